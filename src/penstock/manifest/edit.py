"""Applying operations of the manifest in a transaction.

A batch is applied in order, except that metric merges come after everything else and generation bumps last. A batch
without a bump of its own bumps the component MANIFEST, so that every commit can be waited for.

Job operations keep three things consistent, in the same transaction: the job's state, its row in the pending index, and
the gate of its table and kind (`wal_state`, shard 0). Nothing else changes a gate: `PutWalState` keeps the gates.

Thread: the one that has the writer's turn; an `Edit` is used for one transaction.
Invariants: checked at the end of every batch, see `invariants.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.errors import GateShut, Invalid, LeaseLost, NotFound, UniqueJobAlreadyPending
from penstock.manifest.engine import WriteView
from penstock.manifest.invariants import check_job
from penstock.manifest.keys import U64_MAX, ChunkKey, ComponentId, MetricKey, WalStateKey
from penstock.manifest.operations import (
    BumpGeneration,
    CommitReceipt,
    DeleteChunk,
    DeleteDb,
    DeleteMetrics,
    DeletePendingIndex,
    DeleteWalState,
    ManifestOp,
    MergeMetric,
    PutDb,
    PutJob,
    PutWalState,
    RemoveJob,
    SetResidency,
    UpdateJobState,
    UpsertChunk,
    UpsertPendingIndex,
)
from penstock.manifest.records import (
    Completed,
    DbNameRecord,
    FailedPermanent,
    GenerationRecord,
    GenerationWaiterSnapshot,
    InFlight,
    JobKind,
    JobRecord,
    Local,
    MetricRecord,
    Pending,
    PendingJobRecord,
    Tombstoned,
    WalStateRecord,
)
from penstock.manifest.residency import check_residency
from penstock.manifest.tables import (
    CHUNK_FILES,
    CHUNKS,
    DB,
    DB_NAMES,
    GENERATIONS,
    JOBS,
    METRICS,
    PENDING,
    WAL_STATE,
    chunks,
    partitions,
)

_MANIFEST = int(ComponentId.MANIFEST)
_NO_PROGRESS = WalStateRecord()


class ManifestBatch:
    """Operations in the order of application, prepared by the calling thread to keep the writer's turn short."""

    __slots__ = ("bumps", "hint", "operations", "steps")

    def __init__(self, operations: Sequence[ManifestOp], generation_hint: int | None = None) -> None:
        steps: list[tuple[Callable[[ManifestEdit, Any], None], Any]] = []
        merges: list[tuple[Callable[[ManifestEdit, Any], None], Any]] = []
        bumps: list[BumpGeneration] = []
        for operation in operations:
            kind = type(operation)
            if kind in _APPLY:
                step = _APPLY[kind], operation.prepare()
                (merges if kind is MergeMetric else steps).append(step)
            elif isinstance(operation, BumpGeneration):
                bumps.append(operation)
            else:
                raise Invalid(f"{operation!r} is not an operation of the manifest")
        self.operations = operations
        self.steps = steps + merges
        self.bumps = bumps
        self.hint = generation_hint

    def frees_space(self) -> bool:
        """Return whether the batch may run when the manifest is full."""
        return all(operation.frees_space for operation in self.operations)


class ManifestEdit:
    """The application of one or more batches in one transaction."""

    def __init__(self, view: WriteView, generations: Mapping[int, int], now_ms: int) -> None:
        self.generations: dict[int, int] = {}  # changed by this transaction
        self._view = view
        self._before = generations
        self._now_ms = now_ms
        self._touched_jobs: set[int] = set()

    def apply(self, batch: ManifestBatch) -> CommitReceipt:
        """Apply one batch; after an exception the whole transaction must be rolled back."""
        for apply, prepared in batch.steps:
            apply(self, prepared)
        if self._touched_jobs:
            for job_id in self._touched_jobs:
                check_job(self._view, job_id)
            self._touched_jobs.clear()
        if not batch.bumps:
            generation = self._implicit_bump(batch.hint)
            return CommitReceipt(generation, {_MANIFEST: generation})
        reached = {bump.component: self._bump(bump.component, bump.increment) for bump in batch.bumps}
        return CommitReceipt(max(reached.values()), reached)

    def finish(self, waiting: Callable[[int, int], tuple[GenerationWaiterSnapshot, ...]]) -> None:
        """Write the generations once for all batches, with the waiters for later ones."""
        for component, generation in self.generations.items():
            record = GenerationRecord(generation, self._now_ms, waiting(component, generation))
            GENERATIONS.put(self._view, component, record)

    # -- generations and metrics

    def _bump(self, component: int, increment: int) -> int:
        if increment < 1:
            raise Invalid(f"component {component} cannot move by {increment}: generations never go back")
        generation = self.generations.get(component, self._before.get(component, 0)) + increment
        if generation > U64_MAX:
            raise Invalid(f"component {component} cannot move by {increment}: generations are 64-bit numbers")
        self.generations[component] = generation
        return generation

    def _implicit_bump(self, hint: int | None) -> int:
        current = self.generations.get(_MANIFEST, self._before.get(_MANIFEST, 0))
        return self._bump(_MANIFEST, max(1, (hint or 0) - current))

    def _merge_metric(self, prepared: tuple[MergeMetric, bytes]) -> None:
        operation, key = prepared
        record, delta = METRICS.get_packed(self._view, key), operation.delta
        if record is not None:
            record = record.merged(delta, self._now_ms)
        else:
            record = MetricRecord(delta.sum, delta.count, delta.min, delta.max, delta.bucket_counts, self._now_ms)
        METRICS.put_packed(self._view, key, record)

    def _delete_metrics(self, operation: DeleteMetrics) -> None:
        for key, _ in list(METRICS.scan(self._view, MetricKey(operation.scope, 0), MetricKey(operation.scope + 1, 0))):
            METRICS.delete(self._view, key)

    # -- tables, partitions, chunks

    def _put_db(self, operation: PutDb) -> None:
        value = operation.value
        if operation.db_id < 1:
            raise Invalid("table ids start at 1")
        old, owner = DB.get(self._view, operation.db_id), DB_NAMES.get(self._view, value.name)
        if old is not None and isinstance(old.status, Tombstoned) and not isinstance(value.status, Tombstoned):
            raise Invalid(f"table {operation.db_id} ({old.name}) was dropped: it does not come back")
        if old is not None and not isinstance(old.status, Tombstoned):
            DB_NAMES.delete(self._view, old.name)
        if not isinstance(value.status, Tombstoned):
            if owner is not None and owner.db_id != operation.db_id:
                raise Invalid(f"table {owner.db_id} has the name {value.name!r} already: choose another")
            DB_NAMES.put(self._view, value.name, DbNameRecord(operation.db_id))
        DB.put(self._view, operation.db_id, value)

    def _delete_db(self, operation: DeleteDb) -> None:
        """Remove a descriptor, as the last row of its table: without it the others could not be found."""
        old = DB.get(self._view, operation.db_id)
        if old is None:
            return
        where = f"table {operation.db_id} ({old.name})"
        if not isinstance(old.status, Tombstoned):
            raise Invalid(f"{where} is not tombstoned: it cannot be removed")
        for _ in chunks(self._view, operation.db_id):
            raise Invalid(f"{where} has chunks: they are removed first")
        for _ in partitions(self._view, operation.db_id):
            raise Invalid(f"{where} has partitions: they are removed first")
        DB.delete(self._view, operation.db_id)

    def _put_wal_state(self, prepared: tuple[PutWalState, bytes]) -> None:
        operation, key = prepared
        old = WAL_STATE.get_packed(self._view, key) or _NO_PROGRESS
        value = operation.value if operation.replaces else old.raised(operation.value)
        if operation.key.shard == 0:
            value = msgspec.structs.replace(value, flush_gate_state=old.flush_gate_state, other_gates=old.other_gates)
        elif value.other_gates or value.flush_gate_state != _NO_PROGRESS.flush_gate_state:
            raise Invalid(f"partition {operation.key}: gates are in shard 0 and follow the jobs")
        WAL_STATE.put_packed(self._view, key, value)

    def _delete_wal_state(self, operation: DeleteWalState) -> None:
        """Remove a partition, with the repairs that wait or gave up: nothing is left to repair."""
        old = WAL_STATE.get(self._view, operation.key)
        for kind, gate in old.gates() if old is not None else ():
            if gate.active_job_id is None:
                continue
            job = self._job(gate.active_job_id)
            if isinstance(job.state, InFlight):
                where = f"table {operation.key.db_id}, shard {operation.key.shard}"
                raise GateShut(f"{where}: job {job.job_id} holds the gate of kind {kind}")
            if isinstance(job.state, Pending):
                self._leave_pending(job)
                self._write_job(msgspec.structs.replace(job, state=Completed(self._now_ms)))
        WAL_STATE.delete(self._view, operation.key)

    def _upsert_chunk(self, prepared: tuple[UpsertChunk, bytes, bytes, bytes, bytes]) -> None:
        operation, chunk_key, chunk, file_key, mine = prepared
        view, key, value = self._view, operation.key, operation.value
        old = CHUNKS.get_packed(view, chunk_key)
        if not operation.replaces:
            check_residency(_chunk(key), old, value.residency)
        owner = view.get(CHUNK_FILES.name, file_key)
        if owner is None:
            if old is not None:
                CHUNK_FILES.delete(view, old.file_name)
            view.put(CHUNK_FILES.name, file_key, mine)
        elif owner != mine:
            other = CHUNK_FILES.codec.decode(file_key, owner)
            raise Invalid(
                f"file {value.file_name} belongs to chunk {other.chunk_id} of table {other.db_id}, "
                f"it cannot be chunk {key.chunk_id} of table {key.db_id} too"
            )
        view.put(CHUNKS.name, chunk_key, chunk)

    def _set_residency(self, operation: SetResidency) -> None:
        old = CHUNKS.get(self._view, operation.key)
        if old is None:
            raise NotFound(f"{_chunk(operation.key)} is not in the manifest any more")
        check_residency(_chunk(operation.key), old, operation.value)
        at = operation.uploaded_at_epoch_ms
        uploaded = old.uploaded_at_epoch_ms if at is None else at
        if isinstance(operation.value, Local):
            uploaded = None
        CHUNKS.put(
            self._view,
            operation.key,
            msgspec.structs.replace(old, residency=operation.value, uploaded_at_epoch_ms=uploaded),
        )

    def _delete_chunk(self, operation: DeleteChunk) -> None:
        old = CHUNKS.get(self._view, operation.key)
        if old is not None:
            CHUNKS.delete(self._view, operation.key)
            CHUNK_FILES.delete(self._view, old.file_name)

    # -- jobs

    def _put_job(self, operation: PutJob) -> None:
        job = operation.value
        if job.job_id < 1 or JOBS.get(self._view, job.job_id) is not None:
            raise Invalid(f"job id {job.job_id} is taken or below 1: reserve one with reserve_job_id()")
        if not isinstance(job.state, Pending) or job.attempts:
            raise Invalid(f"job {job.job_id} must begin as Pending with no attempts")
        self._write_job(job)
        if job.kind == JobKind.REPAIR:
            self._take_gate(job, held_by=job.repairs_job_id)

    def _update_job_state(self, operation: UpdateJobState) -> None:
        job, new = self._job(operation.job_id), operation.new_state
        old = job.state
        if isinstance(new, InFlight) and isinstance(old, Pending):
            if new.token != job.attempts + 1:
                raise LeaseLost(f"job {job.job_id}: token {new.token} is not the next one ({job.attempts + 1})")
            job = msgspec.structs.replace(job, attempts=new.token)
            self._leave_pending(job)
            self._take_gate(job, held_by=None)
        elif isinstance(old, InFlight) and not isinstance(new, InFlight):
            if operation.token != old.token:
                raise LeaseLost(f"job {job.job_id} is leased under token {old.token}, not {operation.token}")
            self._leave_gate(job, operation)
        elif isinstance(old, Pending) and isinstance(new, FailedPermanent) and job.kind != JobKind.REPAIR:
            self._leave_pending(job)  # failed before a worker took it
        elif operation.token is not None:
            raise LeaseLost(f"job {job.job_id} is {type(old).__name__}: token {operation.token} is over")
        else:
            raise Invalid(f"job {job.job_id} cannot go from {type(old).__name__} to {type(new).__name__}")
        self._write_job(msgspec.structs.replace(job, state=new, last_error=operation.error or job.last_error))

    def _leave_pending(self, job: JobRecord) -> None:
        """Remove a job's pending row, if it has one."""
        row = PENDING.get(self._view, job.pending_key)
        if row is not None and row.job_id == job.job_id:
            PENDING.delete(self._view, job.pending_key)

    def _remove_job(self, operation: RemoveJob) -> None:
        job = self._job(operation.job_id)
        if isinstance(job.state, InFlight):
            raise Invalid(f"job {job.job_id} is in flight: it cannot be removed")
        gates = WAL_STATE.get(self._view, WalStateKey(job.table, 0)) or WalStateRecord()
        if gates.gate(job.gate_kind).active_job_id == job.job_id:
            raise Invalid(f"job {job.job_id} holds a gate until it is repaired: it cannot be removed")
        if isinstance(job.state, Pending):
            self._leave_pending(job)
        JOBS.delete(self._view, job.job_id)
        self._touched_jobs.discard(job.job_id)

    def _upsert_pending_index(self, operation: UpsertPendingIndex) -> None:
        row = PENDING.get(self._view, operation.key)
        if row is not None and row.job_id != operation.job_id:
            raise UniqueJobAlreadyPending(
                f"table {operation.key.db_id}: job {row.job_id} of kind {operation.key.kind} is already pending"
            )
        if self._job(operation.job_id).pending_key != operation.key:
            raise Invalid(f"job {operation.job_id} does not wait under {operation.key}")
        PENDING.put(self._view, operation.key, PendingJobRecord(operation.job_id))
        self._touched_jobs.add(operation.job_id)

    def _delete_pending_index(self, operation: DeletePendingIndex) -> None:
        row = PENDING.get(self._view, operation.key)
        if row is not None:
            PENDING.delete(self._view, operation.key)
            self._touched_jobs.add(row.job_id)

    def _job(self, job_id: int) -> JobRecord:
        job = JOBS.get(self._view, job_id)
        if job is None:
            raise NotFound(f"job {job_id} is not in the manifest")
        return job

    def _write_job(self, job: JobRecord) -> None:
        JOBS.put(self._view, job.job_id, job)
        self._touched_jobs.add(job.job_id)

    # -- gates

    def _take_gate(self, job: JobRecord, *, held_by: int | None) -> None:
        key = WalStateKey(job.table, 0)
        state = WAL_STATE.get(self._view, key) or WalStateRecord()
        gate = state.gate(job.gate_kind)
        if gate.active_job_id not in (None, job.job_id, held_by):
            raise GateShut(f"table {job.table}: job {gate.active_job_id} holds the gate of kind {job.gate_kind}")
        gate = msgspec.structs.replace(gate, active_job_id=job.job_id)
        WAL_STATE.put(self._view, key, state.with_gate(job.gate_kind, gate))

    def _leave_gate(self, job: JobRecord, operation: UpdateJobState) -> None:
        key, new = WalStateKey(job.table, 0), operation.new_state
        state = WAL_STATE.get(self._view, key) or WalStateRecord()
        gate = state.gate(job.gate_kind)
        if isinstance(new, Completed):
            gate = msgspec.structs.replace(
                gate, active_job_id=None, last_success_at_epoch_ms=new.finished_at_ms, errored_since_epoch_ms=None
            )
        else:
            since = gate.errored_since_epoch_ms
            # A failed repair keeps the gate: what it should have repaired is still broken.
            holder = job.job_id if job.kind == JobKind.REPAIR else None
            gate = msgspec.structs.replace(
                gate, active_job_id=holder, errored_since_epoch_ms=self._now_ms if since is None else since
            )
        WAL_STATE.put(self._view, key, state.with_gate(job.gate_kind, gate))


_APPLY: dict[type[Any], Callable[[ManifestEdit, Any], None]] = {
    PutDb: ManifestEdit._put_db,
    DeleteDb: ManifestEdit._delete_db,
    PutWalState: ManifestEdit._put_wal_state,
    DeleteWalState: ManifestEdit._delete_wal_state,
    UpsertChunk: ManifestEdit._upsert_chunk,
    SetResidency: ManifestEdit._set_residency,
    DeleteChunk: ManifestEdit._delete_chunk,
    DeleteMetrics: ManifestEdit._delete_metrics,
    PutJob: ManifestEdit._put_job,
    UpdateJobState: ManifestEdit._update_job_state,
    RemoveJob: ManifestEdit._remove_job,
    UpsertPendingIndex: ManifestEdit._upsert_pending_index,
    DeletePendingIndex: ManifestEdit._delete_pending_index,
    MergeMetric: ManifestEdit._merge_metric,
}


def _chunk(key: ChunkKey) -> str:
    return f"chunk {key.chunk_id} of table {key.db_id}"
