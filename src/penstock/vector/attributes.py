"""Attributes of vectors: flat and typed, as JSON in the journal and in files, as Arrow columns for filters.

An attribute is a text, a whole number of 64 bits, a finite float, a bool or None. The JSON of a record is canonical:
names ascend, nothing is between tokens, and no attributes at all are no bytes.

Thread: pure functions.
Invariant: decode(encode(attributes)) is the same dict, types included, but for attributes that are None: they are
left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NoReturn, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import in_short, plain_int
from penstock.errors import Invalid

NAMES_MAX = 128  # of one record
NAME_BYTES_MAX = 256
ATTRIBUTES_BYTES_MAX = 64 << 10  # of one record, as JSON

Attribute: TypeAlias = str | int | float | bool | None
Attributes: TypeAlias = dict[str, Attribute]

_encoder = msgspec.json.Encoder(order="sorted")
_encode = _encoder.encode
_decoder = msgspec.json.Decoder(dict[str, str | int | float | bool])
_INT_MAX = (1 << 63) - 1
_COLUMNS_BYTES_MAX = 1 << 30  # of a column of Arrow with 32-bit offsets, with room to spare


class HitAttributes(dict[str, Attribute]):
    """The attributes of a hit: a dict that cannot be changed, because hits share it."""

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the attributes of a hit cannot be changed: change a copy, dict(hit.attributes)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy, also by pickle, is a plain dict


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


def encode_all(rows: Sequence[Any]) -> list[bytes]:
    """Encode the attributes of many records, each as `encode_attributes` does."""
    return _encode_plain(rows) or [encode_attributes(some) for some in rows]


def _encode_plain(rows: Sequence[Any]) -> list[bytes] | None:
    """Encode plain dicts of plain values in one step; None if they are not, or may break a rule."""
    if not rows or set(map(type, rows)) != {dict} or max(map(len, rows)) > NAMES_MAX:
        return None
    names, values = set(chain.from_iterable(rows)), list(chain.from_iterable(map(dict.values, rows)))
    kinds = set(map(type, values))
    if not kinds <= {str, int, float, bool}:
        return None
    if not all(type(name) is str and 0 < len(name) <= NAME_BYTES_MAX // 4 for name in names):
        return None
    numbers = [value for value in values if type(value) is int] if int in kinds else [0]
    if min(numbers) < -_INT_MAX - 1 or max(numbers) > _INT_MAX:
        return None
    try:
        joined = _encoder.encode_lines(rows)
    except UnicodeEncodeError:
        return None
    if b"null" in joined:  # a float that is not finite; or, rarely, a text
        return None
    lines = joined.split(b"\n")[:-1]  # within JSON a line never ends
    if max(map(len, lines), default=0) > ATTRIBUTES_BYTES_MAX:
        return None
    return [b"" if line == b"{}" else line for line in lines] if b"{}" in lines else lines


def encode_columns(names: Sequence[str], columns: Sequence[Any]) -> list[bytes] | None:
    """Encode attributes that are columns of Arrow, without a dict for each row; None if they may break a rule.

    Requires: the columns are as long as each other, and of texts, numbers or bools.
    """
    if not 0 < len(names) <= NAMES_MAX or not all(0 < len(name) <= NAME_BYTES_MAX // 4 for name in names):
        return None
    pieces: list[Any] = []
    total = 0
    for name, column in sorted(zip(names, columns, strict=True), key=itemgetter(0)):
        if column.null_count or pa.types.is_null(column.type) or pa.types.is_uint64(column.type):
            return None
        joined = _encoder.encode_lines(column.to_pylist())
        total += len(joined) + len(column) * (len(name) + NAME_BYTES_MAX)
        if total > _COLUMNS_BYTES_MAX:
            return None
        lines = joined.split(b"\n")[:-1]  # within JSON a line never ends
        if pa.types.is_floating(column.type) and b"null" in lines:  # NaN or infinite
            return None
        pieces += [b"%b%b:" % (b"," if pieces else b"{", _encode(name)), pa.array(lines, pa.binary())]
    rows = pc.binary_join_element_wise(*pieces, b"}", b"")
    if len(rows) and (pc.max(pc.binary_length(rows)).as_py() or 0) > ATTRIBUTES_BYTES_MAX:
        return None
    encoded: list[bytes] = rows.to_pylist()
    return encoded


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


def decode_attributes(data: bytes | str) -> Attributes:
    """Decode the attributes of one record."""
    return dict(_decoder.decode(data)) if data else {}


def attributes_text(attributes: Attributes) -> str:
    """Return decoded attributes as JSON text again; "" if there are none."""
    return _encode(attributes).decode() if attributes else ""


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


# -- columns


def value_class(kind: pa.DataType) -> str:
    """Return what values of an Arrow type are compared with: a number, a bool or a str; "" for nulls."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    if pa.types.is_boolean(kind):
        return "bool"
    return "" if pa.types.is_null(kind) else "str"


def attribute_table(encoded: Sequence[bytes | str | None]) -> pa.Table:
    """Return the attributes of many records as columns, null where a record lacks one.

    An attribute has a column for each class of its values (`value_class`), all with its name, numbers first. Whole
    numbers and floats share one, as the nearest floats.
    """
    columns: dict[str, list[Any]] = {}
    for row, data in enumerate(encoded):
        for name, value in _decoder.decode(data).items() if data else ():
            column = columns.get(name)
            if column is None:
                column = columns[name] = [None] * len(encoded)
            column[row] = value
    pairs = [(name, array) for name, values in sorted(columns.items()) for array in _arrays(values)]
    return _table_of(pairs, len(encoded))


def _table_of(pairs: Sequence[tuple[str, Any]], count: int) -> pa.Table:
    if not pairs:  # a table has its rows even if it has no columns
        return pa.table({"": pa.nulls(count)}).select([])
    return pa.Table.from_arrays([array for _, array in pairs], [name for name, _ in pairs])


_CLASSES: tuple[tuple[set[type], Any], ...] = (({int, float}, None), ({str}, pa.string()), ({bool}, pa.bool_()))


def _arrays(values: list[Any]) -> list[pa.Array]:
    """Return an array for each class of the values; null where a value is of another."""
    present = set(map(type, values)) - {type(None)}
    arrays = []
    for types, kind in _CLASSES:
        some = present & types
        if some:
            mine = values if some == present else [value if type(value) in types else None for value in values]
            if kind is None and float in some:
                mine = [value if value is None else float(value) for value in mine]
            arrays.append(pa.array(mine, kind or (pa.float64() if float in some else pa.int64())))
    return arrays


def joined_fields(fields: Iterable[pa.Field]) -> list[pa.Field]:
    """Return the columns of all tables of attributes together, from the columns of each."""
    kinds: dict[tuple[str, int], pa.DataType] = {}
    for field in fields:
        key = field.name, _ORDER[value_class(field.type)]
        kinds[key] = pa.float64() if key in kinds and kinds[key] != field.type else field.type
    return [pa.field(key[0], kinds[key]) for key in sorted(kinds)]


_ORDER = {"number": 0, "str": 1, "bool": 2, "": 3}


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of several tables of attributes as one, with the rules of `attribute_table`."""
    tables = [table for table in tables if table.num_rows]
    if len(tables) == 1:
        return tables[0]
    pairs = []
    for field in joined_fields(field for table in tables for field in table.schema):
        columns = [class_column(table, field.name, value_class(field.type), field.type) for table in tables]
        pairs.append(
            (field.name, pa.chunked_array([chunk for column in columns for chunk in column.chunks], field.type))
        )
    return _table_of(pairs, sum(table.num_rows for table in tables))


def class_column(table: pa.Table, name: str, values: str, kind: pa.DataType) -> pa.ChunkedArray:
    """Return the column of an attribute's values of a class, as a type of that class; nulls if there is none."""
    for at in table.schema.get_all_field_indices(name):
        column = table.column(at)
        if value_class(column.type) == values:
            return column if column.type == kind else column.cast(kind, safe=False)
    return pa.chunked_array([pa.nulls(table.num_rows, kind)])
