"""Answers what clients ask, over the owner's own port. It knows no transport, and no kind by name.

Thread: any number; each request in the thread of its caller.
Invariants: (1) after it began to yield, nothing is answered but that. (2) it yields only while no snapshot, scan or
lease is held, and no write or call that may not be repeated is at work. (3) requests at work are limited, in all and
for each client, and so are their bytes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

from penstock.client import wire
from penstock.errors import Backpressure, Closed, Invalid, NotFound
from penstock.host import threads
from penstock.host.chance import Random
from penstock.host.files import OsFileSystem, absolute
from penstock.journal.record import PartitionId
from penstock.kinds import Reading
from penstock.local import AppliedReading, SnapshotPort
from penstock.partition.aside import Trouble
from penstock.partition.ledger import TableInfo, check_token
from penstock.registry import check_create, check_name, kind_named
from penstock.server.held import Held
from penstock.server.offered import OfferDesk
from penstock.server.queries import QueryNames
from penstock.server.rights import ADMIN, READ, WRITE, Rights
from penstock.server.scans import PagedScan, in_batches
from penstock.server.writes import GroupTaker
from penstock.store import Store

REQUESTS_MAX = 320
REQUESTS_EACH_MAX = 256
REQUEST_BYTES_MAX = 4 * wire.MESSAGE_BYTES_MAX  # of all requests at work
SNAPSHOTS_MAX, SNAPSHOTS_EACH_MAX = 256, 128
SCANS_MAX, SCANS_EACH_MAX = 1_024, 512
SCANS_BEGIN_MAX = 4
SCAN_LEASE_S = 60.0
QUERY = "query-"  # how the names of snapshots of queries begin
QUERY_KEEPS_S = 5.0  # of a query nobody knows when it ended: so long after the last use an owner may yield
DRAIN_S = 2.0
LEASE_S_MAX = 24 * 3600.0
LOOKUP_BYTES_MAX = 16 << 20
PIECES_MAX = 10_000
STAGED_MAX = 10_000


class Gone(Exception):
    """The owner lets go of the store: find the next one. `untouched`: nothing was done."""

    def __init__(self, *, untouched: bool) -> None:
        super().__init__("the owner is letting go of the store")
        self.untouched = untouched


class Gateway:
    """The owner's side of every connection."""

    def __init__(self, store: Store, *, random: Random, detached: bool = False) -> None:
        self._store = store
        self._port = port = store.port
        self._random = random
        self._clock = clock = store.clock
        self._owner = wire.Owner(store.identity, absolute(store.path), detached, store.durability.value)
        self._applied = AppliedReading(port)
        self._taker = GroupTaker(port)
        self._snapshots: Held[SnapshotPort] = Held(
            SnapshotPort.close, what="snapshot", clock=clock, count_max=SNAPSHOTS_MAX, each_max=SNAPSHOTS_EACH_MAX
        )
        self._scans: Held[PagedScan] = Held(
            PagedScan.close, what="scan", clock=clock, count_max=SCANS_MAX, each_max=SCANS_EACH_MAX, users_max=1
        )
        self._taking = threads.lock("server.taking")
        self._queries = QueryNames(OsFileSystem(), f"{absolute(store.path)}/run/queries", clock)
        self._beginning = threading.BoundedSemaphore(SCANS_BEGIN_MAX)  # the memory of a scan is known once it began
        self._lock = threads.condition("server.gateway")
        self._working: Counter[str] = Counter()  # guarded by _lock: requests, by client
        self._working_bytes = 0  # guarded by _lock
        self._binding = 0  # guarded by _lock: of them, those that must end before the owner may yield
        self._yielding = False  # guarded by _lock
        self._used_s = clock.monotonic_s()  # guarded by _lock: when the last request ended
        self._answers: dict[type, Callable[[Any, Rights], Any]] = {
            wire.Hello: lambda _request, _rights: self._owner,
            wire.ListTables: self._list_tables,
            wire.FindTable: self._find_table,
            wire.ReadTime: lambda _request, _rights: port.time_us(),
            wire.Lookup: self._lookup,
            wire.CutPieces: self._cut_pieces,
            wire.CallService: self._call,
            wire.CreateTable: self._create,
            wire.DropTable: self._drop,
            wire.CheckStore: self._check,
            wire.ResumeTable: self._resume,
            wire.StageFiles: self._stage,
            wire.SendFile: self._send_file,
            wire.AskToken: lambda request, _rights: port.was_used(check_token((request.producer, request.number))),
            wire.TakeSnapshot: self._take_snapshot,
            wire.JoinSnapshot: self._join_snapshot,
            wire.CloseSnapshot: lambda request, _rights: self._snapshots.close(request.snapshot),
            wire.CloseScan: lambda request, _rights: self._scans.close(request.scan),
            wire.Write: self._taker.take,
            **OfferDesk(store.offers, store.files, store.path).answers,
        }

    # -- requests

    def answer(self, data: bytes, rights: Rights) -> bytes:
        """The answer to a message."""
        request = wire.unpack_request(data)
        with self._at_work(rights, len(data), binds=self._binds(request)):
            return wire.pack(self._answers[type(request)](request, rights))

    def _binds(self, request: wire.Request) -> bool:
        """Whether the owner must not go before this is answered."""
        if isinstance(request, wire.CallService):
            info = self._port.table_by_id(request.table)
            return info is not None and request.name not in kind_named(info.kind, info.name).repeatable
        return isinstance(request, wire.Write | wire.CreateTable | wire.DropTable | wire.SendFile | wire.TakeSnapshot)

    @contextmanager
    def _at_work(self, rights: Rights, size: int, *, binds: bool) -> Iterator[None]:
        with self._lock:
            if self._yielding:
                raise Gone(untouched=True)
            if self._working.total() >= REQUESTS_MAX or self._working[rights.client] >= REQUESTS_EACH_MAX:
                raise Backpressure("too many requests are at work: retry later")
            if self._working_bytes + size > REQUEST_BYTES_MAX:
                raise Backpressure(f"requests of {self._working_bytes} bytes are at work: retry later")
            self._working[rights.client] += 1
            self._working_bytes += size
            self._binding += binds
        try:
            yield
        except Closed:
            if self._store.closed:
                raise Gone(untouched=False) from None
            raise
        finally:
            with self._lock:
                self._working[rights.client] -= 1
                self._working_bytes -= size
                self._binding -= binds
                self._used_s = self._clock.monotonic_s()
                self._lock.notify_all()

    # -- coming to an end

    def tend(self) -> None:
        """Close what was not used for its lease. Called every now and then."""
        self._scans.sweep()
        self._snapshots.sweep()

    def idle_s(self) -> float:
        """For how long nobody has asked anything, or held anything."""
        if self._binding or self._occupied() or len(self._snapshots):
            return 0.0
        with self._lock:
            return self._clock.monotonic_s() - self._used_s

    def _occupied(self) -> str:
        """What clients hold in the owner; nothing if it may go."""
        if self._scans.needed() or self._snapshots.needed():
            return "a snapshot is being read"
        if self._port.engaged():
            return "somebody holds a lease"
        if self._store.offers.engaged():
            return "a driver works on its files"
        return ""

    def begin_yield(self) -> str:
        """Answer nothing from now on, if nobody needs the owner; otherwise, why not.

        Writes at work are waited for, with the door shut: where many write there is always one at work.
        """
        with self._lock:
            if self._yielding:
                return ""
            reason = self._occupied()
            if not reason:
                self._yielding = True
                ended = self._lock.wait_for(lambda: not self._binding, DRAIN_S)
                reason = self._occupied() if ended else "a write takes long"
                self._yielding = not reason
            return reason

    def close(self) -> None:
        """Answer nothing from now on, and let go of everything."""
        with self._lock:
            self._yielding = True
        self._scans.close_all()
        self._snapshots.close_all()
        self._queries.close()

    # -- tables

    def _list_tables(self, _: wire.ListTables, rights: Rights) -> list[TableInfo]:
        return [info for info in self._port.tables() if rights.allows(READ, info.name)]

    def _find_table(self, request: wire.FindTable, rights: Rights) -> list[TableInfo]:
        check_name(request.name)
        rights.check(READ, request.name)
        info = self._port.table(request.name)
        return [] if info is None else [info]

    def _create(self, request: wire.CreateTable, rights: Rights) -> TableInfo:
        check_create(request.name, request.kind, request.shards, request.options)
        rights.check(ADMIN, request.name)
        return self._port.create(request.name, request.kind, request.shards, request.options)

    def _drop(self, request: wire.DropTable, rights: Rights) -> None:
        check_name(request.name)
        rights.check(ADMIN, request.name)
        self._port.drop(request.name)

    def _check(self, _: wire.CheckStore, rights: Rights) -> list[Trouble]:
        return [trouble for trouble in self._store.check() if rights.allows(READ, trouble.table)]

    def _resume(self, request: wire.ResumeTable, rights: Rights) -> list[Trouble]:
        check_name(request.name)
        rights.check(ADMIN, request.name)
        return self._store.resume(request.name)

    def _shard(self, reading: Reading, partition: int, right: Any, rights: Rights) -> PartitionId:
        """A partition that is there, and that the client may use so."""
        info = next((info for info in reading.tables() if info.table == partition >> 16), None)
        if info is None or partition & 0xFFFF >= info.shards:
            raise NotFound(f"there is no shard {partition & 0xFFFF} of table {partition >> 16}")
        rights.check(right, info.name)
        return PartitionId(partition)

    # -- reading

    @contextmanager
    def _reading(self, snapshot: str) -> Iterator[Reading]:
        if not snapshot:
            yield self._applied  # not the port: what this process wrote and is not durable is nobody else's business
        else:
            with self._snapshots.use(snapshot) as held:
                yield held

    def _lookup(self, request: wire.Lookup, rights: Rights) -> list[bytes | None]:
        if not 0 < len(request.keys) <= wire.KEYS_MAX:
            raise Invalid(f"a lookup has 1 to {wire.KEYS_MAX} keys")
        with self._reading(request.snapshot) as reading:
            partition = self._shard(reading, request.partition, READ, rights)
            found: list[bytes | None] = []
            size, keys = 0, iter(request.keys)
            while size < LOOKUP_BYTES_MAX and (some := list(islice(keys, 64))):
                values = reading.lookup_many(partition, some)
                size += sum(len(value) for value in values if value is not None)
                found += values
            return found

    def _cut_pieces(self, request: wire.CutPieces, rights: Rights) -> Any:
        if not 0 < request.count <= PIECES_MAX:
            raise Invalid(f"a shard is cut into 1 to {PIECES_MAX} pieces")
        with self._reading(request.snapshot) as reading:
            partition = self._shard(reading, request.partition, READ, rights)
            return wire.send_pieces(reading.pieces(partition, request.count, request.start, request.end))

    def page(self, data: bytes, rights: Rights) -> tuple[Any, Iterator[tuple[Any, bytes]]]:
        """The schema and the record batches of a page."""
        reading = wire.unpack_reading(data)
        with ExitStack() as stack:
            stack.enter_context(self._at_work(rights, len(data), binds=isinstance(reading, wire.Scan)))
            if isinstance(reading, wire.Scan):
                self._begin(reading, rights)
            scan = stack.enter_context(self._scans.use(reading.scan))
            schema = scan.schema
            return schema, self._page(reading.scan, scan, stack.pop_all())

    def _page(self, name: str, scan: PagedScan, at_work: ExitStack) -> Iterator[tuple[Any, bytes]]:
        with at_work:
            yield from scan.page()
        if scan.ended:
            self._scans.close(name)

    def _begin(self, asked: wire.Scan, rights: Rights) -> None:
        self._scans.close(asked.scan)  # asked for again, because the answer was lost
        self._scans.check_room(rights.client)
        with self._beginning, ExitStack() as stack:
            reading = stack.enter_context(self._reading(asked.snapshot))
            partition = self._shard(reading, asked.partition, READ, rights)
            if asked.arrow:
                batches = reading.scan_arrow(partition, asked.start, asked.end)
            else:
                batches = in_batches(reading.scan(partition, asked.start, asked.end, asked.reverse))
            scan = PagedScan(batches, stack.pop_all())
        try:
            others = self._scans.total(lambda scan: scan.held_bytes)
            if others and others + scan.held_bytes > self._store.settings.memory_bytes_max // 4:
                raise Backpressure(f"scans hold {others} bytes (a quarter of memory_bytes_max): retry later")
            keeps_s = QUERY_KEEPS_S if asked.snapshot.startswith(QUERY) else None
            self._scans.add(asked.scan, scan, client=rights.client, lease_s=SCAN_LEASE_S, keeps_s=keeps_s)
        except BaseException:
            scan.close()
            raise

    # -- snapshots

    def _take_snapshot(self, request: wire.TakeSnapshot, rights: Rights) -> wire.Held:
        if not 0 < request.lease_s <= LEASE_S_MAX:
            raise Invalid(f"a snapshot's lease_s is above 0 and at most {LEASE_S_MAX}")
        if not request.query:
            return self._hold_snapshot(self._random.randbytes(16).hex(), request.lease_s, None, rights)
        name = f"{QUERY}{request.query}"
        with self._taking:  # of two tasks of a query one takes it, and the other finds it
            if name in self._snapshots:
                return self._join_snapshot(wire.JoinSnapshot(name), rights)
            self._snapshots.check_room(rights.client)
            if not self._queries.use(request.query):
                raise Closed("the snapshot of this query is gone, or its owner: run the query again")
            return self._hold_snapshot(name, request.lease_s, QUERY_KEEPS_S, rights)

    def _hold_snapshot(self, name: str, lease_s: float, keeps_s: float | None, rights: Rights) -> wire.Held:
        self._snapshots.check_room(rights.client)
        snapshot = self._port.snapshot()
        try:
            self._snapshots.add(name, snapshot, client=rights.client, lease_s=lease_s, keeps_s=keeps_s)
        except BaseException:
            snapshot.close()
            raise
        return self._described(name, snapshot, rights)

    def _join_snapshot(self, request: wire.JoinSnapshot, rights: Rights) -> wire.Held:
        with self._snapshots.use(request.snapshot) as snapshot:
            return self._described(request.snapshot, snapshot, rights)

    def _described(self, name: str, snapshot: SnapshotPort, rights: Rights) -> wire.Held:
        tables = [info for info in snapshot.tables() if rights.allows(READ, info.name)]
        return wire.Held(name, snapshot.lsn, snapshot.time_us(), tables)

    # -- services and files

    def _call(self, request: wire.CallService, rights: Rights) -> bytes:
        info = self._port.table_by_id(request.table)
        if info is None:
            raise NotFound(f"table {request.table} was dropped")
        kind = kind_named(info.kind, info.name)
        rights.check(READ if request.name in kind.asking else WRITE, info.name)
        for other in kind.check_call(info, request.name, request.argument):
            rights.check(WRITE, other)
        return self._port.call(info, request.name, request.argument)

    def _stage(self, request: wire.StageFiles, rights: Rights) -> list[Any]:
        partition = self._shard(self._port, request.partition, WRITE, rights)
        if not 0 < request.count <= STAGED_MAX or not 0 < request.lease_s <= LEASE_S_MAX:
            raise Invalid(f"a load stages 1 to {STAGED_MAX} files, for at most {LEASE_S_MAX} s")
        return self._port.stage(partition, request.count, request.lease_s)

    def _send_file(self, request: wire.SendFile, rights: Rights) -> None:
        partition = self._shard(self._port, request.partition, WRITE, rights)
        self._port.write_staged(partition, request.chunk_id, request.file_name, request.offset, request.data)
