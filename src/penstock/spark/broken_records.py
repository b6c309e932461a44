"""Writes the batches of a stream with a dead-letter queue: finds broken records, and sets them aside with the reason.

A batch that fails because of a record: (1) one Spark job finds the records on which the plan fails (`isolation`); one
commit writes all others, the dead letters and the position. (2) If a table refuses results, a job finds the records
that lead to those, and the commit is tried again. (3) Where records cannot be evaluated apart, the batch is
halved, and each half is a commit of its own. If the function fails on an empty frame, or the error may pass, no record
is to blame, and the stream stops.

A failed task takes its Python processes with it, and new ones take a second to start. So after a batch with broken
records the next ones are searched first, and need not fail.

Thread: that of the stream.
Invariants: (1) a search writes nothing; a dead letter is written in the commit that moves the consumer past its record.
(2) the search ends at a number of records, of commits and of seconds, with the batch's first error, and between two
steps if the stream is to stop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.errors import FixTheCall, PenstockError, PositionConflict, StreamFailed
from penstock.host.clock import SystemClock
from penstock.kinds import StreamColumns
from penstock.spark.committing import check_nulls, check_rows, within
from penstock.spark.dead_letters import ERRORS, is_transient, raised_in_task, reason_of, split_off
from penstock.spark.isolation import Failures, NotSearchableError, RowPosition, find_failures
from penstock.spark.offset_log import Offsets, distance
from penstock.spark.soft_functions import reporting
from penstock.spark.table_ref import BatchTables

logger = logging.getLogger(__name__)
clock = SystemClock()
SEARCH_S = 120.0  # how long the broken records of one batch are searched, from the start of the search
HALVES_MAX = 250  # commits of parts of one batch
BATCHES_EXPECTED = 20  # after one with broken records
# Failures of the plan; nulls that a table refuses, found in the JVM; all that a table refuses, found by Python, which
# takes several times as long. Each also finds what the earlier ones find.
SearchFor = Literal["failures", "nulls", "refusals"]
SEARCHES: tuple[SearchFor, ...] = ("failures", "nulls", "refusals")


class BatchSteps(Protocol):
    """The steps of a stream that a search calls."""

    def check_stop(self) -> None:
        """Raise `Closed` if the stream is to stop."""

    def routed(self, frame: DataFrame) -> dict[str, DataFrame]:
        """Return the DataFrames that the batch function makes of a frame, by table."""

    def shaped(self, tables: dict[str, DataFrame]) -> dict[str, DataFrame]:
        """Return the DataFrames in the form in which they are written."""

    def plan(self, tables: Mapping[str, Any]) -> tuple[BatchTables, Any]:
        """Return the tables of these names."""

    def prepared(self, tables: dict[str, DataFrame]) -> object:
        """Prepare the rows of every table."""

    def commit(
        self, tables: dict[str, DataFrame], start: Offsets, end: Offsets, broken: DataFrame | None = None
    ) -> None:
        """Write the tables, the broken records and the position [start, end) in one commit."""


class BrokenRecords:
    """The batches of a stream with a dead-letter queue."""

    def __init__(self, steps: BatchSteps, columns: StreamColumns, records_max: int, job_tag: str) -> None:
        self._steps = steps
        self._columns = columns
        self._records_max = records_max
        self._job_tag = job_tag
        self._expected = 0  # batches that are searched before they fail, as one did a while ago
        self._last: SearchFor = "failures"  # how its records were found

    def write(self, frame: DataFrame, start: Offsets, end: Offsets) -> None:
        """Write [start, end), with its broken records as dead letters."""
        self._deadline_s: float | None = None  # set when a search begins: Spark's own start takes a while
        self._records = self._commits = 0
        reasons: dict[RowPosition, str] = {}
        if self._expected:
            self._expected -= 1
            reasons = self._search(frame, reasons, self._last) or {}
            if len(reasons) > self._records_max:
                reasons = {}  # fail once, for the first error
        error = self._write_without(frame, start, end, reasons)
        if reasons or error is not None:
            self._expected = BATCHES_EXPECTED
        if error is None:
            return
        self._first = error
        refused = isinstance(error, FixTheCall)  # by a table: the plan itself does not fail
        for look_for in SEARCHES[1:] if refused else SEARCHES:
            all_reasons = self._search(frame, reasons, look_for)
            if all_reasons is None:
                break
            if len(all_reasons) == len(reasons):
                continue
            reasons, self._last = all_reasons, look_for
            self._check_records(len(reasons))
            if self._write_without(frame, start, end, reasons) is None:
                return
        if not self._works_on_nothing(frame, start):
            raise self._first
        self._halve(frame, start, end, error)

    def _works_on_nothing(self, frame: DataFrame, start: Offsets) -> bool:
        """Whether the batch function succeeds on an empty frame; if not, no record is to blame."""
        try:
            self._steps.prepared(self._steps.routed(within(frame, self._columns, start, start)))
        except PositionConflict:
            raise
        except Exception as error:
            logger.info("the batch function fails on an empty frame too: %s", reason_of(error))
            return False
        return True

    def _search(
        self, frame: DataFrame, reasons: dict[RowPosition, str], look_for: SearchFor
    ) -> dict[RowPosition, str] | None:
        """Return the broken records with their reasons, and the known ones; None if rows cannot be evaluated apart."""
        self._steps.check_stop()
        good = split_off(frame, self._columns, reasons)[0] if reasons else frame
        try:
            failures = self._find_failures(good, look_for)
        except NotSearchableError as error:
            self._steps.check_stop()
            logger.info("the records cannot be evaluated apart: %s", reason_of(str(error)))
            return None
        doubtful = {position: text for position, text in failures.items() if is_transient(text)}
        if doubtful:
            _, rows = split_off(good, self._columns, doubtful)
            for position in doubtful.keys() - self._quoting(rows):
                raise raised_in_task(doubtful[position]) or NotSearchableError(doubtful[position])
        return reasons | {position: reason_of(text) for position, text in failures.items()}

    def _write_without(
        self, frame: DataFrame, start: Offsets, end: Offsets, reasons: dict[RowPosition, str]
    ) -> Exception | None:
        """Commit the batch with these records as dead letters; return the error if other records may be to blame."""
        self._steps.check_stop()
        good, broken = split_off(frame, self._columns, reasons) if reasons else (frame, None)
        return self._try_commit(good, start, end, broken)

    def _try_commit(
        self, frame: DataFrame, start: Offsets, end: Offsets, broken: DataFrame | None = None
    ) -> Exception | None:
        """Commit a part of the batch; return the error if its records may be to blame."""
        try:
            self._steps.commit(self._steps.routed(frame), start, end, broken)
        except PositionConflict:
            raise
        except Exception as error:
            if is_transient(error) and (isinstance(error, PenstockError) or not self._quoting(frame, 1)):
                raise
            return error
        return None

    def _quoting(self, frame: DataFrame, limit: int | None = None) -> set[RowPosition]:
        """Return the messages that have the name of an error of Penstock's in them, as lines of a log may.

        Spark's text of an error may quote them: it does not say then that Penstock raised it.
        """
        quoting = frame.where(F.col(self._columns.payload).cast("string").contains(ERRORS))
        quoting = quoting.select(self._columns.shard, self._columns.sequence)
        rows = (quoting if limit is None else quoting.limit(limit)).collect()
        return {RowPosition(*row) for row in rows}

    def _find_failures(self, frame: DataFrame, look_for: SearchFor) -> Failures:
        def plans_of(chosen: DataFrame) -> list[DataFrame]:
            with reporting():
                tables = self._steps.shaped(self._steps.routed(chosen))
            if look_for == "failures":
                return list(tables.values())
            plan, _ = self._steps.plan(tables)
            check = check_nulls if look_for == "nulls" else check_rows
            return [check(plan.tables[name], rows) for name, rows in tables.items()]

        context = frame.sparkSession.sparkContext
        context.addJobTag(self._job_tag)
        try:
            return find_failures(
                frame,
                plans_of,
                self._columns,
                error_column=None if look_for == "failures" else 0,
                failures_max=self._records_max,
                timeout_s=self._left_s(),
            )
        finally:
            context.removeJobTag(self._job_tag)

    def _halve(self, frame: DataFrame, start: Offsets, end: Offsets, error: Exception) -> None:
        """Write a range that fails with `error` in halves, until each broken record is alone."""
        if distance(start, end) <= 1:
            self._records += 1
            self._check_records(self._records)
            _, letters = split_off(frame, self._columns, {_only_position(start, end): reason_of(error)})
            self._steps.commit({}, start, end, letters)
            return
        middle = _middle(start, end)
        for low, high in ((start, middle), (middle, end)):
            self._steps.check_stop()
            self._check_budget()
            half = self._try_commit(within(frame, self._columns, low, high), low, high)
            if half is not None:
                self._halve(frame, low, high, half)

    def _check_records(self, records: int) -> None:
        if records > self._records_max:
            raise self._limit_met(f"more than dead_letter_max={self._records_max} records of one batch fail")

    def _left_s(self) -> float:
        """Return the time that is left for this search; the first call of a batch starts it."""
        now_s = clock.monotonic_s()
        if self._deadline_s is None:
            self._deadline_s = now_s + SEARCH_S
        return max(0.0, self._deadline_s - now_s)

    def _check_budget(self) -> None:
        self._commits += 1
        limit = f"{HALVES_MAX} commits of parts of the batch" if self._commits > HALVES_MAX else f"{SEARCH_S:g} s"
        if self._commits > HALVES_MAX or not self._left_s():
            cause = f"its broken records were not found within {limit}"
            raise self._limit_met(f"{cause}: give penstock.spark.stream a smaller max_rows=")

    def _limit_met(self, cause: str) -> StreamFailed:
        """Return the error of a search that a limit ended: the first error of the batch, and the limit."""
        task = raised_in_task(str(self._first))
        return StreamFailed(f"{reason_of(self._first if task is None else task)} ({cause})")


def _only_position(start: Offsets, end: Offsets) -> RowPosition:
    """Return the position of the one message in [start, end)."""
    return next(RowPosition(shard, start[shard]) for shard in end if start[shard] < end[shard])


def _middle(start: Offsets, end: Offsets) -> Offsets:
    """Return offsets about half-way, filled shard by shard."""
    left = distance(start, end) // 2
    middle = {}
    for shard in sorted(end):
        step = min(left, end[shard] - start[shard])
        middle[shard] = start[shard] + step
        left -= step
    return middle
