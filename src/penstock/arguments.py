"""What users may give for numbers, times and names: one judgement for every call, with plain values as its result.

A subclass of `int`, `float` or `str` becomes the plain value, because what is written must be read by others. A bool is
not a number here, and neither are the scalars of numpy that are no Python numbers.

Thread: pure functions.
"""

from __future__ import annotations

from typing import Any

from penstock.errors import Invalid

SHOWN_CHARACTERS = 80


def whole(value: Any, what: str, low: int = 0, high: int | None = None) -> int:
    """A whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value or (high is not None and value > high):
        raise Invalid(
            f"{what} is a whole number from {low}{'' if high is None else f' to {high}'}, not {in_short(value)}"
        )
    return int(value)


def seconds(value: Any, what: str, most: float, *, above_zero: bool = False) -> float:
    """A time in seconds: from 0, or above it, and at most `most`, which may be infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise Invalid(f"{what} is {in_short(value)}: give seconds from 0 to {most:g}")
    if value == 0 and above_zero:
        raise Invalid(f"{what} is {in_short(value)}: give seconds above 0, and at most {most:g}")
    try:
        return float(value)
    except OverflowError:  # a whole number that is larger than any float, and not infinite
        raise Invalid(f"{what} is {in_short(value)}: give seconds from 0 to {most:g}") from None


def text(value: Any, what: str, bytes_max: int) -> str:
    """A text that is not empty and has at most `bytes_max` bytes."""
    if isinstance(value, str):
        plain = str.__str__(value)
        try:
            if 0 < len(plain.encode()) <= bytes_max:
                return plain
        except UnicodeEncodeError:  # half of a surrogate pair, which no file can hold
            pass
    raise Invalid(f"{what} is a text of 1 to {bytes_max} bytes, not {in_short(value)}")


def in_short(value: Any) -> str:
    """A value for a message: one line of bounded length, whatever it is."""
    try:
        shown = repr(value)
    except Exception:
        return f"a value of the type {type(value).__name__}"
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
