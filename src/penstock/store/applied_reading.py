"""What the owner's clients read: nothing that a crash could undo.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

from penstock.journal.partitions import PartitionId
from penstock.kinds import Countable, partitions_of
from penstock.partition.ledger_records import TableInfo
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

    @contextmanager
    def counted(self, info: TableInfo) -> Iterator[SnapshotPort]:
        """Yield a table as it is now, for its statistics: monitoring must not freeze memtables."""
        partitions = partitions_of(info)
        machines = {partition: self._port.machine(partition) for partition in partitions}
        if all(isinstance(machine, Countable) for machine in machines.values()):
            moment = self._port.present_of(cast(Mapping[PartitionId, Countable], machines))
        else:
            moment = self.snapshot_of(partitions)
        try:
            yield moment
        finally:
            moment.close()
