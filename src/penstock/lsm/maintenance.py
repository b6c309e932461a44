"""Flush, compaction and adoption of trees, as durable jobs.

Order of publication: files synced under their names and opened, one manifest transaction (rows, watermark, job,
generation), the swap of the version. Every attempt writes under ids of its own, so what a vanished one left can never
be taken for something else; `collection` removes it. The repair of a vanished job makes sure that the listed files are
there; until it has, the gate of its kind stays shut.

Thread: handlers run on the scheduler's workers or in the thread of a caller, at most one of a kind and table at a time
(the job's gate sees to it). A tree is closed or dropped only while no handler works on it.
Invariants: (1) a listed file is whole and durable. (2) what was committed is swapped in: nothing between can fail. (3)
if nobody can tell whether a commit happened, the tree is not flushed again before it is reopened.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from penstock.archive.chunk import PLAIN, ChunkIdentity, Sealing
from penstock.errors import (
    Backpressure,
    CommitFailed,
    CorruptionError,
    DiskFull,
    GateShut,
    Invalid,
    OutcomeUnknown,
    PenstockError,
    Poisoned,
    UniqueJobAlreadyPending,
)
from penstock.host import memory, threads
from penstock.host.clock import Clock
from penstock.host.file_errors import is_disk_full
from penstock.host.file_operations import make_dirs
from penstock.host.files import FileSystem
from penstock.lsm.catalog import Catalog
from penstock.lsm.compaction import Compaction
from penstock.lsm.index import ROWS_MAX, Summary
from penstock.lsm.memtable import Memtable
from penstock.lsm.merge import MergeInput, MergePlan, merge, outputs_max
from penstock.lsm.offering import MergeOffers, Reserve
from penstock.lsm.sorted_rows import SortedRows
from penstock.lsm.sstable import Sstable
from penstock.lsm.tree import Tree, TreeSettings
from penstock.lsm.version import FileMeta, TableFile, part_into_runs
from penstock.lsm.writer import BATCH_BYTES, SstableWriter
from penstock.manifest.jobs import JobQueue, Lease
from penstock.manifest.keys import ChunkKey, JobId, MetricKey, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import ManifestOp, MergeMetric
from penstock.manifest.records import Completed, FailedPermanent, JobKind, JobRecord, MetricDelta, Pending
from penstock.scheduler.runner import JobResult, run_job
from penstock.scheduler.task import StopSignal

logger = logging.getLogger(__name__)

FLUSH_CHUNK_ROWS = 1 << 16  # rows given to a writer in one go
ROWS_PER_FILE = FLUSH_CHUNK_ROWS * 50
assert ROWS_PER_FILE < ROWS_MAX  # which leaves room for range deletes
SETTLE_ATTEMPTS = 10  # to find out whether a commit happened
BUSY_TIMEOUT_S = 60.0
BUSY_LOOK_S = 0.05  # between two looks whether others have ended

METRIC_FLUSH_BYTES, METRIC_FLUSH_US, METRIC_COMPACTION_BYTES, METRIC_COMPACTION_US = range(1, 5)
METRIC_MEMTABLE_BYTES, METRIC_LEVEL0_RUNS = 5, 6

Stop = Callable[[], bool]
Merge = Callable[[MergePlan, Stop], Sequence[Summary]]


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
        sealing: Sealing = PLAIN,
        tree_settings: TreeSettings | None = None,
        wake: Callable[[str], None] = lambda task: None,
        relieved: Callable[[], None] = lambda: None,
    ) -> None:
        self._manifest = manifest
        self._jobs = jobs
        self._fs = fs
        self._root = root
        self._store = store
        self._clock = clock
        # Sealed files are merged here: no other process has the keys.
        self._merge: Merge = self._merge_here if merge_files is None or not sealing.plain else merge_files
        self._offers = offers if sealing.plain else None
        self._sealing = sealing
        self._tree_settings = tree_settings or TreeSettings()
        self._wake = wake
        self._relieved = relieved
        self._stopping = threading.Event()
        self._stopped_s = 0.0  # when that was set
        self._changed = threads.condition("lsm.maintenance")
        self._trees: dict[tuple[int, int], tuple[Tree, Catalog]] = {}  # guarded by _changed
        self._busy: dict[tuple[int, int], int] = {}  # guarded by _changed: handlers at work

    # -- trees

    def open_tree(self, db_id: int, shard: int, folder: str, settings: TreeSettings | None = None) -> Tree:
        """The tree of a shard, with its files as the manifest lists them. `folder` is relative to the store."""
        with self._changed:
            if (db_id, shard) in self._trees:
                raise Invalid(f"the tree of table {db_id}, shard {shard} is open already")
        catalog = Catalog(self._manifest, db_id, shard, folder)
        make_dirs(self._fs, f"{self._root}/{folder}")
        files, stored, progress = catalog.load()
        known = progress.operators if files else ()
        tree = Tree(
            files,
            self._open_table,
            clock=self._clock,
            settings=settings or self._tree_settings,
            stored=stored,
            time_us=progress.time_us,
            operators=None if known is None else frozenset(known),
            wake=self._wake,
            relieved=self._relieved,
        )
        with self._changed:
            self._trees[db_id, shard] = tree, catalog
        return tree

    def close_tree(self, db_id: int, shard: int, timeout_s: float = BUSY_TIMEOUT_S) -> None:
        """Forget a tree; its files stay. Waits for work on it to end."""
        if self._stopping.is_set():
            timeout_s = max(0.0, min(timeout_s, self._stopped_s + BUSY_TIMEOUT_S - self._clock.monotonic_s()))
        with self._changed:
            tree, _ = self._trees.pop((db_id, shard), (None, None))  # before the wait: nothing new begins
            if not self._changed.wait_for(lambda: not self._busy.get((db_id, shard)), timeout_s):
                raise GateShut(f"work on table {db_id}, shard {shard} goes on after {timeout_s} s: try again later")
        if tree is not None:
            tree.close()

    def close(self) -> None:
        """Forget all trees, without a wait. Requires: no handler works any more."""
        with self._changed:
            trees, self._trees = [tree for tree, _ in self._trees.values()], {}
        for tree in trees:
            tree.close()

    def is_at_work(self, db_id: int, shard: int) -> bool:
        """Whether a job works on a tree, so that closing it would wait."""
        with self._changed:
            return bool(self._busy.get((db_id, shard)))

    def drop_tree(self, db_id: int, shard: int, folder: str) -> None:
        """Remove a shard's rows in the manifest for good; its files are the caller's. Again does no harm."""
        self.close_tree(db_id, shard)
        txn = self._manifest.begin_write()
        for key, row in self._manifest.scan_chunks(db_id):
            if row.file_name.startswith(f"{folder}/"):
                txn.delete_chunk(key)
        txn.delete_wal_state(WalStateKey(db_id, shard))
        txn.delete_metrics(db_id)
        txn.commit()

    def trees(self) -> list[tuple[Tree, Catalog]]:
        with self._changed:
            return list(self._trees.values())

    def _open_table(self, meta: FileMeta) -> Sstable:
        """A listed file. It must be there, and be the one that was listed."""
        path = f"{self._root}/{meta.file_name}"
        try:
            table = Sstable.open(path, fs=self._fs, keys=self._sealing.keys, lsn=meta.lsn)
        except FileNotFoundError as error:
            raise CorruptionError(
                error.filename or path, 0, "this file is listed in the manifest, and missing"
            ) from None
        found = table.summary
        if (found.store, found.chunk_id, found.rows) != (self._store, meta.chunk_id, meta.rows):
            table.close()
            raise CorruptionError(path, 0, f"this is not the file that the manifest lists as chunk {meta.chunk_id}")
        return table

    def _open_files(self, metas: Sequence[FileMeta]) -> list[TableFile]:
        """Files for a version, opened now: when they are committed, nothing may fail any more."""
        files = [TableFile(meta, self._open_table) for meta in metas]
        for file in files:
            file.table()
        return files

    def _catalog(self, tree: Tree) -> Catalog:
        for known, catalog in self.trees():
            if known is tree:
                return catalog
        raise Invalid("this tree is not open here")

    # -- asking for work

    def request_flush(self, tree: Tree) -> bool:
        """Enqueue a flush of what is frozen; False if one waits already."""
        return self._enqueue(JobKind.FLUSH, self._catalog(tree)) is not None

    def request_compaction(self, tree: Tree, *, everything: bool = False) -> bool:
        """Enqueue a compaction if one is due; False if none is, or one waits or runs already."""
        if tree.pick(everything=everything) is None:
            return False
        return self._enqueue(JobKind.COMPACTION, self._catalog(tree), everything=everything) is not None

    def _enqueue(self, kind: JobKind, catalog: Catalog, *, everything: bool = False) -> JobId | None:
        """A job for a tree; None if one of its table waits or runs."""
        gate = self._jobs.gate(catalog.db_id, kind)
        if gate.is_shut() or gate.pending_job_id() is not None:
            return None
        payload = msgspec.msgpack.encode(_Payload(catalog.shard, everything))
        try:
            return self._jobs.enqueue(kind, db_id=catalog.db_id, payload=payload)
        except UniqueJobAlreadyPending:
            return None

    def flush(self, tree: Tree, timeout_s: float = BUSY_TIMEOUT_S) -> None:
        """Bring all that was applied into files; when this returns, it is.

        Waits for flushes that others began; `GateShut` if that takes longer than `timeout_s`, or if one failed.
        """
        target, deadline_s = tree.freeze(), self._clock.monotonic_s() + timeout_s
        catalog = self._catalog(tree)
        while tree.stored < target and tree.has_unflushed():
            self._enqueue(JobKind.FLUSH, catalog)
            self._run_or_wait(JobKind.FLUSH, tree, catalog, deadline_s)

    def compact(self, tree: Tree, *, everything: bool = False, timeout_s: float = BUSY_TIMEOUT_S) -> bool:
        """Compact now if anything is due; whether it was. `GateShut` as for a flush."""
        deadline_s, catalog = self._clock.monotonic_s() + timeout_s, self._catalog(tree)
        while tree.pick(everything=everything) is not None:
            job_id = self._enqueue(JobKind.COMPACTION, catalog, everything=everything)
            self._run_or_wait(JobKind.COMPACTION, tree, catalog, deadline_s)
            while job_id is not None:  # the background may have taken it
                job = self._manifest.get_job(job_id)
                if job is None or isinstance(job.state, Completed):
                    return True
                if isinstance(job.state, FailedPermanent):
                    raise GateShut(f"table {catalog.db_id} was not compacted{_why(job)}: look at the log")
                self._run_or_wait(JobKind.COMPACTION, tree, catalog, deadline_s)
        return False

    def _run_or_wait(self, kind: JobKind, tree: Tree, catalog: Catalog, deadline_s: float) -> None:
        """Run what waits, whoever asked for it; if somebody else is at it, wait a moment. `GateShut` if it is late."""
        if self.run(kind, db_id=catalog.db_id):
            return
        gate = self._jobs.gate(catalog.db_id, kind)
        holder = gate.state().active_job_id
        number = gate.pending_job_id() if holder is None else holder
        job = None if number is None else self._manifest.get_job(number)
        # A job that failed waits for its next attempt and not for us; a repair that was given up, for an opening.
        failed = job is not None and job.last_error is not None and isinstance(job.state, Pending)
        given_up = job is not None and job.kind == JobKind.REPAIR and isinstance(job.state, FailedPermanent)
        rest_s = deadline_s - self._clock.monotonic_s()
        if failed or given_up or rest_s <= 0 or self._stopping.is_set():
            what = "flushed" if kind == JobKind.FLUSH else "compacted"
            raise GateShut(f"table {catalog.db_id} cannot be {what} now{_why(job)}: try again later")
        tree.wait_for_change(min(BUSY_LOOK_S, rest_s))

    def stop(self) -> None:
        """The store closes: merges in threads of callers end at their next step, and all trees have one deadline."""
        self._stopped_s = self._clock.monotonic_s()
        self._stopping.set()

    def run(self, *kinds: JobKind, db_id: int | None = None) -> int:
        """Run the waiting jobs of these kinds (of one table), and their repairs, in this thread; how many."""
        ran = 0
        while lease := self._jobs.acquire("here", kinds, db_id):
            run_job(self._jobs, lease, self.handle, self._stopping, renew_every_s=self._jobs.lease_s / 3)
            ran += 1
        return ran

    # -- doing it

    def handle(self, lease: Lease, stop: StopSignal) -> JobResult:
        """Do a flush, a compaction or the repair of one, as a job."""
        return JobResult.COMMITTED if self._do(lease, stop.is_set) else JobResult.DONE

    def _do(self, lease: Lease, stop: Stop) -> bool:
        """Whether the job was completed in its own transaction."""
        payload = msgspec.msgpack.decode(lease.job.payload, type=_Payload)
        with self._at_work(lease.job.table, payload.shard) as found:
            if lease.job.kind == JobKind.REPAIR:
                self._check_listed(lease.job.table, payload.shard)  # raises: then the gate stays shut
                return False
            if found is None:
                return False
            tree, catalog = found
            try:
                if lease.job.kind == JobKind.FLUSH:
                    return self._flush(tree, catalog, lease)
                return self._compact(tree, catalog, lease, payload, stop)
            except OSError as error:
                if is_disk_full(error):
                    raise DiskFull(
                        f"{catalog.folder} has no room for new files: free some space, then retry"
                    ) from error
                raise

    def _check_listed(self, db_id: int, shard: int) -> None:
        """Open every listed file of a shard, whether its tree is open or not."""
        for meta in Catalog(self._manifest, db_id, shard, "").load()[0]:
            self._open_table(meta).close()

    @contextmanager
    def _at_work(self, db_id: int, shard: int) -> Iterator[tuple[Tree, Catalog] | None]:
        place = (db_id, shard)
        with self._changed:
            found = self._trees.get(place)
            self._busy[place] = self._busy.get(place, 0) + 1
        try:
            yield found
        finally:
            with self._changed:
                self._busy[place] -= 1
                self._changed.notify_all()

    def _reserve(self, count: int) -> list[int]:
        return [int(self._manifest.reserve_chunk_id()) for _ in range(count)]

    def _flush(self, tree: Tree, catalog: Catalog, lease: Lease) -> bool:
        work = tree.begin_flush()
        if work is None:
            return False
        ids: list[int] = []
        try:
            rows, frozen = work
            began_s = self._clock.monotonic_s()
            ids = self._reserve(1 + (len(rows.rows) - 1) // ROWS_PER_FILE if rows.rows else 1)
            tree.announce(ids)
            summaries = self._write(rows, catalog, ids)
            files = self._open_files([catalog.describe(summary, level=0, run=ids[0]) for summary in summaries])
            stored = (frozen[0].lsn_last, rows.time_us)
            metas, operators = [file.meta for file in files], tree.operators
            operations = catalog.publish(metas, stored=stored, operators=operators, sealing=self._sealing)
            operations += self._observe(catalog, METRIC_FLUSH_BYTES, METRIC_FLUSH_US, summaries, began_s)
            self._commit(lease, operations)
        except Poisoned:
            raise  # it may have been committed: these rows must not be flushed again
        except BaseException:
            tree.abandon_flush()
            tree.withdraw(ids)
            raise
        tree.end_flush(frozen, files, rows.time_us)
        tree.withdraw(ids)
        del work, rows, frozen
        memory.release_free_memory()
        return True

    def _write(self, rows: Memtable, catalog: Catalog, ids: Sequence[int]) -> list[Summary]:
        """Write a memtable as sstables, in small steps."""
        ordered = SortedRows(rows)
        starts = range(0, max(1, len(ordered)), ROWS_PER_FILE)
        borders = [b"", *(ordered.key(start) for start in starts[1:]), None]
        summaries: list[Summary] = []
        # Rows that are deleted are not written, so that there may be more ids than files.
        for chunk_id, start, (low, high) in zip(ids, starts, itertools.pairwise(borders), strict=False):
            writer = self._writer(catalog, chunk_id)
            try:
                writer.delete_ranges(rows.ranges.clip(low or b"", high))
                at, end = start, min(start + ROWS_PER_FILE, len(ordered))
                while at < end:
                    columns = ordered.columns(at, min(at + FLUSH_CHUNK_ROWS, end), BATCH_BYTES)
                    writer.append(columns)
                    at += len(columns)
                summaries.append(writer.finish())
            except BaseException:
                writer.abort()
                raise
        return summaries

    def _writer(self, catalog: Catalog, chunk_id: int) -> SstableWriter:
        identity = ChunkIdentity(store=self._store, chunk_id=chunk_id)
        return SstableWriter(self._fs, f"{self._root}/{catalog.file_name(chunk_id)}", identity, sealing=self._sealing)

    def _compact(self, tree: Tree, catalog: Catalog, lease: Lease, payload: _Payload, stop: Stop) -> bool:
        compaction = tree.pick(everything=payload.everything)
        if compaction is None:
            return False
        began_s = self._clock.monotonic_s()
        inputs = [file.meta for file in compaction.inputs]
        ids = self._reserve(outputs_max(sum(meta.rows for meta in inputs), sum(meta.size_bytes for meta in inputs)))
        plan = MergePlan(
            inputs=tuple(MergeInput(path=meta.file_name, lsn=meta.lsn) for meta in inputs),
            folder=catalog.folder,
            store=self._store,
            chunk_ids=tuple(ids),
            # Of what is in files: a later record may be replayed, and must find what it found the first time.
            now_us=tree.stored_time_us,
            bottom=compaction.bottom,
            lsn_floor=tree.oldest_snapshot(),
        )
        announced = [*ids, *(meta.chunk_id for meta in inputs)]  # the inputs too: they are unlisted before the swap
        tree.announce(announced)

        def reserve(count: int) -> list[int]:
            more = self._reserve(count)
            tree.announce(more)
            announced.extend(more)
            return more

        try:
            summaries = self._merged(compaction, plan, reserve, stop)
            files = self._open_files([catalog.describe(s, level=compaction.target, run=0) for s in summaries])
            if not tree.is_current(compaction):
                raise PenstockError("the inputs of a compaction changed under it")
            operations = catalog.publish([file.meta for file in files], inputs, sealing=self._sealing)
            operations += self._observe(catalog, METRIC_COMPACTION_BYTES, METRIC_COMPACTION_US, summaries, began_s)
            self._commit(lease, operations)
        except BaseException:
            tree.withdraw(announced)
            raise
        tree.end_compaction(compaction, files)
        tree.withdraw(announced)
        return True

    def _merged(self, compaction: Compaction, plan: MergePlan, reserve: Reserve, stop: Stop) -> Sequence[Summary]:
        """The outputs of a merge, by whoever does it. One that a driver gave up had ids of its own: it may go on."""
        if self._offers is not None:
            summaries = self._offers.merge(plan, compaction.inputs, reserve, stop)
            if summaries is not None:
                return summaries
        return self._merge(plan.under(self._root), stop)

    def _merge_here(self, plan: MergePlan, stop: Stop) -> Sequence[Summary]:
        return merge(plan, fs=self._fs, keys=self._sealing.keys, sealing=self._sealing, stop=stop)

    def _commit(self, lease: Lease, operations: list[ManifestOp]) -> None:
        """Commit; if the outcome is unknown, find out. `Poisoned` if that is not possible either."""
        try:
            self._jobs.complete(lease, also=operations)
        except OutcomeUnknown as error:
            if not self._was_committed(lease):
                raise CommitFailed("the commit of a job did not happen: it will be tried again") from error

    def _was_committed(self, lease: Lease) -> bool:
        for _ in range(SETTLE_ATTEMPTS):
            try:
                self._manifest.sync()
                job = self._manifest.get_job(lease.job.job_id)
                return job is not None and isinstance(job.state, Completed)
            except (Backpressure, OutcomeUnknown):
                continue
        raise Poisoned(f"nobody can tell whether job {lease.job.job_id} was committed: open the store again")

    def _observe(
        self, catalog: Catalog, size_kind: int, time_kind: int, summaries: Sequence[Summary], began_s: float
    ) -> list[ManifestOp]:
        took_us = (self._clock.monotonic_s() - began_s) * 1e6
        size = float(sum(summary.file_bytes for summary in summaries))
        return [
            MergeMetric(MetricKey(catalog.db_id, size_kind), _observation(size)),
            MergeMetric(MetricKey(catalog.db_id, time_kind), _observation(took_us)),
        ]

    def check_adoptable(
        self,
        tree: Tree,
        chunk_ids: Sequence[int],
        lsn: int | None = None,
        look: Callable[[Sstable], object] = lambda table: None,
    ) -> list[FileMeta]:
        """What files built elsewhere hold; `Invalid` if they cannot be adopted as they are, or `look` says so."""
        catalog = self._catalog(tree)
        summaries = [self._summary(catalog, chunk_id, look) for chunk_id in chunk_ids]
        if any(summary.merges for summary in summaries):
            raise Invalid("files to adopt hold puts and deletes only: resolve the merges first")
        runs = part_into_runs([(summary.start, summary.end, summary.chunk_id) for summary in summaries])
        return [catalog.describe(summary, level=0, run=runs[summary.chunk_id], lsn=lsn) for summary in summaries]

    def adopt(self, tree: Tree, chunk_ids: Sequence[int], lsn: int, time_us: int) -> None:
        """Take in sorted files that were built elsewhere, all of whose rows have `lsn`.

        They stand in the tree's folder under ids reserved for them, synced. Files that are disjoint by key make one
        run; where two hold the same key, one of them wins. All that was applied before is flushed first, so that runs
        stand in the order of their LSNs.
        """
        if lsn <= tree.lsn:
            raise Invalid(f"files cannot be adopted at LSN {lsn}: {tree.lsn} was applied already")
        chunk_ids = self._not_adopted(tree, chunk_ids)
        added = self.check_adoptable(tree, chunk_ids, lsn)
        tree.announce(chunk_ids)
        try:
            self.flush(tree)
            files = self._open_files(added)
            stored, operators = (lsn, time_us), tree.operators
            operations = self._catalog(tree).publish(added, stored=stored, operators=operators, sealing=self._sealing)
            self._manifest.apply(operations)
            tree.install_adopted(files, lsn, time_us)
        finally:
            tree.withdraw(chunk_ids)

    def _not_adopted(self, tree: Tree, chunk_ids: Sequence[int]) -> list[int]:
        """Those files that no earlier record brought in: two batches may name one file, and the first counts."""
        catalog, retired, found = self._catalog(tree), tree.in_use(), list[int]()
        for chunk_id in dict.fromkeys(chunk_ids):
            row = self._manifest.get_chunk(ChunkKey(catalog.db_id, chunk_id))
            if row is not None:
                new = row.staged
            else:  # a compaction took its rows elsewhere, and the file is gone or about to go
                new = chunk_id not in retired and self._fs.exists(f"{self._root}/{catalog.file_name(chunk_id)}")
            if new:
                found.append(chunk_id)
        return found

    def _summary(self, catalog: Catalog, chunk_id: int, look: Callable[[Sstable], object]) -> Summary:
        path = f"{self._root}/{catalog.file_name(chunk_id)}"
        try:
            table = Sstable.open(path, fs=self._fs, keys=self._sealing.keys)
        except FileNotFoundError as error:
            raise CorruptionError(error.filename or path, 0, "this file is to be adopted, and is missing") from None
        try:
            if table.summary.store != self._store or table.summary.chunk_id != chunk_id:
                raise Invalid(f"{path} was built for another store or under another id: build it again")
            look(table)
            return table.summary
        finally:
            table.close()

    # -- measuring

    def measure(self) -> None:
        """Add the state of every tree to the metrics of the manifest."""
        txn = self._manifest.begin_write()
        for tree, catalog in self.trees():
            now = tree.statistics()
            txn.merge_metric(MetricKey(catalog.db_id, METRIC_MEMTABLE_BYTES), _observation(now.memtable_bytes))
            txn.merge_metric(MetricKey(catalog.db_id, METRIC_LEVEL0_RUNS), _observation(now.level0_runs))
        txn.commit()


def _why(job: JobRecord | None) -> str:
    return "" if job is None or job.last_error is None else f" ({job.last_error.message})"


def _observation(value: float) -> MetricDelta:
    return MetricDelta(sum=value, count=1, min=value, max=value)
