"""Flush, compaction and clean-up of trees, as durable jobs.

A job's payload names the ids of the files it will write, so that a job whose worker vanished is repaired by removing
what it left. Order of publication: files synced under their names, one manifest transaction (rows, watermark, job,
generation), the swap of the version; files that are no longer listed are collected when nobody reads them.

Thread: handlers run on the scheduler's workers, at most one of a kind and table at a time (the job's gate sees to it).
Invariants: (1) a listed file is whole and durable. (2) a file is removed only if it is not listed, not on its way to be
listed, and not in any version that someone holds.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from penstock.archive.container import PLAIN, ChunkIdentity, Sealing
from penstock.errors import GateShut, Invalid, OutcomeUnknown, PenstockError, UniqueJobAlreadyPending
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.files import FileSystem, make_dirs
from penstock.lsm.catalog import Catalog
from penstock.lsm.index import ROWS_MAX, Summary
from penstock.lsm.memtable import Memtable
from penstock.lsm.merge import MergeInput, MergePlan, merge, outputs_max
from penstock.lsm.sstable import Sstable
from penstock.lsm.tree import Tree, TreeSettings
from penstock.lsm.version import FileMeta, check_disjoint
from penstock.lsm.writer import SstableWriter, index_path
from penstock.manifest.jobs import JobQueue, Lease
from penstock.manifest.keys import ChunkKey, MetricKey, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import ManifestOp, MergeMetric
from penstock.manifest.records import JobKind, MetricDelta

logger = logging.getLogger(__name__)

FLUSH_CHUNK_ROWS = 4_096  # rows encoded in one go: a longer call would keep readers and writers waiting
ROWS_PER_FILE = FLUSH_CHUNK_ROWS * 800
assert ROWS_PER_FILE < ROWS_MAX  # which leaves room for range deletes
METRIC_FLUSH_BYTES, METRIC_FLUSH_US, METRIC_COMPACTION_BYTES, METRIC_COMPACTION_US = range(1, 5)
METRIC_MEMTABLE_BYTES, METRIC_LEVEL0_RUNS = 5, 6

Merge = Callable[[MergePlan], Sequence[Summary]]


@dataclass(frozen=True, kw_only=True)
class MaintenanceSettings:
    """How long a file that nobody lists is left alone."""

    grace_s: float = 60.0  # readers elsewhere may hold files of before a restart for so long

    def __post_init__(self) -> None:
        if self.grace_s < 0:
            raise Invalid("grace_s must not be negative")


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    shard: int
    chunk_ids: tuple[int, ...]
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
        sealing: Sealing = PLAIN,
        settings: MaintenanceSettings | None = None,
        tree_settings: TreeSettings | None = None,
        wake: Callable[[str], None] = lambda task: None,
    ) -> None:
        self._manifest = manifest
        self._jobs = jobs
        self._fs = fs
        self._root = root
        self._store = store
        self._clock = clock
        self._merge: Merge = merge_files or self._merge_here
        self._sealing = sealing
        self._settings = settings or MaintenanceSettings()
        self._tree_settings = tree_settings or TreeSettings()
        self._wake = wake
        self._lock = threads.lock("lsm.maintenance")
        self._trees: dict[tuple[int, int], tuple[Tree, Catalog]] = {}  # guarded by _lock
        self._unlisted_since_s: dict[str, float] = {}  # of the clean-up task alone

    # -- trees

    def open_tree(self, db_id: int, shard: int, folder: str, settings: TreeSettings | None = None) -> Tree:
        """The tree of a shard, with its files as the manifest lists them. `folder` is relative to the store."""
        with self._lock:
            if (db_id, shard) in self._trees:
                raise Invalid(f"the tree of table {db_id}, shard {shard} is open already")
        catalog = Catalog(self._manifest, db_id, shard, folder)
        make_dirs(self._fs, f"{self._root}/{folder}")
        files, stored, time_us = catalog.load()
        tree = Tree(
            files,
            self._open_table,
            clock=self._clock,
            settings=settings or self._tree_settings,
            stored=stored,
            time_us=time_us,
            wake=self._wake,
        )
        with self._lock:
            self._trees[db_id, shard] = tree, catalog
        return tree

    def close_tree(self, db_id: int, shard: int) -> None:
        """Forget a tree; its files stay."""
        with self._lock:
            self._trees.pop((db_id, shard), None)

    def drop_tree(self, db_id: int, shard: int, folder: str) -> None:
        """Remove a tree for good: its rows in the manifest, then its files. Doing it again does no harm."""
        self.close_tree(db_id, shard)
        catalog = Catalog(self._manifest, db_id, shard, folder)
        files, _, _ = catalog.load()
        txn = self._manifest.begin_write()
        for meta in files:
            txn.delete_chunk(ChunkKey(db_id, meta.chunk_id))
        txn.delete_wal_state(WalStateKey(db_id, shard))
        txn.commit()
        path = f"{self._root}/{folder}"
        if self._fs.exists(path):
            for name in self._fs.listdir(path):
                self._fs.unlink(f"{path}/{name}")
            self._fs.rmdir(path)

    def trees(self) -> list[tuple[Tree, Catalog]]:
        with self._lock:
            return list(self._trees.values())

    def _open_table(self, meta: FileMeta) -> Sstable:
        return Sstable.open(f"{self._root}/{meta.file_name}", fs=self._fs, keys=self._sealing.keys, lsn=meta.lsn)

    def _catalog(self, tree: Tree) -> Catalog:
        for known, catalog in self.trees():
            if known is tree:
                return catalog
        raise Invalid("this tree is not open here")

    # -- asking for work

    def request_flush(self, tree: Tree) -> bool:
        """Enqueue a flush of what is frozen; False if one waits already."""
        return self._enqueue(JobKind.FLUSH, self._catalog(tree), outputs=1)

    def request_compaction(self, tree: Tree, *, everything: bool = False) -> bool:
        """Enqueue a compaction if one is due; False if none is or one waits already."""
        compaction = tree.pick(everything=everything)
        if compaction is None:
            return False
        return self._enqueue(
            JobKind.COMPACTION, self._catalog(tree), outputs=_outputs(compaction.inputs), everything=everything
        )

    def _enqueue(self, kind: JobKind, catalog: Catalog, *, outputs: int, everything: bool = False) -> bool:
        if self._jobs.gate(catalog.db_id, kind).pending_job_id() is not None:
            return False
        ids = tuple(int(self._manifest.reserve_chunk_id()) for _ in range(outputs))
        payload = msgspec.msgpack.encode(_Payload(catalog.shard, ids, everything))
        try:
            self._jobs.enqueue(kind, db_id=catalog.db_id, payload=payload)
        except UniqueJobAlreadyPending:
            return False
        return True

    def flush(self, tree: Tree) -> None:
        """Freeze and flush now, in this thread."""
        tree.freeze()
        self.request_flush(tree)
        self.run(JobKind.FLUSH)

    def compact(self, tree: Tree, *, everything: bool = False) -> bool:
        """Compact now, in this thread, if anything is due; whether it was."""
        if not self.request_compaction(tree, everything=everything):
            return False
        self.run(JobKind.COMPACTION)
        return True

    def run(self, *kinds: JobKind) -> None:
        """Run the waiting jobs of these kinds, and their repairs, in this thread."""
        while lease := self._jobs.acquire("here", kinds):
            try:
                done = self.handle(lease)
            except BaseException as error:
                self._jobs.fail(lease, error)
                raise
            if not done:
                self._jobs.complete(lease)

    # -- doing it

    def handle(self, lease: Lease) -> bool:
        """Do a flush, a compaction or the repair of one; whether the job was completed in its own transaction."""
        payload = msgspec.msgpack.decode(lease.job.payload, type=_Payload)
        with self._lock:
            found = self._trees.get((lease.job.table, payload.shard))
        if lease.job.kind == JobKind.REPAIR:
            self._remove_leftovers(lease.job.table, payload.chunk_ids)
            return False
        if found is None:
            return False
        tree, catalog = found
        if lease.job.kind == JobKind.FLUSH:
            return self._flush(tree, catalog, lease, payload.chunk_ids)
        return self._compact(tree, catalog, lease, payload)

    def _flush(self, tree: Tree, catalog: Catalog, lease: Lease, chunk_ids: Sequence[int]) -> bool:
        work = tree.begin_flush()
        if work is None:
            return False
        rows, frozen = work
        began_s = self._clock.monotonic_s()
        ids = [
            *chunk_ids,
            *(int(self._manifest.reserve_chunk_id()) for _ in range((len(rows.rows) - 1) // ROWS_PER_FILE)),
        ]
        tree.announce(ids)
        try:
            summaries = self._write(rows, catalog, ids)
            added = [catalog.describe(summary, level=0, run=ids[0]) for summary in summaries]
            operations = catalog.publish(added, stored=(frozen[0].lsn_last, rows.time_us), sealing=self._sealing)
            operations += self._observe(catalog, METRIC_FLUSH_BYTES, METRIC_FLUSH_US, summaries, began_s)
            self._commit(lease, operations, catalog, added)
        except BaseException:
            tree.abandon_flush()
            tree.withdraw(ids)
            raise
        tree.end_flush(frozen, added)
        tree.withdraw(ids)
        return True

    def _write(self, rows: Memtable, catalog: Catalog, ids: Sequence[int]) -> list[Summary]:
        """Write a memtable as sstables, in small steps."""
        keys = rows.sorted_keys()
        borders = [b"", *keys[ROWS_PER_FILE::ROWS_PER_FILE], None]
        summaries: list[Summary] = []
        chunks = rows.chunks(FLUSH_CHUNK_ROWS)
        for chunk_id, (low, high) in zip(ids, itertools.pairwise(borders), strict=True):
            writer = self._writer(catalog, chunk_id)
            try:
                writer.delete_ranges(rows.ranges.clip(low or b"", high))
                for columns in itertools.islice(chunks, ROWS_PER_FILE // FLUSH_CHUNK_ROWS):
                    writer.append(columns)
                summaries.append(writer.finish())
            except BaseException:
                writer.abort()
                raise
        return summaries

    def _writer(self, catalog: Catalog, chunk_id: int) -> SstableWriter:
        identity = ChunkIdentity(store=self._store, chunk_id=chunk_id)
        return SstableWriter(self._fs, f"{self._root}/{catalog.file_name(chunk_id)}", identity, sealing=self._sealing)

    def _compact(self, tree: Tree, catalog: Catalog, lease: Lease, payload: _Payload) -> bool:
        compaction = tree.pick(everything=payload.everything)
        if compaction is None:
            return False
        began_s = self._clock.monotonic_s()
        missing = max(0, _outputs(compaction.inputs) - len(payload.chunk_ids))
        ids = (*payload.chunk_ids, *(int(self._manifest.reserve_chunk_id()) for _ in range(missing)))
        plan = MergePlan(
            inputs=tuple(
                MergeInput(path=f"{self._root}/{file.meta.file_name}", lsn=file.meta.lsn) for file in compaction.inputs
            ),
            folder=f"{self._root}/{catalog.folder}",
            store=self._store,
            chunk_ids=ids,
            now_us=tree.time_us,
            bottom=compaction.bottom,
            lsn_floor=tree.oldest_snapshot(),
        )
        tree.announce(ids)
        try:
            summaries = self._merge(plan)
            added = [catalog.describe(summary, level=compaction.target, run=0) for summary in summaries]
            if not tree.is_current(compaction):
                raise PenstockError("the inputs of a compaction changed under it")
            removed = [file.meta for file in compaction.inputs]
            operations = catalog.publish(added, removed, sealing=self._sealing)
            operations += self._observe(catalog, METRIC_COMPACTION_BYTES, METRIC_COMPACTION_US, summaries, began_s)
            self._commit(lease, operations, catalog, added)
        except BaseException:
            tree.withdraw(ids)
            raise
        tree.end_compaction(compaction, added)
        tree.withdraw(ids)
        return True

    def _merge_here(self, plan: MergePlan) -> Sequence[Summary]:
        return merge(plan, fs=self._fs, keys=self._sealing.keys, sealing=self._sealing)

    def _commit(self, lease: Lease, operations: list[ManifestOp], catalog: Catalog, added: Sequence[FileMeta]) -> None:
        """Commit; if the outcome is unknown, find out: rows that are listed must not be flushed a second time."""
        try:
            self._jobs.complete(lease, also=operations)
        except OutcomeUnknown:
            self._manifest.sync()
            if not added or self._manifest.get_chunk(ChunkKey(catalog.db_id, added[0].chunk_id)) is None:
                raise

    def _observe(
        self, catalog: Catalog, size_kind: int, time_kind: int, summaries: Sequence[Summary], began_s: float
    ) -> list[ManifestOp]:
        took_us = (self._clock.monotonic_s() - began_s) * 1e6
        size = float(sum(summary.file_bytes for summary in summaries))
        return [
            MergeMetric(MetricKey(catalog.db_id, size_kind), _observation(size)),
            MergeMetric(MetricKey(catalog.db_id, time_kind), _observation(took_us)),
        ]

    def adopt(self, tree: Tree, chunk_ids: Sequence[int], lsn: int, time_us: int) -> None:
        """Take in sorted files that were built elsewhere, as one run whose rows all have `lsn`.

        They stand in the tree's folder under ids reserved for them, synced, and are disjoint by key. All that was
        applied before is flushed first, so that runs stand in the order of their LSNs.
        """
        catalog = self._catalog(tree)
        if lsn <= tree.lsn:
            raise Invalid(f"files cannot be adopted at LSN {lsn}: {tree.lsn} was applied already")
        added = [catalog.describe(self._summary(catalog, i), level=0, run=chunk_ids[0], lsn=lsn) for i in chunk_ids]
        check_disjoint(added)
        tree.announce(chunk_ids)
        try:
            self.flush(tree)
            if tree.stored < tree.lsn:
                raise GateShut("another flush of this table is on its way: adopt again when it has ended")
            operations = catalog.publish(added, stored=(lsn, time_us), sealing=self._sealing)
            self._manifest.apply(operations)
            tree.install_adopted(added, lsn, time_us)
        finally:
            tree.withdraw(chunk_ids)

    def _summary(self, catalog: Catalog, chunk_id: int) -> Summary:
        path = f"{self._root}/{catalog.file_name(chunk_id)}"
        table = Sstable.open(path, fs=self._fs, keys=self._sealing.keys)
        try:
            if table.summary.store != self._store or table.summary.chunk_id != chunk_id:
                raise Invalid(f"{path} was built for another store or under another id: build it again")
            return table.summary
        finally:
            table.close()

    # -- collecting

    def _remove_leftovers(self, db_id: int, chunk_ids: Iterable[int]) -> None:
        """What a vanished job wrote and nobody listed."""
        for _, catalog in self.trees():
            if catalog.db_id != db_id:
                continue
            for chunk_id in chunk_ids:
                if self._manifest.get_chunk(ChunkKey(db_id, chunk_id)) is None:
                    self._remove(catalog.file_name(chunk_id))

    def _remove(self, file_name: str) -> None:
        path = f"{self._root}/{file_name}"
        for name in (path, index_path(path), path + ".tmp", index_path(path) + ".tmp"):
            if self._fs.exists(name):
                with suppress(FileNotFoundError):
                    self._fs.unlink(name)

    def collect(self) -> int:
        """Remove files that nobody lists, holds or writes; how many went."""
        removed = 0
        for tree, catalog in self.trees():
            while (meta := tree.take_doomed()) is not None:
                self._remove(meta.file_name)
                removed += 1
            removed += self._collect_unlisted(tree, catalog)
        return removed

    def _collect_unlisted(self, tree: Tree, catalog: Catalog) -> int:
        now_s, removed = self._clock.monotonic_s(), 0
        # In this order: a file on its way is announced before it has a name, and until after it is listed.
        names = self._fs.listdir(f"{self._root}/{catalog.folder}")
        in_use = tree.in_use()
        for name in names:
            stem = name.split(".", 1)[0]
            if not stem.isdigit() or int(stem) in in_use:
                continue
            if self._manifest.get_chunk(ChunkKey(catalog.db_id, int(stem))) is not None:
                self._unlisted_since_s.pop(f"{catalog.folder}/{name}", None)
                continue
            since_s = self._unlisted_since_s.setdefault(f"{catalog.folder}/{name}", now_s)
            if now_s - since_s >= self._settings.grace_s:
                with suppress(FileNotFoundError):
                    self._fs.unlink(f"{self._root}/{catalog.folder}/{name}")
                del self._unlisted_since_s[f"{catalog.folder}/{name}"]
                removed += 1
        return removed

    # -- measuring

    def measure(self) -> None:
        """Add the state of every tree to the metrics of the manifest."""
        txn = self._manifest.begin_write()
        for tree, catalog in self.trees():
            now = tree.statistics()
            txn.merge_metric(MetricKey(catalog.db_id, METRIC_MEMTABLE_BYTES), _observation(now.memtable_bytes))
            txn.merge_metric(MetricKey(catalog.db_id, METRIC_LEVEL0_RUNS), _observation(now.level0_runs))
        txn.commit()


def _outputs(inputs: Sequence[object]) -> int:
    metas = [file.meta for file in inputs]  # type: ignore[attr-defined]
    return outputs_max(sum(meta.rows for meta in metas), sum(meta.size_bytes for meta in metas))


def _observation(value: float) -> MetricDelta:
    return MetricDelta(sum=value, count=1, min=value, max=value)
