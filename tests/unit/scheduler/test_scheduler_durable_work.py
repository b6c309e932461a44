"""Durable work: enqueued once while it is pending, run in the background or here, repaired by itself after a death."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from penstock.errors import GateShut, NotFound
from penstock.manifest.jobs import JobQueue, Lease
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import JobKind
from penstock.scheduler.durable_work import DurableJobs, JobRequest, runner_of
from penstock.scheduler.runner import JobResult
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.task import StopSignal
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine


class Purging:
    kind, task, interval_s = JobKind.PURGE, "purge", 30.0

    def __init__(self) -> None:
        self.requests: list[JobRequest] = []
        self.ran: list[tuple[int, int, bytes]] = []
        self.error: Exception | None = None

    def due(self) -> Iterable[JobRequest]:
        return self.requests

    def run(self, lease: Lease, stop: StopSignal) -> JobResult:
        self.ran.append((lease.job.kind, lease.job.table, lease.job.payload))
        if self.error is not None:
            raise self.error
        return JobResult.DONE


def make(manifest: Manifest | None = None) -> tuple[Manifest, JobQueue, DurableJobs, Purging]:
    clock = FakeClock()
    manifest = manifest or Manifest.open("m", fs=SimulatedDisk(), clock=clock, engine=MemoryEngine)
    jobs = JobQueue(manifest, random=random.Random(1))
    durable, work = DurableJobs(jobs, clock=clock), Purging()
    durable.add(work)
    return manifest, jobs, durable, work


def test_tasks_enqueue_what_is_due_once_and_run_it() -> None:
    manifest, jobs, durable, work = make()
    generation = manifest.generation()
    scheduler = Scheduler(clock=FakeClock())
    for task in durable.tasks():
        scheduler.register(task)
    scheduler.run_pending()
    assert manifest.generation() == generation, "nothing was due, and something was committed"
    work.requests = [JobRequest(db_id=2, payload=b"x"), JobRequest(db_id=2, payload=b"y"), JobRequest(db_id=3)]
    assert durable.enqueue_due(work) == 2  # of a table, one is pending
    scheduler.trigger(runner_of("purge"))
    scheduler.run_pending()
    assert work.ran == [(JobKind.PURGE, 2, b"x"), (JobKind.PURGE, 3, b"")]
    assert not jobs.gate(2, JobKind.PURGE).is_shut()


def test_idleness_does_not_make_looks_rarer() -> None:
    _, _, durable, work = make()
    clock = FakeClock()
    scheduler = Scheduler(clock=clock)
    for task in durable.tasks():
        scheduler.register(task)
    for _ in range(20):  # an idle store
        scheduler.run_pending()
        clock.advance(work.interval_s)
    assert scheduler.statistics().tasks["purge"].interval_s == work.interval_s


def test_a_job_of_a_dead_process_is_repaired_by_the_same_work() -> None:
    manifest, jobs, durable, work = make()
    durable.enqueue(JobKind.PURGE, JobRequest(db_id=2, payload=b"x"))
    assert jobs.acquire("dies", (int(JobKind.PURGE),)) is not None
    _, again, durable, work = make(manifest)
    assert durable.enqueue(JobKind.PURGE, JobRequest(db_id=2)) is None, "the gate is open while a repair is due"
    assert len(again.compensate_orphans()) == 1
    assert durable.run_pending(JobKind.PURGE)
    assert work.ran == [(JobKind.REPAIR, 2, b"x")]
    assert durable.enqueue(JobKind.PURGE, JobRequest(db_id=2)) is not None


def test_running_now_raises_what_the_job_raises_and_is_bounded() -> None:
    _, jobs, durable, work = make()
    durable.run_now(JobKind.PURGE, JobRequest(db_id=4, payload=b"now"))
    assert work.ran == [(JobKind.PURGE, 4, b"now")]
    work.error = ValueError("the object store said no")
    with pytest.raises(ValueError, match="said no"):
        durable.run_now(JobKind.PURGE, JobRequest(db_id=4))
    with pytest.raises(NotFound):
        durable.run_pending(JobKind.ARCHIVE)
    work.error = None
    assert durable.enqueue(JobKind.PURGE, JobRequest(db_id=5)) is not None
    assert jobs.acquire("elsewhere", (int(JobKind.PURGE),), 5) is not None
    with pytest.raises(GateShut):
        durable.run_now(JobKind.PURGE, JobRequest(db_id=5), timeout_s=0.0)
