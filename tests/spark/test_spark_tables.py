"""Tables read and written by Spark's own readers and writers."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import penstock.spark
from penstock.errors import Invalid
from penstock.store.store import Store


def load(spark: Any, folder: str, table: str, **options: str) -> Any:
    return spark.read.format("penstock").option("table", table).options(**options).load(folder)


def test_a_kv_table_read_and_written(spark: Any, store: Store, folder: str) -> None:
    users = store.kv("users")
    users.put_many({b"%04d" % number: b"v%d" % number for number in range(1_000)}, durable=True)
    frame = load(spark, folder, "users")
    assert frame.columns == ["key", "value", "lsn"]
    rows = frame.collect()
    assert {bytes(row.key): bytes(row.value) for row in rows} == dict(users.scan())
    new_rows = spark.range(5_000).selectExpr(
        "cast(format_string('%06d', id) as binary) as key", "cast(concat('x', id) as binary) as value"
    )
    new_rows.write.format("penstock").option("table", "users").mode("append").save(folder)
    assert users.get(b"004999") == b"x4999"
    assert users.get(b"0999") == b"v999"
    assert load(spark, folder, "users").count() == 6_000


def test_keys_of_text_decimals_and_structs(spark: Any, store: Store, folder: str) -> None:
    person = pa.struct([("name", pa.string()), ("paid", pa.decimal128(9, 2))])
    people: Any = store.kv("people", key="utf8", value=person)
    people.put("ada", {"name": "Ada", "paid": Decimal("1.10")}, durable=True)
    frame = load(spark, folder, "people")
    assert dict(frame.dtypes) | {"lsn": ""} == {
        "key": "string", "value": "struct<name:string,paid:decimal(9,2)>", "lsn": ""
    }  # fmt: skip
    assert [tuple(row) for row in frame.where("key = 'ada'").select("value.name", "value.paid").collect()] == [
        ("Ada", Decimal("1.10"))
    ]
    rows = frame.selectExpr("upper(key) as key", "named_struct('name', value.name, 'paid', value.paid) as value")
    rows.write.format("penstock").option("table", "people").mode("append").save(folder)
    assert dict(people)["ADA"] == people["ada"]


def test_a_queue_read_and_written(spark: Any, store: Store, folder: str) -> None:
    events = store.queue("events", shards=2)
    before_1970 = datetime(1955, 11, 5, tzinfo=UTC)
    events.put(b"old", key=b"k", time=before_1970)
    events.put_many([b"m%d" % number for number in range(100)], durable=True)
    rows = load(spark, folder, "events").collect()
    assert {bytes(row.payload) for row in rows} == {b"old", *(b"m%d" % number for number in range(100))}
    old = next(row for row in rows if bytes(row.payload) == b"old")
    assert old.timestamp.astimezone(UTC) == before_1970
    new_rows = spark.range(300).selectExpr(
        "cast(string(id) as binary) as payload", "cast(string(id % 7) as binary) as key"
    )
    new_rows.write.format("penstock").option("table", "events").mode("append").save(folder)
    assert events.statistics().messages == 401


def test_headers_are_a_map(spark: Any, store: Store, folder: str) -> None:
    traced = store.queue("traced", headers=True)
    traced.put(b"1", headers={"trace": "a", "n": b"\x00"})
    traced.put(b"2", durable=True)
    frame = load(spark, folder, "traced")
    assert dict(frame.dtypes)["headers"] == "map<string,binary>"
    rows = {
        bytes(row.payload): row.headers and {k: bytes(v) for k, v in row.headers.items()} for row in frame.collect()
    }
    assert rows == {b"1": {"trace": b"a", "n": b"\x00"}, b"2": None}
    frame.write.format("penstock").option("table", "traced").mode("append").save(folder)
    new_rows = spark.range(2).selectExpr("cast(string(id) as binary) as payload", "map('id', string(id)) as headers")
    new_rows.write.format("penstock").option("table", "traced").mode("append").save(folder)
    written = [(message.payload, message.headers) for message in traced.read()][2:]
    assert sorted(written, key=lambda message: message[0]) == [
        (b"0", {"id": b"0"}),
        *sorted([(b"1", {"trace": b"a", "n": b"\x00"}), (b"1", {"id": b"1"})], key=written.index),
        (b"2", None),
    ]


@pytest.mark.parametrize("rows", [10, 200_000])
def test_overwrite_of_a_range(spark: Any, store: Store, folder: str, rows: int) -> None:
    table = store.kv("t", shards=2, value="int64")
    table.put_many({b"%08d" % number: -1 for number in range(0, 2_000_000, 1_000)}, durable=True)
    frame = spark.range(rows).selectExpr("cast(format_string('%08d', id) as binary) as key", "id as value")
    writer = frame.write.format("penstock").option("table", "t").mode("overwrite")
    writer.option("start", "00000000").option("end", "01000000").save(folder)
    contents = dict(table.scan())
    expected = {b"%08d" % number: number for number in range(rows)}
    expected |= {b"%08d" % number: -1 for number in range(1_000_000, 2_000_000, 1_000)}
    assert contents == expected
    for start, end, words in (("5", "4", "is above end"), ("00000001", "01000000", "key b'00000000' is outside")):
        with pytest.raises(Exception, match=words):
            writer.option("start", start).option("end", end).save(folder)
    assert dict(table.scan()) == expected
    frame.write.format("penstock").option("table", "t").mode("overwrite").save(folder)
    assert table.to_arrow().num_rows == rows


def test_deletes_whatever_stands_beside_them(spark: Any, store: Store, folder: str) -> None:
    table = store.kv("t", value="utf8")
    table.put_many({b"a": "1", b"b": "2", b"c": "3"}, durable=True)
    frame = spark.createDataFrame(
        [(b"a", "x", "delete"), (b"b", None, "delete")], "key binary, value string, op string"
    )
    frame.write.format("penstock").option("table", "t").mode("append").save(folder)
    assert dict(table.scan()) == {b"c": "3"}


def test_merges(spark: Any, store: Store, folder: str) -> None:
    totals = store.kv("totals", value="int64")
    totals.put(b"a", 5, durable=True)
    frame = spark.sql(
        "select cast('a' as binary) key, 3L value, 'add_i64' op union all select cast('b' as binary), 1, 'put'"
    )
    frame.write.format("penstock").option("table", "totals").mode("append").save(folder)
    assert dict(totals.scan()) == {b"a": 8, b"b": 1}


def test_views_and_sql(spark: Any, store: Store, folder: str) -> None:
    store.kv("users", value="utf8").put(b"ada", "1815", durable=True)
    store.queue("events").put(b"hello", durable=True)
    assert penstock.spark.views(spark, folder) == ["events", "users"]
    assert spark.sql("select value from users where key = X'616461'").collect()[0][0] == "1815"
    spark.sql(f"create or replace temporary view v using penstock options (path '{folder}', table 'users')")
    spark.sql("insert into v values (cast('bob' as binary), 'x', 0)")
    assert store.kv("users", value="utf8").get(b"bob") == "x"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"table": "users", "path": "relative"}, "give an absolute one"),
        ({"table": "users"}, "say which store"),
        ({"path": "{folder}"}, "say which table"),
        ({"path": "{folder}", "table": "uesrs"}, "did you mean users?"),
        ({"path": "{folder}", "table": "users", "split": "2"}, "there is no option split: did you mean splits?"),
        ({"path": "{folder}/nothing", "table": "users"}, "no store"),
        ({"path": "{folder}", "table": "users", "splits": "\u00b2"}, "Invalid: option splits"),
        ({"path": "{folder}", "table": "users", "splits": "9" * 5_000}, "Invalid: option splits"),
    ],
)
def test_wrong_use_is_one_clear_line(
    spark: Any, store: Store, folder: str, options: dict[str, str], words: str
) -> None:
    store.kv("users")
    formatted = {name: value.format(folder=folder) for name, value in options.items()}
    with pytest.raises(Exception, match=words.replace("?", r"\?")):
        spark.read.format("penstock").options(**formatted).load().collect()


@pytest.mark.parametrize(
    ("table", "query", "words"),
    [
        ("users", "select binary('a') key, binary('a') key, binary('b') value", "not key, key, value"),
        ("events", "select 'a' payload, 'b' payload", "not payload, payload"),
        ("ratios", "select binary('a') key, 9007199254740993L value", "do not fit the types of the table"),
    ],
)
def test_rows_that_cannot_be_written_are_one_clear_line(
    spark: Any, store: Store, folder: str, table: str, query: str, words: str
) -> None:
    store.kv("users")
    store.kv("ratios", value="float64")
    store.queue("events")
    with pytest.raises(Exception, match=f"penstock.errors.Invalid.*{words}"):
        spark.sql(query).write.format("penstock").option("table", table).mode("append").save(folder)


@pytest.mark.parametrize("name", ["a/b", "x" * 255])
def test_a_stream_takes_every_name_of_a_consumer(spark: Any, store: Store, folder: str, name: str) -> None:
    store.queue("events").put(b"m", durable=True)
    query = penstock.spark.stream(
        spark, folder, source="events", consumer=name, batch=lambda frame: {}, available_now=True
    )
    assert penstock.spark.wait(query, 120).rows_in == 1


@pytest.mark.parametrize(
    "wrong", [{"consumer": 5}, {"consumer": "\ud800"}, {"interval_s": -1}, {"interval_s": float("nan")}]
)
def test_a_stream_refuses_what_cannot_be_meant(spark: Any, store: Store, folder: str, wrong: dict[str, Any]) -> None:
    store.queue("events")
    arguments = {"consumer": "c", **wrong}
    with pytest.raises(Invalid):
        penstock.spark.stream(spark, folder, source="events", batch=lambda frame: {}, **arguments)
