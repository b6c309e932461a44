"""The write turn and the apply turn: the path of a write through the coordinator, told once.

    write_into     a write enters the pending delta and gets its epoch; nothing else happens yet
    join           its writer waits: it takes the write turn if that is free, else it sleeps among the waiters
  the write turn: one thread at a time
    take           all pending writes become a batch; a new delta takes the writes from here on
    make_durable   the flusher encodes the batch, writes it and syncs it: one fsync for all its writers
    mark_durable   `durable` advances; its waiters are woken; the write turn passes to the next thread that wants it
  the apply turn: one thread at a time, batch by batch
    apply          the flusher applies the batch, and returns the view that holds it
    retire         the view and `applied` advance in one step; their waiters are woken

The thread that flushed a batch also applies it if the apply turn is free; otherwise the thread that has that turn does,
or a waiter of that batch. So no work moves to another thread while a caller can do it, and a slow apply does not delay
the next fsync. When many batches wait to be applied, flushes wait too: the next batch gets larger instead, and readers
never read through many layers. The background thread takes batches without a waiter.

Groups. Sixteen threads that each write durable rows in a loop wake together, and the first to return would sync its row
alone while fifteen wait for the next fsync. So, if the threads woken last (their ids are recorded) all returned within
one flush, and soon, the next group is expected to be as large: the first to arrive takes the turn but sleeps, the last
to arrive takes the turn from it and flushes for all. If one does not arrive, the first proceeds after GATHER_S for each
that is expected, and the next group is expected to be as large as this one was. A single thread never waits, nor do
threads that do other work between their writes: they do not return within the time that `_note_woken` sets. Where the
background thread flushes for all (a client's), it waits in the same way, GATHER_S_MAX after each that arrives.

Interrupts. Any line may raise: a Ctrl-C, a signal handler, a failed allocation. So a turn belongs to a `Waiter`, is
taken by one assignment inside a `try`, and `leave(waiter)`, at the end of that `try`, returns every turn the waiter
still has. Its unfinished work is in the layers: a batch that is taken but not durable, or durable but not applied. The
next thread to get the turn continues with that: it writes the batch again after `flusher.recover()`, which finds out
what became of the first attempt. An interrupt is not a failure. A disk error is: it stays in `failure`, and nothing is
retried before `recover()`.

Thread: methods say whether they need the coordinator's lock; it is never held while the flusher works.
Invariants: (1) the order is: durable, its waiters; view, applied, its waiters. (2) a batch waits to be applied only
while a thread has the apply turn, the background thread will take it (`apply_left`), or the apply failed. (3) a thread
that sleeps in `waiters` is woken at the end of a turn, and checks for itself every RECHECK_S.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Generic

from penstock.coordinator.layers import FAIR_FLUSHES, DeltaBuffer
from penstock.coordinator.protocols import Batch, D, EpochTracker, F, Flusher, V
from penstock.coordinator.settings import State, Trigger
from penstock.coordinator.waiting import RECHECK_S, Waiter, Waiters
from penstock.errors import Closed, Poisoned, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.threads import Mutex

logger = logging.getLogger(__name__)

UNAPPLIED_MAX = 16  # batches that are durable and not applied; at the limit, flushes wait
_LEAVE_ATTEMPTS = 8  # repeated interrupts must not leave a turn taken
_POLL_S = 0.01
GATHER_S = 62.5e-6  # for each thread of a group: how long the first waits for the others; more than a put takes
GATHER_S_MAX = 0.001
RETURN_S = 0.001  # a thread that returns later than this was not about to write again


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
        self.apply_left = False  # an apply was left to it
        self.leading: Waiter | None = None  # has the write turn
        self.applying: Waiter | None = None  # has the apply turn
        self.waiters = Waiters()
        self._gathering: Waiter | None = None  # has the write turn and sleeps until its group is complete
        self._group = 0  # number of threads expected to share the next flush
        self._woken: set[int] = set()  # threads of the last group
        self._returned = 0  # number of them that have returned since, in time
        self._return_until_s = 0.0  # later than this a thread of the group did something else
        self._tried = epochs.none  # the last epoch of a batch passed to the flusher
        self.flushes: Counter[Trigger] = Counter()
        self.flush_failures = 0
        self.apply_failures = 0
        self.flush_s_total = 0.0
        self.flush_s_last = self.flushed_s = 0.0  # how long the last took, and when it ended

    # -- with the lock held

    @property
    def state(self) -> State:
        """The state, derived from the failure and the watermarks."""
        if self.failure is not None:
            return State.FAILED
        layers = self._buffer.layers
        if layers.taken > layers.durable:
            return State.FLUSHING
        return State.ACCUMULATING if self._epochs.last > layers.taken else State.IDLE

    @property
    def _applying(self) -> Waiter | None:
        return self.applying  # its earlier name, in scripts

    def has_writes(self) -> bool:
        """Whether some writes are not being flushed: in no batch, or in a batch that an interrupt left unfinished."""
        layers = self._buffer.layers
        return self._epochs.last > layers.taken or (self.leading is None and layers.taken > layers.durable)

    def seal(self) -> None:
        """Make the pending delta, if it has writes, an immutable layer."""
        self._buffer.seal(self._epochs.last)

    def can_lead(self) -> bool:
        """Whether the write turn can be taken."""
        return self.leading is None and self.failure is None and len(self._buffer.layers.results) < UNAPPLIED_MAX

    def can_apply(self) -> bool:
        """Whether the apply turn can be taken and a batch waits for it."""
        return self.applying is None and not self.apply_failed and len(self._buffer.layers.results) > 0

    def join(self, waiter: Waiter) -> float:
        """Take a free turn that leads to the waiter's epoch and return 0.0, or return how long to sleep."""
        if self.applying is waiter:
            return 0.0
        if not waiter.joined:
            waiter.joined = True
            if waiter.thread in self._woken and self._clock.monotonic_s() <= self._return_until_s:
                self._returned += 1
        if waiter.works and waiter.epoch > self._buffer.layers.durable:
            if self.has_thread:  # without one nobody would flush for a writer that finds no room
                self._buffer.fair_flushes = FAIR_FLUSHES
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
        return RECHECK_S

    def _lead_or_gather(self, waiter: Waiter) -> float:
        """Take the write turn, even from a gathering waiter, if the group is complete; else return a time to sleep."""
        others = self.waiters.all
        others.pop(waiter, None)
        if len(others) + 1 >= self._group or (self.leading is waiter and waiter.gathered):
            self.leading, self._gathering = waiter, None
            return 0.0
        self.waiters.add(waiter)
        if self._gathering is not None and self._gathering is not waiter:
            return RECHECK_S
        self.leading = self._gathering = waiter
        waiter.gathered = True
        return min(self._group * GATHER_S, GATHER_S_MAX)

    def lacks_group(self) -> bool:
        """Whether threads are expected that are not here yet, so that one flush could serve all."""
        return len(self.waiters.all) < self._group

    def has_turn(self, waiter: Waiter) -> bool:
        return self.leading is waiter or self.applying is waiter

    def claim_apply(self, waiter: Waiter) -> bool:
        """Take the apply turn if a batch waits for it; return whether the waiter has it."""
        if self.can_apply():
            self.applying = waiter
        return self.applying is waiter

    def _pass_turns(self) -> None:
        """Pass free turns to waiters that need them; after a failure wake all waiters. Requires: _lock."""
        layers, waiters = self._buffer.layers, self.waiters
        if self.failure is not None:
            waiters.wake_all()
        elif waiters.all and self.can_lead():
            follower = waiters.take_worker(layers.durable, applied=False)
            if follower is not None:
                self.leading = follower
                follower.wake()
        if layers.results and self.applying is None and self.can_apply():
            follower = waiters.take_worker(layers.applied, applied=True)
            if follower is not None:
                self.applying = follower
                follower.wake()
            else:
                self.apply_left = True
        # A new write may be due, a waiting write may fit, all writes may have to be refused, or the background thread
        # may have to apply. With the room open and nothing pending none of these holds.
        last, end = self._epochs.last, self._epochs.end
        if self._buffer.room < 0 or self.failure is not None or self.apply_left or last > layers.taken or last > end:
            self._changed()

    def _fail(self, error: Exception) -> None:
        if self.failure is None:  # the first failure causes the others
            self.failure = error

    def _fail_apply(self, error: Exception) -> None:
        self.apply_failures += 1
        self.apply_failed = True
        self._fail(error)
        self.applying = None
        self._pass_turns()

    # -- without the lock

    def leave(self, waiter: Waiter) -> None:
        """Remove the waiter and return every turn it has, even if interrupted."""
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
                    self._pass_turns()
                return
            except BaseException:
                logger.warning("returning a turn was interrupted: trying again", exc_info=True)

    def work(self, waiter: Waiter, trigger: Trigger) -> None:
        """Do the work of the turns that the waiter has. An error is stored in `failure`."""
        if self.leading is waiter:
            self.lead(waiter, trigger)
        if self.applying is waiter:
            self.apply(waiter)

    def lead(self, waiter: Waiter, trigger: Trigger) -> None:
        """Flush one batch, and take the apply turn for it if that is free."""
        with self._lock:
            if self.leading is not waiter or self._gathering is waiter:
                return  # it gathers, and was woken to apply: another thread may take the write turn from it
            batch = self._next_batch() if self.failure is None else None
            if batch is None:
                self.leading = None
                self._pass_turns()
                return
            again = batch.last <= self._tried
            self._tried = batch.last  # before the flusher gets the batch
        begin_s = self._clock.monotonic_s()
        try:
            if again:
                self._flusher.recover()
            result = self._flusher.make_durable(batch, again=again)
        except Exception as error:
            threads.raise_interrupt(error)
            with self._lock:
                self.flush_failures += 1
                self._fail(error)
                self.leading = None
                self._pass_turns()
            return
        with self._lock:
            self._mark_durable(result, trigger, begin_s)
            reached = self._take_reached(waiter, applied=False) if self.waiters.all or not waiter.applied else []
            if self.applying is None and not self.apply_failed:
                self.applying = waiter
            self.leading = None
            buffer, last = self._buffer, self._epochs.last
            idle = last == buffer.layers.taken and buffer.room >= 0 and last <= self._epochs.end
            if not idle or self.waiters.all or self.applying is None or self.failure is not None or self.apply_left:
                self._pass_turns()  # the next fsync can begin while the waiters wake up
        if reached:
            reached[0].wake()

    def _take_reached(self, waiter: Waiter | None, *, applied: bool) -> list[Waiter]:
        """Remove and return the waiters whose epoch is reached; the caller wakes the first. Requires: _lock.

        They, and `waiter` if its wait is over too, form a group. Whether the last group returned in full decides how
        many are expected next.
        """
        layers, waiters = self._buffer.layers, self.waiters
        reached = waiters.take_reached(layers.durable, layers.applied) if waiters.all else []
        ends = waiter is not None and waiter.joined and waiter.applied is applied  # the background thread never joins
        group = [*reached, waiter] if waiter is not None and ends else reached
        if group:
            all_returned = self._returned >= len(self._woken) > 0
            next_leader = self.leading not in (None, waiter) and self.leading not in waiters.all
            self._group = len(group) + len(waiters.all) + next_leader if all_returned else self._returned
            self._woken = {waiter.thread for waiter in group} if reached else {group[0].thread}
            self._note_woken()
        return reached

    def _note_woken(self) -> None:
        """Begin to count the threads of the last group that return in time. Requires: _lock.

        Without a time, threads that write every few milliseconds would count as a group after any slow fsync, and wait
        for each other.
        """
        self._returned = 0
        self._return_until_s = self._clock.monotonic_s() + RETURN_S + 2 * GATHER_S * len(self._woken)

    def _next_batch(self) -> Batch[D] | None:
        """Return the batch that is taken and not durable, or a new one of all pending writes. Requires: _lock."""
        layers = self._buffer.layers
        if layers.taken > layers.durable:
            return layers.batches[len(layers.results)]
        return self._buffer.take(self._epochs.last) if self._epochs.last > layers.taken else None

    def _mark_durable(self, result: F, trigger: Trigger, begin_s: float) -> None:
        self._buffer.layers = self._buffer.layers.mark_durable(result)
        self.flushes[trigger] += 1
        self.flushed_s = self._clock.monotonic_s()
        self.flush_s_last = self.flushed_s - begin_s
        self.flush_s_total += self.flush_s_last

    def apply(self, waiter: Waiter) -> None:
        """Apply up to the waiter's epoch; leave the rest to its waiters or to the background thread."""
        while self.applying is waiter:
            try:
                view = self._apply_next()
            except Exception as error:
                threads.raise_interrupt(error)
                with self._lock:
                    self._fail_apply(error)
                return
            self._publish(view, waiter)

    def _apply_next(self) -> V:
        return self._flusher.apply(self._buffer.layers.results[0])

    def _publish(self, view: V, waiter: Waiter | None) -> None:
        """Replace the oldest durable batch by the view that holds it; free the apply turn if the waiter is done."""
        with self._lock:
            # View and watermark in one step: a waiter that wakes must find its write.
            self._buffer.layers = layers = self._buffer.layers.retire(view)
            last, end = self._epochs.last, self._epochs.end
            idle = last == layers.taken and not layers.results and self._buffer.room >= 0 and last <= end
            if idle and self.leading is None and not self.waiters.all and waiter is not None and waiter.applied:
                alone = self._group == 1 == len(self._woken) and waiter.thread in self._woken
                if alone and self.failure is None and not self.apply_left:  # the rest would change nothing else
                    self._note_woken()
                    self.applying = None
                    return
            reached = self._take_reached(waiter, applied=True)
            if waiter is not None and (not layers.results or (layers.applied >= waiter.epoch and self.has_thread)):
                self.applying = None
            self._pass_turns()  # also to a waiter that too many unapplied batches kept from flushing
        if reached:
            reached[0].wake()

    # -- after a failure

    def recover(self, timeout_s: float) -> None:
        """Write the batch of unknown outcome again, apply all durable batches, and resume; FAILED again on error."""
        waiter = Waiter(self._epochs.last, applied=True)
        try:
            if self._take_both_turns(waiter, timeout_s):
                self._recover()
            self.leave(waiter)
        except BaseException:
            self.leave(waiter)  # also after a `leave` that was interrupted before it began
            raise

    def _take_both_turns(self, waiter: Waiter, timeout_s: float) -> bool:
        """Take both turns; return False, without them, if nothing failed."""
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
                    self._mark_durable(result, Trigger.RECOVERY, begin_s)
            while self._buffer.layers.results:
                self._publish(self._apply_next(), None)
        except Exception as error:
            threads.raise_interrupt(error)
            with self._lock:
                self.failure = error
                self.apply_failed = len(self._buffer.layers.results) > 0
            if isinstance(error, Closed):
                raise
            raise Poisoned(f"recovery failed ({error}): remove the cause, then recover again") from error
        with self._lock:
            self.failure = None
            self.apply_failed = False
