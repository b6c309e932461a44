"""Merge operators: named, associative, defined on bytes, so that every replica and executor folds alike.

    add_i64            sum of little-endian int64, modulo 2**64
    min_i64, max_i64   the smaller, the larger little-endian int64
    min_f64, max_f64   the same for little-endian float64, in IEEE total order (-NaN < -inf < -0 < +0 < inf < NaN)
    add_f64            exact sum of float64, rounded when it is read: see `exact_sum`
    add_decimal, min_decimal, max_decimal   the same as for int64, on little-endian integers of 16 bytes
    append             concatenation, cut after the first 64 MiB
    union              a set: its 65,536 smallest items, each `u32 length | bytes`, ascending, at most 1,020 bytes

Kinds of tables above this layer have operators of their own (`KIND_OPERATORS`), found by name, so that every process
that merges files has them. All operands of such a key have one operator.

An operand is a row of its own kind; operands of one operator fold into one, operands of several become a *chain* row
that lists them, oldest first. Folding onto a delete, or onto nothing at the bottom, gives a put. Folding never fails: a
value that an operand does not fit (a number that is not 8 bytes long, a set that is not well formed) stays as it is.
`check_operand` rejects operands that fit no value before the write.

Thread: pure functions.
Invariant: fold(fold(a, b), c) == fold(a, fold(b, c)), byte for byte, for all rows whose operands were checked.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

from penstock.errors import Invalid
from penstock.lsm import exact_sum
from penstock.lsm.rows import DELETE, I64, MERGE, PUT, U8, VALUE_BYTES_MAX

CHAIN = MERGE
ADD_I64, MIN_I64, MAX_I64, MIN_F64, MAX_F64, APPEND, UNION = range(16, 23)
ADD_F64, ADD_DECIMAL, MIN_DECIMAL, MAX_DECIMAL = range(23, 27)

OPERATORS = {
    "add_i64": ADD_I64,
    "min_i64": MIN_I64,
    "max_i64": MAX_I64,
    "min_f64": MIN_F64,
    "max_f64": MAX_F64,
    "append": APPEND,
    "union": UNION,
    "add_f64": ADD_F64,
    "add_decimal": ADD_DECIMAL,
    "min_decimal": MIN_DECIMAL,
    "max_decimal": MAX_DECIMAL,
}
DECIMAL_BYTES = 16

SERIES_SAMPLES, SERIES_IDS, VECTOR_IDS = 32, 33, 34
# By row kind: (values oldest first, whether nothing is below them) -> value.
KIND_OPERATORS = {
    SERIES_SAMPLES: "penstock.series.operators:series_samples",
    SERIES_IDS: "penstock.series.operators:series_ids",
    VECTOR_IDS: "penstock.vector.operators:vector_ids",
}

UNION_ITEMS_MAX = 1 << 16
UNION_ITEM_BYTES_MAX = 1_020

Operand: TypeAlias = tuple[int, bytes]  # operator's kind, operand

_LINK = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")
_FIRST_NUMBER, _LAST_NUMBER = ADD_I64, MAX_F64


def check_operand(name: str, operand: bytes) -> int:
    """Return the row kind of a named operator; `Invalid` if it does not accept `operand`."""
    kind = OPERATORS.get(name)
    if kind is None:
        raise Invalid(f"merge operator {name!r} is unknown: use one of {', '.join(OPERATORS)}")
    if kind <= _LAST_NUMBER and len(operand) != 8:
        raise Invalid(f"an operand of {name} has 8 bytes, this one has {len(operand)}")
    if kind >= ADD_DECIMAL and len(operand) != DECIMAL_BYTES:
        raise Invalid(f"an operand of {name} has {DECIMAL_BYTES} bytes, this one has {len(operand)}")
    if kind == ADD_F64 and not exact_sum.is_state(operand):
        raise Invalid(f"an operand of {name} has 8 bytes, this one has {len(operand)}")
    if kind == UNION and _items(operand) is None:
        raise Invalid("an operand of union is an ascending list of `u32 length | bytes`: encode it with union_of")
    if len(operand) > VALUE_BYTES_MAX:
        raise Invalid(f"an operand has at most {VALUE_BYTES_MAX} bytes, this one has {len(operand)}")
    return kind


def union_of(items: set[bytes] | frozenset[bytes]) -> bytes:
    """Encode a set.

    >>> penstock.union_items(penstock.union_of({b"b", b"a"}))
    [b'a', b'b']
    """
    if any(len(item) > UNION_ITEM_BYTES_MAX for item in items):
        raise Invalid(f"an item of a union has at most {UNION_ITEM_BYTES_MAX} bytes")
    return _encode(items)


def union_items(value: bytes) -> list[bytes]:
    """Decode the items of a set.

    >>> epoch = store.kv("users").merge(b"tags", penstock.union_of({b"new"}), operator="union")
    >>> penstock.union_items(store.kv("users")[b"tags"])
    [b'new']
    """
    items = _items(value)
    if items is None:
        raise Invalid("the value is not an encoded set")
    return items


def _encode(items: set[bytes] | frozenset[bytes]) -> bytes:
    smallest = sorted(items)[:UNION_ITEMS_MAX]
    return b"".join([part for item in smallest for part in (_LENGTH.pack(len(item)), item)])


def _items(value: bytes) -> list[bytes] | None:
    items: list[bytes] = []
    at = 0
    while at < len(value):
        if at + 4 > len(value):
            return None
        end = at + 4 + int.from_bytes(value[at : at + 4], "little")
        item = value[at + 4 : end]
        if end > len(value) or len(item) > UNION_ITEM_BYTES_MAX or (items and item <= items[-1]):
            return None
        items.append(item)
        at = end
    return items if len(items) <= UNION_ITEMS_MAX else None


def _union(older: bytes, newer: bytes) -> bytes:
    items = _items(older)
    return older if items is None else _encode({*items, *(_items(newer) or ())})


def _fold_decimals(kind: int, older: bytes, newer: bytes) -> bytes:
    if len(older) != DECIMAL_BYTES or len(newer) != DECIMAL_BYTES:
        return older
    a, b = int.from_bytes(older, "little", signed=True), int.from_bytes(newer, "little", signed=True)
    if kind == ADD_DECIMAL:
        return ((a + b) % (1 << 128)).to_bytes(DECIMAL_BYTES, "little")
    return older if (a <= b) is (kind == MIN_DECIMAL) else newer


def _ordered(bits: I64) -> I64:
    """Map float64 bits to integers that compare in IEEE total order (and back: it is its own inverse)."""
    return bits ^ ((bits >> 63) & np.int64(0x7FFF_FFFF_FFFF_FFFF))


_REDUCE: dict[int, Callable[[I64, I64], I64]] = {
    ADD_I64: np.add.reduceat,
    MIN_I64: np.minimum.reduceat,
    MAX_I64: np.maximum.reduceat,
    MIN_F64: np.minimum.reduceat,
    MAX_F64: np.maximum.reduceat,
}


def is_number(kinds: U8) -> Any:
    """Return which kinds `fold_numbers` folds."""
    return (kinds >= _FIRST_NUMBER) & (kinds <= _LAST_NUMBER)


def fold_numbers(kind: int, bits: I64, starts: I64) -> I64:
    """Fold groups of int64 or float64 bits at once; a group begins at each of `starts`."""
    floats = kind in (MIN_F64, MAX_F64)
    folded = _REDUCE[kind](_ordered(bits) if floats else bits, starts)
    return _ordered(folded) if floats else folded


def _fold_pair(kind: int, older: bytes, newer: bytes) -> bytes:
    if kind == APPEND:
        return (older + newer)[:VALUE_BYTES_MAX]
    if kind == UNION:
        return _union(older, newer)
    if kind == ADD_F64:
        return exact_sum.add(older, newer)
    if kind >= ADD_DECIMAL:
        return _fold_decimals(kind, older, newer)
    if kind in (MIN_F64, MAX_F64) and len(older) > 8 and exact_sum.is_state(older):
        older = older[:8]  # a sum: as it is read
    if len(older) != 8 or len(newer) != 8:
        return older
    bits = np.frombuffer(older + newer, "<i8")
    return fold_numbers(kind, bits, np.zeros(1, np.int64)).astype("<i8").tobytes()


@cache
def _of_kind(kind: int) -> Callable[[Sequence[bytes], bool], bytes]:
    module, _, name = KIND_OPERATORS[kind].partition(":")
    function: Callable[[Sequence[bytes], bool], bytes] = getattr(import_module(module), name)
    return function


def _operands(kind: int, value: bytes) -> list[Operand]:
    if kind != CHAIN:
        return [(kind, value)]
    operands: list[Operand] = []
    at = 0
    while at < len(value):
        operator, size = _LINK.unpack_from(value, at)
        operands.append((operator, value[at + _LINK.size : at + _LINK.size + size]))
        at += _LINK.size + size
    return operands


def _chain(operands: list[Operand]) -> Operand:
    if len(operands) == 1:
        return operands[0]
    return CHAIN, b"".join([part for kind, value in operands for part in (_LINK.pack(kind, len(value)), value)])


def fold(older: Operand | None, newer: Operand) -> Operand:
    """Fold two rows (kind, value) into one. `older` None: certainly no row is below `newer`."""
    kind, value = newer
    if kind < MERGE:
        return newer
    if kind in KIND_OPERATORS:
        return fold_all(older, [newer], older is None or older[0] < MERGE)
    operands = _operands(kind, value)
    if older is not None and older[0] >= MERGE:
        joined = _operands(*older)
        for operator, operand in operands:
            if joined[-1][0] == operator:
                joined[-1] = (operator, _fold_pair(operator, joined[-1][1], operand))
            else:
                joined.append((operator, operand))
        return _chain(joined)
    if older is None or older[0] == DELETE:
        base: bytes | None = None
    else:
        base = older[1]
    for operator, operand in operands:
        base = operand if base is None else _fold_pair(operator, base, operand)
    assert base is not None
    return PUT, base


def fold_all(base: Operand | None, operands: Sequence[Operand], certain: bool) -> Operand:
    """Fold operands, oldest first, onto `base`. `certain`: all that is below them is known, so the result is a put."""
    kind = operands[0][0]
    if kind in KIND_OPERATORS:
        below = [] if base is None or base[0] == DELETE else [base[1]]
        return PUT if certain else kind, _of_kind(kind)([*below, *(value for _, value in operands)], certain)
    row = base
    for operand in operands:
        row = operand if row is None and not certain else fold(row, operand)
    assert row is not None
    return row
