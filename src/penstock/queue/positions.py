"""Positions of consumers: rows of the ledger, and the conditions that read and change them.

A consumer has one row for each shard. Its mode is *leased* (messages are leased and acknowledged one by one: a floor,
below which everything is acknowledged, and a bitmap of what is acknowledged above it) or *streamed* (a floor alone: a
stream moves it from batch to batch). The first use sets the mode; use in the other mode is refused.

    queue.ack       acknowledges messages; refused if one of them is acknowledged already
    queue.move      moves shards from start to end if all are at their start; a duplicate if all are at or past their
                    end; otherwise refused
    queue.deliver   counts a delivery of messages, and moves the floor above trimmed messages; always accepted
    queue.seek      moves shards to sequences; refused if the consumer has the other mode
    queue.forget    deletes the consumer; always accepted

Thread: pure functions over rows; the ledger calls them in LSN order.
Invariant: the bitmap and the counts reach at most WINDOW messages above the floor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import numpy as np

from penstock.errors import CorruptionError, Invalid
from penstock.kinds import BatchCounts
from penstock.partition.ledger_records import KindCondition, Verdict, kind_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW = 4_096  # messages above the floor of a shard that can be leased or acknowledged
DELIVERIES_MAX = 255  # where the count stops
SEQUENCE_MAX = 1 << 62  # no shard reaches it

Mode: TypeAlias = Literal["leased", "streamed"]
Range: TypeAlias = tuple[int, int]  # of sequences: [low, high)
Get: TypeAlias = Callable[[bytes], bytes | None]
Put: TypeAlias = Callable[[bytes, bytes | None], None]
_TABLE = struct.Struct(">Q")
_SHARD = struct.Struct(">H")


class ConsumerRow(msgspec.Struct, frozen=True, array_like=True):
    """A consumer's row for one shard."""

    mode: Mode
    floor: int = 1
    acknowledged: bytes = b""  # bit i, little-endian: message `floor + i`; bit 0 is never set
    deliveries: bytes = b""  # byte i: how often message `floor + i` was delivered

    def flags(self) -> NDArray[np.bool_]:
        """Return, for each message of the window, whether it is acknowledged."""
        return _spread(np.unpackbits(np.frombuffer(self.acknowledged, np.uint8), bitorder="little")).astype(np.bool_)

    def counts(self) -> NDArray[np.uint8]:
        """Return, for each message of the window, how often it was delivered."""
        return _spread(np.frombuffer(self.deliveries, np.uint8))

    def raised(self, first: int) -> ConsumerRow:
        """Return the row with its floor at `first` or above: trimmed messages will not be acknowledged."""
        step = first - self.floor
        if step <= 0:
            return self
        flags, counts = self.flags(), self.counts()
        for column in (flags, counts):
            column[: max(0, WINDOW - step)] = column[step:]
            column[max(0, WINDOW - step) :] = 0
        return _packed(self.mode, first, flags, counts)


def _spread(stored: NDArray[np.uint8]) -> NDArray[np.uint8]:
    spread = np.zeros(WINDOW, np.uint8)
    spread[: min(len(stored), WINDOW)] = stored[:WINDOW]
    return spread


def _packed(mode: Mode, floor: int, flags: NDArray[np.bool_], counts: NDArray[np.uint8]) -> ConsumerRow:
    """Build a row, with its floor moved above the acknowledged messages that follow it without a gap."""
    done = WINDOW if flags.all() else int(np.argmin(flags))
    floor += done
    bits = np.packbits(flags[done:], bitorder="little").tobytes().rstrip(b"\0")
    return ConsumerRow(mode, floor, bits, counts[done:].tobytes().rstrip(b"\0"))


# -- arguments of conditions


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """(shard, messages) for each shard, and the lease of each range, which only the owner checks."""

    consumer: str
    messages: list[tuple[int, list[Range]]]
    leases: list[list[int]] = []


class Move(msgspec.Struct, frozen=True, array_like=True):
    """(shard, start, end) for each shard, and what the stream counted, which changes no verdict."""

    consumer: str
    ranges: list[tuple[int, int, int]]
    counts: BatchCounts = BatchCounts()


class Deliver(msgspec.Struct, frozen=True, array_like=True):
    """(shard, its oldest message, messages) for each shard."""

    consumer: str
    messages: list[tuple[int, int, list[Range]]]


class Seek(msgspec.Struct, frozen=True, array_like=True):
    """(shard, sequence) for each shard."""

    consumer: str
    positions: list[tuple[int, int]]
    mode: Mode


class ForgetConsumer(msgspec.Struct, frozen=True, array_like=True):
    """A consumer to delete."""

    consumer: str
    shards: int


_encode = msgspec.msgpack.Encoder().encode
_row_decoder = msgspec.msgpack.Decoder(ConsumerRow)
_decoders = {kind: msgspec.msgpack.Decoder(kind) for kind in (Ack, Move, Deliver, Seek, ForgetConsumer)}


def argument(table: int, request: Ack | Move | Deliver | Seek | ForgetConsumer) -> bytes:
    """Encode the argument of a condition. It begins with the table, as for every kind."""
    return _TABLE.pack(table) + _encode(request)


def read_argument(data: bytes, kind: type[msgspec.Struct]) -> tuple[int, msgspec.Struct]:
    """Decode an argument: the table and the request."""
    try:
        return _TABLE.unpack_from(data)[0], _decoders[kind].decode(data[_TABLE.size :])  # type: ignore[index]
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"a condition of a queue does not decode ({error})") from None


# -- rows


def rows_of(table: int) -> bytes:
    """Return the key prefix of the rows of all consumers of a queue."""
    return kind_rows(table) + b"c"


def row_key(table: int, shard: int, consumer: str) -> bytes:
    """Return the key of a consumer's row for a shard."""
    return rows_of(table) + _SHARD.pack(shard) + consumer.encode()


def parse_row_key(table: int, key: bytes) -> tuple[int, str]:
    """Return the (shard, consumer) of a row's key."""
    rest = key[len(rows_of(table)) :]
    return _SHARD.unpack_from(rest)[0], rest[_SHARD.size :].decode()


def read_row(get: Get, table: int, shard: int, consumer: str) -> ConsumerRow | None:
    """Return a consumer's row for a shard; None if the consumer is new."""
    row = get(row_key(table, shard, consumer))
    return None if row is None else decode_row(row)


def decode_row(row: bytes) -> ConsumerRow:
    """Decode a consumer's row."""
    try:
        return _row_decoder.decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError("a consumer's row", 0, f"it does not decode ({error})") from None


# -- conditions


def _ack(data: bytes, get: Get, put: Put) -> Verdict:
    table, request = read_argument(data, Ack)
    assert isinstance(request, Ack)
    for shard, ranges in request.messages:
        row = read_row(get, table, shard, request.consumer) or ConsumerRow("leased")
        flags = row.flags()
        for low, high in ranges:
            span = slice(low - row.floor, high - row.floor)
            if row.mode != "leased" or not 0 <= span.start < span.stop <= WINDOW or flags[span].any():
                return Verdict.REFUSED
            flags[span] = True
        updated = _packed("leased", row.floor, flags, row.counts())
        put(row_key(table, shard, request.consumer), _encode(updated))
    return Verdict.ACCEPTED


def _move(data: bytes, get: Get, put: Put) -> Verdict:
    table, request = read_argument(data, Move)
    assert isinstance(request, Move)
    rows = [read_row(get, table, shard, request.consumer) for shard, _, _ in request.ranges]
    if any(row is not None and row.mode != "streamed" for row in rows):
        return Verdict.REFUSED
    # A consumer without a row may start anywhere.
    moves = [
        (start if row is None else row.floor, start, end)
        for row, (_, start, end) in zip(rows, request.ranges, strict=True)
    ]
    if any(end < start for _, start, end in moves) or len({shard for shard, _, _ in request.ranges}) < len(moves):
        return Verdict.REFUSED
    if any(floor != start for floor, start, _ in moves):
        return Verdict.DUPLICATE if all(floor >= end for floor, _, end in moves) else Verdict.REFUSED
    for shard, _, end in request.ranges:
        put(row_key(table, shard, request.consumer), _encode(ConsumerRow("streamed", end)))
    return Verdict.ACCEPTED


def _deliver(data: bytes, get: Get, put: Put) -> Verdict:
    table, request = read_argument(data, Deliver)
    assert isinstance(request, Deliver)
    for shard, first, ranges in request.messages:
        row = read_row(get, table, shard, request.consumer) or ConsumerRow("leased")
        if row.mode != "leased":
            continue  # a stream has taken over the consumer since
        row = row.raised(first)
        counts = row.counts()
        for low, high in ranges:
            # Messages below the floor were acknowledged since.
            part = counts[max(0, low - row.floor) : max(0, high - row.floor)]
            part += part < DELIVERIES_MAX
        put(row_key(table, shard, request.consumer), _encode(_packed("leased", row.floor, row.flags(), counts)))
    return Verdict.ACCEPTED


def _seek(data: bytes, get: Get, put: Put) -> Verdict:
    table, request = read_argument(data, Seek)
    assert isinstance(request, Seek)
    for shard, sequence in request.positions:
        row = read_row(get, table, shard, request.consumer)
        if row is not None and row.mode != request.mode:
            return Verdict.REFUSED
        put(row_key(table, shard, request.consumer), _encode(ConsumerRow(request.mode, sequence)))
    return Verdict.ACCEPTED


def _forget(data: bytes, get: Get, put: Put) -> Verdict:
    table, request = read_argument(data, ForgetConsumer)
    assert isinstance(request, ForgetConsumer)
    for shard in range(request.shards):
        put(row_key(table, shard, request.consumer), None)
    return Verdict.ACCEPTED


ACK, MOVE, DELIVER, SEEK, FORGET = "queue.ack", "queue.move", "queue.deliver", "queue.seek", "queue.forget"
CONDITIONS: dict[str, KindCondition] = {ACK: _ack, MOVE: _move, DELIVER: _deliver, SEEK: _seek, FORGET: _forget}


def runs(sequences: Sequence[int] | NDArray[np.int64]) -> list[Range]:
    """Convert ascending sequences to ranges."""
    if not len(sequences):
        return []
    if sequences[-1] - sequences[0] == len(sequences) - 1:  # one range, the usual case
        return [(int(sequences[0]), int(sequences[-1]) + 1)]
    array = np.asarray(sequences, np.int64)
    breaks = np.flatnonzero(array[1:] - array[:-1] != 1)
    lows, highs = array[np.r_[0, breaks + 1]], array[np.r_[breaks, len(array) - 1]] + 1
    return list(zip(lows.tolist(), highs.tolist(), strict=True))
