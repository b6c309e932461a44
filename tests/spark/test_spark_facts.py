"""What may surprise somebody who uses Spark: each with the one clear line they get, or with what is made of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

import penstock
import penstock.spark
from penstock.partition.ledger_records import TableInfo
from penstock.spark.sessions import PUSHDOWN, find_java
from penstock.store.store import Store


def load(spark: Any, folder: str, table: str, **options: str) -> Any:
    return spark.read.format("penstock").option("table", table).options(**options).load(folder)


def writer(frame: Any, table: str) -> Any:
    return frame.write.format("penstock").option("table", table)


# -- which store, which table


def test_paths_and_tables_are_named_well(spark: Any, store: Store, folder: str) -> None:
    store.kv("users")
    with pytest.raises(Exception, match="the path 'store' is relative, and Spark's processes run elsewhere"):
        load(spark, "store", "users")
    with pytest.raises(Exception, match=f"there is no table user in {folder}: did you mean users?"):
        load(spark, folder, "user")
    with pytest.raises(Exception, match=f"there is no store in {folder}/none: give another path"):
        load(spark, f"{folder}/none", "users")
    with pytest.raises(penstock.errors.Invalid, match="is relative"):
        penstock.spark.views(spark, "store")
    with pytest.raises(penstock.errors.NotFound, match="there is no table evnts .* did you mean events"):
        store.queue("events")
        penstock.spark.stream(spark, folder, source="evnts", consumer="c", batch=lambda frame: {})
    assert load(spark, f"file:{folder}", "users").count() == 0


def test_names_of_options_have_no_case(spark: Any, store: Store, folder: str) -> None:
    store.kv("users").put_many({b"a": b"", b"b": b"", b"c": b""}, durable=True)
    reader = spark.read.format("PENSTOCK").option("TABLE", "users").option("Start", "b").option("SpLiTs", "1")
    assert reader.load(folder).count() == 2


def test_a_store_that_was_made_anew(spark: Any, folder: str) -> None:
    """Spark's processes live long, and a folder may have another store the next time."""
    for value in (1, 2):
        with penstock.open(folder) as store:
            store.kv("t", value="int64").put(b"k", value, durable=True)
            assert [row.value for row in load(spark, folder, "t").collect()] == [value]
        os.rename(folder, f"{folder}-{value}")


# -- SQL


def test_insert_into_a_view(spark: Any, store: Store, folder: str) -> None:
    users, events = store.kv("users", value="utf8"), store.queue("events")
    penstock.spark.views(spark, folder)
    spark.sql("insert into users (key, value) values (binary('ada'), '1815')")
    spark.sql("insert into events (payload) values (binary('hello'))")
    assert dict(users.scan()) == {b"ada": "1815"}
    assert [message.payload for message in events.read()] == [b"hello"]
    with pytest.raises(Exception, match="not enough data columns"):
        spark.sql("insert into users values (binary('bob'), 'x')")
    with pytest.raises(Exception, match="a key or a value is null"):
        spark.sql("insert into users (value) values ('x')")
    spark.sql(
        f"create or replace temporary view some using penstock options (path '{folder}', table 'users', start 'b')"
    )
    assert spark.table("some").count() == 0
    assert dict(users.scan()) == {b"ada": "1815"}


def test_a_table_of_the_catalog_has_no_options(spark: Any, store: Store, folder: str) -> None:
    store.kv("users")
    spark.sql(f"create table kept using penstock options (path '{folder}', table 'users')")
    try:
        with pytest.raises(Exception, match="a table of Spark's catalog keeps no options, so make it a TEMPORARY VIEW"):
            spark.table("kept").count()
    finally:
        spark.sql("drop table kept")
    assert store.tables() == ["users"]


# -- writing


def test_modes(spark: Any, store: Store, folder: str) -> None:
    table, queue = store.kv("t", value="int64"), store.queue("q")
    rows, messages = spark.sql("select X'61' key, 1L value"), spark.sql("select X'61' payload")
    with pytest.raises(Exception, match='Please use either the "Append" or "Overwrite" mode'):
        writer(rows, "t").save(folder)
    with pytest.raises(Exception, match=r"q is of the kind queue, which is only appended to: use mode\('append'\)"):
        writer(messages, "q").mode("overwrite").save(folder)
    with pytest.raises(Exception, match=r"start and end say what mode\('overwrite'\) replaces"):
        writer(rows, "t").option("start", "a").mode("append").save(folder)
    assert (dict(table.scan()), queue.statistics().messages) == ({}, 0)


@pytest.mark.parametrize(
    ("table", "columns", "words"),
    [
        ("t", "X'61' key, 'x' value", "column value is string, but the table holds int64: cast it first"),
        ("t", "'a' key, 1L value", "column key is string, but the table holds binary: cast it first"),
        ("t", "X'61' key", "have the columns key and value, and perhaps op, not key"),
        ("t", "X'61' key, 1L value, 2 other", "not key, value, other"),
        ("q", "1 payload", "column payload is int32, but messages hold binary"),
        (
            "q",
            "X'61' payload, 1 timestamp",
            "column timestamp is int32: give a timestamp, or int64 microseconds since 1970",
        ),
        ("q", "X'61' key", "messages have the columns payload, and perhaps key, timestamp, not"),
    ],
)
def test_wrong_columns_are_refused_before_any_work(
    spark: Any, store: Store, folder: str, tmp_path: Path, table: str, columns: str, words: str
) -> None:
    store.kv("t", value="int64")
    store.queue("q")
    mark = tmp_path / "worked"
    worked = spark.range(1).mapInArrow(lambda batches: (mark.write_text("worked"), batches)[1], "id long")
    with pytest.raises(Exception, match=words):
        writer(worked.selectExpr(*columns.split(", ")), table).mode("append").save(folder)
    with pytest.raises(penstock.errors.Invalid, match=words):
        penstock.spark.commit(folder, {table: worked.selectExpr(*columns.split(", "))})
    assert not mark.exists()


def test_a_task_that_fails_leaves_nothing_that_is_seen(spark: Any, store: Store, folder: str) -> None:
    table = store.kv("t", value="int64")
    table.put(b"old", 1, durable=True)
    many = "case when id = 299999 then raise_error('no') else id end value"
    frame = spark.range(0, 300_000, 1, 2).selectExpr("binary(format_string('%07d', id)) key", many)
    with pytest.raises(Exception, match="no"):
        writer(frame, "t").mode("append").save(folder)
    assert dict(table.scan()) == {b"old": 1}
    writer(spark.sql("select binary('new') key, 2L value"), "t").mode("append").save(folder)
    assert dict(table.scan()) == {b"new": 2, b"old": 1}


# -- reading


def test_a_schema_of_ones_own(spark: Any, store: Store, folder: str) -> None:
    store.kv("t", value="int64")
    reader = spark.read.format("penstock").option("table", "t")
    with pytest.raises(Exception, match="table t has no column kee: it has key, value, lsn"):
        reader.schema("kee binary").load(folder).count()
    with pytest.raises(Exception, match="column key of t is binary, not string: cast it later"):
        reader.schema("key string").load(folder).count()


def test_options_that_make_no_sense(spark: Any, store: Store, folder: str) -> None:
    store.kv("t")
    store.queue("q")
    for table, option, value, words in (
        ("t", "splits", "0", "option splits is '0': give a whole number above 0"),
        ("t", "start", "0x6", "'0x6' is not a key: after 0x come pairs of hexadecimal digits"),
        ("q", "start", "-1", "'-1' is not the sequence of a message: give a whole number"),
        ("t", "pushdown", "yes", "option pushdown is 'yes': use one of false, true"),
        ("t", "snapshot", "none", "the snapshot was closed"),
    ):
        with pytest.raises(Exception, match=words):
            load(spark, folder, table, **{option: value}).count()


# -- streams


def test_what_cannot_be_streamed(spark: Any, store: Store, folder: str, tmp_path: Path) -> None:
    store.kv("t", value="int64")
    store.queue("q").put(b"x", durable=True)
    for source, output, mode, words in (
        ("t", None, "append", "table t of the kind kv has no change feed: .*changes=True"),
        ("q", "t", "complete", "a stream appends: outputMode"),
        ("q", "t", "update", "penstock does not support Update mode"),
    ):
        frame = spark.readStream.format("penstock").option("table", source).load(folder)
        frame = frame if output is None else frame.groupBy().count().selectExpr("binary('n') key", "count value")
        out = frame.writeStream.outputMode(mode).option("checkpointLocation", str(tmp_path / mode / source))
        out = out.format("noop") if output is None else out.format("penstock").option("table", output)
        with pytest.raises(Exception, match=words):
            out.trigger(availableNow=True).start(None if output is None else folder).awaitTermination()


def test_messages_that_were_trimmed(spark: Any, store: Store, folder: str, tmp_path: Path) -> None:
    queue = store.queue("q")
    queue.put_many([b"%d" % number for number in range(10)], durable=True)

    def read(name: str, **options: str) -> list[bytes]:
        payloads: list[bytes] = []
        reader = spark.readStream.format("penstock").option("table", "q").options(**options).load(folder)
        out = reader.writeStream.foreachBatch(
            lambda frame, _: payloads.extend(bytes(row.payload) for row in frame.collect())
        )
        out.option("checkpointLocation", str(tmp_path / name)).trigger(availableNow=True).start().awaitTermination()
        return payloads

    assert read("one", start="5", maxRows="2") == [b"4", b"5", b"6", b"7", b"8", b"9"]
    queue.put_many([b"%d" % number for number in range(10, 20)], durable=True)
    queue.trim(15, durable=True)
    with pytest.raises(Exception, match="messages of q were trimmed before they were read"):
        read("one", start="5")
    assert read("one", start="5", onLoss="skip") == [b"%d" % number for number in range(14, 20)]
    assert read("two") == [b"%d" % number for number in range(14, 20)]
    assert read("three", start="latest") == []

    def route(frame: Any) -> dict[str, Any]:
        return {}

    with store.batch() as batch:  # a consumer that stands where messages are gone
        batch.require(*penstock.spark.committing.move_condition(_info(store), "late", {0: 1}, {0: 3}))
    with pytest.raises(penstock.errors.NotFound, match="were trimmed before late read them"):
        penstock.spark.stream(spark, folder, source="q", consumer="late", batch=route)
    queue.consumer("late").forget()
    query = penstock.spark.stream(spark, folder, source="q", consumer="late", batch=route, available_now=True)
    assert penstock.spark.wait(query).rows_in == 6


def _info(store: Store) -> TableInfo:
    info = store.port.table("q")
    assert info is not None
    return info


def test_windows_close_when_a_stream_runs_once(spark: Any, store: Store, folder: str, tmp_path: Path) -> None:
    queue, out = store.queue("q"), store.kv("out", value="int64")
    for minute in (0, 1, 2, 30, 60):
        queue.put(b"x", time=1_704_067_200_000_000 + minute * 60_000_000)
    store.flush()
    frame = spark.readStream.format("penstock").option("table", "q").option("maxRows", "2").load(folder)
    windows = frame.withWatermark("timestamp", "10 minutes").groupBy(_window())
    rows = windows.count().selectExpr("binary(string(window.start)) key", "count value")
    sink = rows.writeStream.format("penstock").option("table", "out").outputMode("append")
    sink = sink.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    sink.start(folder).awaitTermination()
    assert dict(out.scan()) == {b"2024-01-01 00:00:00": 3, b"2024-01-01 00:30:00": 1}


def _window() -> Any:
    from pyspark.sql import functions as F

    return F.window("timestamp", "5 minutes")


# -- sessions


@pytest.fixture
def small(folder: str) -> str:
    with penstock.open(folder) as store:
        store.kv("t").put_many({b"a": b"", b"b": b"", b"c": b""}, durable=True)
    return folder


def run_plain(folder: str, **environment: str | None) -> tuple[dict[str, Any], str]:
    """What each try of plain_session.py gave, and what was written to its standard error."""
    variables = {**os.environ, **environment}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("plain_session.py")), folder],
        env={name: value for name, value in variables.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    outcomes = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {outcome["name"]: outcome.get("value", outcome.get("error")) for outcome in outcomes}, ran.stderr


def test_a_session_of_ones_own(small: str) -> None:
    """The format registers itself; filters are not pushed down, which is said once and changes nothing."""
    outcomes, errors = run_plain(small, PYSPARK_PYTHON=sys.executable)
    assert outcomes == {"count": 3, "key_range": ["b", "c"], "again": 2, "views": ["t"]}
    assert errors.count(f"penstock: filters are not pushed down, set {PUSHDOWN}=true to read less") == 1


def test_a_session_whose_python_lacks_penstock(small: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    path = f"{tmp_path}/bare/bin{os.pathsep}{os.environ['PATH']}"
    outcomes, _ = run_plain(small, PYSPARK_PYTHON=None, PYSPARK_DRIVER_PYTHON=None, PATH=path)
    assert "DATA_SOURCE_NOT_FOUND" in outcomes["count"]
    assert "Spark runs python3, which has no penstock: use penstock.spark.session()" in outcomes["views"]


def test_java_is_found_or_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert os.path.exists(find_java())
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(penstock.errors.Invalid, match=f"JAVA_HOME is '{tmp_path}', and there is no bin/java in it"):
        find_java()
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n")
    old.chmod(0o755)
    with pytest.raises(penstock.errors.Invalid, match="is 11.0.2: JAVA_HOME is .*, point it to a newer one"):
        find_java()


def test_penstock_needs_no_spark() -> None:
    code = "import sys; sys.modules['pyspark'] = None\nimport penstock, penstock.spark\npenstock.spark.session"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert "penstock.spark needs Spark: pip install 'penstock[spark]'" in ran.stderr
