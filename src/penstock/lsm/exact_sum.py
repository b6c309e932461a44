"""Sums of float64 without rounding: the state of `add_f64`, in which the order of additions does not matter.

A state is 8 bytes or more. It begins with the sum, rounded to the nearest float64 (little-endian): this is what readers
get. If that is not the whole sum, the rest follows, again rounded, and so on: each float64 is the sum minus the others
before it. A sum beyond the range of float64 begins with an infinity, and its exact value follows, in units of 2**-1074,
as a two's complement little-endian integer. So a plain float64 is a state, and a state has one form only.

A NaN, or infinities of both signs, make the sum NaN for good; one infinity makes it infinite.

Thread: pure functions.
Invariant: add(add(a, b), c) == add(a, add(b, c)), byte for byte, for all states.
"""

from __future__ import annotations

import math
import struct

STATE_BYTES_MAX = 8 + 280  # of a sum of 2**64 numbers
_BITS = 1_074  # every float64 is a whole number of 2**-1074
_SCALE = 1 << _BITS
_F64 = struct.Struct("<d")
_TWO = struct.Struct("<dd")


def add(older: bytes, newer: bytes) -> bytes:
    """Add two states; `older` is returned if it is not one."""
    if len(older) == len(newer) == 8:
        (a,), (b,) = _F64.unpack(older), _F64.unpack(newer)
        total = a + b
        part = total - a
        rest = (a - (total - part)) + (b - part)  # exactly what the rounding lost, unless something overflowed
        if math.isfinite(total) and math.isfinite(rest):
            return _F64.pack(total or 0.0) if rest == 0 else _TWO.pack(total, rest)
    if not is_state(older):
        return older
    a, b = _read(older), _read(newer)
    if a is None or b is None:
        return older
    if isinstance(a, float) or isinstance(b, float):  # one of them is infinite or NaN
        return _special((a if isinstance(a, float) else 0.0) + (b if isinstance(b, float) else 0.0))
    return _write(a + b)


def is_state(value: bytes) -> bool:
    """Whether a value is a state, in its only form."""
    if len(value) == 8:
        return True
    if not 8 < len(value) <= STATE_BYTES_MAX:
        return False
    if len(value) == 16:  # nearly always: the second is what rounding took from the first
        first, second = _TWO.unpack(value)
        if math.isfinite(first):
            return bool(second != 0 and first + second == first)
    total = _read(value)
    return isinstance(total, int) and _write(total) == value


def _special(value: float) -> bytes:
    return _F64.pack(math.nan if math.isnan(value) else value)


def _read(value: bytes) -> int | float | None:
    """Return a state's sum in units of 2**-1074, or an infinity or NaN; None if the value is not a state."""
    if not value or len(value) % 8 or len(value) > STATE_BYTES_MAX:
        return None
    numbers: tuple[float, ...] = struct.unpack(f"<{len(value) // 8}d", value)
    if len(numbers) == 1 and not math.isfinite(numbers[0]):
        return numbers[0]
    if math.isinf(numbers[0]):
        return int.from_bytes(value[8:], "little", signed=True)
    if not all(map(math.isfinite, numbers)):
        return None
    return sum(map(_units, numbers))


def _units(number: float) -> int:
    numerator, denominator = number.as_integer_ratio()
    return numerator << (_BITS + 1 - denominator.bit_length())


def _write(total: int) -> bytes:
    numbers: list[float] = []
    rest = total
    while rest or not numbers:
        try:
            numbers.append(rest / _SCALE)  # the quotient of two integers is rounded correctly
        except OverflowError:
            words = (total.bit_length() + 64) // 64
            infinity = math.inf if total > 0 else -math.inf
            return _F64.pack(infinity) + total.to_bytes(8 * words, "little", signed=True)
        rest -= _units(numbers[-1])
    return struct.pack(f"<{len(numbers)}d", *numbers)
