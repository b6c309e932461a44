"""Time, passed in so that tests own it.

Thread: any. Wall time (`time_us`) may jump either way and is only ever *recorded*; every decision about how long
something took or may take uses `monotonic_s`. A store uses `steady_clock`, which does not jump.
"""

from __future__ import annotations

import time
from typing import Protocol

UNKNOWN_BOOT = b""
_BOOT_CLOCK = getattr(
    time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC
)  # on other systems the monotonic clock counts sleep, too


class Clock(Protocol):
    """The clocks of a machine."""

    def time_us(self) -> int:
        """Wall time: microseconds since 1970 in UTC."""

    def monotonic_s(self) -> float:
        """Seconds that never go back, without sleep; comparable between processes of one boot."""

    def boot_us(self) -> int:
        """Microseconds since the machine was started, sleep included; comparable between processes of one boot."""

    def boot_id(self) -> bytes:
        """An id of this boot of the machine; `UNKNOWN_BOOT` where the system has none."""


class SystemClock:
    """The clocks of this machine."""

    def time_us(self) -> int:
        return time.time_ns() // 1_000

    monotonic_s = staticmethod(time.monotonic)  # without a method around it: every flush calls it

    def boot_us(self) -> int:
        return time.clock_gettime_ns(_BOOT_CLOCK) // 1_000

    def boot_id(self) -> bytes:
        try:
            with open("/proc/sys/kernel/random/boot_id", "rb") as file:
                return file.read(64).strip()
        except OSError:
            return UNKNOWN_BOOT
