"""The tasks that keep trees in shape: flush, compaction, clean-up, metrics.

The first two only look and enqueue: the work itself is a durable job, done by the `JobRunner`s from here.
A compaction runs on the `process` engine; sealed files stay in this process, whose keys they need.

Thread: the scheduler's workers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from penstock.host.metrics import Metrics
from penstock.lsm.collection import Collector
from penstock.lsm.index import Summary
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.merge import MergeInput, MergePlan, merge
from penstock.lsm.tree import Tree
from penstock.lsm.tree_jobs import Merge, Stop
from penstock.manifest.jobs import JobQueue
from penstock.manifest.records import JobKind
from penstock.scheduler.engines import Engines
from penstock.scheduler.runner import JobRunner, JobRunnerSettings
from penstock.scheduler.task import Outcome, StopSignal, TaskContext, TaskLoad
from penstock.scheduler.work import WorkCancelled

FLUSH, COMPACTION, CLEAN_UP, METRICS = "flush", "compaction", "clean-up", "metrics"
FLUSH_JOBS, COMPACTION_JOBS = "flush-jobs", "compaction-jobs"


@dataclass(frozen=True)
class TreeTask:
    """A task over all trees of a maintenance."""

    name: str
    interval_s: float
    work: Callable[[], Outcome]
    priority: int = 0
    runs_after: Collection[str] = ()

    def execute(self, context: TaskContext) -> Outcome:
        return self.work()


def tree_tasks(maintenance: Maintenance, collector: Collector) -> list[TreeTask]:
    """The four tasks, with the intervals of seed 003; flush and compaction are woken earlier when there is work."""
    turn = itertools.count()

    def trees() -> list[Tree]:
        """All of them, from another one on each time: shards of a table share a gate, and none may starve."""
        found = [tree for tree, _ in maintenance.trees()]
        first = next(turn) % len(found) if found else 0
        return found[first:] + found[:first]

    def flush() -> Outcome:
        asked = [maintenance.request_flush(tree) for tree in trees() if tree.wants_flush()]
        return TaskLoad.BUSY if any(asked) else TaskLoad.IDLE

    def compact() -> Outcome:
        asked = [maintenance.request_compaction(tree) for tree in trees()]
        return TaskLoad.BUSY if any(asked) else TaskLoad.IDLE

    def clean_up() -> Outcome:
        return TaskLoad.BUSY if collector.collect() else TaskLoad.IDLE

    def measure() -> Outcome:
        maintenance.measure()
        return None

    return [
        TreeTask(FLUSH, 1.0, flush, priority=2),
        TreeTask(COMPACTION, 10.0, compact, priority=1, runs_after=(FLUSH,)),
        TreeTask(CLEAN_UP, 30.0, clean_up, runs_after=(COMPACTION,)),
        TreeTask(METRICS, 5.0, measure),
    ]


def job_runners(maintenance: Maintenance, jobs: JobQueue) -> list[JobRunner]:
    """One runner for flushes and one for compactions: a long merge must not keep memtables waiting."""
    handle = maintenance.handle
    return [
        JobRunner(FLUSH_JOBS, jobs, {int(JobKind.FLUSH): handle}, settings=JobRunnerSettings(priority=2)),
        JobRunner(COMPACTION_JOBS, jobs, {int(JobKind.COMPACTION): handle}),
    ]


def merge_on(engines: Engines, engine: str = "process") -> Merge:
    """A merge that runs on an engine: file names go there, descriptions of files come back."""

    def merge_files(plan: MergePlan, stop: Stop) -> Sequence[Summary]:
        result: Any = engines.get(engine).submit(f"{__name__}:merge_work", asdict(plan)).wait(stop)
        return [Summary(**summary) for summary in result]

    return merge_files


def merge_work(arguments: dict[str, Any], stop: StopSignal) -> list[dict[str, Any]]:
    """A merge as work for an engine."""
    inputs = tuple(MergeInput(**source) for source in arguments.pop("inputs"))
    plan = MergePlan(inputs=inputs, **{**arguments, "chunk_ids": tuple(arguments["chunk_ids"])})
    if stop.is_set():
        raise WorkCancelled("the merge was asked to stop before it began")
    return [asdict(summary) for summary in merge(plan, stop=stop.is_set)]


def export(maintenance: Maintenance, metrics: Metrics) -> None:
    """Show the trees of a maintenance in `metrics`, for as long as it lives."""
    reference = weakref.ref(maintenance)

    def collect() -> Iterable[Metric]:
        alive = reference()
        return [] if alive is None else _families(alive)

    metrics.collect_from(collect)


def _families(maintenance: Maintenance) -> list[Metric]:
    tree_labels = ["table", "shard"]
    memtable = GaugeMetricFamily("penstock_lsm_memtable_bytes", "Rows that are not in files", labels=tree_labels)
    frozen = GaugeMetricFamily("penstock_lsm_frozen_memtables", "Memtables that wait for a flush", labels=tree_labels)
    stall = GaugeMetricFamily("penstock_lsm_stall", "0 none, 1 writers slow down, 2 writers stop", labels=tree_labels)
    snapshots = GaugeMetricFamily("penstock_lsm_snapshots", "Snapshots that are held", labels=tree_labels)
    files = GaugeMetricFamily("penstock_lsm_files", "Sstables", labels=[*tree_labels, "level"])
    size = GaugeMetricFamily("penstock_lsm_bytes", "Bytes of sstables", labels=[*tree_labels, "level"])
    for tree, catalog in maintenance.trees():
        now, place = tree.statistics(), [str(catalog.db_id), str(catalog.shard)]
        memtable.add_metric(place, now.memtable_bytes)
        frozen.add_metric(place, now.frozen_memtables)
        stall.add_metric(place, now.stall.value)
        snapshots.add_metric(place, now.snapshots)
        for level, count in enumerate(now.level_files):
            files.add_metric([*place, str(level)], count)
            size.add_metric([*place, str(level)], now.level_bytes[level])
    return [memtable, frozen, stall, snapshots, files, size]
