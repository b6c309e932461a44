"""The state machine of a series shard: applies sections to an LSM tree, as index rows and columns of samples.

A record becomes one edit: rows of series that are new in their bucket, and its samples. So a series and its samples are
applied together, reach files together, and no crash leaves one without the other. `ids` assigns series ids.

Thread: see `partition.machine`; reading from any.
Invariants: (1) an edit depends on the record and the tree alone; what `SeriesIds` remembers only makes it faster.
(2) an edit that was interrupted is applied again as it was prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.kinds import ALL_LATER, TreeMachine
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.tree import Tree
from penstock.lsm.view import View
from penstock.partition.machine import Entry, PartitionDescriptor, readable
from penstock.series import index
from penstock.series.ids import RecordDraft, SeriesIds
from penstock.series.keys import ALL_METRICS
from penstock.series.labels import METRIC, LabelTable
from penstock.series.memtable import SeriesEdit, SeriesMemtable
from penstock.series.options import SeriesOptions, decode_series_options
from penstock.series.reading import SeriesState
from penstock.series.section import SeriesSection, decode_section


def open_series_machine(maintenance: Maintenance, descriptor: PartitionDescriptor, options: bytes) -> SeriesMachine:
    """Open the state machine of a shard."""
    tree = maintenance.open_tree(descriptor.table_id, descriptor.shard, descriptor.folder, memtable=SeriesMemtable)
    return SeriesMachine(tree, maintenance, descriptor, decode_series_options(options))


class SeriesMachine(TreeMachine):
    """The state machine of a series shard."""

    def __init__(
        self, tree: Tree, maintenance: Maintenance, descriptor: PartitionDescriptor, options: SeriesOptions
    ) -> None:
        super().__init__(tree, maintenance, descriptor)
        self.options = options
        self._ids = SeriesIds(options)
        self._prepared: tuple[RecordDraft, SeriesEdit] | None = None  # until it is applied and remembered

    def apply(self, entry: Entry) -> None:
        if self._prepared is not None and self._prepared[0].lsn != entry.lsn:
            self._finish()  # an interrupt came between its edit and its end
        if self._prepared is None:
            sections = entry.decoded or [readable(decode_section, part.payload) for part in entry.sections]
            draft = self._draft(self._ids, self.tree.view, sections, entry.lsn)
            self._prepared = draft, draft.edit(entry.time_us)
        self.tree.apply(self._prepared[1])
        self._finish()

    def _finish(self) -> None:
        """Remember a draft whose edit was applied; forget one whose record was set aside."""
        assert self._prepared is not None
        draft = self._prepared[0]
        if draft.lsn <= self.tree.lsn:
            self._ids.remember(draft)
        self._prepared = None

    def _draft(self, ids: SeriesIds, view: View, sections: Sequence[SeriesSection], lsn: int) -> RecordDraft:
        draft = RecordDraft(ids, self.options, view, lsn)
        for section in sections:
            for part in section.parts:
                draft.add(part)
        return draft

    def snapshot(self) -> SeriesState:
        return SeriesState(self._descriptor.partition, self.tree.snapshot(), self.options)

    def overlay(self, state: SeriesState, sections: Sequence[SeriesSection], time_us: int) -> SeriesState:
        draft = self._draft(SeriesIds(self.options), state.snapshot, sections, ALL_LATER)
        rows = SeriesMemtable()
        rows.apply(draft.edit(time_us))
        return state.under(rows)

    # -- admission

    def known(self, bucket: int, series: LabelTable) -> Any:
        """Return, for each series, whether the bucket has it."""
        return self._ids.known(bucket, series, self.tree.view)

    def series_count(self, bucket: int, metric: str | None = None) -> int:
        """Return the number of series in a bucket, or of one metric in it."""
        if metric is None:
            return self._ids.last_id(bucket, self.tree.view)
        return len(index.ids_with(self.tree.view, bucket, METRIC, metric))

    def oldest_bucket(self) -> int | None:
        """Return the number of the oldest bucket; None if there is none."""
        return next(index.buckets(self.tree.view, 0, ALL_METRICS), None)
