"""Where samples come from: anything that offers the series of matchers in a range of time, as columns.

Thread: a source is used by one query at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from penstock.promql.labels import LabelMatrix
from penstock.promql.limits import QueryBudget
from penstock.promql.tree import LabelMatcher
from penstock.promql.values import F64, I64, StepGrid

STALE_BITS = np.uint64(0x7FF0000000000002)  # a NaN: the series ended here


@dataclass(frozen=True, slots=True)
class SelectedSamples:
    """Samples of series: those of series n are `starts[n]` to `starts[n + 1]`, in the order of time."""

    labels: LabelMatrix
    starts: I64
    times: I64
    values: F64

    def without_stale(self) -> SelectedSamples:
        """Return the samples that are not staleness markers."""
        fresh = self.values.view(np.uint64) != STALE_BITS
        if fresh.all():
            return self
        before = np.concatenate(([0], np.cumsum(fresh, dtype=np.int64)))
        return SelectedSamples(self.labels, before[self.starts], self.times[fresh], self.values[fresh])


class SampleSource(Protocol):
    """A store of samples, read at one moment."""

    def select(
        self,
        matchers: Sequence[LabelMatcher],
        start_us: int,
        end_us: int,
        budget: QueryBudget,
        steps: StepGrid | None = None,
    ) -> SelectedSamples:
        """Return the samples of all series that match, from `start_us` to `end_us`, both included.

        With `steps`, only the last sample at or before each step is needed: a source may leave out the others.
        """
