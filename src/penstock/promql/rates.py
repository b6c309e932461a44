"""How fast samples rise: rate, increase, delta, irate, idelta; and how often they fall or change.

Thread: pure functions.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from penstock.promql.values import F64, I64, Mask
from penstock.promql.windows import RangeWindows

Outcome: TypeAlias = tuple[F64, Mask]  # a value for each series and step, and where there is one
NEAR_GAPS = 1.1  # a border as near as this many average gaps is where the series goes on


def _falls(windows: RangeWindows) -> I64:
    """Return the places of samples that are less than the one before."""
    return np.flatnonzero(windows.values[1:] < windows.values[:-1]) + 1


def _count_between(places: I64, windows: RangeWindows) -> tuple[I64, I64]:
    """Return which of some ascending places lie after each window's first sample, as a range of them."""
    return np.searchsorted(places, windows.low + 1), np.searchsorted(places, windows.high)


def _rise(windows: RangeWindows, *, counter: bool) -> F64:
    """Return the last value less the first; a counter's falls are resets to zero, and what it had before is added."""
    rise: F64 = windows.last()[1] - windows.first()[1]
    if not counter:
        return rise
    falls = _falls(windows)
    first, end = _count_between(falls, windows)
    most = int((end - first).max(initial=0))
    before = windows.values[falls - 1] if len(falls) else np.zeros(1)
    for number in range(most):
        windows.budget.check()
        place = first + number
        rise = np.where(place < end, rise + before[np.minimum(place, len(before) - 1)], rise)
    return rise


def extrapolated(windows: RangeWindows, *, counter: bool, per_second: bool) -> Outcome:
    """Return the rise in each window, extended to its borders as far as the samples make that likely."""
    present = windows.lengths > 1
    rise = _rise(windows, counter=counter)
    (first_us, first), (last_us, _) = windows.first(), windows.last()
    sampled = (last_us - first_us) / 1e6
    gap = sampled / np.maximum(windows.lengths - 1, 1)
    to_start = (first_us - (windows.ends_us - windows.range_us)) / 1e6
    to_end = (windows.ends_us - last_us) / 1e6
    to_start = np.where(to_start >= gap * NEAR_GAPS, gap / 2, to_start)
    to_end = np.where(to_end >= gap * NEAR_GAPS, gap / 2, to_end)
    if counter:  # it cannot have been below zero
        to_zero = sampled * (first / rise)
        nearer = (rise > 0) & (first >= 0) & (to_zero < to_start)
        to_start = np.where(nearer, to_zero, to_start)
    factor = (sampled + to_start + to_end) / sampled
    if per_second:
        factor = factor / (windows.range_us / 1e6)
    return rise * factor, present


def rate(windows: RangeWindows) -> Outcome:
    """Return the rise of counters per second."""
    return extrapolated(windows, counter=True, per_second=True)


def increase(windows: RangeWindows) -> Outcome:
    """Return the rise of counters."""
    return extrapolated(windows, counter=True, per_second=False)


def delta(windows: RangeWindows) -> Outcome:
    """Return the change of gauges."""
    return extrapolated(windows, counter=False, per_second=False)


def _last_two(windows: RangeWindows) -> tuple[F64, F64, F64, Mask]:
    """Return the last value, the one before it, the seconds between them, and where there are two."""
    (last_us, last), (before_us, before) = windows.last(), windows.last(1)
    apart = (last_us - before_us) / 1e6
    return last, before, apart, (windows.lengths > 1) & (apart != 0)


def irate(windows: RangeWindows) -> Outcome:
    """Return the rise between the last two samples per second."""
    last, before, apart, present = _last_two(windows)
    return np.where(last < before, last, last - before) / apart, present


def idelta(windows: RangeWindows) -> Outcome:
    """Return the difference of the last two samples."""
    last, before, _, present = _last_two(windows)
    return last - before, present


def resets(windows: RangeWindows) -> Outcome:
    """Return how often the samples fell."""
    first, end = _count_between(_falls(windows), windows)
    return (end - first).astype(np.float64), windows.lengths > 0


def changes(windows: RangeWindows) -> Outcome:
    """Return how often the samples changed; from NaN to NaN is no change."""
    now, before = windows.values[1:], windows.values[:-1]
    changed = np.flatnonzero((now != before) & ~(np.isnan(now) & np.isnan(before))) + 1
    first, end = _count_between(changed, windows)
    return (end - first).astype(np.float64), windows.lengths > 0
