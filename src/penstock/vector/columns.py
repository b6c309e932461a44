"""Caches of a shard's records in memory: by internal id for a few hits, and as columns for many and for filters.

Thread: any; columns are replaced whole.
Invariant: a record never changes, and internal ids are never used again, so what is cached stays true; only whether a
record is still there is for others to know.
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
        self.nbytes = self._size_bytes(table)  # kept, because every record that is applied asks for it

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
        known = self._table
        if known.num_rows < len(self.ids):
            rest = self.attributes.slice(known.num_rows).to_pylist()
            known = join_tables([known, attribute_table(rest)])
            if max((column.num_chunks for column in known.columns), default=0) > CHUNKS_MAX:
                known = known.combine_chunks()
            self._table, self.nbytes = known, self._size_bytes(known)
        return known

    def take(self, numbers: I64) -> tuple[Any, Any] | None:
        """Return the external ids and attributes of internal ids; None if one is missing."""
        wanted = numbers.astype(np.uint64)
        if len(self.ids) and int(self.ids[-1]) - int(self.ids[0]) + 1 == len(self.ids):
            places = numbers - int(self.ids[0])  # nothing was deleted
        else:
            places = np.searchsorted(self.ids, wanted)
        if len(wanted):
            if int(places.min()) < 0 or int(places.max()) >= len(self.ids):
                return None
            if not np.array_equal(self.ids[places], wanted):
                return None
        at = pa.array(places)
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
        known = self.records.get(number)
        if known is not None:
            return known
        found = read_record(get, number)
        if found is None:
            return None
        known = found[0], HitAttributes(decode_attributes(found[1]))
        self._records_bytes += len(found[0]) + 4 * len(found[1]) + RECORD_OVERHEAD
        if self._records_bytes > min(RECORDS_BYTES_MAX, self._memory_bytes_max() // RECORDS_PART):
            self.records, self._records_bytes = {}, 0
        self.records[number] = known
        return known

    def up_to(self, view: View, lsn: int, ceiling: int, count: int) -> RecordColumns:
        """Return the columns of all records of a view at an LSN, which has `count`."""
        known = self.columns
        if known is None or known.lsn > lsn or len(known.ids) > 2 * count + DELETED_MAX:
            known = RecordColumns.empty(lsn)
        if known.ceiling >= ceiling:
            return known
        found = known.extended(view, lsn, ceiling)
        newest = self.columns
        if newest is None or newest.lsn < lsn:
            self.columns = found
        return found

    def allowed(self, where: Any, columns: RecordColumns) -> U64:
        """Return the internal ids that pass a condition; the same array for the same columns and condition."""
        key = condition_key(where)
        known = None if key is None else self._allowed.get(key)
        if known is not None and known[0] is columns:
            return known[1]
        table = columns.table()
        ids: U64 = columns.ids[compile_condition(where, table.schema).mask(table)]
        if key is not None:  # those of other columns are not found again, and would keep them in memory
            others = {one: known for one, known in self._allowed.items() if known[0] is columns}
            self._allowed = {**(others if len(others) < CONDITIONS_MAX else {}), key: (columns, ids)}
        return ids
