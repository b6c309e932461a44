"""Bytes as a person reads them, and as a person writes them.

Thread: pure functions.
"""

from __future__ import annotations

from typing import Any

from penstock.kv.ranges import parse_key


def format_value(value: Any) -> str:
    """Text as it is, other bytes in hexadecimal digits after 0x: what `parse_bytes` takes."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "0x" + value.hex()
    return text if text.isprintable() and not text.startswith("0x") else "0x" + value.hex()


parse_bytes = parse_key
