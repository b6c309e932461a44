"""The trees of a store, and the durable jobs that flush and compact them.

Callers request work and may wait for it; the scheduler's workers or the caller's thread run a job. The repair of a job
whose process died checks that the listed files exist; until then the gate of its kind stays shut. `tree_jobs` does the
work on files.

Thread: any; `_changed` guards the trees. At most one job of a kind and table runs at a time (its gate ensures it). A
tree is closed or dropped only while no job works on it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from penstock.archive.storage import PLAIN_FILES, FileStorage
from penstock.errors import DiskFull, GateShut, Invalid, UniqueJobAlreadyPending
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_errors import is_disk_full
from penstock.host.file_operations import make_dirs
from penstock.host.files import FileSystem
from penstock.lsm.catalog import Catalog, TableDetail
from penstock.lsm.index import Summary
from penstock.lsm.memtable import Memtable
from penstock.lsm.merge_offers import MergeOffers
from penstock.lsm.snapshot import Snapshot
from penstock.lsm.sstable import Sstable
from penstock.lsm.tree import Tree
from penstock.lsm.tree_files import ArchivedFiles, TreeFiles, files_of
from penstock.lsm.tree_jobs import METRIC_LEVEL0_RUNS, METRIC_MEMTABLE_BYTES, Merge, Stop, TreeJobs, observation
from penstock.lsm.tree_settings import TreeSettings, TreeStatistics
from penstock.lsm.version import FileMeta, TableFile, Version, arrange, split_into_runs
from penstock.lsm.view import View
from penstock.manifest.jobs import JobQueue, Lease
from penstock.manifest.keys import ChunkKey, JobId, MetricKey, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import ManifestOp
from penstock.manifest.records import (
    ChunkEntryRecord,
    Completed,
    FailedPermanent,
    JobKind,
    JobRecord,
    MetricRecord,
    Pending,
)
from penstock.manifest.tables import METRICS
from penstock.scheduler.runner import JobResult, run_job
from penstock.scheduler.task import StopSignal

logger = logging.getLogger(__name__)

SNAPSHOT_ROW = 1 << 14  # added to the number of a shard: the row of its snapshot, see `partition.snapshots`
COMPANION = 1 << 15  # added to the number of a shard: that of its companion tree, if it has one
BUSY_TIMEOUT_S = 60.0
BUSY_LOOK_S = 0.05  # between two checks whether other jobs have ended


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    shard: int
    everything: bool = False


class Maintenance:
    """The trees of a store and the work on their files."""

    def __init__(
        self,
        manifest: Manifest,
        jobs: JobQueue,
        *,
        fs: FileSystem,
        root: str,
        store: bytes,
        clock: Clock,
        merge_files: Merge | None = None,
        offers: MergeOffers | None = None,
        storage_of: Callable[[int], FileStorage] = lambda db_id: PLAIN_FILES,
        tree_settings: TreeSettings | None = None,
        wake: Callable[[str], None] = lambda task: None,
        on_maintained: Callable[[], None] = lambda: None,
    ) -> None:
        self._manifest = manifest
        self._jobs = jobs
        self._files = TreeFiles(fs, root, store)
        self._storage_of = storage_of
        self._clock = clock
        self._work = TreeJobs(manifest, jobs, self._files, clock=clock, merge_files=merge_files, offers=offers)
        self._tree_settings = tree_settings or TreeSettings()
        self._wake = wake
        self._on_maintained = on_maintained
        self._stopping = threading.Event()
        self._stopped_s = 0.0  # when that was set
        self._changed = threads.condition("lsm.maintenance")
        self._trees: dict[tuple[int, int], tuple[Tree, Catalog]] = {}  # guarded by _changed
        self._busy: dict[tuple[int, int], int] = {}  # guarded by _changed: number of running handlers
        self._measured: dict[tuple[int, int], TreeStatistics] = {}  # of `measure`, by one thread at a time

    # -- trees

    def open_tree(
        self,
        db_id: int,
        shard: int,
        folder: str,
        settings: TreeSettings | None = None,
        memtable: type[Memtable] = Memtable,
    ) -> Tree:
        """Open the tree of a shard, with the files that the manifest lists. `folder` is relative to the store."""
        with self._changed:
            if (db_id, shard) in self._trees:
                raise Invalid(f"the tree of table {db_id}, shard {shard} is open already")
        catalog = Catalog(self._manifest, db_id, shard, folder, self._storage_of(db_id))
        make_dirs(self._files.fs, f"{self._files.root}/{folder}")
        files, stored, progress = catalog.load()
        operators = progress.operators if files else ()
        tree = Tree(
            files,
            self._files.open_table,
            clock=self._clock,
            locate=self._files.locate,
            settings=settings or self._tree_settings,
            stored=stored,
            time_us=progress.time_us,
            operators=None if operators is None else frozenset(operators),
            memtable=memtable,
            wake=self._wake,
            on_maintained=self._on_maintained,
        )
        with self._changed:
            self._trees[db_id, shard] = tree, catalog
        return tree

    def open_companion(self, db_id: int, shard: int, folder: str, tree: Tree) -> Tree:
        """Open a second tree of a shard: when an edit of `tree` is in files, so are all earlier edits of the companion.

        So a replay from the LSN that `tree` has stored includes every edit that the companion may lack.
        """
        companion = self.open_tree(db_id, COMPANION + shard, folder)
        tree.store_first = lambda: self._store_within_job(companion)
        return companion

    def _store_within_job(self, tree: Tree) -> None:
        """Flush a tree in the job that flushes another one of its table: the gate of these jobs is that of both."""
        target, catalog = tree.freeze(), self._catalog(tree)
        while tree.stored < target and tree.has_unflushed():
            if not self._work.flush(tree, catalog, None):
                raise GateShut(f"{catalog.folder} is being flushed already: try again later")

    def append_files(self, tree: Tree, parts: Iterable[Memtable], lsn: int, time_us: int) -> None:
        """Write an edit of any size to files, part by part, and install it whole. Requires: its keys are new."""
        self.flush(tree)
        catalog, ids, summaries = self._catalog(tree), list[int](), list[Summary]()
        try:
            for part in parts:
                part_ids = self._work.reserve(files_of(part))
                ids += part_ids
                tree.use.announce(part_ids)
                summaries += self._files.write(part, catalog, part_ids)
            runs = split_into_runs([(summary.start, summary.end, summary.chunk_id) for summary in summaries])
            added = [catalog.describe(summary, level=0, run=runs[summary.chunk_id]) for summary in summaries]
            files = self._files.open_all(added)
            self._manifest.apply(catalog.publish(added, stored=(lsn, time_us), operators=tree.operators))
            tree.install_adopted(files, lsn, time_us)
        finally:
            tree.use.withdraw(ids)

    def staged_view(self, tree: Tree, chunk_ids: Sequence[int], lsn: int, time_us: int) -> View | None:
        """Return the rows of files that `adopt` would add to a tree; None if there are none."""
        unadopted = self._not_adopted(tree, chunk_ids)
        if not unadopted:
            return None
        files = [TableFile(meta, self._files.open_table) for meta in self.check_adoptable(tree, unadopted, lsn)]
        return View(Version(None, (), arrange(files), lsn, lsn, time_us), lambda: time_us)

    def exported(self, tree: Tree) -> tuple[Snapshot, list[ManifestOp]]:
        """Return a snapshot that keeps the files of a tree, and the operations that list just these."""
        catalog = self._catalog(tree)
        time_us = catalog.load()[2].time_us  # first: of no later flush
        snapshot = tree.snapshot()
        version = snapshot.version
        try:
            self._files.bring_back(file.meta for file in version.files())
        except BaseException:
            snapshot.close()
            raise
        metas, stored = [file.meta for file in version.files()], (version.stored, time_us)
        return snapshot, catalog.publish(metas, stored=stored, operators=tree.operators)

    def file_size(self, file_name: str) -> int:
        """Return the size of a file of the store."""
        file = self._files.fs.open(f"{self._files.root}/{file_name}")
        try:
            return file.size()
        finally:
            file.close()

    def close_tree(self, db_id: int, shard: int, timeout_s: float = BUSY_TIMEOUT_S) -> None:
        """Close a tree; its files stay. Waits for work on it to end."""
        if self._stopping.is_set():
            timeout_s = max(0.0, min(timeout_s, self._stopped_s + BUSY_TIMEOUT_S - self._clock.monotonic_s()))
        with self._changed:
            tree, _ = self._trees.pop((db_id, shard), (None, None))  # before the wait: no new work begins
            if not self._changed.wait_for(lambda: not self._busy.get((db_id, shard)), timeout_s):
                raise GateShut(f"work on table {db_id}, shard {shard} goes on after {timeout_s} s: try again later")
        if tree is not None:
            tree.close()

    def close(self) -> None:
        """Close all trees without waiting. Requires: no handler is running."""
        with self._changed:
            trees, self._trees = [tree for tree, _ in self._trees.values()], {}
        for tree in trees:
            tree.close()

    def is_at_work(self, db_id: int, shard: int) -> bool:
        """Whether a job is working on a tree, so that closing it would wait."""
        with self._changed:
            return bool(self._busy.get((db_id, shard)) or self._busy.get((db_id, COMPANION + shard)))

    def drop_tree(self, db_id: int, shard: int, folder: str) -> None:
        """Delete a shard's rows in the manifest; the caller deletes its files. Can be repeated."""
        self.close_tree(db_id, COMPANION + shard)
        self.close_tree(db_id, shard)
        txn = self._manifest.begin_write()
        for key, row in self._manifest.scan_chunks(db_id):
            if row.file_name.startswith(f"{folder}/"):
                txn.delete_chunk(key)
        for number in (shard, COMPANION + shard, SNAPSHOT_ROW + shard):
            if self._manifest.get_wal_state(WalStateKey(db_id, number)) is not None:
                txn.delete_wal_state(WalStateKey(db_id, number))
        if not txn.is_empty:
            txn.commit()

    def trees(self) -> list[tuple[Tree, Catalog]]:
        with self._changed:
            return list(self._trees.values())

    def _catalog(self, tree: Tree) -> Catalog:
        for candidate, catalog in self.trees():
            if candidate is tree:
                return catalog
        raise Invalid("this tree is not open here")

    def detail_of(self, key: ChunkKey, row: ChunkEntryRecord) -> TableDetail:
        """Return a tree's part of a row of the manifest, with the key of its table if it is encrypted."""
        return Catalog(self._manifest, key.db_id, 0, "", self._storage_of(key.db_id)).detail(key.chunk_id, row)

    def use_archive(self, archive: ArchivedFiles) -> None:
        """Read files that are not in the store's folder from an archive. Requires: no tree is open yet."""
        self._files.archive = archive

    # -- requesting work

    def request_flush(self, tree: Tree) -> bool:
        """Enqueue a flush of the frozen memtables; False if one waits already."""
        return self._enqueue(JobKind.FLUSH, self._catalog(tree)) is not None

    def request_compaction(self, tree: Tree, *, everything: bool = False) -> bool:
        """Enqueue a compaction if one is due; False if none is, or one waits or runs already."""
        if tree.pick(everything=everything) is None:
            return False
        return self._enqueue(JobKind.COMPACTION, self._catalog(tree), everything=everything) is not None

    def _enqueue(self, kind: JobKind, catalog: Catalog, *, everything: bool = False) -> JobId | None:
        """Enqueue a job for a tree; None if one of its table waits or runs."""
        gate = self._jobs.gate(catalog.db_id, kind)
        if gate.is_shut() or gate.pending_job_id() is not None:
            return None
        payload = msgspec.msgpack.encode(_Payload(catalog.shard, everything))
        try:
            return self._jobs.enqueue(kind, db_id=catalog.db_id, payload=payload)
        except UniqueJobAlreadyPending:
            return None

    def flush(self, tree: Tree, timeout_s: float = BUSY_TIMEOUT_S) -> None:
        """Write all applied rows to files, and return when that is done.

        Waits for running flushes; `GateShut` if that takes longer than `timeout_s`, or if one failed.
        """
        target, deadline_s = tree.freeze(), self._clock.monotonic_s() + timeout_s
        catalog = self._catalog(tree)
        while tree.stored < target and tree.has_unflushed():
            self._enqueue(JobKind.FLUSH, catalog)
            self._run_or_wait(JobKind.FLUSH, tree, catalog, deadline_s)

    def compact(self, tree: Tree, *, everything: bool = False, timeout_s: float = BUSY_TIMEOUT_S) -> bool:
        """Compact now if a compaction is due; return whether it was. `GateShut` as for `flush`."""
        deadline_s, catalog = self._clock.monotonic_s() + timeout_s, self._catalog(tree)
        while tree.pick(everything=everything) is not None:
            job_id = self._enqueue(JobKind.COMPACTION, catalog, everything=everything)
            self._run_or_wait(JobKind.COMPACTION, tree, catalog, deadline_s)
            while job_id is not None:  # the background may have taken the job
                job = self._manifest.get_job(job_id)
                if job is None or isinstance(job.state, Completed):
                    return True
                if isinstance(job.state, FailedPermanent):
                    raise GateShut(f"the compaction failed{_why(job)}: look at the log")
                self._run_or_wait(JobKind.COMPACTION, tree, catalog, deadline_s)
        return False

    def _run_or_wait(self, kind: JobKind, tree: Tree, catalog: Catalog, deadline_s: float) -> None:
        """Run the waiting job, or wait a moment if another thread runs it. `GateShut` after the deadline."""
        if self.run(kind, db_id=catalog.db_id):
            return
        gate = self._jobs.gate(catalog.db_id, kind)
        holder = gate.state().active_job_id
        number = gate.pending_job_id() if holder is None else holder
        job = None if number is None else self._manifest.get_job(number)
        # A failed job waits for its next attempt, not for us; an abandoned repair waits for the next open.
        failed = job is not None and job.last_error is not None and isinstance(job.state, Pending)
        given_up = job is not None and job.kind == JobKind.REPAIR and isinstance(job.state, FailedPermanent)
        rest_s = deadline_s - self._clock.monotonic_s()
        if failed or given_up or rest_s <= 0 or self._stopping.is_set():
            work = "flush" if kind == JobKind.FLUSH else "compaction"
            raise GateShut(f"a {work} cannot run now{_why(job)}: try again later")
        tree.wait_for_change(min(BUSY_LOOK_S, rest_s))

    def stop(self) -> None:
        """Prepare to close: merges in threads of callers end at their next step, and all trees share one deadline."""
        self._stopped_s = self._clock.monotonic_s()
        self._stopping.set()

    def run(self, *kinds: JobKind, db_id: int | None = None) -> int:
        """Run the waiting jobs of these kinds (of one table) and their repairs in this thread; return their number."""
        ran = 0
        while lease := self._jobs.acquire("here", kinds, db_id):
            run_job(self._jobs, lease, self.handle, self._stopping, renew_every_s=self._jobs.lease_s / 3)
            ran += 1
        return ran

    # -- running jobs

    def handle(self, lease: Lease, stop: StopSignal) -> JobResult:
        """Run a flush, a compaction or the repair of one, as a job."""
        return JobResult.COMMITTED if self._do(lease, stop.is_set) else JobResult.DONE

    def _do(self, lease: Lease, stop: Stop) -> bool:
        """Run a job; return whether it was completed in its own transaction."""
        payload = msgspec.msgpack.decode(lease.job.payload, type=_Payload)
        with self._at_work(lease.job.table, payload.shard) as opened:
            if lease.job.kind == JobKind.REPAIR:
                self._check_listed(lease.job.table, payload.shard)  # raises: then the gate stays shut
                return False
            if opened is None:
                return False
            tree, catalog = opened
            try:
                if lease.job.kind == JobKind.FLUSH:
                    return self._work.flush(tree, catalog, lease)
                done = self._work.compact(tree, catalog, lease, everything=payload.everything, stop=stop)
                if done:
                    self._wake("clean-up")  # now that this job no longer holds its inputs
                return done
            except OSError as error:
                if is_disk_full(error):
                    raise DiskFull(
                        f"{catalog.folder} has no room for new files: free some space, then retry"
                    ) from error
                raise

    def _check_listed(self, db_id: int, shard: int) -> None:
        """Open every listed file of a shard, whether its tree is open or not."""
        for meta in Catalog(self._manifest, db_id, shard, "", self._storage_of(db_id)).load()[0]:
            if self._files.is_here(meta) or self._files.locate(meta) is None:
                self._files.open_table(meta).close()

    @contextmanager
    def _at_work(self, db_id: int, shard: int) -> Iterator[tuple[Tree, Catalog] | None]:
        key = (db_id, shard)
        with self._changed:
            opened = self._trees.get(key)
            self._busy[key] = self._busy.get(key, 0) + 1
        try:
            yield opened
        finally:
            with self._changed:
                self._busy[key] -= 1
                self._changed.notify_all()

    def check_adoptable(
        self,
        tree: Tree,
        chunk_ids: Sequence[int],
        lsn: int | None = None,
        check: Callable[[Sstable], object] = lambda table: None,
    ) -> list[FileMeta]:
        """Return the summaries of files built outside; `Invalid` if they cannot be adopted, or if `check` raises it."""
        catalog = self._catalog(tree)
        summaries = [self._files.inspect(catalog, chunk_id, check) for chunk_id in chunk_ids]
        if any(summary.merges for summary in summaries):
            raise Invalid("files to adopt hold puts and deletes only: resolve the merges first")
        runs = split_into_runs([(summary.start, summary.end, summary.chunk_id) for summary in summaries])
        return [catalog.describe(summary, level=0, run=runs[summary.chunk_id], lsn=lsn) for summary in summaries]

    def adopt(self, tree: Tree, chunk_ids: Sequence[int], lsn: int, time_us: int) -> None:
        """Adopt sorted files that were built outside the tree; all their rows get `lsn`.

        They are in the tree's folder under reserved ids, synced. Files that are disjoint by key make one run; if two
        hold the same key, one of them wins. Earlier edits are flushed first, so that runs are in LSN order.
        """
        if lsn <= tree.lsn:
            raise Invalid(f"files cannot be adopted at LSN {lsn}: {tree.lsn} was applied already")
        chunk_ids = self._not_adopted(tree, chunk_ids)
        added = self.check_adoptable(tree, chunk_ids, lsn)
        tree.use.announce(chunk_ids)
        try:
            self.flush(tree)
            files = self._files.open_all(added)
            operations = self._catalog(tree).publish(added, stored=(lsn, time_us), operators=tree.operators)
            self._manifest.apply(operations)
            tree.install_adopted(files, lsn, time_us)
        finally:
            tree.use.withdraw(chunk_ids)

    def _not_adopted(self, tree: Tree, chunk_ids: Sequence[int]) -> list[int]:
        """Return the files not adopted by an earlier record: two batches may name one file, and the first counts."""
        catalog, retired, unadopted = self._catalog(tree), tree.use.ids(), list[int]()
        for chunk_id in dict.fromkeys(chunk_ids):
            row = self._manifest.get_chunk(ChunkKey(catalog.db_id, chunk_id))
            if row is not None:
                new = row.staged
            else:  # a compaction merged its rows, and the file is deleted or about to be
                new = chunk_id not in retired and self._files.exists(catalog, chunk_id)
            if new:
                unadopted.append(chunk_id)
        return unadopted

    # -- measuring

    def measure(self) -> None:
        """Add the state of every tree that changed since the last call to the metrics of the manifest."""
        txn, measured = self._manifest.begin_write(), dict[tuple[int, int], TreeStatistics]()
        for tree, catalog in self.trees():
            measured[catalog.db_id, catalog.shard] = now = tree.statistics()
            if now == self._measured.get((catalog.db_id, catalog.shard)):
                continue
            txn.merge_metric(MetricKey(catalog.db_id, METRIC_MEMTABLE_BYTES), observation(now.memtable_bytes))
            txn.merge_metric(MetricKey(catalog.db_id, METRIC_LEVEL0_RUNS), observation(now.level0_runs))
            logger.info(
                "LSM metrics: table=%d shard=%d active_memtable_size=%d frozen_memtables=%d flush_pending=%s "
                "compaction_running=%d level_counts=%s",
                catalog.db_id,
                catalog.shard,
                now.active_memtable_bytes,
                now.frozen_memtables,
                now.flush_pending,
                self.compactions_running(catalog),
                list(now.level_files),
            )
        if txn.is_empty:
            return
        txn.commit()
        self._measured = measured

    def metrics(self) -> dict[MetricKey, MetricRecord]:
        """Return all metrics that the manifest has counted."""
        return self._manifest.read(lambda view: dict(METRICS.scan(view)))

    def compactions_running(self, catalog: Catalog) -> int:
        """Return the number of compactions of a tree that run."""
        return self._work.compacting.get((catalog.db_id, catalog.shard), 0)


def _why(job: JobRecord | None) -> str:
    return "" if job is None or job.last_error is None else f" ({job.last_error.message})"
