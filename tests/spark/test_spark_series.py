"""Spark reads and writes series tables: every value and label comes back, and only what is asked for is read."""

from __future__ import annotations

import struct
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
import penstock.spark
from penstock.host import threads
from penstock.series.section import STALE_BITS
from penstock.spark.reading import TableReader
from penstock.store.store import Store

HOUR_US = 3_600_000_000
BITS = [STALE_BITS, 0x7FF8_0000_0000_0001, 0x7FF0 << 48, 0xFFF0 << 48, 1 << 63, 1, 0x3FF8 << 48]


def load(spark: Any, folder: str, **options: str) -> Any:
    return spark.read.format("penstock").option("table", "metrics").options(**options).load(folder)


def bits_of(table: pa.Table) -> dict[tuple[str, str, int], int]:
    values = table.column("value").to_numpy().view(np.uint64).tolist()
    times = table.column("time").cast(pa.int64()).to_pylist()
    labels = [repr(sorted(pairs)) for pairs in table.column("labels").to_pylist()]
    return dict(zip(zip(table.column("metric").to_pylist(), labels, times, strict=True), values, strict=True))


def test_a_round_trip_keeps_everything(spark: Any, store: Store, folder: str) -> None:
    metrics, copy = store.series("metrics", shards=2), store.series("copy", shards=3)
    values = [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in BITS]
    times = [-(2**40), -1, 0, 1, 5 * HOUR_US, 30 * HOUR_US, 1_700_000_000_000_000]
    for labels in ({}, {"host": "ünï ☃", "empty": ""}, {"a.b c": '"\n\\'}):
        metrics.write_columns("cpu", values, labels, times=times)
    store.flush()
    frame = load(spark, folder, splits="4")
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
        ("metric", "string"), ("labels", "map<string,string>"), ("time", "timestamp"), ("value", "double"),
    ]  # fmt: skip
    assert frame.count() == 21
    frame.write.format("penstock").option("table", "copy").mode("append").save(folder)
    assert bits_of(copy.to_arrow()) == bits_of(metrics.to_arrow())
    assert penstock.spark.verify(spark, folder) == []


def test_selector_and_times_are_pushed_down(spark: Any, store: Store, folder: str) -> None:
    metrics = store.series("metrics", options=penstock.SeriesOptions(bucket_s=3600))
    for host in "abc":
        metrics.write_columns("cpu", np.arange(100.0), {"host": host}, times=np.arange(100) * (HOUR_US // 10))
    store.flush()
    some = load(
        spark, folder, selector='cpu{host=~"a|b"}', start=str(2 * HOUR_US), end="1970-01-01T04:00:00", splits="8"
    )
    assert some.rdd.getNumPartitions() == 2  # one for each bucket
    rows = some.collect()
    assert len(rows) == 40
    assert {row["labels"]["host"] for row in rows} == {"a", "b"}
    assert {row["time"].astimezone(UTC).hour for row in rows} == {2, 3}
    whole = load(spark, folder)
    assert whole.where("metric = 'cpu'").groupBy("labels.host").sum("value").collect()[0][1] == 4950.0
    info = store.port.table("metrics")
    assert info is not None
    reader = TableReader({"path": folder, "table": "metrics"}, whole.schema, info)
    reader._filters += [
        ("time", ">=", datetime(1970, 1, 1, 5, tzinfo=UTC)),
        ("time", "<", datetime(1970, 1, 1, 6, tzinfo=UTC)),
    ]
    (task,) = reader.partitions()
    assert [row for batch in reader.read(task) for row in batch.column("value").to_pylist()] == [*range(50, 60)] * 3
    for wrong, message in (({"selector": "cpu{"}, "expected a label"), ({"start": "soon"}, "is not a time")):
        with pytest.raises(Exception, match=message):
            load(spark, folder, **wrong).collect()
    store.kv("users")
    with pytest.raises(Exception, match="users is of the kind kv, which has no selectors"):
        spark.read.format("penstock").option("table", "users").option("selector", "cpu").load(folder).collect()


def test_only_the_columns_asked_for_are_read(spark: Any, store: Store, folder: str) -> None:
    """With the option `columns`, or a schema: labels that no query needs are not sent to Spark."""
    metrics = store.series("metrics", shards=2)
    for host in "ab":
        metrics.write_columns("cpu", np.arange(10.0), {"host": host}, times=np.arange(10) * HOUR_US)
    store.checkpoint()
    metrics.write("mem", 7.0, {"host": "a"}, time=HOUR_US)  # not in a file
    store.flush()
    two = load(spark, folder, columns="value, metric")
    assert two.columns == ["value", "metric"]
    assert dict(two.groupBy("metric").sum("value").collect()) == {"cpu": 90.0, "mem": 7.0}
    some = load(spark, folder, columns="metric,time", selector="mem").collect()
    assert [(row["metric"], row["time"].astimezone(UTC).hour) for row in some] == [("mem", 1)]
    info = store.port.table("metrics")
    assert info is not None
    reader = TableReader({"path": folder, "table": "metrics"}, two.schema, info)
    batches = [batch for task in reader.partitions() for batch in reader.read(task)]
    assert {tuple(batch.schema.names) for batch in batches} == {("value", "metric")}
    for wrong, message in (
        ("value,host", "no column 'host': it has metric, labels"),
        ("value,value", "each column once"),
    ):
        with pytest.raises(Exception, match=message):
            load(spark, folder, columns=wrong)


def test_a_stream_and_a_commit_write_series_once(spark: Any, store: Store, folder: str, tmp_path: Path) -> None:
    metrics, totals = store.series("metrics", shards=2), store.kv("totals", value="int64")
    events = store.queue("events", shards=2)
    events.put_many([b"%d" % n for n in range(50)], keys=[b"%d" % n for n in range(50)], durable=True)

    def route(frame: Any) -> dict[str, Any]:
        numbers = frame.selectExpr("cast(cast(payload as string) as long) n")
        return {
            "totals": numbers.selectExpr("binary('all') key", "1L value", "'add_i64' op"),
            "metrics": numbers.selectExpr(
                "'seen' metric",
                "map('last', cast(n % 10 as string)) labels",
                "timestamp_micros(n) time",
                "double(n) value",
            ),
        }

    query = penstock.spark.stream(
        spark, folder, source="events", consumer="c", batch=route, available_now=True, max_rows=20
    )
    penstock.spark.wait(query)
    assert totals.get(b"all") == 50
    assert metrics.aggregate("seen", function="sum").column("value").to_pylist() == [float(sum(range(50)))]
    rows = spark.sql("select 'once' metric, timestamp_micros(7) time, 1.5D value, 'a' host")
    for _ in range(2):
        penstock.spark.commit(folder, {"metrics": rows}, token=("loader", 1))
    assert metrics.select("once").num_rows == 1
    stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).option("startTimestamp", 0).load()
    writing = (
        stream.selectExpr("'streamed' metric", "timestamp_micros(value) time", "double(value) value")
        .writeStream.format("penstock")
        .option("table", "metrics")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(processingTime="1 second")
        .start(folder)
    )
    try:
        while metrics.select("streamed").num_rows < 20:
            assert writing.isActive, writing.exception()
    finally:
        writing.stop()


def test_rollups_are_computed_on_spark(spark: Any, store: Store, folder: str) -> None:
    source = store.series("metrics", shards=2)
    rollup = penstock.Rollup(source="metrics", step_s=60)
    target = store.series("minutes", options=penstock.SeriesOptions(rollup=rollup))
    ended, done = threading.Event(), list[int]()
    driver = threads.spawn(lambda: done.append(penstock.spark.maintain(spark, folder, once=True, stop=ended)), name="d")
    try:
        until_s = time.monotonic() + 120
        while not store.offers.slots() and time.monotonic() < until_s:
            time.sleep(0.05)
        for host in "abcd":
            source.write_columns("cpu", np.arange(100.0), {"host": host}, times=np.arange(100) * 6_000_000)
        store.flush()
        while not done and time.monotonic() < until_s:
            store._scheduler.trigger("derived-tables")
            store._scheduler.trigger("derived-table-jobs")
            time.sleep(0.2)
        assert done == [1]
        store.roll_up("minutes")  # waits for the commit, or finds nothing left to do
    finally:
        ended.set()
        driver.join(60)
    sums = target.aggregate("cpu:sum", function="sum").column("value").to_pylist()
    assert sums == [4 * float(sum(range(100)))]
    assert target.select('cpu:count{host="c"}').column("value").to_pylist() == [10.0] * 10
