"""The scheduler: a few worker threads that run what is due.

Thread: every method may be called from any thread. Tasks run on the scheduler's workers (or, through `run_pending`, on
the caller's thread), with no lock held.
Invariants: (1) an error of a task is logged, counted and ends only that run. (2) at most `workers` runs at a time.
(3) `shutdown` returns within its time, whatever the tasks do; it also runs when the interpreter exits.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from penstock.arguments import COUNT_MAX, DAY_S, set_seconds, set_wholes
from penstock.errors import Closed, Invalid, PenstockError
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.scheduler import plan
from penstock.scheduler.task import BackgroundTask, SchedulerStatistics, TaskContext
from penstock.scheduler.task_table import TaskLimits, TaskRun, TaskTable

_log = logging.getLogger(__name__)

_BEGIN_S = 1.0  # `begin` is never waited for longer
_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,126}")


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """Limits and time-outs of the background.

    >>> penstock.StoreSettings(scheduler=penstock.SchedulerSettings(workers=2)).scheduler.workers
    2
    """

    workers: int = 4
    spawned_waiting_max: int = 1_000
    retry_s_min: float = 1.0
    retry_s_max: float = 60.0
    shutdown_timeout_s: float = 30.0  # default of `shutdown`: at the end of `with`, at the interpreter's exit

    def __post_init__(self) -> None:
        set_wholes(self, ["workers"], 1, 1_000)
        set_wholes(self, ["spawned_waiting_max"], 1, COUNT_MAX)
        set_seconds(self, ("retry_s_min", "retry_s_max"), DAY_S, above_zero=True)
        set_seconds(self, ["shutdown_timeout_s"], DAY_S)
        if self.retry_s_min > self.retry_s_max:
            raise Invalid("retry_s_min must be at most retry_s_max")


@dataclass(frozen=True, kw_only=True)
class ShutdownReport:
    """The result of a shutdown."""

    running: tuple[str, ...]  # did not end in time; their threads go on until they do
    dropped: int  # spawned functions that never ran

    @property
    def clean(self) -> bool:
        return not self.running and not self.dropped


class Scheduler:
    """Runs registered tasks by timers and events, and spawned functions once."""

    def __init__(self, *, clock: Clock | None = None, settings: SchedulerSettings | None = None) -> None:
        self._settings = settings or SchedulerSettings()
        self._table = TaskTable(
            clock or SystemClock(),
            TaskLimits(
                spawned_waiting_max=self._settings.spawned_waiting_max,
                retry_s_min=self._settings.retry_s_min,
                retry_s_max=self._settings.retry_s_max,
            ),
        )
        self._lock = threads.lock("scheduler.workers")
        self._workers: list[threading.Thread] = []  # guarded by _lock
        self._forget_exit: Callable[[], None] | None = None  # guarded by _lock

    def start(self, *, begins: bool = True) -> Scheduler:
        """Start the workers, once. Without them only `run_pending` runs anything.

        With `begins=False` they run nothing before `begin`, and leave the interpreter to the caller meanwhile.
        """
        if begins:
            self.begin()
        with self._lock:
            if not self._workers and not self._table.stop.is_set():
                table = self._table
                with table.pause_starts():  # else the first workers compete with the start of the others
                    for number in range(1, self._settings.workers + 1):
                        worker = threads.spawn(lambda: _work(table), name=f"penstock-scheduler-{number}")
                        self._workers.append(worker)
                self._forget_exit = threads.at_exit(self, Scheduler.shutdown)
        return self

    def begin(self) -> None:
        """Let the workers run what is due."""
        self._table.begun.set()

    def register(self, task: BackgroundTask) -> Scheduler:
        """Repeat a task, beginning now. Returns the scheduler, so that calls can be chained."""
        if not _NAME.fullmatch(task.name):
            raise Invalid(f"a task is named {task.name!r}: give lower-case letters, digits, '-', '_' or '.'")
        if not 0 < task.interval_s < math.inf:
            raise Invalid(f"task {task.name} has an interval of {task.interval_s} s: give more than 0")
        self._table.add(task)
        return self

    def set_interval(self, name: str, interval_s: float) -> None:
        """Change the interval of a task; `NotFound` if there is none."""
        if not 0 < interval_s < math.inf:
            raise Invalid(f"task {name} has an interval of {interval_s} s: give more than 0")
        self._table.set_interval(name, interval_s)

    def spawn(self, function: Callable[[], object], *, name: str = "spawned") -> None:
        """Run a function once, soon. `Backpressure` if too many wait; an error is logged, not retried."""
        self._table.push(name, function)

    def trigger(self, name: str) -> None:
        """Run a task now, even while it waits for a retry; once more if it is running."""
        self._table.trigger(name)

    def wake(self, name: str) -> None:
        """Run a task now because of an event; a failing task waits for its retry first."""
        self._table.wake(name)

    def run_pending(self) -> list[str]:
        """Run on this thread whatever is ready, until nothing is; return the names in order. For tests."""
        names = []
        while (run := self._table.claim(wait=False)) is not None:
            _execute(self._table, run)
            names.append(run.name)
        return names

    def statistics(self) -> SchedulerStatistics:
        return self._table.statistics(self._settings.workers)

    def stop_tasks(self) -> None:
        """Begin no more runs of tasks, without waiting for those that run; a task may call this."""
        self._table.close()

    def shutdown(self, timeout_s: float | None = None) -> ShutdownReport:
        """Ask tasks to end, run spawned functions, and wait for both at most `timeout_s`. May be called again."""
        timeout_s = self._settings.shutdown_timeout_s if timeout_s is None else timeout_s
        with self._lock:
            workers, forget = self._workers, self._forget_exit
            self._forget_exit = None
        if threading.current_thread() in workers:
            raise Invalid("a task called shutdown of its own scheduler: it would wait for itself, use another thread")
        if forget is not None:
            forget()
        self._table.close()
        drained = bool(workers) and self._table.wait_idle(timeout_s)
        running, dropped = self._table.discard()
        if drained:
            for worker in workers:
                worker.join(1.0)  # it has nothing left to do
        report = ShutdownReport(running=running, dropped=dropped)
        if workers:
            _log.info("Scheduler shut down: still running=%s spawned functions dropped=%d", list(running), dropped)
        if not report.clean:
            _log.warning("shut down with %s still running and %d functions not run", running or "none", dropped)
        return report

    def __enter__(self) -> Scheduler:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        # The garbage collector may run this in any thread, at any line: take no lock and wait for nothing.
        table: TaskTable | None = getattr(self, "_table", None)
        if table is not None:
            table.discarded = True


def _work(table: TaskTable) -> None:
    """Run what is due: the body of a worker thread."""
    table.begun.wait(_BEGIN_S)
    while (run := table.claim(wait=True)) is not None:
        _execute(table, run)


def _execute(table: TaskTable, run: TaskRun) -> None:
    """Run a claimed run and record its end; no error of a task leaves this function."""
    interval_s = run.interval_s
    error: str | None = None
    failure: BaseException | None = None
    try:
        outcome = run.execute(TaskContext(task_name=run.name, run_id=run.run_id, shutdown=table.stop))
        if run.periodic:
            interval_s = plan.next_interval_s(run.base_s, run.interval_s, outcome)
    except BaseException as caught:  # SystemExit too: a task must not end a worker
        failure, error = caught, f"{type(caught).__name__}: {caught}"
    is_new = table.finish(run, interval_s=interval_s, error=error)
    if isinstance(failure, Closed) and is_new:
        _log.error("%s", failure)
    elif failure is not None and is_new:
        retry = "is retried" if run.periodic else "is not retried"
        trace = None if isinstance(failure, PenstockError) else failure  # of a bug: a typed error says all in its line
        _log.error("%s failed in run %d (%s) and %s", run.name, run.run_id, error, retry, exc_info=trace)
