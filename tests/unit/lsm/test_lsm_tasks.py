from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tree_place import Place, Write
from tree_real import RealPlace, rows_of

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
def place() -> Iterator[Place]:
    place = Place(grace_s=0)
    yield place
    place.close()


def fill(place: Place, times: int = 1) -> None:
    for _ in range(times):
        place.write([Write("put", b"k%03d" % n, b"v" * 100) for n in range(100)])


def test_the_four_tasks_look_and_the_runners_do(place: Place) -> None:
    scheduler, engines = Scheduler(clock=place.clock), Engines()
    for task in tree_tasks(place.maintenance, place.collector):
        scheduler.register(task)
    for runner in job_runners(place.maintenance, place.jobs):
        scheduler.register(runner)
    for _ in range(5):
        fill(place)  # more than a memtable
        place.clock.advance(11)
        for _ in range(3):
            scheduler.run_pending()
            place.clock.advance(0.1)
    statistics = place.tree.statistics()
    assert statistics.stored == 5
    assert sum(statistics.level_files[1:]) > 0
    assert {FLUSH, COMPACTION, "clean-up", "metrics"} <= set(scheduler.statistics().tasks)
    assert all(task.failures == 0 for task in scheduler.statistics().tasks.values())
    scheduler.shutdown(5)
    engines.shutdown(5)


def test_metrics_reach_the_manifest_and_prometheus(place: Place) -> None:
    metrics = Metrics()
    export_trees(place.maintenance, metrics)
    for _ in range(3):
        fill(place)
        place.maintenance.flush(place.tree)
    place.maintenance.compact(place.tree, everything=True)
    place.maintenance.measure()
    stored = place.manifest.read(lambda view: dict(METRICS.scan(view)))
    assert stored[MetricKey(1, METRIC_FLUSH_BYTES)].count == 3
    assert stored[MetricKey(1, METRIC_COMPACTION_BYTES)].count == 1
    assert stored[MetricKey(1, METRIC_LEVEL0_RUNS)].max == 0
    text = metrics.exposition()
    assert 'penstock_level_counts{table="1",shard="0",level="1"} 1' in text
    assert 'penstock_memtable_bytes{table="1",shard="0"} 0' in text


def test_a_flush_encodes_few_rows_at_a_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    append = SstableWriter.append

    def counting(self: SstableWriter, columns: Columns) -> None:
        sizes.append(len(columns))
        append(self, columns)

    monkeypatch.setattr(SstableWriter, "append", counting)
    place.write([Write("put", b"%06d" % n, b"") for n in range(10_000)])
    place.maintenance.flush(place.tree)
    assert sum(sizes) == 10_000
    assert max(sizes) <= tree_files.FLUSH_CHUNK_ROWS


def test_writers_stop_when_level_0_piles_up(place: Place) -> None:
    for _ in range(place.tree.settings.level0_stop):
        fill(place)
        place.maintenance.flush(place.tree)
    with pytest.raises(Backpressure, match="level 0 has 60 runs"):
        place.tree.admit(timeout_s=0.01)
    place.maintenance.compact(place.tree)
    place.tree.admit(timeout_s=0.01)


def test_two_shards_share_a_gate_and_neither_starves(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    other = place.maintenance.open_tree(1, 1, "tables/1-1", place.tree.settings)
    write = place.maintenance._files.write

    def failing_for_shard_0(rows: object, catalog: object, ids: object) -> object:
        if catalog.shard == 0:  # type: ignore[attr-defined]
            raise OSError("shard 0 cannot be written")
        return write(rows, catalog, ids)  # type: ignore[arg-type]

    monkeypatch.setattr(place.maintenance._files, "write", failing_for_shard_0)
    scheduler, engines = Scheduler(clock=place.clock), Engines()
    for task in tree_tasks(place.maintenance, place.collector):
        scheduler.register(task)
    for runner in job_runners(place.maintenance, place.jobs):
        scheduler.register(runner)
    puts = place.write([Write("put", b"k%03d" % n, b"v" * 200) for n in range(100)]).puts
    other.apply(Edit(lsn=1, time_us=1, puts=puts))
    for _ in range(200):
        scheduler.run_pending()
        place.clock.advance(1)
    assert other.stored == 1
    assert place.tree.stored == 0
    scheduler.shutdown(5)
    engines.shutdown(5)


def test_a_merge_on_an_engine_stops_when_it_is_told(tmp_path: Path) -> None:
    place = RealPlace(str(tmp_path / "store"), background=False)
    try:
        for lsn in (1, 2):
            place.tree.apply(Edit(lsn=lsn, time_us=1, rows=rows_of(lsn)))
            place.maintenance.flush(place.tree)
        place.maintenance.request_compaction(place.tree, everything=True)
        lease = place.jobs.acquire("w", {int(JobKind.COMPACTION)})
        assert lease is not None
        stop = threading.Event()
        stop.set()
        with pytest.raises(PenstockError) as caught:
            place.maintenance.handle(lease, stop)
        assert isinstance(caught.value, Closed) or "stop" in str(caught.value) or "cancel" in str(caught.value).lower()
        assert place.maintenance.handle(lease, threading.Event()) is JobResult.COMMITTED
        assert place.tree.statistics().level_files == (0, 1)
    finally:
        place.close()


def test_merge_on_another_process_gives_what_a_merge_here_gives(tmp_path: Path) -> None:
    place = RealPlace(str(tmp_path / "store"), background=False)
    try:
        for lsn in range(1, 4):
            place.tree.apply(Edit(lsn=lsn, time_us=1, rows=rows_of(lsn)))
            place.maintenance.flush(place.tree)
        before = list(place.tree.scan())
        assert place.maintenance._work._merge is not place.maintenance._work._merge_here
        assert place.maintenance.compact(place.tree, everything=True)
        assert list(place.tree.scan()) == before
        assert merge_on(place.engines) is not None
    finally:
        place.close()
