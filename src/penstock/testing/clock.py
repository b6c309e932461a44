"""A clock that moves only when a test moves it.

Thread: any; each call is atomic under the interpreter's lock.
"""

from __future__ import annotations

from itertools import count

_boots = count(1)  # every clock belongs to a machine that has just booted


class FakeClock:
    """The wall clock and the monotonic clock of a machine, moved by a test together or separately.

    >>> clock = FakeClock()
    >>> before_s = clock.monotonic_s()
    >>> clock.advance(1.5)
    >>> clock.monotonic_s() - before_s
    1.5
    """

    def __init__(self, *, time_us: int = 1_700_000_000_000_000, monotonic_s: float = 1_000.0) -> None:
        self._time_us = time_us
        self._monotonic_s = monotonic_s
        self._boot = next(_boots)

    def time_us(self) -> int:
        return self._time_us

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def boot_us(self) -> int:
        return round(self._monotonic_s * 1_000_000)

    def boot_id(self) -> bytes:
        return b"boot %d" % self._boot

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks.

        >>> FakeClock().advance(1.5)
        """
        if seconds < 0:
            raise ValueError("time does not run backwards: use jump() for the wall clock")
        self._monotonic_s += seconds
        self._time_us += round(seconds * 1_000_000)

    def jump(self, seconds: float) -> None:
        """Set the wall clock, either way, as an operator or NTP does; no time passes.

        >>> FakeClock().jump(-3600)  # an hour back
        """
        self._time_us += round(seconds * 1_000_000)

    def reboot(self, *, off_s: float = 0.0, up_s: float = 10.0) -> None:
        """Reboot the machine: it was off for `off_s`, and booted `up_s` ago.

        >>> FakeClock().reboot(off_s=60.0)
        """
        self._boot = next(_boots)
        self._monotonic_s = up_s
        self._time_us += round((off_s + up_s) * 1_000_000)
