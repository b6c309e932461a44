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
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from penstock.coordinator import Acknowledgement, CoordinatorSettings, Epoch, WriteCoordinator
from penstock.errors import Closed, CorruptionError, DiskFull, Invalid, KindMismatch, NotFound, TokenTooOld
from penstock.flusher import StoreFlusher
from penstock.host import threads
from penstock.host.chance import Random, system_random
from penstock.host.clock import Clock, SystemClock
from penstock.host.files import FileSystem, OsFileSystem, make_dirs, publish, zero_fill
from penstock.host.metrics import Metrics
from penstock.journal.consensus import Alone
from penstock.journal.record import PartitionId, decode
from penstock.journal.tracker import SegmentedAckTracker
from penstock.kinds import Kind
from penstock.kv.machine import KvKind
from penstock.kv.table import KvReader, KvTable
from penstock.kv.values import VALUE_TYPES, Options, ValueType, encode_options
from penstock.local import LocalPort, SnapshotPort
from penstock.log import Log, LogSettings
from penstock.lsm.maintenance import Maintenance, MaintenanceSettings
from penstock.lsm.tasks import TreeTask, job_handlers, merge_on, tree_tasks
from penstock.lsm.tasks import export as export_trees
from penstock.lsm.tree import TreeSettings
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
from penstock.partition.spill import SpillLog
from penstock.scheduler.engines import Engines
from penstock.scheduler.runner import JobRunner, JobRunnerSettings
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.task import Load, Outcome

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
SHARDS_MAX = 1_024
RESERVE_BYTES = 8 << 20  # kept back, so that deletes can be written to a full disk


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """Everything about a store that can be chosen."""

    memory_bytes_max: int = 512 << 20  # rows that are not in files; writers wait rather than pass it
    durable: bool = False  # whether every write waits by default
    journal: LogSettings = field(default_factory=LogSettings)
    dispatcher: DispatcherSettings = field(default_factory=DispatcherSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    maintenance: MaintenanceSettings = field(default_factory=MaintenanceSettings)
    flush_interval_s: float = 0.1
    background: bool = True  # False: no threads; maintenance runs when it is called
    reserve_bytes: int = RESERVE_BYTES

    def __post_init__(self) -> None:
        if self.memory_bytes_max < 160 << 20:
            raise Invalid("memory_bytes_max must be at least 160 MiB: the largest value has 64")

    @property
    def coordinator(self) -> CoordinatorSettings:
        return CoordinatorSettings(
            flush_interval_s=self.flush_interval_s, bytes_max=max(80 << 20, self.memory_bytes_max // 4)
        )

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
        self.metrics = Metrics()
        make_dirs(fs, self.path)
        self._lock = fs.lock(f"{self.path}/LOCK")
        try:
            self.identity = self._load_identity()
            self._open_parts(engine)
            self._recover()
            self._start()
        except BaseException:
            self._lock.release()
            raise

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
            settings=settings.maintenance,
            tree_settings=settings.tree,
            wake=self._wake,
        )
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
        log = Log.open(
            self._fs, f"{self.path}/journal", random=self._random, settings=settings.journal, identity=self.identity
        )
        self._consensus = Alone(log)
        flusher = StoreFlusher(
            self._consensus,
            self._dispatcher,
            self._kinds,
            clock=self._clock,
            time_us=self._ledger.tree.time_us,
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

    def open(self, descriptor: PartitionDescriptor, options: bytes) -> PartitionStateMachine:
        """For the dispatcher: the state machine of a shard."""
        kind = self._kinds.get(descriptor.kind)
        if kind is None:
            raise KindMismatch(f"table {descriptor.name} is of the kind {descriptor.kind}, which this Penstock lacks")
        return kind.open_machine(descriptor, options, self._maintenance)

    def collect(self, descriptor: PartitionDescriptor) -> None:
        """For the dispatcher: remove what a dropped shard left."""
        self._kinds[descriptor.kind].collect(descriptor, self._maintenance)

    def _make_spill(self, descriptor: PartitionDescriptor) -> SpillLog:
        folder = f"{self.path}/tables/{descriptor.table}/{descriptor.shard}-log"
        return SpillLog(self._fs, folder, random=self._random, identity=self.identity)

    def _recover(self) -> None:
        """Bring every partition up to the end of the journal, and mend jobs that a dead process left."""
        self._jobs.compensate_orphans()
        stored = self._ledger.tree.stored
        if stored + 1 < self._consensus.first:
            raise CorruptionError(
                f"{self.path}/journal", 0, f"it begins at {self._consensus.first}, but the ledger ends at {stored}"
            )
        for lsn, body in self._consensus.records(self._consensus.first):
            self._dispatcher.dispatch(decode(body, where=f"{self.path}/journal", lsn=lsn), lsn)
        self._keep_reserve()

    def _start(self) -> None:
        export_trees(self._maintenance, self.metrics)
        if not self.settings.background:
            return
        self._coordinator.start()
        for task in tree_tasks(self._maintenance):
            self._scheduler.register(task)
        self._scheduler.register(TreeTask("checkpoint", 30.0, self._checkpoint_task, runs_after=("flush",)))
        self._scheduler.register(TreeTask("retry", 1.0, self._retry_task))
        runner = JobRunnerSettings(interval_s=1.0)
        self._scheduler.register(
            JobRunner("jobs", self._jobs, job_handlers(self._maintenance), self._engines, settings=runner)
        )
        self._scheduler.start()
        self._forget_exit = threads.at_exit(self, Store.close)

    def _wake(self, task: str) -> None:
        if self.settings.background:
            self._scheduler.wake(task)
            self._scheduler.wake("jobs")

    # -- background

    def _checkpoint_task(self) -> Outcome:
        report = self._checkpoint.run()
        return Load.BUSY if report.segments_dropped else Load.IDLE

    def _retry_task(self) -> Outcome:
        self._keep_reserve()
        return Load.BUSY if self._dispatcher.retry() else Load.IDLE

    def checkpoint(self) -> CheckpointReport:
        """Drop all of the journal that can be dropped, now."""
        self._check_usable()
        return self._checkpoint.run(everything=True)

    def _forget_verdicts(self, before: int) -> None:
        group = PendingGroup()
        group.sections[LEDGER] = encode_ops(Forget(before))
        self._port.submit(group, 64)

    def _after_apply(self) -> None:
        """Keep rows in memory within their limit: the largest tree is frozen first, then whoever writes waits."""
        trees = [tree for tree, _ in self._maintenance.trees()]
        held = {tree: tree.memory_bytes() for tree in trees}
        limit = self.settings.memory_bytes_max // 2
        if sum(held.values()) > limit // 2:
            largest = max(trees, key=lambda tree: held[tree])
            largest.freeze()
            self._wake("flush")
            if not self.settings.background:
                self._maintenance.flush(largest)
        for tree in trees:
            if self.settings.background:
                tree.wait_while_stopped(60.0)

    # -- a full disk

    def _keep_reserve(self) -> None:
        """Claim the reserve again if it was used; then writes are let in again."""
        path = f"{self.path}/RESERVE"
        if self._fs.exists(path):
            self._port.read_only = None
            return
        try:
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
        if not _NAME.fullmatch(str(name)):
            raise Invalid(f"{name!r} is no table name: use a-z, 0-9 and _, a letter first, at most 63")
        if not 1 <= shards <= SHARDS_MAX:
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
        """Wait until all writes up to `epoch` (None: all so far) are durable."""
        self._check_usable()
        return self._coordinator.flush(epoch, timeout_s)

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
        tables = self._ledger.tables()
        lsn, states = self._dispatcher.snapshot(tables)
        return StoreSnapshot(lsn, SnapshotPort(states, {info.name: info for info in tables}))

    def compact(self, name: str) -> None:
        """Bring a table into as few files as possible, in this thread."""
        self._check_usable()
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
        try:
            self._coordinator.shutdown()
        finally:
            self._scheduler.shutdown()
            self._engines.shutdown(10.0)
            self._dispatcher.close()
            self._consensus.close()
            self._manifest.close()
            self._lock.release()

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
        self._bytes = 0
        self.duplicate = False
        self.epoch: Epoch | None = None

    def kv(self, name: str) -> KvTable:
        """A table that gathers writes for this batch. It must exist."""
        table = self._store.kv(name, create=False)
        return KvTable(_BatchPort(self), table._info)  # type: ignore[arg-type]

    def __enter__(self) -> StoreBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.commit()

    def commit(self) -> None:
        """Write it. `duplicate` says afterwards whether its token was used before."""
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
        if not group.sections and self._token is None:
            return None
        return group


class _BatchPort:
    """Gathers what a table writes; reads are not offered."""

    def __init__(self, batch: StoreBatch) -> None:
        self._batch = batch

    def write(self, partition: PartitionId, insert: Any, size: int, a: Any, b: Any) -> Epoch:
        insert(self._batch._gathered, partition, a, b)
        self._batch._bytes += size
        return Epoch(0)

    def flush(self, epoch: int | None, timeout_s: float) -> None:
        """A batch is durable at its end."""

    def time_us(self) -> int:
        return self._batch._port.time_us()

    def __getattr__(self, name: str) -> Any:
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
