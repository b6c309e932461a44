"""The coordinator: accepts writes, numbers them with epochs, and wakes the threads that wait for those epochs.

A write is an insert into the pending delta under one lock. A caller of `flush` does the flush itself unless another
thread is flushing; a background thread flushes writes without a waiter, by timer and by size, and runs applies that
would delay a caller. `FlushExecutor` runs the flushes and applies.

Thread: every method may be called from any thread, but not from the flusher. One lock guards everything; it is never
held while the flusher works or a thread sleeps.
Invariants: (1) a write that raised changed nothing. (2) an epoch is reported durable only after `make_durable`
returned, and applied only after the view holds it. (3) every wait ends: reached, expired, failed or closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from penstock.coordinator.background import Background
from penstock.coordinator.executor import FlushExecutor
from penstock.coordinator.layers import DeltaBuffer, Layers, Subscription
from penstock.coordinator.protocols import Acknowledgement, D, Epoch, EpochTracker, F, Flusher, V, new_tuple
from penstock.coordinator.settings import CoordinatorSettings, CoordinatorStatistics, State, Trigger
from penstock.coordinator.waiting import RECHECK_S, Admission, Waiter, WaitingWrite
from penstock.errors import Closed, DiskFull, Invalid, OutcomeUnknown, PenstockError, Poisoned, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.host.file_errors import ran_out_of_space

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

WRITE_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 30.0


class WriteCoordinator(Generic[D, F, V]):
    """Group commit for any kind of delta."""

    def __init__(
        self,
        flusher: Flusher[D, F, V],
        make_delta: Callable[[], D],
        *,
        view: V,
        incarnation: int,
        clock: Clock | None = None,
        settings: CoordinatorSettings | None = None,
    ) -> None:
        self._settings = settings or CoordinatorSettings()
        self._clock = clock or SystemClock()
        self._durability = flusher.durability
        self._lock = threads.lock("coordinator")
        self._taking_lock = iter(self._lock.acquire, None)  # each step of the iterator acquires the lock
        self._epochs = EpochTracker(incarnation)
        self._buffer: DeltaBuffer[D, V] = DeltaBuffer(
            make_delta,
            view,
            self._epochs.none,
            flush_bytes=self._settings.flush_bytes,
            bytes_max=self._settings.bytes_max,
        )
        self._executor = FlushExecutor(
            flusher, self._buffer, self._epochs, clock=self._clock, lock=self._lock, changed=self._on_change
        )
        self._admission = Admission(self._buffer, settings=self._settings)
        self._background = Background(
            self._executor,
            self._buffer,
            self._epochs,
            clock=self._clock,
            lock=self._lock,
            interval_s=self._settings.flush_interval_s,
        )
        self._closing = False  # guarded by _lock: no more writes
        self._closed = False  # guarded by _lock: no more flushes
        self._thread: threading.Thread | None = None  # guarded by _lock
        self._forget_exit: Callable[[], None] | None = None  # guarded by _lock

    def start(self) -> Self:
        """Start the background thread, and flush at the interpreter's exit. Without it only callers flush."""
        with self._lock:
            if self._thread is None and not self._closing:
                self._thread = threads.spawn(self._background.run, name="penstock-coordinator")
                self._executor.has_thread = True
                self._forget_exit = threads.at_exit(self, WriteCoordinator.shutdown)
        return self

    # -- writes

    def write_into(  # noqa: PLR0917 - keywords cost as much
        self,
        insert: Callable[[D, A, B, C], object],
        size: int,
        a: A,
        b: B,
        c: C,
        timeout_s: float = WRITE_TIMEOUT_S,
    ) -> Epoch:
        """Call `insert(pending, a, b, c)` under the lock: the cheapest write. On return it is in memory, not durable.

        `insert` must be quick and change nothing if it raises (its epoch then stays unused); `size` is at least 0.
        It takes exactly three arguments because forwarding `*args` costs a third of the whole write.
        """
        buffer = self._buffer
        # `with` would cost a third of the whole write. This costs half of that and is as safe: there is no moment at
        # which an interrupt could leave the lock acquired.
        for _ in self._taking_lock:
            try:
                room = buffer.room - size
                if room >= 0:
                    # The epoch first: an interrupt may leave an epoch without a write, never a write without an epoch.
                    epochs = self._epochs
                    epochs.last = epoch = epochs.last + 1  # type: ignore[assignment]  # Epoch() is a slow call
                    buffer.room = room
                    insert(buffer.layers[0], a, b, c)  # `pending`: by its name would be a call
                    return epoch  # type: ignore[return-value]
                break
            finally:
                self._lock.release()
        return self._write_slow_path(insert, size, a, b, c, timeout_s)

    def write(self, delta: D, size_hint: int | None = None, timeout_s: float = WRITE_TIMEOUT_S) -> Epoch:
        """Merge `delta` into the pending delta. `Backpressure` if there is no room in time: nothing was merged."""
        if delta.is_empty():
            return self._epochs.last
        size = delta.size_estimate() if size_hint is None else size_hint
        if size < 0:
            raise Invalid(f"a write of {size} bytes: give 0 or more")
        return self.write_into(_merge, size, delta, None, None, timeout_s)

    def try_write(self, delta: D, size_hint: int | None = None) -> Epoch:
        """Like `write`, but raise `Backpressure` instead of waiting."""
        return self.write(delta, size_hint, 0.0)

    def write_durable(
        self, delta: D, size_hint: int | None = None, timeout_s: float = FLUSH_TIMEOUT_S
    ) -> Acknowledgement:
        """Write, and wait until the write is durable."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        epoch = self.write(delta, size_hint, timeout_s)
        return self.flush(epoch, deadline_s - self._clock.monotonic_s())

    def _write_slow_path(  # noqa: PLR0917
        self, insert: Callable[[D, A, B, C], object], size: int, a: A, b: B, c: C, timeout_s: float
    ) -> Epoch:
        if size > self._settings.bytes_max:
            raise Invalid(
                f"a write of {size:,} bytes, and at most {self._settings.bytes_max:,} fit: "
                f"{self._settings.bytes_max_remedy}"
            )
        deadline_s, left_s = self._clock.monotonic_s() + timeout_s, timeout_s
        waiting: WaitingWrite | None = None
        try:
            while True:
                with self._lock:
                    self._refuse_writes()
                    self._admission.check_size(size)
                    # One that cannot wait, as a conditional write, would find no room beside a writer that never waits.
                    urgent = timeout_s <= 0 and self._buffer.fits(size, fair=False)
                    if urgent or self._admission.may_pass(size, waiting):
                        if waiting is not None:
                            self._admission.leave(waiting)
                        return self._insert(insert, size, a, b, c)
                    if left_s <= 0:
                        raise self._admission.backpressure(f"no room came within {timeout_s} s")
                    if waiting is None:
                        waiting = WaitingWrite(self._epochs.none, applied=False, size=size)
                        self._admission.join(waiting)
                    self._on_change()
                left_s = self._sleep(waiting, deadline_s, left_s)
        except BaseException:
            if waiting is not None:
                with self._lock:
                    self._admission.leave(waiting)
                    self._on_change()
            raise

    def _insert(self, insert: Callable[[D, A, B, C], object], size: int, a: A, b: B, c: C) -> Epoch:
        begins = not self._executor.has_writes()
        self._epochs.last = epoch = Epoch(self._epochs.last + 1)  # first: see `write_into`
        self._buffer.charge(size)
        if begins and not self._background.awake:
            self._background.start_timer()
        insert(self._buffer.layers.pending, a, b, c)
        self._on_change()
        return epoch

    def _refuse_writes(self) -> None:
        failure = self._executor.failure
        if ran_out_of_space(failure):
            raise DiskFull(f"writes wait for space on the disk ({failure}): free some, then retry") from failure
        if isinstance(failure, Closed):  # for good: no recovery brings the store's folder, or its owner, back
            raise Closed(str(failure)) from failure
        if failure is not None:
            raise Poisoned(f"writes are refused after a failure ({failure}): call recover()") from failure
        if self._closing:
            raise Closed("the coordinator was shut down: open the store again")
        if self._epochs.exhausted:
            raise Poisoned("the epochs of this incarnation are used up: flush, then open the store again")

    @property
    def write_bytes_max(self) -> int:
        """The largest write; less on a nearly full disk."""
        return min(self._settings.bytes_max, self._buffer.bytes_max)

    # -- waiting

    def flush(self, epoch: int | None = None, timeout_s: float = FLUSH_TIMEOUT_S) -> Acknowledgement:
        """Wait until `epoch` (None: every write so far) is durable. One call covers all writes before it.

        If the write turn is free, the caller flushes on its own thread and returns when that ends, even after
        `timeout_s`. With 0 it never does: it asks the background thread, and `WaitExpired` means "not durable yet".
        """
        epochs = self._epochs
        if epoch is None or not epochs.none < epoch <= self._buffer.layers.durable:
            target = epochs.last if epoch is None else epochs.check(epoch)
            self._await(Waiter(target, applied=False), timeout_s)
        return new_tuple(Acknowledgement, (self._buffer.layers.durable, self._durability))

    def wait_applied(self, epoch: int | None = None, timeout_s: float = FLUSH_TIMEOUT_S) -> Acknowledgement:
        """Wait until the view holds `epoch` (None: every write so far), so that all readers see it.

        The epoch is durable by then. The caller flushes and applies unless another thread does.
        """
        epochs = self._epochs
        if epoch is None or not epochs.none < epoch <= self._buffer.layers.applied:
            last = epochs.last
            target = last if epoch is None or epoch == last else epochs.check(epoch)
            self._await(Waiter(target, applied=True), timeout_s)
        return new_tuple(Acknowledgement, (self._buffer.layers.durable, self._durability))

    def wait_flushed(self, epoch: int, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Like `wait_applied`, but the background thread does the work, so that this call can end at any time."""
        target = self._epochs.check(epoch)
        if target > self._buffer.layers.applied:
            self._await(Waiter(target, applied=True, works=False, asks=True), timeout_s)

    def _wait_view(self, target: Epoch, timeout_s: float) -> None:
        """Wait for a view that holds `target`, which may be an epoch not yet assigned."""
        self._await(Waiter(target, applied=True, works=False), timeout_s)

    def _await(self, waiter: Waiter, timeout_s: float) -> None:
        """Work or sleep until the waiter's epoch is reached; `WaitExpired` if time runs out first."""
        executor, buffer = self._executor, self._buffer
        deadline_s, left_s = self._clock.monotonic_s() + timeout_s, timeout_s
        try:
            while True:
                with self._lock:
                    layers = buffer.layers
                    if waiter.epoch <= (layers.applied if waiter.applied else layers.durable):
                        executor.waiters.all.pop(waiter, None)
                        break
                    if executor.failure is not None or self._closed:
                        self._refuse_waiting(waiter)
                    if left_s <= 0 and not executor.has_turn(waiter):
                        self._background.ask()
                        self._on_change()
                        raise WaitExpired(f"epoch {waiter.epoch} was not reached within {timeout_s} s: wait again")
                    sleep_s = executor.join(waiter)
                    if waiter.asks:
                        waiter.asks = False
                        self._background.ask()
                        self._on_change()
                if sleep_s:
                    left_s = self._sleep(waiter, deadline_s, left_s, sleep_s)
                    if waiter.reached:
                        return  # without checking again: sixteen threads that wake together would queue for the lock
                else:  # as `executor.work`, one call shorter
                    if executor.leading is waiter:
                        executor.lead(waiter, Trigger.EXPLICIT)
                    if executor.applying is waiter:
                        executor.apply(waiter)
            if executor.leading is waiter or executor.applying is waiter:
                executor.leave(waiter)  # another thread reached its epoch
        except BaseException:
            executor.leave(waiter)
            raise
        finally:
            if waiter.next is not None:
                waiter.next.wake()

    def _sleep(self, waiter: Waiter, deadline_s: float, left_s: float, sleep_s: float = RECHECK_S) -> float:
        """Sleep until woken, for at most `sleep_s`; return the time left."""
        slice_s = sleep_s if sleep_s < left_s else left_s
        if waiter.wait(slice_s):
            if waiter.reached:
                return left_s  # not used by the caller
            return deadline_s - self._clock.monotonic_s()
        return left_s - slice_s

    def _refuse_waiting(self, waiter: Waiter) -> None:
        """Raise if the waiter's epoch can no longer be reached. Requires: _lock, and that it is not reached."""
        failure, durable = self._executor.failure, waiter.epoch <= self._buffer.layers.durable
        if failure is not None and not durable:
            raise self._outcome_unknown(failure) from failure
        if failure is not None and self._executor.apply_failed:
            reason = f"epoch {waiter.epoch} is durable, but its apply failed ({failure}): call recover()"
            raise Poisoned(reason) from failure
        if self._closed:
            raise Closed(f"the coordinator was shut down before it reached epoch {waiter.epoch}: open the store again")

    def _outcome_unknown(self, reason: object) -> OutcomeUnknown:
        first, last = self._buffer.layers.durable + 1, self._epochs.last
        remedy = f"({reason}): call recover(), or check after a restart"
        if isinstance(reason, Closed):
            remedy = f"because {reason}"
        return OutcomeUnknown(f"epochs {first} to {last} may be durable or not {remedy}", first=first, last=last)

    # -- reading

    @property
    def layers(self) -> Layers[D, V]:
        """Every write, in one reference (see `views` for how to read it)."""
        return self._buffer.layers

    @property
    def buffer(self) -> DeltaBuffer[D, V]:
        """The owner of `layers`, for a reader that keeps it and saves a call at each read."""
        return self._buffer

    def seal_pending(self) -> Layers[D, V]:
        """Seal `pending` and return the layers: `deltas` and `view` hold every write and do not change."""
        with self._lock:
            self._executor.seal()
            self._buffer.fold()
            return self._buffer.layers

    def subscribe(self, after: Epoch | None = None) -> Subscription[V]:
        """Return a subscription to the views, newer than `after` (None: than the current one)."""
        return Subscription(self._read_view, self._wait_view, after)

    def _read_view(self) -> tuple[V, Epoch]:
        layers = self._buffer.layers
        return layers.view, layers.applied

    @property
    def state(self) -> State:
        return self._executor.state

    @property
    def last(self) -> Epoch:
        """The last epoch assigned."""
        return self._epochs.last

    @property
    def durable(self) -> Epoch:
        """All epochs up to this one are durable."""
        return self._buffer.layers.durable

    @property
    def applied(self) -> Epoch:
        """All epochs up to this one are in the view."""
        return self._buffer.layers.applied

    def statistics(self) -> CoordinatorStatistics:
        """Return the current statistics."""
        executor, buffer = self._executor, self._buffer
        with self._lock:
            return CoordinatorStatistics(
                state=executor.state,
                error=None if executor.failure is None else repr(executor.failure),
                last=self._epochs.last,
                durable=buffer.layers.durable,
                applied=buffer.layers.applied,
                writes=self._epochs.count,
                written_bytes=buffer.taken_bytes + buffer.pending_bytes,
                pending_bytes=buffer.pending_bytes,
                in_flight_bytes=buffer.in_flight_bytes,
                layers=len(buffer.layers.deltas),
                waiters=len(executor.waiters),
                waiting_writes=len(self._admission),
                refused_writes=self._admission.refused,
                waited_writes=self._admission.waited,
                flushes=dict(executor.flushes),
                flush_failures=executor.flush_failures,
                apply_failures=executor.apply_failures,
                flush_s_total=executor.flush_s_total,
                flush_s_last=executor.flush_s_last,
            )

    @property
    def failure(self) -> Exception | None:
        """Why writes are refused until `recover`."""
        return self._executor.failure

    def limit_bytes(self, bytes_max: int | None) -> None:
        """Let at most `bytes_max` bytes wait to be applied; None restores the limit of the settings."""
        with self._lock:
            limit = self._settings.bytes_max
            self._buffer.bytes_max = limit if bytes_max is None else min(limit, bytes_max)
            self._on_change()

    def hold(self, reason: str | None) -> None:
        """Block writes for `reason` until called with None; a write that waits too long raises `Backpressure`."""
        with self._lock:
            self._buffer.hold_reason = reason
            self._on_change()

    # -- background work

    def run_pending(self) -> int:
        """Do the background thread's due work on this thread; return the number of steps. For tests and tools."""
        steps, worker = 0, Waiter(self._epochs.none, applied=False)
        try:
            while True:
                with self._lock:
                    trigger = self._background.claim(worker)
                if trigger is None:
                    return steps
                self._executor.work(worker, trigger)
                steps += 1
        except BaseException:
            self._executor.leave(worker)
            raise

    def _on_change(self) -> None:
        """After any change: admit or block writes, and wake the threads that have work. Requires: _lock."""
        executor, waiting = self._executor, len(self._admission) > 0
        refuses = executor.failure is not None or self._closing or self._epochs.exhausted
        if waiting:
            self._admission.wake(everyone=refuses)
        # With nothing pending and the background thread asleep, the next write has to wake it.
        if not waiting and not refuses and (self._background.awake or executor.has_writes()):
            self._buffer.open_room()
        else:
            self._buffer.shut_room()
        self._background.wake_if_due(room_wanted=waiting)

    # -- recovery and shutdown

    def recover(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """After a failure: write the failed batch again, with its epochs, and resume. No effect without a failure."""
        with self._lock:
            if self._closed:
                raise Closed("the coordinator was shut down: open the store again")
        self._executor.recover(timeout_s)

    def refuse_writes(self) -> None:
        """Refuse new writes, so that `last` no longer changes: the first half of `shutdown`."""
        with self._lock:
            self._closing = True
            self._on_change()

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Refuse new writes, flush and apply the others, and end every wait. Raises if a write is not durable."""
        timeout_s = self._settings.shutdown_timeout_s if timeout_s is None else timeout_s
        if self._closed:
            return
        self.refuse_writes()
        try:
            self.wait_applied(self._epochs.last, timeout_s)
        except WaitExpired as error:
            raise self._outcome_unknown(f"shutdown timed out after {timeout_s} s") from error
        finally:
            self._close(timeout_s)

    def _close(self, timeout_s: float) -> None:
        with self._lock:
            self._closed = True
            self._executor.waiters.wake_all()
            self._executor.has_thread = False
            self._background.end()
            thread, forget = self._thread, self._forget_exit
        if forget is not None:
            forget()
        if thread is not None:
            thread.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.shutdown()
            return
        try:
            self.shutdown()
        except PenstockError as also:
            error.add_note(f"shutting the coordinator down failed too: {also}")


def _merge(pending: D, delta: D, _b: Any, _c: Any) -> None:
    pending.merge(delta)
