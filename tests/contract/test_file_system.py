from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import Closed
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


def test_an_owner_changes_no_name_in_a_folder_that_it_has_not_locked(tmp_path: Path) -> None:
    plain = OsFileSystem()
    (tmp_path / "store").mkdir()
    root = str(tmp_path / "store")
    lock = plain.lock(f"{root}/lock")
    fs = OwnerFileSystem(plain, lock)
    fs.create(f"{root}/f").pwrite(b"0123", 0)
    fs.mkdir(f"{root}/folder")
    (tmp_path / "store").rename(tmp_path / "moved")
    (tmp_path / "store").mkdir()
    for name in ("f", "lock"):
        (tmp_path / "store" / name).write_bytes(b"another's")
    (tmp_path / "store" / "folder").mkdir()
    changes: list[Callable[[], object]] = [
        lambda: fs.create(f"{root}/g"),
        lambda: fs.open(f"{root}/f", write=True),
        lambda: fs.rename(f"{root}/f", f"{root}/g"),
        lambda: fs.unlink(f"{root}/f"),
        lambda: fs.mkdir(f"{root}/other"),
        lambda: fs.rmdir(f"{root}/folder"),
        lambda: fs.lock(f"{root}/lock"),
    ]
    for change in changes:
        with pytest.raises(Closed, match="moved, deleted or replaced"):
            change()
    assert fs.open(f"{root}/f").pread(20, 0) == b"another's"
    assert sorted(fs.listdir(root)) == ["f", "folder", "lock"]
    lock.release()


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
