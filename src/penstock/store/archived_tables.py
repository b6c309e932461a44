"""Sstables that are read from the archive: which object each has, and the copies that reading needs.

Thread: any.
Invariant: the key of an evicted file can be found as long as a version holds the file, also after its row is gone: it
is in the description that the version holds, or here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from penstock.archive.file_cache import FileCache
from penstock.archive.objects import ObjectStore, parse_file_key
from penstock.archive.transfer import fetch
from penstock.errors import Invalid
from penstock.host.files import FileSystem
from penstock.lsm.version import FileMeta, RemoteTable

CACHE = "cache"  # the folder of fetched files, in the store's


class ArchivedTables:
    """The archived sstables of a store; `objects` is None if it was opened without an archive."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        objects: ObjectStore | None,
        cache_bytes_max: int,
        stop: Callable[[], bool],
    ) -> None:
        self._fs = fs
        self._root = root
        self.objects = objects
        self._stop = stop
        # Names of files whose copies were removed: they are closed later, by a thread that holds no lock of a tree.
        self.removed: deque[str] = deque()
        self.cache = FileCache(
            fs, f"{root}/{CACHE}", cache_bytes_max, lambda key: self.removed.append(parse_file_key(key).file_name)
        )
        self._keys: dict[str, str | None] = {}  # by file name: of files archived since their tree was opened

    def record(self, file_name: str, key: str | None) -> None:
        """Note that a file is in the archive under a key; None: not any more."""
        self._keys[file_name] = key

    def forget(self, file_names: set[str]) -> None:
        """Forget files that are gone."""
        for name in file_names:
            self._keys.pop(name, None)

    def names(self) -> list[str]:
        """Return the names of the files that were recorded."""
        return list(self._keys)

    def _key(self, meta: FileMeta) -> str | None:
        return self._keys.get(meta.file_name, meta.object)

    def locate(self, meta: FileMeta) -> RemoteTable | None:
        key = self._key(meta)
        if key is None or self.objects is None:
            return None
        return RemoteTable(self.objects.url, key)

    def cached(self, meta: FileMeta) -> str | None:
        key = self._key(meta)
        return None if key is None else self.cached_object(key, meta.file_name)

    def cached_object(self, key: str, file_name: str) -> str:
        """Return the path of a copy of an object."""
        objects = self._opened(key, file_name)
        return self.cache.path_of(key, lambda path: fetch(self._fs, objects, key, path, self._stop))

    def discard(self, meta: FileMeta) -> None:
        key = self._key(meta)
        if key is not None:
            self.cache.discard(key)

    def bring_back(self, meta: FileMeta) -> None:
        key = self._key(meta)
        if key is not None:
            self.fetch_file(key, meta.file_name)

    def fetch_file(self, key: str, file_name: str) -> None:
        """Write an object to its file in the store's folder."""
        fetch(self._fs, self._opened(key, file_name), key, f"{self._root}/{file_name}", self._stop)

    def _opened(self, key: str, file_name: str) -> ObjectStore:
        if self.objects is None:
            raise Invalid(
                f"{file_name} was evicted to the archive, as {key}: open the store with "
                "penstock.open(path, archive=...), the URL that it was archived to"
            )
        return self.objects
