"""The search kernel of a shard, in memory: never the truth, loaded from it, and kept up to date by apply.

Without centroids every search is exact, by numpy (`exact`). With centroids, rows are in posting lists that faiss
searches (`lists`); without faiss installed they are searched exactly. What the owner (the live view of a shard) does:

    load     once, with everything; on a new generation of centroids make a new VectorIndex instead, so that snapshots
             keep the one they were taken with
    reserve  before a load in parts: `load` with no rows, `reserve` with the final size of each list, `add` in slices.
             Lists that grow step by step take up to twice their memory
    pin      with each snapshot, which keeps the result as long as it lives: a vector that is removed later stays in
             memory, for searches with that snapshot's `below` and `deleted` (`removed`, when it was taken), until no
             pin is left
    loaded   check it before a search: an exception in the middle of a change empties the index (load it again)
    probes   the default of a search; `training.choose_probes` finds it
    allowed  pass the same array for the same condition, unchanged: what is gathered for it is cached by identity

Thread: any. Searches run side by side; a change waits for those that run (slices of a few milliseconds), and new ones
wait for it. A search that does not end in CHANGE_WAIT_S does not block a change: the change goes on with a copy.
Invariants: (1) a search sees a vector whole or not at all. (2) a vector of an id never changes; ids are never reused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from penstock.errors import Backpressure
from penstock.host import threads
from penstock.vector.exact import F32, I64, U64, GrowingRows, Mask, ids_at, prepared
from penstock.vector.filtered import FilteredIds, Kernel, SearchSlice, lists_to_probe, visible_ids
from penstock.vector.lists import (
    I32,
    FlatRows,
    PostingLists,
    Scratch,
    bitmap_selector,
    both,
    faiss_installed,
    range_selector,
)
from penstock.vector.operators import id_array
from penstock.vector.options import Metric
from penstock.vector.removed import IndexPin, RemovedIds

SLICE_WORK = 1 << 26  # multiplications of a slice of queries: some 10 ms
SLICE_QUERIES = 1_024
CHANGE_WAIT_S = 10.0
_TINY, _HUGE = 1e-30, 1e30
_ZERO, _ONE = np.float32(0), np.float32(1)
_NO_IDS: U64 = np.empty(0, np.uint64)


class VectorIndex:
    """The vectors of one shard, searched in memory."""

    def __init__(self, dimensions: int, metric: Metric) -> None:
        self.dimensions = dimensions
        self.metric: Metric = metric
        self.probes = 1  # the default of a search
        self._kernel: Kernel | None = GrowingRows(dimensions, metric)
        self._removed = RemovedIds()  # that are still in memory, for pins
        self.changes = 0  # vectors that were added or removed
        self._filtered = FilteredIds()  # replaced by a change
        self._gate = threads.lock("vector.index")  # held by a change; a search that meets one waits for it
        self._searching: set[object] = set()  # a token of each search; changed under the interpreter's lock
        self._change_waits = False
        self._idle = threading.Event()

    # -- contents

    @property
    def loaded(self) -> bool:
        """Whether the index has what was loaded and added; False after an exception within a change."""
        return self._kernel is not None

    @property
    def count(self) -> int:
        """The number of vectors that a search can find."""
        return 0 if self._kernel is None else len(self._kernel) - len(self._removed)

    @property
    def count_in_memory(self) -> int:
        """The number of vectors in memory, removed ones included that a pin keeps."""
        return 0 if self._kernel is None else len(self._kernel)

    @property
    def removed(self) -> U64:
        """The ids, ascending, that were removed and are still in memory: what a snapshot taken now must not see."""
        hidden = self._removed.hidden
        return _NO_IDS if hidden is None else hidden.ids

    @property
    def lists(self) -> int:
        """The number of posting lists; 1 if every search is exact."""
        return len(self._kernel.centroids) if isinstance(self._kernel, PostingLists) else 1

    @property
    def list_sizes(self) -> I64:
        """The number of vectors in each list, removed ones included that a pin keeps."""
        kernel = self._kernel
        return kernel.sizes.copy() if isinstance(kernel, PostingLists) else np.array([self.count], np.int64)

    def memory_bytes(self) -> int:
        """Return the bytes of memory that the index takes."""
        return self._filtered.memory_bytes() + (0 if self._kernel is None else self._kernel.memory_bytes())

    # -- changes

    def load(self, ids: U64, vectors: F32, lists: I32, centroids: F32 | None) -> None:
        """Replace everything. Without centroids every search is exact, and `lists` is not read."""
        kernel: Kernel
        if centroids is not None and len(centroids) and faiss_installed():
            kernel = PostingLists(prepared(centroids, self.metric), self.metric)
            if len(ids):
                kernel.reserve(np.bincount(lists, minlength=len(centroids)).astype(np.int64))
        else:
            kernel = GrowingRows(self.dimensions, self.metric)
        order = np.argsort(ids, kind="stable")
        step = max(1, (64 << 20) // (4 * self.dimensions))
        for start in range(0, len(order), step):
            rows = order[start : start + step]
            kernel.add(ids[rows], prepared(vectors[rows], self.metric), lists[rows])
        with self._change():
            self._kernel = kernel
            self._removed.clear()
            self._filtered = FilteredIds()
            self.probes = min(self.probes, self.lists) if self.lists > 1 else 1

    def reserve(self, sizes: I64) -> None:
        """Allocate lists of these sizes at once."""
        with self._change() as kernel:
            if isinstance(kernel, PostingLists):
                kernel.reserve(sizes)

    def add(self, ids: U64, vectors: F32, lists: I32) -> None:
        """Add vectors. Requires: ids ascend, and are above all that were added before."""
        self.update(ids, vectors, lists, _NO_IDS)

    def remove(self, ids: U64) -> None:
        """Hide these ids from searches; ids that are not there are ignored."""
        self.update(_NO_IDS, np.empty((0, self.dimensions), np.float32), np.empty(0, np.int32), ids)

    def update(self, ids: U64, vectors: F32, lists: I32, removed: U64) -> None:
        """Add vectors as `add` does, and remove others as `remove` does, in one step that no search comes between."""
        if not len(ids) and not len(removed):
            return
        rows = prepared(vectors, self.metric)
        with self._change() as kernel:
            if kernel is None:
                return
            self.changes += len(ids) + len(removed)
            if len(removed):
                self._removed.add(removed[kernel.present(removed)])
                self._filtered = FilteredIds()
            self._purge(kernel)
            if len(ids):
                kernel.add(ids, rows, lists)

    def pin(self) -> IndexPin:
        """Keep vectors that are removed from now on in memory, as long as the result is referenced."""
        with self._gate:
            return self._removed.pin()

    def _purge(self, kernel: Kernel) -> None:
        """Drop removed vectors that no snapshot needs; without lists, only when they are many."""
        if self._removed.hidden is None:
            return
        spare = self._removed.spare()
        if spare and (isinstance(kernel, PostingLists) or 4 * len(spare) > len(kernel)):
            kernel.drop(id_array(spare))
            self._removed.drop_spare()

    @contextmanager
    def _change(self) -> Iterator[Kernel | None]:
        """Wait until no search runs, and let none begin; after an exception nothing is loaded."""
        with self._gate:
            self._change_waits = True
            try:
                self._idle.clear()
                while self._searching and self._idle.wait(CHANGE_WAIT_S):
                    self._idle.clear()
                if self._searching and self._kernel is not None:
                    self._kernel = self._kernel.copied()
                self._searching.clear()  # searches that still run, or were interrupted, have the old kernel
                done = False
                try:
                    yield self._kernel
                    done = True
                finally:
                    if not done:
                        self._kernel, self._filtered = None, FilteredIds()
                        self._removed.clear()
            finally:
                self._change_waits = False

    # -- searches

    def search_one(
        self,
        query: F32,
        k: int,
        probes: int | None = None,
        square: float | None = None,
        allowed: U64 | None = None,
    ) -> tuple[list[float], list[int]]:
        """Return the distances and ids of the nearest vectors, at most `k`: what `search` returns, sooner.

        `square` is that of the length of the query, if the caller knows it.
        """
        kernel = self._kernel
        if type(kernel) is PostingLists:
            buffers = kernel.scratches.take(k)
            try:
                self._searching.add(buffers)
                if self._change_waits:
                    self._wait_for_change(buffers)
                if self._kernel is kernel and self._removed.hidden is None:
                    if allowed is None:
                        self._fill(buffers, query, square)
                        return self._search_lists(kernel, buffers, k, probes)
                    filtered = self._filtered.get(kernel, self.metric, allowed, cached=True)
                    if isinstance(filtered.rows, FlatRows):
                        self._fill(buffers, query, square)
                        distances, positions = self._result(buffers, filtered.rows.search_one(buffers, k))
                        return distances, filtered.ids[positions].tolist()
            finally:
                self._searching.discard(buffers)
                if self._change_waits:
                    self._idle.set()
                kernel.scratches.give_back(buffers, k)
        distance_rows, numbers = self.search(np.asarray(query, np.float32)[None], k, probes=probes, allowed=allowed)
        ids = numbers[0][numbers[0] >= 0].tolist()
        return distance_rows[0][: len(ids)].tolist(), ids

    def _fill(self, buffers: Scratch, query: F32, square: float | None) -> None:
        """Write the prepared query to buffers."""
        size = float(query.dot(query)) if square is None else square
        if self.metric != "cosine":
            buffers.query[:] = query
        elif _TINY < size < _HUGE:
            buffers.scale.fill(size**-0.5)
            np.multiply(query, buffers.scale, buffers.query)
        else:
            buffers.query[:] = prepared(query[None], "cosine")[0]

    def _search_lists(
        self, kernel: PostingLists, buffers: Scratch, k: int, probes: int | None
    ) -> tuple[list[float], list[int]]:
        number = probes or self.probes
        ids = kernel.search_one(buffers, k, number)
        while ids[-1] < 0 and probes is None and number < self.lists:
            number = min(2 * number, self.lists)  # the lists have fewer than k: look at more
            ids = kernel.search_one(buffers, k, number)
        return self._result(buffers, ids)

    def _result(self, buffers: Scratch, ids: list[int]) -> tuple[list[float], list[int]]:
        """Return the distances and ids of the hits, without the -1 that stand for missing ones."""
        distances: list[float]
        if ids[-1] >= 0 and self.metric == "cosine":
            nearness = buffers.distances
            distances = np.subtract(buffers.ones, nearness, nearness).tolist()
            if distances[0] < 0:  # the nearest is first
                distances = np.maximum(nearness, _ZERO, nearness).tolist()
            return distances, ids
        distances = self._nearness(buffers.distances, False, buffers.ids).tolist()
        if ids[-1] < 0:  # fewer than k: the rest is -1
            del ids[ids.index(-1) :]
        return distances[: len(ids)], ids

    def search(
        self,
        queries: F32,
        k: int,
        *,
        probes: int | None = None,
        exact: bool = False,
        allowed: U64 | None = None,
        below: int | None = None,
        deleted: U64 | None = None,
    ) -> tuple[F32, I64]:
        """Return the distances and ids of the `k` nearest vectors of each query; distance inf and id -1: none.

        Only ids that are `allowed`, `below` a ceiling and not `deleted` are seen; without `deleted`, those that are not
        removed. Requires: both arrays ascend.
        """
        queries = prepared(queries, self.metric)
        distances, ids = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        step = self._slice(probes, exact)
        for start in range(0, len(queries), step):
            some = slice(start, start + step)
            with self._search() as kernel:
                request = SearchSlice(queries[some], k, min(probes or self.probes, self.lists), probes is None, exact)
                dead = self.removed if deleted is None else deleted[kernel.present(deleted)]
                if allowed is None:
                    distances[some], ids[some] = self._find(kernel, request, below, dead)
                else:
                    distances[some], ids[some] = self._find_allowed(
                        kernel, request, visible_ids(allowed, below, dead), allowed
                    )
        return distances, ids

    def _slice(self, probes: int | None, exact: bool) -> int:
        """Return how many queries to search before a change may come between."""
        share = 1.0 if exact else (probes or self.probes) / self.lists
        work = max(1.0, min(1.0, share) * self.count * self.dimensions)
        return max(1, min(SLICE_QUERIES, int(SLICE_WORK / work)))

    @contextmanager
    def _search(self) -> Iterator[Kernel]:
        token = object()
        try:
            self._searching.add(token)
            if self._change_waits:
                self._wait_for_change(token)
            kernel = self._kernel
            if kernel is None:
                raise Backpressure("the index of a vector table is being loaded again after an error: search again")
            yield kernel
        finally:
            self._searching.discard(token)
            if self._change_waits:
                self._idle.set()

    def _wait_for_change(self, token: object) -> None:
        """Let a change go first that waits for searches, this one too: its token was there before the change was seen.

        A change says that it waits before it looks for tokens, and a search adds its token before it looks for a
        change, so at least one of them sees the other, and neither takes a lock for it.
        """
        self._searching.discard(token)
        self._idle.set()
        with self._gate:
            self._searching.add(token)

    def _find(self, kernel: Kernel, request: SearchSlice, below: int | None, dead: U64) -> tuple[F32, I64]:
        if isinstance(kernel, GrowingRows):
            visible: Mask | None = None
            if len(dead) or (below is not None and len(kernel) and int(kernel.ids[-1]) >= below):
                visible = np.ones(len(kernel), np.bool_) if below is None else kernel.ids < below
                visible[np.searchsorted(kernel.ids, dead)] = False
            return kernel.search(request.queries, request.k, visible)
        selector = self._selector(dead) if len(dead) else None
        if below is not None and below <= kernel.last_id:
            ceiling = range_selector(below)
            selector = ceiling if selector is None else both(ceiling, selector)
        probes = self.lists if request.exact else request.probes
        scores, ids = kernel.search(request.queries, request.k, probes, selector)
        while request.widens and probes < self.lists and len(few := np.flatnonzero(ids[:, -1] < 0)):
            probes = min(2 * probes, self.lists)
            scores[few], ids[few] = kernel.search(request.queries[few], request.k, probes, selector)
        return self._converted(scores, ids), ids

    def _selector(self, dead: U64) -> Any:
        """Return a selector of all but some ids; that of removed ids is cached."""
        hidden = self._removed.hidden
        if hidden is None or dead is not hidden.ids:
            return bitmap_selector(dead, negated=True)
        selector = hidden.selector
        if selector is None:
            selector = hidden.selector = bitmap_selector(dead, negated=True)
        return selector

    def _find_allowed(self, kernel: Kernel, request: SearchSlice, visible: U64, allowed: U64) -> tuple[F32, I64]:
        filtered = self._filtered.get(kernel, self.metric, visible, cached=visible is allowed)
        if filtered.rows is not None:
            distances, positions = filtered.rows.search(request.queries, request.k)
            if isinstance(filtered.rows, FlatRows):
                distances = self._converted(distances, positions)
            return distances, ids_at(filtered.ids, positions)
        assert isinstance(kernel, PostingLists)
        lists = lists_to_probe(kernel, request, filtered.counts)
        scores, ids = kernel.search_lists(request.queries, request.k, lists, filtered.selector)
        return self._converted(scores, ids), ids

    def _converted(self, scores: F32, ids: I64) -> F32:
        """Return the distances for the scores of faiss; missing hits have the id -1."""
        return self._nearness(scores, bool(ids.size and ids.min() < 0), ids)

    def _nearness(self, scores: F32, some_missing: bool, ids: I64) -> F32:
        if self.metric == "cosine":
            distances = np.subtract(_ONE, scores)
            if distances.ndim > 1 or distances.item(0) < 0:  # the nearest of one query is first
                np.maximum(distances, _ZERO, out=distances)
        elif self.metric == "dot":
            distances = np.negative(scores)
        else:
            distances = np.sqrt(np.maximum(scores, _ZERO))
        if some_missing:
            distances[ids < 0] = np.inf
        return distances
