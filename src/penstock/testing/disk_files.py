"""The files, folders and locks of a simulated disk.

Thread: any; the lock of the disk guards them.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.errors import Closed, CorruptionError
from penstock.host.file_operations import read_fully, write_fully
from penstock.host.files import Buffer
from penstock.testing.disk_image import Change, DiskInode, apply

if TYPE_CHECKING:
    from penstock.testing.disk import SimulatedDisk


class SimulatedFile:
    """A file of a simulated disk."""

    def __init__(self, disk: SimulatedDisk, path: str, inode: DiskInode, *, write: bool) -> None:
        self._disk = disk
        self._path = path
        self._inode: DiskInode | None = None
        self._write = write
        disk._take_descriptor(path)
        self._inode = inode

    @property
    def path(self) -> str:
        return self._path

    def identity(self) -> tuple[int, int]:
        return 0, id(self._target(write=False))

    def set_path(self, path: str) -> None:
        self._path = path

    @contextmanager
    def pin(self) -> Iterator[None]:
        yield

    def _target(self, *, write: bool) -> DiskInode:
        if self._inode is None or (write and not self._write):
            raise OSError(errno.EBADF, "closed, or not open for writing", self._path)
        return self._inode

    def size(self) -> int:
        return len(self._target(write=False).live)

    def pread(self, size: int, offset: int) -> bytes:
        disk = self._disk
        if disk._faults:
            return read_fully(self._read_some, size, offset)
        _check_offset(offset, self._path)  # the same, and as many operations, without a call for each
        with disk._lock:
            data = bytes(self._target(write=False).live[offset : offset + size])
            disk.operations += (size > 0) + (0 < len(data) < size)
            return data

    def _read_some(self, size: int, offset: int) -> bytes:
        _check_offset(offset, self._path)
        with self._disk._operation(f"pread {self._path}", read=True) as fault:
            data = bytes(self._target(write=False).live[offset : offset + size])
            if fault == "short":
                return data[: (len(data) + 1) // 2]
            return _flip(data, self._disk._chance) if fault == "rot" else data

    def pwrite(self, data: Buffer, offset: int) -> None:
        write_fully(self._write_some, data, offset)

    def _write_some(self, rest: memoryview, offset: int) -> int:
        _check_offset(offset, self._path)
        with self._disk._operation(f"pwrite {self._path}") as fault:
            data = bytes(rest)
            if fault in ("short", "eio", "enospc"):  # part of it may have been written before the failure
                data = data[: (len(data) + 1) // 2]
            elif fault == "rot":
                data = _flip(data, self._disk._chance)
            inode = self._target(write=True)
            data = data[: self._disk._room(inode, offset, len(data))]
            if data:
                self._change(inode, (offset, data))
            if fault in ("eio", "enospc"):
                raise self._disk._error(fault, self._path)
            if not data:
                raise OSError(errno.ENOSPC, "simulated disk is full", self._path)
            return len(data)

    def _change(self, inode: DiskInode, change: Change) -> None:
        apply(inode.live, change)
        inode.changes.append((change, False))

    def truncate(self, size: int) -> None:
        _check_offset(size, self._path)
        with self._disk._operation(f"truncate {self._path}", failing=("eio", "enospc")):
            self._change(self._target(write=True), (size, None))

    def allocate(self, offset: int, size: int) -> None:
        with self._disk._operation(f"allocate {self._path}", failing=("eio", "enospc")):
            inode = self._target(write=True)
            if self._disk._room(inode, offset, size) < size:
                raise OSError(errno.ENOSPC, "simulated disk is full", self._path)
            if offset + size > len(inode.live):
                self._change(inode, (offset + size, None))

    def fsync(self) -> None:
        self._sync("fsync")

    def fdatasync(self) -> None:
        self._sync("fdatasync")

    def hold(self) -> None: ...

    def write_synced(self, pieces: Sequence[Buffer], offset: int) -> None:
        for piece in pieces:
            self.pwrite(piece, offset)
            offset += len(piece)
        self.fdatasync()

    def _sync(self, name: str) -> None:
        with self._disk._operation(f"{name} {self._path}") as fault:
            inode = self._target(write=False)
            if fault in ("eio", "enospc"):
                inode.changes = [(change, True) for change, _ in inode.changes]
                raise self._disk._error(fault, self._path)
            content = bytearray(inode.synced)
            for change, lost in inode.changes:
                if not lost:
                    apply(content, change)
            inode.synced = bytes(content)
            inode.changes = [(change, lost) for change, lost in inode.changes if lost]

    def map(self, size: int) -> memoryview:
        self._target(write=False)
        data = self.pread(size, 0)
        if len(data) < size:
            raise CorruptionError(self._path, len(data), f"the file ends here, {size} bytes were expected")
        return memoryview(data)

    def close(self) -> None:
        if self._inode is not None:
            self._inode = None
            self._disk.open_files -= 1

    def __del__(self) -> None:
        self.close()


class SimulatedFolder:
    """A folder of a simulated disk."""

    def __init__(self, disk: SimulatedDisk, path: str) -> None:
        self._disk, self._path, self._is_open = disk, path, False
        disk._take_descriptor(path)
        self._is_open = True

    def fsync(self) -> None:
        if not self._is_open:
            raise OSError(errno.EBADF, "the folder is closed", self._path)
        self._disk.fsync_dir(self._path)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._disk.open_files -= 1

    def __enter__(self) -> SimulatedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SimulatedLock:
    """A lock of a simulated disk."""

    def __init__(self, disk: SimulatedDisk, path: str, node: int) -> None:
        self._disk = disk
        self._path = path
        self._node: int | None = node  # None: released

    def check(self) -> None:
        if self._node is not None and self._disk._find(self._path) != self._node:
            raise Closed(f"{self._path} was moved, deleted or replaced: close the store, and open what is there now")

    def release(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            self._disk._locks.discard(node)


def _check_offset(offset: int, path: str) -> None:
    if offset < 0:
        raise OSError(errno.EINVAL, "Invalid argument", path)


def _flip(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    bit = chance.randrange(len(data) * 8)
    return data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :]
