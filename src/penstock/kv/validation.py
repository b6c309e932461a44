"""The rules for what other processes send to a kv table: sections, staged files, options.

Sections from the API of a table (`table`, `values`) satisfy the rules by construction; what another process sent or
built is checked in full. Apply relies on these rules and checks nothing itself.

Thread: pure functions.
Invariant: what passes here could have been written through the API of this process.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import CorruptionError, Invalid
from penstock.kv import section
from penstock.kv.ranges import PAST_ALL_KEYS
from penstock.kv.values import MERGES, Options, check_stored, decode_options
from penstock.lsm.operators import CHAIN, OPERATORS, check_operand
from penstock.lsm.rows import (
    DELETE,
    KEY_BYTES_MAX,
    NEVER,
    PUT,
    RANGE_DELETE,
    VALUE_BYTES_MAX,
    Columns,
    binary_column,
    offsets_of,
)
from penstock.lsm.sstable import Sstable

ROW_WEIGHT = 192  # memory of the objects around a key and a value
_LINK = struct.Struct("<BI")  # header of an operand in a chain: operator, length
_NAMES = {kind: name for name, kind in OPERATORS.items()}


def weight(payload: bytes) -> int:
    """Estimate the memory that `receive` needs: a copy of the bytes, and objects for each row."""
    return 2 * len(payload) + ROW_WEIGHT * section.row_count(payload)


def receive(payload: bytes, options: bytes) -> section.Section:
    """Decode and check a section for a table with these options; `Invalid` if it breaks a rule."""
    table_options = decode_options(options)
    try:
        part = section.decode(payload)
    except CorruptionError as error:
        raise Invalid(f"a section of a kv table is malformed: {error.reason}") from None
    if not part:
        raise Invalid("a section of a kv table holds no rows")
    if isinstance(part, section.Ranges):
        if any(not start < end or len(start) > KEY_BYTES_MAX or len(end) > len(PAST_ALL_KEYS) for start, end in part):
            raise Invalid("a range of keys to delete is empty or runs downwards, or its keys are too long")
        return part
    _check_rows(part, table_options)
    return part


def _check_rows(rows: section.Rows, options: Options) -> None:
    if max(map(len, rows)) > KEY_BYTES_MAX:
        raise Invalid(f"a key has at most {KEY_BYTES_MAX} bytes")
    if options.key == "utf8":
        _check_text_keys(binary_column(list(rows)))
    values: list[bytes] = []  # the values of puts
    for operation in rows.values():
        if isinstance(operation, bytes):
            values.append(operation)
            continue
        kind, value, expires_us = operation
        if expires_us < 0 or (kind == DELETE and (value or expires_us != NEVER)):
            raise Invalid("an operation expires before 1970, or is a delete with a value or an expiry")
        if kind == PUT:
            values.append(value)
        elif kind != DELETE:
            _check_operands(kind, value, options)
    if max(map(len, values), default=0) > VALUE_BYTES_MAX:
        raise Invalid(f"a value has at most {VALUE_BYTES_MAX} bytes")
    check_stored(binary_column(values), options)


def _check_text_keys(keys: Any) -> None:
    try:
        keys.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise Invalid(f"the keys of this table are text, and one is not ({error})") from None


def _check_operands(kind: int, value: bytes, options: Options) -> None:
    if len(value) > VALUE_BYTES_MAX:
        raise Invalid(f"a chain of operands has at most {VALUE_BYTES_MAX} bytes")
    for operator, operand in _chained(value) if kind == CHAIN else [(kind, value)]:
        name = _NAMES.get(operator)
        if name is None or name not in MERGES[options.value]:
            raise Invalid(f"a table of {options.value_name} has no merge operator {name or operator}")
        check_operand(name, operand)
        check_stored(binary_column([operand]), options)


def _chained(value: bytes) -> list[tuple[int, bytes]]:
    operands: list[tuple[int, bytes]] = []
    at = 0
    while at + _LINK.size <= len(value):
        operator, size = _LINK.unpack_from(value, at)
        at += _LINK.size + size
        operands.append((operator, value[at - size : at]))
    if at != len(value) or len(operands) < 2:
        raise Invalid("a chain of operands is malformed")
    return operands


def check_table(table: Sstable, options: Options) -> None:
    """Raise `Invalid` if an sstable from another process breaks a rule. Checks every row, by columns."""
    table.check_locations()
    last: tuple[bytes, int] | None = None  # key and kind
    for piece in table.pieces(0, table.summary.rows):
        last = _check_columns(table.columns(*piece), last, options, table.path)
    if last is not None and not table.summary.start <= last[0] < table.summary.end:
        raise Invalid(f"{table.path} reaches past the range of keys that it names: build it again")


def _check_columns(columns: Columns, last: tuple[bytes, int] | None, options: Options, path: str) -> tuple[bytes, int]:
    import pyarrow.compute as pc

    keys, kinds = columns.keys, columns.kinds
    for column, bytes_max in ((keys, KEY_BYTES_MAX), (columns.values, VALUE_BYTES_MAX)):
        lengths = np.diff(offsets_of(column))
        if (lengths < 0).any() or lengths.max(initial=0) > bytes_max:
            raise Invalid(f"{path} has a key or a value that is too long: build it again")
    if (kinds > RANGE_DELETE).any():
        raise Invalid(f"{path} holds more than puts and deletes: build it again")
    rising = pc.less(keys[:-1], keys[1:]).to_numpy(zero_copy_only=False)
    # A range delete precedes the row of its first key.
    rising |= (kinds[:-1] == RANGE_DELETE) & (kinds[1:] != RANGE_DELETE) & _equal(keys[:-1], keys[1:])
    first = columns.key(0)
    joins = last is None or last[0] < first or (last[0] == first and last[1] == RANGE_DELETE)
    if not joins or not rising.all():
        raise Invalid(f"{path} does not hold its keys in order: build it again")
    if options.key == "utf8":
        _check_text_keys(keys.filter(pa.array(kinds != RANGE_DELETE)))
    puts = np.flatnonzero(kinds == PUT)
    check_stored(columns.values if len(puts) == len(kinds) else columns.values.take(pa.array(puts)), options)
    return columns.key(len(columns) - 1), int(kinds[-1])


def _equal(keys: Any, others: Any) -> Any:
    import pyarrow.compute as pc

    return pc.equal(keys, others).to_numpy(zero_copy_only=False)


def check_options(options: bytes) -> Any:
    """Return the decoded options of a kv table; `Invalid` if they are malformed."""
    try:
        return decode_options(options)
    except CorruptionError as error:
        raise Invalid(f"options of a kv table are malformed: {error}") from None
