"""A stream that commits results and position together: every message counts once, whatever is killed or deleted.

Spark plans micro-batches of a queue, and `batch_runner` writes each of them in one commit with the consumer's position.

Thread: any; batches run in a thread of Spark's driver.
"""

from __future__ import annotations

import tempfile
import threading
from typing import Any

from py4j.protocol import Py4JError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException, StreamingQueryException

from penstock.arguments import flag, in_short, seconds, whole
from penstock.errors import Invalid, NotFound
from penstock.host.clock import SystemClock
from penstock.host.waiting import Retries, stop_on_signals
from penstock.spark.batch_runner import BatchRunner, Route, StreamProgress
from penstock.spark.dead_letters import in_one_line
from penstock.spark.format import register
from penstock.spark.offset_log import OffsetLog, distance
from penstock.spark.reading import whole_number
from penstock.spark.sessions import ended_jvm, mute_accumulators
from penstock.spark.streaming import start_option
from penstock.spark.table_ref import TableRef

clock = SystemClock()
INTERVAL_S_MAX = 1e6  # between two batches
DEAD_LETTERS_MAX = 1_000_000
POLL_S = 0.05
STREAMS_MAX = 1_000  # whose progress a driver knows


def stream(
    spark: Any,
    path: str,
    *,
    source: str,
    consumer: str,
    batch: Route,
    checkpoint: str | None = None,
    max_rows: int | None = None,
    max_bytes: int | None = None,
    interval_s: float | None = None,
    available_now: bool = False,
    dead_letter: str | None = None,
    dead_letter_max: int = 1_000,
    changes: bool = False,
) -> Any:
    """Start a stream from a queue, or from the change feed of a table, and return Spark's query.

    `batch(df)` returns DataFrames by table name. `changes=True` follows the change feed of a queue, not its messages;
    of any other table the feed is all that can be followed.

    With `dead_letter` (a queue), a DataFrame that `batch` returns under that name is written there with its column
    `reason`, and so is every record that makes `batch` fail. If more than `dead_letter_max` records of one micro-batch
    make it fail, the stream stops with the first error instead.

    >>> def route(messages):
    ...     by_key = messages.groupBy("key").count()
    ...     return {"totals": by_key.selectExpr("key", "count AS value", "'add_i64' AS op")}
    >>> query = penstock.spark.stream(
    ...     spark, path, source="events", consumer="router", batch=route, available_now=True
    ... )
    >>> penstock.spark.wait(query).rows_in
    1
    """
    mute_accumulators(spark)
    most = whole(dead_letter_max, "dead_letter_max", 1, DEAD_LETTERS_MAX)
    followed = "true" if flag(changes, "changes") else "false"
    ref = TableRef.of({"path": path, "table": source, "changes": followed})
    runner = BatchRunner(spark, ref, consumer, batch, dead_letter=dead_letter, dead_letter_max=most)
    start = runner.begin()
    if interval_s is not None:
        interval_s = seconds(interval_s, "interval_s", INTERVAL_S_MAX)
    register(spark)
    reader = spark.readStream.format("penstock").option("table", source).option("start", start_option(start))
    if runner.of_changes:
        reader = reader.option("changes", "true")
    for name, limit in (("max_rows", max_rows), ("max_bytes", max_bytes)):
        if limit is not None:
            reader = reader.option(name.replace("_", ""), str(whole_number({name: str(limit)}, name, 1)))
    folder = checkpoint or tempfile.mkdtemp(prefix="penstock-stream-")
    runner.log = OffsetLog(spark, folder, start)
    runner.log.check(consumer)
    try:
        rows = reader.load(path)
    except (PySparkException, Py4JError) as error:  # the source asks the owner for the columns
        raise in_one_line(error, f"the stream of {consumer} from {source} was not started") from None
    writer = rows.writeStream.foreachBatch(runner.run).option("checkpointLocation", folder)
    if available_now:
        writer = writer.trigger(availableNow=True)
    elif interval_s is not None:
        writer = writer.trigger(processingTime=f"{interval_s} seconds")
    query = writer.queryName(f"{source}-{consumer}-{clock.time_us()}").start()
    runner.query = query
    with _lock:
        _runners[query.runId] = runner  # not by `id`, which is the checkpoint's and outlives a run
        for run_id in list(_runners)[:-STREAMS_MAX]:
            del _runners[run_id]
    return query


_lock = threading.Lock()
_runners: dict[str, BatchRunner] = {}  # guarded by _lock; by `runId`, the newest last


def _runner_of(query: Any) -> BatchRunner:
    try:
        run_id = query.runId
    except (Py4JNetworkError, ConnectionError):
        raise ended_jvm("a stream goes on at its position when it is started again") from None
    except AttributeError:
        raise Invalid(f"this is not a query of Spark's: {in_short(query)}") from None
    with _lock:
        runner = _runners.get(run_id)
    if runner is None:
        raise NotFound(f"this query is not among the last {STREAMS_MAX:,} that penstock.spark.stream started")
    return runner


def progress(query: Any) -> StreamProgress:
    """Return the progress of a stream that `stream` started.

    `lag` is None while the store cannot be reached and no batch has reported it.

    >>> penstock.spark.progress(query).dead
    0
    """
    return _runner_of(query).current()


def wait(query: Any, timeout_s: float | None = None) -> StreamProgress:
    """Wait until a stream ends, and stop it on SIGTERM or SIGINT; raise the error it failed with, in one line.

    Signals work in the main thread only: Python delivers them to no other.

    >>> penstock.spark.wait(query, timeout_s=60).rows_in
    1
    """
    if timeout_s is not None:
        timeout_s = seconds(timeout_s, "timeout_s", INTERVAL_S_MAX)
    deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
    runner, stopped = _runner_of(query), False
    with runner.jvm_failures():
        try:
            with stop_on_signals() as stopping:
                while query.isActive and not stopping.is_set():
                    if deadline_s is not None and clock.monotonic_s() >= deadline_s:
                        break
                    query.awaitTermination(1)
                stopped = stopping.is_set()
                if stopped:
                    runner.stop(query)
        except StreamingQueryException:
            pass  # it is raised below, in one line
        if not stopped:
            runner.raise_failure(query)
    return runner.current()


def caught_up(query: Any, timeout_s: float) -> bool:
    """Wait until a stream has committed all messages that were in its queue at this call, and return True.

    False if the time is over or the stream ends before that; the stream's error if it failed.

    >>> penstock.spark.caught_up(query, 60)
    True
    """
    retries = Retries(clock, clock.monotonic_s() + seconds(timeout_s, "timeout_s", INTERVAL_S_MAX), pause_s=POLL_S)
    runner = _runner_of(query)
    last = runner.latest()
    with runner.jvm_failures():
        while True:
            active = query.isActive  # before the position, which may move until the query has ended
            if not distance(runner.position, last):
                return True
            if not active:
                runner.raise_failure(query)
                return False
            if not retries.again():
                return False
