"""Waits for generations: a heap of targets per component and one heap of deadlines.

Thread: any; the writer's lock guards `GenerationWaiters`, and a `WaitHandle` is resolved once.
Invariant: every handle is resolved: reached, expired, or closed.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Mapping
from itertools import count

from penstock.errors import Backpressure, PenstockError, WaitExpired
from penstock.manifest.records import GenerationWaiterSnapshot

SNAPSHOT_MAX = 16  # waiters in a generation's row, for operators only


class WaitHandle:
    """A wait in progress."""

    def __init__(self, waiter_id: int, component: int, target: int, deadline_s: float, deadline_ms: int) -> None:
        self.waiter_id = waiter_id
        self.component = component
        self.target = target
        self.deadline_s = deadline_s
        self.deadline_ms = deadline_ms
        self._resolved = threading.Event()
        self._error: PenstockError | None = None
        self._generation = 0

    def done(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return self._resolved.is_set()

    def result(self, timeout_s: float) -> int:
        """Wait for the generation and return it; `WaitExpired` at the deadline, or after `timeout_s`."""
        if not self._resolved.wait(timeout_s):
            raise WaitExpired(f"component {self.component} did not reach {self.target} in {timeout_s} s: wait again")
        if self._error is not None:
            raise self._error
        return self._generation

    def resolve(self, generation: int, error: PenstockError | None = None) -> None:
        """Set the outcome and wake the waiter."""
        self._generation, self._error = generation, error
        self._resolved.set()


class GenerationWaiters:
    """All waits in progress."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._order = count()  # heaps must not compare handles
        self._targets: dict[int, list[tuple[int, int, WaitHandle]]] = {}
        self._deadlines: list[tuple[float, int, WaitHandle]] = []

    def add(self, handle: WaitHandle) -> None:
        """Add a wait; `Backpressure` if there are too many."""
        if len(self._deadlines) >= self._limit:
            raise Backpressure(f"{self._limit} threads already wait for generations (the limit): retry later")
        order = next(self._order)
        heapq.heappush(self._targets.setdefault(handle.component, []), (handle.target, order, handle))
        heapq.heappush(self._deadlines, (handle.deadline_s, order, handle))

    def reached(self, generations: Mapping[int, int]) -> None:
        """Resolve the waits whose target was reached."""
        resolved = False
        for component, generation in generations.items():
            heap = self._targets.get(component)
            while heap and heap[0][0] <= generation:
                heapq.heappop(heap)[2].resolve(generation)
                resolved = True
        if resolved:
            self._forget_resolved()

    def expire(self, now_s: float) -> None:
        """Resolve the waits whose deadline has passed."""
        if not self._deadlines or self._deadlines[0][0] > now_s:
            return
        while self._deadlines and self._deadlines[0][0] <= now_s:
            handle = heapq.heappop(self._deadlines)[2]
            message = f"component {handle.component} did not reach {handle.target} before the deadline: wait again"
            handle.resolve(0, WaitExpired(message))
        self._forget_resolved()

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline."""
        return self._deadlines[0][0] if self._deadlines else None

    def end(self, error: PenstockError) -> None:
        """Resolve all waits with an error."""
        for _, _, handle in self._deadlines:
            handle.resolve(0, error)
        self._deadlines.clear()
        self._targets.clear()

    def snapshot(self, component: int, generation: int) -> tuple[GenerationWaiterSnapshot, ...]:
        """Return the waits for more than this generation."""
        heap = self._targets.get(component)
        if not heap:
            return ()
        waiting = sorted(entry for entry in heap if entry[0] > generation)
        return tuple(
            GenerationWaiterSnapshot(handle.waiter_id, handle.target, handle.deadline_ms)
            for _, _, handle in waiting[:SNAPSHOT_MAX]
        )

    def _forget_resolved(self) -> None:
        self._deadlines = [entry for entry in self._deadlines if not entry[2].done()]
        heapq.heapify(self._deadlines)
        for component, heap in list(self._targets.items()):
            self._targets[component] = [entry for entry in heap if not entry[2].done()]
            heapq.heapify(self._targets[component])
