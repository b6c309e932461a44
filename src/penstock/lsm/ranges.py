"""Range deletes of one file or tree: disjoint key ranges, each with the LSN it deletes below.

Where ranges overlap the highest LSN counts: a file keeps only the newest row of a key, and snapshots keep whole old
files, so a lower LSN is never needed. A row of LSN m is deleted by a range of LSN n if it is inside and m < n.

Thread: immutable.
Invariant: starts ascend, ranges neither touch with one LSN nor overlap, none is empty.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from operator import is_
from typing import TypeAlias

RangeDelete: TypeAlias = tuple[bytes, bytes, int]  # start, end (exclusive), lsn


@dataclass(frozen=True, slots=True)
class RangeDeletes:
    """A step function from keys to the LSN below which they are deleted."""

    starts: tuple[bytes, ...] = ()
    ends: tuple[bytes, ...] = ()
    lsns: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.starts)

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[RangeDelete]:
        return zip(self.starts, self.ends, self.lsns, strict=True)

    @classmethod
    def of(cls, deletes: Iterable[RangeDelete]) -> RangeDeletes:
        """Split overlapping ranges into disjoint ones."""
        events: list[tuple[bytes, int, int]] = []
        for start, end, lsn in deletes:
            if start < end:
                events.append((start, lsn, 1))
                events.append((end, lsn, -1))
        events.sort()
        pieces: list[RangeDelete] = []
        open_lsns: dict[int, int] = {}  # LSN: how many ranges of it are open here
        highest: list[int] = []  # a heap of negated LSNs, some of them closed again
        before = b""
        for at, lsn, change in events:
            if open_lsns and before < at:
                while -highest[0] not in open_lsns:
                    heappop(highest)
                top = -highest[0]
                if pieces and pieces[-1][1] == before and pieces[-1][2] == top:
                    pieces[-1] = (pieces[-1][0], at, top)
                else:
                    pieces.append((before, at, top))
            count = open_lsns.get(lsn, 0) + change
            if count == 1 and change == 1:
                heappush(highest, -lsn)
            if count:
                open_lsns[lsn] = count
            else:
                del open_lsns[lsn]
            before = at
        starts, ends, lsns = zip(*pieces, strict=True) if pieces else ((), (), ())
        return cls(starts, ends, lsns)

    def lsn_over(self, key: bytes) -> int:
        """Return the LSN below which rows of `key` are deleted; 0 if none are."""
        i = bisect_right(self.starts, key) - 1
        return self.lsns[i] if i >= 0 and key < self.ends[i] else 0

    def clip(self, start: bytes, end: bytes | None) -> RangeDeletes:
        """Return the part inside [start, end)."""
        first = bisect_right(self.ends, start)
        last = len(self.starts) if end is None else bisect_left(self.starts, end)
        if first >= last or (end is not None and end <= start):
            return NO_RANGES
        starts, ends = list(self.starts[first:last]), list(self.ends[first:last])
        starts[0] = max(starts[0], start)
        ends[-1] = ends[-1] if end is None else min(ends[-1], end)
        return RangeDeletes(tuple(starts), tuple(ends), self.lsns[first:last])

    @classmethod
    def union(cls, sources: Sequence[RangeDeletes]) -> RangeDeletes:
        """Return the union of several."""
        return sources[0] if len(sources) == 1 else cls.of(chain.from_iterable(sources))

    def at_or_above(self, lsn: int) -> RangeDeletes:
        """Return the ranges at or above `lsn`."""
        return RangeDeletes.of(piece for piece in self if piece[2] >= lsn)


NO_RANGES = RangeDeletes()


class Unions:
    """Caches the last union: most versions of a tree differ only in parts without ranges.

    Thread: any; the cache is replaced whole.
    """

    def __init__(self) -> None:
        self._last: tuple[Sequence[RangeDeletes], RangeDeletes] = ((), NO_RANGES)

    def of(self, sources: Sequence[RangeDeletes]) -> RangeDeletes:
        """Return the union of several, none of which is empty."""
        last_sources, union = self._last
        if len(last_sources) != len(sources) or not all(map(is_, last_sources, sources)):
            union = RangeDeletes.union(sources)
            self._last = sources, union
        return union
