"""Between Arrow as Penstock has it and Arrow as Spark wants it: types by Spark's schema, exactly.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from penstock.errors import Invalid
from penstock.kinds import Filters

# Of one batch for Spark, about. It goes through a socket, and both sides are quickest while it stays in a core's cache:
# batches of 1 to 2 MB were read in two thirds of the time of those of 8 MB.
BATCH_BYTES = 3 << 19


def spark_schema(schema: Any) -> StructType:
    """A table's schema for Spark, which has no unsigned integers, and lets INSERT leave out what may be null."""
    fields = [field.with_type(pa.int64()) if field.type == pa.uint64() else field for field in schema]
    return from_arrow_schema(pa.schema([field.with_nullable(True) for field in fields]))


def check_columns(wanted: StructType, table: StructType, name: str) -> None:
    """`Invalid` if a user's own schema asks for what the table does not have."""
    known = {field.name: field.dataType for field in table}
    for field in wanted:
        if field.name not in known:
            raise Invalid(f"table {name} has no column {field.name}: it has {', '.join(known)}")
        if field.dataType != known[field.name]:
            found = known[field.name].simpleString()
            raise Invalid(
                f"column {field.name} of {name} is {found}, not {field.dataType.simpleString()}: cast it later"
            )


def for_spark(batches: Iterator[Any], schema: StructType, filters: Filters = ()) -> Iterator[Any]:
    """Batches with the columns of Spark's schema, in its order and exact types, without rows that a filter drops."""
    wanted = to_arrow_schema(schema, timezone="UTC")
    for batch in batches:
        kept = _filtered(batch, filters)
        columns = [_as(kept.column(field.name), field.type) for field in wanted]
        yield from _small(pa.record_batch(columns, schema=wanted))


def _as(column: Any, kind: Any) -> Any:
    return column if column.type == kind else column.cast(kind)


def _small(batch: Any) -> Iterator[Any]:
    """A batch in slices that the JVM can hold: it takes each of them whole."""
    rows = max(1, batch.num_rows * BATCH_BYTES // max(1, batch.nbytes))
    for start in range(0, max(1, batch.num_rows), rows):
        yield batch.slice(start, rows)


_COMPARE = {"=": pc.equal, ">": pc.greater, ">=": pc.greater_equal, "<": pc.less, "<=": pc.less_equal}


def _filtered(batch: Any, filters: Filters) -> Any:
    """Rows that pass all filters; Spark looks again, so one that cannot be judged here drops nothing."""
    for column, operation, value in filters:
        values = batch.column(column)
        if pa.types.is_floating(values.type):
            continue  # NaN equals itself in Spark and is above all numbers, and in Arrow it is neither
        try:
            if operation == "in":
                mask = pc.is_in(values, pa.array(list(value), values.type))
            else:
                mask = _COMPARE[operation](values, pa.scalar(value, values.type))
        except (pa.ArrowException, OverflowError):  # a number that the column cannot hold
            continue
        batch = batch.filter(mask)
    return batch


def arrow_schema(schema: StructType) -> Any:
    """A DataFrame's schema in Arrow."""
    return to_arrow_schema(schema, timezone="UTC")
