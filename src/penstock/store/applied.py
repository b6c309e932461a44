"""What the owner's clients read: nothing that a crash could undo.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.journal.partitions import PartitionId
from penstock.store.port import LocalPort
from penstock.store.snapshot_port import MomentReading, SnapshotPort


class AppliedReading(MomentReading):
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

    def snapshot_of(self, partitions: Sequence[PartitionId], *, own: bool = False) -> SnapshotPort:
        return self._port.snapshot_of(partitions, own=False)
