"""The reading side of a queue's API, over a port: live, or in a snapshot.

Thread: any number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.arguments import whole
from penstock.errors import NotFound
from penstock.journal.partitions import PartitionId
from penstock.kinds import ReadableTable, Reading
from penstock.lsm.rows import bytes_list, fixed_array
from penstock.queue.changes import change_schema
from penstock.queue.headers import HEADERS, dicts
from penstock.queue.machine import KEY
from penstock.queue.messages import TIME
from penstock.queue.options import feed_options, has_headers

TABLE_SCHEMA = pa.schema(
    [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("timestamp", TIME, nullable=False),
        pa.field("key", pa.binary()),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)
SCHEMA_WITH_HEADERS = TABLE_SCHEMA.append(pa.field("headers", HEADERS))


def table_schema(options: bytes) -> pa.Schema:
    """Return the schema of a queue with these options."""
    return SCHEMA_WITH_HEADERS if has_headers(options) else TABLE_SCHEMA


class Message(NamedTuple):
    """A message that was read.

    >>> store.queue("events").read()[0].payload
    b'hello'
    """

    shard: int
    sequence: int
    time_us: int
    key: bytes | None
    payload: bytes
    headers: dict[str, bytes] | None = None  # None: it has none


def in_table_schema(batch: Any, shard: int, schema: pa.Schema = TABLE_SCHEMA) -> Any:
    """Add the shard column to a record batch of a shard; headers are there if `schema` has them."""
    count = batch.num_rows
    columns = [
        fixed_array(pa.int32(), np.full(count, shard, np.int32)),
        batch.column("sequence").cast(pa.int64()),
        batch.column("time"),
        batch.column("key"),
        batch.column("payload"),
    ]
    if len(schema) > len(columns):
        columns.append(batch.column("headers") if "headers" in batch.schema.names else pa.nulls(count, HEADERS))
    return pa.record_batch(columns, schema=schema)


class QueueView(ReadableTable):
    """A read-only queue, live or in a snapshot.

    >>> with store.snapshot() as snapshot:
    ...     snapshot.queue("events").to_arrow().num_rows
    1
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {self.shards} {'shard' if self.shards == 1 else 'shards'}>"

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema: shard, sequence, timestamp, key, payload, and headers if the queue takes them."""
        return table_schema(self._info.options)

    def _change_schema(self) -> pa.Schema | None:
        options = self._info.options
        return None if feed_options(options) is None else change_schema(options)

    def _partition(self, shard: int) -> PartitionId:
        return self._partitions[whole(shard, f"a shard of queue {self.name}", 0, self.shards - 1)]

    def read(self, shard: int | None = None, from_sequence: int = 1, limit: int = 1_000) -> list[Message]:
        """Return up to `limit` messages from a sequence or (1) the oldest, of one shard or of all, one after the other.

        `NotFound` if the message `from_sequence` was trimmed.

        >>> [message.payload for message in events.read(limit=10)]
        [b'hello']
        """
        messages: list[Message] = []
        with self._moment(shard) as (reading, shards):
            for number in shards:
                messages += self._read(reading, number, _whole(from_sequence), _whole(limit) - len(messages))
        return messages

    @contextmanager
    def _moment(self, shard: int | None) -> Iterator[tuple[Reading, Sequence[int]]]:
        """Provide what a shard, or all of them at one LSN, are read from, and their numbers."""
        if shard is not None or self.shards == 1:
            self._partition(0 if shard is None else shard)
            yield self._reading, [0 if shard is None else shard]
        else:
            with self._reading.moment(self._partitions) as moment:
                yield moment, range(self.shards)

    def _read(self, reading: Reading, shard: int, from_sequence: int, limit: int) -> list[Message]:
        start, partition = max(1, from_sequence), self._partition(shard)
        while True:
            messages: list[Message] = []
            for batch in reading.scan_arrow(partition, _key(start), _key(start + limit)):
                messages += _messages(batch, shard)
            if limit == 0 or (messages and messages[0].sequence == start):
                return messages
            first = _first_from(reading, partition, start)
            if first is None or first == start:  # there is none, or it has just arrived
                return messages
            if from_sequence > 1:
                raise NotFound(f"message {from_sequence} was trimmed: shard {shard} begins at {first}")
            start = first

    def scan_arrow(
        self, shard: int | None = None, from_sequence: int = 1, to_sequence: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Return record batches in the table's schema, of one shard or of all.

        >>> [batch.num_rows for batch in events.scan_arrow(shard=0)]
        [1]
        """
        start, end = _key(from_sequence), None if to_sequence is None else _key(to_sequence)
        schema = self.schema
        with self._moment(shard) as (reading, shards):
            for number in shards:
                for batch in reading.scan_arrow(self._partition(number), start, end):
                    yield in_table_schema(batch, number, schema)

    def read_arrow(self, shard: int | None = None, from_sequence: int = 1, to_sequence: int | None = None) -> pa.Table:
        """Return messages as an Arrow table.

        >>> events.read_arrow(shard=0, from_sequence=1, to_sequence=2).num_rows
        1
        """
        schema = self.schema
        return pa.Table.from_batches(list(self.scan_arrow(shard, from_sequence, to_sequence)), schema)

    def to_arrow(self) -> pa.Table:
        """Return all messages as an Arrow table.

        >>> events.to_arrow().column("payload").to_pylist()
        [b'hello']
        """
        return self.read_arrow()


def _whole(number: Any) -> int:
    return whole(number, "a sequence or a limit")


def _key(sequence: Any) -> bytes:
    return KEY.pack(min(_whole(sequence), (1 << 64) - 1))


def _first_from(reading: Reading, partition: PartitionId, start: int) -> int | None:
    """Return the sequence of the first message at or after `start`; None if there is none."""
    batches = reading.scan_arrow(partition, _key(start), None)
    return next((batch.column("sequence")[0].as_py() for batch in batches), None)


def _messages(batch: Any, shard: int) -> Iterator[Message]:
    times = batch.column("time").cast(pa.int64()).to_pylist()
    sequences, keys = batch.column("sequence").to_pylist(), batch.column("key").to_pylist()
    headers = (dicts(batch.column("headers")),) if "headers" in batch.schema.names else ()
    payloads = bytes_list(batch.column("payload"))
    return map(Message, itertools.repeat(shard), sequences, times, keys, payloads, *headers)
