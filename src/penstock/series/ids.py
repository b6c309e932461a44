"""Series ids: get or create. A record's samples and the rows of its new series are prepared as one edit.

An id belongs to one bucket. It is assigned here, while a record is applied, and nowhere else: new series of a part are
numbered by metric, then by their order in the part, so two replays of a journal give the same ids. The tree is the
truth; `SeriesIds` only remembers what was read from it or applied to it.

In a bucket a series is known by its *code row*: the numbers of its values, one column for each label name, as bytes.
The numbers are exact, so no fingerprint is compared in memory; a fingerprint only finds the row in the tree, where the
labels themselves are compared. A label table that was written before is recognised as a whole.

A delete of all samples of a series in a bucket adds its id to the bucket's set of *empty* series, which readers leave
out; a sample that comes later takes it out of there.

Thread: the thread that applies; `known` and `last_id` from any.
Invariants: (1) what is remembered is in the tree; a draft changes nothing until its edit is applied. (2) ids of a
bucket are 1 to its last id, without gaps. (3) an empty series has no samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from pyroaring import BitMap

from penstock.lsm.operators import SERIES_IDS
from penstock.lsm.rows import NEVER, Row
from penstock.lsm.view import View
from penstock.series import index
from penstock.series.blocks import Samples, Tombstones
from penstock.series.keys import (
    ALL_METRICS,
    EMPTY,
    PROGRESS,
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
from penstock.series.operators import encode_ids
from penstock.series.options import HOUR_US, TIME_MAX, TIME_MIN, SeriesOptions
from penstock.series.section import BucketTrim, MetricMetadata, Part, RollupProgress, SampleBlock, SeriesDelete
from penstock.series.selectors import Matcher, parse_selector

SERIES_REMEMBERED_MAX = 2_000_000  # in all buckets
TABLES_REMEMBERED_MAX = 8
BUCKETS_REMEMBERED_MAX = 4_096  # of which the empty series are remembered
TABLE_BYTES_MAX = 4 << 20  # a larger one is not remembered as a whole
Rows = npt.NDArray[np.intp]


class BucketIds:
    """What is remembered of one bucket."""

    __slots__ = ("ids", "last", "names", "values")

    def __init__(self, last: int) -> None:
        self.last = last  # the highest id in the tree
        self.ids: dict[bytes, int] = {}  # by code row
        self.names: dict[str, int] = {}  # the column of each label name
        self.values: list[dict[str, int]] = []  # the number of each value, by column

    @property
    def complete(self) -> bool:
        """Whether every series of the bucket is remembered."""
        return len(self.ids) == self.last

    def code_rows(self, table: LabelTable, rows: Rows) -> list[bytes]:
        """Return the code rows of some series; numbers values that are new."""
        columns: list[tuple[int, U32]] = []
        for place, (name, values) in enumerate(zip(table.names, table.values, strict=True)):
            column = self.names.get(name)
            if column is None:
                column = len(self.values)
                self.values.append({})  # before the name: an interrupt may come between any two lines
                self.names[name] = column
            known = self.values[column]
            numbers = list(map(known.get, values))
            if None in numbers:
                for value in values:
                    known.setdefault(value, len(known) + 1)
                numbers = list(map(known.get, values))
            columns.append((column, np.array([0, *numbers], np.uint32)[table.codes[rows, place]]))
        return _joined(columns, len(rows))

    def known_rows(self, table: LabelTable) -> list[bytes | None]:
        """Return the code rows of all series, None where a value is new. Changes nothing."""
        columns: list[tuple[int, U32]] = []
        certain = np.ones(len(table), np.bool_)
        for place, (name, values) in enumerate(zip(table.names, table.values, strict=True)):
            column, codes = self.names.get(name), table.codes[:, place]
            if column is None:
                certain &= codes == 0
                continue
            known = self.values[column]
            numbers = np.array([0, *(known.get(value, 0) for value in values)], np.uint32)[codes]
            certain &= (numbers > 0) | (codes == 0)
            columns.append((column, numbers))
        rows = _joined(columns, len(table))
        return [row if sure else None for row, sure in zip(rows, certain.tolist(), strict=True)]


def _joined(columns: list[tuple[int, U32]], count: int) -> list[bytes]:
    width = 1 + max((column for column, _ in columns), default=0)
    matrix = np.zeros((count, width), np.uint32)
    for column, numbers in columns:
        matrix[:, column] = numbers
    packed: Any = matrix.view(f"V{4 * width}").reshape(-1)
    # Columns that came later are zeros: a row must not depend on how many there are.
    return [row.rstrip(b"\0") for row in packed.tolist()]


class _KnownTable:
    """The ids of a label table that was written before, by bucket; 0 for a series not written there."""

    __slots__ = ("encoded", "ids")

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded
        self.ids: dict[int, U32] = {}


class SeriesIds:
    """Ids that were read or assigned, by bucket."""

    def __init__(self, options: SeriesOptions) -> None:
        self._options = options
        self._buckets: dict[int, BucketIds] = {}  # the least recently written first
        self._tables: dict[int, _KnownTable] = {}  # by hash; the least recently written first; replaced whole
        self._empty: dict[int, BitMap] = {}  # by bucket, as in the tree; the sets are never changed

    def bucket(self, bucket: int, view: View) -> BucketIds:
        known = self._buckets.get(bucket)
        return BucketIds(index.last_id(view, bucket)) if known is None else known

    def ids_of(self, table: LabelTable, bucket: int) -> U32 | None:
        """Return the ids of a table that was written before; 0 for a series not written in this bucket."""
        encoded = table.encode()
        known = self._tables.get(xxhash.xxh3_64_intdigest(encoded))
        return known.ids.get(bucket) if known is not None and known.encoded == encoded else None

    def empty(self, bucket: int, view: View) -> BitMap:
        """Return the ids of the series of a bucket whose samples were all deleted."""
        known = self._empty.get(bucket)
        if known is None:
            known = index.empty_ids(view, bucket)
        return known

    def remember(self, draft: RecordDraft) -> None:
        """Remember what an applied draft found and assigned. Can be repeated."""
        if draft.trimmed:
            for bucket in [bucket for bucket in self._buckets if bucket < draft.trimmed]:
                self._buckets.pop(bucket, None)
            self._tables, self._empty = {}, {}
        for bucket, ids in (*draft.empty_read.items(), *draft.empty.items()):
            if len(self._empty) >= BUCKETS_REMEMBERED_MAX:
                self._empty = {}
            self._empty[bucket] = ids
        for number, some in draft.buckets.items():
            some.base.ids.update(some.new)
            some.base.last = max(some.base.last, some.last)
            self._buckets.pop(number, None)
            self._buckets[number] = some.base
        tables = dict(self._tables)
        for table, bucket, ids in draft.resolved:
            encoded = table.encode()
            if len(encoded) > TABLE_BYTES_MAX:
                continue
            digest = xxhash.xxh3_64_intdigest(encoded)
            known = tables.pop(digest, None)
            if known is None or known.encoded != encoded:
                known = _KnownTable(encoded)
            if bucket not in known.ids and len(known.ids) >= TABLES_REMEMBERED_MAX:
                known.ids.clear()
            known.ids[bucket] = ids
            tables[digest] = known
        while len(tables) > TABLES_REMEMBERED_MAX:
            del tables[next(iter(tables))]
        self._tables = tables
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        total = sum(len(some.ids) for some in self._buckets.values())
        while total > SERIES_REMEMBERED_MAX:
            oldest = next(iter(self._buckets))
            total -= len(self._buckets.pop(oldest).ids)

    # -- admission, from any thread

    def known(self, bucket: int, table: LabelTable, view: View) -> npt.NDArray[np.bool_]:
        """Return which series of a table have samples in the bucket; those whose samples were deleted have none."""
        ids = self.ids_of(table, bucket)
        if ids is None or not ids.all():
            ids = self._known_ids(bucket, table, view)
        known: npt.NDArray[np.bool_] = ids > 0
        empty = self.empty(bucket, view)
        return known & ~np.isin(ids, np.array(empty, np.uint32)) if empty else known

    def _known_ids(self, bucket: int, table: LabelTable, view: View) -> U32:
        """Return the id of each series, 0 for those that the bucket does not have."""
        some = self._buckets.get(bucket)
        ids = np.zeros(len(table), np.uint32)
        if some is not None:
            ids[:] = [0 if row is None else some.ids.get(row, 0) for row in some.known_rows(table)]
            if some.complete:
                return ids
        elif not index.last_id(view, bucket):
            return ids
        unsure = np.flatnonzero(ids == 0)
        for row, key in zip(unsure.tolist(), dictionary_keys(bucket, table.fingerprints[unsure]), strict=True):
            ids[row] = next(iter(index.dictionary_ids(view.get(key))), 0)
        return ids

    def series_count(self, bucket: int, view: View) -> int:
        """Return the number of series in a bucket that have samples."""
        some = self._buckets.get(bucket)
        return (index.last_id(view, bucket) if some is None else some.last) - len(self.empty(bucket, view))


class _BucketDraft:
    """New series of one bucket."""

    __slots__ = ("base", "dictionary", "forward", "inverted", "last", "new")

    def __init__(self, base: BucketIds) -> None:
        self.base = base
        self.last = base.last
        self.new: dict[bytes, int] = {}  # ids by code row
        self.dictionary: dict[bytes, bytes] = {}
        self.forward: dict[bytes, bytes] = {}
        self.inverted: dict[bytes, BitMap] = {}


class RecordDraft:
    """The edit of one record, in the making. `view` is the state before it."""

    def __init__(self, ids: SeriesIds, options: SeriesOptions, view: View, lsn: int) -> None:
        self.lsn = lsn
        self.buckets: dict[int, _BucketDraft] = {}
        self.resolved: list[tuple[LabelTable, int, U32]] = []
        self.empty: dict[int, BitMap] = {}  # the ids of empty series, for each bucket where they change
        self.empty_read: dict[int, BitMap] = {}  # those that do not change here
        self.refilled: list[bytes] = []  # dictionary keys of series that were empty
        self.trimmed = 0  # buckets below are deleted
        self._ids = ids
        self._options = options
        self._view = view
        self._parts: list[SamplePart] = []
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

    @property
    def changes_series(self) -> bool:
        """Whether series are new here, or have samples again."""
        return bool(self.refilled) or any(some.new for some in self.buckets.values())

    def series_keys(self) -> Iterator[bytes]:
        """Yield the dictionary keys of the series that are new here, or have samples again."""
        yield from self.refilled
        for some in self.buckets.values():
            yield from some.dictionary

    def edit(self, time_us: int) -> SeriesEdit:
        """Return the edit of all parts."""
        puts, rows = dict(self._metadata), dict[bytes, Row]()
        for some in self.buckets.values():
            puts.update(some.dictionary)
            puts.update(some.forward)
            for key, members in some.inverted.items():
                rows[key] = (SERIES_IDS, encode_ids(members), self.lsn, NEVER)
        for bucket, ids in self.empty.items():
            puts[prefix(bucket, EMPTY)] = encode_ids(ids)
        for part in self._parts:
            puts.update(dict.fromkeys((change_key(part.bucket, hour) for hour in _hours(part)), b""))
        ranges = [bucket_range(0, self.trimmed)] if self.trimmed else []
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
            self._parts.append(SamplePart(self.lsn, first, Samples(ids[block.index], times, bits)))
            return
        buckets = self._options.buckets(block.times)
        for bucket in np.unique(buckets).tolist():
            here = np.flatnonzero(buckets == bucket)
            numbers = block.index[here]
            rows = np.unique(numbers).astype(np.intp)
            ids = self._resolve(bucket, block.series, rows)
            self._refill(bucket, block.series, ids, rows)
            samples = Samples(ids[numbers], block.times[here], block.bits[here])
            self._parts.append(SamplePart(self.lsn, bucket, samples))

    def _empty_of(self, bucket: int) -> BitMap:
        """Return the ids of the empty series of a bucket, after the parts that were added."""
        known = self.empty.get(bucket)
        if known is None:
            known = BitMap() if bucket < self.trimmed else self._ids.empty(bucket, self._view)
            self.empty_read[bucket] = known
        return known

    def _refill(self, bucket: int, table: LabelTable, ids: U32, rows: Rows | None) -> None:
        """Take series that get samples out of the empty ones; `rows` are those of the table that do (None: all)."""
        empty = self._empty_of(bucket)
        if not empty:
            return
        rows = np.arange(len(table)) if rows is None else rows
        rows = rows[np.isin(ids[rows], np.array(empty, np.uint32))]
        if len(rows):
            self.empty[bucket] = empty - BitMap(ids[rows])
            self.refilled += dictionary_keys(bucket, table.fingerprints[rows])

    def _resolve(self, bucket: int, table: LabelTable, rows: Rows | None) -> U32:
        """Return the id of each series of a table, in some rows (None: in all); create those that are new."""
        ids = None if bucket < self.trimmed else self._ids.ids_of(table, bucket)
        if ids is not None and (ids if rows is None else ids[rows]).all():
            return ids
        rows = np.arange(len(table)) if rows is None else rows
        ids = np.zeros(len(table), np.uint32) if ids is None else ids.copy()
        some = self._bucket(bucket)
        codes = some.base.code_rows(table, rows)
        numbers = np.array([some.base.ids.get(row) or some.new.get(row, 0) for row in codes], np.uint32)
        unknown = np.flatnonzero(numbers == 0)
        if len(unknown):
            numbers[unknown] = self._find_or_create(bucket, some, table, rows[unknown], [codes[i] for i in unknown])
        ids[rows] = numbers
        self.resolved.append((table, bucket, ids))
        return ids

    def _bucket(self, bucket: int) -> _BucketDraft:
        some = self.buckets.get(bucket)
        if some is None:
            base = BucketIds(0) if bucket < self.trimmed else self._ids.bucket(bucket, self._view)
            some = self.buckets[bucket] = _BucketDraft(base)
        return some

    def _find_or_create(
        self, bucket: int, some: _BucketDraft, table: LabelTable, rows: Rows, codes: list[bytes]
    ) -> U32:
        keys = dictionary_keys(bucket, table.fingerprints[rows])
        labels = table.label_bytes(rows)
        if bucket < self.trimmed or not some.base.last:
            numbers = np.zeros(len(rows), np.uint32)
        else:
            found = (self._find(bucket, key, line) for key, line in zip(keys, labels, strict=True))
            numbers = np.fromiter(found, np.uint32, len(rows))
            for place in np.flatnonzero(numbers).tolist():
                some.base.ids[codes[place]] = int(numbers[place])  # a fact of the tree, whatever becomes of this draft
        new = np.flatnonzero(numbers == 0)
        if len(new):
            metric = table.codes[rows[new], table.names.index(METRIC)]
            new = new[np.argsort(metric, kind="stable")]  # series of one metric side by side
            fresh = np.arange(some.last + 1, some.last + 1 + len(new), dtype=np.uint32)
            numbers[new] = fresh
            self._create(bucket, some, table, rows[new], fresh, [(keys[i], labels[i], codes[i]) for i in new.tolist()])
        return numbers

    def _find(self, bucket: int, key: bytes, labels: bytes) -> int:
        """Return the id of a series in the tree; 0 if there is none. Series of one fingerprint differ by labels."""
        for number in index.dictionary_ids(self._view.get(key)):
            if self._view.get(forward_key(bucket, number)) == labels:
                return number
        return 0

    def _create(  # noqa: PLR0917
        self,
        bucket: int,
        some: _BucketDraft,
        table: LabelTable,
        rows: Rows,
        ids: U32,
        new: list[tuple[bytes, bytes, bytes]],
    ) -> None:
        some.last = int(ids[-1])
        stored = bucket >= self.trimmed and some.base.last > 0
        for number, (key, _, code) in zip(ids.tolist(), new, strict=True):
            some.new[code] = number
            before = some.dictionary.get(key)
            if before is None:
                before = (self._view.get(key) or b"") if stored else b""
            some.dictionary[key] = before + index.dictionary_value(number)
        some.forward.update(zip(forward_keys(bucket, ids), (labels for _, labels, _ in new), strict=True))
        for place, (name, values) in enumerate(zip(table.names, table.values, strict=True)):
            for value, members in _members(table.codes[rows, place], ids):
                key = inverted_key(bucket, name, values[value - 1])
                known = some.inverted.get(key)
                if known is None:
                    some.inverted[key] = BitMap(members)
                else:
                    known.update(members)

    # -- deletes

    def _delete(self, delete: SeriesDelete) -> None:
        """Delete samples: a tombstone for each matching series. Its rows stay until the bucket is dropped."""
        matchers = parse_selector(delete.selector)
        first, end = self._options.bucket(delete.start), self._options.bucket(delete.end - 1) + 1
        stored = set(index.buckets(self._view, max(first, self.trimmed), end))
        for bucket in sorted(stored | {number for number in self.buckets if first <= number < end}):
            ids = index.match_any(self._view, bucket, matchers) if bucket in stored else BitMap()
            if bucket in self.buckets:
                ids.update(_matching(self.buckets[bucket].forward, matchers))
            empty = self._empty_of(bucket)
            ids -= empty
            if ids:
                first_time, end_time = map(self._options.bucket_start, (bucket, bucket + 1))
                start, stop = max(delete.start, first_time), min(delete.end, end_time)
                if start <= max(first_time, TIME_MIN) and stop >= min(end_time, TIME_MAX):
                    self.empty[bucket] = empty | ids
                deleted = Tombstones(
                    np.array(ids, np.uint32), np.full(len(ids), start, np.int64), np.full(len(ids), stop, np.int64)
                )
                self._parts.append(SamplePart(self.lsn, bucket, deleted=deleted))

    def _trim(self, trim: BucketTrim) -> None:
        """Delete whole buckets, with their index."""
        end = self._options.bucket(trim.floor)
        self._parts = [part for part in self._parts if part.bucket >= end]
        self.resolved = [entry for entry in self.resolved if entry[1] >= end]
        self.buckets = {number: some for number, some in self.buckets.items() if number >= end}
        for sets in (self.empty, self.empty_read):
            for number in [number for number in sets if number < end]:
                del sets[number]
        if next(index.buckets(self._view, 0, end), None) is not None:
            self.trimmed = max(self.trimmed, end)


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


def _members(codes: U32, ids: U32) -> Iterator[tuple[int, U32]]:
    """Yield each code but 0, with the ids that have it."""
    order = np.argsort(codes, kind="stable")
    codes, ids = codes[order], ids[order]
    starts = np.flatnonzero(np.append(True, codes[1:] != codes[:-1]))
    ends = np.append(starts[1:], len(codes))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if codes[start]:
            yield int(codes[start]), ids[start:end]


def _matching(forward: dict[bytes, bytes], matchers: Sequence[Matcher]) -> list[int]:
    """Return the ids of new series that match."""
    ids: list[int] = []
    for key, labels in forward.items():
        pairs = dict(decode_labels(labels))
        if all(matcher.matches(pairs.get(matcher.name, "")) for matcher in matchers):
            ids.append(number_of(key))
    return ids
