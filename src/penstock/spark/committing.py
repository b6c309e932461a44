"""Several tables and the position of a consumer in one commit.

Thread: the driver's; tasks prepare rows, one group commits them.
Invariant: either everything is written and the consumer is at `end`, or nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock.errors import FixTheCall, Invalid
from penstock.feeds import stream_of
from penstock.kinds import BatchCounts, StreamColumns, as_loadable
from penstock.partition.ledger_records import TableInfo
from penstock.protocol.wire import SourceState
from penstock.spark.arrow import arrow_schema
from penstock.spark.dead_letters import raised_in_task
from penstock.spark.loading import add_loads, check_schema, make_loads
from penstock.spark.table_ref import PlannedTable, TableRef
from penstock.store.batch import StoreBatch

_LOADS = "table string, loads binary, error string"
_REFUSED = "error string"


@dataclass(frozen=True)
class Committed:
    """What a commit did.

    >>> rows = spark.createDataFrame([(b"bob", "Bob")], "key binary, value string")
    >>> penstock.spark.commit(path, {"users": rows}, token=("nightly", 1)).duplicate  # a second time
    True
    """

    duplicate: bool  # it was committed before: nothing was written now
    rows: dict[str, int]  # by table


def commit(
    path: str,
    tables: Mapping[str, DataFrame],
    *,
    consumer: str | None = None,
    source: str | None = None,
    start: Mapping[int, int] | None = None,
    end: Mapping[int, int] | None = None,
    token: tuple[str, int] | None = None,
) -> Committed:
    """Write DataFrames to tables of a store and move a consumer of the queue `source`, all of it or nothing.

    With a consumer, it commits if every shard is at `start` (and moves it to `end`), is a duplicate if every shard is
    at or past `end`, and raises `PositionConflict` otherwise. With a token it commits once. `start` and `end` are
    sequences by shard: that of the first message of the batch, and of the first one after it.

    >>> rows = spark.createDataFrame([(b"bob", "Bob")], "key binary, value string")
    >>> penstock.spark.commit(path, {"users": rows}, token=("nightly", 1))
    Committed(duplicate=False, rows={'users': 1})
    """
    if not isinstance(tables, Mapping):
        raise Invalid(f"{type(tables).__name__} was given for the tables: give DataFrames by table, as in {{'t': df}}")
    for name, frame in tables.items():
        if not isinstance(frame, DataFrame):
            raise Invalid(f"{type(frame).__name__} was given for {name}: give a DataFrame")
    ref = TableRef.of({"path": path}, table=False)
    plan = ref.plan(tables, source=(source or "") if consumer is not None else "")
    for name, frame in tables.items():
        check_schema(plan.tables[name], frame.schema)
    if consumer is not None:
        _condition(plan.source, consumer, start, end)  # before the rows are prepared
    encoded = prepare(plan.tables, tables)
    with ref.store().batch(token=token) as batch:
        rows = use(batch, plan.tables, encoded)
        if consumer is not None:
            batch.require(*_condition(plan.source, consumer, start, end, sum(rows.values())))
    return Committed(batch.duplicate, {} if batch.duplicate else rows)


def _condition(
    source: SourceState | None,
    consumer: str,
    start: Mapping[int, int] | None,
    end: Mapping[int, int] | None,
    rows: int = 0,
) -> tuple[str, bytes]:
    if source is None or start is None or end is None:
        raise Invalid("with a consumer, say source= (a queue), start= and end= (sequences by shard)")
    arguments: tuple[Any, ...] = (start, end)
    for offsets in arguments:
        pairs = offsets.items() if isinstance(offsets, Mapping) else [(None, None)]
        if not all(type(number) is int for pair in pairs for number in pair):
            raise Invalid(f"start= and end= are sequences by shard, as in {{0: 1, 1: 1}}, not {offsets!r}")
    name, last = source.table.name, source.latest
    if set(start) != set(end) or not set(start) <= set(last):
        raise Invalid(f"queue {name} has the shards {sorted(last)}: name the same of them in start= and end=")
    for shard in start:
        if not 1 <= start[shard] <= end[shard] <= last[shard]:
            raise Invalid(
                f"shard {shard} of {name} has messages [1, {last[shard]}): a batch of it "
                f"cannot be [{start[shard]}, {end[shard]})"
            )
    return move_condition(source.table, consumer, start, end, counts=BatchCounts(rows))


def move_condition(
    info: TableInfo,
    consumer: str,
    start: Mapping[int, int],
    end: Mapping[int, int],
    *,
    changes: bool = False,
    counts: BatchCounts = BatchCounts(),  # noqa: B008 - immutable
) -> tuple[str, bytes]:
    """Return the condition with which a batch moves a consumer; `changes`: of the table's change feed."""
    ranges = [(shard, start[shard], end[shard]) for shard in sorted(start)]
    return stream_of(info, changes=changes).move(info, consumer, ranges, counts)


def prepare(planned: Mapping[str, PlannedTable], tables: Mapping[str, DataFrame]) -> dict[str, list[bytes]]:
    """Prepare the rows of every table in one Spark job; return the loads by table. Raises if a table refuses a row."""
    frames = [_prepared(planned[name], name, frame) for name, frame in tables.items()]
    encoded: dict[str, list[bytes]] = {name: [] for name in tables}
    if frames:
        for row in reduce(DataFrame.unionAll, frames).collect():
            if row["error"] is not None:
                raise raised_in_task(row["error"]) or Invalid(row["error"])
            encoded[row["table"]].append(bytes(row["loads"]))
    return encoded


def _prepared(table: PlannedTable, name: str, frame: DataFrame) -> DataFrame:
    return frame.mapInArrow(partial(_task, table, name, frame.schema), _LOADS)


def _task(table: PlannedTable, name: str, schema: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Prepare a task's rows, and return the loads to the driver. Runs in a task."""
    loads, error = _attempt(table, schema, batches)
    columns = [pa.array([name]), pa.array([loads], pa.binary()), pa.array([error], pa.string())]
    yield pa.record_batch(columns, names=["table", "loads", "error"])


def check_nulls(table: PlannedTable, frame: DataFrame) -> DataFrame:
    """Return a frame of the nulls in columns that must have none, without a Python function: what `check_rows` says."""
    schema = as_loadable(table.kind, table.info).load_schema(arrow_schema(frame.schema), table.info.options)
    error = F.lit(None).cast("string")
    for name in [field.name for field in schema if not field.nullable]:
        text = f"penstock.errors.Invalid: {name} is null, and table {table.info.name} takes no such row"
        error = F.when(F.col(name).isNull(), text).otherwise(error)
    return frame.select(error.alias("error")).where("error IS NOT NULL")


def check_rows(table: PlannedTable, frame: DataFrame) -> DataFrame:
    """Return a frame of one row for each task: why the table refuses the task's rows, or null."""
    return frame.mapInArrow(partial(_check, table, frame.schema), _REFUSED)


def _check(table: PlannedTable, schema: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """Prepare a task's rows for nothing but the error."""
    _, error = _attempt(table, schema, batches)
    yield pa.record_batch([pa.array([error], pa.string())], names=["error"])


def _attempt(table: PlannedTable, schema: Any, batches: Iterator[Any]) -> tuple[bytes, str | None]:
    """Return the loads of rows, or why the table refuses them. If that were raised, a Python process would end."""
    try:
        return make_loads(table, schema, batches), None
    except FixTheCall as refused:
        for _ in batches:  # what is left unread would end the process, too
            pass
        return b"", f"{type(refused).__module__}.{type(refused).__name__}: {refused}"


def use(batch: StoreBatch, planned: Mapping[str, PlannedTable], encoded: Mapping[str, list[bytes]]) -> dict[str, int]:
    """Add the prepared loads to a batch; return the number of rows by table."""
    return {name: add_loads(batch, table, encoded[name]) for name, table in planned.items()}


def within(frame: DataFrame, columns: StreamColumns, start: Mapping[int, int], end: Mapping[int, int]) -> DataFrame:
    """Return the rows of a frame in [start, end) of each shard."""
    inside, sequence = F.lit(False), F.col(columns.sequence)
    for shard, low in start.items():
        inside = inside | ((F.col(columns.shard) == shard) & (sequence >= low) & (sequence < end[shard]))
    return frame.where(inside)
