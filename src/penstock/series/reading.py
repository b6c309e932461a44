"""A snapshot of a series shard: index and samples at one LSN.

Samples of a group of series come from its blocks in files, newest first, and from the memtables of the snapshot, which
are newer than all files. They are decoded by chunk, filtered, and folded like the blocks of a compaction: the last
write of a series and time wins, and a tombstone deletes what is older.

Thread: any; a snapshot does not change.
Invariants: (1) all reads see one LSN, in all buckets. (2) memory is bounded by about READ_SAMPLES samples, or by one
slice of one series if that has more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap

from penstock.journal.partitions import PartitionId
from penstock.kinds import Piece, ShardSnapshot
from penstock.kinds.changes import FeedSnapshot
from penstock.lsm.file_pieces import FilePiece, size_of
from penstock.lsm.snapshot import Snapshot
from penstock.lsm.view import View
from penstock.series import index
from penstock.series.block_cache import BLOCKS
from penstock.series.blocks import Block, RunSummaries
from penstock.series.index import Check, unchecked
from penstock.series.keys import GROUP_SHIFT, SAMPLES, prefix, samples_key
from penstock.series.labels import U32
from penstock.series.memtable import SeriesMemtable
from penstock.series.operators import fold_columns
from penstock.series.options import TIME_MAX, TIME_MIN, SeriesOptions
from penstock.series.pieces import SeriesPiece, decode_piece, encode_piece, stored_range
from penstock.series.queries import scan_samples
from penstock.series.samples import Contents, Flags, Samples, SampleSteps, Tombstones, concat
from penstock.series.section import MetricMetadata, RollupProgress
from penstock.series.selectors import Matcher
from penstock.series.shard import SampleColumns
from penstock.series.slices import slice_starts, slices_between
from penstock.series.times import key_times, time_key

COLUMN_SAMPLES = 65_536  # of a column that `read` yields
READ_SAMPLES = 1 << 20  # decoded at once


class SeriesState(ShardSnapshot):
    """A shard at one LSN; `view` includes writes that are not applied yet, if it is given."""

    def __init__(
        self,
        partition: PartitionId,
        snapshot: Snapshot,
        options: SeriesOptions,
        view: View | None = None,
        feed: FeedSnapshot | None = None,
    ) -> None:
        self._partition = partition
        self.snapshot = snapshot
        self.options = options
        self.feed = feed
        self._view: View = snapshot if view is None else view

    @property
    def lsn(self) -> int:
        return self.snapshot.lsn

    def under(self, rows: SeriesMemtable) -> SeriesState:
        """Return this state with newer writes on top."""
        return SeriesState(self._partition, self.snapshot, self.options, self.snapshot.under(rows))

    def close(self) -> None:
        self.snapshot.close()
        if self.feed is not None:
            self.feed.close()

    # -- the index

    def _buckets(self, start: int, end: int) -> Iterator[int]:
        self.snapshot.check_open()
        if end <= start:
            return iter(())
        return index.buckets(self._view, self.options.bucket(start), self.options.bucket(end - 1) + 1)

    def match(
        self, matchers: Sequence[Matcher], start: int, end: int, check: Check = unchecked
    ) -> list[tuple[int, U32]]:
        matches: list[tuple[int, U32]] = []
        for bucket in self._buckets(start, end):
            check()
            ids = index.match(self._view, bucket, matchers, check)
            if ids:
                matches.append((bucket, np.array(ids, np.uint32)))
        return matches

    def labels_of(self, bucket: int, ids: U32) -> list[bytes]:
        self.snapshot.check_open()
        return index.labels_of(self._view, bucket, ids)

    def label_names(self, matchers: Sequence[Matcher], start: int, end: int, check: Check = unchecked) -> Iterable[str]:
        names: set[str] = set()
        for bucket in self._buckets(start, end):
            ids = index.match(self._view, bucket, matchers, check) if matchers else None
            names |= index.label_names(self._view, bucket, ids, check)
        return names

    def label_values(
        self, name: str, matchers: Sequence[Matcher], start: int, end: int, check: Check = unchecked
    ) -> Iterable[str]:
        values: set[str] = set()
        for bucket in self._buckets(start, end):
            check()
            ids = index.match(self._view, bucket, matchers, check) if matchers else None
            values.update(index.label_values(self._view, bucket, name, ids, check))
        return values

    def label_codes(
        self, bucket: int, name: str, ids: U32, check: Check = unchecked
    ) -> tuple[list[str], npt.NDArray[np.int64]]:
        self.snapshot.check_open()
        values, codes = [""], np.zeros(len(ids), np.int64)
        requested = BitMap(ids)
        for value, members in index.values(self._view, bucket, name, check=check):
            matches = members & requested
            if matches:
                codes[np.searchsorted(ids, np.array(matches, np.uint32))] = len(values)
                values.append(value)
        return values, codes

    def metadata(self) -> Iterable[MetricMetadata]:
        self.snapshot.check_open()
        return index.metadata(self._view)

    def metric_counts(self, start: int, end: int, check: Check = unchecked) -> Iterable[tuple[int, str, int]]:
        for bucket in self._buckets(start, end):
            check()
            yield from ((bucket, metric, count) for metric, count in index.metric_counts(self._view, bucket, check))

    def statistics(self) -> dict[str, int]:
        self.snapshot.check_open()
        version = self.snapshot.version
        files = list(version.files())
        return {
            "memory_bytes": sum(memtable.bytes for memtable in version.memtables()),
            "files": len(files),
            "file_bytes": sum(file.meta.size_bytes for file in files),
            "runs": len(version.runs),
        }

    # -- rollups

    def changed_hours(self, done: RollupProgress) -> Iterator[int]:
        """Yield the hours that changed after what a rollup has computed."""
        for bucket in self._buckets(TIME_MIN, TIME_MAX):
            for hour, lsn in index.changed_hours(self._view, bucket):
                if lsn > (max(done.lsn, done.hour_lsn) if hour <= done.hour else done.lsn):
                    yield hour

    def trimmed_us(self) -> int:
        """Return the time below which retention has deleted what was written before."""
        return max(TIME_MIN, self.options.bucket_start(index.trimmed_bucket(self._view)))

    def rollup_progress(self) -> RollupProgress:
        """Return how far this shard of a rollup table is computed."""
        self.snapshot.check_open()
        return index.rollup_progress(self._view)

    # -- samples

    def read(
        self, bucket: int, ids: U32, start: int, end: int, steps: SampleSteps | None = None
    ) -> Iterator[SampleColumns]:
        waiting: list[Samples] = []
        count = 0
        for part in self._parts(bucket, ids, start, end):
            samples = part.samples(steps=steps)
            waiting.append(samples)
            count += len(samples)
            if count >= COLUMN_SAMPLES:
                yield from _columns(concat([some for some in waiting if len(some)]))
                waiting, count = [], 0
        yield from _columns(concat([some for some in waiting if len(some)]))

    def read_summarized(
        self, bucket: int, ids: U32, start: int, end: int, step_us: int
    ) -> Iterator[tuple[SampleColumns, RunSummaries]]:
        waiting: list[Samples] = []
        summaries: list[RunSummaries] = []
        count = 0
        for part in self._parts(bucket, ids, start, end):
            whole = part.whole_runs(step_us)
            waiting.append(part.samples(whole))
            summaries += [block.summaries(some) for block, some in zip(part.blocks(), whole, strict=True) if some.any()]
            count += len(waiting[-1])
            if count >= COLUMN_SAMPLES:
                yield _summarized(waiting, summaries)
                waiting, summaries, count = [], [], 0
        yield _summarized(waiting, summaries)

    def _parts(self, bucket: int, ids: U32, start: int, end: int) -> Iterator[_Part]:
        """Divide the samples of some ids in a range of time into parts, ordered by id and time."""
        memory = self._memory(bucket)
        groups = ids >> GROUP_SHIFT
        starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1])) if len(ids) else np.empty(0, np.intp)
        for first, last in pairwise([*starts.tolist(), len(ids)]):
            self.snapshot.check_open()
            slices = self._slices(bucket, int(groups[first]), start, end)
            for some, part in _bounded(slices, ids[first:last]):
                low, high = part[0].start, part[-1].end
                yield _Part(some, part, [_from_memory(contents, some, low, high) for contents in memory])

    def _slices(self, bucket: int, group: int, start: int, end: int) -> list[_Slice]:
        """Return the slices of a group that overlap a range of time."""
        slices: list[_Slice] = []
        for first, low, high in slices_between(slice_starts(self._view, bucket, group), start, end):
            stored = self._view.live_values(samples_key(bucket, group, first), BLOCKS.row)
            blocks = [value if isinstance(value, Block) else Block(value) for value in reversed(stored)]
            slices.append(_Slice(low, high, blocks))
        return slices

    def _memory(self, bucket: int) -> list[Contents]:
        """Return what memtables hold of a bucket, oldest first."""
        floor = self._view.deleted_below(prefix(bucket, SAMPLES))
        memtables = [table for table in self._view.memtables() if isinstance(table, SeriesMemtable)]
        return [table.contents(bucket) for table in reversed(memtables) if table.lsn_last >= floor]

    # -- ranges of time, as keys: see `times`

    def scan_arrow(self, start: bytes, end: bytes | None) -> Iterator[Any]:
        return scan_samples(self, *key_times(start, end))

    def pieces(self, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """Divide a range of time into pieces of whole buckets, but for its ends."""
        buckets = list(self._buckets(*key_times(start, end)))
        each = max(1, -(-len(buckets) // count))
        borders = [start, *(time_key(self.options.bucket_start(bucket)) for bucket in buckets[each::each]), end]
        version, now_us = self.snapshot.version, self.snapshot.now_us
        share = size_of(version, *stored_range(self.options, start, end)) // (len(borders) - 1)
        pieces: list[Piece] = []
        for low, high in pairwise(borders):
            assert low is not None
            stored = FilePiece.of(version, now_us, *stored_range(self.options, low, high))
            pieces.append(Piece(self._partition, low, high, encode_piece(SeriesPiece(self.options, stored)), share))
        return pieces


def read_piece(
    piece: Piece, root: str, identity: bytes, columns: Collection[str] | None = None
) -> Iterator[Any] | None:
    """Return record batches of a piece from its files, of some columns; None if they cannot be read from here."""
    state = open_piece(piece, root, identity)
    return None if state is None else scan_samples(state, *key_times(piece.start, piece.end), columns)


def open_piece(piece: Piece, root: str, identity: bytes) -> SeriesState | None:
    """Return a state with the buckets of a piece, from its files; None if they cannot be read from here."""
    detail = decode_piece(piece.detail)
    version = detail.stored.open(root, identity)
    if version is None:
        return None
    return SeriesState(piece.partition, Snapshot(version, detail.stored.now_us, lambda _: None), detail.options)


def check_piece(piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]]:
    """Check every page of the files that begin in a piece; return (path, reason) for each damage."""
    detail = decode_piece(piece.detail)
    return list(detail.stored.damage(*stored_range(detail.options, piece.start, piece.end), root, identity))


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of a range of time, and the blocks that hold it, oldest first."""

    start: int
    end: int
    blocks: list[Block]

    def count(self, ids: U32) -> int:
        """Return how many samples of some series have to be decoded, at least."""
        chosen = (block.runs["count"][block.select(ids, self.start, self.end)] for block in self.blocks)
        return sum(int(counts.sum(dtype=np.int64)) for counts in chosen)


@dataclass(frozen=True, slots=True)
class _Part:
    """Some ids of a group in a part of a range of time, with all that memory and files hold of them."""

    ids: U32
    slices: list[_Slice]
    memory: list[Contents]  # oldest first, and newer than all blocks

    @property
    def start(self) -> int:
        return self.slices[0].start

    @property
    def end(self) -> int:
        return self.slices[-1].end

    def blocks(self) -> list[Block]:
        return [block for each in self.slices for block in each.blocks]

    def samples(self, whole: Sequence[Flags] | None = None, steps: SampleSteps | None = None) -> Samples:
        """Return the samples, without those of some runs of each block; with `steps`, perhaps only the last of each."""
        blocks = self.blocks()
        chosen = [block.select(self.ids, self.start, self.end) for block in blocks]
        if whole is None and len(blocks) == 1 and not len(blocks[0].deleted) and not self._in_memory():
            return blocks[0].between(chosen[0], self.start, self.end, steps)  # sorted and distinct as it is
        if whole is not None:
            chosen = [which & ~some for which, some in zip(chosen, whole, strict=True)]
        columns = [
            (block.between(which, self.start, self.end), block.deleted)
            for block, which in zip(blocks, chosen, strict=True)
        ]
        samples = fold_columns([*columns, *self.memory])[0]
        return samples if steps is None else steps.thinned(samples)

    def _in_memory(self) -> bool:
        return any(len(samples) or len(deleted) for samples, deleted in self.memory)

    def whole_runs(self, step_us: int) -> list[Flags]:
        """Return, for each block, the runs that lie in one step of time and that no other block or delete touches."""
        blocks = self.blocks()
        chosen = [block.select(self.ids, self.start, self.end) for block in blocks]
        whole = [
            block.in_one_step(which, self.start, self.end, step_us) for block, which in zip(blocks, chosen, strict=True)
        ]
        if any(some.any() for some in whole):
            touched = self._touched(blocks, chosen)
            if len(touched):
                whole = [some & ~np.isin(block.runs["id"], touched) for block, some in zip(blocks, whole, strict=True)]
        return whole

    def _touched(self, blocks: list[Block], chosen: list[Flags]) -> U32:
        """Return ids with samples in memory, tombstones, or runs of several blocks that overlap in time."""
        touched = [block.deleted.ids for block in blocks]
        touched += [ids for samples, deleted in self.memory for ids in (samples.ids, deleted.ids)]
        if len(blocks) > 1:
            ids, first, last = (
                np.concatenate([block.runs[name][which] for block, which in zip(blocks, chosen, strict=True)])
                for name in ("id", "first_time", "last_time")
            )
            order = np.lexsort((first, ids))
            ids, first, last = ids[order], first[order], last[order]
            touched.append(ids[1:][(ids[1:] == ids[:-1]) & (first[1:] <= last[:-1])])
        return np.concatenate(touched) if touched else np.zeros(0, np.uint32)


def _summarized(waiting: list[Samples], summaries: list[RunSummaries]) -> tuple[SampleColumns, RunSummaries]:
    samples = concat([some for some in waiting if len(some)])
    columns = zip(*summaries, strict=True) if summaries else ([np.zeros(0)] for _ in RunSummaries._fields)
    return (samples.ids, samples.times, samples.bits), RunSummaries(*map(np.concatenate, columns))


def _bounded(slices: list[_Slice], ids: U32) -> Iterator[tuple[U32, list[_Slice]]]:
    """Divide the ids of a group, then the time of a single one, so that no part has more than READ_SAMPLES samples."""
    if len(ids) * len(slices) <= 1 or sum(each.count(ids) for each in slices) <= READ_SAMPLES:
        yield ids, slices
    elif len(ids) > 1:
        half = len(ids) // 2
        yield from _bounded(slices, ids[:half])
        yield from _bounded(slices, ids[half:])
    else:
        for each in slices:
            yield ids, [each]


def _from_memory(contents: Contents, ids: U32, start: int, end: int) -> Contents:
    samples, deleted = contents
    low, high = np.searchsorted(samples.ids, (ids[0], ids[-1] + np.uint32(1)))
    some = Samples(samples.ids[low:high], samples.times[low:high], samples.bits[low:high])
    inside = (some.times >= start) & (some.times < end)
    if len(ids) != int(ids[-1]) - int(ids[0]) + 1:
        inside &= ids[np.minimum(np.searchsorted(ids, some.ids), len(ids) - 1)] == some.ids
    first, last = np.searchsorted(deleted.ids, (ids[0], ids[-1] + np.uint32(1)))
    tombstones = Tombstones(deleted.ids[first:last], deleted.starts[first:last], deleted.ends[first:last])
    return (some if inside.all() else some.take(inside)), tombstones


def _columns(samples: Samples) -> Iterator[SampleColumns]:
    for at in range(0, len(samples), COLUMN_SAMPLES):
        some = slice(at, at + COLUMN_SAMPLES)
        yield samples.ids[some], samples.times[some], samples.bits[some]
