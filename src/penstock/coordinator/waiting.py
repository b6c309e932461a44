"""Threads that wait for an epoch, and may be given a turn instead.

A waiter sleeps on a lock of its own rather than on a condition: waking takes no other lock, so sixteen waiters that
wake together do not queue up again, and an interrupt never leaves a shared lock in doubt.

Being woken is a hint, not a message. Whoever sleeps looks at the facts again after LOOK_AGAIN_S at the latest, so that
a wake-up that an interrupt swallowed delays somebody and stops nobody.

Thread: the coordinator's lock guards a `Waiters`; anybody may wake a `Waiter`.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from penstock.coordinator.epochs import Epoch

LOOK_AGAIN_S = 0.5


class Waiter:
    """A thread that waits for an epoch. It is also what a turn is given to: see `executor`."""

    __slots__ = ("_signal", "applied", "epoch", "works")

    def __init__(self, epoch: Epoch, *, applied: bool, works: bool = True) -> None:
        self.epoch = epoch
        self.applied = applied  # waits until the view holds the epoch, not only until it is durable
        self.works = works  # takes a turn when there is one
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
        self.all: list[Waiter] = []

    def __len__(self) -> int:
        return len(self.all)

    def add(self, waiter: Waiter) -> None:
        waiter.prepare()
        self.all.append(waiter)

    def discard(self, waiter: Waiter) -> None:
        """Forget one that waits no more."""
        with suppress(ValueError):
            self.all.remove(waiter)

    def take_reached(self, durable: int, applied: int) -> list[Waiter]:
        """Remove those whose epoch came; the caller wakes them."""
        if not self.all:
            return []
        reached = [waiter for waiter in self.all if waiter.epoch <= (applied if waiter.applied else durable)]
        if reached:
            self.all = [waiter for waiter in self.all if waiter not in reached]
        return reached

    def take_worker(self, above: int, *, applied: bool) -> Waiter | None:
        """Remove the one that waits for the lowest epoch above `above`, and may be given a turn."""
        if not self.all:
            return None
        workers = [w for w in self.all if w.works and w.epoch > above and (w.applied or not applied)]
        if not workers:
            return None
        worker = min(workers, key=_epoch_of)
        self.all.remove(worker)
        return worker

    def wake_all(self) -> None:
        """Let everybody look for themselves."""
        for waiter in self.all:
            waiter.wake()


def _epoch_of(waiter: Waiter) -> Epoch:
    return waiter.epoch
