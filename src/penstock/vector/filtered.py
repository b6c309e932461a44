"""What a kernel searches under a filter: copies of a few vectors, or the lists that have some of many ids.

Thread: as `VectorIndex`, whose searches use it; the cache is replaced, not changed.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from penstock.vector.exact import F32, I64, U64, ExactRows, GrowingRows
from penstock.vector.lists import FlatRows, PostingLists, bitmap_selector
from penstock.vector.options import Metric

FEW_ROWS = 4_096  # that pass a filter, at most: they are searched exactly
FILTERS_MAX = 16  # cached, and
FILTERS_BYTES_MAX = 32 << 20
Kernel: TypeAlias = PostingLists | GrowingRows
_NO_COUNTS: I64 = np.empty(0, np.int64)


class SearchSlice(NamedTuple):
    """A slice of prepared queries, and how to search them."""

    queries: F32
    k: int
    probes: int
    widens: bool  # look at more lists if these have fewer than k
    exact: bool


class _Filtered(NamedTuple):
    """What was gathered for an array of allowed ids."""

    allowed: U64
    ids: U64  # those that are in the index
    rows: ExactRows | FlatRows | None  # if they are few
    selector: Any  # otherwise
    counts: I64  # ids in each list
    size_bytes: int


class FilteredIds:
    """What was gathered for arrays of allowed ids, since the last change of the kernel."""

    def __init__(self) -> None:
        self._gathered: dict[int, _Filtered] = {}  # by the identity of the array; replaced, not changed

    def memory_bytes(self) -> int:
        """Return the bytes that it takes."""
        return sum(filtered.size_bytes for filtered in self._gathered.values())

    def get(self, kernel: Kernel, metric: Metric, allowed: U64, *, cached: bool) -> _Filtered:
        """Return what to search for an array of allowed ids; with `cached`, cache it by the identity of the array."""
        entry = self._gathered.get(id(allowed))
        if entry is not None and entry.allowed is allowed:
            return entry
        filtered = _gather(kernel, metric, allowed)
        complete = not len(allowed) or int(allowed[-1]) <= kernel.last_id  # otherwise some are yet to be added
        if cached and complete and filtered.size_bytes <= FILTERS_BYTES_MAX:
            others = dict(self._gathered)
            size = filtered.size_bytes + sum(other.size_bytes for other in others.values())
            while others and (len(others) >= FILTERS_MAX or size > FILTERS_BYTES_MAX):
                size -= others.pop(next(iter(others))).size_bytes
            self._gathered = {**others, id(allowed): filtered}
        return filtered


def _gather(kernel: Kernel, metric: Metric, allowed: U64) -> _Filtered:
    """Copy the vectors of a few ids; make a selector for more, and count them in each list."""
    ids = allowed[kernel.present(allowed)]
    if len(ids) <= FEW_ROWS or isinstance(kernel, GrowingRows):
        vectors = kernel.vectors(ids)
        rows = (ExactRows if isinstance(kernel, GrowingRows) else FlatRows)(vectors, metric)
        return _Filtered(allowed, ids, rows, None, _NO_COUNTS, vectors.nbytes + 16 * len(ids))
    counts = np.bincount(kernel.lists_of(ids), minlength=len(kernel.centroids)).astype(np.int64)
    return _Filtered(allowed, ids, None, bitmap_selector(ids), counts, int(ids[-1]) // 8 + 8 * len(ids))


def visible_ids(allowed: U64, below: int | None, dead: U64) -> U64:
    """Return the allowed ids that are below a ceiling and not dead: the same array, if it is all of them."""
    if below is not None and len(allowed) and int(allowed[-1]) >= below:
        allowed = allowed[: np.searchsorted(allowed, np.uint64(below))]
    if len(dead):
        hidden = np.isin(allowed, dead, assume_unique=True)
        if hidden.any():
            allowed = allowed[~hidden]
    return allowed


def lists_to_probe(kernel: PostingLists, request: SearchSlice, counts: I64) -> I64:
    """Return for each query the lists to probe: the nearest that have allowed ids, until these are as many as a search
    without a filter looks at. Filters may be correlated with the lists."""
    near = np.negative(request.queries @ kernel.centroids.T)
    if kernel.metric == "euclidean":
        near += np.einsum("ij,ij->i", kernel.centroids, kernel.centroids) / 2
    near[:, counts == 0] = np.inf
    order = np.argsort(near, axis=1)
    candidates = np.cumsum(counts[order], axis=1)
    candidates_min = int(counts.sum()) if request.exact else request.probes * max(1, len(kernel) // len(counts))
    candidates_min = max(candidates_min, request.k) if request.widens else candidates_min
    needed = np.maximum((candidates < candidates_min).sum(axis=1) + 1, request.probes)
    needed = np.minimum(needed, int(np.count_nonzero(counts)))
    lists = order[:, : max(1, int(needed.max()))].astype(np.int64)
    lists[np.arange(lists.shape[1]) >= needed[:, None]] = -1
    return np.ascontiguousarray(lists)
