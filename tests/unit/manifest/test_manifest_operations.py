"""The operations and the rules between rows, on both engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.errors import Closed, GateShut, Invalid, LeaseLost, NotFound, UniqueJobAlreadyPending
from penstock.manifest import tables
from penstock.manifest.invariants import check_all
from penstock.manifest.keys import ChunkKey, ComponentId, MetricKey, PendingJobKey, WalStateKey
from penstock.manifest.manifest import Manifest, ManifestTxn
from penstock.manifest.operations import BumpGeneration, MergeMetric, PutJob, SetResidency, UpdateJobState, UpsertChunk
from penstock.manifest.records import (
    ChunkEntryRecord,
    ChunkResidency,
    Completed,
    DbDescriptorRecord,
    Evicted,
    FailedPermanent,
    FlushGateState,
    InFlight,
    JobErrorSnapshot,
    JobKind,
    JobRecord,
    Local,
    ManifestDbOptions,
    MetricDelta,
    Pending,
    RemoteArchived,
    Tombstoned,
    WalStateRecord,
)
from penstock.testing import FakeClock


def commit(manifest: Manifest, fill: Callable[[ManifestTxn], Any]) -> int:
    txn = manifest.begin_write()
    fill(txn)
    return txn.commit().generation


def job(job_id: int, kind: int = JobKind.COMPACTION, **changes: Any) -> JobRecord:
    return JobRecord(job_id=job_id, created_at_epoch_ms=5, db_id=1, kind=int(kind), **changes)


def table_of(name: str, **changes: Any) -> DbDescriptorRecord:
    return DbDescriptorRecord(1, name, bytes(32), 1, ManifestDbOptions(name, name), **changes)


def gate(manifest: Manifest, kind: int = JobKind.COMPACTION) -> FlushGateState:
    state = manifest.get_wal_state(WalStateKey(1, 0))
    return FlushGateState() if state is None else state.gate(kind)


def is_consistent(manifest: Manifest) -> bool:
    return manifest.read(lambda view: list(check_all(view))) == []


def test_a_transaction_is_all_or_nothing(manifest: Manifest) -> None:
    txn = manifest.begin_write()
    txn.upsert_chunk(ChunkKey(1, 1), ChunkEntryRecord("a", 1, 1))
    txn.update_job_state(99, Pending())
    with pytest.raises(NotFound, match="job 99"):
        txn.commit()
    assert manifest.get_chunk(ChunkKey(1, 1)) is None
    assert manifest.generation() == 0
    with pytest.raises(Closed):
        txn.commit()
    with pytest.raises(Closed):
        txn.delete_chunk(ChunkKey(1, 1))


def test_a_name_belongs_to_one_live_table(manifest: Manifest) -> None:
    commit(manifest, lambda txn: txn.put_db(1, table_of("events")))
    with pytest.raises(Invalid, match="choose another"):
        commit(manifest, lambda txn: txn.put_db(2, table_of("events")))
    commit(manifest, lambda txn: txn.put_db(1, table_of("events", status=Tombstoned(7))))
    commit(manifest, lambda txn: txn.put_db(2, table_of("events")))
    assert manifest.get_db(2) == table_of("events")
    with pytest.raises(Invalid, match="start at 1"):
        commit(manifest, lambda txn: txn.put_db(0, table_of("zero")))


def test_a_file_belongs_to_one_live_row(manifest: Manifest) -> None:
    commit(manifest, lambda txn: txn.upsert_chunk(ChunkKey(1, 1), ChunkEntryRecord("a", 1, 1)))
    with pytest.raises(Invalid, match="belongs to chunk 1"):
        commit(manifest, lambda txn: txn.upsert_chunk(ChunkKey(2, 1), ChunkEntryRecord("a", 1, 1)))

    def move(txn: ManifestTxn) -> None:
        txn.upsert_chunk(ChunkKey(1, 1), ChunkEntryRecord("b", 2, 1))
        txn.upsert_chunk(ChunkKey(2, 1), ChunkEntryRecord("a", 2, 1))

    commit(manifest, move)
    commit(manifest, lambda txn: txn.delete_chunk(ChunkKey(1, 1)))
    commit(manifest, lambda txn: txn.delete_chunk(ChunkKey(1, 1)))
    commit(manifest, lambda txn: txn.upsert_chunk(ChunkKey(3, 9), ChunkEntryRecord("b", 3, 1)))
    assert [key for key, _ in manifest.scan_chunks(3)] == [ChunkKey(3, 9)]
    assert list(manifest.begin_write().scan_chunks(1)) == []
    assert is_consistent(manifest)


def test_chunks_are_scanned_by_table_and_in_pages(manifest: Manifest) -> None:
    def fill(txn: ManifestTxn) -> None:
        for chunk_id in range(1, 2_501):
            txn.upsert_chunk(ChunkKey(2, chunk_id), ChunkEntryRecord(f"2/{chunk_id}", 1, chunk_id))
        txn.upsert_chunk(ChunkKey(1, 7), ChunkEntryRecord("1/7", 1, 1))
        txn.upsert_chunk(ChunkKey(3, 7), ChunkEntryRecord("3/7", 1, 1))

    commit(manifest, fill)
    assert [key.chunk_id for key, _ in manifest.scan_chunks(2)] == list(range(1, 2_501))


def test_progress_is_set_and_gates_stay(manifest: Manifest) -> None:
    commit(manifest, lambda txn: txn.enqueue_job(job(1)))
    commit(manifest, lambda txn: txn.update_job_state(1, InFlight("w", 1, 1)))
    key, progress = WalStateKey(1, 0), WalStateRecord(1, 2, 3, 4)
    commit(manifest, lambda txn: txn.put_wal_state(key, progress))
    state = manifest.get_wal_state(key)
    assert state is not None
    assert (state.stored_lsn, state.highest_lsn) == (1, 4)
    assert state.gate(JobKind.COMPACTION).active_job_id == 1
    with pytest.raises(GateShut, match="^table 1, shard 0: job 1 holds the gate"):
        commit(manifest, lambda txn: txn.delete_wal_state(key))
    with pytest.raises(Invalid, match="gates are in shard 0"):
        commit(
            manifest,
            lambda txn: txn.put_wal_state(WalStateKey(1, 1), progress.with_gate(1, FlushGateState(1))),
        )
    commit(manifest, lambda txn: txn.update_job_state(1, Completed(8), token=1))
    commit(manifest, lambda txn: txn.delete_wal_state(key))
    assert manifest.get_wal_state(key) is None


def test_a_waiting_job_has_its_row(manifest: Manifest) -> None:
    with pytest.raises(Invalid, match="would break the manifest"):
        manifest.apply([PutJob(job(1))])
    commit(manifest, lambda txn: txn.enqueue_job(job(1)))
    with pytest.raises(UniqueJobAlreadyPending, match="job 1"):
        commit(manifest, lambda txn: txn.enqueue_job(job(2)))
    with pytest.raises(Invalid, match="would break the manifest"):
        commit(manifest, lambda txn: txn.delete_pending_index(PendingJobKey(1, 3)))
    with pytest.raises(Invalid, match="does not wait under"):
        commit(manifest, lambda txn: txn.upsert_pending_index(PendingJobKey(1, 4), 1))
    commit(manifest, lambda txn: txn.remove_job(1))
    commit(manifest, lambda txn: txn.delete_pending_index(PendingJobKey(1, 3)))
    commit(manifest, lambda txn: txn.enqueue_job(job(2)))
    assert is_consistent(manifest)


def test_job_states_move_one_way(manifest: Manifest) -> None:
    error = JobErrorSnapshot(1, "OSError", "gone")
    commit(manifest, lambda txn: txn.enqueue_job(job(1)))
    with pytest.raises(Invalid, match="from Pending to Completed"):
        commit(manifest, lambda txn: txn.update_job_state(1, Completed(1)))
    with pytest.raises(LeaseLost, match="not the next"):
        commit(manifest, lambda txn: txn.update_job_state(1, InFlight("w", 1, 2)))
    commit(manifest, lambda txn: txn.update_job_state(1, InFlight("w", 1, 1)))
    with pytest.raises(Invalid, match="from InFlight to InFlight"):
        commit(manifest, lambda txn: txn.update_job_state(1, InFlight("v", 1, 2)))
    with pytest.raises(Invalid, match="in flight"):
        commit(manifest, lambda txn: txn.remove_job(1))
    for token in (None, 0, 2):
        with pytest.raises(LeaseLost):
            manifest.apply([UpdateJobState(1, Completed(1), token)])
    with pytest.raises(Invalid, match="would break"):  # waiting again needs its row
        commit(manifest, lambda txn: txn.update_job_state(1, Pending(), token=1, error=error))
    commit(manifest, lambda txn: txn.update_job_state(1, FailedPermanent(9), token=1, error=error))
    with pytest.raises(LeaseLost, match="is over"):
        commit(manifest, lambda txn: txn.update_job_state(1, Completed(9), token=1))
    with pytest.raises(Invalid):
        commit(manifest, lambda txn: txn.update_job_state(1, Pending()))
    stored = manifest.get_job(1)
    assert stored is not None
    assert (stored.last_error, stored.attempts) == (error, 1)
    with pytest.raises(Invalid, match="taken"):
        commit(manifest, lambda txn: txn.enqueue_job(job(1)))
    with pytest.raises(Invalid, match="must begin as Pending"):
        commit(manifest, lambda txn: txn.enqueue_job(job(2, state=Completed(1))))
    commit(manifest, lambda txn: txn.enqueue_job(job(3)))
    commit(manifest, lambda txn: txn.update_job_state(3, FailedPermanent(9)))
    assert is_consistent(manifest)


def test_a_gate_lets_one_job_through(manifest: Manifest, clock: FakeClock) -> None:
    commit(manifest, lambda txn: txn.enqueue_job(job(1)))
    commit(manifest, lambda txn: txn.update_job_state(1, InFlight("w", 1, 1)))
    commit(manifest, lambda txn: txn.enqueue_job(job(2)))  # one in flight, one waiting
    commit(manifest, lambda txn: txn.enqueue_job(job(3, JobKind.FLUSH)))
    with pytest.raises(GateShut, match="job 1 holds the gate"):
        commit(manifest, lambda txn: txn.update_job_state(2, InFlight("w", 1, 1)))
    commit(manifest, lambda txn: txn.update_job_state(3, InFlight("w", 1, 1)))  # another kind, another gate
    now_ms = clock.time_us() // 1000
    commit(manifest, lambda txn: txn.update_job_state(1, FailedPermanent(8), token=1))
    assert gate(manifest) == FlushGateState(None, None, now_ms)
    clock.advance(5)
    commit(manifest, lambda txn: txn.update_job_state(2, InFlight("w", 1, 1)))
    commit(manifest, lambda txn: txn.update_job_state(2, Completed(9), token=1))
    assert gate(manifest) == FlushGateState(None, 9, None)
    assert gate(manifest, JobKind.FLUSH).active_job_id == 3
    assert is_consistent(manifest)


def test_metrics_are_merged_before_generations_move(manifest: Manifest) -> None:
    key = MetricKey(2**40, 1)
    receipt = manifest.apply(
        [
            BumpGeneration(ComponentId.WAL, 5),
            MergeMetric(key, MetricDelta(2.0, 1, 2.0, 2.0, (1,))),
            BumpGeneration(ComponentId.WAL, 1),
            BumpGeneration(99, 2),
            MergeMetric(key, MetricDelta(4.0, 1, 4.0, 4.0, (0, 1))),
        ]
    )
    assert receipt.generation == 6
    assert receipt.generations == {ComponentId.WAL: 6, 99: 2}
    record = manifest.read(lambda view: tables.METRICS.get(view, key))
    assert record is not None
    assert (record.sum, record.count, record.min, record.max, record.bucket_counts) == (6.0, 2, 2.0, 4.0, (1, 1))
    assert manifest.generation() == 0  # it had bumps of its own


def test_generations_never_go_back(manifest: Manifest) -> None:
    for increment in (0, -1, 2**64):
        with pytest.raises(Invalid):
            manifest.apply([BumpGeneration(7, increment)])
    assert manifest.apply([]).generation == 1
    assert manifest.apply([], generation_hint=10).generation == 10
    assert manifest.apply([], generation_hint=3).generation == 11


def test_an_unknown_operation_is_refused(manifest: Manifest) -> None:
    with pytest.raises(Invalid, match="not an operation"):
        manifest.apply(["drop everything"])  # type: ignore[list-item]


def test_reserved_ids_are_given_out_once(manifest: Manifest) -> None:
    ids = [manifest.reserve_job_id() for _ in range(150)]
    assert ids == list(range(1, 151))
    assert manifest.reserve_chunk_id() == 1


# -- metrics and archived chunks


def test_dropping_a_table_takes_its_metrics_alone(manifest: Manifest) -> None:
    """Ids that a scope of 32 bits would have taken for one (ADR 0003)."""
    scopes = (0, 1, 2, 2**32 + 1)

    def merge(txn: ManifestTxn) -> None:
        for scope in scopes:
            for kind in (1, 2**32 - 1):
                txn.merge_metric(MetricKey(scope, kind), MetricDelta(float(scope), 1, 0.0, 1.0))

    commit(manifest, merge)
    commit(manifest, lambda txn: txn.delete_metrics(2**32 + 1))
    left = manifest.read(lambda view: list(tables.METRICS.scan(view)))
    assert [(key.scope, record.sum) for key, record in left] == [(n, float(n)) for n in (0, 0, 1, 1, 2, 2)]
    commit(manifest, lambda txn: txn.delete_metrics(1))
    assert {key.scope for key, _ in manifest.read(lambda view: list(tables.METRICS.scan(view)))} == {0, 2}


STATES: tuple[ChunkResidency | None, ...] = (
    None,
    Local(),
    RemoteArchived("o"),
    RemoteArchived("o", verified=True),
    Evicted("o"),
)
STEPS: dict[int, tuple[int, ...]] = {0: (1,), 1: (2,), 2: (1, 3), 3: (1, 4), 4: (3,)}  # by index in STATES


def test_every_transition_of_residency_but_the_few_is_refused(manifest: Manifest) -> None:
    key = ChunkKey(1, 1)

    def row(value: ChunkResidency) -> ChunkEntryRecord:
        return ChunkEntryRecord("a", 1, 1, residency=value, staged=False)

    def reach(state: int) -> None:
        commit(manifest, lambda txn: txn.delete_chunk(key))
        if state:
            commit(manifest, lambda txn: txn.upsert_chunk(key, row(Local())))
        for step in range(2, state + 1):
            manifest.apply([SetResidency(key, STATES[step])])  # type: ignore[arg-type]

    for old in range(5):
        for new in range(1, 5):
            value = STATES[new]
            assert value is not None
            for operation in (UpsertChunk(key, row(value)), SetResidency(key, value)):
                reach(old)
                allowed = new in (*STEPS[old], old) and (old > 0 or isinstance(operation, UpsertChunk))
                if allowed:
                    manifest.apply([operation])
                else:
                    with pytest.raises((Invalid, NotFound)):
                        manifest.apply([operation])
                chunk = manifest.get_chunk(key)
                assert (chunk and chunk.residency) == (value if allowed else STATES[old])
            if old > 1 and new > 1:  # another object is never the same one
                reach(old)
                other = Evicted("p") if isinstance(value, Evicted) else RemoteArchived("p", value.verified)  # type: ignore[union-attr]
                with pytest.raises(Invalid):
                    manifest.apply([SetResidency(key, other)])
    reach(4)
    manifest.apply([UpsertChunk(key, row(Local()), replaces=True)])  # a snapshot was installed: its files are here
    with pytest.raises(Invalid, match="needs the key"):
        Evicted("")


def test_setting_a_residency_changes_nothing_else_of_a_row(manifest: Manifest) -> None:
    key, row = ChunkKey(1, 1), ChunkEntryRecord("a", 7, 9, wal_range=(1, 5), detail=b"level 3")
    commit(manifest, lambda txn: txn.upsert_chunk(key, row))
    manifest.apply([SetResidency(key, RemoteArchived("o"), 12)])
    manifest.apply([SetResidency(key, RemoteArchived("o", verified=True))])
    changed = msgspec.structs.replace(row, residency=RemoteArchived("o", verified=True), uploaded_at_epoch_ms=12)
    assert manifest.get_chunk(key) == changed
    manifest.apply([SetResidency(key, Local())])
    assert manifest.get_chunk(key) == row
    staged = ChunkEntryRecord("b", 1, 1, staged=True, purge_after_epoch_ms=1)
    commit(manifest, lambda txn: txn.upsert_chunk(ChunkKey(1, 2), staged))
    with pytest.raises(Invalid, match="once it is adopted"):
        manifest.apply([SetResidency(ChunkKey(1, 2), RemoteArchived("o"))])
