"""The search kernel of a shard in memory: kept up to date by apply, never the truth.

It is loaded by a search, or by the owner's maintenance. The first few searches of a shard with lists do not wait for
it: they look into the lists as they are stored (`stored_lists`). So do all searches while it is being loaded, or if it
has no room.

A search of a snapshot uses the kernel as well, with a ceiling of internal ids and the ids that were deleted before it;
a pin keeps vectors in memory that were deleted since. A new generation of centroids makes a new kernel; snapshots keep
the one they were taken with.

Thread: any. `_lock` guards the kernel against apply, `_loading` makes loads take turns; a load does not hold `_lock`
while it reads, and catches up with what was applied meanwhile.
Invariants: (1) between two records the kernel has the vectors of the tree, or there is none. (2) the kernels and caches
of a store take at most its `memory_bytes_max`, but for what one record and one load add.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import Backpressure
from penstock.host import threads
from penstock.lsm.file_pieces import size_of
from penstock.lsm.snapshot import Snapshot
from penstock.vector.columns import RecordCache
from penstock.vector.draft import VectorDraft
from penstock.vector.index import VectorIndex
from penstock.vector.keys import RECORD, id_range
from penstock.vector.lists import faiss_available
from penstock.vector.loaded import IndexView, LoadedIndex
from penstock.vector.options import VectorOptions
from penstock.vector.sampling import SearchedQueries
from penstock.vector.stored import read_generations, read_sequence
from penstock.vector.stored_lists import StoredLists

ID_BYTES = 32  # memory of an id in a kernel, approximately
COLUMNS_FACTOR = 3  # memory of columns of records, by their bytes in files
COLD_QUERIES = 32  # that are searched in the stored lists before a kernel is loaded for them
LOAD_ROWS_MAX = 300_000  # a larger kernel is loaded by the owner's maintenance: a search would wait for seconds
LOAD_WAIT_S = 60.0  # for a kernel that another thread loads


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
    """The kernel of one shard, and caches beside it."""

    def __init__(
        self, options: VectorOptions, take_snapshot: Callable[[], Snapshot], budget: IndexBudget | None = None
    ) -> None:
        self._options = options
        self._budget = IndexBudget(1 << 62) if budget is None else budget
        self._budget.join(self)
        self._take_snapshot = take_snapshot
        self._lock = threads.lock("vector.live")
        self._loading = threads.lock("vector.loading")
        self.loaded: LoadedIndex | None = None  # guarded by _lock
        self._lsn = 0  # guarded by _lock: of the last record that was applied, or was in the snapshot of a load
        self._waiting: list[VectorDraft] | None = None  # guarded by _lock: records applied while an index is loaded
        self._older: tuple[weakref.ref[VectorIndex], ...] = ()  # guarded by _lock: kernels of older snapshots
        self.cache = RecordCache(lambda: self._budget.bytes_max)
        self.sample = SearchedQueries()
        self._cold = 0  # queries that were searched without a kernel since there was one; approximate
        self._stored: tuple[int, StoredLists] | None = None  # the LSN of its snapshot; replaced whole
        self._reindexed = 0  # the LSN of the last record that changed the index in another way than by vectors

    @property
    def index(self) -> VectorIndex | None:
        """The kernel, if it is loaded: a search of what is applied may use it as it is."""
        loaded = self.loaded
        return loaded.index if loaded is not None and loaded.index.loaded else None

    # -- memory

    def memory_bytes(self) -> int:
        """Return the memory of the kernel, of those that older snapshots have, and of cached records."""
        index = self.index
        return (0 if index is None else index.memory_bytes()) + self._older_bytes() + self.cache.memory_bytes()

    def _older_bytes(self) -> int:
        return sum(index.memory_bytes() for reference in self._older if (index := reference()) is not None)

    def fits(self, count: int) -> bool:
        """Whether the kernel of `count` vectors may be in memory; caches are dropped for it."""
        return self._has_room(count * (4 * self._options.dimensions + ID_BYTES))

    def _has_room(self, size: int) -> bool:
        size += self._older_bytes()
        if self._budget.fits(self, size + self.cache.memory_bytes()):
            return True
        if not self._budget.fits(self, size):
            return False
        self.cache.clear()
        return True

    def columns_fit(self, snapshot: Snapshot) -> bool:
        """Whether the columns of a snapshot's records may be in memory, beside the kernel."""
        size = COLUMNS_FACTOR * size_of(snapshot.version, *id_range(RECORD))
        index, columns = self.index, self.cache.columns
        kernel = 0 if index is None else index.memory_bytes()
        cached_bytes = 0 if columns is None else columns.nbytes
        return self._budget.fits(self, max(size, cached_bytes) + kernel + self._older_bytes())

    def _keep_counting(self, loaded: LoadedIndex | None) -> None:
        """Count a kernel that only snapshots have, as long as they have it. Requires: _lock."""
        if loaded is not None:
            self._older = (
                *(reference for reference in self._older if reference() is not None),
                weakref.ref(loaded.index),
            )

    # -- apply

    def applied(self, draft: VectorDraft) -> None:
        """Take in a record that was applied. Can be repeated."""
        with self._lock:
            if draft.reindexed:
                self._reindexed = max(self._reindexed, draft.lsn)
            if draft.lsn <= self._lsn:
                return
            waiting = self._waiting  # read once: a load that ends sets it to None without the lock
            if waiting is not None and (not waiting or waiting[-1].lsn < draft.lsn):
                waiting.append(draft)
            loaded, done = self.loaded, False
            try:
                if loaded is not None:
                    loaded.take_in(draft)
                done = loaded is None or not draft.added or self._has_room(loaded.index.memory_bytes())
            finally:
                if not done:  # it grew too large, or may be half changed: the next search reads the files
                    self.loaded = None
                    self._keep_counting(loaded)
            self._lsn = draft.lsn

    # -- searches without a kernel

    def stored_lists(self, snapshot: Snapshot, queries: int) -> StoredLists | None:
        """Return the lists as they are stored, if these queries should be searched there; None to use a kernel."""
        generations = read_generations(snapshot)
        if not generations.current or not faiss_available():
            return None  # without faiss every search is exact
        self._cold += queries
        count = read_sequence(snapshot).count
        if self._cold > COLD_QUERIES and count <= LOAD_ROWS_MAX and self._waiting is None and self.fits(count):
            return None
        lsn, stored = self._stored or (0, None)
        # The number of a generation is not enough: an index that was dropped and is made anew begins at 1 again.
        if stored is None or stored.generation != generations.current or min(lsn, snapshot.lsn) < self._reindexed:
            stored = StoredLists(snapshot, self._options)
            self._stored = snapshot.lsn, stored
        return stored

    def maintain(self) -> None:
        """Load the kernel if searches went without, and choose how many lists a search looks at."""
        if self._cold and self.index is None:
            snapshot = self._take_snapshot()
            try:
                fits = self.fits(read_sequence(snapshot).count)
            finally:
                snapshot.close()
            if fits:
                self.load()
        index = self.index
        if index is not None:
            self.sample.adapt(index)

    # -- views

    def view(self, snapshot: Snapshot) -> IndexView | None:
        """Return the kernel as of a snapshot; None if it is not loaded, or is not at that record."""
        with self._lock:
            loaded = self.loaded
            if loaded is None or not loaded.index.loaded or self._lsn != snapshot.lsn:
                return None
            return IndexView.of(loaded)

    def view_of(self, snapshot: Snapshot) -> IndexView | None:
        """Return a kernel as of a snapshot: the live one if that can be loaded from it, else one for it alone.

        None if there is no memory for it.
        """
        with self._take_turn():
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
            with self._take_turn():
                index = self.index
                if index is None:
                    index = self._load_now()
        return index

    def refresh(self) -> None:
        """Replace a kernel that is loaded by one of the current centroids; searches go on meanwhile."""
        with self._take_turn():
            index = self.index
            if index is None:
                return
            if self._has_room(2 * index.memory_bytes()):
                self._load_now()
            else:  # not both at once: searches look into the stored lists until it is loaded again
                with self._lock:
                    self._keep_counting(self.loaded)
                    self.loaded = None
                self._cold = 1

    @contextmanager
    def _take_turn(self) -> Iterator[None]:
        if not self._loading.acquire(timeout=LOAD_WAIT_S):
            raise Backpressure(f"the index of a vector table takes longer than {LOAD_WAIT_S:g} s to load: search again")
        try:
            yield
        finally:
            self._loading.release()

    def _load_now(self) -> VectorIndex:
        """Load what is applied. Requires: _loading."""
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
                self._keep_counting(self.loaded)
                self.loaded = loaded
                self._lsn = max(self._lsn, snapshot.lsn)
            self._cold, self._stored = 0, None
            return view
        finally:
            self._waiting = None
