"""Rows that users pass as Arrow data: tables, streams and frames of pyarrow, pandas, Polars, DuckDB.

Thread: pure functions; the batches of a stream are read once, by one thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from penstock.errors import Invalid

_INDEX = re.compile(r"__index_level_\d+__")  # of a pandas frame that was filtered, for example
SLICE_BYTES = 64 << 20  # cast in one step: offsets of binary columns end at 2 GiB
_VIEWS = {pa.binary_view(): pa.large_binary(), pa.string_view(): pa.large_string()}


class SourceError(Exception):
    """Reading the caller's rows failed. The caller gets the cause unchanged: it is not an error of the store."""


def is_arrow(rows: Any) -> bool:
    """Whether these are Arrow rows."""
    return hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__")


def open_batches(rows: Any, call: str) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    """Return the schema and the record batches of Arrow rows; `Invalid`, with the name of the call, for others."""
    if not is_arrow(rows):
        raise Invalid(f"{call} takes an Arrow table or stream, not {type(rows).__name__}: use pyarrow.table(...)")
    try:
        if hasattr(rows, "__arrow_c_stream__"):
            reader = pa.RecordBatchReader.from_stream(rows)
            return _plain(reader.schema, reader)
        batch = pa.record_batch(rows)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise Invalid(f"{call} takes an Arrow table or stream, and this is not one ({error})") from None
    return _plain(batch.schema, [batch])


def plain_table(rows: Any, call: str) -> pa.Table:
    """Return Arrow rows as a table, as `open_batches` reads them."""
    schema, batches = open_batches(rows, call)
    return pa.Table.from_batches(list(batches), schema)


def _plain(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    """Return rows without the unnamed index of a pandas frame, and with categories decoded."""
    used = [number for number, name in enumerate(schema.names) if not _INDEX.fullmatch(name)]
    plain = pa.schema([schema.field(number).with_type(_plain_type(schema.field(number).type)) for number in used])
    if plain.equals(schema):
        return schema, batches

    def converted() -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = [_plain_column(batch.column(number)) for number in used]
            yield pa.record_batch(columns, schema=plain)

    return plain, converted()


def _plain_type(kind: Any) -> Any:
    if pa.types.is_dictionary(kind):
        return _VIEWS.get(kind.value_type, kind.value_type)
    return pa.binary() if pa.types.is_fixed_size_binary(kind) else kind


def _plain_column(column: Any) -> Any:
    kind = _plain_type(column.type)
    if pa.types.is_dictionary(column.type):
        return column.dictionary.cast(kind).take(column.indices)
    return column if column.type == kind else column.cast(kind)


def cast_batches(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield batches of bounded size with the columns and types of `schema`; `SourceError` if reading them fails."""
    for batch in _read(batches):
        columns = [batch.column(name) for name in schema.names]
        columns = [column.cast(_VIEWS.get(column.type, column.type)) for column in columns]
        for part in _sliced(pa.record_batch(columns, names=schema.names)):
            try:
                columns = [part.column(field.name).cast(field.type) for field in schema]
                for column in columns:
                    if not pa.types.is_decimal(column.type):  # sums may have more digits
                        column.validate(full=True)  # text that is not UTF-8 could not be read again
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise Invalid(f"the rows do not fit the types of the table ({error}): cast them first") from None
            yield pa.record_batch(columns, schema=schema)


def _read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    try:
        yield from batches
    except OSError as error:
        raise SourceError from error


def _sliced(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.nbytes <= SLICE_BYTES or batch.num_rows < 2:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _sliced(batch.slice(0, half))
    yield from _sliced(batch.slice(half))
