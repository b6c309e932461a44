"""Counters, gauges and histograms, exported in Prometheus' text format.

Thread: any. Every name begins with `penstock_`. A store has its own `Metrics`, so that two stores in one process are
not added up; the process-wide registry of `prometheus_client` is not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.errors import Invalid
from penstock.host.threads import lock

_NAMESPACE = "penstock"

M = TypeVar("M", bound=MetricWrapperBase)


class Metrics:
    """The metrics of one store."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._lock = lock("metrics")
        self._made: dict[str, MetricWrapperBase] = {}  # guarded by _lock

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """Return a number that only grows; its name ends with `_total`."""
        return self._make(Counter, name, text, labels)

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        """Return a number that goes up and down."""
        return self._make(Gauge, name, text, labels)

    def histogram(self, name: str, text: str, labels: Sequence[str] = ()) -> Histogram:
        """Return a histogram of durations from 5 ms to 10 s."""
        return self._make(Histogram, name, text, labels)

    def collect_from(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Call `collect` for metrics at each export, so that nothing is counted in between."""
        self._registry.register(_Source(collect))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _make(self, kind: type[M], name: str, text: str, labels: Sequence[str]) -> M:
        """Return the metric of that name, created at the first call."""
        with self._lock:
            made = self._made.get(name)
            if made is None:
                made = kind(name, text, labels, namespace=_NAMESPACE, registry=self._registry)
                self._made[name] = made
            if not isinstance(made, kind) or tuple(made._labelnames) != tuple(labels):
                raise Invalid(f"metric {name} exists with another type or labels: give this one another name")
            return made


class _Source(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()
