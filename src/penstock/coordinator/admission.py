"""Writes that wait for room, first come, first served.

Thread: everything under the coordinator's lock, which `admit` gives up while it waits.
Invariants: (1) a write never passes one that waits. (2) at most `waiting_writes_max` wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, cast

from penstock.coordinator.buffer import DeltaBuffer
from penstock.coordinator.protocols import D, V
from penstock.coordinator.settings import CoordinatorSettings
from penstock.errors import Backpressure
from penstock.host.clock import Clock
from penstock.host.threads import Mutex


class _Entry:
    __slots__ = ("condition", "size")

    def __init__(self, size: int, condition: threading.Condition) -> None:
        self.size = size
        self.condition = condition


class Admission(Generic[D, V]):
    """Lets writes in while there is room for their bytes."""

    def __init__(self, buffer: DeltaBuffer[D, V], *, clock: Clock, lock: Mutex, settings: CoordinatorSettings) -> None:
        self._buffer = buffer
        self._clock = clock
        self._lock = lock
        self._settings = settings
        self._waiting: deque[_Entry] = deque()
        self.refused = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, size: int, timeout_s: float, refuse: Callable[[], None], look: Callable[[], None]) -> None:
        """Return when a write of `size` may go on, `Backpressure` if not in time, or what `refuse` raises."""
        refuse()
        if not self._waiting and self._buffer.fits(size):
            return
        if len(self._waiting) >= self._settings.waiting_writes_max or timeout_s <= 0:
            raise self._backpressure(f"{len(self._waiting)} writes wait for room")
        entry = _Entry(size, threading.Condition(cast(threading.Lock, self._lock)))
        self._waiting.append(entry)
        look()
        deadline_s, late = self._clock.monotonic_s() + timeout_s, False
        try:
            while self._waiting[0] is not entry or not self._buffer.fits(size):
                if late:
                    raise self._backpressure(f"no room came within {timeout_s} s")
                late = not entry.condition.wait(min(deadline_s - self._clock.monotonic_s(), threading.TIMEOUT_MAX))
                refuse()
        finally:
            self._waiting.remove(entry)
            look()

    def wake(self, *, everyone: bool) -> None:
        """Wake the first if it fits now, or everyone, to be refused."""
        if everyone:
            for entry in self._waiting:
                entry.condition.notify()
        elif self._waiting and self._buffer.fits(self._waiting[0].size):
            self._waiting[0].condition.notify()

    def _backpressure(self, reason: str) -> Backpressure:
        self.refused += 1
        held = self._buffer.pending_bytes + self._buffer.in_flight_bytes
        limit = self._settings.bytes_max
        return Backpressure(f"{held:,} bytes are not applied yet (limit {limit:,}) and {reason}: retry later")
