"""Files: the only module that asks the operating system for one.

`FileSystem` and `File` are the seam: `OsFileSystem` here, a simulated disk in `penstock.testing`. Paths are strings.
Files share the descriptors of the process (`open_files`): what needs one and gets none raises `ProcessLimit` before it
has changed anything.

Thread: a `File` may be used by several threads (all its reads and writes carry their offset).
Invariants: (1) a write or a read that returns was done in full: short ones and EINTR are looped. (2) a failed fsync is
raised and never tried again, here or by a caller: the kernel may have dropped the dirty pages and would report success.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, Self, TypeAlias

from penstock.errors import (
    Closed,
    CorruptionError,
    DiskFailed,
    DiskFull,
    Invalid,
    PenstockError,
    ProcessLimit,
    StoreLocked,
)
from penstock.host import threads
from penstock.host.mappings import map_file
from penstock.host.open_files import OPEN_FILES, BoundedFileSystem

logger = logging.getLogger(__name__)

Buffer: TypeAlias = bytes | bytearray | memoryview

_ZEROS = bytes(1 << 20)


class File(Protocol):
    """An open file."""

    @property
    def path(self) -> str: ...

    def size(self) -> int: ...

    def identity(self) -> tuple[int, int]:
        """Which file it is, whatever its name."""

    def moved(self, path: str) -> None:
        """It was renamed: `path` is its name from now on."""

    def pin(self) -> AbstractContextManager[None]:
        """Take its descriptor for a block: `ProcessLimit` comes here or not at all."""

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer only at the end of the file."""

    def pwrite(self, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`."""

    def truncate(self, size: int) -> None: ...

    def allocate(self, offset: int, size: int) -> None:
        """Claim space for a range, so that writing it cannot fail for want of space."""

    def fsync(self) -> None:
        """Make content and size durable. An error here is final: never call it again for the same bytes."""

    def fdatasync(self) -> None:
        """As `fsync`, without times and other metadata that reading does not need."""

    def write_synced(self, pieces: Sequence[Buffer], offset: int) -> None:
        """Write pieces one behind the other, then `fdatasync`. `ProcessLimit`: nothing was written."""

    def map(self, size: int) -> memoryview:
        """The first `size` bytes, read-only; `CorruptionError` if the file is shorter."""

    def close(self) -> None: ...


class Lock(Protocol):
    """A lock on a file, held until `release` or the end of the process."""

    def check(self) -> None:
        """`Closed` if the name of the file leads to another one by now, or to none: who has that one has the name."""

    def release(self) -> None: ...


class Folder(Protocol):
    """A folder whose names can be made durable: nothing more is needed for that once it is open."""

    def fsync(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class FileSystem(Protocol):
    """The file operations Penstock uses."""

    def create(self, path: str) -> File:
        """A new file for reading and writing; an existing one is an error. Durable after `fsync_dir` of its folder."""

    def open(self, path: str, *, write: bool = False) -> File: ...

    def rename(self, source: str, target: str) -> None:
        """Replace `target` atomically. Durable after `fsync_dir` of the folder."""

    def unlink(self, path: str) -> None: ...

    def listdir(self, path: str) -> list[str]: ...

    def exists(self, path: str) -> bool: ...

    def mkdir(self, path: str) -> None:
        """Make a folder; one that is there is no error. Durable after `fsync_dir` of its parent."""

    def rmdir(self, path: str) -> None: ...

    def fsync_dir(self, path: str) -> None: ...

    def folder(self, path: str) -> Folder:
        """Open a folder, to make names durable that are yet to change."""

    def free_bytes(self, path: str) -> int | None:
        """How much can still be written where `path` is; None where nobody knows."""

    def lock(self, path: str) -> Lock:
        """Lock a file (made if absent), or raise `StoreLocked` at once."""


def write_fully(write_some: Callable[[memoryview, int], int], data: Buffer, offset: int) -> None:
    """Call `write_some(rest, offset)` until all of `data` is written."""
    rest = memoryview(data).cast("B")
    while rest:
        try:
            written = write_some(rest, offset)
        except InterruptedError:
            continue
        if written <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        rest = rest[written:]
        offset += written


def read_fully(read_some: Callable[[int, int], bytes], size: int, offset: int) -> bytes:
    """Call `read_some(size, offset)` until `size` bytes are there or the file ends."""
    parts: list[bytes] = []
    while size > 0:
        try:
            part = read_some(size, offset)
        except InterruptedError:
            continue
        if not part:
            break
        parts.append(part)
        size -= len(part)
        offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def zero_fill(file: File, start: int, end: int) -> None:
    """Write zeros over [start, end): an fdatasync of written blocks need not commit a new file size or extent."""
    while start < end:
        size = min(end - start, len(_ZEROS))
        file.pwrite(memoryview(_ZEROS)[:size], start)
        start += size


def claim(file: File, claimed: int, end: int, size: int, step: int) -> int:
    """Claim space for `size` bytes at `end` in a file that has it up to `claimed`; up to where it has it then.

    `DiskFull` if there is none, with nothing written. Small appends are given zero-filled room ahead, in steps, so that
    their fdatasync writes no new file size. A large one would pay twice for that, so it gets its exact range.
    """
    needed = end + size
    if needed <= claimed:
        return claimed
    ahead = size * 8 < step
    target = -(-needed // step) * step if ahead else needed
    try:
        file.allocate(claimed, target - claimed)
        if ahead:
            zero_fill(file, claimed, target)
    except OSError as error:
        if not is_disk_full(error):
            raise
        if target > needed:  # the last bytes of a disk are for those who need no more than that
            return claim(file, claimed, end, size, 1)
        raise DiskFull(f"{file.path} cannot grow by {size} bytes: free some space, then retry") from error
    return target


def publish(fs: FileSystem, file: File, target: str) -> None:
    """Make `file` appear as `target`, whole or not at all, and for good."""
    file.fsync()  # before the rename: a name must never lead to missing bytes
    reveal(fs, file.path, target)


def reveal(fs: FileSystem, source: str, target: str) -> None:
    """Rename a synced file, for good. After an error it may be there under either name.

    But for `ProcessLimit`: the folder is opened first, so that nothing has changed then.
    """
    with fs.folder(parent(target)) as folder:
        fs.rename(source, target)
        folder.fsync()


def path_text(path: object) -> str:
    """The path of a folder, from a text or a `Path`. `str` would make one of anything: a folder named None."""
    try:
        found = os.fspath(path)  # type: ignore[call-overload]
        if isinstance(found, str):
            os.fsencode(found)  # half of a surrogate pair is no name
            return str.__str__(found)
    except (TypeError, UnicodeEncodeError):
        pass
    shown = ascii(path) if isinstance(path, (str, bytes)) else f"a value of the type {type(path).__name__}"
    raise Invalid(f"{shown} is not a path: give a folder whose name is text")


def absolute(path: str) -> str:
    """A path as every process understands it, whatever its own folder is by then and wherever links lead by then."""
    if path and "\0" not in path:
        real = os.path.realpath(path).rstrip("/") or "/"
        if not any("\ud800" <= each <= "\udfff" for each in real):  # bytes that are not text: LMDB takes no such name
            return real
    raise Invalid(f"{path!r} is not a path: give a folder whose name is text")


def parent(path: str) -> str:
    """The folder that holds `path`."""
    return os.path.dirname(path) or "."


def make_dirs(fs: FileSystem, path: str) -> None:
    """Make a folder and those above it, each durable in its parent.

    One that is there already is synced too: whoever made it may have died before that.
    """
    above = parent(path)
    if above == path:
        return
    make_dirs(fs, above)
    existed = fs.exists(path)
    if not existed:
        fs.mkdir(path)
    try:
        fs.fsync_dir(above)
    except OSError as error:
        # A folder that may be passed but not read, or that knows no fsync, is not of our making.
        if not existed or error.errno not in (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.ENOTSUP):
            raise


def remove_file(fs: FileSystem, path: str) -> bool:
    """Unlink a file that nobody needs; whether it is gone. One that stays takes space and does no other harm."""
    try:
        fs.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("%s could not be removed (%s): it is tried again later", path, error)
        return False
    return True


def remove_folder(fs: FileSystem, path: str) -> None:
    """Remove a folder and all that is in it, if it is there. Not durable: after a crash, do it again."""
    if not fs.exists(path):
        return
    for name in fs.listdir(path):
        try:
            fs.unlink(f"{path}/{name}")
        except (IsADirectoryError, PermissionError):  # the second is what some systems say of a folder
            remove_folder(fs, f"{path}/{name}")
    fs.rmdir(path)


_MISPLACED = (IsADirectoryError, NotADirectoryError, FileExistsError)


def _misplaced(error: OSError) -> Invalid:
    wanted = "file" if isinstance(error, IsADirectoryError) else "folder"
    return Invalid(f"{error.filename or 'something'} is in the place of a {wanted} of the store: move it elsewhere")


@contextmanager
def explained() -> Iterator[None]:
    """Let no bare `OSError` reach the caller: say which file it was, and what to do about it."""
    try:
        yield
    except PenstockError:  # some of them are an `OSError`, too
        raise
    except OSError as error:
        raise _explanation(error) from error


def _explanation(error: OSError) -> PenstockError:
    where, reason = error.filename or "a file of the store", error.strerror or str(error)
    if is_disk_full(error):
        return DiskFull(f"{where} has no room, the disk is full: free some space, then retry")
    if isinstance(error, _MISPLACED):
        return _misplaced(error)
    if error.errno == errno.ELOOP:
        return Invalid(f"{where} is a link that leads to itself: put back what it stands for")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return Invalid(f"{where} cannot be used ({reason}): let this user read and write the whole store")
    return DiskFailed(f"{where} cannot be used ({reason}): look at the disk, then retry")


_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
_WRONG_PATH = (errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP, errno.EPERM, errno.EACCES, errno.EROFS)


@contextmanager
def typed(path: str) -> Iterator[None]:
    """Turn errors of the system on the way to a store into those of Penstock, by what to do about them."""
    try:
        yield
    except (PenstockError, TimeoutError):
        raise
    except _MISPLACED as error:
        raise _misplaced(error) from error
    except OSError as error:
        reason = f"{error.strerror or error} ({error.filename or path})"
        if error.errno in _NO_RESOURCES:
            raise ProcessLimit(
                f"{path} cannot be reached, nothing was changed: {reason}; close other files, sockets or processes"
            ) from error
        if is_disk_full(error):
            raise DiskFull(f"{path} cannot be opened, the disk is full: free some space") from error
        if error.errno in _WRONG_PATH:
            raise Invalid(f"{path} cannot be opened: {reason}; see to the folder, or give another path") from error
        raise StoreLocked(f"{path} could not be opened: {reason}; try again") from error


def is_disk_full(error: OSError) -> bool:
    """Whether an error says that space (or quota) ran out."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def ran_out_of_space(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is a full disk."""
    while error is not None:
        if isinstance(error, DiskFull) or (isinstance(error, OSError) and is_disk_full(error)):
            return True
        error = error.__cause__
    return False


def _open_fd(fd: int, path: str) -> int:
    """A descriptor to sync; without this, that of a closed file would be a `ValueError`."""
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

    def moved(self, path: str) -> None:
        self._path = path

    @contextmanager
    def pin(self) -> Iterator[None]:
        yield  # it has a descriptor until it is closed

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
        if sys.platform == "darwin":
            self.fsync()
        else:
            os.fdatasync(_open_fd(self._fd, self._path))

    def write_synced(self, pieces: Sequence[Buffer], offset: int) -> None:
        for piece in pieces:
            self.pwrite(piece, offset)
            offset += len(piece)
        self.fdatasync()

    def map(self, size: int) -> memoryview:
        # Reading a mapping past the end of its file is a SIGBUS, not an exception: look first.
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


class OsLock:
    """A `flock`: it ends with the process that took it, however that ends.

    A forked child shares it, and would keep it for as long as it lives: it closes its copy of the descriptor at once.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1
        with threads.holding_forks():
            self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            threads.after_fork(self, OsLock._close)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._close()
            if isinstance(error, BlockingIOError):
                raise StoreLocked(f"{path} is locked by another process: close it there first") from None
            raise
        self._status = os.fstat(self._fd)

    def check(self) -> None:
        try:
            if self._fd < 0 or os.path.samestat(os.stat(self._path), self._status):
                return  # released: by one who closes, in whose hands nothing else is
        except (FileNotFoundError, NotADirectoryError):
            pass
        raise Closed(
            f"{parent(self._path)} was moved, deleted or replaced while it was open, and nothing more is written there"
            ": close it, and open what is there now"
        )

    def release(self) -> None:
        if self._fd >= 0:  # not in a forked child, where unlocking would take it from the parent
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        with threads.holding_forks():  # a child that is forked between the two lines would keep the lock
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        self.release()  # an interrupt came before its taker could release it


class UnboundedFileSystem:
    """The file system of this machine, with a descriptor for every open file."""

    def create(self, path: str) -> File:
        return OsFile(path, os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644))

    def open(self, path: str, *, write: bool = False) -> File:
        # Without O_NONBLOCK, opening a fifo waits for ever for somebody at its other end.
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
            found = os.statvfs(path)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    def lock(self, path: str) -> Lock:
        return OsLock(path)


class OsFileSystem(BoundedFileSystem):
    """The file system of this machine, within the descriptors of this process."""

    def __init__(self) -> None:
        super().__init__(UnboundedFileSystem(), OPEN_FILES)
