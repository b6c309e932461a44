"""Converts Penstock's Arrow data to the exact types of Spark's schema.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from penstock.arguments import in_short
from penstock.errors import Invalid
from penstock.kinds import Filters

# Approximate size of a batch for Spark. It passes a socket, and both sides are fastest while it fits a core's cache:
# batches of 1 to 2 MB were read in two thirds of the time of 8 MB batches.
BATCH_BYTES = 3 << 19


def spark_schema(schema: Any) -> StructType:
    """Return a table's schema for Spark: no unsigned integers, and all nullable, so that INSERT can omit columns."""
    fields = [field.with_type(pa.int64()) if field.type == pa.uint64() else field for field in schema]
    return from_arrow_schema(pa.schema([field.with_nullable(True) for field in fields]))


def check_columns(requested: StructType, table: StructType, name: str) -> None:
    """Raise `Invalid` if a user's schema has a column or type that the table does not have."""
    types = {field.name: field.dataType for field in table}
    for field in requested:
        if field.name not in types:
            raise Invalid(f"table {name} has no column {field.name}: it has {', '.join(types)}")
        if field.dataType != types[field.name]:
            actual = types[field.name].simpleString()
            raise Invalid(
                f"column {field.name} of {name} is {actual}, not {field.dataType.simpleString()}: cast it later"
            )


def chosen_columns(table: StructType, columns: str, name: str) -> StructType:
    """Return the columns that the option `columns` lists, in its order."""
    names = [column.strip() for column in columns.split(",")]
    fields = {field.name: field for field in table}
    unknown = [column for column in names if column not in fields]
    if unknown or len(set(names)) != len(names):
        problem = f"has no column {in_short(unknown[0])}" if unknown else "has each column once"
        raise Invalid(f"option columns is {in_short(columns)}, and table {name} {problem}: it has {', '.join(fields)}")
    return StructType([fields[column] for column in names])


def for_spark(batches: Iterator[Any], schema: StructType, filters: Filters = ()) -> Iterator[Any]:
    """Yield batches with the columns of Spark's schema, in its order and types, without rows that a filter drops."""
    target_schema = to_arrow_schema(schema, timezone="UTC")
    for batch in batches:
        filtered = _filtered(batch, filters)
        columns = [_as(filtered.column(field.name), field.type) for field in target_schema]
        yield from _small(pa.record_batch(columns, schema=target_schema))


def _as(column: Any, kind: Any) -> Any:
    return column if column.type == kind else column.cast(kind)


def _small(batch: Any) -> Iterator[Any]:
    """Yield a batch in slices that the JVM can hold: it loads each slice whole."""
    rows = max(1, batch.num_rows * BATCH_BYTES // max(1, batch.nbytes))
    for start in range(0, max(1, batch.num_rows), rows):
        yield batch.slice(start, rows)


_COMPARE = {"=": "equal", ">": "greater", ">=": "greater_equal", "<": "less", "<=": "less_equal"}


def _filtered(batch: Any, filters: Filters) -> Any:
    """Return the rows that pass all filters; one that Arrow cannot evaluate is skipped, as Spark filters again."""
    import pyarrow.compute as pc  # which takes a tenth of the time in which a task starts

    for column, operation, value in filters:
        values = batch.column(column)
        if pa.types.is_floating(values.type):
            continue  # in Spark NaN equals itself and is above all numbers; in Arrow neither holds
        try:
            if operation == "in":
                mask = pc.is_in(values, pa.array(list(value), values.type))
            else:
                mask = getattr(pc, _COMPARE[operation])(values, pa.scalar(value, values.type))
        except (pa.ArrowException, OverflowError):  # a number that the column cannot hold
            continue
        batch = batch.filter(mask)
    return batch


def arrow_schema(schema: StructType) -> Any:
    """Return a DataFrame's schema in Arrow."""
    return to_arrow_schema(schema, timezone="UTC")
