"""Compression whose ratio is bounded: a few bytes from outside must not take much memory.

Thread: pure functions.
Invariant: `decompress` takes no more memory than RATIO_MAX times the stored bytes.
"""

from __future__ import annotations

import pyarrow as pa

RATIO_MAX = 16
_zstd = pa.Codec("zstd", compression_level=1)


def compress(data: bytes) -> bytes | None:
    """Return the compressed data; None if it is not smaller, or so much smaller that `decompress` would refuse it."""
    stored: bytes = _zstd.compress(data, asbytes=True)
    return stored if len(stored) < len(data) <= RATIO_MAX * len(stored) else None


def decompress(stored: bytes, size: int, size_max: int) -> bytes:
    """Return `size` bytes of decompressed data; `ValueError` if that is more than allowed, or the data is damaged."""
    if size > min(size_max, RATIO_MAX * len(stored)):
        raise ValueError("it is too large")
    try:
        data: bytes = _zstd.decompress(stored, decompressed_size=size, asbytes=True)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"it does not decompress: {error}") from None
    if len(data) != size:
        raise ValueError("its size is wrong")
    return data
