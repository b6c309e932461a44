"""A coordinator against plain sums, with a flusher that fails at random, followers in real threads, and crashes.

Every write adds numbers, so that what is lost or applied twice shows in a sum. The flusher keeps a "disk": records that
were synced, each with its last epoch as its token, as the ledger does. A flush may fail before anything is on disk or
after everything is; while it is in its fsync, other writes, seals and followers come.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Self

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from penstock.coordinator import Batch, CoordinatorSettings, Durability, Epoch, Layers, State, WriteCoordinator
from penstock.coordinator.executor import FlushExecutor
from penstock.errors import Backpressure, Invalid, Lost, OutcomeUnknown, Poisoned, WaitExpired
from penstock.testing import FakeClock

PATIENCE_S = 20.0
KEYS = st.sampled_from("abc")
NUMBERS = st.integers(1, 1000)
FATES = st.sampled_from(["good", "good", "good", "fail before", "fail after"])
APPLY_FATES = st.sampled_from(["good", "good", "good", "fail before"])
MEANWHILE = st.lists(st.sampled_from(["write", "seal", "follow", "follow_applied", "expire"]), max_size=4)
BYTES_MAX = 400


class Sums:
    """A delta of numbers to be added."""

    def __init__(self, rows: dict[str, int] | None = None) -> None:
        self.rows = Counter(rows or {})

    def is_empty(self) -> bool:
        return not self.rows

    def merge(self, other: Self, /) -> None:
        self.rows.update(other.rows)

    def size_estimate(self) -> int:
        return 10 * len(self.rows)


def add(pending: Sums, key: str, number: int, _: None) -> None:
    pending.rows[key] += number


Record = tuple[int, dict[str, int]]  # the token, and what to add
Coordinator = WriteCoordinator[Sums, Record, dict[str, int]]


class FailingFlusher:
    """Follows a list of fates; good when the list is empty."""

    durability = Durability.DISK

    def __init__(self, machine: CoordinatorMachine) -> None:
        self.machine = machine
        self.disk: list[Record] = []
        self.fates: deque[str] = deque()
        self.apply_fates: deque[str] = deque()
        self.recover_fates: deque[str] = deque()
        self.view: dict[str, int] = {}
        self.ledger: set[int] = set()

    def make_durable(self, batch: Batch[Sums], *, again: bool) -> Record:
        fate = self.fates.popleft() if self.fates else "good"
        self.machine.visit(self.machine.look, self.machine.do_meanwhile, self.machine.look)
        if fate == "fail before":
            raise OSError(fate)
        rows: Counter[str] = Counter()
        for delta in batch.deltas:
            rows.update(delta.rows)
        record = (batch.last, dict(rows))
        self.disk.append(record)
        if fate == "fail after":
            raise OSError(fate)
        return record

    def apply(self, flushed: Record) -> dict[str, int]:
        self.machine.visit(self.machine.look)
        if (self.apply_fates.popleft() if self.apply_fates else "good") != "good":
            raise ValueError("apply")
        token, rows = flushed
        if token not in self.ledger:
            self.ledger.add(token)
            self.view = dict(Counter(self.view) + Counter(rows))
        return self.view

    def recover(self) -> None:
        if (self.recover_fates.popleft() if self.recover_fates else "good") != "good":
            raise OSError("recover")

    def replay(self) -> dict[str, int]:
        """What a restart finds on the disk: each token once."""
        return dict(sum((Counter(rows) for rows in dict(self.disk).values()), Counter[str]()))


def fold(layers: Layers[Sums, dict[str, int]], *, pending: bool) -> dict[str, int]:
    sums = Counter(layers.view)
    for delta in layers.deltas:
        sums.update(delta.rows)
    if pending:
        sums.update(layers.pending.rows)
    return dict(sums)


class CoordinatorMachine(RuleBasedStateMachine):
    """Writes, flushes, failures, recoveries, crashes."""

    def __init__(self) -> None:
        super().__init__()
        self.flusher = FailingFlusher(self)
        self.incarnation = 0
        self.clock = FakeClock()
        self.written: dict[int, tuple[str, int]] = {}  # epoch -> what it added; all of this incarnation
        self.base: Counter[str] = Counter()  # what survived earlier incarnations
        self.acknowledged = 0
        self.meanwhile: list[str] = []
        self.followers: list[tuple[threading.Thread, int, str, list[Any]]] = []
        self.numbers = 0
        self.violations: list[BaseException] = []
        self.open()

    def open(self) -> None:
        self.incarnation += 1
        self.flusher.view = self.flusher.replay()
        self.base = Counter(self.flusher.view)
        self.flusher.ledger = {token for token, _ in self.flusher.disk}
        self.written.clear()
        self.acknowledged = self.incarnation << 40
        self.coordinator: Coordinator = WriteCoordinator(
            self.flusher,
            Sums,
            view=self.flusher.view,
            incarnation=self.incarnation,
            clock=self.clock,
            settings=CoordinatorSettings(flush_bytes=100, bytes_max=BYTES_MAX),
        )

    # -- what is true at every moment, also in the middle of a flush

    def visit(self, *checks: Callable[[], None]) -> None:
        """Check from inside the flusher, whose errors the coordinator takes for failures of the disk."""
        try:
            for check in checks:
                check()
        except BaseException as error:
            self.violations.append(error)
            raise

    def synced(self) -> int:
        return max([token for token, _ in self.flusher.disk if token >> 40 == self.incarnation], default=0)

    def look(self) -> None:
        coordinator = self.coordinator
        assert coordinator.durable <= max(self.synced(), self.incarnation << 40), "told durable before it is"
        assert coordinator.applied <= coordinator.layers.applied, "watermark before the view"
        assert coordinator.layers.view == self.expected(coordinator.layers.applied), "the view is not what was applied"
        assert fold(coordinator.layers, pending=True) == self.expected(coordinator.last), "one's own writes"

    def expected(self, up_to: int) -> dict[str, int]:
        """The sums of all writes up to an epoch."""
        sums = Counter(self.base)
        for epoch, (key, number) in self.written.items():
            if epoch <= up_to:
                sums[key] += number
        return dict(sums)

    @invariant()
    def always(self) -> None:
        self.join_followers()
        if self.violations:
            raise self.violations[0]
        self.look()
        statistics = self.coordinator.statistics()
        assert statistics.waiters == statistics.waiting_writes == 0
        assert 0 <= statistics.pending_bytes + statistics.in_flight_bytes <= BYTES_MAX

    def join_followers(self) -> None:
        for thread, epoch, step, outcome in self.followers:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a waiter hangs"
            if outcome == ["yes"]:
                assert epoch <= self.synced(), "a follower was told durable before it is"
                assert step != "follow_applied" or epoch <= self.coordinator.layers.applied
                self.acknowledged = max(self.acknowledged, epoch)
            else:
                assert isinstance(outcome[0], OutcomeUnknown | Poisoned), outcome
        self.followers.clear()

    # -- what comes while a flush is in its fsync

    def do_meanwhile(self) -> None:
        steps, self.meanwhile = self.meanwhile, []
        for step in steps:
            if step == "write":
                self.numbers += 1
                self.try_write("m", self.numbers)
            elif step == "seal":
                sealed = self.coordinator.seal_pending()
                assert fold(sealed, pending=False) == self.expected(self.coordinator.last)
            elif step == "expire":
                if self.coordinator.durable < self.coordinator.last:
                    with pytest.raises(WaitExpired):
                        self.coordinator.flush(timeout_s=0.0001)
            else:
                self.follow(step)

    def follow(self, step: str) -> None:
        """Another thread waits for the last write. Returns when it does."""
        coordinator, epoch = self.coordinator, self.coordinator.last
        wait: Callable[[int], object] = coordinator.flush if step == "follow" else coordinator.wait_applied
        outcome: list[Any] = []

        def run() -> None:
            try:
                wait(epoch)
                outcome.append("yes")
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=run, daemon=True)
        before = coordinator.statistics().waiters
        thread.start()
        tick = threading.Event()
        for _ in range(int(PATIENCE_S / 0.0001)):
            if coordinator.statistics().waiters > before or outcome:
                break
            tick.wait(0.0001)
        self.followers.append((thread, epoch, step, outcome))

    # -- rules

    def try_write(self, key: str, number: int, *, direct: bool = True) -> int | None:
        last = self.coordinator.last
        try:
            if direct:
                epoch = self.coordinator.write_into(add, 10, key, number, None, 0.0)
            else:
                epoch = self.coordinator.try_write(Sums({key: number}))
        except Poisoned:
            assert self.coordinator.state is State.FAILED
        except Backpressure:
            statistics = self.coordinator.statistics()
            assert statistics.pending_bytes + statistics.in_flight_bytes + 10 > BYTES_MAX
        else:
            assert epoch == last + 1
            self.written[epoch] = (key, number)
            return epoch
        assert self.coordinator.last == last
        return None

    @rule(key=KEYS, number=NUMBERS, direct=st.booleans(), times=st.integers(1, 12))
    def write(self, key: str, number: int, direct: bool, times: int) -> None:
        for _ in range(times):
            self.try_write(key, number, direct=direct)

    @rule(fates=st.lists(FATES, max_size=3), apply_fates=st.lists(APPLY_FATES, max_size=3), meanwhile=MEANWHILE)
    def flush(self, fates: list[str], apply_fates: list[str], meanwhile: list[str]) -> None:
        self.arm(fates, apply_fates, meanwhile)
        self.flush_to(self.coordinator.last)

    @rule(data=st.data(), fates=st.lists(FATES, max_size=2), meanwhile=MEANWHILE, applied=st.booleans())
    def flush_one(self, data: st.DataObject, fates: list[str], meanwhile: list[str], applied: bool) -> None:
        if self.written:
            self.arm(fates, [], meanwhile)
            self.flush_to(data.draw(st.sampled_from(list(self.written))), applied=applied)

    @rule(key=KEYS, number=NUMBERS, fates=st.lists(FATES, max_size=2), meanwhile=MEANWHILE)
    def write_durable(self, key: str, number: int, fates: list[str], meanwhile: list[str]) -> None:
        self.arm(fates, [], meanwhile)
        epoch = self.try_write(key, number)
        if epoch is not None:
            self.flush_to(epoch)

    def arm(self, fates: list[str], apply_fates: list[str], meanwhile: list[str]) -> None:
        self.flusher.fates = deque(fates)
        self.flusher.apply_fates = deque(apply_fates)
        self.meanwhile = list(meanwhile)

    def flush_to(self, epoch: int, *, applied: bool = False) -> None:
        try:
            if applied:
                self.coordinator.wait_applied(epoch)
                assert self.coordinator.layers.applied >= epoch
            else:
                self.coordinator.flush(epoch)
        except OutcomeUnknown as error:
            assert self.coordinator.state is State.FAILED
            assert self.coordinator.durable < error.first <= epoch <= error.last
        except Poisoned:
            assert applied
            assert epoch <= self.synced()
        else:
            assert epoch <= max(self.synced(), self.incarnation << 40), "told durable before it is"
            self.acknowledged = max(self.acknowledged, epoch)

    @rule(seconds=st.sampled_from([0.01, 0.2]), fates=st.lists(FATES, max_size=1), meanwhile=MEANWHILE)
    def time_passes(self, seconds: float, fates: list[str], meanwhile: list[str]) -> None:
        self.arm(fates, [], meanwhile)
        self.clock.advance(seconds)
        self.coordinator.run_pending()
        if seconds > 0.1 and self.coordinator.state is not State.FAILED and not meanwhile:
            assert self.coordinator.applied == self.coordinator.last

    @rule()
    def seal(self) -> None:
        sealed = self.coordinator.seal_pending()
        assert fold(sealed, pending=False) == self.expected(self.coordinator.last)
        assert sealed.pending.is_empty()

    @precondition(lambda self: self.coordinator.state is State.FAILED)
    @rule(fates=st.lists(FATES, max_size=1), apply_fates=st.lists(APPLY_FATES, max_size=1), good=st.booleans())
    def recover(self, fates: list[str], apply_fates: list[str], good: bool) -> None:
        self.arm(fates, apply_fates, [])
        self.flusher.recover_fates = deque([] if good else ["fail"])
        try:
            self.coordinator.recover()
        except Poisoned:
            assert self.coordinator.state is State.FAILED
        else:
            assert self.coordinator.state is not State.FAILED

    @rule()
    def crash(self) -> None:
        """The process dies: every acknowledged write is on the disk, in order, once; epochs of before get no answer."""
        self.join_followers()
        old, replayed = self.coordinator.last, self.flusher.replay()
        survived = max(self.synced(), self.incarnation << 40)
        assert self.acknowledged <= survived
        assert replayed == self.expected(survived)
        self.open()
        with pytest.raises(Lost):
            self.coordinator.flush(old)
        with pytest.raises(Invalid):
            self.coordinator.flush(self.coordinator.last + 1)

    def teardown(self) -> None:
        """However it stands, a shutdown answers; after a good one everything is there."""
        if self.violations:
            return
        self.arm([], [], [])
        failed = self.coordinator.state is State.FAILED
        try:
            self.coordinator.shutdown(timeout_s=PATIENCE_S)
        except (OutcomeUnknown, Poisoned):
            assert failed
        else:
            assert self.flusher.replay() == self.expected(self.coordinator.last)
        self.join_followers()


QUICK = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = QUICK


@pytest.mark.campaign
def test_a_long_campaign() -> None:
    run_state_machine_as_test(
        CoordinatorMachine, settings=settings(max_examples=3_000, stateful_step_count=60, deadline=None)
    )


# -- bugs that the machine must find


def acknowledge_before_fsync(patch: pytest.MonkeyPatch) -> None:
    next_batch = FlushExecutor._next_batch

    def early(self: FlushExecutor[Any, Any, Any]) -> Batch[Any] | None:
        batch = next_batch(self)
        if batch is not None:
            self._buffer.layers = self._buffer.layers._replace(durable=batch.last)
        return batch

    patch.setattr(FlushExecutor, "_next_batch", early)


def watermark_before_view(patch: pytest.MonkeyPatch) -> None:
    apply_next = FlushExecutor._apply_next

    def early(self: FlushExecutor[Any, Any, Any]) -> Any:
        layers = self._buffer.layers
        self._buffer.layers = layers._replace(applied=layers.batches[0].last)
        return apply_next(self)

    patch.setattr(FlushExecutor, "_apply_next", early)


def discard_a_failed_batch(patch: pytest.MonkeyPatch) -> None:
    """What the seed does."""
    recover = FlushExecutor._recover

    def forget(self: FlushExecutor[Any, Any, Any]) -> None:
        layers = self._buffer.layers
        if layers.taken > layers.durable:
            batch = layers.batches[-1]
            deltas = tuple(delta for delta in layers.deltas if delta not in batch.deltas)
            self._buffer.layers = layers._replace(deltas=deltas, batches=layers.batches[:-1], durable=batch.last)
        recover(self)

    patch.setattr(FlushExecutor, "_recover", forget)


def write_again_under_new_epochs(patch: pytest.MonkeyPatch) -> None:
    """The token changes, so what was on disk after all is doubled."""
    recover = FlushExecutor._recover

    def renumber(self: FlushExecutor[Any, Any, Any]) -> None:
        layers = self._buffer.layers
        if layers.taken > layers.durable:
            self._epochs.last = last = Epoch(self._epochs.last + 1)
            batch = layers.batches[-1]
            renamed = Batch(batch.deltas, batch.first, last, batch.size)
            self._buffer.layers = layers._replace(batches=(*layers.batches[:-1], renamed), taken=last, sealed=last)
        recover(self)

    patch.setattr(FlushExecutor, "_recover", renumber)


def forget_the_followers(patch: pytest.MonkeyPatch) -> None:
    """The turn ends and nobody gets it."""
    patch.setattr(FlushExecutor, "_pass_turns", lambda self: self._changed())


@pytest.mark.parametrize(
    "bug",
    [
        acknowledge_before_fsync,
        watermark_before_view,
        discard_a_failed_batch,
        write_again_under_new_epochs,
        forget_the_followers,
    ],
)
def test_the_machine_finds(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE_S", 0.3)
    search = settings(
        max_examples=300,
        stateful_step_count=30,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        derandomize=True,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CoordinatorMachine, settings=search)
