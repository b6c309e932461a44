"""Durable jobs: enqueue, lease, complete, retry, compensate.

A worker leases a job, works, and completes it with the token of its lease. The token is durable and checked in the
completing commit, so a worker that outlived its lease changes nothing. The expiry of a lease is in memory only and by
monotonic time: after a restart every lease counts as expired, and jumps of the wall clock have no effect.

A job whose worker vanished, in this process or an earlier one, fails for good and is replaced by a *repair*: a job with
the same payload that holds the gate of the kind it repairs until it succeeds.

Thread: any. `_lock` guards the leases and backoffs and is never held during a commit.
Invariant: of a table and kind, at most one job is pending and at most one in flight (`edit.py` enforces it).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from penstock.arguments import COUNT_MAX, DAY_S, set_seconds, set_wholes
from penstock.errors import FixTheCall, GateShut, Invalid, LeaseLost, NotFound, OutcomeUnknown, UniqueJobAlreadyPending
from penstock.host import threads
from penstock.host.randomness import Random
from penstock.manifest.engine import ReadView
from penstock.manifest.keys import WHOLE_STORE, JobId, PendingJobKey, WalStateKey
from penstock.manifest.manifest import Manifest, ManifestTxn
from penstock.manifest.operations import CommitReceipt, ManifestOp
from penstock.manifest.records import (
    REPAIR_OF,
    Completed,
    FailedPermanent,
    FlushGateState,
    InFlight,
    JobDurableState,
    JobErrorSnapshot,
    JobKind,
    JobRecord,
    Pending,
    WalStateRecord,
)
from penstock.manifest.tables import JOBS, PENDING, WAL_STATE

PAYLOAD_BYTES_MAX = 1 << 20
MESSAGE_CHARS_MAX = 2_000
PRUNE_BATCH = 1_000


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Time-outs and limits of jobs.

    >>> penstock.StoreSettings(jobs=penstock.JobSettings(attempts_max=8)).jobs.attempts_max
    8
    """

    lease_s: float = 30.0
    attempts_max: int = 5
    backoff_s: float = 1.0  # before the second attempt; doubled for each further one
    backoff_s_max: float = 60.0

    def __post_init__(self) -> None:
        set_seconds(self, ["lease_s"], DAY_S, above_zero=True)
        set_seconds(self, ("backoff_s", "backoff_s_max"), DAY_S)
        set_wholes(self, ["attempts_max"], 1, COUNT_MAX)
        if self.backoff_s > self.backoff_s_max:
            raise Invalid("backoff_s must be at most backoff_s_max")


@dataclass(frozen=True, kw_only=True)
class Lease:
    """The right to run a job, until it expires."""

    job: JobRecord
    worker_id: str
    token: int


@dataclass
class _ActiveLease:
    token: int
    expires_s: float


class JobQueue:
    """The jobs of a manifest."""

    def __init__(self, manifest: Manifest, *, random: Random, settings: JobSettings | None = None) -> None:
        self._manifest = manifest
        self._clock = manifest.clock
        self._random = random
        self._settings = settings or JobSettings()
        self._lock = threads.lock("manifest.jobs")
        self._leases: dict[int, _ActiveLease] = {}  # guarded by _lock: leases of this process, by job id
        self._not_before_s: dict[int, float] = {}  # guarded by _lock: backoff, by job id

    # -- for callers

    def enqueue(
        self, kind: int, *, db_id: int | None = None, payload: bytes = b"", attempts_max: int | None = None
    ) -> JobId:
        """Add a job durably; `UniqueJobAlreadyPending` if one of this table and kind is pending."""
        if kind == JobKind.REPAIR:
            raise Invalid("repairs cannot be enqueued: call repair(db_id, kind)")
        self.gate(db_id, kind).check_free_to_enqueue()  # early: a refused commit would make its whole window run again
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise Invalid(f"a job's payload has at most {PAYLOAD_BYTES_MAX} bytes, not {len(payload)}")
        txn = self._manifest.begin_write()
        job_id = txn.enqueue_job(
            JobRecord(
                job_id=0,
                created_at_epoch_ms=self._now_ms(),
                db_id=db_id,
                kind=int(kind),
                payload=payload,
                attempts_max=self._settings.attempts_max if attempts_max is None else attempts_max,
            )
        )
        txn.commit()
        return job_id

    def gate(self, db_id: int | None, kind: int) -> UniqueJobGate:
        """Return the gate of a table and kind."""
        return UniqueJobGate(self._manifest, db_id or WHOLE_STORE, kind)

    def repair(self, db_id: int | None, kind: int) -> JobId:
        """Retry the repair of a gate whose last repair failed for good."""
        holder = self.gate(db_id, kind).state().active_job_id
        job = None if holder is None else self._manifest.get_job(holder)
        if job is None or not isinstance(job.state, FailedPermanent):
            raise NotFound(f"table {db_id or 0} has no failed repair of kind {kind}")
        txn = self._manifest.begin_write()
        job_id = self._add_repair(txn, job)
        txn.commit()
        return job_id

    def state(self, job_id: JobId) -> JobDurableState | None:
        """Return the state of a job; None if it was removed."""
        job = self._manifest.get_job(job_id)
        return None if job is None else job.state

    def prune(self, keep: int) -> int:
        """Remove all finished jobs but the newest `keep`; return how many were removed."""
        finished = self._manifest.read(_finished)
        surplus = finished[: max(0, len(finished) - keep)]
        for start in range(0, len(surplus), PRUNE_BATCH):
            txn = self._manifest.begin_write()
            for job_id in surplus[start : start + PRUNE_BATCH]:
                txn.remove_job(job_id)
            txn.commit()
        return len(surplus)

    # -- for workers

    def acquire(self, worker_id: str, kinds: Container[int] | None = None, db_id: int | None = None) -> Lease | None:
        """Lease the oldest job (of a table) that may run now, or None. A repair counts as the kind it repairs."""
        for job in self._manifest.read(_runnable):
            if (kinds is not None and job.gate_kind not in kinds) or (db_id is not None and job.table != db_id):
                continue
            lease = Lease(job=job, worker_id=worker_id, token=job.attempts + 1)
            if self._add_lease(lease) and self._begin(lease):
                return lease
        return None

    @property
    def lease_s(self) -> float:
        """How long a lease lasts unless it is renewed."""
        return self._settings.lease_s

    def renew(self, lease: Lease) -> None:
        """Extend a lease to `lease_s` from now; `LeaseLost` if it has expired."""
        with self._lock:
            self._lease_locked(lease).expires_s = self._clock.monotonic_s() + self._settings.lease_s

    def complete(self, lease: Lease, also: Sequence[ManifestOp] = ()) -> CommitReceipt:
        """Complete a job, in one commit with the operations `also`; on `LeaseLost` nothing changes."""
        txn = self._manifest.begin_write()
        txn.extend(also)
        txn.update_job_state(lease.job.job_id, Completed(self._now_ms()), token=lease.token)
        receipt = txn.commit()
        self._drop_lease(lease)
        return receipt

    def fail(self, lease: Lease, error: BaseException, *, retry: bool = True) -> None:
        """Record a failed attempt: the job is pending again, or failed for good after the last attempt."""
        snapshot = JobErrorSnapshot(self._now_ms(), type(error).__name__, str(error)[:MESSAGE_CHARS_MAX])
        job_id, again = lease.job.job_id, retry and lease.token < lease.job.attempts_max
        if again:
            with self._lock:  # before the commit: it must not be leased again at once
                self._not_before_s[job_id] = self._clock.monotonic_s() + self._backoff_s(lease.token)
        try:
            self._end_attempt(lease.job, lease.token, snapshot, again=again)
        except UniqueJobAlreadyPending:
            # A newer job of the same table and kind is already pending, and replaces this one.
            self._end_attempt(lease.job, lease.token, snapshot, again=False)
        self._drop_lease(lease)

    # -- for the scheduler and recovery

    def expire_leases(self) -> list[JobId]:
        """Fail jobs whose lease has expired; return the repairs queued for them."""
        now_s = self._clock.monotonic_s()
        with self._lock:  # removed first: from here on a renewal is refused
            expired = {job_id: active for job_id, active in self._leases.items() if active.expires_s <= now_s}
            for job_id in expired:
                del self._leases[job_id]
        repairs: list[JobId] = []
        try:
            for job_id in list(expired):
                repairs += self._compensate(job_id, expired[job_id].token, "its lease expired")
                del expired[job_id]
        finally:
            with self._lock:
                self._leases.update(expired)  # after an error: the next call retries
        return repairs

    def compensate_orphans(self) -> list[JobId]:
        """Fail jobs that are in flight without a lease of this process: their workers ended with an earlier one."""
        repairs: list[JobId] = []
        failed, in_flight = self._manifest.read(_orphans)
        for job in failed:  # retried at each opening, or the gate would stay shut forever
            txn = self._manifest.begin_write()
            repairs.append(self._add_repair(txn, job))
            txn.commit()
        for job in in_flight:
            with self._lock:
                mine = job.job_id in self._leases
            if not mine:
                repairs += self._compensate(job.job_id, job.attempts, "the process that ran it ended")
        return repairs

    def is_idle(self) -> bool:
        """Whether no job holds a gate: the next opening has nothing to repair."""
        return not self._manifest.read(_gate_holders)

    # -- inside

    def _add_repair(self, txn: ManifestTxn, job: JobRecord) -> JobId:
        repair = JobRecord(
            job_id=0,
            created_at_epoch_ms=self._now_ms(),
            db_id=job.db_id,
            kind=int(JobKind.REPAIR),
            payload=job.payload,
            attempts_max=job.attempts_max,
            repairs_job_id=job.job_id,
            repairs_kind=job.gate_kind,
        )
        return txn.enqueue_job(repair)

    def _add_lease(self, lease: Lease) -> bool:
        now_s, job_id = self._clock.monotonic_s(), lease.job.job_id
        with self._lock:
            if job_id in self._leases or self._not_before_s.get(job_id, now_s) > now_s:
                return False
            self._leases[job_id] = _ActiveLease(lease.token, now_s + self._settings.lease_s)
            self._not_before_s.pop(job_id, None)
            return True

    def _begin(self, lease: Lease) -> bool:
        txn = self._manifest.begin_write()
        txn.update_job_state(lease.job.job_id, InFlight(lease.worker_id, self._now_ms(), lease.token))
        try:
            txn.commit()
        except OutcomeUnknown:
            raise  # it may be ours: the lease stays until it expires
        except (GateShut, FixTheCall):  # another worker was faster
            self._drop_lease(lease)
            return False
        except BaseException:
            self._drop_lease(lease)
            raise
        return True

    def _lease_locked(self, lease: Lease) -> _ActiveLease:
        active = self._leases.get(lease.job.job_id)
        if active is None or active.token != lease.token:
            raise LeaseLost(f"job {lease.job.job_id}: the lease with token {lease.token} has ended: discard the work")
        return active

    def _drop_lease(self, lease: Lease) -> None:
        with self._lock:
            active = self._leases.get(lease.job.job_id)
            if active is not None and active.token == lease.token:
                del self._leases[lease.job.job_id]

    def _end_attempt(self, job: JobRecord, token: int, error: JobErrorSnapshot, *, again: bool) -> None:
        txn = self._manifest.begin_write()
        if again:
            txn.update_job_state(job.job_id, Pending(), token=token, error=error)
            txn.upsert_pending_index(job.pending_key, job.job_id)
        else:
            txn.update_job_state(job.job_id, FailedPermanent(self._now_ms()), token=token, error=error)
        txn.commit()

    def _compensate(self, job_id: int, token: int, why: str) -> list[JobId]:
        job = self._manifest.get_job(job_id)
        if job is None or not isinstance(job.state, InFlight) or job.state.token != token:
            return []  # it has ended meanwhile
        error = JobErrorSnapshot(self._now_ms(), "WorkerVanished", f"worker {job.state.worker_id}: {why}")
        if job.kind == JobKind.REPAIR:  # a repair is retried itself, while it has attempts left
            again = token < job.attempts_max
            self._end_attempt(job, token, error, again=again)
            return [JobId(job_id)] if again else []
        txn = self._manifest.begin_write()
        txn.update_job_state(job_id, FailedPermanent(self._now_ms()), token=token, error=error)
        repair = self._add_repair(txn, job)
        txn.commit()
        return [repair]

    def _backoff_s(self, attempt: int) -> float:
        full = min(self._settings.backoff_s_max, self._settings.backoff_s * 2.0 ** min(attempt - 1, 60))
        return full * (0.5 + self._random.random() / 2)  # jitter, so that retries do not coincide

    def _now_ms(self) -> int:
        return self._clock.time_us() // 1_000


class UniqueJobGate:
    """The gate of one table and kind: at most one job runs, and none while a repair is due."""

    def __init__(self, manifest: Manifest, db_id: int, kind: int) -> None:
        self._manifest = manifest
        self._db_id = db_id
        self._kind = kind

    def state(self) -> FlushGateState:
        """Return which job holds the gate, and how its last jobs ended."""
        state = self._manifest.get_wal_state(WalStateKey(self._db_id, 0)) or WalStateRecord()
        return state.gate(self._kind)

    def is_shut(self) -> bool:
        """Return whether a job holds the gate."""
        return self.state().active_job_id is not None

    def pending_job_id(self) -> JobId | None:
        """Return the pending job, if any."""
        row = self._manifest.read(lambda view: PENDING.get(view, PendingJobKey(self._db_id, self._kind)))
        return None if row is None else JobId(row.job_id)

    def check_free_to_enqueue(self) -> None:
        """Raise `UniqueJobAlreadyPending` if a job is pending; the commit checks this again."""
        waiting = self.pending_job_id()
        if waiting is not None:
            raise UniqueJobAlreadyPending(f"table {self._db_id}: job {waiting} of kind {self._kind} is already pending")


def _runnable(view: ReadView) -> list[JobRecord]:
    jobs = [job for _, row in PENDING.scan(view) if (job := JOBS.get(view, row.job_id)) is not None]
    return sorted((job for job in jobs if _gate_holder(view, job) in (None, job.job_id)), key=lambda job: job.job_id)


def _gate_holder(view: ReadView, job: JobRecord) -> int | None:
    state = WAL_STATE.get(view, WalStateKey(job.table, 0))
    return None if state is None else state.gate(job.gate_kind).active_job_id


def _gate_holders(view: ReadView) -> list[JobRecord]:
    """Return the jobs that hold gates, without reading finished jobs."""
    active = {gate.active_job_id for _, state in WAL_STATE.scan(view) for _, gate in state.gates()}
    jobs = [JOBS.get(view, job_id) for job_id in sorted(job_id for job_id in active if job_id is not None)]
    return [job for job in jobs if job is not None]


def _orphans(view: ReadView) -> tuple[list[JobRecord], list[JobRecord]]:
    """Return repairs that failed for good and still hold their gates, and jobs in flight."""
    holders = _gate_holders(view)
    failed = [job for job in holders if isinstance(job.state, FailedPermanent)]
    return (
        [job for job in failed if PENDING.get(view, _repair_key(job)) is None],
        [job for job in holders if isinstance(job.state, InFlight)],
    )


def _repair_key(job: JobRecord) -> PendingJobKey:
    return PendingJobKey(job.table, REPAIR_OF | job.gate_kind)


def _finished(view: ReadView) -> list[int]:
    return [
        job_id
        for job_id, job in JOBS.scan(view)
        if isinstance(job.state, Completed | FailedPermanent) and _gate_holder(view, job) != job_id
    ]
