"""Scans and queries that a client reads page by page; the owner keeps their position between pages.

So a slow reader holds no thread of the owner, and a vanished one is cleaned up when its lease expires.

Thread: one at a time.
Invariant: a page has about PAGE_BYTES, more only if one row has more, and ends at the first batch after PAGE_S seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from penstock.host.clock import Clock
from penstock.journal.partitions import PartitionId
from penstock.kinds import Reading
from penstock.lsm.rows import binary_column
from penstock.protocol.wire import PAGE_BYTES, mark_batch

BATCH_BYTES = 1 << 20
BATCH_ROWS = 16_384
PAGE_S = 1.0  # so that slow batches do not hold back a page
PAIRS = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary(), nullable=False)])
NOTHING = pa.schema([])


class PagedScan:
    """A scan of (range, record batch), with the resources it needs until its end."""

    def __init__(self, batches: Iterator[tuple[int, Any]], resources: ExitStack, clock: Clock) -> None:
        self._clock = clock
        self._batches = self._in_small_batches(batches)
        self._resources = resources
        self.held_bytes = 0  # of the batch that is being sliced
        self._next: tuple[int, Any] | None = next(self._batches, None)

    def _in_small_batches(self, batches: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        for source, batch in batches:
            rows = batch.num_rows
            self.held_bytes = batch.nbytes
            step = max(1, min(rows, rows * BATCH_BYTES // max(1, self.held_bytes)))
            for start in range(0, rows, step):
                yield source, batch.slice(start, step)

    @property
    def schema(self) -> Any:
        return NOTHING if self._next is None else self._next[1].schema

    @property
    def ended(self) -> bool:
        return self._next is None

    def page(self) -> Iterator[tuple[Any, bytes]]:
        """Yield the record batches of the next page, each with its mark: see `mark_batch`."""
        size, until_s, full = 0, self._clock.monotonic_s() + PAGE_S, False
        while self._next is not None and not full:
            (source, batch), self._next = self._next, next(self._batches, None)
            size += batch.nbytes
            full = size >= PAGE_BYTES or self._clock.monotonic_s() >= until_s
            yield batch, mark_batch(source, self._next is not None and full)

    def close(self) -> None:
        """Release the resources of the scan."""
        self._next = None
        self._batches = iter(())
        self._resources.close()


def in_batches(pairs: Iterator[tuple[bytes, bytes]]) -> Iterator[Any]:
    """Yield (key, value) pairs as record batches."""
    keys: list[bytes] = []
    values: list[bytes] = []
    size = 0
    for key, value in pairs:
        keys.append(key)
        values.append(value)
        size += len(key) + len(value)
        if size >= BATCH_BYTES or len(keys) >= BATCH_ROWS:
            yield pa.record_batch([binary_column(keys), binary_column(values)], schema=PAIRS)
            keys, values, size = [], [], 0
    if keys:
        yield pa.record_batch([binary_column(keys), binary_column(values)], schema=PAIRS)


def scan_ranges(
    reading: Reading, ranges: Sequence[tuple[PartitionId, bytes, bytes | None]]
) -> Iterator[tuple[int, Any]]:
    """Yield the record batches of ranges in order, each with the number of its range."""
    for number, key_range in enumerate(ranges):
        for batch in reading.scan_arrow(*key_range):
            yield number, batch


def unnumbered(batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    """Yield record batches of a single range or a query, with 0 as the number of the range."""
    return ((0, batch) for batch in batches)
