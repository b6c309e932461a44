"""The samples in `(t - range, t]` for every series and step, as index ranges into one column of samples.

Steps are evenly spaced, so the step at which a sample enters a window is a division; counting samples by it gives every
border of every series at once.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.promql.labels import LabelMatrix
from penstock.promql.limits import QueryBudget
from penstock.promql.source import SelectedSamples
from penstock.promql.values import F64, I64, Mask, StepGrid, any_of

SORTED_SAMPLES = 1 << 22  # that are gathered for sorting at once
BLOCK_SAMPLES = 1 << 21  # that are copied at once
LONG_SAMPLES = 512  # of each series: it is searched by itself
ROW_CELLS = 1 << 14  # windows that are computed at once: the intermediate results stay in the caches of a CPU


def counts_up_to(selected: SelectedSamples, grid: StepGrid) -> I64:
    """Return, for each series and step, the index after its last sample at or before the step's time."""
    starts, times, series = selected.starts, selected.times, len(selected.labels)
    if not len(times):
        return np.broadcast_to(starts[:-1, None], (series, grid.steps)).copy()
    each = len(times) // series
    if each * series == len(times) and (np.diff(starts) == each).all():
        table = times.reshape(series, each)
        new = np.append(True, (table[1:] != table[:-1]).any(axis=1))  # series of one target have the same times
        alone = _counts(each * np.arange(int(new.sum()) + 1), table[new].reshape(-1), grid)
        ends: I64 = alone[np.cumsum(new) - 1]
    else:
        ends = _counts(starts, times, grid)
    ends += starts[:-1, None]
    return ends


def _counts(starts: I64, times: I64, grid: StepGrid) -> I64:
    """Return, for each series and step, how many of its samples are at or before the step's time."""
    series, steps = len(starts) - 1, grid.steps
    if len(times) >= LONG_SAMPLES * series:  # fewer steps than samples: search the steps among the samples
        moments = grid.times()
        positions = np.empty((series, steps), np.int64)
        for row, (start, end) in enumerate(pairwise(starts.tolist())):
            positions[row] = np.searchsorted(times[start:end], moments, "right")
        return positions
    of_sample = np.repeat(np.arange(series, dtype=np.int64), np.diff(starts))
    # The first step at or after the sample: the division is rounded up.
    step = np.clip(-(-(times - grid.start_us) // grid.step_us), 0, steps)
    counts = np.bincount(of_sample * (steps + 1) + step, minlength=series * (steps + 1)).reshape(series, steps + 1)
    ends: I64 = np.cumsum(counts[:, :steps], axis=1, dtype=np.int64)
    return ends


@dataclass(frozen=True, slots=True)
class RangeWindows:
    """Windows of series: the samples of one are `low` to `high`."""

    labels: LabelMatrix
    unnamed: Mask
    times: I64  # of all samples
    values: F64
    low: I64  # series x steps
    high: I64
    ends_us: I64  # of each step's window, which is closed there
    evaluated_us: I64  # each step's time; other than the end with `offset` or `@`
    range_us: int
    budget: QueryBudget

    @property
    def lengths(self) -> I64:
        return self.high - self.low

    @property
    def steps(self) -> int:
        return len(self.evaluated_us)

    def row_blocks(self) -> Iterator[tuple[slice, RangeWindows]]:
        """Yield ranges of series, and their windows, few enough for intermediate results of the size of a CPU's cache.

        The labels of the parts are those of all windows.
        """
        rows = max(1, ROW_CELLS // max(1, self.steps))
        for start in range(0, len(self.low), rows):
            self.budget.check()
            block = slice(start, start + rows)
            yield block, replace(self, low=self.low[block], high=self.high[block])

    def first(self) -> tuple[I64, F64]:
        """Return time and value of the first sample of each window. Where it is empty they have no meaning."""
        indices = np.minimum(self.low, len(self.times) - 1)
        return self.times[indices], self.values[indices]

    def last(self, back: int = 0) -> tuple[I64, F64]:
        """Return time and value of the last sample of each window, or of one before it."""
        indices = np.clip(self.high - 1 - back, 0, len(self.times) - 1)
        return self.times[indices], self.values[indices]


def windows_over(
    selected: SelectedSamples,
    unnamed: Mask,
    grid: StepGrid,
    evaluated_us: I64,
    *,
    range_us: int,
    budget: QueryBudget,
) -> RangeWindows:
    """Return the windows that end at the times of a grid; series without a sample in any of them are left out."""
    budget.check_cells(len(selected.labels), len(evaluated_us))
    ahead, uneven = divmod(range_us, grid.step_us)
    if not uneven and ahead <= grid.steps:  # a window begins where another ends, some steps before
        borders = counts_up_to(selected, StepGrid(grid.start_us - range_us, grid.step_us, grid.steps + ahead))
        low, high = borders[:, : grid.steps], borders[:, ahead:]
    else:
        low, high = counts_up_to(selected, grid.shifted(-range_us)), counts_up_to(selected, grid)
    rows = any_of(high > low, 1)
    labels = selected.labels
    if not rows.all():
        labels, unnamed, low, high = labels.take(rows), unnamed[rows], low[rows], high[rows]
    ends = grid.times()
    if grid.steps != len(evaluated_us):  # one fixed time, for every step
        shape = (len(labels), len(evaluated_us))
        low, high = np.broadcast_to(low, shape), np.broadcast_to(high, shape)
        ends = np.broadcast_to(ends, len(evaluated_us))
    return RangeWindows(
        labels, unnamed, selected.times, selected.values, low, high, ends, evaluated_us, range_us, budget
    )


class WindowWalk:
    """Visits the samples of many windows at the same time: the first of each, then the second of each, ..."""

    def __init__(self, low: I64, high: I64, budget: QueryBudget) -> None:
        lengths = (high - low).reshape(-1)
        self.order = np.argsort(-lengths, kind="stable")  # longest first: those still going are a prefix
        self._low = low.reshape(-1)[self.order]
        self._falling = -lengths[self.order]
        self._budget = budget

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[int, I64]]:
        """Yield how many windows still go on, and the index of the next sample of each."""
        longest = -int(self._falling[0]) if len(self) else 0
        for position in range(longest):
            self._budget.check()
            going = int(np.searchsorted(self._falling, -position))  # longer than `position`
            yield going, self._low[:going] + position

    def restored(self, results: F64) -> F64:
        """Return results of the windows in the order in which the windows were given."""
        by_window = np.empty_like(results)
        by_window[self.order] = results
        return by_window


def reduced(ufunc: np.ufunc, column: npt.NDArray[Any], low: I64, high: I64) -> npt.NDArray[Any]:
    """Reduce each window of a column. Requires: no window is empty."""
    if not len(low):
        return np.empty(0, column.dtype)
    borders = np.empty(2 * len(low), np.int64)
    borders[0::2], borders[1::2] = low, high
    # A border may be the end of the column, which reduceat does not accept.
    reductions: npt.NDArray[Any] = ufunc.reduceat(np.append(column, column[-1:]), borders)[0::2]
    return reductions


def window_blocks(low: I64, high: I64, budget: QueryBudget) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of windows, and of the samples that they are in, small enough for wide copies of the samples.

    Requires: `low` ascends.
    """
    start = 0
    while start < len(low):
        budget.check()
        end = max(start + 1, int(np.searchsorted(low, low[start] + BLOCK_SAMPLES)))
        yield slice(start, end), slice(int(low[start]), int(high[start:end].max()))
        start = end


def sorted_windows(values: F64, low: I64, high: I64, budget: QueryBudget) -> Iterator[tuple[I64, F64, I64]]:
    """Yield numbers of windows of similar length, their values in order (NaN first), and their lengths.

    Requires: no window is empty.
    """
    lengths = high - low
    order = np.argsort(lengths, kind="stable")
    at = 0
    while at < len(order):
        budget.check()
        # As many windows as fit, judged by the longest of them.
        longest = int(lengths[order[at]])
        count = max(1, SORTED_SAMPLES // longest)
        batch = order[at : at + count]
        while len(batch) > 1 and len(batch) * int(lengths[batch[-1]]) > 2 * SORTED_SAMPLES:
            batch = batch[: len(batch) // 2]
        width = int(lengths[batch[-1]])
        indices = low[batch, None] + np.arange(width)
        inside = indices < high[batch, None]
        gathered = np.where(inside, values[np.minimum(indices, len(values) - 1)], np.inf)
        yield batch, nan_first(gathered, inside), lengths[batch]
        at += len(batch)


def nan_first(matrix: F64, inside: Mask) -> F64:
    """Return rows in ascending order, NaNs first; what is not inside has to be infinite, and stands last."""
    nans = np.isnan(matrix) & inside
    if not nans.any():
        return np.sort(matrix, axis=1)
    ordered = np.sort(np.where(nans, -np.inf, matrix), axis=1)
    ordered[np.arange(matrix.shape[1]) < nans.sum(axis=1)[:, None]] = np.nan
    return ordered
