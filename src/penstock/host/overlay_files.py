"""A file system whose changes stay in memory: the files below are read and never written.

A store that is opened read-only recovers on it: what recovery would write, it writes here, and reads again from here.

Thread: any; `_lock` guards the names and contents.
Invariants: (1) of the file system below only `open` (to read), `listdir` and `exists` are used. (2) all open files of
one path share one content, so that a change is seen through each of them.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self
from weakref import WeakValueDictionary

from penstock.errors import Closed, CorruptionError, StoreLocked
from penstock.host import threads
from penstock.host.files import Buffer, File, FileSystem, Folder, Lock
from penstock.host.paths import parent

NAME_BYTES_MAX = 255  # as on the file systems below
PAGE_BYTES = 64 << 10  # of a changed file: what is copied to memory at once


class _Content:
    """The bytes of one file: those of the file below, except for changed pages."""

    def __init__(self, number: int, below: File | None) -> None:
        self.number = number
        self._below = below
        self._below_bytes = self.size = 0 if below is None else below.size()
        self._pages: dict[int, bytearray] = {}

    @property
    def unchanged(self) -> File | None:
        """The file below, if this is still the same."""
        return self._below if not self._pages and self._below_bytes == self.size else None

    def read(self, size: int, offset: int) -> bytes:
        end = min(offset + size, self.size)
        if end <= offset:
            return b""
        data = bytearray(self._read_below(end - offset, offset))
        data += bytes(end - offset - len(data))
        for number in range(offset // PAGE_BYTES, -(-end // PAGE_BYTES)) if self._pages else ():
            page = self._pages.get(number)
            if page is not None:
                start, stop = max(offset, number * PAGE_BYTES), min(end, (number + 1) * PAGE_BYTES)
                data[start - offset : stop - offset] = page[start - number * PAGE_BYTES : stop - number * PAGE_BYTES]
        return bytes(data)

    def _read_below(self, size: int, offset: int) -> bytes:
        size = min(size, self._below_bytes - offset)
        return self._below.pread(size, offset) if self._below is not None and size > 0 else b""

    def write(self, data: Buffer, offset: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            number, start = divmod(offset, PAGE_BYTES)
            page = self._pages.get(number)
            if page is None:
                page = bytearray(self._read_below(PAGE_BYTES, number * PAGE_BYTES).ljust(PAGE_BYTES, b"\0"))
                self._pages[number] = page
            count = min(len(view), PAGE_BYTES - start)
            page[start : start + count] = view[:count]
            view, offset = view[count:], offset + count
            self.size = max(self.size, offset)

    def truncate(self, size: int) -> None:
        self._below_bytes = min(self._below_bytes, size)
        self._pages = {number: page for number, page in self._pages.items() if number * PAGE_BYTES < size}
        last, rest = divmod(size, PAGE_BYTES)
        if last in self._pages:
            self._pages[last][rest:] = bytes(PAGE_BYTES - rest)
        self.size = size


class OverlayFile:
    """An open file."""

    def __init__(self, fs: OverlayFileSystem, path: str, content: _Content, *, write: bool) -> None:
        self._fs = fs
        self._path = path
        self._content: _Content | None = content
        self._write = write

    @property
    def path(self) -> str:
        return self._path

    def _opened(self, *, write: bool = False) -> _Content:
        if self._content is None:
            raise OSError(errno.EBADF, "the file is closed", self._path)
        if write and not self._write:
            raise OSError(errno.EBADF, "the file is not open for writing", self._path)
        return self._content

    def _check_offset(self, offset: int) -> None:
        if offset < 0:
            raise OSError(errno.EINVAL, "Invalid argument: a negative offset", self._path)

    def size(self) -> int:
        return self._opened().size

    def identity(self) -> tuple[int, int]:
        return 0, self._opened().number

    def set_path(self, path: str) -> None:
        self._path = path

    @contextmanager
    def pin(self) -> Iterator[None]:
        self._opened()
        yield

    def hold(self) -> None: ...

    def pread(self, size: int, offset: int) -> bytes:
        self._check_offset(offset)
        below = self._opened().unchanged
        if below is not None:
            return below.pread(size, offset)
        with self._fs.changing:
            return self._opened().read(size, offset)

    def pwrite(self, data: Buffer, offset: int) -> None:
        self._check_offset(offset)
        with self._fs.changing:
            self._opened(write=True).write(data, offset)

    def truncate(self, size: int) -> None:
        self._check_offset(size)
        with self._fs.changing:
            self._opened(write=True).truncate(size)

    def allocate(self, offset: int, size: int) -> None:
        with self._fs.changing:
            content = self._opened(write=True)
            content.size = max(content.size, offset + size)

    def fsync(self) -> None:
        self._opened()

    def fdatasync(self) -> None:
        self._opened()

    def write_synced(self, pieces: Sequence[Buffer], offset: int) -> None:
        for piece in pieces:
            self.pwrite(piece, offset)
            offset += len(piece)

    def map(self, size: int) -> memoryview:
        with self._fs.changing:
            content = self._opened()
            if content.size < size:
                raise CorruptionError(self._path, content.size, f"the file ends here, {size} bytes were expected")
            below = content.unchanged
            return memoryview(content.read(size, 0)) if below is None else below.map(size)

    def close(self) -> None:
        self._content = None


class _OverlayFolder:
    """An open folder, with nothing to sync."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._closed = False

    def fsync(self) -> None:
        if self._closed:
            raise OSError(errno.EBADF, "the folder is closed", self._path)

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _OverlayLock:
    """A lock among the users of one overlay, and a shared one below."""

    def __init__(self, fs: OverlayFileSystem, path: str, content: _Content, below: Lock | None) -> None:
        self._fs = fs
        self._path = path
        self._content: _Content | None = content  # None: released
        self._below = below
        fs.locked.add(content.number)

    def check(self) -> None:
        if self._content is not None and self._fs.find(self._path) is not self._content:
            raise Closed(f"{self._path} was moved, deleted or replaced: close the store and open the path again")

    def release(self) -> None:
        content, self._content = self._content, None
        if content is not None:
            self._fs.locked.discard(content.number)
            if self._below is not None:
                self._below.release()


class OverlayFileSystem:
    """A `FileSystem` over another one, which it never changes."""

    def __init__(self, below: FileSystem, *, share_lock: Callable[[str], Lock] | None = None) -> None:
        """`share_lock`: locks a file below against changes by others, while it is locked here."""
        self._below = below
        self._share_lock = share_lock
        self.changing = threads.rlock("host.overlay")
        self._numbers = itertools.count(1)
        # All guarded by `changing`.
        self._opened: WeakValueDictionary[str, _Content] = WeakValueDictionary()  # unchanged files
        self._changed: dict[str, _Content] = {}
        self._folders: set[str] = set()  # made here
        self._whiteouts: set[str] = set()  # names below that were removed here
        self.locked: set[int] = set()  # numbers of contents

    def create(self, path: str) -> File:
        with self.changing:
            self._check_path(path)
            if self.exists(path):
                raise FileExistsError(errno.EEXIST, "exists", path)
            self._changed[path] = content = _Content(next(self._numbers), None)
            return OverlayFile(self, path, content, write=True)

    def open(self, path: str, *, write: bool = False) -> File:
        with self.changing:
            content = self._content(path)
            if write:
                self._changed[path] = content
            return OverlayFile(self, path, content, write=write)

    def _content(self, path: str) -> _Content:
        content = self._changed.get(path) or self._opened.get(path)
        if content is None:
            if path in self._folders:
                raise IsADirectoryError(errno.EISDIR, "is a folder", path)
            try:
                if self._is_gone(path):
                    raise FileNotFoundError(errno.ENOENT, "no such file", path)
                below = self._below.open(path)
            except FileNotFoundError:
                self._check_path(path)  # an impossible name is another error
                raise
            self._opened[path] = content = _Content(next(self._numbers), below)
        return content

    def rename(self, source: str, target: str) -> None:
        with self.changing:
            self._check_path(source)
            self._check_path(target)
            if self._is_folder(source):
                if self.exists(target):
                    self._check_empty(target)
                else:
                    self.mkdir(target)
                for name in self.listdir(source):
                    self.rename(f"{source}/{name}", f"{target}/{name}")
                self.rmdir(source)
                return
            if self._is_folder(target):
                raise IsADirectoryError(errno.EISDIR, "is a folder", target)
            content = self._content(source)
            self._forget(source)
            self._opened.pop(target, None)
            self._changed[target] = content

    def unlink(self, path: str) -> None:
        with self.changing:
            self._check_path(path)
            if self._is_folder(path):
                raise IsADirectoryError(errno.EISDIR, "is a folder", path)
            if not self.exists(path):
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            self._forget(path)

    def _forget(self, path: str) -> None:
        self._changed.pop(path, None)
        self._opened.pop(path, None)
        self._whiteouts.add(path)

    def listdir(self, path: str) -> list[str]:
        with self.changing:
            self._check_folder(path, path)
            names = set() if self._is_gone(path) or not self._below.exists(path) else set(self._below.listdir(path))
            names = {name for name in names if f"{path}/{name}" not in self._whiteouts}
            prefix = f"{path.rstrip('/')}/"
            own = (*self._changed, *self._folders)
            names.update(
                name[len(prefix) :] for name in own if name.startswith(prefix) and "/" not in name[len(prefix) :]
            )
            return sorted(names)

    def exists(self, path: str) -> bool:
        with self.changing:
            if path in self._changed or path in self._folders:
                return True
            return not self._is_gone(path) and self._below.exists(path)

    def _is_gone(self, path: str) -> bool:
        """Whether a name below, or a folder above it, was removed here."""
        while path not in self._whiteouts:
            above = parent(path)
            if above in (path, "."):
                return False
            path = above
        return True

    def _is_folder(self, path: str) -> bool:
        if path in self._folders:
            return True
        if path in self._changed or self._is_gone(path) or not self._below.exists(path):
            return False
        try:
            self._below.listdir(path)
        except NotADirectoryError:
            return False
        return True

    def _check_path(self, path: str) -> None:
        """Raise unless a file or folder of this name could be here."""
        self._check_folder(parent(path), path)
        if len(os.fsencode(os.path.basename(path))) > NAME_BYTES_MAX:
            raise OSError(errno.ENAMETOOLONG, "the name is too long", path)

    def _check_empty(self, folder: str) -> None:
        self._check_folder(folder, folder)
        if self.listdir(folder):
            raise OSError(errno.ENOTEMPTY, "not empty", folder)

    def _check_folder(self, folder: str, path: str) -> None:
        if self._is_folder(folder):
            return
        if self.exists(folder) or (parent(folder) != folder and self._is_file(parent(folder))):
            raise NotADirectoryError(errno.ENOTDIR, "is not a folder", path)
        raise FileNotFoundError(errno.ENOENT, "no such folder", path)

    def _is_file(self, path: str) -> bool:
        return self.exists(path) and not self._is_folder(path)

    def mkdir(self, path: str) -> None:
        with self.changing:
            if self.exists(path):
                if not self._is_folder(path):
                    raise FileExistsError(errno.EEXIST, "exists and is not a folder", path)
                return
            self._check_path(path)
            self._folders.add(path)

    def rmdir(self, path: str) -> None:
        with self.changing:
            self._check_empty(path)
            self._folders.discard(path)
            self._whiteouts.add(path)

    def fsync_dir(self, path: str) -> None:
        self.folder(path).close()

    def folder(self, path: str) -> Folder:
        with self.changing:
            self._check_folder(path, path)
            return _OverlayFolder(path)

    def free_bytes(self, path: str) -> int | None:
        return None  # nothing is written to the disk

    def find(self, path: str) -> _Content | None:
        """Return the content of a path; None if there is none."""
        with self.changing:
            return self._content(path) if self.exists(path) and not self._is_folder(path) else None

    def lock(self, path: str) -> Lock:
        with self.changing:
            self._check_path(path)
            if not self.exists(path):
                self.create(path).close()
            content = self._content(path)
            if content.number in self.locked:
                raise StoreLocked(f"{path} is locked by this process: close it first")
            below = None if self._share_lock is None or path in self._changed else self._share_lock(path)
            return _OverlayLock(self, path, content, below)
