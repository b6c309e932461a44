"""Runs the micro-batches of a stream: each is one commit of its results and the consumer's position.

The batch function turns a micro-batch into DataFrames for tables; one group writes them and moves the consumer from the
start of the batch to its end, if it is at the start. The position in the store is authoritative: Spark's checkpoint
may be deleted or restored from an old copy.

A batch costs the driver two requests: one gets the tables that the batch function named, the consumer's position and
the end of the queue; the other is the commit. The process in which Spark plans makes one request (see `streaming`), and
tasks make one for each page of messages and for each file that they stage.

Thread: batches run in a thread of the driver, one at a time; `stop`, `current` and `raise_failure` in any.
Invariants: (1) a batch is written from the consumer's position on, and skipped if that is at or past its end. (2) a
driver that finds the consumer moved by another driver, before or during the write of a batch, stops with
`PositionConflict`. (3) with a dead-letter queue a record that makes the batch fail is written there with the reason, in
the commit that moves the consumer past it, and all others are written (see `broken_records`).
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import DataFrame

from penstock.arguments import text
from penstock.errors import Closed, Invalid, NotFound, PenstockError, PositionConflict
from penstock.feeds import FeedStream, stream_of
from penstock.host import threads
from penstock.host.clock import SystemClock
from penstock.host.waiting import Retries
from penstock.kinds import BatchCounts, StreamColumns
from penstock.protocol.wire import SourceState
from penstock.spark.broken_records import BrokenRecords
from penstock.spark.committing import move_condition, prepare, use, within
from penstock.spark.dead_letters import dead_letters, in_one_line, letter_columns, reason_of
from penstock.spark.loading import check_schema
from penstock.spark.offset_log import OffsetLog, Offsets, distance
from penstock.spark.sessions import STREAM_LOGGERS, jvm_failures, muted
from penstock.spark.table_ref import BatchTables, TableRef

logger = logging.getLogger(__name__)
clock = SystemClock()
Route = Callable[[DataFrame], Mapping[str, DataFrame]]
CONSUMER_BYTES_MAX = 255
STOP_S = 60.0  # how long `stop` waits for a running batch
ENDED_S = 30.0  # how long Spark takes to end a query whose batch failed
POLL_S = 0.05


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
    lag: int | None = None  # messages after the position when the last batch was planned, or now if there was none
    committed_s: float | None = None  # time of the last commit, in seconds since 1970


class BatchRunner:
    """Runs the batches of one stream."""

    log: OffsetLog
    position: Offsets  # of the consumer, as far as this driver knows; this and the next two are set by `begin`
    _columns: StreamColumns  # of the source
    _letter: StreamColumns  # of the dead-letter queue
    of_changes: bool  # whether the source is a change feed; set by `begin`, too
    query: Any = None

    def __init__(
        self,
        spark: Any,
        source: TableRef,
        consumer: str,
        route: Route,
        *,
        dead_letter: str | None,
        dead_letter_max: int,
    ) -> None:
        self._spark = spark
        self._source = source
        self._consumer = consumer
        self._route = route
        self._dead = dead_letter
        self._dead_max = dead_letter_max
        self.progress = StreamProgress()
        self.error: Exception | None = None  # why the stream ended
        self._turn = threading.Lock()  # held while a batch runs
        self._stopping = False
        self._counted_skips = 0  # skipped batches that the owner has counted
        self._at: Offsets | None = None  # the consumer's position after this driver's last commit
        self._search_tag = f"penstock-search-{uuid.uuid4()}"  # of Spark's jobs that `stop` cancels
        self._broken: BrokenRecords | None = None  # with a dead-letter queue

    def plan(self, tables: Iterable[str] = ()) -> tuple[BatchTables, SourceState]:
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
        plan, source = self.plan([] if self._dead is None else [self._dead])
        info = source.table
        stream = stream_of(info, changes=self._source.changes)
        self._columns, self.of_changes = stream.columns, isinstance(stream, FeedStream)
        if self._dead is not None and not self._columns.payload:
            raise Invalid(f"dead_letter takes messages of a queue, and {info.name} is a change feed: leave it out")
        for table in plan.tables.values():
            self._letter = letter_columns(table, info)
            self._broken = BrokenRecords(self, self._columns, self._dead_max, self._search_tag)
        position, first = source.position, source.earliest
        lost = {shard: sequence for shard, sequence in position.items() if sequence < first[shard]}
        if lost:
            noun, remedy = "messages", "forget() the consumer, then start"
            if self.of_changes:
                noun, remedy = "changes", "start with another consumer="
            raise NotFound(
                f"{noun} of {self._source.table} were trimmed before {self._consumer} read them (it is at {lost}, "
                f"they begin at {first}): keep them longer; to go on without them, {remedy}"
            )
        self.position = position
        return position

    def latest(self) -> Offsets:
        """Return the end of the queue."""
        return self.plan()[1].latest

    def current(self) -> StreamProgress:
        """Return the progress; before the first commit the lag is that of this moment."""
        now = self.progress
        if now.committed_s is not None:
            return now
        try:
            _, source = self.plan()
        except PenstockError:
            return now
        return replace(now, lag=distance(source.position, source.latest))

    def raise_failure(self, query: Any) -> None:
        """Raise why a query failed, in one line; return if it did not, or was stopped."""
        failure = query.exception()  # None if it was stopped, even in the middle of a batch
        if failure is None or self._stopping:
            return
        raise in_one_line(self.error or failure, f"{self.name} failed") from None

    @property
    def name(self) -> str:
        """The stream, for messages."""
        return f"the stream of {self._consumer} from {self._source.table}"

    def jvm_failures(self) -> AbstractContextManager[None]:
        """Return a context in which the end of Spark's JVM is an error of one line."""
        return jvm_failures(self._spark, f"{self.name} goes on at its position when it is started again")

    def stop(self, query: Any) -> None:
        """Stop between two batches: an interrupted batch would be repeated safely, but Spark logs long errors.

        A search for broken records is cancelled.
        """
        self._stopping = True
        self._spark.sparkContext.cancelJobsWithTag(self._search_tag)
        waited = self._turn.acquire(timeout=STOP_S)
        try:
            query.stop()
        finally:
            if waited:
                self._turn.release()

    def run(self, frame: DataFrame, number: int) -> None:
        """Run one micro-batch."""
        try:
            self.check_stop()
            while not self._turn.acquire(timeout=POLL_S):  # `stop` holds it until this thread has ended
                self.check_stop()
            try:
                with self.jvm_failures():
                    self._run(frame, number)
            finally:
                self._turn.release()
        except Exception as error:
            self.error = error
            self._end_quietly()
            raise

    def check_stop(self) -> None:
        """Raise `Closed` if the stream is to stop."""
        if self._stopping:
            raise Closed("the stream was stopped before this batch was written: start it again, it goes on there")

    def _end_quietly(self) -> None:
        """Log the error in one line, and keep Spark from logging it in hundreds while it ends the query."""
        if not self._stopping:
            assert self.error is not None
            logger.error("%s (%s ends)", reason_of(self.error), self.name)
        with ExitStack() as stack:
            stack.enter_context(suppress(Py4JError, ConnectionError))  # of a JVM that has ended
            stack.enter_context(muted(self._spark, STREAM_LOGGERS))
            ending = stack.pop_all()

        def unmute() -> None:
            with ending:
                retries = Retries(clock, clock.monotonic_s() + ENDED_S, pause_s=POLL_S)
                while (self.query is None or self.query.isActive) and retries.again():
                    pass

        threads.spawn(unmute, name="penstock-stream-end")

    def _run(self, frame: DataFrame, number: int) -> None:
        planned, end = self.log.range_of(number)
        if planned == end:
            return  # Spark also runs empty batches
        position = self._at
        if position is None:  # the first batch of this driver
            _, source = self.plan()
            position = self._at = self.position = source.position
            self.progress = replace(self.progress, lag=distance(position, source.latest))
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
            frame = within(frame, self._columns, start, end)
        frame = frame.persist()
        try:
            with muted(self._spark):  # a failure is handled, or reported in one line
                if self._broken is None:
                    self.commit(self.routed(frame), start, end)
                else:
                    self._broken.write(frame, start, end)
        finally:
            frame.unpersist()

    def routed(self, frame: DataFrame) -> dict[str, DataFrame]:
        """Return the DataFrames that the batch function makes of a frame, by table."""
        tables = self._route(frame)
        if not isinstance(tables, Mapping):
            raise Invalid(
                f"the batch function gave {type(tables).__name__}: give DataFrames by table, as in {{'totals': df}}"
            )
        return dict(tables)

    def shaped(self, tables: dict[str, DataFrame], broken: DataFrame | None = None) -> dict[str, DataFrame]:
        """Return the DataFrames by table, with the broken records and those that the function set aside as letters."""
        for name, frame in tables.items():
            if not isinstance(frame, DataFrame):
                raise Invalid(f"the batch function gave {type(frame).__name__} for {name}: give a DataFrame")
        if self._dead is None:
            return tables
        aside = [frame for frame in (tables.get(self._dead), broken) if frame is not None]
        letters = [dead_letters(frame, self._source.table, self._columns, self._letter) for frame in aside]
        if letters:
            both = letters[0] if len(letters) == 1 else letters[0].unionByName(letters[1], allowMissingColumns=True)
            return {**tables, self._dead: both}
        return tables

    def prepared(
        self, tables: dict[str, DataFrame], broken: DataFrame | None = None
    ) -> tuple[BatchTables, SourceState, dict[str, list[bytes]]]:
        """Prepare the rows of every table in tasks; return the tables, the source, and the loads by table."""
        tables = self.shaped(tables, broken)
        plan, source = self.plan(tables)
        if source.position != self._at:
            raise PositionConflict(
                f"consumer {self._consumer} is at {source.position}, but this driver left it at {self._at}: another "
                "driver took over, so this one stops"
            )
        for name, frame in tables.items():
            check_schema(plan.tables[name], frame.schema)
        return plan, source, prepare(plan.tables, tables)

    def commit(
        self, tables: dict[str, DataFrame], start: Offsets, end: Offsets, broken: DataFrame | None = None
    ) -> None:
        """Write the tables, the broken records and the position [start, end) in one commit."""
        plan, source, encoded = self.prepared(tables, broken)
        moved = [shard for shard in end if start[shard] < end[shard]]
        with self._source.store().batch() as group:
            rows = use(group, plan.tables, encoded)
            dead = 0 if self._dead is None else rows.get(self._dead, 0)
            counts = BatchCounts(sum(rows.values()) - dead, dead, self.progress.skipped - self._counted_skips)
            ranges, changes = (_only(start, moved), _only(end, moved)), self._source.changes
            group.require(*move_condition(source.table, self._consumer, *ranges, changes=changes, counts=counts))
        if group.duplicate:  # the consumer was at `start` when the batch began
            raise PositionConflict(
                f"consumer {self._consumer} is past a batch that this driver was writing: another driver took over, "
                "so this one stops"
            )
        self._counted_skips = self.progress.skipped
        self._at = {**source.position, **_only(end, moved)}
        self._count(
            lag=distance(self._at, source.latest),
            batches=1,
            rows_in=distance(start, end),
            rows_out=counts.rows_out,
            dead=dead,
        )
        self.position = self._at  # last: `caught_up` waits for it, and the batch is counted by then

    def _count(self, *, lag: int | None = None, **more: int) -> None:
        now = self.progress
        changed: dict[str, Any] = {name: getattr(now, name) + value for name, value in more.items()}
        committed_s = clock.time_us() / 1e6 if "batches" in more else now.committed_s
        self.progress = replace(now, lag=now.lag if lag is None else lag, committed_s=committed_s, **changed)


def _only(offsets: Offsets, shards: list[int]) -> Offsets:
    return {shard: offsets[shard] for shard in shards}
