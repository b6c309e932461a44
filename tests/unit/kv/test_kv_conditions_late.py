"""Conditional writes to a shard that is late: only waiting writes to their own rows hold them back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from store_model import open_simulated

from penstock.errors import ConditionFailed
from penstock.host import waiting
from penstock.kv.machine import KvMachine
from penstock.partition.backlog import Backlogs
from penstock.partition.partition import Partition
from penstock.store import conditions
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store whose table `t` has applied the row `a`, and nothing since."""
    drain, in_memory, waits = Backlogs.drain, KvMachine.in_memory, [False]

    def lazy(self: Backlogs, partition: Partition) -> None:
        if not waits[0]:
            drain(self, partition)

    monkeypatch.setattr(Backlogs, "drain", lazy)
    monkeypatch.setattr(KvMachine, "in_memory", lambda self, entry: not waits[0] and in_memory(self, entry))
    with open_simulated(SimulatedDisk(), FakeClock()) as store:
        store.kv("t").put(b"a", b"1", durable=True)
        waits[0] = True
        yield store
        waits[0] = False


def are_late(store: Store, *keys: bytes) -> bool:
    number = store.kv("t")._partitions[0]
    partition = store._dispatcher.partition(number)
    with store._dispatcher.turn:
        return conditions._are_late(store._dispatcher, {number: (partition.machine, frozenset(keys))})  # type: ignore[dict-item]


def test_only_writes_to_the_same_rows_count(late: Store) -> None:
    table = late.kv("t")
    table.put(b"b", b"1")
    table.put_many({b"c": b"1", b"d": b"2"}, durable=True)
    table.delete_range(b"x", b"y", durable=True)
    table.merge(b"m", b"!", operator="append", durable=True)
    assert late._dispatcher.partition(table._partitions[0]).late
    assert not are_late(late, b"a")
    assert not are_late(late, b"a", b"e")
    for key in (b"b", b"c", b"d", b"x1", b"m"):
        assert are_late(late, key), key
        assert are_late(late, b"a", key), key


def test_what_is_not_in_memory_counts(late: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    table = late.kv("t")
    for number in range(3):
        table.put(b"b%d" % number, b"1", durable=True)
    partition: Any = late._dispatcher.partition(table._partitions[0])
    assert not are_late(late, b"a")
    with monkeypatch.context() as patch:
        patch.setattr(conditions, "SEARCHED_MAX", 2)
        assert are_late(late, b"a")
    partition.deferred_from = partition.highest
    assert are_late(late, b"a")
    partition.deferred_from = None
    partition.failures = 1
    assert are_late(late, b"a")
    partition.failures = 0


def test_a_conditional_write_passes_others(late: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    table = late.kv("t")
    table.put(b"b", b"1", durable=True)
    partition = late._dispatcher.partition(table._partitions[0])
    monkeypatch.setattr(type(late._port), "machine", lambda self, number, timeout_s=0.0: partition.machine)
    row = partition.machine.row(b"a")  # type: ignore[attr-defined]
    table.put(b"a", b"2", if_lsn=row[1])
    with pytest.raises(ConditionFailed):
        table.put(b"e", b"2", if_lsn=7)
    assert partition.late


def test_a_conditional_write_pauses_between_two_looks_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to be applied, so that nothing else makes it wait: it took the turn 100,000 times a second."""
    pauses: list[float] = []
    with open_simulated(SimulatedDisk(), FakeClock()) as store:
        coordinator = store._coordinator
        store.kv("t").put(b"a", b"1", durable=True)
        coordinator.hold("memory is full")

        def pause(seconds: float, stop: object = None) -> bool:
            pauses.append(seconds)
            if len(pauses) == 20:
                coordinator.hold(None)
            return False

        monkeypatch.setattr(waiting, "pause", pause)
        monkeypatch.setattr(conditions, "_wait_for_others", lambda *_: None if pauses else coordinator.hold(None))
        store.kv("t").put(b"b", b"2", if_absent=True)
        assert store.kv("t")[b"b"] == b"2"
        assert pauses == sorted(pauses)
        assert (pauses[0], pauses[-1]) == (conditions.ROOM_S, conditions.ROOM_S_MAX)
