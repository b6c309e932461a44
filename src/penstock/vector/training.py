"""Centroids of posting lists: k-means, the list of a vector, the lists to split or dissolve, the lists to probe.

Thread: pure functions of arrays.
Invariants: (1) `nearest_list` returns the same lists on every machine, whatever its BLAS and its threads: apply relies
on it. (2) centroids of cosine and dot are directions: vectors of length 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.vector.exact import BLOCK_BYTES, F32, I64, error_bound, lengths
from penstock.vector.options import Metric

I32: TypeAlias = npt.NDArray[np.int32]
F64: TypeAlias = npt.NDArray[np.float64]

TRAINED_ROWS_MIN = 10_000  # fewer are searched exactly
SAMPLE_PER_LIST = 64  # rows that k-means looks at
ROUNDS = 10
SPLIT_ABOVE = 3.0  # times the target length of a list
DISSOLVE_BELOW = 0.1
RECALL_TARGET = 0.95
_CONFIDENCE = 1.645  # one-sided, 95 %
_HUGE = 1e30  # products near the end of float32 are compared in float64


# -- the list of a vector


class ListAssigner:
    """Finds the nearest of some centroids.

    The nearest has the greatest score in float64, summed from the first dimension to the last; among equals it is the
    first. A product in float32 with a bound of its error decides all but a few vectors, so BLAS cannot change a list.
    """

    def __init__(self, centroids: F32, metric: Metric) -> None:
        self._centroids = np.ascontiguousarray(centroids, np.float32)
        self._origin: F32 | None = None
        if metric == "euclidean" and len(centroids):  # distances do not change, and rounding errors become small
            self._origin = (_ordered_sums(self._centroids.T.astype(np.float64)) / len(centroids)).astype(np.float32)
            self._centroids = self._centroids - self._origin
        squares = _ordered_sums(np.square(self._centroids.astype(np.float64)))
        self._halves = squares / 2 if metric == "euclidean" else None
        self._length = math.sqrt(float(squares.max(initial=0.0)))

    def nearest(self, vectors: F32) -> I32:
        """Return the number of each vector's list."""
        lists = np.zeros(len(vectors), np.int32)
        if len(self._centroids) > 1:
            step = max(1, BLOCK_BYTES // (4 * len(self._centroids)))
            for start in range(0, len(vectors), step):
                lists[start : start + step] = self._nearest(vectors[start : start + step])
        return lists

    def _nearest(self, vectors: F32) -> I32:
        if self._origin is not None:
            vectors = vectors - self._origin
        sizes = lengths(vectors)
        with np.errstate(all="ignore"):
            scores = vectors @ self._centroids.T
            if self._halves is not None:
                scores -= self._halves.astype(np.float32)
        rows = np.arange(len(vectors))
        lists = scores.argmax(axis=1)
        best = scores[rows, lists].astype(np.float64)
        reach = sizes * self._length + (0.0 if self._halves is None else self._length**2)
        limits = best - 2 * error_bound(vectors.shape[1], reach)
        limits[(reach > _HUGE) | ~np.isfinite(best)] = -np.inf
        scores[rows, lists] = -np.inf
        doubtful = np.flatnonzero((scores.max(axis=1) >= limits) & (sizes > 0 if self._halves is None else True))
        scores[rows, lists] = best
        for row in doubtful.tolist():
            near = np.flatnonzero(~(scores[row] < limits[row]))
            lists[row] = near[np.argmax(self._exact_scores(vectors[row], near))]
        if self._halves is None:
            lists[sizes == 0] = 0
        numbers: I32 = lists.astype(np.int32)
        return numbers

    def _exact_scores(self, vector: F32, near: I64) -> F64:
        scores = _ordered_sums(self._centroids[near].astype(np.float64) * vector.astype(np.float64))
        return scores if self._halves is None else scores - self._halves[near]


def _ordered_sums(products: F64) -> F64:
    """Return the sum of each row, added from left to right: the same bits on every machine."""
    sums: F64 = np.add.accumulate(products, axis=1)[:, -1]
    return sums


def nearest_list(vectors: F32, centroids: F32, metric: Metric) -> I32:
    """Return the number of the list of each vector: that of the nearest centroid."""
    return ListAssigner(centroids, metric).nearest(np.ascontiguousarray(vectors, np.float32))


# -- centroids


def list_count(rows: int) -> int:
    """Return how many lists `rows` vectors should have."""
    return max(1, round(2 * math.sqrt(rows)))


def sample_size(rows: int) -> int:
    """Return how many of `rows` vectors the centroids should be trained with."""
    return min(rows, SAMPLE_PER_LIST * list_count(rows))


def k_means(vectors: F32, lists: int, metric: Metric, *, seed: int = 0, rounds: int = ROUNDS) -> F32:
    """Return centroids of the vectors: at most `lists`, fewer if fewer vectors differ."""
    points = _directions(vectors) if metric != "euclidean" else np.ascontiguousarray(vectors, np.float32)
    points = np.unique(points, axis=0) if len(points) <= 4 * lists else points  # that few may be all the same
    if not len(points):
        return np.zeros((1, vectors.shape[1]), np.float32)
    if len(points) <= lists:
        return np.unique(points, axis=0)
    chance = np.random.default_rng(seed)
    centroids = points[np.sort(chance.choice(len(points), lists, replace=False))]
    for _ in range(rounds):
        assigned = nearest_list(points, centroids, metric)
        centroids = _means(points, assigned, centroids, chance)
        if metric != "euclidean":
            centroids = _directions(centroids)
    return np.unique(centroids, axis=0)


def _directions(vectors: F32) -> F32:
    """Return the vectors that are not zero, at length 1."""
    sizes = lengths(vectors)
    return (vectors[sizes > 0] / sizes[sizes > 0, None]).astype(np.float32)


def _means(points: F32, assigned: I32, centroids: F32, chance: np.random.Generator) -> F32:
    """Return the mean of each list's points; an empty list gets a point of one of the longest lists."""
    order = np.argsort(assigned, kind="stable")
    counts = np.bincount(assigned, minlength=len(centroids))
    full = np.flatnonzero(counts)
    starts = (np.cumsum(counts) - counts)[full]
    means = np.empty_like(centroids)
    means[full] = np.add.reduceat(points[order], starts, axis=0, dtype=np.float64) / counts[full, None]
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        longest = np.argsort(-counts, kind="stable")
        for number, at in enumerate(empty.tolist()):
            members = np.flatnonzero(assigned == longest[number % len(full)])
            means[at] = points[members[chance.integers(len(members))]]
    return means


# -- lists that are too long or too short


@dataclass(frozen=True, slots=True)
class ListPlan:
    """What to do with the lists of a shard, so that their lengths suit its rows."""

    split: dict[int, int]  # the parts of each list that is too long
    dissolve: tuple[int, ...]  # lists that are too short: their rows go to the nearest of the others

    def __bool__(self) -> bool:
        return bool(self.split or self.dissolve)


def plan_lists(sizes: npt.NDArray[Any]) -> ListPlan:
    """Return which lists to split and which to dissolve, by the rows in each."""
    rows, count = int(sizes.sum()), len(sizes)
    target = max(1.0, rows / list_count(rows)) if rows else 1.0
    split = {int(at): math.ceil(int(sizes[at]) / target) for at in np.flatnonzero(sizes > SPLIT_ABOVE * target)}
    short = np.flatnonzero(sizes < DISSOLVE_BELOW * target)
    spare = max(0, count + sum(split.values()) - len(split) - list_count(rows))  # lists above the target number
    dissolve = short[np.argsort(sizes[short], kind="stable")][: min(spare, count - 1)]
    return ListPlan(split, tuple(sorted(dissolve.tolist())))


def rebalanced(centroids: F32, plan: ListPlan, members: Callable[[int], F32], metric: Metric, *, seed: int = 0) -> F32:
    """Return the centroids after a plan; `members` returns vectors of a list, or a sample of them."""
    replaced = set(plan.dissolve) | set(plan.split)
    parts = [centroids[[at for at in range(len(centroids)) if at not in replaced]]]
    for at, count in plan.split.items():
        vectors = members(at)
        parts.append(k_means(vectors, count, metric, seed=seed + at) if len(vectors) else centroids[at : at + 1])
    return np.concatenate(parts).astype(np.float32)


# -- how many lists to probe


class Searchable(Protocol):
    """What recall is measured on: a `VectorIndex`."""

    @property
    def lists(self) -> int: ...

    def search(self, queries: F32, k: int, *, probes: int | None = None, exact: bool = False) -> tuple[F32, I64]: ...


def recalls(index: Searchable, queries: F32, k: int, probes: int, truth: tuple[F32, I64] | None = None) -> F64:
    """Return for each query the share of its `k` nearest that a search of `probes` lists finds.

    A hit at the distance of the last true one counts, whichever of several equally near it is.
    """
    distances, ids = truth if truth is not None else index.search(queries, k, exact=True)
    hit_distances, hits = index.search(queries, k, probes=probes)
    expected = (ids >= 0).sum(axis=1)
    last = np.where(ids >= 0, distances, -np.inf).max(axis=1)
    slack = 1e-5 * np.abs(last) + 1e-6
    good = ((hits >= 0) & (hit_distances <= (last + slack)[:, None])).sum(axis=1)
    return np.where(expected > 0, np.minimum(good, expected) / np.maximum(expected, 1), 1.0)


def recall_floor(shares: F64) -> float:
    """Return the recall of all queries that a sample of them shows with 95 % confidence."""
    spread = float(shares.std(ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else 0.0
    return float(shares.mean()) - _CONFIDENCE * spread


def choose_probes(index: Searchable, queries: F32, k: int = 10, target: float = RECALL_TARGET) -> tuple[int, float]:
    """Return the least number of lists to probe for a recall, and the recall that was measured with it.

    The sample must show the recall with 95 % confidence, so a small sample gives more probes.
    """
    truth = index.search(queries, k, exact=True)
    low, high = 0, 1  # `low` is not enough
    while recall_floor(shares := recalls(index, queries, k, high, truth)) < target and high < index.lists:
        low, high = high, min(2 * high, index.lists)
    while high - low > 1:
        middle = (low + high) // 2
        middle_shares = recalls(index, queries, k, middle, truth)
        if recall_floor(middle_shares) >= target:
            high, shares = middle, middle_shares
        else:
            low = middle
    return high, float(shares.mean())
