"""A folder as an object store (`file://`), through the host's files: the object libraries do not sync what they put.

Thread: any. A lock on the folder makes `put_new` exclusive among processes.
Invariant: an object appears under its key whole and synced, or not at all; deletes are durable in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from penstock.archive.objects import NetworkFailure, StoredObject, check_key
from penstock.errors import StoreLocked
from penstock.host import threads
from penstock.host.file_operations import make_dirs, publish, remove_file, walk
from penstock.host.files import Buffer, File, FileSystem
from penstock.host.paths import parent

LOCK, TEMPORARY = "LOCK", ".tmp"
T = TypeVar("T")


class FolderObjects:
    """The objects below a folder."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self.url = f"file://{root}"
        self._fs = fs
        self._root = root
        self._lock = threads.lock("archive.folder")
        self._swept: set[str] = set()  # guarded by _lock: first parts of keys

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def put_new(self, key: str, data: Buffer) -> bool:
        path = self._path(key)
        make_dirs(self._fs, self._root)
        try:
            with self._locked():
                first = key.partition("/")[0]
                if first not in self._swept:
                    self._sweep(f"{self._root}/{first}")
                    self._swept.add(first)
                if self._fs.exists(path):
                    return False
                make_dirs(self._fs, parent(path))
                self._write(path, data)
        except StoreLocked:
            raise NetworkFailure(f"another process writes to {self.url}: try again later") from None
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock; `StoreLocked` if another process has it."""
        with self._lock:
            lock = self._fs.lock(f"{self._root}/{LOCK}")
            try:
                yield
            finally:
                lock.release()

    def _sweep(self, folder: str) -> None:
        """Remove what puts and deletes that ended early left in a folder: temporary files and empty folders.

        Garbage collection does not: they are not objects, and their keys may never be put again. Requires: the lock.
        """
        try:
            names = self._fs.listdir(folder)
        except FileNotFoundError:
            return
        for name in names:
            try:
                self._sweep(f"{folder}/{name}")
            except NotADirectoryError:
                if name.endswith(TEMPORARY):
                    remove_file(self._fs, f"{folder}/{name}")
        with suppress(OSError):  # it is not empty
            self._fs.rmdir(folder)

    def _write(self, path: str, data: Buffer) -> None:
        temporary = path + TEMPORARY
        if self._fs.exists(temporary):  # left by an attempt that ended early
            self._fs.unlink(temporary)
        file = self._fs.create(temporary)
        try:
            file.pwrite(data, 0)
            publish(self._fs, file, path)
        except BaseException:
            remove_file(self._fs, temporary)
            raise
        finally:
            file.close()

    def read(self, key: str, start: int, end: int) -> bytes:
        return self._opened(key, lambda file: file.pread(end - start, start))

    def size(self, key: str) -> int | None:
        try:
            return self._opened(key, lambda file: file.size())
        except FileNotFoundError:
            return None

    def _opened(self, key: str, act: Callable[[File], T]) -> T:
        """Read from an object's file; `NetworkFailure` if that fails, as a folder on another machine may."""
        path = self._path(key)
        try:
            file = self._fs.open(path)
            try:
                return act(file)
            finally:
                file.close()
        except FileNotFoundError:
            raise
        except OSError as error:
            threads.raise_interrupt(error)
            reason = error.strerror or str(error)
            raise NetworkFailure(f"{self.url}/{key} cannot be read now ({reason}): try again later") from error

    def listed(self, prefix: str) -> Iterator[StoredObject]:
        for name in walk(self._fs, self._path(prefix)):
            if not name.endswith(TEMPORARY):
                size = self.size(f"{prefix}/{name}")
                if size is not None:  # else deleted meanwhile
                    yield StoredObject(f"{prefix}/{name}", size)

    def folders(self) -> list[str]:
        return [name for name in self._fs.listdir(self._root) if name != LOCK] if self._fs.exists(self._root) else []

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            self._fs.unlink(path)
        except FileNotFoundError:
            return
        self._fs.fsync_dir(parent(path))  # deletes keep their order: a listing must not outlive what it names
        with suppress(StoreLocked), self._locked():  # another process puts, perhaps into one of these folders
            self._remove_empty(parent(path))

    def _remove_empty(self, folder: str) -> None:
        """Remove a folder that has no more objects, and those above it: each run of an archive has its own."""
        with suppress(OSError):  # it is not empty
            while folder != self._root:
                self._fs.rmdir(folder)
                folder = parent(folder)
