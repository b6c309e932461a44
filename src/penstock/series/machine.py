"""The state machine of a series shard: applies sections to an LSM tree, as index rows and columns of samples.

A record becomes one edit: rows of series that are new in their bucket, and its samples. So a series and its samples are
applied together, reach files together, and no crash leaves one without the other. `drafts` assigns series ids.

Thread: see `partition.machine`; reading from any.
Invariants: (1) an edit depends on the record and the tree alone; what `SeriesIds` remembers only makes it faster.
(2) an edit that was interrupted is applied again as it was prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from penstock.host import threads
from penstock.journal.record import REFERENCE, Section
from penstock.kinds import ALL_LATER, MachineContext, TreeMachine
from penstock.kinds.changes import Feed, open_feed
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.tree import Tree
from penstock.lsm.view import View
from penstock.manifest.keys import ChunkKey
from penstock.partition.machine import Entry, PartitionDescriptor, readable
from penstock.partition.reference import StagedFile, Staging, check_intact, decode_reference
from penstock.series import index
from penstock.series.admission import admit_sections
from penstock.series.admitted import AdmittedSeries, SeriesAdmission
from penstock.series.changes import NewestTimes, RowsBefore, record_changes
from penstock.series.drafts import RecordDraft
from penstock.series.ids import SeriesIds
from penstock.series.keys import ALL_METRICS
from penstock.series.labels import METRIC, LabelTable
from penstock.series.loading import staged_payload
from penstock.series.memtable import SeriesEdit, SeriesMemtable
from penstock.series.options import SeriesOptions, decode_series_options, encode_series_options
from penstock.series.reading import SeriesState
from penstock.series.rules import receive_section
from penstock.series.section import AdmissionTerm, SeriesSection
from penstock.series.section_codec import decode_section


def open_series_machine(site: MachineContext, descriptor: PartitionDescriptor, options: bytes) -> SeriesMachine:
    """Open the state machine of a shard."""
    maintenance = site.maintenance
    decoded = decode_series_options(options)  # before the tree, which would stay open
    tree = maintenance.open_tree(descriptor.table_id, descriptor.shard, descriptor.folder, memtable=SeriesMemtable)
    feed = None if decoded.changes is None else open_feed(maintenance, descriptor, tree, decoded.changes)
    return SeriesMachine(tree, maintenance, descriptor, decoded, site, feed=feed)


def _files_of(part: Section) -> tuple[StagedFile, ...]:
    return readable(decode_reference, part.payload).files


class SeriesMachine(TreeMachine):
    """The state machine of a series shard."""

    def __init__(
        self,
        tree: Tree,
        maintenance: Maintenance,
        descriptor: PartitionDescriptor,
        options: SeriesOptions,
        site: MachineContext | None = None,  # None: it takes no files
        *,
        feed: Feed | None = None,
    ) -> None:
        super().__init__(tree, maintenance, descriptor, feed)
        self.options = options
        self._site = site
        self.admitted = AdmittedSeries()
        self.term = AdmissionTerm()
        self._ids = SeriesIds()
        self._newest = NewestTimes()
        self._prepared: tuple[RecordDraft, SeriesEdit] | None = None  # until it is applied and remembered
        self._uncounted: RecordDraft | None = None  # its new series count as admitted. Guarded by admitted.lock

    def apply(self, entry: Entry) -> None:
        if self._prepared is not None and self._prepared[0].lsn != entry.lsn:
            self._finish()  # an interrupt came between its edit and its end
        files = [file for part in entry.sections if part.header.form == REFERENCE for file in _files_of(part)]
        if self._prepared is None:
            draft = self._draft(self._ids, self.tree.view, self._contents(entry), entry.lsn)
            if self.feed is not None and self.feed.lacks(entry.lsn):
                with RowsBefore(self.tree, self._descriptor.partition, self.options) as before:
                    record_changes(self.feed, before, draft, self._newest, entry.time_us)
            self._prepared = draft, draft.edit(entry.time_us)
        if self._prepared[0].changes_series:
            with self.admitted.lock:  # before they are in the tree: see `series_count`
                self._uncounted = self._prepared[0]
        self.tree.apply(self._prepared[1])
        self._finish()
        if files:  # as long as they are needed they take space, and may be purged
            threads.run_uninterrupted(lambda: self._store_loaded(files))

    def _contents(self, entry: Entry) -> Iterator[SeriesSection]:
        """Yield the sections of an entry, one file at a time."""
        if entry.decoded is not None and not entry.sections:
            yield from entry.decoded
        for number, part in enumerate(entry.sections):
            if part.header.form == REFERENCE:
                for file in filter(self._is_staged, _files_of(part)):
                    if entry.decoded is None:  # a replay: no caller has just checked it
                        check_intact(self._context.fs, self._context.root, file)
                    yield readable(decode_section, staged_payload(self._context.fs, self._context.root, file))
            elif entry.decoded is not None:
                yield entry.decoded[number]
            else:
                yield readable(decode_section, part.payload)

    def _is_staged(self, file: StagedFile) -> bool:
        """Whether a file was not applied and discarded before: two batches may name one file, and the first counts."""
        return self._context.manifest.get_chunk(ChunkKey(self._descriptor.table_id, file.chunk_id)) is not None

    @property
    def _context(self) -> MachineContext:
        assert self._site is not None  # a machine without a store is given no files
        return self._site

    def _store_loaded(self, files: Sequence[StagedFile]) -> None:
        """Store what was read from staged files, and discard these."""
        self._maintenance.flush(self.tree)
        context = self._context
        staging = Staging(
            context.manifest, fs=context.fs, root=context.root, clock=context.clock, remove=context.remove
        )
        staging.discard(self._descriptor.table_id, files)

    def check_staged(self, files: Sequence[StagedFile]) -> Callable[[], None]:
        """Raise `Invalid` if staged files are malformed, or hold what this table does not accept.

        Return what withdraws the admission of their series.
        """
        context, table = self._context, self._descriptor
        options = decode_series_options(context.options_of(table.table_id) or encode_series_options(self.options))
        admissions: list[SeriesAdmission | None] = []
        try:
            for file in files:  # each is admitted alone: series of the earlier ones count
                section = receive_section(staged_payload(context.fs, context.root, file))
                admissions.append(admit_sections(table.name, [section], options, self, context.clock.time_us()))
        except BaseException:
            self._withdraw_all(admissions)
            raise
        return partial(self._withdraw_all, admissions)

    def _finish(self) -> None:
        """Remember a draft whose edit was applied; forget one whose record was set aside."""
        assert self._prepared is not None
        draft = self._prepared[0]
        with self.admitted.lock if draft.changes_series else nullcontext():  # a new series counts once at any moment
            if draft.lsn <= self.tree.lsn:
                self._ids.remember(draft.learned())
                for bucket, keys in draft.series_keys():
                    self.admitted.remove(bucket, keys)
            self._uncounted = None
        if draft.empties_series:  # last: an admission that found them with samples has this term
            ended, self.term = self.term, AdmissionTerm()
            ended.over = True
        self._prepared = None

    def _draft(self, ids: SeriesIds, view: View, sections: Iterable[SeriesSection], lsn: int) -> RecordDraft:
        draft = RecordDraft(ids, self.options, view, lsn)
        for section in sections:
            for part in section.parts:
                draft.add(part)
        return draft

    def snapshot(self) -> SeriesState:
        rows = self.tree.snapshot()
        feed = None if self.feed is None else self.feed.snapshot(rows.lsn)
        return SeriesState(self._descriptor.partition, rows, self.options, feed=feed)

    def present(self) -> SeriesState:
        return SeriesState(self._descriptor.partition, self.tree.present(), self.options)

    def overlay(self, state: SeriesState, sections: Sequence[SeriesSection], time_us: int) -> SeriesState:
        draft = self._draft(SeriesIds(), state.snapshot, sections, ALL_LATER)
        rows = SeriesMemtable()
        rows.apply(draft.edit(time_us))
        return state.under(rows)

    # -- admission

    def withdraw(self, admission: SeriesAdmission | None) -> None:
        """Take back an admission whose sections will never be applied."""
        if admission is not None:
            with self.admitted.lock:
                self.admitted.withdraw(admission)

    def _withdraw_all(self, admissions: Iterable[SeriesAdmission | None]) -> None:
        for admission in admissions:
            self.withdraw(admission)

    def series_exist(self, bucket: int, series: LabelTable) -> Any:
        """Return, for each series, whether it has samples in the bucket."""
        return self._ids.series_exist(bucket, series, self.tree.view)

    def series_count(self, bucket: int, metric: str | None = None) -> int:
        """Return the number of series in a bucket that have samples, or of one metric in it.

        Those of an edit that is being applied are among `admitted`, so they do not count here, whether the tree has
        them already or not: their ids are higher than the last one before. Requires: `admitted.lock` is held.
        """
        draft, view = self._uncounted, self.tree.view
        last, empty = (None, None) if draft is None else draft.before(bucket)
        last = self._ids.last(bucket, view) if last is None else last
        empty = self._ids.empty(bucket, view) if empty is None else empty
        if metric is None:
            return last - len(empty)
        return (index.ids_with(view, bucket, METRIC, metric) - empty).range_cardinality(1, last + 1)

    def oldest_bucket(self) -> int | None:
        """Return the number of the oldest bucket; None if there is none."""
        return next(index.buckets(self.tree.view, 0, ALL_METRICS), None)
