"""Rows of a kv table prepared outside the owner: sections if they are few, sorted files if they are many.

The input is Arrow batches with the columns key and value, and optionally `op`: "put", "delete", or the name of a merge
operator. Within one call the last row of a key wins, and operands are folded.

Thread: the caller's; it uses no store, only files in the folder of the `BuildContext`.
Invariants: (1) memory is bounded by SORT_BYTES, not by the rows. (2) a file holds puts and deletes only, each key once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.archive.chunk import ChunkIdentity, Sealing
from penstock.archive.container import open_chunk
from penstock.errors import Invalid, NotFound
from penstock.host.file_operations import make_dirs, remove_folder
from penstock.host.paths import parent
from penstock.journal.partitions import PartitionId, shards_of, table_of
from penstock.kinds import BuildContext, PreparedRows, partitions_of
from penstock.kv import section
from penstock.kv.ranges import PAST_ALL_KEYS
from penstock.kv.structs import has_fields
from penstock.kv.values import MERGES, Options, arrow_type, key_type, stored_values
from penstock.lsm.merge import MergeInput, MergePlan, as_written, merge, outputs_max, sstable_path
from penstock.lsm.operators import check_operand
from penstock.lsm.order import Keys, Values, shared_prefix, sort
from penstock.lsm.ranges import NO_RANGES, RangeDeletes
from penstock.lsm.rows import DELETE, KEY_BYTES_MAX, NEVER, PUT, VALUE_BYTES_MAX, Columns, bytes_list, is_binary
from penstock.lsm.writer import SstableWriter
from penstock.partition.ledger_records import TableInfo
from penstock.partition.pending import PendingDelta
from penstock.partition.reference import StagedFile, sealed

INLINE_BYTES_MAX = 1 << 20  # of rows that are sent as sections
SORT_BYTES = 128 << 20
WRITTEN_ROWS = 65_536  # to a file at once
_NOT_ROWS = ("lsn",)  # columns of a table that are ignored in a load


def load_schema(input_schema: Any, options: Options) -> Any:
    """Return the schema that rows are cast to; `Invalid` if their columns do not fit."""
    fields = [pa.field("key", key_type(options), nullable=False), pa.field("value", arrow_type(options))]
    names = [name for name in input_schema.names if name not in _NOT_ROWS]
    if "op" in names:
        fields.append(pa.field("op", pa.string()))
    expected = {field.name for field in fields}
    if set(names) != expected or len(names) != len(expected):
        raise Invalid(f"rows of a kv table have the columns key and value, and perhaps op, not {', '.join(names)}")
    for field in fields:
        column_type = input_schema.field(field.name).type
        if not _fits(column_type, field.type):
            remedy = "cast it first"
            if field.name == "value" and options.value == "json":
                remedy = "make texts of its values with json.dumps"
            elif field.name == "key" and "string" in str(column_type):
                remedy += ", or make the table with key='utf8' for keys of text"
            raise Invalid(f"column {field.name} is {column_type}, but the table holds {field.type}: {remedy}")
    return pa.schema(fields)


def _fits(actual: Any, target: Any) -> bool:
    """Whether a column can be cast to a type of the table without loss."""
    if pa.types.is_null(actual):
        return True  # no rows, or deletes only
    if pa.types.is_struct(target):
        return has_fields(actual, target)
    if pa.types.is_decimal(target):
        return bool(pa.types.is_decimal(actual) or (pa.types.is_integer(actual) and actual != pa.uint64()))
    if pa.types.is_integer(target):
        return bool(pa.types.is_integer(actual) and actual != pa.uint64())
    if pa.types.is_floating(target):
        return bool(pa.types.is_floating(actual) or pa.types.is_integer(actual))
    if pa.types.is_string(target):
        return bool(pa.types.is_string(actual) or pa.types.is_large_string(actual) or pa.types.is_string_view(actual))
    return is_binary(actual)


class _Shard:
    """The rows of one call for one shard."""

    def __init__(self) -> None:
        self.parts: list[Columns] = []
        self.bytes = 0
        self.sorted: list[str] = []  # temporary sorted files, to be merged at the end
        self.rows = 0


class Loader:
    """Prepares the rows of one call."""

    def __init__(self, info: TableInfo, options: Options, context: BuildContext) -> None:
        self._info = info
        self._options = options
        self._context = context
        self._fs = context.fs
        self._partitions = partitions_of(info)
        self._shards = [_Shard() for _ in self._partitions]
        self._merges = PendingDelta()  # merge operands, which files cannot hold
        self._spare = ""  # the folder of temporary sorted files

    def run(self, batches: Iterator[Any]) -> list[PreparedRows]:
        """Read all batches and return what is to be committed."""
        try:
            for batch in batches:
                self._add(batch)
            return [load for shard in range(len(self._shards)) for load in self._finish(shard)]
        finally:
            if self._spare:
                remove_folder(self._fs, self._spare)

    def _add(self, batch: Any) -> None:
        import pyarrow.compute as pc

        keys, values = batch.column("key").cast(pa.binary()), batch.column("value")
        ops = batch.column("op") if "op" in batch.schema.names else None
        _check_lengths(keys, KEY_BYTES_MAX, "key")
        deletes = np.zeros(batch.num_rows, np.bool_) if ops is None else _equal(ops, "delete")
        if keys.null_count or (
            values.null_count and not deletes[pc.is_null(values).to_numpy(zero_copy_only=False)].all()
        ):
            raise Invalid("a key or a value is null: leave such rows out, or delete with op='delete'")
        if deletes.any():  # the value of a delete is ignored
            values = pc.if_else(pa.array(deletes), pa.scalar(None, values.type), values)
        stored = stored_values(values, self._options)
        if deletes.any():  # a null number is stored as 8 bytes, and a delete has no value
            stored = pc.if_else(pa.array(deletes), pa.scalar(b"", stored.type), stored)
        _check_lengths(stored, VALUE_BYTES_MAX, "value")
        kinds = np.where(deletes, np.uint8(DELETE), np.uint8(PUT))
        shards = shards_of(keys, len(self._partitions))
        merged = self._take_merges(keys, stored, ops, shards, deletes)
        for number, shard in enumerate(self._shards):
            rows = np.flatnonzero((shards == number) & ~merged)
            if len(rows) == batch.num_rows:
                self._add_rows(number, shard, keys, stored, kinds)  # all of them: without a copy
            elif len(rows):
                self._add_rows(number, shard, keys.take(rows), stored.take(rows), kinds[rows])

    def _take_merges(self, keys: Any, values: Any, ops: Any, shards: Any, deletes: Any) -> Any:
        """Move merge operands into sections; return a mask of their rows. A later row that is not one drops them."""
        if ops is None:
            return np.zeros(len(keys), np.bool_)
        merged = ~deletes & ~_equal(ops, "put") & ops.is_valid().to_numpy(zero_copy_only=False)
        if not merged.any() and self._merges.is_empty():
            return merged
        for row, key in enumerate(keys.to_pylist()):
            partition = self._partitions[int(shards[row])]
            if merged[row]:
                self._merge(partition, key, ops[row].as_py(), values[row].as_py())
                continue
            for group in self._merges.groups:
                group.sections.get(partition, {}).pop(key, None)
        return merged

    def _merge(self, partition: PartitionId, key: bytes, operator: str, operand: bytes) -> None:
        if operator not in MERGES[self._options.value]:
            allowed = ", ".join(("put", "delete", *MERGES[self._options.value]))
            raise Invalid(f"op is {operator!r}: a table of {self._options.value_name} takes {allowed}")
        kind = check_operand(operator, operand)
        section.operate(self._merges, partition, key, (kind, operand, NEVER))

    def _add_rows(self, number: int, shard: _Shard, keys: Any, values: Any, kinds: Any) -> None:
        count = len(keys)
        lsns, expires = np.ones(count, np.uint64), np.full(count, NEVER, np.int64)
        shard.parts.append(Columns(keys, lsns, kinds, expires, values))
        shard.bytes += int(_span(keys) + _span(values))
        shard.rows += count
        if shard.bytes >= SORT_BYTES:
            self._sort_away(number)

    def _sort_away(self, number: int) -> None:
        """Write the rows in memory to a temporary sorted file."""
        shard = self._shards[number]
        if not self._spare:
            self._spare = (
                f"{self._context.root}/{self._context.reserve(self._partitions[number], 1)[0].file_name}.parts"
            )
            make_dirs(self._fs, self._spare)
        chunk_id = 1 + sum(len(some.sorted) for some in self._shards)
        path = sstable_path(self._spare, chunk_id)
        identity = ChunkIdentity(store=self._context.identity, chunk_id=chunk_id)
        _write_sstable(self._context, path, identity, self._partitions[number], _sorted(shard.parts))
        shard.sorted.append(path)
        shard.parts, shard.bytes = [], 0

    def _finish(self, number: int) -> Iterator[PreparedRows]:
        shard, partition = self._shards[number], self._partitions[number]
        operands = [rows for group in self._merges.groups if (rows := group.sections.get(partition))]
        if not shard.sorted and shard.bytes <= INLINE_BYTES_MAX:
            if shard.parts:
                yield PreparedRows(partition, section.encode(_rows(_sorted(shard.parts))), rows=shard.rows)
        elif operands:
            raise Invalid("a load of this size cannot hold merges: put the rows, or aggregate and merge fewer")
        elif not shard.sorted:
            staged = self._context.reserve(partition, 1)[0]
            identity = ChunkIdentity(store=self._context.identity, chunk_id=staged.chunk_id)
            path = f"{self._context.root}/{staged.file_name}"
            _write_sstable(self._context, path, identity, partition, _sorted(shard.parts))
            yield self._sealed(partition, staged, shard.rows)
        else:
            yield from self._merged(number)
        yield from (PreparedRows(partition, section.encode(rows), rows=len(rows)) for rows in operands)

    def _merged(self, number: int) -> Iterator[PreparedRows]:
        """Merge the temporary sorted files, newest first, into as few files as possible."""
        shard, partition = self._shards[number], self._partitions[number]
        sealing = self._context.sealing(partition)
        if shard.parts:
            self._sort_away(number)
        size = sum(self._size(path, sealing) for path in shard.sorted)
        reserved = self._context.reserve(partition, outputs_max(shard.rows, size))
        by_id = {staged.chunk_id: staged for staged in reserved}
        plan = MergePlan(
            inputs=tuple(MergeInput(path=path) for path in reversed(shard.sorted)),
            folder=f"{self._context.root}/{reserved[0].file_name.rpartition('/')[0]}",
            store=self._context.identity,
            chunk_ids=tuple(by_id),
            now_us=0,
            table_id=table_of(partition),
            sealing=as_written(sealing),
        )
        for summary in merge(plan, fs=self._fs, keys=sealing.keys, maker=self._context.maker):
            yield self._sealed(partition, by_id[summary.chunk_id], summary.rows)

    def _size(self, path: str, sealing: Sealing) -> int:
        chunk = open_chunk(self._fs, path, sealing.keys)
        try:
            return chunk.size
        finally:
            chunk.close()

    def _sealed(self, partition: Any, staged: StagedFile, rows: int) -> PreparedRows:
        return PreparedRows(partition, file=sealed(self._fs, self._context.root, staged), rows=rows)


def _equal(ops: Any, name: str) -> Any:
    import pyarrow.compute as pc

    return pc.fill_null(pc.equal(ops, name), False).to_numpy(zero_copy_only=False)


def _span(column: Any) -> int:
    return int(column.nbytes)


def _check_lengths(column: Any, bytes_max: int, name: str) -> None:
    import pyarrow.compute as pc

    longest = pc.max(pc.binary_length(column)).as_py() or 0
    if longest > bytes_max:
        raise Invalid(f"a {name} has {longest} bytes: at most {bytes_max} are allowed")


def _sorted(parts: list[Columns]) -> Columns:
    """Sort rows by key and keep the last one of each key."""
    import pyarrow.compute as pc

    columns = [part.keys for part in parts]
    keys, bounds = Keys.of(columns), pc.min_max(pa.chunked_array(columns))
    order, same = sort(keys, shared_prefix(bounds["min"].as_py(), bounds["max"].as_py()))
    rows = order[np.append(~same[1:], True)]  # the sort is stable: the newest of equal keys is last
    kinds = np.concatenate([part.kinds for part in parts])[rows]
    lsns, expires = np.ones(len(rows), np.uint64), np.full(len(rows), NEVER, np.int64)
    return Columns(keys.take(rows), lsns, kinds, expires, Values([part.values for part in parts]).take(rows))


def _rows(columns: Columns) -> section.Rows:
    """Build a section of sorted rows."""
    rows = section.Rows()
    keys, values = columns.list_keys(), bytes_list(columns.values)
    if columns.kinds.any():
        rows.plain = False
        rows.update(zip(keys, zip(columns.kinds.tolist(), values, [NEVER] * len(keys), strict=True), strict=True))
    else:
        rows.update(zip(keys, values, strict=True))
    return rows


def _write_sstable(  # noqa: PLR0917
    context: BuildContext,
    path: str,
    identity: ChunkIdentity,
    partition: PartitionId,
    columns: Columns | None,
    ranges: RangeDeletes = NO_RANGES,
) -> None:
    """Write sorted rows, and deletes of ranges, to a file, durably; a failure leaves no file."""
    writer = SstableWriter(context.fs, path, identity, sealing=context.sealing(partition), maker=context.maker)
    try:
        writer.delete_ranges(ranges)
        if columns is not None:
            for start in range(0, len(columns), WRITTEN_ROWS):
                writer.append(columns.slice(start, min(len(columns), start + WRITTEN_ROWS)))
        writer.finish()
    except BaseException:
        writer.abort()
        raise


# -- one group


def inside(batches: Iterator[Any], start: bytes, end: bytes | None) -> Iterator[Any]:
    """Pass the batches through; `Invalid` at the first key outside [start, end)."""
    import pyarrow.compute as pc

    for batch in batches:
        keys = batch.column("key").cast(pa.binary())
        outside = pc.less(keys, pa.scalar(start, keys.type))
        if end is not None:
            outside = pc.or_(outside, pc.greater_equal(keys, pa.scalar(end, keys.type)))
        stray = keys.filter(outside)
        if len(stray):
            raise Invalid(f"key {stray[0].as_py()!r} is outside the range of start and end that is replaced")
        yield batch


def bundle(
    loads: Sequence[PreparedRows], info: TableInfo, context: BuildContext, replace: tuple[bytes, bytes | None] | None
) -> list[PreparedRows]:
    """Arrange loads for one group: each shard has either sections or files, because files are applied alone.

    `NotFound` if the rows were prepared for an earlier table of this name, which was dropped and made again since.
    """
    bundled: list[PreparedRows] = []
    partitions = partitions_of(info)
    if not {load.partition for load in loads} <= set(partitions):
        raise NotFound(f"table {info.name} was dropped and made again while its rows were prepared: write them again")
    for partition in partitions:
        shard_loads = [load for load in loads if load.partition == partition]
        files = [load for load in shard_loads if load.file is not None]
        deleted = None if replace is None else (replace[0], replace[1] or PAST_ALL_KEYS)
        if files:
            few = [section.decode(load.payload) for load in shard_loads if load.file is None]
            bundled += files + _as_files(partition, few, deleted, context)
        else:
            if deleted is not None:
                bundled.append(PreparedRows(partition, section.encode(section.Ranges([deleted]))))
            bundled += shard_loads
    return bundled


def _as_files(
    partition: PartitionId, few: list[section.Section], deleted: tuple[bytes, bytes] | None, context: BuildContext
) -> list[PreparedRows]:
    """Write rows that came as sections, and the delete of a range, to files."""
    fs, columns = context.fs, None
    if few:
        edit = section.to_edit(few, 1, 0)
        rows = {key: (PUT, value) for key, value in edit.puts.items()} | {k: row[:2] for k, row in edit.rows.items()}
        if any(kind > DELETE for kind, _ in rows.values()):
            raise Invalid("a load of this size cannot hold merges: put the rows, or aggregate and merge fewer")
        keys = sorted(rows)
        columns = Columns.of(keys, [rows[key][1] for key in keys], 1, [rows[key][0] for key in keys])
    loads: list[PreparedRows] = []
    for rows_of, ranges in ((columns, NO_RANGES), (None, RangeDeletes.of([(*deleted, 1)]) if deleted else NO_RANGES)):
        if rows_of is None and not ranges:
            continue
        staged = context.reserve(partition, 1)[0]
        identity = ChunkIdentity(store=context.identity, chunk_id=staged.chunk_id)
        path = f"{context.root}/{staged.file_name}"
        make_dirs(fs, parent(path))
        _write_sstable(context, path, identity, partition, rows_of, ranges)
        loads.append(
            PreparedRows(partition, file=sealed(fs, context.root, staged), rows=0 if rows_of is None else len(rows_of))
        )
    return loads
