"""The rules for what other processes send to a queue: sections, conditions, calls and options.

Apply and the ledger rely on these rules and check nothing themselves. The owner's own conditions and calls are checked
here too.

Thread: pure functions.
Invariant: what passes here could have been written through the API of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import CorruptionError, Invalid
from penstock.log.record import KIND_DATA, Index, Record
from penstock.lsm.maintenance import COMPANION
from penstock.lsm.rows import KEY_BYTES_MAX, VALUE_BYTES_MAX, offsets_of
from penstock.partition.ledger_records import TableInfo
from penstock.queue import section
from penstock.queue.calls import QueueCall, decode_call
from penstock.queue.coding import PREFIX
from penstock.queue.headers import checked_headers
from penstock.queue.messages import (
    BATCH_MESSAGES_MAX,
    FLAG_HEADERS,
    FLAGS_KNOWN,
    TIME_US_END,
    TIME_US_FIRST,
    decode_batch,
)
from penstock.queue.options import decode_queue_options, feed_options, has_headers, no_headers
from penstock.queue.positions import (
    ACK,
    DELIVER,
    FORGET,
    MOVE,
    SEEK,
    SEQUENCE_MAX,
    Ack,
    Deliver,
    ForgetConsumer,
    Move,
    Seek,
    read_argument,
)

READ_ONLY_CALLS = frozenset({"seek", "bounds", "statistics", "positions", "advance", "consumers"})
REPEATABLE_CALLS = READ_ONLY_CALLS | {
    "get",
    "nack",
    "extend",
    "leave",
}  # the lease of a message that was lost in transit expires
CONSUMER_BYTES_MAX = 255
TIME_S_MAX = 7 * 24 * 3600.0
BATCH_WEIGHT = 512  # memory of the objects around a batch
LEASE_MAX = 1 << 63
_ARGUMENTS: dict[str, type[msgspec.Struct]] = {ACK: Ack, MOVE: Move, SEEK: Seek, FORGET: ForgetConsumer}
_OWN_ARGUMENTS = _ARGUMENTS | {DELIVER: Deliver}


def weight(payload: bytes) -> int:
    """Estimate the memory that `receive` needs: copies of the bytes, and objects for each batch."""
    return 3 * len(payload) + BATCH_WEIGHT * section.batch_count(payload)


def receive(payload: bytes, options: bytes) -> section.Encoded | section.Trim:
    """Decode and check a section for a queue with these options; `Invalid` if it breaks a rule."""
    try:
        part = section.decode(payload)
        if isinstance(part, section.Trim):
            if not 1 <= part.before < SEQUENCE_MAX:
                raise Invalid("the sequence of a trim is out of range")
            return part
        if not part.encoded:
            raise Invalid("a section of a queue holds no messages")
        for body in part.encoded:
            _check_body(bytes(body))
        if any(PREFIX.unpack_from(body)[3] & FLAG_HEADERS for body in part.encoded) and not has_headers(options):
            raise no_headers("of this section")
    except CorruptionError as error:
        raise Invalid(f"a section of a queue is malformed: {error.reason}") from None
    except (ValueError, IndexError, OverflowError, pa.ArrowException) as error:
        raise Invalid(f"a section of a queue is malformed: {error}") from None
    return part


def _check_body(body: bytes) -> None:
    lsn, _, count, flags, reserved = PREFIX.unpack_from(body)
    if lsn or reserved or flags & ~FLAGS_KNOWN or not 0 < count <= BATCH_MESSAGES_MAX:
        raise Invalid("a batch of messages is malformed")
    messages = decode_batch(Record(Index(1), 1, Index(0), KIND_DATA, 0, body), path="message", offset=0).messages
    names_and_values = () if messages.headers is None else (messages.headers.keys, messages.headers.items)
    for column in (messages.payloads, messages.keys, *names_and_values):
        if column is not None:
            _check_column(column)
    messages.check()
    if messages.encode(lsn=0, time_us=PREFIX.unpack_from(body)[1]) != body:
        raise Invalid("a batch of messages has bytes that do not belong to it")


def _check_column(column: Any) -> None:
    offsets = offsets_of(column)
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise Invalid("the offsets of a column are malformed")
    column.validate(full=True)


def check_condition(info: TableInfo, condition: str, argument: bytes, *, own: bool) -> None:
    """Raise `Invalid` if a condition is malformed or does not fit the queue; `own`: the owner itself set it."""
    kind = (_OWN_ARGUMENTS if own else _ARGUMENTS).get(condition)
    if kind is None:
        raise Invalid(f"a queue does not take the condition {condition!r} from a client")
    _, request = read_argument(argument, kind)
    consumer: str = request.consumer  # type: ignore[attr-defined]
    if not 0 < len(consumer.encode()) <= CONSUMER_BYTES_MAX:
        raise Invalid("a consumer's name is a text of 1 to 255 bytes")
    numbers: list[tuple[int, list[int]]] = []  # (shard, sequences)
    if isinstance(request, Ack):
        numbers = [(shard, [sequence for span in ranges for sequence in span]) for shard, ranges in request.messages]
        if any(not 0 <= lease < LEASE_MAX for leases in request.leases for lease in leases):
            raise Invalid("a lease is out of range: give messages as `get` returned them")
    elif isinstance(request, Deliver):
        messages = request.messages
        numbers = [(shard, [first, *(at for span in ranges for at in span)]) for shard, first, ranges in messages]
    elif isinstance(request, Move):
        numbers = [(shard, [start, end]) for shard, start, end in request.ranges]
        if any(not 0 <= count < SEQUENCE_MAX for count in request.counts):
            raise Invalid("a count of a stream's batch is out of range")
    elif isinstance(request, Seek):
        numbers = [(shard, [sequence]) for shard, sequence in request.positions]
    elif isinstance(request, ForgetConsumer) and request.shards != info.shards:
        raise Invalid(f"queue {info.name} has {info.shards} shards")
    base = COMPANION if isinstance(request, Move) and _moves_feed(info, numbers) else 0
    for shard, sequences in numbers:
        if not base <= shard < base + info.shards or any(not 0 < sequence < SEQUENCE_MAX for sequence in sequences):
            raise Invalid(f"queue {info.name} has no such shard or sequence")


def _moves_feed(info: TableInfo, numbers: Sequence[tuple[int, object]]) -> bool:
    """Whether a move is of a consumer of the change feed of a queue, not of its messages."""
    of_feed = bool(numbers) and numbers[0][0] >= COMPANION
    return of_feed and info.kind == "queue" and feed_options(info.options) is not None


def check_call(info: TableInfo, argument: bytes) -> Sequence[str]:
    """Return the other tables that a call writes to; `Invalid` if it is malformed or does not fit the queue."""
    try:
        call = decode_call(argument)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"a call is malformed: {error}") from None
    check_request(info, call)
    return [] if call.dead_letter is None else [call.dead_letter]


def check_request(info: TableInfo, call: QueueCall) -> None:
    """Raise `Invalid` if the values of a call are out of range or do not fit the queue."""
    shards = [call.shard, *(shard for shard, _, _ in call.leases), *(shard for shard, _ in call.positions)]
    if any(not 0 <= shard < info.shards for shard in shards):
        raise Invalid(f"queue {info.name} has the shards 0 to {info.shards - 1}")
    if len(call.payload) > VALUE_BYTES_MAX or len(call.key or b"") > KEY_BYTES_MAX:
        raise Invalid(f"a payload has at most {VALUE_BYTES_MAX} bytes and a key {KEY_BYTES_MAX}")
    if len(call.consumer.encode()) > CONSUMER_BYTES_MAX:
        raise Invalid("a consumer's name is a text of 1 to 255 bytes")
    numbers = [call.count, call.bytes_max, call.deliveries_max or 0]
    numbers += [sequence for _, sequence, _ in call.leases] + [sequence for _, sequence in call.positions]
    if any(not 0 <= number < SEQUENCE_MAX for number in numbers):
        raise Invalid("a call has a number out of range")
    if any(not 0 <= lease < LEASE_MAX for _, _, lease in call.leases):
        raise Invalid("a call has a number out of range")
    if not TIME_US_FIRST <= (call.time_us or 0) < TIME_US_END:
        raise Invalid("a time is in microseconds since 1970, from the year 1 to 9999")
    times = call.timeout_s, call.visibility_timeout_s, call.delay_s
    if any(not 0 <= seconds <= TIME_S_MAX for seconds in times):
        raise Invalid("a call has a time out of range: at most a week")
    if len(call.holder.encode()) > CONSUMER_BYTES_MAX:
        raise Invalid(f"the name of a client has at most {CONSUMER_BYTES_MAX} bytes")
    if call.headers is not None:
        checked_headers(call.headers)


def waits(name: str, argument: bytes) -> bool:
    """Whether a call waits for messages. Requires: `check_call` has passed."""
    return name == "get" and decode_call(argument).timeout_s > 0


def check_options(options: bytes) -> None:
    """Raise `Invalid` if the options of a queue are malformed."""
    try:
        decode_queue_options(options)
    except (CorruptionError, UnicodeDecodeError) as error:
        raise Invalid(f"options of a queue are malformed: {error}") from None
