"""A simulated disk: live and synced content, and every state that a crash can leave.

A file holds its synced bytes and the list of changes since; a folder does the same for its names. A crash keeps the
synced part and, by mode, some of the changes. One run of a workload records an image before *every* operation, so that
a crash point costs a copy of a few references, not a run of its own.

Modes of a crash: `strict` keeps only what was synced; `kept` keeps everything; `torn` keeps a random choice, cut at
512-byte sectors, with sizes and names chosen independently of the data; `restart` kills only the process: the operating
system keeps running, and still knows which pages it failed to write.

After a failed fsync the changes are *lost*: readable, perhaps on disk after a crash, never made durable by a later
fsync. Linux behaves like this, so an fsync is not retried. A failed fsync of a folder leaves its changes pending:
journalling file systems write names again or become read-only.

Thread: any; one lock guards the disk. Renames stay within a folder.
"""

from __future__ import annotations

import errno
import itertools
import posixpath
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from penstock.errors import Closed, CorruptionError, StoreLocked
from penstock.host.file_operations import read_fully, write_fully
from penstock.host.files import Buffer, File, Folder, Lock

SECTOR_BYTES = 512
NAME_BYTES_MAX = 255

Mode: TypeAlias = Literal["strict", "kept", "torn", "restart"]
FaultKind: TypeAlias = Literal["eio", "enospc", "short", "rot", "emfile"]

# A change to a file: bytes at an offset, or (data None) a new size.
Change: TypeAlias = "tuple[int, bytes | None]"
# A change to a folder: (name, its new node or None, name that is removed with it or None).
NameChange: TypeAlias = "tuple[str, int | None, str | None]"


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure, at the operation with this number (from 1).

    >>> disk = SimulatedDisk(faults=(Fault(1, "eio"),))
    >>> disk.create("/file")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    OSError: [Errno 5] ...
    """

    at: int
    kind: FaultKind


class _Inode:
    def __init__(self, synced: bytes = b"") -> None:
        self.live = bytearray(synced)
        self.synced = synced
        self.changes: list[tuple[Change, bool]] = []  # each with whether a failed fsync lost it


class _Folder:
    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.synced: dict[str, int] = {}
        self.changes: list[NameChange] = []


@dataclass(frozen=True, slots=True)
class Image:
    """The disk before one operation: enough to build the state after any crash there."""

    operation: int
    label: str
    mark: int  # what `on_image` returned: the length of the history by then
    synced_version: int
    damaged: bool
    capacity_bytes: int | None
    files: dict[int, tuple[bytes, tuple[tuple[Change, bool], ...]]]
    folders: dict[int, tuple[dict[str, int], tuple[NameChange, ...]]]

    def restore(self, mode: Mode, seed: int = 0) -> SimulatedDisk:
        """Return the disk that the machine (in mode `restart`, the next process) sees after the crash."""
        chance = random.Random(f"{seed}/{self.operation}")
        odds = chance.choice((0.1, 0.5, 0.9))

        def survives() -> bool:
            return mode == "kept" or (mode == "torn" and chance.random() < odds)

        disk = SimulatedDisk()
        disk._inodes.clear()
        disk._folders.clear()
        for number, (synced, changes) in self.files.items():
            inode = _Inode(synced if mode == "restart" else _survivor(synced, changes, survives, chance))
            if mode == "restart":
                for change, _ in changes:
                    _apply(inode.live, change)
                inode.changes = list(changes)
            disk._inodes[number] = inode
        for number, (names, renames) in self.folders.items():
            folder = _Folder()
            folder.live = dict(names)
            for rename in renames:
                if mode == "restart" or survives():
                    _apply_name(folder.live, rename)
            folder.synced = dict(names) if mode == "restart" else dict(folder.live)
            folder.changes = list(renames) if mode == "restart" else []
            disk._folders[number] = folder
        disk.damaged = self.damaged
        disk.capacity_bytes = self.capacity_bytes
        disk._next_node = 1 + max([*self.files, *self.folders])
        return disk


def _apply(content: bytearray, change: Change) -> None:
    offset, data = change
    if data is None:
        if offset < len(content):
            del content[offset:]
        else:
            content.extend(bytes(offset - len(content)))
        return
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _apply_name(names: dict[str, int], change: NameChange) -> None:
    name, node, gone = change
    if gone is not None:
        names.pop(gone, None)
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _survivor(
    synced: bytes,
    changes: tuple[tuple[Change, bool], ...],
    survives: Callable[[], bool],
    chance: random.Random,
) -> bytes:
    content = bytearray(synced)
    for (offset, data), _ in changes:
        if data is None:
            if survives():
                _apply(content, (offset, None))
            continue
        for start, end in _sectors(offset, len(data)):
            if survives():
                _apply(content, (start, data[start - offset : end - offset]))
        # The size may reach the disk without the data: the file then ends in zeros.
        if len(content) < offset + len(data) and survives() and chance.random() < 0.5:
            _apply(content, (offset + len(data), None))
    return bytes(content)


def _sectors(offset: int, size: int) -> list[tuple[int, int]]:
    cuts = [offset, *range((offset // SECTOR_BYTES + 1) * SECTOR_BYTES, offset + size, SECTOR_BYTES), offset + size]
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]


class SimulatedFile:
    """A file of a simulated disk."""

    def __init__(self, disk: SimulatedDisk, path: str, inode: _Inode, *, write: bool) -> None:
        self._disk = disk
        self._path = path
        self._inode: _Inode | None = None
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

    def _target(self, *, write: bool) -> _Inode:
        if self._inode is None or (write and not self._write):
            raise OSError(errno.EBADF, "closed, or not open for writing", self._path)
        return self._inode

    def size(self) -> int:
        return len(self._target(write=False).live)

    def pread(self, size: int, offset: int) -> bytes:
        return read_fully(self._read_some, size, offset)

    def _read_some(self, size: int, offset: int) -> bytes:
        _check_place(offset, self._path)
        with self._disk._operation(f"pread {self._path}", read=True) as fault:
            data = bytes(self._target(write=False).live[offset : offset + size])
            if fault == "short":
                return data[: (len(data) + 1) // 2]
            return _flip(data, self._disk._chance) if fault == "rot" else data

    def pwrite(self, data: Buffer, offset: int) -> None:
        write_fully(self._write_some, data, offset)

    def _write_some(self, rest: memoryview, offset: int) -> int:
        _check_place(offset, self._path)
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

    def _change(self, inode: _Inode, change: Change) -> None:
        _apply(inode.live, change)
        inode.changes.append((change, False))

    def truncate(self, size: int) -> None:
        _check_place(size, self._path)
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
                    _apply(content, change)
            inode.synced = bytes(content)
            inode.changes = [(change, lost) for change, lost in inode.changes if lost]
            self._disk._synced_version += 1

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


@lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    """Return the names in a path, from the root on."""
    return tuple(part for part in posixpath.normpath("/" + path).split("/") if part)


def _check_place(offset: int, path: str) -> None:
    if offset < 0:
        raise OSError(errno.EINVAL, "Invalid argument", path)


def _flip(data: bytes, chance: random.Random) -> bytes:
    if not data:
        return data
    bit = chance.randrange(len(data) * 8)
    return data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :]


class _SimulatedLock:
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


class _Operation:
    """One numbered operation: records the image, returns the fault, holds the lock."""

    def __init__(self, disk: SimulatedDisk, label: str, read: bool, failing: tuple[FaultKind, ...]) -> None:
        self._disk, self._label, self._read, self._failing = disk, label, read, failing

    def __enter__(self) -> FaultKind | None:
        disk = self._disk
        disk._lock.acquire()
        try:
            disk.operations += 1
            if not self._read and disk.on_image is not None:
                disk.images.append(disk.image(self._label))
            fault = disk._faults.get(disk.operations)
            if fault in self._failing or (self._read and fault == "eio"):
                assert fault is not None
                raise disk._error(fault, self._label)
            return fault
        except BaseException:
            disk._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._disk._lock.release()


class SimulatedDisk:
    """A file system in memory that can crash, fail, fill up and rot.

    >>> disk = SimulatedDisk()
    >>> file = disk.create("/file")
    >>> file.pwrite(b"word", 0)
    >>> disk.open("/file").pread(4, 0)
    b'word'
    """

    def __init__(self, *, faults: tuple[Fault, ...] = (), capacity_bytes: int | None = None, seed: int = 0) -> None:
        self.operations = 0
        self.open_files = 0
        self.open_files_max: int | None = None  # the limit of files and folders open at once
        self.images: list[Image] = []
        self.on_image: Callable[[], int] | None = None  # set: record an image before every operation
        self.capacity_bytes = capacity_bytes
        self.damaged = any(fault.kind == "rot" for fault in faults)  # then losing unprotected data is not a bug
        self._faults = {fault.at: fault.kind for fault in faults}
        self._chance = random.Random(seed)
        self._lock = threading.RLock()
        self._inodes: dict[int, _Inode] = {}
        self._folders: dict[int, _Folder] = {0: _Folder()}
        self._next_node = 1
        self._locks: set[int] = set()  # the nodes of files that are locked
        self._synced_version = 0

    @property
    def is_faulty(self) -> bool:
        """Whether a correct operation may fail on this disk."""
        return bool(self._faults) or self.capacity_bytes is not None

    # -- crashes and damage

    def image(self, label: str = "end") -> Image:
        """Return an image of what a crash right now could leave."""
        return Image(
            operation=self.operations,
            label=label,
            mark=self.on_image() if self.on_image is not None else 0,
            synced_version=self._synced_version,
            damaged=self.damaged,
            capacity_bytes=self.capacity_bytes,
            files={n: (i.synced, tuple(i.changes)) for n, i in self._inodes.items()},
            folders={n: (dict(f.synced), tuple(f.changes)) for n, f in self._folders.items()},
        )

    def flip(self, path: str, bit: int) -> None:
        """Invert one bit of a file, on the disk itself: bit rot."""
        self.damaged = True
        inode = self._inode(path)
        for content in (inode.live, synced := bytearray(inode.synced)):
            if bit // 8 < len(content):
                content[bit // 8] ^= 1 << bit % 8
        inode.synced = bytes(synced)

    def put_atomically(self, path: str, data: bytes) -> None:
        """Replace a file durably in one operation: stands for the atomic commit of an engine."""
        with self._operation(f"commit {path}", failing=("eio", "enospc")):
            folder, name = self._folder_of(path)
            node = self._new_node()
            self._inodes[node] = _Inode(data)
            folder.live[name] = folder.synced[name] = node
            self._synced_version += 1

    # -- FileSystem

    def create(self, path: str) -> File:
        with self._operation(f"create {path}", failing=("eio", "enospc", "emfile")):
            folder, name = self._folder_of(path)
            if name in folder.live:
                raise FileExistsError(errno.EEXIST, "exists", path)
            file = SimulatedFile(self, path, _Inode(), write=True)  # first: without a descriptor nothing is created
            node = self._new_node()
            self._inodes[node] = file._target(write=True)
            self._rename(folder, (name, node, None))
            return file

    def open(self, path: str, *, write: bool = False) -> File:
        with self._operation(f"open {path}", read=True, failing=("emfile",)):
            return SimulatedFile(self, path, self._inode(path), write=write)

    def rename(self, source: str, target: str) -> None:
        with self._operation(f"rename {source} {target}", failing=("eio", "enospc")):
            folder, name = self._folder_of(source)
            target_name = self._folder_of(target)[1]
            if _parts(source)[:-1] != _parts(target)[:-1]:
                raise OSError(errno.EXDEV, "a simulated rename stays within its folder", source)
            if name not in folder.live:
                raise FileNotFoundError(errno.ENOENT, "no such file", source)
            self._check_replaceable(folder.live[name], folder.live.get(target_name), target)
            self._rename(folder, (target_name, folder.live[name], name))

    def unlink(self, path: str) -> None:
        with self._operation(f"unlink {path}", failing=("eio",)):
            folder, name = self._folder_of(path)
            if folder.live.get(name) in self._folders:
                raise IsADirectoryError(errno.EISDIR, "is a folder", path)
            if folder.live.get(name) not in self._inodes:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            self._rename(folder, (name, None, None))

    def listdir(self, path: str) -> list[str]:
        with self._operation(f"listdir {path}", read=True, failing=("emfile",)):
            return list(self._folder(path).live)

    def exists(self, path: str) -> bool:
        try:
            folder, name = self._folder_of(path)
        except OSError:
            return False
        return not name or name in folder.live

    def mkdir(self, path: str) -> None:
        with self._operation(f"mkdir {path}", failing=("eio", "enospc")):
            folder, name = self._folder_of(path)
            if name in folder.live:
                if folder.live[name] not in self._folders:
                    raise FileExistsError(errno.EEXIST, "exists and is not a folder", path)
                return
            node = self._new_node()
            self._folders[node] = _Folder()
            self._rename(folder, (name, node, None))

    def rmdir(self, path: str) -> None:
        with self._operation(f"rmdir {path}", failing=("eio",)):
            if self._folder(path).live:
                raise OSError(errno.ENOTEMPTY, "not empty", path)
            folder, name = self._folder_of(path)
            self._rename(folder, (name, None, None))

    def fsync_dir(self, path: str) -> None:
        with self._operation(f"fsync_dir {path}", failing=("eio",)):
            folder = self._folder(path)
            folder.synced = dict(folder.live)
            folder.changes.clear()
            self._synced_version += 1

    def folder(self, path: str) -> Folder:
        with self._operation(f"folder {path}", read=True, failing=("emfile",)):
            self._folder(path)
            return SimulatedFolder(self, path)

    def free_bytes(self, path: str) -> int | None:
        with self._lock:
            if self.capacity_bytes is None:
                return None
            return max(0, self.capacity_bytes - self._used_bytes())

    def lock(self, path: str) -> Lock:
        with self._lock:
            folder, name = self._folder_of(path)
            if folder.live.get(name) in self._folders:
                raise IsADirectoryError(errno.EISDIR, "is a folder", path)
            if name not in folder.live:
                node = self._new_node()
                self._inodes[node] = _Inode()
                self._rename(folder, (name, node, None))
            node = folder.live[name]
            if node in self._locks:
                raise StoreLocked(f"{path} is locked by another process: close it there first")
            self._locks.add(node)
            return _SimulatedLock(self, path, node)

    # -- internals

    def _operation(self, label: str, *, read: bool = False, failing: tuple[FaultKind, ...] = ()) -> _Operation:
        return _Operation(self, label, read, failing)

    def _error(self, kind: FaultKind, label: str) -> OSError:
        code = {"enospc": errno.ENOSPC, "emfile": errno.EMFILE}.get(kind, errno.EIO)
        return OSError(code, f"simulated {kind} at operation {self.operations}", label)

    def _take_descriptor(self, path: str) -> None:
        with self._lock:
            if self.open_files_max is not None and self.open_files >= self.open_files_max:
                raise OSError(errno.EMFILE, "too many simulated files are open", path)
            self.open_files += 1

    def _new_node(self) -> int:
        node, self._next_node = self._next_node, self._next_node + 1
        return node

    def _rename(self, folder: _Folder, change: NameChange) -> None:
        _apply_name(folder.live, change)
        folder.changes.append(change)

    def _check_replaceable(self, node: int, replaced: int | None, path: str) -> None:
        """Raise unless a file replaces a file, or a folder an empty folder."""
        if replaced is None or replaced == node:
            return
        if node not in self._folders and replaced in self._folders:
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)
        if node in self._folders and replaced not in self._folders:
            raise NotADirectoryError(errno.ENOTDIR, "is not a folder", path)
        if node in self._folders and self._folders[replaced].live:
            raise OSError(errno.ENOTEMPTY, "not empty", path)

    def _folder(self, path: str) -> _Folder:
        return self._walk(_parts(path), path)

    def _walk(self, parts: tuple[str, ...], path: str) -> _Folder:
        folder = self._folders[0]
        for part in parts:
            node = folder.live.get(part)
            if node in self._inodes:
                raise NotADirectoryError(errno.ENOTDIR, "is not a folder", path)
            if node not in self._folders:
                raise FileNotFoundError(errno.ENOENT, "no such folder", path)
            folder = self._folders[node]
        return folder

    def _folder_of(self, path: str) -> tuple[_Folder, str]:
        *parents, name = _parts(path) or ("",)
        if len(name) > NAME_BYTES_MAX // 4 and len(name.encode()) > NAME_BYTES_MAX:
            raise OSError(errno.ENAMETOOLONG, "the name is too long", path)
        return self._walk(tuple(parents), path), name

    def _find(self, path: str) -> int | None:
        """Return the node of a path; None if there is none."""
        try:
            folder, name = self._folder_of(path)
        except OSError:
            return None
        return folder.live.get(name)

    def _inode(self, path: str) -> _Inode:
        folder, name = self._folder_of(path)
        node = folder.live.get(name)
        if node in self._folders:
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)
        if node not in self._inodes:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self._inodes[node]

    def _room(self, inode: _Inode, offset: int, size: int) -> int:
        """Return how many of `size` bytes at `offset` the disk has space for."""
        if self.capacity_bytes is None:
            return size
        growth = max(0, offset + size - len(inode.live))
        return max(0, size - max(0, growth - (self.capacity_bytes - self._used_bytes())))

    def _used_bytes(self) -> int:
        linked = {node for folder in self._folders.values() for node in folder.live.values()}
        return sum(len(inode.live) for number, inode in self._inodes.items() if number in linked)
