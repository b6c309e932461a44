"""What a kind of table must be, and the port through which its API reaches a store.

The API classes of a kind stand on `Port` alone, so that they are the same in the owner of a store and in a client of
it. The store knows kinds by their names in a registry and in no other way.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from penstock.coordinator import Acknowledgement, Epoch
from penstock.journal.record import PartitionId, partition_id
from penstock.lsm.maintenance import Maintenance
from penstock.partition.ledger import TableInfo
from penstock.partition.machine import PartitionDescriptor, PartitionStateMachine
from penstock.partition.pending import PendingDelta, PendingGroup

Insert = Callable[[PendingDelta, PartitionId, Any, Any], object]


class Kind(Protocol):
    """A kind of table."""

    @property
    def name(self) -> str: ...

    def encode(self, section: Any) -> bytes:
        """A section as bytes: once, when it is flushed."""

    def decode(self, payload: bytes) -> Any:
        """The section that `encode` was given; `CorruptionError` for other bytes."""

    def open_machine(
        self, descriptor: PartitionDescriptor, options: bytes, maintenance: Maintenance
    ) -> PartitionStateMachine:
        """The state machine of a shard."""

    def collect(self, descriptor: PartitionDescriptor, maintenance: Maintenance) -> None:
        """Remove what a dropped shard left."""

    def schema(self, options: bytes) -> Any:
        """The Arrow schema of a table."""


class Port(Protocol):
    """A store, as an API class sees it."""

    def write(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        """Put a write into the pending delta."""

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        """Put a group of its own into the pending delta."""

    def flush(self, epoch: int | None, timeout_s: float) -> Acknowledgement:
        """Wait until an epoch is durable."""

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        """The value of a key, one's own writes included."""

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        """(key, value) of a range, one's own writes included."""

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        """Record batches of a range, one's own writes included."""

    def table(self, name: str) -> TableInfo | None:
        """What the store knows of a table."""

    def create(self, name: str, kind: str, shards: int, options: bytes) -> TableInfo:
        """Make a table if it is absent."""

    def time_us(self) -> int:
        """The store's clock."""


def partitions_of(info: TableInfo) -> Sequence[PartitionId]:
    """The partitions of a table, by shard."""
    return [partition_id(info.table, shard) for shard in range(info.shards)]
