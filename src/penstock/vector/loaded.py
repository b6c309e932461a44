"""A search kernel that was loaded from the rows of a shard, and its views for snapshots.

Thread: guarded by its owner (`live`); a view is for any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.lsm.view import View
from penstock.vector.draft import AddedVectors, VectorDraft
from penstock.vector.exact import are_among
from penstock.vector.index import VectorIndex
from penstock.vector.keys import I32, U64
from penstock.vector.operators import id_array
from penstock.vector.options import VectorOptions
from penstock.vector.removed import IndexPin
from penstock.vector.stored import (
    Centroids,
    lists_by_id,
    read_centroids,
    read_generations,
    read_sequence,
    vector_slices,
)

ANOTHER = -1  # stands for the generation of a kernel whose centroids are not in use any more
UNMEASURED_SHARE = 8  # of the lists a search looks at one, where a machine without faiss made the index


@dataclass(frozen=True, eq=False, slots=True)
class IndexView:
    """A kernel as of one record: what a search of it must see."""

    index: VectorIndex
    pin: IndexPin
    ceiling: int  # internal ids from here on are newer
    removed: U64  # deleted before, and still in memory; ascending

    @classmethod
    def of(cls, loaded: LoadedIndex) -> IndexView:
        """Return the kernel as it is now."""
        return cls(loaded.index, loaded.index.pin(), loaded.ceiling, loaded.index.removed)


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
        listed_ids, lists = lists_by_id(view, self.generation, self._centroids)
        self.index.load(*none, self._centroids.matrix)
        self.index.reserve(np.bincount(lists, minlength=len(self._centroids)).astype(np.int64))
        for ids, vectors in vector_slices(view, self._options.dimensions):
            in_lists = are_among(ids, listed_ids)
            chosen = np.zeros(len(ids), np.int32)
            chosen[in_lists] = lists[np.searchsorted(listed_ids, ids[in_lists])]
            if not in_lists.all():
                chosen[~in_lists] = self._centroids.nearest(vectors[~in_lists], self._options.metric)
            self.index.add(ids, vectors, chosen)

    def take_in(self, draft: VectorDraft) -> None:
        """Add what a record added and remove what it removed, in one step."""
        if draft.generations.current != self.generation:
            self.generation = ANOTHER  # for good: an index that was dropped and is made anew begins at 1 again
        parts = [(added, self._lists_of(added)) for added in draft.live_added()]
        self.ceiling = draft.next_id  # first: a search that saw these vectors must find it, see `service`
        if parts:
            ids = np.concatenate([added.ids for added, _ in parts])
            vectors = np.concatenate([added.vectors for added, _ in parts]) if len(parts) > 1 else parts[0][0].vectors
            self.index.update(ids, vectors, np.concatenate([lists for _, lists in parts]), id_array(draft.removed))
        elif draft.removed:
            self.index.remove(id_array(draft.removed))

    def _lists_of(self, added: AddedVectors) -> I32:
        """Return the position of each vector's centroid: from apply or, if that uses other centroids, computed here."""
        if not len(self._centroids):
            return np.zeros(len(added.ids), np.int32)
        if added.lists is not None and self.generation != ANOTHER:
            return np.searchsorted(self._centroids.numbers, added.lists).astype(np.int32)
        return self._centroids.nearest(added.vectors, self._options.metric)
