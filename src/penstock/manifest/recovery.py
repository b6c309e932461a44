"""Recovery of the control plane: the eight steps from an open manifest to the state of a store.

    1 open and migrate            `Manifest.open`
    2 descriptors of tables       `RecoveredState.descriptors`, if they are behind the ledger; else when they are used
    3 progress and gates          a partition reads its row when it is opened; a gate is read where it is needed
    4 chunks                      `RecoveredState.chunks`, when a table is first used; then, in the background, the
                                  archive enqueues a VERIFY job if copies are not verified, or evicted files still here
    5 jobs                        repairs are queued for those whose process died; the runners find all that wait
    6 metrics                     `RecoveredState.metrics_of`, when the metrics of a table are first counted
    7 generations and waiters     read by `Manifest.open`; waiters that still have time are registered again
    8 service                     the store's: it replays the journal, then starts its tasks

After a clean end the cost grows with the jobs that wait; otherwise with the partitions, too, because jobs in flight are
found by the gates they hold. It never grows with the chunks, metrics or finished jobs.

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
)
from penstock.manifest.tables import DB, GENERATIONS, JOBS, METRICS, PENDING, partitions


@dataclass(frozen=True, kw_only=True)
class RecoveredState:
    """The recovered state of a store. What belongs to one table is read when it is needed."""

    migrated: int  # records rewritten by migrations
    store_gates: Mapping[int, FlushGateState]  # of jobs that belong to no table
    pending_jobs: tuple[JobRecord, ...]  # by id; repairs included
    repairs: tuple[JobId, ...]  # those of pending_jobs that this recovery added or retried
    generations: Mapping[int, int]
    waiters: tuple[tuple[int, GenerationWaiterSnapshot], ...]  # with their component; registered again
    last_commit_ms: int  # when the process before this one last committed; 0: never
    dropped_waiters: int  # those whose deadline has passed, or whose generation was reached
    _manifest: Manifest = field(repr=False)

    def descriptors(self) -> dict[int, DbDescriptorRecord]:
        """Return the descriptors of all tables."""
        return self._manifest.read(lambda view: dict(DB.scan(view)))

    def descriptor(self, db_id: int) -> DbDescriptorRecord | None:
        """Return the descriptor of a table; None if it has none."""
        return self._manifest.get_db(db_id)

    def metrics_of(self, scope: int) -> dict[int, MetricRecord]:
        """Return the metrics of a table, or of the store (0), by kind."""
        start, stop = MetricKey(scope, 0), MetricKey(scope + 1, 0)
        return self._manifest.read(lambda view: {key.kind: record for key, record in METRICS.scan(view, start, stop)})

    def chunks(self, db_id: int) -> Iterator[tuple[ChunkKey, ChunkEntryRecord]]:
        """Iterate over a table's chunks."""
        return self._manifest.scan_chunks(db_id)

    def chunks_to_verify(self, db_id: int) -> Iterator[tuple[ChunkKey, ChunkEntryRecord]]:
        """Iterate over the chunks whose archived copy is not verified."""
        for key, chunk in self.chunks(db_id):
            if isinstance(chunk.residency, RemoteArchived) and not chunk.residency.verified:
                yield key, chunk

    def chunks_in_archive(self, db_id: int) -> Iterator[tuple[ChunkKey, ChunkEntryRecord]]:
        """Iterate over the chunks that are in the archive only."""
        for key, chunk in self.chunks(db_id):
            if isinstance(chunk.residency, Evicted):
                yield key, chunk


def recover(manifest: Manifest, jobs: JobQueue, *, was_idle: bool = False) -> RecoveredState:
    """Queue repairs for unfinished jobs, register waiters again, and read what belongs to no single table.

    `was_idle`: the process before this one ended cleanly, and no job held a gate.
    """
    repairs = () if was_idle else tuple(jobs.compensate_orphans())  # the half of step 5 that writes
    now_ms = manifest.clock.time_us() // 1_000

    def load(view: ReadView) -> RecoveredState:
        waiting, stale = _waiters(view, now_ms)
        return RecoveredState(
            migrated=manifest.migrated,
            store_gates=_gates(view, WHOLE_STORE),  # step 3
            pending_jobs=_pending(view),  # step 5
            repairs=repairs,
            generations={component: row.current_generation for component, row in GENERATIONS.scan(view)},  # step 7
            waiters=waiting,
            last_commit_ms=max((row.last_committed_at_epoch_ms for _, row in GENERATIONS.scan(view)), default=0),
            dropped_waiters=stale,
            _manifest=manifest,
        )

    state = manifest.read(load)
    for component, waiter in state.waiters:
        timeout_s = (waiter.deadline_epoch_ms - now_ms) / 1_000
        manifest.register_waiter(component, waiter.target_generation, timeout_s)
    return state


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


def _waiters(view: ReadView, now_ms: int) -> tuple[tuple[tuple[int, GenerationWaiterSnapshot], ...], int]:
    """Return the waiters of each component's last commit that still wait and have time; also count the others."""
    waiters = [(component, row, waiter) for component, row in GENERATIONS.scan(view) for waiter in row.blocked_waiters]
    waiting = tuple(
        (component, waiter)
        for component, row, waiter in waiters
        if waiter.target_generation > row.current_generation and waiter.deadline_epoch_ms > now_ms
    )
    return waiting, len(waiters) - len(waiting)
