"""The one writer of the manifest: a bounded channel, and windows of batches that share a transaction.

Exactly one thread at a time has the *turn* to commit. A caller who finds it free takes it and commits by itself, with
no hand-off. Whoever ends a window and finds that others came meanwhile gives the turn to the writer thread, which
goes on until the channel is empty. That thread also expires waiters and tends the engine.

Those who wait for a window wake each other, one by one: threads that are all awake at once fight for the interpreter,
and each fight puts one to sleep again. Meanwhile the writer thread waits a little until they are back: a sync that all
share is worth more than one that begins early. Whoever comes back then applies its batch to the draft of the next
window by itself, while the next one wakes up; the transaction alone is left to the writer thread.

A window that is refused is undone and run again batch by batch: a bad batch fails alone. A window whose commit fails
is not run again: after a failed sync nothing is retried behind the caller's back.

Thread: any for the public methods. `_lock` guards the channel, the turn and the waiters; it is never held during a
transaction.
Invariants: (1) a channel that is not empty has someone with the turn. (2) generations are published after the commit
and before anyone is woken. (3) every request and every waiter is answered, also at the end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import cast

from penstock.errors import Backpressure, Closed, ManifestFull, OutcomeUnknown, PenstockError, Poisoned
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.manifest.engine import Engine, ReadView
from penstock.manifest.fork import ForkGuard
from penstock.manifest.keys import ComponentId
from penstock.manifest.operations import CommitReceipt, ManifestOp
from penstock.manifest.records import GenerationWaiterSnapshot
from penstock.manifest.settings import ManifestSettings
from penstock.manifest.tables import GENERATIONS
from penstock.manifest.waiters import Waiters, WaitHandle
from penstock.manifest.window import Request, Window, frees

IDLE_TICK_S = 0.25  # how often deadlines are looked at while someone waits
CLOSE_S = 30.0
EARLY_OPERATIONS_MAX = 64  # in a batch that its own thread applies, under the lock
GATHER_STEPS = 4  # of the latency budget: how much of it is waited at first without anybody coming


class ManifestWriter:
    """Commits batches for everyone."""

    def __init__(
        self, engine: Engine, *, generations: Mapping[int, int], clock: Clock, settings: ManifestSettings
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._settings = settings
        self._guard = ForkGuard("the manifest")
        self._lock = threads.lock("manifest.writer")
        plain = cast(threading.Lock, self._lock)  # a checked lock of a test looks the same
        self._wakeup = threading.Condition(plain)  # for the writer thread
        self._idle = threading.Condition(plain)  # for close
        self._channel: deque[Request] = deque()  # guarded by _lock
        self._busy = False  # guarded by _lock: someone has the turn
        self._turn_given = False  # guarded by _lock: it is the writer thread's
        self._gather = 0  # guarded by _lock: the thread waits until the channel holds so many
        self._early: Window | None = None  # guarded by _lock: the first in the channel, applied already
        self._step_s = settings.commit_latency_budget_s / GATHER_STEPS  # with the turn: until a look who is back
        self._answered: deque[Request] = deque()  # whose threads are to be woken, by whoever takes one off
        self._closing = False  # guarded by _lock
        self._ended = False  # guarded by _lock
        self._waiters = Waiters(settings.waiters_max)  # guarded by _lock
        self._waiter_ids = count(1)
        self._generations = dict(generations)  # written with the turn and under _lock
        self._doubtful = False  # with the turn: a commit did not end well, so the rows know better than _generations
        self._next_tend_s = clock.monotonic_s() + settings.reader_check_interval_s
        self._thread = threading.Thread(target=self._run, name="penstock-manifest", daemon=True)
        self._thread.start()

    # -- requests

    def apply(self, operations: Sequence[ManifestOp], *, hint: int | None, timeout_s: float) -> CommitReceipt:
        """Commit a batch durably. `Backpressure` if the channel is full, or the batch was not begun in time."""
        return self._submit(Request(operations, hint), timeout_s)

    def sync(self, *, timeout_s: float) -> int:
        """Wait until all that was submitted before is committed; the generation of the manifest by then."""
        return self._submit(Request(None, None), timeout_s).generation

    def register(self, component: int, target: int, *, timeout_s: float) -> WaitHandle:
        """Begin to wait for a generation."""
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
        """The last committed generation of a component."""
        return self._generations.get(component, 0)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Commit what is in the channel, answer every waiter, end the thread."""
        if self._guard.is_child():
            return
        with self._lock:
            self._closing = True
            self._wakeup.notify()
            drained = self._idle.wait_for(lambda: not self._busy or self._ended, timeout_s)
            self._end_locked(Closed("the manifest was closed: open it again"))
        self._thread.join(timeout_s)
        if not drained:
            raise OutcomeUnknown(f"a commit of the manifest did not end within {timeout_s} s of closing")

    def _submit(self, request: Request, timeout_s: float) -> CommitReceipt:
        self._guard.check()
        with self._lock:
            self._check_open_locked()
            if self._busy:
                self._enqueue_locked(request)
            else:
                self._busy = True
        if request.answered is None:
            try:
                self._run_window([request])
            finally:
                self._pass_the_turn()
        else:
            in_time = request.answered.acquire(timeout=timeout_s)
            self._wake_one()
            if not in_time:
                self._give_up(request, timeout_s)
        if request.error is not None:
            raise request.error
        assert request.receipt is not None
        return request.receipt

    def _enqueue_locked(self, request: Request) -> None:
        limit = self._settings.channel_batches_max
        if len(self._channel) >= limit:
            raise Backpressure(f"{limit} commits of the manifest are waiting (limit {limit}): retry later")
        request.answered = threading.Lock()
        request.answered.acquire()
        self._channel.append(request)
        self._apply_early_locked(request)
        if self._gather and len(self._channel) >= self._gather:
            self._wakeup.notify()

    def _apply_early_locked(self, request: Request) -> None:
        """Apply a batch to the window that gathers; if that fails, the writer thread applies all of them anew."""
        if self._early is None or not self._early.open:
            return
        try:
            if len(request.operations or ()) > EARLY_OPERATIONS_MAX:
                self._early = None
            else:
                self._early.apply(request)
        except Exception:
            self._early = None

    def _give_up(self, request: Request, timeout_s: float) -> None:
        with self._lock:
            if request in self._channel:
                self._channel.remove(request)
                self._early = None
                raise Backpressure(f"the manifest did not begin this commit within {timeout_s} s: retry later")
        assert request.answered is not None
        if not request.answered.acquire(blocking=False):
            raise OutcomeUnknown(f"this commit of the manifest did not end within {timeout_s} s: look if it is there")

    def _check_open_locked(self) -> None:
        if self._closing or self._ended:
            raise Closed("the manifest is closed: open it again")

    # -- the turn

    def _pass_the_turn(self) -> None:
        with self._lock:
            if self._channel:
                self._turn_given = True
                self._wakeup.notify()
            else:
                self._busy = False
                if self._closing:
                    self._idle.notify_all()

    def _run(self) -> None:
        try:
            while self._await_turn():
                self._drain()
        except BaseException as error:  # a mistake of ours: no one may wait for ever because of it
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
                    return True
                if self._ended:
                    return False
                self._wakeup.wait(self._pause_locked())
                now_s = self._clock.monotonic_s()
                self._waiters.expire(now_s)
                tend = now_s >= self._next_tend_s and not self._closing
            if tend:
                self._next_tend_s = now_s + self._settings.reader_check_interval_s
                self._engine.tend()

    def _pause_locked(self) -> float:
        deadline_s = self._waiters.next_deadline_s()
        if deadline_s is None:
            return self._settings.reader_check_interval_s
        return min(IDLE_TICK_S, max(0.0, deadline_s - self._clock.monotonic_s()))

    def _drain(self) -> None:
        """Run windows until the channel is empty, then give the turn back."""
        while True:
            requests, early = self._next_requests()
            if not requests:
                return
            self._run_window(requests, early)
            if len(requests) > 1:
                self._gather_again(len(requests))

    def _next_requests(self) -> tuple[list[Request], Window | None]:
        """What the next transaction commits, and the same as a window if it is applied already."""
        limit = self._settings.window_batches_max
        with self._lock:
            early, self._early = self._early, None
            if early is not None and not 0 < len(early.receipts) <= limit:
                early = None
            size = min(len(self._channel), limit) if early is None else len(early.receipts)
            requests = [self._channel.popleft() for _ in range(size)]
            if not requests:
                self._wake_all()
                self._busy = False
                self._idle.notify_all()
            self._waiters.expire(self._clock.monotonic_s())
        return requests, early

    def _gather_again(self, size: int) -> None:
        """Wait for those who were answered just now and are about to come back, and let them apply their batches."""
        try:
            with self._engine.read() as view, self._lock:
                if not self._doubtful:
                    self._early = Window(view, self._generations, self._clock.time_us() // 1_000)
                    for request in self._channel:
                        self._apply_early_locked(request)
                self._await_others_locked(size)
        except PenstockError:  # too many readers, say: without a snapshot
            with self._lock:
                self._await_others_locked(size)

    def _await_others_locked(self, size: int) -> None:
        """Wait for as long as some come. A look costs a wake-up, so that the next wait is as long as this one took."""
        self._gather = min(size, self._settings.window_batches_max)
        budget_s, took_s, came = self._settings.commit_latency_budget_s, 0.0, -1
        begin_s = self._clock.monotonic_s()
        while came < len(self._channel) < self._gather and took_s < budget_s and not self._closing:
            came = len(self._channel)
            self._wakeup.wait(min(self._step_s, budget_s - took_s))
            took_s = self._clock.monotonic_s() - begin_s
        self._gather = 0
        self._step_s = min(max(budget_s / GATHER_STEPS, 1.5 * took_s), budget_s)
        if self._early is not None:
            self._early.open = False  # its snapshot ends
        if len(self._channel) < size:
            self._wake_all()

    def _wake_one(self) -> bool:
        """Give one its answer, who wakes the next; False if there is none."""
        try:
            request = self._answered.popleft()
        except IndexError:
            return False
        assert request.answered is not None
        request.answered.release()
        return True

    def _wake_all(self) -> None:
        """Wake those whose turn to be woken did not come: who should have woken them may have given up."""
        while self._wake_one():
            pass

    # -- a window

    def _run_window(self, requests: list[Request], early: Window | None = None) -> None:
        try:
            self._commit(requests, early)
        except Exception as error:
            for request in requests:
                if request.receipt is None and request.error is None:
                    request.error = error
        self._answered.extend(request for request in requests if request.answered is not None)
        self._wake_one()

    def _commit(self, requests: list[Request], early: Window | None = None) -> None:
        """Commit batches in one transaction, or else each in its own."""
        while True:
            refused = True
            try:
                with self._engine.write() as view:
                    if self._doubtful:
                        self._move_generations(load_generations(view))
                    self._doubtful = True
                    window = early or self._applied(view, requests)
                    moved = window.write_to(view, self._snapshot_waiters)
                    refused = False
            except ManifestFull:
                if not self._engine.grow(for_deletes=frees(requests)):
                    if len(requests) == 1:
                        raise
                    return self._commit_each(requests)
            except Exception:
                if not refused or len(requests) == 1:
                    raise
                return self._commit_each(requests)
            else:
                return self._publish(requests, window.receipts, moved)

    def _applied(self, view: ReadView, requests: list[Request]) -> Window:
        window = Window(view, self._generations, self._clock.time_us() // 1_000)
        for request in requests:
            window.apply(request)
        return window

    def _commit_each(self, requests: list[Request]) -> None:
        for request in requests:
            try:
                self._commit([request])
            except Exception as error:
                request.error = error

    def _snapshot_waiters(self, component: int, generation: int) -> tuple[GenerationWaiterSnapshot, ...]:
        with self._lock:
            return self._waiters.snapshot(component, generation)

    def _publish(
        self, requests: list[Request], receipts: Sequence[CommitReceipt | None], moved: Mapping[int, int]
    ) -> None:
        self._move_generations(moved)
        self._doubtful = False
        manifest = int(ComponentId.MANIFEST)
        for request, receipt in zip(requests, receipts, strict=True):
            if receipt is None:
                generation = self._generations.get(manifest, 0)
                receipt = CommitReceipt(generation, {manifest: generation})
            request.receipt = receipt

    def _move_generations(self, moved: Mapping[int, int]) -> None:
        with self._lock:
            self._generations.update(moved)  # before anyone wakes: a waiter must find what it waited for
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
    """Every component's generation as committed."""
    return {component: record.current_generation for component, record in GENERATIONS.scan(view)}
