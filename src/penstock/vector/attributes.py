"""Attributes of vectors: flat and typed, as JSON in the journal and in files, as Arrow columns for filters.

An attribute is a text, a whole number of 64 bits, a finite float, a bool or None. The JSON of a record is canonical:
names ascend, nothing is between tokens, and no attributes at all are no bytes.

Thread: pure functions.
Invariant: decode(encode(attributes)) is the same dict, types included, but for attributes that are None: they are
left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from penstock.arguments import in_short, plain_int
from penstock.errors import Invalid

NAMES_MAX = 128  # of one record
NAME_BYTES_MAX = 256
ATTRIBUTES_BYTES_MAX = 64 << 10  # of one record, as JSON

Attribute: TypeAlias = str | int | float | bool | None
Attributes: TypeAlias = dict[str, Attribute]

_encode = msgspec.json.Encoder(order="sorted").encode
_decoder = msgspec.json.Decoder(dict[str, str | int | float | bool])
_INT_MAX = (1 << 63) - 1


def encode_attributes(attributes: Any) -> bytes:
    """Encode the attributes of one record; `Invalid` if they break a rule."""
    if attributes is None:
        return b""
    if not isinstance(attributes, Mapping):
        raise Invalid(f"attributes of a vector are a dict, not {in_short(attributes)}")
    plain = {_name(name): _value(name, value) for name, value in attributes.items() if value is not None}
    if len(plain) > NAMES_MAX:
        raise Invalid(f"a vector has {len(plain)} attributes: at most {NAMES_MAX} are allowed")
    data = _encode(plain) if plain else b""
    if len(data) > ATTRIBUTES_BYTES_MAX:
        raise Invalid(f"the attributes of a vector have {len(data)} bytes: at most {ATTRIBUTES_BYTES_MAX} are allowed")
    return data


def _name(name: Any) -> str:
    if isinstance(name, str):
        plain = str.__str__(name)
        try:
            if 0 < len(plain.encode()) <= NAME_BYTES_MAX:
                return plain
        except UnicodeEncodeError:  # half of a surrogate pair
            pass
    raise Invalid(f"the name of an attribute is a text of 1 to {NAME_BYTES_MAX} bytes, not {in_short(name)}")


def _value(name: Any, value: Any) -> str | int | float | bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, str):
        plain = str.__str__(value)
        try:
            plain.encode()
        except UnicodeEncodeError:
            raise Invalid(f"the attribute {in_short(name)} is a text that is not UTF-8") from None
        return plain
    number = plain_int(value)
    if number is not None:
        if -_INT_MAX - 1 <= number <= _INT_MAX:
            return number
    elif isinstance(value, (float, np.floating)):
        real = float.__float__(value) if isinstance(value, float) else float(value)
        if math.isfinite(real):
            return real
    raise Invalid(
        f"the attribute {in_short(name)} is a text, a bool, a whole number of 64 bits or a finite float, not "
        f"{in_short(value)}"
    )


def decode_attributes(data: bytes) -> Attributes:
    """Decode the attributes of one record."""
    return dict(_decoder.decode(data)) if data else {}


def check_encoded(data: bytes) -> None:
    """Raise `Invalid` if the attributes that another process encoded break a rule."""
    if not data:
        return
    if len(data) > ATTRIBUTES_BYTES_MAX:
        raise Invalid(f"the attributes of a vector have {len(data)} bytes: at most {ATTRIBUTES_BYTES_MAX} are allowed")
    try:
        attributes = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the attributes of a vector are malformed ({error})") from None
    if encode_attributes(attributes) != data:
        raise Invalid("the attributes of a vector are not in canonical form")


def attribute_table(encoded: Sequence[bytes]) -> pa.Table:
    """Return the attributes of many records as columns, null where a record lacks one.

    Whole numbers and floats under one name become floats, the nearest there are; other mixtures become text.
    """
    columns: dict[str, list[Any]] = {}
    for row, data in enumerate(encoded):
        for name, value in _decoder.decode(data).items() if data else ():
            column = columns.get(name)
            if column is None:
                column = columns[name] = [None] * len(encoded)
            column[row] = value
    arrays = {name: _column(values) for name, values in sorted(columns.items())}
    if not arrays:  # a table has its rows even if it has no columns
        return pa.table({"": pa.nulls(len(encoded))}).select([])
    return pa.table(arrays)


def _column(values: list[Any]) -> pa.Array:
    types = {type(value) for value in values} - {type(None)}
    if types == {int, float}:
        return pa.array([value if value is None else float(value) for value in values], pa.float64())
    if len(types) == 1:
        return pa.array(values)
    return pa.array([value if value is None else as_text(value) for value in values], pa.string())


def as_text(value: Any) -> str:
    """Return an attribute as text: what it is compared with where an attribute has values of several types."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of several tables of attributes as one, with the rules of `attribute_table`."""
    names = sorted({name for table in tables for name in table.column_names})
    count = sum(table.num_rows for table in tables)
    if not names:
        return attribute_table([b""] * count)
    columns: dict[str, Any] = {}
    for name in names:
        parts = [table.column(name) if name in table.column_names else pa.nulls(table.num_rows) for table in tables]
        types = {part.type for part in parts} - {pa.null()}
        if len(types) <= 1:
            kind = next(iter(types), pa.null())
            chunks = [chunk for part in parts for chunk in _chunks(part.cast(kind))]
            columns[name] = pa.chunked_array(chunks, kind)
        else:
            columns[name] = _column([value for part in parts for value in part.to_pylist()])
    return pa.table(columns)


def _chunks(column: Any) -> list[Any]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]
