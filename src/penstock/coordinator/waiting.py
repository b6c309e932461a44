"""Threads that wait for an epoch.

A waiter sleeps on a lock of its own rather than on a condition: waking takes no other lock, so sixteen waiters that
wake together do not queue up again.

Thread: the coordinator's lock guards a `Waiters`; a `Waiter` is woken at most once, by whoever removed it.
"""

from __future__ import annotations

import heapq
import threading
from itertools import count

from penstock.coordinator.epochs import Epoch


class Waiter:
    """One sleeping thread."""

    __slots__ = ("_signal", "epoch", "leads")

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.leads = False  # woken because it has the turn to flush, not because its epoch came
        self._signal = threading.Lock()
        self._signal.acquire()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until woken; False if time ran out first."""
        return self._signal.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))

    def wake(self) -> None:
        self._signal.release()


class Waiters:
    """All who wait for one watermark, by epoch."""

    def __init__(self) -> None:
        self._heap: list[tuple[Epoch, int, Waiter]] = []
        self._order = count()  # a heap must not compare waiters

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, waiter: Waiter) -> None:
        heapq.heappush(self._heap, (waiter.epoch, next(self._order), waiter))

    def discard(self, waiter: Waiter) -> bool:
        """Forget one whose time ran out; False if it is being woken already."""
        kept = [entry for entry in self._heap if entry[2] is not waiter]
        found = len(kept) < len(self._heap)
        heapq.heapify(kept)
        self._heap = kept
        return found

    def pop(self) -> Waiter | None:
        """The one who waits for the lowest epoch."""
        return heapq.heappop(self._heap)[2] if self._heap else None

    def take_reached(self, epoch: Epoch) -> list[Waiter]:
        """Those whose epoch came; the caller wakes them."""
        heap, reached = self._heap, []
        while heap and heap[0][0] <= epoch:
            reached.append(heapq.heappop(heap)[2])
        return reached

    def wake_above(self, epoch: int) -> None:
        """Wake those who wait for more than `epoch`: they look for themselves why."""
        above = [entry[2] for entry in self._heap if entry[0] > epoch]
        self._heap = [entry for entry in self._heap if entry[0] <= epoch]
        heapq.heapify(self._heap)
        for waiter in above:
            waiter.wake()
