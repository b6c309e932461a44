"""The file seam: what Penstock asks of a file system, as protocols.

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
