"""The checker of histories says no where no order explains them."""

from __future__ import annotations

import math

from linearizability import Operation, is_linearizable


def _write(begin: float, end: float, value: bytes) -> Operation:
    return Operation(begin, end, is_write=True, value=value)


def _read(begin: float, end: float, value: bytes | None) -> Operation:
    return Operation(begin, end, is_write=False, value=value)


def test_histories_that_could_have_happened() -> None:
    assert is_linearizable([])
    assert is_linearizable([_read(0, 1, None), _write(2, 3, b"1"), _read(4, 5, b"1")])
    assert is_linearizable([_write(0, 9, b"1"), _read(1, 2, None), _read(3, 4, b"1")])
    assert is_linearizable([_write(0, 3, b"1"), _write(1, 4, b"2"), _read(5, 6, b"1")])
    assert is_linearizable([_write(0, math.inf, b"1"), _read(5, 6, None), _read(7, 8, b"1")])
    assert is_linearizable([_write(0, math.inf, b"1"), _read(5, 6, None)])


def test_histories_that_could_not() -> None:
    assert not is_linearizable([_write(0, 1, b"1"), _read(2, 3, None)])  # a stale read
    assert not is_linearizable([_write(0, 1, b"1"), _write(2, 3, b"2"), _read(4, 5, b"1")])  # a lost write
    assert not is_linearizable([_write(0, 9, b"1"), _read(1, 2, b"1"), _read(3, 4, None)])  # time goes back
    assert not is_linearizable([_write(4, 5, b"1"), _read(1, 2, b"1"), _read(6, 7, b"1")])  # before it was written
    assert not is_linearizable([_write(0, math.inf, b"1"), _read(5, 6, b"1"), _read(7, 8, None)])
