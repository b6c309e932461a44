"""The settings of a coordinator, checked once; its states, the triggers of a flush, and its statistics.

Thread: any; nothing here changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from penstock.coordinator.protocols import Epoch
from penstock.errors import Invalid


class State(Enum):
    """What the coordinator is doing with writes. It is derived from the layers and not stored."""

    IDLE = "idle"  # nothing waits, nothing is being flushed
    ACCUMULATING = "accumulating"  # writes wait for a flush
    FLUSHING = "flushing"  # a batch is being made durable; writes gather for the next
    FAILED = "failed"  # a flush or an apply failed: writes are refused until recover()

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call on every flush


class Trigger(Enum):
    """Why a flush began."""

    EXPLICIT = "explicit"
    TIMER = "timer"
    SIZE = "size"
    RECOVERY = "recovery"

    __hash__ = object.__hash__


def choose_trigger(*, requested: bool, timer_due: bool, size_due: bool) -> Trigger | None:
    """Return why to flush: a request first, then the timer, then the size; None if none is due."""
    if requested:
        return Trigger.EXPLICIT
    if timer_due:
        return Trigger.TIMER
    if size_due:
        return Trigger.SIZE
    return None


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings:
    """Limits and times of a coordinator."""

    flush_interval_s: float = 0.1  # from the first write into an empty delta: bounds what a crash can lose
    flush_bytes: int = 4 << 20  # a pending delta of this size is flushed at once
    bytes_max: int = 64 << 20  # pending or not yet in the view; further writes wait
    bytes_max_remedy: str = "split it"  # for the message about a larger write
    waiting_writes_max: int = 1_000  # writes that wait for room; further ones are refused at once
    shutdown_timeout_s: float = 30.0  # the default: used at the end of `with` and at interpreter exit

    def __post_init__(self) -> None:
        if not 0 < self.flush_interval_s < math.inf:
            raise Invalid(f"flush_interval_s is {self.flush_interval_s}: give more than 0")
        if not 1 <= self.flush_bytes <= self.bytes_max:
            raise Invalid(f"flush_bytes {self.flush_bytes}, bytes_max {self.bytes_max}: give 1 <= flush <= max")
        if self.waiting_writes_max < 0:
            raise Invalid(f"waiting_writes_max is {self.waiting_writes_max}: give 0 or more")
        if not 0 <= self.shutdown_timeout_s < math.inf:
            raise Invalid(f"shutdown_timeout_s is {self.shutdown_timeout_s}: give 0 or more")


@dataclass(frozen=True, kw_only=True)
class CoordinatorStatistics:
    """Statistics of a coordinator at one moment."""

    state: State
    error: str | None  # why it is FAILED
    last: Epoch
    durable: Epoch
    applied: Epoch
    writes: int
    written_bytes: int
    pending_bytes: int  # not yet in a flush
    in_flight_bytes: int  # in a flush, or durable and not yet applied
    layers: int  # deltas that readers check beside the pending one
    waiters: int  # threads that wait for durable or applied
    waiting_writes: int  # threads that wait for room
    refused_writes: int
    waited_writes: int  # that found no room at once
    flushes: Mapping[Trigger, int]  # that succeeded
    flush_failures: int
    apply_failures: int
    flush_s_total: float
    flush_s_last: float
