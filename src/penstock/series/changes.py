"""The changes of a series shard: what a record does to its samples, for the change feed; see `kinds.changes`.

A row of a series table is a sample: its labels and its time identify it. Most records append to series, so a shard
remembers, for each id of a bucket, a time after which it has no sample: a later one is an insert, and nothing is read.
The other buckets of a record are compared with the samples that they had. Metadata of metrics is not in the feed.

A part (see docs/format/changes.md): a header, the type of each change unless all are inserts, and a block of samples.

Thread: the one that applies; decoding in any.
Invariant: a remembered time is never before a sample of the tree, whatever becomes of the record that raised it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import CorruptionError
from penstock.journal.partitions import PartitionId
from penstock.kinds.changes import INSERT, PART_BYTES, POSTIMAGE, PREIMAGE, REMOVAL, ChangePart, Feed
from penstock.lsm.tree import Tree
from penstock.series import index
from penstock.series.arrow import SAMPLES, LabelColumns, sample_batch
from penstock.series.drafts import RecordDraft
from penstock.series.labels import U32, LabelTable, decode_labels
from penstock.series.operators import fold_columns
from penstock.series.options import SERIES_MAX, TIME_MAX, TIME_MIN, SeriesOptions
from penstock.series.reading import SeriesState
from penstock.series.samples import I64, Flags, Samples, deleted_by, sorted_distinct
from penstock.series.section import SampleBlock
from penstock.series.section_codec import decode_block, encode_block

Types: TypeAlias = npt.NDArray[np.uint8]  # of changes
CHANGE_COLUMNS = pa.schema([field.with_nullable(field.name == "value") for field in SAMPLES])
BUCKETS_REMEMBERED_MAX = 64
IDS_REMEMBERED_MAX = 1 << 22  # of all buckets together, but for the last one used
SHOWN_BYTES_MAX = 64 << 20  # of the labels of a part, when each sample shows those of its series
_UNKNOWN, _NONE = np.iinfo(np.int64).max, np.iinfo(np.int64).min
_INSERTS, _CHANGES = 0, 1
_HEADER = struct.Struct("<BBxxI")  # form, whether deletes have values, changes


class NewestTimes:
    """For each id of a bucket, a time after which it has no samples."""

    def __init__(self) -> None:
        self._buckets: dict[int, I64] = {}  # by id; the least recently used first

    def of(self, bucket: int, ids: int) -> I64:
        """Return the times of the ids below `ids`, to be raised in place."""
        times = self._buckets.pop(bucket, None)
        if times is None or len(times) < ids:
            grown = np.full(max(ids, 2 * len(times) if times is not None else ids), _UNKNOWN, np.int64)
            if times is not None:
                grown[: len(times)] = times
            times = grown
        total = len(times) + sum(map(len, self._buckets.values()))
        while self._buckets and (total > IDS_REMEMBERED_MAX or len(self._buckets) >= BUCKETS_REMEMBERED_MAX):
            total -= len(self._buckets.pop(next(iter(self._buckets))))
        self._buckets[bucket] = times
        return times

    def forget(self, end: int) -> None:
        """Forget the buckets below `end`: their ids are assigned anew."""
        for bucket in [bucket for bucket in self._buckets if bucket < end]:
            del self._buckets[bucket]

    def append(self, bucket: int, samples: Samples, known_last: int | None) -> bool:
        """Raise the times to those of new samples; return whether all are distinct and the latest of their series.

        `known_last`: the last id of the bucket that has samples, if that is known.
        """
        ordered = sorted_distinct(samples)
        ends = np.append(ordered.ids[1:] != ordered.ids[:-1], True)
        ids = ordered.ids[ends]
        times = self.of(bucket, int(ids[-1]) + 1)
        before = times[ids]
        if known_last is not None:
            before[(ids > known_last) & (before == _UNKNOWN)] = _NONE
        times[ids] = np.maximum(before, ordered.times[ends])
        first = ordered.times[np.append(True, ends[:-1])]
        return len(ordered) == len(samples) and bool((first > before).all())


class RowsBefore:
    """The samples of a shard before a record; a snapshot is taken when they are first read."""

    def __init__(self, tree: Tree, partition: PartitionId, options: SeriesOptions) -> None:
        self._tree = tree
        self._partition = partition
        self.options = options
        self._state: SeriesState | None = None

    def __enter__(self) -> RowsBefore:
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is not None:
            self._state.close()

    @property
    def state(self) -> SeriesState:
        if self._state is None:
            self._state = SeriesState(self._partition, self._tree.snapshot(), self.options)
        return self._state

    def buckets(self, end: int) -> set[int]:
        """Return the buckets below `end` that have series."""
        return set(index.buckets(self._tree.view, 0, end)) if end else set()

    def ids(self, bucket: int) -> U32:
        """Return the ids of a bucket that have samples."""
        return np.array(index.match(self._tree.view, bucket, ()), np.uint32)

    def read(self, bucket: int, ids: U32, start: int, end: int) -> Iterator[Samples]:
        """Yield the samples of some ids, ascending, in a range of time."""
        if len(ids) and start < end:
            for sample_ids, times, bits in self.state.read(bucket, ids, start, end):
                if len(sample_ids):
                    yield Samples(sample_ids, times, bits)

    def block(self, bucket: int, samples: Samples) -> SampleBlock:
        """Return samples with the labels that their ids have in the tree."""
        ids, rows = np.unique(samples.ids, return_inverse=True)
        table = LabelTable.of(list(map(decode_labels, index.labels_of(self._tree.view, bucket, ids))))
        return SampleBlock(table, rows.reshape(-1).astype(np.uint32), samples.times, samples.bits)


class _Changes(NamedTuple):
    types: Types | None  # None: all are inserts
    samples: SampleBlock


def record_changes(feed: Feed, before: RowsBefore, draft: RecordDraft, newest: NewestTimes, time_us: int) -> None:
    """Record what a draft changes. Requires: it is not applied."""
    preimages = feed.options.preimages
    changes = _changes(before, draft, newest, preimages)
    feed.record(draft.lsn, time_us, _in_parts(changes, preimages))


def _changes(before: RowsBefore, draft: RecordDraft, newest: NewestTimes, preimages: bool) -> Iterator[_Changes]:
    newest.forget(draft.trimmed)
    compared = before.buckets(draft.trimmed) | {part.bucket for part in draft.parts if len(part.deleted)}
    begun: set[int] = set()
    for part, _, _ in draft.written:
        bucket = part.bucket
        # A trimmed bucket is not remembered: if this record is set aside, its ids are as before.
        known_last = None if bucket in begun else draft.known_last(bucket)
        begun.add(bucket)
        if bucket < draft.trimmed or not newest.append(bucket, part.samples, known_last):
            compared.add(bucket)
    for part, series, rows in draft.written:
        if part.bucket not in compared:
            yield _Changes(None, SampleBlock(series, rows, part.samples.times, part.samples.bits))
    for bucket in sorted(compared):
        yield from _Comparison(before, draft, bucket).changes(newest, preimages)


class _Comparison:
    """The changes that a record makes to one bucket, by comparison with the samples that the bucket had."""

    def __init__(self, before: RowsBefore, draft: RecordDraft, bucket: int) -> None:
        self._before = before
        self._bucket = bucket
        self._trimmed = bucket < draft.trimmed
        self._written = [written for written in draft.written if written.part.bucket == bucket]
        parts = ((part.samples, part.deleted) for part in draft.parts if part.bucket == bucket)
        self._after, self._deleted = fold_columns(parts)
        self._older = np.zeros(len(self._after), np.uint64)  # the value before, for those that had one
        self._had = np.zeros(len(self._after), np.bool_)
        known_last = draft.known_last(bucket)
        self._known_last = SERIES_MAX + 1 if known_last is None else known_last
        self._ids_now = self._renumbered() if self._trimmed else {}

    def changes(self, newest: NewestTimes, preimages: bool) -> Iterator[_Changes]:
        for samples in self._read_trimmed() if self._trimmed else self._read(newest):
            positions = _positions(self._after, self._now(samples.ids) if self._trimmed else samples.ids, samples.times)
            same = positions >= 0
            self._had[positions[same]] = True
            self._older[positions[same]] = samples.bits[same]
            is_removed: Flags = ~same
            if not self._trimmed:
                is_removed &= deleted_by(samples, self._deleted)
            if is_removed.any():
                removed = self._before.block(self._bucket, samples.take(is_removed))
                yield _Changes(np.full(len(removed), REMOVAL, np.uint8), removed)
        if len(self._after):
            yield self._writes(preimages)

    # -- the samples before

    def _read_trimmed(self) -> Iterator[Samples]:
        return self._before.read(self._bucket, self._before.ids(self._bucket), TIME_MIN, TIME_MAX)

    def _read(self, newest: NewestTimes) -> Iterator[Samples]:
        """Yield the samples that the record may replace or delete, and learn the newest times of its series."""
        after, deleted = self._after, self._deleted
        ids = np.unique(deleted.ids)
        if len(ids):
            low, high = int(deleted.starts.min()), int(deleted.ends.max())
            again = np.isin(after.ids, ids)
            if again.any():
                low, high = min(low, int(after.times[again].min())), max(high, int(after.times[again].max()) + 1)
            yield from self._before.read(self._bucket, ids[ids <= self._known_last], low, high)
        written = np.setdiff1d(after.ids, ids)
        written = written[written <= self._known_last]
        if not len(written):
            return
        times = newest.of(self._bucket, int(after.ids[-1]) + 1)
        mine = np.isin(after.ids, written)
        low, high = int(after.times[mine].min()), int(after.times[mine].max()) + 1
        unknown = bool((times[written] == _UNKNOWN).any())
        latest = np.full(len(written), _NONE, np.int64)
        np.maximum.at(latest, np.searchsorted(written, after.ids[mine]), after.times[mine])
        for samples in self._before.read(self._bucket, written, low, TIME_MAX if unknown else high):
            np.maximum.at(latest, np.searchsorted(written, samples.ids), samples.times)
            yield samples
        if unknown:  # all after `low` was read, and what is before it is before a sample of this record
            times[written] = latest

    def _renumbered(self) -> dict[bytes, int]:
        """Return the ids of the series that the record writes, by their labels."""
        return {
            labels: number
            for part, series, rows in self._written
            for labels, number in zip(series.label_bytes(rows.tolist()), part.samples.ids.tolist(), strict=True)
        }

    def _now(self, ids: U32) -> U32:
        """Return the ids that series of a trimmed bucket have again; 0 for those that were not written since."""
        if not self._ids_now:
            return np.zeros(len(ids), np.uint32)
        before, rows = np.unique(ids, return_inverse=True)
        labels = self._before.state.labels_of(self._bucket, before)
        return np.array([self._ids_now.get(some, 0) for some in labels], np.uint32)[rows.reshape(-1)]

    # -- the samples after

    def _writes(self, preimages: bool) -> _Changes:
        """Return the changes to samples that the record writes."""
        rows = np.repeat(np.arange(len(self._after)), 1 + (self._had if preimages else np.zeros_like(self._had)))
        types = np.where(self._had, np.uint8(POSTIMAGE), np.uint8(INSERT))[rows]
        samples = self._after.take(rows)
        if preimages:
            first = np.append(rows[1:] == rows[:-1], False)  # of two: the preimage
            types[first] = PREIMAGE
            bits = np.where(first, self._older[rows], samples.bits)
            samples = Samples(samples.ids, samples.times, bits)
        return _Changes(types, self._labelled(samples))

    def _labelled(self, samples: Samples) -> SampleBlock:
        series = self._written[0].series
        if all(written.series is series for written in self._written):
            row_of = np.zeros(max(int(written.part.samples.ids.max()) for written in self._written) + 1, np.uint32)
            for written in self._written:
                row_of[written.part.samples.ids] = written.rows
            return SampleBlock(series, row_of[samples.ids], samples.times, samples.bits)
        labels: dict[int, bytes] = {}
        for part, table, rows in self._written:
            some, first = np.unique(rows, return_index=True)
            labels.update(zip(part.samples.ids[first].tolist(), table.label_bytes(some.tolist()), strict=True))
        ids, series_rows = np.unique(samples.ids, return_inverse=True)
        table = LabelTable.of([decode_labels(labels[some]) for some in ids.tolist()])
        return SampleBlock(table, series_rows.reshape(-1).astype(np.uint32), samples.times, samples.bits)


def _positions(samples: Samples, ids: U32, times: I64) -> npt.NDArray[np.intp]:
    """Return where each (id, time) stands among sorted samples; -1 if it does not. Those with an id are distinct."""
    positions = np.full(len(ids), -1, np.intp)
    first, last = np.searchsorted(samples.ids, ids.min()), np.searchsorted(samples.ids, ids.max(), "right")
    count = int(last - first)
    if count <= 0:
        return positions
    all_ids = np.concatenate((samples.ids[first:last], ids))
    all_times = np.concatenate((samples.times[first:last], times))
    order = np.lexsort((np.arange(len(all_ids)) >= count, all_times, all_ids))
    all_ids, all_times = all_ids[order], all_times[order]
    same = (all_ids[1:] == all_ids[:-1]) & (all_times[1:] == all_times[:-1]) & (order[:-1] < count)
    positions[order[1:][same] - count] = order[:-1][same] + first
    return positions


# -- bytes


def _in_parts(changes: Iterable[_Changes], preimages: bool) -> Iterator[ChangePart]:
    """Encode changes in parts of about PART_BYTES."""
    for types, samples in changes:
        yield from _split(types, samples, preimages)


def _split(types: Types | None, samples: SampleBlock, preimages: bool) -> Iterator[ChangePart]:
    count = len(samples)
    small = len(samples.series.encode()) + 21 * count <= 2 * PART_BYTES
    half = count // 2
    if types is not None and half and types[half - 1] == PREIMAGE:
        half += 1  # its postimage, too: readers put the samples of a series in a part together
    label_bytes = int(samples.series.label_sizes()[samples.index].sum())  # each sample shows the labels of its series
    if half in (0, count) or (small and label_bytes <= SHOWN_BYTES_MAX):
        yield _part(types, samples, preimages)
        return
    for some in (slice(0, half), slice(half, count)):
        rows, series_rows = np.unique(samples.index[some], return_inverse=True)
        table = samples.series.take(rows.astype(np.intp))
        part = SampleBlock(table, series_rows.reshape(-1).astype(np.uint32), samples.times[some], samples.bits[some])
        yield from _split(None if types is None else types[some], part, preimages)


def _part(types: Types | None, samples: SampleBlock, preimages: bool) -> ChangePart:
    header = _HEADER.pack(_INSERTS if types is None else _CHANGES, preimages, len(samples))
    stored = b"" if types is None else types.tobytes()
    return ChangePart(len(samples), (header, stored, *encode_block(samples)))


def read_changes(data: bytes) -> tuple[bytes, pa.RecordBatch]:
    """Decode a part: the types of the changes, and the samples."""
    try:
        form, has_values, count = _HEADER.unpack_from(data)
        at = _HEADER.size
        if form not in (_INSERTS, _CHANGES):
            raise ValueError(f"it has the form {form}")
        types = np.zeros(count, np.uint8) if form == _INSERTS else np.frombuffer(data, np.uint8, count, at)
        block = decode_block(data[at + (0 if form == _INSERTS else count) :])
        if len(block) != count or types.max(initial=0) > REMOVAL or block.index.max(initial=0) >= len(block.series):
            raise ValueError("its samples are not those of its types")
    except (ValueError, KeyError, struct.error, CorruptionError) as error:
        raise CorruptionError("a change feed", 0, f"changes of series do not decode ({error})") from None
    rows: npt.NDArray[np.intp] = block.index.astype(np.intp)
    times, bits = block.times, block.bits
    if (rows[1:] < rows[:-1]).any():  # the samples of a series together; a preimage stays before its postimage
        order = np.argsort(rows, kind="stable")
        rows, times, bits, types = rows[order], times[order], bits[order], types[order]
    batch = sample_batch(LabelColumns(block.series.label_bytes()), rows, times, bits)
    value = batch.column("value")
    if not has_values and (types == REMOVAL).any():
        value = pa.array(value.to_numpy(), mask=types == REMOVAL)
    columns = [*batch.columns[:3], value]
    return types.tobytes(), pa.record_batch(columns, schema=CHANGE_COLUMNS)
