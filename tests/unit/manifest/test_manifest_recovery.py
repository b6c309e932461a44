"""Migrations, and what a store finds after it ended in any way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import CorruptionError, LeaseLost, PenstockError, UnsupportedVersion
from penstock.host.clock import SystemClock
from penstock.host.os_files import OsFileSystem
from penstock.manifest import migrations, tables
from penstock.manifest.engine import ManifestEngine
from penstock.manifest.environment import LmdbEngine
from penstock.manifest.invariants import check_all
from penstock.manifest.jobs import JobQueue
from penstock.manifest.keys import ChunkKey, ComponentId, MetricKey, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.migrations import migrate
from penstock.manifest.operations import BumpGeneration
from penstock.manifest.records import (
    ChunkEntryRecord,
    ChunkResidency,
    DbDescriptorRecord,
    Evicted,
    JobKind,
    Local,
    ManifestDbOptions,
    MetricDelta,
    PendingJobRecord,
    RemoteArchived,
    WalStateRecord,
)
from penstock.manifest.recovery import RecoveredState, recover
from penstock.manifest.settings import ManifestSettings
from penstock.testing import FakeClock, Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.manifest import MemoryEngine


class ManifestOpener:
    """Opens one manifest, on one of the engines, as often as a test needs."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.clock = FakeClock()
        self.disk = SimulatedDisk()
        self._lmdb = str(folder / "manifest") if kind == "lmdb" else None

    def open(self) -> tuple[Manifest, JobQueue]:
        if self._lmdb is not None:
            manifest = Manifest.open(self._lmdb, clock=self.clock)
        else:
            manifest = Manifest.open("manifest", fs=self.disk, clock=self.clock, engine=MemoryEngine)
        return manifest, JobQueue(manifest, random=random.Random(1))


@pytest.fixture(params=["memory", "lmdb"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> ManifestOpener:
    return ManifestOpener(request.param, tmp_path)


def test_everything_comes_back(opener: ManifestOpener) -> None:
    manifest, jobs = opener.open()
    txn = manifest.begin_write()
    descriptor = DbDescriptorRecord(1, "events", bytes(32), 2, ManifestDbOptions("log", "chunks"))
    txn.put_db(1, descriptor)
    txn.put_db(2, msgspec.structs.replace(descriptor, name="users"))
    for shard in range(3):
        txn.put_wal_state(WalStateKey(1, shard), WalStateRecord(shard, 5, 5, 5, restart_epoch=shard))
    residencies: list[ChunkResidency] = [RemoteArchived("o1"), RemoteArchived("o2", verified=True), Evicted("o3")]
    for chunk_id, residency in enumerate(residencies, start=1):
        steps = (Local(), RemoteArchived(f"o{chunk_id}"), RemoteArchived(f"o{chunk_id}", verified=True), residency)
        for step in (*steps[: chunk_id + 1], residency):
            txn.upsert_chunk(ChunkKey(1, chunk_id), ChunkEntryRecord(f"c{chunk_id}", 1, 1, residency=step))
    txn.merge_metric(MetricKey(1, 7), MetricDelta(1.5, 1, 1.5, 1.5))
    txn.bump_generation(ComponentId.WAL, 3)
    txn.commit()
    manifest.register_waiter(ComponentId.WAL, 9, timeout_s=60.0)
    manifest.register_waiter(ComponentId.WAL, 8, timeout_s=5.0)
    manifest.apply([BumpGeneration(ComponentId.WAL)])
    waiting = jobs.enqueue(JobKind.FLUSH, db_id=2)
    for _ in range(3):
        jobs.enqueue(JobKind.VERIFY, db_id=1)
        lease = jobs.acquire("w", kinds={JobKind.VERIFY})
        assert lease is not None
        jobs.complete(lease)
    manifest.close()
    opener.clock.advance(30)

    manifest, jobs = opener.open()
    state = recover(manifest, jobs)
    assert state.descriptors()[1] == state.descriptor(1) == descriptor
    assert state.descriptor(3) is None
    progress = manifest.read(lambda view: [record.restart_epoch for _, record in tables.partitions(view, 1)])
    assert progress == [0, 1, 2]
    assert manifest.get_wal_state(WalStateKey(2, 0)) is None
    assert jobs.gate(1, JobKind.VERIFY).state().last_success_at_epoch_ms is not None
    assert [job.job_id for job in state.pending_jobs] == [waiting]
    assert state.metrics_of(1)[7].sum == 1.5
    assert state.metrics_of(0) == {}
    assert state.generations[ComponentId.WAL] == 4
    assert [(component, waiter.target_generation) for component, waiter in state.waiters] == [(ComponentId.WAL, 9)]
    assert state.dropped_waiters == 1
    manifest.apply([BumpGeneration(ComponentId.WAL)])  # the row names those who wait, again
    again = manifest.read(lambda view: tables.GENERATIONS.get(view, ComponentId.WAL))
    assert again is not None
    assert [waiter.target_generation for waiter in again.blocked_waiters] == [9]
    assert [key.chunk_id for key, _ in state.chunks(1)] == [1, 2, 3]
    assert [key.chunk_id for key, _ in state.chunks_to_verify(1)] == [1]
    assert [key.chunk_id for key, _ in state.chunks_in_archive(1)] == [3]
    assert (state.repairs, state.migrated) == ((), 0)
    manifest.close()


def test_a_job_in_flight_is_repaired_behind_a_shut_gate(opener: ManifestOpener) -> None:
    manifest, jobs = opener.open()
    lost = jobs.enqueue(JobKind.COMPACTION, db_id=1, payload=b"p")
    lost_store_wide = jobs.enqueue(JobKind.CHECKPOINT)
    old_lease = jobs.acquire("w")
    assert old_lease is not None
    assert jobs.acquire("w") is not None
    next_one = jobs.enqueue(JobKind.COMPACTION, db_id=1)
    manifest.close()

    manifest, jobs = opener.open()
    state = recover(manifest, jobs)
    assert len(state.repairs) == 2
    repairs = [job for job in state.pending_jobs if job.kind == JobKind.REPAIR]
    assert [(job.repairs_job_id, job.payload) for job in repairs] == [(lost, b"p"), (lost_store_wide, b"")]
    assert list(state.store_gates) == [JobKind.CHECKPOINT]
    gate = jobs.gate(1, JobKind.COMPACTION)
    assert gate.state().active_job_id == repairs[0].job_id
    with pytest.raises(LeaseLost):
        jobs.complete(old_lease)
    assert recover(manifest, jobs).repairs == ()  # a second time changes nothing

    lease = jobs.acquire("w", kinds={JobKind.COMPACTION})
    assert lease is not None
    assert lease.job.job_id == repairs[0].job_id
    assert jobs.compensate_orphans() == []  # leased by this process
    manifest.close()

    manifest, jobs = opener.open()  # the repair's worker ends too
    assert recover(manifest, jobs).repairs == (repairs[0].job_id,)
    assert jobs.gate(1, JobKind.COMPACTION).is_shut()
    lease = jobs.acquire("w", kinds={JobKind.COMPACTION})
    assert lease is not None
    assert (lease.job.job_id, lease.token) == (repairs[0].job_id, 2)
    jobs.complete(lease)
    lease = jobs.acquire("w", kinds={JobKind.COMPACTION})
    assert lease is not None
    assert lease.job.job_id == next_one
    assert manifest.read(lambda view: list(check_all(view))) == []
    manifest.close()


def test_backups_work_on_the_simulated_disk(disk: SimulatedDisk) -> None:
    with Manifest.open("manifest", fs=disk, engine=MemoryEngine) as manifest:
        for generation in (1, 2, 3):
            assert manifest.apply([]).generation == generation
            manifest.backup()
    after = disk.image().restore("strict")
    assert {name for name in after.listdir("") if "backup" in name} == {"manifest.backup-1", "manifest.backup-2"}
    for age, generation in ((1, 3), (2, 2)):
        with Manifest.open(f"manifest.backup-{age}", fs=after, engine=MemoryEngine) as backup:
            assert backup.generation() == generation


class Work:
    """Jobs that each leave one chunk, on the simulated disk, crashed everywhere."""

    def __init__(self, *, forgets_the_gate: bool = False) -> None:
        self._forgets_the_gate = forgets_the_gate

    def run(self, disk: SimulatedDisk, history: History) -> None:
        with Manifest.open("manifest", fs=disk, clock=FakeClock(), engine=MemoryEngine) as manifest:
            self._work(JobQueue(manifest, random=random.Random(1)), history, jobs_wanted=2)

    def _work(self, jobs: JobQueue, history: History, jobs_wanted: int) -> None:
        for _ in range(jobs_wanted):
            jobs.enqueue(JobKind.FLUSH, db_id=1)
            lease = jobs.acquire("w")
            if lease is None:
                raise Violation("a job waits and cannot be leased")
            history.note("began", lease.job.job_id)
            jobs.complete(lease)
            history.note("done", lease.job.job_id)

    def resume(self, disk: SimulatedDisk, history: History) -> None:
        with Manifest.open("manifest", fs=disk, clock=FakeClock(), engine=MemoryEngine) as manifest:
            jobs = JobQueue(manifest, random=random.Random(1))
            if not self._forgets_the_gate:
                recover(manifest, jobs)
            faults = manifest.read(lambda view: list(check_all(view)))
            if faults:
                raise Violation(faults[0])
            for word, job_id in history.events:
                state = type(getattr(manifest.get_job(job_id), "state", None)).__name__
                if word == "done" and state != "Completed":
                    raise Violation(f"job {job_id} was done and is {state}")
            while (lease := jobs.acquire("w")) is not None:
                jobs.complete(lease)
                history.note("done", lease.job.job_id)
            if jobs.gate(1, JobKind.FLUSH).is_shut():
                raise Violation("the gate is shut and nobody repairs")
            self._work(jobs, history, jobs_wanted=1)


def test_jobs_survive_every_crash() -> None:
    report = explore(Work(), modes=("strict", "restart"), depth=2, faults=Faults(kinds=("eio", "enospc")))
    assert report.crashes > 10
    assert report.faults > 10


def test_the_crash_test_sees_a_recovery_that_forgets_the_gate() -> None:
    with pytest.raises(Violation, match="gate is shut"):
        explore(Work(forgets_the_gate=True), modes=("strict",), depth=1)


# -- migrations


class PendingJobRecord2(PendingJobRecord, frozen=True):
    """What a second version of a record could look like."""

    since_ms: int = 0


def _upgrade(payload: bytes) -> bytes:
    (job_id,) = msgspec.msgpack.decode(payload)
    return msgspec.msgpack.encode((job_id, 77))


VERSION_2: tables.Table[bytes, PendingJobRecord2] = tables.Table("metrics", PendingJobRecord2, bytes, bytes, version=2)
VERSION_1: tables.Table[bytes, PendingJobRecord] = tables.Table("metrics", PendingJobRecord, bytes, bytes, version=1)


@pytest.fixture(params=["memory", "lmdb"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ManifestEngine]:
    opened: ManifestEngine
    if request.param == "lmdb":
        opened = LmdbEngine(str(tmp_path / "manifest"), ManifestSettings(), OsFileSystem(), SystemClock())
    else:
        opened = MemoryEngine("manifest", ManifestSettings(), SimulatedDisk(), SystemClock())
    yield opened
    opened.close()


def _fill(engine: ManifestEngine, rows: int) -> None:
    migrate(engine, [VERSION_1])
    with engine.write() as view:
        for i in range(rows):
            VERSION_1.put(view, i.to_bytes(4, "big"), PendingJobRecord(i))


def test_old_records_are_upgraded_once(engine: ManifestEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "ROWS_PER_TRANSACTION", 10)
    _fill(engine, 95)
    upgrades = {("metrics", 1): _upgrade}
    assert migrate(engine, [VERSION_2], upgrades) == 95
    with engine.read() as view:
        assert [record for _, record in VERSION_2.scan(view)] == [PendingJobRecord2(i, 77) for i in range(95)]
    assert migrate(engine, [VERSION_2], upgrades) == 0
    with pytest.raises(UnsupportedVersion, match="version 2"):
        migrate(engine, [VERSION_1])


def test_a_migration_that_was_cut_short_goes_on(engine: ManifestEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrations, "ROWS_PER_TRANSACTION", 10)
    _fill(engine, 35)

    def dies(payload: bytes) -> bytes:
        if msgspec.msgpack.decode(payload) == [25]:
            raise ZeroDivisionError
        return _upgrade(payload)

    with pytest.raises(ZeroDivisionError):
        migrate(engine, [VERSION_2], {("metrics", 1): dies})
    assert migrate(engine, [VERSION_2], {("metrics", 1): _upgrade}) == 15
    with engine.read() as view:
        assert len(list(VERSION_2.scan(view))) == 35


def test_a_version_without_an_upgrade_is_refused(engine: ManifestEngine) -> None:
    _fill(engine, 1)
    with pytest.raises(UnsupportedVersion, match="cannot upgrade"):
        migrate(engine, [VERSION_2], {})


def test_an_upgrade_must_give_readable_records(engine: ManifestEngine) -> None:
    _fill(engine, 1)
    with pytest.raises(CorruptionError):
        migrate(engine, [VERSION_2], {("metrics", 1): lambda payload: b"junk"})


def test_rows_without_a_schema_version_are_corrupt(engine: ManifestEngine) -> None:
    _fill(engine, 1)
    with engine.write() as view:
        view.delete("meta", b"schema/metrics")
    with pytest.raises(CorruptionError, match="no schema version"):
        migrate(engine, [VERSION_1])


def test_opening_walks_no_table(disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    with Manifest.open("manifest", fs=disk, engine=MemoryEngine) as manifest:
        txn = manifest.begin_write()
        txn.upsert_chunk(ChunkKey(1, 1), ChunkEntryRecord("a", 1, 1))
        txn.commit()

    def refuse(*_: Any) -> Any:
        raise PenstockError("a chunk was read")

    monkeypatch.setattr(tables.CHUNKS.codec, "decode", refuse)
    with Manifest.open("manifest", fs=disk, engine=MemoryEngine) as manifest:
        state: RecoveredState = recover(manifest, JobQueue(manifest, random=random.Random(1)))
        with pytest.raises(PenstockError, match="was read"):
            list(state.chunks(1))
