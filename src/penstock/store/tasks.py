"""The periodic tasks of an open store, beside those of its trees, derived tables and metrics.

    retry           apply what a partition could not, save the time, rebalance memory, reclaim disk space
    dropped-tables  remove the files of dropped tables, and, after the grace period, their rows in the manifest
    services        maintain what clients have open, and change feeds
    housekeeping    back up the manifest, delete old finished jobs, stale staged files and metrics of dropped tables

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
from penstock.partition.ledger_records import TableStatus
from penstock.partition.reference import Staging
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.task import Outcome, PeriodicTask, TaskLoad
from penstock.store.dropped import DroppedShards
from penstock.store.governor import MemoryGovernor
from penstock.store.port import LocalPort
from penstock.store.space import DiskSpace
from penstock.store.table_registry import DbRegistry

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
        manifest: Manifest,
        jobs: JobQueue,
        staging: Staging,
        registry: DbRegistry,
        dropped_grace_s: float,
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
        self._manifest = manifest
        self._jobs = jobs
        self._staging = staging
        self._registry = registry
        self._dropped_grace_s = dropped_grace_s
        self._save_time = save_time
        self._background = background
        self._follows = follows  # a member of a cluster that does not lead

    def all(self) -> list[PeriodicTask]:
        """Return the tasks, for a scheduler."""
        return [
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
        self._registry.follow()  # if a commit failed
        if not self._background:  # else the task `dropped-tables` does it
            self.remove_dropped()
        return TaskLoad.BUSY if behind else TaskLoad.IDLE

    def remove_dropped(self) -> Outcome:
        """Remove the files of dropped tables: alone, because these files may hang."""
        self._dropped.remove()
        for table in self._registry.lapsed(self._dropped_grace_s):
            if not self._dropped.has(table):
                self._registry.bury(table)
        return TaskLoad.IDLE

    def maintain_services(self) -> Outcome:
        """Maintain what clients have open, and change feeds."""
        port = self._port
        port.maintain()
        active = [info for info in port.tables() if info.status is TableStatus.ACTIVE]
        if self._follows:  # the leader writes records; what needs none is judged at their time, not by this clock
            ledger = self._dispatcher.ledger.tree
            maintain_feeds(active, port.machine_unless_late, lambda *_: None, lambda: ledger.time_us)
        else:
            maintain_feeds(active, port.machine_unless_late, port.submit, port.time_us)
        return None

    def clean_up(self) -> Outcome:
        """Back up the manifest, and delete old finished jobs and stale staged files."""
        self._manifest.backup()
        self._registry.find_tombstoned()
        self._registry.sweep_metrics()
        self._jobs.prune(FINISHED_JOBS_KEPT)
        if not self._follows:  # its journal may name files in entries that are not committed yet
            self._staging.purge(info.table_id for info in self._port.tables())
        return None
