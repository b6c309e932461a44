"""Rows that are not in a file yet: a dict, ordered only when someone wants order.

Thread: one writer applies edits; any thread reads beside it (each lookup is one step of the interpreter). A frozen
memtable has no writer.
Invariants: (1) a key has one row, the newest; operands of a merge are folded as they come. (2) keys are never removed
(a delete is a row), so the dict's own order is the order of arrival, and what came since the last sort is its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from operator import itemgetter
from typing import Any

import numpy as np

from penstock.errors import Invalid
from penstock.lsm.index import hash_keys
from penstock.lsm.operators import fold
from penstock.lsm.order import Keys, Values, shared_prefix, sort
from penstock.lsm.ranges import NO_RANGES, RangeDelete, RangeDeletes
from penstock.lsm.rows import DELETE, I64, MERGE, NEVER, PUT, Columns, Row, binary_array, binary_column

RECENT_RANGES_MAX = 64
ROW_OVERHEAD_BYTES = 240  # of a row in a dict: tuple, two bytes objects, the entry
TAIL_KEYS_MAX = 16_384
_SORT_BY_NUMPY = 65_536  # from here on a sort in one call would hold the interpreter too long
_GATHER_ROWS = 1 << 14  # rows gathered in one go: a longer call would keep readers and writers waiting
_ARRAY_BYTES = 1 << 30

_kind_of, _value_of, _lsn_of, _expiry_of = map(itemgetter, range(4))


@dataclass(frozen=True, kw_only=True)
class Edit:
    """All that one record changes in a tree, installed in one step: the ranges, the rows on top, the puts on top."""

    lsn: int
    time_us: int  # of the record: apply judges expiry by it, never by a clock
    rows: Mapping[bytes, Row] = field(default_factory=dict)
    puts: Mapping[bytes, bytes] = field(default_factory=dict)  # of values that never expire: nearly everything
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
        self._folded: RangeDeletes = NO_RANGES
        self._recent: tuple[RangeDelete, ...] = ()  # range deletes that are not in `_folded` yet
        self.bytes = 0  # an estimate of the memory it takes
        self.lsn_last = 0
        self.time_us = 0  # the highest record time
        self.plain = True  # nothing but puts that never expire
        self.expires = False  # some row does
        self._base: list[bytes] = []  # sorted; the first len(_base) keys of the dict

    def __len__(self) -> int:
        return len(self.rows) + len(self._folded) + len(self._recent)

    def apply(self, edit: Edit) -> None:
        """Take in an edit. Requires: its LSN is above all before."""
        if edit.lsn <= self.lsn_last:
            raise Invalid(f"an edit of LSN {edit.lsn} comes after {self.lsn_last}")
        added: list[RangeDelete] = [(start, end, edit.lsn) for start, end in edit.ranges if start < end]
        self.plain = self.plain and not added
        if edit.rows:
            rows = self._absorb(edit.rows, edit.time_us, RangeDeletes.of(added) if added else NO_RANGES)
            self.rows.update(rows)
            self.bytes += _size(rows, map(_value_of, rows.values()))
        if edit.puts:
            values = edit.puts.values()
            self.rows.update(zip(edit.puts, zip(repeat(PUT), values, repeat(edit.lsn), repeat(NEVER)), strict=False))
            self.bytes += _size(edit.puts, values)
        if added:  # after the rows: a reader in between finds the old or the new, never nothing
            self._add_ranges(added)
        self.bytes += 512 * len(edit.ranges)
        self.lsn_last = edit.lsn
        self.time_us = max(self.time_us, edit.time_us)

    def _add_ranges(self, added: list[RangeDelete]) -> None:
        """Few ranges wait beside the many, so that adding one does not sort all of them again."""
        recent = (*self._recent, *added)
        if len(recent) > RECENT_RANGES_MAX:
            self._folded, self._recent = RangeDeletes.of([*self._folded, *recent]), ()
        else:
            self._recent = recent

    @property
    def ranges(self) -> RangeDeletes:
        """Every range delete."""
        return RangeDeletes.of([*self._folded, *self._recent]) if self._recent else self._folded

    @property
    def has_ranges(self) -> bool:
        return bool(self._recent or self._folded)

    def deleted_below(self, key: bytes) -> int:
        """Rows of `key` below this LSN are deleted; 0 if none is."""
        recent = max((lsn for start, end, lsn in self._recent if start <= key < end), default=0)
        return max(recent, self._folded.lsn_over(key)) if self._folded else recent

    def _absorb(self, rows: Mapping[bytes, Row], now_us: int, new: RangeDeletes) -> Mapping[bytes, Row]:
        """The rows as they are to stand here: operands folded onto what is here already, or onto a new range."""
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
        """An operand folded onto the row of its key, or onto the range that deletes it."""
        older = self.rows.get(key)
        deleted_below = max(deleted_below, self.deleted_below(key))
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


class SortedRows:
    """The point rows of a frozen memtable in key order, for a flush.

    Rows are gathered in order of arrival, which is the order in memory, and put into key order by numpy and Arrow on
    all rows at once. Few calls let go of the interpreter on purpose: each one waits for it behind busy writers.
    """

    def __init__(self, memtable: Memtable) -> None:
        keys, values = _Strings(), _Strings()
        lsns, kinds, expires, hashes = [], [], [], []
        lowest, highest = [], []
        all_keys, all_rows = iter(memtable.rows), iter(memtable.rows.values())
        while some := list(islice(all_keys, _GATHER_ROWS)):
            rows = list(islice(all_rows, _GATHER_ROWS))
            keys.add(some)
            values.add(list(map(_value_of, rows)))
            lsns.append(np.fromiter(map(_lsn_of, rows), np.uint64, len(rows)))
            hashes.append(hash_keys(some))
            lowest.append(min(some))
            highest.append(max(some))
            if not memtable.plain:
                kinds.append(np.fromiter(map(_kind_of, rows), np.uint8, len(rows)))
                expires.append(np.fromiter(map(_expiry_of, rows), np.int64, len(rows)))
        self._count = count = len(memtable.rows)
        if not count:
            return
        self._keys = keys.keys()
        self._values = Values(values.arrays())
        self._lsns = np.concatenate(lsns)
        self._kinds = np.concatenate(kinds) if kinds else np.zeros(count, np.uint8)
        self._expires = np.concatenate(expires) if expires else np.full(count, NEVER, np.int64)
        self._hashes = np.concatenate(hashes)
        self._order, _ = sort(self._keys, shared_prefix(min(lowest), max(highest)))

    def __len__(self) -> int:
        return self._count

    def key(self, place: int) -> bytes:
        return self._keys.key(int(self._order[place]))

    def columns(self, start: int, end: int) -> Columns:
        """The rows at places [start, end)."""
        rows = self._order[start:end]
        return Columns(
            keys=self._keys.take(rows),
            lsns=self._lsns[rows],
            kinds=self._kinds[rows],
            expires=self._expires[rows],
            values=self._values.take(rows),
            hashes=self._hashes[rows],
        )


class _Strings:
    """Byte strings laid end to end, gathered in parts."""

    def __init__(self) -> None:
        self._data: list[bytes] = []
        self._lengths: list[I64] = []

    def add(self, items: list[bytes]) -> None:
        self._data.append(b"".join(items))
        self._lengths.append(np.fromiter(map(len, items), np.int64, len(items)))

    def keys(self) -> Keys:
        lengths = np.concatenate(self._lengths)
        return Keys(bytearray(b"").join([*self._data, bytes(8)]), np.cumsum(lengths) - lengths, lengths)

    def arrays(self) -> list[Any]:
        """As Arrow arrays, as few as their 32-bit offsets allow."""
        arrays: list[Any] = []
        first = size = 0
        for at, data in enumerate(self._data):
            if size + len(data) > _ARRAY_BYTES:
                arrays.append(self._array(first, at))
                first, size = at, 0
            size += len(data)
        return [*arrays, self._array(first, len(self._data))]

    def _array(self, first: int, last: int) -> Any:
        lengths = self._lengths[first:last]
        offsets = np.zeros(1 + sum(map(len, lengths)), np.int64)
        if len(lengths):
            np.cumsum(np.concatenate(lengths), out=offsets[1:])
        if offsets[-1] >= 1 << 31:
            raise Invalid(f"{len(offsets) - 1} rows hold {offsets[-1]} bytes: an array takes less than 2 GiB")
        return binary_array(offsets.astype(np.int32), b"".join(self._data[first:last]))


def sort_keys(keys: list[bytes]) -> list[bytes]:
    """Sorted keys; many are sorted by numpy, which lets other threads run."""
    if len(keys) < _SORT_BY_NUMPY:
        return sorted(keys)
    columns = Keys.of([binary_column(keys[at : at + TAIL_KEYS_MAX]) for at in range(0, len(keys), TAIL_KEYS_MAX)])
    order, _ = sort(columns, shared_prefix(min(keys), max(keys)))
    return [keys[i] for i in order.tolist()]


def merged(memtables: Sequence[Memtable], now_us: int) -> Memtable:
    """One memtable in place of several that follow each other, oldest first; they stay as they are."""
    if len(memtables) == 1:
        return memtables[0]
    result = Memtable()
    for newer in memtables:
        result._add_ranges(list(newer.ranges))
        rows = newer.rows
        if not newer.plain and newer is not memtables[0]:
            rows = {
                key: result.fold_onto(key, row, now_us) if row[0] >= MERGE else row for key, row in newer.rows.items()
            }
        result.rows.update(rows)
        result.plain = result.plain and newer.plain
        result.expires = result.expires or newer.expires
        result.bytes += newer.bytes
        result.lsn_last = newer.lsn_last
        result.time_us = max(result.time_us, newer.time_us)
    return result


def _size(keys: Mapping[bytes, object], values: Iterable[bytes]) -> int:
    return sum(map(len, keys)) + sum(map(len, values)) + ROW_OVERHEAD_BYTES * len(keys)
