"""The store: order, visibility, failing partitions, checkpoints, full disks, forks, wrong use."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_model import SETTINGS, open_simulated, read_all

import penstock
from penstock.errors import (
    Closed,
    DiskFull,
    Invalid,
    KindMismatch,
    Lost,
    NotFound,
    PartitionPaused,
    PenstockError,
    StoreLocked,
    TokenTooOld,
)
from penstock.kv.machine import KvMachine
from penstock.kv.table import KvTable
from penstock.log import LogSettings
from penstock.lsm.rows import KEY_BYTES_MAX, VALUE_BYTES_MAX
from penstock.partition.admission import DispatcherSettings
from penstock.partition.machine import Entry
from penstock.store.flusher import StoreFlusher
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk


def one(value: int = 1) -> bytes:
    return value.to_bytes(8, "little", signed=True)


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(disk: SimulatedDisk, clock: FakeClock) -> Iterator[Store]:
    with open_simulated(disk, clock) as opened:
        yield opened


# -- what is seen, and when


@contextmanager
def stopped_before(patch: pytest.MonkeyPatch, name: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The store's flusher waits before `name`: (it got there, let it go on)."""
    reached, go_on = threading.Event(), threading.Event()
    original = getattr(StoreFlusher, name)

    def waiting(self: StoreFlusher, *args: Any, **named: Any) -> Any:
        reached.set()
        assert go_on.wait(30)
        return original(self, *args, **named)

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(StoreFlusher, name, waiting)
        try:
            yield reached, go_on
        finally:
            go_on.set()


@pytest.mark.parametrize("name", ["make_durable", "apply"])
def test_a_write_is_seen_at_every_point_of_its_way(store: Store, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    table = store.kv("t")
    table.put(b"k", b"old")
    table.merge(b"n", one(5), operator="add_i64")
    table.put(b"gone", b"1")
    store.flush()

    def look() -> None:
        assert table.get(b"k") == b"new"
        assert table.get(b"n") == one(8)
        assert table.get(b"gone") is None
        assert dict(table.scan()) == {b"k": b"new", b"n": one(8)}

    with stopped_before(monkeypatch, name) as (reached, go_on):
        table.put(b"k", b"new")
        table.merge(b"n", one(3), operator="add_i64")
        table.delete_range(b"g", b"h")
        look()  # pending
        flushing = threading.Thread(target=store.flush)
        flushing.start()
        assert reached.wait(30)
        look()  # in flight, or durable and not applied
        table.merge(b"n", one(1), operator="add_i64")
        assert table.get(b"n") == one(9)
        table.merge(b"n", one(-1), operator="add_i64")
        look()
        go_on.set()
        flushing.join(30)
    look()
    store.flush()
    look()


def test_between_apply_and_retirement_nothing_counts_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is in the tree and its delta still among the layers: also where the tree says: deleted."""
    table = store.kv("t")
    table.put(b"old", b"1", durable=True)
    reads: list[Any] = []
    dispatch = store._dispatcher.dispatch

    def watched(*args: Any) -> Any:
        result = dispatch(*args)
        reads.append((table.get(b"n"), table.get(b"k"), dict(table.scan())))
        return result

    table.merge(b"n", one(2), operator="add_i64")
    table.merge(b"k", b"x", operator="append")
    monkeypatch.setattr(store._dispatcher, "dispatch", watched)
    with store.batch(token=("p", 1)) as batch:
        batch.kv("t").delete(b"k")
        batch.kv("t").merge(b"n", one(3), operator="add_i64")
    assert reads == [(one(5), None, {b"old": b"1", b"n": one(5)})]


def test_put_tokened_batch_put_keep_their_order(store: Store) -> None:
    table = store.kv("t")
    table.put(b"k", b"1")
    with store.batch(token=("p", 1)) as batch:
        batch.kv("t").put(b"k", b"2")
        batch.kv("t").put(b"only", b"here")
        assert table.get(b"k") == b"1"
    assert table.get(b"k") == b"2"
    table.put(b"k", b"3")
    store.flush()
    assert table.get(b"k") == b"3"
    table.put(b"k", b"4")
    with store.batch(token=("p", 1)) as batch:
        batch.kv("t").put(b"k", b"5")
    assert batch.duplicate
    assert table.get(b"k") == b"4"


def test_a_duplicate_is_never_visible(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    table = store.kv("t")
    with store.batch(token=("p", 1)) as batch:
        batch.kv("t").put(b"k", b"first")
    reads: list[Any] = []
    for name in ("make_durable", "apply"):
        original = getattr(StoreFlusher, name)

        def looking(self: StoreFlusher, *args: Any, original: Callable[..., Any] = original, **named: Any) -> Any:
            reads.append((table.get(b"k"), dict(table.scan())))
            result = original(self, *args, **named)
            reads.append((table.get(b"k"), dict(table.scan())))
            return result

        monkeypatch.setattr(StoreFlusher, name, looking)
    with store.batch(token=("p", 1)) as batch:
        batch.kv("t").put(b"k", b"second")
    assert batch.duplicate
    assert len(reads) == 4
    assert set(map(repr, reads)) == {repr((b"first", {b"k": b"first"}))}


def test_tokens_below_the_window_are_refused_not_called_duplicates(store: Store) -> None:
    store.kv("t")
    for number in (5_000, 3_976, 3_975):
        with store.batch(token=("p", number)) as batch:
            batch.kv("t").put(b"k%d" % number, b"")
            if number == 3_975:
                with pytest.raises(TokenTooOld):
                    batch.commit()
        assert not batch.duplicate
    assert store.kv("t").get(b"k3976") == b""
    assert store.kv("t").get(b"k3975") is None


def test_record_times_never_go_back(disk: SimulatedDisk) -> None:
    early, late = FakeClock(time_us=1_000_000_000), FakeClock(time_us=5_000_000_000)
    with open_simulated(disk, late) as store:
        store.kv("t").put(b"k", b"1", ttl_s=100.0)
    with open_simulated(disk, early) as store:
        table = store.kv("t")
        table.put(b"short", b"1", ttl_s=10.0, durable=True)
        assert table.get(b"k") == table.get(b"short") == b"1"
        assert store._ledger.tree.time_us >= 5_000_000_000
        early.advance(11.5)  # the wall clock is far behind, so that eleven seconds count as ten at least
        assert table.get(b"short") is None
        assert table.get(b"k") == b"1"


def test_snapshots_are_one_moment_of_all_tables(store: Store) -> None:
    for name in ("a", "b"):
        store.kv(name)
    with store.batch() as batch:
        batch.kv("a").put(b"k", b"1")
        batch.kv("b").put(b"k", b"1")
    with store.snapshot() as snapshot:
        with store.batch() as batch:
            batch.kv("a").put(b"k", b"2")
            batch.kv("b").put(b"k", b"2")
        store.compact("a")
        assert (snapshot.kv("a").get(b"k"), snapshot.kv("b").get(b"k")) == (b"1", b"1")
        store.drop("b")
        assert snapshot.kv("b")[b"k"] == b"1"
    with pytest.raises(Closed):
        snapshot.kv("a").get(b"k")


# -- a partition that fails


class Broken:
    """Makes the state machine of a table raise."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.broken = True
        apply = KvMachine.apply

        def failing(machine: KvMachine, entry: Entry) -> None:
            if self.broken and machine._descriptor.name == name:
                raise RuntimeError("out of order")
            apply(machine, entry)

        patch.setattr(KvMachine, "apply", failing)


def pause(store: Store, table: KvTable[Any], clock: FakeClock) -> int:
    """Write until the table is paused; how many writes were taken."""
    for count in range(100):
        clock.advance(10)
        try:
            table.merge(b"n", one(), operator="add_i64", durable=True)
        except PartitionPaused:
            return count
    raise AssertionError("it was never paused")


def test_a_failing_partition_stops_nobody_else(store: Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = store.kv("bad"), store.kv("good")
    broken = Broken(monkeypatch, "bad")
    taken = pause(store, bad, clock)
    assert taken == SETTINGS.dispatcher.attempts_max
    good.put(b"k", b"1", durable=True)
    assert good.get(b"k") == b"1"
    for refused in (
        lambda: bad.put(b"k", b"1"),
        lambda: bad.get(b"n"),
        lambda: list(bad.scan()),
        lambda: list(bad.scan_arrow()),
    ):
        with pytest.raises(PartitionPaused, match=r"shard 0 of bad .*store.resume\('bad'\)"):
            refused()
    with pytest.raises(PartitionPaused), store.batch() as batch:
        batch.kv("good").put(b"k", b"2")
        batch.kv("bad").put(b"k", b"2")
    assert good.get(b"k") == b"1"
    with store.snapshot() as snapshot:
        assert snapshot.kv("good").get(b"k") == b"1"
        with pytest.raises(PartitionPaused):
            snapshot.kv("bad").get(b"n")
    store.resume("bad")
    with pytest.raises(PartitionPaused, match="behind"):
        bad.get(b"n")
    broken.broken = False
    store.resume("bad")
    assert bad.get(b"n") == one(taken)
    bad.put(b"k", b"1")


def test_a_paused_partition_across_spills_and_reopenings(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(monkeypatch, "bad")
    with open_simulated(disk, clock) as store:
        taken = pause(store, store.kv("bad"), clock)
        good = store.kv("good")
        for number in range(40):
            good.put(b"k%d" % number, bytes(200), durable=True)
        report = store.checkpoint()
        assert report.spilled
        assert report.segments_dropped
    with open_simulated(disk, clock) as store:
        assert store.kv("good").get(b"k39") == bytes(200)
        with pytest.raises(PartitionPaused):
            store.kv("bad").get(b"n")
        store.kv("good").put(b"more", b"1", durable=True)
        store.checkpoint()
        broken.broken = False
        store.resume("bad")
        assert store.kv("bad").get(b"n") == one(taken)
    with open_simulated(disk, clock) as store:
        assert store.kv("bad").get(b"n") == one(taken)


def test_limits_on_what_waits(disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = DispatcherSettings(partition_operations_max=2, attempts_max=100, backoff_s=1e9)
    Broken(monkeypatch, "bad")
    with open_simulated(disk, clock, replace(SETTINGS, dispatcher=limits)) as store:
        bad = store.kv("bad")
        bad.put(b"1", b"", durable=True)
        bad.put(b"2", b"", durable=True)
        with pytest.raises(PenstockError, match=r"shard 0 of bad has 2 waiting operations \(limit 2\)"):
            bad.put(b"3", b"")
        store.kv("good").put(b"1", b"", durable=True)


# -- the checkpoint


def test_an_idle_table_never_holds_the_journal_back(store: Store) -> None:
    idle, busy = store.kv("idle"), store.kv("busy")
    idle.put(b"k", b"1", durable=True)
    store.compact("idle")
    for number in range(40):
        busy.put(b"k%d" % number, bytes(200), durable=True)
    store.compact("busy")
    report = store.checkpoint()
    assert report.spilled == 0
    assert report.segments_dropped > 3
    assert len(store._consensus.segment_starts()) == 1


def test_what_is_durable_but_not_applied_is_not_dropped(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_simulated(disk, clock)
    table = store.kv("t")
    table.put(b"k", b"0", durable=True)
    with stopped_before(monkeypatch, "apply") as (reached, _):
        acknowledged = [table.put(b"k%d" % number, bytes(700)) for number in range(1)]
        flushing = threading.Thread(target=store.flush, args=(acknowledged[-1],))
        flushing.start()
        assert reached.wait(30)
        for number in range(1, 6):  # durable, and in further segments; not applied
            store._coordinator.flush(table.put(b"k%d" % number, bytes(700)))
        assert len(store._consensus.segment_starts()) > 3
        for tree, _ in store._maintenance.trees():
            store._maintenance.flush(tree)
        store.checkpoint()
        judged = store._ledger.tree.lsn
        image = disk.image()
        assert store._consensus.first <= judged + 1
    flushing.join(30)
    store.close()
    with open_simulated(image.restore("strict"), clock) as store:
        assert {key for key, _ in store.kv("t").scan()} == {b"k", *(b"k%d" % number for number in range(6))}


def test_a_spill_that_failed_is_done_again_once(disk: SimulatedDisk, clock: FakeClock) -> None:
    def fill(store: Store) -> None:
        for _ in range(20):
            store.kv("t").merge(b"n", one(), operator="add_i64", durable=True)
            store.kv("t").put(b"big", bytes(200), durable=True)

    for at in range(40):
        disk = SimulatedDisk()
        with open_simulated(disk, clock) as store:
            fill(store)
            disk._faults = {disk.operations + at: "eio"}
            try:
                store.checkpoint()
            except (OSError, PenstockError):
                clock.advance(120)  # past the backoff of a failed job
                store.recover()
                store.checkpoint()
        with open_simulated(disk, clock) as store:
            assert store.kv("t").get(b"n") == one(20), at


# -- drops


def test_of_a_dropped_table_nothing_is_left(store: Store, disk: SimulatedDisk) -> None:
    table = store.kv("t", shards=2)
    number = store._ledger.table("t").table  # type: ignore[union-attr]
    for key in range(20):
        table.put(b"%d" % key, bytes(200), durable=True)
    store.checkpoint()
    store.compact("t")
    assert disk.exists(f"/store/tables/{number}/0-log")
    store.drop("t")
    for act in (lambda: table.get(b"1"), lambda: table.put(b"1", b""), lambda: list(table.scan())):
        with pytest.raises(NotFound):
            act()
    assert not list(store.kv("t").scan())
    store._tasks.retry()
    assert not disk.exists(f"/store/tables/{number}")


# -- replaying


CHILD = """
import sys
from penstock.store.store import open_store
from store_model import read_all
store = open_store(sys.argv[1], clock=__import__("store_model").FakeClock(time_us=int(sys.argv[2])))
print(sorted((name, sorted(rows.items())) for name, rows in read_all(store).items()), store._ledger.tree.lsn)
"""


def test_two_processes_replay_a_journal_alike(tmp_path: Path) -> None:
    clock = FakeClock()
    settings = StoreSettings(
        background=False, journal=LogSettings(segment_bytes=4_000, allocate_bytes=512, index_bytes=512)
    )
    chance = random.Random(3)
    store = open_store(str(tmp_path / "one"), clock=clock, settings=settings)
    for name in ("a", "b"):
        store.kv(name, shards=2)
    for number in range(60):
        clock.advance(1)
        with store.batch(token=("p", chance.randrange(40))) as batch:
            for name in ("a", "b"):
                table = batch.kv(name)
                table.merge(
                    b"n%d" % (number % 3), one(number), operator="add_i64", ttl_s=chance.choice([None, 5.0, 30.0])
                )
                table.merge(b"log", b"%d," % number, operator="append")
                table.put(b"k%d" % number, b"v", ttl_s=chance.choice([None, 20.0]))
                if number % 10 == 0:
                    table.delete_range(b"k1", b"k3")
    expected = read_all(store)
    store._coordinator.shutdown()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    store.close()
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    path = os.pathsep.join([str(Path(__file__).parents[1] / "model"), *sys.path])
    answers = [
        subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path / name), str(clock.time_us())],
            capture_output=True, text=True, check=True, timeout=120, env={**os.environ, "PYTHONPATH": path},
        ).stdout
        for name in ("two", "three", "three")
    ]  # fmt: skip
    assert answers[0] == answers[1] == answers[2]
    assert answers[0].startswith(str(sorted((name, sorted(rows.items())) for name, rows in expected.items())))


# -- one owner


def test_one_owner(store: Store, disk: SimulatedDisk) -> None:
    with pytest.raises(StoreLocked):
        open_simulated(disk)
    store.kv("t")  # the owner is not disturbed


def test_a_failed_opening_lets_go_of_everything(disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_simulated(disk) as store:
        store.kv("t").put(b"k", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_recover", lambda self: (_ for _ in ()).throw(OSError(5, "broken")))
        with pytest.raises(OSError, match="broken"):
            open_simulated(disk)
    with open_simulated(disk) as store:
        assert store.kv("t").get(b"k") == b"1"


def test_a_close_that_fails_lets_go_of_everything(disk: SimulatedDisk) -> None:
    store = open_simulated(disk)
    store.kv("t").put(b"k", b"1", durable=True)
    store.kv("t").put(b"k", b"2")
    disk._faults = {disk.operations + n: "eio" for n in range(1, 50)}
    with pytest.raises((OSError, PenstockError)):
        store.close()
    disk._faults = {}
    with open_simulated(disk) as store:
        assert store.kv("t").get(b"k") in (b"1", b"2")


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    """In a process of its own: a fork beside the threads of a test run is no good."""
    code = f"""
import os
from penstock.store.store import open_store
from penstock.errors import Closed
store = open_store({str(tmp_path / "s")!r})
table = store.kv("t")
table.put(b"k", b"parent", durable=True)
snapshot = store.snapshot()
child = os.fork()
if child == 0:
    refused = 0
    calls = [lambda: table.put(b"k", b"1"), lambda: table.put(b"k", b"1", durable=True), lambda: table.get(b"k"),
             lambda: list(table.scan()), lambda: table.delete(b"k"), lambda: store.flush(), lambda: store.kv("u"),
             lambda: store.batch(), lambda: store.snapshot(), lambda: store.checkpoint(), lambda: store.drop("t"),
             lambda: store.tables(), lambda: store.recover()]
    for call in calls:
        try:
            call()
        except Closed as error:
            assert "fork" in str(error)
            refused += 1
    store.close()
    os._exit(0 if refused == len(calls) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
table.put(b"after", b"1", durable=True)
store.close()
store = open_store({str(tmp_path / "s")!r})
assert dict(store.kv("t").scan()) == {{b"k": b"parent", b"after": b"1"}}
store.close()
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120, env=environment)


# -- a full disk


def test_a_full_disk_takes_deletes_and_recovers() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    settings = replace(SETTINGS, reserve_bytes=20_000)
    with open_simulated(disk, clock, settings) as store:
        table = store.kv("t")
        for number in range(30):
            table.put(b"k%02d" % number, bytes(300), durable=True)
        disk.capacity_bytes = sum(len(inode.live) for inode in disk._inodes.values()) + 2_000
        written = 30
        with pytest.raises(DiskFull, match="only deletes"):
            for number in range(30, 300):
                table.put(b"z%03d" % number, bytes(300), durable=True)
                written += 1
        assert written < 60
        assert len(list(table.scan())) == written
        refusals: tuple[Callable[[], object], ...] = (
            lambda: table.put(b"x", b""),
            lambda: table.put_many({b"x": b""}),
            lambda: table.merge(b"x", b"", operator="append"),
        )
        for refused in refusals:
            with pytest.raises(DiskFull):
                refused()
        table.delete(b"k00", durable=True)
        table.delete_range(b"k01", b"k05", durable=True)
        with store.batch(token=("p", 1)) as batch:
            batch.kv("t").delete(b"k05")
        with pytest.raises(DiskFull), store.batch() as batch:
            batch.kv("t").delete(b"k06")
            batch.kv("t").put(b"x", b"")
        store._tasks.retry()
        with pytest.raises(DiskFull):
            table.put(b"x", b"")
        disk.capacity_bytes = None
        store._tasks.retry()
        table.put(b"x", b"1", durable=True)
    with open_simulated(disk, clock, settings) as store:
        left = {key for key, _ in store.kv("t").scan()}
        assert len(left) == written - 6 + 1
        assert not {b"k00", b"k01", b"k05"} & left


# -- wrong use

WRONG: list[tuple[str, type[PenstockError], Callable[[Store, KvTable[Any]], object]]] = [
    ("name", Invalid, lambda s, t: s.kv("Bad")),
    ("name type", Invalid, lambda s, t: s.kv(b"bad")),  # type: ignore[call-overload]
    ("name none", Invalid, lambda s, t: s.kv(None)),  # type: ignore[call-overload]
    ("shards", Invalid, lambda s, t: s.kv("n", shards=0)),
    ("shards type", Invalid, lambda s, t: s.kv("n", shards="2")),  # type: ignore[call-overload]
    ("value type", Invalid, lambda s, t: s.kv("n", value="int")),  # type: ignore[call-overload]
    ("not there", NotFound, lambda s, t: s.kv("n", create=False)),
    ("other shards", KindMismatch, lambda s, t: s.kv("t", shards=3)),
    ("other value", KindMismatch, lambda s, t: s.kv("t", value="json")),
    ("drop", NotFound, lambda s, t: s.drop("n")),
    ("resume", NotFound, lambda s, t: s.resume("n")),
    ("compact", NotFound, lambda s, t: s.compact("n")),
    ("flush future", Invalid, lambda s, t: s.flush(1 << 62)),
    ("flush past", Lost, lambda s, t: s.flush(1)),
    ("token", Invalid, lambda s, t: s.batch(token=("p", -1))),
    ("token type", Invalid, lambda s, t: s.batch(token="p")),  # type: ignore[arg-type]
    ("token producer", Invalid, lambda s, t: s.batch(token=("", 1))),
    ("batch reads", Invalid, lambda s, t: s.batch().kv("t").get(b"k")),
    ("batch table", NotFound, lambda s, t: s.batch().kv("n")),
    ("put key", Invalid, lambda s, t: t.put("k", b"v")),  # type: ignore[arg-type]
    ("put value", Invalid, lambda s, t: t.put(b"k", "v")),
    ("put none", Invalid, lambda s, t: t.put(b"k", None)),
    ("put long key", Invalid, lambda s, t: t.put(bytes(KEY_BYTES_MAX + 1), b"")),
    ("put long value", Invalid, lambda s, t: t.put(b"k", bytes(VALUE_BYTES_MAX + 1))),
    ("put ttl", Invalid, lambda s, t: t.put(b"k", b"v", ttl_s=0)),
    ("put ttl nan", Invalid, lambda s, t: t.put(b"k", b"v", ttl_s=float("nan"))),
    ("put ttl type", Invalid, lambda s, t: t.put(b"k", b"v", ttl_s="1")),  # type: ignore[arg-type]
    ("put_many pairs", Invalid, lambda s, t: t.put_many([(b"k",)])),  # type: ignore[list-item]
    ("put_many key", Invalid, lambda s, t: t.put_many({b"a": b"", "k": b""})),  # type: ignore[arg-type]
    ("put_many value", Invalid, lambda s, t: t.put_many([(b"a", b""), (b"k", 1)])),
    ("put_many int", Invalid, lambda s, t: t.put_many(7)),  # type: ignore[arg-type]
    ("delete", Invalid, lambda s, t: t.delete(7)),  # type: ignore[arg-type]
    ("delete_range", Invalid, lambda s, t: t.delete_range(b"b", b"a")),
    ("delete_range type", Invalid, lambda s, t: t.delete_range(b"b", "c")),  # type: ignore[arg-type]
    ("delete_range none", Invalid, lambda s, t: t.delete_range(b"b", None)),  # type: ignore[arg-type]
    ("merge operator", Invalid, lambda s, t: t.merge(b"k", b"", operator="add")),
    ("merge operator type", Invalid, lambda s, t: t.merge(b"k", b"", operator=["add"])),  # type: ignore[arg-type]
    ("merge operand", Invalid, lambda s, t: t.merge(b"k", b"1", operator="add_i64")),
    (
        "merge typed",
        Invalid,
        lambda s, t: s.kv("numbers", value="int64", create=False).merge(b"k", b"x", operator="append"),
    ),
    ("get", Invalid, lambda s, t: t.get("k")),  # type: ignore[call-overload]
    ("get int", Invalid, lambda s, t: t.get(7)),  # type: ignore[call-overload]
    ("getitem", Invalid, lambda s, t: t["k"]),  # type: ignore[index]
    ("multi_get", Invalid, lambda s, t: t.multi_get(["k"])),  # type: ignore[list-item]
    ("scan limit", Invalid, lambda s, t: t.scan(limit=-1)),
    ("scan limit type", Invalid, lambda s, t: t.scan(limit="1")),  # type: ignore[arg-type]
    ("scan prefix", Invalid, lambda s, t: t.scan(prefix="k")),  # type: ignore[arg-type]
    ("text", Invalid, lambda s, t: s.kv("text", value="utf8", create=False).put(b"k", "\ud800")),
    ("number", Invalid, lambda s, t: s.kv("floats", value="float64", create=False).put(b"k", 10**400)),
    ("integer", Invalid, lambda s, t: s.kv("numbers", value="int64", create=False).put(b"k", 1 << 63)),
    ("snapshot table", NotFound, lambda s, t: s.snapshot().kv("n")),
]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("error", "call"), [wrong[1:] for wrong in WRONG], ids=[wrong[0] for wrong in WRONG])
def test_wrong_use_changes_nothing(
    error: type[PenstockError], call: Callable[[Store, KvTable[Any]], object], shards: int
) -> None:
    with open_simulated(SimulatedDisk()) as store:
        table = store.kv("t", shards=shards) if shards == 1 else store.kv("many", shards=shards)
        store.kv("t")
        store.kv("numbers", value="int64")
        store.kv("floats", value="float64")
        store.kv("text", value="utf8")
        table.put(b"k", b"1", durable=True)
        last = store._coordinator.last
        with pytest.raises(error) as caught:
            call(store, table)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300
        assert store._coordinator.last == last
        assert store.tables() == sorted({"t", "numbers", "floats", "text", table.name})
        assert dict(table.scan()) == {b"k": b"1"}


def test_a_batch_ends_once(store: Store) -> None:
    store.kv("t")
    with store.batch() as batch:
        table = batch.kv("t")
        table.merge(b"n", one(), operator="add_i64")
        batch.commit()
        with pytest.raises(Invalid, match="has ended"):
            table.put(b"late", b"")
    with pytest.raises(Invalid, match="has ended"):
        batch.commit()
    with pytest.raises(RuntimeError, match="given up"), store.batch() as batch:
        batch.kv("t").put(b"never", b"")
        raise RuntimeError("given up")
    assert dict(store.kv("t").scan()) == {b"n": one()}


def test_nothing_works_after_close(disk: SimulatedDisk) -> None:
    store = open_simulated(disk)
    table = store.kv("t")
    table.put(b"k", b"1")
    store.close()
    store.close()
    for call in (
        lambda: table.put(b"k", b"2"),
        lambda: table.get(b"x"),
        lambda: list(table.scan()),
        lambda: store.kv("t"),
        store.flush,
        store.batch,
        store.snapshot,
        store.tables,
        store.checkpoint,
    ):
        with pytest.raises(Closed):
            call()
    with open_simulated(disk) as store:
        assert store.kv("t").get(b"k") == b"1"


def test_put_many_of_nothing_can_be_awaited(store: Store) -> None:
    table = store.kv("t")
    store.flush(table.put_many({}))
    store.flush(table.put_many([], durable=True))


def test_a_snapshot_outlives_a_drop() -> None:
    """Files that were not even opened when the table went are there until the snapshot is closed."""
    disk = SimulatedDisk()
    with open_simulated(disk) as store:
        store.kv("t").put_many({b"%03d" % number: b"v" for number in range(100)}, durable=True)
        store.queue("q").put_many([b"m"] * 10, durable=True)
        store.compact("t")
    store = open_simulated(disk)
    snapshot = store.snapshot()
    tables = [store._info(name).table_id for name in ("t", "q")]
    store.drop("t")
    store.drop("q")
    store._dropped.remove()
    assert snapshot.kv("t").to_arrow().num_rows == 100
    assert snapshot.queue("q").to_arrow().num_rows == 10
    snapshot.close()
    store._dropped.remove()
    assert not any(disk.exists(f"{store.path}/tables/{table}") for table in tables)
    store.close()


def test_a_relative_path_is_of_the_folder_it_was_opened_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with penstock.open("data") as store:
        table = store.kv("t")
        monkeypatch.chdir(tmp_path / "elsewhere")
        table.put_many({b"%d" % number: bytes(1_000) for number in range(2_000)}, durable=True)
        store.checkpoint()
        assert store.path == str(tmp_path / "data")
        with penstock.connect(tmp_path / "data") as other:
            assert other.kv("t").get(b"7") == bytes(1_000)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_metrics_of_a_store_cover_its_parts(store: Store) -> None:
    exported = store.metrics.exposition()
    for name in ("coordinator_", "memtable_bytes", "scheduler_workers", "clock_ahead_seconds"):
        assert f"penstock_{name}" in exported
