"""The edit of one record to a vector shard: internal ids, dictionary, vectors, posting lists, all in one step.

An upsert gets a fresh internal id from the shard's sequence, which is a row of the same edit, so no id is used twice,
whatever crashes. The id it had before becomes deleted: its vector and record are removed, and it joins the set of
deleted ids, because posting lists may still hold it. The new id joins the list of its nearest centroid, in the
generation in use and in one that is being built.

Thread: the one that applies; over a snapshot, any.
Invariants: (1) an edit depends on the record and on the rows of `view` alone. (2) an internal id in a posting list has
a vector, or it is in the set of deleted ids. (3) an external id leads to an internal id that has a vector and a record,
and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap64

from penstock.lsm.memtable import Edit
from penstock.lsm.operators import VECTOR_IDS
from penstock.lsm.rows import DELETE, NEVER, PUT, Row
from penstock.lsm.view import PROBED_TOGETHER_MIN
from penstock.vector.exact import are_among
from penstock.vector.keys import (
    CENTROID,
    DELETED,
    F32,
    GENERATIONS,
    I32,
    ID_KEY_BYTES,
    POSTINGS,
    RECORD,
    SEQUENCE,
    U64,
    VECTOR,
    dictionary_keys,
    id_keys,
    list_key,
    list_range,
)
from penstock.vector.operators import decode_ids, encode_ids, id_array
from penstock.vector.options import VectorOptions
from penstock.vector.section import Deletes, IndexChange, Part, Upserts
from penstock.vector.stored import (
    Centroids,
    Generations,
    IdSequence,
    StoredRows,
    encode_generations,
    encode_sequence,
    internal_id,
    read_centroids,
    read_generations,
    read_sequence,
    record_values,
)

GENERATION_MAX = (1 << 32) - 1


@dataclass(frozen=True, eq=False, slots=True)
class AddedVectors:
    """Vectors that a record added; `lists` are those of the generation in use, None if there is none."""

    ids: U64
    vectors: F32
    lists: I32 | None


class VectorDraft:
    """The edit of one record, in the making."""

    def __init__(
        self, options: VectorOptions, rows: StoredRows, lsn: int, centroids_of: Callable[[int], Centroids] | None = None
    ) -> None:
        self.lsn = lsn
        self.added: list[AddedVectors] = []
        self.removed = BitMap64()  # internal ids that became deleted
        self.reindexed = False  # the index changed in another way than by upserts and deletes
        self._options = options
        self._rows = rows
        self._sequence_before = read_sequence(rows)
        self._next, self._count = self._sequence_before.next, self._sequence_before.count
        self._generations_before = self.generations = read_generations(rows)
        self._stored_centroids = centroids_of or (lambda number: read_centroids(rows, number, options.dimensions))
        self._centroids: dict[int, Centroids] = {}
        self._ids_by_key: dict[bytes, int] = {}  # by key of the dictionary: internal ids of this record, 0 for deleted
        self._upserted: list[tuple[list[bytes], U64]] = []  # keys and internal ids that are not in `_ids_by_key` yet
        self._put_bytes = 0  # of keys and values in `_puts`, at most: some may be removed again
        self._puts: dict[bytes, bytes] = {}
        self._dropped: dict[bytes, Row] = {}  # deletes
        self._lists: dict[tuple[int, int], BitMap64] = {}  # internal ids that join a list of a generation
        self._deleted = BitMap64()  # what joins the set of deleted ids
        self._forgotten: BitMap64 | None = None  # what leaves it
        self._ranges: list[tuple[bytes, bytes]] = []
        self._no_index = False  # all of the index that was stored before is dropped

    def add(self, part: Part) -> None:
        """Add a part of a section, in write order."""
        if isinstance(part, Upserts):
            self._upsert(part)
        elif isinstance(part, Deletes):
            self._delete(part)
        else:
            self._change(part)

    def edit(self, time_us: int) -> Edit:
        """Return the edit of all parts."""
        puts, rows = self._puts, self._dropped
        if (self._next, self._count) != (self._sequence_before.next, self._sequence_before.count):
            # Not among the puts: a memtable takes many of these at once if it has none of their keys yet.
            rows[SEQUENCE] = (PUT, encode_sequence(IdSequence(self._next, self._count)), self.lsn, NEVER)
        if self.generations != self._generations_before:
            rows[GENERATIONS] = (PUT, encode_generations(self.generations), self.lsn, NEVER)
        for (generation, number), ids in self._lists.items():
            if ids:
                rows[list_key(POSTINGS, generation, number)] = (VECTOR_IDS, encode_ids(ids), self.lsn, NEVER)
        if self._no_index:
            rows[DELETED] = (PUT, encode_ids(self._deleted), self.lsn, NEVER)
        elif self._forgotten is not None:
            left = (decode_ids(self._rows.get(DELETED)) - self._forgotten) | self._deleted
            rows[DELETED] = (PUT, encode_ids(left), self.lsn, NEVER)
        elif self._deleted:
            rows[DELETED] = (VECTOR_IDS, encode_ids(self._deleted), self.lsn, NEVER)
        return Edit(lsn=self.lsn, time_us=time_us, rows=rows, puts=puts, put_bytes=self._put_bytes, ranges=self._ranges)

    # -- records

    def _old_ids(self, keys: Sequence[bytes]) -> U64:
        """Return the internal ids that the dictionary has for keys; 0 where it has none."""
        ids_by_key, get = self._ids_by_key, self._rows.get
        for earlier, numbers_of in self._upserted:  # most records are one part, and need none of this
            ids_by_key.update(zip(earlier, numbers_of.tolist(), strict=True))
        self._upserted.clear()
        if self._sequence_before.count == 0:  # the tree has no records: only this draft may have some
            return np.fromiter((ids_by_key.get(key, 0) for key in keys), np.uint64, len(keys))
        ids = np.zeros(len(keys), np.uint64)
        few = len(keys) < PROBED_TOGETHER_MIN  # to check whether they exist would cost a lookup of each
        for number in range(len(keys)) if few else np.flatnonzero(self._rows.existing(keys)).tolist():
            ids[number] = internal_id(get(keys[number]))
        if ids_by_key:
            for number, key in enumerate(keys):
                ids[number] = ids_by_key.get(key, ids[number])
        return ids

    def _upsert(self, part: Upserts) -> None:
        count, keys = len(part), dictionary_keys(part.ids)
        old = self._old_ids(keys)
        old = old[old > 0]
        numbers = np.arange(self._next, self._next + count, dtype=np.uint64)
        self._next += count
        self._count += count - len(old)
        self._remove(old)
        if self._dropped:
            for key in keys:
                self._dropped.pop(key, None)
        self._upserted.append((keys, numbers))
        vectors = np.ascontiguousarray(part.vectors, "<f4")
        packed = vectors.view(f"V{vectors.shape[1] * 4}").reshape(-1)
        self._puts.update(zip(keys, _eights(numbers), strict=True))
        self._puts.update(zip(id_keys(VECTOR, numbers), packed.tolist(), strict=True))
        records = record_values(part.ids, part.attributes_of())
        self._puts.update(zip(id_keys(RECORD, numbers), records, strict=True))
        keys_bytes, records_bytes = sum(map(len, keys)), sum(map(len, records))
        self._put_bytes += keys_bytes + records_bytes + vectors.nbytes + (8 + 2 * ID_KEY_BYTES) * count
        lists: I32 | None = None
        for generation in self.generations.live():
            assigned = self._assign(generation, numbers, vectors)
            lists = assigned if generation == self.generations.current else lists
        self.added.append(AddedVectors(numbers, part.vectors, lists))

    def _delete(self, part: Deletes) -> None:
        keys = dictionary_keys(part.ids)
        old = self._old_ids(keys)
        for key, number in zip(keys, old.tolist(), strict=True):
            if number:
                self._puts.pop(key, None)
                self._dropped[key] = (DELETE, b"", self.lsn, NEVER)
                self._ids_by_key[key] = 0
        old = old[old > 0]
        self._count -= len(old)
        self._remove(old)

    def _remove(self, numbers: U64) -> None:
        """Remove the vectors and records of internal ids."""
        if not len(numbers):
            return
        self.removed.update(numbers.tolist())
        if self.generations.live():
            self._deleted.update(numbers.tolist())
        first = self._sequence_before.next
        tombstone = (DELETE, b"", self.lsn, NEVER)
        for kind in (VECTOR, RECORD):
            for number, key in zip(numbers.tolist(), id_keys(kind, numbers), strict=True):
                if number >= first:  # of this record
                    self._puts.pop(key, None)
                else:
                    self._dropped[key] = tombstone

    def _assign(self, generation: int, numbers: U64, vectors: F32) -> I32 | None:
        """Add new internal ids to the lists of their nearest centroids; return the lists."""
        centroids = self._centroids_of(generation)
        if not len(centroids):
            return None
        lists: I32 = centroids.numbers[centroids.nearest(vectors, self._options.metric)]
        for number, internal in zip(lists.tolist(), numbers.tolist(), strict=True):
            self._list(generation, number).add(internal)
        return lists

    # -- the index

    def _centroids_of(self, generation: int) -> Centroids:
        centroids = self._centroids.get(generation)
        if centroids is None:
            centroids = self._centroids[generation] = self._stored_centroids(generation)
        return centroids

    def _list(self, generation: int, number: int) -> BitMap64:
        """Return the internal ids that join a list, to be changed."""
        ids = self._lists.get((generation, number))
        if ids is None:
            ids = self._lists[generation, number] = BitMap64()
        return ids

    def _change(self, change: IndexChange) -> None:
        self.reindexed = True
        now, generation = self.generations, change.generation
        if not generation:
            if change.use:
                self._drop_below(GENERATION_MAX)
                self.generations, self._no_index, self._deleted = Generations(), True, BitMap64()
            return
        if generation > max(now.live(), default=0):
            if not change.centroids:
                return  # the index was dropped since the change was made
            # A new generation is begun: ids from here on join it when they are written.
            now = Generations(now.current, generation, 0, self._next, now.probes)
            self._centroids[generation] = Centroids(
                np.zeros(0, np.int32), np.zeros((0, self._options.dimensions), np.float32)
            )
        elif generation not in now.live():
            return  # it was dropped since the change was made
        self._put_centroids(generation, change.centroids)
        for number, ids in change.added:
            self._list(generation, number).update(decode_ids(ids))
        if change.forgotten:
            leaving = decode_ids(change.forgotten)
            self._forgotten = leaving if self._forgotten is None else self._forgotten | leaving
            self._deleted -= leaving
        if generation == now.building and change.assigned:
            now = Generations(now.current, now.building, change.assigned, now.until, now.probes)
        self.generations = now
        if change.use:
            self._drop_below(generation)
            self.generations = Generations(generation, probes=change.probes)

    def _put_centroids(self, generation: int, changed: Sequence[tuple[int, bytes]]) -> None:
        if not changed:
            return
        before = self._centroids_of(generation)
        rows = dict(zip(before.numbers.tolist(), before.matrix, strict=True))
        for number, data in changed:
            key = list_key(CENTROID, generation, number)
            rows[number] = np.frombuffer(data, "<f4").astype(np.float32)
            self._puts[key] = data
            self._put_bytes += len(key) + len(data)
        numbers = sorted(rows)
        matrix = np.stack([rows[number] for number in numbers])
        self._centroids[generation] = Centroids(np.array(numbers, np.int32), matrix)

    def _drop_below(self, generation: int) -> None:
        """Drop all generations below one, stored and drafted."""
        for kind in (CENTROID, POSTINGS):
            start, end = list_range(kind, 0, generation)
            self._ranges.append((start, end))
            for key in [key for key in self._puts if start <= key < end]:
                del self._puts[key]
        self._lists = {key: ids for key, ids in self._lists.items() if key[0] >= generation}
        self._centroids = {number: centroids for number, centroids in self._centroids.items() if number >= generation}

    def live_added(self) -> Iterator[AddedVectors]:
        """Yield the vectors that were added and not removed again by this record."""
        for added in self.added:
            if not self.removed or self.removed.max() < int(added.ids[0]):  # all but records of several parts
                yield added
                continue
            live = ~are_among(added.ids, id_array(self.removed))
            if live.any():
                lists = None if added.lists is None else added.lists[live]
                yield AddedVectors(added.ids[live], added.vectors[live], lists)

    @property
    def next_id(self) -> int:
        """The internal id that the next record gives first."""
        return self._next


def _eights(numbers: U64) -> list[bytes]:
    packed: list[bytes] = numbers.astype("<u8").view("V8").tolist()
    return packed
