"""Opens a folder, wires every part of a store, recovers, starts the background tasks (see `tasks`), and closes it.

Opening: lock, identity, manifest, ledger, journal; then the journal is replayed forward: the ledger first, then every
partition that has not stored what a record holds for it. Replaying twice changes nothing.

Thread: one opens and closes.
Invariants: (1) one owner for a folder. (2) nothing is served before recovery ends.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress

from penstock.coordinator import WriteCoordinator
from penstock.coordinator.metrics import export as export_coordinator
from penstock.coordinator.settings import State
from penstock.errors import Closed, CorruptionError, DiskFull, Invalid, NotLeader, PenstockError, Poisoned, ReadOnly
from penstock.host import memory, threads
from penstock.host.clock import Clock
from penstock.host.file_errors import is_disk_full
from penstock.host.file_operations import make_dirs
from penstock.host.files import FileSystem
from penstock.host.metrics import Metrics
from penstock.host.owner_files import owner_file_system
from penstock.host.randomness import Random
from penstock.host.steady_clock import SteadyClock, read_note
from penstock.journal.consensus import Alone, Consensus
from penstock.journal.record import JournalRecord, decode
from penstock.journal.tracker import SegmentedAckTracker
from penstock.kinds import MachineContext
from penstock.log import Log
from penstock.lsm.collection import Collector
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.merge_offers import MergeOffers
from penstock.lsm.tasks import COMPACTION_JOBS, FLUSH_JOBS, job_runners, merge_on, tree_tasks
from penstock.lsm.tree import Tree
from penstock.manifest.engine import EngineOpener
from penstock.manifest.jobs import JobQueue
from penstock.manifest.manifest import Manifest
from penstock.partition.aside import AsideLog
from penstock.partition.checkpoint import Checkpoint
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.extent import JournalExtent, highest_lsn
from penstock.partition.ledger import LEDGER, LEDGER_TABLE, ForgetVerdicts, Ledger, encode_ops
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.partition.reference import Staging
from penstock.partition.snapshots import PartitionSnapshots
from penstock.registry import CONDITIONS, KINDS
from penstock.scheduler.engines import Engines
from penstock.scheduler.metrics import export_scheduler
from penstock.scheduler.offers import OfferBoard
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.task import PeriodicTask
from penstock.store.deriving import DerivedTables
from penstock.store.dropped import DroppedShards
from penstock.store.flusher import StoreFlusher
from penstock.store.following import FOLLOW_S, RAFT_FILE, Follower, MemberJournal
from penstock.store.governor import MemoryGovernor
from penstock.store.identity import load_identity
from penstock.store.journal_trimming import JournalTrimmer
from penstock.store.metrics import StoreMeter
from penstock.store.port import LocalPort
from penstock.store.reserve import Reserve
from penstock.store.settings import StoreSettings
from penstock.store.shards import ShardOpener
from penstock.store.space import DiskSpace
from penstock.store.tables import Tables
from penstock.store.tasks import StoreTasks
from penstock.store.tracing import Tracer

logger = logging.getLogger(__name__)


class OpenedParts(Tables):
    """The parts of an open store and their wiring. `Store` adds the public operations."""

    _port: LocalPort

    def __init__(
        self,
        path: str,
        *,
        settings: StoreSettings,
        fs: FileSystem,
        clock: Clock,
        random: Random,
        engine: EngineOpener,
        read_only: bool = False,
        consensus: MemberJournal | None = None,
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
        self._started = False  # background threads run
        self._recovered = False  # every record of the journal was dispatched
        self.metrics = Metrics(self._check_usable)
        self._tracer = None if settings.trace is None else Tracer(settings.trace, self._clock)
        memory.map_large_blocks()
        self._parts = ExitStack()  # closes the parts, the newest first
        try:
            make_dirs(fs, self.path)
            self._lock = fs.lock(f"{self.path}/LOCK")
            self._parts.callback(self._release_lock)
            self._fs = owner_file_system(fs, self._lock)
            self._reserve = Reserve(self._fs, self.path, settings.reserve_bytes)
            self.identity, self.uuid = load_identity(self._fs, self.path, random)
            self._open_parts(engine)
            self._recover()
            if read_only:
                self._port.refuse_changes(
                    ReadOnly(f"{self.path} was opened with read_only=True: open it without, or connect, to write")
                )
            if not self._consensus.is_leader:
                self._port.refuse_changes(NotLeader("this member is not the leader: connect to the leader to write"))
            self._start()
            if self._tenure is not None and not self._consensus.is_leader:
                self._follower = Follower(self._tenure, self._replay, self._replayed)
                self._parts.callback(self._follower.close)
        except BaseException as error:
            self._closed = True
            self._parts.close()
            if isinstance(error, OSError) and is_disk_full(error):
                raise DiskFull(f"{self.path} cannot be opened, the disk is full: free some space") from error
            raise
        threads.after_fork(self, OpenedParts._disable_after_fork)

    # -- opening

    def _open_parts(self, engine: EngineOpener) -> None:
        settings = self.settings
        self._manifest = Manifest.open(f"{self.path}/manifest", fs=self._fs, clock=self._clock, engine=engine)
        self._parts.callback(self._manifest.close)
        self._extent = JournalExtent(self._manifest)
        self._parts.callback(self._extent.closed)  # the journal is closed by then
        self._jobs = JobQueue(self._manifest, random=self._random)
        self._engines = Engines()
        self.offers = OfferBoard(clock=self._clock, random=self._random)
        self._engines.add("spark", lambda: self.offers)
        self._scheduler = Scheduler(clock=self._clock)
        self._maintenance = Maintenance(
            self._manifest,
            self._jobs,
            fs=self._fs,
            root=self.path,
            store=self.identity,
            clock=self._clock,
            merge_files=merge_on(self._engines) if settings.background else None,
            offers=self._merge_offers() if settings.background else None,
            tree_settings=settings.tree,
            wake=self._wake,
            on_maintained=self._on_maintained,
        )
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
            memory_bytes_max=settings.memory_bytes_max,
        )
        shards = ShardOpener(context, self._dropped, settings=settings, tracer=self._tracer)
        ledger = self._maintenance.open_tree(LEDGER_TABLE, 0, f"tables/{LEDGER_TABLE}/0")
        self._aside = AsideLog(self._fs, self.path, random=self._random, identity=self.identity)
        self._parts.callback(self._aside.close)
        self._ledger = Ledger(ledger, CONDITIONS, self._aside)
        self._aside.is_alive = self._ledger.is_alive
        self._tracker = SegmentedAckTracker()
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
            self._staging.refused = Invalid(
                "a cluster takes rows through its journal, not in files: load fewer rows at a time, or use put_many"
            )
        self._parts.callback(self._consensus.close)
        self._parts.callback(self._dispatcher.close)
        self._parts.callback(self._dropped.close)
        self._parts.callback(self._collect_at_close)
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
        )
        self._trimmer = JournalTrimmer(
            self._checkpoint, self._ledger.tree, fs=self._fs, root=self.path, clock=self._clock
        )
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
            trimmer=self._trimmer,
            manifest=self._manifest,
            jobs=self._jobs,
            staging=self._staging,
            save_time=self._save_time,
            background=settings.background,
            follows=self._tenure is not None and not self._tenure.is_leader,
        )

    def _options_of(self, table: int) -> bytes:
        info = self._ledger.table_by_id(table)
        return b"" if info is None else info.options

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

    def _recover(self) -> None:
        """Replay the journal into every partition, and clean up the jobs that a dead process left."""
        self._jobs.compensate_orphans()
        stored = self._ledger.tree.stored
        if stored + 1 < self._consensus.first:
            raise CorruptionError(
                f"{self.path}/journal", 0, f"it begins at {self._consensus.first}, but the ledger ends at {stored}"
            )
        if self._tenure is not None:  # what is stored here is committed, but this member may not have heard so yet
            self._tenure.await_committed(highest_lsn(self._manifest), FOLLOW_S)
        self._replayed = self._checkpoint.needed_from() - 1
        for lsn, body in self._consensus.records(self._replayed + 1):
            self._replay(lsn, body)
        self._recovered = True
        self._begin_time()
        self._dropped.find(lambda table: self._ledger.table_by_id(table) is not None)
        self._space.begin()

    def _replay(self, lsn: int, body: bytes) -> None:
        """Dispatch a record that this process did not write."""
        record = decode(body, where=f"{self.path}/journal", lsn=lsn)
        self._staging.name_all(section for group in record.groups for section in group.sections)
        self._dispatcher.dispatch(record, lsn)
        self._replayed = lsn
        self._after_apply(len(body))

    def _begin_time(self) -> None:
        """Start the clock at the time of the newest record, which the ledger has by now."""
        note = read_note(self._fs, f"{self.path}/TIME", self.identity)
        self._clock.begin(self._ledger.tree.time_us, note, trust=self.settings.trust_clock)
        self._save_time()

    def _save_time(self) -> None:
        self._clock.save_note(self._fs, f"{self.path}/TIME", self.identity)

    @property
    def takes_writes(self) -> bool:
        """Whether this store accepts writes: always, except that of a member that does not lead."""
        return self._consensus.is_leader

    @property
    def is_failed(self) -> bool:
        """Whether writes are refused because one failed; of a member that follows, whether it cannot any more."""
        if self._follower is not None and self._follower.failure is not None:
            return True
        return self._coordinator.state is State.FAILED

    # -- background

    def _start(self) -> None:
        export_coordinator(self._coordinator, self.metrics)
        export_scheduler(self._scheduler, self.metrics)
        self._meter = StoreMeter(
            self.metrics,
            maintenance=self._maintenance,
            coordinator=self._coordinator,
            dispatcher=self._dispatcher,
            flusher=self._flusher,
            consensus=self._consensus,
            checkpoint=self._checkpoint,
            manifest=self._manifest,
            clock=self._clock,
        )
        if not self.settings.background:
            return
        self._dispatcher.start_workers()
        self._coordinator.start()
        for task in (
            *tree_tasks(self._maintenance, self._collector),
            *job_runners(self._maintenance, self._jobs),
            *(self._derived.tasks() if self._consensus.is_leader else ()),  # what they derive, they write
            *self._tasks.all(),
            PeriodicTask("keep-metrics", 5.0, self._meter.save),
        ):
            self._scheduler.register(task)
        self._scheduler.start()
        self._started = True
        self._parts.callback(threads.at_exit(self, OpenedParts.close))

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

    # -- closing

    def close(self) -> None:
        """Make everything durable and release the folder, even if that fails. A second call does nothing."""
        if self._closed or threads.process_id() != self._process:
            return
        threads.run_uninterrupted(self._close)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._finish()
        except BaseException as error:
            self._close_parts(error)
            raise
        self._close_parts(None)

    def _finish(self) -> None:
        try:
            self._port.close()
        finally:
            self._coordinator.shutdown()
        self._dispatcher.await_all(self.settings.coordinator.shutdown_timeout_s)
        if not self.read_only and self._has_folder():
            self._trimmer.at_close()
            self._meter.save_at_close()
        logger.info("%s: shut down at LSN %d", self.path, self._consensus.committed)

    def _has_folder(self) -> bool:
        """Whether the folder is still the one that was opened; otherwise nothing can be done in it."""
        try:
            self._lock.check()
        except Closed:
            return False
        return True

    def _release_lock(self) -> None:
        """Release the folder, unless a thread hangs in its files: what that writes later must not meet a new owner."""
        if self._recovered and (hanging := self._dispatcher.hanging()):
            names = ", ".join(sorted(hanging))
            raise Poisoned(f"the files of {names} do not answer: {self.path} stays locked until this process ends")
        self._lock.release()

    def _close_parts(self, failure: BaseException | None) -> None:
        """Close every part. Raises the first error; if there is a `failure` already, adds a note to that instead."""
        try:
            self._parts.close()
        except Exception as error:
            if failure is None and isinstance(error, Closed):
                raise  # the folder is gone
            if failure is None:
                raise Poisoned(
                    f"{self.path} was closed with an error ({error}): acknowledged writes are durable; open it again"
                ) from error
            failure.add_note(f"closing the parts of the store failed, too: {error}")
        finally:
            self._port.end()

    def _disable_after_fork(self) -> None:
        self._port.disable_after_fork()

    def _collect_at_close(self) -> None:
        """Remove the inputs of finished compactions; if that fails, the next opening does it."""
        try:
            if (
                self._has_folder() and not self.readers.may_be_there()
            ):  # otherwise a reader's lease may outlive its pins
                self._collector.collect(closing=True)
        except (OSError, PenstockError) as error:
            logger.warning("%s: unused files are removed later (%s)", self.path, error)

    def _check_usable(self) -> None:
        if self._closed:
            raise Closed(f"the store {self.path} was closed: open it again")
        if threads.process_id() != self._process:
            raise Closed("this store was opened before a fork: open or connect to it in this process")
