"""Bulk loads: Arrow rows become sections or sorted files in the caller's process, and one batch commits them.

A load has two halves. `prepare` turns rows into what their kind writes: few rows into a section, many into files that
are staged in the store. They are not visible yet, and any number of processes may prepare at once. `bundle` combines
what they prepared for a table into one group, which a batch commits: all rows become visible together, or none. Files
that are not committed are removed when their lease ends.

Thread: the caller's.
Invariant: rows are checked and cast before a file is staged for them; a bad schema leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from penstock.arguments import in_short, seconds
from penstock.errors import Invalid
from penstock.host.file_errors import translate_os_errors
from penstock.journal.partitions import table_of
from penstock.kinds import BuildContext, Port, PreparedRows, as_loadable, as_replaceable
from penstock.partition.ledger import TableInfo
from penstock.partition.reference import LEASE_S_MAX
from penstock.registry import kind_named

LEASE_S = 3_600.0  # of staged files: how long they wait for their commit
SLICE_BYTES = 64 << 20  # cast in one step: offsets of binary columns end at 2 GiB
_VIEWS = {pa.binary_view(): pa.large_binary(), pa.string_view(): pa.large_string()}


class PreparedLoad(msgspec.Struct, frozen=True, array_like=True):
    """Rows for one table, ready to be committed by `StoreBatch.load`, in this process or another one."""

    table: str
    rows: int
    parts: tuple[PreparedRows, ...]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load` did."""

    rows: int  # written by this call
    duplicate: bool  # the token was committed before: this call wrote nothing


class _SourceError(Exception):
    """Reading the caller's rows failed. The caller gets the cause unchanged: it is not an error of the store."""


def prepare(port: Port, info: TableInfo, rows: Any, lease_s: float = LEASE_S) -> PreparedLoad:
    """Turn rows, an Arrow table or stream, into sections and staged files; `Invalid` if they do not fit the table."""
    lease_s = seconds(lease_s, "lease_s", LEASE_S_MAX, above_zero=True)
    schema, batches = _batches(rows)
    with port.building(lease_s) as context:
        return prepare_batches(context, info, schema, batches)


def prepare_batches(
    context: BuildContext,
    info: TableInfo,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    replace: tuple[bytes, bytes | None] | None = None,
) -> PreparedLoad:
    """Turn record batches of one schema, all in the range that is replaced, into sections and staged files."""
    kind = as_loadable(kind_named(info.kind, info.name), info)
    wanted = kind.load_schema(schema, info.options)
    count = 0

    def fitting() -> Iterator[pa.RecordBatch]:
        nonlocal count
        fitted = _cast(batches, wanted)
        if replace is not None:
            fitted = as_replaceable(kind_named(info.kind, info.name), info).inside(fitted, *replace)
        for batch in fitted:
            count += batch.num_rows
            yield batch

    try:
        with translate_os_errors():
            parts = kind.load(fitting(), info, context)
            for part in parts:
                if part.file is not None:
                    context.hand_over(part.partition, part.file)
    except _SourceError as error:
        raise error.__cause__ or error from None
    return PreparedLoad(info.name, count, tuple(parts))


def check_loads(info: TableInfo, prepared: Any) -> Sequence[PreparedLoad]:
    """Return the loads as a sequence; `Invalid` if they are not loads of this table."""
    loads = [prepared] if isinstance(prepared, PreparedLoad) else prepared
    if not isinstance(loads, Sequence) or not all(isinstance(load, PreparedLoad) for load in loads):
        raise Invalid(f"load takes an Arrow table or stream, or what prepare returned, not {in_short(prepared)}")
    for load in loads:
        if any(table_of(part.partition) != info.table_id for part in load.parts):
            raise Invalid(f"rows prepared for table {load.table} were given for {info.name}: prepare them again")
    return loads


def bundle(
    context: BuildContext,
    info: TableInfo,
    parts: Sequence[PreparedRows],
    replace: tuple[bytes, bytes | None] | None = None,
) -> list[PreparedRows]:
    """Combine what several calls prepared into one group; `replace`: a range of keys whose rows they replace."""
    with translate_os_errors():
        kind = kind_named(info.kind, info.name)
        if replace is None:
            bundled = as_loadable(kind, info).bundle(parts, info, context)
        else:
            bundled = as_replaceable(kind, info).bundle_in_place(parts, info, context, replace)
        handed_over = {part.file for part in parts}
        for part in bundled:
            if part.file is not None and part.file not in handed_over:
                context.hand_over(part.partition, part.file)
    return bundled


def is_arrow(rows: Any) -> bool:
    """Whether these are Arrow rows, not prepared loads."""
    return hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__")


def _batches(rows: Any) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    if not is_arrow(rows):
        raise Invalid(f"load takes an Arrow table or stream, not {type(rows).__name__}: use pyarrow.table(...)")
    try:
        if hasattr(rows, "__arrow_c_stream__"):
            reader = pa.RecordBatchReader.from_stream(rows)
            return reader.schema, reader
        batch = pa.record_batch(rows)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise Invalid(f"load takes an Arrow table or stream, and this is not one ({error})") from None
    return batch.schema, [batch]


def _cast(batches: Iterable[pa.RecordBatch], wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield batches of bounded size with the columns and types that a kind loads."""
    for batch in _read(batches):
        columns = [batch.column(name) for name in wanted.names]
        columns = [column.cast(_VIEWS.get(column.type, column.type)) for column in columns]
        for part in _sliced(pa.record_batch(columns, names=wanted.names)):
            try:
                columns = [part.column(field.name).cast(field.type) for field in wanted]
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise Invalid(f"the rows do not fit the types of the table ({error}): cast them first") from None
            yield pa.record_batch(columns, schema=wanted)


def _read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except OSError as error:
        raise _SourceError from error


def _sliced(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.nbytes <= SLICE_BYTES or batch.num_rows < 2:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _sliced(batch.slice(0, half))
    yield from _sliced(batch.slice(half))
