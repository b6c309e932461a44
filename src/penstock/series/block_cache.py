"""Recently read blocks of files: their directories, and their decoded chunks.

Dashboards read the same series again and again. The cache finds a block by the run of files that holds it, which never
changes, and by its key. The bytes of a block are not cached: they are read again when a chunk is missing.

Thread: any; `_lock` guards the entries.
Invariant: the entries take at most `bytes_max` bytes, about; the least recently used go first.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any, TypeAlias

from penstock.host import threads
from penstock.lsm.rows import Row
from penstock.lsm.version import Run
from penstock.series.blocks import Block
from penstock.series.samples import U64

CACHE_BYTES_MAX = 128 << 20
ENTRY_BYTES = 2_048  # besides directory and chunks
RUN_BYTES = 128  # of a directory, for each run of samples
_EntryKey: TypeAlias = tuple["weakref.ref[Run]", bytes]


class BlockCache:
    """The blocks of all stores of a process, as values of rows."""

    def __init__(self, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._start()
        threads.after_fork(self, BlockCache._start)  # another thread may have held the lock

    def _start(self) -> None:
        self._entries: OrderedDict[_EntryKey, _CachedBlock] = OrderedDict()  # guarded by _lock; the last used last
        self._bytes = 0  # guarded by _lock
        self._lock = threads.lock("series.blocks")

    def row(self, run: Run, key: bytes) -> Any:
        """Return the row of a key in a run, with its block as the value; None if it has none."""
        entry_key = (weakref.ref(run), key)
        with self._lock:
            entry = self._entries.get(entry_key)
            if entry is not None:
                self._entries.move_to_end(entry_key)
                return entry.row
        row = run.get(key)
        if row is None:
            return None
        entry = _CachedBlock(self, entry_key, row)
        with self._lock:
            if entry_key not in self._entries:
                self._entries[entry_key] = entry
                self._grow(entry.bytes)
        return entry.row

    def grow(self, entry: _CachedBlock, size: int) -> None:
        """Count bytes that an entry took; it loses what it has if it is no longer an entry."""
        with self._lock:
            if self._entries.get(entry.key) is entry:
                entry.bytes += size
                self._grow(size)
            else:
                entry.chunks.clear()

    def _grow(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._bytes_max:
            self._bytes = sum(entry.bytes for entry in self._entries.values())  # an interrupt may have miscounted
            while self._bytes > self._bytes_max * 7 // 8:
                _, oldest = self._entries.popitem(last=False)
                self._bytes -= oldest.bytes
                oldest.chunks.clear()

    def __len__(self) -> int:
        return len(self._entries)


class _CachedBlock:
    """An entry: a block, of which it caches the decoded chunks."""

    def __init__(self, cache: BlockCache, key: _EntryKey, row: Row) -> None:
        kind, value, lsn, expires = row
        self.key = key
        self.chunks: dict[int, U64] = {}
        self._cache = cache
        block = Block(value, self)
        self.row = (kind, block, lsn, expires)
        self.bytes = ENTRY_BYTES + RUN_BYTES * len(block.runs["id"])
        self.get = self.chunks.get

    def load(self) -> bytes:
        run = self.key[0]()
        row = None if run is None else run.get(self.key[1])
        assert row is not None  # a reader holds the version that has the run
        return row[1]

    def put(self, chunk: int, items: U64) -> None:
        self.chunks[chunk] = items
        self._cache.grow(self, items.nbytes)


BLOCKS = BlockCache()
