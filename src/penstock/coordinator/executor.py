"""Two turns, and who has them: the way of a write through the coordinator, told once.

    write_into     a write goes into the pending delta and gets its epoch; nothing else happens to it yet
    join           its writer waits: it takes the write turn if that is free, else it sleeps among the waiters
  the write turn: one thread at a time
    take           all that is pending becomes a batch; from here on a new delta takes the writes
    make_durable   the flusher encodes the batch, writes it and syncs it: one fsync for everybody in it
    harden         `durable` moves; those who wait for it are woken; the write turn goes to the next who wants it
  the apply turn: one thread at a time, batch by batch
    apply          the flusher applies the batch, and returns the view that holds it
    retire         the view and `applied` move in one step; those who wait for that are woken

The thread that flushed a batch also applies it, if the apply turn is free; otherwise whoever has that turn does, or one
who waits for that batch. So nobody hands work to another thread while there is a caller to do it, and a slow apply does
not hold back the next fsync. When many batches wait to be applied, flushes wait too: the next gets larger instead, and
readers never look through many layers. A batch that nobody waits for is the background thread's.

Groups. Sixteen threads that write one durable row after the other wake together, and the first to come back would sync
its row alone while fifteen wait for the next fsync. So, while those who were woken last came back within one flush
(their threads are known), the next group is expected to be as large: the first to come takes the turn but sleeps, the
last to come takes the turn from it and flushes for all. If somebody does not come, the first goes on after GATHER_S,
and the next group is expected to be as large as this one was. One thread alone never waits, nor do threads that do
something else between their writes.

Interrupts. Any line may raise: a Ctrl-C, a signal's handler, a failed allocation. So a turn belongs to a `Waiter`, is
taken by one assignment inside a `try`, and `leave(waiter)`, at the end of that `try`, gives back whatever that waiter
still has. What it was doing is in the layers: a batch that was taken and is not durable, or one that is durable and not
applied. Whoever gets the turn next goes on with that: the batch is written again after `flusher.recover()`, which finds
out what became of the first attempt. An interrupt is not a failure of the disk. A failure is: it stays in `failure`,
and nothing is tried again before `recover()`.

Thread: methods say whether they need the coordinator's lock; it is never held while the flusher works.
Invariants: (1) the order is: durable, its waiters; view, applied, its waiters. (2) a batch waits to be applied only
while someone has the apply turn, will look for it (`apply_left`), or the apply failed. (3) who sleeps in `waiters` is
woken by the end of a turn, and looks for itself now and then.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Generic

from penstock.coordinator.epochs import EpochTracker
from penstock.coordinator.layers import DeltaBuffer
from penstock.coordinator.protocols import Batch, D, F, Flusher, V
from penstock.coordinator.settings import State, Trigger
from penstock.coordinator.waiting import LOOK_AGAIN_S, Waiter, Waiters
from penstock.errors import Poisoned, WaitExpired
from penstock.host.clock import Clock
from penstock.host.threads import Mutex

logger = logging.getLogger(__name__)

UNAPPLIED_MAX = 16  # batches that are durable and not applied; more wait with their flush
_LEAVE_ATTEMPTS = 8  # a second and a third interrupt must not leave a turn taken
_POLL_S = 0.01
GATHER_S = 0.001  # the first of a group waits no longer for the others


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
        # All of these are guarded by _lock.
        self.failure: Exception | None = None
        self.apply_failed = False  # with a failure: views have stopped too
        self.has_thread = False  # whether an apply can be left to the background thread
        self.apply_left = False  # it was left
        self.leading: Waiter | None = None  # who has the write turn
        self.applying: Waiter | None = None  # who has the apply turn
        self.waiters = Waiters()
        self._gathering: Waiter | None = None  # who has the write turn and sleeps until its group is complete
        self._group = 0  # how many are expected to share the next flush
        self._woken: set[int] = set()  # threads of the last group
        self._returned = 0  # how many of them have come back since
        self._tried = epochs.none  # the last epoch of a batch that was given to the flusher
        self.flushes: Counter[Trigger] = Counter()
        self.flush_failures = 0
        self.apply_failures = 0
        self.flush_s_total = 0.0
        self.flush_s_last = 0.0

    # -- with the lock held

    @property
    def state(self) -> State:
        """What the facts say."""
        if self.failure is not None:
            return State.FAILED
        layers = self._buffer.layers
        if layers.taken > layers.durable:
            return State.FLUSHING
        return State.ACCUMULATING if self._epochs.last > layers.taken else State.IDLE

    def has_writes(self) -> bool:
        """Whether there are writes that nobody has in hand: in no batch, or in one that an interrupt left behind."""
        layers = self._buffer.layers
        return self._epochs.last > layers.taken or (self.leading is None and layers.taken > layers.durable)

    def seal(self) -> None:
        """Make the pending delta, if it has writes, a layer that does not change any more."""
        self._buffer.seal(self._epochs.last)

    def can_lead(self) -> bool:
        """Whether the write turn may be taken."""
        return self.leading is None and self.failure is None and len(self._buffer.layers.results) < UNAPPLIED_MAX

    def can_apply(self) -> bool:
        """Whether the apply turn may be taken, and there is something to do."""
        return self.applying is None and not self.apply_failed and len(self._buffer.layers.results) > 0

    def join(self, waiter: Waiter) -> float:
        """Take a turn that is free and leads to the waiter's epoch: 0.0. Or sleep among the others: how long."""
        if self.applying is waiter:
            return 0.0
        if not waiter.joined:
            waiter.joined = True
            self._returned += waiter.thread in self._woken
        if waiter.works and waiter.epoch > self._buffer.layers.durable:
            leading = self.leading
            if leading is None:
                if self.failure is None and len(self._buffer.layers.results) < UNAPPLIED_MAX:  # `can_lead`
                    if self._group <= 1:
                        self.leading = waiter
                        return 0.0
                    return self._lead_or_gather(waiter)
            elif leading is waiter or leading is self._gathering:
                return self._lead_or_gather(waiter)
        if waiter.works and waiter.applied and self.claim_apply(waiter):
            return 0.0
        self.waiters.add(waiter)
        return LOOK_AGAIN_S

    def _lead_or_gather(self, waiter: Waiter) -> float:
        """Take the write turn, from one who gathers too, if the group is complete. Or sleep until it is."""
        others = self.waiters.all
        others.pop(waiter, None)
        if len(others) + 1 >= self._group or (self.leading is waiter and waiter.gathered):
            self.leading, self._gathering = waiter, None
            return 0.0
        self.waiters.add(waiter)
        if self._gathering is not None and self._gathering is not waiter:
            return LOOK_AGAIN_S
        self.leading = self._gathering = waiter
        waiter.gathered = True
        return GATHER_S

    def has_turn(self, waiter: Waiter) -> bool:
        return self.leading is waiter or self.applying is waiter

    def claim_apply(self, waiter: Waiter) -> bool:
        """Take the apply turn if there is something to do."""
        if self.can_apply():
            self.applying = waiter
        return self.applying is waiter

    def _hand_on(self) -> None:
        """Give turns that are free to those who wait for what they bring; wake those whose epoch will not come."""
        layers, waiters = self._buffer.layers, self.waiters
        if self.failure is not None:
            waiters.wake_all()
        elif waiters.all and self.can_lead():
            follower = waiters.take_worker(layers.durable, applied=False)
            if follower is not None:
                self.leading = follower
                follower.wake()
        if layers.results and self.can_apply():
            follower = waiters.take_worker(layers.applied, applied=True)
            if follower is not None:
                self.applying = follower
                follower.wake()
            else:
                self.apply_left = True
        # A write that came meanwhile may be due, one that waits may fit, all may have to be refused, the thread may
        # have to apply. With the room open and nothing pending it is none of these.
        last, end = self._epochs.last, self._epochs.end
        if self._buffer.room < 0 or self.failure is not None or self.apply_left or last > layers.taken or last > end:
            self._changed()

    def _fail(self, error: Exception) -> None:
        if self.failure is None:  # the first is the cause of the others
            self.failure = error

    # -- without it

    def leave(self, waiter: Waiter) -> None:
        """Wait no more, and give back every turn that the waiter has, whatever interrupts this."""
        for _ in range(_LEAVE_ATTEMPTS):
            try:
                with self._lock:
                    self.waiters.discard(waiter)
                    if self.leading is waiter:
                        self.leading = None
                    if self.applying is waiter:
                        self.applying = None
                    if self._gathering is waiter:
                        self._gathering = None
                    self._hand_on()
                return
            except BaseException:
                logger.warning("giving back a turn was interrupted: it is done again", exc_info=True)

    def work(self, waiter: Waiter, trigger: Trigger) -> None:
        """Do what the waiter has a turn for. A failure is left in `failure`."""
        if self.leading is waiter:
            self._lead(waiter, trigger)
        if self.applying is waiter:
            self._apply(waiter)

    def _lead(self, waiter: Waiter, trigger: Trigger) -> None:
        """Flush what there is, once; who flushed it also applies it, if nobody else applies."""
        with self._lock:
            assert self.leading is waiter is not self._gathering, "the write turn is taken only from one who sleeps"
            batch = self._next_batch() if self.failure is None else None
            if batch is None:
                self.leading = None
                self._hand_on()
                return
            again = batch.last <= self._tried
            self._tried = batch.last  # before the flusher sees it
        begin_s = self._clock.monotonic_s()
        try:
            if again:
                self._flusher.recover()
            result = self._flusher.make_durable(batch, again=again)
        except Exception as error:
            with self._lock:
                self.flush_failures += 1
                self._fail(error)
                self.leading = None
                self._hand_on()
            return
        with self._lock:
            self._harden(result, trigger, begin_s)
            reached = self._take_reached(waiter, applied=False) if self.waiters.all or not waiter.applied else []
            if self.applying is None and not self.apply_failed:
                self.applying = waiter
            self.leading = None
            self._hand_on()  # the next fsync can begin while the others wake up
        for other in reached:
            other.wake()

    def _take_reached(self, waiter: Waiter | None, *, applied: bool) -> list[Waiter]:
        """Take out those whose epoch came, for the caller to wake them. Requires: _lock.

        They, and `waiter` if that is all it waited for, are a group: whether the last one came back says how many are
        expected next.
        """
        layers, waiters = self._buffer.layers, self.waiters
        reached = waiters.take_reached(layers.durable, layers.applied) if waiters.all else []
        group = [*reached, waiter] if waiter is not None and waiter.applied is applied else reached
        if group:
            came_back = self._returned >= len(self._woken) > 0
            next_leader = self.leading not in (None, waiter) and self.leading not in waiters.all
            self._group = len(group) + len(waiters.all) + next_leader if came_back else self._returned
            self._woken = {waiter.thread for waiter in group} if reached else {group[0].thread}
            self._returned = 0
        return reached

    def _next_batch(self) -> Batch[D] | None:
        """One that was taken and is not durable, or all that is in none. Requires: _lock."""
        layers = self._buffer.layers
        if layers.taken > layers.durable:
            return layers.batches[len(layers.results)]
        return self._buffer.take(self._epochs.last) if self._epochs.last > layers.taken else None

    def _harden(self, result: F, trigger: Trigger, begin_s: float) -> None:
        self._buffer.layers = self._buffer.layers.harden(result)
        self.flushes[trigger] += 1
        self.flush_s_last = self._clock.monotonic_s() - begin_s
        self.flush_s_total += self.flush_s_last

    def _apply(self, waiter: Waiter) -> None:
        """Apply up to the waiter's epoch; what is left then goes to someone who waits for it, or to the thread."""
        while self.applying is waiter:
            try:
                view = self._apply_next()
            except Exception as error:
                with self._lock:
                    self.apply_failures += 1
                    self.apply_failed = True
                    self._fail(error)
                    self.applying = None
                    self._hand_on()
                return
            self._publish(view, waiter)

    def _apply_next(self) -> V:
        return self._flusher.apply(self._buffer.layers.results[0])

    def _publish(self, view: V, waiter: Waiter | None) -> None:
        """Replace the oldest durable batch by the view with it, and let the waiter go if it has done its part."""
        with self._lock:
            # The view with the watermark, in one step: a waiter that wakes must find its write.
            self._buffer.layers = layers = self._buffer.layers.retire(view)
            reached = self._take_reached(waiter, applied=True)
            if waiter is not None and (not layers.results or (layers.applied >= waiter.epoch and self.has_thread)):
                self.applying = None
            self._hand_on()  # also to one whom too many unapplied batches kept from flushing
        for other in reached:
            other.wake()

    # -- after a failure

    def recover(self, timeout_s: float) -> None:
        """Write the batch of unknown outcome again, apply what waits, and go on. Still FAILED if that fails."""
        waiter = Waiter(self._epochs.last, applied=True)
        try:
            if self._take_both_turns(waiter, timeout_s):
                self._recover()
        finally:
            self.leave(waiter)

    def _take_both_turns(self, waiter: Waiter, timeout_s: float) -> bool:
        """False if nothing failed."""
        waiter.prepare()
        while True:
            with self._lock:
                if self.leading is None and self.applying is None:
                    if self.failure is not None:
                        self.leading = self.applying = waiter
                    return self.failure is not None
            if timeout_s <= 0:
                raise WaitExpired("a flush or an apply did not end in time: recover later")
            waiter.wait(min(timeout_s, _POLL_S))
            timeout_s -= _POLL_S

    def _recover(self) -> None:
        try:
            self._flusher.recover()
            layers = self._buffer.layers
            if layers.taken > layers.durable:
                batch = layers.batches[len(layers.results)]
                begin_s = self._clock.monotonic_s()
                result = self._flusher.make_durable(batch, again=True)
                with self._lock:
                    self._harden(result, Trigger.RECOVERY, begin_s)
            while self._buffer.layers.results:
                self._publish(self._apply_next(), None)
        except Exception as error:
            with self._lock:
                self.failure = error
                self.apply_failed = len(self._buffer.layers.results) > 0
            raise Poisoned(f"recovery failed ({error}): remove the cause, then recover again") from error
        with self._lock:
            self.failure = None
            self.apply_failed = False
