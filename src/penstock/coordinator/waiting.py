"""Threads that wait for an epoch, and may be given a turn instead; writes that wait for room, first come, first served.

A waiter sleeps on a lock of its own rather than on a condition: waking takes no other lock, so sixteen waiters that
wake together do not queue up again, and an interrupt never leaves a shared lock in doubt.

Being woken is a hint, not a message. Whoever sleeps looks at the facts again after LOOK_AGAIN_S at the latest, so that
a wake-up that an interrupt swallowed delays somebody and stops nobody.

Thread: the coordinator's lock guards `Waiters` and `Admission`; anybody may wake a `Waiter`.
Invariants: (1) a write never passes one that waits. (2) at most `waiting_writes_max` writes wait.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import Generic

from penstock.coordinator.epochs import Epoch
from penstock.coordinator.layers import DeltaBuffer
from penstock.coordinator.protocols import D, V
from penstock.coordinator.settings import CoordinatorSettings
from penstock.errors import Backpressure, DiskFull

LOOK_AGAIN_S = 0.5


class Waiter:
    """A thread that waits for an epoch. It is also what a turn is given to: see `executor`."""

    __slots__ = ("_signal", "applied", "epoch", "gathered", "joined", "reached", "thread", "works")

    def __init__(self, epoch: Epoch, *, applied: bool, works: bool = True) -> None:
        self.epoch = epoch
        self.applied = applied  # waits until the view holds the epoch, not only until it is durable
        self.works = works  # takes a turn when there is one
        self.thread = threading.get_ident()
        self.joined = False  # has asked for a turn
        self.gathered = False  # has waited once for others to share its flush
        self.reached = False  # its epoch came while it slept, and nobody remembers it any more
        self._signal: threading.Lock | None = None  # made when it is needed: who finds a turn free never sleeps

    def prepare(self) -> None:
        """Before it can be woken."""
        if self._signal is None:
            signal = threading.Lock()
            signal.acquire()
            self._signal = signal

    def wait(self, timeout_s: float) -> bool:
        """Sleep until woken; False if time ran out first."""
        assert self._signal is not None
        return self._signal.acquire(timeout=max(0.0, timeout_s))

    def wake(self) -> None:
        if self._signal is not None:
            with suppress(RuntimeError):  # it was woken before and has not noticed yet
                self._signal.release()


class Waiters:
    """All who sleep."""

    def __init__(self) -> None:
        self.all: dict[Waiter, None] = {}  # in the order in which they came

    def __len__(self) -> int:
        return len(self.all)

    def add(self, waiter: Waiter) -> None:
        """Remember one that waits; it may be there already."""
        waiter.prepare()
        self.all[waiter] = None

    def discard(self, waiter: Waiter) -> None:
        """Forget one that waits no more."""
        self.all.pop(waiter, None)

    def take_reached(self, durable: int, applied: int) -> list[Waiter]:
        """Remove those whose epoch came; the caller wakes them."""
        reached = [waiter for waiter in self.all if waiter.epoch <= (applied if waiter.applied else durable)]
        for waiter in reached:
            del self.all[waiter]
            waiter.reached = True  # after it is out: it need not look
        return reached

    def take_worker(self, above: int, *, applied: bool) -> Waiter | None:
        """Remove the one that waits for the lowest epoch above `above`, and may be given a turn."""
        if not self.all:
            return None
        workers = [w for w in self.all if w.works and w.epoch > above and (w.applied or not applied)]
        if not workers:
            return None
        worker = min(workers, key=_epoch_of)
        del self.all[worker]
        return worker

    def wake_all(self) -> None:
        """Let everybody look for themselves."""
        for waiter in self.all:
            waiter.wake()


def _epoch_of(waiter: Waiter) -> Epoch:
    return waiter.epoch


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
