"""Ports into a store that this process owns: live, and as of a snapshot.

Reads of one's own writes go through the coordinator's layers: what is pending, then what is on its way, then the tree.
A group that its LSN shows to be in the tree already is passed over, so that no operand counts twice.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from penstock.coordinator import Acknowledgement, Epoch, WriteCoordinator
from penstock.errors import Closed, DiskFull, Invalid, NotFound, PenstockError
from penstock.flusher import Flushed
from penstock.host.clock import Clock
from penstock.journal.record import PartitionId
from penstock.kinds import Insert
from penstock.kv.machine import KvMachine
from penstock.kv.section import Ranges, delete_ranges, find, operate, to_edit
from penstock.lsm.memtable import Memtable
from penstock.lsm.rows import DELETE, Row
from penstock.lsm.tree import Snapshot
from penstock.lsm.view import View, resolve
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.ledger import LEDGER, Create, Drop, TableInfo, encode_ops
from penstock.partition.pending import PendingDelta, PendingGroup, add_group, parts

Coordinator = WriteCoordinator[PendingDelta, Flushed, int]
ALL_LATER = 1 << 62  # the LSN of rows that have none yet
GROUP_BYTES = 256
WAIT_S = 60.0


class LocalPort:
    """The store of this process."""

    def __init__(
        self, coordinator: Coordinator, dispatcher: Dispatcher, *, clock: Clock, check_usable: Callable[[], None]
    ) -> None:
        self._coordinator = coordinator
        self._dispatcher = dispatcher
        self._clock = clock
        self._check_usable = check_usable
        self._known, self._write_into = dispatcher.known, coordinator.write_into  # bound once, for every write
        self.read_only: DiskFull | None = None  # set while the disk is full

    def time_us(self) -> int:
        """The clock, or the time of the newest record if that is later: what the trees go by."""
        return max(self._clock.time_us(), self._dispatcher.ledger.tree.time_us)

    def cut_off(self) -> None:
        """In a forked child: refuse everything, without a look at locks that nobody there will release."""
        self._known = self._write_into = _refuse_in_child  # type: ignore[assignment]
        self._coordinator = self._dispatcher = _InChild()  # type: ignore[assignment]

    # -- writing

    def write(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        place = self._known(partition)
        if place is None or place.refusal is not None or self.read_only is not None:
            self._admit(partition, insert, b)
        return self._write_into(insert, size, partition, a, b)

    def _admit(self, partition: PartitionId, insert: Insert, operation: Any) -> None:
        """The slow look: a partition that is new, paused or behind, or a full disk, which still takes deletes."""
        self._check_usable()
        self._dispatcher.admit(self._dispatcher.partition(partition))
        deletes = insert is delete_ranges or (insert is operate and operation[0] == DELETE)
        if self.read_only is not None and not deletes:
            raise self.read_only

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        self._check_usable()
        if self.read_only is not None and not _gives_room(group):
            raise self.read_only
        for partition in group.sections:
            if partition != LEDGER:
                self._dispatcher.admit(self._dispatcher.partition(partition))
        return self._coordinator.write_into(add_group, size + GROUP_BYTES, group, None, None)

    def flush(self, epoch: int | None, timeout_s: float = WAIT_S) -> Acknowledgement:
        return self._coordinator.flush(epoch, timeout_s)

    def settle(self, group: PendingGroup, size: int, timeout_s: float = WAIT_S) -> Epoch:
        """Submit a group and wait until it is judged."""
        epoch = self.submit(group, size)
        self._coordinator.wait_applied(epoch, timeout_s)
        return epoch

    # -- tables

    def table(self, name: str) -> TableInfo | None:
        return self._dispatcher.ledger.table(name)

    def create(self, name: str, kind: str, shards: int, options: bytes) -> TableInfo:
        self._command(encode_ops(Create(name, kind, shards, options)))
        info = self.table(name)
        if info is None:
            raise NotFound(f"table {name} was dropped while it was being made")
        return info

    def drop(self, name: str) -> None:
        if self.table(name) is None:
            raise NotFound(f"there is no table {name}")
        self._command(encode_ops(Drop(name)))

    def _command(self, operations: bytes) -> None:
        group = PendingGroup()
        group.sections[LEDGER] = operations
        self.settle(group, len(operations))

    # -- reading

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        layers = self._coordinator.layers
        sections = layers.pending.open
        if sections is not None and (rows := sections.get(partition)) is not None:  # the hot path: just written
            value = rows.get(key)
            if type(value) is bytes:
                return value
        if layers.deltas or layers.pending.groups:
            for delta in (layers.pending, *layers.deltas):
                for _, part in delta.sections(partition):
                    if find(part, key) is not None:
                        return self._folded(partition, key)
        place = self._known(partition)
        machine = self._machine(partition) if place is None or place.failures else place.machine
        return machine.tree.get(key)  # type: ignore[union-attr]

    def _folded(self, partition: PartitionId, key: bytes) -> bytes | None:
        """The value of a key that is being written: through all layers."""
        layers = self._coordinator.layers
        tree = self._machine(partition).tree
        applied = tree.lsn  # before the row: groups up to here are in it, and those up to the row's LSN too
        stored = tree.get_row(key)
        applied = applied if stored is None else max(applied, stored[2])
        rows: list[Row] = []
        for delta in (layers.pending, *layers.deltas):
            for group, part in delta.sections(partition):
                operation = find(part, key)
                if operation is None or (group.lsn is not None and group.lsn <= applied):
                    continue
                kind, value, expires = operation
                rows.append((kind, value, ALL_LATER, expires))
        if stored is not None:
            rows.append(stored)
        live = resolve(rows, 0, self.time_us())
        return None if live is None else live[1]

    def _view(self, partition: PartitionId) -> View:
        """One moment of a shard, one's own writes included."""
        machine = self._machine(partition)
        with self._dispatcher.turn:  # no record is half applied: what a group's LSN says is exact
            layers = self._coordinator.seal_pending()
            snapshot = machine.snapshot()
            waiting = [
                part
                for delta in reversed(layers.deltas)
                for group, part in reversed(delta.sections(partition))
                if group.lsn is None or group.lsn > snapshot.lsn
            ]
        if not waiting:
            return snapshot
        overlay = Memtable()
        overlay.apply(to_edit(waiting, ALL_LATER, self.time_us()))
        return snapshot.under(overlay)

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        return self._view(partition).scan(start, end, reverse=reverse)

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        return self._view(partition).scan_arrow(start, end)

    def _machine(self, partition: PartitionId) -> KvMachine:
        place = self._dispatcher.partition(partition)
        if place.failures and (behind := place.behind) is not None:
            raise behind
        machine = place.machine
        assert isinstance(machine, KvMachine)
        return machine


class _InChild:
    """Stands for the parts of a store in a forked child."""

    def __getattr__(self, name: str) -> Any:
        _refuse_in_child()


def _refuse_in_child(*_: Any) -> NoReturn:
    raise Closed("this store was opened before a fork: open or connect to it in this process")


def _gives_room(group: PendingGroup) -> bool:
    """Whether a group may be written to a full disk: deletes, drops and what the store does for itself."""
    return all(
        partition == LEDGER
        or all(
            isinstance(part, Ranges)
            or all(not isinstance(operation, bytes) and operation[0] == DELETE for operation in part.values())
            for part in parts(sections)
        )
        for partition, sections in group.sections.items()
    )


class SnapshotPort:
    """A store as of one LSN: reads only."""

    def __init__(self, states: Mapping[PartitionId, Snapshot | PenstockError], tables: Mapping[str, TableInfo]) -> None:
        self._states = dict(states)
        self._tables = dict(tables)

    def table(self, name: str) -> TableInfo | None:
        return self._tables.get(name)

    def _state(self, partition: PartitionId) -> Snapshot:
        state = self._states.get(partition)
        if state is None:
            raise Closed("the snapshot was closed: take another")
        if isinstance(state, PenstockError):
            raise state
        return state

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        return self._state(partition).get(key)

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        return self._state(partition).scan(start, end, reverse=reverse)

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        return self._state(partition).scan_arrow(start, end)

    def close(self) -> None:
        for state in self._states.values():
            if isinstance(state, Snapshot):
                state.close()
        self._states.clear()

    # A snapshot takes no writes; these complete the port.

    def write(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        raise Invalid("a snapshot cannot be written to")

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        raise Invalid("a snapshot cannot be written to")

    def flush(self, epoch: int | None, timeout_s: float) -> Acknowledgement:
        raise Invalid("a snapshot has nothing to flush")

    def create(self, name: str, kind: str, shards: int, options: bytes) -> TableInfo:
        raise Invalid("a snapshot cannot be written to")

    def time_us(self) -> int:
        raise Invalid("a snapshot has no clock")
