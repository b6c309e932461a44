"""Rows that are not in a file yet: a dict, sorted only when a reader needs order.

A put that never expires, by far the most common row, is stored as its bare value, added from its edit in one call. The
LSN of a bare value follows from its position: keys are in insertion order, and each edit records where it ended.

Thread: one writer applies edits; any thread reads concurrently (each lookup is one step of the interpreter). A frozen
memtable has no writer.
Invariants: (1) a key has one row, the newest; operands of a merge are folded on insertion. (2) keys are never removed
(a delete is a row), so the dict is in insertion order, and the keys since the last sort are at its end. (3) a bare
value belongs to the edit that inserted its key; a row that replaces another is a full row. (4) a memtable with range
deletes holds only full rows: their LSNs decide what a range deletes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, repeat
from operator import itemgetter
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.errors import Invalid
from penstock.lsm.key_order import NUMBERED_MIN, NumberedKeys
from penstock.lsm.operators import fold
from penstock.lsm.ranges import NO_RANGES, RangeDelete, RangeDeletes
from penstock.lsm.rows import (
    DELETE,
    MERGE,
    NEVER,
    PUT,
    U64,
    Columns,
    Row,
)
from penstock.lsm.scan_part import ScanPart

RECENT_RANGES_MAX = 64
ROW_OVERHEAD_BYTES = 150  # for a bare value: two bytes objects and the dict entry
FULL_ROW_BYTES = 120  # in addition for a full row: the tuple and its LSN
_BARE_PUTS_MIN = 64  # per edit: recording positions does not pay for fewer
TAIL_KEYS_MAX = 16_384

_value_of = itemgetter(1)


class Readable(Protocol):
    """What a memtable may ask of the files below it."""

    def live_values(self, key: bytes) -> list[bytes]:
        """Return the values of a key's live rows, newest first: its operands, then the put below them, if any."""


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """All changes of one record to a tree, installed in one step: ranges first, then rows, then puts."""

    lsn: int
    time_us: int  # of the record: decides expiry on apply, never a clock
    rows: Mapping[bytes, Row] = {}
    puts: Mapping[bytes, bytes] = {}  # values that never expire: the most common write
    put_bytes: int | None = None  # total of keys and values in `puts`, if known
    ranges: Sequence[tuple[bytes, bytes]] = ()  # deletes of [start, end) for rows of earlier records

    def __post_init__(self) -> None:
        if self.lsn <= 0:
            raise Invalid(f"an edit's LSN is positive, not {self.lsn}")

    def size_bytes(self) -> int:
        """Return the total size of keys and values."""
        rows = sum(map(len, self.rows)) + sum(map(len, map(_value_of, self.rows.values())))
        puts = self.put_bytes
        return rows + (sum(map(len, self.puts)) + sum(map(len, self.puts.values())) if puts is None else puts)


def fold_rows(older: Row | None, newer: Row, now_us: int) -> Row:
    """Merge two rows of a key into one; `older` None: an older source may still have one."""
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
    """Rows by key, and range deletes. All its rows are later than `lsn`."""

    def __init__(self, lsn: int = 0) -> None:
        self.rows: dict[bytes, bytes | Row] = {}
        self._marks: list[tuple[int, int]] = []  # (number of keys after an edit of bare values, its LSN)
        self._folded: tuple[RangeDeletes, ...] = ()  # each more than twice as large as the next
        self._recent: tuple[RangeDelete, ...] = ()  # range deletes that are not in `_folded` yet
        # A cache: `_recent` and `_folded` when it was filled, and their union.
        self._ranges: tuple[tuple[RangeDelete, ...], tuple[RangeDeletes, ...], RangeDeletes] = ((), (), NO_RANGES)
        self.bytes = 0  # estimated memory
        self.lsn_last = lsn
        self.applying = lsn  # the LSN of the last edit begun
        self._marks_before = 0  # length of `_marks` when that edit began
        self.time_us = 0  # the highest record time
        self.plain = True  # only puts that never expire
        self.all_bare = True  # only bare values
        self._by_position = True  # bare values are allowed: there are no range deletes
        self.expires = False  # some row expires
        # The first keys of the dict, sorted: most of them, and those that were added since. Replaced whole.
        self._orders: tuple[Sequence[bytes], Sequence[bytes]] = ([], [])
        self._base_lsns: U64 = np.zeros(0, np.uint64)
        self._bare_lsns: dict[bytes, int] = {}  # LSNs by key, of the first keys, if `row_with_lsn` was called

    def __len__(self) -> int:
        return len(self.rows) + sum(map(len, self._folded)) + len(self._recent)

    def apply(self, edit: Edit) -> None:
        """Apply an edit. Requires: its LSN is above all earlier ones."""
        self._begin(edit.lsn)
        added: list[RangeDelete] = []
        if edit.ranges:
            added = [(start, end, edit.lsn) for start, end in edit.ranges if start < end]
            self._leave_positions()
        if edit.rows:
            self._add_rows(self._absorb(edit.rows, edit.time_us, RangeDeletes.of(added) if added else NO_RANGES))
        if edit.puts:
            self._add_puts(edit.puts, edit.lsn)
        if added:  # after the rows: a reader in between sees the old or the new row, never none
            self._add_ranges(added)
        overhead = ROW_OVERHEAD_BYTES * (len(edit.rows) + len(edit.puts)) + 512 * len(edit.ranges)
        self.bytes += edit.size_bytes() + overhead
        self.lsn_last = edit.lsn
        self.time_us = max(self.time_us, edit.time_us)

    def _begin(self, lsn: int) -> None:
        """Begin an edit, or go on with one that was interrupted."""
        if lsn <= self.lsn_last:
            raise Invalid(f"an edit of LSN {lsn} comes after {self.lsn_last}")
        if lsn > self.applying:
            self._marks_before = len(self._marks)
            self.applying = lsn  # rows may exist from here on: see `remainder`

    def put(self, key: bytes, value: bytes, lsn: int, time_us: int) -> None:
        """Apply an edit that is one put. Requires: its LSN is above all earlier ones."""
        if lsn > self.applying:
            self._marks_before = len(self._marks)
            self.applying = lsn
        self.all_bare = False  # before the row is inserted
        self.rows[key] = (PUT, value, lsn, NEVER)
        self.bytes += len(key) + len(value) + ROW_OVERHEAD_BYTES + FULL_ROW_BYTES
        self.lsn_last = lsn
        self.time_us = max(self.time_us, time_us)

    def remainder(self, edit: Edit) -> Edit:
        """Return what is left of an interrupted edit. No operand is folded twice: its row has the edit's LSN."""
        del self._marks[self._marks_before :]
        rows = {key: row for key, row in edit.rows.items() if self._lsn_of(key) != edit.lsn}
        rows.update(_put_rows(edit.puts, edit.lsn))
        ranges = () if self.deleted_by(edit.lsn) else edit.ranges
        return Edit(lsn=edit.lsn, time_us=edit.time_us, rows=rows, ranges=ranges)

    def _lsn_of(self, key: bytes) -> int:
        row = self.rows.get(key)
        return row[2] if type(row) is tuple else 0

    def deleted_by(self, lsn: int) -> bool:
        """Whether the memtable has range deletes of this LSN."""
        return lsn in self.ranges.lsns

    def _add_rows(self, rows: Mapping[bytes, Row]) -> None:
        self.all_bare = False  # before the rows are inserted
        self.rows.update(rows)
        self.bytes += FULL_ROW_BYTES * len(rows)

    def _add_puts(self, puts: Mapping[bytes, bytes], lsn: int) -> None:
        if len(puts) < _BARE_PUTS_MIN or not self._by_position:
            self._add_rows(_put_rows(puts, lsn))
            return
        before = len(self.rows)
        self._marks.append((before + len(puts), lsn))  # before the insert: readers look up the LSN
        if not before:  # an empty dict would copy whether the garbage collector visits `puts`: all rows, at each pass
            first = next(iter(puts))
            self.rows[first] = puts[first]
        self.rows.update(puts)
        added = len(self.rows) - before
        if added < len(puts):  # some keys existed: their positions would give the old LSN
            self._marks[-1] = (before + added, lsn)
            new = set(islice(reversed(self.rows), added))
            self._add_rows(_put_rows({key: value for key, value in puts.items() if key not in new}, lsn))

    def _leave_positions(self) -> None:
        """Convert every row to a full row, now and from here on: range deletes need LSNs."""
        self.plain = self.all_bare = self._by_position = False
        if self._marks:
            self.rows = self.full_rows()
            self._marks = []  # after the rows: readers read marks first, then rows
            self.bytes += FULL_ROW_BYTES * len(self.rows)

    def merge_newer(self, newer: Memtable, now_us: int) -> None:
        """Add all rows of `newer`, which are later than all rows of this memtable."""
        self.bytes += newer.bytes
        self.expires = self.expires or newer.expires
        if newer.has_ranges:
            self._leave_positions()
            self._add_ranges(list(newer.ranges))
        before = len(self.rows)
        if newer.plain and self._by_position:
            self.rows.update(newer.rows)
            if len(self.rows) == before + len(newer.rows):
                self._marks += [(before + end, lsn) for end, lsn in newer._marks]
                self.all_bare = self.all_bare and newer.all_bare
            else:
                self.rows.update(newer.full_rows())
                self.all_bare = False
        else:
            rows: dict[bytes, Any] = newer.full_rows()
            operands = {key: self.fold_onto(key, row, now_us) for key, row in rows.items() if row[0] >= MERGE}
            self.rows.update(rows | operands)
            self.plain, self.all_bare = self.plain and newer.plain, False
        self.lsn_last = self.applying = newer.lsn_last
        self.time_us = max(self.time_us, newer.time_us)

    def to_flush(self, files: Readable) -> Memtable:
        """Return the rows that a flush writes on top of `files`. A kind's own memtable makes rows of its columns."""
        return self

    def with_rows(self, rows: Mapping[bytes, Row]) -> Memtable:
        """Return a memtable of these rows and those of this one, none of which has the same key."""
        result = Memtable()
        result.merge_newer(self, self.time_us)
        result.plain = False
        result._add_rows(rows)
        return result

    def row(self, key: bytes) -> Row | None:
        """Return the row of a key. For a bare value its LSN is an upper bound: the last LSN applied."""
        lsn = self.lsn_last  # before the lookup
        row = self.rows.get(key)
        return (PUT, row, lsn, NEVER) if type(row) is bytes else row  # type: ignore[return-value]

    def row_with_lsn(self, key: bytes) -> Row | None:
        """Return the row of a key with its own LSN. Requires: no edit is being applied.

        The LSN of a bare value follows from its position, so the positions are kept from the first call on.
        """
        row = self.rows.get(key)
        if type(row) is not bytes:
            return row  # type: ignore[return-value]
        lsns, count = self._bare_lsns, len(self.rows)
        if len(lsns) < count:  # two threads may do this at once: they add the same
            new = list(islice(reversed(self.rows), count - len(lsns)))[::-1]
            lsns.update(zip(new, _lsns_by_position(self._marks, count)[count - len(new) :].tolist(), strict=True))
        return PUT, row, lsns[key], NEVER

    def part(self, order: Sequence[bytes], low: int, high: int, *, reverse: bool, is_last: bool) -> ScanPart:
        """Return the rows of the keys [low, high) of an order, at least one; LSNs are those of `row`."""
        lsn = self.lsn_last
        keys, rows = list(order[low:high]), None
        if isinstance(order, NumberedKeys):
            rows = order.rows(low, high)
            if self.applying != order.lsn:  # after the rows were taken: a later edit may have replaced some
                order.forget_rows()
                rows = None
        if rows is None:
            rows = list(map(self.rows.__getitem__, keys))
        bare, plain = self.all_bare, self.plain  # read after the rows: a flag still set was set for all of them
        if reverse:
            keys.reverse()
            rows.reverse()
        values = rows if bare else [row if type(row) is bytes else row[1] for row in rows]
        return ScanPart(keys, values, plain, partial(_rows_between, rows, lsn), 0, is_last)

    def full_rows(self) -> dict[bytes, bytes | Row]:
        """Return all rows as full rows with their own LSNs, in insertion order. Requires: no edit is being applied."""
        return dict(zip(self.rows, in_full(self.rows.values(), self.lsns_by_position().tolist()), strict=True))

    def lsns_by_position(self) -> U64:
        """Return, for each key in insertion order, the LSN of its row if that is a bare value."""
        return _lsns_by_position(self._marks, len(self.rows))

    def _add_ranges(self, added: list[RangeDelete]) -> None:
        """Add range deletes. Recent ones are folded in bulk, similar sizes together: n log n for n ranges."""
        recent = (*self._recent, *added)
        if len(recent) > RECENT_RANGES_MAX:
            folded, newest = self._folded, RangeDeletes.of(recent)
            while folded and len(folded[-1]) <= 2 * len(newest):
                newest, folded = RangeDeletes.union((folded[-1], newest)), folded[:-1]
            self._folded = (*folded, newest)  # before `_recent`: a reader in between sees some twice, none missing
            recent = ()
        self._recent = recent

    @property
    def ranges(self) -> RangeDeletes:
        """All range deletes."""
        recent, folded = self._recent, self._folded  # in this order, see `_add_ranges`
        cached_recent, cached_folded, ranges = self._ranges
        if recent is not cached_recent or folded is not cached_folded:
            ranges = RangeDeletes.of(chain(recent, *folded))
            self._ranges = recent, folded, ranges
        return ranges

    @property
    def has_ranges(self) -> bool:
        return bool(self._recent or self._folded)

    def deleted_below(self, key: bytes) -> int:
        """Return the LSN below which rows of `key` are deleted; 0 if none are."""
        highest = max((lsn for start, end, lsn in self._recent if start <= key < end), default=0)
        for folded in self._folded:
            highest = max(highest, folded.lsn_over(key))
        return highest

    def _absorb(self, rows: Mapping[bytes, Row], now_us: int, new: RangeDeletes) -> Mapping[bytes, Row]:
        """Return the rows to insert, with operands folded onto existing rows or onto a new range delete."""
        if all(kind == PUT and expires == NEVER for kind, _, _, expires in rows.values()):
            return rows
        self.plain = False
        self.expires = self.expires or any(row[3] != NEVER for row in rows.values())
        if all(row[0] < MERGE for row in rows.values()):
            return rows
        return {
            key: self.fold_onto(key, row, now_us, new.lsn_over(key)) if row[0] >= MERGE else row
            for key, row in rows.items()
        }

    def fold_onto(self, key: bytes, row: Row, now_us: int, deleted_below: int = 0) -> Row:
        """Fold an operand onto the row of its key, or onto the range that deletes that row."""
        older = self.row(key)
        deleted_below = max(deleted_below, self.deleted_below(key))
        if (older[2] if older is not None else 0) < deleted_below <= row[2]:
            older = (DELETE, b"", deleted_below, NEVER)
        return fold_rows(older, row, now_us)

    def orders(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Return two sorted sequences, a long and a short one, that together hold every key once."""
        base, tail = self._orders
        count = len(base) + len(tail)
        if len(self.rows) > count:
            if len(self.rows) - len(base) <= TAIL_KEYS_MAX:
                tail = sorted([*tail, *self._newest(count)])  # a run and a few keys: little more than a merge
            else:
                base, tail = self._sort_all(), []
            self._orders = base, tail
        return base, tail

    def _newest(self, position: int) -> list[bytes]:
        """Return the keys that were inserted after the first `position` ones."""
        while True:
            try:
                return list(islice(reversed(self.rows), len(self.rows) - position))
            except RuntimeError:  # the writer inserted a row during the iteration
                continue

    def _sort_all(self) -> Sequence[bytes]:
        """Return all keys in order; many of them with their rows."""
        lsn = self.lsn_last  # first: an edit that is applied meanwhile makes the rows invalid, see `part`
        if len(self.rows) < NUMBERED_MIN:
            return sorted(self._newest(0))
        while True:
            try:
                keys = np.fromiter(reversed(self.rows), np.object_, len(self.rows))
                rows = np.fromiter(reversed(self.rows.values()), np.object_, len(keys))
                return NumberedKeys(keys, rows, lsn)
            except RuntimeError:  # as in `_newest`
                continue

    def sorted_keys(self) -> Sequence[bytes]:
        """Return all keys in order."""
        base, tail = self.orders()
        if tail:
            base = self._sort_all() if base else tail
            self._orders = base, []
        return base

    def _between(self, keys: Sequence[bytes], start: bytes, end: bytes | None) -> tuple[int, int]:
        return bisect_left(keys, start), len(keys) if end is None else bisect_left(keys, end)

    def holds(self, start: bytes, end: bytes | None) -> bool:
        """Whether there is a point row in [start, end)."""
        low, high = self._between(self.sorted_keys(), start, end)
        return low < high

    def samples(
        self, start: bytes, end: bytes | None, rows_max: int, bytes_max: int
    ) -> Iterator[tuple[bytes, int, int]]:
        """Yield keys at intervals, each with the rows and approximate bytes up to the next."""
        keys = self.sorted_keys()
        low, high = self._between(keys, start, end)
        mean = self.bytes // max(1, len(keys)) + 1
        every = max(1, min(rows_max, bytes_max // mean))
        for at in range(low, high, every):
            rows = min(every, high - at)
            yield keys[at], rows, rows * mean

    def columns(self, start: bytes = b"", end: bytes | None = None) -> Columns:
        """Return the point rows in [start, end) as columns."""
        keys = self.sorted_keys()
        low, high = self._between(keys, start, end)
        if low >= high:
            return Columns.of([], [], [])
        marks, rows, some = self._marks, self.rows, list(keys[low:high])
        full = in_full(map(rows.__getitem__, some), repeat(0))
        kinds, values, row_lsns, expires = zip(*full, strict=True)
        lsns = np.array(row_lsns, np.uint64)
        if marks:
            lsns = np.where(lsns, lsns, self._sorted_lsns(keys, marks)[low:high])
        return Columns.of(some, list(values), lsns, kinds, np.array(expires, np.int64))

    def _sorted_lsns(self, keys: Sequence[bytes], marks: list[tuple[int, int]]) -> U64:
        """Return, for each key in sorted order, the LSN of its bare value; cached until keys are added."""
        if len(self._base_lsns) != len(keys):
            inserted = list(self.rows)
            lsn_of = dict(zip(inserted, _lsns_by_position(marks, len(inserted)).tolist(), strict=True))
            self._base_lsns = np.fromiter(map(lsn_of.__getitem__, keys[:]), np.uint64, len(keys))
        return self._base_lsns


def merged(memtables: Sequence[Memtable], now_us: int) -> Memtable:
    """Merge consecutive memtables, oldest first, into a new one; the inputs do not change."""
    if len(memtables) == 1:
        return memtables[0]
    result = type(memtables[0])()
    for newer in memtables:
        result.merge_newer(newer, now_us)
    return result


def _put_rows(puts: Mapping[bytes, bytes], lsn: int) -> dict[bytes, Row]:
    return dict(zip(puts, zip(repeat(PUT), puts.values(), repeat(lsn), repeat(NEVER)), strict=False))


def _rows_between(rows: list[bytes | Row], lsn: int, start: int, end: int) -> list[Row]:
    return in_full(rows[start:end], repeat(lsn))


def in_full(rows: Iterable[bytes | Row], lsns: Iterable[int]) -> list[Row]:
    """Return full rows, with the given LSNs for bare values."""
    return [
        (PUT, row, lsn, NEVER) if type(row) is bytes else row  # type: ignore[misc]
        for row, lsn in zip(rows, lsns, strict=False)
    ]


def _lsns_by_position(marks: Iterable[tuple[int, int]], count: int) -> U64:
    """Return, for the first `count` keys in insertion order, the LSN of its row if that is a bare value."""
    lsns = np.zeros(count, np.uint64)
    begin = 0
    for end, lsn in marks:
        lsns[begin:end] = lsn
        begin = end
    return lsns
