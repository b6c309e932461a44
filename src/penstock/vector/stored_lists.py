"""Posting lists that are searched as they are stored, without a kernel: the vectors of the nearest lists, one by one.

A query costs a lookup for each vector in these lists: about a millisecond for some hundred. That is less than to load a
kernel for a few queries, and much less than to compare with all vectors if a kernel has no room.

Thread: any; immutable. The view that it searches must be of the generation it was made for.
"""

from __future__ import annotations

import numpy as np
from pyroaring import BitMap64

from penstock.lsm.view import View
from penstock.vector.exact import F32, I64, ExactRows, prepared
from penstock.vector.keys import I32, POSTINGS, U64, VECTOR, id_keys, list_key
from penstock.vector.loaded import UNMEASURED_SHARE
from penstock.vector.operators import decode_ids, id_array
from penstock.vector.options import VectorOptions
from penstock.vector.stored import read_centroids, read_generations


class StoredLists:
    """The lists of one generation."""

    def __init__(self, view: View, options: VectorOptions) -> None:
        now = read_generations(view)
        self.generation = now.current
        self._options = options
        centroids = read_centroids(view, now.current, options.dimensions)
        self._numbers = centroids.numbers
        self._centroids = prepared(centroids.matrix, options.metric)
        self._halves = np.einsum("ij,ij->i", self._centroids, self._centroids) / 2
        self._probes = now.probes or len(self._numbers) // UNMEASURED_SHARE

    def search(self, view: View, queries: F32, k: int, probes: int | None, hidden: BitMap64) -> tuple[F32, I64]:
        """Return the distances and internal ids of the `k` nearest vectors of each query; inf and -1 where none is."""
        distances = np.full((len(queries), k), np.inf, np.float32)
        ids = np.full((len(queries), k), -1, np.int64)
        for row, query in enumerate(prepared(queries, self._options.metric)):
            view.check_open()
            near = -(self._centroids @ query)
            if self._options.metric == "euclidean":
                near += self._halves
            order = self._numbers[np.argsort(near, kind="stable")]
            number = min(probes or max(1, self._probes), len(order))
            members, vectors = self._members(view, order[:number], hidden)
            while probes is None and len(members) < k and number < len(order):  # look at more, as a kernel does
                number = min(2 * number, len(order))
                members, vectors = self._members(view, order[:number], hidden)
            if len(members):
                rows = ExactRows(prepared(vectors, self._options.metric), self._options.metric)
                nearest, positions = rows.search(query[None], k)
                distances[row] = nearest[0]
                ids[row] = np.where(positions[0] >= 0, members[positions[0]].astype(np.int64), -1)
        return distances, ids

    def _members(self, view: View, lists: I32, hidden: BitMap64) -> tuple[U64, F32]:
        """Return the internal ids and vectors of lists; deleted ones have no vector any more."""
        joined = BitMap64()
        for number in lists.tolist():
            joined |= decode_ids(view.get(list_key(POSTINGS, self.generation, number)))
        ids = id_array(joined - hidden)
        values = list(map(view.get, id_keys(VECTOR, ids)))
        there = np.fromiter((value is not None for value in values), np.bool_, len(values))
        matrix = np.frombuffer(b"".join(value for value in values if value is not None), "<f4")
        return ids[there], matrix.reshape(-1, self._options.dimensions).astype(np.float32, copy=False)
