"""Crashes while a shard is late: throttled, frozen, deferred, spilled, paused, catching up. Nothing is lost or doubled.

The files of the queue `a` do not answer for a while, then they fail, then they are well; `b` and a kv table go on. An
image is taken at every file operation of that. Afterwards its disk is well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from queue_store_scenario import SHARDS, QueueStoreScenario, QueueUser
from shared import Patch, SomeRecoveries, seeded

from penstock.errors import PenstockError
from penstock.partition.admission import PartitionState
from penstock.partition.backlog import Backlogs
from penstock.partition.partition import Partition
from penstock.partition.spill import SpillLog
from penstock.queue.machine import QueueMachine
from penstock.testing import History, SimulatedDisk, Violation, explore

pytestmark = pytest.mark.usefixtures("quiet")


class Trouble:
    """What ails the table `a`; for all stores of this process."""

    def __init__(self) -> None:
        self.hangs = self.fails = False
        self.states: set[str] = set()  # states of its shard, and where its entries were

    def note(self, user: QueueUser) -> Partition:
        (partition,) = [one for one in user.store._dispatcher.opened() if one.descriptor.name == "a"]
        self.states.add(user.store._dispatcher.admission.state(partition).value)
        if partition.deferred_from is not None:
            self.states.add("deferred")
        if partition.spill.upto:
            self.states.add("spilled")
        return partition


TROUBLE = Trouble()


@pytest.fixture(autouse=True)
def _trouble(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    drain, apply = Backlogs.drain, QueueMachine.apply

    def hanging(self: Backlogs, partition: Partition) -> None:
        """As if a thread were in its files, and did not come back."""
        if not (TROUBLE.hangs and partition.descriptor.name == "a"):
            drain(self, partition)

    def failing(self: QueueMachine, entry: Any) -> None:
        if TROUBLE.fails and self._descriptor.name == "a":
            raise OSError(5, "Input/output error")
        apply(self, entry)

    monkeypatch.setattr(Backlogs, "drain", hanging)
    monkeypatch.setattr(QueueMachine, "apply", failing)
    TROUBLE.states.clear()
    yield
    TROUBLE.hangs = TROUBLE.fails = False


@contextmanager
def trouble(*, hangs: bool = False, fails: bool = False) -> Iterator[None]:
    TROUBLE.hangs, TROUBLE.fails = hangs, fails
    try:
        yield
    finally:
        TROUBLE.hangs = TROUBLE.fails = False


class LateScenario(QueueStoreScenario):
    """A table that is late, in every way in which it can be."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        user = QueueUser(disk, history)
        for queue in SHARDS:
            user.create(queue)
        user.put("a", 0, 5, 300)
        with trouble(hangs=True):
            for size in (10, 600, 20):
                user.put("a", 0, size)
            user.put("b", 0, 40)
            TROUBLE.note(user)
            user.maintain(user.store.checkpoint)  # spills
            user.advance(11)
            user.store._dispatcher.retry()  # it is frozen: its entries are deferred
            TROUBLE.note(user)
            user.put("b", 0, 700)
            user.work("b", "d", 2, 2)
            user.maintain(user.store.checkpoint)
        with trouble(fails=True):
            user.store._dispatcher.retry()  # throttled: it is tried again
            TROUBLE.note(user)
            user.put("b", 0, 30)
            for _ in range(6):
                user.store._dispatcher.retry()
            partition = TROUBLE.note(user)
            assert user.store._dispatcher.admission.state(partition) is PartitionState.PAUSED
            user.put("b", 0, 600)
            user.maintain(user.store.checkpoint)
        user.store.resume("a")  # catches up
        TROUBLE.note(user)
        user.put("a", 0, 50)
        user.check()
        user.maintain(user.store.checkpoint)
        user.append("a", 0, 40)

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        TROUBLE.hangs = TROUBLE.fails = False
        super().resume(disk, history)


def test_crashes_in_every_late_state() -> None:
    report = explore(LateScenario(), modes=("strict",), depth=1, every=3)
    assert {"active", "frozen", "throttled", "paused", "deferred", "spilled"} <= TROUBLE.states
    assert report.missing("fdatasync /journal/", "commit /manifest", "unlink /journal/") == []
    assert report.crashes > 30


def test_crashes_in_the_recovery_of_a_late_state() -> None:
    explore(SomeRecoveries(LateScenario(), 150), modes=("strict",), recovery_modes=("strict",))


def not_spilled(patch: Patch) -> None:
    """A checkpoint believes that entries are in the log of the shard."""

    def pretend(self: SpillLog, entries: Any) -> None:
        if entries:
            self.upto = entries[-1].lsn

    patch.setattr(SpillLog, "append", pretend)


def applied_twice(patch: Patch) -> None:
    """Deferred entries are recalled although they are applied."""
    patch.setattr(QueueMachine, "_append", _again)


def _again(self: QueueMachine, bodies: Any, entry: Any, following: int, trimmed: Any) -> None:
    if bodies:
        self.queue.append_bodies(bodies, lsn=max(entry.lsn, self.queue.last_lsn + 1), time_us=entry.time_us)


@pytest.mark.parametrize("seed_bug", [not_spilled, applied_twice])
def test_a_bug_of_late_shards_is_caught(seed_bug: Callable[[Patch], None]) -> None:
    with seeded(seed_bug), pytest.raises((Violation, AssertionError, PenstockError)):
        explore(LateScenario(), modes=("strict",), depth=1)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_every_crash_in_every_late_state() -> None:
    explore(LateScenario(), modes=("strict", "torn", "kept", "restart"), depth=1)
    explore(LateScenario(), modes=("strict",), recovery_modes=("strict",))
