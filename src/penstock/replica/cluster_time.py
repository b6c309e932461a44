"""The time of a cluster: its leader's store counts it (`host/steady_clock.py`), and sends it with every message.

A follower uses it instead of its own wall clock, and continues from it when it becomes the leader. So a member whose
wall clock is wrong does not move the time of records when it is elected; it draws that time by at most a tenth, as a
store on its own would. Until a leader has sent the time to this process, the member's own clocks decide.

Thread: any; `_heard` is replaced whole.
Invariant: the time of a member that leads comes from its store alone.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.host.clock import Clock
from penstock.host.steady_clock import TimeNote


class ClusterTime:
    """The clocks of a member's machine; the wall clock is the leader's time while another member leads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.monotonic_s, self.boot_us, self.boot_id = clock.monotonic_s, clock.boot_us, clock.boot_id
        self._heard: TimeNote | None = None
        self._source: Callable[[], int] | None = None

    def hear(self, time_us: int) -> None:
        """Note the time that the leader sent; 0: it does not know it yet."""
        if time_us:
            self._heard = TimeNote(time_us, self.boot_us(), self.boot_id()[:64])

    def lead(self, source: Callable[[], int] | None) -> None:
        """Take the time from the store that takes writes here; None: it is closed."""
        if source is None and self._source is not None:
            self.hear(self._source())
        self._source = source

    def note(self) -> TimeNote | None:
        """Return the time that the leader sent last, and when."""
        return self._heard

    def now_us(self) -> int:
        """Return the cluster's time; 0 if it is not known."""
        source, heard = self._source, self._heard
        if source is not None:
            return source()
        return 0 if heard is None else heard.time_us + self.boot_us() - heard.boot_us

    def time_us(self) -> int:
        """Return the wall clock to follow."""
        return (0 if self._source is not None else self.now_us()) or self._clock.time_us()
