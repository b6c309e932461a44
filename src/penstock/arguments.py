"""Validation of arguments: numbers, times and texts, with plain values as the result.

A subclass of `int`, `float` or `str` becomes the plain value, because other processes must read what is written. It is
converted before it is checked, by the methods of the plain type: a subclass may override comparison and conversion, and
a number that only seems small would fail in the thread that writes for all. A bool is not a number here; integers of
numpy are.

Thread: pure functions.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from math import isinf
from typing import Any, Protocol, TypeAlias

import numpy as np

from penstock.errors import Invalid

SHOWN_CHARACTERS = 80
SIZE_MAX = 1 << 50  # of bytes, of any size among settings
COUNT_MAX = 1_000_000  # of most numbers of things among settings
DAY_S = 86_400.0
TIME_US_MIN, TIME_US_MAX = -62_135_596_800_000_000, 253_402_300_800_000_000  # the years 1 to 9999, half-open
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The years 2015 to 2038 in seconds and in milliseconds; as microseconds they are times of January 1970.
_UNITS = (
    ("seconds", 1_420_070_400, 2_147_483_648, 1_000_000),
    ("milliseconds", 1_420_070_400_000, 2_147_483_648_000, 1_000),
)


class ArrowStream(Protocol):
    """An Arrow table or stream, of pyarrow, Polars, pandas, DuckDB or any other library."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


class ArrowBatch(Protocol):
    """An Arrow array or record batch."""

    def __arrow_c_array__(self, requested_schema: object = None) -> object: ...


ArrowSource: TypeAlias = ArrowStream | ArrowBatch


def whole(value: Any, name: str, low: int = 0, high: int | None = None) -> int:
    """Return a whole number from `low` to `high`; `Invalid` for anything else."""
    number = plain_int(value)
    if number is None or number < low or (high is not None and number > high):
        raise Invalid(
            f"{name} is a whole number from {low}{'' if high is None else f' to {high}'}, not {in_short(value)}"
        )
    return number


def set_wholes(settings: Any, names: Iterable[str], low: int = 0, high: int | None = None) -> None:
    """Check fields of a frozen dataclass, as `whole` does, and make them plain: numpy's integers overflow."""
    for name in names:
        object.__setattr__(settings, name, whole(getattr(settings, name), name, low, high))


def set_seconds(settings: Any, names: Iterable[str], most: float, *, above_zero: bool = False) -> None:
    """Check fields of a frozen dataclass, as `seconds` does, and make them plain."""
    for name in names:
        object.__setattr__(settings, name, seconds(getattr(settings, name), name, most, above_zero=above_zero))


def flag(value: Any, name: str) -> bool:
    """Return True or False; anything else is `Invalid`: "no" and "0" are true for Python."""
    if value is not True and value is not False:
        raise Invalid(f"{name} is True or False, not {in_short(value)}")
    return value is True


def plain_int(value: Any) -> int | None:
    """Return a plain int from an int, a subclass, or an integer of numpy; None for anything else."""
    if isinstance(value, int):
        return None if isinstance(value, bool) else int.__int__(value)
    # numpy derives its durations from its integers.
    return int(value) if isinstance(value, np.integer) and not isinstance(value, np.timedelta64) else None


def seconds(value: Any, name: str, most: float, *, above_zero: bool = False) -> float:
    """A time in seconds: from 0, or above it, and at most `most`, which may be infinite."""
    number = float.__float__(value) if isinstance(value, float) else plain_int(value)
    if number is None or not 0 <= number <= most:
        bounds = "0 on" if isinf(most) else f"0 to {most:g}"
        raise Invalid(f"{name} is {in_short(value)}: give seconds from {bounds}")
    if number == 0 and above_zero:
        raise Invalid(f"{name} is {in_short(value)}: give seconds above 0, and at most {most:g}")
    try:
        return float(number)
    except OverflowError:  # a whole number that is larger than any float, and not infinite
        raise Invalid(f"{name} is {in_short(value)}: give seconds from 0 to {most:g}") from None


def microseconds(time: Any, name: str = "a time") -> int:
    """Return a time, which is microseconds since 1970 or a datetime with a zone, in microseconds."""
    if isinstance(time, datetime):
        try:
            since = time - _EPOCH if time.utcoffset() is not None else None
        except (TypeError, ValueError, OverflowError) as error:
            raise Invalid(f"{in_short(time)} is not a time ({error})") from None
        if not isinstance(since, timedelta):  # pandas' `NaT` is a datetime, but not a time
            raise Invalid("a datetime needs a time zone: use datetime.now(timezone.utc)")
        # Exact, unlike float seconds far from 1970. A zone may move the first and the last hours out of the years.
        number: int | None = int(since // timedelta(microseconds=1))
    else:
        number = plain_int(time)
        if number is not None and _UNITS[0][1] <= number < _UNITS[1][2]:
            warn_of_unit(number, name)
    if number is None or not TIME_US_MIN <= number < TIME_US_MAX:
        raise Invalid(f"{name} is in microseconds since 1970 (years 1 to 9999), or a datetime, not {in_short(time)}")
    return number


def warn_of_unit(time: int, name: str) -> None:
    """Warn, at the line of the user's program, of a time that is likely meant in seconds or milliseconds."""
    for unit, first, end, factor in _UNITS:
        if first <= time < end:
            frame, level = sys._getframe(1), 2
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("penstock."):
                frame, level = frame.f_back, level + 1
            warnings.warn(
                f"{name} is {time}, in microseconds {(_EPOCH + timedelta(microseconds=time)):%d %B %Y}: if these are "
                f"{unit}, multiply by {factor:_}, or give a datetime",
                stacklevel=level,
            )


def text(value: Any, name: str, bytes_max: int) -> str:
    """A text that is not empty and has at most `bytes_max` bytes."""
    if isinstance(value, str):
        plain = str.__str__(value)
        try:
            if 0 < len(plain.encode()) <= bytes_max:
                return plain
        except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
            pass
    raise Invalid(f"{name} is a text of 1 to {bytes_max} bytes, not {in_short(value)}")


def bytes_remedy(value: object) -> str:
    """Return what makes bytes of a value that is not: an array of bytes has no `encode`."""
    return "use bytes(...) of it" if isinstance(value, (bytes, bytearray, memoryview)) else "encode it"


def in_short(value: Any) -> str:
    """Return a value for a message: one line of bounded length, whatever the value is."""
    try:
        line = " ".join(repr(value)[: 4 * SHOWN_CHARACTERS].split())  # tables of Arrow and pandas have many lines
    except Exception:
        return f"a value of the type {type(value).__name__}"
    return line if len(line) <= SHOWN_CHARACTERS else f"{line[:SHOWN_CHARACTERS]}..."
