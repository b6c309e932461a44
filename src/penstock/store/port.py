"""The live port into a store that this process owns: writes, tables, staged files, services. `live_reading` reads.

`applied_reading` has the reads of clients, `snapshot_port` those of a snapshot.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from penstock.archive.container import key_of
from penstock.archive.storage import WrappedKey
from penstock.coordinator import Acknowledgement, Epoch
from penstock.coordinator.waiting import Waiter
from penstock.errors import (
    Backpressure,
    Closed,
    DiskFull,
    FixTheCall,
    Invalid,
    NotFound,
    NotLeader,
    PartitionPaused,
    PenstockError,
    TableDraining,
    WaitExpired,
)
from penstock.feeds import check_condition
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.journal.partitions import PartitionId, table_of
from penstock.kinds import (
    BuildContext,
    Derived,
    Insert,
    Kind,
    Loadable,
    Serviced,
    as_loadable,
    as_row_conditional,
    as_serviced,
)
from penstock.partition.admission import WAIT_S as ADMIT_WAIT_S
from penstock.partition.admission import Reservation
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.ledger_records import (
    LEDGER,
    Alter,
    Condition,
    Configure,
    Create,
    Drop,
    Rewrap,
    SetStatus,
    TableInfo,
    TableStatus,
    Verdict,
    condition_table,
    decode_condition,
    dropped_table,
    encode_condition,
    encode_ops,
)
from penstock.partition.machine import PartitionDescriptor
from penstock.partition.pending import PendingDelta, PendingGroup, add_or_absorb, parts
from penstock.partition.reference import Reference, StagedFile, Staging, files_of
from penstock.registry import check_altered, check_configured, check_create, find_kind, kind_named
from penstock.store.conditions import Expectation, submit_if
from penstock.store.flusher import Coordinator
from penstock.store.keys import StoreKeys
from penstock.store.live_reading import WAIT_S, LiveReading
from penstock.store.services import TableServices

NOT_WRITTEN = (Backpressure, DiskFull, FixTheCall, NotLeader, PartitionPaused)  # a group that raises one never will be

T = TypeVar("T")
# What each group counts for, beside its bytes. A reader of pending writes visits every group, so a few hundred groups
# trigger a flush, as if they were large.
GROUP_BYTES = 16 << 10


class LocalPort(LiveReading):
    """The live port of the process that owns the store."""

    holder = ""

    def __init__(
        self,
        coordinator: Coordinator,
        dispatcher: Dispatcher,
        staging: Staging,
        *,
        clock: Clock,
        incarnation: int,
        identity: bytes,
        uuid: bytes,
        keys: StoreKeys,
        check_usable: Callable[[], None],
    ) -> None:
        super().__init__(coordinator, dispatcher, clock=clock, check_usable=check_usable)
        self._staging = staging
        self.incarnation = incarnation
        self.identity, self.uuid = identity, uuid
        self._keys = keys
        self._write_into = coordinator.write_into  # bound once, for every write
        buffer = coordinator.buffer
        dispatcher.admission.dispatched = lambda: buffer.layers.applied
        dispatcher.backlogs.undispatched = lambda: buffer.pending_bytes + buffer.in_flight_bytes
        self.read_only: DiskFull | None = None  # set while the disk is full
        self._changes_refused: PenstockError | None = None  # set for good if the store was opened to be read only
        self._services = TableServices(self)
        self._service, self._running = self._services.of, self._services.find
        self.totals_of: Callable[[TableInfo], Mapping[str, Any]] = lambda _: {}  # set once metrics are counted
        self._lock = threads.lock("local.listeners")
        self.listeners: tuple[Callable[[], None], ...] = ()  # guarded by _lock; replaced whole

    def disable_after_fork(self) -> None:
        """In a forked child: refuse everything, without taking locks that no thread there will release."""
        refusal = _Refusal("this store was opened before a fork: open or connect to it in this process")
        self._refuse(refusal)
        self._lock = self._services = refusal  # type: ignore[assignment]
        self._service = self._running = refusal.refuse  # type: ignore[assignment]

    def end(self) -> None:
        """Refuse everything from now on: the store was closed."""
        self._refuse(_Refusal("the store was closed: open it again"))

    def refuse_changes(self, error: PenstockError) -> None:
        """Refuse every change from now on with `error`; reads go on."""
        self._changes_refused = error
        self._write_into = self._check_changes  # type: ignore[assignment]

    def _check_changes(self, *_: Any) -> None:
        if self._changes_refused is not None:
            raise self._changes_refused

    def _refuse(self, refusal: _Refusal) -> None:
        self._ended = True  # first: a read that is under way checks it at its end
        self._find_open = self._write_into = refusal.refuse  # type: ignore[assignment]
        self._coordinator = self._dispatcher = refusal  # type: ignore[assignment]

    # -- writing

    @property
    def write_bytes_max(self) -> int:
        return self._coordinator.write_bytes_max - GROUP_BYTES

    def write(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        open_shard = self._find_open(partition)
        if open_shard is None or open_shard.guarded or self.read_only is not None:
            return self._write_guarded(partition, insert, size, a, b)
        return self._write_into(insert, size, partition, a, b)

    def _write_guarded(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        """The slow path: the partition is new, paused or behind, or the disk is full and takes only deletes."""
        self._check_usable()
        with self._reserved([partition], size, ADMIT_WAIT_S) as written:
            is_draining = self._partition(partition).is_draining
            if self.read_only is not None or is_draining:
                alone = PendingDelta()
                insert(alone, partition, a, b)
                if not all(map(self._frees_space, alone.groups)):
                    raise self.read_only or self._draining(partition)
            epoch = self._write_into(insert, size, partition, a, b)
            written(epoch)
        return epoch

    def _draining(self, partition: PartitionId) -> TableDraining:
        name = self._existing(table_of(partition)).name
        return TableDraining(f"table {name} is being drained and takes no new rows: use another, or reactivate it")

    @contextmanager
    def _reserved(self, partitions: Iterable[PartitionId], size: int, wait_s: float) -> Iterator[Callable[[int], None]]:
        """Reserve a write to partitions while it is given to the coordinator; call what it yields with the epoch."""
        reserved: list[Reservation] = []
        epoch = 0

        def written(number: int) -> None:
            nonlocal epoch
            epoch = number

        try:
            for partition in partitions:
                if partition != LEDGER:
                    reserved.append(self._dispatcher.admit(self._partition(partition), wait_s, size))
            yield written
        finally:
            for reservation in reserved:
                reservation.epoch = epoch

    def _frees_space(self, group: PendingGroup) -> bool:
        """Whether a group may be written to a full disk: deletes, drops and the store's own records."""
        return all(self._only_frees(partition, sections) for partition, sections in group.sections.items())

    def _only_frees(self, partition: PartitionId, sections: Any) -> bool:
        """Whether sections of a partition add no rows: they delete, or are the store's own."""
        info = self._dispatcher.ledger.table_by_id(table_of(partition))
        if partition == LEDGER or info is None:
            return True
        kind = kind_named(info.kind, info.name)
        return all(not isinstance(part, Reference) and kind.frees_space(part) for part in parts(sections))

    def submit(self, group: PendingGroup, size: int, wait_s: float = ADMIT_WAIT_S) -> Epoch:
        """See `Port`. `wait_s`: for a shard that takes no writes now."""
        try:
            return self._submit(group, size, wait_s)
        except NOT_WRITTEN:
            _withdraw(group)
            raise

    def _submit(self, group: PendingGroup, size: int, wait_s: float) -> Epoch:
        self._check_usable()
        self._check_changes()
        if self.read_only is not None and not self._frees_space(group):
            raise self.read_only
        for partition, sections in group.sections.items():
            is_draining = partition != LEDGER and self._partition(partition).is_draining
            if is_draining and not self._only_frees(partition, sections):
                raise self._draining(partition)
        share = size // max(1, len(group.sections))
        with self._reserved(group.sections, share, wait_s) as written:
            epoch = self._submit_reserved(group, size)
            written(epoch)
        return epoch

    def _submit_reserved(self, group: PendingGroup, size: int) -> Epoch:
        condition = decode_condition(group.condition)
        expected: list[Expectation] = []  # conditions on rows
        others: list[tuple[str, bytes]] = []  # conditions for the ledger
        for name, argument in condition.others:
            info, kind = self._check_condition(name, argument)
            rows = as_row_conditional(kind)
            if rows is not None and name == rows.row_condition:
                expected.append((rows, info, rows.expected_row(argument)))
            else:
                others.append((name, argument))
        left = Condition(condition.token, tuple(others))  # for the ledger
        if not (staged := _staged_in(group)):
            return self._write(group, size, left, expected)
        with self._staging.claimed(staged, _encoded(left)):
            return self._write(group, size, left, expected)

    def _write(self, group: PendingGroup, size: int, condition: Condition, expected: list[Expectation]) -> Epoch:
        if condition.token is None or not self.is_token_used(condition.token):  # a duplicate needs no lease
            for name, argument in condition.others:
                service = self._service(self._existing(condition_table(argument)))
                if service is not None:
                    service.admit(name, argument)
            self._admit_sections(group)
        if not expected:
            return self._coordinator.write_into(add_or_absorb, size + GROUP_BYTES, group, None, None)
        group.condition = _encoded(condition)
        try:
            return submit_if(
                group,
                size + GROUP_BYTES,
                expected,
                condition.token,
                coordinator=self._coordinator,
                dispatcher=self._dispatcher,
                machine_of=self.machine,
                clock=self.clock,
            )
        except PenstockError:
            raise
        except Exception:
            self._check_usable()  # files that were closed meanwhile raise anything
            raise

    def _admit_sections(self, group: PendingGroup) -> None:
        """Let the kinds refuse sections by the state of their shards."""
        for partition, sections in group.sections.items():
            info = self._dispatcher.ledger.table_by_id(table_of(partition))
            if partition != LEDGER and info is not None:
                kind, shard = kind_named(info.kind, info.name), self._partition(partition)
                written = [part for part in parts(sections) if not isinstance(part, Reference)]
                if not written:
                    continue
                try:
                    withdraw = kind.admit(info, written, shard.machine, self.time_us())
                except Invalid:
                    if not shard.late:
                        raise
                    # A delete that is durable may make room when it is applied.
                    withdraw = kind.admit(info, written, self.machine(partition), self.time_us())
                if withdraw is not None:
                    group.withdrawals += (withdraw,)

    def _check_condition(self, name: str, argument: bytes) -> tuple[TableInfo, Kind]:
        """Check a condition as for a client: one that the ledger cannot judge must not reach the journal."""
        info = self._existing(condition_table(argument))
        check_condition(info, name, argument, own=True)
        return info, kind_named(info.kind, info.name)

    def commit_and_wait(self, group: PendingGroup, size: int, timeout_s: float = WAIT_S) -> Epoch:
        epoch = self.submit(group, size)
        self.wait_applied(epoch, timeout_s)
        self.free_refused(group)
        return epoch

    def free_refused(self, group: PendingGroup) -> None:
        """Let another group write the rows of staged files that this one did not; withdraw what was admitted."""
        if group.verdict in (Verdict.REFUSED, Verdict.TOKEN_TOO_OLD, Verdict.DUPLICATE):
            _withdraw(group)
        if group.verdict in (Verdict.REFUSED, Verdict.TOKEN_TOO_OLD):
            self._staging.unclaim(_staged_in(group))

    def flush(self, epoch: int | None, timeout_s: float = WAIT_S, *, table: int | None = None) -> Acknowledgement:
        return self._coordinator.wait_applied(epoch, timeout_s)

    def wait_for(self, lsn: int, tables: Sequence[TableInfo], timeout_s: float = WAIT_S) -> int:
        """Wait until tables have applied every record up to an LSN; return the LSN that all of them have reached."""
        self._check_usable()
        deadline_s = self.clock.monotonic_s() + timeout_s
        if self._dispatcher.published < lsn:
            self._await_published(lsn, timeout_s, deadline_s)
        return self._dispatcher.wait_for(lsn, tables, deadline_s - self.clock.monotonic_s())

    def _await_published(self, lsn: int, timeout_s: float, deadline_s: float) -> None:
        """Wait until a record was dispatched; `WaitExpired` if it was not in time."""
        # Not an Event: an interrupt in its `set` would leave its lock acquired, and stop the next thread that applies.
        moved = Waiter(Epoch(0), applied=True)
        moved.prepare()
        stop_listening = self.on_applied(moved.wake)
        try:
            while self._dispatcher.published < lsn:
                self._check_usable()
                left_s = deadline_s - self.clock.monotonic_s()
                if left_s <= 0:
                    raise WaitExpired(
                        f"record {lsn} was not applied within {timeout_s:g} s (the last is "
                        f"{self._dispatcher.published}): wait again"
                    )
                moved.wait(min(left_s, 1.0))
        finally:
            stop_listening()

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

    def _existing(self, table: int) -> TableInfo:
        """Return a table by its id; `NotFound`, with its name, if it was dropped."""
        info = self.table_by_id(table)
        if info is None:
            raise dropped_table(table, self.dropped_name(table))
        return info

    def create(
        self,
        name: str,
        kind: str,
        shards: int,
        options: bytes,
        storage: bytes = b"",
        *,
        encrypted: bool | None = None,
    ) -> TableInfo:
        check_create(name, kind, shards, options, storage)
        self._check_changes()
        storage, key = self._keys.new_table(storage, encrypted)
        computed = find_kind(kind)
        if isinstance(computed, Derived) and self.table(name) is None:
            computed.check_source(name, options, self.table)
        self._command(encode_ops(Create(name, kind, shards, options, storage, key)))
        info = self.table(name)
        if info is None:
            raise NotFound(f"table {name} was dropped while it was being created")
        self._keys.check([info])  # now, not in the first flush: a key service that fails must not fail writes
        if key is not None and info.key == key:
            for _, newer in self._keys.rewrapped([info], self._keys.newest()):  # keys were rotated meanwhile
                self.rewrap(info, newer)
        return info

    def drop(self, name: str) -> None:
        self._check_changes()
        info = self.table(name)
        if info is None:
            raise NotFound(f"there is no table {name}")
        self._command(encode_ops(Drop(name)))
        self._services.end(info.table_id)

    def alter(self, info: TableInfo, options: bytes) -> TableInfo:
        check_altered(info, options)
        self._check_changes()
        self._command(encode_ops(Alter(info.table_id, info.options, options)))
        now = self.table_by_id(info.table_id)
        if now is None:
            raise NotFound(f"table {info.name} was dropped")
        return now

    def configure(self, info: TableInfo, storage: bytes) -> TableInfo:
        check_configured(info, storage)
        self._check_changes()
        self._command(encode_ops(Configure(info.table_id, info.storage, storage)))
        return self._existing(info.table_id)

    def set_status(self, info: TableInfo, status: TableStatus) -> TableInfo:
        """Let a table drain, or take writes again, durably."""
        self._check_changes()
        self._command(encode_ops(SetStatus(info.table_id, status)))
        return self._existing(info.table_id)

    def rewrap(self, info: TableInfo, key: WrappedKey) -> None:
        """Replace the wrapped key of an encrypted table by the same key, wrapped by another master key."""
        self._check_changes()
        assert info.key is not None
        self._command(encode_ops(Rewrap(info.table_id, info.key.version, key)))

    def table_key(self, info: TableInfo) -> bytes | None:
        """Return the key of a table; None if it is not encrypted."""
        return None if info.key is None else self._keys.table_key(info.table_id)

    def _command(self, operations: bytes) -> None:
        group = PendingGroup()
        group.sections[LEDGER] = operations
        self.commit_and_wait(group, len(operations))

    # -- files that are built elsewhere

    def stage(self, partition: PartitionId, count: int, lease_s: float) -> list[StagedFile]:
        self._check_usable()
        self._check_changes()
        descriptor = self._partition(partition).descriptor
        suffix = self._loadable(descriptor).staged_suffix
        return self._staging.reserve(descriptor.table_id, descriptor.folder, suffix, count, lease_s)

    @contextmanager
    def building(self, lease_s: float) -> Iterator[BuildContext]:
        def reserve(partition: PartitionId, count: int) -> list[StagedFile]:
            return self.stage(partition, count, lease_s)

        self._check_changes()
        staging, name = self._staging, threads.process_name()
        yield BuildContext(
            staging.root,
            self.identity,
            reserve,
            self.time_us(),
            name,
            staging.fs,
            self.clock,
            files_of=self._keys.files_of,
            uuid=self.uuid,
        )

    def accept(self, group: PendingGroup, partition: PartitionId, files: Sequence[StagedFile]) -> None:
        try:
            group.sections[partition] = self._accept(group, partition, files)
        except BaseException:  # so the group is never submitted
            _withdraw(group)
            raise

    def _accept(self, group: PendingGroup, partition: PartitionId, files: Sequence[StagedFile]) -> Reference:
        kind = self._loadable(self._partition(partition).descriptor)  # `NotFound` if the table has no such shard
        machine = self.machine(partition)  # first: an earlier load of these files may be late, and remove them
        reference = self._staging.accept(table_of(partition), files)
        try:
            self._check_encrypted(table_of(partition), reference.files)
            withdraw = kind.check_staged(machine, reference.files)
            if withdraw is not None:
                group.withdrawals += (withdraw,)
        except FileNotFoundError as error:  # removed meanwhile
            self._staging.release(file.chunk_id for file in reference.files)
            raise Invalid(f"{error.filename} is not staged (any more): stage and build it again") from error
        except BaseException:
            self._staging.release(file.chunk_id for file in reference.files)
            raise
        return reference

    def _check_encrypted(self, table: int, files: Sequence[StagedFile]) -> None:
        """Raise `Invalid` if files are not encrypted with the key of their table, or are, and it is not encrypted."""
        key = self._keys.files_of(table).key
        for name in (name for file in files for name in files_of(file.file_name)):
            if key_of(self._staging.fs, f"{self._staging.root}/{name}") != key:
                state = "encrypted with the key of its table" if key else "plain, as its table is"
                raise Invalid(f"{name} is not {state}: build it with store.load or prepare")

    def _loadable(self, descriptor: PartitionDescriptor) -> Loadable:
        info = self._existing(descriptor.table_id)
        return as_loadable(kind_named(info.kind, info.name), info)

    def write_staged(self, partition: PartitionId, chunk_id: int, file_name: str, offset: int, data: bytes) -> None:
        """Write bytes of a staged file or its index, for a client that cannot; in order, from offset 0."""
        self._check_usable()
        folder = self._partition(partition).descriptor.folder  # opened: its spill may name the file
        if not file_name.startswith(f"{folder}/"):
            raise Invalid(f"{file_name} is not a file of {folder}: write it to the shard that it was staged for")
        self._staging.write(table_of(partition), chunk_id, file_name, offset, data)

    # -- what kinds do for their tables

    @property
    def port(self) -> LocalPort:
        return self

    def call_at_close(self, info: TableInfo, name: str, argument: bytes) -> None:
        """Do nothing: what the owner holds in memory ends with it."""

    def call(self, info: TableInfo, name: str, argument: bytes, *, wait_s: float = 0.0) -> bytes:
        self._check_usable()
        kind = self._serviced(info)
        if name not in kind.read_only_calls:
            self._check_changes()
        kind.check_call(info, name, argument)
        try:
            service = self._service(self._existing(info.table_id))
            assert service is not None  # its kind has services
            return service.call(name, argument)
        except Exception:
            self._check_usable()  # files that were closed meanwhile raise anything
            raise

    @staticmethod
    def _serviced(info: TableInfo) -> Serviced:
        return as_serviced(kind_named(info.kind, info.name), info)

    def ask(self, info: TableInfo, name: str, request: Any, reply: type[T], *, wait_s: float = 0.0) -> T:
        if self._changes_refused is not None and name not in self._serviced(info).read_only_calls:
            self._check_usable()
            self._check_changes()
        try:
            if self._dispatcher.torn:  # as in `lookup`; raises if the store was closed, or opened before a fork
                with self._dispatcher.turn:
                    self._dispatcher.finish()
            service = self._running(info.table_id)
            if service is None:
                service = self._service(self._existing(info.table_id))
                assert service is not None  # its kind has services
            answer: T = service.perform(name, request)
        except Exception:
            self._check_usable()  # as in `call`
            raise
        return answer

    def end_service(self, table: int) -> None:
        """End the service of a table whose files were replaced; its next use begins another."""
        self._services.end(table, is_dropped=False)

    def has_leases(self) -> bool:
        """Whether a client holds a lease that would be lost if this process ended."""
        return self._services.has_leases()

    def maintain(self) -> None:
        """Let every table's service do its maintenance."""
        self._services.maintain(self.tables())

    tend = maintain  # its earlier name, in scripts

    def close(self) -> None:
        """Close the services; each answers its waiters."""
        self._services.close()

    def ledger_row(self, key: bytes) -> bytes | None:
        return self._dispatcher.ledger.tree.get(key)

    def ledger_rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._dispatcher.ledger.tree.scan(prefix=prefix)

    def stream_totals(self, info: TableInfo) -> Mapping[str, Any]:
        return self.totals_of(info)

    def on_applied(self, act: Callable[[], None]) -> Callable[[], None]:
        with self._lock:
            self.listeners = (*self.listeners, act)

        def end() -> None:
            with self._lock:
                self.listeners = tuple(other for other in self.listeners if other is not act)

        return end

    def applied(self) -> None:
        """For the store: tell listeners that records were applied."""
        for act in self.listeners:
            act()


def _encoded(condition: Condition) -> bytes:
    return encode_condition(condition) if condition != Condition() else b""


def _staged_in(group: PendingGroup) -> list[int]:
    """Return the ids of the staged files that a group refers to."""
    references = (part for some in group.sections.values() for part in parts(some) if isinstance(part, Reference))
    return [file.chunk_id for reference in references for file in reference.files]


def _withdraw(group: PendingGroup) -> None:
    """Take back what kinds admitted of a group that was refused."""
    withdrawals, group.withdrawals = group.withdrawals, ()
    for withdraw in withdrawals:
        withdraw()


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
