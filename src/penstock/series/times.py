"""Times as keys: a shard's rows are read in ranges of time, which other packages see as ranges of keys.

Thread: pure functions.
"""

from __future__ import annotations

import struct

from penstock.series.options import TIME_MAX, TIME_MIN

_KEY = struct.Struct(">Q")
_ZERO = 1 << 63


def time_key(time_us: int) -> bytes:
    """Return the key of a time: keys are in the order of times."""
    return _KEY.pack(time_us + _ZERO)


def key_time(key: bytes) -> int:
    """Return the time of a key, or of the first key at or above these bytes."""
    if len(key) > _KEY.size:  # between two times
        return min(TIME_MAX, key_time(key[: _KEY.size]) + 1)
    time: int = _KEY.unpack(key.ljust(_KEY.size, b"\0"))[0] - _ZERO
    return min(max(time, TIME_MIN), TIME_MAX)


def key_times(start: bytes, end: bytes | None) -> tuple[int, int]:
    """Return the range of times of a range of keys."""
    return key_time(start), TIME_MAX if end is None else key_time(end)
