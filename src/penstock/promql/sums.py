"""Sums as Prometheus makes them: by Kahan's method with Neumaier's improvement, sample after sample.

Most sums need no compensation: summed in a wider float, they are as near to the exact sum. `is_tame` says for which
sums that is certain; only the others are walked sample by sample.

Thread: pure functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.promql.limits import QueryBudget
from penstock.promql.values import F64, I64, Mask
from penstock.promql.windows import WindowWalk, reduced, window_blocks

HUGE = 1e300  # sums of larger values may overflow on the way
TOLERANCE = 1e-13  # relative error that a plain sum may have
EPSILON = float(np.finfo(np.longdouble).eps)


def kahan_add(increment: Any, total: Any, rest: Any) -> tuple[Any, Any]:
    """Add to a sum of two parts, and return its parts."""
    added = total + increment
    larger = np.abs(total) >= np.abs(increment)
    lost = np.where(larger, (total - added) + increment, (increment - added) + total)
    return added, np.where(np.isinf(added), 0.0, rest + lost)


def is_tame(total: npt.NDArray[np.longdouble], absolute: npt.NDArray[np.longdouble], counts: I64) -> Mask:
    """Return which sums in wide floats are surely as good as Kahan's, from the sums of absolute values."""
    tame: Mask = (absolute < HUGE) & (counts * EPSILON * absolute <= TOLERANCE * np.abs(total))
    zero: Mask = absolute == 0
    return tame | zero


def window_sums(values: F64, low: I64, high: I64, budget: QueryBudget) -> tuple[F64, F64]:
    """Return the two parts of each window's sum. Requires: no window is empty, and `low` ascends."""
    sums, rests, tame = np.zeros(len(low)), np.zeros(len(low)), np.zeros(len(low), np.bool_)
    for block, span in window_blocks(low, high, budget):
        wide = values[span].astype(np.longdouble)
        begin, end = low[block] - span.start, high[block] - span.start
        total, absolute = reduced(np.add, wide, begin, end), reduced(np.add, np.abs(wide), begin, end)
        sums[block], tame[block] = total, is_tame(total, absolute, end - begin)
    wild = np.flatnonzero(~tame)
    if len(wild):
        walk = WindowWalk(low[wild], high[wild], budget)
        exact, rest = np.zeros(len(wild)), np.zeros(len(wild))
        for going, indices in walk:
            exact[:going], rest[:going] = kahan_add(values[indices], exact[:going], rest[:going])
        sums[wild], rests[wild] = walk.restored(exact), walk.restored(rest)
    return sums, rests


def window_means(values: F64, low: I64, high: I64, budget: QueryBudget) -> F64:
    """Return the mean of each window. Requires: no window is empty."""
    sums, rests = window_sums(values, low, high, budget)
    counts = (high - low).astype(np.float64)
    means: F64 = sums / counts + rests / counts
    wild = np.flatnonzero(~np.isfinite(sums))
    if len(wild):
        walk = WindowWalk(low[wild], high[wild], budget)
        mean = RunningMean(len(wild))
        for going, indices in walk:
            mean.add(values[indices], slice(0, going))
        means[wild] = walk.restored(mean.result())
    return means


class RunningMean:
    """Means of many groups: of a sum while that does not overflow, then step by step."""

    def __init__(self, size: int) -> None:
        self._count = np.zeros(size)
        self._sum, self._rest, self._mean = np.zeros(size), np.zeros(size), np.zeros(size)
        self._stepwise = np.zeros(size, np.bool_)

    def add(self, values: F64, where: Any) -> None:
        """Add a value to each of some groups."""
        first = self._count[where] == 0
        self._count[where] += 1
        count, rest, before = self._count[where], self._rest[where], self._sum[where]
        added, lost = kahan_add(values, before, rest)
        overflows = np.isinf(added) & ~first & ~self._stepwise[where]
        mean = np.where(overflows, before / (count - 1), self._mean[where])
        rest_before = np.where(overflows, rest / (count - 1), rest)
        stepwise = self._stepwise[where] | overflows
        share = (count - 1) / count
        stepped, stepped_rest = kahan_add(values / count, share * mean, share * rest_before)
        self._sum[where] = np.where(stepwise, before, added)
        self._rest[where] = np.where(stepwise, stepped_rest, np.where(first, 0.0, lost))
        self._mean[where] = np.where(stepwise, stepped, self._mean[where])
        self._stepwise[where] = stepwise

    def result(self) -> F64:
        """Return the means."""
        direct = self._sum / self._count + self._rest / self._count
        return np.where(self._stepwise, self._mean + self._rest, direct)
