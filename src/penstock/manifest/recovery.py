"""Recovery of the control plane: the eight steps from an open manifest to the state of a store.

The cost follows the tables, partitions and unfinished jobs, not the chunks or the finished jobs: the chunks of a table
are read on demand, pending jobs are found by the pending index, and jobs in flight by the gates they hold.

Thread: the one that opens the store, before any worker starts.
Invariant: recovery is idempotent, also after a crash in it: every step that writes is one commit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.manifest.engine import ReadView
from penstock.manifest.jobs import JobQueue
from penstock.manifest.keys import WHOLE_STORE, ChunkKey, JobId, MetricKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import (
    ChunkEntryRecord,
    DbDescriptorRecord,
    Evicted,
    FlushGateState,
    GenerationWaiterSnapshot,
    JobRecord,
    MetricRecord,
    RemoteArchived,
    WalStateRecord,
)
from penstock.manifest.tables import DB, GENERATIONS, JOBS, METRICS, PENDING, partitions


@dataclass(frozen=True, kw_only=True)
class RecoveredTable:
    """A table, its partitions by shard, and its gates by job kind."""

    descriptor: DbDescriptorRecord
    partitions: Mapping[int, WalStateRecord]
    gates: Mapping[int, FlushGateState]


@dataclass(frozen=True, kw_only=True)
class RecoveredState:
    """The recovered state of a store, without the chunks."""

    migrated: int  # records rewritten by migrations
    tables: Mapping[int, RecoveredTable]
    store_gates: Mapping[int, FlushGateState]  # of jobs that belong to no table
    pending_jobs: tuple[JobRecord, ...]  # by id; repairs included
    repairs: tuple[JobId, ...]  # those of pending_jobs that this recovery added or retried
    metrics: Mapping[MetricKey, MetricRecord]
    generations: Mapping[int, int]
    waiters: tuple[tuple[int, GenerationWaiterSnapshot], ...]  # with their component, to register again
    _manifest: Manifest = field(repr=False)

    def chunks(self, db_id: int) -> Iterator[tuple[ChunkKey, ChunkEntryRecord]]:
        """Iterate over a table's chunks, read on demand."""
        return self._manifest.scan_chunks(db_id)

    def chunks_to_verify(self, db_id: int) -> Iterator[tuple[ChunkKey, ChunkEntryRecord]]:
        """Iterate over the chunks whose archived copy is not verified."""
        for key, chunk in self.chunks(db_id):
            if isinstance(chunk.residency, RemoteArchived) and not chunk.residency.verified:
                yield key, chunk

    def chunks_to_rehydrate(self, db_id: int) -> Iterator[tuple[ChunkKey, ChunkEntryRecord]]:
        """Iterate over the chunks that are in the archive only."""
        for key, chunk in self.chunks(db_id):
            if isinstance(chunk.residency, Evicted):
                yield key, chunk


def recover(manifest: Manifest, jobs: JobQueue) -> RecoveredState:
    """Queue repairs for unfinished jobs, and read everything but the chunks.

    Step 1, opening and migrating, is `Manifest.open`; step 4, the chunks, is left to `RecoveredState.chunks`; step 8,
    starting service, is the caller's.
    """
    repairs = tuple(jobs.compensate_orphans())  # the half of step 5 that writes
    now_ms = manifest.clock.time_us() // 1_000

    def load(view: ReadView) -> RecoveredState:
        return RecoveredState(
            migrated=manifest.migrated,
            tables={db_id: _table(view, db_id, descriptor) for db_id, descriptor in DB.scan(view)},  # steps 2, 3
            store_gates=_gates(view, WHOLE_STORE),
            pending_jobs=_pending(view),  # step 5
            repairs=repairs,
            metrics=dict(METRICS.scan(view)),  # step 6
            generations={component: row.current_generation for component, row in GENERATIONS.scan(view)},  # step 7
            waiters=_waiters(view, now_ms),
            _manifest=manifest,
        )

    return manifest.read(load)


def _table(view: ReadView, db_id: int, descriptor: DbDescriptorRecord) -> RecoveredTable:
    shards = {key.shard: record for key, record in partitions(view, db_id)}
    return RecoveredTable(descriptor=descriptor, partitions=shards, gates=_gates(view, db_id))


def _gates(view: ReadView, db_id: int) -> dict[int, FlushGateState]:
    return {
        kind: gate
        for key, record in partitions(view, db_id)
        if key.shard == 0
        for kind, gate in record.gates()
        if gate != FlushGateState()
    }


def _pending(view: ReadView) -> tuple[JobRecord, ...]:
    jobs = (JOBS.get(view, row.job_id) for _, row in PENDING.scan(view))
    return tuple(sorted((job for job in jobs if job is not None), key=lambda job: job.job_id))


def _waiters(view: ReadView, now_ms: int) -> tuple[tuple[int, GenerationWaiterSnapshot], ...]:
    """Return the waiters of each component's last commit that still wait and have not expired."""
    return tuple(
        (component, waiter)
        for component, row in GENERATIONS.scan(view)
        for waiter in row.blocked_waiters
        if waiter.target_generation > row.current_generation and waiter.deadline_epoch_ms > now_ms
    )
