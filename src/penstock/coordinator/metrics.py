"""A coordinator's statistics as metrics.

Thread: any. The statistics are read when the metrics are exported; writes pay nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from penstock.coordinator.coordinator import WriteCoordinator
from penstock.coordinator.settings import CoordinatorStatistics, State, Trigger
from penstock.host.metrics import MetricFamily, Metrics, MetricSamples, counter, gauge

_PREFIX = "coordinator_"


def export(coordinator: WriteCoordinator[Any, Any, Any], metrics: Metrics) -> None:
    """Export a coordinator to `metrics`, for as long as it lives."""
    reference = weakref.ref(coordinator)

    def collect() -> Iterable[MetricFamily]:
        alive = reference()
        return [] if alive is None else families(alive.statistics())

    metrics.collect_from(collect)


def families(statistics: CoordinatorStatistics) -> list[MetricFamily]:
    """Return statistics as metrics."""
    flushes: MetricSamples = {(trigger.value,): statistics.flushes.get(trigger, 0) for trigger in Trigger}
    counters = {
        "writes": ("Writes taken", statistics.writes),
        "written_bytes": ("Bytes of the writes taken, as limits count them", statistics.written_bytes),
        "refused_writes": ("Writes refused for want of room", statistics.refused_writes),
        "waited_writes": ("Writes that had to wait for room", statistics.waited_writes),
        "flush_failures": ("Flushes that failed", statistics.flush_failures),
        "apply_failures": ("Applies that failed", statistics.apply_failures),
        "flush_seconds": ("Time spent in flushes that succeeded", statistics.flush_s_total),
    }
    gauges = {
        "pending_bytes": ("Bytes that wait for a flush", statistics.pending_bytes),
        "in_flight_bytes": ("Bytes in a flush, or durable and not yet applied", statistics.in_flight_bytes),
        "layers": ("Deltas that readers look through", statistics.layers),
        "waiters": ("Threads that wait for an epoch", statistics.waiters),
        "waiting_writes": ("Writes that wait for room", statistics.waiting_writes),
        "failed": ("1 after a failure, until it is recovered", int(statistics.state is State.FAILED)),
    }
    return [
        counter(f"{_PREFIX}flushes", "Flushes that succeeded, by their cause", flushes, ("trigger",)),
        *(counter(_PREFIX + name, text, value) for name, (text, value) in counters.items()),
        *(gauge(_PREFIX + name, text, value) for name, (text, value) in gauges.items()),
    ]
