"""Caches of a shard's records in memory: by internal id for a few hits, and as columns for many and for filters.

Thread: any; columns are replaced whole.
Invariant: a record never changes, and internal ids are never used again, so a cached record stays correct. Whether it
was deleted since is for the caller to check.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.lsm.view import View
from penstock.vector.attributes import HitAttributes, attribute_table, decode_attributes, join_tables
from penstock.vector.exact import I64
from penstock.vector.filters import compile_condition, condition_key
from penstock.vector.keys import U64
from penstock.vector.stored import read_record, record_slices

RECORDS_BYTES_MAX = 64 << 20  # of cached records, and
RECORDS_PART = 16  # of the memory that kernels may take
RECORD_OVERHEAD = 500
CONDITIONS_MAX = 16  # whose allowed ids are cached
CHUNKS_MAX = 32  # of a column, before they are joined
DELETED_MAX = 4_096  # deleted records in cached columns, beside as many as there are others


class RecordColumns:
    """The records of a shard below a ceiling, in the order of internal ids; deleted ones may be among them."""

    __slots__ = ("_table", "attributes", "ceiling", "ids", "lsn", "names", "nbytes")

    def __init__(  # noqa: PLR0917
        self, lsn: int, ceiling: int, ids: U64, names: pa.ChunkedArray, attributes: pa.ChunkedArray, table: pa.Table
    ) -> None:
        self.lsn = lsn  # records that were deleted up to here may be missing
        self.ceiling = ceiling
        self.ids = ids
        self.names = names  # external ids
        self.attributes = attributes  # as JSON text
        self._table = table  # the attributes of the first records; replaced whole
        self.nbytes = self._size_bytes(table)  # cached: it is read for every applied record

    def _size_bytes(self, table: pa.Table) -> int:
        return int(self.ids.nbytes + self.names.nbytes + self.attributes.nbytes + table.nbytes)

    @classmethod
    def empty(cls, lsn: int) -> RecordColumns:
        """Return the columns of no records."""
        none = pa.chunked_array([], pa.string())
        return cls(lsn, 0, np.zeros(0, np.uint64), none, none, attribute_table([]))

    def extended(self, view: View, lsn: int, ceiling: int) -> RecordColumns:
        """Return these columns with the records of a view up to a ceiling."""
        ids, names, attributes = [self.ids], self.names.chunks, self.attributes.chunks
        for some, external, encoded in record_slices(view, self.ceiling, ceiling):
            ids.append(some)
            names.append(external)
            attributes.append(encoded)
        if len(names) > CHUNKS_MAX:
            names, attributes = [pa.concat_arrays(names)], [pa.concat_arrays(attributes)]
        texts, encoded_texts = (pa.chunked_array(chunks, pa.string()) for chunks in (names, attributes))
        return RecordColumns(lsn, ceiling, np.concatenate(ids), texts, encoded_texts, self._table)

    def table(self) -> pa.Table:
        """Return the attributes as a table: see `attribute_table`."""
        table = self._table
        if table.num_rows < len(self.ids):
            rest = self.attributes.slice(table.num_rows).to_pylist()
            table = join_tables([table, attribute_table(rest)])
            if max((column.num_chunks for column in table.columns), default=0) > CHUNKS_MAX:
                table = table.combine_chunks()
            self._table, self.nbytes = table, self._size_bytes(table)
        return table

    def take(self, numbers: I64) -> tuple[Any, Any] | None:
        """Return the external ids and attributes of internal ids; None if one is missing."""
        ids = numbers.astype(np.uint64)
        if len(self.ids) and int(self.ids[-1]) - int(self.ids[0]) + 1 == len(self.ids):
            positions = numbers - int(self.ids[0])  # nothing was deleted
        else:
            positions = np.searchsorted(self.ids, ids)
        if len(ids):
            if int(positions.min()) < 0 or int(positions.max()) >= len(self.ids):
                return None
            if not np.array_equal(self.ids[positions], ids):
                return None
        at = pa.array(positions)
        return _joined(self.names.take(at)), _joined(self.attributes.take(at))


def _joined(column: pa.ChunkedArray) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


class RecordCache:
    """The cached records of one shard."""

    def __init__(self, memory_bytes_max: Callable[[], int]) -> None:
        self._memory_bytes_max = memory_bytes_max
        self.records: dict[int, tuple[str, HitAttributes]] = {}  # by internal id
        self._records_bytes = 0
        self.columns: RecordColumns | None = None  # replaced whole
        self._allowed: dict[Hashable, tuple[RecordColumns, U64]] = {}  # replaced whole

    def memory_bytes(self) -> int:
        """Return the memory that the caches take, approximately."""
        columns = self.columns
        allowed = sum(ids.nbytes for _, ids in self._allowed.values())
        return self._records_bytes + allowed + (0 if columns is None else columns.nbytes)

    def clear(self) -> None:
        """Drop everything."""
        self.records, self._records_bytes, self.columns, self._allowed = {}, 0, None, {}

    def record(self, number: int, get: Callable[[bytes], bytes | None]) -> tuple[str, HitAttributes] | None:
        """Return the external id and the attributes of an internal id; None if it was deleted."""
        record = self.records.get(number)
        if record is not None:
            return record
        row = read_record(get, number)
        if row is None:
            return None
        record = row[0], HitAttributes(decode_attributes(row[1]))
        self._records_bytes += len(row[0]) + 4 * len(row[1]) + RECORD_OVERHEAD
        if self._records_bytes > min(RECORDS_BYTES_MAX, self._memory_bytes_max() // RECORDS_PART):
            self.records, self._records_bytes = {}, 0
        self.records[number] = record
        return record

    def up_to(self, view: View, lsn: int, ceiling: int, count: int) -> RecordColumns:
        """Return the columns of all records of a view at an LSN, which has `count`."""
        columns = self.columns
        if columns is None or columns.lsn > lsn or len(columns.ids) > 2 * count + DELETED_MAX:
            columns = RecordColumns.empty(lsn)
        if columns.ceiling >= ceiling:
            return columns
        extended = columns.extended(view, lsn, ceiling)
        newest = self.columns
        if newest is None or newest.lsn < lsn:
            self.columns = extended
        return extended

    def allowed(self, where: Any, columns: RecordColumns) -> U64:
        """Return the internal ids that pass a condition; the same array for the same columns and condition."""
        key = condition_key(where)
        entry = None if key is None else self._allowed.get(key)
        if entry is not None and entry[0] is columns:
            return entry[1]
        table = columns.table()
        ids: U64 = columns.ids[compile_condition(where, table.schema).mask(table)]
        if key is not None:  # entries of other columns are never hit again, and would keep those in memory
            others = {other: entry for other, entry in self._allowed.items() if entry[0] is columns}
            self._allowed = {**(others if len(others) < CONDITIONS_MAX else {}), key: (columns, ids)}
        return ids
