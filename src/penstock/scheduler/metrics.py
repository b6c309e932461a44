"""A scheduler's statistics as metrics.

Thread: any. Statistics are read at each export; running tasks pay nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from penstock.host.metrics import Keep, MetricFamily, Metrics, MetricSamples, counter, gauge
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.task import SchedulerStatistics, TaskStatistics

_TASK = "scheduler_task_"


def export_scheduler(scheduler: Scheduler, metrics: Metrics) -> None:
    """Add a scheduler's statistics to `metrics` while the scheduler lives."""
    reference = weakref.ref(scheduler)

    def collect() -> Iterable[MetricFamily]:
        alive = reference()
        return [] if alive is None else families(alive.statistics())

    metrics.collect_from(collect)


def families(statistics: SchedulerStatistics) -> list[MetricFamily]:
    """Return statistics as metrics. Tasks run while the store is idle, too: their counts alone cause no commit."""

    def by_task(read: Callable[[TaskStatistics], float]) -> MetricSamples:
        return {(name,): read(task) for name, task in statistics.tasks.items()}

    label, keep = ("task",), Keep.WITH_OTHERS
    runs, failures = by_task(lambda task: task.runs), by_task(lambda task: task.failures)
    seconds = by_task(lambda task: task.total_duration_s)
    failing, running = by_task(lambda task: task.failures_in_row), by_task(lambda task: int(task.running))
    interval = by_task(lambda task: task.interval_s)
    return [
        counter(f"{_TASK}runs", "Runs that ended, failed ones included", runs, label, keep=keep),
        counter(f"{_TASK}failures", "Runs that failed", failures, label, keep=keep),
        counter(f"{_TASK}seconds", "Time spent in runs", seconds, label, keep=keep),
        gauge(f"{_TASK}failures_in_row", "Failures since the last run that succeeded", failing, label),
        gauge(f"{_TASK}interval_seconds", "The interval, as adapted to the load", interval, label),
        gauge(f"{_TASK}running", "1 while the task runs", running, label),
        gauge("scheduler_workers", "Threads of the scheduler", statistics.workers),
        gauge("scheduler_workers_busy", "Threads that run something", statistics.workers_busy),
        gauge("scheduler_spawned_waiting", "Spawned functions that wait for a worker", statistics.spawned_waiting),
        counter("scheduler_spawned_runs", "Spawned functions that ended", statistics.spawned_runs, keep=keep),
        counter("scheduler_spawned_failures", "Spawned functions that failed", statistics.spawned_failures, keep=keep),
    ]
