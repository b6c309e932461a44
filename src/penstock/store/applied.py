"""What the owner's clients read: nothing that a crash could undo.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.journal.partitions import PartitionId
from penstock.kinds import QUERY_S, partitions_of
from penstock.partition.ledger import TableInfo
from penstock.store.port import LocalPort
from penstock.store.querying import check_query
from penstock.store.snapshot_port import SnapshotPort, query_moment


class AppliedReading:
    """Read-only view of what is applied, and so durable. For clients of the owner."""

    def __init__(self, port: LocalPort) -> None:
        self._port = port
        self.table, self.tables, self.time_us, self.pieces = port.table, port.tables, port.time_us, port.pieces

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        return self.lookup_many(partition, [key])[0]

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._port.applied_values(partition, keys)

    def lookup_row(self, partition: PartitionId, key: bytes) -> tuple[bytes, int] | None:
        return self._port.applied_row(partition, key)

    @contextmanager
    def moment(self, partitions: Sequence[PartitionId]) -> Iterator[SnapshotPort]:
        moment = self._port._moment(partitions, own=False)
        try:
            yield moment
        finally:
            moment.close()

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        return self._port._moment([partition], own=False).scan(partition, start, end, reverse)

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        return self._port._moment([partition], own=False).scan_arrow(partition, start, end)

    def query(self, info: TableInfo, name: str, argument: bytes, *, timeout_s: float = QUERY_S) -> Iterator[Any]:
        check_query(info, name, argument, timeout_s)
        moment = self._port._moment(partitions_of(info), own=False)
        return query_moment(moment, info, name, argument, timeout_s)
