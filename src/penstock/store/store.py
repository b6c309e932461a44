"""The public `Store`: opening one, and the operations on it that do not belong to a table.

Thread: any.
Invariant: a store that was opened before a fork does not work in the child.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType

from penstock.arguments import SIZE_MAX, seconds, whole
from penstock.coordinator import Durability, Epoch
from penstock.errors import Backpressure, GateShut, NotFound
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.host.file_errors import translate_os_errors
from penstock.host.file_locks import OsReadLock
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.host.overlay_files import OverlayFileSystem
from penstock.host.randomness import Random, system_random
from penstock.journal.partitions import PartitionId
from penstock.kinds import partitions_of
from penstock.lsm.manual_compaction import COMPACT_WAIT_S, CompactionReport, compact_trees
from penstock.manifest.engine import EngineOpener
from penstock.manifest.environment import LmdbEngine
from penstock.manifest.memory import ReadOnlyEngine
from penstock.partition.aside import Trouble
from penstock.partition.checkpoint import CheckpointReport
from penstock.partition.ledger_records import TableInfo
from penstock.registry import vector_kind
from penstock.store.archive_settings import (
    ArchiveReport,
    EvictReport,
    VerifyReport,
)
from penstock.store.backup import Backup
from penstock.store.backup_folder import NUMBER_MAX, CopyProgress, check_progress
from penstock.store.check import StoreCheck
from penstock.store.following import MemberJournal
from penstock.store.inspection import read_chunks, read_jobs, read_sealed, retry_job
from penstock.store.port import LocalPort
from penstock.store.reports import (
    JOB_MAX,
    BackupReport,
    CheckReport,
    ChunkSummary,
    JobSummary,
    RotationReport,
    StoreStatistics,
    check_target,
)
from penstock.store.settings import StoreSettings
from penstock.store.statistics import store_statistics
from penstock.store.table_operations import TableOperations
from penstock.store.views import StoreSubscription, StoreView


def open_store(
    path: str,
    *,
    settings: StoreSettings | None = None,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    random: Random | None = None,
    engine: EngineOpener = LmdbEngine,
    read_only: bool = False,
    consensus: MemberJournal | None = None,
    archive: str | None = None,
    begins: bool = True,
) -> Store:
    """Open the store in `path` as its owner; create it if it does not exist.

    `begins=False`: the caller calls `begin_background` when it is ready. `read_only`: open an existing store without
    changing a byte, as it is on disk now. What recovery would write stays in memory. An owner cannot open the store
    before this one is closed.
    """
    fs, clock, random = fs or OsFileSystem(), clock or SystemClock(), random or system_random()
    chosen = settings or StoreSettings()

    def opened() -> Store:
        with translate_os_errors():
            if read_only:
                return _open_read_only(str(path), chosen, fs, clock, random, archive)
            store = Store(
                str(path),
                settings=chosen,
                fs=fs,
                clock=clock,
                random=random,
                engine=engine,
                consensus=consensus,
                archive=archive,
            )
            if begins:
                store.begin_background()
            return store

    # Return this call directly: an interrupt after it would leave an open store that nobody can close.
    return threads.run_uninterrupted(opened, undo=Store.close)


def _open_read_only(  # noqa: PLR0917 - as `open_store`
    path: str, settings: StoreSettings, fs: FileSystem, clock: Clock, random: Random, archive: str | None
) -> Store:
    if not fs.exists(f"{path}/STORE"):
        raise NotFound(
            f"there is no store in {path}: give another path, or open it without read_only=True to create one"
        )
    overlay = OverlayFileSystem(fs, share_lock=OsReadLock if isinstance(fs, OsFileSystem) else None)
    settings = replace(settings, background=False, serve=False, reserve_bytes=0)
    return Store(
        path,
        settings=settings,
        fs=overlay,
        clock=clock,
        random=random,
        engine=ReadOnlyEngine,
        read_only=True,
        archive=archive,
    )


class Store(TableOperations):
    """An open store.

    >>> store = penstock.open("data/")
    >>> users, events = store.kv("users"), store.queue("events")
    >>> with store.batch(token=("loader", 17)) as batch:  # all of it or nothing, and once
    ...     epoch = batch.kv("users").put(b"ada", b"1815")
    ...     epoch = batch.queue("events").put(b"ada was added")
    >>> store.tables()
    ['events', 'users']
    >>> store.close()
    """

    metrics_url = ""  # where Prometheus finds the metrics, with `StoreSettings.metrics_port`

    # -- how far it is

    def statistics(self) -> StoreStatistics:
        """Return the state of the store now: its epochs, its LSNs and the watermarks of every open partition.

        >>> store.statistics().error
        ''
        """
        self._check_usable()
        return store_statistics(self._coordinator, self._dispatcher, self._consensus, self._clock, self._tenure)

    def subscribe(self) -> StoreSubscription:
        """Return a subscription to the store's LSN and epochs as they move.

        >>> subscription = store.subscribe()
        >>> epoch = users.put(b"ada", b"1815")
        >>> view = subscription.wait_newer(timeout_s=10.0)
        """
        return StoreSubscription(self.view, self.wait_view)

    def view(self) -> StoreView:
        """For subscriptions: return how far the store is."""
        self._check_usable()
        layers = self._coordinator.layers
        return StoreView(self._dispatcher.published, layers.durable, layers.applied)

    def wait_view(self, after: int, timeout_s: float) -> StoreView:
        """For subscriptions: wait for a view with a higher applied epoch than `after`, or raise `WaitExpired`."""
        self._check_usable()
        self._coordinator.subscribe(Epoch(after)).wait_newer(timeout_s)
        return self.view()

    # -- maintenance by hand

    def checkpoint(self) -> CheckpointReport:
        """Drop every journal segment that is no longer needed, now.

        >>> report = store.checkpoint()
        """
        self._check_writable()
        with translate_os_errors():
            return threads.run_uninterrupted(lambda: self._checkpoint.run(everything=True))

    def compact(self, name: str, *, timeout_s: float = COMPACT_WAIT_S) -> CompactionReport:
        """Merge a table into as few files as possible.

        `GateShut` if other work on the table does not end within `timeout_s` seconds, `WaitExpired` if the table is
        that long behind its writers.

        >>> report = store.compact("users", timeout_s=60.0)
        >>> report.bytes_after > 0
        True
        """
        info, timeout_s = self._info(name), seconds(timeout_s, "timeout_s", math.inf)
        self._check_writable()
        try:
            with translate_os_errors():
                return self._compact(info, timeout_s)
        except GateShut as error:
            raise GateShut(f"table {info.name} was not compacted: {error}") from error

    def _compact(self, info: TableInfo, timeout_s: float) -> CompactionReport:
        timeout_s = self._wait_for_writes(info, timeout_s)
        trees = [tree for tree, catalog in self._maintenance.trees() if catalog.db_id == info.table_id]
        cancelled: list[bool] = []
        compaction = partial(compact_trees, self._maintenance, trees, clock=self._clock, timeout_s=timeout_s)
        return threads.run_uninterrupted(
            lambda: compaction(stop=lambda: bool(cancelled)), cancel=lambda: cancelled.append(True)
        )

    def _wait_for_writes(self, info: TableInfo, timeout_s: float) -> float:
        """Open the shards of a table, and wait until they have all that was written; return the time left."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        self._port.flush(None, timeout_s)  # also what nobody waits for
        for partition in partitions_of(info):
            self._port.machine(partition, max(0.0, deadline_s - self._clock.monotonic_s()))
        return max(0.0, deadline_s - self._clock.monotonic_s())

    def jobs(self) -> list[JobSummary]:
        """Return the background work of the store: what waits, what runs, and what ended lately; the oldest first.

        >>> [job.error for job in store.jobs() if job.state == "failed"]
        []
        """
        self._check_usable()
        return read_jobs(self._manifest, self._name_of)

    def _name_of(self, table: int) -> str | None:
        info = self._port.table_by_id(table)
        return None if info is None else info.name

    def retry_job(self, job: int) -> int:
        """Enqueue a job that failed for good once more; return the number of the new job.

        >>> [store.retry_job(job.job) for job in store.jobs() if job.state == "failed"]
        []
        """
        self._check_writable()
        return retry_job(self._manifest, self._jobs, whole(job, "job", 1, JOB_MAX))

    def run_jobs(self, name: str, *, timeout_s: float = COMPACT_WAIT_S) -> int:
        """Flush a table and do the compactions that are due, now; return the number of compactions.

        `GateShut` if other work on the table does not end within `timeout_s` seconds.

        >>> compactions = store.run_jobs("users")
        """
        info, timeout_s = self._info(name), seconds(timeout_s, "timeout_s", math.inf)
        self._check_writable()

        def rest_s() -> float:
            return max(0.0, deadline_s - self._clock.monotonic_s())

        def run() -> int:
            count = 0
            for tree, catalog in self._maintenance.trees():
                if catalog.db_id == info.table_id:
                    self._maintenance.flush(tree, rest_s())
                    count += self._maintenance.compact(tree, timeout_s=rest_s())
            return count

        with translate_os_errors():
            deadline_s = self._clock.monotonic_s() + self._wait_for_writes(info, timeout_s)
            return threads.run_uninterrupted(run)

    def chunks(self, name: str) -> list[ChunkSummary]:
        """Return the files of a table that never change: of sorted rows, or a queue's that get no more messages.

        >>> disk_bytes = sum(chunk.size_bytes for chunk in store.chunks("users"))
        """
        info = self._info(name)
        summaries = read_chunks(self._manifest, info.table_id, info.name, self._maintenance.detail_of)
        with translate_os_errors():
            return summaries + read_sealed(info, self._port.machine)

    def roll_up(self, name: str) -> int:
        """Bring a rollup table up to date, in this thread; return the number of commits. The store does it by itself.

        `KindMismatch` if the table is not computed from another one.

        >>> options = penstock.SeriesOptions(rollup=penstock.Rollup(source="metrics", step_s=300))
        >>> rollup = store.series("metrics_5m", options=options)
        >>> commits = store.roll_up("metrics_5m")
        """
        info = self._info(name)
        self._port.flush(None)  # with all that was written so far
        with translate_os_errors():
            return self._derived.derive_now(info)

    def reindex(self, name: str, *, rebuild: bool = False) -> int:
        """Bring the index of a vector table up to date, in this thread; return the number of commits.

        The store does it by itself. With `rebuild` the index is dropped first and made anew from the vectors.

        >>> commits = store.reindex("documents", rebuild=True)
        """
        info = self._info(name, vector_kind())
        self._check_writable()
        with translate_os_errors():
            if rebuild:
                with self._derived.turn(info):  # a step that was planned before would bring back what is dropped
                    vector_kind().reset(self._port, info)
            self._port.flush(None)
            for partition in partitions_of(info):
                self._port.machine(partition)  # waits until it has what was written so far
            return self._derived.derive_now(info)

    def backup(
        self,
        target: str | Path,
        *,
        keep: int | None = None,
        progress: Callable[[CopyProgress], object] | None = None,
    ) -> BackupReport:
        """Copy the store as of one LSN into the folder `target`, while others write; `penstock.restore` reads it.

        A folder holds many backups of one store: files that an earlier one has are not copied again. A backup counts
        once it is whole; what an interrupt or a crash left is removed by the next one. `keep`: after this backup, the
        number of whole ones to keep; None keeps all. `progress` is called after each file, in another thread.

        >>> store.backup("backups", keep=7).number
        1
        """
        self._check_writable()
        folder, keep = check_target(target, self.path), None if keep is None else whole(keep, "keep", 1, NUMBER_MAX)
        self._port.flush(None)  # with all that was written so far
        cancelled: list[bool] = []
        backup = Backup(
            self._backup_source(),
            folder,
            progress=check_progress(progress),
            stop=lambda: bool(cancelled) or self._closed,
        )
        with translate_os_errors():
            return threads.run_uninterrupted(lambda: backup.run(keep), cancel=lambda: cancelled.append(True))

    # -- the archive

    def archive(self) -> ArchiveReport:
        """Upload what the archive lacks, and the store as of one LSN; `penstock.reattach` makes a store of it again.

        Files count as archived once their objects were read back and compared. The store does this by itself, at the
        interval of `ArchiveSettings`. `ArchiveUnavailable` if the object store does not answer: nothing is lost, what
        was uploaded is not uploaded again.

        >>> store.archive().number
        1
        """
        self._check_writable()
        self._port.flush(None)  # with all that was written so far
        with translate_os_errors():
            return threads.run_uninterrupted(self._archive.archive)

    def evict(self, name: str | None = None, *, local_bytes: int = 0) -> EvictReport:
        """Remove archived files of a table, or of all, from the folder, except `local_bytes` of each table's newest.

        Reading fetches them again, into a cache. Files that a snapshot, a backup or a compaction needs stay.

        >>> freed = store.evict("users", local_bytes=1 << 30).bytes
        """
        info = None if name is None else self._info(name)
        local_bytes = whole(local_bytes, "local_bytes", 0, SIZE_MAX)
        self._check_writable()
        with translate_os_errors():
            return threads.run_uninterrupted(lambda: self._archive.evict(info, local_bytes))

    def rehydrate(self, name: str | None = None) -> int:
        """Fetch all evicted files of a table, or of all, into the folder again; return the bytes.

        >>> store.rehydrate("users")
        0
        """
        info = None if name is None else self._info(name)
        self._check_writable()
        with translate_os_errors():
            return threads.run_uninterrupted(lambda: self._archive.rehydrate(info))

    def verify_archive(self, name: str | None = None) -> VerifyReport:
        """Read the archived objects of a table, or of all, and report those that are damaged or missing.

        Where the file is in the folder, the next `archive` uploads it again.

        >>> store.verify_archive().damage
        []
        """
        info = None if name is None else self._info(name)
        self._check_writable()
        with translate_os_errors():
            return threads.run_uninterrupted(lambda: self._archive.verify(info))

    def collect_archive(self) -> int:
        """Delete objects that nothing has named for `ArchiveSettings.grace_s` seconds; return their number.

        >>> store.collect_archive()
        0
        """
        self._check_writable()
        with translate_os_errors():
            return threads.run_uninterrupted(self._archive.collect)

    @property
    def archive_url(self) -> str | None:
        """The URL of the store's archive; None if it has none."""
        return self._archive.url

    # -- repair, checks and keys

    def recover(self) -> None:
        """Accept writes again after a failed one; the unwritten batches are written again.

        >>> store.recover()  # after `OutcomeUnknown` or `DiskFailed`, once the disk works again
        """
        self._check_writable()
        self._coordinator.recover()

    def resume(self, name: str) -> list[Trouble]:
        """Let a paused table try again; return those of its `troubles` that remain.

        >>> store.resume("users")
        []
        """
        info = self._info(name)
        self._check_writable()
        self._dispatcher.resume(info.table_id)
        self._port.applied()
        return [trouble for trouble in self.troubles() if trouble.table == info.name]

    def rotate_keys(self) -> RotationReport:
        """Wrap the keys of all encrypted tables with the newest master key, so that older ones are not needed any more.

        Rows are not encrypted again: no file of a table changes. Backups that exist still need the older keys. What
        was interrupted is finished by the next call; until then both keys are needed.

        >>> with penstock.open("secret/", keys={1: b"1" * 32, 2: b"2" * 32}, encrypt=True) as secret:
        ...     secret.rotate_keys().version
        2
        """
        self._check_writable()
        with translate_os_errors():
            return threads.run_uninterrupted(self._rotate_keys)  # an interrupt must not leave the turn taken

    def _rotate_keys(self) -> RotationReport:
        if not self._rotating.acquire(blocking=False):  # two that read different keys would undo each other
            raise Backpressure(f"another rotation of the keys of {self.path} is running: wait for its end")
        try:
            version, rewrapped = self._keys.newest(), list[str]()
            while older := self._keys.rewrapped(self._port.tables(), version):  # again: tables are created meanwhile
                for info, key in older:
                    self._port.rewrap(info, key)
                    rewrapped.append(info.name)
            self._keys.check_stored(self._port.tables())
            self._rewrite_ledger()  # leave no older form of the keys in the files of the ledger
            return RotationReport(version, rewrapped)
        finally:
            self._rotating.release()

    def _rewrite_ledger(self) -> None:
        self._maintenance.flush(self._ledger.tree)
        self._maintenance.compact(self._ledger.tree, everything=True)

    def keep_snapshot(self, name: str) -> list[int]:
        """Copy the files of a table, so that `repair` can restore it; return the LSN of each shard's copy.

        From then on the table's own log keeps what is written later. A checkpoint renews the copy when the log has
        become longer than it.

        >>> lsns = store.keep_snapshot("users")
        """
        info = self._info(name)
        self._check_writable()
        with translate_os_errors():
            return [self._snapshot_shard(partition) for partition in partitions_of(info)]

    def _snapshot_shard(self, number: PartitionId) -> int:
        partition = self._dispatcher.partition(number)
        self._dispatcher.catch_up(partition)
        return threads.run_uninterrupted(lambda: self._snapshots.save(partition).lsn)

    def drop_snapshot(self, name: str) -> None:
        """Remove the copy that `keep_snapshot` made; nothing is kept for `repair` any more.

        >>> store.drop_snapshot("users")
        """
        info = self._info(name)
        self._check_writable()
        with translate_os_errors():
            for number in partitions_of(info):
                partition = self._dispatcher.partition(number)
                threads.run_uninterrupted(partial(self._snapshots.discard, partition))

    def repair(self, name: str) -> list[Trouble]:
        """Replace the damaged files of a table by its snapshot, and apply again all that was written since.

        Nothing is lost. Snapshots and leases of the table end. Returns those of its `troubles` that remain;
        `Invalid` if `keep_snapshot` was not called before.

        >>> lsns = store.keep_snapshot("users")  # long before something breaks
        >>> store.repair("users")
        []
        """
        info = self._info(name)
        self._check_writable()
        try:
            with translate_os_errors():
                for number in partitions_of(info):
                    threads.run_uninterrupted(partial(self._snapshots.repair, number))
        finally:  # also if a later shard failed: the service read files that were replaced
            self._port.end_service(info.table_id)
        self._port.applied()
        return [trouble for trouble in self.troubles() if trouble.table == info.name]

    def check(self, *, progress: Callable[[CopyProgress], object] | None = None) -> CheckReport:
        """Read every file of the store and report what is damaged, what cannot be read, and what nothing names.

        The store stays in use meanwhile. `progress` is called after each file, in another thread.

        >>> store.check().ok
        True
        """
        self._check_usable()
        cancelled: list[bool] = []
        check = StoreCheck(
            self._backup_source(),
            self._maintenance,
            progress=check_progress(progress),
            stop=lambda: bool(cancelled) or self._closed,
        )
        with translate_os_errors():
            return threads.run_uninterrupted(lambda: self._check(check), cancel=lambda: cancelled.append(True))

    def _check(self, check: StoreCheck) -> CheckReport:
        if not self._checking.acquire(blocking=False):  # each reads every file
            raise Backpressure(f"another check of {self.path} is running: wait for its end")
        try:
            return check.run(self.troubles)
        finally:
            self._checking.release()

    def troubles(self) -> list[Trouble]:
        """Return the acknowledged writes that cannot be read, and why; an empty list if all is well.

        Entries that were set aside are not retried, because later ones were applied without them: their bytes stay in
        the folder `aside` of the store.

        >>> store.troubles()
        []
        """
        self._check_usable()
        return self._dispatcher.troubles()

    def _check_writable(self) -> None:
        self._check_usable()
        self._port._check_changes()

    # -- for the server

    @property
    def port(self) -> LocalPort:
        return self._port

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def files(self) -> FileSystem:
        return self._fs

    @property
    def durability(self) -> Durability:
        """What an acknowledged write survives."""
        return self._flusher.durability

    def check_folder(self) -> None:
        """`Closed` if the folder at this path is not the one that was opened: it was moved, deleted or replaced."""
        self._lock.check()

    def at_close(self, act: Callable[[], object]) -> None:
        """Call `act` when the store closes: after the last write, before its parts close."""
        self._parts.callback(act)

    def after_background(self, act: Callable[[], object]) -> None:
        """Call `act` when the store closes and no background work runs any more: what readers hold is released then."""
        self._readers_held.append(act)

    # -- with

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
