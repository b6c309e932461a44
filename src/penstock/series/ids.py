"""Series ids that a shard remembers: what was read from its tree or applied to it.

In a bucket a series is identified by its *code row*: the number of the set of its label names, and the numbers of its
values, as bytes.
The numbers are exact, so no fingerprint is compared in memory. A label table that was written before is recognised as a
whole. All of it may be forgotten at any moment: the tree is the truth.

Thread: the thread that applies; `series_exist`, `empty` and `last` from any.
Invariant: what is remembered is in the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from pyroaring import BitMap

from penstock.lsm.view import View
from penstock.series import index
from penstock.series.keys import dictionary_keys
from penstock.series.labels import U32, LabelTable

SERIES_REMEMBERED_MAX = 2_000_000  # in all buckets
TABLES_REMEMBERED_MAX = 8
BUCKETS_REMEMBERED_MAX = 1_024
TABLE_BYTES_MAX = 4 << 20  # a larger one is not remembered as a whole
Rows = npt.NDArray[np.intp]


class BucketIds:
    """What is remembered of one bucket."""

    __slots__ = ("ids", "last", "names", "shapes", "values")

    def __init__(self, last: int) -> None:
        self.last = last  # the highest id in the tree
        self.ids: dict[bytes, int] = {}  # by code row
        self.names: dict[str, int] = {}  # the column of each label name
        self.values: list[dict[str, int]] = []  # the number of each value, by column
        self.shapes: dict[bytes, int] = {}  # the number of each set of columns that series have

    @property
    def complete(self) -> bool:
        """Whether every series of the bucket is remembered."""
        return len(self.ids) == self.last

    def code_rows(self, table: LabelTable, rows: Rows) -> list[bytes]:
        """Return the code rows of some series; numbers values that are new."""
        columns: list[tuple[int, U32]] = []
        for position, (name, values) in enumerate(zip(table.names, table.values, strict=True)):
            column = self.names.get(name)
            if column is None:
                column = len(self.values)
                self.values.append({})  # before the name: an interrupt may come between any two lines
                self.names[name] = column
            number_of = self.values[column]
            numbers = list(map(number_of.get, values))
            if None in numbers:
                for value in values:
                    number_of.setdefault(value, len(number_of) + 1)
                numbers = list(map(number_of.get, values))
            columns.append((column, np.array([0, *numbers], np.uint32)[table.codes[rows, position]]))
        coded: list[bytes] = [b""] * len(rows)
        for shape, which, numbered in _by_shape(columns, len(rows)):
            number = self.shapes.setdefault(shape, len(self.shapes) + 1)
            for row, code_row in zip(which, _code_rows(number, numbered), strict=True):
                coded[row] = code_row
        return coded

    def known_rows(self, table: LabelTable) -> list[bytes | None]:
        """Return the code rows of all series, None where a value is new. Changes nothing."""
        columns: list[tuple[int, U32]] = []
        certain = np.ones(len(table), np.bool_)
        for position, (name, values) in enumerate(zip(table.names, table.values, strict=True)):
            column, codes = self.names.get(name), table.codes[:, position]
            if column is None:
                certain &= codes == 0
                continue
            number_of = self.values[column]
            numbers = np.array([0, *(number_of.get(value, 0) for value in values)], np.uint32)[codes]
            certain &= (numbers > 0) | (codes == 0)
            columns.append((column, numbers))
        coded: list[bytes | None] = [None] * len(table)
        for shape, which, numbered in _by_shape(columns, len(table)):
            number = self.shapes.get(shape)
            if number is not None:
                for row, code_row in zip(which, _code_rows(number, numbered), strict=True):
                    coded[row] = code_row
        return [row if sure else None for row, sure in zip(coded, certain.tolist(), strict=True)]


def _by_shape(columns: list[tuple[int, U32]], count: int) -> Iterator[tuple[bytes, list[int], U32]]:
    """Yield each set of columns that some rows have, these rows, and their numbers: a matrix of rows x columns.

    So a series takes memory for the labels that it has, however many names others use.
    """
    if not columns:
        return
    columns.sort(key=lambda column: column[0])
    names = np.array([column for column, _ in columns], np.uint32)
    matrix = np.stack([numbers for _, numbers in columns], axis=1)
    present = matrix > 0
    if present.all():
        yield names.tobytes(), list(range(count)), matrix
        return
    packed: Any = np.ascontiguousarray(np.packbits(present, axis=1))
    _, shape_of = np.unique(packed.view(f"V{packed.shape[1]}").reshape(-1), return_inverse=True)
    order = np.argsort(shape_of.reshape(-1), kind="stable")
    for which in np.split(order, np.cumsum(np.bincount(shape_of.reshape(-1)))[:-1]):
        mine = present[which[0]]
        yield names[mine].tobytes(), which.tolist(), matrix[which][:, mine]


def _code_rows(shape: int, numbers: U32) -> list[bytes]:
    """Return the code rows of series of one shape: its number, and the numbers of their values."""
    rows = np.empty((len(numbers), numbers.shape[1] + 1), np.uint32)
    rows[:, 0], rows[:, 1:] = shape, numbers
    packed: Any = rows.view(f"V{4 * rows.shape[1]}").reshape(-1)
    coded: list[bytes] = packed.tolist()
    return coded


class _KnownTable:
    """The ids of a label table that was written before, by bucket; 0 for a series not written there."""

    __slots__ = ("encoded", "ids")

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded
        self.ids: dict[int, U32] = {}


@dataclass(slots=True)
class LearnedIds:
    """The ids that an applied record looked up or assigned."""

    trimmed: int  # buckets below are deleted
    buckets: dict[int, tuple[BucketIds, dict[bytes, int], int]]  # new ids by code row, and the last id
    empty: dict[int, BitMap]  # ids of empty series, by bucket
    tables: list[tuple[LabelTable, int, U32]]  # a bucket, and the id of each series there


class SeriesIds:
    """Ids that were read or assigned, by bucket."""

    def __init__(self) -> None:
        self._buckets: dict[int, BucketIds] = {}  # the least recently written first
        self._tables: dict[int, _KnownTable] = {}  # by hash; the least recently written first; replaced whole
        self._empty: dict[int, BitMap] = {}  # by bucket, as in the tree; the sets are never changed

    def bucket(self, bucket: int, view: View) -> BucketIds:
        ids = self._buckets.get(bucket)
        return BucketIds(index.last_id(view, bucket)) if ids is None else ids

    def ids_of(self, table: LabelTable, bucket: int) -> U32 | None:
        """Return the ids of a table that was written before; 0 for a series not written in this bucket."""
        encoded = table.encode()
        entry = self._tables.get(xxhash.xxh3_64_intdigest(encoded))
        return entry.ids.get(bucket) if entry is not None and entry.encoded == encoded else None

    def empty(self, bucket: int, view: View) -> BitMap:
        """Return the ids of the series of a bucket whose samples were all deleted."""
        ids = self._empty.get(bucket)
        if ids is None:
            ids = index.empty_ids(view, bucket)
        return ids

    def remember(self, learned: LearnedIds) -> None:
        """Remember what an applied record looked up or assigned. Can be repeated."""
        if learned.trimmed:
            for bucket in [bucket for bucket in self._buckets if bucket < learned.trimmed]:
                self._buckets.pop(bucket, None)
            self._tables, self._empty = {}, {}
        for bucket, ids in learned.empty.items():
            if len(self._empty) >= BUCKETS_REMEMBERED_MAX:
                self._empty = {}
            self._empty[bucket] = ids
        for number, (base, new, last) in learned.buckets.items():
            base.ids.update(new)
            base.last = max(base.last, last)
            self._buckets.pop(number, None)
            self._buckets[number] = base
        tables = dict(self._tables)
        for table, bucket, numbers in learned.tables:
            encoded = table.encode()
            if len(encoded) > TABLE_BYTES_MAX:
                continue
            digest = xxhash.xxh3_64_intdigest(encoded)
            entry = tables.pop(digest, None)
            if entry is None or entry.encoded != encoded:
                entry = _KnownTable(encoded)
            if bucket not in entry.ids and len(entry.ids) >= TABLES_REMEMBERED_MAX:
                entry.ids.clear()
            entry.ids[bucket] = numbers
            tables[digest] = entry
        while len(tables) > TABLES_REMEMBERED_MAX:
            del tables[next(iter(tables))]
        self._tables = tables
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        total = sum(len(some.ids) for some in self._buckets.values())
        while total > SERIES_REMEMBERED_MAX or len(self._buckets) > BUCKETS_REMEMBERED_MAX:
            oldest = next(iter(self._buckets))
            total -= len(self._buckets.pop(oldest).ids)

    # -- admission, from any thread

    def series_exist(self, bucket: int, table: LabelTable, view: View) -> npt.NDArray[np.bool_]:
        """Return which series of a table have samples in the bucket; those whose samples were deleted have none."""
        ids = self.ids_of(table, bucket)
        if ids is None or not ids.all():
            ids = self._known_ids(bucket, table, view)
        has_id: npt.NDArray[np.bool_] = ids > 0
        empty = self.empty(bucket, view)
        return has_id & ~np.isin(ids, np.array(empty, np.uint32)) if empty else has_id

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

    def last(self, bucket: int, view: View) -> int:
        """Return the highest id of a bucket; 0 if it has none."""
        some = self._buckets.get(bucket)
        return index.last_id(view, bucket) if some is None else some.last
