"""Flushes, applies, and the turns to do them.

There are two turns. Who has the *flush turn* makes one batch durable; who has the *apply turn* publishes views. A
caller who wants durability and finds the flush turn free takes it and flushes for everyone; the others wait for its
end. Then those whose epoch came are woken, and one of those who came meanwhile gets the turn. So nobody hands work to
another thread while there is a caller to do it. A batch is applied by the thread that flushed it if the apply turn is
free; otherwise by whoever has that turn, so that a slow apply does not hold back the next fsync. When many batches wait
to be applied, flushes wait too: the next gets larger instead, and readers never look through many layers.

Thread: methods say whether they need the coordinator's lock; it is never held while the flusher works.
Invariants: (1) the order is: durable, durable watermark, its waiters; view, applied watermark, its waiters. (2) a batch
waits to be applied only while someone has the apply turn, or the state is FAILED. (3) who
waits for durability has someone with a turn before it, who will hand on the turn or wake it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Generic, cast

from penstock.coordinator.buffer import DeltaBuffer
from penstock.coordinator.epochs import Epoch, EpochTracker
from penstock.coordinator.protocols import Batch, D, F, Flusher, V
from penstock.coordinator.states import TRANSITIONS, State, Trigger
from penstock.coordinator.waiting import Waiter, Waiters
from penstock.errors import Poisoned, WaitExpired
from penstock.host.clock import Clock
from penstock.host.threads import Mutex

UNAPPLIED_MAX = 16  # batches that are durable and not applied; more wait with their flush


class FlushExecutor(Generic[D, F, V]):
    """Moves batches from the buffer to the view."""

    def __init__(
        self,
        flusher: Flusher[D, F, V],
        buffer: DeltaBuffer[D, V],
        epochs: EpochTracker,
        *,
        clock: Clock,
        lock: Mutex,
        changed: Callable[[], None],
    ) -> None:
        self._flusher = flusher
        self._buffer = buffer
        self._epochs = epochs
        self._clock = clock
        self._lock = lock
        self._changed = changed  # called with the lock held
        self._turns_free = threading.Condition(cast(threading.Lock, lock))
        # All of these are guarded by _lock.
        self.state = State.IDLE
        self.failure: BaseException | None = None
        self.apply_failed = False  # with a failure: views have stopped too
        self.has_thread = False  # whether an apply turn can be left to the background thread
        self.apply_left = False  # it was left
        self.flushes: Counter[Trigger] = Counter()
        self.flush_failures = 0
        self.apply_failures = 0
        self.flush_s_total = 0.0
        self.flush_s_last = 0.0
        self.durable_waiters = Waiters()
        self.applied_waiters = Waiters()
        self.leading = False  # someone has the flush turn
        self._applying = False  # someone has the apply turn
        self._taken = epochs.none  # the last epoch in a batch
        self._sealed = epochs.none  # the last epoch that is not in the pending delta
        self._flushing = False
        self._kept: Batch[D] | None = None  # of unknown outcome, to be written again
        self._to_apply: deque[tuple[Batch[D], F]] = deque()

    # -- with the lock held

    def has_writes(self) -> bool:
        """Whether there are writes that are in no batch."""
        return self._epochs.last > self._taken

    def settle(self) -> None:
        """Move to the state that the facts call for."""
        if self.failure is not None:
            state = State.FAILED
        elif self._flushing:
            state = State.FLUSHING
        else:
            state = State.ACCUMULATING if self.has_writes() else State.IDLE
        assert state is self.state or state in TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state

    def seal(self) -> None:
        """Make the pending delta, if it has writes, a layer that does not change any more."""
        if self._epochs.last > self._sealed:
            self._buffer.seal()
            self._sealed = self._epochs.last

    def can_lead(self) -> bool:
        """Whether the flush turn may be taken."""
        return not self.leading and len(self._to_apply) < UNAPPLIED_MAX

    def wait_or_lead(self, epoch: Epoch) -> Waiter | None:
        """Wait for `epoch` to be durable; None gives the caller the flush turn, to `lead`."""
        if self.can_lead():
            self.leading = True
            return None
        waiter = Waiter(epoch)
        self.durable_waiters.add(waiter)
        return waiter

    def end_turn(self) -> None:
        """Give the flush turn to one who waits for it, or leave it free."""
        self.leading = False
        self.settle()
        if self.failure is None:
            self._hand_on()
        else:
            self._answer()
        self._changed()

    def _hand_on(self) -> None:
        follower = self.durable_waiters.pop() if self.can_lead() else None
        if follower is not None:
            self.leading = follower.leads = True
            follower.wake()
        else:
            self._turns_free.notify_all()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:  # the first is the cause of the others
            self.failure = error

    def _answer(self) -> None:
        """After a failure: wake everyone whose epoch will not come by itself. Requires: the flush turn is free."""
        self.durable_waiters.wake_above(self._epochs.durable)
        self.applied_waiters.wake_above(self._epochs.applied if self.apply_failed else self._epochs.durable)
        self._turns_free.notify_all()

    # -- with the flush turn

    def lead(self, trigger: Trigger) -> None:
        """Flush what there is, once, and apply it. Gives the turn away; a failure is left in `failure`."""
        with self._lock:
            if self.failure is not None:
                self.end_turn()
                return
            assert self.has_writes()  # a turn is taken for writes that are in no batch, and only its holder takes them
            batch = self._take()
        begin_s = self._clock.monotonic_s()
        try:
            flushed = self._flusher.make_durable(batch, again=False)
        except BaseException as error:
            with self._lock:
                self._flushing = False
                self._kept = batch
                self.flush_failures += 1
                self._fail(error)
                self.end_turn()
            if isinstance(error, Exception):
                return
            raise
        with self._lock:
            self._flushing = False
            reached = self._publish_durable(batch, flushed, trigger, begin_s)
            applies = not self._applying and self.failure is None
            self._applying = self._applying or applies
            self.end_turn()  # the next fsync can begin while the others wake up
        for waiter in reached:
            waiter.wake()
        if applies:
            self.apply(batch.last)

    def _take(self) -> Batch[D]:
        self.seal()
        first, self._taken = Epoch(self._taken + 1), self._epochs.last
        self._flushing = True
        self.settle()
        return self._buffer.take(first, self._taken)

    def _publish_durable(self, batch: Batch[D], flushed: F, trigger: Trigger, begin_s: float) -> list[Waiter]:
        self.flushes[trigger] += 1
        self.flush_s_last = self._clock.monotonic_s() - begin_s
        self.flush_s_total += self.flush_s_last
        self._to_apply.append((batch, flushed))
        self._epochs.advance_durable(batch.last)  # before its waiters wake: they look at it
        return self.durable_waiters.take_reached(batch.last)

    # -- with the apply turn

    def apply(self, until: Epoch | None) -> None:
        """Apply what is durable, in order; with `until`, what comes after it is left to the background thread."""
        while True:
            try:
                batch = self._apply_next()
            except BaseException as error:
                with self._lock:
                    self._applying = False
                    self.apply_failures += 1
                    self.apply_failed = True
                    self._fail(error)
                    self.settle()
                    if not self.leading:
                        self._answer()
                    self._changed()
                if isinstance(error, Exception):
                    return
                raise
            with self._lock:
                if not self._to_apply:
                    self._applying = False
                    self._turns_free.notify_all()
                    return
                if until is not None and batch.last >= until and self.has_thread:
                    self.apply_left = True
                    self._changed()
                    return

    def _apply_next(self) -> Batch[D]:
        batch, flushed = self._to_apply[0]  # only who has the turn removes it
        view = self._flusher.apply(flushed)
        with self._lock:
            self._to_apply.popleft()
            self._buffer.retire(batch, view)  # before the watermark: a waiter that wakes must find its write
            self._epochs.advance_applied(batch.last)
            reached = self.applied_waiters.take_reached(batch.last)
            if self.failure is None:
                self._hand_on()  # to one whom too many unapplied batches kept from flushing
            self._changed()
        for waiter in reached:
            waiter.wake()
        return batch

    # -- after a failure

    def recover(self, timeout_s: float) -> None:
        """Write the kept batch again, apply what waits, and go on. Still FAILED if that fails."""
        with self._lock:
            if not self._turns_free.wait_for(lambda: not (self.leading or self._applying), timeout_s):
                raise WaitExpired(f"a flush or an apply did not end within {timeout_s} s: recover later")
            if self.failure is None:
                return
            self.leading = self._applying = True
        try:
            self._flusher.recover()
            if self._kept is not None:
                self._write_again(self._kept)
            while self._to_apply:
                self._apply_next()
        except BaseException as error:
            with self._lock:
                self.failure = error
                self.apply_failed = bool(self._to_apply)
                self._applying = False
                self.end_turn()
            if isinstance(error, Exception):
                raise Poisoned(f"recovery failed ({error}): remove the cause, then recover again") from error
            raise
        with self._lock:
            self.failure = None
            self.apply_failed = self._applying = False
            self.end_turn()

    def _write_again(self, kept: Batch[D]) -> None:
        begin_s = self._clock.monotonic_s()
        flushed = self._flusher.make_durable(kept, again=True)
        with self._lock:
            self._kept = None
            reached = self._publish_durable(kept, flushed, Trigger.RECOVERY, begin_s)
        for waiter in reached:
            waiter.wake()
