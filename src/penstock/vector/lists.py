"""Posting lists in memory, searched by faiss.

faiss has no part in what is stored: the lists, the centroids and the list of each vector are given by the caller.
Entries go into the lists directly, because `IndexIVF.add` starts threads and assigns lists by itself.

Thread: guarded by the owner (`VectorIndex`): searches run side by side, a change runs alone.
Invariants: (1) the ids of a list ascend. (2) `_ids` ascend and have the list of every id in `_lists`; -1: dropped.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import Invalid
from penstock.vector.exact import F32, I64, U64
from penstock.vector.options import Metric

I32: TypeAlias = npt.NDArray[np.int32]

SCRATCHES_MAX = 8  # values of k with spare buffers, and buffers of each
PARAMETERS_MAX = 64
SPARSE = 1 << 12  # a set of ids with fewer than one in SPARSE numbers is a hash set, not a bitmap
ONE_THREAD_SIZE = 1 << 19  # numbers in centroids: for a product with more, BLAS may start threads
FLAT_QUERIES = 16  # from 20 on faiss computes squared distances by a product, which is inexact far from the origin
_faiss: Any = None


def faiss_installed() -> bool:
    """Whether faiss can be imported, which this does."""
    try:
        load_faiss()
    except Invalid:
        return False
    return True


def faiss_available() -> bool:
    """Whether faiss is installed; it is not imported."""
    if "faiss" in sys.modules:
        return sys.modules["faiss"] is not None
    return importlib.util.find_spec("faiss") is not None


def load_faiss() -> Any:
    """Return the module faiss; `Invalid` if it is not installed."""
    global _faiss  # noqa: PLW0603 - an import costs a third of a second: only those who search an index pay it
    if _faiss is None:
        try:
            _faiss = importlib.import_module("faiss")
        except ImportError as error:
            raise Invalid(
                f"an index of vectors needs faiss ({error}): run pip install 'penstock[vector]'; "
                "until then every search is exact"
            ) from None
    return _faiss


def _native(index: Any, kind: str, name: str) -> Callable[..., Any]:
    """Return a method of an index of a kind without the layer of Python around it, which costs a microsecond."""
    module = sys.modules[type(index).__module__]
    for native in (getattr(module, attribute) for attribute in vars(module) if attribute.startswith("_swigfaiss")):
        function = getattr(native, f"{kind}_{name}", None)
        if function is not None:
            return partial(function, index.this)
    method: Callable[..., Any] = getattr(index, f"{name}_c")
    return method


class Scratch:
    """Buffers of a search of one vector, with pointers that faiss takes: making those costs 2 us."""

    __slots__ = (
        "at_distances", "at_ids", "at_list", "at_nearness", "at_query", "distances", "ids", "list", "nearness", "ones",
        "query", "scale", "scores",
    )  # fmt: skip

    def __init__(self, dimensions: int, lists: int, k: int) -> None:
        self.query = np.empty(dimensions, np.float32)
        self.scores = np.empty(lists, np.float32)
        self.list, self.nearness = np.zeros(1, np.int64), np.zeros(1, np.float32)
        self.distances, self.ids = np.empty(k, np.float32), np.empty(k, np.int64)
        self.ones = np.ones(k, np.float32)  # numpy takes these two arrays sooner than numbers
        self.scale = np.ones((), np.float32)
        pointer = _faiss.swig_ptr
        self.at_query, self.at_distances, self.at_ids = map(pointer, (self.query, self.distances, self.ids))
        self.at_list, self.at_nearness = map(pointer, (self.list, self.nearness))


class Scratches:
    """Buffers that no search uses now.

    Thread: any. A search takes buffers out and puts them back, each by one step of the interpreter.
    """

    def __init__(self, dimensions: int, lists: int) -> None:
        self._dimensions, self._lists = dimensions, lists
        self._spare: dict[int, list[Scratch]] = {}  # by k

    def take(self, k: int) -> Scratch:
        """Return buffers for this caller alone."""
        try:
            return self._spare[k].pop()
        except (KeyError, IndexError):
            return Scratch(self._dimensions, self._lists, k)

    def give_back(self, buffers: Scratch, k: int) -> None:
        """Let other searches use buffers."""
        spare = self._spare.get(k)
        if spare is None:
            if len(self._spare) >= SCRATCHES_MAX:
                self._spare = {}
            spare = self._spare.setdefault(k, [])
        if len(spare) < SCRATCHES_MAX:
            spare.append(buffers)


class _Parameters(dict[int, Any]):
    """Parameters of searches without a selector, by probes; making them costs some us."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, probes: int) -> Any:
        if len(self) >= PARAMETERS_MAX:
            self.clear()
        self[probes] = parameters = self._make(probes)
        return parameters


class PostingLists:
    """The posting lists of a shard, with prepared vectors."""

    def __init__(self, centroids: F32, metric: Metric) -> None:
        faiss = load_faiss()
        self.centroids = np.ascontiguousarray(centroids, np.float32)
        self.metric: Metric = metric
        self._dimensions = self.centroids.shape[1]
        product = metric != "euclidean"
        self._quantizer = (faiss.IndexFlatIP if product else faiss.IndexFlatL2)(self._dimensions)
        self._quantizer.add(self.centroids)
        kind = faiss.METRIC_INNER_PRODUCT if product else faiss.METRIC_L2
        self._index = faiss.IndexIVFFlat(self._quantizer, self._dimensions, len(self.centroids), kind)
        self._index.is_trained = True
        self._inverted = self._index.invlists
        self._search = _native(self._index, "IndexIVF", "search")
        self._search_preassigned = _native(self._index, "IndexIVF", "search_preassigned")
        self._plain_parameters = _Parameters(self.parameters)
        self._transposed = np.ascontiguousarray(self.centroids.T)
        self._halves = None if product else np.einsum("ij,ij->i", self.centroids, self.centroids) / 2
        self.scratches = Scratches(self._dimensions, len(self.centroids))
        self._sizes = np.zeros(len(self.centroids), np.int64)
        self._capacities = np.zeros(len(self.centroids), np.int64)
        self._count = 0  # of _ids and _lists that are used
        self._ids: U64 = np.empty(0, np.uint64)
        self._lists: I32 = np.empty(0, np.int32)
        self._dropped = 0

    def __len__(self) -> int:
        return self._count - self._dropped

    @property
    def sizes(self) -> I64:
        """The number of entries of each list."""
        return self._sizes

    @property
    def last_id(self) -> int:
        """The highest id that was added; 0 if none was."""
        return int(self._ids[self._count - 1]) if self._count else 0

    # -- changes

    def reserve(self, sizes: I64) -> None:
        """Allocate lists of these sizes at once: lists that grow take up to twice their memory."""
        for at in np.flatnonzero(sizes > self._capacities).tolist():
            self._inverted.resize(at, int(sizes[at]))
            self._inverted.resize(at, int(self._sizes[at]))
            self._capacities[at] = sizes[at]
        self._grow(self._count + int(sizes.sum()))

    def add(self, ids: U64, vectors: F32, lists: I32) -> None:
        """Add vectors. Requires: ids ascend, and are above all that were added before."""
        count = len(ids)
        self._grow(self._count + count)
        if count == 1:
            self._append(int(lists[0]), ids.view(np.int64), vectors)
        else:
            order = np.argsort(lists, kind="stable")
            numbers, starts = np.unique(lists[order], return_index=True)
            rows, keys = np.ascontiguousarray(vectors[order]), ids[order].view(np.int64)
            for number, start, end in zip(
                numbers.tolist(), starts.tolist(), [*starts[1:].tolist(), count], strict=True
            ):
                self._append(number, keys[start:end], rows[start:end])
        self._ids[self._count : self._count + count] = ids
        self._lists[self._count : self._count + count] = lists
        self._count += count

    def _append(self, number: int, keys: I64, rows: F32) -> None:
        """Add entries to a list. Requires: both arrays are contiguous."""
        pointer = _faiss.swig_ptr
        # First: this raises for a list that does not exist, for which faiss would write to some other memory.
        size, capacity = int(self._sizes[number]) + len(keys), int(self._capacities[number])
        self._inverted.add_entries(number, len(keys), pointer(keys), pointer(rows.view(np.uint8)))
        self._sizes[number] = size
        if size > capacity:
            self._capacities[number] = max(2 * capacity, size)

    def _grow(self, count: int) -> None:
        if count > len(self._ids):
            size = max(count, len(self._ids) * 5 // 4)
            ids, lists = np.empty(size, np.uint64), np.empty(size, np.int32)
            ids[: self._count], lists[: self._count] = self._ids[: self._count], self._lists[: self._count]
            self._ids, self._lists = ids, lists

    def drop(self, ids: U64) -> None:
        """Take vectors out of their lists. Requires: they are in them."""
        at = np.searchsorted(self._ids[: self._count], ids)
        lists = self._lists[at]
        for number in set(lists.tolist()):
            self._cut(number, ids[lists == number])
        self._lists[at] = -1
        self._dropped += len(ids)
        if 2 * self._dropped > self._count:
            live = self._lists[: self._count] >= 0
            self._ids, self._lists = self._ids[: self._count][live], self._lists[: self._count][live]
            self._count, self._dropped = len(self._ids), 0

    def _cut(self, number: int, ids: U64) -> None:
        """Take entries out of a list, and move those behind them up."""
        keys, vectors = self.entries(number)
        out = np.searchsorted(keys, ids)
        first, left = int(out[0]), len(keys) - len(out)
        if len(out) == 1:
            keys[first:left], vectors[first:left] = keys[first + 1 :], vectors[first + 1 :]
        else:
            keep = np.ones(len(keys) - first, np.bool_)
            keep[out - first] = False
            keys[first:left], vectors[first:left] = keys[first:][keep], vectors[first:][keep]
        del keys, vectors  # they are views of the list, which may move
        self._inverted.resize(number, left)
        self._sizes[number] = left

    def copied(self) -> PostingLists:
        """Return a copy, while searches run on this one."""
        copy = PostingLists(self.centroids, self.metric)
        copy.reserve(self._sizes)
        live = self._lists[: self._count] >= 0
        ids, lists = self._ids[: self._count][live], self._lists[: self._count][live]
        for start in range(0, len(ids), 65_536):
            some = slice(start, start + 65_536)
            copy.add(ids[some], self.vectors(ids[some]), lists[some])
        return copy

    # -- reading

    def entries(self, number: int) -> tuple[U64, F32]:
        """Return views of the ids and vectors of a list, valid until the next change."""
        size = int(self._sizes[number])
        if not size:
            return np.zeros(0, np.uint64), np.zeros((0, self._dimensions), np.float32)
        keys: U64 = _faiss.rev_swig_ptr(self._inverted.get_ids(number), size).view(np.uint64)
        codes = _faiss.rev_swig_ptr(self._inverted.get_codes(number), size * 4 * self._dimensions)
        return keys, codes.view(np.float32).reshape(size, self._dimensions)

    def present(self, ids: U64) -> npt.NDArray[np.bool_]:
        """Return which of the ids are in the lists."""
        return self.lists_of(ids) >= 0

    def lists_of(self, ids: U64) -> I32:
        """Return the list of each id; -1 if it is in none."""
        listed_ids = self._ids[: self._count]
        at = np.minimum(np.searchsorted(listed_ids, ids), max(self._count - 1, 0))
        if not self._count:
            return np.full(len(ids), -1, np.int32)
        return np.where(listed_ids[at] == ids, self._lists[at], np.int32(-1))

    def vectors(self, ids: U64) -> F32:
        """Return a copy of the vectors of some ids. Requires: they are in the lists."""
        gathered = np.empty((len(ids), self._dimensions), np.float32)
        if not len(ids):
            return gathered
        lists = self.lists_of(ids)
        order = np.argsort(lists, kind="stable")
        numbers, starts = np.unique(lists[order], return_index=True)
        for number, rows in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
            keys, vectors = self.entries(number)
            gathered[rows] = vectors[np.searchsorted(keys, ids[rows])]
        return gathered

    def parameters(self, probes: int, selector: Any = None) -> Any:
        """Return the parameters of a search."""
        options = {} if selector is None else {"sel": selector}
        return _faiss.SearchParametersIVF(nprobe=probes, **options)

    def search(self, queries: F32, k: int, probes: int, selector: Any = None) -> tuple[F32, I64]:
        """Return what faiss finds in the `probes` nearest lists: products or squared distances, and ids."""
        scores, ids = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        pointer = _faiss.swig_ptr
        parameters = self._plain_parameters[probes] if selector is None else self.parameters(probes, selector)
        self._search(len(queries), pointer(queries), k, pointer(scores), pointer(ids), parameters)
        return scores, ids

    def search_one(self, buffers: Scratch, k: int, probes: int) -> list[int]:
        """Search as `search` does, for the query in some buffers; write the distances to them, and return the ids."""
        parameters = self._plain_parameters[probes]
        if probes == 1 and self.centroids.size <= ONE_THREAD_SIZE:  # 4 us for 632 centroids; faiss takes 7
            scores = np.dot(buffers.query, self._transposed, buffers.scores)
            if self._halves is not None:
                np.subtract(scores, self._halves, scores)
            buffers.list[0] = scores.argmax()
            self._search_preassigned(
                1, buffers.at_query, k, buffers.at_list, buffers.at_nearness, buffers.at_distances, buffers.at_ids,
                False, parameters,
            )  # fmt: skip
        else:
            self._search(1, buffers.at_query, k, buffers.at_distances, buffers.at_ids, parameters)
        ids: list[int] = buffers.ids.tolist()
        return ids

    def search_lists(self, queries: F32, k: int, lists: I64, selector: Any) -> tuple[F32, I64]:
        """Search as `search` does, in the lists that are given for each query; -1 is none."""
        scores, ids = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        coarse = np.zeros(lists.shape, np.float32)
        pointer = _faiss.swig_ptr
        self._index.search_preassigned_c(
            len(queries), pointer(queries), k, pointer(lists), pointer(coarse), pointer(scores), pointer(ids), False,
            self.parameters(lists.shape[1], selector),
        )  # fmt: skip
        return scores, ids

    def memory_bytes(self) -> int:
        """Return the bytes that the lists take."""
        slots = int(np.maximum(self._capacities, self._sizes).sum())
        return slots * (4 * int(self._dimensions) + 8) + 12 * len(self._ids) + 3 * int(self.centroids.nbytes)


class FlatRows:
    """Prepared rows that faiss compares one by one, in an index of lists."""

    __slots__ = ("_index", "_search", "nbytes")

    def __init__(self, rows: F32, metric: Metric) -> None:
        self._index = (_faiss.IndexFlatL2 if metric == "euclidean" else _faiss.IndexFlatIP)(rows.shape[1])
        if len(rows):
            self._index.add(rows)
        self._search = _native(self._index, "IndexFlat", "search")
        self.nbytes = rows.nbytes

    def search(self, queries: F32, k: int) -> tuple[F32, I64]:
        """Return products or squared distances, and positions; -1: none."""
        scores, at = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        pointer = _faiss.swig_ptr
        for start in range(0, len(queries), FLAT_QUERIES):
            some = queries[start : start + FLAT_QUERIES]
            outputs = pointer(scores[start : start + FLAT_QUERIES]), pointer(at[start : start + FLAT_QUERIES])
            self._search(len(some), pointer(some), k, *outputs)
        return scores, at

    def search_one(self, buffers: Scratch, k: int) -> list[int]:
        """Search as `search` does, for the query in some buffers; write scores to them, and return the positions."""
        self._search(1, buffers.at_query, k, buffers.at_distances, buffers.at_ids)
        positions: list[int] = buffers.ids.tolist()
        return positions


def bitmap_selector(ids: U64, *, negated: bool = False) -> Any:
    """Return a selector of these ids, or of all others. Requires: they ascend."""
    size = int(ids[-1]) + 1 if len(ids) else 1
    if size > SPARSE * max(1, len(ids)):  # ids are never used again: after many upserts they are large numbers
        selector = _faiss.IDSelectorBatch(ids.astype(np.int64))
    else:
        bits = np.zeros(size, np.bool_)
        bits[ids] = True
        selector = _faiss.IDSelectorBitmap(np.packbits(bits, bitorder="little"))
    return _faiss.IDSelectorNot(selector) if negated else selector


def range_selector(below: int) -> Any:
    """Return a selector of the ids under a ceiling; as the ids of a list ascend, it costs nothing."""
    return _faiss.IDSelectorRange(0, below, True)


def both(one: Any, other: Any) -> Any:
    """Return a selector of what two selectors select."""
    return _faiss.IDSelectorAnd(one, other)
