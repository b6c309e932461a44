"""A simulated disk: live and synced content, and every state that a crash can leave.

One run of a workload records an image before *every* operation, so that a crash point costs a copy of a few
references, not a run of its own. `disk_image` builds the states that a crash there can leave.

After a failed fsync the changes are *lost*: readable, perhaps on disk after a crash, never made durable by a later
fsync. Linux behaves like this, so an fsync is not retried. A failed fsync of a folder leaves its changes pending:
journalling file systems write names again or become read-only.

Thread: any; one lock guards the disk. Renames stay within a folder.
"""

from __future__ import annotations

import errno
import posixpath
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, TypeAlias

from penstock.errors import StoreLocked
from penstock.host.files import File, Folder, Lock
from penstock.testing.disk_files import SimulatedFile, SimulatedFolder, SimulatedLock
from penstock.testing.disk_image import DiskFolder, DiskInode, Image, NameChange, apply_name

NAME_BYTES_MAX = 255

FaultKind: TypeAlias = Literal["eio", "enospc", "short", "rot", "emfile"]


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


@lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    """Return the names in a path, from the root on."""
    return tuple(part for part in posixpath.normpath("/" + path).split("/") if part)


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
        self._seed = seed
        self._lock = threading.RLock()
        self._inodes: dict[int, DiskInode] = {}
        self._folders: dict[int, DiskFolder] = {0: DiskFolder()}
        self._next_node = 1
        self._locks: set[int] = set()  # the nodes of files that are locked

    @cached_property
    def _chance(self) -> random.Random:
        return random.Random(self._seed)

    @property
    def is_faulty(self) -> bool:
        """Whether a correct operation may fail on this disk."""
        return bool(self._faults) or self.capacity_bytes is not None

    # -- crashes and damage

    def image(self, label: str = "end") -> Image:
        """Return an image of what a crash right now could leave.

        >>> image = SimulatedDisk().image()
        """
        return Image(
            operation=self.operations,
            label=label,
            mark=self.on_image() if self.on_image is not None else 0,
            damaged=self.damaged,
            capacity_bytes=self.capacity_bytes,
            files={n: (i.synced, tuple(i.changes)) for n, i in self._inodes.items()},
            folders={n: (dict(f.synced), tuple(f.changes)) for n, f in self._folders.items()},
        )

    def state(self) -> int:
        """Return a hash of all that a process can find here and a later crash can leave: equal disks behave alike.

        >>> SimulatedDisk().state() == SimulatedDisk().state()
        True
        """
        with self._lock:
            if any(i.changes for i in self._inodes.values()) or any(f.changes for f in self._folders.values()):
                files = [(n, i.synced, tuple(i.changes)) for n, i in self._inodes.items()]
                folders = [(n, tuple(f.synced.items()), tuple(f.changes)) for n, f in self._folders.items()]
                return hash((tuple(files), tuple(folders)))
            return hash(tuple(self._content(self._folders[0], "")))

    def _content(self, folder: DiskFolder, path: str) -> Iterator[tuple[str, bytes | None]]:
        """Yield every path below a folder, with the bytes of files."""
        for name, node in folder.live.items():
            if node in self._folders:
                yield f"{path}/{name}", None
                yield from self._content(self._folders[node], f"{path}/{name}")
            else:
                yield f"{path}/{name}", self._inodes[node].synced

    def flip(self, path: str, bit: int) -> None:
        """Invert one bit of a file, on the disk itself: bit rot.

        >>> disk = SimulatedDisk()
        >>> disk.put_atomically("/file", b"a")
        >>> disk.flip("/file", 1)
        >>> disk.open("/file").pread(1, 0)
        b'c'
        """
        self.damaged = True
        inode = self._inode(path)
        for content in (inode.live, synced := bytearray(inode.synced)):
            if bit // 8 < len(content):
                content[bit // 8] ^= 1 << bit % 8
        inode.synced = bytes(synced)

    def put_atomically(self, path: str, data: bytes) -> None:
        """Replace a file durably in one operation: stands for the atomic commit of an engine.

        >>> SimulatedDisk().put_atomically("/file", b"bytes")
        """
        with self._operation(f"commit {path}", failing=("eio", "enospc")):
            folder, name = self._folder_of(path)
            node = self._new_node()
            self._inodes[node] = DiskInode(data)
            folder.live[name] = folder.synced[name] = node

    # -- FileSystem

    def create(self, path: str) -> File:
        with self._operation(f"create {path}", failing=("eio", "enospc", "emfile")):
            folder, name = self._folder_of(path)
            if name in folder.live:
                raise FileExistsError(errno.EEXIST, "exists", path)
            file = SimulatedFile(self, path, DiskInode(), write=True)  # first: without a descriptor nothing is created
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
            self._folders[node] = DiskFolder()
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
                self._inodes[node] = DiskInode()
                self._rename(folder, (name, node, None))
            node = folder.live[name]
            if node in self._locks:
                raise StoreLocked(f"{path} is locked by another process: close it there first")
            self._locks.add(node)
            return SimulatedLock(self, path, node)

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

    def _rename(self, folder: DiskFolder, change: NameChange) -> None:
        apply_name(folder.live, change)
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

    def _folder(self, path: str) -> DiskFolder:
        return self._walk(_parts(path), path)

    def _walk(self, parts: tuple[str, ...], path: str) -> DiskFolder:
        folder = self._folders[0]
        for part in parts:
            node = folder.live.get(part)
            if node in self._inodes:
                raise NotADirectoryError(errno.ENOTDIR, "is not a folder", path)
            if node not in self._folders:
                raise FileNotFoundError(errno.ENOENT, "no such folder", path)
            folder = self._folders[node]
        return folder

    def _folder_of(self, path: str) -> tuple[DiskFolder, str]:
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

    def _inode(self, path: str) -> DiskInode:
        folder, name = self._folder_of(path)
        node = folder.live.get(name)
        if node in self._folders:
            raise IsADirectoryError(errno.EISDIR, "is a folder", path)
        if node not in self._inodes:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return self._inodes[node]

    def _room(self, inode: DiskInode, offset: int, size: int) -> int:
        """Return how many of `size` bytes at `offset` the disk has space for."""
        if self.capacity_bytes is None:
            return size
        growth = max(0, offset + size - len(inode.live))
        return max(0, size - max(0, growth - (self.capacity_bytes - self._used_bytes())))

    def _used_bytes(self) -> int:
        linked = {node for folder in self._folders.values() for node in folder.live.values()}
        return sum(len(inode.live) for number, inode in self._inodes.items() if number in linked)
