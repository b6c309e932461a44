"""Ids that were removed from a search kernel and are still in memory: a snapshot may need their vectors.

A removal costs the same however many ids are hidden, because a snapshot may be open for hours beside a writer of small
records. So they are Roaring bitmaps: one of all, and one for the removals between two pins. A search makes an array.

Thread: guarded by the owner (`VectorIndex`): a change runs alone. `HiddenIds` is for any thread.
Invariant: what was removed before a pin was taken is not needed by it, and what is removed later is.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakSet

from pyroaring import BitMap64

from penstock.vector.exact import U64
from penstock.vector.operators import id_array


class IndexPin:
    """Keeps removed vectors in memory while it is referenced."""

    __slots__ = ("__weakref__", "removals")

    def __init__(self, removals: int) -> None:
        self.removals = removals  # before it was taken


class HiddenIds:
    """The ids that a search must not find, between two changes."""

    __slots__ = ("_bits", "_ids", "selector")

    def __init__(self, bits: BitMap64) -> None:
        self._bits = bits
        self._ids: U64 | None = None
        self.selector: Any = None  # of faiss; cached here by the first search that needs one

    @property
    def ids(self) -> U64:
        """These ids, ascending."""
        ids = self._ids
        if ids is None:
            ids = self._ids = id_array(self._bits)
        return ids


class RemovedIds:
    """The removed ids of one kernel."""

    def __init__(self) -> None:
        self._pins: WeakSet[IndexPin] = WeakSet()
        self._removals = 0  # so far
        self._pinned_at = 0  # removals before the newest pin
        self.clear()

    def clear(self) -> None:
        """Forget all ids."""
        self._all = BitMap64()
        self._spare = BitMap64()  # those that no pin needs
        self._parts: deque[tuple[int, BitMap64]] = deque()  # the others: first removal of a part, ids
        self.hidden: HiddenIds | None = None  # replaced by every change; None: nothing is hidden

    def __len__(self) -> int:
        return len(self._all)

    def pin(self) -> IndexPin:
        """Keep vectors that are removed from now on, as long as the result is referenced."""
        pin = IndexPin(self._removals)
        self._pins.add(pin)
        self._pinned_at = self._removals
        return pin

    def add(self, ids: U64) -> None:
        """Hide more ids; those that are hidden are ignored."""
        some = BitMap64(ids.tolist()) - self._all
        self._removals += 1
        if not some:
            return
        if self._parts and self._parts[-1][0] > self._pinned_at:
            self._parts[-1][1].update(some)
        else:
            self._parts.append((self._removals, some))
        self._all |= some
        self.hidden = HiddenIds(self._all)

    def spare(self) -> BitMap64:
        """Return the ids that no pin needs."""
        oldest = min((pin.removals for pin in self._pins), default=self._removals)
        while self._parts and self._parts[0][0] <= oldest:
            self._spare |= self._parts.popleft()[1]
        return self._spare

    def drop_spare(self) -> None:
        """Forget the ids that no pin needs: they are not in memory any more."""
        self._all -= self._spare
        self._spare = BitMap64()
        self.hidden = HiddenIds(self._all) if self._all else None
