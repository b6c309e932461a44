"""Requests to a queue's service and its replies: passed as values within the owner, as bytes by a client.

Thread: immutable values.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.kinds import TableSize
from penstock.queue.headers import COUNT_MAX

LEASES_MAX = 65_536  # of one call
POSITIONS_MAX = 1_024  # a queue has at most that many shards


class QueueCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The argument of a call; each call uses the fields it needs."""

    shard: int = 0
    payload: bytes = b""
    key: bytes | None = None
    time_us: int | None = None
    consumer: str = ""
    count: int = 0
    timeout_s: float = 0.0
    visibility_timeout_s: float = 30.0
    deliveries_max: int | None = None
    dead_letter: str | None = None
    leases: Annotated[list[tuple[int, int, int]], msgspec.Meta(max_length=LEASES_MAX)] = []  # (shard, sequence, lease)
    positions: Annotated[list[tuple[int, int]], msgspec.Meta(max_length=POSITIONS_MAX)] = []  # (shard, sequence)
    bytes_max: int = 0  # 0: no limit; the same for `count` in `advance`
    delay_s: float = 0.0
    holder: str = ""  # the client that gets messages; empty: the owner itself
    headers: Annotated[dict[str, bytes], msgspec.Meta(max_length=COUNT_MAX)] | None = None  # of a message to append


class ShardBounds(msgspec.Struct, frozen=True, array_like=True):
    """The messages [first, next) of a shard.

    >>> store.queue("events").bounds()
    [ShardBounds(first=1, next=2)]
    """

    first: int
    next: int


class LeasedMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):  # a thousand would trigger the collector
    """A message under a lease.

    >>> (message,) = store.queue("events").consumer("worker").get()
    >>> message.payload, message.deliveries
    (b'hello', 1)
    """

    shard: int
    sequence: int
    time_us: int
    key: bytes | None
    payload: bytes
    deliveries: int  # this one included
    lease: int
    headers: dict[str, bytes] | None = None  # None: it has none


class ConsumerPosition(msgspec.Struct, frozen=True, array_like=True):
    """The position of a consumer in a shard.

    >>> store.queue("events").consumer("worker").positions()
    [ConsumerPosition(consumer='worker', shard=0, mode='new', floor=1, lag=1)]
    """

    consumer: str
    shard: int
    mode: str
    floor: int  # all messages below are acknowledged
    lag: int  # number of messages that are not acknowledged


class StreamTotals(msgspec.Struct, frozen=True, array_like=True):
    """What the streams of a consumer did since the store was made.

    >>> {consumer.name: consumer.stream for consumer in store.queue("events").consumers()}  # by consumer
    {}
    """

    batches: int = 0  # committed
    rows_in: int = 0  # messages that they read
    rows_out: int = 0  # rows that they wrote, dead letters apart
    dead: int = 0  # letters that they wrote
    duplicates: int = 0  # batches that were committed before, and not written again


class ConsumerSummary(msgspec.Struct, frozen=True, array_like=True):
    """A consumer of a queue at one moment.

    >>> messages = store.queue("events").consumer("worker").get()
    >>> [(consumer.name, consumer.leased) for consumer in store.queue("events").consumers()]
    [('worker', 1)]
    """

    name: str
    mode: str  # "leased" (get and ack), "streamed" (moved by a stream) or "new" (it has got no message yet)
    position: dict[int, int]  # for each shard, the sequence below which everything is acknowledged
    lag: int  # number of messages that are not acknowledged
    leased: int  # number of messages that it holds under leases
    last_seen_us: int | None  # when it last got or acknowledged messages; None: not since the store was opened
    stream: StreamTotals | None = None  # of a consumer that streams move


class QueueTotals(msgspec.Struct, frozen=True, array_like=True):
    """A queue at one moment.

    >>> store.queue("events").statistics().messages
    1
    """

    shards: list[ShardBounds]
    files: int
    bytes: int
    consumers: list[ConsumerPosition]

    @property
    def messages(self) -> int:
        """How many messages the queue has."""
        return sum(bounds.next - bounds.first for bounds in self.shards)

    @property
    def size(self) -> TableSize:
        """Its size, in the terms that all kinds share."""
        return TableSize(self.messages, self.files, self.bytes)


_encode = msgspec.msgpack.Encoder().encode
_call = msgspec.msgpack.Decoder(QueueCall)


def encode_call(call: QueueCall) -> bytes:
    """Encode a call."""
    return _encode(call)


def decode_call(argument: bytes) -> QueueCall:
    """Decode a call; no bytes are an empty call."""
    return _call.decode(argument) if argument else QueueCall()
