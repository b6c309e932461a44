"""Limits of cardinality: they count from admission, and deleted series do not count."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from series_under_test import SeriesUnderTest, block, labels

import penstock
from penstock.errors import ConditionFailed, Invalid
from penstock.series import admission, admitted, loading
from penstock.series.admission import admit_sections
from penstock.series.admitted import AdmittedSeries
from penstock.series.keys import dictionary_keys
from penstock.series.labels import LabelTable, check_labels
from penstock.series.machine import SeriesMachine
from penstock.series.section import SampleBlock, SeriesDelete, SeriesSection

T0 = 1_700_000_000_000_000
QUIET = penstock.StoreSettings(background=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    with penstock.open(tmp_path / "store", settings=QUIET) as opened:
        yield opened


def small(store: Any, **options: Any) -> Any:
    return store.series("metrics", options=penstock.SeriesOptions(**options))


def flood(numbers: Sequence[int], metric: str = "cpu") -> pa.Table:
    count = len(numbers)
    return pa.table(
        {"metric": [metric] * count, "n": list(map(str, numbers)), "time": [T0] * count, "value": np.zeros(count)}
    )


def test_a_series_that_was_deleted_is_admitted_again(tmp_path: Path) -> None:
    """A table object that wrote it before asks again, whoever deleted it, and is refused each time."""
    with penstock.open(tmp_path / "store", settings=QUIET) as store:
        metrics = small(store, series_max=2)
        for other in (metrics, store.series("metrics")):
            for name in ("a", "b"):
                metrics.write(name, 1.0, time=T0)
                metrics.write(name, 2.0, time=T0)  # without asking: it was admitted
            other.delete("a", durable=True)
            metrics.write("c", 1.0, time=T0)
            for _ in range(3):
                with pytest.raises(Invalid, match="holds 2 series and this write adds 1"):
                    metrics.write("a", 1.0, time=T0)
                metrics.write("b", 3.0, time=T0)
            assert metrics.cardinality().series == 2
            metrics.delete("{}", durable=True)


def test_writes_that_are_not_applied_yet_count(tmp_path: Path) -> None:
    waiting = penstock.StoreSettings(background=False, flush_interval_s=3_600.0)
    with penstock.open(tmp_path / "store", settings=waiting) as store:
        metrics = small(store, series_max=10, metric_series_max=6)
        errors: list[Exception] = []

        def burst() -> None:
            for number in range(20):
                try:
                    metrics.write("cpu", 1.0, {"n": str(number)}, time=T0)
                except Invalid as error:
                    errors.append(error)

        threads = [threading.Thread(target=burst) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(errors) == 28  # of both threads: six series are admitted, whichever asks first
        assert "metric cpu of table metrics has 6 series and this write adds 1: the limit is 6" in str(errors[-1])
        store.flush()
        assert metrics.cardinality().metrics == {"cpu": 6}
        with pytest.raises(Invalid, match=r"holds 6 series and this write adds 5, most of metric mem: the limit is 10"):
            metrics.write_arrow(flood(range(5), "mem"))
        metrics.write_arrow(flood(range(4), "mem"), durable=True)
        assert metrics.cardinality().series == 10


def test_a_write_that_failed_counts_for_a_while(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = small(store, series_max=3)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(store._coordinator), "write_into", fail)
        with pytest.raises(KeyboardInterrupt):
            metrics.write_arrow(flood(range(2)))
    metrics.write_arrow(flood(range(3)), durable=True)  # again, and one more: those of before count once
    assert metrics.cardinality().series == 3
    machine = store.port.machine(metrics._partitions[0])
    assert not machine.admitted._admissions


def test_admitted_series_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    admissions = AdmittedSeries()
    table = LabelTable.of([check_labels("cpu", {"n": str(number)}) for number in range(5)])
    keys = dictionary_keys(7, table.fingerprints)
    admissions.add({7: {"cpu": keys[:2]}}, T0 - 1)
    admissions.add({7: {"cpu": keys[2:], "mem": keys[:1]}}, T0)
    assert (admissions.count(7), admissions.count(7, "cpu"), admissions.count(7, "mem"), admissions.count(8)) == (
        6,
        5,
        1,
        0,
    )
    assert admissions.new(7, "cpu", keys) == admissions.new(8, "cpu", []) == 0
    assert admissions.new(7, "mem", keys) == 4
    admissions.forget(T0 + 59_999_998)
    assert admissions.count(7) == 6
    admissions.forget(T0 + 59_999_999)
    assert (admissions.count(7, "cpu"), admissions.new(7, "cpu", keys)) == (3, 2)
    admissions.remove(7, keys[3:])
    assert admissions.count(7) == 2
    admissions.forget(T0 + 60_000_000)
    assert not admissions._admissions
    admissions.add({7: {"cpu": keys}}, T0)
    monkeypatch.setattr(admitted, "ADMITTED_MAX", 4)
    admissions.forget(T0)
    assert not admissions._admissions


def test_withdrawn_series_do_not_count() -> None:
    admissions, keys = AdmittedSeries(), [b"a", b"b", b"c"]
    first = admissions.add({7: {"cpu": keys[:2]}, 8: {"cpu": keys}}, T0)
    second = admissions.add({7: {"cpu": keys[1:]}}, T0)
    admissions.remove(8, keys[:1])
    admissions.withdraw(first)
    assert (admissions.count(7), admissions.count(8)) == (2, 0)  # b waits in the second write, too
    admissions.withdraw(second)
    admissions.withdraw(second)
    assert admissions.new(7, "cpu", keys) == 2  # b may still be applied by either: it is forgotten later
    admissions.forget(T0 + 60_000_000)
    assert not admissions._admissions


@contextmanager
def at_every_line(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` before each line that this thread runs in the packages of series and trees."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if not any(name in frame.f_code.co_filename for name in ("/series/", "/lsm/")):
            return None
        if event == "line":
            act()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("emptied", [False, True])
def test_a_series_counts_once_while_it_is_applied(reopened: bool, emptied: bool) -> None:
    """Whenever an admission comes, at every line of an apply, it counts those that were there and those admitted."""
    options = penstock.SeriesOptions(bucket_s=3_600)
    shard = SeriesUnderTest(options=options)

    def block(numbers: range, hours: int) -> SampleBlock:
        table = LabelTable.of([check_labels("cpu", {"n": str(number)}) for number in numbers])
        index = np.tile(np.arange(len(numbers), dtype=np.uint32), hours)
        times = np.repeat(3_600_000_000 * np.arange(hours), len(numbers))
        return SampleBlock(table, index, times, np.zeros(len(index), np.uint64))

    shard.write(block(range(5), 2))
    if emptied:
        shard.write(SeriesDelete('cpu{n="0"}'))
    if reopened:
        shard.flush()
        shard.reopen()
    machine, new = shard.machine, block(range(9) if emptied else range(3, 9), 3)
    admit_sections("metrics", [SeriesSection(new)], options, machine, T0)
    buckets, totals = [options.bucket(3_600_000_000 * hour) for hour in range(3)], list[Any]()

    def counts() -> None:
        if machine.admitted.lock.acquire(blocking=False):  # an admission would wait for it
            try:
                totals.append(
                    tuple(
                        machine.series_count(bucket, metric) + machine.admitted.count(bucket, metric)
                        for metric in (None, "cpu")
                        for bucket in buckets
                    )
                )
            finally:
                machine.admitted.lock.release()

    with at_every_line(counts):
        shard.write(new)
    assert len(totals) > 100
    assert set(totals) == {(9, 9, 9 if emptied else 6) * 2}
    assert not machine.admitted._admissions
    shard.close()


@pytest.mark.parametrize("connected", [False, True])
def test_a_limit_is_exact_while_writes_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connected: bool
) -> None:
    finish, slow, go_on = SeriesMachine._finish, threading.Event(), threading.Event()

    def finish_late(machine: SeriesMachine) -> None:
        slow.set()
        go_on.wait(30)
        finish(machine)

    monkeypatch.setattr(SeriesMachine, "_finish", finish_late)
    with penstock.open(tmp_path / "store") as store:
        small(store, metric_series_max=9)
        with penstock.connect(store.path) if connected else nullcontext(store) as writer:
            metrics = writer.series("metrics")
            try:
                metrics.write_arrow(flood(range(3)), durable=True)
                assert slow.wait(30)
                metrics.write_arrow(flood(range(3, 6)), durable=True)
                store.series("metrics").write_arrow(flood(range(6, 9)))
            finally:
                go_on.set()
            with pytest.raises(Invalid, match="has 9 series and this write adds 1"):
                metrics.write_arrow(flood(range(9, 10)), durable=True)
            writer.flush()
            assert metrics.cardinality().metrics == {"cpu": 9}


def test_writers_that_share_new_series_fill_a_table_to_its_limit(tmp_path: Path) -> None:
    """Nobody is refused before it is full, however writes, flushes and compactions come together; then everybody is."""
    with penstock.open(tmp_path / "store") as store:
        metrics, failed = small(store, metric_series_max=120, series_max=200), list[BaseException]()

        def fill(writer: Any, seed: int) -> None:
            chance, table = random.Random(seed), writer.series("metrics")
            left = [("cpu", number) for number in range(120)] + [("mem", number) for number in range(80)]
            chance.shuffle(left)
            while left:
                some = [left.pop() for _ in range(min(len(left), chance.randrange(1, 20)))]
                for metric in {metric for metric, _ in some}:
                    numbers = [number for other, number in some if other == metric]
                    if chance.random() < 0.3:
                        for number in numbers:
                            table.write(metric, 1.0, {"n": str(number)}, time=T0)
                    else:
                        table.write_arrow(flood(numbers, metric), durable=chance.random() < 0.5)
            writer.flush()

        def guarded(writer: Any, seed: int) -> None:
            try:
                fill(writer, seed)
            except BaseException as error:
                failed.append(error)

        with penstock.connect(store.path) as client:
            writers = [threading.Thread(target=guarded, args=(client if seed else store, seed)) for seed in range(3)]
            for thread in writers:
                thread.start()
            while any(thread.is_alive() for thread in writers):
                store.checkpoint()
                store.compact("metrics")
            for thread in writers:
                thread.join(30)
            assert not failed
            for writer in (store, client):
                for metric in ("cpu", "mem"):
                    with pytest.raises(Invalid, match="holds 200 series and this write adds 1"):
                        writer.series("metrics").write(metric, 1.0, {"n": "new"}, time=T0, durable=True)
        assert metrics.cardinality().metrics == {"cpu": 120, "mem": 80}


@pytest.mark.parametrize("connected", [False, True])
def test_a_durable_delete_makes_room_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connected: bool) -> None:
    """A write that a limit forbids waits until what came before it is applied, and is judged again."""
    apply, late, refused = SeriesMachine.apply, threading.Event(), threading.Event()
    check = admission._check_new

    def apply_late(machine: SeriesMachine, entry: Any) -> None:
        if late.is_set():
            refused.wait(30)
        apply(machine, entry)

    def check_and_tell(*arguments: Any) -> None:
        try:
            check(*arguments)
        except Invalid:
            refused.set()
            raise

    monkeypatch.setattr(SeriesMachine, "apply", apply_late)
    monkeypatch.setattr(admission, "_check_new", check_and_tell)
    with penstock.open(tmp_path / "store") as store:
        small(store, series_max=2).write_arrow(flood(range(2)), durable=True)
        assert store.series("metrics").cardinality().series == 2
        with penstock.connect(store.path) if connected else nullcontext(store) as writer:
            metrics = writer.series("metrics")
            late.set()
            metrics.delete('cpu{n="0"}', durable=True)
            metrics.write("cpu", 1.0, {"n": "2"}, time=T0, durable=True)
            assert refused.is_set()
            assert metrics.label_values("n") == ["1", "2"]
            with pytest.raises(Invalid, match="holds 2 series and this write adds 1"):
                metrics.write("cpu", 1.0, {"n": "3"}, time=T0, durable=True)


@pytest.mark.parametrize("connected", [False, True])
def test_a_refused_write_does_not_count(tmp_path: Path, connected: bool) -> None:
    """However often one is refused, by another shard, table or condition: the series that it would add stay free."""
    with penstock.open(tmp_path / "store") as store:
        metrics = store.series("metrics", shards=2, options=penstock.SeriesOptions(metric_series_max=100))
        full = store.series("full", options=penstock.SeriesOptions(series_max=1))
        full.write("cpu", 1.0, time=T0, durable=True)
        store.kv("keys").put(b"taken", b"", durable=True)
        with penstock.connect(store.path) if connected else nullcontext(store) as writer:
            for number in range(5):
                some = flood(range(number * 80, number * 80 + 80))  # about 40 to each shard
                with pytest.raises(Invalid, match="series_max"), writer.batch() as batch:
                    batch.series("metrics").write_arrow(some)
                    batch.series("full").write("cpu", 1.0, {"n": str(number)}, time=T0)
                with pytest.raises(ConditionFailed), writer.batch() as batch:
                    batch.series("metrics").write_arrow(some)
                    batch.kv("keys").put(b"taken", b"", if_absent=True)
                with pytest.raises(Invalid, match="metric_series_max"):  # of one shard or the other
                    writer.series("metrics").write_arrow(flood(range(number * 999, number * 999 + 205)), durable=True)
            writer.series("metrics").write_arrow(flood(range(180)), durable=True)
        assert metrics.cardinality().metrics == {"cpu": 180}


@pytest.mark.parametrize("stored", [False, True])
def test_a_flood_of_labels_is_deleted(store: Any, stored: bool) -> None:
    metrics = small(store, series_max=1_000, metric_series_max=900)
    metrics.write("up", 1.0, {"host": "a"}, time=T0)
    metrics.write_arrow(flood(range(900)), durable=True)
    if stored:
        store.checkpoint()
    with pytest.raises(Invalid, match="has 900 series and this write adds 1"):
        metrics.write("cpu", 1.0, {"n": "900"}, time=T0)
    metrics.delete('cpu{n!="5"}', durable=True)
    for _ in range(2):
        assert metrics.cardinality().metrics == {"cpu": 1, "up": 1}
        assert metrics.label_values("n") == ["5"]
        assert metrics.labels() == ["__name__", "host", "n"]
        assert metrics.series().num_rows == 2
        assert metrics.statistics().series == 2
        store.checkpoint()
        store.compact("metrics")
    metrics.delete("cpu", durable=True)
    assert metrics.labels() == ["__name__", "host"]
    assert metrics.label_values("__name__") == ["up"]
    metrics.write_arrow(flood(range(900, 1_800)), durable=True)
    with pytest.raises(Invalid, match="has 900 series and this write adds 1"):  # it would be listed again
        metrics.write_columns("cpu", [1.0], {"n": "7"}, times=[T0])
    metrics.delete('cpu{n="1000"}', durable=True)
    metrics.write_columns("cpu", [1.0], {"n": "7"}, times=[T0], durable=True)
    assert metrics.select('cpu{n="7"}').num_rows == 1
    assert metrics.cardinality().metrics == {"cpu": 900, "up": 1}


def test_deleted_series_stay_away_after_reopening(tmp_path: Path) -> None:
    day = 86_400_000_000
    with penstock.open(tmp_path / "store", settings=QUIET) as store:
        metrics = store.series("metrics", shards=2)
        metrics.write_arrow(flood(range(50)), durable=True)
        metrics.write("cpu", 1.0, {"n": "3"}, time=T0 + day)
        metrics.delete("cpu", end=(T0 // day + 1) * day, durable=True)  # one of two buckets
        assert metrics.label_values("n") == ["3"]
        metrics.delete("cpu", start=T0 + day - 1, end=T0 + day + 1, durable=True)  # a part of the other
    with penstock.open(tmp_path / "store") as store:
        metrics = store.series("metrics")
        assert metrics.select("{}").num_rows == 0
        assert metrics.label_values("n") == ["3"]  # as documented: it is listed until its bucket is deleted
        with store.snapshot() as before:
            metrics.write("cpu", 2.0, {"n": "4"}, time=T0, durable=True)
            assert before.series("metrics").label_values("n") == ["3"]
        assert metrics.label_values("n") == ["3", "4"]
        with penstock.connect(store.path) as client:
            assert client.series("metrics").label_values("n") == ["3", "4"]


@pytest.mark.parametrize("connected", [False, True])
def test_a_refused_load_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connected: bool) -> None:
    """A load by file that another shard, another table, a condition or a token refuses leaves room at once."""
    monkeypatch.setattr(loading, "INLINE_BYTES_MAX", 0)
    with penstock.open(tmp_path / "store") as store:
        metrics = store.series("metrics", shards=2, options=penstock.SeriesOptions(metric_series_max=100))
        full = store.series("full", options=penstock.SeriesOptions(series_max=1))
        full.write("cpu", 1.0, time=T0, durable=True)
        store.kv("keys").put(b"taken", b"", durable=True)
        with penstock.connect(store.path) if connected else nullcontext(store) as writer:
            for number in range(4):
                some = flood(range(number * 80, number * 80 + 80))  # about 40 to each shard
                with pytest.raises(Invalid, match="series_max"), writer.batch() as batch:
                    batch.load("metrics", some)
                    batch.load("full", flood([number]))
                with pytest.raises(Invalid, match="series_max"), writer.batch() as batch:
                    batch.load("metrics", some)
                    batch.series("full").write("cpu", 1.0, {"n": str(number)}, time=T0)
                with pytest.raises(ConditionFailed), writer.batch() as batch:
                    batch.load("metrics", some)
                    batch.kv("keys").put(b"taken", b"", if_absent=True)
                with pytest.raises(Invalid, match="metric_series_max"):  # of one shard or the other
                    writer.load("metrics", flood(range(number * 999, number * 999 + 205)))
            assert admitted_in(store, metrics) == 0
            writer.load("metrics", flood(range(180)))
        assert metrics.cardinality().metrics == {"cpu": 180}
        assert admitted_in(store, metrics) == 0


def admitted_in(store: Any, table: Any) -> int:
    """Return how many series count that are not applied."""
    admissions = [store.port.machine(partition).admitted for partition in table._partitions]
    return sum(some.count(bucket) for some in admissions for bucket in list(some._admissions))


def test_a_load_whose_files_are_committed_twice_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "INLINE_BYTES_MAX", 0)
    with penstock.open(tmp_path / "store") as store:
        metrics = small(store, series_max=50)
        first, second = (store.prepare("metrics", flood(range(start, start + 40))) for start in (0, 40))
        with store.batch() as batch:
            batch.load("metrics", first)
        with pytest.raises(Invalid, match="not staged|committed before"), store.batch() as batch:
            batch.load("metrics", first)
        with pytest.raises(Invalid, match="series_max"), store.batch() as batch:
            batch.load("metrics", second)
        metrics.write_arrow(flood(range(40, 50)), durable=True)
        assert metrics.cardinality().series == 50
        assert admitted_in(store, metrics) == 0


def test_a_write_without_new_series_leaves_the_counts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An admission changes the counts under their lock; an apply that does not take it must not touch them."""
    shard = SeriesUnderTest()
    rows = [(labels("cpu", n=str(number)), T0, number) for number in range(5)]
    shard.write(block(rows))
    touched = list[bool]()
    for name in ("remove", "add", "withdraw", "forget"):
        right = getattr(AdmittedSeries, name)

        def noticed(self: AdmittedSeries, *arguments: Any, right: Any = right) -> Any:
            free = self.lock.acquire(blocking=False)
            if free:
                self.lock.release()
            touched.append(not free)
            return right(self, *arguments)

        monkeypatch.setattr(AdmittedSeries, name, noticed)
    shard.write(block([(series, T0 + 1, bits) for series, _, bits in rows[:3]]))  # some of a table written before
    shard.write(block([(series, T0 + 2, bits) for series, _, bits in rows[::-1]]))  # a table not remembered whole
    assert touched == []
    shard.write(block([(labels("cpu", n="new"), T0, 1)]))
    assert touched == [True]
    shard.close()
