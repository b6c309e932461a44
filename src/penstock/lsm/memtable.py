"""Rows that are not in a file yet: a dict, ordered only when someone wants order.

Thread: one writer applies edits; any thread reads beside it (each lookup is one step of the interpreter). A frozen
memtable has no writer.
Invariants: (1) a key has one row, the newest; operands of a merge are folded as they come. (2) keys are never removed
(a delete is a row), so the dict's own order is the order of arrival, and what came since the last sort is its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from penstock.errors import Invalid
from penstock.lsm.operators import fold
from penstock.lsm.order import Keys, shared_prefix, sort
from penstock.lsm.ranges import NO_RANGES, RangeDelete, RangeDeletes
from penstock.lsm.rows import DELETE, MERGE, NEVER, PUT, Columns, Row, binary_column

ROW_OVERHEAD_BYTES = 240  # of a row in a dict: tuple, two bytes objects, the entry
TAIL_KEYS_MAX = 16_384
_SORT_BY_NUMPY = 65_536  # from here on a sort in one call would hold the interpreter too long


@dataclass(frozen=True, kw_only=True)
class Edit:
    """All that one record changes in a tree, installed in one step: first the ranges, then the rows on top."""

    lsn: int
    time_us: int  # of the record: apply judges expiry by it, never by a clock
    rows: Mapping[bytes, Row] = field(default_factory=dict)
    ranges: Sequence[tuple[bytes, bytes]] = ()  # deletes of [start, end) for rows of earlier records

    def __post_init__(self) -> None:
        if self.lsn <= 0:
            raise Invalid(f"an edit's LSN is positive, not {self.lsn}")


def fold_rows(older: Row | None, newer: Row, now_us: int) -> Row:
    """One row in place of two; `older` None: there may be one further below."""
    kind, value, lsn, expires = newer
    if kind < MERGE or older is None:
        return newer
    if older[3] <= now_us:
        older = (DELETE, b"", older[2], NEVER)
    kind, value = fold((older[0], older[1]), (kind, value))
    if expires == NEVER and older[0] != DELETE:
        expires = older[3]
    return kind, value, lsn, expires


class Memtable:
    """Rows by key, and the ranges deleted below them."""

    def __init__(self) -> None:
        self.rows: dict[bytes, Row] = {}
        self.ranges: RangeDeletes = NO_RANGES
        self.bytes = 0  # an estimate of the memory it takes
        self.lsn_last = 0
        self.time_us = 0  # the highest record time
        self.plain = True  # nothing but puts that never expire
        self.expires = False  # some row does
        self._base: list[bytes] = []  # sorted; the first len(_base) keys of the dict

    def __len__(self) -> int:
        return len(self.rows) + len(self.ranges)

    def apply(self, edit: Edit) -> None:
        """Take in an edit. Requires: its LSN is above all before."""
        if edit.lsn <= self.lsn_last:
            raise Invalid(f"an edit of LSN {edit.lsn} comes after {self.lsn_last}")
        if edit.ranges:
            added: list[RangeDelete] = [(start, end, edit.lsn) for start, end in edit.ranges]
            self.ranges = RangeDeletes.of([*self.ranges, *added])
            self.plain = False
        rows = self._absorb(edit.rows, edit.time_us)
        self.rows.update(rows)
        self.bytes += _size(rows) + 512 * len(edit.ranges)
        self.lsn_last = edit.lsn
        self.time_us = max(self.time_us, edit.time_us)

    def _absorb(self, rows: Mapping[bytes, Row], now_us: int) -> Mapping[bytes, Row]:
        """The rows as they are to stand here: operands folded onto what is here already."""
        if all(kind == PUT and expires == NEVER for kind, _, _, expires in rows.values()):
            return rows
        self.plain = False
        self.expires = self.expires or any(row[3] != NEVER for row in rows.values())
        if all(row[0] < MERGE for row in rows.values()):
            return rows
        return {key: self.fold_onto(key, row, now_us) if row[0] >= MERGE else row for key, row in rows.items()}

    def fold_onto(self, key: bytes, row: Row, now_us: int) -> Row:
        """An operand folded onto the row of its key, or onto the range that deletes it."""
        older = self.rows.get(key)
        deleted_below = self.ranges.lsn_over(key) if self.ranges else 0
        if (older[2] if older is not None else 0) < deleted_below <= row[2]:
            older = (DELETE, b"", deleted_below, NEVER)
        return fold_rows(older, row, now_us)

    def orders(self) -> tuple[list[bytes], list[bytes]]:
        """Two sorted lists that hold every key once: a long one and a short one."""
        base = self._base
        while True:
            try:
                tail = list(islice(reversed(self.rows), len(self.rows) - len(base)))
                break
            except RuntimeError:  # the writer added a row between two steps of ours
                continue
        tail = sort_keys(tail)
        if len(tail) <= TAIL_KEYS_MAX:
            return base, tail
        merged = base + tail
        merged.sort()  # two runs: a merge, not a sort
        self._base = merged
        return merged, []

    def sorted_keys(self) -> list[bytes]:
        """Every key in order."""
        base, tail = self.orders()
        if tail:
            base = sorted(base + tail) if base else tail
            self._base = base
        return base

    def columns(self, start: bytes = b"", end: bytes | None = None) -> Columns:
        """The point rows in [start, end), as columns."""
        keys = self.sorted_keys()
        low = bisect_left(keys, start)
        high = len(keys) if end is None else bisect_left(keys, end)
        return self.columns_of(keys[low:high])

    def columns_of(self, keys: list[bytes]) -> Columns:
        """The rows of these keys, which ascend."""
        rows = [self.rows[key] for key in keys]
        if not rows:
            return Columns.of([], [], [])
        kinds, values, lsns, expires = zip(*rows, strict=True)
        return Columns.of(keys, list(values), np.array(lsns, np.uint64), kinds, np.array(expires, np.int64))

    def chunks(self, rows: int) -> Iterator[Columns]:
        """All point rows in order, so many at a time: nobody is kept waiting for a long call."""
        keys = self.sorted_keys()
        for at in range(0, len(keys), rows):
            yield self.columns_of(keys[at : at + rows])


def sort_keys(keys: list[bytes]) -> list[bytes]:
    """Sorted keys; many are sorted by numpy, which lets other threads run."""
    if len(keys) < _SORT_BY_NUMPY:
        return sorted(keys)
    columns = Keys.of([binary_column(keys[at : at + TAIL_KEYS_MAX]) for at in range(0, len(keys), TAIL_KEYS_MAX)])
    order, _ = sort(columns, shared_prefix(min(keys), max(keys)))
    return [keys[i] for i in order.tolist()]


def merged(older: Memtable, newer: Memtable, now_us: int) -> Memtable:
    """One memtable in place of two that follow each other; both stay as they are."""
    result = Memtable()
    result.rows = dict(older.rows)
    result.ranges = RangeDeletes.of([*older.ranges, *newer.ranges]) if older.ranges or newer.ranges else NO_RANGES
    result.plain = older.plain and newer.plain
    result.expires = older.expires or newer.expires
    if not newer.plain:
        fold_base = Memtable()
        fold_base.rows, fold_base.ranges = older.rows, result.ranges
        rows = {
            key: fold_base.fold_onto(key, row, now_us) if row[0] >= MERGE else row for key, row in newer.rows.items()
        }
        result.rows.update(rows)
    else:
        result.rows.update(newer.rows)
    result.bytes = older.bytes + newer.bytes
    result.lsn_last = newer.lsn_last
    result.time_us = max(older.time_us, newer.time_us)
    return result


def _size(rows: Mapping[bytes, Row]) -> int:
    return sum(map(len, rows)) + sum([len(row[1]) for row in rows.values()]) + ROW_OVERHEAD_BYTES * len(rows)
