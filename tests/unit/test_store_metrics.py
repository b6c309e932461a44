"""The metrics of a store: every one that the seeds name, kept across openings, and as every reader gets them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

import penstock
import penstock.aio
from penstock.cli.program import app
from penstock.errors import Backpressure, Closed, Invalid, PartitionPaused, Poisoned, WaitExpired
from penstock.kv.machine import KvMachine
from penstock.log import LogSettings
from penstock.lsm.tree_jobs import TreeJobs
from penstock.partition.admission import DispatcherSettings
from penstock.partition.machine import Entry
from penstock.protocol import wire
from penstock.server.rights import LOCAL, Rights
from penstock.server.service import service_of
from penstock.store.kept_metrics import HASHED, number_of
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing.members import await_true

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

# Seed 002, "Observability & Metrics". What it describes without a name has one that says the same.
SEED_002 = {
    "partition_enqueued_ops": "partition_enqueued_ops",
    "partition_enqueued_bytes": "partition_enqueued_bytes",
    "partition_backlog_age_ms": "partition_backlog_age_ms",
    "partition_durable_index": "partition_durable_index",
    "partition_applied_index": "partition_applied_index",
    "partition_applied_global": "partition_applied_global",
    "fsync latency": "fsync_latency_seconds_count",
    "retry counts": "fsync_retries_total",
    "failed fsyncs": "fsync_failures_total",
    "rejects": "admission_rejects_total",
    "retries": "admission_retries_total",
    "rejects of a partition": "partition_admission_rejects_total",
    "Raft-side metrics": "journal_committed_index",  # those of a cluster: test_member_acks
    "stages of the write/apply pipeline": "write_stage_seconds_count",
    "partition_snapshot_index": "partition_snapshot_index",
    "global_applied_floor": "global_applied_floor",
    "throttled, frozen": "partition_state",
}
# Seed 003: the state of `LsmState` and what its metrics task reports, and the runs of its tasks.
SEED_003 = {
    "active_memtable_size": "active_memtable_size",
    "frozen_memtables": "frozen_memtables",
    "flush_pending": "flush_pending",
    "compaction_running": "compaction_running",
    "level_counts": "level_counts",
    "run_id": "scheduler_task_runs_total",
    "coordinator": "coordinator_writes_total",
}


def read(text: str) -> Samples:
    return {
        (sample.name.removeprefix("penstock_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    settings = StoreSettings(
        journal=LogSettings(segment_bytes=64 << 10, allocate_bytes=4 << 10, index_bytes=1 << 10),
        dispatcher=DispatcherSettings(attempts_max=2, backoff_s=0.0),
    )
    with penstock.open(tmp_path / "store", settings=settings) as opened:
        yield opened


def test_every_metric_of_the_seeds_moves(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scenario in which all of them change; the text is read after every step."""
    texts: list[str] = []

    def look() -> None:
        texts.append(store.metrics.exposition())

    table = store.kv("t")
    look()
    table.put(b"k", b"v" * 100, durable=True)
    look()
    apply_fails(store, monkeypatch, look)
    journal_fails(store, monkeypatch, look)
    store._coordinator.hold("the test says so")
    with pytest.raises(Backpressure):
        store._coordinator.write_into(lambda *_: None, 1, None, None, None, 0.01)
    store._coordinator.hold(None)
    store.snapshot().close()  # freezes the memtable
    look()
    table.put(b"l", b"w", durable=True)
    merge = TreeJobs._outputs_of

    def looked_at(self: TreeJobs, *args: Any) -> Any:
        look()
        return merge(self, *args)

    monkeypatch.setattr(TreeJobs, "_outputs_of", looked_at)
    store.compact("t")
    table.put(b"m", b"x", durable=True)
    store.compact("t")
    look()
    readings = [read(text) for text in texts]
    still = [
        f"{name}: {metric}"
        for name, metric in {**SEED_002, **SEED_003}.items()
        if not any(len({samples.get(key) for samples in readings}) > 1 for key in readings[-1] if key[0] == metric)
    ]
    assert still == []
    assert all(
        line.startswith(("penstock_", "# HELP penstock_", "# TYPE penstock_")) for line in texts[-1].splitlines()
    )
    assert lint(texts[-1]) == []


def apply_fails(store: Store, monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> None:
    with monkeypatch.context() as broken:
        apply = KvMachine.apply

        def failing(self: KvMachine, entry: Entry) -> None:
            raise OSError(5, "the disk of this table is gone")

        broken.setattr(KvMachine, "apply", failing)
        store.kv("t").put(b"later", b"v")
        with pytest.raises(PartitionPaused):
            for _ in range(1_000):  # until the write was applied, and failed
                store.flush()
                store._dispatcher.retry()
                store.kv("t").put(b"refused", b"v")
                time.sleep(0.01)
        time.sleep(0.01)
        look()
        now = store.statistics()
        (one,) = now.partitions
        assert (one.table, one.state) == ("t", "paused")
        assert one.enqueued_ops >= 1  # writes are taken until the last attempt has failed
        assert one.backlog_age_ms > 0
        assert "the disk of this table is gone" in one.error
        assert now.global_applied_floor == one.applied_global < now.durable_lsn
        broken.setattr(KvMachine, "apply", apply)
        assert store.resume("t") == []
    look()
    assert store.statistics().partitions[0].enqueued_ops == 0


def journal_fails(store: Store, monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> None:
    with monkeypatch.context() as broken:

        def failing(bodies: list[bytes]) -> int:
            raise OSError(5, "the disk of the journal is gone")

        broken.setattr(store._consensus, "propose", failing)
        with pytest.raises((Poisoned, penstock.errors.OutcomeUnknown)):
            store.kv("t").put(b"unsure", b"v", durable=True)
    store.recover()
    look()
    assert value(read(store.metrics.exposition()), "fsync_failures_total") == 1
    assert value(read(store.metrics.exposition()), "fsync_retries_total") == 1


def lint(text: str) -> list[str]:
    """What Prometheus' own tool finds wrong, if it is installed; the one name with a unit is the seed's."""
    tool = shutil.which("promtool")
    if tool is None:
        return []
    command = [tool, "check", "metrics"]
    ran = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line]
    return [line for line in lines if not line.startswith("penstock_partition_backlog_age_ms ")]


def test_the_size_that_settings_give_forces_a_flush(tmp_path: Path) -> None:
    settings = StoreSettings(flush_bytes=10_000, flush_interval_s=3600.0, waiting_writes_max=7)
    assert settings.coordinator.waiting_writes_max == 7
    with penstock.open(tmp_path / "store", settings=settings) as store:
        table = store.kv("t")
        table.put(b"small", b"v")
        time.sleep(0.2)
        assert value(read(store.metrics.exposition()), "coordinator_flushes_total", trigger="size") == 0
        epoch = table.put(b"large", bytes(20_000))
        await_true(lambda: store.statistics().durable_epoch >= epoch, "a flush by size")
        assert value(read(store.metrics.exposition()), "coordinator_flushes_total", trigger="size") == 1


# -- kept across openings


def test_counts_and_buckets_outlive_the_process(tmp_path: Path) -> None:
    settings, texts = StoreSettings(background=False), list[Samples]()
    for _ in range(3):
        with open_store(str(tmp_path / "store"), settings=settings) as store:
            store.kv("t").put(b"k", b"v", durable=True)
            store.compact("t")
            texts.append(read(store.metrics.exposition()))
    first, last = texts[0], texts[-1]
    assert value(last, "coordinator_writes_total") == value(first, "coordinator_writes_total") + 2
    assert value(last, "fsync_latency_seconds_count") == value(first, "fsync_latency_seconds_count") + 2
    assert value(last, "memtable_flush_seconds_count", table="t") == 3
    for name in ("fsync_latency_seconds", "memtable_flush_seconds"):
        (count,) = [number for key, number in last.items() if key[0] == f"{name}_count"]
        buckets = [number for key, number in last.items() if key[0] == f"{name}_bucket"]
        assert (max(buckets), len(buckets)) == (count, 20)
        assert min(buckets) < count, "all durations were counted as the shortest"
    assert value(last, "write_stage_seconds_sum", stage="journal") > value(
        first, "write_stage_seconds_sum", stage="journal"
    )


def test_nothing_is_committed_if_nothing_changed(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "store"), settings=StoreSettings(background=False)) as store:
        store.kv("t").put(b"k", b"v", durable=True)

        def keep() -> int:
            store._meter.save()
            store._maintenance.measure()
            return store._manifest.generation()

        generation = keep()
        assert (keep(), keep()) == (generation, generation)
        store.kv("t").put(b"k", b"v", durable=True)
        assert keep() > generation


def test_a_dropped_table_takes_its_counts_along(tmp_path: Path) -> None:
    settings = StoreSettings(background=False)
    with open_store(str(tmp_path / "store"), settings=settings) as store:
        store.kv("t").put(b"k", b"v", durable=True)
        store.compact("t")
        store.drop("t")
        store.kv("t").put(b"k", b"v", durable=True)
        assert not [key for key in read(store.metrics.exposition()) if key[0] == "memtable_flush_seconds_count"]


def test_no_two_metrics_share_a_number(store: Store) -> None:
    penstock.connect(store.path).close()  # requests are counted, too
    for name in ("a", "b"):
        store.kv(name)
    names = [
        (family.name, *labels)
        for family in store.metrics.families()
        if family.kind != "gauge"
        for labels in family.samples
    ]
    numbers = {number_of(name, labels) for name, *labels in names}
    assert len(numbers) == len(names) > 80
    assert min(numbers) >= HASHED
    assert max(numbers) < 1 << 32


# -- who reads them


def test_a_client_reads_what_the_owner_reads(store: Store) -> None:
    store.kv("t").put(b"k", b"v", durable=True)
    with penstock.connect(store.path) as client:
        ours, theirs = read(store.metrics.exposition()), read(client.metrics.exposition())
        assert set(theirs) >= set(ours)
        assert value(theirs, "partition_applied_index", table="t", shard="0") > 0
        client.kv("t").put(b"l", b"w")
        statistics = client.statistics()  # with what this client wrote before
        assert statistics == store.statistics()
        assert statistics.global_applied_floor == statistics.durable_lsn
    with pytest.raises(Closed):
        client.metrics.exposition()
    with pytest.raises(Closed):
        client.statistics()


def test_a_client_sees_only_tables_it_may_read(store: Store) -> None:
    for name in ("mine", "yours"):
        store.kv(name).put(b"k", b"v", durable=True)
    service = service_of(store)
    assert service is not None
    gateway = service.gateway()
    rights = Rights(client="c", tables={"mine": "read"})
    text = wire.unpack(gateway.answer(wire.pack(wire.ReadMetrics()), rights), str)
    assert '{table="mine",shard="0"}' in text
    assert "yours" not in text
    assert "penstock_coordinator_writes_total" in text
    now = wire.unpack(gateway.answer(wire.pack(wire.ReadStatistics()), rights), penstock.StoreStatistics)
    assert [one.table for one in now.partitions] == ["mine"]
    assert "yours" in wire.unpack(gateway.answer(wire.pack(wire.ReadMetrics()), LOCAL), str)
    for request in (wire.ReadMetrics(), wire.ReadStatistics(), wire.AwaitView(0, 0.0), wire.AwaitView(0, 1.0)):
        with pytest.raises(Invalid, match="right to read any table"):
            gateway.answer(wire.pack(request), Rights(client="stranger"))
    for wrong in (-1.0, float("nan")):  # a hostile client must not wait for ever
        view = wire.unpack(gateway.answer(wire.pack(wire.AwaitView(1 << 60, wrong)), LOCAL), penstock.StoreView)
        assert view.applied_epoch < 1 << 60


def test_the_command_prints_them(store: Store, tmp_path: Path) -> None:
    store.kv("t").put(b"k", b"v", durable=True)
    ran = CliRunner().invoke(app, ["metrics", store.path])
    assert ran.exit_code == 0, ran.output
    assert value(read(ran.output), "partition_durable_index", table="t", shard="0") > 0
    ran = CliRunner().invoke(app, ["metrics", str(tmp_path / "nothing")])
    assert isinstance(ran.exception, penstock.errors.NotFound)


def test_in_asyncio(tmp_path: Path) -> None:
    async def main() -> tuple[penstock.StoreView, str]:
        async with penstock.aio.open(tmp_path / "store") as store:
            views = await store.subscribe()
            table = await store.kv("t")
            epoch = await table.put(b"k", b"v", durable=True)
            view = await views.wait_newer(timeout_s=30)
            assert (await views.latest()).applied_epoch >= view.applied_epoch
            assert (await store.statistics()).applied_epoch >= epoch
            return view, await store.metrics.exposition()

    view, text = asyncio.run(main())
    assert view.lsn > 0
    assert "penstock_partition_applied_index" in text


# -- statistics and views


def test_statistics_are_frozen_and_ordered(store: Store) -> None:
    store.kv("t", shards=3).put(b"k", b"v", durable=True)
    store.queue("q").put(b"m", durable=True)
    store.wait_for(store.statistics().durable_lsn)
    now = store.statistics()
    with pytest.raises(AttributeError):
        now.writes = 1  # type: ignore[misc]
    assert now.applied_epoch <= now.durable_epoch <= now.last_epoch
    assert now.first_lsn <= now.needed_from <= now.durable_lsn + 1
    assert now.global_applied_floor == now.applied_lsn == now.durable_lsn
    assert {(one.table, one.kind) for one in now.partitions} == {("t", "kv"), ("q", "queue")}
    for one in now.partitions:
        assert one.stored <= one.applied <= one.durable <= one.highest <= now.durable_lsn
        assert one.applied_global == now.durable_lsn, "an idle partition holds nobody back"
        assert (one.state, one.enqueued_ops, one.enqueued_bytes, one.error) == ("active", 0, 0, "")
    store.close()
    for use in (store.statistics, store.subscribe, store.metrics.exposition):
        with pytest.raises(Closed):
            use()


@pytest.mark.parametrize("remote", [False, True])
def test_views_move_with_writes(store: Store, remote: bool) -> None:
    reader: Any = penstock.connect(store.path) if remote else store
    with reader:
        table, views = store.kv("t"), reader.subscribe()
        before = views.latest()
        with pytest.raises(WaitExpired):
            views.wait_newer(0.02)
        with pytest.raises(WaitExpired):
            views.wait_newer(0)
        epoch = table.put(b"k", b"v", durable=True)
        view = views.wait_newer(30)
        assert view.applied_epoch >= epoch > before.applied_epoch
        assert view.durable_epoch >= view.applied_epoch
        assert view.lsn > before.lsn
        for wrong in ("1", None, -1, float("nan"), True):
            with pytest.raises(Invalid):
                views.wait_newer(wrong)
    if remote:
        with pytest.raises(Closed):
            views.wait_newer(1)
        with pytest.raises(Closed):
            views.latest()


def test_a_view_of_an_earlier_opening_is_old(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "store")) as store:
        store.kv("t").put(b"k", b"v", durable=True)
        earlier = store.subscribe().latest()
    with open_store(str(tmp_path / "store")) as store:
        view = store.wait_view(earlier.applied_epoch, 1.0)
        assert view.lsn == earlier.lsn
        assert view.applied_epoch > earlier.applied_epoch


# -- logs and traces


def test_flush_compaction_checkpoint_and_shutdown_are_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="penstock"):
        table = store.kv("t")
        for number in range(4):
            table.put(b"%d" % number, b"x" * 40_000, durable=True)
        store.compact("t")
        table.put(b"one more", b"x" * 40_000, durable=True)
        store.compact("t")
        store.checkpoint()
        store._maintenance.measure()
        store.close()
    lines = [record.getMessage() for record in caplog.records]
    for begins in (
        "Flushed memtable to SSTable: table=",
        "Compaction completed: table=",
        "Checkpoint completed: spilled=",
        "LSM metrics: table=",
        "Scheduler shut down: ",
        f"{store.path}: shut down at LSN ",
    ):
        assert any(line.startswith(begins) for line in lines), (begins, lines)


def test_a_trace_gets_every_stage(tmp_path: Path) -> None:
    stages: list[penstock.WriteStage] = []
    settings = StoreSettings(background=False, trace=stages.append)
    with open_store(str(tmp_path / "store"), settings=settings) as store:
        store.kv("t", shards=2)
        store.queue("q")
        stages.clear()
        with store.batch() as batch:
            for number in range(8):
                batch.kv("t").put(b"%d" % number, b"v")
            batch.queue("q").put(b"m")
        lsn = store.statistics().applied_lsn
    ours = [stage for stage in stages if stage.lsn == lsn]
    assert [stage.stage for stage in ours] == ["encode", "journal", "apply", "apply", "apply", "dispatch"]
    assert {(stage.table, stage.shard) for stage in ours if stage.stage == "apply"} == {("t", 0), ("t", 1), ("q", 0)}
    assert all(stage.duration_s >= 0 and stage.size > 0 for stage in ours)
    begins = [stage.began_s for stage in ours]
    assert begins[0] <= begins[1] <= min(begins[2:])


def test_a_trace_that_fails_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    def failing(stage: penstock.WriteStage) -> None:
        nonlocal calls
        calls += 1
        raise ValueError("not today")

    with open_store(str(tmp_path / "store"), settings=StoreSettings(background=False, trace=failing)) as store:
        store.kv("t").put(b"k", b"v", durable=True)
        assert store.kv("t")[b"k"] == b"v"
    assert calls == 1
    assert "is not called again" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"trace": "print"},
        {"metrics_port": -1},
        {"metrics_port": 65_536},
        {"metrics_port": True},
        {"metrics_port": "9464"},
        {"metrics_host": ""},
        {"metrics_host": 5},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        StoreSettings(**wrong)


def test_the_trees_of_a_feed_have_a_label_of_their_own(store: Store) -> None:
    store.kv("fed", shards=2, changes=True).put_many({b"%d" % n: b"v" for n in range(20)}, durable=True)
    samples = read(store.metrics.exposition())
    of_trees = [dict(labels) for name, labels in samples if name == "memtable_bytes"]
    shards = {labels["shard"] for labels in of_trees if labels["table"] == "fed"}
    assert shards == {"0", "1", "0/changes", "1/changes"}


# -- while others are at work


def test_they_are_read_while_a_partition_hangs(store: Store) -> None:
    store.kv("t").put(b"k", b"v", durable=True)
    has_turn, let_go = threading.Event(), threading.Event()

    def hang() -> None:
        with store._dispatcher.turn:
            has_turn.set()
            let_go.wait(60)

    hanging = threading.Thread(target=hang)
    hanging.start()
    try:
        assert has_turn.wait(30)
        read_by: list[object] = []
        for use in (store.metrics.exposition, store.statistics, store.subscribe().latest, store._meter.save):
            reader = threading.Thread(target=lambda act: read_by.append(act()), args=(use,))
            reader.start()
            reader.join(20)
        assert len(read_by) == 4, "one of them waits for the thread that applies"
    finally:
        let_go.set()
        hanging.join()


def test_readers_writers_and_drops_at_once(store: Store) -> None:
    failures: list[BaseException] = []
    ended = threading.Event()

    def until_end(act: Callable[[], object]) -> None:
        try:
            while not ended.is_set():
                act()
        except BaseException as error:
            failures.append(error)

    def look() -> None:
        read(store.metrics.exposition())
        now = store.statistics()
        assert now.global_applied_floor <= now.applied_lsn <= now.durable_lsn
        assert all(one.stored <= one.applied <= one.durable <= one.highest for one in now.partitions)

    threads = [threading.Thread(target=until_end, args=(act,)) for act in (look, look, store._meter.save)]
    for thread in threads:
        thread.start()
    for number in range(8):
        table = store.kv(f"t{number}", shards=2)
        for key in range(20):
            table.put(b"%d" % key, b"v")
        table.put(b"last", b"v", durable=True)
        store.drop(f"t{number}")
    ended.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_view_is_awaited_through_the_death_of_the_owner(tmp_path: Path) -> None:
    with penstock.connect(tmp_path / "store", create=True) as client:
        table, views = client.kv("t"), client.subscribe()
        before = views.latest()
        for process in owners(tmp_path / "store"):
            os.kill(process, signal.SIGKILL)
        table.put(b"k", b"v", durable=True)
        view = views.wait_newer(60)
        assert view.lsn > before.lsn
        assert view.applied_epoch > before.applied_epoch


def owners(path: Path) -> list[int]:
    """The processes that own a store, other than this one."""
    processes = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if b"penstock.server" in words and str(path).encode() in words:
                processes.append(int(entry.parent.name))
    return processes
