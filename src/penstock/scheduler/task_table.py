"""The tasks and spawned functions of a scheduler, as its workers see them.

Thread: any; everything mutable is guarded by one condition, which is never held while a task runs. Workers refer to the
table and not to the scheduler, so that an unused scheduler is garbage-collected and its workers end.
Invariants: (1) a task is in at most one run at a time. (2) a wake-up during a run leads to another run after it.
(3) once closed, no periodic run begins; accepted spawned functions still run until `discard`.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.errors import Backpressure, Closed, Invalid, NotFound
from penstock.host.clock import Clock
from penstock.host.threads import condition
from penstock.scheduler import plan
from penstock.scheduler.task import BackgroundTask, Outcome, SchedulerStatistics, TaskContext, TaskStatistics

_WAIT_S_MAX = 5.0  # a worker checks at least this often whether its scheduler still exists


@dataclass(frozen=True, kw_only=True)
class TaskLimits:
    """Limits of a table."""

    spawned_waiting_max: int
    retry_s_min: float
    retry_s_max: float


@dataclass(frozen=True)
class TaskRun:
    """A run claimed by a worker."""

    name: str
    run_id: int
    periodic: bool
    execute: Callable[[TaskContext], Outcome]
    base_s: float
    interval_s: float
    started_s: float


@dataclass(frozen=True)
class _Spawned:
    name: str
    function: Callable[[], object]
    queued_s: float


class _TaskEntry:
    """A registered task. All fields are guarded by the table's condition."""

    def __init__(self, task: BackgroundTask, now_s: float) -> None:
        self.task = task
        self.name = task.name
        self.base_s = task.interval_s
        self.priority = task.priority
        self.runs_after = frozenset(task.runs_after)
        self.interval_s = self.base_s
        self.due_s = now_s  # the first run is immediate
        self.last_start_s = -math.inf
        self.started = 0
        self.runs = 0
        self.failures = 0
        self.failures_in_row = 0
        self.last_error: str | None = None
        self.last_duration_s: float | None = None
        self.total_duration_s = 0.0
        self.running = False
        self.wake_requested = False  # during a run
        self.trigger_requested = False  # during a run

    def state(self) -> plan.TaskState:
        return plan.TaskState(
            name=self.name,
            priority=self.priority,
            due_s=self.due_s,
            runs_after=self.runs_after,
            running=self.running,
            last_start_s=self.last_start_s,
        )

    def statistics(self) -> TaskStatistics:
        return TaskStatistics(
            name=self.name,
            runs=self.runs,
            failures=self.failures,
            failures_in_row=self.failures_in_row,
            last_error=self.last_error,
            last_duration_s=self.last_duration_s,
            total_duration_s=self.total_duration_s,
            interval_s=self.interval_s,
            next_due_s=self.due_s,
            running=self.running,
        )


class TaskTable:
    """Registered tasks, waiting functions and current runs."""

    def __init__(self, clock: Clock, limits: TaskLimits) -> None:
        self.stop = threading.Event()
        self.begun = threading.Event()
        self.discarded = False  # set without the lock by a scheduler that is collected: see `Scheduler.__del__`
        self._clock = clock
        self._limits = limits
        self._changed = condition("scheduler.board")
        self._entries: dict[str, _TaskEntry] = {}  # guarded by _changed
        self._spawned: deque[_Spawned] = deque()  # guarded by _changed
        self._running: list[TaskRun] = []  # guarded by _changed
        self._spawned_started = 0  # guarded by _changed
        self._spawned_runs = 0  # guarded by _changed
        self._spawned_failures = 0  # guarded by _changed

    def add(self, task: BackgroundTask) -> None:
        with self._changed:
            self._check_open()
            if task.name in self._entries:
                raise Invalid(f"a task named {task.name} is registered already: give each task its own name")
            entry = _TaskEntry(task, self._clock.monotonic_s())
            orders = {other.name: other.runs_after for other in self._entries.values()}
            plan.check_order({**orders, entry.name: entry.runs_after})
            self._entries[entry.name] = entry
            self._changed.notify_all()

    def push(self, name: str, function: Callable[[], object]) -> None:
        with self._changed:
            self._check_open()
            if len(self._spawned) >= self._limits.spawned_waiting_max:
                raise Backpressure(f"{len(self._spawned)} spawned functions wait for a worker (the limit): retry later")
            self._spawned.append(_Spawned(name, function, self._clock.monotonic_s()))
            self._changed.notify()

    @contextmanager
    def pause_starts(self) -> Iterator[None]:
        """Let no run begin during a block."""
        with self._changed:
            yield

    def set_interval(self, name: str, interval_s: float) -> None:
        """Change the interval of a task."""
        with self._changed:
            entry = self._entry(name)
            entry.base_s = entry.interval_s = interval_s
            self._changed.notify_all()

    def trigger(self, name: str) -> None:
        """Make a task due now, even while it waits for a retry."""
        with self._changed:
            self._check_open()
            entry = self._entry(name)
            if entry.running:
                entry.trigger_requested = True
            else:
                entry.due_s = min(entry.due_s, self._clock.monotonic_s())
                self._changed.notify()

    def wake(self, name: str) -> None:
        """Make a task due now, unless it waits for a retry. Does nothing once closed."""
        with self._changed:
            entry = self._entry(name)
            if entry.running:
                entry.wake_requested = True
            elif not entry.failures_in_row:
                entry.due_s = min(entry.due_s, self._clock.monotonic_s())
                self._changed.notify()

    def claim(self, *, wait: bool) -> TaskRun | None:
        """Return the next run, which the caller must finish; None if none is ready (with `wait`: at the end)."""
        with self._changed:
            while True:
                if self.discarded:
                    return None
                now_s = self._clock.monotonic_s()
                states = self._states(now_s)
                names = plan.ready(states, now_s)
                if names:
                    return self._begin(names[0], now_s)
                if not wait or self.stop.is_set():
                    return None
                self._changed.wait(min(plan.wait_s(states, now_s), _WAIT_S_MAX))

    def finish(self, run: TaskRun, *, interval_s: float, error: str | None) -> bool:
        """Record the end of a claimed run. With `error` it failed, and `interval_s` is ignored.

        Return whether the error is to be logged: not if a task failed with it last, and has not succeeded since.
        """
        with self._changed:
            repeated = any(entry.failures_in_row and entry.last_error == error for entry in self._entries.values())
            self._running.remove(run)
            now_s = self._clock.monotonic_s()
            if run.periodic:
                self._finish(self._entries[run.name], run, now_s, interval_s, error)
            else:
                self._spawned_runs += 1
                self._spawned_failures += error is not None
            self._changed.notify_all()
            return error is not None and not repeated

    def _finish(self, entry: _TaskEntry, run: TaskRun, now_s: float, interval_s: float, error: str | None) -> None:
        entry.running = False
        entry.last_start_s = run.started_s
        entry.runs += 1
        entry.last_duration_s = now_s - run.started_s
        entry.total_duration_s += entry.last_duration_s
        if error is None:
            entry.failures_in_row = 0
            entry.interval_s = interval_s
            again = entry.wake_requested or entry.trigger_requested
            entry.due_s = now_s if again else now_s + interval_s
        else:
            entry.failures += 1
            entry.failures_in_row += 1
            entry.last_error = error
            pause_s = plan.retry_s(entry.failures_in_row, self._limits.retry_s_min, self._limits.retry_s_max)
            entry.due_s = now_s if entry.trigger_requested else now_s + pause_s
        entry.wake_requested = entry.trigger_requested = False

    def close(self) -> None:
        """Start no more periodic runs; workers end when the spawned functions are done."""
        with self._changed:
            self.stop.set()
            self.begun.set()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs or waits; False after `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running and not self._spawned, timeout_s)

    def discard(self) -> tuple[tuple[str, ...], int]:
        """Drop waiting functions; return the names of current runs and the number dropped."""
        with self._changed:
            self.discarded = True
            dropped = len(self._spawned)
            self._spawned.clear()
            self._changed.notify_all()
            return tuple(run.name for run in self._running), dropped

    def statistics(self, workers: int) -> SchedulerStatistics:
        with self._changed:
            return SchedulerStatistics(
                tasks={entry.name: entry.statistics() for entry in self._entries.values()},
                workers=workers,
                workers_busy=len(self._running),
                spawned_waiting=len(self._spawned),
                spawned_runs=self._spawned_runs,
                spawned_failures=self._spawned_failures,
            )

    def _states(self, now_s: float) -> list[plan.TaskState]:
        states: list[plan.TaskState] = []
        if not self.stop.is_set():
            states = [entry.state() for entry in self._entries.values()]
        if self._spawned:  # the oldest stands for all: they have one priority
            states.append(plan.TaskState(name="", priority=0, due_s=min(self._spawned[0].queued_s, now_s)))
        return states

    def _begin(self, name: str, now_s: float) -> TaskRun:
        if name:
            entry = self._entries[name]
            entry.running = True
            entry.started += 1
            run = TaskRun(name, entry.started, True, entry.task.execute, entry.base_s, entry.interval_s, now_s)
        else:
            spawned = self._spawned.popleft()
            self._spawned_started += 1

            def execute(_: TaskContext) -> None:
                spawned.function()

            run = TaskRun(spawned.name, self._spawned_started, False, execute, 0.0, 0.0, now_s)
        self._running.append(run)
        return run

    def _entry(self, name: str) -> _TaskEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise NotFound(f"no task named {name}: registered are {', '.join(sorted(self._entries)) or 'none'}")
        return entry

    def _check_open(self) -> None:
        if self.stop.is_set():
            raise Closed("the scheduler was shut down: make a new one")
