"""The types of values of a kv table: declared once, stored as bytes. `check_stored` is the rule for those bytes.

    bytes      as they are
    utf8       text
    json       any JSON value; stored as its text
    int64      8 bytes, little-endian: what the merge operators add_i64, min_i64 and max_i64 work on
    float64    8 bytes, little-endian; longer after `add_f64`: the exact sum, which begins with the rounded one
    decimal    16 bytes, little-endian: the number in units of its last digit, as in Arrow
    struct     a MessagePack map of the fields: see `structs`

Thread: pure functions.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal, Inexact, InvalidOperation, Overflow
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from penstock.arguments import in_short, plain_int
from penstock.errors import CorruptionError, Invalid
from penstock.kinds.changes import ChangeOptions
from penstock.kv import structs
from penstock.lsm import exact_sum
from penstock.lsm.operators import DECIMAL_BYTES
from penstock.lsm.rows import VALUE_BYTES_MAX, offsets_of

ValueType: TypeAlias = Literal["bytes", "utf8", "json", "int64", "float64"]


class DecimalType(Protocol):
    """The Arrow type of decimals: `pyarrow.decimal128(18, 2)`.

    >>> prices = store.kv("prices", value=pyarrow.decimal128(18, 2))
    >>> epoch = prices.put(b"apple", decimal.Decimal("1.20"))
    >>> prices[b"apple"]
    Decimal('1.20')
    """

    @property
    def precision(self) -> int:
        """How many digits a value has at most."""

    @property
    def scale(self) -> int:
        """How many of them stand behind the point."""


class StructType(Protocol):
    """The type of Arrow structs: `pyarrow.struct([("name", pyarrow.string())])`.

    >>> people = store.kv("people", value=pyarrow.struct([("name", pyarrow.string()), ("born", pyarrow.int32())]))
    >>> epoch = people.put(b"ada", {"name": "Ada", "born": 1815})
    >>> people[b"ada"]["born"]
    1815
    """

    @property
    def num_fields(self) -> int:
        """How many fields it has."""

    def field(self, i: int | str, /) -> object:
        """Return a field, by place or by name."""


AnyValueType: TypeAlias = ValueType | DecimalType | StructType
# A value of a `json` table. Reads return lists and dicts; writes accept any sequence or mapping.
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
KeyType: TypeAlias = Literal["bytes", "utf8"]
VALUE_TYPES: tuple[ValueType, ...] = ("bytes", "utf8", "json", "int64", "float64")

JSON_DEPTH_MAX = 200  # of nested lists and objects: Python's parser fails at some depth
_I64 = struct.Struct("<q")
_F64 = struct.Struct("<d")
_EXACT = Context(prec=80, Emax=10_000, Emin=-10_000, traps=[Inexact, Overflow, InvalidOperation])
# A string without an end matches up to the end of the text: to try again from each of its quotes would take hours.
_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


class Options(msgspec.Struct, frozen=True, array_like=True):
    """The options of a kv table, fixed when it is created."""

    value: ValueType | Literal["decimal", "struct"] = "bytes"
    digits: tuple[int, int] = (0, 0)  # of decimals: all, and after the point
    key: KeyType = "bytes"
    fields: bytes = b""  # of structs
    changes: ChangeOptions | None = None  # of its change feed, if it has one

    @property
    def value_name(self) -> str:
        """The type of the values, for messages."""
        return str(arrow_type(self)) if self.value in ("decimal", "struct") else self.value


_encode_options = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Options)


def options_of(value: Any, key: Any = None) -> Options:
    """Return the options for the types of values and keys that a user named; `Invalid` if there is no such type."""
    if key is not None and not (isinstance(key, str) and key in ("bytes", "utf8")):
        raise Invalid(f"key={in_short(key)} is unknown: use bytes or utf8")
    options = Options() if value is None else _value_options(value)
    return options if key is None else msgspec.structs.replace(options, key=str.__str__(key))


def _value_options(value: Any) -> Options:
    for value_type in VALUE_TYPES:
        if isinstance(value, str) and value == value_type:
            return Options(value_type)
    if isinstance(value, pa.Decimal128Type):
        if not 0 <= value.scale <= value.precision:
            raise Invalid(f"value={value}: the digits after the point are 0 to all of them")
        return Options("decimal", (value.precision, value.scale))
    if isinstance(value, pa.StructType):
        return Options("struct", fields=structs.describe(value))
    raise Invalid(
        f"value={in_short(value)} is unknown: use one of {', '.join(VALUE_TYPES)}, or pyarrow.decimal128(18, 2), or a "
        "pyarrow.struct"
    )


def encode_options(options: Options) -> bytes:
    """Encode options for the ledger; without fields that older versions do not know, where they have no meaning."""
    fields = msgspec.structs.astuple(options)
    of_structs = options.value == "struct"
    needed = (options.changes is not None, of_structs, options.key != "bytes", options.value == "decimal", True)
    return _encode_options(fields[: 5 - needed.index(True)])


def decode_options(data: bytes) -> Options:
    """Decode the options of a table."""
    try:
        options = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, Invalid) as error:
        raise CorruptionError("kv options", 0, f"they do not decode ({error})") from None
    if options.value == "struct":
        try:
            structs.struct_type(options.fields)
        except Invalid as error:
            raise CorruptionError("kv options", 0, str(error)) from None
    precision, scale = options.digits
    if options.value == "decimal" and not (1 <= precision <= 38 and 0 <= scale <= precision):
        raise CorruptionError("kv options", 0, f"decimals have no {precision} digits, {scale} of them after the point")
    return options


def changes_in(data: bytes) -> ChangeOptions | None:
    """Return the options of a table's change feed; None if it has none, or if its options cannot be read."""
    try:
        return decode_options(data).changes
    except CorruptionError:
        return None


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
    number = value if isinstance(value, (float, np.floating)) else plain_int(value)
    if number is None:
        raise Invalid(f"this table holds numbers, not {in_short(value)}")
    try:
        return _F64.pack(number)
    except (struct.error, OverflowError):
        raise Invalid("this table holds numbers of 64 bits, and the value is larger") from None


def _decimal(value: Any, precision: int, scale: int) -> bytes:
    number = value if isinstance(value, Decimal) else plain_int(value)
    if number is None or (isinstance(number, Decimal) and not number.is_finite()):
        raise Invalid(f"this table holds decimals, not {in_short(value)}: pass a decimal.Decimal or an int")
    try:
        units = _EXACT.scaleb(Decimal(number), scale)
        whole = int(units.to_integral_exact(context=_EXACT))
    except (Inexact, Overflow, InvalidOperation):
        whole = 10**precision
    if abs(whole) >= 10**precision:
        raise Invalid(
            f"this table holds decimals of {precision} digits, {scale} of them after the point, not {in_short(value)}"
        )
    return whole.to_bytes(DECIMAL_BYTES, "little", signed=True)


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


ENCODERS: dict[str, Callable[[Any], bytes]] = {
    "bytes": _bytes,
    "utf8": _utf8,
    "json": _json,
    "int64": _int64,
    "float64": _float64,
}


def encoder(options: Options) -> Callable[[Any], bytes]:
    """Return the function from a user's value to its stored bytes; it raises `Invalid`."""
    if options.value == "struct":
        return partial(structs.encode, struct=structs.struct_type(options.fields))
    if options.value != "decimal":
        return ENCODERS[options.value]
    precision, scale = options.digits
    return lambda value: _decimal(value, precision, scale)


def encode_operand(value: Any, options: Options) -> bytes:
    """Encode the operand of a merge: a value of the type, or the 8 bytes of a number."""
    if type(value) is bytes and len(value) == 8 and options.value in ("int64", "float64"):
        return value
    return encoder(options)(value)


def decoder(options: Options) -> Callable[[bytes], Any]:
    """Return the function from stored bytes to a user's value."""
    if options.value == "struct":
        return partial(structs.decode, struct=structs.struct_type(options.fields))
    if options.value != "decimal":
        return DECODERS[options.value]
    down = -options.digits[1]
    return lambda data: _EXACT.scaleb(Decimal(int.from_bytes(data, "little", signed=True)), down)


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": lambda data: data,
    "utf8": _read_text,
    "json": json.loads,
    "int64": lambda data: _I64.unpack(data)[0],
    "float64": lambda data: _F64.unpack_from(data)[0],
}

# The merge operators whose results are of the same type.
MERGES: dict[str, tuple[str, ...]] = {
    "bytes": ("add_i64", "min_i64", "max_i64", "min_f64", "max_f64", "append", "union"),
    "utf8": ("append",),
    "json": (),
    "int64": ("add_i64", "min_i64", "max_i64"),
    "float64": ("add_f64", "min_f64", "max_f64"),
    "decimal": ("add_decimal", "min_decimal", "max_decimal"),
    "struct": (),
}

_ARROW: dict[str, Any] = {
    "bytes": pa.binary(),
    "utf8": pa.string(),
    "json": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
}


def arrow_type(options: Options) -> Any:
    """Return the Arrow type of a table's values."""
    if options.value == "struct":
        return structs.struct_type(options.fields)
    return pa.decimal128(*options.digits) if options.value == "decimal" else _ARROW[options.value]


def key_type(options: Options) -> Any:
    """Return the Arrow type of a table's keys."""
    return pa.string() if options.key == "utf8" else pa.binary()


def arrow_values(column: Any, options: Options) -> Any:
    """Convert a binary column of stored values to the declared type, without a loop."""
    import pyarrow.compute as pc

    if options.value == "bytes":
        return column
    if options.value in ("utf8", "json"):
        return _texts(column)
    if options.value == "struct":
        return structs.to_arrow(column, arrow_type(options))
    if options.value == "decimal":
        units = column.cast(pa.binary(DECIMAL_BYTES))
        return pa.Array.from_buffers(arrow_type(options), len(units), [None, units.buffers()[1]], offset=units.offset)
    if options.value == "float64" and (np.diff(offsets_of(column)) != 8).any():
        column = pc.binary_slice(column, 0, 8)  # of an exact sum, the rounded one
    packed = column.cast(pa.binary(8))
    dtype = "<i8" if options.value == "int64" else "<f8"
    data = np.frombuffer(packed.buffers()[1], dtype)[packed.offset : packed.offset + len(packed)]
    return pa.array(data)


def stored_values(column: Any, options: Options) -> Any:
    """Convert a column of the declared type to stored bytes, without a loop; null becomes empty or zero."""
    import pyarrow.compute as pc

    if options.value in ("bytes", "utf8", "json"):
        if options.value == "json":
            _check_json(column)
        return pc.fill_null(column.cast(pa.binary()), b"")
    if options.value == "struct":
        return structs.from_arrow(column, arrow_type(options))
    if options.value == "decimal":
        units = pc.fill_null(column.cast(arrow_type(options)), 0)
        at = DECIMAL_BYTES * units.offset
        return _of_width(bytes(units.buffers()[1])[at : at + DECIMAL_BYTES * len(units)], DECIMAL_BYTES)
    dtype = np.dtype("<i8") if options.value == "int64" else np.dtype("<f8")
    data = pc.fill_null(column.cast(arrow_type(options)), 0).to_numpy(zero_copy_only=False).astype(dtype)
    return _of_width(data.tobytes(), 8)


def _of_width(data: bytes, width: int) -> Any:
    """Return a binary column of values of one width."""
    offsets = pa.py_buffer(np.arange(0, len(data) + 1, width, dtype=np.int32))
    return pa.Array.from_buffers(pa.binary(), len(data) // width, [None, offsets, pa.py_buffer(data)])


# -- the rule for stored bytes


def check_stored(column: Any, options: Options) -> None:
    """Raise `Invalid` if a value of an Arrow binary column is not of the declared type, so could not be read."""
    value_type = options.value
    if value_type in ("int64", "float64", "decimal"):
        width = DECIMAL_BYTES if value_type == "decimal" else 8
        for row in np.flatnonzero(np.diff(offsets_of(column)) != width).tolist():
            if value_type != "float64" or not exact_sum.is_state(column[row].as_py()):  # only sums are longer
                raise Invalid(f"this table holds {value_type}, and a value does not have {width} bytes")
    elif value_type == "json":
        _check_json(column)
    elif value_type == "struct":
        structs.check_column(column, arrow_type(options))
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
