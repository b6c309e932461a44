"""The options of a vector table: dimensions and metric, fixed when it is created.

Thread: immutable values.
Invariant: every `VectorOptions` has passed its checks, and can always be decoded from its bytes.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import msgspec

from penstock.arguments import in_short, whole
from penstock.errors import CorruptionError, Invalid
from penstock.kinds.changes import ChangeOptions, change_options

Metric: TypeAlias = Literal["cosine", "dot", "euclidean"]
METRICS: tuple[str, ...] = get_args(Metric)
DIMENSIONS_MAX = 16_384
DIMENSIONS_DEFAULT = 384  # of a table that is created by `store.create` without options


class VectorOptions(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the vectors of a table are, and how their distance is measured."""

    dimensions: int = DIMENSIONS_DEFAULT
    metric: Metric = "cosine"
    changes: ChangeOptions | None = None  # of its change feed, if it has one

    def __post_init__(self) -> None:
        whole(self.dimensions, "dimensions of a vector table", 1, DIMENSIONS_MAX)
        if not isinstance(self.metric, str) or self.metric not in METRICS:  # type: ignore[redundant-expr]
            raise Invalid(f"{in_short(self.metric)} is not a metric: use one of {', '.join(METRICS)}")

    @property
    def vector_bytes(self) -> int:
        return 4 * self.dimensions


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(VectorOptions)


def vector_options(dimensions: Any, metric: Any, changes: Any = False) -> VectorOptions:
    """Return options made of plain values; `Invalid` if they are not options."""
    if dimensions is None:
        raise Invalid("a new vector table needs dimensions=: the length of its vectors")
    number = whole(dimensions, "dimensions of a vector table", 1, DIMENSIONS_MAX)
    options = VectorOptions(dimensions=number, metric="cosine" if metric is None else metric)
    plain: Any = str.__str__(options.metric)
    return VectorOptions(dimensions=number, metric=plain, changes=change_options(changes))


def encode_vector_options(options: VectorOptions) -> bytes:
    """Encode options for the ledger; without a change feed, as before there were any."""
    return _encode((options.dimensions, options.metric) if options.changes is None else options)


def decode_vector_options(data: bytes) -> VectorOptions:
    """Decode the options of a vector table."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, Invalid) as error:
        raise CorruptionError("vector options", 0, f"they do not decode ({error})") from None
