"""Batches of messages as columns: as input, as the body of a record, and as read.

Thread: immutable values.
Invariant: the columns of one batch have equal length, and no payload is null.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.arguments import TIME_US_MAX, TIME_US_MIN
from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.log.record import Record
from penstock.lsm.rows import (
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    binary_array,
    binary_column,
    fixed_array,
    offsets_of,
)
from penstock.queue.coding import FLAGS_CODED, PREFIX, BodyCoding
from penstock.queue.headers import (
    HEADERS,
    check_column,
    column_of,
    columns_of,
    decode_columns,
    encoded_columns,
    from_arrow,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FLAG_TIMES = 1  # there is a column of times
_FLAG_KEYS = 2  # there is a column of keys
_FLAG_NULLS = 4  # and some messages have no key
FLAG_HEADERS = 8  # headers follow the payloads
FLAGS_KNOWN = 15
BATCH_BYTES_MAX = 64 << 20  # of keys and payloads in one call
BATCH_MESSAGES_MAX = 1 << 24  # in one call
# A message's own time is from the year 1 to 9999: Python and Spark support no other, and one message with another time
# would make the whole queue unreadable for them.
TIME_US_FIRST, TIME_US_END = TIME_US_MIN, TIME_US_MAX
_FEW = 16  # messages
_SOME = 4_096
COLUMNS = ("payload", "key", "timestamp", "headers")  # of messages that a user gives as a table
IGNORED = ("shard", "sequence")  # columns that messages have when they are read
_PADDING = tuple(bytes(n) for n in range(8))

TIME = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.uint64(), nullable=False),
        pa.field("time", TIME, nullable=False),
        pa.field("key", pa.binary(), nullable=True),
        pa.field("payload", pa.binary(), nullable=False),
    ]
)
SCHEMA_WITH_HEADERS = SCHEMA.append(pa.field("headers", HEADERS))


@dataclass(frozen=True, slots=True)
class Messages:
    """A batch of messages without sequences."""

    payloads: Any  # Arrow binary, no nulls
    keys: Any = None  # Arrow binary, null for a message without key; None if no message has one
    times: NDArray[np.int64] | None = None  # microseconds; None if all have the record's time
    headers: Any = None  # Arrow map, null for a message without headers; None if no message has any

    def __post_init__(self) -> None:
        count = len(self.payloads)
        for name, column in (("keys", self.keys), ("times", self.times), ("headers", self.headers)):
            if column is not None and len(column) != count:
                raise _lengths_differ(count, len(column), name)
        if self.payloads.null_count:
            raise Invalid("a payload is null: give empty bytes for an empty message")

    @classmethod
    def of(
        cls,
        payloads: Sequence[bytes],
        keys: Sequence[bytes | None] | None = None,
        times: Sequence[int] | NDArray[np.int64] | None = None,
        headers: Sequence[Mapping[str, bytes] | None] | None = None,
    ) -> Messages:
        """Build a batch from lists; the headers must have been checked."""
        column = None
        try:
            keys = None if keys is None else list(keys)
            if keys is not None:
                column = binary_column([b"" if key is None else key for key in keys])
                if None in keys:
                    valid = np.fromiter((key is not None for key in keys), bool, len(keys))
                    bitmap = pa.py_buffer(np.packbits(valid, bitorder="little"))
                    column = pa.Array.from_buffers(pa.binary(), len(keys), [bitmap, *column.buffers()[1:]])
            payloads = list(payloads)
            if headers is not None and len(headers) != len(payloads):  # their column is None if no message has any
                raise _lengths_differ(len(payloads), len(headers), "headers")
            return cls(
                binary_column(payloads),
                column,
                None if times is None else np.asarray(times, np.int64),
                None if headers is None else column_of(headers),
            )
        except Invalid:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise Invalid(f"payloads and keys must be bytes: {error}") from None

    @classmethod
    def from_arrow(cls, data: Any) -> Messages:
        """Build a batch from an Arrow array of payloads, or from a table of messages (`COLUMNS`).

        A column `time` is a column `timestamp`, and `shard` and `sequence` are ignored: what was read can be put.
        """
        if isinstance(data, (pa.Array, pa.ChunkedArray)):
            return cls(_binary(data))
        names = check_columns(data.schema.names, COLUMNS)
        times = None
        if (name := time_name(names)) is not None:
            column = data.column(name).cast(TIME)
            if column.null_count:
                raise Invalid("a message's time is null: leave the column out to take the record's time")
            times = _whole(column).view(pa.int64()).to_numpy()
        keys = _binary(data.column("key")) if "key" in names else None
        headers = from_arrow(data.column("headers")) if "headers" in names else None
        return cls(_binary(data.column("payload")), keys, times, headers)

    def __len__(self) -> int:
        return len(self.payloads)

    def check(self) -> int:
        """Return the size in bytes; `Invalid` if a message or the batch is too large, or a time out of range."""
        if self.times is not None and ((self.times < TIME_US_FIRST) | (self.times >= TIME_US_END)).any():
            raise Invalid("a message's time is in microseconds since 1970, from the year 1 to 9999")
        size = _checked_bytes(self.payloads, VALUE_BYTES_MAX, "payload")
        if self.keys is not None:
            size += _checked_bytes(self.keys, KEY_BYTES_MAX, "key")
        if self.headers is not None:
            size += check_column(self.headers)
        _check_count(len(self))
        if size > BATCH_BYTES_MAX and len(self) > 1:
            raise Invalid(
                f"a batch of messages has {size} bytes: at most {BATCH_BYTES_MAX} are allowed, give it in parts"
            )
        return size

    def slice(self, start: int, stop: int) -> Messages:
        """Return the messages [start, stop), without a copy."""
        return Messages(
            self.payloads[start:stop],
            None if self.keys is None else self.keys[start:stop],
            None if self.times is None else self.times[start:stop],
            None if self.headers is None else self.headers[start:stop],
        )

    def size_bytes(self) -> int:
        """Return the total size of all keys, payloads and headers."""
        size = 0 if self.headers is None else int(columns_of(self.headers).sizes().sum())
        for column in (self.payloads, self.keys):
            if column is not None:
                offsets = offsets_of(column)
                size += int(offsets[-1]) - int(offsets[0])
        return size

    def ends(self) -> NDArray[np.int64]:
        """Return, for each message, the size of all keys, payloads and headers up to its end."""
        total = np.zeros(len(self), np.int64)
        if self.headers is not None:
            total += np.cumsum(columns_of(self.headers).sizes())
        for column in (self.payloads, self.keys):
            if column is not None:
                offsets = offsets_of(column).astype(np.int64)
                total += offsets[1:] - offsets[0]
        return total

    def encode(self, *, lsn: int, time_us: int) -> bytes:
        """Encode the body of the record for this batch. Requires: `check` has passed."""
        flags = 0
        parts = [b""]  # the prefix, filled in when the flags are known
        if self.times is not None and (self.times != time_us).any():
            flags |= _FLAG_TIMES
            parts.append(self.times.astype("<i8", copy=False).tobytes())
        if self.keys is not None and self.keys.null_count < len(self):
            flags |= _FLAG_KEYS
            if self.keys.null_count:
                flags |= _FLAG_NULLS
                valid = self.keys.is_valid().to_numpy(zero_copy_only=False)
                _add(parts, np.packbits(valid, bitorder="little").tobytes())
            _add_column(parts, self.keys)
        _add_column(parts, self.payloads)
        if self.headers is not None and self.headers.null_count < len(self):
            flags |= FLAG_HEADERS
            offsets, names, values = encoded_columns(self.headers)
            _add(parts, offsets)
            _add_column(parts, names)
            _add_column(parts, values)
        parts[0] = PREFIX.pack(lsn, time_us, len(self), flags, 0)
        return b"".join(parts)


def _lengths_differ(payloads: int, others: int, name: str) -> Invalid:
    return Invalid(f"{name} and payloads differ in number ({others} and {payloads}): give as many {name} as payloads")


def check_columns(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the names of the columns that count; `Invalid` if messages have others, or one twice."""
    used = [name for name in names if name not in IGNORED]
    twice = len({"timestamp" if name == "time" else name for name in used}) < len(used)
    if "payload" not in used or set(used) - {*columns, "time"} or twice:
        raise Invalid(
            f"messages have the columns payload, and perhaps {', '.join(columns[1:])}, not {', '.join(names)}"
        )
    return used


def time_name(names: Sequence[str]) -> str | None:
    """Return the name of the column with the times of messages."""
    return next((name for name in ("timestamp", "time") if name in names), None)


def encode_payloads(payloads: Sequence[bytes], *, lsn: int, time_us: int) -> bytes:
    """Check and encode a list of payloads without building columns: most batches are such lists."""
    _check_count(len(payloads))
    try:
        data = b"".join(payloads)
        if len(data) > min(VALUE_BYTES_MAX, BATCH_BYTES_MAX):
            Messages.of(payloads).check()  # raises an error that names the limit
        offsets, end = _offsets(payloads)
    except Invalid:
        raise
    except (TypeError, ValueError) as error:
        raise Invalid(f"payloads must be bytes: {error}") from None
    if end != len(data):
        raise Invalid("payloads must be bytes: one of them holds wider items")
    parts = [PREFIX.pack(lsn, time_us, len(payloads), 0, 0)]
    _add(parts, offsets)
    _add(parts, data)
    return b"".join(parts)


def _check_count(count: int) -> None:
    if count > BATCH_MESSAGES_MAX:
        raise Invalid(f"a batch has {count} messages: at most {BATCH_MESSAGES_MAX} are allowed, give it in parts")


def _offsets(items: Sequence[bytes]) -> tuple[bytes, int]:
    """Return the offsets of a column as bytes, and the last offset."""
    count = len(items)
    if count <= _FEW:  # for so few, numpy's overhead is larger than the work
        ends = list(accumulate(map(len, items), initial=0))
        return struct.pack(f"<{count + 1}i", *ends), ends[-1]
    if count <= _SOME:  # numpy's sum would let another thread run, and a caller would wait for it
        offsets = np.fromiter(accumulate(map(len, items), initial=0), "<i4", count + 1)
    else:
        offsets = np.zeros(count + 1, "<i4")
        np.cumsum(np.fromiter(map(len, items), np.int32, count), out=offsets[1:])
    return offsets.tobytes(), int(offsets[-1])


def stamped(body: bytes | memoryview, *, lsn: int, time_us: int) -> bytes:
    """Fill in the LSN and time of a body that was encoded before they were known."""
    _, _, count, flags, _ = PREFIX.unpack_from(body)
    return b"".join((PREFIX.pack(lsn, time_us, count, flags, 0), memoryview(body)[PREFIX.size :]))


def _binary(column: Any) -> Any:
    return _whole(column.cast(pa.binary()))


def _whole(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _add(parts: list[bytes], data: bytes) -> None:
    parts += (data, _PADDING[-len(data) & 7])


def _checked_bytes(column: Any, bytes_max: int, name: str) -> int:
    """Return the size of a column; `Invalid` if an item is too long."""
    offsets = offsets_of(column)
    size = int(offsets[-1]) - int(offsets[0])
    if size > bytes_max:  # otherwise no item can be too long
        longest = int(np.diff(offsets).max(initial=0))
        if longest > bytes_max:
            raise Invalid(f"a {name} has {longest} bytes: at most {bytes_max} are allowed")
    return size


def _add_column(parts: list[bytes], column: Any) -> None:
    offsets = offsets_of(column)
    start, end = int(offsets[0]), int(offsets[-1])
    if start:
        offsets = offsets - start
    _add(parts, offsets.astype("<i4", copy=False).tobytes())
    data = column.buffers()[2]
    _add(parts, b"" if data is None else memoryview(data)[start:end].tobytes())


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Messages of one record of a queue, with their sequences."""

    first: int  # the sequence of the first message
    lsn: int
    time_us: int  # the record's time
    messages: Messages

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def next(self) -> int:
        """The sequence after the last message."""
        return self.first + len(self.messages)

    @property
    def payloads(self) -> Any:
        return self.messages.payloads

    @property
    def keys(self) -> Any:
        """Arrow binary, null for a message without key."""
        return pa.nulls(len(self), pa.binary()) if self.messages.keys is None else self.messages.keys

    @property
    def times(self) -> NDArray[np.int64]:
        return np.full(len(self), self.time_us, np.int64) if self.messages.times is None else self.messages.times

    def slice(self, start: int, stop: int) -> MessageBatch:
        """Return the messages with sequences in [start, stop), without a copy."""
        start, stop = max(start, self.first), min(stop, self.next)
        messages = self.messages.slice(start - self.first, stop - self.first)
        return MessageBatch(start, self.lsn, self.time_us, messages)

    def record_batch(self, *, headers: bool = False) -> Any:
        """Return the messages as an Arrow record batch of `SCHEMA`, or of `SCHEMA_WITH_HEADERS`."""
        sequences = np.arange(self.first, self.next, dtype=np.uint64)
        times = fixed_array(TIME, self.times)
        columns = [fixed_array(pa.uint64(), sequences), times, self.keys, self.payloads]
        if not headers:
            return pa.record_batch(columns, schema=SCHEMA)
        own = self.messages.headers
        columns.append(pa.nulls(len(self), HEADERS) if own is None else own)
        return pa.record_batch(columns, schema=SCHEMA_WITH_HEADERS)


def decode_batch(record: Record, *, path: str, offset: int, coding: BodyCoding | None = None) -> MessageBatch:
    """Decode the messages of a record; `path` and `offset` are for error messages only.

    Without `coding` a compressed or sealed record is refused: only files hold them.
    """
    body = record.body
    lsn, time_us, count, flags, _ = PREFIX.unpack_from(body)
    if coding is not None and flags & FLAGS_CODED:
        body = coding.decode(body, path, offset)
        flags &= ~FLAGS_CODED
    at = PREFIX.size
    if flags & ~FLAGS_KNOWN:
        raise UnsupportedVersion(f"{path} has a batch of messages with the flags {flags}: upgrade Penstock to read it")

    def take(size: int) -> memoryview:
        nonlocal at
        part = memoryview(body)[at : at + size]
        if len(part) < size:
            raise CorruptionError(path, offset, f"a batch of {count} messages is cut short")
        at += size + (-size & 7)
        return part

    def take_column(items: int = count) -> Any:
        offsets = np.frombuffer(take(4 * (items + 1)), "<i4")
        return binary_array(offsets, take(int(offsets[-1])))

    times = np.frombuffer(take(8 * count), "<i8") if flags & _FLAG_TIMES else None
    keys = None
    if flags & _FLAG_KEYS:
        bitmap = pa.py_buffer(take((count + 7) // 8)) if flags & _FLAG_NULLS else None
        keys = take_column()
        if bitmap is not None:
            keys = pa.Array.from_buffers(pa.binary(), count, [bitmap, *keys.buffers()[1:]])
    payloads = take_column()
    headers = decode_columns(count, take, take_column, path) if flags & FLAG_HEADERS else None
    return MessageBatch(record.index, lsn, time_us, Messages(payloads, keys, times, headers))
