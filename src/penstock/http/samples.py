"""Samples of series that a program has sent, as columns.

Thread: immutable values; any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.errors import Invalid
from penstock.series.labels import METRIC, LabelTable, check_labels
from penstock.series.rules import HELP_BYTES_MAX
from penstock.series.section import MetricMetadata, SampleBlock

SERIES_MAX = 100_000  # of one request; and of metrics that are described
SAMPLES_MAX = 1_000_000
LABEL_BYTES_MAX = 64 << 20  # of all label sets: remote write 2.0 may name one long text many times
LABEL_CELLS_MAX = 1 << 24  # series x names of labels: a label table has a code for each


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

    def to_block(self) -> SampleBlock:
        """Return the samples for `SeriesTable.write_block`; `Invalid` if the labels of a series break a rule.

        Labels are not repeated for each sample: few bytes of a request could become more than fits into memory.
        """
        used, index = np.unique(self.index, return_inverse=True)
        label_sets = []
        for number in used.tolist():
            labels = dict(self.series[number])
            label_sets.append(check_labels(labels.pop(METRIC, ""), labels))
        table = LabelTable.of(label_sets)
        return SampleBlock(table, index.reshape(-1).astype(np.uint32), self.times_us, self.values.view(np.uint64))


class SampleCollector:
    """Collects samples, within the limits of one request."""

    def __init__(self) -> None:
        self._series: list[Mapping[str, str]] = []
        self._numbers: dict[tuple[tuple[str, str], ...], int] = {}
        self._index: list[int] = []
        self._times_us: list[int] = []
        self._values: list[float] = []
        self._names: set[str] = set()
        self._label_bytes = 0
        self.metadata: dict[str, MetricMetadata] = {}
        self.left_out = 0

    def add(self, labels: Mapping[str, str], times_us: Sequence[int], values: Sequence[float]) -> None:
        """Add samples of one series; a label without a value is absent."""
        key = tuple(sorted(pair for pair in labels.items() if pair[1]))
        number = self._numbers.get(key)
        if number is None:
            if len(self._series) == SERIES_MAX:
                raise Invalid(f"a request has at most {SERIES_MAX} series: send fewer at once")
            self._check_labels(key)
            number = self._numbers[key] = len(self._series)
            self._series.append(dict(key))
        self.check_room(len(values))
        self._index += [number] * len(values)
        self._times_us += times_us
        self._values += values

    def check_room(self, samples: int) -> None:
        """Refuse more samples than a request may have, before they become objects of Python."""
        if len(self._values) + samples > SAMPLES_MAX:
            raise Invalid(f"a request has at most {SAMPLES_MAX} samples: send fewer at once")

    def _check_labels(self, key: tuple[tuple[str, str], ...]) -> None:
        self._names.update(name for name, _ in key)
        self._label_bytes += sum(len(name) + len(value) for name, value in key)
        if self._label_bytes > LABEL_BYTES_MAX or len(self._names) * (len(self._series) + 1) > LABEL_CELLS_MAX:
            raise Invalid("the series of the request have too many labels, or too long ones: send fewer at once")

    def describe(self, metric: str, **known: str) -> None:
        """Add metadata of a metric; the last of a metric counts. A text that is too long is cut."""
        if len(self.metadata) == SERIES_MAX:
            raise Invalid(f"a request describes at most {SERIES_MAX} metrics: send fewer at once")
        texts = {name: text.encode()[:HELP_BYTES_MAX].decode(errors="ignore") for name, text in known.items()}
        self.metadata[metric] = MetricMetadata(metric, **texts)

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
