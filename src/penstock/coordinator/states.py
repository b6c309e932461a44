"""The coordinator's states, and which trigger of a flush comes first.

Thread: any; nothing here changes.
"""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """What the coordinator is doing with writes. It follows from the layers: nothing else remembers it."""

    IDLE = "idle"  # nothing waits, nothing is being flushed
    ACCUMULATING = "accumulating"  # writes wait for a flush
    FLUSHING = "flushing"  # a batch is being made durable; writes gather for the next
    FAILED = "failed"  # a flush or an apply failed: writes are refused until recover()

    __hash__ = object.__hash__  # members are single objects; the enum's own hash is a Python call on every flush


class Trigger(Enum):
    """Why a flush began."""

    EXPLICIT = "explicit"
    TIMER = "timer"
    SIZE = "size"
    RECOVERY = "recovery"

    __hash__ = object.__hash__


def choose_trigger(*, asked: bool, timer_due: bool, size_due: bool) -> Trigger | None:
    """Commands come before the timer, the timer before the size."""
    if asked:
        return Trigger.EXPLICIT
    if timer_due:
        return Trigger.TIMER
    if size_due:
        return Trigger.SIZE
    return None
