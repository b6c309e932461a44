"""The deadlines of a change feed: when rows of its shard expire.

A deadline is a row of the feed's tree (see `changes`), and stays there for a while after it was met. The next ones are
held in memory, so that most records search no tree.

Thread: the one that applies; `is_due` any.
Invariant: `_next` has every deadline of the tree in (the last record's time, `_upto_us`]; it may have others.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

import xxhash

from penstock.lsm.rows import KEY_BYTES_MAX, NEVER
from penstock.lsm.tree import Tree

DEADLINE = b"d"
Deadline = tuple[int, bytes]  # time in microseconds, key
CACHED_COUNT = 4_096  # deadlines in memory, about
MET_MAX = 4_096  # that stay in the tree after they were met
_U64 = struct.Struct(">Q")


class Deadlines:
    """The deadlines of one feed."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._next: list[Deadline] = []  # sorted
        self._upto_us = -1  # -1: `_next` is to be read
        self._met = 0  # since rows of the tree were last deleted
        self._due: tuple[int, list[Deadline]] = 0, []  # the last record that met deadlines, and these

    def due(self, lsn: int, after_us: int, time_us: int) -> list[Deadline]:
        """Return the deadlines in (after_us, time_us] that a record meets. Requires: those up to `after_us` are met."""
        if self._due[0] == lsn:  # an interrupt came after they were deleted, and before all of the record was there
            return self._due[1]
        if time_us > self._upto_us:
            self._read(after_us)
        if not self._next and time_us <= self._upto_us:
            return []  # nearly always
        if time_us <= self._upto_us:
            first, end = (bisect_left(self._next, (at_us + 1,)) for at_us in (after_us, time_us))
            due = self._next[first:end]
            del self._next[:first]
        else:  # more than memory should hold
            due = list(self._scan(after_us, time_us))
        if due:
            self._due = lsn, due
        return due

    def holds(self, time_us: int) -> bool:
        """Whether `due` needs no tree for a record of this time."""
        return time_us <= self._upto_us

    def _read(self, after_us: int) -> None:
        self._upto_us = -1
        self._next = list(self._scan(after_us, NEVER - 1, CACHED_COUNT))
        self._upto_us = NEVER if len(self._next) < CACHED_COUNT else self._next[-1][0] - 1

    def _scan(self, after_us: int, time_us: int, limit: int = -1) -> Iterator[Deadline]:
        rows = self._tree.scan(_key(after_us + 1, b""), _key(time_us + 1, b""), limit=limit)
        return ((_U64.unpack_from(key, 1)[0], whole or key[9:]) for key, whole in rows)

    def add(self, deadlines: Iterable[Deadline]) -> None:
        """Hold new deadlines. Requires: before their record is applied, so that an interrupt loses none."""
        for deadline in deadlines:
            if deadline[0] <= self._upto_us:
                insort(self._next, deadline)
        if len(self._next) > 4 * CACHED_COUNT:
            self._upto_us = self._next[CACHED_COUNT][0] - 1
            del self._next[CACHED_COUNT:]

    def forget(self) -> None:
        """Forget the deadlines in memory: the tree got others, and is read again when they are needed."""
        self._upto_us = -1

    def obsolete(self, met: int, met_us: int) -> tuple[bytes, bytes] | None:
        """Return a range of rows to delete, now and then: those of deadlines up to `met_us`, `met` of them new."""
        self._met += met
        if self._met < MET_MAX:
            return None
        self._met = 0
        return DEADLINE, _key(met_us + 1, b"")

    def is_due(self, after_us: int, time_us: int) -> bool:
        """Whether a deadline is in (after_us, time_us]."""
        return next(self._scan(after_us, time_us, 1), None) is not None


def deadline_row(time_us: int, key: bytes) -> tuple[bytes, bytes]:
    """Return the row of a deadline. A key too long for that is its value, and a hash of it ends the row's key."""
    room = KEY_BYTES_MAX - len(DEADLINE) - _U64.size
    if len(key) <= room:
        return _key(time_us, key), b""
    digest = xxhash.xxh3_128_digest(key)
    return _key(time_us, key[: room - len(digest)] + digest), key


def _key(time_us: int, key: bytes) -> bytes:
    return DEADLINE + _U64.pack(time_us) + key
