"""The coordinator's transitions, one by one, with a flusher that does what the test says."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest

from penstock.coordinator import (
    Acknowledgement,
    Batch,
    CoordinatorSettings,
    Durability,
    Epoch,
    Layers,
    State,
    Trigger,
    WriteCoordinator,
)
from penstock.coordinator.executor import GATHER_S, GATHER_S_MAX, UNAPPLIED_MAX, FlushExecutor
from penstock.coordinator.metrics import export
from penstock.coordinator.protocols import COUNT_MAX
from penstock.coordinator.waiting import RECHECK_S, Waiter
from penstock.errors import Backpressure, Closed, Invalid, Lost, OutcomeUnknown, Poisoned, WaitExpired
from penstock.host.metrics import Metrics
from penstock.testing import FakeClock
from penstock.testing.locks import LockOrderChecker

PATIENCE_S = 20.0  # how long a test waits for what must come
INCARNATION = 7
NONE = INCARNATION << 40


class Adds:
    """Numbers to be added: what is lost or doubled shows."""

    def __init__(self, **rows: int) -> None:
        self.rows = rows

    def is_empty(self) -> bool:
        return not self.rows

    def merge(self, other: Self, /) -> None:
        for key, number in other.rows.items():
            self.rows[key] = self.rows.get(key, 0) + number

    def size_estimate(self) -> int:
        return 10 * len(self.rows)


View = dict[str, int]
Coordinator = WriteCoordinator[Adds, Batch[Adds], View]


class Gate:
    """A door in the flusher: a test can shut it and wait until someone stands before it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._arrived = threading.Semaphore(0)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def await_arrival(self) -> None:
        assert self._arrived.acquire(timeout=PATIENCE_S)

    def pass_through(self) -> None:
        if not self._open.is_set():
            self._arrived.release()
            assert self._open.wait(PATIENCE_S)


class ScriptedFlusher:
    """Keeps batches in memory; fails, waits and watches as told."""

    durability = Durability.DISK

    def __init__(self) -> None:
        self.durable_gate = Gate()
        self.apply_gate = Gate()
        self.durable_errors: deque[BaseException] = deque()
        self.apply_errors: deque[BaseException] = deque()
        self.recover_errors: deque[BaseException] = deque()
        self.calls: list[tuple[int, int, bool]] = []
        self.threads: list[int] = []
        self.applied: list[int] = []
        self.view: View = {}
        self.synced = NONE
        self.pause_s = 0.0  # a disk gives others time to look
        self.watch: Callable[[str], None] = lambda where: None

    def make_durable(self, batch: Batch[Adds], *, again: bool) -> Batch[Adds]:
        self.watch("make_durable")
        self.calls.append((batch.first - NONE, batch.last - NONE, again))
        self.threads.append(threading.get_ident())
        self.durable_gate.pass_through()
        threading.Event().wait(self.pause_s)
        if self.durable_errors:
            raise self.durable_errors.popleft()
        self.synced = batch.last
        return batch

    def apply(self, flushed: Batch[Adds]) -> View:
        self.watch("apply")
        self.apply_gate.pass_through()
        threading.Event().wait(self.pause_s)
        if self.apply_errors:
            raise self.apply_errors.popleft()
        total = Adds(**self.view)
        for delta in flushed.deltas:
            total.merge(delta)
        self.view = total.rows
        self.applied.append(flushed.last - NONE)
        return self.view

    def recover(self) -> None:
        if self.recover_errors:
            raise self.recover_errors.popleft()


class Box:
    """A coordinator with its parts, and the threads a test started."""

    def __init__(self, settings: CoordinatorSettings | None = None, *, fake_clock: bool = True) -> None:
        self.flusher = ScriptedFlusher()
        self.clock = FakeClock()
        self.coordinator: Coordinator = WriteCoordinator(
            self.flusher,
            Adds,
            view={},
            incarnation=INCARNATION,
            clock=self.clock if fake_clock else None,
            settings=settings,
        )
        self._threads: list[tuple[threading.Thread, list[Any]]] = []

    def write(self, key: str = "a", number: int = 1) -> int:
        return self.coordinator.write(Adds(**{key: number}))

    def state(self) -> State:
        return self.coordinator.state

    def begin(self, function: Callable[[], object]) -> list[Any]:
        """Run in a thread; its result or error comes into the list."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(function())
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append((thread, outcome))
        thread.start()
        return outcome

    def begin_flush_held(self) -> list[Any]:
        """A flush by another thread that stands in `make_durable`."""
        self.flusher.durable_gate.shut()
        outcome = self.begin(self.coordinator.flush)
        self.flusher.durable_gate.await_arrival()
        return outcome

    def await_waiters(self, count: int) -> None:
        spin_until(lambda: self.coordinator.statistics().waiters == count)

    def await_waiting_writes(self, count: int) -> None:
        spin_until(lambda: self.coordinator.statistics().waiting_writes == count)

    def join(self) -> None:
        for thread, _ in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a waiter hangs"


def spin_until(true: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(int(PATIENCE_S / 0.001)):
        if true():
            return
        tick.wait(0.001)
    raise AssertionError("it never came")


def total(layers: Layers[Adds, View], *, pending: bool = True) -> View:
    adds = Adds(**layers.view)
    for delta in reversed(layers.deltas):
        adds.merge(delta)
    if pending:
        adds.merge(Adds(**layers.pending.rows))  # a copy in one step: it may grow meanwhile
    return adds.rows


@pytest.fixture
def box() -> Box:
    return Box()


# -- states


def test_a_write_moves_idle_to_accumulating(box: Box) -> None:
    assert box.state() is State.IDLE
    assert box.write() == NONE + 1
    assert box.state() is State.ACCUMULATING


def test_a_flush_moves_accumulating_to_flushing_to_idle(box: Box) -> None:
    box.write()
    outcome = box.begin_flush_held()
    assert box.state() is State.FLUSHING
    box.flusher.durable_gate.open()
    box.join()
    assert outcome == [Acknowledgement(box.coordinator.last, Durability.DISK)]
    assert box.state() is State.IDLE
    assert box.coordinator.layers.view == {"a": 1}


def test_writes_during_a_flush_leave_it_accumulating(box: Box) -> None:
    box.write()
    box.begin_flush_held()
    box.write("b")
    assert box.state() is State.FLUSHING
    box.flusher.durable_gate.open()
    box.join()
    assert box.state() is State.ACCUMULATING
    assert box.flusher.calls == [(1, 1, False)]


def test_a_failed_flush_moves_to_failed_and_recovery_to_idle(box: Box) -> None:
    box.write()
    box.flusher.durable_errors.append(OSError("EIO"))
    with pytest.raises(OutcomeUnknown) as caught:
        box.coordinator.flush()
    assert (caught.value.first, caught.value.last) == (NONE + 1, NONE + 1)
    assert isinstance(caught.value.__cause__, OSError)
    assert box.state() is State.FAILED
    box.coordinator.recover()
    assert box.state() is State.IDLE
    assert box.flusher.calls == [(1, 1, False), (1, 1, True)]
    assert box.coordinator.layers.view == {"a": 1}
    assert box.coordinator.flush().epoch == NONE + 1


def test_recovery_with_writes_behind_the_failed_flush_moves_to_accumulating(box: Box) -> None:
    box.write()
    outcome = box.begin_flush_held()
    box.write("b")
    box.flusher.durable_errors.append(OSError("EIO"))
    box.flusher.durable_gate.open()
    box.join()
    assert isinstance(outcome[0], OutcomeUnknown)
    assert (outcome[0].first, outcome[0].last) == (NONE + 1, NONE + 2)
    box.coordinator.recover()
    assert box.state() is State.ACCUMULATING
    assert total(box.coordinator.layers) == {"a": 1, "b": 1}
    box.coordinator.flush()
    assert box.flusher.calls == [(1, 1, False), (1, 1, True), (2, 2, False)]


@pytest.mark.parametrize("step", ["recover", "make_durable", "apply"])
def test_a_recovery_that_fails_stays_failed_and_can_be_repeated(box: Box, step: str) -> None:
    box.write()
    box.flusher.durable_errors.append(OSError("first"))
    with pytest.raises(OutcomeUnknown):
        box.coordinator.flush()
    errors = {"recover": "recover_errors", "make_durable": "durable_errors", "apply": "apply_errors"}
    getattr(box.flusher, errors[step]).append(OSError("second"))
    with pytest.raises(Poisoned, match="second"):
        box.coordinator.recover()
    assert box.state() is State.FAILED
    assert (box.coordinator.durable > NONE) is (step == "apply")
    with pytest.raises(Poisoned if step == "apply" else OutcomeUnknown):
        box.coordinator.wait_applied(NONE + 1)
    box.coordinator.recover()
    assert box.state() is State.IDLE
    assert box.coordinator.layers.view == {"a": 1}
    assert box.flusher.applied == [1]


def test_recovery_of_what_did_not_fail_does_nothing(box: Box) -> None:
    box.write()
    box.coordinator.recover()
    assert box.state() is State.ACCUMULATING
    assert box.flusher.calls == []


def test_recovery_waits_for_the_turn_and_gives_up_in_time(box: Box) -> None:
    box.write()
    box.begin_flush_held()
    with pytest.raises(WaitExpired):
        box.coordinator.recover(timeout_s=0.01)
    box.flusher.durable_gate.open()
    box.join()


def test_a_failed_apply_is_durable_and_readable_but_not_in_the_view(box: Box) -> None:
    epoch = box.write()
    box.flusher.apply_errors.append(ValueError("bad row"))
    assert box.coordinator.flush(epoch).epoch == epoch
    assert box.state() is State.FAILED  # from IDLE
    assert (box.coordinator.durable, box.coordinator.applied) == (epoch, NONE)
    assert box.coordinator.layers.view == {}
    assert total(box.coordinator.layers) == {"a": 1}
    statistics = box.coordinator.statistics()
    assert statistics.error == "ValueError('bad row')"
    assert (statistics.apply_failures, statistics.flush_failures) == (1, 0)
    with pytest.raises(Poisoned, match="bad row"):
        box.coordinator.wait_applied(epoch)
    with pytest.raises(Poisoned):
        box.write()
    box.coordinator.recover()
    box.coordinator.wait_applied(epoch)
    assert box.coordinator.layers.view == {"a": 1}
    assert box.flusher.calls == [(1, 1, False)]  # what is durable is not written again


def test_an_apply_that_fails_while_writes_wait_moves_accumulating_to_failed(box: Box) -> None:
    box.write()
    box.flusher.apply_gate.shut()
    box.flusher.apply_errors.append(ValueError("bad row"))
    box.begin(box.coordinator.flush)
    box.flusher.apply_gate.await_arrival()
    box.write("b")
    assert box.state() is State.ACCUMULATING
    box.flusher.apply_gate.open()
    box.join()
    assert box.state() is State.FAILED
    with pytest.raises(OutcomeUnknown):
        box.coordinator.flush()


def test_an_apply_that_fails_during_the_next_flush_does_not_deny_it(box: Box) -> None:
    box.write()
    box.flusher.apply_gate.shut()
    box.flusher.apply_errors.append(ValueError("bad row"))
    box.begin(box.coordinator.flush)
    box.flusher.apply_gate.await_arrival()
    second = box.write("b")
    outcome = box.begin_flush_held()
    box.write("c")
    follower = box.begin(box.coordinator.flush)
    applied = box.begin(lambda: box.coordinator.wait_applied(NONE + 1))
    box.await_waiters(2)
    box.flusher.apply_gate.open()
    spin_until(lambda: box.state() is State.FAILED)
    box.flusher.durable_gate.open()
    box.join()
    assert outcome == [(second, Durability.DISK)]
    assert isinstance(follower[0], OutcomeUnknown)
    assert isinstance(applied[0], Poisoned)
    box.coordinator.recover()
    assert box.coordinator.layers.view == {"a": 1, "b": 1}
    assert total(box.coordinator.layers) == {"a": 1, "b": 1, "c": 1}


# -- flushing


def test_a_flush_during_a_flush_waits_for_the_write_before_it(box: Box) -> None:
    box.write()
    box.begin_flush_held()
    second = box.write("b")
    outcome = box.begin(box.coordinator.flush)
    box.await_waiters(1)
    assert outcome == []
    box.flusher.durable_gate.open()
    box.join()
    assert outcome[0].epoch == second
    assert box.flusher.calls == [(1, 1, False), (2, 2, False)]
    assert box.flusher.synced == second


def test_the_caller_flushes_by_itself_when_nobody_does(box: Box) -> None:
    assert box.coordinator.write_durable(Adds(a=1)).epoch == NONE + 1
    assert box.flusher.threads == [threading.get_ident()]


def test_many_followers_share_one_flush(box: Box) -> None:
    box.write()
    box.begin_flush_held()
    outcomes = [box.begin(lambda: box.coordinator.write_durable(Adds(b=1))) for _ in range(15)]
    box.await_waiters(15)
    box.flusher.durable_gate.open()
    box.join()
    assert box.flusher.calls == [(1, 1, False), (2, 16, False)]
    assert all(outcome[0].epoch == NONE + 16 for outcome in outcomes)
    assert box.coordinator.layers.view == {"a": 1, "b": 15}


def test_one_flush_acknowledges_a_window_of_writes(box: Box) -> None:
    epochs = [box.write() for _ in range(64)]
    box.coordinator.flush(epochs[-1])
    assert [box.coordinator.flush(epoch).epoch for epoch in epochs] == [epochs[-1]] * 64
    assert box.flusher.calls == [(1, 64, False)]


def test_nothing_to_flush_is_durable(box: Box) -> None:
    assert box.coordinator.flush().epoch == NONE
    assert box.coordinator.write(Adds()) == NONE
    box.coordinator.wait_applied(NONE)
    assert box.flusher.calls == []


def test_an_epoch_of_another_incarnation_gets_no_answer(box: Box) -> None:
    box.coordinator.write_durable(Adds(a=1))
    for ask in (box.coordinator.flush, box.coordinator.wait_applied):
        with pytest.raises(Lost):
            ask(((INCARNATION - 1) << 40) + 1)
        with pytest.raises(Invalid):
            ask(NONE + 2)
        with pytest.raises(Invalid):
            ask(((INCARNATION + 1) << 40) + 1)


def test_a_follower_gives_up_in_time_and_its_write_stays(box: Box) -> None:
    box.write()
    box.begin_flush_held()
    epoch = box.write("b")
    with pytest.raises(WaitExpired):
        box.coordinator.flush(epoch, timeout_s=0.01)
    assert box.coordinator.statistics().waiters == 0
    box.flusher.durable_gate.open()
    box.join()
    assert box.coordinator.flush(epoch).epoch == epoch


@pytest.mark.parametrize("interrupt", [False, True])
def test_a_turn_that_comes_too_late_is_passed_on(box: Box, monkeypatch: pytest.MonkeyPatch, interrupt: bool) -> None:
    box.write()
    box.begin_flush_held()
    sleep = Waiter.wait

    def oversleep(waiter: Waiter, timeout_s: float) -> bool:
        woken = sleep(waiter, timeout_s)
        if waiter.epoch != NONE + 2:
            return woken
        if interrupt:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(Waiter, "wait", oversleep)
    late = box.begin(lambda: box.coordinator.write_durable(Adds(b=1)))
    box.await_waiters(1)
    other = box.begin(lambda: box.coordinator.write_durable(Adds(c=1)))
    box.await_waiters(2)
    box.flusher.durable_gate.open()
    box.join()
    assert isinstance(late[0], KeyboardInterrupt if interrupt else Acknowledgement)
    assert other[0].epoch == NONE + 3
    assert box.state() is State.IDLE


def test_an_interrupt_is_no_failure_the_next_flush_goes_on_with_the_batch(box: Box) -> None:
    box.write()
    box.flusher.durable_errors.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        box.coordinator.flush()
    assert box.state() is State.FLUSHING  # a batch was taken, and nobody knows what became of it
    box.coordinator.recover()  # nothing failed
    assert box.coordinator.flush().epoch == NONE + 1
    assert box.flusher.calls == [(1, 1, False), (1, 1, True)]
    box.flusher.apply_errors.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        box.coordinator.write_durable(Adds(b=1))
    box.coordinator.wait_applied()
    assert box.coordinator.layers.view == {"a": 1, "b": 1}
    assert box.flusher.calls[2:] == [(2, 2, False)]


def test_an_interrupted_recovery_can_be_repeated(box: Box) -> None:
    box.write()
    box.flusher.durable_errors.append(OSError("EIO"))
    with pytest.raises(OutcomeUnknown):
        box.coordinator.flush()
    box.flusher.recover_errors.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        box.coordinator.recover()
    assert box.state() is State.FAILED
    box.coordinator.recover()
    assert box.coordinator.layers.view == {"a": 1}


def test_an_interrupt_of_a_write_never_leaves_the_lock_taken(box: Box) -> None:
    """Interrupts come anywhere in it, most often between two of its calls: where `acquire` and `try` have a gap."""

    def insert(pending: Adds, a: None, b: None, c: None) -> None:
        pending.rows["a"] = 1

    def interrupt(*_: object) -> None:
        raise InterruptedWriteError

    box.write()
    interrupts = 0
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        while interrupts < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002)
                while True:
                    box.coordinator.write_into(insert, 0, None, None, None)
            except InterruptedWriteError:
                interrupts += 1
            taken = not box.coordinator._lock.acquire(timeout=0)
            assert not taken, f"the lock is taken after {interrupts} interrupts"
            box.coordinator._lock.release()
    finally:
        signal.signal(signal.SIGALRM, previous)


class InterruptedWriteError(BaseException):
    pass


def test_followers_of_a_failed_flush_get_the_epochs_in_doubt(box: Box) -> None:
    box.write()
    leader = box.begin_flush_held()
    outcomes = [box.begin(lambda: box.coordinator.write_durable(Adds(b=1))) for _ in range(3)]
    outcomes += [box.begin(lambda: box.coordinator.wait_applied(NONE + 1))]
    outcomes += [box.begin(lambda: box.coordinator.subscribe().wait_newer(PATIENCE_S))]
    box.await_waiters(5)
    box.flusher.durable_errors.append(OSError("EIO"))
    box.flusher.durable_gate.open()
    box.join()
    for outcome in [leader, *outcomes]:
        assert isinstance(outcome[0], OutcomeUnknown)
        assert (outcome[0].first, outcome[0].last) == (NONE + 1, NONE + 4)
    with pytest.raises(Poisoned):
        box.write()
    assert box.coordinator.statistics().flush_failures == 1


def test_what_was_durable_before_a_failure_still_is(box: Box) -> None:
    first = box.coordinator.write_durable(Adds(a=1)).epoch
    box.write()
    box.flusher.durable_errors.append(OSError("EIO"))
    with pytest.raises(OutcomeUnknown) as caught:
        box.coordinator.flush()
    assert caught.value.first == first + 1
    assert box.coordinator.flush(first).epoch == first
    box.coordinator.wait_applied(first)


def test_views_of_durable_batches_go_on_after_a_failed_flush(box: Box) -> None:
    box.write()
    box.flusher.apply_gate.shut()
    box.begin(box.coordinator.flush)
    box.flusher.apply_gate.await_arrival()
    applied = box.begin(lambda: box.coordinator.wait_applied(NONE + 1))
    box.await_waiters(1)
    box.flusher.durable_errors.append(OSError("EIO"))
    with pytest.raises(OutcomeUnknown):
        box.coordinator.write_durable(Adds(b=1))
    assert applied == []
    box.flusher.apply_gate.open()
    box.join()
    assert applied == [Acknowledgement(Epoch(NONE + 1), Durability.DISK)]
    assert box.coordinator.layers.view == {"a": 1}


@pytest.mark.parametrize("end", ["apply", "fail", "shutdown"])
def test_many_unapplied_batches_hold_the_next_flush_back(box: Box, end: str) -> None:
    box.flusher.apply_gate.shut()
    box.begin(lambda: box.coordinator.write_durable(Adds(a=1)))
    box.flusher.apply_gate.await_arrival()
    for _ in range(UNAPPLIED_MAX - 1):
        box.coordinator.write_durable(Adds(a=1))
    outcomes = [box.begin(lambda: box.coordinator.write_durable(Adds(a=1))) for _ in range(3)]
    box.await_waiters(3)
    box.clock.advance(1.0)
    assert box.coordinator.run_pending() == 0
    assert len(box.coordinator.layers.deltas) == UNAPPLIED_MAX
    assert total(box.coordinator.layers) == {"a": UNAPPLIED_MAX + 3}
    if end == "shutdown":
        with pytest.raises(OutcomeUnknown):
            box.coordinator.shutdown(timeout_s=0.01)
        spin_until(lambda: all(outcomes))
    elif end == "fail":
        box.flusher.apply_errors.append(ValueError("bad row"))
    box.flusher.apply_gate.open()
    box.join()
    if end == "apply":
        assert [outcome[0].epoch for outcome in outcomes] == [NONE + UNAPPLIED_MAX + 3] * 3
        assert box.flusher.calls[-1] == (UNAPPLIED_MAX + 1, UNAPPLIED_MAX + 3, False)
        box.coordinator.wait_applied(NONE + UNAPPLIED_MAX + 3)
    else:
        assert [type(outcome[0]) for outcome in outcomes] == [OutcomeUnknown if end == "fail" else Closed] * 3
    if end == "fail":
        box.coordinator.recover()
    assert total(box.coordinator.layers) == {"a": UNAPPLIED_MAX + 3}


# -- triggers


def test_the_timer_runs_from_the_first_write_into_an_empty_delta(box: Box) -> None:
    box.clock.advance(5.0)
    box.write()
    box.clock.advance(0.06)
    box.write()
    assert box.coordinator.run_pending() == 0
    box.clock.advance(0.05)
    assert box.coordinator.run_pending() == 1
    assert box.flusher.calls == [(1, 2, False)]
    box.write()
    box.clock.advance(0.09)
    assert box.coordinator.run_pending() == 0
    assert box.coordinator.statistics().flushes == {Trigger.TIMER: 1}


def test_a_full_delta_is_flushed_at_once() -> None:
    box = Box(CoordinatorSettings(flush_bytes=30, bytes_max=1000))
    box.write()
    box.write()
    assert box.coordinator.run_pending() == 0
    box.write()
    assert box.coordinator.run_pending() == 1
    assert box.coordinator.statistics().flushes == {Trigger.SIZE: 1}


def test_a_flush_that_does_not_wait_is_asked_for(box: Box) -> None:
    epoch = box.write()
    with pytest.raises(WaitExpired):
        box.coordinator.flush(timeout_s=0.0)
    assert box.flusher.calls == []
    assert box.coordinator.run_pending() == 1
    assert box.coordinator.flush(timeout_s=0.0).epoch == epoch
    assert box.coordinator.statistics().flushes == {Trigger.EXPLICIT: 1}
    with pytest.raises(WaitExpired):
        box.coordinator.subscribe().wait_newer(0.0)


# -- room


def small() -> Box:
    return Box(CoordinatorSettings(flush_bytes=20, bytes_max=30, waiting_writes_max=2))


def test_a_write_without_room_is_refused_and_changes_nothing() -> None:
    box = small()
    for _ in range(3):
        box.coordinator.try_write(Adds(a=1))
    with pytest.raises(Backpressure):
        box.coordinator.try_write(Adds(a=1))
    with pytest.raises(Backpressure):
        box.coordinator.write(Adds(a=1), timeout_s=0.01)
    assert total(box.coordinator.layers) == {"a": 3}
    assert box.coordinator.last == NONE + 3
    assert box.coordinator.statistics().refused_writes == 2
    assert box.coordinator.flush().epoch == NONE + 3
    assert box.coordinator.try_write(Adds(a=1)) == NONE + 4


def test_bytes_in_flight_count_until_they_are_applied() -> None:
    box = small()
    for _ in range(3):
        box.write()
    box.flusher.apply_gate.shut()
    box.begin_flush_held()
    assert box.coordinator.statistics().in_flight_bytes == 30
    for gate in (box.flusher.durable_gate, box.flusher.apply_gate):
        with pytest.raises(Backpressure):
            box.coordinator.try_write(Adds(a=1))
        gate.open()
        if gate is box.flusher.durable_gate:
            box.flusher.apply_gate.await_arrival()
    box.join()
    assert box.coordinator.statistics().in_flight_bytes == 0
    box.coordinator.try_write(Adds(a=1))


def test_waiting_writes_go_on_in_their_order_and_only_so_many_wait() -> None:
    box = small()
    for _ in range(3):
        box.write()
    first = box.begin(lambda: box.coordinator.write(Adds(b=1), size_hint=30, timeout_s=PATIENCE_S))
    box.await_waiting_writes(1)
    second = box.begin(lambda: box.coordinator.write(Adds(c=1), timeout_s=PATIENCE_S))
    box.await_waiting_writes(2)
    with pytest.raises(Backpressure, match="2 writes wait"):
        box.coordinator.write(Adds(d=1), timeout_s=PATIENCE_S)
    assert box.coordinator.run_pending() == 1  # a write that waits is a reason to flush
    spin_until(lambda: first == [NONE + 4])
    assert second == []  # the first took all the room
    box.coordinator.flush()
    box.join()
    assert second == [NONE + 5]


def test_small_writes_pass_a_large_one_that_waits_but_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.coordinator.waiting.SMALL_BYTES", 10)
    monkeypatch.setattr("penstock.coordinator.waiting.LARGE_BYTES", 20)
    box = Box(CoordinatorSettings(flush_bytes=100, bytes_max=100, waiting_writes_max=9))
    for _ in range(6):
        box.coordinator.write(Adds(a=1), size_hint=10)
    large = box.begin(lambda: box.coordinator.write(Adds(b=1), size_hint=50, timeout_s=PATIENCE_S))
    box.await_waiting_writes(1)
    for _ in range(4):
        box.coordinator.try_write(Adds(c=1), size_hint=10)  # there is room for these
    last = box.begin(lambda: box.coordinator.write(Adds(c=1), size_hint=10, timeout_s=PATIENCE_S))
    box.await_waiting_writes(2)  # no room
    with pytest.raises(Backpressure):
        box.coordinator.try_write(Adds(c=1), size_hint=11)  # not small
    box.coordinator.flush()
    box.join()
    assert sorted([large[0], last[0]]) == [NONE + 11, NONE + 12]
    # As much as the large one wants has passed it by now: it is the next.
    box.coordinator.flush()
    for _ in range(10):
        box.coordinator.write(Adds(a=1), size_hint=6)
    large = box.begin(lambda: box.coordinator.write(Adds(b=1), size_hint=50, timeout_s=PATIENCE_S))
    box.await_waiting_writes(1)
    for _ in range(5):
        box.coordinator.try_write(Adds(c=1), size_hint=8)
    with pytest.raises(Backpressure):
        box.coordinator.try_write(Adds(c=1), size_hint=8)
    box.coordinator.flush()
    box.join()


def test_one_who_gives_up_makes_way() -> None:
    box = small()
    box.write()
    box.write()
    large = box.begin(lambda: box.coordinator.write(Adds(b=1), size_hint=30, timeout_s=0.2))
    box.await_waiting_writes(1)
    small_one = box.begin(lambda: box.coordinator.write(Adds(c=1), timeout_s=PATIENCE_S))
    box.join()
    assert isinstance(large[0], Backpressure)
    assert small_one == [NONE + 3]


def test_waiting_writes_are_answered_by_a_failure_and_by_the_end() -> None:
    for end in ("fail", "shutdown"):
        box = small()
        for _ in range(3):
            box.write()
        waiting = [box.begin(lambda: box.coordinator.write(Adds(b=1), timeout_s=PATIENCE_S)) for _ in range(2)]  # noqa: B023
        box.await_waiting_writes(2)
        if end == "fail":
            box.flusher.durable_errors.append(OSError("EIO"))
            with pytest.raises(OutcomeUnknown):
                box.coordinator.flush()
        else:
            box.coordinator.shutdown()
        box.join()
        assert [type(outcome[0]) for outcome in waiting] == [Poisoned if end == "fail" else Closed] * 2


def test_a_write_that_can_never_fit_is_wrong() -> None:
    box = small()
    for size in (31, -1):
        with pytest.raises(Invalid):
            box.coordinator.write(Adds(a=1), size_hint=size)
    assert box.coordinator.last == NONE


def test_an_insert_that_raises_leaves_a_number_and_nothing_else(box: Box) -> None:
    def refuse(pending: Adds, a: None, b: None, c: None) -> None:
        raise ValueError

    for _ in range(2):  # with and without a look
        with pytest.raises(ValueError):
            box.coordinator.write_into(refuse, 10, None, None, None)
        box.write()
    box.coordinator.wait_applied()
    assert box.coordinator.layers.view == {"a": 2}
    assert box.coordinator.statistics().pending_bytes == 0


def test_epochs_that_run_out_refuse_writes(box: Box) -> None:
    box.write()
    box.coordinator._epochs.last += COUNT_MAX - 10  # type: ignore[assignment]
    box.coordinator.flush()
    with pytest.raises(Poisoned, match="used up"):
        box.write()


# -- reading


def test_a_write_is_readable_between_fsync_and_apply(box: Box) -> None:
    box.write("a", 1)
    box.coordinator.flush()
    box.write("a", 10)
    box.flusher.apply_gate.shut()
    box.begin_flush_held()
    box.write("a", 100)
    assert total(box.coordinator.layers) == {"a": 111}
    box.flusher.durable_gate.open()
    box.flusher.apply_gate.await_arrival()
    between = box.coordinator.layers
    assert (between.view, [d.rows for d in between.deltas], between.pending.rows) == ({"a": 1}, [{"a": 10}], {"a": 100})
    box.flusher.apply_gate.open()
    box.join()
    after = box.coordinator.layers
    assert (after.view, after.deltas, after.pending.rows) == ({"a": 11}, (), {"a": 100})
    assert total(between) == {"a": 111}  # who took it before keeps a state that counts once


def test_a_sealed_layer_does_not_change_and_is_flushed_in_order(box: Box) -> None:
    box.write("a", 1)
    sealed = box.coordinator.seal_pending()
    box.write("a", 10)
    assert total(sealed, pending=False) == {"a": 1}
    again = box.coordinator.seal_pending()
    assert [delta.rows for delta in again.deltas] == [{"a": 10}, {"a": 1}]
    assert box.coordinator.seal_pending().deltas == again.deltas  # nothing to seal
    box.coordinator.flush()
    assert box.flusher.calls == [(1, 2, False)]
    assert box.coordinator.layers.view == {"a": 11}
    assert box.coordinator.layers.deltas == ()


def test_many_seals_do_not_make_many_layers(box: Box) -> None:
    box.flusher.apply_gate.shut()
    box.write("a", 1)
    box.begin(box.coordinator.flush)
    box.flusher.apply_gate.await_arrival()
    for number in range(100):
        box.write("a", 1)
        sealed = box.coordinator.seal_pending()
        assert total(sealed, pending=False) == {"a": number + 2}
        assert len(sealed.deltas) <= 9
    box.flusher.apply_gate.open()
    box.join()
    box.coordinator.flush()
    assert box.coordinator.layers.view == {"a": 101}


def test_a_subscription_shows_the_latest_view_and_waits_for_newer_ones(box: Box) -> None:
    slow = box.coordinator.subscribe()
    subscription = box.coordinator.subscribe()
    assert subscription.latest() == {}
    outcome = box.begin(lambda: subscription.wait_newer(PATIENCE_S))
    box.await_waiters(1)
    box.coordinator.write_durable(Adds(a=1))
    box.join()
    assert outcome == [{"a": 1}]
    with pytest.raises(WaitExpired):
        subscription.wait_newer(0.01)
    box.coordinator.write_durable(Adds(a=1))
    assert slow.wait_newer(0.0) == {"a": 2}  # it missed one, and held nobody up
    outcome = box.begin(lambda: slow.wait_newer(PATIENCE_S))
    box.await_waiters(1)
    box.coordinator.shutdown()
    box.join()
    assert isinstance(outcome[0], Closed)


# -- the background thread


@contextmanager
def started(**sizes: Any) -> Iterator[Box]:
    box = Box(CoordinatorSettings(**sizes), fake_clock=False)
    box.coordinator.start()
    with box.coordinator:
        yield box
        box.join()


def test_the_thread_flushes_by_timer_by_size_and_after_idling() -> None:
    with started(flush_interval_s=0.005, flush_bytes=50) as box:
        for _ in range(3):
            epoch = box.write()
            spin_until(lambda: box.coordinator.applied == epoch)  # noqa: B023
            spin_until(lambda: not box.coordinator._background.awake)
        assert set(box.coordinator.statistics().flushes) == {Trigger.TIMER}
        assert threading.get_ident() not in box.flusher.threads
    with started(flush_interval_s=1e6, flush_bytes=50) as box:
        spin_until(lambda: not box.coordinator._background.awake)
        for _ in range(7):
            box.write()
        spin_until(lambda: box.coordinator.applied >= NONE + 5)
        assert set(box.coordinator.statistics().flushes) == {Trigger.SIZE}


def test_the_thread_takes_over_applies_so_that_a_caller_is_not_held_up() -> None:
    with started(flush_interval_s=1e6) as box:
        box.flusher.apply_gate.shut()
        first = box.begin(lambda: box.coordinator.write_durable(Adds(a=1)))
        box.flusher.apply_gate.await_arrival()
        second = box.coordinator.write_durable(Adds(a=1))  # does not wait for the first one's apply
        assert second.epoch == NONE + 2
        box.flusher.apply_gate.open()
        box.coordinator.wait_applied(second.epoch, PATIENCE_S)
        box.join()
        assert first[0].epoch in (NONE + 1, NONE + 2)
        assert box.flusher.applied == [1, 2]


def test_writers_faster_than_the_disk_wait_and_memory_stays_bounded() -> None:
    with started(flush_interval_s=0.01, flush_bytes=100, bytes_max=300) as box:

        def write() -> None:
            for _ in range(500):
                box.coordinator.write(Adds(a=1), timeout_s=PATIENCE_S)
                statistics = box.coordinator.statistics()
                assert statistics.pending_bytes + statistics.in_flight_bytes <= 300

        outcomes = [box.begin(write) for _ in range(4)]
        box.join()
        assert outcomes == [[None]] * 4
        box.coordinator.wait_applied(box.coordinator.last)
        assert box.coordinator.layers.view == {"a": 2000}


# -- the end


def test_shutdown_flushes_and_closes(box: Box) -> None:
    box.coordinator.start()
    epoch = box.write()
    box.coordinator.shutdown()
    assert box.coordinator.layers.view == {"a": 1}
    assert box.coordinator.flush(epoch).epoch == epoch
    with pytest.raises(Closed):
        box.write()
    with pytest.raises(Closed):
        box.coordinator.recover()
    box.coordinator.shutdown()
    assert box.coordinator._thread is not None
    assert not box.coordinator._thread.is_alive()


def test_shutdown_answers_everyone_even_if_a_flush_hangs(box: Box) -> None:
    box.write()
    box.begin_flush_held()
    epoch = box.write()
    follower = box.begin(lambda: box.coordinator.flush(epoch))
    box.await_waiters(1)
    with pytest.raises(OutcomeUnknown) as caught:
        box.coordinator.shutdown(timeout_s=0.05)
    assert (caught.value.first, caught.value.last) == (NONE + 1, NONE + 2)
    spin_until(lambda: len(follower) == 1)
    assert isinstance(follower[0], Closed)
    box.flusher.durable_gate.open()
    box.join()


def test_the_end_of_with_keeps_the_error_that_ended_it(box: Box) -> None:
    box.flusher.durable_errors.append(OSError("EIO"))
    with pytest.raises(KeyError) as caught, box.coordinator:
        box.write()
        raise KeyError
    assert "may be durable or not" in caught.value.__notes__[0]


def test_the_interpreters_exit_flushes() -> None:
    script = """
from penstock.coordinator import *
class Puts(dict):
    def is_empty(self): return not self
    def merge(self, other): self.update(other)
    def size_estimate(self): return 1
class Printer:
    durability = Durability.DISK
    def make_durable(self, batch, *, again): print("flushed", [dict(d) for d in batch.deltas], flush=True)
    def apply(self, flushed): return None
coordinator = WriteCoordinator(
    Printer(), Puts, view=None, incarnation=1, settings=CoordinatorSettings(flush_interval_s=1e6)).start()
coordinator.write(Puts(a=1))
print("end of main", flush=True)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines() == ["end of main", "flushed [{'a': 1}]"]
    assert ran.stderr == ""


# -- metrics


def test_metrics_say_what_the_statistics_say(box: Box) -> None:
    metrics = Metrics()
    export(box.coordinator, metrics)
    box.coordinator.write_durable(Adds(a=1))
    box.write()
    text = metrics.exposition()
    for line in (
        "penstock_coordinator_writes_total 2",
        "penstock_coordinator_written_bytes_total 20",
        "penstock_coordinator_pending_bytes 10",
        'penstock_coordinator_flushes_total{trigger="explicit"} 1',
        "penstock_coordinator_flush_failures_total 0",
        "penstock_coordinator_waiters 0",
        "penstock_coordinator_failed 0",
    ):
        assert line in text.splitlines()
    assert "penstock_coordinator_flush_seconds_total" in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"flush_interval_s": 0},
        {"flush_bytes": 0},
        {"flush_bytes": 2, "bytes_max": 1},
        {"waiting_writes_max": -1},
        {"shutdown_timeout_s": float("inf")},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        CoordinatorSettings(**wrong)


# -- the order of publication, with the bugs that it must catch


def check_publication(box: Box) -> None:
    """Readers watch while writers write: no watermark shows what is not there, and every write is readable at once."""
    coordinator, flusher = box.coordinator, box.flusher
    flusher.pause_s = 0.0002
    over = threading.Event()

    def observe() -> None:
        while not over.is_set():
            written = coordinator.last - NONE
            durable = coordinator.durable
            assert durable <= flusher.synced, "told durable before the fsync"
            applied = coordinator.applied
            layers = coordinator.layers
            assert applied <= layers.applied, "watermark before the view"
            assert layers.view.get("all", 0) >= layers.applied - NONE, "the view does not hold what it says"
            counts = [layers.pending.rows.get("all", 0), *(delta.rows["all"] for delta in layers.deltas)]
            visible = sum(counts) + layers.view.get("all", 0)
            # A write takes its number first: the last one may still be on its way into the pending delta.
            assert written - 1 <= visible <= coordinator.last - NONE, "a write is in no layer, or in two"

    def write(name: str) -> None:
        for number in range(1, 151):
            epoch = coordinator.write(Adds(all=1, **{name: 1}))
            assert total(coordinator.layers)[name] == number, "one's own write is not readable, or is counted twice"
            if number % 3 == 0:
                coordinator.flush(epoch)
                assert flusher.synced >= epoch
            if number % 10 == 0:
                coordinator.wait_applied(epoch)
                assert coordinator.layers.view[name] == number
            if number % 25 == 0:
                assert total(coordinator.seal_pending(), pending=False)[name] == number

    readers = [box.begin(observe) for _ in range(2)]
    writers = [box.begin(lambda name=f"w{n}": write(name)) for n in range(4)]  # type: ignore[misc]
    spin_until(lambda: all(writers) or any(readers))
    over.set()
    box.join()
    for outcome in readers + writers:
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
    assert coordinator.seal_pending().view.get("all", 0) <= 600


@pytest.fixture
def switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_see_the_order_of_publication_and_take_locks_in_order() -> None:
    checker = LockOrderChecker()
    with checker.installed(), started(flush_interval_s=0.001, flush_bytes=300) as box:
        box.flusher.watch = checker.check_io
        check_publication(box)
        box.coordinator.shutdown()
        assert {key: number for key, number in box.flusher.view.items() if key != "all"} == dict.fromkeys(
            ["w0", "w1", "w2", "w3"], 150
        )
    assert checker.order().get("coordinator", set()) == set()


def acknowledge_before_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    next_batch = FlushExecutor._next_batch

    def early(self: FlushExecutor[Any, Any, Any]) -> Batch[Any] | None:
        batch = next_batch(self)
        if batch is not None:
            self._buffer.layers = self._buffer.layers._replace(durable=batch.last)
            for waiter in self.waiters.take_reached(batch.last, 0):
                waiter.wake()
        return batch

    monkeypatch.setattr(FlushExecutor, "_next_batch", early)


def watermark_before_view(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_next = FlushExecutor._apply_next

    def early(self: FlushExecutor[Any, Any, Any]) -> Any:
        with self._lock:
            last = self._buffer.layers.batches[0].last
            self._buffer.layers = self._buffer.layers._replace(applied=last)
            reached = self.waiters.take_reached(0, last)
        for waiter in reached:
            waiter.wake()
        return apply_next(self)

    monkeypatch.setattr(FlushExecutor, "_apply_next", early)


def retire_before_view(monkeypatch: pytest.MonkeyPatch) -> None:
    apply_next = FlushExecutor._apply_next

    def early(self: FlushExecutor[Any, Any, Any]) -> Any:
        with self._lock:
            now = self._buffer.layers
            deltas = now.batches[0].deltas
            self._buffer.layers = now._replace(deltas=now.deltas[: -len(deltas)])
        threading.Event().wait(0.001)
        with self._lock:
            again = self._buffer.layers
            self._buffer.layers = again._replace(deltas=(*again.deltas, *reversed(deltas)))
        return apply_next(self)

    monkeypatch.setattr(FlushExecutor, "_apply_next", early)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("bug", [acknowledge_before_fsync, watermark_before_view, retire_before_view])
def test_the_check_of_publication_catches(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    box = Box(CoordinatorSettings(flush_interval_s=0.001, flush_bytes=300), fake_clock=False)
    box.coordinator.start()
    with pytest.raises((AssertionError, KeyError)):
        check_publication(box)
    box.coordinator._close(PATIENCE_S)


# -- writes that are held at the door, and a thread that is awake


def test_a_held_coordinator_lets_no_write_in_until_it_is_let_go() -> None:
    with started() as box:
        taken = box.write()  # the room is open by now
        box.coordinator.hold("rows are in no file yet")
        with pytest.raises(Backpressure, match="rows are in no file yet, and no room came within"):
            box.coordinator.write(Adds(a=1), timeout_s=0.01)
        assert box.coordinator.last == taken
        assert box.coordinator.flush(taken).epoch == taken  # what was taken in before goes on
        waiting = box.begin(lambda: box.coordinator.write(Adds(a=1), timeout_s=PATIENCE_S))
        spin_until(lambda: box.coordinator.statistics().waiting_writes == 1)
        box.coordinator.hold(None)
        box.join()
        assert waiting == [taken + 1]


def test_what_is_written_while_the_thread_is_awake_is_flushed_without_a_call() -> None:
    with started(flush_interval_s=0.01) as box:
        box.coordinator.write_durable(Adds(a=1))
        spin_until(lambda: box.coordinator._background.awake)
        for _ in range(50):  # into a room that is open: nobody tells the thread
            epoch = box.write()
            spin_until(lambda: box.coordinator.durable >= epoch)  # noqa: B023


# -- groups: threads that come back together share a flush


class Threads:
    """Threads that write and wait for it, played by one: what each is told by `join` is seen."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.executor = box.coordinator._executor
        self.waiters: dict[int, Waiter] = {}

    def write(self, *threads: int) -> None:
        for thread in threads:
            self.waiters[thread] = Waiter(Epoch(self.box.write()), applied=True)
            self.waiters[thread].thread = thread

    def join(self, thread: int) -> float:
        with self.executor._lock:
            return self.executor.join(self.waiters[thread])

    def work(self, thread: int) -> set[int]:
        """Let one do what it has a turn for; who is woken."""
        self.executor.work(self.waiters[thread], Trigger.EXPLICIT)
        return {thread for thread, waiter in self.waiters.items() if waiter.reached}

    def share(self, *threads: int) -> None:
        """A flush for all, led by the first."""
        self.write(*threads)
        assert [self.join(thread) > 0 for thread in threads] == [False] + [True] * (len(threads) - 1)
        assert self.work(threads[0]) == set(threads[1:])


@pytest.fixture
def group(box: Box) -> Threads:
    """Three that came back together once."""
    threads = Threads(box)
    threads.share(1, 2, 3)
    threads.share(1, 2, 3)
    return threads


def test_the_last_of_a_group_flushes_for_all_of_it(group: Threads) -> None:
    for first, second, third in [(1, 2, 3), (3, 1, 2), (2, 3, 1)]:
        group.write(1, 2, 3)
        assert group.join(first) == 3 * GATHER_S
        assert group.join(second) == RECHECK_S
        assert group.join(third) == 0.0
        assert group.work(third) == {first, second}


def test_one_that_does_not_come_back_is_waited_for_once(group: Threads) -> None:
    group.write(1, 2)
    del group.waiters[3]
    assert (group.join(1), group.join(2)) == (3 * GATHER_S, RECHECK_S)
    assert group.join(1) == 0.0  # its time is over
    assert group.work(1) == {2}
    group.write(1, 2)
    assert (group.join(1), group.join(2)) == (2 * GATHER_S, 0.0)
    assert group.work(2) == {1}


def test_the_background_thread_waits_for_a_group_and_not_for_long(box: Box) -> None:
    """As a client's does, where callers wait and do not flush."""
    flush_s = GATHER_S_MAX * 3.5
    box.flusher.watch = lambda where: box.clock.advance(flush_s) if where == "make_durable" else None
    gates = [threading.Semaphore(0) for _ in range(3)]

    def write_often(number: int) -> None:
        for _ in range(5):
            assert gates[number].acquire(timeout=PATIENCE_S)
            box.coordinator.wait_flushed(box.write(), PATIENCE_S)

    def come(*numbers: int, waiting: int) -> int:
        """Let threads write; return the number of flushes that are due when they all wait."""
        for number in numbers:
            gates[number].release()
        box.await_waiters(waiting)
        return box.coordinator.run_pending()

    for number in range(3):
        box.begin(lambda number=number: write_often(number))  # type: ignore[misc]
    assert come(0, 1, 2, waiting=3) == 1
    assert come(0, 1, 2, waiting=3) == 1  # all came back: from now on three are expected
    assert come(0, waiting=1) == come(1, waiting=2) == 0
    assert come(2, waiting=3) == 1
    assert come(0, 1, waiting=2) == 0
    box.clock.advance(GATHER_S_MAX * 1.01)  # the third does not come
    assert box.coordinator.run_pending() == 1
    assert come(0, 1, waiting=2) == 1  # nor is it expected any more
    assert come(2, waiting=1) == 0
    box.clock.advance(GATHER_S_MAX * 1.01)  # the two do not come
    assert box.coordinator.run_pending() == 1
    assert come(2, waiting=1) == 1  # one alone never waits
    box.join()
    assert [last - first + 1 for first, last, _ in box.flusher.calls] == [3, 3, 3, 2, 2, 1, 1]


def test_a_request_for_what_is_on_its_way_is_not_left_over(box: Box) -> None:
    """With one left over, the next group's requests would wake nobody, and wait for the timer."""
    background, lock = box.coordinator._background, box.coordinator._lock

    def ask(where: str) -> None:
        if where == "make_durable":
            with lock:
                background.ask()

    box.flusher.watch = ask
    box.write()
    box.clock.advance(60)
    assert box.coordinator.run_pending() == 1
    with lock:
        background._sleep_s()  # as the thread does when it finds nothing more
        assert not background._requested


def test_a_thread_that_sleeps_past_the_time_of_a_group_is_woken(box: Box) -> None:
    background, lock = box.coordinator._background, box.coordinator._lock
    woken: list[None] = []
    background._wakeup.notify = lambda n=1: woken.append(None)  # type: ignore[method-assign]
    box.coordinator._executor._group = 2  # one more is expected than comes
    with lock:
        background.awake, background._until_s = True, box.clock.monotonic_s() + 60  # it found that another led
        box.coordinator._executor.flush_s_last = 1.0
        background.ask()
        woken.clear()
        background.wake_if_due(room_wanted=False)
        assert not woken  # nothing to flush
    box.write()
    with lock:
        background._requested, background._due_s = True, box.clock.monotonic_s() + 60
        woken.clear()
        background.wake_if_due(room_wanted=False)
        assert woken


def test_others_than_those_who_were_woken_are_no_reason_to_wait(box: Box) -> None:
    threads = Threads(box)
    for first in range(0, 20, 2):
        threads.waiters.clear()
        threads.share(first, first + 1)


def test_threads_that_do_something_else_between_their_writes_are_not_waited_for(box: Box) -> None:
    """They write again while a flush is under way, but not soon after the last one: a slow disk is not a group."""
    threads = Threads(box)
    threads.share(1, 2)
    for _ in range(3):
        box.clock.advance(0.002)
        threads.share(1, 2)  # the first leads at once


@pytest.mark.parametrize("count", [2, 8, 100])
def test_a_group_waits_a_short_time_for_each_of_its_threads(box: Box, count: int) -> None:
    threads, many = Threads(box), range(count)
    for _ in range(2):
        threads.share(*many)
    threads.write(*many)
    assert threads.join(0) == min(count * GATHER_S, GATHER_S_MAX)
    assert [threads.join(number) for number in many[1:]] == [RECHECK_S] * (count - 2) + [0.0]
    assert threads.work(many[-1]) == set(many[:-1])


def test_one_who_gathers_and_leaves_hands_the_turn_on(group: Threads) -> None:
    group.write(1, 2)
    assert (group.join(1), group.join(2)) == (3 * GATHER_S, RECHECK_S)
    group.executor.leave(group.waiters[1])
    assert group.executor.leading is group.waiters[2]
    assert group.waiters[2].wait(0.0)
    assert group.join(2) == 3 * GATHER_S  # it may still be the first of three
    assert group.join(2) == 0.0
    group.work(2)
    assert group.box.state() is State.IDLE


def test_a_thread_that_gathers_can_be_woken_to_apply(group: Threads) -> None:
    """It has the apply turn then, and the write turn can still be taken from it."""
    group.write(2, 3)
    assert (group.join(2), group.join(3), group.join(2)) == (3 * GATHER_S, RECHECK_S, 0.0)

    def interrupt(where: str) -> None:
        if where == "apply":
            group.box.flusher.watch = lambda where: None
            group.executor.waiters.discard(group.waiters[3])  # its wait ended
            group.write(1)
            assert group.join(1) == 3 * GATHER_S
            raise KeyboardInterrupt

    group.box.flusher.watch = interrupt
    with pytest.raises(KeyboardInterrupt):
        group.work(2)
    group.executor.leave(group.waiters[2])
    assert group.executor.leading is group.executor.applying is group.waiters[1]
    assert group.join(1) == 0.0
    group.work(1)
    assert group.box.coordinator.seal_pending().view == {"a": 8}  # applied; its own write is not flushed
    assert group.executor.leading is group.waiters[1]
    assert group.join(1) == 0.0  # its time is over
    group.work(1)
    assert group.box.state() is State.IDLE


def test_waiters_wake_each_other_and_an_interrupt_does_not_break_the_chain(
    group: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.write(1, 2, 3)
    assert (group.join(1), group.join(2), group.join(3)) == (3 * GATHER_S, RECHECK_S, 0.0)
    assert group.work(3) == {1, 2}
    first, second = group.waiters[1], group.waiters[2]
    assert first.wait(0.0)
    assert not second.wait(0.0)  # the first wakes it

    def interrupt(*_: object) -> float:
        raise KeyboardInterrupt

    first.epoch = Epoch(group.box.write())  # a wait that is not over
    monkeypatch.setattr(group.box.coordinator, "_sleep", interrupt)
    group.executor.leading = second
    with pytest.raises(KeyboardInterrupt):
        group.box.coordinator._await(first, PATIENCE_S)
    assert second.wait(0.0)


def test_a_batch_whose_apply_fails_at_once_is_durable_and_the_failure_is_told(box: Box) -> None:
    epoch = box.write()
    box.flusher.apply_errors.append(OSError("apply"))
    with pytest.raises(Poisoned, match="is durable, but its apply failed"):
        box.coordinator.wait_applied(epoch)
    assert box.coordinator.durable >= epoch


def test_one_that_came_during_a_flush_waits_for_the_group_that_is_woken(group: Threads) -> None:
    group.write(1, 2, 3)
    assert (group.join(1), group.join(2), group.join(3)) == (3 * GATHER_S, RECHECK_S, 0.0)
    late: list[float] = []

    def come_late(where: str) -> None:
        if where == "make_durable" and not late:
            group.write(4)
            late.append(group.join(4))

    group.box.flusher.watch = come_late
    assert group.work(3) == {1, 2}
    assert late == [RECHECK_S]
    assert group.executor.leading is group.waiters[4]
    assert group.join(4) == 4 * GATHER_S
    group.write(1, 2, 3)
    assert (group.join(2), group.join(1), group.join(3)) == (RECHECK_S, RECHECK_S, 0.0)
    assert group.work(3) == {1, 2, 4}


def test_threads_that_write_one_after_the_other_share_flushes() -> None:
    with started() as box:
        box.flusher.pause_s = 0.001

        def run() -> None:
            for _ in range(50):
                box.coordinator.write_durable(Adds(a=1))

        outcomes = [box.begin(run) for _ in range(8)]
        box.join()
        assert outcomes == [[None]] * 8
        box.coordinator.wait_applied()  # all are durable: the last may still be applied by the background thread
        assert box.coordinator.seal_pending().view == {"a": 400}
