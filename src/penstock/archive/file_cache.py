"""Files that were fetched from the archive to be read: a folder of limited size.

The least recently used file is removed first. A file that is mapped stays readable after that, and occupies its space
until the mapping ends: `on_removed` should end it.

Thread: any; a file is fetched once, by the first thread that asks for it. `_changed` is not held during a transfer.
Invariants: (1) a file in the folder was whole and synced when it got its name, and one that an earlier process left is
compared with its key before it is used. (2) the files have at most `bytes_max` bytes together, not counting those that
are being fetched; a single file may be larger. (3) no file is fetched while it is being removed: the removal would
delete the new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from penstock.archive.objects import INDEX, FileKey, parse_file_key
from penstock.archive.transfer import file_checksum
from penstock.errors import CorruptionError, Invalid, WaitExpired
from penstock.host import threads
from penstock.host.file_operations import remove_file
from penstock.host.files import FileSystem

TEMPORARY = ".tmp"
WAIT_S = 600.0  # for another thread that fetches the same file


class FileCache:
    """The fetched files in a folder, by the keys of their objects."""

    def __init__(
        self, fs: FileSystem, folder: str, bytes_max: int, on_removed: Callable[[str], None] = lambda key: None
    ) -> None:
        self._fs = fs
        self._folder = folder
        self._bytes_max = bytes_max
        self._on_removed = on_removed
        self._changed = threads.condition("archive.cache")
        self._files: OrderedDict[str, int] | None = None  # guarded by _changed: bytes by key, the oldest use first
        self._busy: set[str] = set()  # guarded by _changed: being fetched or removed
        self._unchecked: set[str] = set()  # guarded by _changed: left by an earlier process, and not read since

    def path_of(self, key: str, fetch: Callable[[str], None], timeout_s: float = WAIT_S) -> str:
        """Return the path of a fetched file; `fetch` writes it to a path if it is not there yet.

        Another thread may remove it to make room before the caller opens it: then the caller must call again.
        """
        path, size = self._path(key), _named(key).size
        with self._changed:
            files = self._loaded()
            if not self._changed.wait_for(lambda: key not in self._busy, timeout_s):
                raise WaitExpired(f"{key} is being fetched, and this takes too long: try again later")
            is_here = key in files and self._fs.exists(path)  # else somebody emptied the folder
            if is_here and key not in self._unchecked:
                files.move_to_end(key)
                return path
            files.pop(key, None)
            self._busy.add(key)
            surplus = self._make_room(size)
        try:
            self._remove(surplus)
            if not (is_here and self._is_sound(key)):
                fetch(path)
            with self._changed:
                self._unchecked.discard(key)
                files[key] = size
                surplus = self._make_room(0, but=key)  # others were fetched meanwhile
            self._remove(surplus)
        finally:
            with self._changed:
                self._busy.discard(key)
                self._changed.notify_all()
        return path

    def _is_sound(self, key: str) -> bool:
        """Whether a file that an earlier process left is still what it fetched; a damaged one would fail every read."""
        named = _named(key)
        try:
            return file_checksum(self._fs, self._path(key)) == (named.size, named.checksum)
        except (CorruptionError, OSError):
            return False

    def bytes(self) -> int:
        """Return the size of all files."""
        with self._changed:
            return sum(self._loaded().values())

    def discard(self, key: str) -> None:
        """Remove a file, if it is there: it is not needed, or damaged."""
        with self._changed:
            size = self._loaded().pop(key, None)
            if size is not None:
                self._busy.add(key)
        if size is not None:
            self._remove([key])

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key.replace('/', '_')}"

    def _loaded(self) -> OrderedDict[str, int]:
        """Return the files, which an earlier process may have left."""
        if self._files is None:
            self._files = OrderedDict()
            names = self._fs.listdir(self._folder) if self._fs.exists(self._folder) else []
            for name in sorted(names):
                key = name.replace("_", "/")
                try:
                    self._files[key] = _named(key).size
                except Invalid:
                    remove_file(self._fs, f"{self._folder}/{name}")
            self._unchecked.update(self._files)
            for key in self._make_room(0):
                remove_file(self._fs, self._path(key))
                self._busy.discard(key)
        return self._files

    def _make_room(self, size: int, but: str | None = None) -> list[str]:
        """Forget the files that must go for one of this size; return their keys, for `_remove`."""
        assert self._files is not None
        surplus, total = list[str](), size + sum(self._files.values())
        for key in [other for other in self._files if other != but]:
            if total <= self._bytes_max:
                break
            total -= self._files.pop(key)
            surplus.append(key)
        self._busy.update(surplus)
        return surplus

    def _remove(self, keys: list[str]) -> None:
        """Remove files that are forgotten, and busy until then."""
        try:
            for key in keys:
                path = self._path(key)
                for name in (path, path + INDEX):
                    remove_file(self._fs, name)
                self._on_removed(key)
        finally:
            with self._changed:
                self._busy.difference_update(keys)
                self._changed.notify_all()


def _named(key: str) -> FileKey:
    if key.endswith((INDEX, TEMPORARY)):
        raise Invalid(f"{key} is not the key of a file")
    return parse_file_key(key)
