"""Sections of a series table as bytes:

    version u8 = 1, and parts as `partition/part_codec` frames them
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
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import Invalid
from penstock.partition.part_codec import HEADER, PART, decode_parts, decoding, encode_parts
from penstock.series import bounded_zstd
from penstock.series.labels import U64, decode_table, table_size
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
_BLOCK = struct.Struct("<IIBBBx")
_INDEX, _TIMES, _BITS = np.dtype("<u4"), np.dtype("<i8"), np.dtype("<u8")
_COLUMNS: tuple[np.dtype[Any], ...] = (_INDEX, _TIMES, _BITS)
_TYPES: dict[int, Any] = {METADATA: MetricMetadata, DELETE: SeriesDelete, TRIM: BucketTrim, PROGRESS: RollupProgress}
_NUMBERS = {kind: number for number, kind in _TYPES.items()}
_pack = msgspec.msgpack.Encoder().encode


def encode_section(section: SeriesSection) -> bytes:
    """Encode a section."""
    return encode_parts(VERSION, [_encode_part(part) for part in section.parts])


def _encode_part(part: Part) -> tuple[int, list[bytes]]:
    return (SAMPLES, encode_block(part)) if isinstance(part, SampleBlock) else (_NUMBERS[type(part)], [_pack(part)])


def compressed(payload: bytes) -> bytes:
    """Return an encoded section in fewer bytes: for loads, which are sent as one message."""
    if len(payload) > SECTION_BYTES_MAX:
        raise Invalid(f"a load of {len(payload):,} bytes for one shard is too large: write it in several commits")
    stored = bounded_zstd.compress(payload)
    return payload if stored is None else HEADER.pack(COMPRESSED, len(payload)) + stored


def _decompressed(payload: bytes) -> bytes:
    version, size = HEADER.unpack_from(payload)
    if version != COMPRESSED:
        return payload
    return bounded_zstd.decompress(payload[HEADER.size :], size, SECTION_BYTES_MAX)


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
    with decoding("series"):
        return SeriesSection(*decode_parts(_decompressed(payload), VERSION, _DECODERS))


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


_DECODERS: dict[int, Callable[[memoryview], Part]] = {
    SAMPLES: lambda body: decode_block(bytes(body)),
    **{number: msgspec.msgpack.Decoder(kind).decode for number, kind in _TYPES.items()},
}


def _check_count(samples: int, most: int) -> None:
    """Refuse a count that the bytes do not bear out, before memory is taken for it."""
    if samples > most:
        raise ValueError("a block states more samples than it holds")


def section_weight(payload: bytes) -> int:
    """Estimate the memory that `receive_section` needs, from sizes in a section that may be malformed.

    Labels become texts; samples become columns, of which some are not stored.
    """
    if payload[:1] == bytes([COMPRESSED]) and len(payload) >= HEADER.size:
        stated = int(HEADER.unpack_from(payload)[1])
        return len(payload) + 8 * min(stated, bounded_zstd.RATIO_MAX * len(payload))  # mostly samples
    weight, at = 4 * len(payload), HEADER.size
    while at + PART.size + _BLOCK.size <= len(payload):
        number, size = PART.unpack_from(payload, at)
        at += PART.size
        if number == SAMPLES:
            stored = min(_BLOCK.unpack_from(payload, at)[0], len(payload))
            weight += LABEL_WEIGHT * max(stored, table_size(payload, at + _BLOCK.size))
        at += size
    return weight
