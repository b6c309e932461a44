"""Durable jobs: one gate, one lease, one token."""

from __future__ import annotations

import threading

import pytest

from penstock.errors import Invalid, LeaseLost, NotFound, UniqueJobAlreadyPending
from penstock.manifest.invariants import check_all
from penstock.manifest.jobs import PAYLOAD_BYTES_MAX, JobQueue, JobSettings, Lease
from penstock.manifest.keys import ChunkKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import UpsertChunk
from penstock.manifest.records import (
    ChunkEntryRecord,
    Completed,
    FailedPermanent,
    InFlight,
    JobKind,
    JobRecord,
    Pending,
)
from penstock.testing import FakeClock


def acquired(jobs: JobQueue, worker: str = "w") -> Lease:
    lease = jobs.acquire(worker)
    assert lease is not None
    return lease


def stored(manifest: Manifest, job_id: int) -> JobRecord:
    job = manifest.get_job(job_id)
    assert job is not None
    return job


def is_consistent(manifest: Manifest) -> bool:
    return manifest.read(lambda view: list(check_all(view))) == []


def test_the_life_of_a_job(manifest: Manifest, jobs: JobQueue) -> None:
    job_id = jobs.enqueue(JobKind.FLUSH, db_id=1, payload=b"p")
    assert isinstance(stored(manifest, job_id).state, Pending)
    assert jobs.gate(1, JobKind.FLUSH).pending_job_id() == job_id
    lease = acquired(jobs)
    assert (lease.job.job_id, lease.job.payload, lease.token) == (job_id, b"p", 1)
    assert isinstance(stored(manifest, job_id).state, InFlight)
    assert jobs.gate(1, JobKind.FLUSH).state().active_job_id == job_id
    assert jobs.acquire("other") is None
    jobs.complete(lease, also=[UpsertChunk(ChunkKey(1, 1), ChunkEntryRecord("made", 1, 1))])
    assert isinstance(stored(manifest, job_id).state, Completed)
    assert manifest.get_chunk(ChunkKey(1, 1)) is not None
    assert not jobs.gate(1, JobKind.FLUSH).is_shut()
    with pytest.raises(LeaseLost):
        jobs.complete(lease)
    with pytest.raises(LeaseLost):
        jobs.renew(lease)
    assert is_consistent(manifest)


@pytest.mark.parametrize("looks_first", [True, False])
def test_64_threads_enqueue_and_one_succeeds(manifest: Manifest, jobs: JobQueue, looks_first: bool) -> None:
    start = threading.Barrier(64)
    won: list[int] = []
    refused: list[UniqueJobAlreadyPending] = []

    def enqueue() -> int:
        if looks_first:
            return jobs.enqueue(JobKind.COMPACTION, db_id=1)
        txn = manifest.begin_write()  # all meet in the commit itself
        job_id = txn.enqueue_job(JobRecord(0, 1, 1, int(JobKind.COMPACTION)))
        txn.commit()
        return job_id

    def work() -> None:
        start.wait(30)
        try:
            won.append(enqueue())
        except UniqueJobAlreadyPending as error:
            refused.append(error)

    threads = [threading.Thread(target=work) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(won), len(refused)) == (1, 63)
    assert jobs.gate(1, JobKind.COMPACTION).pending_job_id() == won[0]
    assert is_consistent(manifest)


def test_workers_that_race_share_nothing(manifest: Manifest, jobs: JobQueue) -> None:
    for kind in range(100, 110):
        jobs.enqueue(kind, db_id=1)
    leases: list[Lease] = []

    def work(worker: int) -> None:
        while (lease := jobs.acquire(f"w{worker}")) is not None:
            leases.append(lease)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(lease.job.kind for lease in leases) == list(range(100, 110))
    assert is_consistent(manifest)


def test_older_jobs_first_and_only_wanted_kinds(jobs: JobQueue) -> None:
    first = jobs.enqueue(JobKind.TRAIN, db_id=9)
    second = jobs.enqueue(JobKind.FLUSH, db_id=1)
    store_wide = jobs.enqueue(JobKind.CHECKPOINT)
    lease = jobs.acquire("w", kinds={JobKind.FLUSH, JobKind.CHECKPOINT})
    assert lease is not None
    assert lease.job.job_id == second
    assert [acquired(jobs).job.job_id, acquired(jobs).job.job_id] == [first, store_wide]


def test_a_second_job_waits_for_the_gate(jobs: JobQueue) -> None:
    jobs.enqueue(JobKind.FLUSH, db_id=1)
    running = acquired(jobs)
    second = jobs.enqueue(JobKind.FLUSH, db_id=1)
    assert jobs.acquire("w") is None
    jobs.complete(running)
    assert acquired(jobs).job.job_id == second


def test_retries_back_off_and_end(manifest: Manifest, jobs: JobQueue, clock: FakeClock) -> None:
    job_id = jobs.enqueue(JobKind.ARCHIVE, db_id=1, attempts_max=4)
    for attempt, wait_s in enumerate((4.0, 8.0, 10.0), start=1):
        lease = acquired(jobs)
        assert lease.token == attempt
        jobs.fail(lease, OSError("no route"))
        assert not jobs.gate(1, JobKind.ARCHIVE).is_shut()
        clock.jump(86_400)
        assert jobs.acquire("w") is None
        clock.advance(wait_s - 0.1)
        assert jobs.acquire("w") is None
        clock.advance(0.2)
    lease = acquired(jobs)
    assert is_consistent(manifest)
    jobs.fail(lease, OSError("no route at all"))
    job = stored(manifest, job_id)
    assert isinstance(job.state, FailedPermanent)
    assert job.last_error is not None
    assert (job.last_error.kind, job.last_error.message, job.attempts) == ("OSError", "no route at all", 4)
    assert jobs.gate(1, JobKind.ARCHIVE).state().errored_since_epoch_ms is not None
    assert jobs.acquire("w") is None
    assert is_consistent(manifest)


def test_a_failure_that_cannot_be_retried(manifest: Manifest, jobs: JobQueue) -> None:
    job_id = jobs.enqueue(64, db_id=1)
    jobs.fail(acquired(jobs), ValueError("never"), retry=False)
    assert isinstance(stored(manifest, job_id).state, FailedPermanent)


def test_a_failed_job_gives_way_to_the_one_that_waits(manifest: Manifest, jobs: JobQueue) -> None:
    first = jobs.enqueue(JobKind.FLUSH, db_id=1)
    lease = acquired(jobs)
    second = jobs.enqueue(JobKind.FLUSH, db_id=1)
    jobs.fail(lease, OSError("once"))
    assert isinstance(stored(manifest, first).state, FailedPermanent)
    assert acquired(jobs).job.job_id == second
    assert is_consistent(manifest)


def test_a_holder_that_slept_cannot_complete(manifest: Manifest, jobs: JobQueue, clock: FakeClock) -> None:
    job_id = jobs.enqueue(JobKind.COMPACTION, db_id=1, payload=b"files")
    sleeper = acquired(jobs, "sleeper")
    clock.advance(31)
    (repair_id,) = jobs.expire_leases()
    assert isinstance(stored(manifest, job_id).state, FailedPermanent)
    repair = acquired(jobs, "other")
    assert (repair.job.job_id, repair.job.kind, repair.job.repairs_kind) == (repair_id, JobKind.REPAIR, 3)
    assert repair.job.payload == b"files"
    upsert = UpsertChunk(ChunkKey(1, 1), ChunkEntryRecord("stale", 1, 1))
    for act in (lambda: jobs.complete(sleeper, also=[upsert]), lambda: jobs.renew(sleeper)):
        with pytest.raises(LeaseLost):
            act()
    with pytest.raises(LeaseLost):
        jobs.fail(sleeper, OSError("late"))
    assert manifest.get_chunk(ChunkKey(1, 1)) is None
    jobs.complete(repair)
    assert not jobs.gate(1, JobKind.COMPACTION).is_shut()
    assert is_consistent(manifest)


def test_a_late_holder_may_complete_until_someone_took_over(jobs: JobQueue, clock: FakeClock) -> None:
    jobs.enqueue(JobKind.FLUSH, db_id=1)
    lease = acquired(jobs)
    clock.advance(1_000)
    jobs.complete(lease)
    assert jobs.expire_leases() == []


def test_renewal_keeps_a_lease(jobs: JobQueue, clock: FakeClock) -> None:
    jobs.enqueue(JobKind.FLUSH, db_id=1)
    lease = acquired(jobs)
    for _ in range(5):
        clock.advance(29)
        assert jobs.expire_leases() == []
        jobs.renew(lease)
    jobs.complete(lease)


@pytest.mark.parametrize("jump_s", [3_600.0, -3_600.0])
def test_clock_jumps_change_no_lease_decision(jobs: JobQueue, clock: FakeClock, jump_s: float) -> None:
    jobs.enqueue(JobKind.FLUSH, db_id=1)
    lease = acquired(jobs)
    clock.advance(29)
    clock.jump(jump_s)
    assert jobs.expire_leases() == []
    jobs.renew(lease)
    clock.jump(-2 * jump_s)
    clock.advance(29)
    assert jobs.expire_leases() == []
    clock.jump(jump_s)
    clock.advance(2)
    assert len(jobs.expire_leases()) == 1


def test_an_expiry_that_cannot_commit_is_tried_again(
    manifest: Manifest, jobs: JobQueue, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (64, 65):
        jobs.enqueue(kind, db_id=1)
        acquired(jobs)
    clock.advance(31)
    with monkeypatch.context() as broken:
        broken.setattr(manifest, "begin_write", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            jobs.expire_leases()
    assert len(jobs.expire_leases()) == 2


def test_a_repair_keeps_the_gate_until_it_succeeds(manifest: Manifest, jobs: JobQueue, clock: FakeClock) -> None:
    jobs.enqueue(JobKind.FLUSH, db_id=1, attempts_max=2)
    acquired(jobs)
    clock.advance(31)
    (repair_id,) = jobs.expire_leases()
    waiting = jobs.enqueue(JobKind.FLUSH, db_id=1)
    gate = jobs.gate(1, JobKind.FLUSH)
    with pytest.raises(NotFound):
        jobs.repair(1, JobKind.FLUSH)  # one is under way
    assert gate.state().active_job_id == repair_id
    jobs.fail(acquired(jobs), OSError("first"))
    assert gate.is_shut()
    assert jobs.acquire("w") is None
    clock.advance(5)
    lease = acquired(jobs)
    assert lease.job.job_id == repair_id
    clock.advance(31)
    assert jobs.expire_leases() == []  # that was its last attempt
    assert isinstance(stored(manifest, repair_id).state, FailedPermanent)
    assert gate.is_shut()
    assert jobs.acquire("w") is None
    assert jobs.prune(keep=0) == 1  # the first job; the failed repair still holds the gate
    again = jobs.repair(1, JobKind.FLUSH)
    assert gate.state().active_job_id == again
    jobs.complete(acquired(jobs))
    assert not gate.is_shut()
    assert acquired(jobs).job.job_id == waiting
    assert is_consistent(manifest)


def test_a_repair_whose_worker_vanishes_waits_again(jobs: JobQueue, clock: FakeClock) -> None:
    jobs.enqueue(JobKind.FLUSH, db_id=1)
    acquired(jobs)
    clock.advance(31)
    (repair_id,) = jobs.expire_leases()
    old = acquired(jobs)
    clock.advance(31)
    assert jobs.expire_leases() == [repair_id]
    new = acquired(jobs)
    assert (old.token, new.token) == (1, 2)
    with pytest.raises(LeaseLost):
        jobs.complete(old)
    jobs.complete(new)


def test_finished_jobs_can_be_forgotten(manifest: Manifest, jobs: JobQueue) -> None:
    for _ in range(5):
        jobs.enqueue(JobKind.FLUSH, db_id=1)
        jobs.complete(acquired(jobs))
    jobs.enqueue(JobKind.FLUSH, db_id=1)
    assert jobs.prune(keep=2) == 3
    assert jobs.prune(keep=2) == 0
    assert [manifest.get_job(job_id) is None for job_id in range(1, 7)] == [True, True, True, False, False, False]
    assert is_consistent(manifest)


def test_bad_calls_are_refused(jobs: JobQueue) -> None:
    with pytest.raises(Invalid, match="repair"):
        jobs.enqueue(JobKind.REPAIR, db_id=1)
    with pytest.raises(Invalid, match="unknown"):
        jobs.enqueue(63)
    with pytest.raises(Invalid, match="payload"):
        jobs.enqueue(64, payload=bytes(PAYLOAD_BYTES_MAX + 1))
    with pytest.raises(NotFound):
        jobs.repair(1, JobKind.FLUSH)
    for wrong in ({"lease_s": 0.0}, {"backoff_s": 2.0, "backoff_s_max": 1.0}, {"attempts_max": 0}):
        with pytest.raises(Invalid):
            JobSettings(**wrong)
