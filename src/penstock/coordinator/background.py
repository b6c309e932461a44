"""The thread that flushes writes without a waiter: by timer, by size, and on request.

Thread: `run` is the background thread itself; everything else needs the coordinator's lock, or is called by tests.
Invariant: while there are writes that no thread flushes, this thread is awake before they are due.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Generic, cast

from penstock.coordinator.executor import GATHER_S_MAX, FlushExecutor
from penstock.coordinator.layers import DeltaBuffer
from penstock.coordinator.protocols import D, EpochTracker, F, V
from penstock.coordinator.settings import Trigger, choose_trigger
from penstock.coordinator.waiting import Waiter
from penstock.host.clock import Clock
from penstock.host.threads import Mutex

logger = logging.getLogger(__name__)

_PAUSE_S = 0.1  # after an unexpected error, so that it does not fill the log


class Background(Generic[D, F, V]):
    """Decides when to flush, and does it."""

    def __init__(
        self,
        executor: FlushExecutor[D, F, V],
        buffer: DeltaBuffer[D, V],
        epochs: EpochTracker,
        *,
        clock: Clock,
        lock: Mutex,
        interval_s: float,
    ) -> None:
        self._executor = executor
        self._buffer = buffer
        self._epochs = epochs
        self._clock = clock
        self._lock = lock
        self._interval_s = interval_s
        self._wakeup = threading.Condition(cast(threading.Lock, lock))
        # All of these are guarded by _lock.
        self._due_s = 0.0  # when to flush the writes made by then
        self._requested = False  # a caller requested a flush and does not do it itself
        self._asked_s = self._joined_s = 0.0  # when the first one did, and the last
        self._room_wanted = False  # writes wait for room
        self.awake = False  # the thread checks by itself within an interval
        self._until_s = 0.0  # when it does, if it sleeps
        self._noticed = epochs.none  # the last epoch seen
        self._ending = False

    def run(self) -> None:
        """Work until `end`."""
        worker = Waiter(self._epochs.none, applied=False)
        while True:
            try:
                trigger = self._await_work(worker)
                if trigger is None:
                    return
                self._executor.work(worker, trigger)
            except BaseException:
                logger.exception("the flush thread met an unexpected error and continues: report this as a bug")
                self._executor.leave(worker)
                threading.Event().wait(_PAUSE_S)

    # -- with the lock held

    def start_timer(self) -> None:
        """Start the flush interval: the first write entered an empty delta while the thread sleeps."""
        self._due_s = self._clock.monotonic_s() + self._interval_s
        self._requested = False  # another thread has done the requested flush

    def ask(self) -> None:
        """Request a flush: now, or when the group of the caller is complete (see `executor`)."""
        now_s = self._clock.monotonic_s()
        if not self._requested:
            self._wakeup.notify()  # first: an interrupt between the two must not leave the thread asleep
            self._requested, self._asked_s = True, now_s
        self._joined_s = now_s

    def end(self) -> None:
        """Let the thread end when no work is left."""
        self._ending = True
        self._wakeup.notify()

    def wake_if_due(self, *, room_wanted: bool) -> None:
        """Wake the thread if it has work."""
        self._room_wanted = room_wanted
        executor = self._executor
        asleep = not self.awake and executor.has_writes()
        late = self._requested and executor.can_lead() and executor.has_writes() and self._gathered_s() < self._until_s
        if asleep or late or executor.apply_left or self._trigger() is not None:
            self._wakeup.notify()

    def claim(self, worker: Waiter) -> Trigger | None:
        """Take the turn for the next work, if any: batches left to apply come before new flushes."""
        executor = self._executor
        if executor.apply_left:
            executor.apply_left = False
            worker.epoch = self._epochs.last  # apply everything
            if executor.claim_apply(worker):
                return Trigger.EXPLICIT
        trigger = self._trigger()
        if trigger is not None:
            self._requested = False
            self._due_s = self._clock.monotonic_s() + self._interval_s
            worker.epoch = self._epochs.none
            executor.leading = worker
        return trigger

    def _await_work(self, worker: Waiter) -> Trigger | None:
        with self._lock:
            while (trigger := self.claim(worker)) is None and not self._ending:
                sleep_s = self._sleep_s()
                self.awake = sleep_s is not None
                if not self.awake:
                    self._buffer.shut_room()  # the next write wakes the thread
                self._until_s = math.inf if sleep_s is None else self._clock.monotonic_s() + sleep_s
                self._wakeup.wait(sleep_s)
            self.awake, self._until_s = True, 0.0
            return trigger

    def _trigger(self) -> Trigger | None:
        """Return why to flush now, or None if the turn is taken or there are no writes."""
        executor = self._executor
        if not executor.can_lead() or not executor.has_writes():
            return None
        now_s = self._clock.monotonic_s()
        return choose_trigger(
            requested=self._requested and (not executor.lacks_group() or now_s >= self._gathered_s()),
            timer_due=now_s >= self._due_s,
            size_due=self._buffer.flush_due or self._room_wanted,
        )

    def _gathered_s(self) -> float:
        """Return until when to wait for a group that returns one by one: for less than the flush that this saves."""
        flushed_s = self._executor.flushed_s
        return min(
            max(self._joined_s, flushed_s) + GATHER_S_MAX, max(self._asked_s, flushed_s) + self._executor.flush_s_last
        )

    def _sleep_s(self) -> float | None:
        """Return how long nothing can become due without a call of `wake_if_due`; None: until the next write.

        After activity the thread wakes within an interval, before newer writes are due. So a write pays for waking it
        only when the store has been idle.
        """
        executor = self._executor
        if executor.failure is not None:
            return None
        if not executor.has_writes():
            self._requested = False  # the writes of the request are in a batch already
        if executor.has_writes() and executor.can_lead():
            due_s = min(self._due_s, self._gathered_s()) if self._requested else self._due_s
            return max(0.0, due_s - self._clock.monotonic_s())
        if executor.has_writes() or self._noticed != self._epochs.last:
            self._noticed = self._epochs.last
            self._due_s = self._clock.monotonic_s() + self._interval_s
            return self._interval_s
        return None
