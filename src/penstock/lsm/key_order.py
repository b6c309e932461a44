"""The keys of a memtable in order.

numpy sorts the numbers of keys in a fraction of the time in which a sorted list of the keys can be made: that visits
every key object in random order of memory. So keys and rows stay in the order of insertion, and a scan takes those it
needs by number; numpy does that, too, several times as fast as lookups in a dict.

Thread: any; only `forget_rows` changes something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from penstock.lsm.order import Strings, sort

NUMBERED_MIN = 4_096  # keys: fewer are sorted faster as a list
_JOINED_TOGETHER = 4_096  # keys that are joined by one call, which blocks the interpreter


class NumberedKeys(Sequence[bytes]):
    """A sorted sequence of keys, all of them different; a slice is a list."""

    __slots__ = ("_inserted", "_numbers", "_rows", "lsn")

    def __init__(self, inserted: Any, rows: Any, lsn: int) -> None:
        """`inserted`, `rows`: arrays of the keys and of their rows, as they are after the edit of this LSN."""
        strings = Strings()
        for at in range(0, len(inserted), _JOINED_TOGETHER):
            strings.add(inserted[at : at + _JOINED_TOGETHER].tolist())
        keys = strings.joined()
        self._numbers, _ = sort(keys, keys.shared_prefix(), distinct=True)
        self._inserted = inserted  # an array, because the garbage collector would visit all keys of a list
        self._rows: Any = rows
        self.lsn = lsn

    def __len__(self) -> int:
        return len(self._inserted)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        keys: Any = self._inserted[self._numbers[index]]
        if isinstance(index, slice):
            keys = keys.tolist()
        return keys  # type: ignore[no-any-return]

    def rows(self, start: int, end: int) -> list[Any] | None:
        """Return the rows of the keys [start, end) after the edit `lsn`; None if they were released."""
        rows = self._rows
        return None if rows is None else rows[self._numbers[start:end]].tolist()

    def forget_rows(self) -> None:
        """Release the rows: later edits may have replaced some."""
        self._rows = None
