"""Functions of all samples in a window: the family *_over_time.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.promql.rates import Outcome
from penstock.promql.sums import EPSILON, HUGE, kahan_add, window_means, window_sums
from penstock.promql.values import F64, I64
from penstock.promql.windows import RangeWindows, WindowWalk, nan_first, reduced, sorted_windows, window_blocks

VARIANCE_TOLERANCE = 1e-12  # relative error that a variance from plain sums may have


def _filled(windows: RangeWindows, compute: Callable[[I64, I64], F64]) -> Outcome:
    """Apply a function of (low, high) to the windows that have samples."""
    present = windows.lengths > 0
    values = np.zeros(present.shape)
    values[present] = compute(windows.low[present], windows.high[present])
    return values, present


def sum_over_time(windows: RangeWindows) -> Outcome:
    """Return the sum of each window."""

    def sums(low: I64, high: I64) -> F64:
        total, rest = window_sums(windows.values, low, high, windows.budget)
        return np.where(np.isinf(total), total, total + rest)

    return _filled(windows, sums)


def avg_over_time(windows: RangeWindows) -> Outcome:
    """Return the mean of each window."""
    return _filled(windows, lambda low, high: window_means(windows.values, low, high, windows.budget))


def count_over_time(windows: RangeWindows) -> Outcome:
    """Return the number of samples of each window."""
    return windows.lengths.astype(np.float64), windows.lengths > 0


def present_over_time(windows: RangeWindows) -> Outcome:
    """Return 1 for each window with samples."""
    return np.ones(windows.low.shape), windows.lengths > 0


def min_over_time(windows: RangeWindows) -> Outcome:
    """Return the least value of each window; NaN only if there is no other."""
    return _filled(windows, lambda low, high: reduced(np.fmin, windows.values, low, high))


def max_over_time(windows: RangeWindows) -> Outcome:
    """Return the greatest value of each window; NaN only if there is no other."""
    return _filled(windows, lambda low, high: reduced(np.fmax, windows.values, low, high))


def first_over_time(windows: RangeWindows) -> Outcome:
    """Return the first value of each window."""
    return windows.first()[1], windows.lengths > 0


def last_over_time(windows: RangeWindows) -> Outcome:
    """Return the last value of each window."""
    return windows.last()[1], windows.lengths > 0


def ts_of_first_over_time(windows: RangeWindows) -> Outcome:
    """Return the time of the first sample of each window, in seconds."""
    return windows.first()[0] / 1e6, windows.lengths > 0


def ts_of_last_over_time(windows: RangeWindows) -> Outcome:
    """Return the time of the last sample of each window, in seconds."""
    return windows.last()[0] / 1e6, windows.lengths > 0


def ts_of_max_over_time(windows: RangeWindows) -> Outcome:
    """Return the time of the last of the greatest values of each window, in seconds."""
    return _time_of(windows, np.greater_equal)


def ts_of_min_over_time(windows: RangeWindows) -> Outcome:
    """Return the time of the last of the least values of each window, in seconds."""
    return _time_of(windows, np.less_equal)


def _time_of(windows: RangeWindows, beats: Callable[[F64, F64], F64]) -> Outcome:
    def times(low: I64, high: I64) -> F64:
        walk = WindowWalk(low, high, windows.budget)
        best, at = windows.values[low][walk.order], windows.times[low][walk.order].astype(np.float64)
        for going, indices in walk:
            values = windows.values[indices]
            better = beats(values, best[:going]) | np.isnan(best[:going])
            best[:going] = np.where(better, values, best[:going])
            at[:going] = np.where(better, windows.times[indices], at[:going])
        return walk.restored(at) / 1e6

    return _filled(windows, times)


def stdvar_over_time(windows: RangeWindows) -> Outcome:
    """Return the variance of each window."""
    return _filled(windows, lambda low, high: _variances(windows, low, high))


def stddev_over_time(windows: RangeWindows) -> Outcome:
    """Return the standard deviation of each window."""
    return _filled(windows, lambda low, high: np.sqrt(_variances(windows, low, high)))


def _variances(windows: RangeWindows, low: I64, high: I64) -> F64:
    """Return variances from sums of squares where these are exact enough, else as Prometheus does it."""
    values, counts = windows.values, high - low
    variances, good = np.zeros(len(low)), np.zeros(len(low), np.bool_)
    for block, span in window_blocks(low, high, windows.budget):
        origin = values[span.start]  # distances from some value of about this size have smaller squares
        wide = values[span].astype(np.longdouble) - (origin if np.isfinite(origin) else 0.0)
        begin, end, count = low[block] - span.start, high[block] - span.start, counts[block]
        total, squares = reduced(np.add, wide, begin, end), reduced(np.add, wide * wide, begin, end)
        spread = squares - total * total / count
        variances[block] = spread / count
        good[block] = (count * EPSILON * squares <= VARIANCE_TOLERANCE * spread) & (squares < HUGE)
    wild = np.flatnonzero(~good)
    if len(wild):
        walk = WindowWalk(low[wild], high[wild], windows.budget)
        size = len(wild)
        mean, mean_rest, spread_sum, spread_rest = (np.zeros(size) for _ in range(4))
        for number, (going, indices) in enumerate(walk, 1):
            active = slice(0, going)
            off = values[indices] - (mean[active] + mean_rest[active])
            mean[active], mean_rest[active] = kahan_add(off / number, mean[active], mean_rest[active])
            after = values[indices] - (mean[active] + mean_rest[active])
            spread_sum[active], spread_rest[active] = kahan_add(off * after, spread_sum[active], spread_rest[active])
        variances[wild] = walk.restored(spread_sum + spread_rest) / counts[wild]
    return variances


def quantile_over_time(windows: RangeWindows, quantiles: F64) -> Outcome:
    """Return a quantile of each window; `quantiles` has one for each step."""
    window_quantiles = np.broadcast_to(quantiles, windows.low.shape)[windows.lengths > 0]

    def compute(low: I64, high: I64) -> F64:
        values = np.empty(len(low))
        for batch, ordered, lengths in sorted_windows(windows.values, low, high, windows.budget):
            values[batch] = quantiles_of(ordered, lengths, window_quantiles[batch])
        return values

    return _filled(windows, compute)


def mad_over_time(windows: RangeWindows) -> Outcome:
    """Return the median of the distances from the median of each window."""

    def distances(low: I64, high: I64) -> F64:
        values, half = np.empty(len(low)), np.array(0.5)
        for batch, ordered, lengths in sorted_windows(windows.values, low, high, windows.budget):
            median = quantiles_of(ordered, lengths, np.broadcast_to(half, len(batch)))
            inside = np.arange(ordered.shape[1]) < lengths[:, None]
            far = np.where(inside, np.abs(ordered - median[:, None]), np.inf)
            values[batch] = quantiles_of(nan_first(far, inside), lengths, np.broadcast_to(half, len(batch)))
        return values

    return _filled(windows, distances)


def quantiles_of(ordered: F64, lengths: I64, quantiles: F64) -> F64:
    """Return a quantile of each row's first `lengths` values, interpolated between the two nearest."""
    rank = np.where(np.isnan(quantiles), 0.0, np.clip(quantiles, 0.0, 1.0)) * (lengths - 1)
    lower = np.maximum(np.floor(rank), 0.0)
    upper = np.minimum(lengths - 1, lower + 1)
    weight = rank - np.floor(rank)
    rows = np.arange(len(ordered))
    below, above = ordered[rows, lower.astype(np.intp)], ordered[rows, upper.astype(np.intp)]
    values = below * (1 - weight) + above * weight
    values = np.where(quantiles < 0, -np.inf, np.where(quantiles > 1, np.inf, values))
    return np.where(np.isnan(quantiles), np.nan, values)
