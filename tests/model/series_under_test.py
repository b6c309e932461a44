"""A series shard on a simulated disk, with a manifest in memory, and a model of what it must answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tree_under_test import SETTINGS, ShardUnderTest

from penstock.journal.partitions import partition_id
from penstock.kinds.changes import open_feed
from penstock.lsm.tree_settings import TreeSettings
from penstock.partition.machine import Entry, PartitionDescriptor
from penstock.series.keys import SAMPLES
from penstock.series.labels import Labels, LabelTable, decode_labels
from penstock.series.machine import SeriesMachine
from penstock.series.memtable import SeriesMemtable
from penstock.series.options import TIME_MAX, TIME_MIN, SeriesOptions
from penstock.series.reading import SeriesState
from penstock.series.section import BucketTrim, MetricMetadata, Part, SampleBlock, SeriesDelete, SeriesSection
from penstock.series.section_codec import decode_section, encode_section
from penstock.series.selectors import parse_selector
from penstock.testing import SimulatedDisk

OPTIONS = SeriesOptions(bucket_s=300)
DESCRIPTOR = PartitionDescriptor(partition_id(1, 0), 1, 0, "metrics", "series")
Sample = tuple[Labels, int, int]  # labels, time, bits
Contents = dict[tuple[Labels, int], int]  # bits by labels and time


def labels(metric: str, **others: str) -> Labels:
    return tuple(sorted([("__name__", metric), *others.items()]))


def block(samples: Sequence[Sample]) -> SampleBlock:
    """A part of a section, as a writer makes it."""
    rows = {some: row for row, some in enumerate(dict.fromkeys(sample[0] for sample in samples))}
    return SampleBlock(
        LabelTable.of(list(rows)),
        np.array([rows[sample[0]] for sample in samples], np.uint32),
        np.array([sample[1] for sample in samples], np.int64),
        np.array([sample[2] for sample in samples], np.uint64),
    )


def select(state: SeriesState, selector: str = "{}", start: int = TIME_MIN, end: int = TIME_MAX) -> Contents:
    """What a shard holds, as the model has it; raises if a row comes twice or out of order."""
    contents: Contents = {}
    for bucket, ids in state.match(parse_selector(selector), start, end):
        by_id = dict(zip(ids.tolist(), map(decode_labels, state.labels_of(bucket, ids)), strict=True))
        last = (0, TIME_MIN - 1)
        for columns in state.read(bucket, ids, start, end):
            for number, time, bits in zip(*(column.tolist() for column in columns), strict=True):
                assert (number, time) > last, "rows come twice or out of order"
                last = (number, time)
                assert (by_id[number], time) not in contents, "a row comes twice"
                contents[by_id[number], time] = bits
    return contents


def listed(state: SeriesState) -> set[tuple[int, Labels]]:
    """The series of each bucket that a shard lists."""
    return {
        (bucket, some)
        for bucket, ids in state.match((), TIME_MIN, TIME_MAX)
        for some in map(decode_labels, state.labels_of(bucket, ids))
    }


class SeriesModel:
    """A dict that does the same, one part after the other."""

    def __init__(self, options: SeriesOptions = OPTIONS) -> None:
        self.samples: Contents = {}
        self.listed: set[tuple[int, Labels]] = set()  # bucket and series: written, and not deleted from a whole bucket
        self.metadata: dict[str, MetricMetadata] = {}
        self._options = options

    def add(self, part: Part) -> None:
        if isinstance(part, SampleBlock):
            for row, time, bits in zip(part.index.tolist(), part.times.tolist(), part.bits.tolist(), strict=True):
                self.samples[part.series.labels(row), time] = bits
                self.listed.add((self._options.bucket(time), part.series.labels(row)))
        elif isinstance(part, MetricMetadata):
            self.metadata[part.metric] = part
        elif isinstance(part, SeriesDelete):
            deleted = self.select(part.selector, part.start, part.end)
            self.samples = {key: bits for key, bits in self.samples.items() if key not in deleted}
            matchers, start = parse_selector(part.selector), self._options.bucket_start
            self.listed -= {
                (bucket, some)
                for bucket, some in self.listed
                if part.start <= start(bucket) and part.end >= start(bucket + 1)
                if all(matcher.matches(dict(some).get(matcher.name, "")) for matcher in matchers)
            }
        elif isinstance(part, BucketTrim):
            floor = self._options.bucket(part.floor)
            self.samples = {k: bits for k, bits in self.samples.items() if self._options.bucket(k[1]) >= floor}
            self.listed = {(bucket, some) for bucket, some in self.listed if bucket >= floor}

    def select(self, selector: str = "{}", start: int = TIME_MIN, end: int = TIME_MAX) -> Contents:
        matchers = parse_selector(selector)
        return {
            (some, time): bits
            for (some, time), bits in self.samples.items()
            if start <= time < end and all(m.matches(dict(some).get(m.name, "")) for m in matchers)
        }

    def copy(self) -> SeriesModel:
        copy = SeriesModel(self._options)
        copy.samples, copy.metadata, copy.listed = dict(self.samples), dict(self.metadata), set(self.listed)
        return copy


class SeriesUnderTest(ShardUnderTest):
    """A series shard with what it needs to run, reopen and replay its records."""

    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        *,
        options: SeriesOptions = OPTIONS,
        settings: TreeSettings = SETTINGS,
        grace_s: float = 60.0,
    ) -> None:
        self.records: list[tuple[int, int, bytes]] = []  # lsn, time, section
        self._options = options
        super().__init__(disk, settings=settings, memtable=SeriesMemtable, grace_s=grace_s)

    def replay(self) -> None:
        changes = self._options.changes
        feed = None if changes is None else open_feed(self.maintenance, DESCRIPTOR, self.tree, changes)
        self.machine = SeriesMachine(self.tree, self.maintenance, DESCRIPTOR, self._options, feed=feed)
        for lsn, time_us, payload in self.records:
            if lsn > self.tree.stored:
                self.apply(lsn, time_us, decode_section(payload))

    def write(self, *parts: Part) -> int:
        lsn, time_us, section = 1 + self.tree.lsn, self.clock.time_us(), SeriesSection(*parts)
        self.records.append((lsn, time_us, encode_section(section)))
        self.apply(lsn, time_us, section)
        return lsn

    def apply(self, lsn: int, time_us: int, section: SeriesSection) -> None:
        self.machine.apply(Entry(lsn, time_us, (), (section,)))

    def select(self, selector: str = "{}", start: int = TIME_MIN, end: int = TIME_MAX) -> Contents:
        state = self.machine.snapshot()
        try:
            return select(state, selector, start, end)
        finally:
            state.close()

    def listed(self) -> set[tuple[int, Labels]]:
        state = self.machine.snapshot()
        try:
            return listed(state)
        finally:
            state.close()

    def counts(self) -> dict[int, int]:
        """How many series each bucket has, by admission's count."""
        state = self.machine.snapshot()
        try:
            buckets = {bucket for bucket, _, _ in state.metric_counts(TIME_MIN, TIME_MAX)}
        finally:
            state.close()
        return {bucket: self.machine.series_count(bucket) for bucket in buckets}

    def index_rows(self) -> dict[bytes, bytes]:
        """The rows of the index: dictionary, labels, sets of ids, metadata."""
        return {key: value for key, value in self.tree.scan() if key[4] != SAMPLES}
