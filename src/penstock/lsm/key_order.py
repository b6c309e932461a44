"""The keys of a memtable in order.

numpy sorts the numbers of keys in a fraction of the time in which a sorted list of the keys can be made: that visits
every key object in random order of memory. So the keys stay in the order of insertion, and a scan takes those it needs
by number.

Thread: values; nothing here changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from penstock.lsm.order import Strings, sort

_NUMBERED_MIN = 4_096  # keys: fewer are sorted faster as a list
_JOINED_TOGETHER = 4_096  # keys that are joined by one call, which blocks the interpreter


class NumberedKeys(Sequence[bytes]):
    """A sorted sequence of keys, none of which is equal to another; a slice is a list."""

    __slots__ = ("_inserted", "_numbers")

    def __init__(self, inserted: list[bytes]) -> None:
        strings = Strings()
        for at in range(0, len(inserted), _JOINED_TOGETHER):
            strings.add(inserted[at : at + _JOINED_TOGETHER])
        keys = strings.joined()
        self._numbers, _ = sort(keys, keys.shared_prefix(), distinct=True)
        # An array, because the garbage collector would visit all keys of a list.
        self._inserted: Any = np.empty(len(inserted), np.object_)
        self._inserted[:] = inserted

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


def sort_keys(keys: list[bytes]) -> Sequence[bytes]:
    """Return keys in order, all of them different. Many are sorted by numpy, which lets other threads run."""
    return sorted(keys) if len(keys) < _NUMBERED_MIN else NumberedKeys(keys)
