"""Rollup tables: count, sum, min, max and last of each series and step of another table, computed by jobs.

A source shard marks each hour in which a record changed samples, with the LSN of that record. A rollup table remembers
the LSN up to which it is computed. A job computes the hours that were marked since, whole: it reads them from a
snapshot, in parts that run in any process, and commits in one group the deletion of these hours in the rollup, their
new samples, and the LSN. So late samples and deletes are followed, a job that is repeated does no harm, and readers
see whole hours only.

A sample of `cpu{host="a"}` counts in `cpu:count`, `cpu:sum`, `cpu:min`, `cpu:max` and `cpu:last` of `{host="a"}`, at the
time at which its step begins. Staleness markers are left out.

Thread: `RollupPlan` in the owner, one at a time for a table (the gate of its job ensures it); `roll_part` anywhere.
Invariant: the samples of a rollup are at least as new as the LSN it remembers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import Invalid
from penstock.kinds import Host, Piece, QueryContext, SnapshotReading, partitions_of
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
HOURS = pa.schema([pa.field("hour", pa.int64(), nullable=False)])
PROGRESS = pa.schema([pa.field("lsn", pa.int64(), nullable=False)])



# -- queries of plans


class ChangesQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The argument of the query `changed_hours`: hours that records after an LSN changed."""

    after: int = 0


_encode = msgspec.msgpack.Encoder().encode
_changes = msgspec.msgpack.Decoder(ChangesQuery)


def decode_changes(argument: bytes) -> ChangesQuery:
    """Decode the argument of `changed_hours` and `rollup_progress`; `Invalid` if it is malformed."""
    try:
        return _changes.decode(argument)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"the argument of a query does not decode: {error}") from None


def changed_hours(query: ChangesQuery, shards: Sequence[SeriesState], context: QueryContext) -> Iterator[Any]:
    """Yield the hours, counted from 1970, that changed in any shard."""
    hours: set[int] = set()
    for shard in shards:
        context.check()
        hours.update(shard.changed_hours(query.after))
    yield pa.record_batch([pa.array(sorted(hours), pa.int64())], schema=HOURS)


def rollup_progress(shards: Sequence[SeriesState]) -> Iterator[Any]:
    """Yield the LSN up to which a rollup is computed, of the shard that is furthest behind."""
    yield pa.record_batch([pa.array([min(shard.rollup_lsn() for shard in shards)], pa.int64())], schema=PROGRESS)


# -- plans


def plan_rollup(info: TableInfo, rollup: Rollup, host: Host) -> RollupPlan | None:
    """Plan the next computation of a rollup table; None if it is up to date or has no source."""
    source = host.port.table(rollup.source)
    if source is None or source.kind != info.kind or source.table == info.table:
        return None
    snapshot = host.port.snapshot()
    try:
        done = _number(snapshot, info, "rollup_progress", 0)[0]
        hours = _number(snapshot, source, "changed_hours", done)
        if hours:
            return RollupPlan(info, source, rollup, host, snapshot, hours)
    except BaseException:
        snapshot.close()
        raise
    snapshot.close()
    return None


def _number(snapshot: SnapshotReading, info: TableInfo, query: str, after: int) -> list[int]:
    batches = snapshot.query(info, query, _encode(ChangesQuery(after)))
    return [number for batch in batches for number in batch.column(0).to_pylist()]


class RollupPlan:
    """One computation of a rollup table: a `Derivation`."""

    function = f"{__name__}:roll_part"

    def __init__(  # noqa: PLR0917
        self,
        info: TableInfo,
        source: TableInfo,
        rollup: Rollup,
        host: Host,
        snapshot: SnapshotReading,
        hours: list[int],
    ) -> None:
        self._info = info
        self._host = host
        self._snapshot = snapshot
        # Not all of them: what is computed reaches the LSN with the last job.
        self._lsn = snapshot.lsn if len(hours) <= HOURS_MAX else None
        self._ranges = _ranges(hours[:HOURS_MAX])
        self.parts = [
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
        files = decode_piece(piece.detail).stored.files
        return JobPart(arguments=pack(arguments), reads=tuple(n for meta in files for n in (meta.file_name, index_path(meta.file_name))))

    def commit(self, results: Sequence[Any]) -> None:
        """Replace the hours that were computed, in one group."""
        group = PendingGroup()
        deletes = [SeriesDelete("{}", start, end) for start, end in self._ranges]
        size = 0
        for shard, partition in enumerate(partitions_of(self._info)):
            blocks = [part for result in results if result[shard] for part in decode_section(result[shard]).parts]
            progress = [] if self._lsn is None else [RollupProgress(self._lsn)]
            group.sections[partition] = SeriesSection(*deletes, *blocks, *progress)
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
