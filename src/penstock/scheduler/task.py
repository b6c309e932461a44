"""Background tasks: their protocol and their statistics.

Thread: `execute` is called by a worker of the scheduler, never twice at the same time for one task. The other members
are read once, at registration.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias


class StopSignal(Protocol):
    """Asks long work to end soon; a `threading.Event` is one."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until the signal is set or `timeout` has passed; return whether it is set."""


class TaskLoad(enum.Enum):
    """How much a run had to do, which determines the next interval."""

    IDLE = "idle"
    BUSY = "busy"


Outcome: TypeAlias = TaskLoad | float | None
"""When to run next: sooner or later by the load, after a number of seconds, or (None) after the task's interval."""


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """The arguments of one run."""

    task_name: str
    run_id: int  # from 1, per task and scheduler
    shutdown: StopSignal


class BackgroundTask(Protocol):
    """Work that a scheduler repeats."""

    @property
    def name(self) -> str: ...

    @property
    def interval_s(self) -> float:
        """Seconds from the end of one run to the start of the next."""

    @property
    def priority(self) -> int:
        """Tasks of higher priority go first when more are due than workers are free."""

    @property
    def runs_after(self) -> Collection[str]:
        """Names of tasks that go first when both are due; unknown names are ignored."""

    def execute(self, context: TaskContext) -> Outcome:
        """Run once. An error is reported and the task retried later; long runs check `context.shutdown`."""


@dataclass(frozen=True)
class PeriodicTask:
    """A background task that calls a function."""

    name: str
    interval_s: float
    work: Callable[[], Outcome]
    priority: int = 0
    runs_after: Collection[str] = ()

    def execute(self, context: TaskContext) -> Outcome:
        return self.work()


@dataclass(frozen=True, kw_only=True)
class TaskStatistics:
    """Counters of a task since it was registered."""

    name: str
    runs: int  # finished, failed ones included
    failures: int
    failures_in_row: int
    last_error: str | None  # of the last failed run
    last_duration_s: float | None
    total_duration_s: float
    interval_s: float  # as adapted to the load
    next_due_s: float  # by the monotonic clock
    running: bool


@dataclass(frozen=True, kw_only=True)
class SchedulerStatistics:
    """Counters of a scheduler since it was created."""

    tasks: dict[str, TaskStatistics]
    workers: int
    workers_busy: int
    spawned_waiting: int
    spawned_runs: int
    spawned_failures: int
