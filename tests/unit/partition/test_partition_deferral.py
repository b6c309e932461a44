"""Entries that wait outside memory: nothing is lost or doubled, order holds, and other tables have the memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from store_model import SETTINGS, open_simulated

import penstock
from penstock.errors import PartitionPaused
from penstock.host.waiting import pause
from penstock.partition.admission import PartitionAdmission, Reservation
from penstock.partition.backlog import Backlogs
from penstock.queue.machine import QueueMachine
from penstock.testing import FakeClock, SimulatedDisk

DEADLINE_S = 20.0


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """The applies of the queue `sick` hang until the event is set."""
    healed, apply = Event(), QueueMachine.apply

    def patched(machine: QueueMachine, entry: Any) -> None:
        if machine._descriptor.name == "sick":
            healed.wait(60)
        apply(machine, entry)

    monkeypatch.setattr(QueueMachine, "apply", patched)
    try:
        yield healed
    finally:
        healed.set()


def settings(**limits: Any) -> penstock.StoreSettings:
    return penstock.StoreSettings(dispatcher=penstock.DispatcherSettings(stall_s=0.2, **limits), serve=False)


def until(condition: Any) -> None:
    for _ in range(int(DEADLINE_S / 0.02)):
        if condition():
            return
        pause(0.02)
    raise AssertionError("it did not come about")


def sick_partitions(store: Any) -> list[Any]:
    return [partition for partition in store._dispatcher.partitions() if partition.descriptor.name == "sick"]


def payloads(table: Any) -> list[bytes]:
    return table.to_arrow().column("payload").to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("moved", [False, True])
def test_a_table_that_hangs_gives_its_memory_back(moved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging(monkeypatch) as healed, penstock.open(tmp_path, settings=settings()) as store:
        sick, well = store.queue("sick"), store.kv("well")
        for number in range(30):
            sick.put(b"%d" % number, durable=True)
        (partition,) = sick_partitions(store)
        until(lambda: store._dispatcher.retry() and partition.deferred_operations >= 28)
        assert len(partition.backlog) == 1
        (statistics,) = [shard for shard in store.statistics().partitions if shard.table == "sick"]
        assert statistics.enqueued_ops == 30
        with pytest.raises(PartitionPaused, match="is frozen"):
            sick.put(b"no", durable=True)
        well.put(b"a", b"1", durable=True)
        if moved:  # a part of it is in the partition's own log by then
            store._consensus.roll()
            store.checkpoint()
            assert partition.spill.upto > 0
        healed.set()
        until(lambda: not partition.late)
        assert payloads(sick) == [b"%d" % number for number in range(30)]
        assert (partition.deferred_from, partition.deferred_operations, partition.deferred_bytes) == (None, 0, 0)
        assert store._dispatcher.backlogs.operations == 0
    with penstock.open(tmp_path) as store:
        assert payloads(store.queue("sick")) == [b"%d" % number for number in range(30)]


def test_many_shards_that_hang_do_not_use_up_the_limits_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = settings(operations_max=20, partition_operations_max=20)
    with penstock.open(tmp_path, settings=limits) as store, hanging(monkeypatch) as healed:
        sick, well = store.queue("sick", shards=6), store.kv("well")
        assert payloads(sick) == []  # every shard is open
        written = 0
        for number in range(60):
            try:
                sick.put(b"%d" % number, key=b"%d" % number)
                store.flush()
                written += 1
            except penstock.errors.PenstockError:
                break
        until(lambda: all(len(partition.backlog) <= 1 for partition in sick_partitions(store)))
        for number in range(5):
            well.put(b"%d" % number, b"1", durable=True)
        healed.set()
        until(lambda: not any(partition.late for partition in sick_partitions(store)))
        assert len(payloads(sick)) == written > 10


def test_the_guard_after_the_commit_defers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was admitted, no more than twice the limits is in memory."""
    monkeypatch.setattr(PartitionAdmission, "admit", lambda *_: Reservation(0, 0.0))
    disk, clock = SimulatedDisk(), FakeClock()
    limits = penstock.DispatcherSettings(partition_operations_max=4, workers=0)
    largest = [0]
    enqueue = Backlogs.enqueue

    def watched(self: Backlogs, partition: Any, entry: Any) -> None:
        enqueue(self, partition, entry)
        largest[0] = max(largest[0], len(partition.backlog))

    monkeypatch.setattr(Backlogs, "enqueue", watched)
    failing = [True]
    apply = QueueMachine.apply

    def patched(machine: QueueMachine, entry: Any) -> None:
        if failing[0] and machine._descriptor.name == "sick":
            raise OSError("the disk fails")
        apply(machine, entry)

    monkeypatch.setattr(QueueMachine, "apply", patched)
    with open_simulated(disk, clock, replace(SETTINGS, dispatcher=limits)) as store:
        sick = store.queue("sick")
        for number in range(60):
            sick.put(b"%d" % number, durable=True)
        (partition,) = sick_partitions(store)
        assert partition.deferred_operations > 40
        crashed = disk.image().restore("strict")
        assert largest[0] <= 9
        failing[0] = False
        clock.advance(100)
        for _ in range(3):
            store.resume("sick")
        assert payloads(sick) == [b"%d" % number for number in range(60)]
        assert partition.deferred_from is None
    with open_simulated(crashed, clock) as store:  # killed while most of it waited outside memory
        assert payloads(store.queue("sick")) == [b"%d" % number for number in range(60)]
