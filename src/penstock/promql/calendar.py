"""Functions of time: parts of the date of seconds since 1970, in UTC.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.promql.values import F64

Moments = npt.NDArray[np.datetime64]
SECONDS_MAX = 1 << 55  # what numpy's dates can hold, and a thousand million years


def _since(moments: Moments, unit: str, of: str) -> npt.NDArray[np.int64]:
    """Return how many of a unit have passed since the larger one began."""
    passed: Any = moments.astype(f"datetime64[{unit}]") - moments.astype(f"datetime64[{of}]").astype(
        f"datetime64[{unit}]"
    )
    return np.asarray(passed.astype(np.int64))


def _days_in_month(moments: Moments) -> npt.NDArray[np.int64]:
    month = moments.astype("datetime64[M]")
    days: Any = (month + np.timedelta64(1, "M")).astype("datetime64[D]") - month.astype("datetime64[D]")
    return np.asarray(days.astype(np.int64))


_PARTS: Mapping[str, Callable[[Moments], npt.NDArray[np.int64]]] = MappingProxyType(
    {
        "minute": lambda t: _since(t, "m", "h"),
        "hour": lambda t: _since(t, "h", "D"),
        "day_of_week": lambda t: (t.astype("datetime64[D]").astype(np.int64) + 4) % 7,
        "day_of_month": lambda t: _since(t, "D", "M") + 1,
        "day_of_year": lambda t: _since(t, "D", "Y") + 1,
        "days_in_month": _days_in_month,
        "month": lambda t: _since(t, "M", "Y") + 1,
        "year": lambda t: t.astype("datetime64[Y]").astype(np.int64) + 1970,
    }
)
CALENDAR_FUNCTIONS = tuple(_PARTS)


def date_part(function: str, seconds: F64) -> F64:
    """Return a part of each date; NaN where there is none."""
    in_range = np.abs(seconds) < SECONDS_MAX
    moments = np.trunc(np.where(in_range, seconds, 0.0)).astype(np.int64).astype("datetime64[s]")
    return np.where(in_range, _PARTS[function](moments).astype(np.float64), np.nan)
