"""Key ranges from options and filters.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import Invalid
from penstock.lsm.rows import KEY_BYTES_MAX

PAST_ALL_KEYS = b"\xff" * (KEY_BYTES_MAX + 1)  # greater than every key


def parse_key(text: str) -> bytes:
    """Parse a key from text: as it is, or as hexadecimal digits after 0x."""
    if not text.startswith("0x"):
        return text.encode()
    try:
        return bytes.fromhex(text[2:])
    except ValueError:
        raise Invalid(f"{text!r} is not a key: after 0x come pairs of hexadecimal digits") from None


def filtered_key_range(filters: Sequence[tuple[str, Any]]) -> tuple[bytes, bytes | None]:
    """Return a key range that holds every key that passes all filters (operation, value)."""
    low, high = b"", None
    for operation, value in filters:
        values = [bytes(key) for key in (value if operation == "in" else [value])]
        if operation in ("=", "in", ">", ">="):
            low = max(low, min(values) + (b"\0" if operation == ">" else b""))
        if operation in ("=", "in", "<", "<="):
            end = max(values) + (b"" if operation == "<" else b"\0")
            high = end if high is None else min(high, end)
    return low, high if high is None else max(low, high)
