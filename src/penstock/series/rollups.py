"""Rollup tables: count, sum, min, max and last of each series and step of another table, computed by jobs.

A source shard marks each hour in which a record changed samples, with the LSN of that record. A rollup table remembers
the LSN up to which it is computed. A job computes the hours that were marked since, whole: it reads them from a
snapshot, in parts of a few steps that run in any process, and commits for each range of steps its deletion in the
rollup together with its new samples, as many ranges at once as make a commit of moderate size; the last commit has the
LSN. So late samples and deletes are followed, a job that ends early or is repeated does no harm, and readers see whole
steps. A rollup also remembers the id of its source: when that was dropped and another table has its name, the first job
for the new one deletes all that the rollup holds. Until then the rollup keeps it.

A step of which the source's retention has deleted a part is never computed again: one late sample would replace what
the rollup has of all the deleted ones.

A sample of `cpu{host="a"}` counts in `cpu:count`, `cpu:sum`, `cpu:min`, `cpu:max` and `cpu:last` of `{host="a"}`, at
the time at which its step begins. Staleness markers are left out.

Thread: `RollupPlan` in the owner, one at a time for a table (the gate of its job ensures it); `roll_part` anywhere.
Invariant: the samples of a rollup are at least as new as the LSN it remembers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import Invalid, KindMismatch, NotFound
from penstock.kinds import Host, Piece, QueryContext, SnapshotReading, partitions_of
from penstock.lsm.file_pieces import CARRIED_BYTES_MAX
from penstock.lsm.writer import index_path
from penstock.partition.ledger_records import TableInfo
from penstock.partition.pending import PendingGroup
from penstock.scheduler.offers import JobPart
from penstock.scheduler.task import StopSignal
from penstock.scheduler.work import WorkCancelled, pack
from penstock.series.aggregate import Totals, without_stale
from penstock.series.labels import METRIC, VALUE_BYTES_MAX, LabelTable, decode_labels
from penstock.series.options import HOUR_S, HOUR_US, SECOND_US, TIME_MAX, TIME_MIN, Rollup
from penstock.series.pieces import decode_piece
from penstock.series.queries import SelectedSeries, SeriesQuery, encode_query
from penstock.series.reading import SeriesState, open_piece
from penstock.series.section import RollupProgress, SampleBlock, SeriesDelete, SeriesSection, split_block
from penstock.series.section_codec import compressed, decode_section, encode_section
from penstock.series.times import key_times, time_key

ROLLED = ("count", "sum", "min", "max", "last")
HOURS_MAX = 24 * 7  # of one job: the next one goes on
JOB_RESULTS = 2_000_000  # of one job, about: series x steps
PART_HOURS = 24
PART_RESULTS = 100_000  # of one part, about
COMMIT_BYTES = 16 << 20  # of the samples of one commit: twice this at most
SAMPLE_BYTES = 20
NOTHING = RollupProgress(0)
HOURS = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in ("hour", "start")])
DONE = pa.schema([pa.field(name, pa.int64(), nullable=False) for name in RollupProgress.__struct_fields__])


# -- queries of plans


_encode = msgspec.msgpack.Encoder().encode
_progress = msgspec.msgpack.Decoder(RollupProgress)


def decode_progress(argument: bytes) -> RollupProgress:
    """Decode the argument of `changed_hours` and `rollup_progress`; `Invalid` if it is malformed."""
    try:
        return _progress.decode(argument)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"the argument of a query does not decode: {error}") from None


def changed_hours(done: RollupProgress, shards: Sequence[SeriesState], context: QueryContext) -> Iterator[Any]:
    """Yield the hours, counted from 1970, that changed in any shard after what a rollup has computed.

    An hour is computed from the time on at which retention has deleted nothing of it: see the top of the module.
    """
    hours: set[int] = set()
    floor = TIME_MIN
    for shard in shards:
        context.check()
        hours.update(shard.changed_hours(done))
        floor = max(floor, shard.trimmed_us())
    changed = np.array(sorted(hours), np.int64)
    yield pa.record_batch([pa.array(changed), pa.array(np.maximum(changed * HOUR_US, floor))], schema=HOURS)


def rollup_progress(shards: Sequence[SeriesState]) -> Iterator[Any]:
    """Yield how far a rollup is computed. All shards have the same: it is written to all in one group."""
    done = shards[0].rollup_progress()
    yield pa.record_batch([pa.array([getattr(done, name)], pa.int64()) for name in DONE.names], schema=DONE)


# -- plans


def check_source(name: str, rollup: Rollup, source: TableInfo | None, kind: str) -> None:
    """Raise `Invalid`, `NotFound` or `KindMismatch` if a new table cannot be a rollup of `source`."""
    if rollup.source == name:
        raise Invalid(f"table {name} cannot be a rollup of itself: name another series table in Rollup(source=)")
    if source is None:
        raise NotFound(f"there is no table {rollup.source} to make a rollup of: create it first, or correct source=")
    if source.kind != kind:
        raise KindMismatch(f"table {rollup.source} is of the kind {source.kind}: a rollup is made of a series table")


def plan_rollup(info: TableInfo, rollup: Rollup, host: Host) -> RollupPlan | None:
    """Plan the next computation of a rollup table; None if it is up to date or has no source."""
    source = host.port.table(rollup.source)
    if source is None or source.kind != info.kind or source.table_id == info.table_id:
        return None
    for partition in partitions_of(source):
        machine = host.machine(partition)
        if machine.memory_bytes() > CARRIED_BYTES_MAX // 2:  # parts carry few rows that are in no file
            machine.store_now()
    snapshot = host.port.snapshot()
    try:
        (row,) = [row for batch in _query(snapshot, info, "rollup_progress") for row in batch.to_pylist()]
        done = RollupProgress(**row)
        anew = done.source not in (0, source.table_id)
        done = RollupProgress(0) if anew else done
        rows = [row for batch in _query(snapshot, source, "changed_hours", done) for row in batch.to_pylist()]
        hours = [(row["hour"], row["start"]) for row in rows]
        if hours or anew:
            due = _Due(done, hours, anew, rollup.step_s, _series_count(snapshot, source))
            return RollupPlan(info, source, host, snapshot, due)
    except BaseException:
        snapshot.close()
        raise
    snapshot.close()
    return None


def _query(snapshot: SnapshotReading, info: TableInfo, name: str, argument: RollupProgress = NOTHING) -> Iterator[Any]:
    return snapshot.query(info, name, _encode(argument))


def _series_count(snapshot: SnapshotReading, source: TableInfo) -> int:
    """Return the number of series of the bucket that has most, at least 1."""
    batches = snapshot.query(source, "statistics", encode_query(SeriesQuery()))
    return max(1, *(int(row["series"]) for batch in batches for row in batch.to_pylist()))


class _Due(msgspec.Struct, frozen=True):
    """What a rollup has to compute."""

    done: RollupProgress
    hours: list[tuple[int, int]]  # ascending; each with the time from which on it is computed
    anew: bool  # what the rollup holds is of an earlier source of the same name: it is deleted
    step_s: int
    series: int  # in the bucket that has most

    @property
    def hours_max(self) -> int:
        """The most hours that the next job computes."""
        return min(HOURS_MAX, max(1, JOB_RESULTS * self.step_s // (HOUR_S * self.series)))

    @property
    def step_us(self) -> int:
        return self.step_s * SECOND_US

    def ranges(self) -> list[tuple[int, int]]:
        """The ranges of time of the next job, one for each part."""
        longest_us = min(max(1, PART_RESULTS // self.series) * self.step_us, PART_HOURS * HOUR_US)
        return _ranges(self.hours[: self.hours_max], self.step_us, longest_us)

    def before(self, source: int) -> RollupProgress:
        """How far the rollup is computed until the next job is done."""
        return RollupProgress(0, source=source) if self.anew else self.done

    def after(self, lsn: int, source: int) -> RollupProgress:
        """How far the rollup is computed when the next job, which read this LSN, is done."""
        if len(self.hours) <= self.hours_max:
            return RollupProgress(lsn, source=source)
        return RollupProgress(self.done.lsn, self.hours[self.hours_max - 1][0], lsn, source)


class RollupPlan:
    """One computation of a rollup table: a `Derivation`."""

    function: str = f"{__name__}:roll_part"

    def __init__(self, info: TableInfo, source: TableInfo, host: Host, snapshot: SnapshotReading, due: _Due) -> None:
        self._info = info
        self._host = host
        self._snapshot = snapshot
        self._before, self._after = due.before(source.table_id), due.after(snapshot.lsn, source.table_id)
        self._anew = due.anew
        self._ranges: list[tuple[int, int]] = []  # of each part
        parts: list[JobPart] = []
        for start, end in due.ranges():
            for partition in partitions_of(source):
                for piece in snapshot.pieces(partition, 1, time_key(start), time_key(end)):
                    self._ranges.append((start, end))
                    parts.append(self._part(piece, due.step_us))
        self.parts: Sequence[JobPart] = parts

    def _part(self, piece: Piece, step_us: int) -> JobPart:
        arguments: dict[str, Any] = {
            "partition": int(piece.partition),
            "start": piece.start,
            "end": piece.end,
            "detail": piece.detail,
            "step_us": step_us,
            "shards": self._info.shards,
            "identity": self._host.identity,
        }
        names = [meta.file_name for meta in decode_piece(piece.detail).stored.files]
        return JobPart(arguments=pack(arguments), reads=tuple(n for name in names for n in (name, index_path(name))))

    def commit(self, results: Sequence[Any]) -> None:
        """Replace the steps that were computed, then write how far the rollup is."""
        group = _RollupGroup(self._info, self._host, self._before)
        if self._anew:
            group.delete(TIME_MIN, TIME_MAX)
        before: tuple[int, int] | None = None
        for steps, result in zip(self._ranges, results, strict=True):
            if steps != before:  # the parts of one range follow each other
                group.commit_above(COMMIT_BYTES // 4)
                group.delete(*steps)
                before = steps
            for shard, encoded in enumerate(result):
                for block in decode_section(encoded).parts if encoded else ():
                    assert isinstance(block, SampleBlock)
                    group.add(shard, block)
        group.commit(self._after)

    def close(self) -> None:
        self._snapshot.close()


class _RollupGroup:
    """Commits of a rollup: deletes and samples are collected until they are many."""

    def __init__(self, info: TableInfo, host: Host, progress: RollupProgress) -> None:
        self._partitions = partitions_of(info)
        self._host = host
        self._progress = progress  # of all commits but the last
        self._begin()

    def _begin(self) -> None:
        self._sections = [SeriesSection() for _ in self._partitions]
        self._bytes = 0

    def delete(self, start: int, end: int) -> None:
        """Delete a range of time."""
        for section in self._sections:
            section.log.append(SeriesDelete("{}", start, end))

    def add(self, shard: int, block: SampleBlock) -> None:
        """Add samples. Steps with very many series are divided: for a moment, readers see a part of them."""
        rows = COMMIT_BYTES // SAMPLE_BYTES
        for start in range(0, len(block), rows):
            self.commit_above(COMMIT_BYTES)
            some = block if len(block) <= rows else _rows_of(block, start, start + rows)
            self._sections[shard].log.append(some)
            self._bytes += SAMPLE_BYTES * len(some) + 2 * len(some.series.encode())

    def commit_above(self, size: int) -> None:
        """Commit what was collected, if it is more bytes than this."""
        if self._bytes > size:
            self.commit(self._progress)

    def commit(self, progress: RollupProgress) -> None:
        """Commit what was collected, and in all shards how far the rollup is."""
        group = PendingGroup()
        for partition, section in zip(self._partitions, self._sections, strict=True):
            section.log.append(progress)
            group.sections[partition] = section
        size = self._bytes + 1_024 * len(self._sections)
        self._begin()
        self._host.port.commit_and_wait(group, size)


def _rows_of(block: SampleBlock, start: int, end: int) -> SampleBlock:
    """Return some samples of a block."""
    used, index = np.unique(block.index[start:end], return_inverse=True)
    series = block.series.take(used.astype(np.intp))
    return SampleBlock(series, index.reshape(-1).astype(np.uint32), block.times[start:end], block.bits[start:end])


def _ranges(hours: Sequence[tuple[int, int]], step_us: int, longest_us: int) -> list[tuple[int, int]]:
    """Return ranges of time that cover the whole steps of ascending hours, none longer than `longest_us`."""
    ranges: list[tuple[int, int]] = []
    for hour, first in hours:
        start, end = max(TIME_MIN, -(-first // step_us) * step_us), min(TIME_MAX, (hour + 1) * HOUR_US)
        if ranges and ranges[-1][1] == start and end - ranges[-1][0] <= longest_us:
            ranges[-1] = ranges[-1][0], end
            continue
        while start < end:
            ranges.append((start, min(end, start // step_us * step_us + longest_us)))
            start = ranges[-1][1]
    return ranges


# -- work


def roll_part(arguments: dict[str, Any], stop: StopSignal) -> list[bytes]:
    """Compute the steps of a range of time as work: return an encoded section for each shard of the rollup."""
    piece = Piece(arguments["partition"], arguments["start"], arguments["end"], arguments["detail"])
    state = open_piece(piece, arguments["root"], arguments["identity"])
    if state is None:
        raise Invalid("the files of a rollup's source cannot be read here")
    block = rolled(state, *key_times(piece.start, piece.end), arguments["step_us"], stop)
    sections = {} if block is None else dict(split_block(block, arguments["shards"]))
    shards = (sections.get(shard) for shard in range(arguments["shards"]))
    return [b"" if some is None else compressed(encode_section(SeriesSection(some))) for some in shards]


class _Working:
    """The `QueryContext` of a part."""

    lsn = time_us = 0

    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop

    def check(self) -> None:
        if self._stop.is_set():
            raise WorkCancelled("the rollup was asked to stop")


def rolled(state: SeriesState, start: int, end: int, step_us: int, stop: StopSignal) -> SampleBlock | None:
    """Return count, sum, min, max and last of each series and step; None if there are no samples."""
    working = _Working(stop)
    selected = SelectedSeries(state, (), start, end, working)
    totals = Totals((*ROLLED[:4], "time", "last"))
    of_row = np.arange(len(selected.labels))
    for some in selected.slices(working):
        samples = without_stale(some)
        if len(samples.times):
            totals.add(of_row, samples, samples.times // step_us, samples.bits.view(np.float64))
    rows, steps, columns = totals.columns()
    if not len(rows):
        return None
    del columns[4]  # the times of the last samples
    series, series_index = np.unique(rows, return_inverse=True)
    table = LabelTable.of([_named(selected.labels[row], name) for row in series.tolist() for name in ROLLED])
    index = (series_index.reshape(-1) * len(ROLLED))[:, None] + np.arange(len(ROLLED))
    values = np.stack([column.astype(np.float64) for column in columns], axis=1)
    times = np.maximum(np.repeat(steps * step_us, len(ROLLED)), TIME_MIN)
    return SampleBlock(table, index.reshape(-1).astype(np.uint32), times, values.reshape(-1).view(np.uint64))


def _named(labels: bytes, function: str) -> tuple[tuple[str, str], ...]:
    """Return the labels of a rollup's series: a metric that is too long for the suffix is cut."""
    suffix = f":{function}"
    room = VALUE_BYTES_MAX - len(suffix)
    return tuple(
        (name, value.encode()[:room].decode(errors="ignore") + suffix if name == METRIC else value)
        for name, value in decode_labels(labels)
    )
