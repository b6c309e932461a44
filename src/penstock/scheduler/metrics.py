"""A scheduler's statistics as metrics.

Thread: any. Statistics are read at each export; running tasks pay nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.host.metrics import Metrics
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.task import SchedulerStatistics

_TASK = "penstock_scheduler_task_"


def export_scheduler(scheduler: Scheduler, metrics: Metrics) -> None:
    """Add a scheduler's statistics to `metrics` while the scheduler lives."""
    reference = weakref.ref(scheduler)

    def collect() -> Iterable[Metric]:
        alive = reference()
        return [] if alive is None else families(alive.statistics())

    metrics.collect_from(collect)


def families(statistics: SchedulerStatistics) -> list[Metric]:
    """Return statistics as metric families."""
    label = ["task"]
    runs = CounterMetricFamily(_TASK + "runs", "Runs that ended, failed ones included", labels=label)
    failures = CounterMetricFamily(_TASK + "failures", "Runs that failed", labels=label)
    seconds = CounterMetricFamily(_TASK + "seconds", "Time spent in runs", labels=label)
    failing = GaugeMetricFamily(_TASK + "failures_in_row", "Failures since the last run that succeeded", labels=label)
    interval = GaugeMetricFamily(_TASK + "interval_seconds", "The interval, as adapted to the load", labels=label)
    running = GaugeMetricFamily(_TASK + "running", "1 while the task runs", labels=label)
    for name, task in statistics.tasks.items():
        runs.add_metric([name], task.runs)
        failures.add_metric([name], task.failures)
        seconds.add_metric([name], task.total_duration_s)
        failing.add_metric([name], task.failures_in_row)
        interval.add_metric([name], task.interval_s)
        running.add_metric([name], int(task.running))
    workers = GaugeMetricFamily("penstock_scheduler_workers", "Threads of the scheduler")
    workers.add_metric([], statistics.workers)
    busy = GaugeMetricFamily("penstock_scheduler_workers_busy", "Threads that run something")
    busy.add_metric([], statistics.workers_busy)
    waiting = GaugeMetricFamily("penstock_scheduler_spawned_waiting", "Spawned functions that wait for a worker")
    waiting.add_metric([], statistics.spawned_waiting)
    spawned = CounterMetricFamily("penstock_scheduler_spawned_runs", "Spawned functions that ended")
    spawned.add_metric([], statistics.spawned_runs)
    failed = CounterMetricFamily("penstock_scheduler_spawned_failures", "Spawned functions that failed")
    failed.add_metric([], statistics.spawned_failures)
    return [runs, failures, seconds, failing, interval, running, workers, busy, waiting, spawned, failed]
