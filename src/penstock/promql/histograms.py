"""Classic histograms: series of cumulative counts, each with its upper bound in the label `le`.

The buckets of one histogram that have values may differ from step to step, so each histogram's steps are divided by
which buckets are there; all steps of one pattern are computed at once.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.promql.labels import LabelMatrix
from penstock.promql.limits import QueryBudget
from penstock.promql.matching import SAME_LABELS
from penstock.promql.tree import RESERVED_LABELS
from penstock.promql.values import F64, I64, Mask, VectorValue, merged

BUCKET = "le"
SMALL_DIFFERENCE = 1e-12  # relative: between buckets it comes from rounding, and is ignored
_NORMAL_MIN = float(np.finfo(np.float64).tiny)
Compute = Callable[[F64, F64, I64], F64]  # of bounds, counts (buckets x some steps), and these steps


def histogram_quantile(vector: VectorValue, quantiles: F64, budget: QueryBudget) -> VectorValue:
    """Return a quantile of each histogram at each step."""
    return _each(vector, lambda bounds, counts, steps: _quantile(bounds, counts, quantiles[steps]), budget)


def histogram_fraction(vector: VectorValue, lower: F64, upper: F64, budget: QueryBudget) -> VectorValue:
    """Return which part of each histogram's observations lies between two values."""
    return _each(vector, lambda bounds, counts, steps: _fraction(bounds, counts, lower[steps], upper[steps]), budget)


def _bounds(labels: LabelMatrix) -> F64:
    """Return the upper bound of each series; NaN if its label is not a number."""
    values, codes = labels.column(BUCKET)
    return np.array([_number(value) for value in values])[codes]


def _number(text: str) -> float:
    if "_" in text or text != text.strip():
        return np.nan
    try:
        return float(text)
    except ValueError:
        return np.nan


def _each(vector: VectorValue, compute: Compute, budget: QueryBudget) -> VectorValue:
    """Apply a function to the buckets of each histogram."""
    vector = vector.take(~np.isnan(_bounds(vector.labels)))
    if not len(vector):
        return VectorValue.empty(vector.values.shape[1])
    bounds = _bounds(vector.labels)
    numbers, first = vector.labels.without([BUCKET]).groups()
    order = np.lexsort((bounds, numbers))
    borders = np.searchsorted(numbers[order], np.arange(len(first) + 1))
    values = np.zeros((len(first), vector.values.shape[1]))
    present = np.zeros(values.shape, np.bool_)
    for number in range(len(first)):
        budget.check()
        rows = order[borders[number] : borders[number + 1]]
        there = vector.present[rows]
        for pattern, steps in _patterns(there):
            buckets = rows[pattern]
            present[number, steps] = True
            counts = vector.values[np.ix_(buckets, steps)]
            values[number, steps] = compute(*_coalesced(bounds[buckets], counts), steps)
    labels = vector.labels.take(first).without((BUCKET, *RESERVED_LABELS))
    result = VectorValue(labels, values, present, np.ones(len(first), np.bool_))
    return merged(result.compact(), SAME_LABELS)


def _patterns(there: Mask) -> list[tuple[I64, I64]]:
    """Return the distinct sets of buckets, as indices of buckets and the steps that have exactly these."""
    if there.all():
        return [(np.arange(len(there)), np.arange(there.shape[1]))]
    patterns, of_step = np.unique(there, axis=1, return_inverse=True)
    of_step = of_step.reshape(-1)
    return [
        (np.flatnonzero(patterns[:, pattern]), np.flatnonzero(of_step == pattern))
        for pattern in range(patterns.shape[1])
        if patterns[:, pattern].any()
    ]


def _coalesced(bounds: F64, counts: F64) -> tuple[F64, F64]:
    """Add up buckets of the same bound. Requires: they are ordered by it."""
    distinct, starts = np.unique(bounds, return_index=True)
    if len(distinct) == len(bounds):
        return bounds, counts
    return distinct, np.add.reduceat(counts, starts, axis=0)


def _rising(counts: F64) -> F64:
    """Return counts that never fall from bucket to bucket, and do not differ by mere rounding."""
    counts = counts.copy()
    before = counts[0]
    for bucket in range(1, len(counts)):
        now = counts[bucket]
        both, apart = np.abs(before) + np.abs(now), np.abs(before - now)
        near_zero = (before == 0) | (now == 0) | (both < _NORMAL_MIN)
        alike = np.where(near_zero, apart < SMALL_DIFFERENCE * _NORMAL_MIN, apart / both < SMALL_DIFFERENCE)
        alike |= np.isnan(before) & np.isnan(now)
        before = np.where(alike | (now < before), before, now)
        counts[bucket] = before
    return counts


def _quantile(bounds: F64, counts: F64, quantiles: F64) -> F64:
    special = np.where(quantiles < 0, -np.inf, np.where(quantiles > 1, np.inf, np.nan))
    usual = (quantiles >= 0) & (quantiles <= 1)
    if bounds[-1] != np.inf or len(bounds) < 2:
        return np.where(usual, np.nan, special)
    counts = _rising(counts)
    total = counts[-1]
    rank = quantiles * total
    reached = counts[:-1] >= rank
    bucket = np.where(reached.any(axis=0), reached.argmax(axis=0), len(bounds) - 1)
    steps = np.arange(counts.shape[1])
    below = np.maximum(bucket - 1, 0)
    start = np.where(bucket > 0, bounds[below], 0.0)
    before = np.where(bucket > 0, counts[below, steps], 0.0)
    inside = start + (bounds[bucket] - start) * ((rank - before) / (counts[bucket, steps] - before))
    values = np.where((bucket == 0) & (bounds[0] <= 0), bounds[0], inside)
    values = np.where(bucket == len(bounds) - 1, bounds[-2], values)
    return np.where(usual, np.where(total == 0, np.nan, values), special)


def _fraction(bounds: F64, counts: F64, lower: F64, upper: F64) -> F64:
    total = counts[-1]
    ranks = [_rank(bounds, counts, edge) for edge in (lower, upper)]
    fractions = np.where(lower >= upper, 0.0, (ranks[1] - ranks[0]) / total)
    unknown = (total == 0) | np.isnan(lower) | np.isnan(upper) | (bounds[-1] != np.inf)
    return np.where(unknown, np.nan, fractions)


def _rank(bounds: F64, counts: F64, edge: F64) -> F64:
    """Return how many observations are below a value, at each step."""
    total = counts[-1]
    rank, below, final = np.zeros(len(total)), total.copy(), np.zeros(len(total), np.bool_)
    low = 0.0 if bounds[0] > 0 else -np.inf
    for high, count in zip(bounds.tolist(), counts, strict=True):
        at_border = ~final & (low >= edge)
        within = ~final & ~at_border & (low < edge) & (high > edge)
        inside = count if np.isneginf(low) else rank + (count - rank) * (edge - low) / (high - low)
        below = np.where(at_border, rank, np.where(within, inside, below))
        final |= at_border | within
        rank, low = count, high
    return np.asarray(np.where(below > total, total, below), np.float64)
