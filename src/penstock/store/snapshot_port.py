"""The port of a snapshot, a store at one LSN; and the reads of a live port that take a snapshot while they last.

Thread: any. Invariant: nothing that it reads changes or is deleted before `close`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import Closed, Invalid, NotFound, PenstockError
from penstock.host.clock import Clock
from penstock.journal.partitions import PartitionId
from penstock.kinds import QUERY_S, Piece, PieceSnapshot, ShardSnapshot, partitions_of
from penstock.kinds.change_reading import QUERIES as FEED_QUERIES
from penstock.partition.ledger_records import TableInfo
from penstock.store.querying import check_query, run_query


class SnapshotPort:
    """Read-only view of a store at one LSN."""

    def __init__(
        self,
        lsn: int,
        states: Mapping[PartitionId, ShardSnapshot | PenstockError],
        tables: Mapping[str, TableInfo],
        time_us: int,
        pinned: Sequence[ShardSnapshot] | None = None,
        *,
        clock: Clock,
    ) -> None:
        self.lsn = lsn
        self._clock = clock
        self._states = dict(states)
        self._pinned = list(states.values()) if pinned is None else pinned  # what `close` releases
        self._tables = dict(tables)
        self._time_us = time_us
        self._closed = False

    def table(self, name: str) -> TableInfo | None:
        return self._tables.get(name)

    def tables(self) -> list[TableInfo]:
        return sorted(self._tables.values(), key=lambda info: info.name)

    def time_us(self) -> int:
        return self._time_us

    def _state(self, partition: PartitionId) -> ShardSnapshot:
        state = self._states.get(partition)
        if state is None and self._closed:
            raise Closed("the snapshot was closed: take another")
        if state is None:
            raise NotFound("this table was made after the snapshot: take another snapshot")
        if isinstance(state, PenstockError):
            raise state
        return state

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        return self._state(partition).get(key)

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(map(self._state(partition).get, keys))

    def lookup_row(self, partition: PartitionId, key: bytes) -> tuple[bytes, int] | None:
        return self._state(partition).row(key)

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        return self._state(partition).scan(start, end, reverse=reverse)

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        return self._state(partition).scan_arrow(start, end)

    def pieces(self, partition: PartitionId, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        if count < 1:
            raise Invalid(f"a shard is cut into 1 piece or more, not {count}")
        state = self._state(partition)
        return state.pieces(count, start, end) if isinstance(state, PieceSnapshot) else [Piece(partition, start, end)]

    def query(self, info: TableInfo, name: str, argument: bytes, *, timeout_s: float = QUERY_S) -> Iterator[Any]:
        kind = check_query(info, name, argument, timeout_s)
        shards = [self._state(partition) for partition in partitions_of(info)]
        return run_query(
            kind,
            info,
            name,
            argument,
            shards,
            lsn=self.lsn,
            time_us=self._time_us,
            clock=self._clock,
            timeout_s=timeout_s,
        )

    @contextmanager
    def moment(self, partitions: Sequence[PartitionId]) -> Iterator[SnapshotPort]:
        yield self

    def close(self) -> None:
        self._closed = True  # first: a concurrent reader must get `Closed`, not `NotFound`
        for state in self._pinned:
            if not isinstance(state, PenstockError):
                state.close()
        self._pinned = ()
        self._states.clear()


class MomentReading(ABC):
    """Base of the live ports: a read of more than one row takes a snapshot of its shards."""

    @abstractmethod
    def snapshot_of(self, partitions: Sequence[PartitionId], *, own: bool = True) -> SnapshotPort:
        """Return some shards as of one LSN; with `own`, and this process's writes that are not applied yet."""

    @contextmanager
    def moment(self, partitions: Sequence[PartitionId]) -> Iterator[SnapshotPort]:
        moment = self.snapshot_of(partitions)
        try:
            yield moment
        finally:
            moment.close()

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        return self.snapshot_of([partition]).scan(partition, start, end, reverse)

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        return self.snapshot_of([partition]).scan_arrow(partition, start, end)

    def query(self, info: TableInfo, name: str, argument: bytes, *, timeout_s: float = QUERY_S) -> Iterator[Any]:
        check_query(info, name, argument, timeout_s)
        moment = self.snapshot_of(partitions_of(info), own=name not in FEED_QUERIES)  # a feed has what is applied
        return _query_and_close(moment, info, name, argument, timeout_s)


def _query_and_close(
    moment: SnapshotPort, info: TableInfo, name: str, argument: bytes, timeout_s: float
) -> Iterator[Any]:
    try:
        yield from moment.query(info, name, argument, timeout_s=timeout_s)
    finally:
        moment.close()
