"""The parts of a store and how they are wired: what each is given, and what they call when something happens.

`opening` makes a store of them: it opens the folder, recovers, starts the background tasks, and closes.

Thread: one opens; callbacks come from any.
Invariant: `_parts` closes every part that was opened, the newest first.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from penstock.archive.master_keys import master_keys
from penstock.archive.table_keys import lend, take_back
from penstock.coordinator import WriteCoordinator
from penstock.errors import Closed, DiskFull, Invalid, KeyMissing, NotLeader, WrongKey
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.environment import KEYS_VARIABLE, environment_variable
from penstock.host.files import FileSystem, Lock
from penstock.host.metrics import Metrics
from penstock.host.randomness import Random
from penstock.host.steady_clock import SteadyClock
from penstock.journal.consensus import Alone, Consensus
from penstock.journal.record import JournalRecord, decode
from penstock.journal.tracker import SegmentedAckTracker
from penstock.kinds import MachineContext
from penstock.log import Log
from penstock.lsm.collection import Collector
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.merge_offers import MergeOffers
from penstock.lsm.tasks import COMPACTION_JOBS, FLUSH_JOBS, merge_on
from penstock.lsm.tree import Tree
from penstock.manifest.engine import EngineOpener
from penstock.manifest.jobs import JobQueue
from penstock.manifest.manifest import Manifest
from penstock.partition.aside import AsideLog
from penstock.partition.checkpoint import Checkpoint
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.extent import JournalExtent
from penstock.partition.ledger import Ledger
from penstock.partition.ledger_records import (
    LEDGER,
    LEDGER_TABLE,
    ForgetVerdicts,
    TableInfo,
    encode_ops,
    rewrapped_keys,
)
from penstock.partition.machine import PartitionDescriptor
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.partition.reference import Staging
from penstock.partition.snapshots import PartitionSnapshots
from penstock.partition.storage_options import DEFAULT, StorageOptions
from penstock.registry import CONDITIONS, KINDS
from penstock.scheduler.durable_work import DurableJobs
from penstock.scheduler.engines import Engines
from penstock.scheduler.offers import OfferBoard
from penstock.scheduler.scheduler import Scheduler
from penstock.store.archiving import StoreArchive
from penstock.store.backup import BackupSource
from penstock.store.deriving import DerivedTables
from penstock.store.dropped import DroppedShards
from penstock.store.flusher import StoreFlusher
from penstock.store.following import RAFT_FILE, Follower, MemberJournal, cluster_ids
from penstock.store.governor import MemoryGovernor
from penstock.store.journal_trimming import JournalTrimmer
from penstock.store.keys import StoreKeys
from penstock.store.port import LocalPort
from penstock.store.reserve import Reserve
from penstock.store.settings import StoreSettings
from penstock.store.shards import ShardOpener
from penstock.store.space import DiskSpace
from penstock.store.table_registry import DbRegistry
from penstock.store.tables import Tables
from penstock.store.tasks import StoreTasks
from penstock.store.tracing import Tracer

logger = logging.getLogger(__name__)


class WiredParts(Tables):
    """The parts of a store, wired; `OpenedParts` opens and closes them."""

    _port: LocalPort
    _fs: FileSystem  # set before `_open_parts`, as are these
    _lock: Lock
    _reserve: Reserve
    identity: bytes
    uuid: bytes
    _archive: StoreArchive
    _replayed: int

    def __init__(
        self,
        path: str,
        *,
        settings: StoreSettings,
        clock: Clock,
        random: Random,
        read_only: bool,
        consensus: MemberJournal | None,
    ) -> None:
        self.path = path.rstrip("/") or "/"
        self.settings = settings
        self._durable = settings.durable
        self._clock, self._random = SteadyClock(clock), random
        self._process = threads.process_id()
        self._follower: Follower | None = None  # of a member that does not lead
        self._tenure = consensus  # the journal of a member of a cluster; None: the store has its own
        self.read_only = read_only  # then `fs` and `engine` keep every change in memory
        self._closed = False
        self._checking = threads.lock("store.check")
        self._rotating = threads.lock("store.rotation")
        self._started = False  # background threads run
        self._recovered = False  # every record of the journal was dispatched
        self.metrics = Metrics(self._check_usable)
        self._tracer = None if settings.trace is None else Tracer(settings.trace, self._clock)
        self._parts = ExitStack()  # closes the parts, the newest first

    def _make_archive(self, url: str | None) -> StoreArchive:
        if url is not None and self._tenure is not None:
            raise Invalid("a member of a cluster has no archive: back up its members instead")
        return StoreArchive(
            url,
            fs=self._fs,
            root=self.path,
            uuid=self.uuid,
            identity=self.identity,
            clock=self._clock,
            random=self._random,
            settings=self.settings.archive,
            read_only=self.read_only,
        )

    def _backup_source(self) -> BackupSource:
        return BackupSource(
            fs=self._fs,
            root=self.path,
            identity=self.identity,
            uuid=self.uuid,
            clock=self._clock,
            manifest=self._manifest,
            checkpoint=self._checkpoint,
            consensus=self._consensus,
            collector=self._collector,
            dropped=self._dropped,
            aside=self._aside,
            snapshots=self._snapshots,
            dispatcher=self._dispatcher,
            port=self._port,
            archived=self._archive.tables,
            maintenance=self._maintenance,
        )

    def _open_control(self, engine: EngineOpener) -> None:
        """Open the manifest, and what runs jobs and tasks."""
        settings = self.settings
        path = f"{self.path}/manifest"
        self._manifest = Manifest.open(path, settings.manifest, fs=self._fs, clock=self._clock, engine=engine)
        self._parts.callback(self._manifest.close)
        self._extent = JournalExtent(self._manifest)
        self._parts.callback(self._extent.closed)  # the journal is closed by then
        self._jobs = JobQueue(self._manifest, random=self._random, settings=settings.jobs)
        self._extent.is_idle = self._jobs.is_idle
        self._engines = Engines()
        self.offers = OfferBoard(clock=self._clock, random=self._random)
        self._engines.add("spark", lambda: self.offers)
        self._scheduler = Scheduler(clock=self._clock, settings=settings.scheduler)
        self._durable_jobs = DurableJobs(self._jobs, clock=self._clock, wake=self._wake_task)

    def _open_parts(self, engine: EngineOpener) -> None:
        self._open_control(engine)
        settings = self.settings
        self._keys = self._open_keys()
        self._maintenance = Maintenance(
            self._manifest,
            self._jobs,
            fs=self._fs,
            root=self.path,
            store=self.identity,
            clock=self._clock,
            storage_of=self._keys.files_of,
            merge_files=merge_on(self._engines) if settings.background else None,
            offers=self._merge_offers() if settings.background else None,
            tree_settings=settings.tree,
            wake=self._wake,
            on_maintained=self._on_maintained,
        )
        self._maintenance.use_archive(self._archive.tables)
        self._parts.callback(self._maintenance.close)
        self._collector = Collector(
            self._maintenance,
            self._manifest,
            fs=self._fs,
            root=self.path,
            clock=self._clock,
            settings=settings.collection,
        )
        self.readers = self._collector.readers
        self._dropped = DroppedShards(self._fs, self.path, self._maintenance, self.readers.may_remove)
        context = MachineContext(
            fs=self._fs,
            root=self.path,
            identity=self.identity,
            clock=self._clock,
            random=self._random,
            manifest=self._manifest,
            maintenance=self._maintenance,
            settings=None,
            published=lambda: self._dispatcher.published,
            may_remove=self.readers.may_remove,
            remove=self.readers.remove,
            options_of=self._options_of,
            storage_of=self._storage_of,
            memory_bytes_max=settings.memory_bytes_max,
            files_of=self._keys.files_of,
        )
        shards = ShardOpener(
            context, self._dropped, settings=settings, tracer=self._tracer, check=self._check_descriptor
        )
        ledger = self._maintenance.open_tree(LEDGER_TABLE, 0, f"tables/{LEDGER_TABLE}/0")
        self._aside = AsideLog(self._fs, self.path, random=self._random, identity=self.identity)
        self._parts.callback(self._aside.close)
        self._ledger = Ledger(ledger, CONDITIONS, self._aside)
        self._aside.is_alive = self._ledger.is_alive
        self._registry = DbRegistry(self._manifest, self._ledger, clock=self._clock)
        self._tracker = SegmentedAckTracker(others=() if self._tenure is None else self._tenure.others)
        self._dispatcher = Dispatcher(
            self._ledger,
            shards,
            self._tracker,
            clock=self._clock,
            make_spill=lambda descriptor: shards.open_spill(descriptor, self._staging, self._snapshots),
            aside=self._aside,
            journal=self._records,
            settings=settings.dispatcher,
            on_applied=self._notify_applied,
            opener_of=self._keys.opener,
        )
        self._staging = Staging(
            self._manifest,
            fs=self._fs,
            root=self.path,
            clock=self._clock,
            open_shards=self._dispatcher.open_shards,
            remove=self.readers.remove,
        )
        self._consensus: Consensus = self._tenure or self._open_alone()
        if self._tenure is not None:  # a member may still need verdicts that its leader does not
            self._ledger.verdicts_from = lambda: self._consensus.first
            self._staging.next_id = cluster_ids(self._tenure.incarnation)
        self._parts.callback(self._consensus.close)
        self._parts.callback(self._dispatcher.close)
        self._parts.callback(self._dropped.close)
        self._parts.callback(self._collect_at_close)
        self._readers_held: list[Callable[[], object]] = []  # to call when no background work runs any more
        self._parts.callback(self._release_readers)
        self._parts.callback(self._engines.shutdown, 10.0)
        self._parts.callback(self.offers.shutdown, 0.0)
        self._parts.callback(self._scheduler.shutdown)
        self._parts.callback(self._maintenance.stop)
        self._snapshots = PartitionSnapshots(
            self._dispatcher,
            self._consensus,
            self._manifest,
            fs=self._fs,
            root=self.path,
            identity=self.identity,
        )
        self._dispatcher.is_repairable = self._snapshots.is_repairable
        self._flusher = StoreFlusher(
            self._consensus,
            self._dispatcher,
            KINDS,
            keys=self._keys,
            clock=self._clock,
            make_room=self._make_room,
            check_folder=self._lock.check,
            applied=self._after_apply,
            tracer=self._tracer,
        )
        self._coordinator = WriteCoordinator(
            self._flusher,
            PendingDelta,
            view=0,
            incarnation=self._consensus.incarnation,
            clock=self._clock,
            settings=settings.coordinator,
        )
        self._governor = MemoryGovernor(
            self._maintenance,
            self._coordinator,
            memory_bytes_max=settings.memory_bytes_max,
            rows_bytes_max=settings.rows_bytes_max,
            flush_soon=self._flush_soon,
            press=self._dispatcher.press,
        )
        self._port = LocalPort(
            self._coordinator,
            self._dispatcher,
            self._staging,
            clock=self._clock,
            incarnation=self._consensus.incarnation,
            identity=self.identity,
            uuid=self.uuid,
            keys=self._keys,
            check_usable=self._check_usable,
        )
        self._derived = DerivedTables(self._port, self._jobs, self._engines, self.offers, self.path)
        self._checkpoint = Checkpoint(
            self._dispatcher,
            self._consensus,
            self._manifest,
            self._extent,
            forget_verdicts=self._forget_verdicts,
            store_ledger=lambda: self._maintenance.flush(self._ledger.tree),
            snapshots=self._snapshots,
            settings=settings.checkpoint,
            member_acks=None if self._tenure is None else self._tenure.acks,
        )
        self._trimmer = JournalTrimmer(
            self._checkpoint, self._ledger.tree, fs=self._fs, root=self.path, clock=self._clock
        )
        self._durable_jobs.add(self._trimmer)
        self._parts.callback(self._durable_jobs.stop)
        self._space = DiskSpace(
            self.path,
            self._reserve,
            coordinator=self._coordinator,
            port=self._port,
            dispatcher=self._dispatcher,
            checkpoint=self._checkpoint,
            clock=self._clock,
            waiting_bytes_max=settings.coordinator.bytes_max,
        )
        self._tasks = StoreTasks(
            self._scheduler,
            lock=self._lock,
            dispatcher=self._dispatcher,
            port=self._port,
            governor=self._governor,
            space=self._space,
            dropped=self._dropped,
            manifest=self._manifest,
            jobs=self._jobs,
            staging=self._staging,
            registry=self._registry,
            dropped_grace_s=settings.collection.dropped_grace_s,
            save_time=self._save_time,
            background=settings.background,
            follows=self._tenure is not None and not self._tenure.is_leader,
        )

    def _open_keys(self) -> StoreKeys:
        settings = self.settings
        keys = StoreKeys(
            self.identity,
            master_keys(
                settings.keys if settings.keys is not None else environment_variable(KEYS_VARIABLE) or None, self._fs
            ),
            self._random,
            self._table_by_id,
            settings.encrypt,
        )
        source = keys.table_key
        lend(self.identity, source)
        self._parts.callback(take_back, self.identity, source)
        return keys

    def _check_keys(self) -> None:
        """Raise `KeyMissing` or `WrongKey` if the key of a table cannot be unwrapped.

        A rotation that is in the journal, and not in the files of the ledger, counts: the older key may be gone.
        """
        try:
            self._keys.check(self._ledger.tables())
        except (KeyMissing, WrongKey):
            for _, body in self._consensus.records(self._checkpoint.needed_from()):
                for table_id, key in rewrapped_keys(body):
                    self._keys.learn(table_id, key)
            self._keys.check(self._ledger.tables())

    def _table_by_id(self, table: int) -> TableInfo | None:
        return None if table == LEDGER_TABLE else self._ledger.table_by_id(table)

    def _check_descriptor(self, descriptor: PartitionDescriptor) -> None:
        info = self._ledger.table_by_id(descriptor.table_id)
        if info is not None:
            self._registry.check(info)

    def _options_of(self, table: int) -> bytes:
        info = self._ledger.table_by_id(table)
        return b"" if info is None else info.options

    def _storage_of(self, table: int) -> StorageOptions:
        info = self._ledger.table_by_id(table)
        return DEFAULT if info is None else info.storage_options

    def _make_room(self) -> bool:
        return self._space.release_reserve()

    def _merge_offers(self) -> MergeOffers:
        return MergeOffers(self.offers, fs=self._fs, root=self.path, bytes_min=self.settings.offer_bytes_min)

    def _open_alone(self) -> Alone:
        if self._fs.exists(f"{self.path}/{RAFT_FILE}"):
            raise Invalid(f"{self.path} is a member of a cluster: start it as one, or connect to the cluster")
        return Alone(self._open_journal())

    def _open_journal(self) -> Log:
        folder, settings = f"{self.path}/journal", self.settings.journal
        try:
            return self._extent.open_journal(self._fs, folder, self._random, settings, self.identity)
        except DiskFull:  # a full disk must not prevent opening, reading and deleting
            if not self._reserve.release():
                raise
            return self._extent.open_journal(self._fs, folder, self._random, settings, self.identity)

    def _records(self, start: int) -> Iterator[tuple[int, JournalRecord]]:
        """For the dispatcher: yield the durable records from an LSN on."""
        for lsn, body in self._consensus.records(max(start, self._consensus.first)):
            yield lsn, decode(body, where=f"{self.path}/journal", lsn=lsn)

    # -- what the parts call

    def _wake_task(self, task: str) -> None:
        if self._started:
            self._scheduler.wake(task)

    def _wake(self, task: str) -> None:
        if self._started:
            self._scheduler.wake(task)
            self._scheduler.wake(FLUSH_JOBS)
            self._scheduler.wake(COMPACTION_JOBS)

    def _forget_verdicts(self, before: int) -> None:
        group = PendingGroup()
        group.sections[LEDGER] = encode_ops(ForgetVerdicts(before))
        with suppress(Closed, NotLeader):  # the next call covers this one too; a follower does as its leader says
            self._port.submit(group, 64)

    def _notify_applied(self) -> None:
        """Tell listeners that waiting entries of a partition were applied."""
        if self._recovered and self._port.listeners:
            self._port.applied()

    def _after_apply(self, size: int) -> None:
        """Wake waiters for records; every few megabytes, check memory and disk space."""
        if self._port.listeners:
            self._port.applied()
        if self._governor.applied(size):
            self._space.check()

    def _on_maintained(self) -> None:
        self._governor.rebalance()
        self._wake("checkpoint")  # a flush may let it drop some of the journal

    def _flush_soon(self, tree: Tree) -> None:
        if self._started:
            if self._maintenance.request_flush(tree):
                self._wake("flush")
        else:
            threads.run_uninterrupted(lambda: self._maintenance.flush(tree))

    # -- the store as its parts see it

    @abstractmethod
    def _save_time(self) -> None:
        """Keep the time for the next opening."""

    @abstractmethod
    def _release_readers(self) -> None:
        """Release what clients hold."""

    def _collect_at_close(self) -> None:
        """Remove the inputs of finished compactions."""

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise `Closed` if the store was closed, or was opened before a fork."""
