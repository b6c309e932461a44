"""The manifest: the authority on tables, progress, files and jobs, behind a typed API.

Thread: any, except that a `ManifestTxn` belongs to the thread that began it.
Invariants: (1) a commit that returned is durable. (2) a commit is applied whole or not at all. (3) a reserved id is
never reserved again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import TracebackType
from typing import TypeVar

import msgspec

from penstock.errors import Closed, CorruptionError, Invalid, NotFound
from penstock.host import threads
from penstock.host.clock import Clock, SystemClock
from penstock.host.file_operations import publish, remove_file
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.host.paths import parent
from penstock.manifest import tables
from penstock.manifest.engine import EngineOpener, ManifestEngine, ReadView
from penstock.manifest.environment import LmdbEngine, backup_path, remove_stamp
from penstock.manifest.examine import examine
from penstock.manifest.keys import ChunkId, ChunkKey, ComponentId, JobId, MetricKey, PendingJobKey, WalStateKey
from penstock.manifest.migrations import migrate
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
    UpdateJobState,
    UpsertChunk,
    UpsertPendingIndex,
)
from penstock.manifest.records import (
    ChunkEntryRecord,
    DbDescriptorRecord,
    JobDurableState,
    JobErrorSnapshot,
    JobRecord,
    MetricDelta,
    WalStateRecord,
)
from penstock.manifest.settings import ManifestSettings
from penstock.manifest.waiters import WaitHandle
from penstock.manifest.writer import ManifestWriter, load_generations

OPERATIONS_MAX = 100_000  # in one batch
IDS_PER_BLOCK = 64  # reserved by one commit; unused ones are skipped after a restart
CHUNKS_PER_READ = 1_024
COPY_BYTES = 1 << 20
TIMEOUT_S = 30.0

T = TypeVar("T")


class ManifestTxn:
    """Operations for one commit. Nothing is written before `commit`."""

    def __init__(self, manifest: Manifest, generation_hint: int | None) -> None:
        self._manifest = manifest
        self._hint = generation_hint
        self._operations: list[ManifestOp] = []
        self._committed = False

    def put_db(self, db_id: int, descriptor: DbDescriptorRecord) -> None:
        self._add(PutDb(db_id, descriptor))

    def delete_db(self, db_id: int) -> None:
        """Remove the descriptor of a tombstoned table."""
        self._add(DeleteDb(db_id))

    def put_wal_state(self, key: WalStateKey, value: WalStateRecord) -> None:
        """Set a partition's progress; its gates do not change."""
        self._add(PutWalState(key, value))

    def delete_wal_state(self, key: WalStateKey) -> None:
        self._add(DeleteWalState(key))

    def upsert_chunk(self, key: ChunkKey, value: ChunkEntryRecord) -> None:
        self._add(UpsertChunk(key, value))

    def delete_chunk(self, key: ChunkKey) -> None:
        self._add(DeleteChunk(key))

    def scan_chunks(self, db_id: int) -> Iterator[tuple[ChunkKey, ChunkEntryRecord]]:
        """Iterate over the committed chunks of a table, without the changes of this transaction."""
        return self._manifest.scan_chunks(db_id)

    def enqueue_job(self, record: JobRecord) -> JobId:
        """Add a pending job and its row in the pending index; a job id of 0 is replaced by a reserved one."""
        if record.job_id == 0:
            record = msgspec.structs.replace(record, job_id=self._manifest.reserve_job_id())
        self._add(PutJob(record))
        self._add(UpsertPendingIndex(record.pending_key, record.job_id))
        return JobId(record.job_id)

    def update_job_state(
        self,
        job_id: int,
        new_state: JobDurableState,
        *,
        token: int | None = None,
        error: JobErrorSnapshot | None = None,
    ) -> None:
        """Change a job's state; its pending row and its gate follow in the same commit."""
        self._add(UpdateJobState(job_id, new_state, token, error))

    def remove_job(self, job_id: int) -> None:
        self._add(RemoveJob(job_id))

    def upsert_pending_index(self, key: PendingJobKey, job_id: int) -> None:
        self._add(UpsertPendingIndex(key, job_id))

    def delete_pending_index(self, key: PendingJobKey) -> None:
        self._add(DeletePendingIndex(key))

    def merge_metric(self, key: MetricKey, delta: MetricDelta) -> None:
        self._add(MergeMetric(key, delta))

    def delete_metrics(self, scope: int) -> None:
        """Remove all metrics of a table."""
        self._add(DeleteMetrics(scope))

    def bump_generation(self, component: int, increment: int = 1) -> None:
        self._add(BumpGeneration(component, increment))

    @property
    def is_empty(self) -> bool:
        return not self._operations

    def extend(self, operations: Iterable[ManifestOp]) -> None:
        """Add operations."""
        for operation in operations:
            self._add(operation)

    def commit(self, timeout_s: float = TIMEOUT_S) -> CommitReceipt:
        """Make all of it durable, or raise and change nothing (except `OutcomeUnknown`, which leaves that open)."""
        if self._committed:
            raise Closed("this transaction was committed already: begin another")
        self._committed = True
        return self._manifest.apply(self._operations, generation_hint=self._hint, timeout_s=timeout_s)

    def _add(self, operation: ManifestOp) -> None:
        if self._committed:
            raise Closed("this transaction was committed already: begin another")
        if len(self._operations) >= OPERATIONS_MAX:
            raise Invalid(f"a transaction has at most {OPERATIONS_MAX} operations: commit it and begin another")
        self._operations.append(operation)


class Manifest:
    """An open manifest."""

    def __init__(
        self, path: str, engine: ManifestEngine, settings: ManifestSettings, fs: FileSystem, clock: Clock
    ) -> None:
        self.path = path
        self.clock = clock
        self._engine = engine
        self._settings = settings
        self._fs = fs
        self.restart_epoch = 0  # the incarnation of the store, once its journal is open
        self._ids_lock = threads.lock("manifest.ids")
        self._ids: dict[int, range] = {}  # guarded by _ids_lock: reserved, not yet returned
        self._backup_lock = threads.lock("manifest.backup")
        self.migrated = migrate(engine)
        with engine.read() as view:
            generations = load_generations(view)
        self._writer = ManifestWriter(engine, generations=generations, clock=clock, settings=settings)

    @classmethod
    def open(
        cls,
        path: str,
        settings: ManifestSettings | None = None,
        *,
        fs: FileSystem | None = None,
        clock: Clock | None = None,
        engine: EngineOpener = LmdbEngine,
    ) -> Manifest:
        """Open or create the manifest at `path`. `StoreLocked` if another process has it open."""
        settings, fs, clock = settings or ManifestSettings(), fs or OsFileSystem(), clock or SystemClock()
        opened = engine(path, settings, fs, clock)
        try:
            return cls(path, opened, settings, fs, clock)
        except BaseException:
            opened.close()
            raise

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Finish commits in progress, answer every waiter and close the file. A second call does nothing."""
        try:
            self._writer.close(timeout_s)
        finally:
            self._engine.close()

    def __enter__(self) -> Manifest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- writing

    def begin_write(self, *, generation_hint: int | None = None) -> ManifestTxn:
        """Begin a transaction. Without a bump of its own it raises the manifest's generation to at least the hint."""
        return ManifestTxn(self, generation_hint)

    def apply(
        self, operations: list[ManifestOp], *, generation_hint: int | None = None, timeout_s: float = TIMEOUT_S
    ) -> CommitReceipt:
        """Commit operations, as `ManifestTxn.commit` does."""
        return self._writer.apply(operations, hint=generation_hint, timeout_s=timeout_s)

    def sync(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for all earlier commits; return the manifest's generation."""
        return self._writer.sync(timeout_s=timeout_s)

    # -- reading

    def read(self, fn: Callable[[ReadView], T]) -> T:
        """Run a function on one snapshot, which `penstock.manifest.tables` reads and which ends with the call.

        Keep it short and commit outside of it: while it runs the file cannot grow, and freed space is not used again.
        """
        with self._engine.read() as view:
            return fn(view)

    def get_db(self, db_id: int) -> DbDescriptorRecord | None:
        return self.read(lambda view: tables.DB.get(view, db_id))

    def get_wal_state(self, key: WalStateKey) -> WalStateRecord | None:
        return self.read(lambda view: tables.WAL_STATE.get(view, key))

    def get_chunk(self, key: ChunkKey) -> ChunkEntryRecord | None:
        return self.read(lambda view: tables.CHUNKS.get(view, key))

    def get_job(self, job_id: int) -> JobRecord | None:
        return self.read(lambda view: tables.JOBS.get(view, job_id))

    def scan_chunks(self, db_id: int) -> Iterator[tuple[ChunkKey, ChunkEntryRecord]]:
        """Iterate over a table's chunks by id, in pages: a slow caller pins no snapshot, and may see later commits."""
        start = 0
        while True:
            page = self.read(lambda view, start=start: list(islice(tables.chunks(view, db_id, start), CHUNKS_PER_READ)))  # type: ignore[misc]
            yield from page
            if len(page) < CHUNKS_PER_READ:
                return
            start = page[-1][0].chunk_id + 1

    # -- generations and ids

    def generation(self, component: int = ComponentId.MANIFEST) -> int:
        """Return the last committed generation of a component."""
        return self._writer.generation(component)

    def register_waiter(self, component: int, target: int, timeout_s: float) -> WaitHandle:
        """Register a wait until a component reaches a generation."""
        return self._writer.register(component, target, timeout_s=timeout_s)

    def wait_for_generation(self, component: int, target: int, timeout_s: float) -> int:
        """Wait until a component reaches a generation; `WaitExpired` if it does not."""
        return self.register_waiter(component, target, timeout_s).result(timeout_s)

    def reserve_job_id(self) -> JobId:
        """Return a new job id."""
        return JobId(self._reserve(ComponentId.JOB_IDS))

    def reserve_chunk_id(self) -> ChunkId:
        """Return a new chunk id."""
        return ChunkId(self._reserve(ComponentId.CHUNK_IDS))

    def _reserve(self, component: int) -> int:
        with self._ids_lock:
            block = self._ids.get(component, range(0))
            if not block:
                end = self.apply([BumpGeneration(component, IDS_PER_BLOCK)]).generation
                block = range(end - IDS_PER_BLOCK + 1, end + 1)
            self._ids[component] = block[1:]
            return block[0]

    # -- backups

    def backup(self) -> str:
        """Write a snapshot as the newest backup, durably; older backups move up and the oldest is removed."""
        count = self._settings.backups_kept
        with self._backup_lock:
            fresh = self.path + ".backup-new"
            if self._fs.exists(fresh):
                self._fs.unlink(fresh)
            try:
                self._engine.copy(fresh)
            except BaseException:
                remove_file(self._fs, fresh)  # a full disk needs the space
                raise
            for age in range(count - 1, 0, -1):
                if self._fs.exists(backup_path(self.path, age)):
                    self._fs.rename(backup_path(self.path, age), backup_path(self.path, age + 1))
            target = backup_path(self.path, 1)
            copy = self._fs.open(fresh, write=True)
            publish(self._fs, copy, target)
            copy.close()
        return target

    def copy_to(self, target: str) -> ReadView:
        """Write a snapshot to a new file and sync it; return its rows, read back and checked."""
        self._engine.copy(target)
        copy = self._fs.open(target, write=True)
        try:
            copy.fsync()
        finally:
            copy.close()
        return self._engine.read_copy(target)

    @staticmethod
    def restore(path: str, *, fs: FileSystem | None = None) -> str:
        """Replace a damaged manifest with its newest valid backup; the damaged file is kept as `<path>.damaged`.

        Commits made after that backup are gone. Returns the name of the backup.
        """
        fs = fs or OsFileSystem()
        owner = fs.lock(path + ".owner")
        try:
            source = _newest_valid_backup(fs, path)
            _copy(fs, source, path + ".restored")
            if fs.exists(path):
                fs.rename(path, path + ".damaged")
            if fs.exists(path + "-lock"):  # it lists readers of the damaged file
                fs.unlink(path + "-lock")
            remove_stamp(fs, path)  # the stamp describes the damaged file
            copy = fs.open(path + ".restored", write=True)
            publish(fs, copy, path)
            copy.close()
            return source
        finally:
            owner.release()


def _newest_valid_backup(fs: FileSystem, path: str) -> str:
    prefix = backup_path(path, 0).rsplit("/", 1)[-1][:-1]
    ages = sorted(
        int(name[len(prefix) :])
        for name in fs.listdir(parent(path))
        if name.startswith(prefix) and name.isascii() and name[len(prefix) :].isdigit()
    )
    for age in ages:
        try:
            examine(fs, backup_path(path, age))
        except CorruptionError:
            continue
        return backup_path(path, age)
    raise NotFound(f"{path} has no valid backup to restore from")


def _copy(fs: FileSystem, source: str, target: str) -> None:
    if fs.exists(target):
        fs.unlink(target)
    read, write = fs.open(source), fs.create(target)
    offset = 0
    while data := read.pread(COPY_BYTES, offset):
        write.pwrite(data, offset)
        offset += len(data)
    read.close()
    write.close()
