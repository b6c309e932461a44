"""The contract of `FileSystem`, `File`, `Folder` and `Lock`: every operation, and how each of them fails.

Renames stay within a folder, and a file that was unlinked or replaced while it was open may be unreadable
(`FileNotFoundError`): Penstock needs no more, and never reuses the name of an open file for a new one. What survives a
crash is not part of this contract: see `explore`.
"""

from __future__ import annotations

import errno
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import Closed, CorruptionError, StoreLocked
from penstock.host.file_operations import make_dirs, publish, remove_folder, zero_fill
from penstock.host.files import File, FileSystem, Folder, Lock

NAME_BYTES_MAX = 255
_FOLDER_FOR_FILE = (IsADirectoryError, PermissionError)  # the second is what macOS raises when a folder is unlinked


class FileSystemContract(ABC):
    """Tests of a file system. `root` is an existing, empty folder of it."""

    @abstractmethod
    @pytest.fixture
    def fs(self, tmp_path: Path) -> FileSystem:
        """The file system under test."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        """An existing, empty folder."""
        return str(tmp_path)

    def test_it_has_every_operation(self, fs: FileSystem, root: str) -> None:
        file, lock = fs.create(f"{root}/f"), fs.lock(f"{root}/lock")
        for protocol, value in ((FileSystem, fs), (File, file), (Lock, lock), (Folder, fs.folder(root))):
            for name in vars(protocol):
                if not name.startswith("_"):
                    assert hasattr(value, name), f"{type(value).__name__} has no {name}"
        lock.release()

    # -- the bytes of a file

    def test_a_new_file_is_empty(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        assert (file.path, file.size(), file.pread(10, 0)) == (f"{root}/f", 0, b"")
        assert fs.exists(f"{root}/f")
        assert fs.open(f"{root}/f").size() == 0

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    def test_what_is_written_is_read(self, fs: FileSystem, root: str, kind: Callable[[bytes], bytes]) -> None:
        file = fs.create(f"{root}/f")
        file.pwrite(kind(b"hello"), 0)
        file.pwrite(kind(b"J"), 0)
        file.pwrite(kind(b""), 2)
        assert (file.size(), file.pread(5, 0), file.pread(3, 1)) == (5, b"Jello", b"ell")
        assert fs.open(f"{root}/f").pread(5, 0) == b"Jello"

    def test_a_read_ends_with_the_file(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        file.pwrite(b"0123", 0)
        assert (file.pread(100, 0), file.pread(100, 3), file.pread(0, 1)) == (b"0123", b"3", b"")
        assert (file.pread(1, 4), file.pread(1, 1 << 40)) == (b"", b"")

    def test_a_write_past_the_end_leaves_zeros_before_it(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        file.pwrite(b"a", 0)
        file.pwrite(b"z", 5000)
        assert file.size() == 5001
        assert file.pread(6000, 0) == b"a" + bytes(4999) + b"z"

    def test_large_reads_and_writes_are_done_in_full(self, fs: FileSystem, root: str) -> None:
        data = bytes(range(256)) * (3 << 12)
        file = fs.create(f"{root}/f")
        file.pwrite(data, 7)
        assert file.pread(len(data), 7) == data
        assert bytes(file.map(len(data) + 7)) == bytes(7) + data

    def test_truncate_cuts_and_extends(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        file.pwrite(b"0123456789", 0)
        file.truncate(4)
        assert (file.size(), file.pread(10, 0)) == (4, b"0123")
        file.truncate(6)
        assert file.pread(10, 0) == b"0123\0\0"
        file.truncate(0)
        assert (file.size(), file.pread(10, 0)) == (0, b"")

    def test_allocate_keeps_what_is_there(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        file.pwrite(b"0123", 0)
        file.allocate(0, 10)
        file.allocate(2, 1)
        assert file.pread(20, 0) == b"0123" + bytes(6)
        zero_fill(file, 2, 12)
        assert file.pread(20, 0) == b"01" + bytes(10)

    @pytest.mark.parametrize("act", ["pread", "pwrite", "truncate"])
    def test_a_negative_place_is_an_error(self, fs: FileSystem, root: str, act: str) -> None:
        file = fs.create(f"{root}/f")
        file.pwrite(b"0123", 0)
        acts: dict[str, Callable[[], object]] = {
            "pread": lambda: file.pread(1, -1),
            "pwrite": lambda: file.pwrite(b"x", -1),
            "truncate": lambda: file.truncate(-1),
        }
        with pytest.raises(OSError, match="nvalid"):
            acts[act]()
        assert file.pread(10, 0) == b"0123"

    def test_syncs(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        file.fsync()
        file.pwrite(b"0", 0)
        file.fdatasync()
        file.write_synced([b"12", bytearray(b"3"), memoryview(b"45"), b""], 1)
        file.write_synced([], 3)
        file.fsync()
        assert file.pread(10, 0) == b"012345"
        fs.open(f"{root}/f").fsync()  # also a file that is open for reading: another writer may have written it

    def test_a_map_has_the_size_that_was_asked_for(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        assert bytes(file.map(0)) == b""
        file.pwrite(b"0123456789", 0)
        for size in (0, 1, 9, 10):
            view = file.map(size)
            assert (bytes(view), view.readonly, view.format) == (b"0123456789"[:size], True, "B")
        with pytest.raises(CorruptionError, match="11 bytes were expected") as caught:
            file.map(11)
        assert (caught.value.path, caught.value.offset) == (f"{root}/f", 10)

    def test_a_map_outlives_its_file(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        file.pwrite(b"0123", 0)
        view = file.map(4)
        file.close()
        fs.unlink(f"{root}/f")
        assert bytes(view) == b"0123"

    def test_several_threads_may_use_a_file(self, fs: FileSystem, root: str) -> None:
        file, errors = fs.create(f"{root}/f"), list[BaseException]()

        def write(number: int) -> None:
            try:
                for block in range(number, 400, 4):
                    file.pwrite(bytes([number]) * 16, block * 16)
                    assert file.pread(16, block * 16) == bytes([number]) * 16
                    file.fdatasync()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert file.pread(400 * 16, 0) == b"".join(bytes([block % 4]) * 16 for block in range(400))

    # -- open and closed

    def test_a_file_that_is_open_for_reading_is_not_written(self, fs: FileSystem, root: str) -> None:
        fs.create(f"{root}/f").pwrite(b"0123", 0)
        file = fs.open(f"{root}/f")
        acts: list[Callable[[], object]] = [
            lambda: file.pwrite(b"x", 0),
            lambda: file.truncate(1),
            lambda: file.write_synced([b"x"], 0),
        ]
        for act in acts:
            with pytest.raises(OSError, match=r"writing|Bad file|nvalid"):
                act()
        assert file.pread(10, 0) == b"0123"

    def test_a_file_that_is_open_for_writing_is_read_and_written(self, fs: FileSystem, root: str) -> None:
        fs.create(f"{root}/f").pwrite(b"0123", 0)
        file = fs.open(f"{root}/f", write=True)
        file.pwrite(b"45", 4)
        assert fs.open(f"{root}/f").pread(10, 0) == file.pread(10, 0) == b"012345"

    def test_a_closed_file_is_an_error(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        file.pwrite(b"0123", 0)
        file.close()
        file.close()
        uses: list[Callable[[], object]] = [
            file.size,
            lambda: file.pread(1, 0),
            lambda: file.pwrite(b"x", 0),
            lambda: file.truncate(1),
            lambda: file.allocate(0, 8),
            file.fsync,
            file.fdatasync,
            lambda: file.write_synced([b"x"], 0),
            lambda: file.map(1),
            lambda: file.map(0),
        ]
        for use in uses:
            with pytest.raises(OSError) as caught:
                use()
            assert caught.value.errno == errno.EBADF
        assert fs.open(f"{root}/f").pread(10, 0) == b"0123"

    def test_a_pin_is_a_block(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        with file.pin(), file.pin():
            file.pwrite(b"0", 0)
        with pytest.raises(ZeroDivisionError), file.pin():
            raise ZeroDivisionError
        assert file.pread(1, 0) == b"0"

    def test_a_file_is_known_by_its_identity(self, fs: FileSystem, root: str) -> None:
        one, other = fs.create(f"{root}/one"), fs.create(f"{root}/other")
        assert one.identity() != other.identity()
        assert one.identity() == fs.open(f"{root}/one").identity()
        fs.rename(f"{root}/one", f"{root}/moved")
        one.set_path(f"{root}/moved")
        assert one.path == f"{root}/moved"
        assert one.identity() == fs.open(f"{root}/moved").identity()

    def test_a_file_that_moved_is_used_as_before(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        file.pwrite(b"01", 0)
        fs.rename(f"{root}/f", f"{root}/g")
        file.set_path(f"{root}/g")
        file.pwrite(b"23", 2)
        file.fsync()
        assert fs.open(f"{root}/g").pread(10, 0) == b"0123"

    def test_many_files_may_be_open(self, fs: FileSystem, root: str) -> None:
        files = [fs.create(f"{root}/{number}") for number in range(40)]
        for number, file in enumerate(files):
            file.pwrite(b"%d" % number, 0)
        for number, file in enumerate(files):
            file.fdatasync()
            assert file.pread(10, 0) == b"%d" % number

    # -- names

    def test_a_file_is_created_once(self, fs: FileSystem, root: str) -> None:
        fs.create(f"{root}/f").pwrite(b"0123", 0)
        fs.mkdir(f"{root}/folder")
        for name in ("f", "folder"):
            with pytest.raises(FileExistsError):
                fs.create(f"{root}/{name}")
        assert fs.open(f"{root}/f").pread(10, 0) == b"0123"

    def test_what_is_missing_is_not_found(self, fs: FileSystem, root: str) -> None:
        missing: list[Callable[[], object]] = [
            lambda: fs.open(f"{root}/no"),
            lambda: fs.open(f"{root}/no", write=True),
            lambda: fs.unlink(f"{root}/no"),
            lambda: fs.rename(f"{root}/no", f"{root}/other"),
            lambda: fs.listdir(f"{root}/no"),
            lambda: fs.rmdir(f"{root}/no"),
            lambda: fs.fsync_dir(f"{root}/no"),
            lambda: fs.folder(f"{root}/no"),
            lambda: fs.create(f"{root}/no/f"),
            lambda: fs.mkdir(f"{root}/no/folder"),
            lambda: fs.lock(f"{root}/no/lock"),
        ]
        for act in missing:
            with pytest.raises(FileNotFoundError):
                act()
        assert fs.listdir(root) == []
        assert not fs.exists(f"{root}/no")

    def test_a_folder_in_the_place_of_a_file_is_an_error(self, fs: FileSystem, root: str) -> None:
        fs.mkdir(f"{root}/folder")
        fs.create(f"{root}/f")
        acts: list[Callable[[], object]] = [
            lambda: fs.open(f"{root}/folder"),
            lambda: fs.open(f"{root}/folder", write=True),
            lambda: fs.unlink(f"{root}/folder"),
            lambda: fs.rename(f"{root}/f", f"{root}/folder"),
            lambda: fs.lock(f"{root}/folder"),
        ]
        for act in acts:
            with pytest.raises(_FOLDER_FOR_FILE):
                act()
        assert sorted(fs.listdir(root)) == ["f", "folder"]

    def test_a_file_in_the_place_of_a_folder_is_an_error(self, fs: FileSystem, root: str) -> None:
        fs.create(f"{root}/f")
        fs.mkdir(f"{root}/folder")
        acts: list[Callable[[], object]] = [
            lambda: fs.listdir(f"{root}/f"),
            lambda: fs.rmdir(f"{root}/f"),
            lambda: fs.fsync_dir(f"{root}/f"),
            lambda: fs.folder(f"{root}/f"),
            lambda: fs.open(f"{root}/f/g"),
            lambda: fs.create(f"{root}/f/g"),
            lambda: fs.unlink(f"{root}/f/g"),
            lambda: fs.mkdir(f"{root}/f/g"),
            lambda: fs.rename(f"{root}/folder", f"{root}/f"),
            lambda: fs.lock(f"{root}/f/lock"),
        ]
        for act in acts:
            with pytest.raises(NotADirectoryError):
                act()
        with pytest.raises(FileExistsError):
            fs.mkdir(f"{root}/f")
        assert not fs.exists(f"{root}/f/g")
        assert sorted(fs.listdir(root)) == ["f", "folder"]

    def test_a_name_may_be_long_and_not_longer(self, fs: FileSystem, root: str) -> None:
        longest, long = f"{root}/{'x' * NAME_BYTES_MAX}", f"{root}/{'y' * (NAME_BYTES_MAX + 1)}"
        fs.create(longest).pwrite(b"0123", 0)
        assert fs.listdir(root) == ["x" * NAME_BYTES_MAX]
        assert fs.open(longest).pread(4, 0) == b"0123"
        acts: list[Callable[[], object]] = [
            lambda: fs.create(long),
            lambda: fs.open(long),
            lambda: fs.mkdir(long),
            lambda: fs.rename(longest, long),
            lambda: fs.unlink(long),
            lambda: fs.lock(long),
            lambda: fs.create(f"{root}/{'é' * 128}"),  # 256 bytes
        ]
        for act in acts:
            with pytest.raises(OSError, match="too long"):
                act()
        assert not fs.exists(long)
        assert len(fs.listdir(root)) == 1

    def test_a_rename_replaces(self, fs: FileSystem, root: str) -> None:
        old, new = fs.create(f"{root}/old"), fs.create(f"{root}/new")
        old.pwrite(b"old", 0)
        new.pwrite(b"new", 0)
        fs.rename(f"{root}/new", f"{root}/old")
        assert fs.listdir(root) == ["old"]
        assert fs.open(f"{root}/old").pread(10, 0) == b"new"
        try:
            content = old.pread(10, 0)
        except FileNotFoundError:
            content = b"old"
        assert content == b"old"  # never the bytes of the file that now has its name
        fs.rename(f"{root}/old", f"{root}/old")
        assert fs.open(f"{root}/old").pread(10, 0) == b"new"

    def test_a_folder_is_renamed_with_what_is_in_it(self, fs: FileSystem, root: str) -> None:
        fs.mkdir(f"{root}/a")
        fs.create(f"{root}/a/f").pwrite(b"0123", 0)
        fs.rename(f"{root}/a", f"{root}/b")
        assert fs.listdir(root) == ["b"]
        assert fs.open(f"{root}/b/f").pread(10, 0) == b"0123"
        fs.mkdir(f"{root}/empty")
        with pytest.raises(OSError, match="not empty"):
            fs.rename(f"{root}/empty", f"{root}/b")
        fs.rename(f"{root}/b", f"{root}/empty")
        assert fs.listdir(f"{root}/empty") == ["f"]

    def test_an_unlinked_file_is_gone_for_others(self, fs: FileSystem, root: str) -> None:
        file = fs.create(f"{root}/f")
        file.pwrite(b"old", 0)
        fs.unlink(f"{root}/f")
        assert fs.listdir(root) == []
        try:
            content = file.pread(10, 0)
        except FileNotFoundError:
            content = b"old"
        assert content == b"old"
        fs.create(f"{root}/f").pwrite(b"new", 0)
        assert fs.open(f"{root}/f").pread(10, 0) == b"new"

    def test_folders(self, fs: FileSystem, root: str) -> None:
        fs.mkdir(f"{root}/a")
        fs.mkdir(f"{root}/a")  # an existing folder is not an error
        make_dirs(fs, f"{root}/a/b/c")
        make_dirs(fs, f"{root}/a/b/c")
        fs.create(f"{root}/a/f")
        assert sorted(fs.listdir(f"{root}/a")) == ["b", "f"]
        assert fs.exists(f"{root}/a/b/c")
        with pytest.raises(OSError, match="not empty"):
            fs.rmdir(f"{root}/a")
        fs.rmdir(f"{root}/a/b/c")
        assert fs.listdir(f"{root}/a/b") == []
        remove_folder(fs, f"{root}/a")
        remove_folder(fs, f"{root}/a")
        assert fs.listdir(root) == []

    def test_a_folder_is_synced(self, fs: FileSystem, root: str) -> None:
        with fs.folder(root) as folder:
            publish(fs, fs.create(f"{root}/f.tmp"), f"{root}/f")
            publish(fs, fs.create(f"{root}/g.tmp"), f"{root}/f")
            folder.fsync()
        fs.fsync_dir(root)
        assert fs.listdir(root) == ["f"]
        folder.close()
        with pytest.raises(OSError) as caught:
            folder.fsync()
        assert caught.value.errno == errno.EBADF

    def test_free_bytes(self, fs: FileSystem, root: str) -> None:
        free = fs.free_bytes(root)
        assert free is None or free >= 0

    # -- locks

    def test_a_lock_is_held_once(self, fs: FileSystem, root: str) -> None:
        lock, other = fs.lock(f"{root}/lock"), fs.lock(f"{root}/other")
        assert sorted(fs.listdir(root)) == ["lock", "other"]
        for _ in range(2):
            with pytest.raises(StoreLocked, match=r"locked by (another|this) process"):
                fs.lock(f"{root}/lock")
        lock.check()
        lock.release()
        lock.release()
        lock.check()  # a released lock: nothing is in danger
        again = fs.lock(f"{root}/lock")
        lock.release()  # a lock that was released already: does not release the other
        with pytest.raises(StoreLocked):
            fs.lock(f"{root}/lock")
        again.release()
        other.release()
        assert fs.exists(f"{root}/lock")  # if it were unlinked, a second owner would lock another file

    @pytest.mark.parametrize("replaced", [False, True])
    def test_a_lock_whose_file_is_gone_says_so(self, fs: FileSystem, root: str, replaced: bool) -> None:
        fs.mkdir(f"{root}/a")
        lock = fs.lock(f"{root}/a/lock")
        fs.rename(f"{root}/a", f"{root}/b")
        if replaced:
            fs.mkdir(f"{root}/a")
            other = fs.lock(f"{root}/a/lock")
            other.check()
            other.release()
        with pytest.raises(Closed, match="moved, deleted or replaced"):
            lock.check()
        lock.release()
