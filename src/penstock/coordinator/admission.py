"""Writes that wait for room, first come, first served.

Thread: everything under the coordinator's lock, which nobody holds while it sleeps.
Invariants: (1) a write never passes one that waits. (2) at most `waiting_writes_max` wait.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Generic

from penstock.coordinator.buffer import DeltaBuffer
from penstock.coordinator.epochs import Epoch
from penstock.coordinator.protocols import D, V
from penstock.coordinator.settings import CoordinatorSettings
from penstock.coordinator.waiting import Waiter
from penstock.errors import Backpressure, DiskFull


class WaitingWrite(Waiter):
    """A write that has no room yet."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        super().__init__(Epoch(0), applied=False)
        self.size = size
        self.prepare()


class Admission(Generic[D, V]):
    """Lets writes in while there is room for their bytes."""

    def __init__(self, buffer: DeltaBuffer[D, V], *, settings: CoordinatorSettings) -> None:
        self._buffer = buffer
        self._settings = settings
        self._waiting: deque[WaitingWrite] = deque()
        self.refused = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def may_pass(self, size: int, waiting: WaitingWrite | None) -> bool:
        """Whether a write may go on; one that waited, only when it is the first."""
        first = self._waiting[0] if self._waiting else None
        return first is waiting and self._buffer.fits(size)

    def join(self, waiting: WaitingWrite) -> None:
        """Begin to wait; `Backpressure` if too many do."""
        if len(self._waiting) >= self._settings.waiting_writes_max:
            raise self.backpressure(f"{len(self._waiting)} writes wait for room")
        self._waiting.append(waiting)

    def leave(self, waiting: WaitingWrite) -> None:
        with suppress(ValueError):
            self._waiting.remove(waiting)

    def wake(self, *, everyone: bool) -> None:
        """Wake the first if it fits now, or everyone, to be refused."""
        if everyone:
            for waiting in self._waiting:
                waiting.wake()
        elif self._waiting and self._buffer.fits(self._waiting[0].size):
            self._waiting[0].wake()

    def check_size(self, size: int) -> None:
        """Refuse a write that can never fit: while the disk has little space, less may wait than the settings say."""
        if size > self._buffer.bytes_max:
            raise DiskFull(f"a write of {size:,} bytes, but the disk has little space left: free some, then retry")

    def backpressure(self, reason: str) -> Backpressure:
        self.refused += 1
        if self._buffer.held is not None:
            return Backpressure(f"{self._buffer.held}, and {reason}: retry later")
        unapplied = self._buffer.pending_bytes + self._buffer.in_flight_bytes
        limit = self._buffer.bytes_max
        return Backpressure(f"{unapplied:,} bytes are not applied yet (limit {limit:,}) and {reason}: retry later")
