"""Values and times that callers pass as numbers, lists and arrays, checked and copied.

Thread: pure functions.
Invariants: (1) values keep their bits. (2) a column shares no memory with the caller's array.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.arguments import in_short, microseconds, warn_of_unit
from penstock.errors import Invalid
from penstock.series.arrow import time_column, value_column
from penstock.series.labels import U64
from penstock.series.options import TIME_MAX
from penstock.series.samples import I64
from penstock.series.times import moments_us


def plain_number(value: Any) -> float:
    """Return a value as a plain float, with its bits; `Invalid` if it is not a number."""
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        try:
            return float.__float__(value) if isinstance(value, float) else float(value)
        except OverflowError:
            pass
    raise Invalid(f"a value is a number that a float can hold, not {in_short(value)}")


def value_bits(values: Any) -> U64:
    """Return the bits of values as float64; `Invalid` if they are not numbers, or larger than float64 can hold."""
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return value_column(values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values)
    try:
        column = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise Invalid(f"values are an array of numbers, not {in_short(values)} ({error})") from None
    if column.ndim != 1 or (column.dtype.kind not in "fiu" and len(column)):
        raise Invalid(f"values are an array of numbers, not {in_short(values)}")
    _refuse_masked(values, "values")
    with np.errstate(all="ignore"):
        numbers = np.array(column, np.float64)  # a copy: the caller may change its array before the write is encoded
    if column.dtype.itemsize > numbers.itemsize and (np.isinf(numbers) & ~np.isinf(column)).any():
        raise Invalid("a value is larger than float64 can hold: scale the values, or drop it")
    return numbers.view(np.uint64)


def _refuse_masked(column: Any, name: str) -> None:
    """Refuse masked elements: numpy would pass what is under the mask."""
    if np.ma.is_masked(column):
        raise Invalid(f"some {name} are masked: drop such samples")


def times_us(times: Any) -> I64:
    """Return times as microseconds since 1970; `Invalid` if they are not times."""
    if isinstance(times, (pa.Array, pa.ChunkedArray)):
        return time_column(times.combine_chunks() if isinstance(times, pa.ChunkedArray) else times)
    try:
        column = np.asarray(times)
    except (TypeError, ValueError) as error:
        raise Invalid(f"times are an array of microseconds since 1970, not {in_short(times)} ({error})") from None
    _refuse_masked(times, "times")
    if column.dtype.kind == "O" and column.ndim == 1 and len(column) and isinstance(column[0], datetime):
        return np.fromiter(map(microseconds, column), np.int64, len(column))  # with a zone, from pandas too
    if column.ndim != 1 or (column.dtype.kind not in "iuM" and len(column)):
        raise Invalid(f"times are an array of microseconds since 1970, or of datetimes, not {in_short(times)}")
    if column.dtype.kind == "u" and len(column) and int(column.max()) >= TIME_MAX:
        raise Invalid(f"the time {int(column.max())} is outside the years 1 to 9999: times are microseconds since 1970")
    if column.dtype.kind == "M":
        return moments_us(column)
    if len(column):
        warn_of_unit(int(column[0]), "a time")
    return np.array(column, np.int64)
