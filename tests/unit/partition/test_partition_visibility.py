"""A batch is seen whole or not at all, by every reader, while its tables are applied apart and at random speed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.partition.machine import Entry
from penstock.partition.moments import Moments
from penstock.partition.partition import Partition
from penstock.queue.machine import QueueMachine
from penstock.series.machine import SeriesMachine
from penstock.vector.machine import VectorMachine

BATCHES = 60
START_US = 1_700_000_000_000_000


def slow_down(monkeypatch: pytest.MonkeyPatch, machine_class: type[Any], chance: random.Random) -> None:
    apply = machine_class.apply

    def slow(machine: Any, entry: Entry) -> None:
        time.sleep(chance.random() * 0.01)
        apply(machine, entry)

    monkeypatch.setattr(machine_class, "apply", slow)


def write_batches(store: Any) -> None:
    for number in range(BATCHES):
        with store.batch(durable=number % 7 == 0) as batch:
            batch.kv("kv").put(b"n", b"%d" % number)
            batch.queue("queue").put(b"%d" % number)
            batch.series("series").write("m", float(number), time=START_US + number * 1_000_000)
            batch.vector("vector").upsert([f"{number}"], np.array([[1.0, number]], np.float32))
    store.flush()


def look_at_snapshots(store: Any) -> None:
    with store.snapshot() as snapshot:
        value = snapshot.kv("kv").get(b"n")
        rows = 0 if value is None else int(value) + 1
        assert snapshot.queue("queue").to_arrow().num_rows == rows, "a message is missing, or early"
        assert snapshot.series("series").select("m").num_rows == rows, "a sample is missing, or early"
        assert snapshot.vector("vector").to_arrow().num_rows == rows, "a vector is missing, or early"


def look_one_by_one(store: Any) -> None:
    """What is read later is not older, in whatever order the tables are read."""
    messages = store.queue("queue").to_arrow().num_rows  # the others show what this process has not flushed yet
    vectors = store.vector("vector").to_arrow().num_rows
    samples = store.series("series").select("m").num_rows
    value = store.kv("kv").get(b"n")
    assert messages <= vectors <= samples <= (0 if value is None else int(value) + 1), "a table is behind the others"


def consume(store: Any) -> None:
    consumer = store.queue("queue").consumer("c")
    for message in consumer.get(5, timeout_s=0.01):
        number = int(message.payload)
        assert int(store.kv("kv").get(b"n") or -1) >= number, "a message came before the rows of its batch"
        assert store.vector("vector").to_arrow().num_rows > number, "a message came before the vectors of its batch"
        consumer.ack(message)


def run(store: Any) -> list[BaseException]:
    store.kv("kv"), store.queue("queue"), store.series("series"), store.vector("vector", dimensions=2)
    done, errors = threading.Event(), list[BaseException]()

    def repeat(act: Callable[[Any], None]) -> None:
        try:
            while not done.is_set() and not errors:
                act(store)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(act,)) for act in (look_at_snapshots, look_one_by_one, consume)]
    for thread in threads:
        thread.start()
    try:
        write_batches(store)
    finally:
        done.set()
        for thread in threads:
            thread.join(30)
    if not errors:
        look_at_snapshots(store)
    return errors


@pytest.fixture
def _slow_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    for machine_class in (QueueMachine, SeriesMachine, VectorMachine):
        slow_down(monkeypatch, machine_class, chance)


@pytest.mark.usefixtures("_slow_tables")
def test_no_reader_sees_half_of_a_batch(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store", settings=penstock.StoreSettings(serve=False)) as store:
        assert run(store) == []


@pytest.mark.usefixtures("_slow_tables")
def test_a_snapshot_that_does_not_wait_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: states are taken as they are, late or not."""

    def state_of(self: Moments, partition: Partition, lsn: int) -> Any:
        return partition.machine.snapshot()

    monkeypatch.setattr(Moments, "_state_of", state_of)
    with penstock.open(tmp_path / "store", settings=penstock.StoreSettings(serve=False)) as store:
        assert any("missing, or early" in str(error) or "behind" in str(error) for error in run(store))
