"""The search kernel of a shard in memory: loaded on the first search, kept up to date by apply, never the truth.

A search of a snapshot uses the kernel as well, with a ceiling of internal ids and the ids that were deleted before it;
a pin keeps vectors in memory that were deleted since. A new generation of centroids makes a new kernel; snapshots keep
the one they were taken with.

Thread: any. `_lock` guards the kernel against apply, `_loading` makes loads take turns; a load does not hold `_lock`
while it reads, and catches up with what was applied meanwhile.
Invariant: between two records the kernel has the vectors of the tree, or there is none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import Backpressure, CorruptionError
from penstock.host import threads
from penstock.lsm.rows import Columns, bytes_list, offsets_of
from penstock.lsm.snapshot import Snapshot
from penstock.lsm.view import View
from penstock.vector.attributes import attribute_table, join_tables
from penstock.vector.draft import (
    AddedVectors,
    Centroids,
    VectorDraft,
    read_centroids,
    read_generations,
    read_postings,
    read_sequence,
    record_key,
    split_record,
)
from penstock.vector.index import IndexPin, VectorIndex
from penstock.vector.keys import F32, I32, RECORD, U64, VECTOR, id_range, ids_of
from penstock.vector.operators import id_array
from penstock.vector.options import VectorOptions
from penstock.vector.training import choose_probes, recalls

SAMPLE_MAX = 128  # queries in the sample
SAMPLE_EVERY = 16  # of as many queries one replaces another, when the sample is full
ADAPT_EVERY = 1_000  # searches
RECALL_QUERIES = 64  # on which recall is measured
RECORDS_BYTES_MAX = 64 << 20  # of cached records
RECORD_OVERHEAD = 200
UNMEASURED_SHARE = 8  # of the lists a search looks at one, where a machine without faiss made the index
ID_BYTES = 32  # memory of an id in a kernel, approximately
CONDITIONS_MAX = 16  # whose allowed ids are cached
DELETED_MAX = 4_096  # deleted records in cached columns of attributes, beside as many as there are others


@dataclass(frozen=True, eq=False, slots=True)
class RemovedIds:
    """Internal ids that were deleted, and are still in memory for older snapshots."""

    ids: U64

    def to_array(self) -> U64:
        return self.ids


@dataclass(frozen=True, eq=False, slots=True)
class IndexView:
    """A kernel as of one record: what a search of it must see."""

    index: VectorIndex
    pin: IndexPin
    ceiling: int  # internal ids from here on are newer
    gone: U64  # deleted before, and still in memory; ascending

    @classmethod
    def of(cls, loaded: LoadedIndex) -> IndexView:
        """Return the kernel as it is now."""
        return cls(loaded.index, loaded.index.pin(), loaded.ceiling, loaded.index.removed)


@dataclass(frozen=True, eq=False, slots=True)
class AttributeColumns:
    """The attributes of all records below a ceiling, in the order of internal ids; deleted ones may be among them."""

    lsn: int  # records that were deleted up to here may be missing
    ceiling: int
    ids: U64
    table: pa.Table


# -- reading rows


def vector_slices(view: View, dimensions: int, start: int = 0, end: int | None = None) -> Iterator[tuple[U64, F32]]:
    """Yield internal ids in [start, end), ascending, and their vectors."""
    for columns in view.scan_columns(*id_range(VECTOR, start, end)):
        yield ids_of(columns.keys), matrix_of(columns, dimensions)


def matrix_of(columns: Columns, dimensions: int) -> F32:
    """Return the values of rows of vectors as a matrix, without a copy where that is possible."""
    offsets = offsets_of(columns.values)
    if len(columns) and not bool((np.diff(offsets) == 4 * dimensions).all()):
        raise CorruptionError("vectors", 0, f"a vector does not have {dimensions} dimensions")
    data = np.frombuffer(columns.values.buffers()[2], np.uint8) if len(columns) else np.zeros(0, np.uint8)
    return data[int(offsets[0]) : int(offsets[-1])].view("<f4").reshape(-1, dimensions)


def record_slices(view: View, start: int = 0, end: int | None = None) -> Iterator[tuple[U64, list[bytes], list[bytes]]]:
    """Yield internal ids in [start, end), ascending, with their external ids and encoded attributes."""
    for columns in view.scan_columns(*id_range(RECORD, start, end)):
        pairs = list(map(split_record, bytes_list(columns.values)))
        yield ids_of(columns.keys), [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def lists_by_id(view: View, generation: int, centroids: Centroids) -> tuple[U64, I32]:
    """Return the internal ids in the posting lists of a generation, ascending, and the place of each one's centroid."""
    places = {number: place for place, number in enumerate(centroids.numbers.tolist())}
    parts = [
        (id_array(ids), places[number]) for number, ids in read_postings(view, generation) if ids and number in places
    ]
    if not parts:
        return np.zeros(0, np.uint64), np.zeros(0, np.int32)
    ids = np.concatenate([some for some, _ in parts])
    lists = np.concatenate([np.full(len(some), place, np.int32) for some, place in parts])
    order = np.argsort(ids, kind="stable")
    return ids[order], lists[order]


class LoadedIndex:
    """A kernel and the centroids that it was loaded with."""

    def __init__(self, view: View, options: VectorOptions, generation: int | None = None) -> None:
        """Load the vectors of a view, in the lists of a generation; None: of the one in use."""
        generations = read_generations(view)
        self.generation = generations.current if generation is None else generation
        self._options = options
        self.index = VectorIndex(options.dimensions, options.metric)
        self.ceiling = read_sequence(view).next
        self._centroids = (
            read_centroids(view, self.generation, options.dimensions)
            if self.generation
            else Centroids(np.zeros(0, np.int32), np.zeros((0, options.dimensions), np.float32))
        )
        self._read(view)
        if self.generation and generation is None:
            probes = generations.probes or self.index.lists // UNMEASURED_SHARE
            self.index.probes = min(max(1, probes), self.index.lists)

    def _read(self, view: View) -> None:
        """Read everything: posting lists that lack a vector, after damage, do not hide it."""
        none = np.zeros(0, np.uint64), np.zeros((0, self._options.dimensions), np.float32), np.zeros(0, np.int32)
        if not len(self._centroids):
            self.index.load(*none, None)
            for ids, vectors in vector_slices(view, self._options.dimensions):
                self.index.add(ids, vectors, np.zeros(len(ids), np.int32))
            return
        known, lists = lists_by_id(view, self.generation, self._centroids)
        self.index.load(*none, self._centroids.matrix)
        self.index.reserve(np.bincount(lists, minlength=len(self._centroids)).astype(np.int64))
        for ids, vectors in vector_slices(view, self._options.dimensions):
            places = np.searchsorted(known, ids)
            found = np.zeros(len(ids), np.bool_)
            if len(known):
                found = known[np.minimum(places, len(known) - 1)] == ids
            chosen = np.zeros(len(ids), np.int32)
            chosen[found] = lists[places[found]]
            if not found.all():
                chosen[~found] = self._centroids.nearest(vectors[~found], self._options.metric)
            self.index.add(ids, vectors, chosen)

    def take_in(self, draft: VectorDraft) -> None:
        """Add what a record added and remove what it removed, in one step."""
        parts = [(some, self._lists_of(some, draft.generations.current)) for some in draft.live_added()]
        if parts:
            ids = np.concatenate([some.ids for some, _ in parts])
            vectors = np.concatenate([some.vectors for some, _ in parts]) if len(parts) > 1 else parts[0][0].vectors
            self.index.update(ids, vectors, np.concatenate([lists for _, lists in parts]), id_array(draft.gone))
        elif draft.gone:
            self.index.remove(id_array(draft.gone))
        self.ceiling = draft.next_id

    def _lists_of(self, some: AddedVectors, generation: int) -> I32:
        """Return the place of each vector's centroid, as apply found it or, for another generation, anew."""
        if not len(self._centroids):
            return np.zeros(len(some.ids), np.int32)
        if some.lists is not None and generation == self.generation:
            return np.searchsorted(self._centroids.numbers, some.lists).astype(np.int32)
        return self._centroids.nearest(some.vectors, self._options.metric)


class IndexBudget:
    """The memory that the kernels of a store may take together; a shard that does not fit is searched in its files."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._lock = threads.lock("vector.budget")
        self._users: weakref.WeakSet[LiveIndex] = weakref.WeakSet()  # guarded by _lock

    def join(self, user: LiveIndex) -> None:
        """Count the kernels of a shard from now on."""
        with self._lock:
            self._users.add(user)

    def fits(self, user: LiveIndex, size: int) -> bool:
        """Whether the kernels of a shard may take `size` bytes, beside those of the others."""
        with self._lock:
            others = [other for other in self._users if other is not user]
        return size + sum(other.memory_bytes() for other in others) <= self.bytes_max


class LiveIndex:
    """The kernel of one shard."""

    def __init__(
        self, options: VectorOptions, take_snapshot: Callable[[], Snapshot], budget: IndexBudget | None = None
    ) -> None:
        self._options = options
        self._budget = IndexBudget(1 << 62) if budget is None else budget
        self._budget.join(self)
        self._take_snapshot = take_snapshot
        self._lock = threads.lock("vector.live")
        self._loading = threads.lock("vector.loading")
        self._loaded: LoadedIndex | None = None  # guarded by _lock
        self._lsn = 0  # guarded by _lock: of the last record that was applied, or was in the snapshot of a load
        self._waiting: list[VectorDraft] | None = None  # guarded by _lock: records applied while an index is loaded
        self._older: tuple[weakref.ref[VectorIndex], ...] = ()  # guarded by _lock: kernels of older snapshots
        self._columns: AttributeColumns | None = None  # replaced whole
        self._allowed: dict[Hashable, tuple[AttributeColumns, U64]] = {}
        self.records: dict[int, tuple[str, bytes]] = {}  # a cache, by internal id, whose record never changes
        self._records_bytes = 0
        self._searches = 0  # approximate
        self._sample: list[F32] = []  # of queries that were searched; its elements are replaced
        self._adapted_at = 0

    @property
    def index(self) -> VectorIndex | None:
        """The kernel, if it is loaded: a search of what is applied may use it as it is."""
        loaded = self._loaded
        return loaded.index if loaded is not None and loaded.index.loaded else None

    @property
    def generation(self) -> int | None:
        """The generation of centroids that the kernel has; None if it is not loaded."""
        loaded = self._loaded
        return None if loaded is None else loaded.generation

    def memory_bytes(self) -> int:
        """Return the memory of the kernel, of those that older snapshots have, and of attributes."""
        columns, index = self._columns, self.index
        now = (0 if index is None else index.memory_bytes()) + (0 if columns is None else columns.table.nbytes)
        return now + self._older_bytes()

    def _older_bytes(self) -> int:
        return sum(index.memory_bytes() for some in self._older if (index := some()) is not None)

    def fits(self, count: int) -> bool:
        """Whether the kernel of `count` vectors may be in memory."""
        return self._budget.fits(self, count * (4 * self._options.dimensions + ID_BYTES) + self._older_bytes())

    def _keep_counting(self, loaded: LoadedIndex | None) -> None:
        """Count a kernel that only snapshots have, as long as they have it. Requires: _lock."""
        if loaded is not None:
            self._older = (*(some for some in self._older if some() is not None), weakref.ref(loaded.index))

    # -- apply

    def applied(self, draft: VectorDraft) -> None:
        """Take in a record that was applied. Can be repeated."""
        with self._lock:
            if draft.lsn <= self._lsn:
                return
            waiting = self._waiting  # read once: a load that ends sets it to None without the lock
            if waiting is not None and (not waiting or waiting[-1].lsn < draft.lsn):
                waiting.append(draft)
            loaded, done = self._loaded, False
            try:
                if loaded is not None:
                    loaded.take_in(draft)
                done = loaded is None or not draft.added or self.fits(loaded.index.count_in_memory)
            finally:
                if not done:  # it grew too large, or may be half changed: the next search looks at the files
                    self._loaded = None
                    self._keep_counting(loaded)
            self._lsn = draft.lsn

    # -- views

    def view(self, snapshot: Snapshot) -> IndexView | None:
        """Return the kernel as of a snapshot; None if it is not loaded, or is not at that record."""
        with self._lock:
            loaded = self._loaded
            if loaded is None or not loaded.index.loaded or self._lsn != snapshot.lsn:
                return None
            return IndexView.of(loaded)

    def view_of(self, snapshot: Snapshot) -> IndexView | None:
        """Return a kernel as of a snapshot: the live one if that can be loaded from it, else one for it alone.

        None if there is no memory for it.
        """
        with self._loading:
            view = self.view(snapshot)
            if view is None and self.index is None:
                view = self._load(lambda: snapshot)
            if view is None:
                count, live = read_sequence(snapshot).count, self.index
                if self.fits(count if live is None else count + live.count_in_memory):
                    loaded = LoadedIndex(snapshot, self._options)
                    with self._lock:
                        self._keep_counting(loaded)
                    view = IndexView.of(loaded)
            return view

    def load(self) -> VectorIndex:
        """Return the kernel of what is applied."""
        index = self.index
        if index is None:
            with self._loading:
                index = self.index
                if index is None:
                    index = self._load_now()
        return index

    def refresh(self) -> None:
        """Replace a kernel that is loaded by one of the current centroids; searches go on meanwhile."""
        with self._loading:
            if self.index is not None:
                self._load_now()

    def _load_now(self) -> VectorIndex:
        taken: list[Snapshot] = []

        def take() -> Snapshot:
            taken.append(self._take_snapshot())
            return taken[0]

        try:
            view = self._load(take)
        finally:
            for snapshot in taken:
                snapshot.close()
        if view is None:
            raise Backpressure("a write to this vector table was interrupted and is being applied again: retry")
        return view.index

    def _load(self, take: Callable[[], Snapshot]) -> IndexView | None:
        """Load from a snapshot, catch up and install; return its view. None if it is older than what is applied.

        Requires: _loading.
        """
        try:
            with self._lock:
                self._waiting = []
                began = self._lsn
            snapshot = take()
            if snapshot.lsn < began:
                return None
            loaded = LoadedIndex(snapshot, self._options)
            view = IndexView.of(loaded)  # before it catches up: its pin keeps what is removed now
            with self._lock:
                for draft in self._waiting:
                    if draft.lsn > snapshot.lsn:
                        loaded.take_in(draft)
                self._keep_counting(self._loaded)
                self._loaded = loaded
                self._lsn = max(self._lsn, snapshot.lsn)
            return view
        finally:
            self._waiting = None

    # -- records

    def record(self, number: int, get: Callable[[bytes], bytes | None]) -> tuple[str, bytes] | None:
        """Return the external id and encoded attributes of an internal id; None if it was deleted."""
        known = self.records.get(number)
        if known is not None:
            return known
        value = get(record_key(number))
        if value is None:
            return None
        external, attributes = split_record(value)
        known = external.decode(), attributes
        self._records_bytes += len(value) + RECORD_OVERHEAD
        if self._records_bytes > RECORDS_BYTES_MAX:
            self.records, self._records_bytes = {}, 0
        self.records[number] = known
        return known

    # -- recall

    def sample(self, query: F32) -> None:
        """Keep some of the queries that are searched; `query` must not change."""
        self._searches += 1
        if len(self._sample) < SAMPLE_MAX:
            self._sample.append(query)
        elif not self._searches % SAMPLE_EVERY:
            self._sample[self._searches // SAMPLE_EVERY % SAMPLE_MAX] = query

    def adapt(self) -> None:
        """Choose how many lists a search looks at by the recall of sampled queries, if there are many new ones."""
        index = self.index
        if index is None or index.lists < 2 or self._searches < self._adapted_at + ADAPT_EVERY:
            return
        self._adapted_at = self._searches
        index.probes, _ = choose_probes(index, np.stack(self._sample))

    def recall(self, k: int = 10) -> tuple[float | None, int]:
        """Return the recall of searches at default settings, on a sample of queries, and the size of the sample."""
        index, queries = self.index, self._sample[:RECALL_QUERIES]
        if index is None or not queries or not index.count:
            return None, 0
        return float(recalls(index, np.stack(queries), k, index.probes).mean()), len(queries)

    # -- attributes

    def columns(self, view: View, lsn: int, ceiling: int, count: int) -> AttributeColumns:
        """Return the attributes of all records of a view at an LSN, and perhaps of deleted ones."""
        known = self._columns
        if known is None or known.lsn > lsn or len(known.ids) > 2 * count + DELETED_MAX:
            known = AttributeColumns(lsn, 0, np.zeros(0, np.uint64), attribute_table([]))
        if known.ceiling >= ceiling:
            return known
        ids, tables = [known.ids], [known.table]
        for some, _, encoded in record_slices(view, known.ceiling, ceiling):
            ids.append(some)
            tables.append(attribute_table(encoded))
        found = AttributeColumns(lsn, ceiling, np.concatenate(ids), join_tables(tables))
        newest = self._columns
        if newest is None or newest.lsn < lsn:
            self._columns = found
        return found

    def allowed(self, key: Hashable | None, columns: AttributeColumns, find: Callable[[], Any]) -> U64:
        """Return the internal ids that pass a condition, from a cache if the condition has a key."""
        known = None if key is None else self._allowed.get(key)
        if known is not None and known[0] is columns:
            return known[1]
        ids: U64 = columns.ids[find()]
        if key is not None:
            if len(self._allowed) >= CONDITIONS_MAX:
                self._allowed = {}
            self._allowed[key] = columns, ids
        return ids
