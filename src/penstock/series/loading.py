"""Rows that are prepared outside the owner: few as sections, many as staged files.

A staged file is an encoded section, compressed if that pays. The owner checks it as it checks a section from a client,
applies its samples, stores them at once, and then discards the file.

Thread: a `SampleLoader` belongs to its caller; the rest are pure functions over files.
Invariants: (1) of the rows of one load the last of a series and time wins. (2) a shard of a load has sections or
files, never both: a group that names files has its record to itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.host.files import FileSystem
from penstock.journal.partitions import PartitionId
from penstock.kinds import BuildContext, PreparedRows, partitions_of, staged_content
from penstock.partition.ledger_records import TableInfo
from penstock.partition.reference import StagedFile, sealed
from penstock.series.admission import check_not_rollup, check_window
from penstock.series.arrow import BlockMaker
from penstock.series.options import decode_series_options
from penstock.series.section import SampleBlock, SeriesSection, split_block
from penstock.series.section_codec import compressed, decode_section, encode_section

STAGED_SUFFIX = ".samples"
INLINE_BYTES_MAX = 1 << 20  # of a shard's samples, that are sent as a section
BUNDLE_BYTES_MAX = 8 << 20  # of all sections of a group
FILE_BYTES = 32 << 20  # of the samples of one file, which is read whole
ROWS_MAX = 1 << 19  # that are converted at once
SAMPLE_BYTES = 20


class SampleLoader:
    """Prepares rows outside the owner."""

    def __init__(self, info: TableInfo, context: BuildContext) -> None:
        self._info = info
        self._options = decode_series_options(info.options)
        self._context = context
        self._partitions = partitions_of(info)
        self._sections = [SeriesSection() for _ in self._partitions]
        self._bytes = [0] * len(self._partitions)
        self._done: list[PreparedRows] = []

    def run(self, batches: Iterator[Any]) -> list[PreparedRows]:
        """Read all batches and return what is to be committed."""
        check_not_rollup(self._info.name, self._options)
        maker = BlockMaker()
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_MAX):
                block = maker.block(batch.slice(start, ROWS_MAX))
                if block is not None:
                    self._check_times(block)
                    self._add(block)
        for shard, section in enumerate(self._sections):
            if section.log and self._bytes[shard] <= INLINE_BYTES_MAX and not self._has_files(shard):
                payload = compressed(encode_section(section))
                self._done.append(PreparedRows(self._partitions[shard], payload, rows=_samples(section)))
            elif section.log:
                self._write(shard)
        return self._done

    def _check_times(self, block: SampleBlock) -> None:
        """Refuse what the owner would refuse: a search for broken rows prepares each alone.

        The store's time was taken when the work was planned, so the time here, if it is later, judges what is new.
        """
        now_us = max(self._context.time_us, self._context.clock.time_us())
        first, last = int(block.times.min()), int(block.times.max())
        check_window(self._info.name, first, first, self._options, self._context.time_us)
        check_window(self._info.name, last, last, self._options, now_us)

    def _add(self, block: SampleBlock) -> None:
        for shard, part in split_block(block, len(self._partitions)):
            self._sections[shard].log.append(part)
            self._bytes[shard] += SAMPLE_BYTES * len(part) + len(part.series.encode())
            if self._bytes[shard] >= FILE_BYTES:
                self._write(shard)

    def _has_files(self, shard: int) -> bool:
        return any(load.partition == self._partitions[shard] for load in self._done)

    def as_files(self, loads: Sequence[PreparedRows]) -> list[PreparedRows]:
        """Write loads that came as sections to files."""
        shards = {partition: shard for shard, partition in enumerate(self._partitions)}
        for load in loads:
            shard = shards[load.partition]
            self._sections[shard].update(decode_section(load.payload))
            self._bytes[shard] += SAMPLE_BYTES * load.rows
            if self._bytes[shard] >= FILE_BYTES:
                self._write(shard)
        for shard, section in enumerate(self._sections):
            if section.log:
                self._write(shard)
        return self._done

    def _write(self, shard: int) -> None:
        section, partition = self._sections[shard], self._partitions[shard]
        self._sections[shard], self._bytes[shard] = SeriesSection(), 0
        self._done.append(self._file(partition, compressed(encode_section(section)), _samples(section)))

    def _file(self, partition: PartitionId, payload: bytes, rows: int) -> PreparedRows:
        context = self._context
        (staged,) = context.reserve(partition, 1)
        context.write_file(partition, staged, payload)
        return PreparedRows(partition, file=sealed(context.fs, context.root, staged), rows=rows)


def _samples(section: SeriesSection) -> int:
    return sum(len(part) for part in section.log if isinstance(part, SampleBlock))


def bundle(loads: Sequence[PreparedRows], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
    """Arrange loads for one group: sections become files beside files, or if there are very many."""
    shards = {load.partition for load in loads if load.file is not None}
    if sum(len(load.payload) for load in loads) > BUNDLE_BYTES_MAX:
        shards = {load.partition for load in loads}
    beside = [load for load in loads if load.file is None and load.partition in shards]
    others = [load for load in loads if load.file is not None or load.partition not in shards]
    return others + SampleLoader(info, context).as_files(beside)


def staged_payload(fs: FileSystem, root: str, staged: StagedFile) -> bytes:
    """Return the section of a staged file, encoded."""
    return staged_content(fs, f"{root}/{staged.file_name}")
