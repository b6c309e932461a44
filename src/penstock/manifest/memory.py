"""A manifest in memory: the base of its engines, and an engine that reads a file and never writes it.

Thread: reads from any thread; one writer at a time.
Invariant: a snapshot never changes, because a transaction copies a table before it changes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from penstock.errors import Closed, CorruptionError, Invalid
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.manifest.engine import TABLES, ReadView
from penstock.manifest.examine import check_file, read_stamp
from penstock.manifest.pages import PageWalk, read_meta
from penstock.manifest.settings import ManifestSettings

KEY_BYTES_MAX = 511  # as in LMDB


class MemoryView:
    """A snapshot, or a transaction that copies the tables it changes."""

    def __init__(self, tables: Mapping[str, dict[bytes, bytes]]) -> None:
        self.tables = dict(tables)
        self._copied: set[str] = set()

    def get(self, table: str, key: bytes) -> bytes | None:
        return self.tables[table].get(key)

    def scan(self, table: str, start: bytes = b"", stop: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        rows = self.tables[table]
        keys = sorted(rows)
        for key in keys[bisect_left(keys, start) :]:
            if stop is not None and key >= stop:
                return
            if key in rows:
                yield key, rows[key]

    def put(self, table: str, key: bytes, value: bytes) -> None:
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise Invalid(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}")
        self._own(table)[key] = value

    def put_many(self, table: str, rows: Sequence[tuple[bytes, bytes]]) -> None:
        for key, value in rows:
            self.put(table, key, value)

    def delete(self, table: str, key: bytes) -> bool:
        return key in self.tables[table] and self._own(table).pop(key) is not None

    def _own(self, table: str) -> dict[bytes, bytes]:
        if table not in self._copied:
            self.tables[table] = dict(self.tables[table])
            self._copied.add(table)
        return self.tables[table]


class MemoryTables:
    """Transactions over tables in memory."""

    def __init__(self, path: str, tables: dict[str, dict[bytes, bytes]]) -> None:
        self._path = path
        self._tables = tables  # replaced whole by a commit
        self._writing = threads.lock("manifest.memory")
        self._closed = False

    @contextmanager
    def read(self) -> Iterator[MemoryView]:
        self._check_open()
        yield MemoryView(self._tables)

    @contextmanager
    def write(self) -> Iterator[MemoryView]:
        with self._writing:
            self._check_open()
            view = MemoryView(self._tables)
            yield view
            self._make_durable(view.tables)
            self._tables = view.tables

    def _make_durable(self, tables: dict[str, dict[bytes, bytes]]) -> None:
        """Write the tables of a commit before readers see them; by default they stay in memory."""

    def grow(self, *, for_deletes: bool) -> bool:
        return False

    def maintain(self) -> None:
        self._check_open()

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._path} is closed: open it again")


class ReadOnlyEngine(MemoryTables):
    """The rows of an LMDB file that no process has open, read without LMDB; commits stay in memory."""

    def __init__(self, path: str, settings: ManifestSettings, fs: FileSystem, clock: Clock) -> None:
        super().__init__(path, read_tables(fs, path))

    def copy(self, target: str) -> None:
        raise Invalid(f"{self._path} was opened read-only: open the store as its owner to back it up")

    def read_copy(self, path: str) -> ReadView:
        raise Invalid(f"{path} is no copy: this store was opened read-only")


def read_tables(fs: FileSystem, path: str) -> dict[str, dict[bytes, bytes]]:
    """Check the file as its owner would, then read every row."""
    if not fs.exists(path):
        raise CorruptionError(path, 0, "the manifest is missing, although the store exists")
    stamp = read_stamp(fs, f"{path}.owner")[1] if fs.exists(f"{path}.owner") else None
    unchecked = check_file(fs, path, stamp)
    if unchecked is not None:
        try:
            unchecked.check_rest()
        finally:
            unchecked.close()
    tables: dict[str, dict[bytes, bytes]] = {name: {} for name in TABLES}
    file = fs.open(path)
    try:
        for table, key, value in PageWalk(file, read_meta(file)).rows():
            tables.setdefault(table, {})[key] = value
    finally:
        file.close()
    return tables
