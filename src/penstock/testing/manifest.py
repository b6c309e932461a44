"""A manifest engine in memory, whose commit is one atomic operation of the simulated disk.

LMDB is C and outside the file seam, so crash images of the layers above the manifest are taken with this engine. It
passes the same contract suite as the real one: `Manifest.open("manifest", fs=disk, engine=MemoryEngine)`.

Thread: reads from any thread; one writer at a time.
Invariant: a snapshot never changes, because a transaction copies a table before it changes it.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from penstock.errors import Closed, CommitFailed, Invalid
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.manifest.engine import TABLES
from penstock.manifest.settings import ManifestSettings
from penstock.testing.disk import SimulatedDisk

KEY_BYTES_MAX = 511  # as in LMDB

_STATE = msgspec.msgpack.Decoder(dict[str, dict[bytes, bytes]])


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


class MemoryEngine:
    """The manifest's engine on a simulated disk."""

    def __init__(self, path: str, settings: ManifestSettings, fs: FileSystem, clock: Clock) -> None:
        if not isinstance(fs, SimulatedDisk):
            raise Invalid("the memory engine works on a SimulatedDisk only")
        self._path = path
        self._disk = fs
        self._writing = threading.Lock()
        self._owner = fs.lock(path + ".owner")
        self._closed = False
        self._tables: dict[str, dict[bytes, bytes]] = {name: {} for name in TABLES}
        try:
            if fs.exists(path):
                file = fs.open(path)
                self._tables.update(_STATE.decode(file.pread(file.size(), 0)))
        except BaseException:
            self._owner.release()
            raise

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
            try:
                self._disk.put_atomically(self._path, msgspec.msgpack.encode(view.tables))
            except OSError as error:
                raise CommitFailed(f"{self._path}: nothing was committed ({error})") from error
            self._tables = view.tables

    def grow(self, *, for_deletes: bool) -> bool:
        return False

    def maintain(self) -> None:
        self._check_open()

    def copy(self, target: str) -> None:
        with self.read() as view:
            file = self._disk.create(target)
            file.pwrite(msgspec.msgpack.encode(view.tables), 0)
            file.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._owner.release()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self._path} is closed: open it again")
