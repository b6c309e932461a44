"""Batch reads of a change feed: the commits after one LSN up to another, a task for each shard.

Options: `table`; `changes`: "true"; `after`: an LSN, after which the commits begin (by default with the first that is
kept); `until`: the LSN of the last commit (by default the last when the DataFrame is planned); `snapshot`: the id of an
open snapshot.

Thread: `partitions` in Spark's planner, `read` in its tasks.
Invariant: the commits of a plan are fixed: all queries on a DataFrame see the same, or `NotFound` if some were trimmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from penstock.arguments import in_short
from penstock.errors import Invalid, NotFound
from penstock.kinds.change_reading import BOUNDS, check_after, encode_request
from penstock.kinds.changes import CHANGES
from penstock.kinds.port import Reading
from penstock.partition.ledger_records import TableInfo
from penstock.spark.arrow import for_spark
from penstock.spark.table_ref import TableRef

DIGITS_MAX = 18


class CommitRange(InputPartition):
    """The commits [start, end) of a shard, for one task."""

    def __init__(self, shard: int, start: int, end: int) -> None:
        super().__init__(None)
        self.shard, self.start, self.end = shard, start, end


class ChangesReader(DataSourceReader):
    """Reads the change feed of a table."""

    def __init__(self, options: dict[str, str], schema: StructType, info: TableInfo) -> None:
        self._ref = TableRef.of(options)
        self._info = info
        self._schema = schema
        self._snapshot = options.get("snapshot", "")
        self._after, self._until = _lsn(options, "after"), _lsn(options, "until")
        check_after(info, self._after)
        if self._after is not None and self._until is not None and self._until < self._after:
            raise Invalid(f"after ({self._after}) is above until ({self._until}): exchange them")

    def _reading(self) -> Reading:
        store = self._ref.store()
        return store.snapshot(self._snapshot).port if self._snapshot else store.port

    def partitions(self) -> list[InputPartition]:
        reading, shards = self._reading(), range(self._info.shards)
        start = 0 if self._after is None else self._after + 1
        nothing = encode_request([(shard, start, start) for shard in shards])
        for _ in reading.query(self._info, CHANGES, nothing):  # raises if the commits after `after` are not all there
            pass
        (bounds,) = reading.query(self._info, BOUNDS, b"")
        floors, lasts = bounds.column("floor").to_pylist(), bounds.column("last").to_pylist()
        ends = [last + 1 if self._until is None else min(last, self._until) + 1 for last in lasts]
        starts = [start or floor + 1 for floor in floors]
        return [CommitRange(shard, starts[shard], ends[shard]) for shard in shards if starts[shard] < ends[shard]]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, CommitRange):
            return iter(())  # Spark makes its own for a feed without commits
        reading = self._reading()
        info = reading.table(self._info.name)
        if info is None or info.table_id != self._info.table_id:
            raise NotFound(f"table {self._info.name} was dropped since this DataFrame was planned: load it again")
        request = encode_request([(partition.shard, partition.start, partition.end)])
        return for_spark(reading.query(info, CHANGES, request), self._schema)


def _lsn(options: dict[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is not None and not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        raise Invalid(f"option {name} is {in_short(text)}: give an LSN, as in the column _commit_version")
    return None if text is None else int(text)
