"""The edit of one record: its samples, and the rows of the series that are new. Here series get their ids.

An id belongs to one bucket. It is assigned here, while a record is applied, and nowhere else: new series of a part are
numbered by metric, then by their order in the part, so two replays of a journal give the same ids. A fingerprint finds
the rows of a series in the tree, where the labels themselves are compared.

A delete of all samples of a series in a bucket adds its id to the bucket's set of *empty* series, which readers leave
out; a sample that comes later takes it out of there.

Thread: the thread that applies.
Invariants: (1) a draft depends on the record and the tree alone, and changes nothing until its edit is applied. (2) ids
of a bucket are 1 to its last id, without gaps. (3) an empty series has no samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from penstock.lsm.operators import SERIES_IDS
from penstock.lsm.rows import NEVER, Row
from penstock.lsm.view import View
from penstock.series import index
from penstock.series.ids import BucketIds, LearnedIds, Rows, SeriesIds
from penstock.series.keys import (
    ALL_METRICS,
    EMPTY,
    PROGRESS,
    TRIMMED,
    bucket_range,
    change_key,
    dictionary_keys,
    forward_key,
    forward_keys,
    inverted_key,
    metadata_key,
    number_of,
    prefix,
)
from penstock.series.labels import METRIC, U32, LabelTable, decode_labels
from penstock.series.memtable import SamplePart, SeriesEdit
from penstock.series.operators import decode_ids, encode_ids, encode_single_ids
from penstock.series.options import HOUR_US, TIME_MAX, TIME_MIN, SeriesOptions
from penstock.series.samples import Samples, Tombstones
from penstock.series.section import BucketTrim, MetricMetadata, Part, RollupProgress, SampleBlock, SeriesDelete
from penstock.series.selectors import Matcher, parse_selector

RESOLVED_MAX = 64  # label tables of a record, by bucket, whose ids are remembered as a whole


class WrittenPart(NamedTuple):
    """Samples of one bucket, and for each the row of its series in a label table."""

    part: SamplePart
    series: LabelTable
    rows: U32


class _BucketDraft:
    """New series of one bucket."""

    __slots__ = ("base", "dictionary", "forward", "inverted", "last", "new")

    def __init__(self, base: BucketIds) -> None:
        self.base = base
        self.last = base.last
        self.new: dict[bytes, int] = {}  # ids by code row
        self.dictionary: dict[bytes, bytes] = {}
        self.forward: dict[bytes, bytes] = {}
        self.inverted: dict[bytes, BitMap | bytes] = {}  # sets of ids; one of a single id is encoded


class RecordDraft:
    """The edit of one record, in the making. `view` is the state before it."""

    def __init__(self, ids: SeriesIds, options: SeriesOptions, view: View, lsn: int) -> None:
        self.lsn = lsn
        self._buckets: dict[int, _BucketDraft] = {}
        self._resolved: list[tuple[LabelTable, int, U32]] = []
        self._empty: dict[int, BitMap] = {}  # the ids of empty series, for each bucket where they change
        self._empty_read: dict[int, BitMap] = {}  # those that do not change here
        self._refilled: dict[int, list[bytes]] = {}  # dictionary keys of series that were empty, by bucket
        self._trimmed = 0  # buckets below are deleted
        self.empties_series = False  # series that had samples may have none after this
        self._ids = ids
        self._options = options
        self._view = view
        self._parts: list[SamplePart] = []
        self._written: list[WrittenPart] = []
        self._metadata: dict[bytes, bytes] = {}

    def add(self, part: Part) -> None:
        """Add a part of a section, in write order."""
        if isinstance(part, SampleBlock):
            self._add_samples(part)
        elif isinstance(part, MetricMetadata):
            self._metadata[metadata_key(part.metric)] = index.encode_metadata(part)
        elif isinstance(part, SeriesDelete):
            self._delete(part)
        elif isinstance(part, RollupProgress):
            self._metadata[prefix(ALL_METRICS, PROGRESS)] = index.encode_progress(part)
        else:
            self._trim(part)

    def learned(self) -> LearnedIds:
        """Return the ids to remember once the edit is applied."""
        buckets = {number: (draft.base, draft.new, draft.last) for number, draft in self._buckets.items()}
        return LearnedIds(self._trimmed, buckets, {**self._empty_read, **self._empty}, self._resolved)

    @property
    def parts(self) -> Sequence[SamplePart]:
        """Samples and deletes by bucket, in write order."""
        return self._parts

    @property
    def written(self) -> Sequence[WrittenPart]:
        """The parts with samples, in write order, with the labels of their series."""
        return self._written

    @property
    def trimmed(self) -> int:
        """The record deletes all that buckets below this one had before it; 0: it deletes none."""
        return self._trimmed

    def known_last(self, bucket: int) -> int | None:
        """Return the last id of a bucket before this record; None if it adds no series there."""
        draft = self._buckets.get(bucket)
        return None if draft is None else draft.base.last

    @property
    def changes_series(self) -> bool:
        """Whether series are new here, or have samples again."""
        return bool(self._refilled) or any(draft.new for draft in self._buckets.values())

    def before(self, bucket: int) -> tuple[int | None, BitMap | None]:
        """Return a bucket's last id and empty series before this draft; None where it does not change them."""
        draft = self._buckets.get(bucket)
        return None if draft is None else draft.base.last, self._empty_read.get(bucket)

    def series_keys(self) -> Iterator[tuple[int, Collection[bytes]]]:
        """Yield, by bucket, the dictionary keys of the series that are new here, or have samples again."""
        yield from self._refilled.items()
        yield from ((bucket, draft.dictionary.keys()) for bucket, draft in self._buckets.items() if draft.dictionary)

    def edit(self, time_us: int) -> SeriesEdit:
        """Return the edit of all parts."""
        puts, rows = dict(self._metadata), dict[bytes, Row]()
        for draft in self._buckets.values():
            puts.update(draft.dictionary)
            puts.update(draft.forward)
            for key, members in draft.inverted.items():
                encoded = members if isinstance(members, bytes) else encode_ids(members)
                rows[key] = (SERIES_IDS, encoded, self.lsn, NEVER)
        for bucket, ids in self._empty.items():
            puts[prefix(bucket, EMPTY)] = encode_ids(ids)
        for part in self._parts:
            puts.update(dict.fromkeys((change_key(part.bucket, hour) for hour in _hours(part)), b""))
        ranges = [bucket_range(0, self._trimmed)] if self._trimmed else []
        return SeriesEdit(lsn=self.lsn, time_us=time_us, puts=puts, rows=rows, ranges=ranges, parts=tuple(self._parts))

    # -- samples

    def _add_samples(self, block: SampleBlock) -> None:
        first, last = (self._options.bucket(int(time)) for time in (block.times.min(), block.times.max()))
        if first == last:
            ids = self._resolve(first, block.series, None)
            # A decoded section is views of its bytes: without a copy these would stay in memory, labels and all.
            times = block.times if block.times.base is None else block.times.copy()
            bits = block.bits if block.bits.base is None else block.bits.copy()
            self._refill(first, block.series, ids, None)
            part = SamplePart(self.lsn, first, Samples(ids[block.index], times, bits))
            self._add_part(part, block.series, block.index)
            return
        for bucket, here in self._options.by_bucket(block.times):
            numbers = block.index[here]
            rows = np.unique(numbers).astype(np.intp)
            ids = self._resolve(bucket, block.series, rows)
            self._refill(bucket, block.series, ids, rows)
            samples = Samples(ids[numbers], block.times[here], block.bits[here])
            self._add_part(SamplePart(self.lsn, bucket, samples), block.series, numbers)

    def _add_part(self, part: SamplePart, series: LabelTable, rows: U32) -> None:
        self._parts.append(part)
        self._written.append(WrittenPart(part, series, rows))

    def _empty_of(self, bucket: int) -> BitMap:
        """Return the ids of the empty series of a bucket, after the parts that were added."""
        ids = self._empty.get(bucket)
        if ids is None:
            ids = BitMap() if bucket < self._trimmed else self._ids.empty(bucket, self._view)
            self._empty_read[bucket] = ids
        return ids

    def _refill(self, bucket: int, table: LabelTable, ids: U32, rows: Rows | None) -> None:
        """Take series that get samples out of the empty ones; `rows` are those of the table that do (None: all)."""
        empty = self._empty_of(bucket)
        if not empty:
            return
        rows = np.arange(len(table)) if rows is None else rows
        rows = rows[np.isin(ids[rows], np.array(empty, np.uint32))]
        if len(rows):
            self._empty[bucket] = empty - BitMap(ids[rows])
            self._refilled.setdefault(bucket, []).extend(dictionary_keys(bucket, table.fingerprints[rows]))

    def _resolve(self, bucket: int, table: LabelTable, rows: Rows | None) -> U32:
        """Return the id of each series of a table, in some rows (None: in all); create those that are new."""
        ids = None if bucket < self._trimmed else self._ids.ids_of(table, bucket)
        if ids is not None and (ids if rows is None else ids[rows]).all():
            return ids
        rows = np.arange(len(table)) if rows is None else rows
        ids = np.zeros(len(table), np.uint32) if ids is None else ids.copy()
        draft = self._bucket(bucket)
        codes = draft.base.code_rows(table, rows)
        numbers = np.array([draft.base.ids.get(row) or draft.new.get(row, 0) for row in codes], np.uint32)
        unknown = np.flatnonzero(numbers == 0)
        if len(unknown):
            numbers[unknown] = self._find_or_create(bucket, draft, table, rows[unknown], [codes[i] for i in unknown])
        ids[rows] = numbers
        self._resolved.append((table, bucket, ids))
        del self._resolved[:-RESOLVED_MAX]
        return ids

    def _bucket(self, bucket: int) -> _BucketDraft:
        draft = self._buckets.get(bucket)
        if draft is None:
            base = BucketIds(0) if bucket < self._trimmed else self._ids.bucket(bucket, self._view)
            draft = self._buckets[bucket] = _BucketDraft(base)
        return draft

    def _find_or_create(
        self, bucket: int, draft: _BucketDraft, table: LabelTable, rows: Rows, codes: list[bytes]
    ) -> U32:
        keys = dictionary_keys(bucket, table.fingerprints[rows])
        labels = table.label_bytes(rows)
        stored: list[bytes | None] = [None] * len(keys)  # ids of series with the same fingerprint
        numbers = np.zeros(len(rows), np.uint32)
        if bucket >= self._trimmed and draft.base.last:
            stored = list(map(self._view.get, keys))
            for position in [position for position, value in enumerate(stored) if value is not None]:
                numbers[position] = self._find(bucket, stored[position], labels[position])
            for position in np.flatnonzero(numbers).tolist():
                draft.base.ids[codes[position]] = int(numbers[position])  # true of the tree, with or without this draft
        new = np.flatnonzero(numbers == 0)
        if len(new):
            metric = table.codes[rows[new], table.names.index(METRIC)]
            new = new[np.argsort(metric, kind="stable")]  # series of one metric side by side
            fresh = np.arange(draft.last + 1, draft.last + 1 + len(new), dtype=np.uint32)
            numbers[new] = fresh
            new_series = [(keys[i], stored[i], labels[i], codes[i]) for i in new.tolist()]
            self._create(bucket, draft, table, rows[new], fresh, new_series)
        return numbers

    def _find(self, bucket: int, stored: bytes | None, labels: bytes) -> int:
        """Return the id of a series in the tree; 0 if there is none. Series of one fingerprint differ by labels."""
        for number in index.dictionary_ids(stored):
            if self._view.get(forward_key(bucket, number)) == labels:
                return number
        return 0

    def _create(  # noqa: PLR0917
        self,
        bucket: int,
        draft: _BucketDraft,
        table: LabelTable,
        rows: Rows,
        ids: U32,
        new_series: list[tuple[bytes, bytes | None, bytes, bytes]],
    ) -> None:
        """Add the rows of new series: dictionary key, what the tree has there, labels and code row of each."""
        draft.last = int(ids[-1])
        keys, stored, labels, codes = zip(*new_series, strict=True)
        draft.new.update(zip(codes, ids.tolist(), strict=True))
        draft.forward.update(zip(forward_keys(bucket, ids), labels, strict=True))
        entries = index.dictionary_values(ids)
        alone = not any(stored) and len(set(keys)) == len(keys) and draft.dictionary.keys().isdisjoint(keys)
        if alone:
            draft.dictionary.update(zip(keys, entries, strict=True))
        else:  # some have the fingerprint of another
            for key, before, entry in zip(keys, stored, entries, strict=True):
                draft.dictionary[key] = draft.dictionary.get(key, before or b"") + entry
        for column, (name, values) in enumerate(zip(table.names, table.values, strict=True)):
            self._add_inverted(bucket, draft, (name, values), table.codes[rows, column], ids)

    def _add_inverted(
        self, bucket: int, draft: _BucketDraft, label: tuple[str, Sequence[str]], codes: U32, ids: U32
    ) -> None:
        """Add new series to the sets of one label's values, which their codes number from 1."""
        name, values = label
        order = np.argsort(codes, kind="stable")
        codes, ids = codes[order], ids[order]
        starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
        starts = starts[codes[starts] > 0]
        lengths = np.searchsorted(codes, codes[starts], side="right") - starts
        alone = lengths == 1
        start = inverted_key(bucket, name, "")
        singles = {
            start + values[code - 1].encode(): encoded
            for code, encoded in zip(codes[starts[alone]].tolist(), encode_single_ids(ids[starts[alone]]), strict=True)
        }
        for key in singles.keys() & draft.inverted.keys():
            draft.inverted[key] = _as_set(draft.inverted[key]) | _as_set(singles.pop(key))
        draft.inverted.update(singles)
        for first, length in zip(starts[~alone].tolist(), lengths[~alone].tolist(), strict=True):
            key = start + values[int(codes[first]) - 1].encode()
            members = BitMap(ids[first : first + length])
            draft.inverted[key] = members | _as_set(draft.inverted[key]) if key in draft.inverted else members

    # -- deletes

    def _delete(self, delete: SeriesDelete) -> None:
        """Delete samples: a tombstone for each matching series. Its rows stay until the bucket is dropped."""
        matchers = parse_selector(delete.selector)
        first, end = self._options.bucket(delete.start), self._options.bucket(delete.end - 1) + 1
        stored = set(index.buckets(self._view, max(first, self._trimmed), end))
        for bucket in sorted(stored | {number for number in self._buckets if first <= number < end}):
            ids = index.match_any(self._view, bucket, matchers) if bucket in stored else BitMap()
            if bucket in self._buckets:
                ids.update(_matching(self._buckets[bucket].forward, matchers))
            empty = self._empty_of(bucket)
            ids -= empty
            if ids:
                first_time, end_time = map(self._options.bucket_start, (bucket, bucket + 1))
                start, stop = max(delete.start, first_time), min(delete.end, end_time)
                if start <= max(first_time, TIME_MIN) and stop >= min(end_time, TIME_MAX):
                    self._empty[bucket] = empty | ids
                    self.empties_series = True
                deleted = Tombstones(
                    np.array(ids, np.uint32), np.full(len(ids), start, np.int64), np.full(len(ids), stop, np.int64)
                )
                self._parts.append(SamplePart(self.lsn, bucket, deleted=deleted))

    def _trim(self, trim: BucketTrim) -> None:
        """Delete whole buckets, with their index."""
        end = self._options.bucket(trim.floor)
        self._parts = [part for part in self._parts if part.bucket >= end]
        self._written = [written for written in self._written if written.part.bucket >= end]
        self._resolved = [entry for entry in self._resolved if entry[1] >= end]
        self._buckets = {number: draft for number, draft in self._buckets.items() if number >= end}
        for sets in (self._empty, self._empty_read):
            for number in [number for number in sets if number < end]:
                del sets[number]
        if next(index.buckets(self._view, 0, end), None) is not None:
            self._trimmed = max(self._trimmed, end)
            self._metadata[prefix(ALL_METRICS, TRIMMED)] = index.encode_trimmed(self._trimmed)
            self.empties_series = True


def _hours(part: SamplePart) -> set[int]:
    """Return the hours, counted from 1970, of which a part changes samples: marks for rollups."""
    hours: set[int] = set()
    times = part.samples.times
    if len(times):
        first, last = int(times.min()) // HOUR_US, int(times.max()) // HOUR_US
        hours.update((first, last) if last - first < 2 else np.unique(times // HOUR_US).tolist())
    for start, end in zip(part.deleted.starts.tolist(), part.deleted.ends.tolist(), strict=True):
        hours.update(range(start // HOUR_US, (end - 1) // HOUR_US + 1))
        break  # a delete has one range for all its series
    return hours


def _as_set(ids: BitMap | bytes) -> BitMap:
    return decode_ids(ids) if isinstance(ids, bytes) else ids


def _matching(forward: dict[bytes, bytes], matchers: Sequence[Matcher]) -> list[int]:
    """Return the ids of new series that match."""
    ids: list[int] = []
    for key, labels in forward.items():
        pairs = dict(decode_labels(labels))
        if all(matcher.matches(pairs.get(matcher.name, "")) for matcher in matchers):
            ids.append(number_of(key))
    return ids
