"""Change feeds as streams: their offsets, the positions of their consumers, and their upkeep in the owner.

A feed is streamed by LSN: an offset is the LSN of the next commit of a shard, so that a batch holds whole commits. The
positions of its consumers are rows of the ledger, and move by the conditions of streamed queues. In the feed of a queue
they have the numbers of shards plus COMPANION, beside the consumers of its messages.

Thread: any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from penstock.arguments import text
from penstock.errors import Closed, Invalid, PenstockError
from penstock.journal.partitions import PartitionId
from penstock.kinds import BatchCounts, Kind, Port, Streamable, StreamColumns, as_streamable, partitions_of
from penstock.kinds.change_reading import BOUNDS, LSN_MAX, SIZES, as_changing, encode_request, has_feed, no_feed
from penstock.kinds.changes import CHANGES, Changing, FeedKeeping, feed_schema
from penstock.lsm.maintenance import COMPANION
from penstock.partition.ledger_records import TableInfo
from penstock.partition.pending import PendingGroup
from penstock.queue.positions import FORGET, MOVE, SEEK, Move, argument, read_row
from penstock.registry import find_condition, kind_named

logger = logging.getLogger(__name__)
START_BYTES_MAX = 1 << 20
NOTHING_BYTES = 64  # what a section that changes nothing counts for


def stream_of(info: TableInfo, *, changes: bool = False) -> Streamable:
    """Return what can be streamed from a table: its rows, or its change feed; `KindMismatch` if neither can.

    `changes`: its feed, also if its rows can be streamed.
    """
    kind = kind_named(info.kind, info.name)
    if isinstance(kind, Streamable) and not changes:
        return kind
    if isinstance(kind, Changing):
        as_changing(kind, info)
        return FeedStream(COMPANION if isinstance(kind, Streamable) else 0)
    if changes:
        raise no_feed(info)
    return as_streamable(kind, info)


def change_schema_of(info: TableInfo) -> Any:
    """Return the Arrow schema of a table's change feed; `KindMismatch` if it has none."""
    return feed_schema(as_changing(kind_named(info.kind, info.name), info).change_schema(info.options))


def check_condition(info: TableInfo, name: str, argument: bytes, *, own: bool) -> None:
    """Raise `Invalid` if a condition is malformed or not for a table; `own`: the owner itself set it."""
    kind = find_condition(name)
    if kind is None:
        raise Invalid(f"there is no condition {name!r}")
    of_feed = name in (MOVE, SEEK, FORGET) and has_feed(kind_named(info.kind, info.name), info)
    if info.kind != kind.name and not of_feed:
        raise Invalid(f"the condition {name} is not for table {info.name}")
    kind.check_condition(info, name, argument, own=own)


class FeedStream(Streamable):
    """The change feed of a table as a stream."""

    columns = StreamColumns("_shard", "_commit_version", payload="")

    def __init__(self, row_shards: int = 0) -> None:
        self._row_shards = row_shards  # what is added to the number of a shard in the rows of consumers

    def source(self, port: Port, info: TableInfo) -> FeedSource:
        return FeedSource(port, info, self._row_shards)

    def sequence_key(self, sequence: int) -> bytes:
        return sequence.to_bytes(8, "big")

    def move(
        self,
        info: TableInfo,
        consumer: str,
        ranges: Sequence[tuple[int, int, int]],
        counts: BatchCounts = BatchCounts(),  # noqa: B008 - immutable
    ) -> tuple[str, bytes]:
        rows = [(self._row_shards + shard, start, end) for shard, start, end in ranges]
        return MOVE, argument(info.table_id, Move(consumer, rows, counts))

    def range_query(self, ranges: Sequence[tuple[int, int, int]], *, skip: bool) -> tuple[str, bytes]:
        """Return the query that reads the commits [start, end) of each (shard, start, end), and its argument."""
        return CHANGES, encode_request(ranges, skip=skip)


@runtime_checkable
class _LedgerReading(Protocol):
    """A port of the owner."""

    def ledger_row(self, key: bytes) -> bytes | None: ...


class FeedSource:
    """The offsets of a change feed. Positions of consumers are known to the owner's port only."""

    def __init__(self, port: Port, info: TableInfo, row_shards: int) -> None:
        self._port = port
        self._info = info
        self._row_shards = row_shards

    def offsets(self, start: str) -> dict[int, int]:
        """Return the LSN to begin with, for each shard, from the text of an option."""
        shards = self._info.shards
        start = text(start, "start", START_BYTES_MAX)
        word, _, rest = start.partition(":")
        if start in ("earliest", "latest") or (word == "consumer" and rest):
            (bounds,) = self._port.query(self._info, BOUNDS, b"")
            first = {shard: floor + 1 for shard, floor in enumerate(bounds.column("floor").to_pylist())}
            if start == "latest":
                return {shard: last + 1 for shard, last in enumerate(bounds.column("last").to_pylist())}
            return first if start == "earliest" else self._position(rest, first)
        if start.isdecimal() and len(start) < len(str(LSN_MAX)):
            return dict.fromkeys(range(shards), max(1, int(start)))
        try:
            offsets = msgspec.json.decode(start, type=dict[int, int])
        except msgspec.DecodeError:
            offsets = {}
        if sorted(offsets) != list(range(shards)) or any(not 0 < lsn < LSN_MAX for lsn in offsets.values()):
            raise Invalid(
                f"start is {start!r}: use earliest, latest, consumer:NAME, an LSN, or LSNs of all shards (0 to "
                f"{shards - 1}) as JSON"
            )
        return offsets

    def _position(self, consumer: str, first: dict[int, int]) -> dict[int, int]:
        if not isinstance(self._port, _LedgerReading):
            raise Invalid("the position of a consumer is known to the owner of the store: ask it to plan the batch")
        read, table, add = self._port.ledger_row, self._info.table_id, self._row_shards
        rows = {shard: read_row(read, table, add + shard, consumer) for shard in first}
        return {shard: first[shard] if row is None else row.floor for shard, row in rows.items()}

    def advance(self, start: dict[int, int], rows_max: int | None, bytes_max: int | None) -> dict[int, int]:
        """Return the end of a batch of whole commits, in LSN order over all shards: at least one, if there is one."""
        end = {shard: max(start[shard], latest) for shard, latest in self.offsets("latest").items()}
        if not rows_max and not bytes_max:
            return end
        rows = size = 0
        last: int | None = None
        request = encode_request([(shard, low, end[shard]) for shard, low in start.items()], skip=True)
        for batch in self._port.query(self._info, SIZES, request):
            (part,) = batch.to_pylist()
            if last is not None and part["lsn"] > last:
                full = (rows_max and rows + part["rows"] > rows_max) or (bytes_max and size + part["bytes"] > bytes_max)
                if full:
                    return {shard: max(start[shard], min(until, last + 1)) for shard, until in end.items()}
            last, rows, size = part["lsn"], rows + part["rows"], size + part["bytes"]
        return end

    def lag(self, consumer: str) -> int:
        """Return how many LSNs a consumer is behind, in all shards together."""
        latest = self.offsets("latest")
        return sum(max(0, latest[shard] - at) for shard, at in self.offsets(f"consumer:{consumer}").items())


def maintain_feeds(
    tables: Sequence[TableInfo],
    machine: Callable[[PartitionId], Any],  # None for a shard that is late
    submit: Callable[[PendingGroup, int], object],
    time_us: Callable[[], int],
) -> None:
    """Trim feeds, and let them take in rows that expired: both happen with the next record of a shard.

    A shard without writes gets a record that changes nothing. A failing shard does not stop the others, nor does one
    that is late: the records that it has to apply do the same.
    """
    for info in tables:
        kind: Kind = kind_named(info.kind, info.name)
        if not has_feed(kind, info):
            continue
        assert isinstance(kind, Changing)
        for partition in partitions_of(info):
            try:
                shard = machine(partition)
                if shard is None:
                    continue
                assert isinstance(shard, FeedKeeping)
                if shard.maintain_feed(time_us()):
                    group = PendingGroup()
                    group.sections[partition] = kind.nothing()
                    submit(group, NOTHING_BYTES)
            except Closed:
                return
            except (OSError, PenstockError) as error:
                logger.warning("the change feed of %s is trimmed later (%s)", info.name, error)
