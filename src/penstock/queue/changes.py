"""The change feed of a queue: its files are its history, so that the feed costs a small record for each trim.

An insert is a message as it lies in the files, under the LSN of its record. A trim deletes: in a queue with a feed it
is a record of the files, too, before the messages of its LSN. The files stay until neither the
queue nor its feed needs them. A message trimmed by the same record that put it was never visible, and is not in the
feed.

What retention trims is a floor, an LSN, in the memory of the shard; it is committed with its progress, and before
files go.

Thread: `QueueFeed` by the thread that maintains feeds; views from any.
Invariant: the files have every record of messages and trims above the floor, and, with preimages, every message that
such a trim deleted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from penstock.errors import CorruptionError, UnsupportedVersion
from penstock.kinds.changes import INSERT, REMOVAL, ChangeOptions
from penstock.log.record import Index, Record
from penstock.lsm.rows import fixed_array
from penstock.queue.coding import PREFIX
from penstock.queue.files import KIND_MESSAGES, KIND_TRIM, decode_trim
from penstock.queue.headers import HEADERS
from penstock.queue.messages import TIME, decode_batch
from penstock.queue.options import decode_queue_options
from penstock.queue.persistent import PersistentQueue

DELETED_ROWS = 65_536  # in one part of a long trim
STEP_BYTES = 256 << 20  # of the files that one step of retention reads
_INSERTED, _DELETED, _DELETED_ROWS = range(3)  # forms of a part
_HEADER = struct.Struct("<BxxxIQQQ")  # form, shard, sequence of the record, and the messages [low, high) of the part
assert _HEADER.size == 32


class FeedFloor(NamedTuple):
    """Where a feed begins, after retention."""

    lsn: int = 0  # changes of commits up to this LSN were trimmed
    first: int = 1  # the first message of the queue as of that LSN


class QueueFeed:
    """The retention of the change feed of a shard."""

    def __init__(self, options: ChangeOptions, floor: FeedFloor) -> None:
        self.options = options
        self.floor = floor  # replaced whole
        self.committed = floor  # guarded by the lock of the shard

    def maintain(self, queue: PersistentQueue, lsn: int, now_us: int) -> None:
        """Trim what is too old or too much, of commits up to `lsn`. Requires: the files stay meanwhile."""
        age_s, bytes_max = self.options.age_s, self.options.bytes_max
        oldest_us = 0 if age_s is None else now_us - int(age_s * 1e6)
        floor, begin = self.floor, 0
        for left, record in queue.changes(floor.lsn + 1):
            at, time_us, _, _, _ = PREFIX.unpack_from(record.body)
            begin = begin or left
            if at > lsn or begin - left > STEP_BYTES:
                break
            if at != floor.lsn and time_us >= oldest_us and (bytes_max is None or left <= bytes_max):
                break
            floor = FeedFloor(at, decode_trim(record)[1] if record.kind == KIND_TRIM else floor.first)
        self.floor = floor

    def needed_from(self, queue: PersistentQueue) -> int:
        """Return the first message whose file the feed needs."""
        since = queue.first_since(self.floor.lsn + 1)
        return min(since, self.floor.first) if self.options.preimages else since


class QueueFeedView:
    """The change feed of a shard as of one LSN; read while the snapshot of the shard is open."""

    def __init__(
        self, queue: Callable[[], PersistentQueue], shard: int, feed: QueueFeed, *, lsn: int, last: int
    ) -> None:
        self._queue = queue
        self._shard = shard
        self._preimages = feed.options.preimages
        self._lsn = lsn
        self.floor = feed.floor.lsn
        self.last = max(last, self.floor)  # the LSN of the last change, or a later one

    def parts(self, start: int, end: int) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield (lsn, time, rows, data) of each part of the commits [start, end)."""
        end, trimmed = min(end, self._lsn + 1), (0, 0)  # the last trim: its LSN, and the first message after it
        if start >= end:
            return
        for _, record in self._queue().changes(start):
            lsn, time_us, count, _, _ = PREFIX.unpack_from(record.body)
            if lsn >= end:
                return
            if record.kind == KIND_TRIM:
                low, before = decode_trim(record)
                trimmed = lsn, before
                for high, data in self._deleted(low, min(before, record.index)):
                    yield lsn, time_us, high - low, data
                    low = high
                continue
            low = max(record.index, trimmed[1] if trimmed[0] == lsn else 0)
            high = record.index + count
            if low < high:
                yield lsn, time_us, high - low, self._part(_INSERTED, low, high, record)

    def _deleted(self, low: int, high: int) -> Iterator[tuple[int, bytes]]:
        """Yield the parts of a trim of the messages [low, high), each with the first message after it."""
        if self._preimages:
            for record in self._queue().message_records(low, high):
                end = min(high, record.index + PREFIX.unpack_from(record.body)[2])
                yield end, self._part(_DELETED_ROWS, low, end, record)
                low = end
            return
        while low < high:
            end = min(high, low + DELETED_ROWS)
            yield end, self._part(_DELETED, low, end, None)
            low = end

    def _part(self, form: int, low: int, high: int, record: Record | None) -> bytes:
        header = _HEADER.pack(form, self._shard, 0 if record is None else record.index, low, high)
        return header if record is None else header + self._queue().opened(record)

    def close(self) -> None:
        """Do nothing: the snapshot of the shard keeps the files."""


def change_schema(options: bytes) -> pa.Schema:
    """Return the columns of a queue in its change feed. A delete without preimages has shard and sequence alone."""
    columns = [
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("sequence", pa.int64(), nullable=False),
        pa.field("timestamp", TIME),
        pa.field("key", pa.binary()),
        pa.field("payload", pa.binary()),
    ]
    return pa.schema([*columns, pa.field("headers", HEADERS)] if decode_queue_options(options).headers else columns)


def read_changes(data: bytes, options: bytes) -> tuple[bytes, pa.RecordBatch]:
    """Decode a part: the type of each change, and the messages."""
    schema = change_schema(options)
    try:
        form, shard, index, low, high = _HEADER.unpack_from(data)
        if form > _DELETED_ROWS or not low < high:
            raise ValueError(f"it has the form {form}")
        count = high - low
        kinds = bytes([INSERT if form == _INSERTED else REMOVAL]) * count
        shards = fixed_array(pa.int32(), np.full(count, shard, np.int32))
        if form == _DELETED:
            sequences = fixed_array(pa.int64(), np.arange(low, high, dtype=np.int64))
            absent = [pa.nulls(count, field.type) for field in list(schema)[2:]]
            return kinds, pa.record_batch([shards, sequences, *absent], schema=schema)
        record = Record(Index(index), 1, Index(0), KIND_MESSAGES, 0, data[_HEADER.size :])
        rows = decode_batch(record, path="a change feed", offset=0).slice(low, high)
        if len(rows) != count:
            raise ValueError(f"it has {len(rows)} messages, not {count}")
    except (ValueError, struct.error, UnsupportedVersion) as error:
        raise CorruptionError("a change feed", 0, f"changes of a queue do not decode ({error})") from None
    batch = rows.record_batch(headers="headers" in schema.names)
    columns = [batch.column(0).cast(pa.int64()), *batch.columns[1:]]
    return kinds, pa.record_batch([shards, *columns], schema=schema)
