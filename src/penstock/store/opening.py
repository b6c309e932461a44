"""Opens a folder with all parts of a store (see `wiring`), recovers, starts the background tasks (see `tasks`), closes.

Opening: lock, identity, manifest, ledger, journal; then the journal is replayed forward: the ledger first, then every
partition that has not stored what a record holds for it. Replaying twice changes nothing.

Thread: one opens and closes.
Invariants: (1) one owner for a folder. (2) nothing is served before recovery ends.
"""

from __future__ import annotations

import logging

from penstock.coordinator.metrics import export as export_coordinator
from penstock.coordinator.settings import State
from penstock.errors import Closed, CorruptionError, DiskFull, NotLeader, PenstockError, Poisoned, ReadOnly
from penstock.host import memory, threads
from penstock.host.clock import Clock
from penstock.host.file_errors import is_disk_full
from penstock.host.file_operations import make_dirs
from penstock.host.files import FileSystem
from penstock.host.owner_files import owner_file_system
from penstock.host.randomness import Random
from penstock.host.steady_clock import REPORT_US, read_note
from penstock.journal.record import decode
from penstock.lsm.tasks import job_runners, tree_tasks
from penstock.manifest.engine import EngineOpener
from penstock.manifest.keys import ComponentId
from penstock.manifest.recovery import RecoveredState, recover
from penstock.partition.extent import highest_lsn
from penstock.scheduler.metrics import export_scheduler
from penstock.scheduler.task import PeriodicTask
from penstock.store.following import FOLLOW_S, Follower, MemberJournal
from penstock.store.identity import load_identity
from penstock.store.metrics import StoreMeter
from penstock.store.reserve import Reserve
from penstock.store.settings import StoreSettings
from penstock.store.statsd import INTERVAL_S, StatsdSender, parse_agent
from penstock.store.wiring import WiredParts

logger = logging.getLogger(__name__)


class OpenedParts(WiredParts):
    """An open store without its public operations, which `Store` adds."""

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
        archive: str | None = None,
    ) -> None:
        super().__init__(path, settings=settings, clock=clock, random=random, read_only=read_only, consensus=consensus)
        memory.map_large_blocks()
        try:
            make_dirs(fs, self.path)
            self._lock = fs.lock(f"{self.path}/LOCK")
            self._parts.callback(self._release_lock)
            self._fs = owner_file_system(fs, self._lock)
            self._reserve = Reserve(self._fs, self.path, settings.reserve_bytes)
            self.identity, self.uuid = load_identity(self._fs, self.path, random)
            self._archive = self._make_archive(archive)
            self._open_parts(engine)
            self._recover()
            self._archive.connect(self._manifest, self._jobs, self._backup_source, self._port, self._recovered_state)
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

    def _recover(self) -> None:
        """Replay the journal into every partition, and clean up the jobs that a dead process left."""
        recovered = recover(self._manifest, self._jobs, was_idle=self._extent.was_idle)
        stored = self._ledger.tree.stored
        if stored + 1 < self._consensus.first:
            raise CorruptionError(
                f"{self.path}/journal", 0, f"it begins at {self._consensus.first}, but the ledger ends at {stored}"
            )
        if self._tenure is not None:  # what is stored here is committed, but this member may not know it yet
            described = recovered.generations.get(ComponentId.TABLES, 0) - 1  # the record of its newest table
            self._tenure.await_committed(max(highest_lsn(self._manifest), described), FOLLOW_S)
        self._check_keys()  # first: without its table's key, no section can be applied
        self._replayed = self._checkpoint.needed_from() - 1
        for lsn, body in self._consensus.records(self._replayed + 1):
            tables = self._ledger.tables_by_id
            self._replay(lsn, body)
            if self._ledger.tables_by_id is not tables:
                self._check_keys()
        self._recovered = True
        self._begin_time()
        self._restore_registry(recovered)
        self._dispatcher.on_tables = self._registry.follow
        self._dropped.find(lambda table: self._ledger.table_by_id(table) is not None, self._registry.tombstoned())
        self._recovered_state = recovered
        self._log_recovery(recovered)
        self._space.begin()

    def _log_recovery(self, recovered: RecoveredState) -> None:
        logger.info(
            "Store recovered: tables=%d records_migrated=%d jobs_pending=%d jobs_repaired=%d gates=%s waiters=%d "
            "waiters_dropped=%d last_commit_ms=%d",
            len(self._ledger.tables_by_id),
            recovered.migrated,
            len(recovered.pending_jobs),
            len(recovered.repairs),
            sorted(recovered.store_gates),
            len(recovered.waiters),
            recovered.dropped_waiters,
            recovered.last_commit_ms,
        )

    def _restore_registry(self, recovered: RecoveredState) -> None:
        self._registry.restore(recovered)

    def _replay(self, lsn: int, body: bytes) -> None:
        """Dispatch a record that this process did not write."""
        record = decode(body, where=f"{self.path}/journal", lsn=lsn)
        sections = [section for group in record.groups for section in group.sections]
        self._staging.take_over(sections)
        self._staging.name_all(sections)
        self._dispatcher.dispatch(record, lsn)
        self._replayed = lsn
        self._after_apply(len(body))

    def _begin_time(self) -> None:
        """Start the clock at the time of the newest record, which the ledger has by now."""
        note = None if self._tenure is None else self._tenure.time_note()
        note = note or read_note(self._fs, f"{self.path}/TIME", self.identity)
        self._clock.begin(self._ledger.tree.time_us, note, trust=self.settings.trust_clock)
        self.readers.begin()
        self._save_time()

    def follow_time(self) -> None:
        """Set the clock to the leader's time, if it is far from it. Requires: this is the store of a follower."""
        self._clock.time_us()  # it compares now
        has_time_note = self._tenure is not None and self._tenure.time_note() is not None
        if has_time_note and abs(self._clock.wall_ahead_us) > REPORT_US:
            self._begin_time()

    def clock_us(self) -> int:
        """Return the time of this store, also while it is being closed."""
        return self._clock.time_us()

    def _save_time(self) -> None:
        self._clock.save_note(self._fs, f"{self.path}/TIME", self.identity)

    @property
    def takes_writes(self) -> bool:
        """Whether this store accepts writes: always, except that of a member that does not lead."""
        return self._consensus.is_leader

    def confirm_lead(self) -> int:
        """Return an LSN at or past every record that was acknowledged; `Closed` if another member may have written."""
        return self._consensus.barrier()

    @property
    def is_full(self) -> bool:
        """Whether writes that grow the store are refused, because its disk is full."""
        return self._port.read_only is not None

    @property
    def is_failed(self) -> bool:
        """Whether writes are refused because one failed; of a member that follows, whether it cannot any more."""
        if self._follower is not None and self._follower.failure is not None:
            return True
        return self._coordinator.state is State.FAILED

    # -- background

    _statsd: StatsdSender | None = None  # sends metrics to an agent, if the settings name one

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
            recovered=self._recovered_state,
            clock=self._clock,
            tenure=self._tenure,
        )
        self._port.totals_of = self._meter.stream_totals
        if not self.settings.background:
            return
        if self.settings.statsd is not None:
            self._statsd = StatsdSender(self.metrics, parse_agent(self.settings.statsd))
        self._dispatcher.start_workers()
        self._coordinator.start()
        self._parts.callback(self._coordinator.shutdown)  # of a store that is not opened after all
        for task in (
            *tree_tasks(self._maintenance, self._collector),
            *job_runners(self._maintenance, self._jobs),
            *(self._derived.tasks() if self._consensus.is_leader else ()),  # what they derive, they write
            *self._tasks.all(),
            *self._durable_jobs.tasks(),
            *self._archive.tasks(),
            PeriodicTask("keep-metrics", 5.0, self._meter.save),
            *(() if self._statsd is None else (PeriodicTask("statsd", INTERVAL_S, self._statsd.send),)),
        ):
            self._scheduler.register(task)
        for name, interval_s in self.settings.task_intervals_s.items():
            self._scheduler.set_interval(name, interval_s)
        self._scheduler.start(begins=False)  # what is left to do until the caller has the store is quicker alone
        self._started = True
        self._parts.callback(threads.at_exit(self, OpenedParts.close))

    def begin_background(self) -> None:
        """Begin the periodic tasks: the store is in the hands of its caller."""
        self._scheduler.begin()

    # -- closing

    def close(self) -> None:
        """Make everything durable and release the folder, even if that fails. A second call does nothing.

        >>> store = penstock.open("logs/")
        >>> store.close()  # `with` does it
        """
        if self._closed or threads.process_id() != self._process:
            return
        threads.run_uninterrupted(self._close)

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._archive.stop()
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
        if self._statsd is not None:
            self._statsd.send_last()
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

    def _release_readers(self) -> None:
        """Release what clients hold. Their leases may last longer: no task may find their files without a reader."""
        for act in self._readers_held:
            act()

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
