"""Contract suites: tests that an implementation of one of Penstock's protocols must pass.

A suite is a class of pytest tests with an abstract fixture. To run it, subclass it in a test module under a name that
begins with `Test`, and define the fixture:

    class TestMyFileSystem(FileSystemContract):
        @pytest.fixture
        def fs(self) -> FileSystem:
            return MyFileSystem()

`file_system`, `manifest_engine`, `consensus`, `reading` and `port` hold a suite each. They import pytest, so nothing in
the rest of `penstock.testing` imports them.
"""
