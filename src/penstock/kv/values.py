"""What the values of a kv table are: declared once, kept as bytes.

    bytes      as they are
    utf8       text
    json       any JSON value; stored as its text
    int64      8 bytes, little-endian: what the merge operators add_i64, min_i64 and max_i64 work on
    float64    8 bytes, little-endian

Thread: pure functions.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import CorruptionError, Invalid
from penstock.lsm.operators import OPERATORS

ValueType: TypeAlias = Literal["bytes", "utf8", "json", "int64", "float64"]
VALUE_TYPES: tuple[ValueType, ...] = ("bytes", "utf8", "json", "int64", "float64")

_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")


class Options(msgspec.Struct, frozen=True, array_like=True):
    """What is fixed when a kv table is made."""

    value: ValueType = "bytes"


_encode_options = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Options)


def encode_options(options: Options) -> bytes:
    """Options as the ledger keeps them."""
    return _encode_options(options)


def decode_options(data: bytes) -> Options:
    """Options as they were when the table was made."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise CorruptionError("kv options", 0, f"they do not decode ({error})") from None


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    raise Invalid(f"this table holds bytes, not {type(value).__name__}: encode the value, or declare value=")


def _utf8(value: Any) -> bytes:
    if not isinstance(value, str):
        raise Invalid(f"this table holds text, not {type(value).__name__}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise Invalid(f"this table holds text, and the value is none ({error})") from None


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise Invalid(f"this table holds JSON, and the value is none ({error})") from None


def _int64(value: Any) -> bytes:
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise Invalid(f"this table holds integers of 64 bits, not {value!r}")
    return _I64.pack(value)


def _float64(value: Any) -> bytes:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Invalid(f"this table holds numbers, not {value!r}")
    try:
        return _F64.pack(value)
    except struct.error:
        raise Invalid("this table holds numbers of 64 bits, and the value is larger") from None


ENCODERS: dict[ValueType, Callable[[Any], bytes]] = {
    "bytes": _bytes,
    "utf8": _utf8,
    "json": _json,
    "int64": _int64,
    "float64": _float64,
}

DECODERS: dict[ValueType, Callable[[bytes], Any]] = {
    "bytes": lambda data: data,
    "utf8": bytes.decode,
    "json": json.loads,
    "int64": lambda data: _I64.unpack(data)[0],
    "float64": lambda data: _F64.unpack(data)[0],
}

# The merge operators whose results are values of the type again.
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
    """The Arrow type of a table's values."""
    return _ARROW[options.value]


def arrow_values(column: Any, options: Options) -> Any:
    """A binary column of stored values as the declared type, without a loop."""
    if options.value == "bytes":
        return column
    if options.value in ("utf8", "json"):
        return column.cast(pa.string())
    width = pa.binary(8)
    packed = column.cast(width)
    dtype = "<i8" if options.value == "int64" else "<f8"
    data = np.frombuffer(packed.buffers()[1], dtype)[packed.offset : packed.offset + len(packed)]
    return pa.array(data)


def stored_values(column: Any, options: Options) -> Any:
    """A column of the declared type as the bytes that are stored, without a loop; null becomes empty."""
    if options.value in ("bytes", "utf8", "json"):
        if options.value == "json":
            _check_json(column)
        return pc.fill_null(column.cast(pa.binary()), b"")
    dtype = np.dtype("<i8") if options.value == "int64" else np.dtype("<f8")
    data = pc.fill_null(column.cast(arrow_type(options)), 0).to_numpy(zero_copy_only=False).astype(dtype)
    offsets = pa.py_buffer(np.arange(0, 8 * len(data) + 1, 8, dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), len(data), [None, offsets, pa.py_buffer(data.tobytes())])


def _check_json(column: Any) -> None:
    """`Invalid` if a text is no JSON: somebody would find out when it is read."""
    for text in column.to_pylist():
        try:
            if text is not None:
                json.loads(text)
        except ValueError as error:
            raise Invalid(f"this table holds JSON, and a value is none ({error})") from None
