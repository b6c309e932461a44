"""The fleet's metrics: a series table, its rollups, and a query by labels.

The query on Spark writes a sample for each sound reading. The store computes the rollups from them in durable jobs,
which run on Spark while a driver maintains the store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import penstock

TABLE = "metrics"
ROLLUPS = {"metrics_1m": 60, "metrics_1h": 3_600}  # the seconds of a step by table
SELECTOR = 'temperature{site=~"north|east"}'
QUERY = f"""store.series("{TABLE}").aggregate('{SELECTOR}', function="avg", by=["site"])"""
ROLLUP_WAIT_S = 60.0
STOP_S = 30.0


class MetricsSummary(NamedTuple):
    """What is known of the metrics at the end of a run."""

    means: dict[str, float]  # what QUERY returns, by site
    points: dict[str, int]  # in each rollup, of all its series
    spark_jobs: int  # that Spark did for the store
    late_commits: int  # of rollups that Spark had not done in time, so that the owner did


def create(store: penstock.Store) -> None:
    """Create the tables, if they are absent."""
    samples = store.series(TABLE)
    samples.set_metadata("temperature", type="gauge", unit="celsius", help="reading of a device of the fleet")
    samples.set_metadata("load", type="gauge", help="processes that run or wait on this machine")
    for name, step_s in ROLLUPS.items():
        store.series(name, options=penstock.SeriesOptions(rollup=penstock.Rollup(source=TABLE, step_s=step_s)))


def count_samples(store: Any) -> int:
    """Count the samples of a store or a snapshot."""
    return _only(store.series(TABLE).aggregate("{}", function="count"))


def count_rolled(store: Any, name: str) -> int:
    """Count the samples that a rollup has taken in."""
    return _only(store.series(name).aggregate('{__name__=~".+:count"}', function="sum"))


def _only(table: Any) -> int:
    """Return the value of an aggregate over everything; 0 if there was nothing."""
    values: list[float] = table.column("value").to_pylist()
    return round(sum(values))


def summarize(store: penstock.Store, spark_jobs: int) -> MetricsSummary:
    """Bring the rollups up to date, and ask the metrics."""
    commits = sum(store.roll_up(name) for name in ROLLUPS)
    rows = store.series(TABLE).aggregate(SELECTOR, function="avg", by=["site"]).to_pylist()
    points = {name: _only(store.series(name).aggregate('{__name__=~".+:count"}', function="count")) for name in ROLLUPS}
    return MetricsSummary({dict(row["labels"])["site"]: row["value"] for row in rows}, points, spark_jobs, commits)


# -- in a process with Spark


@contextmanager
def maintained(spark: Any, folder: str, note: Callable[[int], None]) -> Iterator[None]:
    """Run the jobs of a store on Spark until the block ends; `note` gets the number done, after each."""
    import penstock.spark

    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            if done := penstock.spark.maintain(spark, folder, once=True, stop=stop):
                note(done)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(STOP_S)


def wait_for_rollups(folder: str) -> None:
    """Wait until the rollups have all samples, for ROLLUP_WAIT_S seconds at most."""
    deadline_s = time.monotonic() + ROLLUP_WAIT_S
    with penstock.connect(folder) as store:
        samples = count_samples(store)
        while any(count_rolled(store, name) < samples for name in ROLLUPS) and time.monotonic() < deadline_s:
            time.sleep(0.2)
