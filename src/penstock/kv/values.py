"""The types of values of a kv table: declared once, stored as bytes. `check_stored` is the rule for those bytes.

    bytes      as they are
    utf8       text
    json       any JSON value; stored as its text
    int64      8 bytes, little-endian: what the merge operators add_i64, min_i64 and max_i64 work on
    float64    8 bytes, little-endian

Thread: pure functions.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arguments import in_short, plain_int
from penstock.errors import CorruptionError, Invalid
from penstock.lsm.operators import OPERATORS
from penstock.lsm.rows import VALUE_BYTES_MAX, offsets_of

ValueType: TypeAlias = Literal["bytes", "utf8", "json", "int64", "float64"]
# A value of a `json` table. Reads return lists and dicts; writes accept any sequence or mapping.
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
VALUE_TYPES: tuple[ValueType, ...] = ("bytes", "utf8", "json", "int64", "float64")

JSON_DEPTH_MAX = 200  # of nested lists and objects: Python's parser fails at some depth
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_JSON_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


class Options(msgspec.Struct, frozen=True, array_like=True):
    """The options of a kv table, fixed when it is created."""

    value: ValueType = "bytes"


_encode_options = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Options)


def check_value_type(value: Any) -> ValueType:
    """Return the value type that a user named; `Invalid` if there is no such type."""
    for value_type in VALUE_TYPES:
        if isinstance(value, str) and value == value_type:
            return value_type
    raise Invalid(f"value={in_short(value)} is unknown: use one of {', '.join(VALUE_TYPES)}")


def encode_options(options: Options) -> bytes:
    """Encode options for the ledger."""
    return _encode_options(options)


def decode_options(data: bytes) -> Options:
    """Decode the options of a table."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError("kv options", 0, f"they do not decode ({error})") from None


# -- from users' values to stored bytes


def _bytes(value: Any) -> bytes:
    if type(value) is bytes:
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:  # a subclass becomes bytes: readers recognize a plain value by its type
            return bytes(memoryview(value))
        except ValueError as error:
            raise Invalid(f"the value's memory cannot be read ({error})") from None
    raise Invalid(f"this table holds bytes, not {type(value).__name__}: encode the value, or declare value=")


def _utf8(value: Any) -> bytes:
    if not isinstance(value, str):
        raise Invalid(f"this table holds text, not {type(value).__name__}")
    try:
        return str.encode(value)
    except UnicodeEncodeError as error:
        raise Invalid(f"this table holds text, and the value is not ({error})") from None


def _json(value: Any) -> bytes:
    try:
        data = json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"this table holds JSON, and the value is not ({error})") from None
    _check_depth(data)
    return data


def _int64(value: Any) -> bytes:
    number = plain_int(value)
    if number is None or not -(1 << 63) <= number < 1 << 63:
        raise Invalid(f"this table holds integers of 64 bits, not {in_short(value)}")
    return _I64.pack(number)


def _float64(value: Any) -> bytes:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Invalid(f"this table holds numbers, not {in_short(value)}")
    try:
        return _F64.pack(value)
    except (struct.error, OverflowError):
        raise Invalid("this table holds numbers of 64 bits, and the value is larger") from None


# -- from stored bytes to users' values


def _read_text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if len(data) == VALUE_BYTES_MAX and error.start > VALUE_BYTES_MAX - 4:
            return data[: error.start].decode()  # `append` cut it at the limit, in the middle of a character
        raise CorruptionError("a value", error.start, "the table holds text, and this is not") from None


def _texts(column: Any) -> Any:
    """Convert a binary column to text."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(map(_read_text, column.to_pylist()), pa.string())


ENCODERS: dict[ValueType, Callable[[Any], bytes]] = {
    "bytes": _bytes,
    "utf8": _utf8,
    "json": _json,
    "int64": _int64,
    "float64": _float64,
}


def encode_operand(value: Any, value_type: ValueType) -> bytes:
    """Encode the operand of a merge: a value of the type, or the 8 bytes of a number."""
    if type(value) is bytes and len(value) == 8 and value_type in ("int64", "float64"):
        return value
    return ENCODERS[value_type](value)


DECODERS: dict[ValueType, Callable[[bytes], Any]] = {
    "bytes": lambda data: data,
    "utf8": _read_text,
    "json": json.loads,
    "int64": lambda data: _I64.unpack(data)[0],
    "float64": lambda data: _F64.unpack(data)[0],
}

# The merge operators whose results are of the same type.
MERGES: dict[ValueType, tuple[str, ...]] = {
    "bytes": tuple(OPERATORS),
    "utf8": ("append",),
    "json": (),
    "int64": ("add_i64", "min_i64", "max_i64"),
    "float64": ("min_f64", "max_f64"),
}

_ARROW: dict[ValueType, Any] = {
    "bytes": pa.binary(),
    "utf8": pa.string(),
    "json": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
}


def arrow_type(options: Options) -> Any:
    """Return the Arrow type of a table's values."""
    return _ARROW[options.value]


def arrow_values(column: Any, options: Options) -> Any:
    """Convert a binary column of stored values to the declared type, without a loop."""
    if options.value == "bytes":
        return column
    if options.value in ("utf8", "json"):
        return _texts(column)
    width = pa.binary(8)
    packed = column.cast(width)
    dtype = "<i8" if options.value == "int64" else "<f8"
    data = np.frombuffer(packed.buffers()[1], dtype)[packed.offset : packed.offset + len(packed)]
    return pa.array(data)


def stored_values(column: Any, options: Options) -> Any:
    """Convert a column of the declared type to stored bytes, without a loop; null becomes empty or zero."""
    if options.value in ("bytes", "utf8", "json"):
        if options.value == "json":
            _check_json(column)
        return pc.fill_null(column.cast(pa.binary()), b"")
    dtype = np.dtype("<i8") if options.value == "int64" else np.dtype("<f8")
    data = pc.fill_null(column.cast(arrow_type(options)), 0).to_numpy(zero_copy_only=False).astype(dtype)
    offsets = pa.py_buffer(np.arange(0, 8 * len(data) + 1, 8, dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), len(data), [None, offsets, pa.py_buffer(data.tobytes())])


# -- the rule for stored bytes


def check_stored(column: Any, value_type: ValueType) -> None:
    """Raise `Invalid` if a value of an Arrow binary column is not of the declared type, so could not be read."""
    if value_type in ("int64", "float64"):
        if (np.diff(offsets_of(column)) != 8).any():
            raise Invalid(f"this table holds {value_type}, and a value does not have 8 bytes")
    elif value_type == "json":
        _check_json(column)
    elif value_type == "utf8":
        try:
            column.cast(pa.string())
        except pa.ArrowInvalid as error:
            raise Invalid(f"this table holds text, and a value is not ({error})") from None


def _check_json(column: Any) -> None:
    """Raise `Invalid` if a text is not JSON: a later read would fail."""
    for text in column.cast(pa.binary()).to_pylist():
        if text is None:
            continue
        _check_depth(text)
        try:
            json.loads(text.decode(), parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise Invalid(f"this table holds JSON, and a value is not ({error})") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_depth(data: bytes) -> None:
    if data.count(b"[") + data.count(b"{") <= JSON_DEPTH_MAX:
        return
    depth = 0
    for character in re.findall(rb"[][{}]", _JSON_STRING.sub(b"", data)):
        depth += 1 if character in b"[{" else -1
        if depth > JSON_DEPTH_MAX:
            raise Invalid(f"this table holds JSON of at most {JSON_DEPTH_MAX} nested lists and objects")
