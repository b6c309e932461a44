"""The streaming source: the messages of a queue, by shard and sequence.

Options: `table`; `start`: "earliest" (default), "latest", "consumer:NAME", "time:MICROSECONDS", a sequence, or
sequences by shard as JSON; `maxrows` and `maxbytes` of a micro-batch; `onloss`: "fail" (default) or "skip", when
messages were trimmed before they were read.

Thread: Spark's; offsets are asked for in a process of Spark's, `read` runs in its tasks.
Invariant: an offset says for each shard the sequence of the next message, so a batch is [start, end) of every shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.errors import NotFound
from penstock.kinds import StreamSource, as_streamable, partitions_of
from penstock.spark.arrow import for_spark
from penstock.spark.place import StoreLocation
from penstock.spark.reading import choice, whole_number

Offset = dict[str, int]  # by shard, in text: JSON has no other keys
SPLIT_ROWS = 250_000  # a shard with more messages in a batch is read by several tasks


class OffsetPartition(InputPartition):
    """Messages for one task."""

    def __init__(self, shard: int, start: int, end: int) -> None:
        super().__init__(None)
        self.shard, self.start, self.end = shard, start, end


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a table that hands out offsets."""

    def __init__(self, options: dict[str, str], schema: StructType) -> None:
        self._place = StoreLocation.of(options)
        self._schema = schema
        self._start = options.get("start", "earliest")
        self._rows_max = whole_number(options, "maxrows", 0) if "maxrows" in options else None
        self._bytes_max = whole_number(options, "maxbytes", 0) if "maxbytes" in options else None
        self._skips = choice(options, "onloss", ("fail", "skip")) == "skip"
        self._last: Offset | None = None  # where an availableNow run ends
        self._source()  # one clear line now, if the table cannot be streamed

    def _source(self) -> StreamSource:
        return stream_source(self._place)

    def initialOffset(self) -> Offset:
        return _by_text(self._source().offsets(self._start))

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._rows_max is not None:
            return ReadMaxRows(self._rows_max)
        return ReadAllAvailable() if self._bytes_max is None else ReadMaxBytes(self._bytes_max)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        rows = None if isinstance(limit, ReadAllAvailable) else self._rows_max
        size = None if isinstance(limit, ReadAllAvailable) else self._bytes_max
        source = self._source()
        begin = self._checked(source, _by_shard(start))
        end = source.advanced(begin, rows, size)
        if self._last is not None:
            end = {shard: max(begin[shard], min(place, self._last[str(shard)])) for shard, place in end.items()}
        return _by_text(end)

    def reportLatestOffset(self) -> Offset:
        return _by_text(self._source().offsets("latest"))

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self.reportLatestOffset()

    def _checked(self, source: StreamSource, start: dict[int, int]) -> dict[int, int]:
        """Where reading can begin; an error if what comes next was trimmed, unless that is to be skipped."""
        first = source.offsets("earliest")
        lost = {shard: place for shard, place in start.items() if place < first[shard]}
        if lost and not self._skips:
            raise NotFound(
                f"messages of {self._place.table} were trimmed before they were read (shards at {lost}, now {first}): "
                "keep them longer, or go on without them by .option('onloss', 'skip')"
            )
        return {shard: max(place, first[shard]) for shard, place in start.items()}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        source, found = self._source(), list[InputPartition]()
        for shard, low in self._checked(source, _by_shard(start)).items():
            high = end[str(shard)]
            for at in range(low, high, SPLIT_ROWS):
                found.append(OffsetPartition(shard, at, min(high, at + SPLIT_ROWS)))
        return found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, OffsetPartition)
        kind, info = self._place.kind()
        number, key = partitions_of(info)[partition.shard], as_streamable(kind, info).sequence_key
        low, high = key(partition.start), key(partition.end)
        batches = self._place.store()._port.scan_arrow(number, low, high)
        shown = (kind.shown(batch, info.options, partition.shard) for batch in batches)
        return for_spark(self._whole(shown, partition), self._schema)

    def _whole(self, batches: Iterator[Any], wanted: OffsetPartition) -> Iterator[Any]:
        """The batches, if they hold every message: a retention may have been faster."""
        found = 0
        for batch in batches:
            found += batch.num_rows
            yield batch
        if found != wanted.end - wanted.start and not self._skips:
            raise NotFound(
                f"messages [{wanted.start}, {wanted.end}) of shard {wanted.shard} of {self._place.table} were trimmed "
                "while they were read: keep them longer, or skip by .option('onloss', 'skip')"
            )

    def commit(self, end: Offset) -> None:
        """Not an acknowledgement: Spark does not call it for the last batch."""

    def stop(self) -> None:
        """Nothing is held."""


def stream_source(place: StoreLocation) -> StreamSource:
    """Return the table of a location as streams read it; `KindMismatch` if it cannot be streamed."""
    kind, info = place.kind()
    return as_streamable(kind, info).source(place.store()._port, info)


def _by_text(places: dict[int, int]) -> Offset:
    return {str(shard): place for shard, place in places.items()}


def _by_shard(offset: Offset) -> dict[int, int]:
    return {int(shard): place for shard, place in offset.items()}


def start_option(places: dict[int, int]) -> str:
    """The option `start` for exact places."""
    return json.dumps(_by_text(places))
