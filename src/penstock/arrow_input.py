"""Rows that users pass as Arrow data: tables, streams and frames of pyarrow, pandas, Polars, DuckDB.

Thread: pure functions; the batches of a stream are read once, by one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from penstock.errors import Invalid

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
            return reader.schema, reader
        batch = pa.record_batch(rows)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise Invalid(f"{call} takes an Arrow table or stream, and this is not one ({error})") from None
    return batch.schema, [batch]


def cast_batches(batches: Iterable[pa.RecordBatch], wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield batches of bounded size with the columns and types of `wanted`; `SourceError` if reading them fails."""
    for batch in _read(batches):
        columns = [batch.column(name) for name in wanted.names]
        columns = [column.cast(_VIEWS.get(column.type, column.type)) for column in columns]
        for part in _sliced(pa.record_batch(columns, names=wanted.names)):
            try:
                columns = [part.column(field.name).cast(field.type) for field in wanted]
                for column in columns:
                    if not pa.types.is_decimal(column.type):  # sums may have more digits
                        column.validate(full=True)  # text that is not UTF-8 could not be read again
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise Invalid(f"the rows do not fit the types of the table ({error}): cast them first") from None
            yield pa.record_batch(columns, schema=wanted)


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
