"""Batch reads: the planner cuts a table into ranges; the tasks of a query read them in one snapshot, which they share.

Options: `table`; `start` and `end` (keys of a kv table as text or 0x..., sequences of a queue), `splits` (about how
many tasks), `snapshot` (the id of a snapshot that somebody holds, for several reads at one LSN), `pushdown`.

Spark plans a DataFrame once and keeps the plan for all queries on it, and the filters that one of them pushed down.
So the ranges of a plan hold at any time, the snapshot is taken by the first task of each query, and filters narrow
what is read only where that was asked for, of a DataFrame that is used once.

Thread: `partitions` in Spark's planner, `read` in its tasks.
Invariants: (1) all tasks of a query read one LSN. (2) a filter is left to Spark as well: here it only saves work.
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
from penstock.kinds import FileReadable, Kind, partitions_of
from penstock.partition.ledger import TableInfo
from penstock.registry import kind_named
from penstock.spark.arrow import for_spark
from penstock.spark.table_ref import TableRef, check_range

clock = SystemClock()
TASK_BYTES_MIN, TASK_BYTES_MAX = 16 << 20, 256 << 20  # what a task reads, where nobody says how many there are
LEASE_S = 300.0  # of a query's snapshot, since a task used it
RENEW_S = 2.0  # a task that reads files by itself tells the owner so often that it does
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
OPERATIONS = {EqualTo: "=", GreaterThan: ">", GreaterThanOrEqual: ">=", LessThan: "<", LessThanOrEqual: "<=", In: "in"}
DIGITS_MAX = 18  # of a number in an option: messages carry 64 bits
_warned: list[bool] = []


class KeyRangePartition(InputPartition):
    """A range of keys of one shard, for one task."""

    def __init__(self, shard: int, start: bytes, end: bytes | None) -> None:
        super().__init__(None)
        self.shard, self.start, self.end = shard, start, end


class _Pushed:
    """Takes filters from sessions that push them down.

    Spark calls `reader.pushFilters` where that is on; where it is off, it refuses readers whose method is their own. So
    this stands in the method's place, and shows Spark's own function to who asks whether there is another.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, wanted: list[tuple[str, str, Any]]) -> None:
        self._wanted = wanted

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        """Remember what narrows the range to be read, and leave every filter to Spark as well."""
        for found in filters:
            operation = OPERATIONS.get(type(found))
            if operation is not None and len(found.attribute) == 1:  # type: ignore[attr-defined]
                value = found.value  # type: ignore[attr-defined]
                value = [one for one in value if one is not None] if operation == "in" else value
                if value is not None and value != []:
                    self._wanted.append((found.attribute[0], operation, value))  # type: ignore[attr-defined]
            yield found


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
        self._plan = uuid.uuid4().hex
        self._wanted: list[tuple[str, str, Any]] = []
        if choice(options, "pushdown", ("false", "true")) == "true":
            self.pushFilters = _Pushed(self._wanted)  # type: ignore[method-assign]
            warn_if_off()

    def partitions(self) -> list[InputPartition]:
        ranges = self._ranges()
        if not ranges:
            return []
        partitions = partitions_of(self._info)
        wanted = [(partitions[shard], low, high) for shard, low, high in ranges]
        store = self._ref.store()
        port = store.snapshot(self._snapshot).port if self._snapshot else store.port
        if self._splits is None:
            cuts = port.cut_ranges(wanted, threads.cores(), TASK_BYTES_MIN, TASK_BYTES_MAX)
        else:
            cuts = port.cut_ranges(wanted, max(1, self._splits // len(partitions)) * len(ranges))
        found: list[InputPartition] = []
        for (shard, low, high), inner in zip(ranges, cuts, strict=True):
            found += map(KeyRangePartition, repeat(shard), [low, *inner], [*inner, high])
        return found

    def _ranges(self) -> list[tuple[int, bytes, bytes | None]]:
        """(shard, start, end): the keys to be read."""
        info, port = self._info, self._ref.store().port
        kind = kind_named(info.kind, info.name)
        ranges: list[tuple[int, bytes, bytes | None]] = []
        for shard in range(info.shards):
            low, high = kind.key_range(self._wanted, info, shard, port)
            low, high = max(low, self._start), _least(high, self._end)
            if high is None or low < high:
                ranges.append((shard, low, high))
        return ranges

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, KeyRangePartition):
            return iter(())  # Spark makes one for a table without ranges
        snapshot = self._moment()
        info = snapshot.info(self._ref.table)
        if info.table != self._info.table:  # its ranges are of other shards: some rows would be left out
            raise NotFound(
                f"table {info.name} was dropped and made again since this DataFrame was planned: load it anew"
            )
        kind = kind_named(info.kind, info.name)
        batches = self._batches(snapshot, kind, partitions_of(info)[partition.shard], partition)
        shown = (
            kind.to_table_schema(batch, info.options, partition.shard) for batch in self._renewed(batches, snapshot)
        )
        return for_spark(shown, self._schema, self._wanted)

    def _moment(self) -> RemoteSnapshot:
        """The snapshot that all tasks of this query read."""
        store = self._ref.store()
        if self._snapshot:
            return store.snapshot(self._snapshot)
        return store.query_snapshot(self._query(), lease_s=LEASE_S)

    def _query(self) -> str:
        """The name of the query that this task works for; outside SQL, of its stage."""
        context = TaskContext.get()
        if context is None:
            return f"{self._plan}-{threads.process_id()}"
        number, app = context.getLocalProperty("spark.sql.execution.id"), context.getLocalProperty("spark.app.id")
        return f"{self._plan}-stage-{context.stageId()}" if number is None or app is None else f"{app}-{number}"

    def _batches(
        self, snapshot: RemoteSnapshot, kind: Kind, number: PartitionId, wanted: KeyRangePartition
    ) -> Iterator[Any]:
        """The range's record batches: out of the files if this process sees them, otherwise from the owner."""
        root, identity = self._ref.root, self._ref.store().identity
        if root is not None and isinstance(kind, FileReadable):
            for piece in snapshot.port.pieces(number, 1, wanted.start, wanted.end):
                batches = kind.read_piece(piece, root, identity) if piece.detail else None
                yield from snapshot.read(piece) if batches is None else batches
        else:
            yield from snapshot.port.scan_arrow(number, wanted.start, wanted.end)

    def _renewed(self, batches: Iterator[Any], snapshot: RemoteSnapshot) -> Iterator[Any]:
        """The batches; the snapshot is kept while they are read."""
        told_s = clock.monotonic_s()
        for batch in batches:
            yield batch
            if clock.monotonic_s() > told_s + RENEW_S:
                self._ref.store().snapshot(snapshot.id)  # to ask for it is to use it
                told_s = clock.monotonic_s()


def _least(one: bytes | None, other: bytes | None) -> bytes | None:
    """The lower end of two, where None is past everything."""
    return other if one is None else one if other is None else min(one, other)


def warn_if_off() -> None:
    """One warning for each process if the session does not push filters down: everything is read then."""
    frame: Any = sys._getframe(1)
    while frame is not None and "enable_pushdown" not in frame.f_locals:
        frame = frame.f_back
    if frame is not None and not frame.f_locals["enable_pushdown"] and not _warned:
        _warned.append(True)
        print(f"penstock: filters are not pushed down, set {PUSHDOWN}=true to read less", file=sys.stderr)


def whole_number(options: dict[str, str], name: str, default: int) -> int:
    """An option that counts something."""
    text = options.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not 0 < len(text) <= DIGITS_MAX or int(text) < 1:
        raise Invalid(f"option {name} is {in_short(text)}: give a whole number above 0")
    return int(text)


def choice(options: dict[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """An option that is one of some words; the first of them if it is not given."""
    found = options.get(name, allowed[0])
    if found not in allowed:
        raise Invalid(f"option {name} is {found!r}: use one of {', '.join(allowed)}")
    return found
