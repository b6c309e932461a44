"""How far consumers are: rows of the ledger, and the conditions that read and move them.

A consumer has one row for each shard. It is *leased* (messages are taken and acknowledged one by one: a floor, below
which everything is acknowledged, and a bitmap of what is acknowledged above it) or *streamed* (only the floor counts:
somebody else keeps order and moves it from one place to the next). The first use decides which; the other is refused.

    queue.ack       every named message is not acknowledged yet: then it is; otherwise refused
    queue.move      every shard stands at its start: then at its end; every one at or past its end: duplicate;
                    anything else: refused
    queue.deliver   counts a delivery of messages, and moves the floor over what was trimmed; always accepted
    queue.seek      puts shards to places; refused if the consumer is used in the other way
    queue.forget    removes the consumer; always accepted

Thread: pure functions over rows; the ledger calls them in LSN order.
Invariant: the bitmap and the counts reach at most WINDOW messages above the floor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import CorruptionError, Invalid
from penstock.partition.ledger import KindCondition, Verdict, kind_rows

WINDOW = 4_096  # messages above the floor of a shard that can be out or acknowledged
DELIVERIES_MAX = 255  # counted no further
SEQUENCE_MAX = 1 << 62  # no shard comes so far

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
        """For each message of the window, whether it is acknowledged."""
        return _spread(np.unpackbits(np.frombuffer(self.acknowledged, np.uint8), bitorder="little")).astype(np.bool_)

    def counts(self) -> NDArray[np.uint8]:
        """For each message of the window, how often it was delivered."""
        return _spread(np.frombuffer(self.deliveries, np.uint8))

    def raised(self, first: int) -> ConsumerRow:
        """The place where everything below `first` is gone: nobody will acknowledge it."""
        step = first - self.floor
        if step <= 0:
            return self
        flags, counts = self.flags(), self.counts()
        for column in (flags, counts):
            column[: max(0, WINDOW - step)] = column[step:]
            column[max(0, WINDOW - step) :] = 0
        return _packed(self.mode, first, flags, counts)


def _spread(found: NDArray[np.uint8]) -> NDArray[np.uint8]:
    spread = np.zeros(WINDOW, np.uint8)
    spread[: min(len(found), WINDOW)] = found[:WINDOW]
    return spread


def _packed(mode: Mode, floor: int, flags: NDArray[np.bool_], counts: NDArray[np.uint8]) -> ConsumerRow:
    """A row whose floor is moved over all that is acknowledged in one piece."""
    done = WINDOW if flags.all() else int(np.argmin(flags))
    floor += done
    bits = np.packbits(flags[done:], bitorder="little").tobytes().rstrip(b"\0")
    return ConsumerRow(mode, floor, bits, counts[done:].tobytes().rstrip(b"\0"))


# -- what conditions are given


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """(shard, messages) for each shard, and the lease of each range, which only the owner looks at."""

    consumer: str
    messages: list[tuple[int, list[Range]]]
    leases: list[list[int]] = []


class Move(msgspec.Struct, frozen=True, array_like=True):
    """(shard, start, end) for each shard."""

    consumer: str
    ranges: list[tuple[int, int, int]]


class Deliver(msgspec.Struct, frozen=True, array_like=True):
    """(shard, its oldest message, messages) for each shard."""

    consumer: str
    messages: list[tuple[int, int, list[Range]]]


class Seek(msgspec.Struct, frozen=True, array_like=True):
    """(shard, sequence) for each shard."""

    consumer: str
    places: list[tuple[int, int]]
    mode: Mode


class ForgetConsumer(msgspec.Struct, frozen=True, array_like=True):
    """A consumer that is needed no more."""

    consumer: str
    shards: int


_encode = msgspec.msgpack.Encoder().encode
_place = msgspec.msgpack.Decoder(ConsumerRow)
_decoders = {kind: msgspec.msgpack.Decoder(kind) for kind in (Ack, Move, Deliver, Seek, ForgetConsumer)}


def argument(table: int, asked: Ack | Move | Deliver | Seek | ForgetConsumer) -> bytes:
    """The argument of a condition: it begins with the table, as every kind's does."""
    return _TABLE.pack(table) + _encode(asked)


def read_argument(data: bytes, kind: type[msgspec.Struct]) -> tuple[int, msgspec.Struct]:
    """The table and what is asked."""
    try:
        return _TABLE.unpack_from(data)[0], _decoders[kind].decode(data[_TABLE.size :])  # type: ignore[index]
    except (struct.error, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"a condition of a queue does not decode ({error})") from None


# -- rows


def rows_of(table: int) -> bytes:
    """How the rows of all consumers of a queue begin."""
    return kind_rows(table) + b"c"


def row_key(table: int, shard: int, consumer: str) -> bytes:
    """The key of a consumer's row for a shard."""
    return rows_of(table) + _SHARD.pack(shard) + consumer.encode()


def parse_row_key(table: int, key: bytes) -> tuple[int, str]:
    """(shard, consumer) of a row."""
    rest = key[len(rows_of(table)) :]
    return _SHARD.unpack_from(rest)[0], rest[_SHARD.size :].decode()


def read_place(get: Get, table: int, shard: int, consumer: str) -> ConsumerRow | None:
    """Where a consumer is in a shard; None if it is new."""
    kept = get(row_key(table, shard, consumer))
    return None if kept is None else decode_position(kept)


def decode_position(row: bytes) -> ConsumerRow:
    """What a row holds."""
    try:
        return _place.decode(row)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError("a consumer's row", 0, f"it does not decode ({error})") from None


# -- conditions


def _ack(data: bytes, get: Get, put: Put) -> Verdict:
    table, asked = read_argument(data, Ack)
    assert isinstance(asked, Ack)
    for shard, ranges in asked.messages:
        place = read_place(get, table, shard, asked.consumer) or ConsumerRow("leased")
        flags = place.flags()
        for low, high in ranges:
            some = slice(low - place.floor, high - place.floor)
            if place.mode != "leased" or not 0 <= some.start < some.stop <= WINDOW or flags[some].any():
                return Verdict.REFUSED
            flags[some] = True
        row = _packed("leased", place.floor, flags, place.counts())
        put(row_key(table, shard, asked.consumer), _encode(row))
    return Verdict.ACCEPTED


def _move(data: bytes, get: Get, put: Put) -> Verdict:
    table, asked = read_argument(data, Move)
    assert isinstance(asked, Move)
    places = [read_place(get, table, shard, asked.consumer) for shard, _, _ in asked.ranges]
    if any(place is not None and place.mode != "streamed" for place in places):
        return Verdict.REFUSED
    # A consumer without a row is wherever it says that it is.
    moves = [
        (start if place is None else place.floor, start, end)
        for place, (_, start, end) in zip(places, asked.ranges, strict=True)
    ]
    if any(end < start for _, start, end in moves) or len({shard for shard, _, _ in asked.ranges}) < len(moves):
        return Verdict.REFUSED
    if any(floor != start for floor, start, _ in moves):
        return Verdict.DUPLICATE if all(floor >= end for floor, _, end in moves) else Verdict.REFUSED
    for shard, _, end in asked.ranges:
        put(row_key(table, shard, asked.consumer), _encode(ConsumerRow("streamed", end)))
    return Verdict.ACCEPTED


def _deliver(data: bytes, get: Get, put: Put) -> Verdict:
    table, asked = read_argument(data, Deliver)
    assert isinstance(asked, Deliver)
    for shard, first, ranges in asked.messages:
        place = read_place(get, table, shard, asked.consumer) or ConsumerRow("leased")
        if place.mode != "leased":
            continue  # it became a stream's since
        place = place.raised(first)
        counts = place.counts()
        for low, high in ranges:
            some = counts[
                max(0, low - place.floor) : max(0, high - place.floor)
            ]  # what is below was acknowledged since
            some += some < DELIVERIES_MAX
        put(row_key(table, shard, asked.consumer), _encode(_packed("leased", place.floor, place.flags(), counts)))
    return Verdict.ACCEPTED


def _seek(data: bytes, get: Get, put: Put) -> Verdict:
    table, asked = read_argument(data, Seek)
    assert isinstance(asked, Seek)
    for shard, sequence in asked.places:
        place = read_place(get, table, shard, asked.consumer)
        if place is not None and place.mode != asked.mode:
            return Verdict.REFUSED
        put(row_key(table, shard, asked.consumer), _encode(ConsumerRow(asked.mode, sequence)))
    return Verdict.ACCEPTED


def _forget(data: bytes, get: Get, put: Put) -> Verdict:
    table, asked = read_argument(data, ForgetConsumer)
    assert isinstance(asked, ForgetConsumer)
    for shard in range(asked.shards):
        put(row_key(table, shard, asked.consumer), None)
    return Verdict.ACCEPTED


ACK, MOVE, DELIVER, SEEK, FORGET = "queue.ack", "queue.move", "queue.deliver", "queue.seek", "queue.forget"
CONDITIONS: dict[str, KindCondition] = {ACK: _ack, MOVE: _move, DELIVER: _deliver, SEEK: _seek, FORGET: _forget}


def runs(sequences: Sequence[int] | NDArray[np.int64]) -> list[Range]:
    """Ascending sequences as ranges."""
    if not len(sequences):
        return []
    if sequences[-1] - sequences[0] == len(sequences) - 1:  # one range: nearly always
        return [(int(sequences[0]), int(sequences[-1]) + 1)]
    found = np.asarray(sequences, np.int64)
    breaks = np.flatnonzero(found[1:] - found[:-1] != 1)
    lows, highs = found[np.r_[0, breaks + 1]], found[np.r_[breaks, len(found) - 1]] + 1
    return list(zip(lows.tolist(), highs.tolist(), strict=True))
