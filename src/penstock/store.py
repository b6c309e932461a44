"""Opens a folder, wires every part, recovers, and gives out tables.

Opening: lock, identity, manifest, ledger, journal; then the journal is replayed forward: the ledger first, then every
partition that has not stored what a record holds for it. Replaying twice changes nothing.

Thread: any for everything; opening and closing by one.
Invariants: (1) one owner for a folder. (2) nothing is served before recovery has ended. (3) a store that was opened
before a fork does not work in the child.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from penstock.coordinator import Acknowledgement, CoordinatorSettings, Epoch, WriteCoordinator
from penstock.errors import Closed, CorruptionError, DiskFull, Invalid, KindMismatch, NotFound, TokenTooOld
from penstock.flusher import StoreFlusher
from penstock.host import memory, threads
from penstock.host.chance import Random, system_random
from penstock.host.clock import Clock, SystemClock
from penstock.host.files import FileSystem, OsFileSystem, make_dirs, publish, zero_fill
from penstock.host.metrics import Metrics
from penstock.journal.consensus import Alone
from penstock.journal.record import PartitionId, decode, partition_id
from penstock.journal.tracker import SegmentedAckTracker
from penstock.kinds import Kind
from penstock.kv.machine import KvKind, KvMachine, folder_of
from penstock.kv.table import KvReader, KvTable
from penstock.kv.values import VALUE_TYPES, Options, ValueType, encode_options
from penstock.local import LocalPort, SnapshotPort
from penstock.log import Log, LogSettings
from penstock.lsm.collection import CollectionSettings, Collector
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.tasks import COMPACTION_JOBS, FLUSH_JOBS, TreeTask, job_runners, merge_on, tree_tasks
from penstock.lsm.tasks import export as export_trees
from penstock.lsm.tree import Tree, TreeSettings
from penstock.manifest.engine import EngineOpener
from penstock.manifest.environment import LmdbEngine
from penstock.manifest.jobs import JobQueue
from penstock.manifest.manifest import Manifest
from penstock.partition.checkpoint import Checkpoint, CheckpointReport, CheckpointSettings
from penstock.partition.dispatcher import Dispatcher, DispatcherSettings
from penstock.partition.ledger import (
    LEDGER,
    LEDGER_TABLE,
    Condition,
    Forget,
    Ledger,
    TableInfo,
    Verdict,
    check_token,
    encode_condition,
    encode_ops,
)
from penstock.partition.machine import PartitionDescriptor, PartitionStateMachine
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.partition.reference import Reference, StagedFile, Staging
from penstock.partition.spill import SpillLog, remove_folder
from penstock.scheduler.engines import Engines
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.task import Load, Outcome

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
SHARDS_MAX = 1_024
FINISHED_JOBS_KEPT = 1_000
APPLY_WAIT_S = 60.0  # for memory, before a batch is applied all the same
RESERVE_BYTES = 8 << 20  # kept back, so that deletes can be written to a full disk


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Everything about a store that can be chosen."""

    memory_bytes_max: int = 512 << 20  # rows that are not in files; writers wait rather than pass it
    durable: bool = False  # whether every write waits by default
    journal: LogSettings = field(default_factory=LogSettings)
    dispatcher: DispatcherSettings = field(default_factory=DispatcherSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    collection: CollectionSettings = field(default_factory=CollectionSettings)
    flush_interval_s: float = 0.1
    background: bool = True  # False: no threads; maintenance runs when it is called
    reserve_bytes: int = RESERVE_BYTES

    def __post_init__(self) -> None:
        if self.memory_bytes_max < 160 << 20:
            raise Invalid("memory_bytes_max must be at least 160 MiB: the largest value has 64")

    @property
    def coordinator(self) -> CoordinatorSettings:
        return CoordinatorSettings(
            flush_interval_s=self.flush_interval_s,
            flush_bytes=8 << 20,
            bytes_max=max(80 << 20, self.memory_bytes_max // 8),
        )

    @property
    def rows_bytes_max(self) -> int:
        """For rows in memtables; the rest is for writes on their way and for what a flush needs while it works."""
        return self.memory_bytes_max // 2

    @property
    def tree(self) -> TreeSettings:
        return TreeSettings(memtable_bytes=min(64 << 20, self.memory_bytes_max // 8))


def open_store(
    path: str,
    *,
    settings: StoreSettings | None = None,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    random: Random | None = None,
    engine: EngineOpener = LmdbEngine,
) -> Store:
    """Be the owner of the store in `path`; it is made if there is none."""
    return Store(
        str(path),
        settings=settings or StoreSettings(),
        fs=fs or OsFileSystem(),
        clock=clock or SystemClock(),
        random=random or system_random(),
        engine=engine,
    )


class Store:
    """An open store."""

    def __init__(
        self, path: str, *, settings: StoreSettings, fs: FileSystem, clock: Clock, random: Random, engine: EngineOpener
    ) -> None:
        self.path = path.rstrip("/") or "/"
        self.settings = settings
        self._fs, self._clock, self._random = fs, clock, random
        self._process = threads.process_id()
        self._closed = False
        self._started = False  # background work is done by threads
        self._dropped: deque[PartitionDescriptor] = deque()  # shards whose files are to be removed
        self.metrics = Metrics()
        memory.expect_large_blocks()
        make_dirs(fs, self.path)
        self._parts = ExitStack()  # closes what is open, the newest first
        self._parts.callback(fs.lock(f"{self.path}/LOCK").release)
        try:
            self.identity = self._load_identity()
            self._open_parts(engine)
            self._recover()
            self._start()
        except BaseException:
            self._closed = True
            self._parts.close()
            raise
        threads.after_fork(self, Store._cut_off)

    # -- opening

    def _load_identity(self) -> bytes:
        """The store's UUID: drawn when it is made, in every file it writes."""
        path = f"{self.path}/STORE"
        if self._fs.exists(path):
            file = self._fs.open(path)
            identity = file.pread(64, 0)
            file.close()
            if len(identity) != 16:
                raise CorruptionError(path, 0, f"the store's identity has {len(identity)} bytes instead of 16")
            return identity
        if self._fs.exists(f"{self.path}/STORE.tmp"):
            self._fs.unlink(f"{self.path}/STORE.tmp")
        identity = self._random.randbytes(16)
        file = self._fs.create(f"{self.path}/STORE.tmp")
        file.pwrite(identity, 0)
        publish(self._fs, file, path)
        file.close()
        return identity

    def _open_parts(self, engine: EngineOpener) -> None:
        settings = self.settings
        self._manifest = Manifest.open(f"{self.path}/manifest", fs=self._fs, clock=self._clock, engine=engine)
        self._parts.callback(self._manifest.close)
        self._jobs = JobQueue(self._manifest, random=self._random)
        self._engines = Engines()
        self._scheduler = Scheduler(clock=self._clock)
        self._maintenance = Maintenance(
            self._manifest,
            self._jobs,
            fs=self._fs,
            root=self.path,
            store=self.identity,
            clock=self._clock,
            merge_files=merge_on(self._engines) if settings.background else None,
            tree_settings=settings.tree,
            wake=self._wake,
        )
        self._collector = Collector(
            self._maintenance,
            self._manifest,
            fs=self._fs,
            root=self.path,
            clock=self._clock,
            settings=settings.collection,
        )
        self._staging = Staging(self._manifest, fs=self._fs, root=self.path, clock=self._clock)
        self._kinds: dict[str, Kind] = {kind.name: kind for kind in (KvKind(),)}
        self._ledger = Ledger(self._maintenance.open_tree(LEDGER_TABLE, 0, f"tables/{LEDGER_TABLE}/0"))
        self._tracker = SegmentedAckTracker()
        self._dispatcher = Dispatcher(
            self._ledger,
            self,
            self._tracker,
            clock=self._clock,
            make_spill=self._make_spill,
            settings=settings.dispatcher,
        )
        self._consensus = Alone(self._open_journal())
        self._parts.callback(self._consensus.close)
        self._parts.callback(self._dispatcher.close)
        self._parts.callback(self._engines.shutdown, 10.0)
        self._parts.callback(self._scheduler.shutdown)
        flusher = StoreFlusher(
            self._consensus,
            self._dispatcher,
            self._kinds,
            clock=self._clock,
            make_room=self._release_reserve,
            applied=self._after_apply,
        )
        self._coordinator = WriteCoordinator(
            flusher,
            PendingDelta,
            view=0,
            incarnation=self._consensus.incarnation,
            clock=self._clock,
            settings=settings.coordinator,
        )
        self._port = LocalPort(self._coordinator, self._dispatcher, clock=self._clock, check_usable=self._check_usable)
        self._checkpoint = Checkpoint(
            self._dispatcher,
            self._consensus,
            self._manifest,
            forget_verdicts=self._forget_verdicts,
            store_ledger=lambda: self._maintenance.flush(self._ledger.tree),
            settings=settings.checkpoint,
        )

    def _open_journal(self) -> Log:
        folder, settings = f"{self.path}/journal", self.settings.journal
        try:
            return Log.open(self._fs, folder, random=self._random, settings=settings, identity=self.identity)
        except DiskFull:  # a full disk must not keep anyone from opening, reading and deleting
            if not self._fs.exists(f"{self.path}/RESERVE"):
                raise
            self._fs.unlink(f"{self.path}/RESERVE")
            return Log.open(self._fs, folder, random=self._random, settings=settings, identity=self.identity)

    def open(self, descriptor: PartitionDescriptor, options: bytes) -> PartitionStateMachine:
        """For the dispatcher: the state machine of a shard."""
        kind = self._kinds.get(descriptor.kind)
        if kind is None:
            raise KindMismatch(f"table {descriptor.name} is of the kind {descriptor.kind}, which this Penstock lacks")
        return kind.open_machine(descriptor, options, self._maintenance)

    def collect(self, descriptor: PartitionDescriptor) -> None:
        """For the dispatcher: a shard was dropped; its files go when nobody works on them, which may take a while."""
        self._dropped.append(descriptor)

    def _collect_dropped(self) -> None:
        while self._dropped:
            descriptor = self._dropped[0]
            self._kinds[descriptor.kind].collect(descriptor, self._maintenance)
            remove_folder(self._fs, self._spill_folder(descriptor))
            table = f"{self.path}/tables/{descriptor.table}"
            if self._fs.exists(table) and not self._fs.listdir(table):
                self._fs.rmdir(table)
            self._dropped.popleft()

    def _spill_folder(self, descriptor: PartitionDescriptor) -> str:
        return f"{self.path}/tables/{descriptor.table}/{descriptor.shard}-log"

    def _make_spill(self, descriptor: PartitionDescriptor) -> SpillLog:
        return SpillLog(self._fs, self._spill_folder(descriptor), random=self._random, identity=self.identity)

    def _recover(self) -> None:
        """Bring every partition up to the end of the journal, and mend jobs that a dead process left."""
        self._jobs.compensate_orphans()
        stored = self._ledger.tree.stored
        if stored + 1 < self._consensus.first:
            raise CorruptionError(
                f"{self.path}/journal", 0, f"it begins at {self._consensus.first}, but the ledger ends at {stored}"
            )
        for lsn, body in self._consensus.records(self._consensus.first):
            record = decode(body, where=f"{self.path}/journal", lsn=lsn)
            self._staging.name_all(record)
            self._dispatcher.dispatch(record, lsn)
            self._after_apply()
        self._find_dropped()
        self._keep_reserve()

    def _find_dropped(self) -> None:
        """Shards that were dropped and whose files an earlier process did not get to."""
        for name in self._fs.listdir(f"{self.path}/tables"):
            if name.isdigit() and int(name) != LEDGER_TABLE and self._ledger.table_by_id(int(name)) is None:
                folders = self._fs.listdir(f"{self.path}/tables/{name}")
                for shard in sorted({int(folder.removesuffix("-log")) for folder in folders} or {0}):
                    number = partition_id(int(name), shard)
                    self._dropped.append(PartitionDescriptor(number, int(name), shard, "", "kv"))

    def _start(self) -> None:
        export_trees(self._maintenance, self.metrics)
        if not self.settings.background:
            return
        self._coordinator.start()
        for task in tree_tasks(self._maintenance, self._collector):
            self._scheduler.register(task)
        for runner in job_runners(self._maintenance, self._jobs, self._engines):
            self._scheduler.register(runner)
        self._scheduler.register(TreeTask("checkpoint", 30.0, self._checkpoint_task, runs_after=("flush",)))
        self._scheduler.register(TreeTask("retry", 1.0, self._retry_task))
        self._scheduler.register(TreeTask("housekeeping", 600.0, self._housekeeping_task))
        self._scheduler.start()
        self._started = True
        self._parts.callback(threads.at_exit(self, Store.close))

    def _wake(self, task: str) -> None:
        if self._started:
            self._scheduler.wake(task)
            self._scheduler.wake(FLUSH_JOBS)
            self._scheduler.wake(COMPACTION_JOBS)

    # -- background

    def _checkpoint_task(self) -> Outcome:
        report = self._checkpoint.run()
        return Load.BUSY if report.segments_dropped else Load.IDLE

    def _retry_task(self) -> Outcome:
        behind = self._dispatcher.retry()
        self._keep_reserve()
        self._collect_dropped()
        return Load.BUSY if behind else Load.IDLE

    def _housekeeping_task(self) -> Outcome:
        """A copy of the manifest, and an end to the rows of jobs that ended long ago."""
        self._manifest.backup()
        self._jobs.prune(FINISHED_JOBS_KEPT)
        self._staging.purge(info.table for info in self._ledger.tables())
        return None

    def checkpoint(self) -> CheckpointReport:
        """Drop all of the journal that can be dropped, now."""
        self._check_usable()
        return self._checkpoint.run(everything=True)

    def _forget_verdicts(self, before: int) -> None:
        group = PendingGroup()
        group.sections[LEDGER] = encode_ops(Forget(before))
        with suppress(Closed):  # the next one will say it for this one too
            self._port.submit(group, 64)

    def _after_apply(self) -> None:
        """Keep rows in memory within their limit: the largest memtable is flushed early, then whoever writes waits."""
        trees = [tree for tree, _ in self._maintenance.trees()]
        growing = {tree: tree.growing_bytes() for tree in trees}
        if sum(growing.values()) > self.settings.memory_bytes_max // 8:
            largest = max(trees, key=lambda tree: growing[tree])
            largest.freeze()
            self._flush_soon(largest)
        for tree in trees:
            if self._started:
                tree.wait_while_stopped(APPLY_WAIT_S)
        deadline_s = self._clock.monotonic_s() + APPLY_WAIT_S
        while self._started and self._held_bytes() > self.settings.rows_bytes_max:
            if self._clock.monotonic_s() >= deadline_s:
                break  # this batch is in; the next one waits as long
            largest = max(trees, key=lambda tree: tree.memory_bytes() - tree.growing_bytes())
            self._flush_soon(largest)
            largest.wait_for_change(0.05)

    def _held_bytes(self) -> int:
        return sum(tree.memory_bytes() for tree, _ in self._maintenance.trees())

    def _flush_soon(self, tree: Tree) -> None:
        if self._started:
            if self._maintenance.request_flush(tree):
                self._wake("flush")
        else:
            self._maintenance.flush(tree)

    # -- a full disk

    def _keep_reserve(self) -> None:
        """Claim the reserve again if it was used; then writes are let in again."""
        path = f"{self.path}/RESERVE"
        if self._fs.exists(path):
            self._port.read_only = None
            return
        try:
            if self._fs.exists(path + ".tmp"):  # of a process that died
                self._fs.unlink(path + ".tmp")
            file = self._fs.create(path + ".tmp")
            try:
                zero_fill(file, 0, self.settings.reserve_bytes)
                publish(self._fs, file, path)
            finally:
                file.close()
        except OSError:
            if self._fs.exists(path + ".tmp"):
                self._fs.unlink(path + ".tmp")
            return
        self._port.read_only = None

    def _release_reserve(self) -> bool:
        """The disk is full: give the reserve free for what is on its way and for deletes, and refuse other writes."""
        self._port.read_only = DiskFull(f"the disk of {self.path} is full: only deletes are taken; free some space")
        path = f"{self.path}/RESERVE"
        if not self._fs.exists(path):
            return False
        self._fs.unlink(path)
        return True

    # -- tables

    def kv(self, name: str, *, shards: int = 1, value: ValueType | None = None, create: bool = True) -> KvTable:
        """A kv table; made if it is absent, unless `create=False` (`NotFound`)."""
        if value is not None and value not in VALUE_TYPES:
            raise Invalid(f"value={value!r} is unknown: use one of {', '.join(VALUE_TYPES)}")
        wanted = encode_options(Options(value or "bytes"))
        info = self._table(name, "kv", shards, wanted, create=create)
        if value is not None and info.options != wanted:
            raise KindMismatch(f"table {name} holds values of another type than {value}")
        return KvTable(self._port, info, durable=self.settings.durable)

    def _table(self, name: str, kind: str, shards: int, options: bytes, *, create: bool) -> TableInfo:
        self._check_usable()
        if not isinstance(name, str) or not _NAME.fullmatch(name):  # type: ignore[redundant-expr]
            raise Invalid(f"{name!r} is no table name: use a-z, 0-9 and _, a letter first, at most 63")
        if not isinstance(shards, int) or not 1 <= shards <= SHARDS_MAX:  # type: ignore[redundant-expr]
            raise Invalid(f"a table has 1 to {SHARDS_MAX} shards, not {shards}")
        info = self._port.table(name)
        if info is None:
            if not create:
                raise NotFound(f"there is no table {name}: it has {', '.join(self.tables()) or 'none'}")
            info = self._port.create(name, kind, shards, options)
        if info.kind != kind:
            raise KindMismatch(f"table {name} is of the kind {info.kind}, not {kind}")
        if shards not in (1, info.shards):
            raise KindMismatch(f"table {name} has {info.shards} shards, not {shards}")
        return info

    def tables(self) -> list[str]:
        """The names of all tables."""
        self._check_usable()
        return [info.name for info in self._ledger.tables()]

    def drop(self, name: str) -> None:
        """Remove a table and all that is in it."""
        self._check_usable()
        self._port.drop(name)

    def resume(self, name: str) -> None:
        """Let a paused table try again."""
        self._check_usable()
        info = self._port.table(name)
        if info is None:
            raise NotFound(f"there is no table {name}")
        self._dispatcher.resume(info.table)

    # -- durability

    def flush(self, epoch: int | None = None, timeout_s: float = 60.0) -> Acknowledgement:
        """Wait until all writes up to `epoch` are durable; None, or the 0 of a write of nothing: all so far."""
        self._check_usable()
        return self._coordinator.flush(epoch or None, timeout_s)

    def recover(self) -> None:
        """Go on after a failed write: what was kept is written again."""
        self._check_usable()
        self._coordinator.recover()

    def batch(self, *, token: tuple[str, int] | None = None, durable: bool = True) -> StoreBatch:
        """Writes to any tables that happen together or not at all; with a token at most once."""
        self._check_usable()
        return StoreBatch(self, self._port, token=None if token is None else check_token(token), durable=durable)

    def snapshot(self) -> StoreSnapshot:
        """Everything that is applied, at one LSN."""
        self._check_usable()
        lsn, tables, states = self._dispatcher.snapshot()
        return StoreSnapshot(lsn, SnapshotPort(states, {info.name: info for info in tables}))

    def _accept(self, number: PartitionId, files: Sequence[StagedFile]) -> Reference:
        """The owner's duties before files are named in the journal: hash, sync, and that they can be adopted."""
        reference = self._staging.accept(number >> 16, files)
        machine = self._dispatcher.partition(number).machine
        try:
            assert isinstance(machine, KvMachine)
            self._maintenance.check_adoptable(machine.tree, [file.chunk_id for file in files])
        except BaseException:
            self._staging.release(file.chunk_id for file in files)
            raise
        return reference

    def stage(self, name: str, shard: int = 0, *, count: int = 1, lease_s: float = 3600.0) -> list[StagedFile]:
        """Places for sstables to be built elsewhere and taken in by `batch().adopt`; kept for `lease_s`."""
        self._check_usable()
        info = self._existing(name)
        if not 0 <= shard < info.shards:
            raise Invalid(f"table {name} has the shards 0 to {info.shards - 1}, not {shard}")
        descriptor = self._dispatcher.partition(partition_id(info.table, shard)).descriptor
        return self._staging.reserve(info.table, folder_of(descriptor), count, lease_s)

    def _existing(self, name: str) -> TableInfo:
        info = self._port.table(name)
        if info is None:
            raise NotFound(f"there is no table {name}: it has {', '.join(self.tables()) or 'none'}")
        return info

    def compact(self, name: str) -> None:
        """Bring a table into as few files as possible, in this thread."""
        self._check_usable()
        if self._port.table(name) is None:
            raise NotFound(f"there is no table {name}")
        for tree, catalog in self._maintenance.trees():
            info = self._ledger.table_by_id(catalog.db_id)
            if info is not None and info.name == name:
                self._maintenance.flush(tree)
                self._maintenance.compact(tree, everything=True)

    # -- the end

    def _check_usable(self) -> None:
        if self._closed:
            raise Closed(f"the store {self.path} was closed: open it again")
        if threads.process_id() != self._process:
            raise Closed("this store was opened before a fork: open or connect to it in this process")

    def close(self) -> None:
        """Make everything durable and let go of the folder. A second call does nothing."""
        if self._closed or threads.process_id() != self._process:
            return
        self._closed = True
        with self._parts:
            self._coordinator.shutdown()

    def _cut_off(self) -> None:
        self._port.cut_off()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class StoreBatch:
    """Writes to several tables as one group; it happens at the end of the `with` block, if that ends well."""

    def __init__(self, store: Store, port: LocalPort, *, token: tuple[str, int] | None, durable: bool) -> None:
        self._store = store
        self._port = port
        self._token = token
        self._durable = durable
        self._gathered = PendingDelta()
        self._files: dict[PartitionId, tuple[StagedFile, ...]] = {}
        self._bytes = 0
        self._ended = False
        self.duplicate = False
        self.epoch: Epoch | None = None

    def kv(self, name: str) -> KvTable:
        """A table that gathers writes for this batch. It must exist."""
        self._check_open()
        table = self._store.kv(name, create=False)
        return KvTable(_BatchPort(self), table._info)  # type: ignore[arg-type]

    def adopt(self, name: str, files: Sequence[StagedFile], shard: int = 0) -> None:
        """Take in files that were staged for a shard of a table, built, and `sealed`; they are seen together."""
        self._check_open()
        number = partition_id(self._store._existing(name).table, shard)
        self._files[number] = (*self._files.get(number, ()), *files)

    def __enter__(self) -> StoreBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._ended:
            self.commit()
        self._ended = True

    def _check_open(self) -> None:
        if self._ended:
            raise Invalid("this batch has ended: begin another")

    def commit(self) -> None:
        """Write it. `duplicate` says afterwards whether its token was used before."""
        self._check_open()
        self._ended = True
        if self._files and self._token is not None and self._store._ledger.was_used(*self._token):
            self.duplicate = True  # known without a look at the files
            return
        group = self._group()
        if group is None:
            return
        if self._token is None:
            self.epoch = self._port.submit(group, self._bytes)
            if self._durable:
                self._port.flush(self.epoch)
            return
        self.epoch = self._port.settle(group, self._bytes)
        if group.verdict is Verdict.TOKEN_TOO_OLD:
            raise TokenTooOld(f"token {self._token} is below the window of its producer: nothing was written")
        self.duplicate = group.verdict is Verdict.DUPLICATE

    def _group(self) -> PendingGroup | None:
        condition = b"" if self._token is None else encode_condition(Condition(self._token))
        group = PendingGroup(condition)
        for gathered in self._gathered.groups:
            for partition, section in gathered.sections.items():
                group.sections[partition] = (*group.sections.get(partition, ()), section)
        for partition, files in self._files.items():
            if partition in group.sections:
                raise Invalid("a batch either writes to a shard or adopts files for it")
            group.sections[partition] = self._store._accept(partition, files)
        if not group.sections and self._token is None:
            return None
        return group


class _BatchPort:
    """Gathers what a table writes; reads are not offered."""

    def __init__(self, batch: StoreBatch) -> None:
        self._batch = batch

    def write(self, partition: PartitionId, insert: Any, size: int, a: Any, b: Any) -> Epoch:
        self._batch._check_open()
        insert(self._batch._gathered, partition, a, b)
        self._batch._bytes += size
        return Epoch(0)

    def flush(self, epoch: int | None, timeout_s: float) -> None:
        """A batch is durable at its end."""

    def time_us(self) -> int:
        return self._batch._port.time_us()

    def __getattr__(self, name: str) -> Any:
        return _refuse_reads


def _refuse_reads(*_: Any) -> NoReturn:
    raise Invalid("a batch takes writes only: read from the store's table")


class StoreSnapshot:
    """All tables at one LSN."""

    def __init__(self, lsn: int, port: SnapshotPort) -> None:
        self.lsn = lsn
        self._port = port

    def kv(self, name: str) -> KvReader:
        info = self._port.table(name)
        if info is None:
            raise NotFound(f"there is no table {name} in this snapshot")
        if info.kind != "kv":
            raise KindMismatch(f"table {name} is of the kind {info.kind}, not kv")
        return KvReader(self._port, info)

    def close(self) -> None:
        """Let go of the files it needs."""
        self._port.close()

    def __enter__(self) -> StoreSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
