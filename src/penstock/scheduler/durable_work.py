"""Kinds of durable jobs, and how a store runs them: a task looks for what is due and enqueues it, a runner runs it.

A `DurableWork` is one kind of job (checkpoint, archive, verify, rehydrate, purge): it says which tables have something
due, and does one job. `DurableJobs` turns it into tasks of the scheduler, under the gates of the manifest: of a table
and kind at most one job is pending and one in flight, and one whose process died is repaired first, by the same work.

Thread: `due` and `run` are called by the scheduler's workers, or by the thread that calls `run_now`.
Invariants: (1) a job is enqueued only if there is something to do: an idle store commits nothing. (2) `run` may be
called again after an attempt that ended anywhere, also by kill -9: then `lease.job.kind` is REPAIR, and it finishes or
undoes what that attempt left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from penstock.errors import GateShut, NotFound, UniqueJobAlreadyPending
from penstock.host.clock import Clock
from penstock.manifest.jobs import JobQueue, Lease
from penstock.manifest.keys import JobId
from penstock.manifest.records import FailedPermanent, InFlight, JobKind, Pending
from penstock.scheduler.runner import JobResult, JobRunner, JobRunnerSettings, run_job
from penstock.scheduler.task import Outcome, PeriodicTask, StopSignal

WAIT_S = 60.0
POLL_S = 0.05  # between two checks of a job that another thread runs


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job that is due. `db_id` None: a job of the whole store."""

    db_id: int | None = None
    payload: bytes = b""


class DurableWork(Protocol):
    """One kind of durable job."""

    @property
    def kind(self) -> JobKind: ...

    @property
    def task(self) -> str:
        """The name of the task that looks for what is due, for `store.trigger`: "archive", "verify", …"""

    @property
    def interval_s(self) -> float:
        """Seconds between two calls of `due`."""

    def due(self) -> Iterable[JobRequest]:
        """Return a job for each table that has something to do. Must be cheap: it is called at every interval."""

    def run(self, lease: Lease, stop: StopSignal) -> JobResult:
        """Do a job, or the repair of one. Long work checks `stop`, and raises `WorkCancelled` if it is set."""


class DurableJobs:
    """Runs durable work, in the background or in the caller's thread."""

    def __init__(self, jobs: JobQueue, *, clock: Clock, wake: Callable[[str], None] = lambda task: None) -> None:
        """`wake`: run a task now."""
        self._jobs = jobs
        self._clock = clock
        self._wake = wake
        self._works: dict[int, DurableWork] = {}
        self._stopping = threading.Event()

    def add(self, work: DurableWork) -> None:
        """Add a kind of job. Requires: before `tasks`, and no other work of that kind."""
        assert int(work.kind) not in self._works, f"two works of kind {work.kind!r}"
        self._works[int(work.kind)] = work

    def tasks(self) -> Sequence[PeriodicTask | JobRunner]:
        """Return a task for each kind that enqueues its jobs, and a runner for each that runs them.

        A runner of its own: an upload that takes an hour must not delay a checkpoint.
        """
        enqueuers = [
            PeriodicTask(work.task, work.interval_s, partial(self._enqueue_task, work)) for work in self._works.values()
        ]
        settings = JobRunnerSettings(renew_every_s=self._jobs.lease_s / 3)
        runners = [
            JobRunner(runner_of(work.task), self._jobs, {kind: work.run}, settings=settings)
            for kind, work in self._works.items()
        ]
        return [*enqueuers, *runners]

    def _enqueue_task(self, work: DurableWork) -> Outcome:
        """Enqueue what is due of a kind: the body of a task."""
        self.enqueue_due(work)
        return None  # not IDLE: what is due once a store is quiet would wait for an interval that idleness made longer

    def enqueue_due(self, work: DurableWork) -> int:
        """Enqueue what is due of a kind; return how many jobs were added."""
        added = sum(self.enqueue(work.kind, request) is not None for request in work.due())
        if added:
            self._wake(runner_of(work.task))
        return added

    def enqueue(self, kind: JobKind, request: JobRequest) -> JobId | None:
        """Add a job durably; None if one of its table and kind is pending, or runs."""
        gate = self._jobs.gate(request.db_id, kind)
        if gate.is_shut() or gate.pending_job_id() is not None:
            return None
        try:
            return self._jobs.enqueue(kind, db_id=request.db_id, payload=request.payload)
        except UniqueJobAlreadyPending:
            return None

    def run_now(self, kind: JobKind, request: JobRequest, timeout_s: float = WAIT_S) -> None:
        """Run a job of a table in this thread, or wait for the one that runs; raises what the job raises.

        `GateShut` if it does not end within `timeout_s`, or an earlier one failed for good.
        """
        deadline_s, mine = self._clock.monotonic_s() + timeout_s, None
        while True:
            mine = mine or self.enqueue(kind, request)
            if self.run_pending(kind, request.db_id, mine):
                return
            state = None if mine is None else self._jobs.state(mine)
            if mine is not None and not isinstance(state, Pending | InFlight):
                if isinstance(state, FailedPermanent):
                    raise GateShut(f"job {mine} failed: look at the log, then try again")
                return
            if self._stopping.is_set() or self._clock.monotonic_s() >= deadline_s:
                raise GateShut(f"a job of kind {kind.name.lower()} did not end within {timeout_s:g} s: try again later")
            self._stopping.wait(POLL_S)

    def run_pending(self, kind: JobKind, db_id: int | None = None, job_id: JobId | None = None) -> bool:
        """Run the pending jobs of a kind (and table) in this thread; return whether `job_id`, or any, was run."""
        work = self._works.get(int(kind))
        if work is None:
            raise NotFound(f"there is no work for jobs of kind {kind.name.lower()}")
        done = False
        while lease := self._jobs.acquire("here", (int(kind),), db_id):
            run_job(self._jobs, lease, work.run, self._stopping, renew_every_s=self._jobs.lease_s / 3)
            done = done or job_id in (None, lease.job.job_id)
        return done

    def stop(self) -> None:
        """Prepare to close: jobs in threads of callers end when they next check the signal."""
        self._stopping.set()

    @property
    def works(self) -> Sequence[DurableWork]:
        return list(self._works.values())


def runner_of(task: str) -> str:
    """Return the name of the task that runs the jobs of a work."""
    return f"{task}-jobs"
