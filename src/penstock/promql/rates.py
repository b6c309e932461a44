"""How fast samples rise: rate, increase, delta, irate, idelta; and how often they fall or change.

Thread: pure functions.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from penstock.promql.values import F64, I64, Mask
from penstock.promql.windows import RangeWindows

Outcome: TypeAlias = tuple[F64, Mask]  # a value for each series and step, and where there is one
NEAR_GAPS = 1.1  # a series is taken to go on to a border that is nearer than this many average gaps


def _falls(windows: RangeWindows) -> Mask:
    """Return which samples are less than the one before."""
    return np.append(False, windows.values[1:] < windows.values[:-1])


def _count_within(mask: Mask, windows: RangeWindows) -> I64:
    """Return how many of some samples lie after each window's first sample; of an empty window it has no meaning."""
    up_to = np.cumsum(mask, dtype=np.int64)
    return up_to[np.maximum(windows.high - 1, 0)] - up_to[np.minimum(windows.low, len(up_to) - 1)]


def _add_resets(rise: F64, windows: RangeWindows, falls: I64) -> None:
    """Add to the rise of a counter what it had before each fall, which is a reset to zero; one after the other."""
    series = np.searchsorted(falls, windows.low[:, 0] + 1) < np.searchsorted(falls, windows.high[:, -1])
    (falling,) = np.nonzero(series)
    first, end = np.searchsorted(falls, windows.low[falling] + 1), np.searchsorted(falls, windows.high[falling])
    rows, columns = np.nonzero(end > first)
    first, end, rows = first[rows, columns], end[rows, columns], falling[rows]
    while len(rows):
        windows.budget.check()
        rise[rows, columns] += windows.values[falls[first] - 1]
        first = first + 1
        going = first < end
        rows, columns, first, end = rows[going], columns[going], first[going], end[going]


def extrapolated(windows: RangeWindows, *, counter: bool, per_second: bool) -> Outcome:
    """Return the rise in each window, extended to its borders as far as the samples make that likely."""
    values = np.empty(windows.low.shape)
    falls = np.flatnonzero(_falls(windows)) if counter else np.zeros(0, np.int64)
    for rows, block in windows.row_blocks():
        values[rows] = _extrapolated(block, falls, counter=counter, per_second=per_second)
    return values, windows.lengths > 1


def _extrapolated(windows: RangeWindows, falls: I64, *, counter: bool, per_second: bool) -> F64:
    (first_us, first), (last_us, last) = windows.first(), windows.last()
    rise = last - first
    _add_resets(rise, windows, falls)
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
    return rise * factor


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
    return _count_within(_falls(windows), windows).astype(np.float64), windows.lengths > 0


def changes(windows: RangeWindows) -> Outcome:
    """Return how often the samples changed; from NaN to NaN is no change."""
    now, before = windows.values[1:], windows.values[:-1]
    changed = np.append(False, (now != before) & ~(np.isnan(now) & np.isnan(before)))
    return _count_within(changed, windows).astype(np.float64), windows.lengths > 0
