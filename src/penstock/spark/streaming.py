"""The streaming source: the messages of a queue by shard and sequence, or the change feed of a table by shard and LSN.

Options: `table`; `start`: "earliest" (default), "latest", "consumer:NAME", "time:MICROSECONDS" (of a queue), a sequence
or LSN, or these by shard as JSON; `maxrows` and `maxbytes` of a micro-batch; `onloss`: "fail" (default) or "skip", when
messages were trimmed before they were read; `changes`: "true" for the change feed of a table.

Thread: Spark's; a process of Spark's calls for offsets, `read` runs in its tasks.
Invariants: (1) an offset holds the sequence of the next message of each shard, so a batch is [start, end) of every
shard. (2) a batch costs one request to plan and one or more pages of each shard to read: the reply to `latestOffset`
also serves Spark's next calls, and tasks get the table with their work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import KindMismatch, NotFound
from penstock.feeds import FeedStream, stream_of
from penstock.kinds import Streamable, partitions_of
from penstock.partition.ledger_records import TableInfo
from penstock.registry import kind_named
from penstock.spark.arrow import for_spark
from penstock.spark.reading import whole_number
from penstock.spark.table_ref import TableRef, choice

Offset = dict[str, int]  # by shard, as text since JSON has no other keys; and the table's id, under TABLE
TABLE = "table"
SPLIT_ROWS = 250_000  # a shard with more messages in a batch is read by several tasks
TASK_ROWS = 2_000  # a batch of at most this many messages is read by one task, in one request


class ShardRange(NamedTuple):
    """The messages [start, end) of a shard."""

    shard: int
    start: int
    end: int


class OffsetPartition(InputPartition):
    """Messages for one task."""

    def __init__(self, table: TableInfo, ranges: list[ShardRange]) -> None:
        super().__init__(None)
        self.table, self.ranges = table, ranges


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a table that has offsets."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._ref = TableRef.of(options)
        self._schema = schema
        self._start = options.get("start", "earliest")
        self._rows_max = whole_number(options, "maxrows", 0) if "maxrows" in options else 0
        self._bytes_max = whole_number(options, "maxbytes", 0) if "maxbytes" in options else 0
        self._skips = choice(options, "onloss", ("fail", "skip")) == "skip"
        self._last: Offset | None = None  # where an availableNow run ends
        self._state = self._ref.source_state()  # the last reply; raises now if the table cannot be streamed
        if isinstance(self._stream(self._state.table), FeedStream) and not self._ref.changes:
            raise KindMismatch(
                f"table {self._ref.table} is streamed by its change feed: add .option('changes', 'true')"
            )

    def _stream(self, info: TableInfo) -> Streamable:
        return stream_of(info, changes=self._ref.changes)

    def initialOffset(self) -> Offset:
        self._state = self._ref.source_state(begin=self._start)
        return self._offset(self._state.position)

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._rows_max:
            return ReadMaxRows(self._rows_max)
        return ReadMaxBytes(self._bytes_max) if self._bytes_max else ReadAllAvailable()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        limits = (0, 0) if isinstance(limit, ReadAllAvailable) else (self._rows_max, self._bytes_max)
        self._state = self._ref.source_state(_by_shard(start), *limits)
        begin, end = self._checked(start), self._state.end
        if self._last is not None:
            end = {shard: max(begin[shard], min(sequence, self._last[str(shard)])) for shard, sequence in end.items()}
        return self._offset(end)

    def reportLatestOffset(self) -> Offset:
        """Return the latest offset of the last reply: Spark calls this after `latestOffset`, for its progress."""
        return self._offset(self._state.latest)

    def prepareForTriggerAvailableNow(self) -> None:
        self._state = self._ref.source_state()
        self._last = self.reportLatestOffset()

    def _offset(self, offsets: dict[int, int]) -> Offset:
        return {**_by_text(offsets), TABLE: self._state.table.table_id}

    def _checked(self, offset: Offset) -> dict[int, int]:
        """Return where reading can begin; `NotFound` if messages were trimmed, unless they are to be skipped.

        Also `NotFound` if the offset is of a queue that was dropped since: it means nothing in the new one.
        """
        start, first, latest = _by_shard(offset), self._state.earliest, self._state.latest
        table = self._state.table.table_id
        if (
            offset.get(TABLE, table) != table
            or start.keys() != latest.keys()
            or any(start[n] > latest[n] for n in start)
        ):
            raise NotFound(
                f"the stream is at {start}, and {self._ref.table} ends at {latest}: the queue was dropped and made "
                "again, or restored, since the checkpoint was made; delete the checkpoint, or give another start"
            )
        lost = {shard: sequence for shard, sequence in start.items() if sequence < first[shard]}
        if lost and not self._skips:
            raise NotFound(
                f"messages of {self._ref.table} were trimmed before they were read (shards at {lost}, now {first}): "
                "keep them longer, or go on without them by .option('onloss', 'skip')"
            )
        return {shard: max(sequence, first[shard]) for shard, sequence in start.items()}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the tasks of a batch. `read` notices messages that were trimmed since the last reply."""
        begin = self._checked(start)
        ranges = [ShardRange(shard, low, end[str(shard)]) for shard, low in begin.items() if low < end[str(shard)]]
        if isinstance(self._stream(self._state.table), FeedStream):
            return [OffsetPartition(self._state.table, [shard_range]) for shard_range in ranges]
        if 0 < sum(shard_range.end - shard_range.start for shard_range in ranges) <= TASK_ROWS:
            return [OffsetPartition(self._state.table, ranges)]
        return [
            OffsetPartition(self._state.table, [ShardRange(shard, at, min(high, at + SPLIT_ROWS))])
            for shard, low, high in ranges
            for at in range(low, high, SPLIT_ROWS)
        ]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, OffsetPartition)
        info = partition.table
        kind, partitions, stream = kind_named(info.kind, info.name), partitions_of(info), self._stream(info)
        if isinstance(stream, FeedStream):
            query = stream.range_query(partition.ranges, skip=self._skips)
            return for_spark(self._ref.store().port.query(info, *query), self._schema)
        key = stream.sequence_key
        key_ranges = [(partitions[shard], key(start), key(end)) for shard, start, end in partition.ranges]
        batches = self._whole(self._ref.store().port.scan_ranges(key_ranges), partition.ranges)
        typed = (kind.to_table_schema(batch, info.options, partition.ranges[number].shard) for number, batch in batches)
        return for_spark(typed, self._schema)

    def _whole(self, batches: Iterator[tuple[int, Any]], ranges: list[ShardRange]) -> Iterator[tuple[int, Any]]:
        """Yield the batches; `NotFound` if messages are missing: retention may have trimmed them."""
        missing = [end - start for _, start, end in ranges]
        for number, batch in batches:
            missing[number] -= batch.num_rows
            yield number, batch
        for (shard, start, end), count in zip(ranges, missing, strict=True):
            if count and not self._skips:
                raise NotFound(
                    f"messages [{start}, {end}) of shard {shard} of {self._ref.table} were trimmed while they were "
                    "read: keep them longer, or skip by .option('onloss', 'skip')"
                )

    def commit(self, end: Offset) -> None:
        """Not an acknowledgement: Spark does not call it for the last batch."""

    def stop(self) -> None:
        """Do nothing: there is nothing to release."""


def _by_text(offsets: dict[int, int]) -> Offset:
    return {str(shard): sequence for shard, sequence in offsets.items()}


def _by_shard(offset: Offset) -> dict[int, int]:
    return {int(shard): sequence for shard, sequence in offset.items() if shard != TABLE}


def start_option(offsets: dict[int, int]) -> str:
    """Return the option `start` for exact offsets."""
    return json.dumps(_by_text(offsets))
