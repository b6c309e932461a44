"""What is fixed when a queue is made: how long it keeps its messages.

Thread: values.
"""

from __future__ import annotations

import msgspec

from penstock.errors import CorruptionError, Invalid


class Retention(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """When messages may go. Nothing goes unless one of these says so; with several, the first that does counts."""

    age_s: float | None = None  # older than this, by the time of their record
    bytes_max: int | None = None  # the oldest, while a shard's files take more
    acknowledged: bool = False  # as soon as every consumer has acknowledged them, and there is at least one

    def __post_init__(self) -> None:
        if (self.age_s is not None and self.age_s <= 0) or (self.bytes_max is not None and self.bytes_max <= 0):
            raise Invalid("a retention's age_s and bytes_max are above 0")


class QueueOptions(msgspec.Struct, frozen=True, array_like=True):
    """The options of a queue table."""

    retention: Retention = Retention()


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(QueueOptions)


def encode_queue_options(options: QueueOptions) -> bytes:
    """Options as the ledger keeps them."""
    return _encode(options)


def decode_queue_options(data: bytes) -> QueueOptions:
    """Options as they were when the queue was made."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, Invalid) as error:
        raise CorruptionError("queue options", 0, f"they do not decode ({error})") from None
