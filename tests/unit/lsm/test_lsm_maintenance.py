"""Flushes, compactions and adoptions that meet each other wait, up to the caller's deadline, and say what they did."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from lsm_files import columns, puts

from penstock.archive.chunk import ChunkIdentity, KeyRing
from penstock.errors import Closed, GateShut, PenstockError
from penstock.host.os_files import OsFileSystem
from penstock.lsm.catalog import Catalog
from penstock.lsm.index import Summary
from penstock.lsm.maintenance import BUSY_TIMEOUT_S, Maintenance
from penstock.lsm.merge import MergePlan
from penstock.lsm.tree import Tree
from penstock.lsm.writer import SstableWriter
from penstock.manifest import jobs
from penstock.manifest.jobs import Lease
from penstock.manifest.records import JobKind
from penstock.partition.reference import StagedFile, sealed
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

SETTINGS = StoreSettings(background=False)
PATIENCE_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "s"), settings=SETTINGS) as opened:
        yield opened


def tree_of(store: Store, name: str) -> Tree:
    table = store._info(name).table_id
    return next(tree for tree, catalog in store._maintenance.trees() if catalog.db_id == table)


def add_run(store: Store, value: bytes) -> Tree:
    """A run of level 0."""
    store.kv("t").put_many({b"%d" % number: value for number in range(100)}, durable=True)
    tree = tree_of(store, "t")
    store._maintenance.flush(tree)
    return tree


def run_in_thread(act: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """A call in a thread, and what came of it."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(act())
        except PenstockError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


@contextmanager
def taken(store: Store, kind: JobKind) -> Iterator[Lease]:
    """A job that somebody has taken and not begun: it waits, and nobody else can have it."""
    job = next(job for job in store._manifest.read(jobs._runnable) if job.kind == kind)
    lease = Lease(job=job, worker_id="other", token=job.attempts + 1)
    assert store._jobs._add_lease(lease)
    try:
        yield lease
    finally:
        store._jobs._drop_lease(lease)


# -- flushes


def begin_flush_elsewhere(store: Store) -> Tree:
    store.kv("t").put(b"k", b"1", durable=True)
    tree = tree_of(store, "t")
    tree.freeze()
    assert store._maintenance.request_flush(tree)
    return tree


def test_a_flush_waits_for_a_job_that_somebody_has_taken(store: Store) -> None:
    tree = begin_flush_elsewhere(store)
    with taken(store, JobKind.FLUSH):
        thread, outcome = run_in_thread(lambda: store._maintenance.flush(tree))
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(PATIENCE_S)
    assert outcome == [None]
    assert tree.stored == tree.lsn


def test_a_flush_gives_up_at_its_deadline(store: Store) -> None:
    tree = begin_flush_elsewhere(store)
    with taken(store, JobKind.FLUSH), pytest.raises(GateShut, match="a flush cannot run now"):
        store._maintenance.flush(tree, timeout_s=0.1)
    assert tree.stored < tree.lsn


# -- compactions


class SlowMerge:
    """A merge that goes on when it is told, or stops when it is asked to."""

    def __init__(self, store: Store) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._merge = store._maintenance._work._merge_here
        store._maintenance._work._merge = self

    def __call__(self, plan: MergePlan, stop: Callable[[], bool], keys: KeyRing | None) -> Sequence[Summary]:
        self.begun.set()
        while not self.go_on.wait(0.01):
            if stop():
                raise Closed("the merge was asked to stop: run its plan again")
        return self._merge(plan, stop, keys)


def compact_elsewhere(store: Store, tree: Tree) -> tuple[SlowMerge, threading.Thread]:
    """A compaction in the background that is under way."""
    slow = SlowMerge(store)
    assert store._maintenance.request_compaction(tree, everything=True)
    thread, _ = run_in_thread(lambda: store._maintenance.run(JobKind.COMPACTION))
    assert slow.begun.wait(PATIENCE_S)
    return slow, thread


def test_a_compaction_by_hand_waits_for_one_in_the_background(store: Store) -> None:
    add_run(store, b"1")
    tree = add_run(store, b"2")
    slow, background = compact_elsewhere(store, tree)
    add_run(store, b"3")  # too late for it
    thread, outcome = run_in_thread(lambda: store.compact("t"))
    thread.join(0.3)
    assert thread.is_alive()
    slow.go_on.set()
    for each in (background, thread):
        each.join(PATIENCE_S)
    (report,) = outcome
    assert not isinstance(report, PenstockError)
    assert (report.shards, report.merged, report.files_after) == (1, 1, 1)  # type: ignore[attr-defined]
    assert sum(tree.statistics().level_files) == 1
    assert store.kv("t").get(b"7") == b"3"


def test_a_compaction_gives_up_at_its_deadline(store: Store) -> None:
    add_run(store, b"1")
    slow, background = compact_elsewhere(store, add_run(store, b"2"))
    with pytest.raises(GateShut, match="a compaction cannot run now"):
        store.compact("t", timeout_s=0.1)
    slow.go_on.set()
    background.join(PATIENCE_S)


def test_a_compaction_says_what_it_did(store: Store) -> None:
    for value in (b"1", b"2", b"3"):
        add_run(store, value)
    store.kv("t").put(b"more", b"4")
    report = store.compact("t")
    assert (report.shards, report.merged, report.files_before, report.files_after) == (1, 1, 3, 1)
    assert report.bytes_after < report.bytes_before
    again = store.compact("t")
    assert again == replace(again, merged=0, files_before=1, files_after=1)


def test_a_table_that_nobody_has_used_yet_is_compacted(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "s"), settings=SETTINGS) as store:
        store.kv("t", shards=3)
        for value in (b"1", b"2"):
            store.kv("t").put_many({b"%d" % number: value for number in range(100)}, durable=True)
            for tree, _ in store._maintenance.trees():
                store._maintenance.flush(tree)
        store.checkpoint()
    with open_store(str(tmp_path / "s"), settings=SETTINGS) as store:
        report = store.compact("t")
        assert (report.shards, report.merged, report.files_before, report.files_after) == (3, 3, 6, 3)


def test_a_compaction_of_a_closed_store_and_one_under_a_close(store: Store) -> None:
    add_run(store, b"1")
    add_run(store, b"2")
    slow = SlowMerge(store)
    thread, outcome = run_in_thread(lambda: store.compact("t"))
    assert slow.begun.wait(PATIENCE_S)
    store.close()
    thread.join(PATIENCE_S)
    assert isinstance(outcome[0], Closed)
    with pytest.raises(Closed):
        store.compact("t")
    with open_store(store.path, settings=SETTINGS) as again:
        assert again.kv("t").get(b"7") == b"2"
        assert again.compact("t").files_after == 1


def test_closing_trees_have_one_deadline(store: Store) -> None:
    """However many shards somebody still works on, a close does not wait for each of them in turn."""
    add_run(store, b"1")
    table, maintenance = store._info("t").table_id, store._maintenance
    maintenance.stop()
    maintenance._stopped_s -= BUSY_TIMEOUT_S
    with maintenance._at_work(table, 0), pytest.raises(GateShut, match="after 0.0 s"):
        maintenance.close_tree(table, 0)


def test_a_dropped_shard_at_work_does_not_keep_others(store: Store) -> None:
    for name in ("t", "u"):
        store.kv(name).put(b"k", b"1", durable=True)
    busy, other = (store._info(name).table_id for name in ("t", "u"))
    store.drop("t")
    store.drop("u")
    store._dropped._may_remove = lambda: True  # nobody reads from before the opening
    with store._maintenance._at_work(busy, 0):
        store._dropped.remove()
        assert [f"{table}" in os.listdir(f"{store.path}/tables") for table in (busy, other)] == [True, False]
    store._dropped.remove()
    assert f"{busy}" not in os.listdir(f"{store.path}/tables")


# -- adoptions


def build(store: Store, staged: StagedFile, value: bytes) -> StagedFile:
    fs = OsFileSystem()
    identity = ChunkIdentity(store=store.identity, chunk_id=staged.chunk_id)
    writer = SstableWriter(fs, f"{store.path}/{staged.file_name}", identity)
    writer.append(columns(puts({b"a%d" % number: value for number in range(10)})))
    writer.finish()
    return sealed(fs, store.path, staged)


def adopt(store: Store, value: bytes) -> None:
    (staged,) = store.stage("t", count=1)
    with store.batch() as batch:
        batch.adopt("t", [build(store, staged, value)])


def fails_at_once(maintenance: Maintenance, kind: JobKind, tree: Tree, catalog: Catalog, deadline_s: float) -> None:
    """As it was: whoever meets a job of somebody else gives up."""
    if not maintenance.run(kind, db_id=catalog.db_id):
        raise GateShut("cannot be flushed now")


@pytest.mark.parametrize("seeded", [False, True])
def test_an_adoption_waits_for_a_flush_in_the_background(
    store: Store, seeded: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the negative control: an adoption that does not wait leaves its shard behind."""
    if seeded:
        monkeypatch.setattr(Maintenance, "_run_or_wait", fails_at_once)
    begin_flush_elsewhere(store)
    with taken(store, JobKind.FLUSH):
        thread, _ = run_in_thread(lambda: adopt(store, b"1"))
        thread.join(0.5)
        assert thread.is_alive() != seeded
    thread.join(PATIENCE_S)
    assert ("applying to shard 0 of t failed" in caplog.text) == seeded
    if not seeded:
        assert store.kv("t").get(b"a1") == b"1"


def test_adoptions_beside_flushes_and_compactions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing pauses the table, and every file is there."""
    ended, errors = threading.Event(), list[PenstockError]()
    with open_store(str(tmp_path / "s"), settings=StoreSettings(reserve_bytes=4096)) as store:
        table = store.kv("t")

        def repeat(act: Callable[[int], object]) -> threading.Thread:
            def run() -> None:
                number = 0
                while not ended.is_set():
                    try:
                        act(number)
                    except PenstockError as error:
                        errors.append(error)
                    number += 1

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        def write(number: int) -> None:
            table.put_many({b"p%d" % key: b"%d" % number for key in range(50)}, durable=True)
            tree = tree_of(store, "t")
            tree.freeze()
            if store._maintenance.request_flush(tree):
                store._wake("flush")

        def compact(_: int) -> None:
            store.compact("t")
            time.sleep(0.02)

        others = [repeat(write), repeat(write), repeat(compact)]
        try:
            for number in range(25):
                adopt(store, b"%d" % number)
        finally:
            ended.set()
            for thread in others:
                thread.join(PATIENCE_S)
        assert errors == []
        assert "applying to shard" not in caplog.text
        store.flush()
        assert table.get(b"a5") == b"24"
