"""Rollup tables: count, sum, min, max and last of each series and step of another table, computed by jobs.

A source shard marks each hour in which a record changed samples, with the LSN of that record. A rollup table remembers
the LSN up to which it is computed. A job computes the hours that were marked since, whole: it reads them from a
snapshot, in parts that run in any process, and commits in one group the deletion of these hours in the rollup, their
new samples, and the LSN. So late samples and deletes are followed, a job that is repeated does no harm, and readers
see whole hours only. A rollup also remembers the id of its source: when that was dropped and another table has its
name, the first job for the new one deletes all that the rollup holds. Until then the rollup keeps it.

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
from penstock.partition.ledger import TableInfo
from penstock.partition.pending import PendingGroup
from penstock.scheduler.offers import JobPart
from penstock.scheduler.task import StopSignal
from penstock.scheduler.work import WorkCancelled, pack
from penstock.series.aggregate import Totals, without_stale
from penstock.series.labels import METRIC, VALUE_BYTES_MAX, LabelTable, decode_labels
from penstock.series.options import HOUR_US, SECOND_US, TIME_MAX, TIME_MIN, Rollup
from penstock.series.pieces import decode_piece
from penstock.series.queries import SelectedSeries
from penstock.series.reading import SeriesState, open_piece
from penstock.series.section import (
    RollupProgress,
    SampleBlock,
    SeriesDelete,
    SeriesSection,
    decode_section,
    encode_section,
)
from penstock.series.table import split_block
from penstock.series.times import key_times, time_key

ROLLED = ("count", "sum", "min", "max", "last")
HOURS_MAX = 24 * 7  # of one job: the next one goes on
PART_HOURS = 24
NOTHING = RollupProgress(0)
HOURS = pa.schema([pa.field("hour", pa.int64(), nullable=False)])
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
    """Yield the hours, counted from 1970, that changed in any shard after what a rollup has computed."""
    hours: set[int] = set()
    for shard in shards:
        context.check()
        hours.update(shard.changed_hours(done))
    yield pa.record_batch([pa.array(sorted(hours), pa.int64())], schema=HOURS)


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
        hours = [hour for batch in _query(snapshot, source, "changed_hours", done) for hour in batch[0].to_pylist()]
        if hours or anew:
            return RollupPlan(info, source, rollup, host, snapshot, _Due(done, hours, anew))
    except BaseException:
        snapshot.close()
        raise
    snapshot.close()
    return None


def _query(snapshot: SnapshotReading, info: TableInfo, name: str, argument: RollupProgress = NOTHING) -> Iterator[Any]:
    return snapshot.query(info, name, _encode(argument))


class _Due(msgspec.Struct, frozen=True):
    """What a rollup has to compute."""

    done: RollupProgress
    hours: list[int]  # ascending
    anew: bool  # what the rollup holds is of an earlier source of the same name: it is deleted

    def now(self) -> list[int]:
        """The hours of the next job."""
        return self.hours[:HOURS_MAX]

    def after(self, lsn: int, source: int) -> RollupProgress:
        """How far the rollup is computed when the next job, which read this LSN, is done."""
        if len(self.hours) <= HOURS_MAX:
            return RollupProgress(lsn, source=source)
        return RollupProgress(self.done.lsn, self.hours[HOURS_MAX - 1], lsn, source)


class RollupPlan:
    """One computation of a rollup table: a `Derivation`."""

    function: str = f"{__name__}:roll_part"

    def __init__(  # noqa: PLR0917
        self,
        info: TableInfo,
        source: TableInfo,
        rollup: Rollup,
        host: Host,
        snapshot: SnapshotReading,
        due: _Due,
    ) -> None:
        self._info = info
        self._host = host
        self._snapshot = snapshot
        self._after = due.after(snapshot.lsn, source.table_id)
        self._ranges = _ranges(due.now())
        self._replaced = [(TIME_MIN, TIME_MAX)] if due.anew else self._ranges
        self.parts: Sequence[JobPart] = [
            self._part(piece, rollup)
            for partition in partitions_of(source)
            for start, end in self._ranges
            for piece in snapshot.pieces(partition, 1, time_key(start), time_key(end))
        ]

    def _part(self, piece: Piece, rollup: Rollup) -> JobPart:
        arguments: dict[str, Any] = {
            "partition": int(piece.partition),
            "start": piece.start,
            "end": piece.end,
            "detail": piece.detail,
            "step_us": rollup.step_s * SECOND_US,
            "shards": self._info.shards,
            "identity": self._host.identity,
        }
        names = [meta.file_name for meta in decode_piece(piece.detail).stored.files]
        return JobPart(arguments=pack(arguments), reads=tuple(n for name in names for n in (name, index_path(name))))

    def commit(self, results: Sequence[Any]) -> None:
        """Replace the hours that were computed, in one group."""
        group = PendingGroup()
        deletes = [SeriesDelete("{}", start, end) for start, end in self._replaced]
        size = 0
        for shard, partition in enumerate(partitions_of(self._info)):
            blocks = [part for result in results if result[shard] for part in decode_section(result[shard]).parts]
            group.sections[partition] = SeriesSection(*deletes, *blocks, self._after)
            size += sum(len(result[shard]) for result in results) + 1_024
        self._host.port.commit_and_wait(group, size)

    def close(self) -> None:
        self._snapshot.close()


def _ranges(hours: Sequence[int]) -> list[tuple[int, int]]:
    """Return ranges of time that cover ascending hours, each of PART_HOURS at most."""
    ranges: list[tuple[int, int]] = []
    for hour in hours:
        start, end = max(TIME_MIN, hour * HOUR_US), min(TIME_MAX, (hour + 1) * HOUR_US)
        if ranges and ranges[-1][1] == start and end - ranges[-1][0] <= PART_HOURS * HOUR_US:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((start, end))
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
    return [encode_section(SeriesSection(sections[n])) if n in sections else b"" for n in range(arguments["shards"])]


class _Working:
    """The `QueryContext` of a part."""

    time_us = 0

    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop

    def check(self) -> None:
        if self._stop.is_set():
            raise WorkCancelled("the rollup was asked to stop")


def rolled(state: SeriesState, start: int, end: int, step_us: int, stop: StopSignal) -> SampleBlock | None:
    """Return count, sum, min, max and last of each series and step; None if there are no samples."""
    selected = SelectedSeries(state, (), start, end)
    totals = Totals((*ROLLED[:4], "time", "last"))
    of_row = np.arange(len(selected.labels))
    for some in selected.slices(_Working(stop)):
        kept = without_stale(some)
        if len(kept.times):
            totals.add(of_row, kept, kept.times // step_us, kept.bits.view(np.float64))
    rows, steps, columns = totals.columns()
    if not len(rows):
        return None
    del columns[4]  # the times of the last samples
    series, places = np.unique(rows, return_inverse=True)
    table = LabelTable.of([_named(selected.labels[row], name) for row in series.tolist() for name in ROLLED])
    index = (places.reshape(-1) * len(ROLLED))[:, None] + np.arange(len(ROLLED))
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
