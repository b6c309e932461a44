"""A PromQL range as a DataFrame: each task evaluates the steps of one slice of time.

A step depends on no other step, so a range is as many instants: a task reads the samples of its own steps, and those
before them that a range or the lookback reaches back to. It reads them from the table's files as of the snapshot that
all tasks of the query share; a task that does not see the store's folder asks the owner. A slice that is too large
for the limits of a query is evaluated in halves.

Thread: the driver's; `_task` in tasks.
Invariant: all tasks of a query read one LSN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.arguments import whole
from penstock.client.store import RemoteSnapshot
from penstock.errors import Invalid, KindMismatch
from penstock.host.clock import SystemClock
from penstock.kinds import partitions_of
from penstock.partition.ledger_records import TableInfo
from penstock.promql import QueryBudget, QueryLimits, StepGrid, evaluate, parse_query
from penstock.promql.evaluator import LOOKBACK_US, check_range_query
from penstock.promql.limits import STEPS_MAX, QueryTooLarge
from penstock.promql.tree import reach_us
from penstock.registry import series_kind
from penstock.series.arrow import SAMPLES
from penstock.series.promql_source import TableSource, range_grid
from penstock.series.queries import decode_query, run_series_query
from penstock.series.reading import SeriesState, open_piece
from penstock.series.times import time_key
from penstock.spark.arrow import for_spark, spark_schema
from penstock.spark.reading import LEASE_S
from penstock.spark.table_ref import TableRef, query_name

SLICE_S = LEASE_S * 0.8  # for one evaluation: less than the lease of the snapshot, which each renews
SLICES_MAX = 100_000


@dataclass(frozen=True)
class _RangeQuery:
    """A range query, for tasks."""

    ref: TableRef
    info: TableInfo
    query: str
    grid: StepGrid
    slices: int

    def slice(self, number: int) -> StepGrid:
        """Return the steps of one slice."""
        first, end = (number * self.grid.steps // self.slices, (number + 1) * self.grid.steps // self.slices)
        return _part(self.grid, first, end)


def promql(  # noqa: PLR0917 - as `query_range`
    spark: SparkSession,
    path: str,
    table: str,
    query: str,
    start: int | datetime,
    end: int | datetime,
    step: float | timedelta,
    *,
    splits: int | None = None,
) -> DataFrame:
    """Evaluate a PromQL expression over a range of time on Spark; the rows are those of `SeriesTable.query_range`.

    The range is divided into slices of time, by default about twice as many as Spark has cores, and more if they would
    have more than 11,001 steps; `splits` is their number. The rows have no order.

    >>> start = 1_700_000_000_000_000
    >>> epoch = store.series("metrics").write("cpu", 0.42, {"host": "a"}, time=start, durable=True)
    >>> frame = penstock.spark.promql(spark, path, "metrics", "sum(cpu)", start, start + 60_000_000, step=30)
    >>> [row["value"] for row in frame.collect()]
    [0.42, 0.42, 0.42]
    """
    ref = TableRef.of({"path": path, "table": table})
    tree = parse_query(query)
    check_range_query(tree)
    grid = range_grid(start, end, step)
    info = ref.info()
    if info.kind != series_kind().name:
        raise KindMismatch(f"table {table} is of the kind {info.kind}, not series: PromQL reads a series table")
    least = -(-grid.steps // STEPS_MAX)
    if splits is None:
        # A slice reads again what its first step reaches back to, so it is at least as long.
        useful = max(1, (grid.end_us - grid.start_us) // max(1, reach_us(tree, LOOKBACK_US)))
        slices = max(least, min(2 * spark.sparkContext.defaultParallelism, useful, grid.steps))
    else:
        slices = max(least, min(whole(splits, "splits", 1), grid.steps))
    if slices > SLICES_MAX:
        raise Invalid(f"a range of {grid.steps} steps needs more than {SLICES_MAX} slices: give a longer step")
    range_query = _RangeQuery(ref, info, str.__str__(query), grid, slices)
    return spark.range(0, slices, 1, slices).mapInArrow(partial(_task, range_query), spark_schema(SAMPLES))


def _task(range_query: _RangeQuery, batches: Iterator[Any]) -> Iterator[Any]:
    """Evaluate the slices of a task's rows. Runs in a task."""
    schema = spark_schema(SAMPLES)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from for_spark(_rows(range_query, range_query.slice(number)), schema)


def _rows(range_query: _RangeQuery, grid: StepGrid) -> Iterator[Any]:
    """Yield the rows of some steps; in halves if together they are too large."""
    snapshot = range_query.ref.store().query_snapshot(query_name("promql"), lease_s=LEASE_S)  # it renews the lease, too
    budget = QueryBudget(QueryLimits(timeout_s=SLICE_S), SystemClock())
    source = TableSource(partial(_runs, range_query, snapshot, budget))
    try:
        result = evaluate(parse_query(range_query.query), source, grid, budget, instant=False, whole=range_query.grid)
        rows = result.to_arrow(SAMPLES)
    except QueryTooLarge:
        if grid.steps == 1:
            raise
    else:
        yield from rows.to_batches()
        return
    half = grid.steps // 2
    for first, end in ((0, half), (half, grid.steps)):
        yield from _rows(range_query, _part(grid, first, end))


def _part(grid: StepGrid, first: int, end: int) -> StepGrid:
    return StepGrid(grid.start_us + first * grid.step_us, grid.step_us, end - first)


class _SliceContext:
    """What the query of a slice may use, as the owner's `QueryContext`."""

    def __init__(self, budget: QueryBudget, lsn: int, time_us: int) -> None:
        self.lsn, self.time_us = lsn, time_us
        self.check = budget.check


def _runs(
    range_query: _RangeQuery, snapshot: RemoteSnapshot, budget: QueryBudget, argument: bytes, timeout_s: float
) -> Iterator[Any]:
    """Answer the query `runs` from the table's files, or by the owner if this process does not see them."""
    query = decode_query(argument)
    shards = _shards(range_query, snapshot, query.start, query.end)
    if shards is None:
        return snapshot.port.query(range_query.info, "runs", argument, timeout_s=timeout_s)
    return run_series_query("runs", argument, shards, _SliceContext(budget, snapshot.lsn, snapshot.port.time_us()))


def _shards(range_query: _RangeQuery, snapshot: RemoteSnapshot, start_us: int, end_us: int) -> list[SeriesState] | None:
    root, identity = range_query.ref.root, range_query.ref.store().identity
    if root is None:
        return None
    shards: list[SeriesState] = []
    for partition in partitions_of(range_query.info):
        (piece,) = snapshot.port.pieces(partition, 1, time_key(start_us), time_key(end_us))
        state = open_piece(piece, root, identity) if piece.detail else None
        if state is None:
            return None
        shards.append(state)
    return shards
