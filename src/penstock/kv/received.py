"""Sections and options of a kv table that another process sent: everything about them is looked at.

Thread: pure functions.
Invariant: what passes here could have been written through the API of this process.
"""

from __future__ import annotations

import struct

from penstock.errors import CorruptionError, Invalid
from penstock.kv import section
from penstock.kv.ranges import PAST_ALL_KEYS
from penstock.kv.values import decode_options
from penstock.lsm.operators import CHAIN, OPERATORS, check_operand
from penstock.lsm.rows import DELETE, KEY_BYTES_MAX, PUT, VALUE_BYTES_MAX

ROW_WEIGHT = 192  # of the objects around a key and a value
_LINK = struct.Struct("<BI")  # of a chain: operator, length
_NAMES = {kind: name for name, kind in OPERATORS.items()}


def weight(payload: bytes) -> int:
    """The memory that `receive` takes, about: its bytes again, and objects for each row."""
    return 2 * len(payload) + ROW_WEIGHT * section.row_count(payload)


def receive(payload: bytes) -> section.Section:
    """The section in a payload; `Invalid` if it breaks a rule."""
    try:
        found = section.decode(payload)
    except CorruptionError as error:
        raise Invalid(f"a section of a kv table is malformed: {error.reason}") from None
    if isinstance(found, section.Ranges):
        if any(not start < end or len(start) > KEY_BYTES_MAX or len(end) > len(PAST_ALL_KEYS) for start, end in found):
            raise Invalid("a range of keys to delete is empty or runs downwards, or its keys are too long")
        return found
    if max(map(len, found), default=0) > KEY_BYTES_MAX:
        raise Invalid(f"a key has at most {KEY_BYTES_MAX} bytes")
    for operation in () if found.plain else found.values():
        if not isinstance(operation, bytes):
            _check_operation(*operation)
    if found.plain and max(map(len, found.values()), default=0) > VALUE_BYTES_MAX:
        raise Invalid(f"a value has at most {VALUE_BYTES_MAX} bytes")
    return found


def _check_operation(kind: int, value: bytes, expires_us: int) -> None:
    if len(value) > VALUE_BYTES_MAX or expires_us < 0 or (kind == DELETE and value):
        raise Invalid("an operation has a value that is too long or out of place, or expires before 1970")
    if kind in (PUT, DELETE):
        return
    for operator, operand in _chained(value) if kind == CHAIN else [(kind, value)]:
        if operator not in _NAMES:
            raise Invalid(f"there is no merge operator {operator}")
        check_operand(_NAMES[operator], operand)


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


def check_options(options: bytes) -> None:
    """`Invalid` if these are no options of a kv table."""
    try:
        decode_options(options)
    except (CorruptionError, UnicodeDecodeError) as error:
        raise Invalid(f"options of a kv table are malformed: {error}") from None
