"""The state machine of a vector shard: applies sections to an LSM tree, and then to the search kernel in memory.

A record becomes one edit: see `draft`. The kernel (`live`) follows in the same step of apply, so that a reader between
two records finds both alike.

Thread: see `partition.machine`; reading from any.
Invariants: (1) an edit depends on the record and the tree alone; cached centroids only make it faster. (2) an edit that
was interrupted is applied again as it was prepared.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from penstock.errors import CorruptionError
from penstock.kinds import ALL_LATER, TreeMachine, Waiting
from penstock.kinds.changes import Feed, open_feed
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.memtable import Edit
from penstock.lsm.tree import Tree
from penstock.partition.machine import Entry, PartitionDescriptor, readable
from penstock.vector.changes import record_changes
from penstock.vector.draft import VectorDraft
from penstock.vector.keys import DICTIONARY
from penstock.vector.live import IndexBudget, LiveIndex
from penstock.vector.options import VectorOptions, decode_vector_options
from penstock.vector.reading import VectorState
from penstock.vector.section import VectorSection, decode_section
from penstock.vector.stored import Centroids, IdSequence, StoredRows, get_record, read_centroids

GET_ATTEMPTS = 100


_budgets: weakref.WeakKeyDictionary[Maintenance, IndexBudget] = weakref.WeakKeyDictionary()  # one for each store


def open_vector_machine(
    maintenance: Maintenance, descriptor: PartitionDescriptor, options: bytes, memory_bytes_max: int
) -> VectorMachine:
    """Open the state machine of a shard; the kernels of a store may take `memory_bytes_max` together."""
    budget = _budgets.setdefault(maintenance, IndexBudget(memory_bytes_max))
    decoded = decode_vector_options(options)  # before the tree, which would stay open
    tree = maintenance.open_tree(descriptor.table_id, descriptor.shard, descriptor.folder)
    feed = None if decoded.changes is None else open_feed(maintenance, descriptor, tree, decoded.changes)
    return VectorMachine(tree, maintenance, descriptor, decoded, budget, feed=feed)


class VectorMachine(TreeMachine):
    """The state machine of a vector shard."""

    def __init__(
        self,
        tree: Tree,
        maintenance: Maintenance,
        descriptor: PartitionDescriptor,
        options: VectorOptions,
        budget: IndexBudget | None = None,
        *,
        feed: Feed | None = None,
    ) -> None:
        super().__init__(tree, maintenance, descriptor, feed)
        self.options = options
        self.live = LiveIndex(options, tree.snapshot, budget)
        self._prepared: tuple[VectorDraft, Edit] | None = None  # until it is applied and taken in
        self._centroids: dict[int, Centroids] = {}  # by generation
        self.indexed_at = IdSequence()  # when the lists last needed no job

    @property
    def applied(self) -> int:
        """The last record that both the tree and the kernel have: one that an interrupt left in between is repeated."""
        prepared, lsn = self._prepared, self.tree.lsn
        return lsn if prepared is None else min(lsn, prepared[0].lsn - 1)

    def apply(self, entry: Entry) -> None:
        if self._prepared is not None and self._prepared[0].lsn != entry.lsn:
            self._finish()  # an interrupt came between its edit and its end
        if self._prepared is None:
            sections = entry.decoded or [readable(decode_section, part.payload) for part in entry.sections]
            if self.feed is not None and self.feed.lacks(entry.lsn):
                record_changes(self.feed, self.tree, self.options, entry, sections)
            draft = self._draft(self.tree.view, sections, entry.lsn)
            self._prepared = draft, draft.edit(entry.time_us)
        if entry.lsn > self.tree.lsn:
            self.tree.apply(self._prepared[1])
        self._finish()

    def _finish(self) -> None:
        """Take in a draft whose edit was applied; forget one whose record was set aside."""
        assert self._prepared is not None
        draft = self._prepared[0]
        if draft.lsn <= self.tree.lsn:
            if draft.reindexed:
                self._centroids = {}
            self.live.applied(draft)
        self._prepared = None

    def _draft(self, rows: StoredRows, sections: Sequence[VectorSection], lsn: int) -> VectorDraft:
        draft = VectorDraft(self.options, rows, lsn, lambda generation: self._centroids_of(rows, generation))
        for section in sections:
            for part in section.parts:
                draft.add(part)
        return draft

    def _centroids_of(self, rows: StoredRows, generation: int) -> Centroids:
        centroids = self._centroids.get(generation)
        if centroids is None:
            centroids = read_centroids(rows, generation, self.options.dimensions)
            if rows is self.tree.view:
                self._centroids[generation] = centroids
        return centroids

    # -- reading

    def snapshot(self) -> VectorState:
        rows = self.tree.snapshot()
        feed = None if self.feed is None else self.feed.snapshot(rows.lsn)
        return VectorState(self._descriptor.partition, rows, self.options, self.live, feed)

    def present(self) -> VectorState:
        return VectorState(self._descriptor.partition, self.tree.present(), self.options, self.live)

    def overlay(self, state: VectorState, sections: Sequence[VectorSection], time_us: int) -> VectorState:
        draft = VectorDraft(self.options, state.snapshot, ALL_LATER)
        for section in sections:
            for part in section.parts:
                draft.add(part)
        return state.under(draft, time_us)

    def get(self, key: bytes) -> bytes | None:
        """Return the vector of an external id and its encoded attributes, or None."""
        for _ in range(GET_ATTEMPTS):
            view = self.tree.view
            record = get_record(view.get, key)
            # An upsert may have moved the record between two of these lookups: then the next attempt finds it.
            if record is not None or view.get(DICTIONARY + key) is None:
                return record
        raise CorruptionError(self._descriptor.folder, 0, "a vector or its record is missing: rebuild it from a backup")

    def row(self, key: bytes) -> tuple[bytes, int] | None:
        record, row = self.get(key), self.tree.row(DICTIONARY + key)
        return None if record is None or row is None else (record, row[1])

    def touches(self, section: VectorSection, key: bytes) -> bool:
        return section.find(key) is not False

    def fold(self, key: bytes, waiting: Waiting, time_us: int) -> bytes | None:
        for group, section in waiting:  # newest first: the last write of an id is the whole record
            write = section.find(key)
            if write is False:
                continue
            lsn = group.lsn
            if lsn is not None and lsn <= self.tree.lsn:
                break  # it is applied, and so are those before it
            value: bytes | None = section.get(key)
            return value
        return self.get(key)
