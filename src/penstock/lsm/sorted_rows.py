"""The rows of a frozen memtable in key order: what a flush writes.

Thread: one; the memtable no longer has a writer.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import repeat
from operator import itemgetter

import numpy as np

from penstock.lsm.index import hash_keys
from penstock.lsm.memtable import Memtable, in_full
from penstock.lsm.order import Strings, sort
from penstock.lsm.ranges import RangeDeletes
from penstock.lsm.rows import NEVER, Columns, Row, binary_column

_GATHER_ROWS = 1 << 14  # rows gathered per call: a longer call would block readers and writers
_LARGE_ROW_BYTES = 1 << 10  # mean row size above which a second copy of all values costs too much memory


_KIND, _VALUE, _LSN, _EXPIRES = map(itemgetter, range(4))  # of a full row


class SortedRows:
    """The point rows of a frozen memtable in key order, for a flush.

    Rows are gathered in insertion order, which is the order in memory, and sorted by numpy and Arrow all at once; large
    values are not copied until they are needed. Deliberately few calls release the interpreter lock: each then waits
    for it behind busy writers.
    """

    def __init__(self, memtable: Memtable) -> None:
        self._count = count = len(memtable.rows)
        if not count:
            return
        keys, values = Strings(), Strings()
        hashes = []
        self._lsns = memtable.lsns_by_position()
        self._kinds = np.zeros(count, np.uint8)
        self._expires = np.full(count, NEVER, np.int64)
        self._large: list[bytes] = []
        large = memtable.bytes >= _LARGE_ROW_BYTES * count
        all_keys, all_rows = list(memtable.rows), list(memtable.rows.values())
        for at in range(0, count, _GATHER_ROWS):
            some, rows = all_keys[at : at + _GATHER_ROWS], all_rows[at : at + _GATHER_ROWS]
            keys.add(some)
            bare: list[bytes] = rows if memtable.all_bare else self._spread(rows, at, memtable.plain)  # type: ignore[assignment]
            if large:
                self._large += bare
            else:
                values.add(bare)
            hashes.append(hash_keys(some))
        self._keys = keys.joined()
        self._values = values.joined()
        self._hashes = np.concatenate(hashes)
        self._order, _ = sort(self._keys, self._keys.shared_prefix(), distinct=True)
        if memtable.has_ranges:
            self._leave_out_deleted(memtable.ranges)

    def _leave_out_deleted(self, ranges: RangeDeletes) -> None:
        """Omit rows that a later range delete of the same memtable covers: a full disk has no room for them.

        The range itself is written, so that older rows stay deleted.
        """
        live, lsns = np.ones(self._count, np.bool_), self._lsns[self._order]
        for start, end, lsn in ranges:
            low, high = self._first_at(start), self._first_at(end)
            live[low:high] &= lsns[low:high] >= lsn
        self._order = self._order[live]
        self._count = len(self._order)

    def _first_at(self, key: bytes) -> int:
        """Return the position of the first row at or after a key."""
        return bisect_left(range(self._count), key, key=self.key)

    def _spread(self, rows: list[bytes | Row], at: int, plain: bool) -> list[bytes]:
        """Return the values of rows, and store the other columns of full rows at positions from `at` on."""
        rows_at, full = slice(at, at + len(rows)), in_full(rows, repeat(0))
        lsns = np.fromiter(map(_LSN, full), np.uint64, len(full))
        self._lsns[rows_at] = np.where(lsns, lsns, self._lsns[rows_at])  # 0: a bare value's
        if not plain:
            self._kinds[rows_at] = np.fromiter(map(_KIND, full), np.uint8, len(full))
            self._expires[rows_at] = np.fromiter(map(_EXPIRES, full), np.int64, len(full))
        return list(map(_VALUE, full))

    def __len__(self) -> int:
        return self._count

    def key(self, index: int) -> bytes:
        return self._keys.key(int(self._order[index]))

    def columns(self, start: int, end: int, bytes_max: int) -> Columns:
        """Return the rows at positions [start, end), at least one, and no more than `bytes_max` of values allow."""
        rows = self._order[start:end]
        if self._large:
            large: list[bytes] = []
            size = 0
            for row in rows.tolist():
                size += len(self._large[row])
                if large and size > bytes_max:
                    break
                large.append(self._large[row])
            rows, values = rows[: len(large)], binary_column(large)
        else:
            values = self._values.take(rows)
        return Columns(
            keys=self._keys.take(rows),
            lsns=self._lsns[rows],
            kinds=self._kinds[rows],
            expires=self._expires[rows],
            values=values,
            hashes=self._hashes[rows],
        )
