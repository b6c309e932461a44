"""Records that make a batch fail: all of them are found and set aside once, with the reason, within limits."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from owner_processes import until
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType

import penstock.spark
from penstock.errors import Backpressure, Invalid, StreamFailed
from penstock.spark import batch_runner, broken_records, isolation
from penstock.spark.dead_letters import in_one_line, reason_of
from penstock.spark.sessions import TASK_LOGGERS, muted
from penstock.store.store import Store

Route = Callable[[Any], dict[str, Any]]
PLACE_COUNT = 7


class Orders:
    """A queue of orders, of which some are broken, and what must become of them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.events = store.queue("events", shards=2)
        self.dead = store.queue("dead")
        store.queue("copied", shards=2)
        store.kv("totals", value="int64")
        store.kv("places").put_many(
            {b"%d" % number: b"place %d" % number for number in range(PLACE_COUNT)}, durable=True
        )
        self.good: Counter[bytes] = Counter()
        self.broken: list[bytes] = []

    def feed(self, count: int, broken: dict[int, bytes]) -> None:
        """Put `count` orders, `place:amount`, with broken ones at some indexes."""
        payloads = [broken.get(index, b"%d:%d" % (index % PLACE_COUNT, index)) for index in range(count)]
        self.events.put_many(payloads, keys=[b"k%d" % (index % 5) for index in range(count)], durable=True)
        self.broken += list(broken.values())
        self.good.update(payload for index, payload in enumerate(payloads) if index not in broken)

    def letters(self) -> list[dict[str, Any]]:
        return [json.loads(message.payload) for message in self.dead.read()]

    def check(self, reason: str = "") -> None:
        """Every message is in one place, once; every dead letter has the reason."""
        messages = [message.payload for message in self.dead.read()]
        assert Counter(map(penstock.spark.dead_letter_payload, messages)) == Counter(self.broken)
        assert all(reason in letter["reason"] for letter in self.letters()), self.letters()
        assert Counter(self.store.queue("copied").to_arrow()["payload"].to_pylist()) == self.good
        totals = dict(self.store.kv("totals", value="int64").scan())
        assert sum(totals.values()) == sum(int(one.split(b":")[1]) * n for one, n in self.good.items())
        assert self.events.consumer("c").lag == 0


@pytest.fixture(autouse=True, scope="module")
def compiled(spark: Any) -> Iterator[None]:
    """A search evaluates plans as users have them, with the code that Spark makes of each; other tests go without."""
    usual = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}
    before = {name: spark.conf.get(name) for name in usual}
    for name, value in usual.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.fixture
def orders(store: Store) -> Orders:
    return Orders(store)


def run(spark: Any, orders: Orders, tmp_path: Path, route: Route, **more: Any) -> penstock.spark.StreamProgress:
    options: dict[str, Any] = {"dead_letter": "dead", "available_now": True, "checkpoint": str(tmp_path / "c"), **more}
    query = penstock.spark.stream(spark, orders.store.path, source="events", consumer="c", batch=route, **options)
    return penstock.spark.wait(query, 250)


# -- functions that fail, each in its own way, on orders that do not begin with a number


def results(orders: Any) -> dict[str, Any]:
    """Of a frame with payload and the columns place and amount: a copy, and totals by place."""
    totals = orders.groupBy("place").agg(F.sum("amount").alias("value"))
    key = F.col("place").cast("string").cast("binary").alias("key")
    return {
        "copied": orders.select("key", "payload"),
        "totals": totals.select(key, "value", F.lit("add_i64").alias("op")),
    }


def by_cast(frame: Any) -> dict[str, Any]:
    """Fails in the JVM."""
    parts = F.split(F.col("payload").cast("string"), ":")
    return results(frame.withColumn("place", parts[0].cast("int")).withColumn("amount", parts[1].cast("long")))


def by_map(frame: Any) -> dict[str, Any]:
    """Fails in a Python function of batches."""

    def parse(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            parts = [payload.split(b":") for payload in batch.column("payload").to_pylist()]
            place_ids, amount = [int(one) for one, _ in parts], [int(one) for _, one in parts]
            columns = [batch.column("key"), batch.column("payload"), pa.array(place_ids, pa.int32()), pa.array(amount)]
            yield pa.record_batch(columns, names=["key", "payload", "place", "amount"])

    return results(frame.mapInArrow(parse, "key binary, payload binary, place int, amount long"))


place_of = F.udf(lambda payload: int(payload.split(b":")[0]), IntegerType())


def by_row(frame: Any) -> dict[str, Any]:
    """Fails in a Python function of rows, made before the search; before it rows are shuffled and filtered."""
    amount = F.try_element_at(F.split(F.col("payload").cast("string"), ":"), F.lit(2)).try_cast("long")
    rows = frame.repartition(3, "sequence").where("sequence > 0")
    return results(rows.withColumn("place", place_of("payload")).withColumn("amount", amount))


def by_table(frame: Any) -> dict[str, Any]:
    """Fails nowhere, but gives results without a key, and one whose key is too long: a table refuses both."""
    parts = F.split(F.col("payload").cast("string"), ":")
    place_id, amount = parts[0].try_cast("int"), F.try_element_at(parts, F.lit(2)).try_cast("long")
    is_long = F.col("payload").cast("string") == "x"
    key = F.when(is_long, F.repeat(F.lit("k"), 70_000).cast("binary")).otherwise(F.col("key"))
    place_id, amount = F.when(is_long, 0).otherwise(place_id), F.when(is_long, 0).otherwise(amount)
    return results(frame.withColumn("place", place_id).withColumn("amount", amount).withColumn("key", key))


def by_join(frame: Any) -> dict[str, Any]:
    """Fails after a join with a table of the store."""
    reader = frame.sparkSession.read.format("penstock").option("table", "places")
    place_rows = reader.load(by_join.path).select(F.col("key").alias("at"), "value")  # type: ignore[attr-defined]
    parts = F.split(F.col("payload").cast("string"), ":")
    joined = frame.withColumn("at", F.element_at(parts, 1).cast("binary")).join(place_rows, "at", "left")
    return results(joined.withColumn("place", parts[0].cast("int")).withColumn("amount", parts[1].cast("long")))


QUOTING = b"penstock.errors.Backpressure: retry later"  # a line of a log: the error that quotes it is not Penstock's
BROKEN = {3: b"x", 17: b"\xff\x00", 18: b"", 41: QUOTING, 59: b"seven:7"}


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        (by_cast, "[CAST_INVALID_INPUT] The value "),
        pytest.param(by_map, "ValueError: ", marks=pytest.mark.campaign),
        (by_row, "ValueError: invalid literal for int() with base 10: "),
        (by_table, "penstock.errors.Invalid: "),
        pytest.param(by_join, "[CAST_INVALID_INPUT] The value ", marks=pytest.mark.campaign),
    ],
)
def test_broken_records_are_found_in_one_pass(
    spark: Any, orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: Route, reason: str
) -> None:
    by_join.path = orders.store.path  # type: ignore[attr-defined]
    monkeypatch.setattr(broken_records.BrokenRecords, "_halve", None)
    orders.feed(60, BROKEN)
    progress = run(spark, orders, tmp_path, route)
    assert (progress.batches, progress.rows_in, progress.dead, progress.lag) == (1, 60, 5, 0)
    orders.check(reason)
    at = {(letter["shard"], letter["sequence"]) for letter in orders.letters()}
    assert at == {(m.shard, m.sequence) for s in (0, 1) for m in orders.events.read(s) if m.payload in orders.broken}
    assert not any("\n" in letter["reason"] or ".py" in letter["reason"] for letter in orders.letters())
    orders.feed(30, {5: b"again"})  # batches after a broken one are searched before they can fail
    progress = run(spark, orders, tmp_path, route, max_rows=20)
    assert progress.dead == 1
    orders.check(reason)


def test_two_kinds_of_broken_records_and_letters_of_the_function(spark: Any, orders: Orders, tmp_path: Path) -> None:
    """One fails in a task, one is refused by a table, one is set aside by the function: still one commit."""

    def route(frame: Any) -> dict[str, Any]:
        bad = F.col("payload").cast("string") == "aside"
        parts = F.split(F.col("payload").cast("string"), ":")
        place_id = F.when(parts[0] == "null", None).otherwise(parts[0].cast("int"))
        rows = frame.where(~bad).withColumn("place", place_id).withColumn("amount", parts[1].cast("long"))
        aside = frame.where(bad).select("payload", F.lit("set aside").alias("reason"))
        return {**results(rows), "dead": aside}

    orders.feed(30, {4: b"x:1", 9: b"null:1", 20: b"aside"})
    progress = run(spark, orders, tmp_path, route)
    assert (progress.batches, progress.dead) == (1, 3)
    orders.check()
    starts = {letter["payload"]: letter["reason"][:16] for letter in orders.letters()}
    assert starts == {"x:1": "[CAST_INVALID_IN", "null:1": "penstock.errors.", "aside": "set aside"}


def test_a_search_leaves_no_files(spark: Any, orders: Orders, tmp_path: Path) -> None:
    """Also where a function reports a row and a table refuses another in one evaluation."""

    def route(frame: Any) -> dict[str, Any]:
        is_long = F.col("payload").cast("string") == "3:99999"
        key = F.when(is_long, F.repeat(F.lit("k"), 70_000).cast("binary")).otherwise(F.col("key"))
        amount = F.try_element_at(F.split(F.col("payload").cast("string"), ":"), F.lit(2)).try_cast("long")
        return results(
            frame.withColumn("place", place_of("payload")).withColumn("amount", amount).withColumn("key", key)
        )

    system, folder = spark._jvm.java.lang.System, tmp_path / "reports"
    before = system.setProperty("java.io.tmpdir", str(folder))
    folder.mkdir()
    try:
        refused, both = {2: b"3:99999"}, {n: b"x" if n % 2 else b"3:99999" for n in range(30, 42)}
        orders.feed(60, refused | both)
        progress = run(spark, orders, tmp_path, route, max_rows=20)  # the second batch is searched for both at once
        assert progress.dead == 13
        assert [one.name for one in folder.iterdir() if one.name.startswith("penstock-")] == []
    finally:
        system.setProperty("java.io.tmpdir", before)


def by_broadcast(frame: Any) -> dict[str, Any]:
    """Fails, and broadcasts the batch."""
    keys = frame.sparkSession.range(5).select(F.concat(F.lit("k"), "id").cast("binary").alias("key"))
    return by_cast(keys.join(F.broadcast(frame), "key"))


@pytest.mark.campaign  # in the default suite: `by_table` above, and what a load refuses
def test_samples_whose_time_a_table_refuses(spark: Any, orders: Orders, tmp_path: Path) -> None:
    """They are found one by one, as rows that fail are, and the stream goes on."""
    samples = orders.store.series("samples", shards=2)
    orders.feed(200, {3: b"0:999999999999", 150: b"1:888888888888"})

    def route(frame: Any) -> dict[str, Any]:
        amount = F.split(F.col("payload").cast("string"), ":")[1].cast("long")
        seconds = (F.unix_timestamp() + F.when(amount > 1_000_000, 90_000).otherwise(0)).cast("timestamp")
        return by_cast(frame) | {
            "samples": frame.select(
                F.lit("amount").alias("metric"),
                F.create_map(F.lit("n"), amount.cast("string")).alias("labels"),
                seconds.alias("time"),
                amount.cast("double").alias("value"),
            )
        }

    run(spark, orders, tmp_path, route)
    orders.check("penstock.errors.Invalid: a sample is")
    assert "in the future, and table samples accepts 86,400 s (future_s)" in orders.letters()[0]["reason"]
    assert samples.aggregate("amount", function="count").column("value").to_pylist() == [198.0]


def test_a_function_that_broadcasts_its_input_is_halved(spark: Any, orders: Orders, tmp_path: Path) -> None:
    """Such a plan cannot be evaluated on single rows: each half is a commit."""
    orders.feed(8, {5: b"x"})
    progress = run(spark, orders, tmp_path, by_broadcast)
    assert progress.batches > 1
    orders.check("[CAST_INVALID_INPUT]")


def test_records_that_fail_only_together(spark: Any, orders: Orders, tmp_path: Path) -> None:
    """None of them is broken."""

    def route(frame: Any) -> dict[str, Any]:
        small = frame.select(F.assert_true(F.count("*") <= 5).alias("ok"))
        return by_cast(frame.crossJoin(small).where("ok IS NULL").drop("ok"))

    orders.feed(16, {})
    run(spark, orders, tmp_path, route)
    orders.check()


def test_too_many_broken_records(spark: Any, orders: Orders, tmp_path: Path) -> None:
    """The stream stops with the first error; nothing was written, nothing is lost."""
    orders.feed(40, {index: b"x%d" % index for index in range(10, 15)})
    with pytest.raises(StreamFailed, match="^\\[CAST_INVALID_INPUT\\].*more than dead_letter_max=4 records") as caught:
        run(spark, orders, tmp_path, by_cast, dead_letter_max=4)
    assert "\n" not in str(caught.value)
    assert (orders.letters(), orders.events.consumer("c").lag) == ([], 40)
    assert run(spark, orders, tmp_path, by_cast, dead_letter_max=5).dead == 5
    orders.check()


def test_halving_has_a_budget(spark: Any, orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken_records, "HALVES_MAX", 2)
    orders.feed(8, {5: b"x"})
    words = "its broken records were not found within 2 commits .*: give penstock.spark.stream a smaller max_rows="
    with pytest.raises(StreamFailed, match=words):
        run(spark, orders, tmp_path, by_broadcast)
    assert orders.letters() == []


def test_the_time_of_a_search_counts_from_its_start(
    spark: Any, orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Spark needs before, to start its processes and to fail, is not a part of it."""
    now_s = 0.0

    class SlowClock:
        def monotonic_s(self) -> float:
            return now_s

    def slow(frame: Any) -> dict[str, Any]:
        nonlocal now_s
        now_s += 2 * broken_records.SEARCH_S if now_s == 0 else 0.0
        return by_cast(frame)

    monkeypatch.setattr(broken_records, "clock", SlowClock())
    orders.feed(20, {5: b"x"})
    assert run(spark, orders, tmp_path, slow).dead == 1
    orders.check("[CAST_INVALID_INPUT]")


@pytest.mark.parametrize("value", [0, True, "5", 2.0])
def test_limits_that_are_none(spark: Any, orders: Orders, tmp_path: Path, value: Any) -> None:
    with pytest.raises(Invalid, match="dead_letter_max is a whole number from 1"):
        run(spark, orders, tmp_path, by_cast, dead_letter_max=value)


def test_a_search_ends_when_the_stream_is_stopped(
    spark: Any, orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, in the middle of the job; and the function that it was in is not left running."""
    mark = tmp_path / "searching"

    def slow(payload: Any) -> Any:
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        if payload == b"x" and context is not None and context.getLocalProperty("penstock.searching"):
            (tmp_path / "pid").write_text(str(os.getpid()))
            (tmp_path / "pid").rename(mark)
            time.sleep(600)
        return int(payload.split(b":")[0])

    def route(frame: Any) -> dict[str, Any]:
        place_id = F.udf(lambda payload: slow(payload) + 0, "int")("payload")
        return results(frame.withColumn("place", place_id).withColumn("amount", F.lit(1)))

    def interrupt() -> None:
        while not mark.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(batch_runner, "STOP_S", 100.0)
    orders.feed(12, {5: b"x"})
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        progress = run(spark, orders, tmp_path, route)
    finally:
        thread.join(1)
    assert (progress.batches, progress.lag, orders.letters()) == (0, 12, [])
    until(lambda: not Path("/proc", mark.read_text()).exists())
    run(spark, orders, tmp_path, by_cast)
    assert len(orders.letters()) == 1


@pytest.mark.parametrize("error", [NameError("a fault of the function"), Backpressure("full: retry later")])
def test_no_record_is_blamed_for_other_faults(spark: Any, orders: Orders, tmp_path: Path, error: Exception) -> None:
    orders.feed(50, {})

    def route(frame: Any) -> dict[str, Any]:
        raise error

    with pytest.raises(type(error), match=str(error)):
        run(spark, orders, tmp_path, route)
    assert (orders.letters(), orders.events.consumer("c").lag) == ([], 50)
    run(spark, orders, tmp_path, by_cast)
    orders.check()


def test_a_search_that_reports_good_rows_would_be_seen(
    spark: Any, orders: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of these tests."""
    find_failures = isolation.find_failures

    def more(frame: Any, *arguments: Any, **options: Any) -> Any:
        failures = dict(find_failures(frame, *arguments, **options))
        good = frame.where("payload = binary('1:1')").select("shard", "sequence").first()
        return failures | ({isolation.RowPosition(*good): "[WRONG] "} if good else {})

    monkeypatch.setattr(broken_records, "find_failures", more)
    orders.feed(20, {5: b"x"})
    run(spark, orders, tmp_path, by_cast)
    with pytest.raises(AssertionError):
        orders.check()


def test_failing_tasks_are_quiet_only_where_they_are_expected(spark: Any) -> None:
    manager = spark._jvm.org.apache.logging.log4j.LogManager

    def levels() -> set[str]:
        return {str(manager.getLogger(name).getLevel()) for name in TASK_LOGGERS}

    first, second = muted(spark), muted(spark)  # of two streams, of which the first ends first
    with first:
        second.__enter__()
        assert levels() == {"OFF"}
    assert levels() == {"OFF"}
    second.__exit__(None, None, None)
    assert levels() == {str(manager.getRootLogger().getLevel())}


def test_headers_are_carried(spark: Any, store: Store, tmp_path: Path) -> None:
    store.queue("traced", headers=True).put_many([b"1", b"x"], headers=[{"trace": "1"}, {"trace": "2"}], durable=True)
    store.queue("dead")
    store.queue("copied")

    def route(frame: Any) -> dict[str, Any]:
        number = F.col("payload").cast("string").cast("int").cast("string").cast("binary")
        return {"copied": frame.select(number.alias("payload"))}

    def start() -> Any:
        return penstock.spark.stream(
            spark, store.path, source="traced", consumer="c", batch=route, dead_letter="dead", available_now=True
        )

    with pytest.raises(Invalid, match=r"traced have headers.*: call store\.queue\('dead'\)\.alter\(headers=True\)$"):
        start()
    store.queue("dead").alter(headers=True)
    assert penstock.spark.wait(start(), 250).dead == 1
    (letter,) = store.queue("dead").read()
    assert (letter.headers, penstock.spark.dead_letter_payload(letter.payload)) == ({"trace": b"2"}, b"x")


# -- reasons

CAST = """[CAST_INVALID_INPUT] The value 'x' of the type "STRING" cannot be cast to "INT". SQLSTATE: 22018
== DataFrame ==
"cast" was called from
/home/ada/job.py:12
"""
PYTHON = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "/home/ada/job.py", line 12, in parse
    int(payload)
ValueError: invalid literal for int() with base 10: b'x'
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (CAST, """[CAST_INVALID_INPUT] The value 'x' of the type "STRING" cannot be cast to "INT". SQLSTATE: 22018"""),
        (
            f"Job aborted: Lost task 0.0 (TID 1): org.apache.spark.SparkNumberFormatException: {CAST}\tat a.b(C:1)",
            0,
        ),
        (PYTHON, "ValueError: invalid literal for int() with base 10: b'x'"),
        (f"org.apache.spark.api.python.PythonException: {PYTHON}\njava.io.EOFException: null\n", 2),
        ("java.lang.ArithmeticException: / by zero\n", "java.lang.ArithmeticException: / by zero"),
        (ValueError("two\nlines"), "ValueError: two lines"),
        (KeyError(), "KeyError:"),
        ("x" * 1_000, "x" * 500),
    ],
)
def test_reasons(text: Any, reason: str | int) -> None:
    expected = {0: reason_of(CAST), 2: reason_of(PYTHON)}[reason] if isinstance(reason, int) else reason
    assert reason_of(text) == expected


def test_an_error_of_the_driver_is_raised_as_it_is() -> None:
    error = NameError("x")
    assert in_one_line(error, "it failed") is error
