"""Background work and files for people to look at: the durable jobs of a store, and the chunks of a table.

Thread: any; jobs and rows of chunks are read from the manifest, in one transaction each, and a queue's files from its
own manifest, which alone decides what a queue holds.
Invariant: reading changes nothing, and what is returned is bounded: at most JOBS_MAX jobs, the newest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.errors import Invalid, NotFound
from penstock.journal.partitions import PartitionId
from penstock.kinds import FileKeeping, partitions_of
from penstock.lsm.catalog import TableDetail
from penstock.manifest.engine import ReadView
from penstock.manifest.jobs import JobQueue
from penstock.manifest.keys import ChunkKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import (
    ChunkEntryRecord,
    ChunkResidency,
    Completed,
    Evicted,
    FailedPermanent,
    InFlight,
    JobKind,
    JobRecord,
    Local,
    RemoteArchived,
)
from penstock.manifest.tables import JOBS, chunks
from penstock.partition.ledger_records import TableInfo
from penstock.registry import kind_named
from penstock.store.reports import ChunkSummary, JobSummary

JOBS_MAX = 2_000


def read_jobs(manifest: Manifest, name_of: Callable[[int], str | None]) -> list[JobSummary]:
    """Return the newest jobs, the oldest of them first."""

    def newest(view: ReadView) -> list[JobRecord]:
        return [job for _, job in JOBS.scan(view)][-JOBS_MAX:]

    return [_job(job, name_of(job.table) or "") for job in manifest.read(newest)]


def _job(job: JobRecord, table: str) -> JobSummary:
    state, kind = job.state, _kind(job.gate_kind)
    ended = state.finished_at_ms * 1_000 if isinstance(state, Completed | FailedPermanent) else None
    running = state if isinstance(state, InFlight) else None
    return JobSummary(
        job=job.job_id,
        kind=kind if job.repairs_kind is None else f"repair of {kind}",
        table=table,
        state="running" if running else _STATES.get(type(state), "pending"),
        attempts=job.attempts,
        attempts_max=job.attempts_max,
        created_us=job.created_at_epoch_ms * 1_000,
        started_us=None if running is None else running.leased_at_ms * 1_000,
        finished_us=ended,
        worker="" if running is None else running.worker_id,
        error="" if job.last_error is None else f"{job.last_error.kind}: {job.last_error.message}",
        failed_us=None if job.last_error is None else job.last_error.at_epoch_ms * 1_000,
    )


_STATES: dict[type, str] = {Completed: "done", FailedPermanent: "failed"}


def _kind(number: int) -> str:
    try:
        return JobKind(number).name.lower()
    except ValueError:
        return f"kind {number}"  # a user's


def retry_job(manifest: Manifest, jobs: JobQueue, job_id: int) -> int:
    """Enqueue a job that failed once more; return the number of the new one. `Invalid` if it did not fail."""
    job = _existing(manifest, job_id)
    if not isinstance(job.state, FailedPermanent):
        raise Invalid(f"job {job_id} has not failed for good: only such a job is retried")
    holder = jobs.gate(job.db_id, job.gate_kind).state().active_job_id
    if holder == job_id:  # a repair that failed: until one succeeds, no other job of its kind can run
        return jobs.repair(job.db_id, job.gate_kind)
    return jobs.enqueue(job.gate_kind, db_id=job.db_id, payload=job.payload)


def _existing(manifest: Manifest, job_id: int) -> JobRecord:
    job = manifest.get_job(job_id)
    if job is None:
        raise NotFound(f"there is no job {job_id}: finished ones are removed after a while")
    return job


def read_chunks(
    manifest: Manifest,
    table_id: int,
    table: str,
    detail_of: Callable[[ChunkKey, ChunkEntryRecord], TableDetail],
) -> list[ChunkSummary]:
    """Return the files of a table by shard, level and number. `detail_of` decodes a tree's part of a row."""
    summaries: list[ChunkSummary] = []
    for key, row in manifest.read(lambda view: list(chunks(view, table_id))):
        if row.staged:
            continue
        detail = detail_of(key, row)
        summaries.append(
            ChunkSummary(
                chunk=key.chunk_id,
                table=table,
                shard=detail.shard,
                level=detail.level,
                rows=detail.rows,
                deletes=detail.deletes,
                size_bytes=row.size_bytes,
                lsn_min=row.wal_range[0],
                lsn_max=row.wal_range[1] - 1,
                start=detail.start,
                end=detail.end,
                file=row.file_name,
                residency=_residency(row.residency),
                encrypted=row.encrypted,
                object="" if isinstance(row.residency, Local) else row.residency.object,
            )
        )
    return sorted(summaries, key=lambda summary: (summary.shard, summary.level, summary.chunk))


def read_sealed(info: TableInfo, machine: Callable[[PartitionId], Any]) -> list[ChunkSummary]:
    """Return the files that a table keeps beside the manifest, and that never change. Opens its shards."""
    kind = kind_named(info.kind, info.name)
    if not isinstance(kind, FileKeeping):
        return []
    return [
        ChunkSummary(
            chunk=file.number,
            table=info.name,
            shard=shard,
            level=0,
            rows=file.rows,
            deletes=0,
            size_bytes=file.size,
            lsn_min=0,
            lsn_max=0,
            start=file.start,
            end=file.end,
            file=file.path,
            residency="local",
            encrypted=info.key is not None,
        )
        for shard, partition in enumerate(partitions_of(info))
        for file in kind.sealed_files(machine(partition))
    ]


def _residency(residency: ChunkResidency) -> str:
    if isinstance(residency, RemoteArchived):
        return "archived" if residency.verified else "unverified"
    return "evicted" if isinstance(residency, Evicted) else "local"
