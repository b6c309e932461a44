"""Formats bytes as readable text, and parses them.

Thread: pure functions.
"""

from __future__ import annotations

from typing import Any

from penstock.kv.ranges import parse_key


def format_value(value: Any) -> str:
    """Return text unchanged and other bytes as 0x and hexadecimal digits, as `parse_bytes` reads them."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return "0x" + value.hex()
    return text if text.isprintable() and not text.startswith("0x") else "0x" + value.hex()


parse_bytes = parse_key
