from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.host.files import FileSystem
from penstock.host.open_files import BoundedFileSystem, OpenFiles
from penstock.host.os_files import OsFileSystem, UnboundedFileSystem
from penstock.host.owner_files import OwnerFileSystem
from penstock.testing import SimulatedDisk
from penstock.testing.contracts.file_system import FileSystemContract


class TestOsFileSystem(FileSystemContract):
    @pytest.fixture
    def fs(self, tmp_path: Path) -> FileSystem:
        return OsFileSystem()


class TestUnboundedFileSystem(FileSystemContract):
    @pytest.fixture
    def fs(self, tmp_path: Path) -> FileSystem:
        return UnboundedFileSystem()


class TestOneDescriptor(FileSystemContract):
    """Every use of another file takes the descriptor of the last one: all of them are opened again and again."""

    @pytest.fixture
    def fs(self, tmp_path: Path) -> FileSystem:
        return BoundedFileSystem(UnboundedFileSystem(), OpenFiles(lambda: 1))


class TestOwnerFileSystem(FileSystemContract):
    @pytest.fixture
    def fs(self, tmp_path: Path) -> Iterator[FileSystem]:
        lock = OsFileSystem().lock(str(tmp_path / "owner"))
        yield OwnerFileSystem(OsFileSystem(), lock)
        lock.release()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        (tmp_path / "owned").mkdir()
        return str(tmp_path / "owned")


class TestSimulatedDisk(FileSystemContract):
    @pytest.fixture
    def fs(self, tmp_path: Path) -> FileSystem:
        return SimulatedDisk()

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        return ""


class TestSimulatedDiskWithinABudget(TestSimulatedDisk):
    @pytest.fixture
    def fs(self, tmp_path: Path) -> FileSystem:
        disk = SimulatedDisk()
        disk.open_files_max = 3
        return BoundedFileSystem(disk, OpenFiles(lambda: 1))
