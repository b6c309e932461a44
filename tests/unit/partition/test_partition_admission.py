"""Limits count from admission: what was admitted and waits for its record is held against a shard like its backlog."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interrupts import every_point, where
from store_model import SETTINGS, open_simulated

import penstock
from penstock.errors import Backpressure, Invalid
from penstock.kv.machine import KvMachine
from penstock.partition.admission import DispatcherSettings, PartitionAdmission, Reservation
from penstock.queue.machine import QueueMachine
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.members import await_true

LIMITS = DispatcherSettings(partition_operations_max=5, attempts_max=1_000, backoff_s=1e9)


@pytest.fixture(autouse=True)
def _failing(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = KvMachine.apply

    def failing(machine: KvMachine, entry: Any) -> None:
        if machine._descriptor.name == "bad":
            raise OSError("the disk fails")
        apply(machine, entry)

    monkeypatch.setattr(KvMachine, "apply", failing)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def opened(clock: FakeClock, limits: DispatcherSettings) -> Store:
    store = open_simulated(SimulatedDisk(), clock, replace(SETTINGS, dispatcher=limits))
    store.kv("bad").put(b"first", bytes(300), durable=True)
    return store


def admitted(write: Callable[[int], object]) -> tuple[int, Backpressure]:
    """How many writes were admitted, none of which is flushed, and the refusal of the next."""
    for number in range(1_000):
        try:
            write(number)
        except Backpressure as error:
            return number, error
    return 1_000, Backpressure("none was refused")


def test_plain_puts_count_before_they_are_flushed(clock: FakeClock) -> None:
    with opened(clock, LIMITS) as store:
        bad = store.kv("bad")
        number, error = admitted(lambda number: bad.put(b"%d" % number, b""))
        assert number == 4  # with the one that waits
        assert (error.table, error.shard, error.limit, error.maximum) == ("bad", 0, "partition_operations_max", 5)
        assert error.partition == bad._partitions[0]
        assert error.value == 5
        assert error.retry_after_s > 0
        (statistics,) = [shard for shard in store.statistics().partitions if shard.table == "bad"]
        assert statistics.enqueued_ops == 5
        store.kv("good").put(b"k", b"", durable=True)  # flushes them: they are one record
        (statistics,) = [shard for shard in store.statistics().partitions if shard.table == "bad"]
        assert statistics.enqueued_ops == 2
        assert admitted(lambda number: bad.put(b"%d" % number, b""))[0] == 3


def test_without_reservations_all_would_be_admitted(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartitionAdmission, "_reserve", lambda self, partition, size: Reservation(size, 0.0))
    with opened(clock, LIMITS) as store:
        assert admitted(lambda number: store.kv("bad").put(b"%d" % number, b""))[0] == 1_000


def test_many_threads_together_do_not_pass_the_limit(clock: FakeClock) -> None:
    with opened(clock, replace(LIMITS, partition_operations_max=20)) as store:
        bad, passed, barrier = store.kv("bad"), list[int](), threading.Barrier(8)

        def write(thread: int) -> None:
            barrier.wait(30)
            for number in range(10):
                try:
                    bad.put(b"%d %d" % (thread, number), b"")
                    passed.append(number)
                except Backpressure:
                    return

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(passed) == 19


def test_small_writes_pass_where_a_large_one_does_not_fit(clock: FakeClock) -> None:
    with opened(clock, replace(LIMITS, partition_operations_max=1_000, partition_bytes_max=2_000)) as store:
        bad = store.kv("bad")
        with pytest.raises(Backpressure, match="more") as caught:
            bad.put(b"large", bytes(1_900))
        assert caught.value.limit == "partition_bytes_max"
        assert 0 < caught.value.value < caught.value.maximum == 2_000
        number, error = admitted(lambda number: bad.put(b"%d" % number, bytes(10)))
        assert number > 2
        assert error.limit == "partition_bytes_max"
        store.kv("good").put(b"large", bytes(10_000), durable=True)  # a shard that keeps up takes any


def test_age_counts_from_admission(clock: FakeClock) -> None:
    with opened(clock, replace(LIMITS, partition_age_s_max=30.0)) as store:
        bad = store.kv("bad")
        bad.put(b"1", b"")
        clock.advance(31)
        _, error = admitted(lambda number: bad.put(b"2", b""))
        assert (error.limit, error.maximum) == ("partition_age_s_max", 30.0)
        assert error.value >= 31


def test_a_write_that_fails_is_not_counted(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(clock, LIMITS) as store:
        bad = store.kv("bad")

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(store._port, "_write_into", interrupted)
            for _ in range(20):
                with pytest.raises(KeyboardInterrupt):
                    bad.put(b"k", b"")
        assert admitted(lambda number: bad.put(b"%d" % number, b""))[0] == 4


def test_a_reservation_that_an_interrupt_left_ends_by_itself(clock: FakeClock) -> None:
    with opened(clock, LIMITS) as store:
        bad = store.kv("bad")
        partition = store._dispatcher.partition(bad._partitions[0])
        for _ in range(4):
            store._dispatcher.admit(partition)
        assert admitted(lambda number: bad.put(b"k", b""))[0] == 0
        clock.advance(61)
        assert admitted(lambda number: bad.put(b"%d" % number, b""))[0] == 4


def test_a_write_that_is_long_under_way_holds_back_no_other(clock: FakeClock) -> None:
    """Reservations end in the order of their records: one without a record does not keep those that came later."""
    with opened(clock, replace(LIMITS, partition_operations_max=1_000)) as store:
        bad = store.kv("bad")
        partition = store._dispatcher.partition(bad._partitions[0])
        waiting = store._dispatcher.admit(partition, size=7)  # a conditional write may wait for half a minute
        for number in range(50):
            bad.put(b"%d" % number, b"", durable=number % 10 == 9)
        assert store._dispatcher.admission.operations(partition) == 1 + 5 + 1
        assert list(partition.admitted) == [waiting]
        assert partition.admitted_bytes == 7
        waiting.epoch = 0
        assert store._dispatcher.admission.operations(partition) == 6
        assert partition.admitted_bytes == 0


def test_bytes_are_those_of_the_reservations_after_every_interrupt(clock: FakeClock) -> None:
    with opened(clock, replace(LIMITS, partition_operations_max=100_000)) as store:
        bad = store.kv("bad")
        partition = store._dispatcher.partition(bad._partitions[0])
        reservation = store._dispatcher.admit(partition, size=7)  # so that nothing begins anew

        def write() -> None:
            bad.put(b"k", bytes(50))
            store._dispatcher.admission.release(partition)

        for point in every_point(write):
            if point % 16 == 0:
                store.flush()
            assert partition.admitted_bytes == sum(one.size for one in partition.admitted), where[-1]
            for left in partition.admitted:  # by the interrupt, or else each would make the next write longer
                left.epoch = 0 if left.epoch is None and left is not reservation else left.epoch
        clock.advance(61)
        store.flush()
        assert store._dispatcher.admission.bytes(partition) == partition.waiting_bytes
        assert reservation not in partition.admitted


def test_batches_count_too_and_are_refused_whole(clock: FakeClock) -> None:
    with opened(clock, LIMITS) as store:
        bad, good = store.kv("bad"), store.kv("good")
        admitted(lambda number: bad.put(b"%d" % number, b""))
        with pytest.raises(Backpressure, match="shard 0 of bad"), store.batch() as batch:
            batch.kv("good").put(b"k", b"v")
            batch.kv("bad").put(b"k", b"v")
        assert good.get(b"k") is None


def test_a_signal_holds_back_plain_puts(clock: FakeClock) -> None:
    is_holding = [False]

    def signal(table: str, shard: int) -> str | None:
        return "the night shift" if is_holding[0] and table == "held" else None

    with opened(clock, replace(LIMITS, signal=signal)) as store:
        table, other = store.kv("held"), store.kv("other")
        table.put(b"k", b"1")
        is_holding[0] = True
        with pytest.raises(Backpressure, match="night shift") as caught:
            table.put(b"k", b"2")
        assert (caught.value.table, caught.value.limit) == ("held", "signal")
        other.put(b"k", b"1")
        is_holding[0] = False
        table.put(b"k", b"3", durable=True)
        assert table.get(b"k") == b"3"


def behind_by(store: Store, records: int) -> None:
    """Write records to another table, each of its own: the failing shard is that much further behind."""
    good = store.kv("good")
    for number in range(records):
        good.put(b"%d" % number, b"", durable=True)
    store._dispatcher.retry()  # each second in a store with background threads: who must ask is decided anew


def test_a_table_tolerates_a_lag_of_its_own(clock: FakeClock) -> None:
    with opened(clock, replace(LIMITS, partition_operations_max=1_000)) as store:
        bad = store.kv("bad")
        assert store.describe("bad").storage.lag_max is None
        behind_by(store, 20)
        bad.put(b"1", b"")  # a million by the settings
        assert store.alter("bad", lag_max=10).lag_max == 10
        behind_by(store, 1)
        with pytest.raises(Backpressure, match="records to catch up with") as caught:
            bad.put(b"2", b"")
        error = caught.value
        assert (error.table, error.shard, error.limit, error.maximum) == ("bad", 0, "partition_lag_max", 10)
        assert error.value >= 21
        (statistics,) = [shard for shard in store.statistics().partitions if shard.table == "bad"]
        assert statistics.state == "throttled"
        assert store.alter("bad", lag_max=1_000).lag_max == 1_000
        bad.put(b"2", b"")
        assert store.alter("bad", lag_max=None).lag_max is None
        bad.put(b"3", b"")
        with pytest.raises(Invalid):
            store.alter("bad", lag_max=0)


def test_the_lag_of_the_settings_holds_for_all_other_tables(clock: FakeClock) -> None:
    with opened(clock, replace(LIMITS, partition_operations_max=1_000, partition_lag_max=10)) as store:
        behind_by(store, 20)
        with pytest.raises(Backpressure) as caught:
            store.kv("bad").put(b"1", b"")
        assert (caught.value.limit, caught.value.maximum) == ("partition_lag_max", 10)
        store.alter("bad", lag_max=10_000)
        store.kv("bad").put(b"1", b"")


def test_refusals_are_counted_by_shard_and_limit(clock: FakeClock) -> None:
    with opened(clock, LIMITS) as store:
        admitted(lambda number: store.kv("bad").put(b"%d" % number, b""))
        text = store.metrics.exposition()
        labels = '{table="bad",shard="0",limit="partition_operations_max"}'
        assert f"penstock_partition_admission_rejects_total{labels} 1" in text
        assert 'penstock_admission_rejects_total{limit="partition"} 1' in text
        assert 'table="good"' not in "".join(line for line in text.splitlines() if "admission" in line)
        store.drop("bad")
        assert "partition_admission_rejects_total{" not in store.metrics.exposition()


@pytest.fixture
def served(path: Path) -> Iterator[tuple[Any, Any]]:
    limits = replace(LIMITS, workers=2, backoff_s=60.0)
    settings = penstock.StoreSettings(dispatcher=limits)
    with penstock.open(str(path), settings=settings) as store, penstock.connect(str(path)) as client:
        store.kv("bad").put(b"first", b"", durable=True)
        yield store, client


def test_clients_get_the_fields(served: tuple[Any, Any]) -> None:
    store, client = served
    admitted(lambda number: store.kv("bad").put(b"%d" % number, b"", durable=True))
    with pytest.raises(Backpressure) as caught, client.batch() as batch:
        batch.kv("bad").put(b"k", b"")
    error = caught.value
    assert (error.table, error.shard, error.limit, error.maximum) == ("bad", 0, "partition_operations_max", 5)
    assert error.value >= 5
    assert error.retry_after_s > 0


def test_writes_that_wait_for_a_shard_are_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healed, apply = threading.Event(), QueueMachine.apply

    def slow(machine: QueueMachine, entry: Any) -> None:
        healed.wait(30)
        apply(machine, entry)

    monkeypatch.setattr(QueueMachine, "apply", slow)
    limits = DispatcherSettings(partition_operations_max=2, workers=2)
    settings = penstock.StoreSettings(dispatcher=limits, flush_interval_s=0.01)
    with penstock.open(str(path), settings=settings) as store:
        queue = store.queue("slow")

        def write() -> None:
            while not healed.is_set():
                queue.put(b"message")
                healed.wait(0.02)  # so that each is in a record of its own

        writer = threading.Thread(target=write)
        try:
            writer.start()
            await_true(lambda: _retries(store) > 0, "a write that waits")
        finally:
            healed.set()
        writer.join(30)
        assert not writer.is_alive()
        assert 'penstock_partition_admission_rejects_total{table="slow"' not in store.metrics.exposition()


def _retries(store: Store) -> int:
    counts = re.findall(
        r'^penstock_partition_admission_retries_total{table="slow",shard="0"} (\d+)$', store.metrics.exposition(), re.M
    )
    assert not counts or f"penstock_admission_retries_total {counts[0]}" in store.metrics.exposition()
    return int(counts[0]) if counts else 0
