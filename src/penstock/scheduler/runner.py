"""The job runner: takes durable jobs, keeps their leases, and says how they ended.

A job's handler runs here, in the owner of the store: it decides what to do, gives the heavy part to an engine through
`JobContext.call`, and publishes the result. The runner does the rest: lease, renewal, completion, failure.

Thread: a runner is a task of a scheduler and handles one job at a time; register several for more. While a job runs, a
thread of its own renews the lease.
Invariants: (1) a job whose lease was lost is neither completed nor failed by this runner. (2) a lease is renewed until
its handler has returned, and not after.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.errors import FixTheCall, Invalid, LeaseLost, Restore, WaitExpired
from penstock.host import threads
from penstock.manifest.jobs import Lease
from penstock.scheduler.engines import Engines
from penstock.scheduler.task import Outcome, StopSignal, TaskContext, TaskLoad
from penstock.scheduler.work import Plain, WorkCancelled, WorkFailed

_log = logging.getLogger(__name__)

_POLL_S = 0.05  # between two looks at the signals of a job


class JobSource(Protocol):
    """Where jobs come from: `penstock.manifest.jobs.JobQueue`, or a test's. All but `acquire` may raise `LeaseLost`."""

    def acquire(self, worker_id: str, kinds: Container[int] | None = None) -> Lease | None:
        """Lease a job of these kinds that may run now, if there is one; a repair is of the kind it repairs."""

    def renew(self, lease: Lease) -> None:
        """Begin the lease's time anew."""

    def complete(self, lease: Lease) -> object:
        """The job is done."""

    def fail(self, lease: Lease, error: BaseException, *, retry: bool = True) -> None:
        """The attempt failed; with `retry` another one may follow, after a pause and if any are left."""

    def expire_leases(self) -> object:
        """Give up jobs whose workers vanished, and queue their repairs."""


class JobResult(enum.Enum):
    """What a handler leaves to do."""

    DONE = "the runner completes the job"
    COMMITTED = "the handler completed it, in the transaction that published its result"


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


@dataclass(frozen=True, kw_only=True)
class JobContext:
    """What a handler may use."""

    engines: Engines
    stop: StopSignal

    def call(self, function: str, arguments: Mapping[str, Plain], *, engine: str = "process") -> Plain:
        """Run a function on an engine and wait for its result; it is cancelled when the job is to stop."""
        handle = self.engines.get(engine).submit(function, arguments)
        while True:
            try:
                return handle.result(_POLL_S)
            except WaitExpired:
                if self.stop.is_set():
                    handle.cancel()


JobHandler = Callable[[Lease, JobContext], JobResult]
"""Runs one job. It may be called again for the same job, and (`lease.job.kind` is REPAIR) after one that vanished."""


@dataclass(frozen=True, kw_only=True)
class JobRunnerStatistics:
    """A runner since it was made."""

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
        engines: Engines,
        *,
        settings: JobRunnerSettings | None = None,
    ) -> None:
        self.name = name
        self._settings = settings or JobRunnerSettings()
        self.interval_s = self._settings.interval_s
        self.priority = self._settings.priority
        self._source = source
        self._handlers = dict(handlers)
        self._engines = engines
        self._lock = threads.lock("scheduler.runner")
        self._completed = self._failed = self._lost = 0  # guarded by _lock

    def execute(self, context: TaskContext) -> Outcome:
        """Run one job, if there is one, and ask to be called again at once."""
        self._source.expire_leases()
        lease = self._source.acquire(self.name, self._handlers)
        if lease is None:
            return TaskLoad.IDLE
        job_id = lease.job.job_id
        signal = JobSignal(context.shutdown)
        ended = threading.Event()
        keeper = threads.spawn(lambda: self._keep(lease, signal, ended), name=f"penstock-lease-{job_id}")
        try:
            self._run(lease, signal)
        except LeaseLost as error:
            _log.warning("job %d was lost to another worker: %s", job_id, error)
            with self._lock:
                self._lost += 1
        finally:
            ended.set()
            keeper.join(self._settings.renew_every_s)
        return 0.0

    def statistics(self) -> JobRunnerStatistics:
        with self._lock:
            return JobRunnerStatistics(completed=self._completed, failed=self._failed, lost=self._lost)

    def _run(self, lease: Lease, signal: JobSignal) -> None:
        """Run the handler and tell the source how it went; `LeaseLost` if that is no longer ours to tell."""
        try:
            result = self._handlers[lease.job.gate_kind](lease, JobContext(engines=self._engines, stop=signal))
            if result is JobResult.DONE:
                if signal.lost.is_set():
                    raise LeaseLost("its lease ended while it ran")
                self._source.complete(lease)
        except LeaseLost:
            raise
        except Exception as error:
            if signal.lost.is_set():
                raise LeaseLost(f"its lease ended while it ran ({error})") from error
            self._fail(lease, error)
        else:
            with self._lock:
                self._completed += 1

    def _fail(self, lease: Lease, error: Exception) -> None:
        permanent = isinstance(error, FixTheCall | Restore) or (isinstance(error, WorkFailed) and error.permanent)
        if isinstance(error, WorkFailed):
            _log.error("job %d failed on its engine:\n%s", lease.job.job_id, error.trace)
        elif not isinstance(error, WorkCancelled):
            _log.error("job %d failed", lease.job.job_id, exc_info=error)
        with self._lock:
            self._failed += 1
        self._source.fail(lease, error, retry=not permanent)

    def _keep(self, lease: Lease, signal: JobSignal, ended: threading.Event) -> None:
        """Renew the lease until the job has ended or the lease is lost."""
        while not ended.wait(self._settings.renew_every_s):
            try:
                self._source.renew(lease)
            except LeaseLost:
                signal.lost.set()
                return
            except Exception:
                # The lease has most of its time left; if this goes on, it ends, and the source says so.
                _log.warning("the lease of job %d was not renewed and is tried again", lease.job.job_id, exc_info=True)
