"""Compaction, verification and export by Spark: same rows as without it, and nothing half done."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
import penstock.spark
from penstock.errors import NotFound, PenstockError
from penstock.kv.table import KvTable
from penstock.lsm.collection import CollectionSettings
from penstock.lsm.merge import MergeInput, MergePlan, merge
from penstock.manifest.records import JobKind
from penstock.scheduler.offers import OfferSettings
from penstock.spark import maintenance as spark_maintenance
from penstock.spark.table_ref import TableRef
from penstock.store.settings import StoreSettings
from penstock.store.store import Store

SETTINGS = StoreSettings(offer_bytes_min=1, collection=CollectionSettings(grace_s=0))


@contextmanager
def maintaining(spark: Any, folder: str) -> Iterator[list[int]]:
    """A driver that works for a store in a thread; how many jobs it did, when it has ended."""
    stop, done = threading.Event(), list[int]()
    thread = threading.Thread(target=lambda: done.append(penstock.spark.maintain(spark, folder, stop=stop)))
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join(120)
        assert not thread.is_alive()


def wait_for_driver(store: Store) -> None:
    while not store.offers.slots():
        threading.Event().wait(0.02)


def flush(store: Store, name: str) -> None:
    for tree, catalog in store._maintenance.trees():
        if catalog.db_id == table_id(store, name):
            store._maintenance.flush(tree)


def table_id(store: Store, name: str) -> int:
    info = store.port.table(name)
    assert info is not None
    return info.table_id


def files(store: Store, name: str) -> list[Path]:
    rows = store._manifest.scan_chunks(table_id(store, name))
    return sorted(Path(store.path, row.file_name) for _, row in rows if not row.staged)


def fill(store: Store, name: str) -> KvTable[Any]:
    """Puts, deletes, range deletes, operands and expiries over several runs."""
    table = store.kv(name, value="int64")
    for run in range(4):
        table.put_many({b"%06d" % (n * 7_919 % 60_000): n + run for n in range(run, 40_000, 2)})
        for n in range(run, 60_000, 997):
            table.delete(b"%06d" % n)
        table.delete_range(b"%06d" % (10_000 + 5_000 * run), b"%06d" % (12_000 + 5_000 * run))
        for n in range(run, 60_000, 501):
            table.merge(b"%06d" % n, 1_000_000, operator="add_i64")
        for n in range(run, 60_000, 1_499):
            table.put(b"%06d" % n, -1, ttl_s=0.001 if n % 2 else 3_600.0)
        store.flush()
        flush(store, name)
    return table


def test_a_compaction_by_spark_is_one_by_a_process(spark: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.lsm.merge_offers.PART_BYTES_MIN", 1)
    monkeypatch.setattr("penstock.lsm.writer.BATCH_ROWS", 2_048)
    monkeypatch.setattr("penstock.lsm.writer.BATCH_ROWS_LEAST", 1_024)
    with penstock.open(folder, settings=SETTINGS) as store:
        fill(store, "near")
        fill(store, "far")
        store.compact("near")  # nobody is there: by the process engine
        with maintaining(spark, folder) as done:
            wait_for_driver(store)
            store.compact("far")
        assert done[0] >= 1  # of the ledger, too, if one is due meanwhile
        near, far = store.kv("near").to_arrow(), store.kv("far").to_arrow()
        assert len(far) > 10_000
        assert far.drop(["lsn"]).equals(near.drop(["lsn"]))
        assert len(files(store, "far")) in (3, 4)  # one of each part; what comes in between makes them fewer
        assert penstock.spark.verify(spark, folder) == []
    with penstock.open(folder) as again:
        assert again.kv("far").to_arrow().equals(far)


def test_without_the_folder_files_go_over_the_socket(spark: Any, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that do not see the store's folder: looked at in a driver whose place says so, and whose tasks run here."""
    ran: list[str] = []

    def run_here(spark: Any, count: int, work: Any, tag: str | None = None) -> list[bytes]:
        ran.append(tag or "")
        return [work(number) for number in range(count)]

    monkeypatch.setattr(spark_maintenance, "_run_tasks", run_here)
    monkeypatch.setattr(TableRef, "root", None)
    with penstock.open(folder, settings=SETTINGS) as store:
        table = fill(store, "t")
        before = table.to_arrow()
        with maintaining(spark, folder) as done:
            wait_for_driver(store)
            store.compact("t")
        assert done[0] >= 1  # of the ledger, too, if one is due meanwhile
        assert len(ran) >= 1
        assert table.to_arrow().equals(before)
        assert len(files(store, "t")) == 1


DRIVER = """
import sys, threading, penstock.spark
from penstock.spark import maintenance

def half(spark, count, work, tag):
    work(0)
    print("working", flush=True)
    threading.Event().wait(3600)

maintenance._run_tasks = half
class Spark:
    class sparkContext:
        defaultParallelism = 2
    def interruptTag(self, tag): ...
print("there", flush=True)
penstock.spark.maintain(Spark(), sys.argv[1])
"""


def test_a_driver_that_is_killed_at_work_is_done_without(folder: str) -> None:
    with penstock.open(folder, settings=SETTINGS) as store:
        table = fill(store, "t")
        before, inputs = table.to_arrow(), files(store, "t")
        with subprocess.Popen([sys.executable, "-c", DRIVER, folder], stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "there\n"
            wait_for_driver(store)
            compacting = threading.Thread(target=store.compact, args=("t",))
            compacting.start()
            assert driver.stdout.readline() == "working\n"
            os.kill(driver.pid, signal.SIGKILL)
        abandoned = newest(inputs[0].parent)
        assert abandoned not in inputs  # what the driver had written, under an id of its own
        store.offers._settings = OfferSettings(silence_s=0.1)  # long enough for one that is dead
        compacting.join(120)
        assert not compacting.is_alive()
        (listed,) = files(store, "t")
        assert abandoned != listed
        assert table.to_arrow().equals(before)
        assert store._jobs.gate(table_id(store, "t"), JobKind.COMPACTION).pending_job_id() is None
        # A finished compaction wakes the clean-up, which deletes its inputs and what no driver will list any more. The
        # thread that compacted may hold the inputs for a moment longer.
        expected, deadline_s = {listed, listed.with_suffix(".idx")}, time.monotonic() + 30
        while set(listed.parent.iterdir()) != expected:
            assert time.monotonic() < deadline_s, sorted(listed.parent.iterdir())
            store._collector.collect()


def newest(folder: Path) -> Path:
    """The file with the highest id."""
    return max(folder.glob("*.sst"))


def test_inputs_that_changed_meanwhile_are_dropped(spark: Any, folder: str) -> None:
    with penstock.open(folder, settings=SETTINGS) as store:
        table = fill(store, "t")
        before, finish = table.to_arrow(), store.offers.finish

        def finish_late(offer: str, results: Any) -> bool:
            store.offers.finish = finish  # type: ignore[method-assign]
            overtake(store, "t")
            return finish(offer, results)

        store.offers.finish = finish_late  # type: ignore[method-assign]
        with maintaining(spark, folder) as done:
            wait_for_driver(store)
            with pytest.raises(PenstockError, match="changed while it ran"):
                store.compact("t")
        assert done[0] >= 1  # of the ledger, too, if one is due meanwhile
        (listed,) = files(store, "t")
        assert newest(listed.parent) == listed  # of who overtook: it came last
        assert table.to_arrow().equals(before)


def overtake(store: Store, name: str) -> None:
    """Compact a table here and now, past the gate of its jobs."""
    maintenance = store._maintenance
    tree, catalog = next((t, c) for t, c in maintenance.trees() if c.db_id == table_id(store, name))
    compaction = tree.pick(everything=True)
    assert compaction is not None
    inputs = [file.meta for file in compaction.inputs]
    plan = MergePlan(
        inputs=tuple(MergeInput(path=meta.file_name, lsn=meta.lsn) for meta in inputs),
        folder=catalog.folder,
        store=store.identity,
        chunk_ids=tuple(maintenance._work.reserve(4)),
        now_us=tree.stored_time_us,
    )
    files = maintenance._files.open_all([catalog.describe(s, level=1, run=0) for s in merge(plan.under(store.path))])
    store._manifest.apply(catalog.publish([file.meta for file in files], inputs))
    tree.end_compaction(compaction, files)


def test_a_task_that_fails_leaves_the_job_to_the_owner(
    spark: Any, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    with penstock.open(folder, settings=SETTINGS) as store:
        table = fill(store, "t")
        before = table.to_arrow()
        real = store.offers.submit_parts

        def impossible(function: str, parts: Any) -> Any:
            return real("penstock.lsm.merge_offers:no_such_function", parts)

        store.offers.submit_parts = impossible  # type: ignore[method-assign]
        with caplog.at_level(logging.WARNING), maintaining(spark, folder) as done:
            wait_for_driver(store)
            store.compact("t")
        assert done == [0]
        assert any("done here" in record.message for record in caplog.records)
        assert table.to_arrow().equals(before)
        assert len(files(store, "t")) == 1


def test_once_ends_after_the_first_job(spark: Any, folder: str) -> None:
    with penstock.open(folder, settings=SETTINGS) as store:
        fill(store, "t")
        driver = threading.Thread(target=penstock.spark.maintain, args=(spark, folder), kwargs={"once": True})
        driver.start()
        wait_for_driver(store)
        store.compact("t")
        driver.join(60)
        assert not driver.is_alive()


def test_verify_finds_a_flipped_bit(spark: Any, folder: str) -> None:
    with penstock.open(folder, settings=SETTINGS) as store:
        fill(store, "t")
        store.compact("t")
        store.kv("other").put(b"a", b"b", durable=True)
        store.queue("events").put_many([b"m%d" % n for n in range(1_000)], durable=True)
        assert penstock.spark.verify(spark, folder) == []
        file = files(store, "t")[0]
        damaged = {}
        for name, offset in ((file, 100_000), (file.with_suffix(".idx"), file.with_suffix(".idx").stat().st_size - 9)):
            damaged[name] = offset
            flip(name, offset)
        damages = penstock.spark.verify(spark, folder)
        assert {damage.table for damage in damages} == {"t"}
        assert [damage.file for damage in damages] == sorted(str(name.relative_to(folder)) for name in damaged)
        assert all("does not match its checksum" in damage.reason for damage in damages)
        for name, offset in damaged.items():
            flip(name, offset)
        assert penstock.spark.verify(spark, folder) == []
        log = next(Path(folder, "tables", str(table_id(store, "events"))).rglob("*.data"))
        flip(log, log.stat().st_size - 50 if log.stat().st_size < 4_096 else 2_000)
        (bad,) = penstock.spark.verify(spark, folder)
        assert bad.table == "events"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


def test_export_is_the_table(spark: Any, store: Store, folder: str, tmp_path: Path) -> None:
    users = store.kv("users", shards=2)
    users.put_many({b"%04d" % n: os.urandom(n % 50) for n in range(3_000)}, durable=True)
    lsn = penstock.spark.export(spark, folder, "users", str(tmp_path / "users"))
    assert lsn > 0
    expected = users.to_arrow().sort_by("key")
    rows = pq.read_table(tmp_path / "users").sort_by("key")
    assert rows.column("key").to_pylist() == expected.column("key").to_pylist()
    assert rows.column("value").to_pylist() == expected.column("value").to_pylist()
    assert rows.column("lsn").cast(pa.uint64()).to_pylist() == expected.column("lsn").to_pylist()
    with pytest.raises(Exception, match="already exists"):
        penstock.spark.export(spark, folder, "users", str(tmp_path / "users"))
    users.put(b"0000", b"new", durable=True)
    penstock.spark.export(spark, folder, "users", str(tmp_path / "users"), mode="overwrite")
    again = dict(zip(*(pq.read_table(tmp_path / "users").column(c).to_pylist() for c in ("key", "value")), strict=True))
    assert again[b"0000"] == b"new"
    with pytest.raises(NotFound, match="did you mean users"):
        penstock.spark.export(spark, folder, "usres", str(tmp_path / "x"))
