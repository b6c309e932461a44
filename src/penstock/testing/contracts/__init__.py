"""Contract suites: tests that an implementation of one of Penstock's protocols must pass.

A suite is a class of pytest tests with an abstract fixture. To run it, subclass it in a test module under a name that
begins with `Test`, and define the fixture:

    class TestMyFileSystem(FileSystemContract):
        @pytest.fixture
        def fs(self) -> FileSystem:
            return MyFileSystem()

    file_system      `FileSystem`, `File`, `Folder` and `Lock`
    manifest_engine  the transactional store under the manifest
    consensus        `Consensus`: what makes a journal record durable
    reading          `Reading`: reads in the owner, by a client and in a snapshot
    port             `Port`: a store in the owner and by a client

They import pytest, so nothing in the rest of `penstock.testing` imports them.
"""
