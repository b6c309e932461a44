"""Threads that wait for an epoch and may get a turn instead; writes that wait for room, first come, first served.

A waiter sleeps on a lock of its own rather than on a condition: waking takes no other lock, so sixteen waiters that
wake together do not queue again, and an interrupt never leaves a shared lock in doubt.

A wake-up is a hint, not a message. A sleeper checks the state again after RECHECK_S at the latest, so a wake-up lost
to an interrupt delays a thread but never blocks it.

Thread: the coordinator's lock guards `Waiters` and `Admission`; any thread may wake a `Waiter`.
Invariants: (1) a write never overtakes a waiting write. (2) at most `waiting_writes_max` writes wait.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from itertools import pairwise
from typing import Generic

import msgspec

from penstock.coordinator.layers import DeltaBuffer
from penstock.coordinator.protocols import D, Epoch, V
from penstock.coordinator.settings import CoordinatorSettings
from penstock.errors import Backpressure, DiskFull

RECHECK_S = 0.5


class Waiter(msgspec.Struct, eq=False):
    """A thread that waits for an epoch. It is also the owner of a turn: see `executor`."""

    epoch: Epoch
    applied: bool  # waits until the view holds the epoch, not only until it is durable
    works: bool = True  # takes a turn when one is free
    asks: bool = False  # wants the background thread to flush for it
    thread: int = msgspec.field(default_factory=threading.get_ident)
    joined: bool = False  # has asked for a turn
    gathered: bool = False  # has waited once for others to share its flush
    reached: bool = False  # its epoch was reached while it slept, and it is no longer in `Waiters`
    next: Waiter | None = None  # to be woken when this wait ends: see `take_reached`
    _signal: threading.Lock | None = None  # made on first use: a thread that finds a turn free never sleeps

    def prepare(self) -> None:
        """Create the signal. Call before the waiter can be woken."""
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
            with suppress(RuntimeError):  # it was woken already and has not run yet
                self._signal.release()


class Waiters:
    """The sleeping waiters."""

    def __init__(self) -> None:
        self.all: dict[Waiter, None] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self.all)

    def add(self, waiter: Waiter) -> None:
        """Add a waiter; it may be present already."""
        waiter.prepare()
        self.all[waiter] = None

    def discard(self, waiter: Waiter) -> None:
        """Remove a waiter if it is present."""
        self.all.pop(waiter, None)

    def take_reached(self, durable: int, applied: int) -> list[Waiter]:
        """Remove and return the waiters whose epoch is reached; the caller wakes the first, and each wakes its `next`.

        Woken all at once, they would fight for the interpreter lock: with sixteen, a quarter of their time was that.
        """
        reached = [waiter for waiter in self.all if waiter.epoch <= (applied if waiter.applied else durable)]
        for waiter, following in pairwise(reached):
            waiter.next = following
        for waiter in reached:
            del self.all[waiter]
            waiter.reached = True  # after the removal: it need not check again
        return reached

    def take_worker(self, above: int, *, applied: bool) -> Waiter | None:
        """Remove and return the waiter for the lowest epoch above `above` that may take a turn."""
        if not self.all:
            return None
        workers = [w for w in self.all if w.works and w.epoch > above and (w.applied or not applied)]
        if not workers:
            return None
        worker = min(workers, key=_epoch_of)
        del self.all[worker]
        return worker

    def wake_all(self) -> None:
        """Wake all waiters, to check the state themselves."""
        for waiter in self.all:
            waiter.wake()


def _epoch_of(waiter: Waiter) -> Epoch:
    return waiter.epoch


RETRY_S = 0.1  # the pause that a refused write is advised to make: about the time of a flush
SMALL_BYTES, LARGE_BYTES = 64 << 10, 1 << 20  # small writes need not wait behind large ones


class WaitingWrite(Waiter):
    """A write that has no room yet."""

    size: int = 0
    overtaken_bytes: int = 0  # of small writes that came later and were let in first: at most its own size

    def __post_init__(self) -> None:
        self.prepare()


class Admission(Generic[D, V]):
    """Admits writes while there is room for their bytes."""

    def __init__(self, buffer: DeltaBuffer[D, V], *, settings: CoordinatorSettings) -> None:
        self._buffer = buffer
        self._settings = settings
        self._waiting: deque[WaitingWrite] = deque()
        self.refused = 0
        self.waited = 0  # writes that had to wait, refused or not

    def __len__(self) -> int:
        return len(self._waiting)

    def may_pass(self, size: int, waiting: WaitingWrite | None) -> bool:
        """Whether a write may proceed; a waiting write only if it is the first, or a small one behind a large one."""
        first = self._waiting[0] if self._waiting else None
        if first is waiting or first is None:
            return first is waiting and self._buffer.fits(size)
        if not _overtakes(size, first) or not self._buffer.fits(size):
            return False
        first.overtaken_bytes += size
        return True

    def join(self, waiting: WaitingWrite) -> None:
        """Start to wait; `Backpressure` if too many writes wait."""
        if len(self._waiting) >= self._settings.waiting_writes_max:
            raise self.backpressure(f"{len(self._waiting)} writes wait for room")
        self._waiting.append(waiting)
        self.waited += 1

    def leave(self, waiting: WaitingWrite) -> None:
        with suppress(ValueError):
            self._waiting.remove(waiting)

    def wake(self, *, everyone: bool) -> None:
        """Wake the first waiting write if it fits now, or all of them, to be refused."""
        if everyone:
            for waiting in self._waiting:
                waiting.wake()
        elif self._waiting and self._buffer.fits(self._waiting[0].size):
            self._waiting[0].wake()
        elif self._waiting and self._waiting[0].size >= LARGE_BYTES:
            first = self._waiting[0]
            for waiting in self._waiting:
                if _overtakes(waiting.size, first) and self._buffer.fits(waiting.size):
                    waiting.wake()

    def check_size(self, size: int) -> None:
        """Refuse a write that can never fit: on a nearly full disk the limit is below that of the settings."""
        if size > self._buffer.bytes_max:
            raise DiskFull(f"a write of {size:,} bytes, but the disk has little space left: free some, then retry")

    def backpressure(self, reason: str) -> Backpressure:
        self.refused += 1
        if self._buffer.hold_reason is not None:
            return Backpressure(f"{self._buffer.hold_reason}, and {reason}: retry later", retry_after_s=RETRY_S)
        unapplied = self._buffer.pending_bytes + self._buffer.in_flight_bytes
        limit = self._buffer.bytes_max
        return Backpressure(
            f"{unapplied:,} bytes are not applied yet (limit {limit:,}) and {reason}: retry later",
            limit="bytes_max",
            maximum=limit,
            value=unapplied,
            retry_after_s=RETRY_S,
        )


def _overtakes(size: int, first: WaitingWrite) -> bool:
    """Whether a write may be let in before the first one that waits."""
    return size <= SMALL_BYTES and first.size >= LARGE_BYTES and first.overtaken_bytes + size <= first.size
