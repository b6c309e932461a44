"""The one writer of the manifest: a bounded channel, and windows of batches that share a transaction.

At most one thread has the *turn* to commit. A caller that finds it free takes it and commits in its own thread, without
a hand-off. If other requests came meanwhile, it then passes the turn to the writer thread, which runs windows until the
channel is empty. That thread also expires waiters and maintains the engine.

The waiters of a window wake each other, one by one: threads that wake together contend for the interpreter lock and go
back to sleep. Meanwhile the writer thread waits briefly for them to come back: one sync shared by all is worth more
than one that starts early.

A refused window is rolled back and run again batch by batch, so that a bad batch fails alone. A window whose commit
fails is not run again: after a failed sync nothing is retried behind the caller's back.

Thread: any for the public methods. `_lock` guards the channel, the turn and the waiters; it is never held during a
transaction.
Invariants: (1) while the channel is not empty, a thread has the turn. (2) generations are published after the commit
and before waiters are woken. (3) every request and every waiter is answered, also at close.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import cast

from penstock.errors import Backpressure, Closed, Invalid, ManifestFull, OutcomeUnknown, PenstockError, Poisoned
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.manifest.draft import Draft
from penstock.manifest.edit import ManifestBatch, ManifestEdit
from penstock.manifest.engine import ManifestEngine, ReadView
from penstock.manifest.fork import ForkGuard
from penstock.manifest.keys import ComponentId
from penstock.manifest.operations import CommitReceipt, ManifestOp
from penstock.manifest.records import GenerationWaiterSnapshot
from penstock.manifest.settings import ManifestSettings
from penstock.manifest.tables import GENERATIONS
from penstock.manifest.waiters import GenerationWaiters, WaitHandle

IDLE_TICK_S = 0.25  # how often deadlines are checked while there are waiters
CLOSE_S = 30.0
GATHER_STEPS = 4  # the first wait without a new request is this fraction of the latency budget


class _Request:
    """An `Apply` (with a batch) or a `Sync` (without) in the channel."""

    __slots__ = ("answered", "batch", "error", "receipt")

    def __init__(self, batch: ManifestBatch | None) -> None:
        self.batch = batch  # None: a sync
        self.receipt: CommitReceipt | None = None
        self.error: Exception | None = None
        self.answered: threading.Lock | None = None  # locked until there is an answer, if a caller waits for it


class ManifestWriter:
    """Commits batches for all threads."""

    def __init__(
        self, engine: ManifestEngine, *, generations: Mapping[int, int], clock: Clock, settings: ManifestSettings
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._settings = settings
        self._guard = ForkGuard("the manifest")
        self._lock = threads.lock("manifest.writer")
        plain = cast(threading.Lock, self._lock)  # a test's checked lock has the same methods
        self._wakeup = threading.Condition(plain)  # for the writer thread
        self._idle = threading.Condition(plain)  # for close
        self._channel: deque[_Request] = deque()  # guarded by _lock
        self._turn: object = None  # guarded by _lock: a request or the writer thread; None: free
        self._turn_given = False  # guarded by _lock: passed to the writer thread
        self._gather = 0  # guarded by _lock: the channel length that the writer thread waits for
        self._gathered: threading.Lock | None = None  # guarded by _lock: released when that length is reached
        self._step_s = settings.commit_latency_budget_s / GATHER_STEPS  # with the turn: between two checks
        self._answered: deque[_Request] = deque()  # whose threads are still to be woken
        self._closing = False  # guarded by _lock
        self._ended = False  # guarded by _lock
        self._waiters = GenerationWaiters(settings.waiters_max)  # guarded by _lock
        self._waiter_ids = count(1)
        self._generations = dict(generations)  # written with the turn and under _lock
        self._generations_uncertain = False  # with the turn: a commit failed, so the rows must be read again
        self._next_maintenance_s = clock.monotonic_s() + settings.reader_check_interval_s
        self._thread = threads.spawn(self._run, name="penstock-manifest")

    # -- requests

    def apply(self, operations: Sequence[ManifestOp], *, hint: int | None, timeout_s: float) -> CommitReceipt:
        """Commit a batch durably. `Backpressure` if the channel is full, or the commit did not start in time."""
        return self._submit(_Request(ManifestBatch(operations, hint)), timeout_s)

    def sync(self, *, timeout_s: float) -> int:
        """Wait until all earlier requests are committed; return the manifest's generation."""
        return self._submit(_Request(None), timeout_s).generation

    def register(self, component: int, target: int, *, timeout_s: float) -> WaitHandle:
        """Register a wait for a generation."""
        self._guard.check()
        deadline_ms = self._clock.time_us() // 1_000 + round(timeout_s * 1_000)
        with self._lock:
            self._check_open_locked()
            deadline_s = self._clock.monotonic_s() + timeout_s
            handle = WaitHandle(next(self._waiter_ids), component, target, deadline_s, deadline_ms)
            generation = self._generations.get(component, 0)
            if generation >= target:
                handle.resolve(generation)
            else:
                self._waiters.add(handle)
                self._wakeup.notify()  # its deadline may be the next
        return handle

    def generation(self, component: int) -> int:
        """Return the last committed generation of a component."""
        return self._generations.get(component, 0)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Commit the requests in the channel, answer every waiter, and end the thread."""
        if self._guard.is_child():
            return
        with self._lock:
            self._closing = True
            self._wakeup.notify()
            drained = self._idle.wait_for(lambda: self._turn is None or self._ended, timeout_s)
            self._end_locked(Closed("the manifest was closed: open it again"))
        self._thread.join(timeout_s)
        if not drained:
            raise OutcomeUnknown(f"a commit of the manifest did not end within {timeout_s} s of closing")

    def _submit(self, request: _Request, timeout_s: float) -> CommitReceipt:
        self._guard.check()
        if not timeout_s >= 0:  # also refuses NaN
            raise Invalid(f"a commit cannot wait for {timeout_s} s: give 0 or more")
        try:
            self._take_part(request, min(timeout_s, threading.TIMEOUT_MAX))
        finally:
            if self._turn is request:  # after an interrupt: the turn must not be lost
                self._pass_turn(request)
        if request.error is not None:
            raise request.error
        assert request.receipt is not None
        return request.receipt

    def _take_part(self, request: _Request, timeout_s: float) -> None:
        gathered = None
        with self._lock:
            self._check_open_locked()
            if self._turn is None:
                self._turn = request
            else:
                gathered = self._enqueue_locked(request)
        if gathered is not None:
            gathered.release()  # not under the lock: the woken writer thread would wait for it
        if request.answered is None:
            self._run_window([request])
            self._pass_turn(request)
        else:
            in_time = request.answered.acquire(timeout=timeout_s)
            self._wake_one()
            if not in_time:
                self._give_up(request, timeout_s)

    def _enqueue_locked(self, request: _Request) -> threading.Lock | None:
        """Add a request to the channel; return the lock to release if the writer thread waits for this request."""
        limit = self._settings.channel_batches_max
        if len(self._channel) >= limit:
            raise Backpressure(f"{limit} commits of the manifest are waiting (limit {limit}): retry later")
        request.answered = threading.Lock()
        request.answered.acquire()
        self._channel.append(request)
        if len(self._channel) < self._gather:
            return None
        gathered, self._gathered = self._gathered, None
        return gathered

    def _give_up(self, request: _Request, timeout_s: float) -> None:
        with self._lock:
            if request in self._channel:
                self._channel.remove(request)
                raise Backpressure(f"the manifest did not begin this commit within {timeout_s} s: retry later")
        if request.receipt is None and request.error is None:
            raise OutcomeUnknown(f"this commit of the manifest did not end within {timeout_s} s: check if it happened")

    def _check_open_locked(self) -> None:
        if self._closing or self._ended:
            raise Closed("the manifest is closed: open it again")

    # -- the turn

    def _pass_turn(self, owner: _Request) -> None:
        with self._lock:
            if self._turn is not owner:
                return
            if self._channel:
                self._turn_given = True
                self._wakeup.notify()
                self._turn = self._thread
            else:
                if self._closing:
                    self._idle.notify_all()
                self._turn = None

    def _run(self) -> None:
        try:
            while self._await_turn():
                self._drain()
        except BaseException as error:  # a bug of ours: nothing may wait forever because of it
            poisoned = Poisoned("the writer of the manifest failed: reopen the store")
            poisoned.__cause__ = error
            with self._lock:
                self._end_locked(poisoned)
            raise

    def _await_turn(self) -> bool:
        """Wait for the turn, doing periodic work meanwhile; False at the end."""
        while True:
            with self._lock:
                if self._turn_given:
                    self._turn_given = False
                    self._turn = self._thread
                    return True
                if self._ended:
                    return False
                self._wakeup.wait(self._pause_locked())
                now_s = self._clock.monotonic_s()
                self._waiters.expire(now_s)
                due = now_s >= self._next_maintenance_s and not self._closing
            if due:
                self._next_maintenance_s = now_s + self._settings.reader_check_interval_s
                try:
                    self._engine.maintain()
                except Closed:  # its owner was garbage-collected after an interrupt
                    return False

    def _pause_locked(self) -> float:
        deadline_s = self._waiters.next_deadline_s()
        if deadline_s is None:
            return self._settings.reader_check_interval_s
        return min(IDLE_TICK_S, max(0.0, deadline_s - self._clock.monotonic_s()))

    def _drain(self) -> None:
        """Run windows until the channel is empty, then release the turn."""
        size = 0
        while window := self._next_window(size):
            size = len(window)
            self._run_window(window)

    def _next_window(self, last_size: int) -> list[_Request]:
        if last_size > 1:
            self._await_others(last_size)
        with self._lock:
            size = min(len(self._channel), self._settings.window_batches_max)
            window = [self._channel.popleft() for _ in range(size)]
            if size < last_size:
                self._wake_all()
            if not window:
                self._turn = None
                self._idle.notify_all()
            self._waiters.expire(self._clock.monotonic_s())
        return window

    def _await_others(self, size: int) -> None:
        """Wait for the callers that were just answered to submit again, as long as more of them do.

        A check costs a wake-up, so the next wait lasts as long as this one took.
        """
        size = min(size, self._settings.window_batches_max)
        gathered = threading.Lock()
        gathered.acquire()
        with self._lock:
            came = len(self._channel)
            if came >= size or self._closing:
                return
            self._gather, self._gathered = size, gathered
        budget_s, took_s = self._settings.commit_latency_budget_s, 0.0
        begin_s = self._clock.monotonic_s()
        while not gathered.acquire(timeout=min(self._step_s, budget_s - took_s)):
            took_s = self._clock.monotonic_s() - begin_s
            with self._lock:
                if len(self._channel) == came or took_s >= budget_s or self._closing:
                    self._gathered = None
                    break
                came = len(self._channel)
        took_s = self._clock.monotonic_s() - begin_s
        self._step_s = min(max(budget_s / GATHER_STEPS, 1.5 * took_s), budget_s)

    def _wake_one(self) -> bool:
        """Wake one answered caller, which wakes the next; False if there is none."""
        try:
            request = self._answered.popleft()
        except IndexError:
            return False
        assert request.answered is not None
        request.answered.release()
        return True

    def _wake_all(self) -> None:
        """Wake all answered callers: the one that should have woken the next may have timed out."""
        while self._wake_one():
            pass

    # -- a window

    def _run_window(self, window: list[_Request]) -> None:
        try:
            self._commit(window)
        except Exception as error:
            for request in window:
                if request.receipt is None and request.error is None:
                    request.error = error
        self._answered.extend(request for request in window if request.answered is not None)
        window.clear()  # so that each request is freed by its own thread
        self._wake_one()

    def _commit(self, window: list[_Request]) -> None:
        """Commit a window as one transaction, or else each batch on its own."""
        while True:
            refused = True
            try:
                with self._engine.write() as transaction:
                    if self._generations_uncertain:
                        self._move_generations(load_generations(transaction))
                    self._generations_uncertain = True
                    draft = Draft(transaction)
                    edit = ManifestEdit(draft, self._generations, self._clock.time_us() // 1_000)
                    receipts = [None if request.batch is None else edit.apply(request.batch) for request in window]
                    edit.finish(self._snapshot_waiters)
                    draft.write_to(transaction)
                    refused = False
            except ManifestFull:
                if not self._engine.grow(for_deletes=_frees(window)):
                    if len(window) == 1:
                        raise
                    return self._commit_each(window)
            except Exception:
                if not refused or len(window) == 1:
                    raise
                return self._commit_each(window)
            else:
                return self._publish(window, receipts, edit.generations)

    def _commit_each(self, window: list[_Request]) -> None:
        for request in window:
            try:
                self._commit([request])
            except Exception as error:
                request.error = error

    def _snapshot_waiters(self, component: int, generation: int) -> tuple[GenerationWaiterSnapshot, ...]:
        with self._lock:
            return self._waiters.snapshot(component, generation)

    def _publish(
        self, window: list[_Request], receipts: Sequence[CommitReceipt | None], moved: Mapping[int, int]
    ) -> None:
        self._move_generations(moved)
        self._generations_uncertain = False
        manifest = int(ComponentId.MANIFEST)
        for request, receipt in zip(window, receipts, strict=True):
            if receipt is None:
                generation = self._generations.get(manifest, 0)
                receipt = CommitReceipt(generation, {manifest: generation})
            request.receipt = receipt

    def _move_generations(self, moved: Mapping[int, int]) -> None:
        with self._lock:
            self._generations.update(moved)  # before waiters wake: they must find their generation
            self._waiters.reached(moved)

    def _end_locked(self, error: PenstockError) -> None:
        self._ended = True
        self._waiters.end(error)
        while self._channel:
            request = self._channel.popleft()
            request.error = error
            self._answered.append(request)
        self._wake_all()
        self._wakeup.notify_all()


def load_generations(view: ReadView) -> dict[int, int]:
    """Return the committed generation of every component."""
    return {component: record.current_generation for component, record in GENERATIONS.scan(view)}


def _frees(window: Sequence[_Request]) -> bool:
    return all(request.batch is None or request.batch.frees_space() for request in window)
