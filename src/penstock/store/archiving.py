"""The archive of a store: runs, verification, eviction and collection, as durable jobs and by hand.

A run uploads and verifies every sstable that is not archived yet, and then the store as of one LSN (`archive_run`). A
store that lost its disk is made again from the newest run. Policies evict files that were archived long enough ago, or
that are too many.

The object store may be out of reach for hours: nothing but the archive, and reads of what was evicted, depends on it.

Thread: any. `_turn` lets one run, verification, eviction or collection work at a time.
Invariant: nothing is uploaded or deleted before the archive was found to be this store's, and to honour conditional
puts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from penstock.archive.object_urls import check_url, open_objects, probe
from penstock.archive.objects import MARKER, ObjectStore
from penstock.archive.retrying import RetryingObjects, RetrySettings
from penstock.archive.transfer import where
from penstock.errors import (
    ArchiveUnavailable,
    CorruptionError,
    GateShut,
    Invalid,
    PenstockError,
    UniqueJobAlreadyPending,
)
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.host.randomness import Random
from penstock.host.waiting import Retries
from penstock.manifest.jobs import JobQueue, Lease
from penstock.manifest.keys import ChunkKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import ArchivePolicy, Completed, Evicted, FailedPermanent, JobKind, Local, RemoteArchived
from penstock.manifest.recovery import RecoveredState
from penstock.partition.ledger_records import LEDGER_TABLE, TableInfo
from penstock.scheduler.runner import JobResult, JobRunner, run_job
from penstock.scheduler.task import Outcome, PeriodicTask, StopSignal, TaskLoad
from penstock.store.archive_run import ArchivedFile, ArchiveRun, RunListing, read_listing, run_numbers
from penstock.store.archive_settings import ArchiveReport, ArchiveSettings, EvictReport, VerifyReport
from penstock.store.archive_url import read_archive_url, write_archive_url
from penstock.store.archived_tables import ArchivedTables
from penstock.store.backup import BackupSource
from penstock.store.chunk_moves import NO_ARCHIVE, ChunkMoves, ChunkRow
from penstock.store.object_collection import ObjectCollector
from penstock.store.reports import check_target

logger = logging.getLogger(__name__)

MARKER_VERSION = 1
WAIT_S = 3_600.0  # for another run that is under way
CHECK_S = 10.0  # between two checks of what is due
_KINDS = (JobKind.ARCHIVE, JobKind.VERIFY, JobKind.REHYDRATE, JobKind.PURGE)


class _ArchiveMarker(msgspec.Struct, frozen=True):
    version: int
    store: str
    identity: str


class _ArchivePayload(msgspec.Struct, frozen=True, array_like=True):
    table: int = 0  # 0: all of them
    is_left: bool = False  # only what an earlier process left half done


class StoreArchive:
    """The archive of an open store; without a URL it only says so."""

    def __init__(
        self,
        url: str | None,
        *,
        fs: FileSystem,
        root: str,
        uuid: bytes,
        identity: bytes,
        clock: Clock,
        random: Random,
        settings: ArchiveSettings,
        read_only: bool,
    ) -> None:
        self._fs, self._root = fs, root
        self._store, self._identity = uuid.hex(), identity.hex()
        self._clock, self._random = clock, random
        self._settings = settings
        self._read_only = read_only
        self._stopping = threading.Event()
        stored_url = read_archive_url(fs, root)
        self.url = stored_url if url is None else check_url(url)
        self._moved = url is not None and stored_url is not None and self.url != stored_url
        if self.url != stored_url and self.url is not None and self.url.startswith("file://"):
            check_target(self.url.removeprefix("file://"), root)  # `check` would call its objects orphans
        objects = None if self.url is None else self._open(self.url)
        self.tables = ArchivedTables(fs, root, objects, settings.cache_bytes_max, self._stopping.is_set)
        self._turn = threads.lock("store.archive")
        self._attaching = threads.lock("store.archive.attaching")
        self._attached = False  # guarded by _attaching: the archive was found to be this store's
        self._started_s = clock.monotonic_s()
        self._ran_s: float | None = None  # when the last run of this process ended
        self._reports: dict[int, Any] = {}  # of the last job of each kind
        self._seen_s: dict[ChunkKey, float] = {}  # when chunks that are not archived were first seen
        self.last_error = ""
        self.runs = self.failures = 0

    def _open(self, url: str) -> RetryingObjects:
        settings = self._settings
        return RetryingObjects(
            open_objects(url, self._fs, request_timeout_s=settings.request_timeout_s),
            clock=self._clock,
            random=self._random,
            settings=RetrySettings(attempts_max=settings.attempts_max, timeout_s=settings.timeout_s),
            stop=self._stopping,
        )

    def connect(
        self,
        manifest: Manifest,
        jobs: JobQueue,
        source: Callable[[], BackupSource],
        port: Any,
        recovered: RecoveredState,
    ) -> None:
        """Take over the other parts of the store. Requires: they are made, and nothing is served yet."""
        self._recovered, self._left_requested = recovered, False
        self._manifest, self._jobs, self._source, self._port = manifest, jobs, source, port
        parts = source()
        self.moves = ChunkMoves(
            manifest,
            parts.maintenance,
            self.tables,
            parts.collector.readers,
            fs=self._fs,
            root=self._root,
            store=self._store,
            clock=self._clock,
            stop=self._stopping.is_set,
        )
        self._maintenance = parts.maintenance
        self.collector = ObjectCollector(
            manifest,
            parts.maintenance,
            parts.collector.readers,
            fs=self._fs,
            root=self._root,
            store=self._store,
            clock=self._clock,
            grace_s=self._settings.grace_s,
            runs_kept=self._settings.runs_kept,
        )
        if self.url is not None and not self._read_only:
            self._attach_at_open()

    # -- attaching

    def _attach_at_open(self) -> None:
        """Attach now, if the object store answers; else later. `Invalid` if this store must not use it."""
        assert self.url is not None
        quick = RetryingObjects(
            open_objects(self.url, self._fs, request_timeout_s=min(10.0, self._settings.request_timeout_s)),
            clock=self._clock,
            random=self._random,
            settings=RetrySettings(attempts_max=1),
        )
        try:
            self._attach(quick)
        except (ArchiveUnavailable, OSError) as error:
            self._failed(error)
            logger.warning("%s was opened without its archive, which is tried again later: %s", self._root, error)

    def _attach(self, objects: ObjectStore) -> None:
        """Check that the archive can be used and is this store's, and remember its URL."""
        with self._attaching:  # a probe that is under way is not one that a dead process left
            if self._attached:
                return
            assert self.url is not None
            marker = msgspec.json.encode(_ArchiveMarker(MARKER_VERSION, self._store, self._identity))
            key = f"{self._store}/{MARKER}"
            if self._moved and objects.size(key) is None:
                raise Invalid(
                    f"{self.url} has no archive of this store, which has one elsewhere: copy its objects there first, "
                    "or open the store with the URL that it had"
                )
            probe(objects, self._store, self._random)
            if not objects.put_new(key, marker) and objects.read(key, 0, 1_000) != marker:
                raise Invalid(f"{where(objects, key)} is of another store: give the archive another prefix")
            write_archive_url(self._fs, self._root, self.url)
            self._attached = True

    def objects(self) -> ObjectStore:
        """Return the object store, attached; `Invalid` if there is none."""
        if self.tables.objects is None:
            raise Invalid(NO_ARCHIVE)
        if not self._attached:
            self._attach(self.tables.objects)
        return self.tables.objects

    # -- by hand

    def archive(self, timeout_s: float = WAIT_S) -> ArchiveReport:
        """Make a run now."""
        report = self._run_now(JobKind.ARCHIVE, 0, timeout_s)
        assert isinstance(report, ArchiveReport)
        return report

    def verify(self, table: TableInfo | None, timeout_s: float = WAIT_S) -> VerifyReport:
        """Read the objects of all archived chunks (of a table)."""
        report = self._run_now(JobKind.VERIFY, 0 if table is None else table.table_id, timeout_s)
        assert isinstance(report, VerifyReport)
        return report

    def rehydrate(self, table: TableInfo | None, timeout_s: float = WAIT_S) -> int:
        """Fetch every evicted file (of a table) into the folder again; return the bytes."""
        return int(self._run_now(JobKind.REHYDRATE, 0 if table is None else table.table_id, timeout_s))

    def collect(self, timeout_s: float = WAIT_S) -> int:
        """Delete objects that nothing names any more; return their number."""
        return int(self._run_now(JobKind.PURGE, 0, timeout_s))

    def evict(self, table: TableInfo | None, local_bytes: int, timeout_s: float = WAIT_S) -> EvictReport:
        """Remove archived files from the folder until each table has at most `local_bytes` there."""
        self.objects()
        tables = self._port.tables() if table is None else [table]
        policy = ArchivePolicy(local_bytes_max=local_bytes)
        with self._taking_turns(timeout_s):
            return _sum([self._evict_table(info, policy) for info in tables])

    @contextmanager
    def _taking_turns(self, timeout_s: float) -> Iterator[None]:
        if not self._turn.acquire(timeout=timeout_s):
            raise GateShut("the archive is busy with an earlier run: try again later")
        try:
            yield
        finally:
            self._turn.release()

    def _run_now(self, kind: JobKind, table: int, timeout_s: float) -> Any:
        """Run a job in this thread; if another one runs it, wait for its end."""
        self.objects()  # first: a store without an archive gets no job
        retries, job_id = Retries(self._clock, self._clock.monotonic_s() + timeout_s, pause_s=0.05), None
        payload = msgspec.msgpack.encode(_ArchivePayload(table))
        while True:
            if job_id is None:
                with suppress(UniqueJobAlreadyPending):
                    job_id = self._jobs.enqueue(kind, payload=payload, attempts_max=1)
            lease = self._jobs.acquire("here", (kind,))
            if lease is not None:
                run_job(self._jobs, lease, self.handle, self._stopping, renew_every_s=self._jobs.lease_s / 3)
                if lease.job.job_id == job_id:
                    return self._reports[kind]
                continue
            job = None if job_id is None else self._manifest.get_job(job_id)
            if job is not None and isinstance(job.state, Completed):
                return self._reports[kind]
            if job is not None and isinstance(job.state, FailedPermanent):
                raise ArchiveUnavailable(f"the job failed ({job.last_error.message if job.last_error else ''})")
            if not retries.again() or self._stopping.is_set():
                raise GateShut("the archive is busy with an earlier run: try again later")

    # -- jobs

    def handle(self, lease: Lease, stop: StopSignal) -> JobResult:
        """Run a job of the archive, or the repair of one: each may be repeated."""
        job = lease.job
        payload = msgspec.msgpack.decode(job.payload, type=_ArchivePayload) if job.payload else _ArchivePayload()
        work: Mapping[int, Callable[[int], Any]] = {
            int(JobKind.ARCHIVE): self._archive,
            int(JobKind.VERIFY): self._verify,
            int(JobKind.REHYDRATE): self._rehydrate,
            int(JobKind.PURGE): lambda _: self.collector.collect(self.objects()),
        }
        try:
            with self._taking_turns(WAIT_S):
                if payload.is_left:
                    self._finish_moves()
                else:
                    self._reports[job.gate_kind] = work[job.gate_kind](payload.table)
        except (PenstockError, OSError) as error:
            self._failed(error)
            raise
        self.last_error = ""
        return JobResult.DONE

    def _failed(self, error: BaseException) -> None:
        self.failures += 1
        self.last_error = str(error)

    def _archive(self, _: int) -> ArchiveReport:
        objects = self.objects()
        chunks = uploaded = 0
        young = self._young()
        for key, row in self.moves.rows(self._table_ids()):
            if isinstance(row.residency, Evicted) or key in young:
                continue
            size = self.moves.archive(key, row)
            chunks, uploaded = chunks + (size > 0), uploaded + size
        runs = run_numbers(objects, self._store)
        whole = [number for number, is_whole in runs.items() if is_whole]
        before = self._readable(objects, whole[-1]) if whole else None
        run = ArchiveRun(self._source(), objects, self._stopping.is_set)
        report = run.upload(max(runs, default=0) + 1, before)
        self._ran_s = self._clock.monotonic_s()
        self.runs += 1
        return _more(report, chunks, uploaded)

    def _readable(self, objects: ObjectStore, number: int) -> RunListing | None:
        """Return a whole run; None if its listing is damaged: the next run replaces it, and uses nothing of it."""
        try:
            return read_listing(objects, self._store, number)
        except CorruptionError as error:
            logger.warning("the next archive run uploads everything that is in no sstable again: %s", error)
            return None

    def _young(self) -> set[ChunkKey]:
        """Return the chunks that are too young for the policies of their tables: a compaction may replace them soon.

        Their age is counted from when this process first saw them. A run uploads them all the same, as files of its
        own moment; they just do not count as archived.
        """
        now_s, first_seen_s, young = self._clock.monotonic_s(), dict[ChunkKey, float](), set[ChunkKey]()
        for info in self._port.tables():
            wait_s = self._policy(info).archive_after_ms / 1_000
            for key, row in self.moves.rows([info.table_id]) if wait_s else ():
                if isinstance(row.residency, Local):
                    first_seen_s[key] = self._seen_s.get(key, now_s)
                    if now_s - first_seen_s[key] < wait_s:
                        young.add(key)
        self._seen_s = first_seen_s
        return young

    def _verify(self, table: int) -> VerifyReport:
        self.objects()
        count = size = 0
        damage: list[tuple[str, str]] = []
        for key, row in self.moves.rows([table] if table else self._table_ids()):
            if not isinstance(row.residency, Local):
                count, size = count + 1, size + row.size_bytes
                damage += self.moves.verify_again(key, row)
        for file in () if table else self._newest_run():
            count, size = count + 1, size + file.size
            damage += self.moves.verify_listed(file.object, file.size, file.checksum, file.path)
        return VerifyReport(objects=count, bytes=size, damage=damage)

    def _newest_run(self) -> Sequence[ArchivedFile]:
        """Return the files of the newest whole run that no row names: those of queues, the manifest, the journal."""
        objects = self.objects()
        whole = [number for number, is_whole in run_numbers(objects, self._store).items() if is_whole]
        return read_listing(objects, self._store, whole[-1]).files if whole else ()

    def _moves_left(self) -> Iterator[ChunkRow]:
        """Iterate over the chunks whose move an earlier process did not finish: not verified, or not yet unlinked."""
        for table in self._table_ids():
            yield from self._recovered.chunks_to_verify(table)
            yield from (each for each in self._recovered.chunks_in_archive(table) if self.moves.is_left(each[1]))

    def _request_finish(self) -> None:
        """Enqueue a job for what an earlier process left, once after an opening; again later if another one waits."""
        if self._left_requested or not self._attached or self._read_only:
            return
        with suppress(UniqueJobAlreadyPending):
            if next(self._moves_left(), None) is not None:
                self._jobs.enqueue(JobKind.VERIFY, payload=msgspec.msgpack.encode(_ArchivePayload(is_left=True)))
            self._left_requested = True

    def _finish_moves(self) -> None:
        self.objects()
        for key, row in list(self._moves_left()):
            if isinstance(row.residency, Evicted):
                self.moves.evict(key, row)
            else:
                for path, reason in self.moves.verify_again(key, row):
                    logger.warning("%s: %s", path, reason)

    def _rehydrate(self, table: int) -> int:
        self.objects()
        rows = list(self.moves.rows([table] if table else self._table_ids()))
        return sum(self.moves.rehydrate(key, row) for key, row in rows)

    def _table_ids(self) -> list[int]:
        return [LEDGER_TABLE, *(info.table_id for info in self._port.tables())]

    # -- policies

    def tasks(self) -> list[Any]:
        """Return the tasks and the runner of jobs, for a scheduler; none without an archive."""
        if self.url is None:
            return []
        return [
            PeriodicTask("archive", CHECK_S, self.check_due),
            JobRunner("archive-jobs", self._jobs, {int(kind): self.handle for kind in _KINDS}),
        ]

    def check_due(self) -> Outcome:
        """Enqueue what is due and what an earlier process left; close files whose copies are gone; evict by policy."""
        self.release_removed()
        self._request_finish()
        interval_s = self._settings.interval_s
        since_s = self._started_s if self._ran_s is None else self._ran_s
        if interval_s is not None and self._clock.monotonic_s() - since_s >= interval_s:
            self._started_s, self._ran_s = self._clock.monotonic_s(), None
            for kind in (JobKind.ARCHIVE, JobKind.PURGE):
                with suppress(UniqueJobAlreadyPending):
                    self._jobs.enqueue(kind, payload=msgspec.msgpack.encode(_ArchivePayload()))
        if self._attached and self._turn.acquire(blocking=False):
            try:
                self.evict_by_policy()
            finally:
                self._turn.release()
        return TaskLoad.IDLE

    def evict_by_policy(self) -> EvictReport:
        """Evict what the policies of the tables say."""
        due = [(info, self._policy(info)) for info in self._port.tables()]
        return _sum([self._evict_table(info, policy) for info, policy in due if _evicts(policy)])

    def _policy(self, info: TableInfo) -> ArchivePolicy:
        return info.storage_options.archive or self._settings.policy

    def _evict_table(self, info: TableInfo, policy: ArchivePolicy) -> EvictReport:
        rows = list(self.moves.rows([info.table_id]))
        files = size = in_use = 0
        for key, row in self._due(rows, policy):
            is_new = not isinstance(row.residency, Evicted)
            if self.moves.evict(key, row):
                files, size = files + 1, size + row.size_bytes
            elif is_new:
                in_use += 1
        return EvictReport(files=files, bytes=size, kept=in_use)

    def _due(self, rows: list[ChunkRow], policy: ArchivePolicy) -> list[ChunkRow]:
        """Return the rows whose files must leave the folder, the oldest first; evicted ones may have left a file."""
        evicted = [each for each in rows if isinstance(each[1].residency, Evicted)]
        here = [each for each in rows if not isinstance(each[1].residency, Evicted)]
        archived = [each for each in here if isinstance(at := each[1].residency, RemoteArchived) and at.verified]
        archived.sort(key=lambda each: each[1].uploaded_at_epoch_ms or 0)
        surplus = 0
        if policy.local_bytes_max is not None:
            surplus = sum(row.size_bytes for _, row in here) - policy.local_bytes_max
        now_ms, due = self._clock.time_us() // 1_000, list[ChunkRow]()
        for key, row in archived:
            age_ms = now_ms - (row.uploaded_at_epoch_ms or 0)
            is_old = policy.evict_after_ms is not None and age_ms >= policy.evict_after_ms
            if is_old or surplus > 0:
                due.append((key, row))
                surplus -= row.size_bytes
        return evicted + due

    def release_removed(self) -> None:
        """Close the files whose copies were removed from the cache: their mappings would keep the space."""
        names: set[str] = set()
        while self.tables.removed:
            names.add(self.tables.removed.popleft())
        for tree, _ in self._maintenance.trees() if names else ():
            tree.release(names)

    def stop(self) -> None:
        """End transfers at their next step: the store closes."""
        self._stopping.set()


def _more(report: ArchiveReport, chunks: int, size: int) -> ArchiveReport:
    return ArchiveReport(
        number=report.number,
        lsn=report.lsn,
        files=report.files,
        bytes=report.bytes,
        files_uploaded=report.files_uploaded + chunks,
        bytes_uploaded=report.bytes_uploaded + size,
    )


def _sum(reports: list[EvictReport]) -> EvictReport:
    return EvictReport(
        files=sum(report.files for report in reports),
        bytes=sum(report.bytes for report in reports),
        kept=sum(report.kept for report in reports),
    )


def _evicts(policy: ArchivePolicy) -> bool:
    return policy.evict_after_ms is not None or policy.local_bytes_max is not None
