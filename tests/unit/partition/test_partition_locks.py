"""Nobody does file work with a lock that others need: checked at every operation of the simulated disk."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest
from store_model import open_simulated

from penstock.partition.dispatcher import Dispatcher
from penstock.partition.ledger_records import LEDGER_TABLE
from penstock.partition.machine import Entry
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing import disk as disk_module
from penstock.testing.locks import LockOrderChecker, LockOrderViolation

# Whoever holds one of these keeps writers or readers of every table.
NEVER_DURING_IO = {
    "partition.turn",
    "coordinator",
    "journal.tracker",
    "lsm.tree",
    "partition.moved",
    "partition.workers",
    "queue.pins",
    "queue.deliveries",
    "store.governor",
    "local.services",
}


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[LockOrderChecker]:
    checker = LockOrderChecker()
    enter = disk_module._Operation.__enter__

    def checked(operation: disk_module._Operation) -> disk_module.FaultKind | None:
        locks = NEVER_DURING_IO.intersection(checker.lock_names())
        of_ledger = f"/tables/{LEDGER_TABLE}/" in operation._label and operation._read
        if locks and not of_ledger:
            checker._report(f"{operation._label} with {' and '.join(sorted(locks))} held")
        return enter(operation)

    monkeypatch.setattr(disk_module._Operation, "__enter__", checked)
    with checker.installed():
        yield checker


def use_every_kind(store: Store) -> None:
    kv, queue = store.kv("kv", shards=2), store.queue("queue", shards=2)
    series, vector = store.series("series"), store.vector("vector", dimensions=2)
    for number in range(20):
        kv.put(b"%d" % number, bytes(200), durable=True)
        kv.merge(b"sum", b"x", operator="append")
        kv.put(b"soon", b"v", ttl_s=1.0)
        queue.put(b"%d" % number, durable=True)
        series.write("m", float(number), time=1_700_000_000_000_000 + number * 1_000_000, durable=True)
        vector.upsert([f"{number}"], np.array([[1.0, number]], np.float32), durable=True)
        with store.batch(token=("loader", number)) as batch:
            batch.kv("kv").put(b"batch", b"%d" % number)
            batch.queue("queue").put(b"batch")
        if number % 5 == 0:
            store.checkpoint()
            with store.snapshot() as snapshot:
                assert snapshot.queue("queue").to_arrow().num_rows == 2 * number + 2
    store.load("kv", pa.table({"key": [b"%06d" % number for number in range(5_000)], "value": [b"v"] * 5_000}))
    assert sum(1 for _ in kv.scan()) > 5_000
    kv.put(b"cas", b"1", if_absent=True)
    consumer = queue.consumer("c")
    consumer.ack(consumer.get(10))
    store.compact("kv")
    store.drop("vector")


def test_no_file_is_touched_with_a_lock_that_others_need(checker: LockOrderChecker) -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with open_simulated(disk, clock) as store:
        use_every_kind(store)
    with open_simulated(disk, clock) as store:  # with everything on disk
        store.kv("kv").put(b"k", b"v", durable=True)
        store.queue("queue").put(b"m", durable=True)
        with store.snapshot() as snapshot:
            assert snapshot.kv("kv").get(b"k") == b"v"
    assert checker.violations == []


def test_an_apply_with_the_turn_is_seen(checker: LockOrderChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: entries of files are applied where they are dispatched, with the turn."""

    def offer(dispatcher: Dispatcher, number: int, entry: Entry) -> None:
        dispatcher._partitions[number].machine.apply(entry)  # type: ignore[index]

    with pytest.raises(BaseException, match="turn held"), open_simulated(SimulatedDisk(), FakeClock()) as store:
        queue = store.queue("queue")
        queue.put(b"0", durable=True)
        monkeypatch.setattr(Dispatcher, "_offer", offer)
        queue.put(b"1", durable=True)
    assert isinstance(checker.violations.pop(), LockOrderViolation)
    checker.violations.clear()
