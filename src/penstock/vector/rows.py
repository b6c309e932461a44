"""Vectors and rows that a caller passes: ids, matrices, attributes, Arrow tables. All are checked before a write.

Arrow rows have the columns `id` (text) and `vector` (lists of numbers), and attributes: a column `attributes` (JSON
text, a struct, or a map of texts), or any other columns of texts, numbers or bools.

Thread: pure functions.
Invariant: what is returned shares no memory with what the caller passed, and can be written to a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.arguments import in_short
from penstock.errors import Invalid
from penstock.vector.attributes import encode_all, encode_columns
from penstock.vector.keys import F32
from penstock.vector.options import VectorOptions
from penstock.vector.section import ID_BYTES_MAX, Upserts, check_ids, check_vectors

_ID_RULE = f"the id of a vector is a text of 1 to {ID_BYTES_MAX} bytes"


def schema_of(options: VectorOptions) -> pa.Schema:
    """Return the Arrow schema of a table: id, vector, and attributes as JSON text (null: none)."""
    return pa.schema(
        [
            pa.field("id", pa.string(), nullable=False),
            pa.field("vector", vector_type(options), nullable=False),
            pa.field("attributes", pa.string()),
        ]
    )


def vector_type(options: VectorOptions) -> Any:
    """Return the Arrow type of vectors."""
    return pa.list_(pa.field("item", pa.float32(), nullable=False), options.dimensions)


def plain_id(value: Any) -> bytes:
    """Return an id as bytes; `Invalid` if it is not one."""
    if isinstance(value, str):
        try:
            data = str.__str__(value).encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            data = b""
        if 0 < len(data) <= ID_BYTES_MAX:
            return data
    raise Invalid(f"{_ID_RULE}, not {in_short(value)}")


def plain_ids(ids: Any) -> list[bytes]:
    """Return ids as bytes; `Invalid` if one is not an id."""
    if isinstance(ids, (pa.Array, pa.ChunkedArray)):
        return _id_column(ids)
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise Invalid(f"ids are a list of texts, not {in_short(ids)}")
    listed = list(ids)
    if set(map(type, listed)) == {str}:
        try:
            encoded = list(map(str.encode, listed))
        except UnicodeEncodeError:
            encoded = [b""]
        sizes = set(map(len, encoded))
        if min(sizes) > 0 and max(sizes) <= ID_BYTES_MAX:
            return encoded
    return [plain_id(value) for value in listed]


def plain_matrix(values: Any, options: VectorOptions, count: int | None = None) -> F32:
    """Return vectors as rows of float32, a copy; `Invalid` if they do not fit the table."""
    return _checked_matrix(_numbers(values), options, count)


def _checked_matrix(matrix: F32, options: VectorOptions, count: int | None) -> F32:
    if matrix.ndim != 2 or (count is not None and len(matrix) != count):
        rows = "some" if count is None else str(count)
        raise Invalid(
            f"vectors are a matrix of {rows} rows and {options.dimensions} columns, not of the shape {matrix.shape}"
        )
    if len(matrix):
        check_vectors(matrix, options)
    return matrix


def plain_vector(values: Any, options: VectorOptions) -> F32:
    """Return one vector as float32, a copy; `Invalid` if it does not fit the table."""
    return _checked_vector(_numbers(values), options)


def plain_queries(values: Any, options: VectorOptions) -> F32:
    """Return one vector or the rows of a matrix as float32, a copy; `Invalid` if they do not fit the table."""
    numbers = _numbers(values)
    return _checked_vector(numbers, options) if numbers.ndim == 1 else _checked_matrix(numbers, options, None)


def _checked_vector(vector: F32, options: VectorOptions) -> F32:
    if vector.shape != (options.dimensions,):
        raise Invalid(f"a vector of this table has {options.dimensions} numbers, not the shape {vector.shape}")
    check_vectors(vector.reshape(1, -1), options)
    return vector


def _numbers(values: Any) -> F32:
    if isinstance(values, (pa.Array, pa.ChunkedArray)) and pa.types.is_nested(values.type):
        return _vector_column(values)
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise Invalid("vectors have masked numbers: drop such rows, or fill them")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"vectors are arrays of numbers, not {in_short(values)} ({error})") from None
    if array.dtype.kind not in "fiu" and array.size:
        raise Invalid(f"vectors are arrays of numbers, not {in_short(values)}")
    with np.errstate(all="ignore"):  # what float32 cannot hold becomes infinite, and is refused
        return np.array(array, np.float32, order="C")


def rows_of(ids: Any, vectors: Any, attributes: Any, options: VectorOptions) -> Upserts | None:
    """Return rows to write; None if there are none; `Invalid` if one breaks a rule."""
    plain = plain_ids(ids)
    matrix = _numbers(vectors)
    encoded = _attribute_list(attributes, len(plain))
    if not plain and not matrix.size:
        return None
    return Upserts(plain, _checked_matrix(matrix, options, len(plain)), encoded)


def _attribute_list(attributes: Any, count: int) -> list[bytes]:
    if attributes is None:
        return []
    if isinstance(attributes, (Mapping, str, bytes)) or not isinstance(attributes, Iterable):
        raise Invalid(f"attributes are a list with a dict for each vector, not {in_short(attributes)}")
    encoded = encode_all(list(attributes))
    if len(encoded) != count:
        raise Invalid(f"there are {count} ids and {len(encoded)} attributes: give as many of both")
    return encoded if any(encoded) else []


# -- Arrow


def arrow_rows(rows: Any, options: VectorOptions) -> Upserts | None:
    """Return the rows of an Arrow table or record batch to write; None if it has none; `Invalid` if one is wrong."""
    try:
        table = rows if isinstance(rows, pa.Table) else pa.table(rows)
    except Exception as error:  # whatever another library raises
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise Invalid(f"upsert takes ids and a matrix, or an Arrow table, not {in_short(rows)} ({line})") from None
    names = table.column_names
    if len(set(names)) != len(names):
        raise Invalid("rows of a vector table have two columns of one name")
    for name in ("id", "vector"):
        if name not in names:
            raise Invalid(f"rows of a vector table have the columns id and vector: {name} is missing")
    if not table.num_rows:
        return None
    ids = _id_column(table.column("id"))
    matrix = _vector_column(table.column("vector"))
    if matrix.ndim != 2 or matrix.shape[1] != options.dimensions:
        raise Invalid(f"the vectors of this table have {options.dimensions} dimensions, these have {matrix.shape[1:]}")
    check_vectors(matrix, options)
    return Upserts(ids, matrix, _attribute_rows(table))


def check_columns(schema: pa.Schema) -> None:
    """Raise `Invalid` if rows of a schema cannot be written to a vector table."""
    names = schema.names
    missing = [name for name in ("id", "vector") if name not in names]
    if missing or len(set(names)) != len(names):
        raise Invalid(f"rows of a vector table have the columns id and vector, not {', '.join(names)}")
    if not _is_list(schema.field("vector").type):
        raise Invalid(f"the column vector is {schema.field('vector').type}: give lists of numbers")
    if not _is_text(schema.field("id").type):
        raise Invalid(f"the column id is {schema.field('id').type}: give texts")
    for field in schema:
        if field.name not in ("id", "vector", "attributes") and not _is_scalar(field.type):
            raise Invalid(f"the column {field.name} is {field.type}: attributes are texts, numbers and bools")


def _is_text(kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list(kind: Any) -> bool:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)))


def _is_scalar(kind: Any) -> bool:
    types = pa.types
    return bool(
        _is_text(kind)
        or types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_null(kind)
    )


def _joined(column: Any) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _id_column(column: Any) -> list[bytes]:
    if not _is_text(column.type):
        raise Invalid(f"the column id is {column.type}: give texts")
    if column.null_count:
        raise Invalid("the column id has nulls: drop such rows")
    ids: list[bytes] = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
    if ids:
        check_ids(ids)
    return ids


def _vector_column(column: Any) -> F32:
    """Return a column of lists as a matrix; the lengths of all lists must be equal."""
    array = _joined(column)
    kind = array.type
    if not _is_list(kind):
        raise Invalid(f"vectors are lists of numbers, not {kind}")
    if array.null_count:
        raise Invalid("the column vector has nulls: drop such rows")
    flat = array.flatten()
    if flat.null_count:
        raise Invalid("a vector has nulls: drop such rows")
    if pa.types.is_fixed_size_list(kind):
        width = kind.list_size
    else:
        lengths = np.diff(array.offsets.to_numpy())
        width = int(lengths[0]) if len(lengths) else 0
        if (lengths != width).any():
            raise Invalid(f"the vectors of one write have one length: these have {lengths.min()} to {lengths.max()}")
    numbers = flat.to_numpy(zero_copy_only=False)
    with np.errstate(all="ignore"):
        return np.array(numbers, np.float32).reshape(len(array), width)


def _attribute_rows(table: pa.Table) -> list[bytes]:
    """Return the encoded attributes of each row."""
    others = [name for name in table.column_names if name not in ("id", "vector", "attributes")]
    for name in others:
        if not _is_scalar(table.schema.field(name).type):
            kind = table.schema.field(name).type
            raise Invalid(f"the column {in_short(name)} is {kind}: attributes are texts, numbers and bools")
    dicts: list[Any] = [None] * table.num_rows
    if "attributes" in table.column_names:
        dicts = _attribute_dicts(table.column("attributes"))
    elif others and (from_columns := encode_columns(others, [table.column(name) for name in others])) is not None:
        return from_columns
    if not others:
        encoded = encode_all(dicts)
    else:
        columns = [table.column(name).to_pylist() for name in others]
        joined = []
        for attributes, values in zip(dicts, zip(*columns, strict=True), strict=True):
            beside = dict(zip(others, values, strict=True))
            if attributes and not beside.keys().isdisjoint(attributes):
                raise Invalid("an attribute stands in the column attributes and in a column of its own: give it once")
            joined.append({**attributes, **beside} if attributes else beside)
        encoded = encode_all(joined)
    return encoded if any(encoded) else []


_parse = msgspec.json.Decoder(dict[str, str | int | float | bool | None]).decode


def _attribute_dicts(column: Any) -> list[Any]:
    kind = column.type
    if _is_text(kind):
        try:
            return [_parse(text) if text else None for text in column.cast(pa.large_string()).to_pylist()]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Invalid(f"the column attributes is text, and not the JSON of flat objects ({error})") from None
    if pa.types.is_map(kind):
        return [None if pairs is None else _from_pairs(pairs) for pairs in column.to_pylist()]
    if pa.types.is_struct(kind):
        if len({field.name for field in kind}) != kind.num_fields:
            raise Invalid("the struct of attributes has a name twice")
        rows: list[Any] = column.to_pylist()
        return rows
    raise Invalid(f"the column attributes is {kind}: give a struct, a map or JSON text")


def _from_pairs(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    attributes = dict(pairs)
    if len(attributes) != len(pairs):
        raise Invalid("a map of attributes has a name twice")
    return attributes
