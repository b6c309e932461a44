"""The memtable of a series shard: rows of the index as in any tree, samples as columns.

An applied record adds its samples as arrays; nothing is done for each series or sample. When the memtable is frozen and
first read, or flushed, the samples of a bucket are sorted once; a flush then makes one block for each group of series.

Thread: one writer; columns are read only when the memtable is frozen.
Invariants: (1) the index rows and the samples of a record are in one memtable, so they reach files together: no sample
without its series. (2) within a memtable the last write of a series and time wins, and a delete removes what was
written before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from penstock.lsm.memtable import Edit, Memtable, Readable
from penstock.lsm.rows import NEVER, Row
from penstock.series.keys import SAMPLES, prefix
from penstock.series.operators import fold_columns
from penstock.series.samples import NO_SAMPLES, NO_TOMBSTONES, Contents, Samples, Tombstones
from penstock.series.slices import by_group, group_rows

PART_OVERHEAD_BYTES = 500


@dataclass(frozen=True, slots=True)
class SamplePart:
    """Samples of one bucket, or deletes of samples that were written before, from one record."""

    lsn: int
    bucket: int
    samples: Samples = NO_SAMPLES
    deleted: Tombstones = NO_TOMBSTONES

    @property
    def nbytes(self) -> int:
        return self.samples.nbytes + 20 * len(self.deleted) + PART_OVERHEAD_BYTES


class SeriesEdit(Edit, frozen=True, kw_only=True):
    """An edit with samples."""

    parts: tuple[SamplePart, ...] = ()  # in write order; each deletes first


class SeriesMemtable(Memtable):
    """Rows by key, and samples by bucket."""

    def __init__(self, lsn: int = 0) -> None:
        super().__init__(lsn)
        self._parts: list[SamplePart] = []  # in write order; none when they are grouped
        self._grouped: dict[int, list[SamplePart]] | None = None  # by bucket, when the memtable is frozen
        self._sorted: dict[int, Contents] = {}  # by bucket; filled when the memtable is frozen

    def __len__(self) -> int:
        parts, grouped = self._parts, self._grouped
        return super().__len__() + (len(parts) if grouped is None else sum(map(len, grouped.values())))

    def apply(self, edit: Edit) -> None:
        self._begin(edit.lsn)
        if isinstance(edit, SeriesEdit) and edit.parts:
            self._parts.extend(edit.parts)  # one step: see `remainder`
            self.bytes += sum(part.nbytes for part in edit.parts)
        super().apply(edit)

    def remainder(self, edit: Edit) -> Edit:
        rest = super().remainder(edit)
        parts = edit.parts if isinstance(edit, SeriesEdit) else ()
        if parts and self._parts and self._parts[-1].lsn == edit.lsn:
            parts = ()
        return SeriesEdit(lsn=rest.lsn, time_us=rest.time_us, rows=rest.rows, ranges=rest.ranges, parts=parts)

    def merge_newer(self, newer: Memtable, now_us: int) -> None:
        if isinstance(newer, SeriesMemtable):
            self._parts += newer._all_parts()
        super().merge_newer(newer, now_us)

    def _all_parts(self) -> Iterable[SamplePart]:
        """Return all parts; those of a bucket are in write order."""
        parts, grouped = self._parts, self._grouped  # in this order: see `_groups`
        return parts if grouped is None else chain.from_iterable(grouped.values())

    def _groups(self) -> dict[int, list[SamplePart]]:
        """Return the parts by bucket. Requires: frozen."""
        parts, grouped = self._parts, self._grouped
        if grouped is None:
            grouped = {}
            for part in parts:
                grouped.setdefault(part.bucket, []).append(part)
            self._grouped = grouped  # before the parts go. Another reader may do the same at this moment: both have all
            self._parts = []
        return grouped

    def buckets(self) -> list[int]:
        """Return the buckets that have samples or deletes here. Requires: frozen."""
        return sorted(self._groups())

    def contents(self, bucket: int) -> Contents:
        """Return the samples of a bucket, sorted and distinct, and the deletes of older ones. Requires: frozen."""
        contents = self._sorted.get(bucket)
        if contents is None:
            grouped = self._groups()
            floor = self.deleted_below(prefix(bucket, SAMPLES))
            parts = [part for part in grouped.get(bucket, ()) if part.lsn >= floor]
            contents = fold_columns((part.samples, part.deleted) for part in parts)
            self._sorted[bucket] = contents
            if bucket in grouped:  # the sorted columns replace what they were made from
                grouped[bucket] = [SamplePart(self.lsn_last, bucket, *contents)]
        return contents

    def to_flush(self, files: Readable) -> Memtable:
        rows: dict[bytes, Row] = {}
        for bucket in self.buckets():
            trimmed = self.deleted_below(prefix(bucket, SAMPLES)) > 0  # what files have of it is deleted
            for group, contents in by_group(*self.contents(bucket)):
                slice_rows = group_rows(None if trimmed else files, bucket, group, contents)
                rows.update({key: (kind, value, self.lsn_last, NEVER) for key, kind, value in slice_rows})
        return self.with_rows(rows)
