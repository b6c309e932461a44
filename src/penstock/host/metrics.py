"""Metrics: numbers that the parts of a store keep, read when they are exported in Prometheus' text format.

A part keeps plain numbers and histograms where it works. A source reads them at each export, so nothing is paid
between exports. Every name begins with `penstock_`. A store has its own `Metrics`: two stores in one process are not
added up.

Thread: any. A `Histogram` is observed by one thread at a time; any thread reads it.
Invariant: labels are bounded: names of tables, shards, tasks, some consumers and the like, never keys.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from penstock.host.threads import lock

PREFIX = "penstock_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Upper limits of the buckets of durations. They never change: the counts of a kept histogram outlive the process.
SECONDS = (*(float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 2.5, 5)), 10.0)

MetricKind = Literal["counter", "gauge", "histogram"]


class Keep(Enum):
    """Whether the counts of a metric outlive the process."""

    ALWAYS = "always"  # a change is committed soon
    WITH_OTHERS = "with others"  # a change is committed together with that of another metric
    ELSEWHERE = "elsewhere"  # the counts are those of all openings already


class Distribution(NamedTuple):
    """The observations of a histogram at one moment."""

    bounds: Sequence[float]
    counts: tuple[int, ...]  # by bucket; the last one has no upper limit
    sum: float
    min: float
    max: float

    @property
    def total(self) -> int:
        return sum(self.counts)


MetricValue: TypeAlias = float | Distribution
MetricSamples: TypeAlias = dict[tuple[str, ...], MetricValue]  # by the values of the labels


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """All samples of one metric. The name of a counter ends with `_total`."""

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...]
    samples: MetricSamples
    keep: Keep = Keep.ALWAYS  # gauges are never kept

    def of_tables(self, allowed: Callable[[str], bool]) -> MetricFamily:
        """Return the family without the samples of tables that are not allowed."""
        if "table" not in self.labels:
            return self
        at = self.labels.index("table")
        return replace(self, samples={labels: value for labels, value in self.samples.items() if allowed(labels[at])})


def counter(
    name: str, text: str, value: float | MetricSamples, labels: tuple[str, ...] = (), *, keep: Keep = Keep.ALWAYS
) -> MetricFamily:
    """Return a metric that only grows: one number, or one for each value of its labels."""
    return MetricFamily(f"{name}_total", "counter", text, labels, _samples(value), keep)


def gauge(name: str, text: str, value: float | MetricSamples, labels: tuple[str, ...] = ()) -> MetricFamily:
    """Return a metric that goes up and down."""
    return MetricFamily(name, "gauge", text, labels, _samples(value))


def histogram(
    name: str, text: str, value: Distribution | MetricSamples, labels: tuple[str, ...] = (), *, keep: Keep = Keep.ALWAYS
) -> MetricFamily:
    """Return a metric that counts observations by their size."""
    samples: MetricSamples = {(): value} if isinstance(value, Distribution) else value
    return MetricFamily(name, "histogram", text, labels, samples, keep)


def _samples(value: float | MetricSamples) -> MetricSamples:
    return value if isinstance(value, dict) else {(): value}


class Histogram:
    """Counts observations by their size.

    A hot path calls `note`, which is as cheap as a call can be, and `count_noted` from time to time: until then notes
    take memory.
    """

    __slots__ = ("_bounds", "_counts", "_lock", "_max", "_min", "_noted", "_sum", "note")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._min, self._max = math.inf, -math.inf
        self._noted: list[float] = []
        self.note = self._noted.append
        self._lock = lock("host.histogram")  # for those that count notes

    def count_noted(self) -> None:
        """Count what was noted so far."""
        with self._lock:
            noted = self._noted[:]
            del self._noted[: len(noted)]  # first: an interrupt may lose some, and counts none twice
            for value in noted:
                self.observe(value)

    def observe(self, value: float) -> None:
        if value < self._min:  # noqa: PLR1730 - min() is a call, and this is every flush
            self._min = value
        if value > self._max:  # noqa: PLR1730
            self._max = value
        self._sum += value
        self._counts[bisect_left(self._bounds, value)] += 1  # last: an interrupt leaves no count without its limits

    def read(self) -> Distribution:
        """Return the observations so far; one that is under way may be counted in part."""
        self.count_noted()
        return Distribution(self._bounds, tuple(self._counts), self._sum, self._min, self._max)


def bucket_counts(value: float, bounds: Sequence[float] = SECONDS) -> tuple[int, ...]:
    """Return the counts of a histogram with one observation."""
    bucket = bisect_left(bounds, value)
    return tuple(int(number == bucket) for number in range(len(bounds) + 1))


MetricSource: TypeAlias = Callable[[], Iterable[MetricFamily]]


class Metrics:
    """The metrics of one store.

    >>> "penstock_coordinator_writes_total" in store.metrics.exposition()
    True
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check  # raises if the metrics cannot be read any more
        self._lock = lock("metrics")
        self._sources: tuple[MetricSource, ...] = ()  # guarded by _lock; replaced whole
        self.with_earlier: Callable[[Iterable[MetricFamily]], list[MetricFamily]] = list

    def collect_from(self, collect: MetricSource) -> None:
        """Call `collect` for metrics at each export."""
        with self._lock:
            self._sources = (*self._sources, collect)

    def families(self) -> list[MetricFamily]:
        """Return all metrics, counted since the store was opened."""
        return [family for collect in self._sources for family in collect()]

    def read(self, allowed: Callable[[str], bool] | None = None) -> list[MetricFamily]:
        """Return all metrics, with what earlier openings counted; of `allowed` tables only, if that is given."""
        self._check()
        families = self.with_earlier(self.families())
        return families if allowed is None else [family.of_tables(allowed) for family in families]

    def exposition(self) -> str:
        """Return all metrics in Prometheus' text format.

        >>> store.metrics.exposition().startswith("# HELP penstock_")
        True
        """
        return exposition(self.read())


def exposition(families: Iterable[MetricFamily]) -> str:
    """Return metrics in Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for family in families:
        name = PREFIX + family.name
        lines.append(f"# HELP {name} {_escaped(family.text)}")
        lines.append(f"# TYPE {name} {family.kind}")
        for values, value in family.samples.items():
            labels = dict(zip(family.labels, values, strict=True))
            if isinstance(value, Distribution):
                lines += _histogram_lines(name, labels, value)
            else:
                lines.append(_line(name, labels, value))
    return "\n".join(lines) + "\n" if lines else ""


def _histogram_lines(name: str, labels: Mapping[str, str], value: Distribution) -> list[str]:
    lines, total = [], 0
    for bound, count in zip((*value.bounds, math.inf), value.counts, strict=True):
        total += count
        lines.append(_line(f"{name}_bucket", {**labels, "le": _number(float(bound))}, total))
    return [*lines, _line(f"{name}_sum", labels, value.sum), _line(f"{name}_count", labels, total)]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    if labels:
        pairs = ",".join(f'{label}="{_escaped(text, quotes=True)}"' for label, text in labels.items())
        name = f"{name}{{{pairs}}}"
    return f"{name} {_number(value)}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text
