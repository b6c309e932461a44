"""The protocols between Penstock and a file system.

`OsFileSystem` (os_files) is this machine's; `penstock.testing` has a simulated disk. Paths are strings.

Thread: a `File` may be used by several threads: all its reads and writes carry their offset.
Invariants, of every implementation: (1) a write or a read that returns was done in full. (2) a failed fsync is raised
and never tried again, here or by a caller: the kernel may have dropped the dirty pages and would report success. (3)
what needs a descriptor and gets none raises `ProcessLimit` before it has changed anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class File(Protocol):
    """An open file."""

    @property
    def path(self) -> str: ...

    def size(self) -> int: ...

    def identity(self) -> tuple[int, int]:
        """Return device and inode: the same file under any name has the same."""

    def set_path(self, path: str) -> None:
        """Take over a new name, after a rename."""

    def pin(self) -> AbstractContextManager[None]:
        """Keep the descriptor open during a block. `ProcessLimit` is raised on entry, never inside."""

    def hold(self) -> None:
        """Keep the descriptor open until `close`, for a file that every write uses."""

    def pread(self, size: int, offset: int) -> bytes:
        """Read up to `size` bytes at `offset`; fewer only at the end of the file."""

    def pwrite(self, data: Buffer, offset: int) -> None:
        """Write all of `data` at `offset`."""

    def truncate(self, size: int) -> None: ...

    def allocate(self, offset: int, size: int) -> None:
        """Reserve disk space for a range, so that writing it cannot fail with ENOSPC."""

    def fsync(self) -> None:
        """Make content and size durable. An error here is final: never call it again for the same bytes."""

    def fdatasync(self) -> None:
        """As `fsync`, without times and other metadata that reading does not need."""

    def write_synced(self, pieces: Sequence[Buffer], offset: int) -> None:
        """Write buffers one after the other, then `fdatasync`. On `ProcessLimit` nothing was written."""

    def map(self, size: int) -> memoryview:
        """Map the first `size` bytes, read-only; `CorruptionError` if the file is shorter."""

    def close(self) -> None: ...


class Lock(Protocol):
    """An exclusive lock on a file, until `release` or the end of the process."""

    def check(self) -> None:
        """Raise `Closed` if the locked path was deleted, or names another file now."""

    def release(self) -> None: ...


class Folder(Protocol):
    """An open folder. Syncing it makes its names durable and needs no further descriptor."""

    def fsync(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class FileSystem(Protocol):
    """The file operations Penstock uses."""

    def create(self, path: str) -> File:
        """Create a file for reading and writing; an error if it exists. Durable after `fsync_dir` of its folder."""

    def open(self, path: str, *, write: bool = False) -> File:
        """Open a file that exists, for reading or also for writing."""

    def rename(self, source: str, target: str) -> None:
        """Replace `target` atomically. Durable after `fsync_dir` of the folder."""

    def unlink(self, path: str) -> None:
        """Remove a file. Durable after `fsync_dir` of its folder."""

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder."""

    def exists(self, path: str) -> bool:
        """Return whether there is a file or a folder."""

    def mkdir(self, path: str) -> None:
        """Create a folder unless it exists. Durable after `fsync_dir` of its parent."""

    def rmdir(self, path: str) -> None:
        """Remove an empty folder. Durable after `fsync_dir` of its parent."""

    def fsync_dir(self, path: str) -> None:
        """Make the names in a folder durable."""

    def folder(self, path: str) -> Folder:
        """Open a folder before changing names in it, so that syncing them cannot fail for want of a descriptor."""

    def free_bytes(self, path: str) -> int | None:
        """Return the free bytes of the file system of `path`; None if it does not say."""

    def lock(self, path: str) -> Lock:
        """Lock a file, creating it if absent; `StoreLocked` at once if another process has it."""
