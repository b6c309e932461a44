"""The file system of a store's owner: it changes names only while the folder is still the one it locked.

A store finds its files by name. If the folder of an open store is moved or deleted and another one takes its path (a
restored copy, a new store), the same names lead to that store's files, and we would overwrite its journal, tables and
sockets. The lock is on a file, not on a name, so it tells the two folders apart, even if one is a copy.

Thread: any.
Invariant: no name is created, replaced or removed, and no file opened for writing, in a folder whose lock is not ours.
Files that are already open stay those of the old folder.
"""

from __future__ import annotations

from penstock.host.files import File, FileSystem, Folder, Lock
from penstock.host.os_files import OsFileSystem


def owner_file_system(fs: FileSystem, lock: Lock) -> FileSystem:
    """Return a file system that checks `lock` before changes; a simulated disk has no other users and needs none."""
    return OwnerFileSystem(fs, lock) if isinstance(fs, OsFileSystem) else fs


class OwnerFileSystem:
    """A `FileSystem` that checks a lock before every change: `Closed` if the locked file is gone or replaced."""

    def __init__(self, inner: FileSystem, lock: Lock) -> None:
        self._inner = inner
        self._lock = lock

    def create(self, path: str) -> File:
        self._lock.check()
        return self._inner.create(path)

    def open(self, path: str, *, write: bool = False) -> File:
        if write:
            self._lock.check()
        return self._inner.open(path, write=write)

    def rename(self, source: str, target: str) -> None:
        self._lock.check()
        self._inner.rename(source, target)

    def unlink(self, path: str) -> None:
        self._lock.check()
        self._inner.unlink(path)

    def listdir(self, path: str) -> list[str]:
        return self._inner.listdir(path)

    def exists(self, path: str) -> bool:
        return self._inner.exists(path)

    def mkdir(self, path: str) -> None:
        self._lock.check()
        self._inner.mkdir(path)

    def rmdir(self, path: str) -> None:
        self._lock.check()
        self._inner.rmdir(path)

    def fsync_dir(self, path: str) -> None:
        self._inner.fsync_dir(path)

    def folder(self, path: str) -> Folder:
        return self._inner.folder(path)

    def free_bytes(self, path: str) -> int | None:
        return self._inner.free_bytes(path)

    def lock(self, path: str) -> Lock:
        self._lock.check()
        return self._inner.lock(path)
