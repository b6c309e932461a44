"""A stream that commits results and position together: every message counts once, whatever is killed or deleted.

Spark plans micro-batches of a queue; the batch function turns each into DataFrames for tables; one group writes them
and moves the consumer from the start of the batch to its end, if it is at the start. The position in the store is
authoritative: Spark's checkpoint may be deleted or restored from an old copy.

A batch costs the driver two requests: one gets the tables that the batch function named, the consumer's position and
the end of the queue; the other is the commit. The process in which Spark plans makes one request (see `streaming`), and
tasks make one for each page of messages and for each file that they stage.

Thread: the batch function runs in a thread of the driver, one batch at a time.
Invariants: (1) a batch is written from the consumer's position on, and skipped if that is at or past its end. (2) a
driver that finds the consumer moved by another driver, before or during the write of a batch, stops with
`PositionConflict`. (3) with a dead-letter queue a record that makes the batch fail is written there with the reason,
and all others are written.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from penstock import errors
from penstock.arguments import seconds, text
from penstock.errors import Closed, FixTheCall, Invalid, KindMismatch, NotFound, PenstockError, PositionConflict
from penstock.host.clock import SystemClock
from penstock.host.waiting import stop_on_signals
from penstock.kinds import StreamColumns, as_streamable
from penstock.protocol.wire import SourceState
from penstock.registry import kind_named
from penstock.spark.committing import move_condition, prepare, use, within
from penstock.spark.format import register
from penstock.spark.loading import check_schema
from penstock.spark.offset_log import OffsetLog, Offsets
from penstock.spark.reading import whole_number
from penstock.spark.sessions import muted
from penstock.spark.streaming import start_option
from penstock.spark.table_ref import BatchTables, PlannedTable, TableRef

logger = logging.getLogger(__name__)
clock = SystemClock()
Route = Callable[[DataFrame], Mapping[str, DataFrame]]
REASON = "reason"
_RAISED = re.compile(r"penstock\.errors\.(\w+)")  # as tracebacks print it
INTERVAL_S_MAX = 1e6  # between two batches
CONSUMER_BYTES_MAX = 255
STOP_S = 60.0  # how long `stop` waits for a running batch


@dataclass(frozen=True)
class StreamProgress:
    """Progress of a stream.

    >>> penstock.spark.progress(query).batches
    1
    """

    batches: int = 0
    rows_in: int = 0
    rows_out: int = 0
    dead: int = 0  # messages written to the dead-letter queue
    skipped: int = 0  # batches that were already written
    lag: int = 0  # messages in the queue after the last batch, when that was written
    committed_s: float | None = None  # time of the last commit, in seconds since 1970


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
) -> Any:
    """Start a stream from a queue and return Spark's query. `batch(df)` returns DataFrames by table name.

    With `dead_letter` (a queue), a DataFrame that `batch` returns under that name is written there with its column
    `reason`, and so is every record that makes `batch` fail.

    >>> def route(messages):
    ...     by_key = messages.groupBy("key").count()
    ...     return {"totals": by_key.selectExpr("key", "count AS value", "'add_i64' AS op")}
    >>> query = penstock.spark.stream(
    ...     spark, path, source="events", consumer="router", batch=route, available_now=True
    ... )
    >>> penstock.spark.wait(query).rows_in
    1
    """
    runner = _Runner(TableRef.of({"path": path, "table": source}), consumer, batch, dead_letter)
    start = runner.begin()
    if interval_s is not None:
        interval_s = seconds(interval_s, "interval_s", INTERVAL_S_MAX)
    register(spark)
    reader = spark.readStream.format("penstock").option("table", source).option("start", start_option(start))
    for name, limit in (("max_rows", max_rows), ("max_bytes", max_bytes)):
        if limit is not None:
            reader = reader.option(name.replace("_", ""), str(whole_number({name: str(limit)}, name, 1)))
    folder = checkpoint or tempfile.mkdtemp(prefix="penstock-stream-")
    runner.log = OffsetLog(spark, folder, start)
    runner.log.check(consumer)
    writer = reader.load(path).writeStream.foreachBatch(runner.run).option("checkpointLocation", folder)
    if available_now:
        writer = writer.trigger(availableNow=True)
    elif interval_s is not None:
        writer = writer.trigger(processingTime=f"{interval_s} seconds")
    query = writer.queryName(f"{source}-{consumer}-{clock.time_us()}").start()
    with _lock:
        _runners[query.runId] = runner  # not by `id`, which is the checkpoint's and outlives a run
    return query


_lock = threading.Lock()
_runners: dict[str, _Runner] = {}  # guarded by _lock; by `runId`


def _runner_of(query: Any) -> _Runner:
    with _lock:
        runner = _runners.get(query.runId)
    if runner is None:
        raise NotFound("this query was not started by penstock.spark.stream")
    return runner


def progress(query: Any) -> StreamProgress:
    """Return the progress of a stream that `stream` started.

    >>> penstock.spark.progress(query).dead
    0
    """
    return _runner_of(query).progress


def wait(query: Any, timeout_s: float | None = None) -> StreamProgress:
    """Wait until a stream ends, and stop it on SIGTERM or SIGINT; raise the error it failed with.

    Signals work in the main thread only: Python delivers them to no other.

    >>> penstock.spark.wait(query, timeout_s=60).rows_in
    1
    """
    deadline_s = None if timeout_s is None else clock.monotonic_s() + timeout_s
    try:
        with stop_on_signals() as stopping:
            while query.isActive and not stopping.is_set() and (deadline_s is None or clock.monotonic_s() < deadline_s):
                query.awaitTermination(1)
            if stopping.is_set():
                _runner_of(query).stop(query)
    except StreamingQueryException as error:
        raise _runner_of(query).error or error from None
    failure = query.exception()  # it may have ended between two checks
    if failure is not None and not stopping.is_set():
        raise _runner_of(query).error or failure
    return progress(query)


class _Runner:
    """Runs the batches of one stream."""

    log: OffsetLog
    _columns: StreamColumns  # of the source; this and the next are set by `begin`
    _letter: StreamColumns  # of the dead-letter queue

    def __init__(self, source: TableRef, consumer: str, route: Route, dead_letter: str | None) -> None:
        self._source = source
        self._consumer = consumer
        self._route = route
        self._dead = dead_letter
        self.progress = StreamProgress()
        self.error: Exception | None = None  # why the stream ended
        self._turn = threading.Lock()  # held while a batch runs
        self._stopping = False
        self._at: Offsets | None = None  # the consumer's position after this driver's last commit

    def _within(self, frame: DataFrame, start: Offsets, end: Offsets) -> DataFrame:
        return within(frame, self._columns, start, end)

    def _plan(self, tables: Iterable[str] = ()) -> tuple[BatchTables, SourceState]:
        """Return the tables that a batch writes to, and the state of the source with the consumer's position."""
        plan = self._source.plan(tables, source=self._source.table, consumer=self._consumer)
        assert plan.source is not None
        return plan, plan.source

    def begin(self) -> Offsets:
        """Check the arguments and return the consumer's position; a new consumer starts at the first message."""
        if not self._consumer:
            raise Invalid("say who reads: consumer='name'; its position is kept in the store under this name")
        text(self._consumer, "a consumer's name", CONSUMER_BYTES_MAX)
        if not callable(self._route):
            raise Invalid(f"batch is {self._route!r}: give a function that makes DataFrames by table of a DataFrame")
        if self._dead == self._source.table:
            raise Invalid(f"dead_letter is {self._dead}, the source: each would be read again; give another")
        plan, source = self._plan([] if self._dead is None else [self._dead])
        info = source.table
        self._columns = as_streamable(kind_named(info.kind, info.name), info).columns
        for table in plan.tables.values():
            self._letter = _letter_columns(table)
        position, first = source.position, source.earliest
        lost = {shard: sequence for shard, sequence in position.items() if sequence < first[shard]}
        if lost:
            raise NotFound(
                f"messages of {self._source.table} were trimmed before {self._consumer} read them (it is at {lost}, "
                f"they begin at {first}): keep them longer; to go on without them, forget() the consumer, then start"
            )
        return position

    def stop(self, query: Any) -> None:
        """Stop between two batches: an interrupted batch would be repeated safely, but Spark logs long errors."""
        self._stopping = True
        waited = self._turn.acquire(timeout=STOP_S)
        try:
            query.stop()
        finally:
            if waited:
                self._turn.release()

    def run(self, frame: DataFrame, number: int) -> None:
        """Run one micro-batch."""
        if self._stopping:
            raise Closed("the stream was stopped before this batch")
        with self._turn:
            try:
                self._run(frame, number)
            except Exception as error:
                self.error = error
                raise

    def _run(self, frame: DataFrame, number: int) -> None:
        planned, end = self.log.range_of(number)
        if planned == end:
            return  # Spark also runs empty batches
        position = self._at
        if position is None:  # the first batch of this driver
            _, source = self._plan()
            position = self._at = source.position
            self.progress = replace(self.progress, lag=_distance(position, source.latest))
        if all(position[shard] >= end[shard] for shard in end):
            self._count(skipped=1)
            return
        if any(position[shard] < planned[shard] for shard in end):
            raise PositionConflict(
                f"the checkpoint is ahead of consumer {self._consumer}, which is at {position}, not at {planned}: "
                "delete the checkpoint and start again"
            )
        start = {shard: min(position[shard], end[shard]) for shard in end}
        if start != planned:  # an old checkpoint: start from the stored position
            frame = self._within(frame, start, end)
        frame = frame.persist()
        try:
            # Broken records are expected with a dead-letter queue, and Spark would log many lines for each attempt.
            with nullcontext() if self._dead is None else muted(frame.sparkSession):
                self._write(frame, start, end)
        finally:
            frame.unpersist()

    def _write(self, frame: DataFrame, start: Offsets, end: Offsets, *, judged: bool = False) -> None:
        """Write [start, end); a range that fails because of a record is halved until that record is alone."""
        try:
            self._commit(self._routed(frame), start, end)
        except PositionConflict:
            raise
        except Exception as error:
            if self._dead is None or _is_transient(error) or not (judged or self._works_on_nothing(frame, start)):
                raise
            self._halve(frame, start, end, error)

    def _routed(self, frame: DataFrame) -> dict[str, DataFrame]:
        """Return the DataFrames that the batch function makes of a frame, by table."""
        tables = self._route(frame)
        if not isinstance(tables, Mapping):
            raise Invalid(
                f"the batch function gave {type(tables).__name__}: give DataFrames by table, as in {{'totals': df}}"
            )
        return dict(tables)

    def _works_on_nothing(self, frame: DataFrame, start: Offsets) -> bool:
        """Whether the batch function succeeds on an empty frame; if not, no record is to blame."""
        try:
            self._prepared(self._routed(self._within(frame, start, start)))
        except Exception as error:
            logger.warning("the batch function fails on an empty frame too: %s", _first_line(error))
            return False
        return True

    def _halve(self, frame: DataFrame, start: Offsets, end: Offsets, error: Exception) -> None:
        if _distance(start, end) <= 1:
            logger.warning("a record goes to the dead-letter queue: %s", _first_line(error))
            bad = self._within(frame, start, end).withColumn(REASON, F.lit(_first_line(error)))
            self._commit({self._dead_name: bad}, start, end)
            return
        middle = _middle(start, end)
        self._write(self._within(frame, start, middle), start, middle, judged=True)
        self._write(self._within(frame, middle, end), middle, end, judged=True)

    @property
    def _dead_name(self) -> str:
        assert self._dead is not None
        return self._dead

    def _prepared(self, tables: dict[str, DataFrame]) -> tuple[BatchTables, SourceState, dict[str, list[bytes]]]:
        """Prepare the rows of every table in tasks; return the tables, the source, and the loads by table."""
        if self._dead is not None and self._dead in tables:
            letters = tables[self._dead]
            tables[self._dead] = _dead_letters(letters, self._source.table, self._columns, self._letter)
        for name, frame in tables.items():
            if not isinstance(frame, DataFrame):
                raise Invalid(f"the batch function gave {type(frame).__name__} for {name}: give a DataFrame")
        plan, source = self._plan(tables)
        if source.position != self._at:
            raise PositionConflict(
                f"consumer {self._consumer} is at {source.position}, but this driver left it at {self._at}: another "
                "driver took over, so this one stops"
            )
        for name, frame in tables.items():
            check_schema(plan.tables[name], frame.schema)
        return plan, source, prepare(plan.tables, tables)

    def _commit(self, tables: dict[str, DataFrame], start: Offsets, end: Offsets) -> None:
        plan, source, encoded = self._prepared(tables)
        moved = [shard for shard in end if start[shard] < end[shard]]
        with self._source.store().batch() as group:
            rows = use(group, plan.tables, encoded)
            group.require(*move_condition(source.table, self._consumer, _only(start, moved), _only(end, moved)))
        if group.duplicate:  # the consumer was at `start` when the batch began
            raise PositionConflict(
                f"consumer {self._consumer} is past a batch that this driver was writing: another driver took over, "
                "so this one stops"
            )
        self._at = {**source.position, **_only(end, moved)}
        dead = 0 if self._dead is None else rows.get(self._dead, 0)
        self._count(
            lag=_distance(self._at, source.latest),
            batches=1,
            rows_in=_distance(start, end),
            rows_out=sum(rows.values()) - dead,
            dead=dead,
        )

    def _count(self, *, lag: int | None = None, **more: int) -> None:
        now = self.progress
        changed: dict[str, Any] = {name: getattr(now, name) + value for name, value in more.items()}
        self.progress = replace(now, lag=now.lag if lag is None else lag, committed_s=clock.time_us() / 1e6, **changed)


def _only(offsets: Offsets, shards: list[int]) -> Offsets:
    return {shard: offsets[shard] for shard in shards}


def _distance(start: Offsets, end: Offsets) -> int:
    """Return the number of messages in [start, end)."""
    return sum(max(0, end[shard] - start[shard]) for shard in end)


def _middle(start: Offsets, end: Offsets) -> Offsets:
    """Return offsets about half-way, filled shard by shard."""
    left = _distance(start, end) // 2
    middle = {}
    for shard in sorted(end):
        step = min(left, end[shard] - start[shard])
        middle[shard] = start[shard] + step
        left -= step
    return middle


def _is_transient(error: Exception) -> bool:
    """Whether the batch may succeed later, so that no record is to blame; checks the error and that of a task."""
    kinds = [type(error), *(getattr(errors, name, Exception) for name in _RAISED.findall(str(error)))]
    return any(issubclass(kind, PenstockError) and not issubclass(kind, FixTheCall) for kind in kinds)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    blamed = [line for line in lines if "Error" in line or "Exception" in line]
    return (blamed or lines or [type(error).__name__])[-1].strip()[:500]


def _letter_columns(table: PlannedTable) -> StreamColumns:
    """Return the columns of the dead-letter table; `Invalid`, before any work, if it is not a queue."""
    try:
        columns = as_streamable(table.kind, table.info).columns
        check_schema(table, StructType([StructField(columns.payload, StringType())]))
        return columns
    except (Invalid, KindMismatch) as error:
        raise Invalid(f"dead_letter is {table.info.name}, which takes no messages ({error}): give a queue") from None


def _dead_letters(frame: DataFrame, source: str, columns: StreamColumns, letter: StreamColumns) -> DataFrame:
    """Return dead letters: each row as JSON with the reason and its source."""
    names = frame.columns
    if columns.payload not in names or REASON not in names:
        raise Invalid(f"dead letters need the columns {columns.payload} and {REASON}, not {', '.join(names)}")
    parts = [F.lit(source).alias("source"), F.col(REASON)]
    parts += [
        F.col(name).alias(alias)
        for name, alias in ((columns.shard, "shard"), (columns.sequence, "sequence"))
        if name in names
    ]
    payload = F.col(columns.payload).cast("binary")
    parts += [F.base64(payload).alias("payload_base64"), F.try_validate_utf8(payload.cast("string")).alias("payload")]
    kept = [F.col(name) for name in letter.carried if name in names]
    return frame.select(F.to_json(F.struct(*parts)).alias(letter.payload), *kept)


def dead_letter_payload(message: bytes) -> bytes:
    """Return the original payload of a dead letter.

    >>> letter = b'{"reason": "not JSON", "payload": "x", "payload_base64": "eA=="}'
    >>> penstock.spark.dead_letter_payload(letter)
    b'x'
    """
    return base64.b64decode(json.loads(message)["payload_base64"])
