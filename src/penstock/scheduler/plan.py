"""Which task runs next, and when: pure functions over the state of the tasks.

Order: higher priority first, then the task that has been due longer. A waiting task gains one priority per `AGEING_S`,
so that a busy task of high priority cannot starve the others.

Runs-after: a task that is due waits while a task that it runs after is due or running, but only until one run of that
task, begun since it became due, has ended. Without this bound a task that is always due would stop its followers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from penstock.errors import Invalid
from penstock.scheduler.task import Outcome, TaskLoad

AGEING_S = 30.0

_SHORTEST = 1 / 16  # of a task's own interval
_LONGEST = 4.0


@dataclass(frozen=True, kw_only=True)
class TaskState:
    """The state of a task that determines its order."""

    name: str
    priority: int
    due_s: float
    runs_after: Collection[str] = ()
    running: bool = False
    last_start_s: float = -math.inf  # when the latest run that has ended began


def ready(states: Iterable[TaskState], now_s: float) -> list[str]:
    """Return the names of the tasks that may start now, in order."""
    by_name = {state.name: state for state in states}
    free = [state for state in by_name.values() if _due(state, now_s) and not _blocked(state, by_name, now_s)]
    free.sort(key=lambda state: (-_rank(state, now_s), state.due_s, state.name))
    return [state.name for state in free]


def wait_s(states: Iterable[TaskState], now_s: float) -> float:
    """Return the seconds until the next task becomes due; infinity if none will."""
    return min((state.due_s - now_s for state in states if not state.running and state.due_s > now_s), default=math.inf)


def check_order(runs_after: Mapping[str, Collection[str]]) -> None:
    """Raise `Invalid` if the runs-after relation has a cycle."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            cycle = " after ".join([*path[path.index(name) :], name])
            raise Invalid(f"tasks depend on each other ({cycle}): remove one of these dependencies")
        if name in done:
            return
        for earlier in runs_after.get(name, ()):
            visit(earlier, [*path, name])
        done.add(name)

    for name in runs_after:
        visit(name, [])


def next_interval_s(base_s: float, current_s: float, outcome: Outcome) -> float:
    """Return the interval after a run: halved under load, 1.5 times as long when idle, from 1/16 to 4 times the base.

    A task that returns seconds may run again at once, and waits at most 4 times the base.
    """
    if outcome is None:
        return base_s
    if outcome is TaskLoad.BUSY:
        # From a long interval straight to half the base: returning load must not wait for it to shrink.
        return max(base_s * _SHORTEST, min(current_s, base_s) / 2)
    if outcome is TaskLoad.IDLE:
        return min(base_s * _LONGEST, max(current_s, base_s * _SHORTEST) * 1.5)
    try:
        seconds = float(outcome)
    except (TypeError, ValueError):
        seconds = math.nan
    if not seconds >= 0:
        raise Invalid(f"a task returned {outcome!r}: return a Load, seconds from 0 up, or None")
    return min(seconds, base_s * _LONGEST)


def retry_s(failures_in_row: int, shortest_s: float, longest_s: float) -> float:
    """Return the pause of a failing task: doubled after each failure, within bounds."""
    return min(longest_s, shortest_s * 2.0 ** min(failures_in_row - 1, 60))


def _due(state: TaskState, now_s: float) -> bool:
    return not state.running and state.due_s <= now_s


def _blocked(state: TaskState, by_name: Mapping[str, TaskState], now_s: float) -> bool:
    for name in state.runs_after:
        earlier = by_name.get(name)
        if earlier is None or earlier.last_start_s >= state.due_s:
            continue
        if earlier.running or _due(earlier, now_s):
            return True
    return False


def _rank(state: TaskState, now_s: float) -> float:
    return state.priority + (now_s - state.due_s) // AGEING_S
