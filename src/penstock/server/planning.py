"""What Spark needs before it reads or writes, each in one request: where to cut a table, and what a batch finds.

Thread: any.
Invariant: nothing is held for the client when a plan is answered: it may be out of date at once. Ranges of keys hold at
any time, and a commit is judged by its conditions.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import Invalid
from penstock.journal.partitions import PartitionId
from penstock.kinds import Port, Reading, as_streamable
from penstock.protocol import wire
from penstock.registry import check_name, kind_named
from penstock.server.rights import READ, Rights

PIECES_MAX = 10_000
Range = tuple[PartitionId, bytes, bytes | None]


# -- reading


def cut_ranges(reading: Reading, ranges: Sequence[Range], request: wire.CutRanges) -> list[list[bytes]]:
    """The keys at which each range is cut."""
    return [
        [piece.start for piece in reading.pieces(partition, count, start, end)[1:]] if count > 1 else []
        for (partition, start, end), count in zip(ranges, _counts(reading, ranges, request), strict=True)
    ]


def _counts(reading: Reading, ranges: Sequence[Range], request: wire.CutRanges) -> list[int]:
    """Into how many parts each range is cut."""
    if not request.bytes_max:
        return [max(1, request.count // len(ranges))] * len(ranges)
    whole = [reading.pieces(partition, 1, start, end) for partition, start, end in ranges]
    sizes = [sum(piece.size_bytes for piece in pieces) for pieces in whole]
    total = max(1, sum(sizes))
    parts = parts_for(total, request.count, request.bytes_min, request.bytes_max)
    return [max(1, round(parts * size / total)) for size in sizes]


def parts_for(size: int, readers: int, bytes_min: int, bytes_max: int) -> int:
    """In how many parts bytes are read: each costs Spark some 50 ms, and readers that wait for the last cost more."""
    rounds = -(-size // (readers * bytes_max))
    return max(1, min(rounds * readers, -(-size // max(1, bytes_min)), PIECES_MAX))


def check_cut(request: wire.CutRanges) -> None:
    """`Invalid` for a request that makes no sense."""
    if not 0 < request.count <= PIECES_MAX:
        raise Invalid(f"a table is cut into 1 to {PIECES_MAX} pieces")
    if not 0 <= request.bytes_min <= request.bytes_max or (request.bytes_min and not request.bytes_max):
        raise Invalid("the least size of a piece is above its largest: exchange them")


# -- batches


def plan_batch(port: Port, request: wire.PlanBatch, rights: Rights) -> wire.BatchPlan:
    """Find the tables of a batch, and how far its source is."""
    for name in [*request.tables, *([request.source] if request.source else [])]:
        rights.check(READ, check_name(name))
    source = _source_state(port, request) if request.source else None  # first: `time_us` is not before its messages
    found = [info for name in request.tables if (info := port.table(name)) is not None]
    return wire.BatchPlan(port.time_us(), found, source)


def _source_state(port: Port, request: wire.PlanBatch) -> wire.SourceState | None:
    info = port.table(request.source)
    if info is None:
        return None
    table = as_streamable(kind_named(info.kind, info.name), info).source(port, info)
    position = table.offsets(f"consumer:{request.consumer}") if request.consumer else {}
    earliest = table.offsets("earliest")
    start = {shard: max(sequence, earliest.get(shard, 0)) for shard, sequence in request.start}
    end = table.advance(start, request.rows_max, request.bytes_max) if start else {}
    return wire.SourceState(info, earliest, table.offsets("latest"), position, end)
