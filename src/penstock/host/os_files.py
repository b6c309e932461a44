"""The file system of this machine: the only module that asks the operating system for a file.

Files share the descriptors of the process (`open_files`).

Thread: any.
Invariants: those of the seam (`files`); short reads, short writes and EINTR are looped.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from penstock.errors import CorruptionError
from penstock.host.file_locks import OsLock
from penstock.host.file_operations import read_fully, write_fully
from penstock.host.files import Buffer, File, Folder, Lock
from penstock.host.mappings import map_file
from penstock.host.open_files import OPEN_FILES, BoundedFileSystem


def _open_fd(fd: int, path: str) -> int:
    """Return a descriptor to sync; `os.fsync` answers a closed one (-1) with a `ValueError`."""
    if fd < 0:
        raise OSError(errno.EBADF, "the file is closed", path)
    return fd


class OsFile:
    """A file of the operating system."""

    def __init__(self, path: str, fd: int) -> None:
        self._path = path
        self._fd = fd

    @property
    def path(self) -> str:
        return self._path

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def identity(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def set_path(self, path: str) -> None:
        self._path = path

    @contextmanager
    def pin(self) -> Iterator[None]:
        yield  # it has a descriptor until it is closed

    def hold(self) -> None: ...

    def pread(self, size: int, offset: int) -> bytes:
        fd = self._fd
        return read_fully(lambda n, at: os.pread(fd, n, at), size, offset)

    def pwrite(self, data: Buffer, offset: int) -> None:
        fd = self._fd
        written = os.pwrite(fd, data, offset)
        if written != len(data):  # seldom: the rest of a short write
            rest = memoryview(data).cast("B")[written:]
            write_fully(lambda some, at: os.pwrite(fd, some, at), rest, offset + written)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def allocate(self, offset: int, size: int) -> None:
        if not hasattr(os, "posix_fallocate"):  # macOS: the write itself will tell
            return
        try:
            os.posix_fallocate(self._fd, offset, size)
        except OSError as error:
            # A file system without the call: the write itself will tell.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def fsync(self) -> None:
        fd = _open_fd(self._fd, self._path)
        if sys.platform == "darwin":  # fsync there stops at the drive's cache
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fsync(fd)

    def fdatasync(self) -> None:
        fd = self._fd
        if sys.platform == "darwin" or fd < 0:
            self.fsync()
        else:
            os.fdatasync(fd)

    def write_synced(self, pieces: Sequence[Buffer], offset: int) -> None:
        for piece in pieces:
            self.pwrite(piece, offset)
            offset += len(piece)
        self.fdatasync()

    def map(self, size: int) -> memoryview:
        # Reading a mapping past the end of its file is a SIGBUS, not an exception: check first.
        actual = self.size()
        if actual < size:
            raise CorruptionError(self._path, actual, f"the file ends here, {size} bytes were expected")
        if size == 0:
            return memoryview(b"")
        return map_file(self._fd, size, self._path)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if os is not None:  # else the interpreter is ending, and the system closes the file
            self.close()


class OsFolder:
    """A folder of the operating system."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def fsync(self) -> None:
        os.fsync(_open_fd(self._fd, self._path))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class UnboundedFileSystem:
    """The file system of this machine, with a descriptor for every open file."""

    def create(self, path: str) -> File:
        return OsFile(path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644))

    def open(self, path: str, *, write: bool = False) -> File:
        # Without O_NONBLOCK, opening a fifo would wait forever for its other end.
        fd = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
        file = OsFile(path, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            file.close()
            raise IsADirectoryError(errno.EISDIR, "this is not a regular file", path)
        return file

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def listdir(self, path: str) -> list[str]:
        return os.listdir(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def mkdir(self, path: str) -> None:
        try:
            os.mkdir(path, 0o755)
        except FileExistsError:
            if not os.path.isdir(path):
                raise

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def fsync_dir(self, path: str) -> None:
        with self.folder(path) as folder:
            folder.fsync()

    def folder(self, path: str) -> Folder:
        return OsFolder(path)

    def free_bytes(self, path: str) -> int | None:
        try:
            status = os.statvfs(path)
        except OSError:
            return None
        return status.f_bavail * status.f_frsize

    def lock(self, path: str) -> Lock:
        return OsLock(path)


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed: a file of a store must not get its number.

    What a library prints would go into that file. A program that redirects its output would close it, and if it is the
    lock of a store, a second process could own the store.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one


class OsFileSystem(BoundedFileSystem):
    """The file system of this machine, within the descriptors of this process."""

    def __init__(self) -> None:
        _open_closed_streams()
        super().__init__(UnboundedFileSystem(), OPEN_FILES)
