"""Samples of series that a program has sent, as columns.

Thread: immutable values; any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import Invalid
from penstock.series.arrow import SAMPLES
from penstock.series.labels import METRIC
from penstock.series.section import MetricMetadata

SERIES_MAX = 100_000  # of one request
SAMPLES_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class ReceivedSamples:
    """Samples, each with the number of its series, and what was said about metrics."""

    series: Sequence[Mapping[str, str]]  # label sets, the metric as `__name__`
    index: npt.NDArray[np.int64]
    times_us: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    metadata: Sequence[MetricMetadata] = field(default=())
    left_out: int = 0  # samples of kinds that are not stored: native histograms, texts

    def __len__(self) -> int:
        return len(self.values)

    def to_arrow(self) -> pa.Table:
        """Return rows for `SeriesTable.write_arrow`; `Invalid` if a series has no metric."""
        metrics = [labels.get(METRIC, "") for labels in self.series]
        if not all(metrics):
            raise Invalid(f"a series has no {METRIC}: name its metric")
        maps = [[pair for pair in labels.items() if pair[0] != METRIC] for labels in self.series]
        rows = pa.array(self.index)
        columns = [
            pa.array(metrics, pa.string()).take(rows),
            pa.array(maps, SAMPLES.field("labels").type).take(rows),
            pa.array(self.times_us).cast(SAMPLES.field("time").type),
            pa.Array.from_buffers(pa.float64(), len(self), [None, pa.py_buffer(np.ascontiguousarray(self.values))]),
        ]
        return pa.table(columns, schema=SAMPLES)


class SampleCollector:
    """Collects samples, within the limits of one request."""

    def __init__(self) -> None:
        self._series: list[Mapping[str, str]] = []
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        self._index: list[int] = []
        self._times_us: list[int] = []
        self._values: list[float] = []
        self.metadata: dict[str, MetricMetadata] = {}
        self.left_out = 0

    def add(self, labels: Mapping[str, str], times_us: Sequence[int], values: Sequence[float]) -> None:
        """Add samples of one series."""
        key = tuple(sorted(labels.items()))
        number = self._numbers.get(key)
        if number is None:
            if len(self._series) == SERIES_MAX:
                raise Invalid(f"a request has at most {SERIES_MAX} series: send fewer at once")
            number = self._numbers[key] = len(self._series)
            self._series.append(dict(key))
        if len(self._values) + len(values) > SAMPLES_MAX:
            raise Invalid(f"a request has at most {SAMPLES_MAX} samples: send fewer at once")
        self._index += [number] * len(values)
        self._times_us += times_us
        self._values += values

    def describe(self, metric: str, **known: Any) -> None:
        """Add metadata of a metric; the last of a metric counts."""
        self.metadata[metric] = MetricMetadata(metric, **known)

    def result(self) -> ReceivedSamples:
        """Return what was collected; `Invalid` if a time does not fit."""
        try:
            times = np.array(self._times_us, np.int64)
        except OverflowError:
            raise Invalid("a sample's time does not fit into microseconds since 1970") from None
        return ReceivedSamples(
            self._series,
            np.array(self._index, np.int64),
            times,
            np.array(self._values, np.float64),
            list(self.metadata.values()),
            self.left_out,
        )
