"""Samples of series that a program has sent, as columns.

Thread: immutable values; any thread may use a cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import Invalid
from penstock.host import threads
from penstock.series.labels import METRIC, Labels, LabelTable, check_labels
from penstock.series.rules import HELP_BYTES_MAX
from penstock.series.section import MetricMetadata, SampleBlock

SERIES_MAX = 100_000  # of one request; and of metrics that are described
SAMPLES_MAX = 1_000_000
LABEL_BYTES_MAX = 64 << 20  # of all label sets: remote write 2.0 may name one long text many times
LABEL_CELLS_MAX = 1 << 24  # series x names of labels: a label table has a code for each
CACHED_BYTES_MAX = 32 << 20  # of labels as they were sent, in a cache, and as much of label tables
CACHED_ENTRY_BYTES = 1_000  # that an entry takes besides, about
CACHED_TABLE_BYTES = 100  # of a series in a label table, about
LabelKey: TypeAlias = bytes | tuple[str, ...]  # labels as they were sent


@dataclass(frozen=True, slots=True)
class ReceivedSamples:
    """Samples, each with the number of its series, and metadata of metrics."""

    series: Sequence[Labels]  # checked, the metric as `__name__`
    index: npt.NDArray[np.int64]
    times_us: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    metadata: Sequence[MetricMetadata] = field(default=())
    left_out: int = 0  # samples of kinds that are not stored: native histograms, texts
    table: LabelTable | None = None  # of all series, if it is known: then each of them has samples

    def __len__(self) -> int:
        return len(self.values)

    def to_block(self) -> SampleBlock:
        """Return the samples for `SeriesTable.write_block`.

        Labels are not repeated for each sample: few bytes of a request could become more than fits into memory.
        """
        table, index = self.table, self.index
        if table is None:
            used, index = np.unique(self.index, return_inverse=True)
            table = LabelTable.of([self.series[number] for number in used.tolist()])
        return SampleBlock(table, index.reshape(-1).astype(np.uint32), self.times_us, self.values.view(np.uint64))


class KnownSeries:
    """Labels that were decoded and checked. In one `KnownLabels` the same labels are the same object."""

    __slots__ = ("characters", "labels", "names")

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.names, values = zip(*labels, strict=True)
        self.characters = len("".join(self.names)) + len("".join(values))


class KnownLabels:
    """Series by the form in which their labels were sent, and label tables of series that were sent together.

    Each access to a dict is atomic, so threads share it: what one of them misses is decoded again. What is put takes at
    most CACHED_BYTES_MAX bytes, whatever one request holds.
    """

    def __init__(self) -> None:
        self._by_form: dict[LabelKey, KnownSeries] = {}
        self._by_labels: dict[Labels, KnownSeries] = {}
        self._tables: dict[tuple[KnownSeries, ...], LabelTable] = {}
        self._lock = threads.lock("http.labels")
        self.room = CACHED_BYTES_MAX  # guarded by _lock; below 0: full, and no request begins with it any more
        self._table_room = CACHED_BYTES_MAX  # guarded by _lock
        self.get = self._by_form.get

    def put(self, key: LabelKey, labels: Labels, size: int) -> None:
        """Remember labels that have `size` bytes, if there is room: one request may have more than fits."""
        with self._lock:
            self.room -= 2 * size + CACHED_ENTRY_BYTES
            if self.room >= 0:
                self._by_form[key] = self._by_labels.setdefault(labels, KnownSeries(labels))

    def table(self, series: tuple[KnownSeries, ...]) -> LabelTable:
        """Return the label table of distinct series; `Invalid` if they have too many labels for one request."""
        table = self._tables.get(series)
        if table is None:
            names = {name for shape in {entry.names for entry in series} for name in shape}
            _check_labels(len(series), len(names), sum(entry.characters for entry in series))
            table = LabelTable.of([entry.labels for entry in series])
            size = table.codes.nbytes + 2 * len(table.encode()) + CACHED_TABLE_BYTES * len(series)
            with self._lock:
                if size > self._table_room:
                    self._tables, self._table_room = {}, CACHED_BYTES_MAX
                if size <= self._table_room:
                    self._table_room -= size
                    self._tables[series] = table
        return table


class LabelCache:
    """Labels that were decoded lately; emptied when full. A request uses those that are `current` when it begins."""

    def __init__(self) -> None:
        self._current = KnownLabels()

    def current(self) -> KnownLabels:
        if self._current.room < 0:
            self._current = KnownLabels()
        return self._current


def _check_labels(series: int, names: int, characters: int) -> None:
    if characters > LABEL_BYTES_MAX or series * names > LABEL_CELLS_MAX:
        raise Invalid("the series of the request have too many labels, or too long ones: send fewer at once")


class SampleCollector:
    """Collects samples, within the limits of one request."""

    def __init__(self) -> None:
        self._series: list[Labels] = []
        self._numbers: dict[Labels, int] = {}
        self._index, self._times_us, self._values = array("q"), array("q"), array("d")
        self._names: set[str] = set()
        self._label_bytes = 0
        self.metadata: dict[str, MetricMetadata] = {}
        self.left_out = 0

    def number_of(self, labels: Labels) -> int:
        """Return the number of a series, a new one for labels that are new. Requires: they were checked."""
        number = self._numbers.get(labels)
        if number is None:
            if len(self._series) == SERIES_MAX:
                raise Invalid(f"a request has at most {SERIES_MAX} series: send fewer at once")
            names, values = zip(*labels, strict=True)
            self._names.update(names)
            self._label_bytes += len("".join(names)) + len("".join(values))
            _check_labels(len(self._series) + 1, len(self._names), self._label_bytes)
            number = self._numbers[labels] = len(self._series)
            self._series.append(labels)
        return number

    def check_room(self, samples: int) -> None:
        """Refuse more samples than a request may have, before they become objects of Python."""
        if samples > SAMPLES_MAX:
            raise Invalid(f"a request has at most {SAMPLES_MAX} samples: send fewer at once")

    def add(self, labels: Mapping[str, str], time_us: int, value: float) -> None:
        """Add a sample; a label without a value is absent. `Invalid` if the labels break a rule."""
        rest = {name: text for name, text in labels.items() if name != METRIC}
        number = self.number_of(check_labels(labels.get(METRIC, ""), rest))
        self.check_room(len(self._values) + 1)
        try:
            self._times_us.append(time_us)
        except OverflowError:
            raise Invalid("a sample's time does not fit into microseconds since 1970") from None
        self._index.append(number)
        self._values.append(value)

    def describe(self, metric: str, **fields: str) -> None:
        """Add metadata of a metric; the last of a metric counts. A text that is too long is cut."""
        if len(self.metadata) == SERIES_MAX:
            raise Invalid(f"a request describes at most {SERIES_MAX} metrics: send fewer at once")
        texts = {name: text.encode()[:HELP_BYTES_MAX].decode(errors="ignore") for name, text in fields.items()}
        self.metadata[metric] = MetricMetadata(metric, **texts)

    def result(self) -> ReceivedSamples:
        """Return the samples that were added."""
        index, times = np.frombuffer(self._index, np.int64), np.frombuffer(self._times_us, np.int64)
        return self.with_samples(index, times, np.frombuffer(self._values, np.float64))

    def with_samples(
        self, index: npt.NDArray[np.int64], times_us: npt.NDArray[np.int64], values: npt.NDArray[np.float64]
    ) -> ReceivedSamples:
        """Return samples as columns, with the series and the metadata that were collected."""
        return ReceivedSamples(self._series, index, times_us, values, list(self.metadata.values()), self.left_out)
