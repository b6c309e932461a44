"""The file system of one owner: it changes names only while the folder is the one that it locked.

A store knows its files by their names. When somebody moves or deletes the folder of an open store and puts another one
in its place (a restored copy, a new store), the same names lead to the files of that one: its owner would lose sockets,
tables and the journal to ours. A lock is on a file, so it tells the two folders apart, also if one is a copy.

Thread: any.
Invariant: no name is made, replaced or removed, and no file opened for writing, in a folder whose lock is not ours.
Files that are open already stay those of the old folder, whatever their names lead to now.
"""

from __future__ import annotations

from penstock.host.files import File, FileSystem, Folder, Lock
from penstock.host.os_files import OsFileSystem


def owned(fs: FileSystem, lock: Lock) -> FileSystem:
    """The files of an owner; a disk that is simulated has no other users, and stays what it is."""
    return OwnedFiles(fs, lock) if isinstance(fs, OsFileSystem) else fs


class OwnedFiles:
    """A `FileSystem` that looks at a lock before every change; `Closed` if its file is gone or another one."""

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
