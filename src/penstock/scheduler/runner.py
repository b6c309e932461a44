"""The job runner: leases durable jobs, renews the leases, and records how the jobs ended.

`run_job` is the one way in which a job is run, by a thread of the scheduler or by a caller's own. A job's handler runs
in the owner of the store: it decides what to do, gives the heavy part to an engine (`Engine.submit`, `Handle.wait`) and
publishes the result.

Thread: a `JobRunner` is a task of a scheduler and handles one job at a time; register several for more. While a job
runs, a thread of its own renews the lease.
Invariants: (1) a job whose lease was lost is neither completed nor failed by this runner. (2) a lease is renewed until
its handler has returned, and not after.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Collection, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import Closed, FixTheCall, Invalid, LeaseLost, PenstockError, Restore
from penstock.host import threads
from penstock.host.waiting import repeating
from penstock.manifest.jobs import Lease
from penstock.scheduler.task import Outcome, StopSignal, TaskContext, TaskLoad
from penstock.scheduler.work import WorkCancelled, WorkFailed

_log = logging.getLogger(__name__)

_POLL_S = 0.05  # between two checks of the signals of a job


class JobSource(Protocol):
    """Where jobs come from: `penstock.manifest.jobs.JobQueue`, or a test's. All but `acquire` may raise `LeaseLost`."""

    def acquire(self, worker_id: str, kinds: Container[int] | None = None) -> Lease | None:
        """Lease a job of these kinds that may run now, if there is one; a repair is of the kind it repairs."""

    def renew(self, lease: Lease) -> None:
        """Begin the lease's time anew."""

    def complete(self, lease: Lease) -> object:
        """Record that the job is done."""

    def fail(self, lease: Lease, error: BaseException, *, retry: bool = True) -> None:
        """Record that the attempt failed; with `retry` another may follow, after a pause and if any are left."""

    def expire_leases(self) -> object:
        """Give up jobs whose workers vanished, and queue their repairs."""


class JobResult(enum.Enum):
    """What a handler leaves to do."""

    DONE = "the runner completes the job"
    COMMITTED = "the handler completed it, in the transaction that published its result"


JobHandler = Callable[[Lease, StopSignal], JobResult]
"""Runs one job. It may be called again for the same job, and (`lease.job.kind` is REPAIR) after one that vanished."""


class JobSignal:
    """The stop signal of a job: the scheduler shuts down, or the lease is lost."""

    def __init__(self, shutdown: StopSignal) -> None:
        self.lost = threading.Event()
        self._shutdown = shutdown

    def is_set(self) -> bool:
        return self.lost.is_set() or self._shutdown.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        rest_s = float("inf") if timeout is None else timeout
        while not self.is_set() and rest_s > 0:
            self.lost.wait(min(_POLL_S, rest_s))
            rest_s -= _POLL_S
        return self.is_set()


def run_job(source: JobSource, lease: Lease, handler: JobHandler, stop: StopSignal, *, renew_every_s: float) -> None:
    """Run a leased job in this thread and record how it ended; raises what its handler raised.

    `LeaseLost` if the lease ended while it ran: then nothing is recorded, because the job is another worker's.
    """
    signal, job_id = JobSignal(stop), lease.job.job_id

    def renew() -> bool:
        try:
            source.renew(lease)
        except LeaseLost:
            signal.lost.set()
            return False
        except Exception:
            # The lease has most of its time left; if this goes on, it ends, and the source says so.
            _log.warning("the lease of job %d was not renewed and is tried again", job_id, exc_info=True)
        return True

    with repeating(renew, every_s=renew_every_s, name=f"penstock-lease-{job_id}"):
        try:
            result = handler(lease, signal)
            if result is JobResult.DONE:
                if signal.lost.is_set():
                    raise LeaseLost("its lease ended while it ran")
                source.complete(lease)
        except LeaseLost:
            raise
        except BaseException as error:
            if signal.lost.is_set():
                raise LeaseLost(f"its lease ended while it ran ({error})") from error
            with suppress(LeaseLost):
                source.fail(lease, error, retry=not _is_permanent(error))
            raise


def _is_permanent(error: BaseException) -> bool:
    """Whether another attempt would fail in the same way."""
    return isinstance(error, FixTheCall | Restore) or (isinstance(error, WorkFailed) and error.permanent)


@dataclass(frozen=True, kw_only=True)
class JobRunnerStatistics:
    """Counters of a runner since it was created."""

    completed: int
    failed: int
    lost: int  # leases that ended before their jobs


@dataclass(frozen=True, kw_only=True)
class JobRunnerSettings:
    """When a runner looks for jobs and how it keeps them."""

    interval_s: float = 1.0
    priority: int = 0
    renew_every_s: float = 10.0  # well under the time of a lease

    def __post_init__(self) -> None:
        if not self.interval_s > 0 or not self.renew_every_s > 0:
            raise Invalid("interval_s and renew_every_s must be more than 0")


class JobRunner:
    """A background task that runs jobs of some kinds."""

    runs_after: Collection[str] = ()

    def __init__(
        self,
        name: str,
        source: JobSource,
        handlers: Mapping[int, JobHandler],
        *,
        settings: JobRunnerSettings | None = None,
    ) -> None:
        self.name = name
        self._settings = settings or JobRunnerSettings()
        self.interval_s = self._settings.interval_s
        self.priority = self._settings.priority
        self._source = source
        self._handlers = dict(handlers)
        self._lock = threads.lock("scheduler.runner")
        self._completed = self._failed = self._lost = 0  # guarded by _lock

    def execute(self, context: TaskContext) -> Outcome:
        """Run one job, if there is one, and ask to be called again at once."""
        self._source.expire_leases()
        lease = self._source.acquire(self.name, self._handlers)
        if lease is None:
            return TaskLoad.IDLE
        handler, renew_every_s = self._handlers[lease.job.gate_kind], self._settings.renew_every_s
        completed = failed = lost = 0
        try:
            run_job(self._source, lease, handler, context.shutdown, renew_every_s=renew_every_s)
            completed = 1
        except LeaseLost as error:
            _log.warning("job %d was lost to another worker: %s", lease.job.job_id, error)
            lost = 1
        except Exception as error:
            _log_failure(lease, error)
            failed = 1
        with self._lock:
            self._completed += completed
            self._failed += failed
            self._lost += lost
        return 0.0

    def statistics(self) -> JobRunnerStatistics:
        """Return what became of the jobs of this runner."""
        with self._lock:
            return JobRunnerStatistics(completed=self._completed, failed=self._failed, lost=self._lost)


def _log_failure(lease: Lease, error: Exception) -> None:
    if isinstance(error, WorkCancelled):
        _log.info("job %d was cancelled: %s", lease.job.job_id, error)
    elif isinstance(error, WorkFailed):
        _log.error("job %d failed on its engine:\n%s", lease.job.job_id, error.trace)
    elif isinstance(error, PenstockError):
        level = logging.INFO if isinstance(error, Closed) else logging.ERROR  # a table or the store has gone meanwhile
        _log.log(level, "job %d failed: %s", lease.job.job_id, error)
    else:
        _log.error("job %d failed", lease.job.job_id, exc_info=error)
