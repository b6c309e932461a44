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

from penstock.errors import Invalid
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.scheduler import plan
from penstock.scheduler.board import Board, Limits, TaskRun
from penstock.scheduler.task import BackgroundTask, SchedulerStatistics, TaskContext

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,126}")


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """How much a scheduler does at once, and how patient it is."""

    workers: int = 4
    spawned_waiting_max: int = 1_000
    retry_s_min: float = 1.0
    retry_s_max: float = 60.0
    shutdown_timeout_s: float = 30.0  # when no other is given: at the end of `with`, at the interpreter's exit

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 1_000:
            raise Invalid(f"workers is {self.workers}: give 1 to 1,000")
        if self.spawned_waiting_max < 1:
            raise Invalid(f"spawned_waiting_max is {self.spawned_waiting_max}: give 1 or more")
        if not 0 < self.retry_s_min <= self.retry_s_max < math.inf:
            raise Invalid(f"retries wait {self.retry_s_min} to {self.retry_s_max} s: give 0 < min <= max")
        if not 0 <= self.shutdown_timeout_s < math.inf:
            raise Invalid(f"shutdown_timeout_s is {self.shutdown_timeout_s}: give 0 or more")


@dataclass(frozen=True, kw_only=True)
class ShutdownReport:
    """How a shutdown went."""

    running: tuple[str, ...]  # did not end in time; their threads go on until they do
    dropped: int  # spawned functions that never ran

    @property
    def clean(self) -> bool:
        return not self.running and not self.dropped


class Scheduler:
    """Runs registered tasks by their timers and by events, and spawned functions once."""

    def __init__(self, *, clock: Clock | None = None, settings: SchedulerSettings | None = None) -> None:
        self._settings = settings or SchedulerSettings()
        self._board = Board(
            clock or SystemClock(),
            Limits(
                spawned_waiting_max=self._settings.spawned_waiting_max,
                retry_s_min=self._settings.retry_s_min,
                retry_s_max=self._settings.retry_s_max,
            ),
        )
        self._lock = threads.lock("scheduler.workers")
        self._workers: list[threading.Thread] = []  # guarded by _lock
        self._forget_exit: Callable[[], None] | None = None  # guarded by _lock

    def start(self) -> Scheduler:
        """Start the workers; calling it again does nothing. Without it only `run_pending` runs anything."""
        with self._lock:
            if not self._workers and not self._board.stop.is_set():
                board = self._board
                for number in range(1, self._settings.workers + 1):
                    worker = threads.spawn(lambda: _work(board), name=f"penstock-scheduler-{number}")
                    self._workers.append(worker)
                self._forget_exit = threads.at_exit(self, Scheduler.shutdown)
        return self

    def register(self, task: BackgroundTask) -> Scheduler:
        """Repeat a task, beginning now. Returns itself, so that calls can be chained."""
        if not _NAME.fullmatch(task.name):
            raise Invalid(f"a task is named {task.name!r}: give lower-case letters, digits, '-', '_' or '.'")
        if not 0 < task.interval_s < math.inf:
            raise Invalid(f"task {task.name} has an interval of {task.interval_s} s: give more than 0")
        self._board.add(task)
        return self

    def spawn(self, function: Callable[[], object], *, name: str = "spawned") -> None:
        """Run a function once, soon. `Backpressure` if too many wait; an error is reported, not tried again."""
        self._board.push(name, function)

    def trigger(self, name: str) -> None:
        """Run a task now, by hand: also while it waits to be tried again; once more if it is running."""
        self._board.trigger(name)

    def wake(self, name: str) -> None:
        """Tell a task that there is something to do: it runs now, after its pause if it failed. For event sources."""
        self._board.wake(name)

    def run_pending(self) -> list[str]:
        """Run on this thread what is ready now, until nothing is; the names in the order they ran. For tests."""
        names = []
        while (run := self._board.claim(wait=False)) is not None:
            _execute(self._board, run)
            names.append(run.name)
        return names

    def statistics(self) -> SchedulerStatistics:
        return self._board.statistics(self._settings.workers)

    def shutdown(self, timeout_s: float | None = None) -> ShutdownReport:
        """Signal tasks to end, run what was spawned, wait for both at most `timeout_s`; harmless to call again."""
        timeout_s = self._settings.shutdown_timeout_s if timeout_s is None else timeout_s
        with self._lock:
            workers, forget = self._workers, self._forget_exit
            self._forget_exit = None
        if threading.current_thread() in workers:
            raise Invalid("a task called shutdown of its own scheduler: it would wait for itself; use another thread")
        if forget is not None:
            forget()
        self._board.close()
        drained = bool(workers) and self._board.drained(timeout_s)
        running, dropped = self._board.abandon()
        if drained:
            for worker in workers:
                worker.join(1.0)  # nothing is left for it to do: it is on its last line
        report = ShutdownReport(running=running, dropped=dropped)
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
        # The collector may run this in any thread, at any line: take no lock and wait for nothing.
        board: Board | None = getattr(self, "_board", None)
        if board is not None:
            board.abandoned = True


def _work(board: Board) -> None:
    """The life of a worker."""
    while (run := board.claim(wait=True)) is not None:
        _execute(board, run)


def _execute(board: Board, run: TaskRun) -> None:
    """Run and report; nothing a task raises goes further."""
    interval_s = run.interval_s
    error: str | None = None
    try:
        outcome = run.execute(TaskContext(task_name=run.name, run_id=run.run_id, shutdown=board.stop))
        if run.periodic:
            interval_s = plan.next_interval_s(run.base_s, run.interval_s, outcome)
    except BaseException as failure:  # SystemExit too: a task must not end a worker
        error = f"{type(failure).__name__}: {failure}"
        what = "will be tried again" if run.periodic else "will not be tried again"
        _log.error("%s failed in run %d (%s) and %s", run.name, run.run_id, error, what, exc_info=True)
    board.finish(run, interval_s=interval_s, error=error)
