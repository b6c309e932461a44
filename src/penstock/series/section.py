"""Sections of a series table: the pending writes of one shard, in the order in which they were written.

A section is a list of parts. Samples that were written one by one are collected as (key, time, value) and become one
block when the section is encoded or read.

    SampleBlock      samples of many series, as columns
    MetricMetadata   type, unit and help of a metric
    SeriesDelete     deletes the samples of a selector in [start, end), of everything applied or written before it
    BucketTrim       deletes all buckets that end at a time or before (retention)
    RollupProgress   up to which LSN of its source a rollup table is computed

Only the owner writes the last two.

As bytes:

    version u8 = 1, 3 zero bytes, parts u32
    for each part:   type u8, 3 zero bytes, length u32, body
    a block's body:  bytes of the label table u32, samples u32, form u8 for each of index, times, values, 1 zero byte,
                     label table (see `labels`), index, times, values
    a column         in form 0 every element; in form 1 one element, which all equal; in form 2 nothing: 0, 1, 2, ...
    other bodies     MessagePack

A section that was prepared elsewhere may be compressed: version u8 = 2, 3 zero bytes, size before compression u32, and
by zstd the bytes above.

Thread: changed under the coordinator's lock; read by any thread.
Invariant: decode(encode(section)) has the same parts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arguments import in_short
from penstock.arguments import text as checked_text
from penstock.errors import CorruptionError, Invalid
from penstock.journal.partitions import PartitionId
from penstock.partition.part_log import PartLog, open_section
from penstock.partition.pending import PendingDelta
from penstock.series.labels import (
    RATIO_MAX,
    U32,
    U64,
    Labels,
    LabelTable,
    check_table,
    check_value,
    decode_table,
    fingerprint_of,
    table_size,
)
from penstock.series.options import TIME_MAX, TIME_MIN
from penstock.series.selectors import parse_selector

VERSION, COMPRESSED = 1, 2
SECTION_BYTES_MAX = 1 << 29  # before compression
SAMPLES, METADATA, DELETE, TRIM, PROGRESS = 1, 2, 3, 4, 5
EVERY, SAME, COUNTING = 0, 1, 2
HELP_BYTES_MAX = 4_096
SAMPLE_BYTES = 200  # memory of a sample that was written alone: a tuple, an int, a float and a place in a list
LABEL_WEIGHT = 32  # memory for each byte of a label table
STALE_BITS = 0x7FF0_0000_0000_0002  # Prometheus' staleness marker, a NaN
METRIC_TYPES = ("", "counter", "gauge", "histogram", "summary", "info", "stateset", "unknown")
I64: TypeAlias = npt.NDArray[np.int64]
_zstd = pa.Codec("zstd", compression_level=1)
_HEADER = struct.Struct("<BxxxI")
_PART = struct.Struct("<BxxxI")
_BLOCK = struct.Struct("<IIBBBx")
_INDEX, _TIMES, _BITS = np.dtype("<u4"), np.dtype("<i8"), np.dtype("<u8")
_COLUMNS: tuple[np.dtype[Any], ...] = (_INDEX, _TIMES, _BITS)


class AdmissionTerm:
    """How long a shard's admissions hold: until samples are deleted, and a series may have to be admitted again."""

    __slots__ = ("over",)

    def __init__(self) -> None:
        self.over = False


_ENDLESS = AdmissionTerm()  # in a client: the owner admits all that it sends


class SeriesKey:
    """A series that is written to sample by sample: checked once, then compared by identity."""

    __slots__ = ("bucket", "fingerprint", "labels", "partition", "term")

    def __init__(self, labels: Labels, partition: PartitionId) -> None:
        self.labels = labels
        self.partition = partition
        self.fingerprint = fingerprint_of(labels)
        self.bucket = -1  # the last one in which it was admitted
        self.term = _ENDLESS  # of that admission


@dataclass(frozen=True, eq=False, slots=True)
class SampleBlock:
    """Samples of many series. The last of several samples of one series and time wins."""

    series: LabelTable
    index: U32  # for each sample, the row of its series
    times: I64
    bits: U64  # of the float64 values

    def __len__(self) -> int:
        return len(self.times)


class MetricMetadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is known about a metric.

    >>> metrics = store.series("metrics")
    >>> epoch = metrics.set_metadata("cpu", type="gauge", unit="ratio")
    >>> metrics.metadata()["cpu"].unit
    'ratio'
    """

    metric: str
    type: str = ""
    unit: str = ""
    help: str = ""


class SeriesDelete(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A delete of the samples of a selector in [start, end)."""

    selector: str
    start: int = TIME_MIN
    end: int = TIME_MAX


class BucketTrim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A delete of all buckets that end at `floor` or before."""

    floor: int


class RollupProgress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rollup table holds at least what its source held at an LSN; up to an hour, what it held at a later one."""

    lsn: int
    hour: int = -(1 << 31)  # hours from 1970 up to this one
    hour_lsn: int = 0
    source: int = 0  # the id of the source; 0: written by a release that did not note it


Part: TypeAlias = SampleBlock | MetricMetadata | SeriesDelete | BucketTrim | RollupProgress
_TYPES: dict[int, Any] = {METADATA: MetricMetadata, DELETE: SeriesDelete, TRIM: BucketTrim, PROGRESS: RollupProgress}
_NUMBERS = {kind: number for number, kind in _TYPES.items()}
_pack = msgspec.msgpack.Encoder().encode
_DECODERS = {number: msgspec.msgpack.Decoder(kind) for number, kind in _TYPES.items()}


class SeriesSection(PartLog[Part]):
    """Pending writes of one shard, in order. In its log, single samples are tuples."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self.log)

    def _make(self, log: list[Part | tuple[SeriesKey, int, float]]) -> list[Part]:
        return _parts(log)


def _parts(log: list[Part | tuple[SeriesKey, int, float]]) -> list[Part]:
    parts: list[Part] = []
    alone: list[tuple[SeriesKey, int, float]] = []
    for item in log:
        if type(item) is tuple:
            alone.append(item)
            continue
        if alone:
            parts.append(_block(alone))
            alone = []
        parts.append(item)  # type: ignore[arg-type]
    if alone:
        parts.append(_block(alone))
    return parts


class _LastBlock:
    """The series of the last block of single samples: scrapes repeat the same series in the same order."""

    made: tuple[list[SeriesKey], dict[SeriesKey, int], LabelTable] | None = None  # replaced whole


def _block(alone: list[tuple[SeriesKey, int, float]]) -> SampleBlock:
    keys, times, values = zip(*alone, strict=True)
    distinct = list(dict.fromkeys(keys))
    made = _LastBlock.made
    if made is None or made[0] != distinct:
        # Two keys may have the same labels: each table object makes its own.
        first = {labels: row for row, labels in enumerate(dict.fromkeys(key.labels for key in distinct))}
        made = distinct, {key: first[key.labels] for key in distinct}, LabelTable.of(list(first))
        _LastBlock.made = made
    _, rows, table = made
    index = np.fromiter(map(rows.__getitem__, keys), np.uint32, len(keys))
    return SampleBlock(table, index, np.array(times, np.int64), np.array(values, np.float64).view(np.uint64))


# -- inserts, under the coordinator's lock


def append_sample(delta: PendingDelta, partition: PartitionId, key: SeriesKey, sample: tuple[int, float]) -> None:
    """Append one sample: the hot path."""
    try:
        delta.open[partition].log.append((key, *sample))  # type: ignore[index]
    except (KeyError, TypeError):  # the first write of its group, or of its shard
        open_section(delta, partition, SeriesSection).log.append((key, *sample))


def append_part(delta: PendingDelta, partition: PartitionId, part: Part, _: None) -> None:
    """Append a part."""
    open_section(delta, partition, SeriesSection).log.append(part)


# -- bytes


def encode_section(section: SeriesSection) -> bytes:
    """Encode a section."""
    parts = section.parts
    pieces = [_HEADER.pack(VERSION, len(parts))]
    for part in parts:
        if isinstance(part, SampleBlock):
            body = _encode_block(part)
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


def _encode_block(block: SampleBlock) -> list[bytes]:
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
            parts.append(_decode_block(body) if number == SAMPLES else _DECODERS[number].decode(body))
            at += size
        if at != len(payload):
            raise ValueError("its length is wrong")
    except CorruptionError:
        raise
    except (ValueError, KeyError, struct.error, msgspec.DecodeError) as error:
        raise CorruptionError("series section", 0, f"it does not decode ({error})") from None
    return SeriesSection(*parts)


def _decode_block(body: bytes) -> SampleBlock:
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


# -- sections from other processes


def receive_section(payload: bytes) -> SeriesSection:
    """Decode and check a section; `Invalid` if it breaks a rule of the API."""
    try:
        section = decode_section(payload)
    except CorruptionError as error:
        raise Invalid(f"a section of a series table is malformed: {error.reason}") from None
    if not section.log:
        raise Invalid("a section of a series table holds nothing")
    for part in section.parts:
        if isinstance(part, SampleBlock):
            check_block(part)
        elif isinstance(part, MetricMetadata):
            check_metadata(part)
        elif isinstance(part, SeriesDelete):
            check_delete(part)
        else:
            raise Invalid("only the owner of a store deletes buckets and computes rollups: see SeriesOptions")
    return section


def check_block(block: SampleBlock) -> None:
    """Raise `Invalid` if a block breaks a rule."""
    check_table(block.series)
    if not len(block):
        raise Invalid("a block of a series table holds no samples")
    if int(block.index.max()) >= len(block.series):
        raise Invalid("a sample names a series that its block does not have")
    if len(np.unique(block.index)) != len(block.series):
        raise Invalid("a series of a block has no samples")
    check_times(block.times)


def check_times(times: I64) -> None:
    """Raise `Invalid` if a time is not one that a table can hold."""
    if len(times) and not (int(times.min()) >= TIME_MIN and int(times.max()) < TIME_MAX):
        wrong = int(times.min()) if int(times.min()) < TIME_MIN else int(times.max())
        raise Invalid(f"the time {wrong} is outside the years 1 to 9999: times are microseconds since 1970")


def check_metadata(metadata: MetricMetadata) -> MetricMetadata:
    """Return a metric's metadata as plain texts, which the writer can encode; `Invalid` if it breaks a rule."""
    metric = check_value("__name__", checked_text(metadata.metric, "a metric", HELP_BYTES_MAX))
    kind, unit, text = (_text_of(metadata, name) for name in ("type", "unit", "help"))
    if kind not in METRIC_TYPES:
        raise Invalid(f"{in_short(kind)} is not a type of metrics: use one of: {', '.join(METRIC_TYPES[1:])}")
    return MetricMetadata(metric, kind, unit, text)


def _text_of(metadata: MetricMetadata, name: str) -> str:
    value = getattr(metadata, name)
    if isinstance(value, str) and not str.__len__(value):
        return ""
    return checked_text(value, f"the {name} of a metric", HELP_BYTES_MAX)


def check_delete(delete: SeriesDelete) -> SeriesDelete:
    """Return a delete; `Invalid` if its selector or its range is wrong."""
    parse_selector(delete.selector)
    if not TIME_MIN <= delete.start < delete.end <= TIME_MAX:
        raise Invalid(f"a range of time runs upwards: {delete.end} is not above {delete.start}")
    return delete
