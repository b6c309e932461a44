"""The API of a series table, in the owner and through a connection."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock import aio
from penstock.errors import Invalid, KindMismatch, NotFound
from penstock.series.section import STALE_BITS
from penstock.store.store import open_store
from penstock.testing.clock import FakeClock
from penstock.testing.disk import SimulatedDisk
from penstock.testing.kinds.sample import SETTINGS
from penstock.testing.manifest import MemoryEngine

HOUR_US = 3_600_000_000
STALE = struct.unpack("<d", struct.pack("<Q", STALE_BITS))[0]


@pytest.fixture(params=["open", "connect"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with penstock.open(tmp_path / "store") as owner:
        if request.param == "open":
            yield owner
        else:
            with penstock.connect(owner.path) as client:
                yield client


def rows(table: pa.Table) -> list[tuple[str, dict[str, str], int, float]]:
    table = table.set_column(2, "time", table.column("time").cast(pa.int64()))
    samples = [(row["metric"], dict(row["labels"]), row["time"], row["value"]) for row in table.to_pylist()]
    return sorted(samples, key=lambda row: (row[0], sorted(row[1].items()), row[2]))


def test_samples_are_written_and_selected(store: Any) -> None:
    metrics = store.series("metrics", shards=3)
    metrics.write("cpu", 1, {"host": "a"}, time=10)
    metrics.write("cpu", 2.5, {"host": "b", "empty": ""}, time=datetime(1969, 12, 31, tzinfo=UTC))
    metrics.write_columns("mem", [5.0, 6.0], {"host": "a"}, times=[HOUR_US, 30 * HOUR_US])
    metrics.write_columns("mem", np.array([7]), times=np.array(["1970-01-01T00:00:01"], "datetime64[s]"))
    metrics.write_arrow(pa.table({"host": ["a", "c"], "time": [11, 12], "value": [3.0, 4.0]}), metric="cpu")
    everything = [
        ("cpu", {"host": "a"}, 10, 1.0),
        ("cpu", {"host": "a"}, 11, 3.0),
        ("cpu", {"host": "b"}, -24 * HOUR_US, 2.5),
        ("cpu", {"host": "c"}, 12, 4.0),
        ("mem", {}, 1_000_000, 7.0),
        ("mem", {"host": "a"}, HOUR_US, 5.0),
        ("mem", {"host": "a"}, 30 * HOUR_US, 6.0),
    ]
    assert rows(metrics.to_arrow()) == everything  # one reads one's own writes
    assert rows(metrics.select('cpu{host=~"a|c"}')) == [everything[0], everything[1], everything[3]]
    assert rows(metrics.select("cpu", 11, 12)) == [everything[1]]
    assert rows(metrics.select("{}", datetime(1970, 1, 1, 1, tzinfo=UTC))) == everything[5:]
    assert rows(pa.table(metrics)) == everything
    assert sum(batch.num_rows for batch in metrics.scan_arrow("mem")) == 3
    assert metrics.select("nothing").schema == metrics.schema
    store.flush()
    with store.snapshot() as snapshot:
        metrics.write("cpu", 9.0, {"host": "a"}, time=10)
        assert rows(snapshot.series("metrics").to_arrow()) == everything
    assert rows(metrics.select('cpu{host="a"}', end=11)) == [("cpu", {"host": "a"}, 10, 9.0)]  # the last write wins


def test_labels_series_metadata_and_cardinality(store: Any) -> None:
    metrics = store.series("metrics", shards=2)
    for host in "abc":
        metrics.write("cpu", 1.0, {"host": host, "dc": "x"}, time=5)
    metrics.write("mem", 1.0, {"host": "a"}, time=40 * HOUR_US)
    metrics.set_metadata("cpu", type="counter", unit="s", help="time spent")
    metrics.set_metadata("cpu", type="gauge", unit="s")
    assert metrics.labels() == ["__name__", "dc", "host"]
    assert metrics.labels("mem") == ["__name__", "host"]
    assert metrics.label_values("host") == ["a", "b", "c"]
    assert metrics.label_values("__name__") == ["cpu", "mem"]
    assert metrics.label_values("host", "mem") == ["a"]
    assert metrics.label_values("host", start=40 * HOUR_US) == ["a"]
    series = [(row["metric"], dict(row["labels"])) for row in metrics.series('{host="a"}').to_pylist()]
    assert sorted(series, key=repr) == [("cpu", {"dc": "x", "host": "a"}), ("mem", {"host": "a"})]
    assert metrics.metadata() == {"cpu": penstock.MetricMetadata("cpu", "gauge", "s", "")}
    assert metrics.metadata("mem") == {}
    counted = metrics.cardinality()
    assert counted == penstock.Cardinality(4, {"cpu": 3, "mem": 1}, {"host": 3, "__name__": 2, "dc": 1})
    assert metrics.cardinality(top=1) == penstock.Cardinality(4, {"cpu": 3}, {"host": 3})


def test_statistics(store: Any) -> None:
    metrics = store.series("metrics", shards=2)
    assert metrics.statistics() == penstock.SeriesStatistics(
        shards=2, buckets=0, series=0, memory_bytes=0, files=0, file_bytes=0, runs_max=0
    )
    for number in range(10):
        metrics.write("cpu", 1.0, {"n": str(number)}, time=number % 3 * 24 * HOUR_US)
    store.flush()
    statistics = metrics.statistics()
    assert (statistics.shards, statistics.buckets, statistics.series, statistics.files) == (2, 3, 4, 0)
    assert statistics.memory_bytes > 0
    with store.snapshot() as snapshot:
        assert snapshot.series("metrics").statistics().series == 4


def test_aggregates(store: Any) -> None:
    metrics = store.series("metrics", shards=2)
    minute = 60_000_000
    for host, base in (("a", 0.0), ("b", 100.0)):
        metrics.write_columns("cpu", base + np.arange(10.0), {"host": host}, times=np.arange(10) * minute)
    summed = metrics.aggregate("cpu", function="sum", step=300).to_pylist()
    assert [(row["time"].minute, row["value"]) for row in summed] == [(0, 520.0), (5, 570.0)]
    by_host = metrics.aggregate("cpu", function="rate", by=["host"], step=timedelta(minutes=5)).to_pylist()
    assert [(dict(row["labels"])["host"], row["value"]) for row in by_host] == [
        ("a", 4 / 300), ("a", 5 / 300), ("b", 4 / 300), ("b", 5 / 300),
    ]  # fmt: skip
    (median,) = metrics.aggregate("cpu", function="quantile", quantile=0.5, end=5 * minute).to_pylist()
    assert median == {"labels": [], "time": None, "value": 52.0}


def test_deletes(store: Any) -> None:
    metrics = store.series("metrics", shards=2)
    metrics.write_columns("cpu", np.arange(5.0), {"host": "a"}, times=range(5))
    metrics.write_columns("cpu", np.arange(5.0), {"host": "b"}, times=range(5))
    metrics.delete('cpu{host="a"}', 1, 3)
    metrics.write("cpu", 9.0, {"host": "a"}, time=2)
    assert metrics.select('cpu{host="a"}').column("value").to_pylist() == [0.0, 9.0, 3.0, 4.0]
    assert metrics.select('cpu{host="b"}').num_rows == 5
    metrics.delete("{}")
    assert metrics.to_arrow().num_rows == 0


def test_values_keep_their_bits(store: Any) -> None:
    metrics = store.series("metrics")
    values = [STALE, float("nan"), float("inf"), -0.0, 5e-324]
    metrics.write_columns("cpu", values, times=range(5))
    metrics.write("one", STALE, time=0)
    expected = [struct.unpack("<Q", struct.pack("<d", value))[0] for value in values]
    assert metrics.select("cpu").column("value").to_numpy().view(np.uint64).tolist() == expected
    assert metrics.select("one").column("value").to_numpy().view(np.uint64).tolist() == [STALE_BITS]


def test_a_batch_holds_series_too(store: Any) -> None:
    metrics, users = store.series("metrics", shards=2), store.kv("users")
    for duplicate in (False, True):
        with store.batch(token=("loader", 1)) as batch:
            batch.kv("users").put(b"ada", b"1")
            batch.series("metrics").write("cpu", 1.0, time=1)
            batch.series("metrics").write("cpu", 2.0, time=2)
            batch.series("metrics").write_columns("mem", [1.0], times=[1])
            batch.series("metrics").delete("cpu", 1, 2)
        assert batch.duplicate is duplicate
    assert rows(metrics.to_arrow()) == [("cpu", {}, 2, 2.0), ("mem", {}, 1, 1.0)]
    assert users.get(b"ada") == b"1"
    with pytest.raises(Invalid, match="takes writes only"), store.batch() as batch:
        batch.series("metrics").select("cpu")


def test_loads(store: Any) -> None:
    metrics = store.series("metrics", shards=2)
    table = pa.table({"metric": ["cpu"] * 3, "time": [1, 2, 3], "value": [1, 2, 3], "host": ["a", "b", None]})
    assert store.load("metrics", table, token=("load", 1)).rows == 3
    assert store.load("metrics", table, token=("load", 1)).duplicate
    expected = [("cpu", {}, 3, 3.0), ("cpu", {"host": "a"}, 1, 1.0), ("cpu", {"host": "b"}, 2, 2.0)]
    assert rows(metrics.to_arrow()) == expected
    with pytest.raises(Invalid, match="metric, time and value"):
        store.load("metrics", table.drop_columns(["time"]))
    with pytest.raises(Invalid, match="labels are texts"):
        store.load("metrics", table.append_column("dc", pa.array([1, 2, 3])))


def test_tables_of_other_options_and_kinds(store: Any) -> None:
    options = penstock.SeriesOptions(bucket_s=3600, retention_s=86_400)
    assert store.series("metrics", options=options).options == options
    assert store.series("metrics").options == options
    with pytest.raises(KindMismatch, match="other options"):
        store.series("metrics", options=penstock.SeriesOptions())
    with pytest.raises(KindMismatch):
        store.kv("metrics")
    with pytest.raises(NotFound):
        store.series("none", create=False)
    assert repr(store.series("metrics")) == "<SeriesTable 'metrics'>"


def test_limits_are_judged_by_the_owner(store: Any) -> None:
    options = penstock.SeriesOptions(series_max=4, metric_series_max=3, window_s=3600, future_s=60)
    metrics = store.series("metrics", options=options)
    for host in "abc":
        metrics.write("cpu", 1.0, {"host": host}, durable=True)
    with pytest.raises(Invalid, match="metric cpu of table metrics has 3 series .* 3 .metric_series_max."):
        metrics.write("cpu", 1.0, {"host": "d"}, durable=True)
    metrics.write("cpu", 2.0, {"host": "a"}, durable=True)  # a known series is always accepted
    metrics.write("mem", 1.0, durable=True)
    with pytest.raises(Invalid, match="table metrics holds 4 series .* most of metric disk: .* 4 .series_max."):
        metrics.write_arrow(
            pa.table({"host": ["a"], "time": [datetime.now(UTC)], "value": [1.0]}), metric="disk", durable=True
        )
    now = round(datetime.now(UTC).timestamp() * 1e6)
    with pytest.raises(Invalid, match=r"7,\d\d\d s old, and table metrics accepts 3,600 s .window_s."):
        metrics.write("cpu", 1.0, {"host": "a"}, time=now - 2 * HOUR_US - 5_000_000, durable=True)
    with pytest.raises(Invalid, match="in the future, and table metrics accepts 60 s .future_s."):
        metrics.write_columns("cpu", [1.0], {"host": "a"}, times=[now + HOUR_US], durable=True)
    assert metrics.label_values("host") == ["a", "b", "c"]
    assert store.troubles() == []


def test_old_buckets_are_deleted() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with open_store("/store", fs=disk, clock=clock, engine=MemoryEngine, settings=SETTINGS) as store:
        metrics = store.series("metrics", shards=2, options=penstock.SeriesOptions(bucket_s=3600, retention_s=7200))
        now = clock.time_us()
        for hours in range(6):
            for host in "abcd":
                metrics.write("cpu", float(hours), {"host": host}, time=now - hours * HOUR_US)
        store.flush()
        store.port.maintain()
        store.flush()
        remaining = set(metrics.select("cpu").column("value").to_pylist())
        assert {0.0, 1.0, 2.0} <= remaining <= {0.0, 1.0, 2.0, 3.0}
        before = metrics.to_arrow()
    with open_store("/store", fs=disk, clock=clock, engine=MemoryEngine, settings=SETTINGS) as store:
        assert rows(store.series("metrics").to_arrow()) == rows(before)
        assert len(store.series("metrics").series()) == 4


def test_many_writes_of_many_series(store: Any) -> None:
    metrics = store.series("metrics", shards=2)
    for number in range(600):
        metrics.write(
            "cpu", float(number), {"host": f"h{number % 30}"}, time=1_600_000_000_000_000 + number * 100_000_000
        )
    store.flush()
    assert metrics.select("cpu").num_rows == 600
    assert metrics.select('cpu{host="h7"}').column("value").to_pylist() == [float(n) for n in range(7, 600, 30)]


def test_asyncio(tmp_path: Path) -> None:
    async def use() -> None:
        async with aio.open(tmp_path / "store") as store:
            metrics = await store.series("metrics")
            await metrics.write("cpu", 1.0, {"host": "a"}, time=1, durable=True)
            assert (await metrics.select("cpu")).num_rows == 1
            assert await metrics.label_values("host") == ["a"]
            async with store.batch() as batch:
                batch.series("metrics").write("cpu", 2.0, time=2)
            assert sum([batch.num_rows async for batch in metrics.scan_arrow("cpu")]) == 2
            async with store.snapshot() as snapshot:
                assert (await snapshot.series("metrics").to_arrow()).num_rows == 2

    asyncio.run(use())


def test_options_are_altered(store: Any) -> None:
    metrics, other = store.series("metrics"), store.series("metrics")
    metrics.write("cpu", 1.0, {"host": "a"}, durable=True)
    metrics.alter(metric_series_max=1, window_s=60, future_s=None)
    assert metrics.options == penstock.SeriesOptions(metric_series_max=1, window_s=60, future_s=None)
    assert store.series("metrics").options == metrics.options
    with pytest.raises(Invalid, match="metric_series_max"):
        other.write("cpu", 1.0, {"host": "b"}, durable=True)
    with pytest.raises(Invalid, match="window_s"):
        metrics.write("cpu", 1.0, {"host": "a"}, time=1)
    other.write("cpu", 1.0, {"host": "a"}, time=datetime(2100, 1, 1, tzinfo=UTC))  # it was refused before
    metrics.alter(window_s=None, metric_series_max=10)
    other.write("cpu", 1.0, {"host": "b"}, time=1, durable=True)
    with pytest.raises(Invalid, match="alter what"):
        metrics.alter()
    with pytest.raises(Invalid, match="series_max of a series table"):
        metrics.alter(series_max=0)


@pytest.mark.parametrize("days", [-400, 400])
def test_a_clock_that_jumped_in_a_client_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    """The window is one around the store's time; an agent would drop for good what its door refuses."""
    with penstock.open(tmp_path / "store") as owner, penstock.connect(owner.path) as client:
        owner.series("metrics", options=penstock.SeriesOptions(window_s=3_600, future_s=3_600))
        now = owner.port.time_us()
        wrong = FakeClock(time_us=now + days * 24 * HOUR_US)
        monkeypatch.setattr(client.port, "now_us", wrong.time_us)
        metrics = client.series("metrics")
        for _ in range(2):  # as a new series, and as a known one
            metrics.write("cpu", 1.0, time=now, durable=True)
            metrics.write_columns("mem", [1.0, 2.0], times=[now - 1, now], durable=True)
        for time in (now - 2 * HOUR_US, now + 2 * HOUR_US, wrong.time_us()):
            with pytest.raises(Invalid, match=r"window_s|future_s"):
                metrics.write("cpu", 1.0, time=time, durable=True)
            with pytest.raises(Invalid, match=r"window_s|future_s"):
                metrics.write_columns("disk", [1.0], times=[time], durable=True)
        assert owner.series("metrics").cardinality().metrics == {"cpu": 1, "mem": 1}
