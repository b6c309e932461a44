"""A sample of the queries that were searched, to measure recall and to choose how many lists a search looks at.

Thread: any; `adapt` one at a time. Counts are approximate.
"""

from __future__ import annotations

import weakref

import numpy as np

from penstock.vector.index import VectorIndex
from penstock.vector.keys import F32
from penstock.vector.training import choose_probes, recalls

SAMPLE_MAX = 128  # queries in the sample
SAMPLE_EVERY = 16  # when the sample is full, one query in SAMPLE_EVERY replaces another
ADAPT_FIRST = 1_000  # searches before the first measurement of recall
ADAPT_SHARE = 0.1  # of the vectors: it is measured again when more than this share changed
RECALL_QUERIES = 64  # on which recall is measured


class SearchedQueries:
    """The sampled queries of one shard."""

    def __init__(self) -> None:
        self._searches = 0
        self._queries: list[F32] = []  # its elements are replaced
        self._due = ADAPT_FIRST  # searches
        self._adapted: tuple[weakref.ref[VectorIndex], int] | None = None  # the kernel that was measured, its changes

    def add(self, query: F32) -> None:
        """Keep a copy of some of the queries that are searched."""
        self._searches = number = self._searches + 1
        if number <= SAMPLE_MAX:
            self._queries.append(query.copy())
        elif not number % SAMPLE_EVERY:
            self._queries[number // SAMPLE_EVERY % len(self._queries)] = query.copy()

    def adapt(self, index: VectorIndex) -> None:
        """Choose how many lists a search looks at by the recall of the sample.

        That costs an exact search of the sample, so it is done when the searches have doubled since, or the vectors
        changed.
        """
        if index.lists < 2 or self._searches < ADAPT_FIRST:
            return
        last = self._adapted
        changed = last is None or last[0]() is not index or index.changes - last[1] > ADAPT_SHARE * index.count
        if changed or self._searches >= self._due:
            self._due, self._adapted = 2 * self._searches, (weakref.ref(index), index.changes)
            index.probes, _ = choose_probes(index, np.stack(self._queries))

    def recall(self, index: VectorIndex, k: int = 10) -> tuple[float | None, int]:
        """Return the recall of searches at default settings on a sample of queries, and the size of the sample."""
        queries = self._queries[:RECALL_QUERIES]
        if not queries or not index.count:
            return None, 0
        return float(recalls(index, np.stack(queries), k, index.probes).mean()), len(queries)
