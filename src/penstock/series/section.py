"""Sections of a series table: the pending writes of one shard, in the order in which they were written.

A section is a list of parts. Samples that were written one by one are collected as (key, time, value) and become
blocks when the section is encoded or read. `section_codec` has its bytes, `rules` what a part may hold.

    SampleBlock      samples of many series, as columns
    MetricMetadata   type, unit and help of a metric
    SeriesDelete     deletes the samples of a selector in [start, end), of everything applied or written before it
    BucketTrim       deletes all buckets that end at a time or before (retention)
    RollupProgress   up to which LSN of its source a rollup table is computed

Only the owner writes the last two.

Thread: changed under the coordinator's lock; read by any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np

from penstock.journal.partitions import PartitionId
from penstock.partition.part_log import PartLog, open_section
from penstock.partition.pending import PendingDelta
from penstock.series.labels import U32, U64, Labels, LabelTable, fingerprint_of
from penstock.series.options import TIME_MAX, TIME_MIN
from penstock.series.samples import I64

SAMPLE_BYTES = 200  # memory of a sample that was written alone: a tuple, an int, a float and a slot in a list
CODES_MAX = 1 << 21  # series x names in the label table of samples that were written alone
STALE_BITS = 0x7FF0_0000_0000_0002  # Prometheus' staleness marker, a NaN


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


def split_block(block: SampleBlock, shards: int) -> Iterator[tuple[int, SampleBlock]]:
    """Yield, for each shard with samples, its number and its part of a block."""
    rows_new = np.empty(len(block.series), np.uint32)
    shard_of = np.empty(len(block.series), np.int64)
    parts = block.series.by_shard(shards)
    for shard, (_, rows) in enumerate(parts):
        rows_new[rows] = np.arange(len(rows), dtype=np.uint32)
        shard_of[rows] = shard
    of_sample = shard_of[block.index]
    for shard, (series, _) in enumerate(parts):
        positions = np.flatnonzero(of_sample == shard)
        if len(positions):
            yield (
                shard,
                SampleBlock(series, rows_new[block.index[positions]], block.times[positions], block.bits[positions]),
            )


class MetricMetadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Type, unit and help of a metric.

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
            parts += _blocks(alone)
            alone = []
        parts.append(item)  # type: ignore[arg-type]
    if alone:
        parts += _blocks(alone)
    return parts


class _LastBlock:
    """The series of the last block of single samples: scrapes repeat the same series in the same order."""

    series: tuple[list[SeriesKey], dict[SeriesKey, int], LabelTable] | None = None  # replaced whole


def _blocks(alone: list[tuple[SeriesKey, int, float]]) -> Iterator[SampleBlock]:
    """Yield blocks of single samples: one, or several if they have very many names of labels."""
    keys, times, values = zip(*alone, strict=True)
    distinct = list(dict.fromkeys(keys))
    series = _LastBlock.series
    if series is None or series[0] != distinct:
        # Two keys may have the same labels: each table object makes its own.
        first = {labels: row for row, labels in enumerate(dict.fromkeys(key.labels for key in distinct))}
        if len(first) > 1 and len(first) * len({name for labels in first for name, _ in labels}) > CODES_MAX:
            half = len(alone) // 2
            yield from _blocks(alone[:half])
            yield from _blocks(alone[half:])
            return
        series = distinct, {key: first[key.labels] for key in distinct}, LabelTable.of(list(first))
        _LastBlock.series = series
    _, rows, table = series
    index = np.fromiter(map(rows.__getitem__, keys), np.uint32, len(keys))
    yield SampleBlock(table, index, np.array(times, np.int64), np.array(values, np.float64).view(np.uint64))


# -- inserts, under the coordinator's lock


def append_sample(delta: PendingDelta, partition: PartitionId, key: SeriesKey, sample: tuple[int, float]) -> None:
    """Append one sample: the hot path."""
    try:
        delta.open[partition].log.append((key, *sample))  # type: ignore[index]
    except (KeyError, TypeError):  # the first write of its group, or of its shard
        open_section(delta, partition, SeriesSection).log.append((key, *sample))
