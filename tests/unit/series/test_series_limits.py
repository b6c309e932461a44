"""Limits of cardinality: they count from admission, and deleted series do not count."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.errors import Invalid
from penstock.series import admitted
from penstock.series.admitted import AdmittedSeries
from penstock.series.keys import dictionary_keys
from penstock.series.labels import LabelTable, check_labels

T0 = 1_700_000_000_000_000
QUIET = penstock.StoreSettings(background=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    with penstock.open(tmp_path / "store", settings=QUIET) as opened:
        yield opened


def small(store: Any, **options: Any) -> Any:
    return store.series("metrics", options=penstock.SeriesOptions(**options))


def flood(numbers: range, metric: str = "cpu") -> pa.Table:
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
    assert not machine.admitted._until


def test_admitted_series_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    known = AdmittedSeries()
    table = LabelTable.of([check_labels("cpu", {"n": str(number)}) for number in range(5)])
    keys = dictionary_keys(7, table.fingerprints)
    known.add(7, {"cpu": keys[:2]}, T0 - 1)
    known.add(7, {"cpu": keys[2:], "mem": keys[:1]}, T0)
    assert (known.count(7), known.count(7, "cpu"), known.count(7, "mem"), known.count(8)) == (6, 5, 1, 0)
    assert known.new(7, "cpu", keys) == known.new(8, "cpu", []) == 0
    assert known.new(7, "mem", keys) == 4
    known.forget(T0 + 59_999_998)
    assert known.count(7) == 6
    known.forget(T0 + 59_999_999)
    assert (known.count(7, "cpu"), known.new(7, "cpu", keys)) == (3, 2)
    known.remove(7, keys[3:])
    assert known.count(7) == 2
    known.forget(T0 + 60_000_000)
    assert not known._until
    known.add(7, {"cpu": keys}, T0)
    monkeypatch.setattr(admitted, "ADMITTED_MAX", 4)
    known.forget(T0)
    assert not known._until


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
