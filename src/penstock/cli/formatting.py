"""Values as text and as JSON, and back.

Thread: pure functions.
Invariants: (1) a formatted value is one printable line, so data can neither move the cursor nor look like two rows.
(2) `parse_bytes(format_value(value)) == value` for bytes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec
import pyarrow as pa

from penstock.arguments import in_short
from penstock.errors import Invalid
from penstock.kv.ranges import parse_key


def parse_bytes(text: str) -> bytes:
    """Return the bytes of an argument: as the shell passed it, or 0x and hexadecimal digits."""
    try:
        return parse_key(text)
    except UnicodeEncodeError:  # what is not text in this locale, Python passes as surrogates
        return os.fsencode(text)


def parse_text(text: str) -> str:
    """Return an argument as text, which is UTF-8 in any locale."""
    try:
        return os.fsencode(text).decode()
    except UnicodeDecodeError:
        raise Invalid("an argument is not UTF-8 text, which this table holds") from None


def format_value(value: Any) -> str:
    """Return a value as one printable line; bytes that are not such text as 0x and hexadecimal digits."""
    if isinstance(value, bytes):
        try:
            text = value.decode()
        except UnicodeDecodeError:
            return "0x" + value.hex()
        return text if text.isprintable() and not text.startswith("0x") else "0x" + value.hex()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (dict, list, tuple)):
        value = msgspec.json.encode(json_value(value)).decode()
    text = "" if value is None else str(value)
    return text if text.isprintable() else msgspec.json.encode(json_value(text)).decode()


def json_value(value: Any) -> Any:
    """Return a value as JSON has it: bytes that are not text as {"hex": …}, NaN and infinities as text."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return {"hex": bytes(value).hex()}
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, Mapping):
        return {format_value(name): json_value(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return value if value is None or isinstance(value, (bool, int)) else str(value)


def raw_bytes(value: Any) -> bytes:
    """Return a value as bytes for a file or a pipe: bytes and text as they are, anything else as JSON."""
    if isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else msgspec.json.encode(json_value(value))


def parse_value(text: bytes, kind: pa.DataType, name: Any) -> Any:
    """Parse a value of a kv table: `kind` is the Arrow type of its values, `name` the declared type."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return text
    if name == "utf8":
        return _text(text)
    if pa.types.is_decimal(kind):
        try:
            return Decimal(_text(text))
        except InvalidOperation:
            raise Invalid(f"{text!r} is not a decimal number") from None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"the value is not JSON ({error}): this table holds {name}") from None


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Invalid("the value is not UTF-8 text, which this table holds") from None


def parse_time(text: str) -> datetime:
    """Parse a time: ISO 8601 (UTC if it names no zone), or seconds since 1970."""
    try:
        return datetime.fromtimestamp(float(text), UTC)
    except (ValueError, OverflowError, OSError):
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(f"{in_short(text)} is not a time: give 2026-03-01T12:00:00Z, or seconds since 1970") from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def parse_json(text: str, name: str) -> Any:
    """Parse JSON from the argument or option `name`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise Invalid(f"{name} is not JSON: {error}") from None


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(count: float) -> str:
    """Return a number of bytes for people: 1.5 MB."""
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
