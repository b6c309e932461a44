"""A tree on a real disk with LMDB, scheduler and worker processes; run as a program it compacts until it is killed."""

from __future__ import annotations

import random
import sys

from penstock.host.clock import SystemClock
from penstock.host.file_operations import make_dirs
from penstock.host.os_files import OsFileSystem
from penstock.lsm.collection import CollectionSettings, Collector
from penstock.lsm.compaction import LevelLimits
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.memtable import Edit
from penstock.lsm.rows import NEVER, PUT, Row
from penstock.lsm.tasks import COMPACTION_JOBS, FLUSH_JOBS, job_runners, merge_on, tree_tasks
from penstock.lsm.tree_settings import TreeSettings
from penstock.manifest.jobs import JobQueue
from penstock.manifest.manifest import Manifest
from penstock.scheduler.engines import Engines
from penstock.scheduler.scheduler import Scheduler

SETTINGS = TreeSettings(memtable_bytes=200_000, limits=LevelLimits(level0_runs=3, level1_bytes=4_000_000))


class RealShard:
    """Everything a tree needs, as a store will wire it."""

    def __init__(self, root: str, *, background: bool = True, grace_s: float = 0.0) -> None:
        fs, clock = OsFileSystem(), SystemClock()
        self._background = background
        make_dirs(fs, root)
        self.manifest = Manifest.open(f"{root}/manifest", fs=fs, clock=clock)
        self.jobs = JobQueue(self.manifest, random=random.Random(1))
        self.engines = Engines()
        self.scheduler = Scheduler()
        self.maintenance = Maintenance(
            self.manifest,
            self.jobs,
            fs=fs,
            root=root,
            store=bytes(16),
            clock=clock,
            merge_files=merge_on(self.engines),
            wake=self._wake,
        )
        settings = CollectionSettings(grace_s=grace_s)
        self.collector = Collector(self.maintenance, self.manifest, fs=fs, root=root, clock=clock, settings=settings)
        self.tree = self.maintenance.open_tree(1, 0, "tables/1", SETTINGS)
        self.repairs = self.jobs.compensate_orphans()
        if background:
            for task in tree_tasks(self.maintenance, self.collector):
                self.scheduler.register(task)
            for runner in job_runners(self.maintenance, self.jobs):
                self.scheduler.register(runner)
            self.scheduler.start()

    def _wake(self, task: str) -> None:
        if not self._background:
            return
        self.scheduler.wake(task)
        self.scheduler.wake(FLUSH_JOBS)
        self.scheduler.wake(COMPACTION_JOBS)

    def close(self) -> None:
        self.scheduler.shutdown(60)
        self.engines.shutdown(10)
        self.manifest.close()


def rows_of(lsn: int) -> dict[bytes, Row]:
    """What record `lsn` writes: any reader can tell from a value which record it came from."""
    return {
        b"key%05d" % (n * 7919 % 20_000): (PUT, b"%010d" % lsn * 8, lsn, NEVER) for n in range(lsn * 50, lsn * 50 + 50)
    }


def main(root: str) -> None:
    shard = RealShard(root)
    lsn = shard.tree.stored
    print("stored", lsn, flush=True)
    while True:
        lsn += 1
        shard.tree.admit()
        shard.tree.apply(Edit(lsn=lsn, time_us=lsn, rows=rows_of(lsn)))
        if lsn % 20 == 0:
            print("stored", shard.tree.stored, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
