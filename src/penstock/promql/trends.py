"""Where samples are going: lines through them by least squares, and smoothing.

Thread: pure functions.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import Invalid
from penstock.promql.rates import Outcome
from penstock.promql.sums import kahan_add
from penstock.promql.values import F64, I64, Mask
from penstock.promql.windows import RangeWindows, WindowWalk


def deriv(windows: RangeWindows) -> Outcome:
    """Return the slope per second of a line through each window."""
    present = windows.lengths > 1
    values = np.zeros(present.shape)
    values[present] = _lines(windows, windows.first()[0][present], present)[0]
    return values, present


def predict_linear(windows: RangeWindows, ahead_s: F64) -> Outcome:
    """Return where a line through each window is `ahead_s` seconds after the evaluation."""
    present = windows.lengths > 1
    shape = present.shape
    slope, level = _lines(windows, np.broadcast_to(windows.evaluated_us, shape)[present], present)
    values = np.zeros(shape)
    values[present] = slope * np.broadcast_to(ahead_s, shape)[present] + level
    return values, present


def _lines(windows: RangeWindows, origin_us: I64, present: Mask) -> tuple[F64, F64]:
    """Return slope, and level at `origin_us`, of a line through each of the windows that have two samples."""
    walk = WindowWalk(windows.low[present], windows.high[present], windows.budget)
    size = len(walk)
    origin = origin_us[walk.order]
    first = windows.values[windows.low[present]][walk.order]
    level_line = np.ones(size, np.bool_)
    sums = [(np.zeros(size), np.zeros(size)) for _ in range(4)]
    for going, indices in walk:
        y = windows.values[indices]
        x = (windows.times[indices] - origin[:going]) / 1e6
        level_line[:going] &= y == first[:going]
        for (total, rest), addend in zip(sums, (x, y, x * y, x * x), strict=True):
            total[:going], rest[:going] = kahan_add(addend, total[:going], rest[:going])
    count = windows.lengths[present][walk.order].astype(np.float64)
    sum_x, sum_y, sum_xy, sum_xx = (total + rest for total, rest in sums)
    slope = (sum_xy - sum_x * sum_y / count) / (sum_xx - sum_x * sum_x / count)
    level = sum_y / count - slope * sum_x / count
    flat = np.where(np.isinf(first), np.nan, 0.0)
    slope = np.where(level_line, flat, slope)
    level = np.where(level_line, flat + first, level)
    return walk.restored(slope), walk.restored(level)


def double_exponential_smoothing(windows: RangeWindows, smoothing: F64, trend: F64) -> Outcome:
    """Return the smoothed last value of each window; both factors are between 0 and 1."""
    for name, factor in (("smoothing", smoothing), ("trend", trend)):
        if len(windows.labels) and not ((factor > 0) & (factor < 1)).all():
            raise Invalid(f"the {name} factor of double_exponential_smoothing is above 0 and below 1")
    present = windows.lengths > 1
    walk = WindowWalk(windows.low[present], windows.high[present], windows.budget)
    smooth, turn = (np.broadcast_to(factor, present.shape)[present][walk.order] for factor in (smoothing, trend))
    start = windows.low[present][walk.order]
    level = windows.values[start]
    slope = windows.values[np.minimum(start + 1, len(windows.values) - 1)] - level
    before = np.zeros(len(walk))
    for number, (going, indices) in enumerate(walk):
        if not number:
            continue
        active = slice(0, going)
        if number > 1:
            slope[active] = turn[active] * (level[active] - before[active]) + (1 - turn[active]) * slope[active]
        following = smooth[active] * windows.values[indices] + (1 - smooth[active]) * (level[active] + slope[active])
        before[active], level[active] = level[active].copy(), following
    values = np.zeros(present.shape)
    values[present] = walk.restored(level)
    return values, present
