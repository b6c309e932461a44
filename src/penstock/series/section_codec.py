"""Sections of a series table as bytes:

    version u8 = 1, 3 zero bytes, parts u32
    for each part:   type u8, 3 zero bytes, length u32, body
    a block's body:  bytes of the label table u32, samples u32, form u8 for each of index, times, values, 1 zero byte,
                     label table (see `labels`), index, times, values
    a column         in form 0 every element; in form 1 one element, which all equal; in form 2 nothing: 0, 1, 2, ...
    other bodies     MessagePack

A section that was prepared elsewhere may be compressed: version u8 = 2, 3 zero bytes, size before compression u32, and
by zstd the bytes above.

Thread: pure functions.
Invariant: decode(encode(section)) has the same parts.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import CorruptionError, Invalid
from penstock.series.labels import RATIO_MAX, U64, decode_table, table_size
from penstock.series.section import (
    BucketTrim,
    MetricMetadata,
    Part,
    RollupProgress,
    SampleBlock,
    SeriesDelete,
    SeriesSection,
)

VERSION, COMPRESSED = 1, 2
SECTION_BYTES_MAX = 1 << 29  # before compression
SAMPLES, METADATA, DELETE, TRIM, PROGRESS = 1, 2, 3, 4, 5
EVERY, SAME, COUNTING = 0, 1, 2
LABEL_WEIGHT = 32  # memory for each byte of a label table
_zstd = pa.Codec("zstd", compression_level=1)
_HEADER = struct.Struct("<BxxxI")
_PART = struct.Struct("<BxxxI")
_BLOCK = struct.Struct("<IIBBBx")
_INDEX, _TIMES, _BITS = np.dtype("<u4"), np.dtype("<i8"), np.dtype("<u8")
_COLUMNS: tuple[np.dtype[Any], ...] = (_INDEX, _TIMES, _BITS)
_TYPES: dict[int, Any] = {METADATA: MetricMetadata, DELETE: SeriesDelete, TRIM: BucketTrim, PROGRESS: RollupProgress}
_NUMBERS = {kind: number for number, kind in _TYPES.items()}
_pack = msgspec.msgpack.Encoder().encode
_DECODERS = {number: msgspec.msgpack.Decoder(kind) for number, kind in _TYPES.items()}


def encode_section(section: SeriesSection) -> bytes:
    """Encode a section."""
    parts = section.parts
    pieces = [_HEADER.pack(VERSION, len(parts))]
    for part in parts:
        if isinstance(part, SampleBlock):
            body = encode_block(part)
            pieces.append(_PART.pack(SAMPLES, sum(map(len, body))))
            pieces += body
        else:
            packed = _pack(part)
            pieces += (_PART.pack(_NUMBERS[type(part)], len(packed)), packed)
    return b"".join(pieces)


def compressed(payload: bytes) -> bytes:
    """Return an encoded section in fewer bytes: for loads, which are sent as one message."""
    if len(payload) > SECTION_BYTES_MAX:
        raise Invalid(f"a load of {len(payload):,} bytes for one shard is too large: write it in several commits")
    stored: bytes = _zstd.compress(payload, asbytes=True)
    pays = len(stored) < len(payload) <= RATIO_MAX * len(stored)
    return _HEADER.pack(COMPRESSED, len(payload)) + stored if pays else payload


def _decompressed(payload: bytes) -> bytes:
    version, size = _HEADER.unpack_from(payload)
    if version != COMPRESSED:
        return payload
    if size > min(SECTION_BYTES_MAX, RATIO_MAX * (len(payload) - _HEADER.size)):
        raise ValueError("it is too large")
    try:
        plain: bytes = _zstd.decompress(payload[_HEADER.size :], decompressed_size=size, asbytes=True)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"it does not decompress: {error}") from None
    if len(plain) != size:
        raise ValueError("its size is wrong")
    return plain


def encode_block(block: SampleBlock) -> list[bytes]:
    """Return the body of a block, in pieces."""
    table = block.series.encode()
    columns = [_encode_column(block.index, _INDEX), _encode_column(block.times, _TIMES), (EVERY, _raw(block.bits))]
    forms = [form for form, _ in columns]
    return [_BLOCK.pack(len(table), len(block), *forms), table, *(data for _, data in columns)]


def _encode_column(column: npt.NDArray[Any], kind: np.dtype[Any]) -> tuple[int, bytes]:
    """Return the form and the bytes of a column."""
    if len(column) > 1 and column[0] == column[-1] and bool((column == column[0]).all()):
        return SAME, column[:1].astype(kind).tobytes()
    counting = kind is _INDEX and len(column) and not column[0] and column[-1] == len(column) - 1
    if counting and bool((column == np.arange(len(column), dtype=np.uint32)).all()):
        return COUNTING, b""
    return EVERY, column.astype(kind, copy=False).tobytes()


def _raw(bits: U64) -> bytes:
    return bits.astype(_BITS, copy=False).tobytes()


def decode_section(payload: bytes) -> SeriesSection:
    """Decode a section; `CorruptionError` if it is malformed."""
    try:
        payload = _decompressed(payload)
        version, count = _HEADER.unpack_from(payload)
        if version != VERSION:
            raise ValueError(f"its version is {version}")
        at = _HEADER.size
        parts: list[Part] = []
        if count > (len(payload) - at) // _PART.size:
            raise ValueError("it is cut short")
        for _ in range(count):
            number, size = _PART.unpack_from(payload, at)
            at += _PART.size
            if at + size > len(payload):
                raise ValueError("it is cut short")
            body = payload[at : at + size]
            parts.append(decode_block(body) if number == SAMPLES else _DECODERS[number].decode(body))
            at += size
        if at != len(payload):
            raise ValueError("its length is wrong")
    except CorruptionError:
        raise
    except (ValueError, KeyError, struct.error, msgspec.DecodeError) as error:
        raise CorruptionError("series section", 0, f"it does not decode ({error})") from None
    return SeriesSection(*parts)


def decode_block(body: bytes) -> SampleBlock:
    """Decode the body of a block; `ValueError` or `CorruptionError` if it is malformed."""
    size, samples, *forms = _BLOCK.unpack_from(body)
    at = _BLOCK.size + size
    if at > len(body):
        raise ValueError("a block is cut short")
    table = decode_table(body[_BLOCK.size : at])
    columns: list[npt.NDArray[Any]] = []
    for form, kind in zip(forms, _COLUMNS, strict=True):
        stored = {EVERY: samples, SAME: 1, COUNTING: 0}[form]
        if at + stored * kind.itemsize > len(body) or (form == COUNTING and kind is not _INDEX):
            raise ValueError("a block is cut short")
        column = np.frombuffer(body, kind, stored, at)
        at += stored * kind.itemsize
        if form == COUNTING:
            _check_count(samples, len(table))
            column = np.arange(samples, dtype=_INDEX)
        elif form == SAME:
            _check_count(samples, max(len(table), (len(body) - _BLOCK.size - size) // 8))
            column = np.full(samples, column[0], kind)
        columns.append(column)
    if at != len(body):
        raise ValueError("the length of a block is wrong")
    index, times, bits = columns
    return SampleBlock(table, index, times, bits)


def _check_count(samples: int, most: int) -> None:
    """Refuse a count that the bytes do not bear out, before memory is taken for it."""
    if samples > most:
        raise ValueError("a block states more samples than it holds")


def section_weight(payload: bytes) -> int:
    """Estimate the memory that `receive_section` needs, from sizes in a section that may be malformed.

    Labels become texts; samples become columns, of which some are not stored.
    """
    if payload[:1] == bytes([COMPRESSED]) and len(payload) >= _HEADER.size:
        stated = int(_HEADER.unpack_from(payload)[1])
        return len(payload) + 8 * min(stated, RATIO_MAX * len(payload))  # mostly samples
    weight, at = 4 * len(payload), _HEADER.size
    while at + _PART.size + _BLOCK.size <= len(payload):
        number, size = _PART.unpack_from(payload, at)
        at += _PART.size
        if number == SAMPLES:
            stored = min(_BLOCK.unpack_from(payload, at)[0], len(payload))
            weight += LABEL_WEIGHT * max(stored, table_size(payload, at + _BLOCK.size))
        at += size
    return weight
