"""What a stream tells of itself: its lag, when it has caught up, why it failed; and two drivers of one stream."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

import penstock.spark
from penstock.errors import Invalid, NotFound, PositionConflict, StreamFailed
from penstock.store.store import Store


@pytest.fixture
def queues(store: Store) -> Store:
    store.queue("events")
    store.queue("copied")
    return store


def start(spark: Any, store: Store, checkpoint: Path, batch: Any, **more: Any) -> Any:
    options: dict[str, Any] = {"source": "events", "consumer": "c", **more}
    return penstock.spark.stream(spark, store.path, batch=batch, checkpoint=str(checkpoint), **options)


def copy(frame: Any) -> dict[str, Any]:
    return {"copied": frame.select("payload")}


def put(store: Store, count: int) -> None:
    store.queue("events").put_many([b"%d" % number for number in range(count)], durable=True)


def test_lag_and_catching_up(spark: Any, queues: Store, tmp_path: Path) -> None:
    assert penstock.spark.StreamProgress().lag is None
    put(queues, 50)
    go, running = threading.Event(), threading.Event()

    def route(frame: Any) -> dict[str, Any]:
        running.set()
        assert go.wait(100)
        return copy(frame)

    query = start(spark, queues, tmp_path / "c", route, interval_s=0.0)
    try:
        assert running.wait(100)
        progress = penstock.spark.progress(query)
        assert (progress.batches, progress.lag, progress.committed_s) == (0, 50, None)
        put(queues, 10)
        assert penstock.spark.progress(query).lag == 60, "the lag of this moment, before the first commit"
        assert not penstock.spark.caught_up(query, 0.1)
        go.set()
        assert penstock.spark.caught_up(query, 100)
        progress = penstock.spark.progress(query)
        assert (progress.rows_in, progress.lag) == (60, 0)
    finally:
        go.set()
        query.stop()
    put(queues, 5)
    assert not penstock.spark.caught_up(query, 100), "it was stopped"


def test_a_failure_is_one_line(
    spark: Any, queues: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    put(queues, 5)

    def fail(frame: Any) -> dict[str, Any]:
        return copy(frame.where(F.col("payload").cast("string").cast("date").isNotNull()))

    cause = r"^\[CAST_INVALID_INPUT\] The value '0' .* \(the stream of c from events failed\)$"
    with caplog.at_level(logging.ERROR):
        query = start(spark, queues, tmp_path / "c", fail, available_now=True)
        with pytest.raises(StreamFailed, match=cause) as caught:
            penstock.spark.wait(query, 100)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    with pytest.raises(StreamFailed, match=cause):
        penstock.spark.caught_up(query, 100)
    (record,) = caplog.records
    assert record.getMessage().startswith("[CAST_INVALID_INPUT] The value '0'")
    assert "\n" not in record.getMessage()
    assert "MicroBatchExecution" not in capfd.readouterr().err


def test_a_failure_of_the_source_is_one_line(spark: Any, queues: Store, tmp_path: Path) -> None:
    put(queues, 5)
    query = start(spark, queues, tmp_path / "c", copy, interval_s=0.0)
    assert penstock.spark.caught_up(query, 100)
    queues.drop("events")
    queues.queue("events")
    # The stream looks at any moment, also between the two calls.
    cause = r"^(the stream is at .* the queue was dropped and made again|there is no table events in )"
    with pytest.raises(NotFound, match=cause) as caught:
        penstock.spark.wait(query, 100)
    assert "\n" not in str(caught.value)


def test_queries_of_others(spark: Any) -> None:
    class Query:
        runId = "unknown"

    for ask in (penstock.spark.progress, penstock.spark.wait, lambda query: penstock.spark.caught_up(query, 1)):
        with pytest.raises(NotFound, match="not among the last 1,000 that penstock.spark.stream started"):
            ask(Query())
        with pytest.raises(Invalid, match="not a query"):
            ask(None)


# -- two drivers


@pytest.fixture
def paused_stream(spark: Any, queues: Store, tmp_path: Path) -> Iterator[tuple[Any, threading.Event]]:
    """A stream that is in the middle of its first batch, until the event is set."""
    put(queues, 50)
    go, running = threading.Event(), threading.Event()

    def route(frame: Any) -> dict[str, Any]:
        running.set()
        assert go.wait(100)
        return copy(frame)

    query = start(spark, queues, tmp_path / "c", route, interval_s=0.0)
    assert running.wait(100)
    yield query, go
    go.set()
    query.stop()


def test_two_streams_of_one_consumer(
    spark: Any, queues: Store, tmp_path: Path, paused_stream: tuple[Any, threading.Event]
) -> None:
    """The one that commits first goes on; the other stops, and has written nothing."""
    query, go = paused_stream
    assert penstock.spark.wait(start(spark, queues, tmp_path / "other", copy, available_now=True), 100).rows_in == 50
    go.set()
    with pytest.raises(PositionConflict, match="consumer c is at .*: another driver took over, so this one stops"):
        penstock.spark.wait(query, 100)
    assert queues.queue("copied").statistics().messages == 50


def test_two_streams_with_one_checkpoint(
    spark: Any, queues: Store, tmp_path: Path, paused_stream: tuple[Any, threading.Event]
) -> None:
    """Spark refuses or stops one of them: whichever it is, every message counts once."""
    query, go = paused_stream
    threading.Timer(1.0, go.set).start()
    try:
        penstock.spark.wait(start(spark, queues, tmp_path / "c", copy, available_now=True), 100)
    except PositionConflict:
        assert penstock.spark.caught_up(query, 100)
    assert queues.queue("copied").statistics().messages == 50
    assert queues.queue("events").consumer("c").lag == 0


# -- threads


def test_a_thread_of_the_users_own(spark: Any, store: Store) -> None:
    """Spark finds formats by the session of the thread, and a new thread has none until it registers."""
    store.kv("t", value="int64")
    failures: list[Exception] = []

    def write() -> None:
        try:
            penstock.spark.register(spark)
            rows = spark.range(3).selectExpr("cast(cast(id as string) as binary) key", "id value")
            rows.write.format("penstock").option("table", "t").mode("append").save(store.path)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join(100)
    assert failures == []
    assert len(list(store.kv("t", value="int64").scan())) == 3
