"""Exact nearest rows of a matrix, by numpy alone.

A product in float32 picks candidates, with a bound of its rounding error; their distances are then computed in float64.
So the result is that of float64 arithmetic, at the speed of float32.

Thread: pure functions of arrays.
Invariants: (1) a smaller distance is nearer for every metric: cosine is 1 - cos, dot is minus the product. (2) equal
distances are ordered by position.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.vector.options import Metric

F32: TypeAlias = npt.NDArray[np.float32]
I64: TypeAlias = npt.NDArray[np.int64]
U64: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

BLOCK_BYTES = 16 << 20  # of scores that are computed at a time
_ROUNDING = 2.0**-24


def lengths(vectors: F32) -> npt.NDArray[np.float64]:
    """Return the Euclidean length of each vector; float64, in which no square of a float32 overflows."""
    sizes: npt.NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    return sizes


@np.errstate(all="ignore")
def prepared(vectors: F32, metric: Metric) -> F32:
    """Return vectors as kernels compare them: of length 1 with cosine (zero stays zero), otherwise as given."""
    vectors = np.ascontiguousarray(vectors, np.float32)
    if metric != "cosine":
        return vectors
    if len(vectors) == 1:  # of a search: most of the time would go into the general way
        square = float(vectors[0].dot(vectors[0]))
        if 1e-30 < square < 1e30:
            return vectors * np.float32(square**-0.5)
    divisors = lengths(vectors)
    divisors[divisors == 0] = 1.0
    if divisors.min(initial=1.0) < 1e-30:  # float32 does not have the divisor
        return (vectors / divisors[:, None]).astype(np.float32)
    return vectors / divisors.astype(np.float32)[:, None]


def error_bound(dimensions: int, products: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return how far a float32 inner product can be off, in any order of summation.

    `products` are the products of the two vectors' lengths.
    """
    return (dimensions + 8) * _ROUNDING * products * 1.01 + dimensions * 1e-44


def distances_to(rows: F32, query: F32, metric: Metric) -> npt.NDArray[np.float64]:
    """Return the distance of each prepared row to a prepared query."""
    wide = query.astype(np.float64)
    distances: npt.NDArray[np.float64]
    if metric == "euclidean":
        difference = rows - wide
        distances = np.sqrt(np.einsum("ij,ij->i", difference, difference))
        return distances
    distances = -np.einsum("ij,j->i", rows.astype(np.float64), wide)
    return np.maximum(1.0 + distances, 0.0) if metric == "cosine" else distances


class ExactRows:
    """Prepared rows that are searched exactly."""

    __slots__ = ("_halves", "_length", "metric", "rows")

    def __init__(self, rows: F32, metric: Metric) -> None:
        self.rows = rows
        self.metric = metric
        squares = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
        self._halves = squares / 2
        self._length = float(np.sqrt(squares.max(initial=0.0)))

    def search(self, queries: F32, k: int, visible: Mask | None = None) -> tuple[F32, I64]:
        """Return the distances and the positions of the `k` nearest rows of each prepared query; position -1: none."""
        distances = np.full((len(queries), k), np.inf, np.float32)
        positions = np.full((len(queries), k), -1, np.int64)
        most = min(k, len(self.rows) if visible is None else int(np.count_nonzero(visible)))
        if not most:
            return distances, positions
        step = max(1, BLOCK_BYTES // (8 * len(self.rows)))
        for start in range(0, len(queries), step):
            block = queries[start : start + step]
            for number, candidates in enumerate(self._candidates(block, most, visible), start):
                candidate_distances = distances_to(self.rows[candidates], queries[number], self.metric)
                order = np.lexsort((candidates, candidate_distances))[:most]
                distances[number, :most] = candidate_distances[order]
                positions[number, :most] = candidates[order]
        return distances, positions

    def _candidates(self, queries: F32, most: int, visible: Mask | None) -> Any:
        """Yield for each query the positions of the rows that may be among its `most` nearest."""
        with np.errstate(all="ignore"):
            scores = np.negative(queries @ self.rows.T)
        reach = lengths(queries) * self._length
        bounds = 2 * error_bound(queries.shape[1], reach)
        if self.metric == "euclidean":
            scores = scores + self._halves
        if visible is not None:
            scores[:, ~visible] = np.inf
        for row, bound in zip(scores, bounds, strict=True):
            limit = np.partition(row, most - 1)[most - 1] + bound
            if not np.isfinite(limit):  # it overflowed: every visible row is a candidate
                yield np.arange(len(row)) if visible is None else np.flatnonzero(visible)
            else:
                yield np.flatnonzero(row <= limit)


class GrowingRows:
    """Prepared rows by id that are searched exactly.

    Thread: guarded by the owner: searches run side by side, a change runs alone.
    Invariant: ids ascend.
    """

    def __init__(self, dimensions: int, metric: Metric) -> None:
        self._metric: Metric = metric
        self._count = 0
        self._ids: U64 = np.empty(0, np.uint64)
        self._rows: F32 = np.empty((0, dimensions), np.float32)
        self._exact: ExactRows | None = None  # over the rows that are used; made by a search after a change

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> U64:
        return self._ids[: self._count]

    @property
    def last_id(self) -> int:
        """The highest id that was added; 0 if none was."""
        return int(self._ids[self._count - 1]) if self._count else 0

    def add(self, ids: U64, vectors: F32, lists: object = None) -> None:
        """Add vectors. Requires: ids ascend, and are above all that were added before."""
        end = self._count + len(ids)
        if end > len(self._ids):
            size = max(end, len(self._ids) * 3 // 2)
            grown, rows = np.empty(size, np.uint64), np.empty((size, self._rows.shape[1]), np.float32)
            grown[: self._count], rows[: self._count] = self.ids, self._rows[: self._count]
            self._ids, self._rows = grown, rows
        self._ids[self._count : end] = ids
        self._rows[self._count : end] = vectors
        self._count, self._exact = end, None

    def drop(self, ids: U64) -> None:
        """Delete rows. Requires: they are there."""
        keep = np.ones(self._count, np.bool_)
        keep[np.searchsorted(self.ids, ids)] = False
        self._ids, self._rows = self.ids[keep], self._rows[: self._count][keep]
        self._count, self._exact = len(self._ids), None

    def copied(self) -> GrowingRows:
        """Return a copy, while searches run on this one."""
        copy = GrowingRows(self._rows.shape[1], self._metric)
        copy.add(self.ids, self._rows[: self._count])
        return copy

    def present(self, ids: U64) -> Mask:
        """Return which of the ids are there."""
        return are_among(ids, self.ids)

    def vectors(self, ids: U64) -> F32:
        """Return a copy of the vectors of some ids. Requires: they are there."""
        return self._rows[np.searchsorted(self.ids, ids)]

    def search(self, queries: F32, k: int, visible: Mask | None) -> tuple[F32, I64]:
        """Return the distances and ids of the `k` nearest rows of each prepared query; id -1: none."""
        exact = self._exact
        if exact is None:
            exact = self._exact = ExactRows(self._rows[: self._count], self._metric)
        distances, positions = exact.search(queries, k, visible)
        return distances, ids_at(self.ids, positions)

    def memory_bytes(self) -> int:
        """Return the bytes that the rows take."""
        return self._ids.nbytes + self._rows.nbytes + (0 if self._exact is None else 8 * self._count)


def are_among(ids: U64, sorted_ids: U64) -> Mask:
    """Return which of the ids are in `sorted_ids`. Requires: `sorted_ids` ascends."""
    if not len(sorted_ids):
        return np.zeros(len(ids), np.bool_)
    at = np.minimum(np.searchsorted(sorted_ids, ids), len(sorted_ids) - 1)
    there: Mask = sorted_ids[at] == ids
    return there


def ids_at(ids: U64, positions: I64) -> I64:
    """Return the ids at positions, where -1 is none."""
    if not len(ids):
        return positions
    return np.where(positions >= 0, ids.view(np.int64)[positions], -1)
