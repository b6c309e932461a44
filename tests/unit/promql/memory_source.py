"""The dataset as a source of samples in memory. It leaves out every sample that a source may leave out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from promql_dataset import Series, dataset

from penstock.promql import LabelMatcher, QueryBudget, SelectedSamples, StepGrid
from penstock.promql.labels import LabelMatrix
from penstock.series.samples import SampleSteps
from penstock.series.selectors import Matcher


class MemorySource:
    def __init__(self, series: Sequence[Series] | None = None) -> None:
        self._series = dataset() if series is None else series
        self._columns = [
            (np.array(entry.times_ms, np.int64) * 1_000, np.array(entry.values, np.float64)) for entry in self._series
        ]

    def select(
        self,
        matchers: Sequence[LabelMatcher],
        start_us: int,
        end_us: int,
        budget: QueryBudget,
        steps: StepGrid | None = None,
    ) -> SelectedSamples:
        tests = [Matcher(m.name, m.operator, m.value) for m in matchers]
        labels, starts = [], [0]
        times: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = [np.zeros(0, np.int64)]
        values: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = [np.zeros(0)]
        for series, (moments, numbers) in zip(self._series, self._columns, strict=True):
            if not all(test.matches(series.labels.get(test.name, "")) for test in tests):
                continue
            low, high = np.searchsorted(moments, start_us), np.searchsorted(moments, end_us, side="right")
            if low < high:
                indices = np.arange(low, high)
                if steps is not None:
                    indices = indices[SampleSteps(steps.start_us, steps.step_us).last(moments[indices])]
                labels.append(series.labels)
                times.append(moments[indices])
                values.append(numbers[indices])
                starts.append(starts[-1] + len(indices))
        budget.check_series(len(labels))
        budget.add_samples(starts[-1])
        return SelectedSamples(
            LabelMatrix.of(labels), np.array(starts, np.int64), np.concatenate(times), np.concatenate(values)
        )
