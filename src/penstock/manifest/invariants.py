"""Invariants between rows of the manifest.

`check_job` runs on every commit, for the jobs it touched; the other rules are enforced by the operations themselves,
which alone write those rows. `check_all` reads everything: for files that may be damaged, and for tests.

Thread: any; works on a view.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import Invalid
from penstock.manifest.engine import ReadView
from penstock.manifest.keys import WalStateKey
from penstock.manifest.records import InFlight, JobKind, JobRecord, Pending, Tombstoned, WalStateRecord
from penstock.manifest.tables import CHUNK_FILES, CHUNKS, DB, GENERATIONS, JOBS, METRICS, PENDING, WAL_STATE, names


def check_job(view: ReadView, job_id: int) -> None:
    """Raise `Invalid` unless a job matches its row in the pending index and its gate."""
    job = JOBS.get(view, job_id)
    for broken in () if job is None else _job_faults(view, job):
        raise Invalid(f"this commit would break the manifest: {broken}")


def check_all(view: ReadView) -> Iterator[str]:
    """Decode every row and yield each violated rule."""
    yield from _name_faults(view)
    for _ in METRICS.scan(view):
        pass
    for _ in GENERATIONS.scan(view):
        pass
    for _, job in JOBS.scan(view):
        yield from _job_faults(view, job)
    for key, row in PENDING.scan(view):
        pending = JOBS.get(view, row.job_id)
        if pending is None or not isinstance(pending.state, Pending) or pending.pending_key != key:
            yield f"pending index {key} names job {row.job_id}, which does not wait there"
    for partition, state in WAL_STATE.scan(view):
        for kind, gate in state.gates():
            yield from _gate_faults(view, partition, kind, gate.active_job_id)
    yield from _chunk_faults(view)


def _job_faults(view: ReadView, job: JobRecord) -> Iterator[str]:
    row = PENDING.get(view, job.pending_key)
    waits = row is not None and row.job_id == job.job_id
    if waits != isinstance(job.state, Pending):
        yield f"job {job.job_id} is {type(job.state).__name__} and its pending index row says {row}"
    if isinstance(job.state, InFlight):
        state = WAL_STATE.get(view, WalStateKey(job.table, 0)) or WalStateRecord()
        holder = state.gate(job.gate_kind).active_job_id
        if holder != job.job_id:
            yield f"job {job.job_id} is in flight and job {holder} holds its gate"


def _gate_faults(view: ReadView, partition: WalStateKey, kind: int, job_id: int | None) -> Iterator[str]:
    if job_id is None:
        return
    job = JOBS.get(view, job_id)
    if job is None or partition.shard != 0 or job.table != partition.db_id or job.gate_kind != kind:
        yield f"the gate of kind {kind} of {partition} is held by job {job_id}, which it does not fit"
    elif not isinstance(job.state, InFlight) and job.kind != JobKind.REPAIR:
        yield f"the gate of kind {kind} of {partition} is held by job {job_id}, which is not in flight"


def _name_faults(view: ReadView) -> Iterator[str]:
    named = {name: row.db_id for name, row in names(view)}
    alive = {row.name: db_id for db_id, row in DB.scan(view) if not isinstance(row.status, Tombstoned)}
    for name in sorted(named.keys() | alive.keys()):
        if named.get(name) != alive.get(name):
            yield f"the name {name} is that of table {alive.get(name)}, its index says {named.get(name)}"


def _chunk_faults(view: ReadView) -> Iterator[str]:
    rows = files = 0
    for key, chunk in CHUNKS.scan(view):
        rows += 1
        owner = CHUNK_FILES.get(view, chunk.file_name)
        if owner is None or (owner.db_id, owner.chunk_id) != key:
            yield f"chunk {key} has the file {chunk.file_name}, which belongs to {owner}"
    for _ in CHUNK_FILES.scan(view):
        files += 1
    if rows != files:
        yield f"{files} files belong to {rows} chunks"
