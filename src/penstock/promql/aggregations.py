"""Aggregations that give one value for each group of series and each step.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from penstock.promql.labels import LabelMatrix
from penstock.promql.limits import QueryBudget
from penstock.promql.sums import RunningMean, is_tame, kahan_add
from penstock.promql.tree import METRIC_NAME, AggregateNode
from penstock.promql.values import F64, I64, VectorValue

BLOCK_CELLS = 1 << 15  # values in wide floats at once: they stay in the caches of a CPU


class SeriesGroups:
    """The series of a vector, ordered by group."""

    def __init__(self, node: AggregateNode, vector: VectorValue, budget: QueryBudget) -> None:
        self.vector = vector
        self.budget = budget
        labels = grouping_labels(vector.labels, node.labels, without=node.without)
        self.of_series, first = labels.groups()
        self.labels = labels.take(first)
        self.order = np.argsort(self.of_series, kind="stable")
        self.starts = np.searchsorted(self.of_series[self.order], np.arange(len(first)))
        self.sizes = np.diff(self.starts, append=len(self.order))
        reduced = np.add.reduceat(vector.present[self.order].astype(np.int64), self.starts, axis=0)
        self.counts: I64 = reduced  # values of each group at each step

    def blocks(self) -> Iterator[slice]:
        """Yield ranges of steps that are small enough for wide copies."""
        series, steps = self.vector.values.shape
        width = max(1, BLOCK_CELLS // series)
        for start in range(0, steps, width):
            self.budget.check()
            yield slice(start, min(start + width, steps))

    def ordered(self, block: slice, absent: float) -> F64:
        """Return the values of some steps in the order of groups, with `absent` where there is none."""
        present = self.vector.present[self.order, block]
        return np.where(present, self.vector.values[self.order, block], absent)

    def members(self, group: int) -> I64:
        """Return the series of one group."""
        start = self.starts[group]
        members: I64 = self.order[start : start + self.sizes[group]]
        return members

    def result(self, values: F64) -> VectorValue:
        """Return one value for each group and step."""
        unnamed = np.logical_or.reduceat(self.vector.unnamed[self.order], self.starts)
        return VectorValue(self.labels, values, self.counts > 0, unnamed).compact()


def grouping_labels(labels: LabelMatrix, names: tuple[str, ...], *, without: bool) -> LabelMatrix:
    """Return the labels that make groups."""
    return labels.without((METRIC_NAME, *names)) if without else labels.keeping(names)


def _sums(groups: SeriesGroups) -> tuple[F64, F64]:
    """Return the two parts of each group's sum."""
    sums, rests = np.zeros(groups.counts.shape), np.zeros(groups.counts.shape)
    for block in groups.blocks():
        wide = groups.ordered(block, 0.0).astype(np.longdouble)
        total = np.add.reduceat(wide, groups.starts, axis=0)
        absolute = np.add.reduceat(np.abs(wide), groups.starts, axis=0)
        sums[:, block] = total
        wild = ~is_tame(total, absolute, groups.counts[:, block])
        for group in np.flatnonzero(wild.any(axis=1)):
            steps = np.flatnonzero(wild[group]) + block.start
            exact, rest = np.zeros(len(steps)), np.zeros(len(steps))
            for row in groups.members(int(group)):
                groups.budget.check()
                there = groups.vector.present[row, steps]
                added = kahan_add(groups.vector.values[row, steps], exact, rest)
                exact, rest = np.where(there, added[0], exact), np.where(there, added[1], rest)
            sums[group, steps], rests[group, steps] = exact, rest
    return sums, rests


def _sum(groups: SeriesGroups) -> F64:
    sums, rests = _sums(groups)
    return sums + rests


def _avg(groups: SeriesGroups) -> F64:
    sums, rests = _sums(groups)
    counts = groups.counts.astype(np.float64)
    means = sums / counts + rests / counts
    for group in np.flatnonzero((~np.isfinite(sums)).any(axis=1)):
        steps = np.flatnonzero(~np.isfinite(sums[group]))
        mean = RunningMean(len(steps))
        for row in groups.members(int(group)):
            groups.budget.check()
            there = np.flatnonzero(groups.vector.present[row, steps])
            mean.add(groups.vector.values[row, steps[there]], there)
        means[group, steps] = mean.result()
    return means


def _variance(groups: SeriesGroups) -> F64:
    """Return variances, from distances to the first series of each group; NaN if a value is not finite."""
    variances = np.zeros(groups.counts.shape)
    for block in groups.blocks():
        values = groups.ordered(block, np.nan)
        there = groups.vector.present[groups.order, block]
        # The row of the first value of each group and step.
        rows = np.where(there, np.arange(len(values))[:, None], len(values) - 1)
        origin = np.take_along_axis(values, np.minimum.reduceat(rows, groups.starts, axis=0), axis=0)
        off = np.where(there, values.astype(np.longdouble) - origin[groups.of_series[groups.order]], 0.0)
        counts = groups.counts[:, block]
        total = np.add.reduceat(off, groups.starts, axis=0)
        squares = np.add.reduceat(off * off, groups.starts, axis=0)
        variances[:, block] = (squares - total * total / counts) / counts
    return np.where(variances < 0, 0.0, variances)


def _extreme(groups: SeriesGroups, ufunc: np.ufunc) -> F64:
    values: F64 = ufunc.reduceat(groups.ordered(slice(None), np.nan), groups.starts, axis=0)
    return values


AGGREGATIONS: Mapping[str, Callable[[SeriesGroups], F64]] = MappingProxyType(
    {
        "sum": _sum,
        "avg": _avg,
        "min": lambda groups: _extreme(groups, np.fmin),
        "max": lambda groups: _extreme(groups, np.fmax),
        "count": lambda groups: groups.counts.astype(np.float64),
        "group": lambda groups: np.ones(groups.counts.shape),
        "stdvar": _variance,
        "stddev": lambda groups: np.sqrt(_variance(groups)),
    }
)
