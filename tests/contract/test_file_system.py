from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import Closed
from penstock.host.file_locks import OsReadLock
from penstock.host.files import FileSystem
from penstock.host.open_files import BoundedFileSystem, OpenFiles
from penstock.host.os_files import OsFileSystem, UnboundedFileSystem
from penstock.host.overlay_files import OverlayFileSystem
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


class TestOverlayFileSystem(FileSystemContract):
    """Over a folder that is not changed."""

    @pytest.fixture
    def fs(self, tmp_path: Path) -> FileSystem:
        return OverlayFileSystem(OsFileSystem(), share_lock=OsReadLock)

    @pytest.fixture
    def root(self, tmp_path: Path) -> Iterator[str]:
        yield str(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_an_overlay_shows_the_files_below_and_its_changes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(256)) * 1024)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "g").write_bytes(b"g")
    before = (tmp_path / "f").read_bytes()
    fs, root = OverlayFileSystem(OsFileSystem()), str(tmp_path)
    reader, writer = fs.open(f"{root}/f"), fs.open(f"{root}/f", write=True)
    assert reader.pread(300, 70_000) == before[70_000:70_300]
    assert bytes(reader.map(len(before))) == before
    writer.pwrite(b"changed", 65_533)
    expected = before[:65_533] + b"changed" + before[65_540:]
    assert reader.pread(1 << 20, 0) == expected == bytes(reader.map(len(before)))
    writer.truncate(65_536)
    writer.allocate(65_536, 10)
    assert fs.open(f"{root}/f").pread(1 << 20, 65_530) == expected[65_530:65_536] + bytes(10)
    fs.rename(f"{root}/folder", f"{root}/moved")
    assert fs.listdir(root) == ["f", "moved"]
    assert fs.open(f"{root}/moved/g").pread(9, 0) == b"g"
    with pytest.raises(FileNotFoundError):
        fs.open(f"{root}/folder/g")
    fs.unlink(f"{root}/f")
    fs.create(f"{root}/f").pwrite(b"new", 0)
    assert fs.open(f"{root}/f").pread(9, 0) == b"new"
    assert reader.pread(3, 0) == before[:3], "a file that is open stays the one it was"
    assert (tmp_path / "f").read_bytes() == before
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["f", "folder", "g"]


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
