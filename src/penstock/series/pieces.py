"""Pieces of a series shard for readers in other processes: ranges of time, and the files that hold their buckets.

Thread: any; the snapshot that a piece was made from pins its files.
"""

from __future__ import annotations

import msgspec

from penstock.lsm.file_pieces import FilePiece
from penstock.series.keys import bucket_range
from penstock.series.options import SeriesOptions
from penstock.series.times import key_times


class SeriesPiece(msgspec.Struct, frozen=True, array_like=True):
    """The content of a piece's `detail`."""

    options: SeriesOptions
    stored: FilePiece


encode_piece = msgspec.msgpack.Encoder().encode
decode_piece = msgspec.msgpack.Decoder(SeriesPiece).decode


def stored_range(options: SeriesOptions, start: bytes, end: bytes | None) -> tuple[bytes, bytes | None]:
    """Return the keys in the tree of all buckets that a range of time touches."""
    low, high = key_times(start, end)
    first, last = bucket_range(options.bucket(low), options.bucket(max(low, high - 1)) + 1)
    return first if start else b"", None if end is None else last
