"""Times that users pass, in microseconds; and times as keys, for packages that read a shard in ranges of keys.

Thread: pure functions.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arguments import microseconds, seconds
from penstock.errors import Invalid
from penstock.series.options import TIME_MAX, TIME_MIN

STEP_S_MAX = 1e12
_KEY = struct.Struct(">Q")
_ZERO = 1 << 63


def moment_us(time: Any, name: str = "a time") -> int:
    """Return a time as microseconds since 1970, from such a number or a datetime (numpy's are UTC)."""
    if isinstance(time, np.datetime64):
        return int(moments_us(np.array([time]))[0])
    return microseconds(time, name)


def moments_us(column: npt.NDArray[np.datetime64]) -> npt.NDArray[np.int64]:
    """Return datetimes of numpy as microseconds; `Invalid` for NaT and for what does not fit."""
    if np.isnat(column).any():
        raise Invalid("a time is NaT, which is not a time: drop such rows")
    years = column.astype("datetime64[Y]").astype(np.int64) + 1970  # first: numpy wraps what does not fit
    if len(years) and not (years.min() >= 1 and years.max() <= 9999):
        raise Invalid("a time is outside the years 1 to 9999: numpy's datetimes have a unit, which may be wrong")
    return column.astype("datetime64[us]").astype(np.int64)


def step_us(step: Any) -> int:
    """Return a step above 0, in seconds or as a timedelta, in microseconds."""
    number = step.total_seconds() if isinstance(step, timedelta) else step
    return max(1, round(seconds(number, "step", STEP_S_MAX, above_zero=True) * 1e6))


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
