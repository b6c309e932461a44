"""Values that are Arrow structs: a row's fields as a MessagePack map of those that are not null.

A field is stored by its name, so a struct can get more fields: rows from before have them as nulls. Times and dates are
stored as integers, decimals as text.

Thread: pure functions.
Invariant: a column of stored values is converted as a whole, by one call for each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from struct import Struct
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.arguments import in_short, plain_int
from penstock.errors import Invalid
from penstock.lsm.rows import offsets_of

FIELDS_MAX = 1_000
DEPTH_MAX = 16
DESCRIBED_BYTES_MAX = 256 << 10  # every client gets them with the table
_encode = msgspec.msgpack.Encoder().encode
_maps = msgspec.msgpack.Decoder(list[dict[str, Any]])
_F32 = Struct("<f")
_ERRORS = (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError)


def describe(struct: Any) -> bytes:
    """Return a struct type as bytes, for the options of a table; `Invalid` if a table cannot hold it."""
    if not pa.types.is_struct(struct) or not 0 < struct.num_fields <= FIELDS_MAX:
        raise Invalid(f"value={in_short(struct)}: a struct has 1 to {FIELDS_MAX} fields")
    _stored_type(struct, 0)
    _check_zones(struct)
    described = bytes(pa.schema(list(struct)).serialize())
    if len(described) > DESCRIBED_BYTES_MAX:
        raise Invalid(f"the fields of a struct take {len(described)} bytes: at most {DESCRIBED_BYTES_MAX} are allowed")
    return described


@lru_cache(256)
def struct_type(described: bytes) -> Any:
    """Return the struct type that `describe` described; `Invalid` for other bytes."""
    try:
        struct = pa.struct(list(pa.ipc.read_schema(pa.py_buffer(described))))
        _stored_type(struct, 0)
    except (*_ERRORS, OSError) as error:
        raise Invalid(f"the fields of a struct do not decode ({error})") from None
    return struct


def widens(narrow: Any, wide: Any) -> bool:
    """Whether a struct has the fields of another, followed only by fields that may be null."""
    fields = list(wide)
    return fields[: narrow.num_fields] == list(narrow) and all(field.nullable for field in fields[narrow.num_fields :])


def has_fields(actual: Any, target: Any) -> bool:
    """Whether a type has the fields of a struct, in order and no others; those that may be null may be missing."""
    if pa.types.is_list(target):
        return has_fields(getattr(actual, "value_type", None), target.value_type)
    if not pa.types.is_struct(target):
        return True  # the cast finds out whether its values fit
    if not isinstance(actual, pa.StructType):
        return isinstance(actual, pa.DataType) and pa.types.is_null(actual)
    actual_types = {field.name: field.type for field in actual}
    common = [field.name for field in target if field.name in actual_types]
    return common == [field.name for field in actual] and all(
        has_fields(actual_types[field.name], field.type) if field.name in actual_types else field.nullable
        for field in target
    )


def _stored_type(arrow: Any, depth: int) -> Any:
    """Return the Arrow type in which values of a type are stored; `Invalid` if they cannot be."""
    types = pa.types
    if depth > DEPTH_MAX:
        raise Invalid(f"a struct has at most {DEPTH_MAX} levels")
    if types.is_struct(arrow):
        if len({field.name for field in arrow}) < arrow.num_fields:
            raise Invalid("two fields of a struct have the same name")
        return pa.struct([pa.field(f.name, _stored_type(f.type, depth + 1), f.nullable) for f in arrow])
    if types.is_list(arrow):
        return pa.list_(_stored_type(arrow.value_type, depth + 1))
    if types.is_timestamp(arrow):
        return pa.int64()
    if types.is_date32(arrow):
        return pa.int32()
    if types.is_decimal128(arrow):
        return pa.string()
    if any(
        test(arrow)
        for test in (types.is_boolean, types.is_integer, types.is_float32, types.is_float64, types.is_string)
    ) or types.is_binary(arrow):
        return arrow
    raise Invalid(
        f"a struct cannot have a field of the type {arrow}: use booleans, integers, floats, text, bytes, timestamps, "
        "date32, decimal128, lists and structs"
    )


def _check_zones(arrow: Any) -> None:
    """Raise `Invalid` for a time zone that does not exist: no row with such a time could be read."""
    if pa.types.is_struct(arrow):
        for field in arrow:
            _check_zones(field.type)
    elif pa.types.is_list(arrow):
        _check_zones(arrow.value_type)
    elif pa.types.is_timestamp(arrow) and arrow.tz is not None:
        try:
            pa.scalar(0, arrow).as_py()
        except _ERRORS:
            raise Invalid(f"a struct cannot have a field of the type {arrow}: its time zone is unknown") from None


# -- one value


def encode(value: Any, struct: Any) -> bytes:
    """Return the stored form of a mapping of field names to values; `Invalid` if it does not fit."""
    if not isinstance(value, Mapping):
        raise Invalid(f"this table holds structs, not {in_short(value)}: pass a dict of its fields")
    try:
        column = pa.array([_plain(value, struct)], struct)
        _check_times(column, struct)
        (row,) = column.cast(_stored_type(struct, 0)).to_pylist()
    except _ERRORS as error:
        if isinstance(error, Invalid):
            raise
        raise Invalid(f"this table holds {in_short(str(struct))}, and the value is not ({error})") from None
    return _encode(_without_nulls(row))


def _plain(value: Any, arrow: Any) -> Any:
    """Return a value in dicts and lists; `Invalid` for what Arrow takes silently.

    These are unknown fields, missing ones, pairs instead of a mapping, and numbers that it would change.
    """
    if value is None:
        return None
    if pa.types.is_struct(arrow):
        if not isinstance(value, Mapping):
            raise Invalid(f"a field of this table's struct is a struct, not {in_short(value)}: pass a dict")
        unknown = set(value) - {field.name for field in arrow}
        if unknown:
            raise Invalid(f"this table's struct has no field {in_short(min(map(str, unknown)))}")
        return {field.name: _plain_field(value.get(field.name), field) for field in arrow}
    if pa.types.is_list(arrow):
        if not isinstance(value, (list, tuple, np.ndarray)) or (isinstance(value, np.ndarray) and value.ndim == 0):
            raise Invalid(f"a field of this table's struct is a list, not {in_short(value)}")
        return [_plain_field(item, arrow.value_field) for item in value]
    if _would_change(value, arrow):
        raise Invalid(f"a field of this table's struct is {arrow}, not {in_short(value)}")
    return value


def _would_change(value: Any, arrow: Any) -> bool:
    """Whether Arrow would store another number: for a fraction, a bool, or a number that float32 cannot hold."""
    types = pa.types
    if types.is_integer(arrow):
        return plain_int(value) is None
    if types.is_timestamp(arrow) or types.is_date32(arrow):
        return isinstance(value, (float, np.floating))
    if types.is_float32(arrow) and isinstance(value, (int, float, np.floating)) and not isinstance(value, bool):
        try:
            _F32.pack(float(value))
        except OverflowError:
            return True
    return bool(types.is_floating(arrow)) and isinstance(value, (bool, np.bool_))


def _plain_field(value: Any, field: Any) -> Any:
    if value is None and not field.nullable:
        raise Invalid(f"the field {field.name} of this table's struct must not be null")
    return _plain(value, field.type)


def _check_times(column: Any, arrow: Any) -> None:
    """Raise `Invalid` for a time or a date that Python does not have: its whole row could not be read."""
    import pyarrow.compute as pc

    if pa.types.is_struct(arrow):
        for field, part in zip(arrow, column.flatten(), strict=True):
            _check_times(part, field.type)
    elif pa.types.is_list(arrow):
        _check_times(column.flatten(), arrow.value_type)
    elif pa.types.is_date32(arrow) or (pa.types.is_timestamp(arrow) and arrow.unit != "ns"):  # those of ns end in 2262
        try:
            pc.min_max(column).as_py()  # if these two can be converted, so can all others
        except (ValueError, OverflowError):
            raise Invalid("a time of this table's struct is outside the years 1 to 9999") from None


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def decode(data: bytes, struct: Any) -> dict[str, Any]:
    """Return a stored value as a dict of all fields."""
    value: dict[str, Any] = _to_arrow([msgspec.msgpack.decode(data)], struct)[0].as_py()
    return value


# -- columns


def to_arrow(column: Any, struct: Any) -> Any:
    """Convert a binary column of stored values to structs."""
    return _to_arrow(_read(column), struct)


def _read(column: Any) -> list[dict[str, Any]]:
    """Decode all values of a binary column in one call: their bytes are those of one MessagePack array."""
    if not len(column):
        return []
    offsets = offsets_of(column)
    content = bytes(memoryview(column.buffers()[2])[offsets[0] : offsets[-1]]) if offsets[-1] > offsets[0] else b""
    return _maps.decode(b"\xdd" + len(column).to_bytes(4, "big") + content)


def _to_arrow(rows: list[dict[str, Any]], struct: Any) -> Any:
    return pa.array(rows, _stored_type(struct, 0)).cast(struct)


def from_arrow(column: Any, struct: Any) -> Any:
    """Convert a column of structs to stored values; a null becomes one without fields."""
    try:
        column = column.cast(struct)
        _check_required(column, struct)
        _check_times(column, struct)
        rows = column.cast(_stored_type(struct, 0)).to_pylist()
    except pa.ArrowException as error:
        raise Invalid(f"this table holds {in_short(str(struct))}, and a value is not ({error})") from None
    return pa.array([_encode(_without_nulls(row or {})) for row in rows], pa.binary())


def _check_required(column: Any, arrow: Any) -> None:
    """Raise `Invalid` if a field or an item that must not be null is."""
    if pa.types.is_struct(arrow):
        fields, parts = list(arrow), column.drop_null().flatten()
    elif pa.types.is_list(arrow):
        fields, parts = [arrow.value_field], [column.drop_null().flatten()]
    else:
        return
    for field, part in zip(fields, parts, strict=True):
        if part.null_count and not field.nullable:
            raise Invalid(f"the field {field.name} of this table's struct must not be null")
        _check_required(part, field.type)


def check_column(column: Any, struct: Any) -> None:
    """Raise `Invalid` if a stored value of a binary column could not be read as a struct."""
    try:
        # One by one: together they may decode although none does alone.
        for value in column.to_pylist():
            msgspec.msgpack.decode(value, type=dict[str, Any])
        rows = pa.array(_read(column), _stored_type(struct, 0))
        _check_required(rows, struct)
        _check_times(rows.cast(struct), struct)
    except (*_ERRORS, msgspec.DecodeError, RecursionError) as error:
        raise Invalid(f"this table holds structs, and a value is not one ({error})") from None
