from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree_real import RealShard, rows_of
from tree_under_test import TreeUnderTest, Write

from penstock.errors import Backpressure, Closed, PenstockError
from penstock.host.metrics import Metrics
from penstock.lsm import tree_files
from penstock.lsm.memtable import Edit
from penstock.lsm.metrics import export_trees
from penstock.lsm.rows import Columns
from penstock.lsm.tasks import COMPACTION, FLUSH, job_runners, merge_on, tree_tasks
from penstock.lsm.tree_jobs import METRIC_COMPACTION_BYTES, METRIC_FLUSH_BYTES, METRIC_LEVEL0_RUNS
from penstock.lsm.writer import SstableWriter
from penstock.manifest.keys import MetricKey
from penstock.manifest.records import JobKind
from penstock.manifest.tables import METRICS
from penstock.scheduler.engines import Engines
from penstock.scheduler.runner import JobResult
from penstock.scheduler.scheduler import Scheduler


@pytest.fixture
def shard() -> Iterator[TreeUnderTest]:
    shard = TreeUnderTest(grace_s=0)
    yield shard
    shard.close()


def fill(shard: TreeUnderTest, times: int = 1) -> None:
    for _ in range(times):
        shard.write([Write("put", b"k%03d" % n, b"v" * 100) for n in range(100)])


def test_the_four_tasks_look_and_the_runners_do(shard: TreeUnderTest) -> None:
    scheduler, engines = Scheduler(clock=shard.clock), Engines()
    for task in tree_tasks(shard.maintenance, shard.collector):
        scheduler.register(task)
    for runner in job_runners(shard.maintenance, shard.jobs):
        scheduler.register(runner)
    for _ in range(5):
        fill(shard)  # more than a memtable
        shard.clock.advance(11)
        for _ in range(3):
            scheduler.run_pending()
            shard.clock.advance(0.1)
    statistics = shard.tree.statistics()
    assert statistics.stored == 5
    assert sum(statistics.level_files[1:]) > 0
    assert {FLUSH, COMPACTION, "clean-up", "metrics"} <= set(scheduler.statistics().tasks)
    assert all(task.failures == 0 for task in scheduler.statistics().tasks.values())
    scheduler.shutdown(5)
    engines.shutdown(5)


def test_metrics_reach_the_manifest_and_prometheus(shard: TreeUnderTest) -> None:
    metrics = Metrics()
    export_trees(shard.maintenance, metrics)
    for _ in range(3):
        fill(shard)
        shard.maintenance.flush(shard.tree)
    shard.maintenance.compact(shard.tree, everything=True)
    shard.maintenance.measure()
    stored = shard.manifest.read(lambda view: dict(METRICS.scan(view)))
    assert stored[MetricKey(1, METRIC_FLUSH_BYTES)].count == 3
    assert stored[MetricKey(1, METRIC_COMPACTION_BYTES)].count == 1
    assert stored[MetricKey(1, METRIC_LEVEL0_RUNS)].max == 0
    text = metrics.exposition()
    assert 'penstock_level_counts{table="1",shard="0",level="1"} 1' in text
    assert 'penstock_memtable_bytes{table="1",shard="0"} 0' in text


def test_a_flush_encodes_few_rows_at_a_time(shard: TreeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    append = SstableWriter.append

    def counting(self: SstableWriter, columns: Columns) -> None:
        sizes.append(len(columns))
        append(self, columns)

    monkeypatch.setattr(SstableWriter, "append", counting)
    shard.write([Write("put", b"%06d" % n, b"") for n in range(10_000)])
    shard.maintenance.flush(shard.tree)
    assert sum(sizes) == 10_000
    assert max(sizes) <= tree_files.FLUSH_CHUNK_ROWS


def test_writers_stop_when_level_0_piles_up(shard: TreeUnderTest) -> None:
    for _ in range(shard.tree.settings.level0_stop):
        fill(shard)
        shard.maintenance.flush(shard.tree)
    with pytest.raises(Backpressure, match="level 0 has 60 runs"):
        shard.tree.admit(timeout_s=0.01)
    shard.maintenance.compact(shard.tree)
    shard.tree.admit(timeout_s=0.01)


def test_two_shards_share_a_gate_and_neither_starves(shard: TreeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    other = shard.maintenance.open_tree(1, 1, "tables/1-1", shard.tree.settings)
    write = shard.maintenance._files.write

    def failing_for_shard_0(rows: object, catalog: object, ids: object) -> object:
        if catalog.shard == 0:  # type: ignore[attr-defined]
            raise OSError("shard 0 cannot be written")
        return write(rows, catalog, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(shard.maintenance._files, "write", failing_for_shard_0)
    scheduler, engines = Scheduler(clock=shard.clock), Engines()
    for task in tree_tasks(shard.maintenance, shard.collector):
        scheduler.register(task)
    for runner in job_runners(shard.maintenance, shard.jobs):
        scheduler.register(runner)
    puts = shard.write([Write("put", b"k%03d" % n, b"v" * 200) for n in range(100)]).puts
    other.apply(Edit(lsn=1, time_us=1, puts=puts))
    for _ in range(200):
        scheduler.run_pending()
        shard.clock.advance(1)
    assert other.stored == 1
    assert shard.tree.stored == 0
    scheduler.shutdown(5)
    engines.shutdown(5)


def test_a_merge_on_an_engine_stops_when_it_is_told(tmp_path: Path) -> None:
    shard = RealShard(str(tmp_path / "store"), background=False)
    try:
        for lsn in (1, 2):
            shard.tree.apply(Edit(lsn=lsn, time_us=1, rows=rows_of(lsn)))
            shard.maintenance.flush(shard.tree)
        shard.maintenance.request_compaction(shard.tree, everything=True)
        lease = shard.jobs.acquire("w", {int(JobKind.COMPACTION)})
        assert lease is not None
        stop = threading.Event()
        stop.set()
        with pytest.raises(PenstockError) as caught:
            shard.maintenance.handle(lease, stop)
        assert isinstance(caught.value, Closed) or "stop" in str(caught.value) or "cancel" in str(caught.value).lower()
        assert shard.maintenance.handle(lease, threading.Event()) is JobResult.COMMITTED
        assert shard.tree.statistics().level_files == (0, 1)
    finally:
        shard.close()


def test_merge_on_another_process_gives_what_a_merge_here_gives(tmp_path: Path) -> None:
    shard = RealShard(str(tmp_path / "store"), background=False)
    try:
        for lsn in range(1, 4):
            shard.tree.apply(Edit(lsn=lsn, time_us=1, rows=rows_of(lsn)))
            shard.maintenance.flush(shard.tree)
        before = list(shard.tree.scan())
        assert shard.maintenance._work._merge is not shard.maintenance._work._merge_here
        assert shard.maintenance.compact(shard.tree, everything=True)
        assert list(shard.tree.scan()) == before
        assert merge_on(shard.engines) is not None
    finally:
        shard.close()
