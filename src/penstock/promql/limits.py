"""What one query may use: series, samples, cells of results, and time; and what all queries of a server may hold.

Thread: a budget belongs to one query; `cancel` may be called by any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.errors import Backpressure, Closed, Invalid, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock

SAMPLES_MAX = 20_000_000  # each takes some 60 bytes while a query runs
STEPS_MAX = 11_001  # of a range, as in Prometheus: 11,000 after the first


class QueryTooLarge(Invalid):
    """A query reads or holds more than its limits allow; a query of a shorter range may be within them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """Limits of one query. A cell is one series at one step; an expression holds a few bytes for each."""

    series_max: int = 1_000_000
    samples_max: int = SAMPLES_MAX
    cells_max: int = 20_000_000
    timeout_s: float = 30.0


class SampleRoom:
    """How many samples all queries of a process may hold at once, however many they are."""

    def __init__(self, samples_max: int) -> None:
        self._samples_max = samples_max
        self._taken = 0  # guarded by _lock
        self._lock = threads.lock("promql.samples")

    def take(self, count: int) -> None:
        """Take room for samples, or raise `Backpressure`; a query that is alone always has room."""
        with self._lock:
            if self._taken and self._taken + count > self._samples_max:
                raise Backpressure(f"queries hold {self._taken} samples (limit {self._samples_max}): retry later")
            self._taken += count

    def give_back(self, count: int) -> None:
        """Give room back."""
        with self._lock:
            self._taken -= count


class QueryBudget:
    """What a running query has used, against its limits."""

    def __init__(self, limits: QueryLimits, clock: Clock, room: SampleRoom | None = None) -> None:
        self.limits = limits
        self._clock = clock
        self._room = room
        self._in_room = 0
        self._until_s = clock.monotonic_s() + limits.timeout_s
        self._samples = 0
        self._cells = 0  # of results that wait for another one
        self._cancelled = False

    def cancel(self) -> None:
        """Make the query end with `Closed` soon."""
        self._cancelled = True

    def remaining_s(self) -> float:
        """Return how many seconds are left; above 0, or `WaitExpired`."""
        self.check()
        return max(0.001, self._until_s - self._clock.monotonic_s())

    def check(self) -> None:
        """Raise if the query was cancelled or has run too long. Called in every loop."""
        if self._cancelled:
            raise Closed("the query was cancelled: send it again")
        if self._clock.monotonic_s() > self._until_s:
            raise WaitExpired(f"a query took longer than {self.limits.timeout_s:g} s: ask for less, or raise timeout_s")

    def add_samples(self, count: int) -> None:
        """Count samples that were read."""
        self._samples += count
        if self._samples > self.limits.samples_max:
            limit = self.limits.samples_max
            raise QueryTooLarge(f"a query reads at most {limit} samples: select fewer series or less time")
        if self._room is not None:
            self._room.take(count)
            self._in_room += count

    def close(self) -> None:
        """Give back the room of the query's samples. Can be repeated."""
        if self._room is not None:
            count, self._in_room = self._in_room, 0
            self._room.give_back(count)

    def check_series(self, count: int) -> None:
        """Refuse more series than one selector may have."""
        if count > self.limits.series_max:
            raise Invalid(f"a query selects at most {self.limits.series_max} series: narrow its selectors")

    @contextmanager
    def holding(self, cells: int) -> Iterator[None]:
        """Count the values of a result that is held while another one is computed."""
        self._cells += cells
        try:
            yield
        finally:
            self._cells -= cells

    def check_cells(self, series: int, steps: int) -> None:
        """Refuse a result of too many series and steps, together with those that are held."""
        self.check()
        if self._cells + series * steps > self.limits.cells_max:
            beside = f" beside {self._cells}" if self._cells else ""
            raise QueryTooLarge(
                f"a query holds at most {self.limits.cells_max} values at once, not {series} series x {steps} "
                f"steps{beside}: select fewer series, or a longer step"
            )
