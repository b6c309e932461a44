"""Flush and compaction of a tree: write files, publish them in one transaction, swap them in.

Order of publication: files synced under their names and opened, one manifest transaction (rows, watermark, job,
generation), the swap of the version. Every attempt writes under its own ids, so files of a crashed attempt can never be
mistaken for others; `collection` deletes them.

Thread: at most one flush and one compaction of a table at a time (the job's gate ensures it).
Invariants: (1) a listed file is whole and durable. (2) a committed change is swapped in: nothing between can fail. (3)
if it is unknown whether a commit happened, the tree is not flushed again before it is reopened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from penstock.archive.chunk import KeyRing
from penstock.errors import Backpressure, CommitFailed, OutcomeUnknown, PenstockError, Poisoned
from penstock.host import memory
from penstock.host.clock import Clock
from penstock.host.metrics import bucket_counts
from penstock.lsm.catalog import Catalog
from penstock.lsm.compaction import Compaction
from penstock.lsm.index import Summary
from penstock.lsm.merge import MergeInput, MergePlan, as_written, merge, outputs_max
from penstock.lsm.merge_offers import MergeOffers, Reserve
from penstock.lsm.tree import Tree
from penstock.lsm.tree_files import TreeFiles, files_of
from penstock.manifest.jobs import JobQueue, Lease
from penstock.manifest.keys import MetricKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import ManifestOp, MergeMetric
from penstock.manifest.records import Completed, MetricDelta

logger = logging.getLogger(__name__)

OUTCOME_ATTEMPTS = 10  # to find out whether a commit happened

METRIC_FLUSH_BYTES, METRIC_FLUSH_US, METRIC_COMPACTION_BYTES, METRIC_COMPACTION_US = range(1, 5)
METRIC_MEMTABLE_BYTES, METRIC_LEVEL0_RUNS = 5, 6

Stop = Callable[[], bool]
Merge = Callable[[MergePlan, Stop, KeyRing | None], Sequence[Summary]]  # the keys of an encrypted table


class TreeJobs:
    """The work of jobs on the files of trees. `merge_files` runs a merge in another process, if possible."""

    def __init__(
        self,
        manifest: Manifest,
        jobs: JobQueue,
        files: TreeFiles,
        *,
        clock: Clock,
        merge_files: Merge | None = None,
        offers: MergeOffers | None = None,
    ) -> None:
        self._manifest = manifest
        self._jobs = jobs
        self._files = files
        self._clock = clock
        self._merge: Merge = self._merge_here if merge_files is None else merge_files
        self._offers = offers
        self.compacting: dict[tuple[int, int], int] = {}  # compactions that run, by table and shard

    def reserve(self, count: int) -> list[int]:
        """Reserve chunk ids for new files."""
        return [int(self._manifest.reserve_chunk_id()) for _ in range(count)]

    def flush(self, tree: Tree, catalog: Catalog, lease: Lease | None) -> bool:
        """Write frozen memtables to files; return whether there were any, so that the job is completed.

        `lease`: of the job; None within the job of another tree of the same table.
        """
        work = tree.begin_flush()
        if work is None:
            return False
        ids: list[int] = []
        try:
            rows, frozen = work
            if tree.store_first is not None:
                tree.store_first()
            began_s = self._clock.monotonic_s()
            rows = rows.to_flush(tree.files())
            ids = self.reserve(files_of(rows))
            tree.use.announce(ids)
            summaries = self._files.write(rows, catalog, ids)
            files = self._files.open_all([catalog.describe(summary, level=0, run=ids[0]) for summary in summaries])
            stored = (frozen[0].lsn_last, rows.time_us)
            operations = catalog.publish([file.meta for file in files], stored=stored, operators=tree.operators)
            operations += self._observe(catalog, METRIC_FLUSH_BYTES, METRIC_FLUSH_US, summaries, began_s)
            if lease is None:
                self._manifest.apply(operations)
            else:
                self._commit(lease, operations)
        except Poisoned:
            raise  # it may have been committed: these rows must not be flushed again
        except BaseException:
            tree.abandon_flush()
            tree.use.withdraw(ids)
            raise
        tree.end_flush(frozen, files, rows.time_us)
        tree.use.withdraw(ids)
        logger.info(
            "Flushed memtable to SSTable: table=%d shard=%d chunks=%s rows=%d bytes=%d lsn=%d",
            catalog.db_id,
            catalog.shard,
            [summary.chunk_id for summary in summaries],
            sum(summary.rows for summary in summaries),
            sum(summary.file_bytes for summary in summaries),
            stored[0],
        )
        del work, rows, frozen
        memory.release_free_memory()
        return True

    def compact(self, tree: Tree, catalog: Catalog, lease: Lease, *, everything: bool, stop: Stop) -> bool:
        """Merge the files that are due, or all; return whether there were any, so that the job is completed."""
        compaction = tree.pick(everything=everything)
        if compaction is None:
            return False
        key = (catalog.db_id, catalog.shard)
        self.compacting[key] = 1
        try:
            self._compact(compaction, tree, catalog, lease, stop)
        finally:
            self.compacting.pop(key, None)
        return True

    def _compact(self, compaction: Compaction, tree: Tree, catalog: Catalog, lease: Lease, stop: Stop) -> None:
        began_s = self._clock.monotonic_s()
        inputs = [file.meta for file in compaction.inputs]
        ids = self.reserve(outputs_max(sum(meta.rows for meta in inputs), sum(meta.size_bytes for meta in inputs)))
        plan = MergePlan(
            inputs=tuple(MergeInput(path=meta.file_name, lsn=meta.lsn) for meta in inputs),
            folder=catalog.folder,
            store=self._files.store,
            chunk_ids=tuple(ids),
            # The time of stored rows: a later record may be replayed, and must see the same rows as the first time.
            now_us=tree.stored_time_us,
            bottom=compaction.bottom,
            lsn_floor=tree.oldest_snapshot(),
            table_id=catalog.db_id,
            sealing=as_written(catalog.storage.sealing(compaction.target)),
        )
        announced = [*ids, *(meta.chunk_id for meta in inputs)]  # the inputs too: they are unlisted before the swap
        tree.use.announce(announced)

        def reserve(count: int) -> list[int]:
            more = self.reserve(count)
            tree.use.announce(more)
            announced.extend(more)
            return more

        try:
            self._files.bring_back(inputs)
            summaries = self._outputs_of(compaction, plan, reserve, stop, catalog.storage.keys)
            files = self._files.open_all([catalog.describe(s, level=compaction.target, run=0) for s in summaries])
            if not tree.is_current(compaction):
                raise PenstockError("the inputs of a compaction changed while it ran")
            operations = catalog.publish([file.meta for file in files], inputs)
            operations += self._observe(catalog, METRIC_COMPACTION_BYTES, METRIC_COMPACTION_US, summaries, began_s)
            self._commit(lease, operations)
        except Poisoned:
            raise  # it may have been committed: neither inputs nor outputs may be deleted
        except BaseException:
            tree.use.withdraw(announced)
            raise
        tree.end_compaction(compaction, files)
        tree.use.withdraw(announced)
        logger.info(
            "Compaction completed: table=%d shard=%d source_levels=%s target_level=%d input_tables=%d output_tables=%d",
            catalog.db_id,
            catalog.shard,
            sorted({meta.level for meta in inputs}),
            compaction.target,
            len(inputs),
            len(files),
        )

    def _outputs_of(
        self, compaction: Compaction, plan: MergePlan, reserve: Reserve, stop: Stop, keys: KeyRing | None
    ) -> Sequence[Summary]:
        """Merge on a driver, or here. An abandoned driver has its own ids, so it may keep writing."""
        if self._offers is not None:
            summaries = self._offers.merge(plan, compaction.inputs, reserve, stop)
            if summaries is not None:
                return summaries
        return self._merge(plan.under(self._files.root), stop, keys)

    def _merge_here(self, plan: MergePlan, stop: Stop, keys: KeyRing | None) -> Sequence[Summary]:
        return merge(plan, fs=self._files.fs, keys=keys, stop=stop)

    def _commit(self, lease: Lease, operations: list[ManifestOp]) -> None:
        """Commit; if the outcome is unknown, find out. `Poisoned` if that fails too."""
        try:
            self._jobs.complete(lease, also=operations)
        except OutcomeUnknown as error:
            if not self._was_committed(lease):
                raise CommitFailed("the commit of a job did not happen: it will be tried again") from error

    def _was_committed(self, lease: Lease) -> bool:
        for _ in range(OUTCOME_ATTEMPTS):
            try:
                self._manifest.sync()
                job = self._manifest.get_job(lease.job.job_id)
                return job is not None and isinstance(job.state, Completed)
            except (Backpressure, OutcomeUnknown):
                continue
        raise Poisoned(f"it is unknown whether job {lease.job.job_id} was committed: open the store again")

    def _observe(
        self, catalog: Catalog, size_kind: int, time_kind: int, summaries: Sequence[Summary], began_s: float
    ) -> list[ManifestOp]:
        took_us = (self._clock.monotonic_s() - began_s) * 1e6
        size = float(sum(summary.file_bytes for summary in summaries))
        return [
            MergeMetric(MetricKey(catalog.db_id, size_kind), observation(size)),
            MergeMetric(MetricKey(catalog.db_id, time_kind), observation(took_us, bucket_counts(took_us / 1e6))),
        ]


def observation(value: float, counts: tuple[int, ...] = ()) -> MetricDelta:
    """Return one value in the form of the manifest's metrics, with its bucket in a histogram if it has one."""
    return MetricDelta(sum=value, count=1, min=value, max=value, bucket_counts=counts)
