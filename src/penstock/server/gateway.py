"""Answers the requests of clients, over the owner's own port. It knows no transport, and no kind by name.

Thread: any number; each request runs in the thread of its transport.
Invariants: (1) after the owner began to yield, every request is refused. (2) it yields only while no snapshot, scan or
lease is held, and no write or call that must not be repeated runs. (3) the rights of a client are checked before
anything is done for it, and every request counts (see `work`) until its answer is sent or its client is gone. (4) only
the client that opened a snapshot or scan may use and close it, except that any client may read a snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, get_args

from msgspec import structs

from penstock.coordinator.protocols import Durability
from penstock.errors import Backpressure, Closed, Invalid, NotFound, PenstockError
from penstock.host import threads
from penstock.host.metrics import Keep, MetricFamily, MetricSamples, counter
from penstock.host.os_files import OsFileSystem
from penstock.host.paths import absolute
from penstock.host.randomness import Random
from penstock.journal.partitions import PartitionId, shard_number, table_of
from penstock.kinds import STATISTICS, Reading, as_serviced, partitions_of
from penstock.lsm.manual_compaction import CompactionReport
from penstock.partition.aside import Trouble
from penstock.partition.ledger_records import TableInfo
from penstock.partition.storage_options import codecs_of
from penstock.partition.tokens import check_token
from penstock.protocol import wire
from penstock.registry import check_create, check_name, kind_named
from penstock.server.archive_requests import ArchiveRequests
from penstock.server.confirming import ReadConfirmation
from penstock.server.leased_objects import LeaseCounts, LeasedObjects
from penstock.server.offer_requests import OfferRequests
from penstock.server.planning import PIECES_MAX, check_cut, cut_ranges, plan_batch
from penstock.server.query_names import QueryNames
from penstock.server.rights import ADMIN, LOCAL, READ, WRITE, Right, Rights
from penstock.server.scans import PagedScan, in_batches, scan_ranges, unnumbered
from penstock.server.status_requests import StatusRequests
from penstock.server.table_requests import TableRequests
from penstock.server.work import READING, WAITING, WRITING, OwnerLeaving, Sending, Work, Workload
from penstock.server.writes import GroupTaker
from penstock.store.applied_reading import AppliedReading
from penstock.store.querying import check_query
from penstock.store.reports import BackupReport, CheckReport, RotationReport
from penstock.store.snapshot_port import SnapshotPort
from penstock.store.store import Store

SNAPSHOTS_MAX, SNAPSHOTS_EACH_MAX, SNAPSHOTS_OWN = 256, 128, 4
SCANS_MAX, SCANS_EACH_MAX, SCANS_OWN = 1_024, 512, 8
SCANS_BEGIN_MAX, SCANS_BEGIN_S = 4, 10.0
SCAN_LEASE_S = 60.0
FORGET_S = 10.0  # from the record of a lease to its removal: clients come and go, and each record is a commit
QUERY = "query-"  # prefix of the names of query snapshots
QUERY_KEEPS_S = 5.0  # Spark never reports the end of a query: after its last use the owner waits this long to yield
DRAIN_S = 2.0
LEASE_S_MAX = 24 * 3600.0
VALUE_BYTES_SMALL = 1 << 10  # below this a value is not counted: KEYS_MAX of them are small
LOOKUP_BYTES_MAX = 16 << 20  # of the values of one answer, unless it has only one
STAGED_MAX = 10_000
STAGED_EACH_MAX = 100_000  # of one client, with leases that have not expired
_CHANGES = (wire.ReceivedWrite, wire.CreateTable, wire.DropTable, wire.AlterTable, wire.ConfigureTable, wire.SendFile)
_LIFECYCLE = (wire.DrainTable, wire.ReactivateTable)
_REPAIRS = (wire.KeepSnapshot, wire.DropSnapshot, wire.RepairTable)
_ARCHIVE = (wire.ArchiveStore, wire.EvictFiles, wire.RehydrateFiles, wire.VerifyArchive, wire.CollectArchive)
_JOBS = (wire.RetryJob, wire.RunJobs, *_ARCHIVE)
_WRITES = (
    *_CHANGES,
    *_LIFECYCLE,
    *_REPAIRS,
    wire.CompactTable,
    *_JOBS,
    wire.BackupStore,
    wire.StageFiles,
    wire.WriteOffered,
)
_BINDS = (
    *_CHANGES,
    *_LIFECYCLE,
    *_REPAIRS,
    *_JOBS,
    wire.TakeSnapshot,
    wire.CompactTable,
    wire.BackupStore,
    wire.CheckStore,
)
_UNCONFIRMED = (*_WRITES, wire.Hello, wire.CloseScan, wire.CloseSnapshot, wire.JoinSnapshot, wire.ReadTime)


class Gateway:
    """The owner's side of every connection."""

    def __init__(self, store: Store, *, random: Random, detached: bool = False) -> None:
        self._store = store
        self._port = port = store.port
        self._random = random
        self._clock = clock = store.clock
        self._owner = wire.Owner(
            store.identity, absolute(store.path), detached, store.durability.value, store.uuid, store.takes_writes
        )
        self._applied = AppliedReading(port)
        self._confirmation = ReadConfirmation(
            store.confirm_lead, lambda lsn, wait_s: port.wait_for(lsn, port.tables(), wait_s), clock
        )
        self._taker = GroupTaker(port, self.fault)
        self._snapshots: LeasedObjects[SnapshotPort] = LeasedObjects(
            SnapshotPort.close,
            noun="snapshot",
            clock=clock,
            count_max=SNAPSHOTS_MAX,
            each_max=SNAPSHOTS_EACH_MAX,
            own=SNAPSHOTS_OWN,
            renew=store.readers.expect,
        )
        self._scans: LeasedObjects[PagedScan] = LeasedObjects(
            PagedScan.close,
            noun="scan",
            clock=clock,
            count_max=SCANS_MAX,
            each_max=SCANS_EACH_MAX,
            own=SCANS_OWN,
            users_max=1,
        )
        self._taking = threads.lock("server.taking")
        self._queries = QueryNames(OsFileSystem(), f"{absolute(store.path)}/run/queries", clock)
        # The memory of a scan is known only after it began, so few may begin at a time.
        self._beginning = {is_query: threading.BoundedSemaphore(SCANS_BEGIN_MAX) for is_query in (False, True)}
        self._staged = LeaseCounts(clock, STAGED_EACH_MAX)
        self._work = Workload(clock)
        self._answers: dict[type, Callable[[Any, Work], Any]] = {
            wire.Hello: self._hello,
            wire.ListTables: self._list_tables,
            wire.FindTable: self._find_table,
            wire.ReadTime: lambda _request, _work: port.time_us(),
            wire.Lookup: self._lookup,
            wire.LookupRow: self._lookup_row,
            wire.CutPieces: self._cut_pieces,
            wire.CutRanges: self._cut_ranges,
            wire.PlanBatch: lambda request, work: plan_batch(port, request, work.rights),
            wire.CallService: self._call,
            wire.CreateTable: self._create,
            wire.DropTable: self._drop,
            wire.CompactTable: self._compact,
            wire.ListTroubles: self._list_troubles,
            wire.CheckStore: self._check,
            wire.BackupStore: self._backup,
            wire.ResumeTable: self._resume,
            wire.KeepSnapshot: self._keep_snapshot,
            wire.DropSnapshot: self._drop_snapshot,
            wire.RepairTable: self._repair,
            wire.WaitFor: self._wait_for,
            wire.ReadStorage: self._read_storage,
            wire.RotateKeys: self._rotate_keys,
            wire.StageFiles: self._stage,
            wire.SendFile: self._send_file,
            wire.AskToken: self._ask_token,
            wire.TakeSnapshot: self._take_snapshot,
            wire.JoinSnapshot: self._join_snapshot,
            wire.CloseSnapshot: lambda request, work: self._snapshots.close(request.snapshot, work.rights.client),
            wire.CloseScan: lambda request, work: self._scans.close(request.scan, work.rights.client),
            wire.ReceivedWrite: self._taker.take,
            **OfferRequests(store.offers, store.files, store.path).answers,
            **StatusRequests(store, self.fault).answers,
            **TableRequests(store).answers,
            **ArchiveRequests(store).answers,
        }
        self._counting = threads.lock("server.requests")
        self._requests = dict.fromkeys((*self._answers, *get_args(wire.Reading)), 0)  # guarded by _counting
        store.metrics.collect_from(self._metrics)
        store.after_background(self._snapshots.close_all)

    def _metrics(self) -> list[MetricFamily]:
        counts: MetricSamples = {(kind.__name__.removeprefix("Received"),): n for kind, n in self._requests.items()}
        text = "Requests of other processes, by name"
        return [counter("requests", text, counts, ("request",), keep=Keep.WITH_OTHERS)]  # reads cause no commit

    def _count(self, kind: type) -> None:
        with self._counting:
            self._requests[kind] += 1

    # -- requests

    def answer(self, data: bytes, rights: Rights) -> bytes:
        """Return the answer to a message."""
        (answer,) = self.answering(data, rights)
        return answer

    def answering(self, data: bytes, rights: Rights, *, linearizable: bool = False) -> Sending[bytes]:
        """Return the answer to a message; its memory counts until it is sent. `linearizable`: of a read, too."""
        with ExitStack() as stack:
            work = stack.enter_context(self._at_work(rights, len(data)))
            request = wire.unpack_request(data)
            self._count(type(request))
            activity, binds = self._activity_of(request, rights)
            work.begin(activity, binds=binds)
            if linearizable and not isinstance(request, _UNCONFIRMED):
                self._confirmation.confirm()
            answer = wire.pack(self._answers[type(request)](request, work))
            work.note(len(answer))
            return Sending(iter([answer]), stack.pop_all())

    def fault(self, error: PenstockError, rights: Rights) -> wire.ErrorMessage:
        """Encode an error for a client; only one that may read every table learns the store's path."""
        return wire.fault_of(error, "" if rights.allows_everywhere(READ) else self._owner.path)

    def _activity_of(self, request: wire.Request, rights: Rights) -> tuple[str, bool]:
        """Return which budget a request counts against, and whether the owner must not yield before its answer."""
        if isinstance(request, (wire.AwaitView, wire.WaitFor, wire.WaitForChange)):
            return WAITING, False
        if not isinstance(request, wire.CallService):
            return WRITING if isinstance(request, _WRITES) else READING, isinstance(request, _BINDS)
        info = self._port.table_by_id(request.table)
        if info is None:
            raise rights.dropped_table(request.table, self._port.dropped_name(request.table))
        rights.check(READ, info.name)  # first: without the right to read, a client must not learn a table's kind
        kind = as_serviced(kind_named(info.kind, info.name), info)
        rights.check(READ if request.name in kind.read_only_calls else WRITE, info.name)
        for other in kind.check_call(info, request.name, request.argument):
            rights.check(WRITE, other)
        activity = READING if request.name in kind.read_only_calls else WRITING
        return WAITING if kind.waits(
            request.name, request.argument
        ) else activity, request.name not in kind.repeatable_calls

    @contextmanager
    def _at_work(self, rights: Rights, size: int) -> Iterator[Work]:
        with self._work.admit(rights, size) as work:
            try:
                yield work
            except Closed:
                if self._store.closed or self._owner.durability == Durability.QUORUM.value:  # another member leads
                    raise OwnerLeaving(untouched=False) from None
                raise

    # -- yielding and closing

    def maintain(self) -> None:
        """Close scans and snapshots whose lease has expired, and record whether any is left. Called periodically."""
        self._scans.sweep()
        self._snapshots.sweep()
        with suppress(OSError, PenstockError):  # it is recorded at the next call
            self._store.readers.keep(self._snapshots.longest_left_s, after_s=FORGET_S)

    def idle_s(self) -> float:
        """Return for how many seconds no client has sent a request or held anything."""
        return 0.0 if self._occupied() or len(self._snapshots) else self._work.idle_s()

    def _occupied(self) -> str:
        """Return why the owner must not yield; empty if it may."""
        if self._scans.needed() or self._snapshots.needed():
            return "a snapshot is being read"
        if self._port.has_leases():
            return "a client holds a lease"
        if self._store.offers.has_taken_offers():
            return "a driver is working on its files"
        return ""

    def begin_yield(self) -> str:
        """Refuse all requests from now on, unless a client needs the owner; return the reason then, else empty."""
        return self._work.shut(self._occupied, DRAIN_S)

    def close(self) -> None:
        """Refuse all requests from now on, and close all scans, and when nothing removes files any more, snapshots."""
        self._work.close()
        with suppress(OSError, PenstockError):  # then the next opening keeps their files for longer
            self._store.readers.keep(self._snapshots.longest_left_s)
        self._scans.close_all()
        self._queries.close()

    # -- identity

    def _hello(self, _: wire.Hello, work: Work) -> wire.Owner:
        knows_path = work.rights.allows_everywhere(READ)  # such a client may read the files directly
        return self._owner if knows_path else structs.replace(self._owner, path="")

    def _ask_token(self, request: wire.AskToken, work: Work) -> bool:
        return self._port.is_token_used(work.rights.own_token(check_token((request.producer, request.number))))

    # -- tables

    def _list_tables(self, _: wire.ListTables, work: Work) -> list[TableInfo]:
        return [info for info in self._port.tables() if work.rights.allows(READ, info.name)]

    def _find_table(self, request: wire.FindTable, work: Work) -> list[TableInfo]:
        check_name(request.name)
        work.rights.check(READ, request.name)
        info = self._port.table(request.name)
        return [] if info is None else [info]

    def _create(self, request: wire.CreateTable, work: Work) -> TableInfo:
        work.rights.check(ADMIN, check_name(request.name))
        check_create(request.name, request.kind, request.shards, request.options, request.storage)
        return self._port.create(
            request.name,
            request.kind,
            request.shards,
            request.options,
            request.storage,
            encrypted=request.encrypted,
        )

    def _drop(self, request: wire.DropTable, work: Work) -> None:
        check_name(request.name)
        work.rights.check(ADMIN, request.name)
        self._port.drop(request.name)

    def _compact(self, request: wire.CompactTable, work: Work) -> CompactionReport:
        work.rights.check(ADMIN, check_name(request.name))
        return self._store.compact(request.name, timeout_s=request.timeout_s)

    def _list_troubles(self, _: wire.ListTroubles, work: Work) -> list[Trouble]:
        return self._visible(self._store.troubles(), work.rights)

    def _check(self, _: wire.CheckStore, work: Work) -> CheckReport:
        work.rights.check_everywhere(READ)
        return self._store.check()

    def _backup(self, request: wire.BackupStore, work: Work) -> BackupReport:
        if work.rights.client != LOCAL.client:  # it would name any folder of a machine that is not its own
            raise Invalid("a backup is written where the store is: connect by its path, on that machine")
        return self._store.backup(request.target, keep=request.keep)

    def _wait_for(self, request: wire.WaitFor, work: Work) -> int:
        if len(request.tables) > wire.KEYS_MAX or not 0 <= request.timeout_s <= wire.WAIT_S_MAX:
            raise Invalid(f"a wait names at most {wire.KEYS_MAX} tables, and lasts 0 to {wire.WAIT_S_MAX:g} s")
        infos = [self._table(self._port, table, 0, READ, work.rights) for table in request.tables]
        return self._port.wait_for(request.lsn, infos, request.timeout_s)

    def _resume(self, request: wire.ResumeTable, work: Work) -> list[Trouble]:
        work.rights.check(ADMIN, check_name(request.name))
        return self._visible(self._store.resume(request.name), work.rights)

    def _keep_snapshot(self, request: wire.KeepSnapshot, work: Work) -> list[int]:
        work.rights.check(ADMIN, check_name(request.name))
        return self._store.keep_snapshot(request.name)

    def _drop_snapshot(self, request: wire.DropSnapshot, work: Work) -> None:
        work.rights.check(ADMIN, check_name(request.name))
        self._store.drop_snapshot(request.name)

    def _repair(self, request: wire.RepairTable, work: Work) -> list[Trouble]:
        work.rights.check(ADMIN, check_name(request.name))
        return self._visible(self._store.repair(request.name), work.rights)

    def _visible(self, troubles: list[Trouble], rights: Rights) -> list[Trouble]:
        """Return the troubles of tables that a client may read, worded as an error would be for it."""
        return [
            Trouble(
                trouble.table, trouble.shard, self.fault(PenstockError(trouble.reason), rights).message, trouble.lsn
            )
            for trouble in troubles
            if rights.allows(READ, trouble.table)
        ]

    def _shard(self, reading: Reading, partition: int, right: Right, rights: Rights) -> PartitionId:
        """Return a partition that exists and that the client has a right to."""
        self._table(reading, table_of(partition), shard_number(partition), right, rights)
        return PartitionId(partition)

    def _table(self, reading: Reading, table: int, shard: int, right: Right, rights: Rights) -> TableInfo:
        info = next((info for info in reading.tables() if info.table_id == table), None)
        if info is None and self._port.table_by_id(table) is not None:
            raise NotFound("this table was made after the snapshot: take another snapshot")
        if info is None:
            raise rights.dropped_table(table, self._port.dropped_name(table))
        if shard >= info.shards:
            raise NotFound(f"table number {table} has no shard {shard}: get it from the store again")
        rights.check(right, info.name)
        return info

    # -- reading

    @contextmanager
    def _reading(self, snapshot: str) -> Iterator[Reading]:
        if not snapshot:
            yield self._applied  # not the port: clients must not see the owner's writes before they are durable
        else:
            with self._snapshots.use(snapshot) as port:
                yield port

    def _lookup(self, request: wire.Lookup, work: Work) -> list[bytes | None]:
        with self._reading(request.snapshot) as reading:
            partition = self._shard(reading, request.partition, READ, work.rights)
            if len(request.keys) == 1:
                return self._values(reading, partition, request.keys, work)
            with reading.moment([partition]) as moment:
                return self._values(moment, partition, request.keys, work)

    def _values(
        self, reading: Reading, partition: PartitionId, keys: Sequence[bytes], work: Work
    ) -> list[bytes | None]:
        """Return the values of the first keys, as many as fit into an answer."""
        values: list[bytes | None] = []
        size = 0
        for key in keys:
            value = reading.lookup(partition, key)
            if value is not None and len(value) > VALUE_BYTES_SMALL:
                size += len(value)
                if values and size > LOOKUP_BYTES_MAX:
                    break
                work.hold(2 * len(value))  # packing makes a second copy
            values.append(value)
        return values

    def _lookup_row(self, request: wire.LookupRow, work: Work) -> tuple[bytes, int] | None:
        with self._reading(request.snapshot) as reading:
            row = reading.lookup_row(self._shard(reading, request.partition, READ, work.rights), request.key)
            if row is not None and len(row[0]) > VALUE_BYTES_SMALL:
                work.hold(2 * len(row[0]))  # as in `_values`
            return row

    def _cut_pieces(self, request: wire.CutPieces, work: Work) -> Any:
        if not 0 < request.count <= PIECES_MAX:
            raise Invalid(f"a shard is cut into 1 to {PIECES_MAX} pieces")
        with self._reading(request.snapshot) as reading:
            partition = self._shard(reading, request.partition, READ, work.rights)
            pieces = reading.pieces(partition, request.count, request.start, request.end)
            lease_s = self._snapshots.lease_s(request.snapshot)
            if lease_s and not self._store.readers.expect(lease_s):  # its files would not outlive this owner
                pieces = [replace(piece, detail=b"") for piece in pieces]
            return wire.send_pieces(pieces)

    def _cut_ranges(self, request: wire.CutRanges, work: Work) -> list[list[bytes]]:
        check_cut(request)
        with self._reading(request.snapshot) as reading, ExitStack() as stack:
            return cut_ranges(*self._ranges(reading, request.ranges, work.rights, stack), request)

    def page(
        self, data: bytes, rights: Rights, *, linearizable: bool = False
    ) -> tuple[Any, Sending[tuple[Any, bytes]]]:
        """Return the schema and the record batches of a page."""
        with ExitStack() as stack:
            work = stack.enter_context(self._at_work(rights, len(data)))
            reading = wire.unpack_reading(data)
            self._count(type(reading))
            work.begin(READING, binds=not isinstance(reading, wire.More))
            if not isinstance(reading, wire.More):
                if linearizable:
                    self._confirmation.confirm()
                self._begin(reading, rights)
            scan = stack.enter_context(self._scans.use(reading.scan, rights.client))
            schema = scan.schema
            return schema, Sending(self._page(reading.scan, scan, rights), stack.pop_all())

    def _page(self, name: str, scan: PagedScan, rights: Rights) -> Iterator[tuple[Any, bytes]]:
        yield from scan.page()
        if scan.ended:
            self._scans.close(name, rights.client)  # it closes once this page is sent

    @contextmanager
    def _turn_to_begin(self, request: wire.Begin) -> Iterator[None]:
        """Wait for one of a few turns. Queries, which may take long, have turns of their own."""
        turns = self._beginning[isinstance(request, wire.RunQuery)]
        if not turns.acquire(timeout=SCANS_BEGIN_S):
            raise Backpressure(f"{SCANS_BEGIN_MAX} scans or queries are starting: retry later")
        try:
            yield
        finally:
            turns.release()

    def _batches(self, request: wire.Begin, rights: Rights, stack: ExitStack) -> Iterator[tuple[int, Any]]:
        """Yield the batches of a scan or query, each with its range's number; `stack` holds what they are read from."""
        reading = stack.enter_context(self._reading(request.snapshot))
        if isinstance(request, wire.RunQuery):
            info = self._table(reading, request.table, 0, READ, rights)
            check_query(info, request.name, request.argument, request.timeout_s)  # before it holds anything
            counts = request.name == STATISTICS and reading is self._applied
            moment = stack.enter_context(self._applied.counted(info) if counts else reading.moment(partitions_of(info)))
            return unnumbered(moment.query(info, request.name, request.argument, timeout_s=request.timeout_s))
        if isinstance(request, wire.ScanRanges):
            return scan_ranges(*self._ranges(reading, request.ranges, rights, stack))
        partition = self._shard(reading, request.partition, READ, rights)
        if request.arrow:
            return unnumbered(reading.scan_arrow(partition, request.start, request.end))
        return unnumbered(in_batches(reading.scan(partition, request.start, request.end, request.reverse)))

    def _ranges(
        self, reading: Reading, ranges: Sequence[wire.KeyRange], rights: Rights, stack: ExitStack
    ) -> tuple[Reading, list[tuple[PartitionId, bytes, bytes | None]]]:
        """Check ranges, all of one table; return the view to read them from, which `stack` holds, and the ranges."""
        if len({table_of(partition) for partition, _, _ in ranges}) > 1:
            raise Invalid("the ranges are of several tables: send one request per table")
        checked = [(self._shard(reading, partition, READ, rights), start, end) for partition, start, end in ranges]
        return stack.enter_context(reading.moment([partition for partition, _, _ in checked])), checked

    def _begin(self, request: wire.Begin, rights: Rights) -> None:
        with self._turn_to_begin(request), ExitStack() as stack:
            batches = self._batches(request, rights, stack)
            self._scans.close(request.scan, rights.client)  # a retry, because the answer was lost
            self._scans.check_room(rights.client)
            scan = PagedScan(batches, stack.pop_all(), self._clock)
        try:
            others = self._scans.total(lambda scan: scan.held_bytes)
            if others and others + scan.held_bytes > self._store.settings.memory_bytes_max // 4:
                raise Backpressure(f"scans hold {others} bytes (a quarter of memory_bytes_max): retry later")
            keeps_s = QUERY_KEEPS_S if request.snapshot.startswith(QUERY) else None
            self._scans.add(request.scan, scan, client=rights.client, lease_s=SCAN_LEASE_S, keeps_s=keeps_s)
        except BaseException:
            scan.close()
            raise

    # -- snapshots

    def _take_snapshot(self, request: wire.TakeSnapshot, work: Work) -> wire.SnapshotHandle:
        rights = work.rights
        rights.check_anywhere(READ)
        if not 0 < request.lease_s <= LEASE_S_MAX:
            raise Invalid(f"a snapshot's lease_s is above 0 and at most {LEASE_S_MAX}")
        if not request.query:
            return self._hold_snapshot(self._random.randbytes(16).hex(), request.lease_s, None, rights)
        name = f"{QUERY}{rights.client}/{request.query}"  # a client cannot use up another's names
        with self._taking:  # of two tasks of a query, the first takes the snapshot and the second joins it
            if name in self._snapshots:
                return self._join_snapshot(wire.JoinSnapshot(name), work)
            self._snapshots.check_room(rights.client)
            if not self._queries.use(request.query, rights.client):
                raise Closed("the snapshot of this query was closed, or its owner ended: run the query again")
            return self._hold_snapshot(name, request.lease_s, QUERY_KEEPS_S, rights)

    def _hold_snapshot(self, name: str, lease_s: float, keeps_s: float | None, rights: Rights) -> wire.SnapshotHandle:
        self._snapshots.check_room(rights.client)
        with self._store.readers.granting(lease_s):
            snapshot = self._port.snapshot()
            try:
                self._snapshots.add(name, snapshot, client=rights.client, lease_s=lease_s, keeps_s=keeps_s)
            except BaseException:
                snapshot.close()
                raise
        return self._handle(name, snapshot, rights)

    def _join_snapshot(self, request: wire.JoinSnapshot, work: Work) -> wire.SnapshotHandle:
        with self._snapshots.use(request.snapshot) as snapshot:
            return self._handle(request.snapshot, snapshot, work.rights)

    def _handle(self, name: str, snapshot: SnapshotPort, rights: Rights) -> wire.SnapshotHandle:
        tables = [info for info in snapshot.tables() if rights.allows(READ, info.name)]
        return wire.SnapshotHandle(name, snapshot.lsn, snapshot.time_us(), tables)

    # -- services and files

    def _call(self, request: wire.CallService, work: Work) -> bytes:
        info = self._port.table_by_id(request.table)
        if info is None:
            raise work.rights.dropped_table(request.table, self._port.dropped_name(request.table))
        return self._port.call(info, request.name, request.argument)  # `_activity_of` checked the rights

    def _read_storage(self, request: wire.ReadStorage, work: Work) -> wire.StorageReply:
        """Return the key of a table, if it is encrypted, to a client that may read the table."""
        info = self._port.table_by_id(request.table)
        if info is None:
            raise work.rights.dropped_table(request.table, self._port.dropped_name(request.table))
        work.rights.check(READ, info.name)
        return wire.StorageReply(codecs_of(info.storage_options), self._port.table_key(info))

    def _rotate_keys(self, _request: wire.RotateKeys, work: Work) -> RotationReport:
        work.rights.check_everywhere(ADMIN)
        return self._store.rotate_keys()

    def _stage(self, request: wire.StageFiles, work: Work) -> list[Any]:
        partition = self._shard(self._port, request.partition, WRITE, work.rights)
        if not 0 < request.count <= STAGED_MAX or not 0 < request.lease_s <= LEASE_S_MAX:
            raise Invalid(f"a load stages 1 to {STAGED_MAX} files, for at most {LEASE_S_MAX} s")
        self._staged.add(work.rights.client, request.count, request.lease_s)
        return self._port.stage(partition, request.count, request.lease_s)

    def _send_file(self, request: wire.SendFile, work: Work) -> None:
        partition = self._shard(self._port, request.partition, WRITE, work.rights)
        self._port.write_staged(partition, request.chunk_id, request.file_name, request.offset, request.data)
