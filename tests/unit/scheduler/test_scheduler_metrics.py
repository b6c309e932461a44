"""A scheduler's statistics as Prometheus sees them."""

from __future__ import annotations

import gc

from prometheus_client.parser import text_string_to_metric_families

from penstock.host.metrics import Metrics
from penstock.scheduler.metrics import export_scheduler
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.task import Outcome, TaskContext, TaskLoad
from penstock.testing import FakeClock


class Task:
    priority = 0
    runs_after = ()
    interval_s = 4.0

    def __init__(self, name: str, clock: FakeClock, *, fails: bool = False) -> None:
        self.name = name
        self._clock = clock
        self._fails = fails

    def execute(self, context: TaskContext) -> Outcome:
        self._clock.advance(0.5)
        if self._fails:
            raise OSError("no luck")
        return TaskLoad.BUSY


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(metrics.exposition())
    return {
        (sample.name, sample.labels.get("task", "")): sample.value for family in families for sample in family.samples
    }


def test_statistics_are_exported_when_someone_looks() -> None:
    clock = FakeClock()
    scheduler = Scheduler(clock=clock)
    metrics = Metrics()
    export_scheduler(scheduler, metrics)
    scheduler.register(Task("flush", clock)).register(Task("merge", clock, fails=True))
    scheduler.spawn(lambda: None)
    scheduler.run_pending()
    scheduler.trigger("flush")
    scheduler.run_pending()
    values = samples(metrics)
    task = "penstock_scheduler_task_"
    assert values[task + "runs_total", "flush"] == 2
    assert values[task + "failures_total", "flush"] == 0
    assert values[task + "seconds_total", "flush"] == 1.0
    assert values[task + "interval_seconds", "flush"] == 1.0
    assert values[task + "running", "flush"] == 0
    assert values[task + "failures_total", "merge"] == values[task + "failures_in_row", "merge"] == 1
    assert values["penstock_scheduler_spawned_runs_total", ""] == 1
    assert values["penstock_scheduler_workers", ""] == 4
    assert all(name.startswith("penstock_") for name, _ in values)


def test_metrics_do_not_keep_a_scheduler_alive() -> None:
    metrics = Metrics()
    scheduler = Scheduler()
    export_scheduler(scheduler, metrics)
    assert samples(metrics)
    del scheduler
    gc.collect()
    assert samples(metrics) == {}
