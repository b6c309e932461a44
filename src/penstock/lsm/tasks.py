"""The tasks that maintain trees: flush, compaction, clean-up, metrics.

The first two only check and enqueue: the work is a durable job, run by the `JobRunner`s made here.
A compaction runs on the `process` engine. If its table is encrypted, the table's key goes with the work, through the
pipe to the worker, and nowhere else.

Thread: the scheduler's workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from penstock.archive.chunk import KeyRing
from penstock.archive.table_keys import TableKeyRing
from penstock.lsm.collection import Collector
from penstock.lsm.index import Summary
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.merge import MergeInput, MergePlan, merge
from penstock.lsm.merge_offers import as_tuples
from penstock.lsm.tree import Tree
from penstock.lsm.tree_jobs import Merge, Stop
from penstock.manifest.jobs import JobQueue
from penstock.manifest.records import JobKind
from penstock.scheduler.engines import Engines
from penstock.scheduler.runner import JobRunner, JobRunnerSettings
from penstock.scheduler.task import Outcome, PeriodicTask, StopSignal, TaskLoad
from penstock.scheduler.work import WorkCancelled

FLUSH, COMPACTION, CLEAN_UP, METRICS = "flush", "compaction", "clean-up", "metrics"
FLUSH_JOBS, COMPACTION_JOBS = "flush-jobs", "compaction-jobs"


def tree_tasks(maintenance: Maintenance, collector: Collector) -> list[PeriodicTask]:
    """Return the four tasks, with the intervals of seed 003; work wakes flush and compaction earlier."""
    turn = itertools.count()

    def trees() -> list[Tree]:
        """Return all trees, each time from another one on: shards of a table share a gate, and none may starve."""
        everyone = [tree for tree, _ in maintenance.trees()]
        first = next(turn) % len(everyone) if everyone else 0
        return everyone[first:] + everyone[:first]

    def flush() -> Outcome:
        enqueued = [maintenance.request_flush(tree) for tree in trees() if tree.wants_flush()]
        return TaskLoad.BUSY if any(enqueued) else TaskLoad.IDLE

    def compact() -> Outcome:
        enqueued = [maintenance.request_compaction(tree) for tree in trees()]
        return TaskLoad.BUSY if any(enqueued) else TaskLoad.IDLE

    def clean_up() -> Outcome:
        return TaskLoad.BUSY if collector.collect() else TaskLoad.IDLE

    def measure() -> Outcome:
        maintenance.measure()
        return None

    return [
        PeriodicTask(FLUSH, 1.0, flush, priority=2),
        PeriodicTask(COMPACTION, 10.0, compact, priority=1, runs_after=(FLUSH,)),
        PeriodicTask(CLEAN_UP, 30.0, clean_up, runs_after=(COMPACTION,)),
        PeriodicTask(METRICS, 5.0, measure),
    ]


def job_runners(maintenance: Maintenance, jobs: JobQueue) -> list[JobRunner]:
    """Return a runner for flushes and one for compactions: a long merge must not delay flushes."""
    handle = maintenance.handle
    return [
        JobRunner(FLUSH_JOBS, jobs, {int(JobKind.FLUSH): handle}, settings=JobRunnerSettings(priority=2)),
        JobRunner(COMPACTION_JOBS, jobs, {int(JobKind.COMPACTION): handle}),
    ]


def merge_on(engines: Engines, engine: str = "process") -> Merge:
    """Return a merge that runs on an engine: it sends file names and receives summaries."""

    def merge_files(plan: MergePlan, stop: Stop, keys: KeyRing | None = None) -> Sequence[Summary]:
        arguments = asdict(plan)
        if keys is not None:
            arguments["key"] = keys.key(keys.current())
        result: Any = engines.get(engine).submit(f"{__name__}:merge_work", arguments).wait(stop)
        return [Summary(**summary) for summary in result]

    return merge_files


def merge_work(arguments: dict[str, Any], stop: StopSignal) -> list[dict[str, Any]]:
    """Run a merge as work for an engine."""
    inputs, key = tuple(MergeInput(**source) for source in arguments.pop("inputs")), arguments.pop("key", None)
    plan = MergePlan(inputs=inputs, **as_tuples(arguments, "chunk_ids", "sealing"))
    if stop.is_set():
        raise WorkCancelled("the merge was asked to stop before it began")
    keys = None if key is None else TableKeyRing(lambda table_id: bytes(key), plan.table_id)
    return [asdict(summary) for summary in merge(plan, keys=keys, stop=stop.is_set)]
