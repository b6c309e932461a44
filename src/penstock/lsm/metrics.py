"""Trees and the work on their files as metrics, with the names of seed 003.

Thread: any. Everything is read at each export: the state of trees from their versions, the times and sizes of flushes
and compactions from the manifest, where each was counted together with its commit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from penstock.host.metrics import (
    SECONDS,
    Distribution,
    Keep,
    MetricFamily,
    Metrics,
    MetricSamples,
    counter,
    gauge,
    histogram,
)
from penstock.lsm.maintenance import COMPANION, Maintenance
from penstock.lsm.tree_jobs import METRIC_COMPACTION_BYTES, METRIC_COMPACTION_US, METRIC_FLUSH_BYTES, METRIC_FLUSH_US
from penstock.manifest.records import MetricRecord


def export_trees(maintenance: Maintenance, metrics: Metrics, name_of: Callable[[int], str | None] = str) -> None:
    """Export the trees of a maintenance to `metrics`, for as long as it lives; `name_of` names a table by its id."""
    reference = weakref.ref(maintenance)

    def collect() -> Iterable[MetricFamily]:
        alive = reference()
        return [] if alive is None else [*_tree_families(alive, name_of), *_job_families(alive, name_of)]

    metrics.collect_from(collect)


def _tree_families(maintenance: Maintenance, name_of: Callable[[int], str | None]) -> list[MetricFamily]:
    labels = ("table", "shard")
    by_tree: dict[str, MetricSamples] = {name: {} for name in _TREE_TEXTS}
    by_level: dict[str, MetricSamples] = {name: {} for name in _LEVEL_TEXTS}
    for tree, catalog in maintenance.trees():
        now, name = tree.statistics(), name_of(catalog.db_id)
        if name is None:  # dropped meanwhile
            continue
        shard = catalog.shard
        key = (name, str(shard) if shard < COMPANION else f"{shard - COMPANION}/changes")
        by_tree["active_memtable_size"][key] = now.active_memtable_bytes
        by_tree["memtable_bytes"][key] = now.memtable_bytes
        by_tree["frozen_memtables"][key] = now.frozen_memtables
        by_tree["flush_pending"][key] = int(now.flush_pending)
        by_tree["compaction_running"][key] = maintenance.compactions_running(catalog)
        by_tree["tree_stall"][key] = now.stall.value
        by_tree["tree_snapshots"][key] = now.snapshots
        for level, count in enumerate(now.level_files):
            by_level["level_counts"][*key, str(level)] = count
            by_level["level_bytes"][*key, str(level)] = now.level_bytes[level]
    return [
        *(gauge(name, text, by_tree[name], labels) for name, text in _TREE_TEXTS.items()),
        *(gauge(name, text, by_level[name], (*labels, "level")) for name, text in _LEVEL_TEXTS.items()),
    ]


_TREE_TEXTS = {
    "active_memtable_size": "Bytes of the memtable that takes new rows",
    "memtable_bytes": "Bytes of all rows that are not in files",
    "frozen_memtables": "Memtables that wait for a flush",
    "flush_pending": "1 while frozen memtables wait for a flush or are being flushed",
    "compaction_running": "Compactions that run",
    "tree_stall": "0 none, 1 writers slow down, 2 writers stop",
    "tree_snapshots": "Snapshots that are held",
}
_LEVEL_TEXTS = {"level_counts": "Sstables of a level", "level_bytes": "Bytes of the sstables of a level"}


def _job_families(maintenance: Maintenance, name_of: Callable[[int], str | None]) -> list[MetricFamily]:
    """Return what the manifest counted of flushes and compactions, each together with its commit."""
    seconds: dict[int, MetricSamples] = {METRIC_FLUSH_US: {}, METRIC_COMPACTION_US: {}}
    sizes: dict[int, MetricSamples] = {METRIC_FLUSH_BYTES: {}, METRIC_COMPACTION_BYTES: {}}
    for key, record in maintenance.metrics().items():
        name = name_of(key.scope)
        if name is not None and key.kind in seconds:
            seconds[key.kind][name,] = _in_seconds(record)
        elif name is not None and key.kind in sizes:
            sizes[key.kind][name,] = record.sum
    table, keep = ("table",), Keep.ELSEWHERE
    flushed, compacted = seconds[METRIC_FLUSH_US], seconds[METRIC_COMPACTION_US]
    return [
        histogram("memtable_flush_seconds", "Time to flush memtables to files", flushed, table, keep=keep),
        histogram("compaction_seconds", "Time of a compaction", compacted, table, keep=keep),
        counter("memtable_flushed_bytes", "Bytes that flushes wrote", sizes[METRIC_FLUSH_BYTES], table, keep=keep),
        counter("compacted_bytes", "Bytes that compactions wrote", sizes[METRIC_COMPACTION_BYTES], table, keep=keep),
    ]


def _in_seconds(record: MetricRecord) -> Distribution:
    """Return observations in microseconds as a distribution of seconds; earlier versions did not count by size."""
    counts = [*record.bucket_counts, *[0] * (len(SECONDS) + 1 - len(record.bucket_counts))]
    counts[-1] += max(0, record.count - sum(counts))
    return Distribution(SECONDS, tuple(counts), record.sum / 1e6, record.min / 1e6, record.max / 1e6)
