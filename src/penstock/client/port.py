"""The port into a store that another process owns.

A coordinator in this process collects writes, as in the owner, and sends them in batches: a write is a dict insert, and
the owner acknowledges whole batches. A read first sends the pending writes, so that it sees them.

Thread: any. Only the coordinator's background thread sends, so a waiter can time out at any moment.
Invariants: (1) a read sees everything this client wrote before it. (2) no call waits longer than the
`timeout_s` of `connect`, or than its own. (3) a write that raised `OutcomeUnknown` may still happen, once; any other
error of a write says that it did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeVar

import msgspec

from penstock.archive.storage import CodecOfLevel, FileStorage
from penstock.archive.table_keys import TableKeyRing
from penstock.client.building import building
from penstock.client.connection import Connection
from penstock.client.flusher import GROUP_BYTES_MAX, SEND_S, RemoteFlusher, WholeGroup
from penstock.client.owner_requests import OwnerRequests
from penstock.client.reading import FlightSnapshot
from penstock.coordinator import Acknowledgement, CoordinatorSettings, Durability, Epoch, WriteCoordinator
from penstock.errors import Closed, KeyMissing, OutcomeUnknown, PenstockError, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.decoders import decoder_of
from penstock.host.files import File
from penstock.host.randomness import Random
from penstock.journal.partitions import PartitionId, table_of
from penstock.kinds import BuildContext, Insert, Kind, as_serviced
from penstock.partition.ledger_records import TableInfo, decode_condition
from penstock.partition.pending import PendingDelta, PendingGroup, add_group, parts
from penstock.partition.reference import Reference, StagedFile
from penstock.protocol import wire
from penstock.registry import check_altered, check_configured, kind_named
from penstock.store.table_description import TableDescription

T = TypeVar("T")
FILES_S = 600.0  # for a group that adopts files: the owner reads and syncs them first
GROUP_BYTES = 256
AHEAD_BYTES = 8 << 20  # written while a batch is being sent; more than this waits, so that both sides work at once
AHEAD_S = 5.0  # how long a write waits for room
SNAPSHOT_LEASE_S = 300.0
RECENT_S = 1.0  # how long `store.kv(name)` and the like answer without a request
SETTINGS = CoordinatorSettings(bytes_max=72 << 20)


class FlightPort(OwnerRequests):
    """The live port of a client: a store that another process owns."""

    def __init__(self, connection: Connection, *, clock: Clock, random: Random, send_s: float = SEND_S) -> None:
        super().__init__(connection, random)
        self._clock = clock
        self._lock = threads.lock("client.port")
        self._kinds: dict[int, Kind] = {}  # guarded by _lock; by table
        self._recent: dict[str, tuple[TableInfo, float, int]] = {}  # guarded by _lock; see `recent`
        self._table_keys: dict[int, bytes] = {}  # guarded by _lock; of encrypted tables, in memory only
        self.holder = f"client-{random.randbytes(16).hex()}"
        self._farewells: dict[tuple[int, str], bytes] = {}  # calls to make at close: their arguments
        self._flusher = RemoteFlusher(connection, self._kind_of, producer=self.holder, clock=clock, send_s=send_s)
        self._coordinator: WriteCoordinator[PendingDelta, int, int] = WriteCoordinator(
            self._flusher, PendingDelta, view=0, incarnation=1, clock=clock, settings=SETTINGS
        )
        self._write_into = self._coordinator.write_into
        self._refusals = self._flusher.refusals
        self._durability = self._flusher.durability
        self._write_s = min(AHEAD_S, connection.owner_timeout_s)
        self._coordinator.start()

    def _kind_of(self, partition: PartitionId) -> Kind | None:
        with self._lock:
            return self._kinds.get(table_of(partition))

    def learn(self, tables: Sequence[TableInfo], *, now: bool = False) -> None:
        """Remember tables: their kinds encode the writes to them. `now`: the owner has just described them."""
        kinds = {info.table_id: kind_named(info.kind, info.name) for info in tables}
        until_s, missing = self._clock.monotonic_s() + RECENT_S, self._connection.missing
        with self._lock:
            self._kinds.update(kinds)
            self._connection.table_names.update({info.table_id: info.name for info in tables})
            if now:
                self._recent.update({info.name: (info, until_s, missing) for info in tables})

    def recent(self, name: str) -> TableInfo | None:
        """Return a table that the owner described less than RECENT_S ago, without a request; None if it did not.

        Another client may have dropped or altered it since; so it is asked again after any call that found something
        missing.
        """
        with self._lock:
            info, until_s, missing = self._recent.get(name, (None, 0.0, 0))
        fresh = missing == self._connection.missing and self._clock.monotonic_s() < until_s
        return info if fresh else None

    def _forget(self, name: str) -> None:
        with self._lock:
            self._recent.pop(name, None)

    # -- writing

    @property
    def write_bytes_max(self) -> int:
        return min(SETTINGS.bytes_max, GROUP_BYTES_MAX)

    def write(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        if self._refusals.unraised:
            self._refusals.raise_unraised()
        epoch = self._write_into(insert, size, partition, a, b, self._write_s)
        flusher = self._flusher
        flusher.unsent_bytes += size  # approximate: no lock guards it
        if flusher.unsent_bytes > AHEAD_BYTES:
            flusher.idle.wait(self._write_s)
        return epoch

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        return self._submit(WholeGroup(group.condition, group.sections), size)

    def _submit(self, group: WholeGroup, size: int) -> Epoch:
        return self._write_into(add_group, size + GROUP_BYTES, group, None, None, self._write_s)

    def commit_and_wait(self, group: PendingGroup, size: int, timeout_s: float | None = None) -> Epoch:
        whole = WholeGroup(group.condition, group.sections, awaited=True)
        if timeout_s is None:
            adopts = any(isinstance(part, Reference) for section in group.sections.values() for part in parts(section))
            owner_timeout_s = self._connection.owner_timeout_s
            timeout_s = max(owner_timeout_s, FILES_S) if adopts else owner_timeout_s
        try:
            epoch = self._submit(whole, size)
            self._wait(epoch, timeout_s)
        except (OutcomeUnknown, WaitExpired) as error:
            raise self._in_doubt(error, decode_condition(group.condition).token) from error
        finally:
            whole.awaited = False  # a later refusal is reported to other calls
        if whole.error is not None:
            raise whole.error
        group.verdict, group.refused_by = whole.verdict, whole.refused_by
        return epoch

    def _in_doubt(self, error: PenstockError, token: tuple[str, int] | None) -> OutcomeUnknown:
        """Return the error for a writer that stopped waiting for the outcome."""
        first, last = self._coordinator.applied + 1, self._coordinator.last
        advice = "read before you write it again" if token is None else f"repeat it with the token {token}"
        return OutcomeUnknown(
            f"the outcome of the write is unknown ({error}): {advice}", first=first, last=last, token=token
        )

    def flush(self, epoch: int | None, timeout_s: float | None = None, *, table: int | None = None) -> Acknowledgement:
        owner_timeout_s = self._connection.owner_timeout_s
        try:
            self.wait_sent(epoch, owner_timeout_s if timeout_s is None else min(timeout_s, owner_timeout_s), table)
        except WaitExpired as error:
            raise self._in_doubt(error, None) from error
        return self.acknowledgement()

    def acknowledgement(self) -> Acknowledgement:
        """Return the last epoch of this client that is durable."""
        return Acknowledgement(self._coordinator.applied, self._durability)

    def wait_sent(self, epoch: int | None, timeout_s: float, table: int | None = None) -> None:
        """Wait until writes up to an epoch (None: all so far) are durable; raises if the owner refused some of them."""
        self._connection.check_open()
        self._wait(self._coordinator.last if epoch is None else epoch, timeout_s)
        if epoch is None:
            self._refusals.raise_unraised()
        else:
            self._refusals.raise_for(epoch, table)

    def _wait(self, epoch: int, timeout_s: float) -> None:
        """Wait for the owner's answer to a write; `WaitExpired` if it is late. Sending continues then."""
        try:
            self._coordinator.wait_flushed(epoch, timeout_s)
        except WaitExpired:
            raise WaitExpired(f"the owner of the store did not answer within {timeout_s} s: try again") from None

    def _flush_writes(self) -> None:
        if self._coordinator.applied < self._coordinator.last:
            self._wait(self._coordinator.last, self._connection.owner_timeout_s)

    def disable_after_fork(self) -> None:
        """In a forked child: refuse everything."""
        self._connection.disable_after_fork()
        self._write_into = self._refuse_in_child
        self._coordinator = _InChild(self._refuse_in_child)  # type: ignore[assignment]

    def _refuse_in_child(self, *_: Any, **__: Any) -> NoReturn:
        raise Closed("this connection was made before a fork: connect in this process")

    def refuse_writes(self, error: PenstockError) -> None:
        """Raise an error for every write from now on: the owner at the other end takes none."""

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise error

        self._write_into = refuse

    def recover(self) -> None:
        """After a failure: send the unacknowledged writes again, with the same tokens."""
        self._coordinator.recover()

    def send_all(self) -> None:
        """Refuse new writes and send the others, while the owner accepts some; raises if any did not happen."""
        self._coordinator.refuse_writes()
        while True:
            answers = self._flusher.answers
            try:
                self._flush_writes()
                break
            except WaitExpired as error:
                if self._flusher.answers == answers:
                    raise self._in_doubt(error, None) from error
        self._refusals.raise_unraised()

    def call_at_close(self, info: TableInfo, name: str, argument: bytes) -> None:
        self._farewells[info.table_id, name] = argument

    def close(self) -> None:
        """Stop sending; `OutcomeUnknown` if some writes are not acknowledged."""
        farewells, self._farewells = self._farewells, {}
        for (table, name), argument in farewells.items():
            self._connection.forget(wire.CallService(table, name, argument))  # if it is lost, leases expire
        self._write_into = self._refuse_closed
        self._flusher.end()
        self._coordinator.shutdown(0.0)

    def _refuse_closed(self, *_: Any, **__: Any) -> NoReturn:
        raise self._connection.closed()

    # -- reading

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        self._flush_writes()
        values = self._first_values(partition, keys) if keys else []
        if len(values) == len(keys):
            return values
        with self.moment([partition]) as snapshot:  # a second request would read another LSN
            return snapshot.lookup_many(partition, keys)

    # -- tables

    def table(self, name: str) -> TableInfo | None:
        tables = self._connection.ask(wire.FindTable(name), list[TableInfo])
        self.learn(tables, now=True)
        return tables[0] if tables else None

    def tables(self) -> list[TableInfo]:
        tables = self._connection.ask(wire.ListTables(), list[TableInfo])
        self.learn(tables, now=True)
        return tables

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
        info = self._connection.ask(wire.CreateTable(name, kind, shards, options, storage, encrypted), TableInfo)
        self.learn([info], now=True)
        return info

    def drop(self, name: str) -> None:
        self._flush_writes()
        try:
            self._connection.ask(wire.DropTable(name), None, repeat=False)  # type: ignore[arg-type]
        finally:
            self._forget(name)

    def alter(self, info: TableInfo, options: bytes) -> TableInfo:
        check_altered(info, options)
        self._forget(info.name)
        altered = self._connection.ask(wire.AlterTable(info.table_id, info.options, options), TableInfo)
        self.learn([altered], now=True)
        return altered

    def configure(self, info: TableInfo, storage: bytes) -> TableInfo:
        check_configured(info, storage)
        self._forget(info.name)
        configured = self._connection.ask(wire.ConfigureTable(info.table_id, info.storage, storage), TableInfo)
        self.learn([configured], now=True)
        return configured

    def describe(self, name: str) -> TableDescription:
        """Return the description of a table."""
        return self._connection.ask(wire.DescribeTable(name), TableDescription)

    def wait_for_change(self, name: str, after: int, timeout_s: float) -> TableDescription:
        """Wait for a later description of a table."""

        def changed(wait_s: float) -> TableDescription:
            return self._connection.ask(wire.WaitForChange(name, after, wait_s), TableDescription, wait_s=wait_s)

        return self._in_requests(changed, timeout_s)

    def drain(self, name: str, timeout_s: float) -> TableDescription:
        """Let a table drain, with what this client wrote before."""
        self._flush_writes()
        self._forget(name)
        return self._connection.ask(wire.DrainTable(name, timeout_s), TableDescription, wait_s=timeout_s)

    def reactivate(self, name: str) -> TableDescription:
        """Let a table take writes again."""
        self._forget(name)
        return self._connection.ask(wire.ReactivateTable(name), TableDescription)

    def wait_for(self, lsn: int, tables: Sequence[TableInfo], timeout_s: float) -> int:
        """Wait until tables have applied every record up to an LSN."""
        numbers = [info.table_id for info in tables]

        def applied(wait_s: float) -> int:
            return self._connection.ask(wire.WaitFor(lsn, numbers, wait_s), int, wait_s=wait_s)

        return self._in_requests(applied, timeout_s)

    def time_us(self) -> int:
        return self._connection.ask(wire.ReadTime(), int)

    def now_us(self) -> int:
        return self._clock.time_us()

    def plan_batch(
        self,
        tables: Sequence[str],
        *,
        source: str = "",
        consumer: str = "",
        start: Mapping[int, int] | None = None,
        rows_max: int = 0,
        bytes_max: int = 0,
        begin: str = "",
        changes: bool = False,
    ) -> wire.BatchPlan:
        """Return everything that planning a batch needs, in one request: see `wire.PlanBatch`."""
        self._flush_writes()
        starts = [] if start is None else sorted(start.items())
        request = wire.PlanBatch(list(tables), source, consumer, starts, rows_max, bytes_max, begin, changes)
        plan = self._connection.ask(request, wire.BatchPlan)
        self.learn(plan.tables if plan.source is None else [*plan.tables, plan.source.table])
        return plan

    # -- what kinds do for their tables

    def call(self, info: TableInfo, name: str, argument: bytes, *, wait_s: float = 0.0) -> bytes:
        self._flush_writes()
        repeat = name in as_serviced(kind_named(info.kind, info.name), info).repeatable_calls
        request = wire.CallService(info.table_id, name, argument)
        return self._connection.ask(request, bytes, repeat=repeat, wait_s=wait_s)

    def ask(self, info: TableInfo, name: str, request: Any, reply: type[T], *, wait_s: float = 0.0) -> T:
        answer = self.call(info, name, msgspec.msgpack.encode(request, enc_hook=bytes), wait_s=wait_s)
        return decoder_of(reply).decode(answer)

    # -- files that are built elsewhere

    def stage(self, partition: PartitionId, count: int, lease_s: float) -> list[StagedFile]:
        return self._connection.ask(wire.StageFiles(partition, count, lease_s), list[StagedFile])

    @property
    def uuid(self) -> bytes:
        return self._connection.owner.uuid

    @property
    def shares_files(self) -> bool:
        """Whether the files of the store's folder are those that requests name. Those of a cluster's members differ."""
        return self._connection.owner.durability != Durability.QUORUM.value

    def building(self, lease_s: float) -> AbstractContextManager[BuildContext]:
        owner = self._connection.owner
        root = self._connection.folder or owner.path
        return building(
            lambda: self, root if self.shares_files else "", (owner.identity, owner.uuid), self.time_us(), lease_s
        )

    def files_of(self, table_id: int) -> FileStorage:
        """Return how the files of a table are written: the owner sends its key, if it is encrypted."""
        reply = self._connection.ask(wire.ReadStorage(table_id), wire.StorageReply)
        codecs: list[CodecOfLevel] = reply.codecs
        if reply.key is None:
            return FileStorage(lambda: codecs)
        with self._lock:
            self._table_keys[table_id] = reply.key
        return FileStorage(lambda: codecs, TableKeyRing(self.table_key, table_id))

    def table_key(self, table_id: int) -> bytes:
        """Return the key of an encrypted table, which the owner sends once; `KeyMissing` if it is not encrypted."""
        with self._lock:
            key = self._table_keys.get(table_id)
        if key is None:
            self.files_of(table_id)
            with self._lock:
                key = self._table_keys.get(table_id)
        if key is None:
            raise KeyMissing(f"table {table_id} is not encrypted")
        return key

    def accept(self, group: PendingGroup, partition: PartitionId, files: Sequence[StagedFile]) -> None:
        """Make files the section of a group; the owner checks and syncs them before it accepts the group."""
        group.sections[partition] = Reference(tuple(files))

    def send_file(self, partition: PartitionId, staged: StagedFile, name: str, file: File) -> None:
        """Send a file that was built where the owner cannot read it; `name` is the staged file's or its index's."""
        offset, size = 0, file.size()
        while offset < size or offset == 0:
            data = file.pread(wire.PIECE_BYTES, offset)
            request = wire.SendFile(partition, staged.chunk_id, name, offset, data)
            self._connection.ask(request, None)  # type: ignore[arg-type]
            offset += len(data)
            if not data:
                break

    def is_token_used(self, token: tuple[str, int]) -> bool:
        return self._connection.ask(wire.AskToken(*token), bool)

    # -- snapshots

    @contextmanager
    def moment(self, partitions: Sequence[PartitionId]) -> Iterator[FlightSnapshot]:
        snapshot = self.snapshot()
        try:
            yield snapshot
        finally:
            snapshot.close()

    def snapshot(self, lease_s: float = SNAPSHOT_LEASE_S) -> FlightSnapshot:
        self._flush_writes()
        handle = self._connection.ask(
            wire.TakeSnapshot(lease_s),
            wire.SnapshotHandle,
            undo=lambda handle: self._connection.forget(wire.CloseSnapshot(handle.snapshot)),
        )
        return self._snapshot_of(handle, ours=True)

    def query_snapshot(self, query: str, lease_s: float) -> FlightSnapshot:
        """Return the snapshot of a query, taken for the first of its tasks; `Closed` if it was closed since."""
        handle = self._connection.ask(wire.TakeSnapshot(lease_s, query), wire.SnapshotHandle)
        return self._snapshot_of(handle, ours=False)

    def join_snapshot(self, snapshot_id: str) -> FlightSnapshot:
        """Return a snapshot that another client took."""
        handle = self._connection.ask(wire.JoinSnapshot(snapshot_id), wire.SnapshotHandle)
        return self._snapshot_of(handle, ours=False)

    def _snapshot_of(self, handle: wire.SnapshotHandle, *, ours: bool) -> FlightSnapshot:
        self.learn(handle.tables)
        return FlightSnapshot(self._connection, self._random, handle, ours=ours)


class _InChild:
    """Stand-in for the coordinator in a forked child: every use raises `Closed`."""

    def __init__(self, refuse: Callable[..., NoReturn]) -> None:
        self._refuse = refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()
