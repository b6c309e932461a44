"""The periodic tasks of an open store, beside those of its trees, derived tables and metrics.

    checkpoint      drop the part of the journal that is stored
    retry           apply what a partition could not, save the time, rebalance memory, reclaim disk space
    dropped-tables  remove the files of dropped tables
    services        maintain what clients have open, and change feeds
    housekeeping    back up the manifest, delete old finished jobs and stale staged files

Thread: the scheduler's; of a store without background threads, the caller's. A task does not run twice at a time.
Invariant: a task that fails or runs once more loses nothing: the next run does its work.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import Closed
from penstock.feeds import maintain_feeds
from penstock.host.files import Lock
from penstock.manifest.jobs import JobQueue
from penstock.manifest.manifest import Manifest
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.reference import Staging
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.task import Outcome, PeriodicTask, TaskLoad
from penstock.store.dropped import DroppedShards
from penstock.store.governor import MemoryGovernor
from penstock.store.journal_trimming import JournalTrimmer
from penstock.store.port import LocalPort
from penstock.store.space import DiskSpace

FINISHED_JOBS_KEPT = 1_000


class StoreTasks:
    """The work of each task."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        lock: Lock,
        dispatcher: Dispatcher,
        port: LocalPort,
        governor: MemoryGovernor,
        space: DiskSpace,
        dropped: DroppedShards,
        trimmer: JournalTrimmer,
        manifest: Manifest,
        jobs: JobQueue,
        staging: Staging,
        save_time: Callable[[], None],
        background: bool,
        follows: bool,
    ) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._dispatcher = dispatcher
        self._port = port
        self._governor = governor
        self._space = space
        self._dropped = dropped
        self._trimmer = trimmer
        self._manifest = manifest
        self._jobs = jobs
        self._staging = staging
        self._save_time = save_time
        self._background = background
        self._follows = follows  # a member of a cluster that does not lead

    def all(self) -> list[PeriodicTask]:
        """Return the tasks, for a scheduler."""
        return [
            PeriodicTask("checkpoint", 30.0, self._trimmer.run, runs_after=("flush",)),
            PeriodicTask("retry", 1.0, self.retry),
            PeriodicTask("dropped-tables", 1.0, self.remove_dropped),
            PeriodicTask("services", 10.0, self.maintain_services),
            PeriodicTask("housekeeping", 600.0, self.clean_up),
        ]

    def retry(self) -> Outcome:
        """Apply what a partition could not, and whatever else is due each second."""
        try:
            self._lock.check()
        except Closed:  # the folder is gone: whatever a task does would fail
            self._scheduler.stop_tasks()
            raise
        behind = self._dispatcher.retry()
        self._port.applied()
        self._save_time()
        self._governor.rebalance()
        self._space.reclaim()
        if not self._background:  # else the task `dropped-tables` does it
            self._dropped.remove()
        return TaskLoad.BUSY if behind else TaskLoad.IDLE

    def remove_dropped(self) -> Outcome:
        """Remove the files of dropped tables: alone, because these files may hang."""
        self._dropped.remove()
        return TaskLoad.IDLE

    def maintain_services(self) -> Outcome:
        """Maintain what clients have open, and change feeds."""
        port = self._port
        port.maintain()
        if not self._follows:  # else this is the leader's: what is trimmed must not depend on the clock of a follower
            maintain_feeds(port.tables(), port.machine_unless_late, port.submit, port.time_us)
        return None

    def clean_up(self) -> Outcome:
        """Back up the manifest, and delete old finished jobs and stale staged files."""
        self._manifest.backup()
        self._jobs.prune(FINISHED_JOBS_KEPT)
        self._staging.purge(info.table_id for info in self._port.tables())
        return None
