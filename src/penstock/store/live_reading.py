"""Reads of the live store, in the process that owns it.

This process reads its own writes through the coordinator's layers: pending writes, then batches being flushed, then the
tree. A group whose LSN shows that the tree has it already is skipped, so that no operand counts twice.

A read of more than one row sees the state between two records: see `Dispatcher.finish`.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.errors import Invalid
from penstock.host.clock import Clock
from penstock.host.file_errors import translate_os_errors
from penstock.journal.partitions import PartitionId
from penstock.kinds import Countable, Machine, Piece
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.partition import Partition
from penstock.store.conditions import is_touched
from penstock.store.flusher import Coordinator
from penstock.store.snapshot_port import MomentReading, SnapshotPort

WAIT_S = 60.0


class LiveReading(MomentReading):
    """The current state of a store, with the writes of this process that are not durable yet."""

    def __init__(
        self, coordinator: Coordinator, dispatcher: Dispatcher, *, clock: Clock, check_usable: Callable[[], None]
    ) -> None:
        self._coordinator = coordinator
        self._dispatcher = dispatcher
        self.clock = clock
        self._check_usable = check_usable
        self._buffer = coordinator.buffer  # this and the next are bound once, for every read and write
        self._find_open = dispatcher.find_open
        self._ended = False

    def time_us(self) -> int:
        """Return the store's time, which decides what has expired; never before the newest record."""
        return max(self.clock.time_us(), self._dispatcher.ledger.tree.time_us)

    def now_us(self) -> int:
        return self.time_us()

    def _partition(self, partition: PartitionId) -> Partition:
        """Return a shard, opened on first use; any file error may occur then."""
        with translate_os_errors():
            return self._dispatcher.partition(partition)

    def machine(self, partition: PartitionId, timeout_s: float = WAIT_S) -> Machine:
        """Return the state machine of a shard with every record dispatched so far; raises if it cannot have them."""
        open_shard = self._find_open(partition)
        if open_shard is not None and not open_shard.late:
            return open_shard.machine  # type: ignore[return-value]
        shard = self._partition(partition)
        if shard.late:
            self._dispatcher.catch_up(shard, timeout_s=timeout_s)
        return shard.machine  # type: ignore[return-value]

    def machine_unless_late(self, partition: PartitionId) -> Machine | None:
        """Return the state machine of a shard if it has every record dispatched so far. Waits for its opening alone."""
        shard = self._partition(partition)
        return None if shard.late else shard.machine  # type: ignore[return-value]

    def opened(self, partition: PartitionId) -> Machine | None:
        """Return the state machine of a shard if it is open."""
        open_shard = self._find_open(partition)
        return None if open_shard is None else open_shard.machine  # type: ignore[return-value]

    def wait_applied(self, epoch: int, timeout_s: float = WAIT_S) -> None:
        """Wait until every process can read a write."""
        self._coordinator.wait_applied(epoch, timeout_s)

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        layers = self._buffer.layers
        pending = layers.pending
        sections = pending.open
        if sections is not None and (rows := sections.get(partition)) is not None:  # the hot path: just written
            value = rows.get(key)
            if type(value) is bytes:
                return value
        try:
            if self._dispatcher.torn:
                with self._dispatcher.turn:
                    self._dispatcher.finish()  # from here on every table has the batch, or is late
                stored = self._lookup(partition, key)
            elif layers.deltas or pending.groups:
                stored = self._lookup(partition, key)
            else:  # nothing waits, so what is applied is all there is
                open_shard = self._find_open(partition)
                machine: Any = self.machine(partition) if open_shard is None or open_shard.late else open_shard.machine
                stored = machine.get(key)
        except Exception:
            self._check_usable()  # files that were closed meanwhile raise anything
            raise
        if stored is None and self._ended:
            self._check_usable()
        return stored

    def _lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        layers = self._coordinator.layers
        open_shard = self._find_open(partition)
        machine: Any = self.machine(partition) if open_shard is None or open_shard.late else open_shard.machine
        if layers.deltas or layers.pending.groups:
            waiting = [part for delta in (layers.pending, *layers.deltas) for part in delta.sections(partition)]
            if any(machine.touches(part, key) for _, part in waiting):
                value: bytes | None = machine.fold(key, waiting, self.time_us())
                return value
        return machine.get(key)  # type: ignore[no-any-return]

    def lookup_row(self, partition: PartitionId, key: bytes) -> tuple[bytes, int] | None:
        self._check_usable()
        if is_touched(self._coordinator, partition, self.machine(partition), key):
            self.wait_applied(self._coordinator.last)  # only then it has an LSN
        return self.applied_row(partition, key)

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        if len(keys) == 1:
            return [self.lookup(partition, keys[0])]
        try:
            with self.moment([partition]) as moment:
                return moment.lookup_many(partition, keys)
        except Exception:
            self._check_usable()
            raise

    def snapshot_of(self, partitions: Sequence[PartitionId], *, own: bool = True) -> SnapshotPort:
        """Return shards as of one LSN; with `own`, overlaid with this process's writes that are not applied yet."""
        self._check_usable()
        shards = [self._partition(partition) for partition in partitions]
        lsn, states, (deltas, time_us) = self._dispatcher.freeze(
            shards, lambda _: (self._coordinator.seal_pending().deltas if own else (), self.time_us()), WAIT_S
        )
        machines: list[Any] = [shard.machine for shard in shards]
        waiting = [
            [
                part
                for delta in reversed(deltas)
                for group, part in reversed(delta.sections(partition))
                if group.lsn is None or group.lsn > lsn
            ]
            for partition in partitions
        ]
        views = {
            partition: machine.overlay(state, some, time_us) if some else state
            for partition, machine, state, some in zip(partitions, machines, states, waiting, strict=True)
        }
        return SnapshotPort(lsn, views, {}, time_us, states, clock=self.clock)

    def present_of(self, machines: Mapping[PartitionId, Countable]) -> SnapshotPort:
        """Return shards as they are now, each at its own LSN: for counts."""
        self._check_usable()
        states = {partition: machine.present() for partition, machine in machines.items()}
        return SnapshotPort(self._dispatcher.published, states, {}, self.time_us(), clock=self.clock)

    def pieces(self, partition: PartitionId, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        raise Invalid("pieces are read from a snapshot: take one")

    def snapshot(self) -> SnapshotPort:
        self._check_usable()
        lsn, tables, states = self._dispatcher.snapshot()
        return SnapshotPort(lsn, states, {info.name: info for info in tables}, self.time_us(), clock=self.clock)

    def applied_values(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of keys as every process sees them, all at one LSN."""
        self._check_usable()
        if len(keys) == 1:
            with self._dispatcher.turn:
                self._dispatcher.finish()  # a batch that another read has seen in part is applied by now
            return [self.machine(partition).get(keys[0])]
        moment = self.snapshot_of([partition], own=False)
        try:
            return moment.lookup_many(partition, keys)
        finally:
            moment.close()

    def applied_row(self, partition: PartitionId, key: bytes) -> tuple[bytes, int] | None:
        """Return the value of a key, as every process sees it, and the LSN of its row."""
        self._check_usable()
        machine = self.machine(partition)  # may wait, which is forbidden with the turn
        machine.get(key)  # an evicted file is fetched here: with the turn, every table would wait for it
        with self._dispatcher.turn:
            self._dispatcher.finish()
            open_shard = self._find_open(partition)
            if open_shard is not None and not open_shard.late:
                return machine.row(key)
        moment = self.snapshot_of([partition], own=False)
        try:
            return moment.lookup_row(partition, key)
        finally:
            moment.close()
