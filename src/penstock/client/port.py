"""The port into a store that another process owns.

Writes gather in a coordinator of this process, as they do in the owner, and go over in batches: a write is a dict
insert, an acknowledgement is one for each batch. A read first sends what was written here, so that it sees it.

Thread: any. Only the coordinator's background thread sends: those who wait can give up at any moment.
Invariants: (1) what a read returns holds everything this client wrote before it. (2) no call waits longer than the
`timeout_s` of `connect`, or than its own. (3) a write that raised `OutcomeUnknown` may still happen, once; any other
error of a write says that it did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from typing import Any, NoReturn, TypeVar

import msgspec

from penstock.client.building import building
from penstock.client.connection import Connection, Page
from penstock.client.flusher import SEND_S, RemoteFlusher, WholeGroup
from penstock.coordinator import Acknowledgement, CoordinatorSettings, Epoch, WriteCoordinator
from penstock.errors import Closed, OutcomeUnknown, PenstockError, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.files import File
from penstock.host.randomness import Random
from penstock.journal.partitions import PartitionId, table_of
from penstock.kinds import QUERY_S, BuildContext, Insert, Kind, Piece, as_serviced
from penstock.lsm.rows import bytes_list
from penstock.partition.aside import Trouble
from penstock.partition.ledger import TableInfo, decode_condition
from penstock.partition.pending import PendingDelta, PendingGroup, add_group, parts
from penstock.partition.reference import Reference, StagedFile
from penstock.protocol import wire
from penstock.registry import kind_named
from penstock.scheduler.offers import Offer
from penstock.store.querying import check_query

T = TypeVar("T")
FILES_S = 600.0  # for a group that adopts files: the owner reads and syncs them first
GROUP_BYTES = 256
AHEAD_BYTES = 8 << 20  # written while a batch is under way; more waits for it, so that both sides work at once
AHEAD_S = 5.0  # for a write that finds no room
SNAPSHOT_LEASE_S = 300.0
SETTINGS = CoordinatorSettings(bytes_max=72 << 20)


class _FlightReading:
    """Reads, live or in a snapshot."""

    snapshot_id = ""  # live

    def __init__(self, connection: Connection, random: Random) -> None:
        self._connection = connection
        self._random = random

    def _flush_writes(self) -> None:
        """Send what was written here."""

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        return self.lookup_many(partition, [key])[0]

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        values: list[bytes | None] = []
        while len(values) < len(keys):
            values += self._first_values(partition, keys[len(values) :])
        return values

    def _first_values(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values of as many of the first keys as one answer has room for, at least one."""
        some = list(keys[: wire.KEYS_MAX])
        return self._connection.ask(wire.Lookup(self.snapshot_id, partition, some), list[bytes | None])

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        pages = self._scan(partition, start, end, arrow=False, reverse=reverse)
        return (
            pair
            for page in pages
            for _, batch in page
            for pair in zip(bytes_list(batch.column("key")), bytes_list(batch.column("value")), strict=True)
        )

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        return (batch for page in self._scan(partition, start, end, arrow=True, reverse=False) for _, batch in page)

    def scan_ranges(self, ranges: Sequence[wire.KeyRange]) -> Iterator[tuple[int, Any]]:
        """Record batches of several ranges of one table at one moment, each with the number of its range."""
        self._flush_writes()
        name = self._random.randbytes(16).hex()
        return chain.from_iterable(self._connection.pages(wire.ScanRanges(name, self.snapshot_id, list(ranges))))

    def query(self, info: TableInfo, name: str, argument: bytes, *, timeout_s: float = QUERY_S) -> Iterator[Any]:
        check_query(info, name, argument, timeout_s)
        self._flush_writes()
        scan = self._random.randbytes(16).hex()
        request = wire.RunQuery(scan, self.snapshot_id, info.table, name, argument, timeout_s)
        # The first page waits for two batches: one to send, and whether there is another.
        return (batch for page in self._connection.pages(request, wait_s=2 * timeout_s) for _, batch in page)

    def _scan(
        self, partition: PartitionId, start: bytes, end: bytes | None, *, arrow: bool, reverse: bool
    ) -> Iterator[Page]:
        self._flush_writes()
        name = self._random.randbytes(16).hex()
        return self._connection.pages(wire.Scan(name, self.snapshot_id, partition, start, end, arrow, reverse))

    def pieces(self, partition: PartitionId, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        request = wire.CutPieces(self.snapshot_id, partition, count, start, end)
        return wire.received_pieces(self._connection.ask_raw(request))

    def cut_ranges(
        self, ranges: Sequence[wire.KeyRange], count: int, bytes_min: int = 0, bytes_max: int = 0
    ) -> list[list[bytes]]:
        """The keys at which each of several ranges is cut for tasks that read it, in one request."""
        self._flush_writes()
        request = wire.CutRanges(self.snapshot_id, list(ranges), count, bytes_min, bytes_max)
        return self._connection.ask(request, list[list[bytes]])


class FlightSnapshot(_FlightReading):
    """A store as of one LSN, held by its owner for whoever knows its id, while it is used and for its lease after."""

    def __init__(self, connection: Connection, random: Random, held: wire.SnapshotHandle, *, ours: bool) -> None:
        super().__init__(connection, random)
        self._held = held
        self._ours = ours
        self._tables = {info.name: info for info in held.tables}
        self.snapshot_id = held.snapshot

    @property
    def lsn(self) -> int:
        return self._held.lsn

    def table(self, name: str) -> TableInfo | None:
        return self._tables.get(name)

    def tables(self) -> list[TableInfo]:
        return self._held.tables

    def time_us(self) -> int:
        return self._held.time_us

    @contextmanager
    def moment(self, partitions: Sequence[PartitionId]) -> Iterator[FlightSnapshot]:
        yield self

    def close(self) -> None:
        """Let it go, if it was taken here: one that was joined is its taker's to close."""
        if self._ours:
            self._ours = False
            self._connection.forget(wire.CloseSnapshot(self.snapshot_id))


class FlightPort(_FlightReading):
    """The store of another process."""

    def __init__(self, connection: Connection, *, clock: Clock, random: Random, send_s: float = SEND_S) -> None:
        super().__init__(connection, random)
        self._clock = clock
        self._lock = threads.lock("client.port")
        self._kinds: dict[int, Kind] = {}  # guarded by _lock; by table
        self._flusher = RemoteFlusher(
            connection, self._kind_of, producer=f"client-{random.randbytes(16).hex()}", clock=clock, send_s=send_s
        )
        self._coordinator: WriteCoordinator[PendingDelta, int, int] = WriteCoordinator(
            self._flusher, PendingDelta, view=0, incarnation=1, clock=clock, settings=SETTINGS
        )
        self._write_into = self._coordinator.write_into
        self._refusals = self._flusher.refusals
        self._durability = self._flusher.durability
        self._write_s = min(AHEAD_S, connection.patience_s)
        self._coordinator.start()

    def _kind_of(self, partition: PartitionId) -> Kind | None:
        with self._lock:
            return self._kinds.get(table_of(partition))

    def learn(self, tables: Sequence[TableInfo]) -> None:
        """Note the kinds of tables that were found, here or elsewhere: what is written to them is encoded by these."""
        kinds = {info.table: kind_named(info.kind, info.name) for info in tables}
        with self._lock:
            self._kinds.update(kinds)

    # -- writing

    def write(self, partition: PartitionId, insert: Insert, size: int, a: Any, b: Any) -> Epoch:
        if self._refusals.news:
            self._refusals.raise_news()
        epoch = self._write_into(insert, size, partition, a, b, self._write_s)
        flusher = self._flusher
        flusher.unsent_bytes += size  # about: nobody locks it
        if flusher.unsent_bytes > AHEAD_BYTES:
            flusher.idle.wait(self._write_s)
        return epoch

    def submit(self, group: PendingGroup, size: int) -> Epoch:
        return self._submit(WholeGroup(group, awaited=False), size)

    def _submit(self, group: WholeGroup, size: int) -> Epoch:
        return self._write_into(add_group, size + GROUP_BYTES, group, None, None, self._write_s)

    def commit_and_wait(self, group: PendingGroup, size: int, timeout_s: float | None = None) -> Epoch:
        whole = WholeGroup(group, awaited=True)
        if timeout_s is None:
            adopts = any(isinstance(part, Reference) for held in group.sections.values() for part in parts(held))
            patience_s = self._connection.patience_s
            timeout_s = max(patience_s, FILES_S) if adopts else patience_s
        try:
            epoch = self._submit(whole, size)
            self._wait(epoch, timeout_s)
        except (OutcomeUnknown, WaitExpired) as error:
            raise self._in_doubt(error, decode_condition(group.condition).token) from error
        finally:
            whole.awaited = False  # what comes now is told to others
        if whole.error is not None:
            raise whole.error
        group.verdict, group.refused_by = whole.verdict, whole.refused_by
        return epoch

    def _in_doubt(self, error: PenstockError, token: tuple[str, int] | None) -> OutcomeUnknown:
        """What a writer is told who waits no more."""
        first, last = self._coordinator.applied + 1, self._coordinator.last
        advice = "look before you write it again" if token is None else f"do it again under the token {token}"
        return OutcomeUnknown(
            f"the owner did not say what became of the write ({error}): {advice}", first=first, last=last, token=token
        )

    def flush(self, epoch: int | None, timeout_s: float | None = None, *, table: int | None = None) -> Acknowledgement:
        patience_s = self._connection.patience_s
        try:
            self.wait_sent(epoch, patience_s if timeout_s is None else min(timeout_s, patience_s), table)
        except WaitExpired as error:
            raise self._in_doubt(error, None) from error
        return self.acknowledgement()

    def acknowledgement(self) -> Acknowledgement:
        """How far this client's writes have come."""
        return Acknowledgement(self._coordinator.applied, self._durability)

    def wait_sent(self, epoch: int | None, timeout_s: float, table: int | None = None) -> None:
        """Wait until writes up to an epoch (None: all so far) are durable; raises if some of them were refused."""
        self._wait(self._coordinator.last if epoch is None else epoch, timeout_s)
        if epoch is None:
            self._refusals.raise_news()
        else:
            self._refusals.raise_for(epoch, table)

    def _wait(self, epoch: int, timeout_s: float) -> None:
        """Wait until the owner answered for a write; `WaitExpired` if it does not in time. The sending goes on."""
        coordinator = self._coordinator
        with suppress(WaitExpired):
            coordinator.flush(epoch, 0.0)  # asks the background thread
        deadline_s, views = self._clock.monotonic_s() + timeout_s, coordinator.subscribe()
        while views.latest() < epoch and coordinator.applied < epoch:
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0:
                raise WaitExpired(f"the owner of the store did not answer within {timeout_s} s: try again")
            with suppress(WaitExpired):  # said above, in words that fit
                views.wait_newer(left_s)

    def _flush_writes(self) -> None:
        if self._coordinator.applied < self._coordinator.last:
            self._wait(self._coordinator.last, self._connection.patience_s)

    def disable_after_fork(self) -> None:
        """In a forked child: refuse everything."""
        self._connection.disable_after_fork()
        self._write_into = self._refuse_in_child
        self._coordinator = _InChild(self._refuse_in_child)  # type: ignore[assignment]

    def _refuse_in_child(self, *_: Any, **__: Any) -> NoReturn:
        raise Closed("this connection was made before a fork: connect in this process")

    def recover(self) -> None:
        """After a failure: send again what was kept, under the same tokens."""
        self._coordinator.recover()

    def send_all(self) -> None:
        """Refuse new writes and send the others, for as long as the owner takes some; raises if not all happened."""
        self._coordinator.refuse_writes()
        while True:
            answers = self._flusher.answers
            try:
                self._flush_writes()
                break
            except WaitExpired as error:
                if self._flusher.answers == answers:
                    raise self._in_doubt(error, None) from error
        self._refusals.raise_news()

    def close(self) -> None:
        """Send nothing any more; `OutcomeUnknown` if something was not sent."""
        self._flusher.end()
        self._coordinator.shutdown(0.0)

    # -- reading

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        self._flush_writes()
        values = self._first_values(partition, keys) if keys else []
        if len(values) == len(keys):
            return values
        with self.moment([partition]) as snapshot:  # the rest would be of another moment
            return snapshot.lookup_many(partition, keys)

    # -- tables

    def table(self, name: str) -> TableInfo | None:
        found = self._connection.ask(wire.FindTable(name), list[TableInfo])
        self.learn(found)
        return found[0] if found else None

    def tables(self) -> list[TableInfo]:
        found = self._connection.ask(wire.ListTables(), list[TableInfo])
        self.learn(found)
        return found

    def create(self, name: str, kind: str, shards: int, options: bytes) -> TableInfo:
        info = self._connection.ask(wire.CreateTable(name, kind, shards, options), TableInfo)
        self.learn([info])
        return info

    def drop(self, name: str) -> None:
        self._flush_writes()
        self._connection.ask(wire.DropTable(name), None, repeat=False)  # type: ignore[arg-type]

    def check(self) -> list[Trouble]:
        """What cannot be read although it was acknowledged."""
        return self._connection.ask(wire.CheckStore(), list[Trouble])

    def resume(self, name: str) -> list[Trouble]:
        """Let a paused table try again; what is wrong with it all the same."""
        return self._connection.ask(wire.ResumeTable(name), list[Trouble])

    def time_us(self) -> int:
        return self._connection.ask(wire.ReadTime(), int)

    def plan_batch(
        self,
        tables: Sequence[str],
        *,
        source: str = "",
        consumer: str = "",
        start: Mapping[int, int] | None = None,
        rows_max: int = 0,
        bytes_max: int = 0,
    ) -> wire.BatchPlan:
        """All that a batch needs to know, in one request: see `wire.PlanBatch`."""
        self._flush_writes()
        begin = [] if start is None else sorted(start.items())
        request = wire.PlanBatch(list(tables), source, consumer, begin, rows_max, bytes_max)
        plan = self._connection.ask(request, wire.BatchPlan)
        self.learn(plan.tables if plan.source is None else [*plan.tables, plan.source.table])
        return plan

    # -- what kinds do for their tables

    def call(self, info: TableInfo, name: str, argument: bytes, *, wait_s: float = 0.0) -> bytes:
        self._flush_writes()
        repeat = name in as_serviced(kind_named(info.kind, info.name), info).repeatable
        request = wire.CallService(info.table, name, argument)
        return self._connection.ask(request, bytes, repeat=repeat, wait_s=wait_s)

    def ask(self, info: TableInfo, name: str, request: Any, reply: type[T], *, wait_s: float = 0.0) -> T:
        answer = self.call(info, name, msgspec.msgpack.encode(request), wait_s=wait_s)
        return msgspec.msgpack.decode(answer, type=reply)

    # -- files that are built elsewhere

    def stage(self, partition: PartitionId, count: int, lease_s: float) -> list[StagedFile]:
        return self._connection.ask(wire.StageFiles(partition, count, lease_s), list[StagedFile])

    def building(self, lease_s: float) -> AbstractContextManager[BuildContext]:
        owner = self._connection.owner
        root = self._connection.folder or owner.path
        return building(lambda: self, root, owner.identity, self.time_us(), lease_s)

    def accept(self, partition: PartitionId, files: Sequence[StagedFile]) -> Reference:
        """What a group says of files; the owner checks and syncs them before it takes the group."""
        return Reference(tuple(files))

    def send_file(self, partition: PartitionId, staged: StagedFile, name: str, file: File) -> None:
        """Bring a file that was built in a place its owner does not see: `name` is the staged one's or its index's."""
        offset, size = 0, file.size()
        while offset < size or offset == 0:
            data = file.pread(wire.PIECE_BYTES, offset)
            request = wire.SendFile(partition, staged.chunk_id, name, offset, data)
            self._connection.ask(request, None)  # type: ignore[arg-type]
            offset += len(data)
            if not data:
                break

    # -- work for drivers

    def take_offer(self, slots: int) -> Offer | None:
        """Work that waits for a driver which runs so many parts at once, if there is any."""
        found = self._connection.ask(wire.TakeOffer(slots), list[Offer])
        return found[0] if found else None

    def keep_offer(self, offer: str) -> bool:
        """Say that an offer is being worked on; False: nobody wants it any more."""
        return self._connection.ask(wire.KeepOffer(offer), bool)

    def finish_offer(self, offer: str, results: list[bytes]) -> bool:
        """Hand in the packed result of each part; False: nobody wants them any more."""
        return self._connection.ask(wire.FinishOffer(offer, results), bool)

    def fail_offer(self, offer: str, reason: str) -> None:
        """Say that it was not done."""
        self._connection.ask(wire.FailOffer(offer, reason), None)  # type: ignore[arg-type]

    def read_offered(self, offer: str, name: str, offset: int) -> bytes:
        """Some bytes of a file that an offer reads; none past its end."""
        return self._connection.ask(wire.ReadOffered(offer, name, offset), bytes)

    def write_offered(self, offer: str, name: str, offset: int, data: bytes) -> None:
        """Some bytes of a file that an offer writes; at 0 it begins anew."""
        self._connection.ask(wire.WriteOffered(offer, name, offset, data), None)  # type: ignore[arg-type]

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
        held = self._connection.ask(wire.TakeSnapshot(lease_s), wire.SnapshotHandle)
        return self._held(held, ours=True)

    def query_snapshot(self, query: str, lease_s: float) -> FlightSnapshot:
        """The snapshot of a query, made for the first of its tasks; `Closed` if it is gone."""
        held = self._connection.ask(wire.TakeSnapshot(lease_s, query), wire.SnapshotHandle)
        return self._held(held, ours=False)

    def join_snapshot(self, snapshot_id: str) -> FlightSnapshot:
        """A snapshot that another client took."""
        held = self._connection.ask(wire.JoinSnapshot(snapshot_id), wire.SnapshotHandle)
        return self._held(held, ours=False)

    def _held(self, held: wire.SnapshotHandle, *, ours: bool) -> FlightSnapshot:
        self.learn(held.tables)
        return FlightSnapshot(self._connection, self._random, held, ours=ours)


class _InChild:
    """Stands for the coordinator in a forked child."""

    def __init__(self, refuse: Callable[..., NoReturn]) -> None:
        self._refuse = refuse

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()
