"""Time, passed in so that tests own it.

Thread: any. Wall time (`time_us`) may jump either way and is only ever *recorded*; every decision about how long
something took or may take uses `monotonic_s`.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The two clocks of a machine."""

    def time_us(self) -> int:
        """Wall time: microseconds since 1970 in UTC."""

    def monotonic_s(self) -> float:
        """Seconds that never go back; comparable within one process only."""


class SystemClock:
    """The clocks of this machine."""

    def time_us(self) -> int:
        return time.time_ns() // 1_000

    def monotonic_s(self) -> float:
        return time.monotonic()
