"""The options of a queue: how long it keeps its messages, whether they have headers, its change feed.

Thread: immutable values.
Invariant: every `Retention` has passed its checks, and can always be decoded from its bytes.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec

from penstock.arguments import in_short, seconds, whole
from penstock.errors import CorruptionError, Invalid
from penstock.kinds.changes import ChangeOptions

AGE_S_MAX = 1e11
BYTES_MAX = (1 << 62) - 1


class Retention(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """When messages may be deleted: as soon as one of these rules applies. Without rules they are kept for ever.

    >>> store.queue("orders", retention=penstock.Retention(age_s=7 * 86_400, acknowledged=True))
    <QueueTable 'orders', 1 shard>
    """

    age_s: float | None = None  # delete messages older than this, by the time of their record
    bytes_max: int | None = None  # delete the oldest, while a shard's files take more than this
    acknowledged: bool = False  # delete what all consumers have acknowledged, if there is a consumer

    def __post_init__(self) -> None:
        if self.age_s is not None:
            seconds(self.age_s, "age_s of a retention", AGE_S_MAX, above_zero=True)
        if self.bytes_max is not None:
            whole(self.bytes_max, "bytes_max of a retention", 1, BYTES_MAX)
        if type(self.acknowledged) is not bool:
            raise Invalid(f"acknowledged of a retention is True or False, not {in_short(self.acknowledged)}")


class QueueOptions(msgspec.Struct, frozen=True, array_like=True):
    """The options of a queue table."""

    retention: Retention = Retention()
    headers: bool = False  # whether its messages may have headers; once True it stays
    changes: ChangeOptions | None = None  # of its change feed; chosen when it is created


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(QueueOptions)


def queue_options(retention: Any, headers: bool = False, changes: ChangeOptions | None = None) -> QueueOptions:
    """Build the options of a queue from plain values; `Invalid` if `retention` is not a `Retention`."""
    if retention is None:
        return QueueOptions(headers=headers, changes=changes)
    if not isinstance(retention, Retention):
        raise Invalid(f"retention is a Retention(age_s=, bytes_max=, acknowledged=), not {in_short(retention)}")
    age_s, bytes_max = retention.age_s, retention.bytes_max
    plain = Retention(
        age_s=None if age_s is None else float(age_s),
        bytes_max=None if bytes_max is None else int(bytes_max),
        acknowledged=retention.acknowledged,
    )
    return QueueOptions(plain, headers, changes)


def encode_queue_options(options: QueueOptions) -> bytes:
    """Encode options for the ledger; without headers or a change feed, as before there were any."""
    if options.changes is not None:
        return _encode(options)
    return _encode((options.retention, True)) if options.headers else _encode((options.retention,))


def decode_queue_options(data: bytes) -> QueueOptions:
    """Decode the options of a queue."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, Invalid) as error:
        raise CorruptionError("queue options", 0, f"they do not decode ({error})") from None


def has_headers(data: bytes) -> bool:
    """Whether a queue's messages may have headers, by its options; False if those cannot be read."""
    try:
        return decode_queue_options(data).headers
    except CorruptionError:
        return False


def feed_options(data: bytes) -> ChangeOptions | None:
    """Return the options of a queue's change feed, by its options; None if it has none, or if none can be in them."""
    try:
        return decode_queue_options(data).changes
    except CorruptionError:
        with suppress(msgspec.DecodeError):
            parts = msgspec.msgpack.decode(data)
            if isinstance(parts, list) and len(parts) < len(QueueOptions.__struct_fields__):
                return None  # an early version stored a retention that is no longer accepted
        raise


def no_headers(name: str) -> Invalid:
    """Return the error for headers that a queue does not take."""
    return Invalid(f"queue {name} takes no headers: create it with headers=True, or call its alter(headers=True)")
