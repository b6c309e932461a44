"""What a background task is, and what is known about one.

Thread: `execute` is called by a worker of the scheduler, never twice at the same time for one task. The other members
are read once, at registration.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias


class StopSignal(Protocol):
    """Tells long work that it should end soon; a `threading.Event` is one."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep, but not past the signal; True if it was given."""


class TaskLoad(enum.Enum):
    """What a run found, from which the next interval follows."""

    IDLE = "idle"
    BUSY = "busy"


Outcome: TypeAlias = TaskLoad | float | None
"""When to run next: sooner or later by the load, in so many seconds, or (None) after the task's own interval."""


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """What a run is told about itself."""

    task_name: str
    run_id: int  # from 1, per task and scheduler
    shutdown: StopSignal


class BackgroundTask(Protocol):
    """Work that the scheduler repeats."""

    @property
    def name(self) -> str: ...

    @property
    def interval_s(self) -> float:
        """Seconds from the end of one run to the start of the next."""

    @property
    def priority(self) -> int:
        """The higher one goes first when more tasks are due than workers are free."""

    @property
    def runs_after(self) -> Collection[str]:
        """Tasks that go first when both are due; names that are not registered are waited for by nobody."""

    def execute(self, context: TaskContext) -> Outcome:
        """Run once. An error is reported and tried again later; long runs look at `context.shutdown`."""


@dataclass(frozen=True, kw_only=True)
class TaskStatistics:
    """One task since it was registered."""

    name: str
    runs: int  # finished, failed ones included
    failures: int
    failures_in_row: int
    last_error: str | None  # of the last run that failed
    last_duration_s: float | None
    total_duration_s: float
    interval_s: float  # as adapted to the load
    next_due_s: float  # on the clock's monotonic hand
    running: bool


@dataclass(frozen=True, kw_only=True)
class SchedulerStatistics:
    """A scheduler since it was made."""

    tasks: dict[str, TaskStatistics]
    workers: int
    workers_busy: int
    spawned_waiting: int
    spawned_runs: int
    spawned_failures: int
