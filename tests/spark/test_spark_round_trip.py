"""What goes through Spark comes back as it was, whatever its type; what a read narrows changes nothing but the work."""

from __future__ import annotations

import functools
import itertools
import math
import struct
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, GreaterThanOrEqual, In, LessThan

from penstock.spark.arrow import for_spark
from penstock.spark.format import PenstockSource
from penstock.spark.sessions import PUSHDOWN
from penstock.store.store import Store

KEYS = [
    b"",
    b"\0",
    b"\0\0",
    b"\0a",
    b"a",
    b"a\0",
    b"a\0b",
    "ключ".encode(),
    b"\xff",
    b"\xff\xff\xff\xff",
    b"k" * 65_536,
]
VALUES: dict[str, list[Any]] = {
    "bytes": [b"", b"\0", b"\0\xff", b"x" * 300_000, bytes(range(256))],
    "utf8": ["", "\0", "é", "\U0001f41f", "long " * 50_000],
    "json": [None, "", {"a": [1, None, True]}, [], -1.5, "\u2028"],
    "int64": [0, -1, 1, (1 << 63) - 1, -(1 << 63)],
    "float64": [0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7976931348623157e308],
}
numbers = itertools.count()


def load(spark: Any, folder: str, table: str, **options: str) -> Any:
    return spark.read.format("penstock").option("table", table).options(**options).load(folder)


def save(frame: Any, folder: str, table: str, mode: str = "append") -> None:
    frame.write.format("penstock").option("table", table).mode(mode).save(folder)


def exact(value: Any) -> Any:
    """A value that equals another only if they are the same, NaN and -0.0 included."""
    return (
        struct.pack("<d", value)
        if isinstance(value, float)
        else bytes(value)
        if isinstance(value, bytearray)
        else value
    )


def contents(table: Any) -> dict[bytes, Any]:
    return {row["key"]: exact(row["value"]) for row in table.to_arrow().to_pylist()}


# -- kv


@pytest.mark.parametrize("value", VALUES)
def test_every_value_and_key_of_a_kv_table(spark: Any, store: Store, folder: str, value: Any) -> None:
    here, there = store.kv("here", value=value, shards=2), store.kv("there", value=value, shards=3)
    rows = dict(zip(KEYS, itertools.cycle(VALUES[value]), strict=False))
    rows |= {b"v%d" % number: one for number, one in enumerate(VALUES[value])}
    here.put_many(rows, durable=True)
    frame = load(spark, folder, "here")
    assert {bytes(row.key): exact(row.value) for row in frame.collect()} == contents(here)
    save(frame, folder, "there")
    assert contents(there) == contents(here)
    there_again = {key: exact(one) for key, one in there.scan()}
    assert there_again == {key: exact(one) for key, one in rows.items()}


def test_rows_that_are_put_deleted_and_null(spark: Any, store: Store, folder: str) -> None:
    table = store.kv("t", value="utf8")
    table.put_many({b"a": "old", b"b": "old"}, durable=True)
    save(
        spark.sql("select X'61' key, string(null) value, 'delete' op union all select X'63', 'new', null"), folder, "t"
    )
    assert dict(table.scan()) == {b"b": "old", b"c": "new"}
    for row in ("select X'61' key, string(null) value", "select cast(null as binary) key, 'v' value"):
        with pytest.raises(Exception, match="a key or a value is null"):
            save(spark.sql(row), folder, "t")
    assert dict(table.scan()) == {b"b": "old", b"c": "new"}


def test_smaller_numbers_fit_into_larger_ones(spark: Any, store: Store, folder: str) -> None:
    whole, real = store.kv("whole", value="int64"), store.kv("real", value="float64")
    save(spark.sql("select X'01' key, 7S value"), folder, "whole")
    save(spark.sql("select X'01' key, float(0.5) value"), folder, "real")
    save(spark.sql("select X'02' key, 3 value"), folder, "real")
    assert (whole.get(b"\1"), real.get(b"\1"), real.get(b"\2")) == (7, 0.5, 3.0)


def test_large_values(spark: Any, store: Store, folder: str) -> None:
    """Some of several megabytes each: more than goes through the journal, and than one batch for the JVM holds."""
    here, there, queue = store.kv("here"), store.kv("there"), store.queue("queue")
    rows = {b"%02d" % number: bytes([number]) * (4 << 20) for number in range(12)}
    here.put_many(rows, durable=True)
    frame = load(spark, folder, "here")
    save(frame, folder, "there")
    assert dict(there.scan()) == rows
    save(frame.selectExpr("value as payload", "key"), folder, "queue")
    assert {message["key"]: message["payload"] for message in queue.to_arrow().to_pylist()} == rows
    matches = (
        load(spark, folder, "queue").selectExpr("key", "sha2(payload, 256) = sha2(repeat(payload, 1), 256)").collect()
    )
    assert len(matches) == len(rows)


def test_a_large_batch_comes_in_slices() -> None:
    schema = pa.schema([pa.field("value", pa.binary(), nullable=False)])
    batch = pa.record_batch([pa.array([b"x" * (1 << 20)] * 100)], schema=schema)
    from pyspark.sql.pandas.types import from_arrow_schema

    sizes = [part.nbytes for part in for_spark(iter([batch]), from_arrow_schema(schema))]
    assert len(sizes) > 2
    assert max(sizes) < 40 << 20


# -- queues


def test_every_message_of_a_queue(spark: Any, store: Store, folder: str) -> None:
    here, there = store.queue("here", shards=2), store.queue("there", shards=3)
    times = [datetime(1, 1, 1, tzinfo=UTC), datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)]
    times += [datetime(1970, 1, 1, tzinfo=UTC), datetime(1582, 10, 10, 1, 2, 3, 4, tzinfo=UTC)]
    times += [datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)]
    for number, (key, time) in enumerate(zip([None, *KEYS], itertools.cycle(times), strict=False)):
        here.put([b"", b"\0", b"payload %d" % number][number % 3], key=key, time=time)
    store.flush()
    frame = load(spark, folder, "here")
    columns = ["shard", "sequence", "time", "key", "payload"]
    rows = frame.selectExpr("shard", "sequence", "unix_micros(timestamp) time", "key", "payload").collect()
    assert sorted(map(_plain, rows)) == sorted(map(_plain, _messages(here, columns)))
    save(frame, folder, "there")
    own = ["key", "time", "payload"]
    assert sorted(map(_plain, _messages(there, own))) == sorted(map(_plain, _messages(here, own)))


def _messages(queue: Any, columns: list[str]) -> list[tuple[Any, ...]]:
    table = queue.to_arrow()
    whole = table.append_column("time", table["timestamp"].cast(pa.int64()))
    return [tuple(row[name] for name in columns) for row in whole.to_pylist()]


def _plain(row: Iterable[Any]) -> tuple[Any, ...]:
    """Values that can be put in order."""
    return tuple(
        b"none" if one is None else b"=" + bytes(one) if isinstance(one, (bytes, bytearray)) else one for one in row
    )


def test_messages_without_a_time_get_the_stores(spark: Any, store: Store, folder: str) -> None:
    queue = store.queue("q")
    before = store.port.time_us()
    save(spark.sql("select X'61' payload, timestamp(null) timestamp union all select X'62', now()"), folder, "q")
    save(spark.sql("select 'text' payload"), folder, "q")
    times = queue.to_arrow()["timestamp"].cast(pa.int64()).to_pylist()
    assert len(times) == 3
    assert min(times) >= before - 1_000
    with pytest.raises(Exception, match="a payload is null"):
        save(spark.sql("select binary(null) payload"), folder, "q")


# -- tables that Hypothesis makes

few = settings(
    max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
some_keys = st.lists(st.binary(max_size=24), min_size=1, max_size=40, unique=True)
some_values = {
    "bytes": st.binary(max_size=60),
    "utf8": st.text(max_size=30),
    "int64": st.integers(-(1 << 63), (1 << 63) - 1),
    "float64": st.floats(),
}


@st.composite
def kv_tables(draw: st.DrawFn) -> tuple[str, int, dict[bytes, Any]]:
    """(type of values, shards, rows): few rows of every shape, repeated under many keys."""
    kind = draw(st.sampled_from(sorted(some_values)))
    values = draw(st.lists(some_values[kind], min_size=1, max_size=40))
    keys = [key + b"%d" % number if number else key for number in range(60) for key in draw(some_keys)]
    return kind, draw(st.integers(1, 3)), dict(zip(keys, itertools.cycle(values), strict=False))


@few
@given(table_spec=kv_tables())
def test_a_made_table_written_by_spark(spark: Any, store: Store, folder: str, table_spec: Any) -> None:
    kind, shards, rows = table_spec
    name = f"t{next(numbers)}"
    table = store.kv(name, value=kind, shards=shards)
    save(spark.createDataFrame(_arrow(table, rows)), folder, name)
    assert contents(table) == {key: exact(value) for key, value in rows.items()}


@few
@given(table_spec=kv_tables())
def test_a_made_table_read_by_spark(spark: Any, store: Store, folder: str, table_spec: Any) -> None:
    kind, shards, rows = table_spec
    name = f"t{next(numbers)}"
    table = store.kv(name, value=kind, shards=shards)
    table.put_many(rows, durable=True)
    rows_read = load(spark, folder, name).toArrow().sort_by("key")
    own = table.to_arrow().sort_by("key")
    assert [exact(value) for value in rows_read["value"].to_pylist()] == [
        exact(value) for value in own["value"].to_pylist()
    ]
    assert rows_read["key"].to_pylist() == own["key"].to_pylist()
    assert rows_read["lsn"].to_pylist() == own["lsn"].to_pylist()


def _arrow(table: Any, rows: dict[bytes, Any]) -> pa.Table:
    value = table.schema.field("value").type
    return pa.table({"key": pa.array(list(rows), pa.binary()), "value": pa.array(list(rows.values()), value)})


# -- what to read


@pytest.fixture
def numbered(store: Store) -> Any:
    """100,000 rows in files and 1,000 in memory, of which some are deleted."""
    table = store.kv("n", value="int64")
    table.put_many({b"%06d" % number: number for number in range(100_000)}, durable=True)
    store.compact("n")
    table.put_many({b"%06d" % number: -number for number in range(50_000, 51_000)})
    table.delete_range(b"000010", b"000020", durable=True)
    return table


def test_fewer_columns_and_ranges(spark: Any, store: Store, folder: str, numbered: Any) -> None:
    expected = dict(numbered.scan())
    keys = spark.read.format("penstock").schema("key binary").option("table", "n").load(folder)
    assert keys.columns == ["key"]
    assert {bytes(row.key) for row in keys.collect()} == set(expected)
    turned = spark.read.format("penstock").schema("value bigint, key binary").option("table", "n").load(folder)
    assert {bytes(row[1]): row[0] for row in turned.where("value > 99000").collect()} == {
        key: value for key, value in expected.items() if value > 99_000
    }
    ranged = load(spark, folder, "n", start="049990", end="0x303530303130")
    assert {bytes(row.key): row.value for row in ranged.collect()} == dict(numbered.scan(b"049990", b"050010"))
    assert load(spark, folder, "n", start="5", end="5").count() == 0
    with pytest.raises(Exception, match=r"start \(b'5'\) is above end \(b'4'\): exchange them"):
        load(spark, folder, "n", start="5", end="4").count()
    for splits in (1, 4, 13):
        frame = load(spark, folder, "n", splits=str(splits)).selectExpr("spark_partition_id() p", "value")
        parts = frame.groupBy("p").count().collect()
        assert sum(row["count"] for row in parts) == len(expected)
        assert len(parts) == splits
        assert max(row["count"] for row in parts) < 2 * len(expected) / splits


def test_several_reads_at_one_snapshot(spark: Any, store: Store, folder: str) -> None:
    import penstock.spark

    table, queue = store.kv("t", value="int64"), store.queue("q")
    table.put(b"a", 1)
    queue.put(b"one", durable=True)
    with penstock.connect(folder) as connected, connected.snapshot() as snapshot:
        table.put(b"a", 2)
        queue.put(b"two", durable=True)
        old = {name: load(spark, folder, name, snapshot=snapshot.id) for name in ("t", "q")}
        assert [row.value for row in old["t"].collect()] == [1]
        assert [bytes(row.payload) for row in old["q"].collect()] == [b"one"]
        penstock.spark.views(spark, folder, snapshot=snapshot.id)
        assert spark.sql("select (select count(*) from t where value = 1) + (select count(*) from q)").first()[0] == 2
    assert [row.value for row in load(spark, folder, "t").collect()] == [2]
    with pytest.raises(Exception, match="the snapshot was closed"):
        load(spark, folder, "t", snapshot=snapshot.id).collect()


def test_ranges_of_a_queue(spark: Any, store: Store, folder: str) -> None:
    queue = store.queue("q", shards=2)
    queue.put_many(
        [b"%d" % number for number in range(100)], keys=[b"%d" % number for number in range(100)], durable=True
    )
    rows = load(spark, folder, "q", start="10", end="20").select("shard", "sequence").collect()
    assert sorted(map(tuple, rows)) == [(shard, sequence) for shard in (0, 1) for sequence in range(10, 20)]


# -- filters


def read(folder: str, table: str, filters: list[Filter]) -> tuple[int, list[Any]]:
    """How many ranges are planned with these filters, and the rows that are read from them."""
    source = PenstockSource({"path": folder, "table": table, "pushdown": "true", "splits": "8"})
    reader: Any = source.reader(source.schema())
    assert list(reader.pushFilters(filters)) == filters
    ranges = reader.partitions()
    return len(ranges), [row for one in ranges for batch in reader.read(one) for row in batch.to_pylist()]


def test_a_filter_on_keys_reads_less(folder: str, numbered: Any) -> None:
    pieces, rows = read(folder, "n", [])
    assert (pieces, len(rows)) == (8, 99_990)
    assert read(folder, "n", [EqualTo(("key",), b"050500")]) == (1, [rows[50_490]])
    pieces, rows = read(folder, "n", [GreaterThanOrEqual(("key",), b"099990"), LessThan(("key",), b"099995")])
    assert [row["value"] for row in rows] == list(range(99_990, 99_995))
    pieces, rows = read(folder, "n", [In(("key",), (b"000001", None, b"000003"))])
    assert [row["value"] for row in rows] == [1, 3]
    assert read(folder, "n", [GreaterThan(("key",), b"099999")])[1] == []
    pieces, rows = read(folder, "n", [GreaterThan(("value",), 99_990)])
    assert (pieces, len(rows)) == (8, 9)  # every range is read, and few rows go to the JVM


def test_a_filter_on_sequences_reads_less(folder: str, store: Store) -> None:
    queue = store.queue("q", shards=4)
    queue.put_many([b"x"] * 4_000, keys=[b"%d" % number for number in range(4_000)], durable=True)
    pieces, rows = read(
        folder, "q", [EqualTo(("shard",), 2), GreaterThan(("sequence",), 100), LessThan(("sequence",), 111)]
    )
    assert pieces <= 2  # of the eight that all shards are cut into
    assert [row["sequence"] for row in rows] == list(range(101, 111))
    assert read(folder, "q", [EqualTo(("shard",), 9)]) == (0, [])
    assert read(folder, "q", [GreaterThan(("sequence",), (1 << 63) - 1)])[1] == []


KV_FILTERS = [
    "key = X'62'", "key < X'62'", "key <= X'62'", "key > X'62'", "key >= X'62'", "key <> X'62'", "key <=> X'62'",
    "key in (X'61', null, X'63')", "key in (X'7A')", "key between X'61' and X'62'", "key < X''", "key >= X''",
    "key = X'61' or value > 1", "not (key = X'61')", "key is not null", "key is null",
    "value = double('NaN')", "value > 1", "value >= double('inf')", "value < 1", "value <= -0.0", "value = 0.0",
    "value in (0.0, double('NaN'))",
    "value > 0 and key > X'61'", "lsn > -1", "lsn >= 1", "lsn < 0", "lsn in (-1, 5)", "key > X'61' and key < X'61'",
]  # fmt: skip
QUEUE_FILTERS = [
    "sequence = 3", "sequence >= -5", "sequence < -5", "sequence > 9223372036854775807", "sequence in (1, null, 4)",
    "sequence <> 2", "shard = 0", "shard = 7", "shard in (0, 1)", "shard >= 1 and sequence < 3",
    "sequence > 2 and sequence < 2", "timestamp < timestamp'1970-01-01 00:00:00Z'",
    "timestamp >= timestamp'1970-01-01 00:00:00Z'", "timestamp = timestamp'1955-11-05 00:00:00.000001Z'",
    "key is null", "key = X''", "key > X''", "payload = X''", "payload > X'70'",
]  # fmt: skip


def test_no_filter_changes_what_is_found(spark: Any, store: Store, folder: str) -> None:
    table = store.kv("t", value="float64")
    values = [*VALUES["float64"], 1.0, 2.0, 3.0, -1.0]
    table.put_many(
        dict(zip([b"", b"a", b"a\0", b"b", b"c", b"d", b"e", b"z", b"\xff", b"f", b"g"], values, strict=True))
    )
    queue = store.queue("q", shards=2)
    for number, key in enumerate([None, b"", b"\0", b"k", b"l", b"m", None, b"o"]):
        queue.put([b"", b"p%d" % number][number % 2], key=key, time=-446_774_400_000_000 + 1 + 10**14 * number)
    store.flush()
    for name, filters in (("t", KV_FILTERS), ("q", QUEUE_FILTERS)):
        copy = spark.createDataFrame(load(spark, folder, name).toArrow())
        judged = copy.selectExpr(
            "*", *(f"coalesce({condition}, false) f{number}" for number, condition in enumerate(filters))
        )
        rows = judged.collect()
        columns = ("key", "lsn") if name == "t" else ("shard", "sequence")
        expected = {
            condition: sorted(_plain(row[row_key] for row_key in columns) for row in rows if row[f"f{number}"])
            for number, condition in enumerate(filters)
        }
        narrowed = [
            load(spark, folder, name, splits="1", pushdown="true")
            .where(condition)
            .selectExpr(f"{number} number", *columns)
            for number, condition in enumerate(filters)
        ]
        keys: dict[str, list[Any]] = {condition: [] for condition in filters}
        for number, *row_key in functools.reduce(DataFrame.unionAll, narrowed).collect():
            keys[filters[number]].append(_plain(row_key))
        assert {condition: sorted(row_keys) for condition, row_keys in keys.items()} == expected


@pytest.mark.parametrize("pushdown", ["true", "false"])
def test_a_frame_can_be_used_again(spark: Any, store: Store, folder: str, pushdown: str) -> None:
    """Spark plans a frame once for all queries on it; each of them has its own filters, and sees what is there then."""
    table = store.kv("t", value="int64")
    table.put_many({b"%d" % number: number for number in range(10)}, durable=True)
    before = spark.conf.get(PUSHDOWN)
    spark.conf.set(PUSHDOWN, pushdown)
    try:
        frame = load(spark, folder, "t")
        assert [frame.count(), frame.where("value = 3").count(), frame.count()] == [10, 1, 10]
        assert frame.where("value = 3").union(frame.where("value > 4")).union(frame).count() == 16
        assert frame.where("value = 3").crossJoin(frame.where("value > 4")).count() == 5
        table.put(b"x", 100, durable=True)
        assert frame.count() == 11
        assert [row.value for row in frame.rdd.filter(lambda row: row.value > 8).collect()] == [9, 100]
    finally:
        spark.conf.set(PUSHDOWN, before)
