"""Batch reads: the planner splits a table into ranges; the tasks of a query read them in one shared snapshot.

Options: `table`; `start` and `end` (keys of a kv table as text or 0x..., sequences of a queue, times of samples),
`selector` (of samples), `columns` (by default all: Spark does not say which a query needs), `splits` (approximate
number of tasks), `snapshot` (the id of an open snapshot, for several reads at one LSN), `pushdown`.

Spark plans a DataFrame once and reuses the plan for all queries on it, with the filters that one of them pushed down.
So the ranges of a plan are valid at any time, the first task of each query takes the snapshot, and filters narrow the
read only with the option `pushdown`, for a DataFrame that is used once.

Thread: `partitions` in Spark's planner, `read` in its tasks.
Invariants: (1) all tasks of a query read one LSN. (2) Spark applies every filter again: here they only save work.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from penstock.arguments import in_short
from penstock.client.store import RemoteSnapshot
from penstock.errors import Invalid, NotFound
from penstock.host import threads
from penstock.host.clock import SystemClock
from penstock.journal.partitions import PartitionId
from penstock.kinds import FileReadable, Kind, as_selectable, partitions_of
from penstock.partition.ledger_records import TableInfo
from penstock.registry import kind_named
from penstock.spark.arrow import for_spark
from penstock.spark.table_ref import TableRef, check_range, choice

clock = SystemClock()
TASK_BYTES_MIN, TASK_BYTES_MAX = 16 << 20, 256 << 20  # what a task reads, without the option `splits`
LEASE_S = 300.0  # of a query's snapshot, from its last use by a task
RENEW_S = 2.0  # how often a task that reads files by itself renews the lease
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
OPERATIONS = {EqualTo: "=", GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<=", In: "in"}
DIGITS_MAX = 18  # of a number in an option, so that it fits 64 bits
_warned: list[bool] = []


class KeyRangePartition(InputPartition):
    """A range of keys of one shard, for one task."""

    def __init__(self, shard: int, start: bytes, end: bytes | None) -> None:
        super().__init__(None)
        self.shard, self.start, self.end = shard, start, end


class _Pushed:
    """Receives the filters of sessions that push them down.

    Spark calls `reader.pushFilters` if pushdown is on; if it is off, it rejects readers that override the method. So
    this object replaces the method, and its `__func__` is Spark's own function, which that check compares.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, filters: list[tuple[str, str, Any]]) -> None:
        self._filters = filters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Record the filters that narrow the range, and return every filter to Spark as well."""
        for spark_filter in filters:
            operation = OPERATIONS.get(type(spark_filter))
            if operation is not None and len(spark_filter.attribute) == 1:  # type: ignore[attr-defined]
                value = spark_filter.value  # type: ignore[attr-defined]
                value = [item for item in value if item is not None] if operation == "in" else value
                if value is not None and value != []:
                    self._filters.append((spark_filter.attribute[0], operation, value))  # type: ignore[attr-defined]
            yield spark_filter


class TableReader(DataSourceReader):
    """Reads a table of any kind."""

    def __init__(self, options: dict[str, str], schema: StructType, info: TableInfo) -> None:
        self._ref = TableRef.of(options)
        self._info = info  # as it was planned
        self._schema = schema
        self._snapshot = options.get("snapshot", "")
        self._splits = whole_number(options, "splits", 0) if "splits" in options else None
        kind = kind_named(info.kind, info.name)
        self._start = kind.parse_key(options["start"]) if "start" in options else b""
        self._end = kind.parse_key(options["end"]) if "end" in options else None
        check_range(self._start, self._end)
        self._selector = options.get("selector")
        if self._selector is not None:
            as_selectable(kind, info).select_range(self._selector, 0, self._start, self._end)  # before any work
        self._plan = uuid.uuid4().hex
        self._filters: list[tuple[str, str, Any]] = []
        if choice(options, "pushdown", ("false", "true")) == "true":
            self.pushFilters = _Pushed(self._filters)  # type: ignore[method-assign]
            warn_if_off()

    def partitions(self) -> list[InputPartition]:
        ranges = self._ranges()
        if not ranges:
            return []
        partitions = partitions_of(self._info)
        key_ranges = [(partitions[shard], low, high) for shard, low, high in ranges]
        store = self._ref.store()
        port = store.snapshot(self._snapshot).port if self._snapshot else store.port
        if self._splits is None:
            cuts = port.cut_ranges(key_ranges, threads.cores(), TASK_BYTES_MIN, TASK_BYTES_MAX)
        else:
            cuts = port.cut_ranges(key_ranges, max(1, self._splits // len(partitions)) * len(ranges))
        tasks: list[InputPartition] = []
        for (shard, low, high), inner in zip(ranges, cuts, strict=True):
            tasks += map(KeyRangePartition, repeat(shard), [low, *inner], [*inner, high])
        return tasks

    def _ranges(self) -> list[tuple[int, bytes, bytes | None]]:
        """Return the keys to read, as (shard, start, end)."""
        info, port = self._info, self._ref.store().port
        kind = kind_named(info.kind, info.name)
        ranges: list[tuple[int, bytes, bytes | None]] = []
        for shard in range(info.shards):
            low, high = kind.key_range(self._filters, info, shard, port)
            low, high = max(low, self._start), _least(high, self._end)
            if high is None or low < high:
                ranges.append((shard, low, high))
        return ranges

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, KeyRangePartition):
            return iter(())  # Spark makes its own for a table without ranges
        snapshot = self._moment()
        info = snapshot.info(self._ref.table)
        if info.table_id != self._info.table_id:  # the ranges are of the old table's shards: some rows would be missed
            raise NotFound(
                f"table {info.name} was dropped and made again since this DataFrame was planned: load it again"
            )
        kind = kind_named(info.kind, info.name)
        batches = self._batches(snapshot, kind, partitions_of(info)[partition.shard], partition)
        typed = (
            kind.to_table_schema(batch, info.options, partition.shard)
            for batch in renewing(batches, self._ref, snapshot)
        )
        return for_spark(typed, self._schema, self._filters)

    def _moment(self) -> RemoteSnapshot:
        """Return the snapshot that all tasks of this query read."""
        store = self._ref.store()
        if self._snapshot:
            return store.snapshot(self._snapshot)
        return store.query_snapshot(self._query(), lease_s=LEASE_S)

    def _query(self) -> str:
        """Return the name of this task's query; outside SQL, of its stage."""
        context = TaskContext.get()
        if context is None:
            return f"{self._plan}-{threads.process_id()}"
        number, app = context.getLocalProperty("spark.sql.execution.id"), context.getLocalProperty("spark.app.id")
        return f"{self._plan}-stage-{context.stageId()}" if number is None or app is None else f"{app}-{number}"

    def _batches(
        self, snapshot: RemoteSnapshot, kind: Kind, number: PartitionId, key_range: KeyRangePartition
    ) -> Iterator[Any]:
        """Yield the range's record batches: from the files if this process sees them, otherwise from the owner."""
        root, identity = self._ref.root, self._ref.store().identity
        if self._selector is not None:
            info = self._info
            query = as_selectable(kind, info).select_range(
                self._selector, key_range.shard, key_range.start, key_range.end
            )
            yield from snapshot.port.query(info, *query)
        elif root is not None and isinstance(kind, FileReadable):
            columns = frozenset(self._schema.names)
            for piece in snapshot.port.pieces(number, 1, key_range.start, key_range.end):
                batches = kind.read_piece(piece, root, identity, columns) if piece.detail else None
                yield from snapshot.read(piece) if batches is None else batches
        else:
            yield from snapshot.port.scan_arrow(number, key_range.start, key_range.end)


def renewing(batches: Iterator[Any], ref: TableRef, snapshot: RemoteSnapshot) -> Iterator[Any]:
    """Yield what a task makes by itself of a query's snapshot, and renew that one's lease meanwhile.

    Otherwise the tasks that begin after a long one would find it closed.
    """
    renewed_s = clock.monotonic_s()
    for batch in batches:
        yield batch
        if clock.monotonic_s() > renewed_s + RENEW_S:
            ref.store().snapshot(snapshot.id)  # renews the lease
            renewed_s = clock.monotonic_s()


def _least(one: bytes | None, other: bytes | None) -> bytes | None:
    """Return the lower of two ends, where None is past everything."""
    return other if one is None else one if other is None else min(one, other)


def warn_if_off() -> None:
    """Warn once per process if the session does not push filters down: everything is read then."""
    frame: Any = sys._getframe(1)
    while frame is not None and "enable_pushdown" not in frame.f_locals:
        frame = frame.f_back
    if frame is not None and not frame.f_locals["enable_pushdown"] and not _warned:
        _warned.append(True)
        print(f"penstock: filters are not pushed down, set {PUSHDOWN}=true to read less", file=sys.stderr)


def whole_number(options: dict[str, str], name: str, default: int) -> int:
    """Return an option that is a positive integer."""
    text = options.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not 0 < len(text) <= DIGITS_MAX or int(text) < 1:
        raise Invalid(f"option {name} is {in_short(text)}: give a whole number above 0")
    return int(text)
