"""Answers what Spark asks before it reads or writes: where to split a table, and the state of a batch's tables.

Thread: any.
Invariant: a plan holds nothing in the owner, and may be outdated at once. That is safe: key ranges stay valid, and a
commit is judged by its conditions.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import Invalid
from penstock.feeds import stream_of
from penstock.journal.partitions import PartitionId
from penstock.kinds import Port, Reading
from penstock.protocol import wire
from penstock.registry import check_name
from penstock.server.rights import READ, Rights

PIECES_MAX = 10_000
Range = tuple[PartitionId, bytes, bytes | None]


# -- reading


def cut_ranges(reading: Reading, ranges: Sequence[Range], request: wire.CutRanges) -> list[list[bytes]]:
    """Return the keys at which each range is split."""
    return [
        [piece.start for piece in reading.pieces(partition, count, start, end)[1:]] if count > 1 else []
        for (partition, start, end), count in zip(ranges, _counts(reading, ranges, request), strict=True)
    ]


def _counts(reading: Reading, ranges: Sequence[Range], request: wire.CutRanges) -> list[int]:
    """Return the number of parts of each range."""
    if not request.bytes_max:
        return [max(1, request.count // len(ranges))] * len(ranges)
    whole = [reading.pieces(partition, 1, start, end) for partition, start, end in ranges]
    sizes = [sum(piece.size_bytes for piece in pieces) for pieces in whole]
    total = max(1, sum(sizes))
    parts = parts_for(total, request.count, request.bytes_min, request.bytes_max)
    return [max(1, round(parts * size / total)) for size in sizes]


def parts_for(size: int, readers: int, bytes_min: int, bytes_max: int) -> int:
    """Return in how many parts to read `size` bytes: a part costs Spark some 50 ms, idle readers cost more."""
    rounds = -(-size // (readers * bytes_max))
    return max(1, min(rounds * readers, -(-size // max(1, bytes_min)), PIECES_MAX))


def check_cut(request: wire.CutRanges) -> None:
    """Raise `Invalid` if the limits of a request contradict each other."""
    if not 0 < request.count <= PIECES_MAX:
        raise Invalid(f"a table is cut into 1 to {PIECES_MAX} pieces")
    if not 0 <= request.bytes_min <= request.bytes_max or (request.bytes_min and not request.bytes_max):
        raise Invalid("the least size of a piece is above its largest: exchange them")


# -- batches


def plan_batch(port: Port, request: wire.PlanBatch, rights: Rights) -> wire.BatchPlan:
    """Return the tables of a batch, and the state of its source."""
    for name in [*request.tables, *([request.source] if request.source else [])]:
        rights.check(READ, check_name(name))
    source = _source_state(port, request) if request.source else None  # first: `time_us` is not before its messages
    tables = [info for name in request.tables if (info := port.table(name)) is not None]
    return wire.BatchPlan(port.time_us(), tables, source)


def _source_state(port: Port, request: wire.PlanBatch) -> wire.SourceState | None:
    info = port.table(request.source)
    if info is None:
        return None
    table = stream_of(info, changes=request.changes).source(port, info)
    begin = f"consumer:{request.consumer}" if request.consumer else request.begin
    position = table.offsets(begin) if begin else {}
    earliest = table.offsets("earliest")
    start = {shard: max(sequence, earliest.get(shard, 0)) for shard, sequence in request.start}
    end = table.advance(start, request.rows_max, request.bytes_max) if start else {}
    return wire.SourceState(info, earliest, table.offsets("latest"), position, end)
