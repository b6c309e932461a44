"""Ports into a store that this process owns: live, as other processes see it, and as of a snapshot.

This process reads its own writes through the coordinator's layers: pending writes, then batches being flushed, then the
tree. A group whose LSN shows that the tree has it already is skipped, so that no operand counts twice. Other processes
read through `AppliedReading`, which shows nothing that a crash could undo.

A read of more than one row sees the state between two records: see `Dispatcher.finish`.

Thread: any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from penstock.coordinator import Acknowledgement, Epoch, WriteCoordinator
from penstock.errors import Closed, DiskFull, Invalid, NotFound, PenstockError
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_errors import translate_os_errors
from penstock.journal.partitions import PartitionId, table_of
from penstock.kinds import (
    QUERY_S,
    BuildContext,
    Insert,
    Loadable,
    Machine,
    Piece,
    PieceSnapshot,
    Serviced,
    ShardSnapshot,
    TableService,
    as_loadable,
    as_serviced,
    partitions_of,
)
from penstock.partition.dispatcher import Dispatcher, Partition
from penstock.partition.ledger import (
    LEDGER,
    Create,
    Drop,
    TableInfo,
    condition_table,
    decode_condition,
    dropped_table,
    encode_ops,
)
from penstock.partition.machine import PartitionDescriptor
from penstock.partition.pending import PendingDelta, PendingGroup, add_or_absorb, parts
from penstock.partition.reference import Reference, StagedFile, Staging
from penstock.registry import check_create, kind_named
from penstock.store.flusher import Flushed
from penstock.store.querying import check_query, run_query

logger = logging.getLogger(__name__)

T = TypeVar("T")
Coordinator = WriteCoordinator[PendingDelta, Flushed, int]
# What each group counts for, beside its bytes. A reader of pending writes visits every group, so a few hundred groups
# trigger a flush, as if they were large.
GROUP_BYTES = 16 << 10
WAIT_S = 60.0


class LocalPort:
    """The live port of the process that owns the store."""

    def __init__(
        self,
        coordinator: Coordinator,
        dispatcher: Dispatcher,
        staging: Staging,
        *,
        clock: Clock,
        incarnation: int,
        identity: bytes,
        check_usable: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._dispatcher = dispatcher
        self._staging = staging
        self.clock = clock
        self.incarnation = incarnation
        self._identity = identity
        self._check_usable = check_usable
        self._known, self._write_into = dispatcher.known, coordinator.write_into  # bound once, for every write
        self._ended = False
        self.read_only: DiskFull | None = None  # set while the disk is full
        self._lock = threads.rlock("local.services")
        self._services: dict[int, TableService] = {}  # guarded by _lock; by table
        self._listeners: tuple[Callable[[], None], ...] = ()  # guarded by _lock; replaced whole

    def time_us(self) -> int:
        """Return the store's time, which decides what has expired; never before the newest record."""
        return max(self.clock.time_us(), self._dispatcher.ledger.tree.time_us)

    def disable_after_fork(self) -> None:
        """In a forked child: refuse everything, without taking locks that no thread there will release."""
        self._refuse(_Refusal("this store was opened before a fork: open or connect to it in this process"))
        self._lock = self._coordinator  # type: ignore[assignment]

    def end(self) -> None:
        """Refuse everything from now on: the store was closed."""
        self._refuse(_Refusal("the store was closed: open it again"))

    def _refuse(self, refusal: _Refusal) -> None:
        self._ended = True  # first: a read that is under way checks it at its end
        self._known = self._write_into = refusal.refuse  # type: ignore[assignment]
        self._coordinator = self._dispatcher = refusal  # type: ignore[assignment]

    # -- writing

    def write(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        known = self._known(partition)
        if known is None or known.refusal is not None or self.read_only is not None:
            self._admit(partition, insert, a, b)
        return self._write_into(insert, size, partition, a, b)

    def _admit(self, partition: PartitionId, insert: Insert, a: Any, b: Any) -> None:
        """The slow path: the partition is new, paused or behind, or the disk is full and takes only deletes."""
        self._check_usable()
        self._dispatcher.admit(self._partition(partition))
        if self.read_only is not None:
            alone = PendingDelta()
            insert(alone, partition, a, b)
            if not all(map(self._frees_space, alone.groups)):
                raise self.read_only

    def _frees_space(self, group: PendingGroup) -> bool:
        """Whether a group may be written to a full disk: deletes, drops and the store's own records."""
        for partition, sections in group.sections.items():
            info = self._dispatcher.ledger.table_by_id(table_of(partition))
            if partition != LEDGER and info is not None:
                kind = kind_named(info.kind, info.name)
                if not all(not isinstance(part, Reference) and kind.frees_space(part) for part in parts(sections)):
                    return False
        return True

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        self._check_usable()
        if self.read_only is not None and not self._frees_space(group):
            raise self.read_only
        for partition in group.sections:
            if partition != LEDGER:
                self._dispatcher.admit(self._partition(partition))
        condition = decode_condition(group.condition)
        for name, argument in condition.others:
            self._check_condition(name, argument)
        if condition.token is None or not self.is_token_used(condition.token):  # a duplicate needs no lease
            for name, argument in condition.others:
                service = self._service(self._existing(condition_table(argument)))
                if service is not None:
                    service.admit(name, argument)
        return self._coordinator.write_into(add_or_absorb, size + GROUP_BYTES, group, None, None)

    def _check_condition(self, name: str, argument: bytes) -> None:
        """Check a condition as for a client: one that the ledger cannot judge must not reach the journal."""
        info = self._existing(condition_table(argument))
        kind_named(info.kind, info.name).check_condition(info, name, argument, own=True)

    def commit_and_wait(self, group: PendingGroup, size: int, timeout_s: float = WAIT_S) -> Epoch:
        epoch = self.submit(group, size)
        self.wait_applied(epoch, timeout_s)
        return epoch

    def wait_applied(self, epoch: int, timeout_s: float = WAIT_S) -> None:
        """Wait until every process can read a write."""
        self._coordinator.wait_applied(epoch, timeout_s)

    def flush(self, epoch: int | None, timeout_s: float = WAIT_S, *, table: int | None = None) -> Acknowledgement:
        return self._coordinator.wait_applied(epoch, timeout_s)

    @property
    def failure(self) -> BaseException | None:
        """Why writes are refused until the store recovers; None while they are accepted."""
        return self._coordinator.failure

    def is_token_used(self, token: tuple[str, int]) -> bool:
        return self._dispatcher.ledger.is_token_used(*token)

    # -- tables

    def table(self, name: str) -> TableInfo | None:
        return self._dispatcher.ledger.table(name)

    def tables(self) -> list[TableInfo]:
        return self._dispatcher.ledger.tables()

    def table_by_id(self, table: int) -> TableInfo | None:
        return self._dispatcher.ledger.table_by_id(table)

    def dropped_name(self, table: int) -> str | None:
        """Return the name of a table that was dropped since the opening; None if it is not known."""
        return self._dispatcher.ledger.dropped_name(table)

    def create(self, name: str, kind: str, shards: int, options: bytes) -> TableInfo:
        check_create(name, kind, shards, options)
        self._command(encode_ops(Create(name, kind, shards, options)))
        info = self.table(name)
        if info is None:
            raise NotFound(f"table {name} was dropped while it was being created")
        return info

    def drop(self, name: str) -> None:
        info = self.table(name)
        if info is None:
            raise NotFound(f"there is no table {name}")
        self._command(encode_ops(Drop(name)))
        with self._lock:
            service = self._services.pop(info.table, None)
        if service is not None:
            service.close()

    def _command(self, operations: bytes) -> None:
        group = PendingGroup()
        group.sections[LEDGER] = operations
        self.commit_and_wait(group, len(operations))

    # -- files that are built elsewhere

    def stage(self, partition: PartitionId, count: int, lease_s: float) -> list[StagedFile]:
        self._check_usable()
        descriptor = self._partition(partition).descriptor
        suffix = self._loadable(descriptor).staged_suffix
        return self._staging.reserve(descriptor.table, descriptor.folder, suffix, count, lease_s)

    @contextmanager
    def building(self, lease_s: float) -> Iterator[BuildContext]:
        def reserve(partition: PartitionId, count: int) -> list[StagedFile]:
            return self.stage(partition, count, lease_s)

        staging, name = self._staging, threads.process_name()
        yield BuildContext(staging.root, self._identity, reserve, self.time_us(), name, staging.fs)

    def accept(self, partition: PartitionId, files: Sequence[StagedFile]) -> Reference:
        kind = self._loadable(self._partition(partition).descriptor)  # `NotFound` if the table has no such shard
        reference = self._staging.accept(table_of(partition), files)
        try:
            kind.check_staged(self.machine(partition), reference.files)
        except BaseException:
            self._staging.release(file.chunk_id for file in reference.files)
            raise
        return reference

    def _loadable(self, descriptor: PartitionDescriptor) -> Loadable:
        info = self._existing(descriptor.table)
        return as_loadable(kind_named(info.kind, info.name), info)

    def write_staged(self, partition: PartitionId, chunk_id: int, file_name: str, offset: int, data: bytes) -> None:
        """Write bytes of a staged file or its index, for a client that cannot; in order, from offset 0."""
        self._check_usable()
        self._staging.write(table_of(partition), chunk_id, file_name, offset, data)

    # -- what kinds do for their tables

    @property
    def port(self) -> LocalPort:
        return self

    def call(self, info: TableInfo, name: str, argument: bytes, *, wait_s: float = 0.0) -> bytes:
        self._check_usable()
        as_serviced(kind_named(info.kind, info.name), info).check_call(info, name, argument)
        try:
            service = self._service(self._existing(info.table))
            assert service is not None  # its kind has services
            return service.call(name, argument)
        except Exception:
            self._check_usable()  # files that were closed meanwhile raise anything
            raise

    def ask(self, info: TableInfo, name: str, request: Any, reply: type[T], *, wait_s: float = 0.0) -> T:
        self._check_usable()
        as_serviced(kind_named(info.kind, info.name), info)
        try:
            service = self._service(self._existing(info.table))
            assert service is not None  # its kind has services
            answer: T = service.perform(name, request)
        except Exception:
            self._check_usable()  # as in `call`
            raise
        return answer

    def _existing(self, table: int) -> TableInfo:
        """Return a table by its id; `NotFound`, with its name, if it was dropped."""
        info = self.table_by_id(table)
        if info is None:
            raise dropped_table(table, self.dropped_name(table))
        return info

    def _service(self, info: TableInfo) -> TableService | None:
        """Return the service of a table, made on first use; None if its kind has none."""
        with self._lock:
            service = self._services.get(info.table)
            if service is None:
                kind = kind_named(info.kind, info.name)
                if isinstance(kind, Serviced):
                    service = self._services[info.table] = kind.service(info, self)
            return service

    def has_leases(self) -> bool:
        """Whether a client holds a lease that would be lost if this process ended."""
        with self._lock:
            services = list(self._services.values())
        return any(service.has_leases() for service in services)

    def maintain(self) -> None:
        """Let every table's service do its maintenance; a failing service does not stop the others."""
        for info in self.tables():
            try:
                service = self._service(info)
                if service is not None:
                    service.maintain()
            except Exception as error:  # any: it must not delay the other tables
                logger.warning("maintenance of table %s failed (%s): it is tried again", info.name, error)

    tend = maintain  # its earlier name, in scripts

    def close(self) -> None:
        """Close the services; each answers its waiters."""
        with self._lock:
            services = list(self._services.values())
        for service in services:
            service.close()

    def ledger_row(self, key: bytes) -> bytes | None:
        return self._dispatcher.ledger.tree.get(key)

    def ledger_rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._dispatcher.ledger.tree.scan(prefix=prefix)

    def on_applied(self, act: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            self._listeners = (*self._listeners, act)

        def end() -> None:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not act)

        return end

    def applied(self) -> None:
        """For the store: tell listeners that records were applied."""
        for act in self._listeners:
            act()

    def _partition(self, partition: PartitionId) -> Partition:
        """Return a shard, opened on first use; any file error may occur then."""
        with translate_os_errors():
            return self._dispatcher.partition(partition)

    def machine(self, partition: PartitionId) -> Machine:
        """Return the state machine of a shard; raises if the shard is behind the journal."""
        shard = self._partition(partition)
        if shard.failures and (behind := shard.behind) is not None:
            raise behind
        return shard.machine  # type: ignore[return-value]

    # -- reading

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        layers = self._coordinator.layers
        pending = layers.pending
        sections = pending.open
        if sections is not None and (rows := sections.get(partition)) is not None:  # the hot path: just written
            value = rows.get(key)
            if type(value) is bytes:
                return value
        try:
            if self._dispatcher.torn:
                with self._dispatcher.turn:
                    self._dispatcher.finish()
                    stored = self._lookup(partition, key)
            elif layers.deltas or pending.groups:
                stored = self._lookup(partition, key)
            else:  # nothing waits, so what is applied is all there is
                known = self._known(partition)
                machine: Any = self.machine(partition) if known is None or known.failures else known.machine
                stored = machine.get(key)
        except Exception:
            self._check_usable()  # files that were closed meanwhile raise anything
            raise
        if stored is None and self._ended:
            self._check_usable()
        return stored

    def _lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        layers = self._coordinator.layers
        known = self._known(partition)
        machine: Any = self.machine(partition) if known is None or known.failures else known.machine
        if layers.deltas or layers.pending.groups:
            waiting = [part for delta in (layers.pending, *layers.deltas) for part in delta.sections(partition)]
            if any(machine.touches(part, key) for _, part in waiting):
                value: bytes | None = machine.fold(key, waiting, self.time_us())
                return value
        return machine.get(key)  # type: ignore[no-any-return]

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        if len(keys) == 1:
            return [self.lookup(partition, keys[0])]
        try:
            with self.moment([partition]) as moment:
                return moment.lookup_many(partition, keys)
        except Exception:
            self._check_usable()
            raise

    @contextmanager
    def moment(self, partitions: Sequence[PartitionId]) -> Iterator[SnapshotPort]:
        moment = self._moment(partitions)
        try:
            yield moment
        finally:
            moment.close()

    def _moment(self, partitions: Sequence[PartitionId], *, own: bool = True) -> SnapshotPort:
        """Return shards as of one LSN; with `own`, overlaid with this process's writes that are not applied yet."""
        self._check_usable()
        machines = [self.machine(partition) for partition in partitions]
        waiting: list[list[Any]] = [[] for _ in partitions]
        with self._dispatcher.turn:
            self._dispatcher.finish()
            deltas = self._coordinator.seal_pending().deltas if own else ()
            lsn, time_us = self._dispatcher.published, self.time_us()
            states = [machine.snapshot() for machine in machines]
            for machine, partition, some in zip(machines, partitions, waiting, strict=True):
                some += [
                    part
                    for delta in reversed(deltas)
                    for group, part in reversed(delta.sections(partition))
                    if group.lsn is None or group.lsn > machine.applied
                ]
        views = {
            partition: machine.overlay(state, some, time_us) if some else state
            for partition, machine, state, some in zip(partitions, machines, states, waiting, strict=True)
        }
        return SnapshotPort(lsn, views, {}, time_us, states, clock=self.clock)

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        return self._moment([partition]).scan(partition, start, end, reverse)

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        return self._moment([partition]).scan_arrow(partition, start, end)

    def query(self, info: TableInfo, name: str, argument: bytes, *, timeout_s: float = QUERY_S) -> Iterator[Any]:
        check_query(info, name, argument, timeout_s)
        return _query_moment(self._moment(partitions_of(info)), info, name, argument, timeout_s)

    def pieces(self, partition: PartitionId, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        raise Invalid("pieces are read from a snapshot: take one")

    def snapshot(self) -> SnapshotPort:
        self._check_usable()
        lsn, tables, states = self._dispatcher.snapshot()
        return SnapshotPort(lsn, states, {info.name: info for info in tables}, self.time_us(), clock=self.clock)

    def applied_values(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of keys as every process sees them, all at one LSN."""
        self._check_usable()
        with self._dispatcher.turn:
            self._dispatcher.finish()
            return list(map(self.machine(partition).get, keys))


class AppliedReading:
    """Read-only view of what is applied, and so durable. For clients of the owner."""

    def __init__(self, port: LocalPort) -> None:
        self._port = port
        self.table, self.tables, self.time_us, self.pieces = port.table, port.tables, port.time_us, port.pieces

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        return self.lookup_many(partition, [key])[0]

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._port.applied_values(partition, keys)

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
        return _query_moment(moment, info, name, argument, timeout_s)


def _query_moment(moment: SnapshotPort, info: TableInfo, name: str, argument: bytes, timeout_s: float) -> Iterator[Any]:
    """Yield the batches of a query, then close its moment."""
    try:
        yield from moment.query(info, name, argument, timeout_s=timeout_s)
    finally:
        moment.close()


class _Refusal:
    """Stand-in for the parts of a store that cannot be used any more: every use raises `Closed`."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def refuse(self, *_: Any) -> NoReturn:
        raise Closed(self._reason)

    def __getattr__(self, name: str) -> Any:
        self.refuse()

    def __enter__(self) -> NoReturn:
        self.refuse()

    def __exit__(self, *_: object) -> None: ...


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
            kind, info, name, argument, shards, time_us=self._time_us, clock=self._clock, timeout_s=timeout_s
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
