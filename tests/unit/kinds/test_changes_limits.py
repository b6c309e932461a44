"""Change feeds at their limits: the longest keys, the largest values, positions of other tables, many readers."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import interrupts
import pyarrow as pa
import pytest
from feed_model import changes_of, follow, take_in_expired
from interrupts import every_point
from store_model import open_simulated

import penstock
from penstock.errors import Backpressure, NotFound, PenstockError
from penstock.kinds import change_reading
from penstock.kinds import changes as kind_changes
from penstock.kinds.changes import POSTIMAGE, PREIMAGE
from penstock.kv import changes as kv_changes
from penstock.lsm import memtable
from penstock.lsm import tree as lsm_tree
from penstock.lsm.maintenance import COMPANION
from penstock.lsm.rows import KEY_BYTES_MAX, NEVER, VALUE_BYTES_MAX
from penstock.lsm.tree import Tree
from penstock.lsm.tree_settings import Stall
from penstock.lsm.view import View
from penstock.lsm.writer import ROW_BYTES_MAX
from penstock.series import changes as series_changes
from penstock.testing import FakeClock, SimulatedDisk
from penstock.vector import changes as vector_changes


def store_all(store: Any) -> None:
    for tree, _ in store._maintenance.trees():
        store._maintenance.flush(tree)


def test_the_longest_keys_expire() -> None:
    """The key of a deadline is longer than that of its row: it has to fit into a file all the same."""
    disk, clock = SimulatedDisk(), FakeClock()
    keys = [b"k" * (KEY_BYTES_MAX - short) + b"%d" % number for short in (1, 9, 10, 11, 26) for number in (1, 2)]
    store = open_simulated(disk, clock)
    table = store.kv("t", changes=True)
    for key in keys:
        table.put(key, b"v", ttl_s=1)
    store.flush()
    store_all(store)
    store = open_simulated(disk.image().restore("strict"), clock)
    clock.advance(2)
    take_in_expired(store)
    changes = changes_of(store, "t")
    assert sorted(key for _, kind, key, _ in changes if kind == "delete") == sorted(keys)
    assert follow({}, changes, preimages=False) == {}


def test_the_largest_values_and_their_preimages_fit_into_rows() -> None:
    value = bytes(VALUE_BYTES_MAX)
    parts = list(kv_changes._in_parts([((kind, b"k", value), NEVER) for kind in (PREIMAGE, POSTIMAGE)]))
    assert [part.rows for part in parts] == [1, 1]
    assert max(part.size for part in parts) < ROW_BYTES_MAX - KEY_BYTES_MAX


def test_a_part_may_end_with_a_preimage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_changes, "PART_BYTES", 1)
    with open_simulated(SimulatedDisk()) as store:
        table = store.kv("t", changes=penstock.ChangeOptions(preimages=True))
        for value in (b"1", b"2"):
            table.put_many({b"a": value, b"b": value}, durable=True)
        table.delete_range(b"a", b"c", durable=True)
        assert follow({}, changes_of(store, "t"), preimages=True) == {}


@pytest.mark.parametrize("stored", [False, True])
def test_many_puts_of_one_commit_are_divided(monkeypatch: pytest.MonkeyPatch, stored: bool) -> None:
    monkeypatch.setattr(kv_changes, "PART_BYTES", 1_000)
    store = open_simulated(SimulatedDisk(), FakeClock())
    table = store.kv("t", changes=True)
    table.put_many({b"%d" % number: b"1" for number in range(1, 600, 3)}, durable=True)
    if stored:
        store_all(store)
    with store.batch() as batch:  # two sections
        batch.kv("t").put_many({b"%d" % number: b"2" for number in range(0, 600, 2)})
        batch.kv("t").delete_range(b"x", b"y")
    table.put_many({b"%d" % number: b"3" for number in range(600)}, durable=True)
    changes = changes_of(store, "t")
    inserted: set[bytes] = set()
    for _, kind, key, _ in changes:
        assert kind == ("update_postimage" if key in inserted else "insert")
        inserted.add(key)
    assert len(changes) == 200 + 300 + 600
    assert follow({}, changes, preimages=False) == dict(table.scan())
    assert max(sum(1 for _ in tree.scan(b"c", b"d")) for tree, _ in store._maintenance.trees()) > 10  # its feed


@pytest.mark.parametrize("remote", [False, True])
def test_large_commits_are_not_read_together(path: Path, remote: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_reading, "BATCH_BYTES", 100_000)
    sizes: list[int] = []
    concat = pa.concat_batches

    def counted(batches: list[Any]) -> Any:
        sizes.append(sum(batch.nbytes for batch in batches))
        return concat(batches)

    monkeypatch.setattr(pa, "concat_batches", counted)
    with penstock.open(str(path)) as store:
        table = store.kv("t", changes=True)
        for number in range(30):
            table.put(b"%d" % number, b"x" * 50_000, durable=True)
        reader: Any = penstock.connect(str(path)) if remote else store
        with reader:
            assert reader.kv("t").changes().to_arrow().num_rows == 30
    assert len(sizes) >= 15, "all was put together before a batch was given out"
    assert max(sizes) < 200_000


def test_many_changes_of_one_record_go_to_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range delete with preimages reads more than memory may hold, and a replay would do so again."""
    monkeypatch.setattr(kind_changes, "LOADED_BYTES", 2_000)
    for kind in (kv_changes, vector_changes):
        monkeypatch.setattr(kind, "PART_BYTES", 500)
    disk, clock = SimulatedDisk(), FakeClock()
    store = open_simulated(disk, clock)
    options = penstock.ChangeOptions(preimages=True)
    table, docs = store.kv("t", changes=options), store.vector("docs", dimensions=2, changes=options)
    table.put_many({b"%04d" % number: b"x" * 20 for number in range(500)}, durable=True)
    table.put(b"ttl", b"y", ttl_s=1, durable=True)
    docs.upsert([f"{number}" for number in range(300)], [[1.0, 2.0]] * 300, durable=True)
    clock.advance(2)
    rows: list[int] = []
    monkeypatch.setattr(kind_changes.Feed, "record_files", _counted(kind_changes.Feed.record_files, rows))
    table.delete_range(b"0100", b"0400", durable=True)
    docs.delete([f"{number}" for number in range(250)], durable=True)
    assert len(rows) == 2
    feeds = [one for one, each in store._maintenance.trees() if each.shard == COMPANION]
    assert all(one.statistics().level0_runs <= 3 for one in feeds), "writers would have to wait for a compaction"
    for _ in range(2):
        table.put(b"0001", b"z", durable=True)
        changes = changes_of(store, "t")
        assert follow({}, changes, preimages=True) == dict(table.scan())
        assert sum(kind == "delete" for _, kind, _, _ in changes) == 301
        kinds = store.vector("docs").changes().to_arrow()["_change_type"].to_pylist()
        assert (kinds.count("insert"), kinds.count("delete")) == (300, 250)
        store = open_simulated(disk.image().restore("strict"), clock)
        table = store.kv("t")


def test_a_range_delete_holds_few_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of a range are recorded while they are read."""
    monkeypatch.setattr(kv_changes, "PART_BYTES", 500)
    read, at_parts, scan, part = [0], list[int](), View.scan, kv_changes._part

    def counting(view: View, *args: Any, **options: Any) -> Any:
        for row in scan(view, *args, **options):
            read[0] += 1
            yield row

    def noting(*args: Any) -> Any:
        at_parts.append(read[0])
        return part(*args)

    with open_simulated(SimulatedDisk()) as store:
        table = store.kv("t", changes=True)
        table.put_many({b"%04d" % number: b"x" for number in range(1_000)}, durable=True)
        monkeypatch.setattr(View, "scan", counting)
        monkeypatch.setattr(kv_changes, "_part", noting)
        table.delete_range(b"0010", b"0990", durable=True)
        assert at_parts[0] < 100
        assert len(at_parts) > 20
        with store.batch() as batch:  # ranges that overlap, and a key that is written again
            batch.kv("t").delete_range(b"0000", b"0005")
            batch.kv("t").delete_range(b"0003", b"0008")
            batch.kv("t").put(b"0004", b"y")
        monkeypatch.undo()
        assert follow({}, changes_of(store, "t"), preimages=False) == dict(table.scan())


def _counted(act: Any, calls: list[int]) -> Any:
    def counting(self: Any, lsn: int, *rest: Any) -> None:
        calls.append(lsn)
        act(self, lsn, *rest)

    return counting


def test_positions_of_other_tables_and_stores_are_told(path: Path) -> None:
    with penstock.open(str(path)) as store, penstock.connect(str(path)) as client:
        table = store.kv("t", changes=True)
        table.put(b"old", b"1", durable=True)
        last = table.changes().to_arrow()["_commit_version"][-1].as_py()
        store.drop("t")
        table = store.kv("t", changes=True)
        table.put(b"new", b"2", durable=True)
        with store.snapshot() as snapshot:
            for reader in (table, client.kv("t"), snapshot.kv("t")):
                with pytest.raises(NotFound, match="was created at LSN"):
                    reader.changes(after=last).to_arrow()
                assert reader.changes(after=0).to_arrow()["key"].to_pylist() == [b"new"]
                assert reader.changes(after=snapshot.lsn).to_arrow().num_rows == 0
                with pytest.raises(NotFound, match="are not there"):
                    reader.changes(after=snapshot.lsn + 1_000).to_arrow()
        docs = store.vector("docs", dimensions=2, changes=True)
        with pytest.raises(NotFound, match="are not there"):
            docs.changes(after=1 << 40).to_arrow()


def test_a_slow_feed_slows_its_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_simulated(SimulatedDisk()) as store:
        table, other = store.kv("t", changes=True), store.kv("other", changes=True)
        table.put(b"k", b"v", durable=True)
        info = store._ledger.table("t")
        assert info is not None
        trees, feed_id = store._maintenance.trees(), (info.table_id, COMPANION)
        slow = [tree for tree, catalog in trees if (catalog.db_id, catalog.shard) == feed_id]
        stall = Tree.stall

        def behind(self: Tree) -> tuple[Stall, str]:
            return (Stall.STOP, "its files are many") if self in slow else stall(self)

        monkeypatch.setattr(Tree, "stall", behind)
        store._governor.rebalance()
        with pytest.raises(Backpressure, match="its files are many"):
            table.put(b"k", b"w", durable=True)
        other.put(b"k", b"w", durable=True)
        monkeypatch.undo()
        store._governor.rebalance()
        table.put(b"k", b"x", durable=True)


@pytest.mark.parametrize("kind", ["kv", "vector"])
def test_a_feed_that_cannot_be_opened_is_opened_later(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OSError(24, "too many open files")

    with open_simulated(SimulatedDisk()) as store:
        kv = kind == "kv"
        table: Any = store.kv("t", changes=True) if kv else store.vector("t", dimensions=2, changes=True)
        with monkeypatch.context() as broken:
            broken.setattr(kind_changes, "_floor_of", failing)
            for _ in range(2):
                with pytest.raises((OSError, PenstockError), match="too many open files"):
                    table.changes().to_arrow()
        _ = table.put(b"k", b"v", durable=True) if kv else table.upsert(["k"], [[1, 2]], durable=True)
        assert table.changes().to_arrow()["_change_type"].to_pylist() == ["insert"]


def test_an_interrupt_at_any_point_of_a_record_leaves_its_changes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [kind_changes.__file__, kv_changes.__file__, lsm_tree.__file__, memtable.__file__]
    monkeypatch.setattr(interrupts, "_CODE", tuple(map(str, files)))
    clock, rows, last, points = FakeClock(), dict[bytes, Any](), 0, 0
    with open_simulated(SimulatedDisk(), clock) as store:
        table = store.kv("t", changes=True)
        number = 0

        def act() -> None:
            nonlocal number
            number += 1
            table.put(b"n%d" % (number % 7), b"%d" % number, durable=True)

        def prepare() -> None:
            table.put(b"ttl", b"x", ttl_s=1, durable=True)
            clock.advance(2)

        prepare()
        for _ in every_point(act):
            points += 1
            store.flush()
            take_in_expired(store)
            changes = changes_of(store, "t", last)
            rows, last = follow(rows, changes, preimages=False), changes[-1][0]
            assert rows == dict(table.scan()), interrupts.where[-1]
            prepare()
    assert points > 50


def test_an_interrupt_at_any_point_of_a_record_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends, updates and deletes of samples in turn, each interrupted anywhere in what computes and records them."""
    files = [kind_changes.__file__, series_changes.__file__]
    monkeypatch.setattr(interrupts, "_CODE", tuple(map(str, files)))
    rows, last, points, number = dict[Any, float](), 0, 0, 0
    with open_simulated(SimulatedDisk()) as store:
        table = store.series("s", options=penstock.SeriesOptions(bucket_s=300), changes=True)

        def act() -> None:
            nonlocal number
            number += 1
            if number % 5 == 4:
                table.delete('{host="a"}', start=0, end=10**9, durable=True)
            times = [number * 10**7, number * 10**7 + 1] if number % 3 else [10**7, 2 * 10**7]
            table.write_columns("cpu", [1.0, float(number)], {"host": "ab"[number % 2]}, times=times, durable=True)

        for _ in every_point(act):
            points += 1
            store.flush()
            changes = table.changes(after=last).to_arrow().to_pylist()
            for row in changes:
                key, kind = (dict(row["labels"])["host"], row["time"]), row["_change_type"]
                assert (key in rows) == (kind != "insert"), interrupts.where[-1]
                last = row["_commit_version"]
                if kind == "delete":
                    del rows[key]
                else:
                    rows[key] = row["value"]
            now = {(dict(row["labels"])["host"], row["time"]): row["value"] for row in table.to_arrow().to_pylist()}
            assert rows == now, interrupts.where[-1]
    assert points > 50


def test_a_commit_of_very_many_series_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample shows the labels of its series: a part has as many as a reader can hold."""
    monkeypatch.setattr(series_changes, "SHOWN_BYTES_MAX", 20_000)
    with open_simulated(SimulatedDisk()) as store:
        table = store.series("s", changes=True)
        hosts = [f"{number}" + "x" * 500 for number in range(200)]
        columns = {"metric": ["cpu"] * 200, "host": hosts, "time": [5] * 200, "value": [1.0] * 200}
        table.write_arrow(pa.table(columns), durable=True)
        state: Any = store.port.machine(next(iter(table._partitions))).snapshot()
        parts = list(state.feed.parts(1, 1 << 60))
        state.close()
        assert len(parts) >= 5
        assert sorted(dict(row)["host"] for row in table.changes().to_arrow()["labels"].to_pylist()) == sorted(hosts)


def test_a_rollup_has_a_feed_too(path: Path) -> None:
    with penstock.open(str(path), settings=penstock.StoreSettings(background=False)) as store:
        cpu = store.series("cpu")
        options = penstock.SeriesOptions(rollup=penstock.Rollup(source="cpu", step_s=60))
        rollup = store.series("cpu_1m", options=options, changes=True)
        cpu.write_columns("cpu", [1.0, 2.0], times=[1, 2], durable=True)
        store.roll_up("cpu_1m")
        cpu.write("cpu", 7.0, time=3, durable=True)
        store.roll_up("cpu_1m")
        rows = {(row["metric"], row["time"]): row["value"] for row in rollup.to_arrow().to_pylist()}
        fed = {(row["metric"], row["time"]): row["value"] for row in rollup.changes().to_arrow().to_pylist()}
        assert fed == rows
        assert len(rows) == 5
        assert "update_postimage" in rollup.changes().to_arrow()["_change_type"].to_pylist()


def test_readers_writers_conditions_and_maintenance_at_once(path: Path) -> None:
    """Every reader sees whole commits in order; conditions are judged although the shard is always being written."""
    failures: list[BaseException] = []
    ended, reads = threading.Event(), list[int]()
    with penstock.open(str(path)) as store:
        store.kv("a", shards=2, changes=True)
        store.kv("b", changes=True)
        store.kv("c", changes=penstock.ChangeOptions(preimages=True))

        def until_end(act: Any) -> None:
            try:
                while not ended.is_set():
                    act()
            except BaseException as error:
                failures.append(error)
                ended.set()

        def write() -> None:
            chance = random.randrange(1_000)
            with store.batch() as batch:
                for key in range(5):
                    batch.kv("a").put(b"%d.%d" % (chance, key), b"%d" % chance)
                batch.kv("b").put(b"%d" % chance, b"x")
                batch.kv("c").put(b"%d" % chance, b"x")
            pace()

        def pace() -> None:
            if store.statistics().durable_lsn > 1_000:  # each read takes the whole feed: it must not outgrow them
                ended.wait(0.05)

        def read() -> None:
            with store.snapshot() as snapshot:
                a = snapshot.kv("a").changes().to_arrow()
                b = snapshot.kv("b").changes().to_arrow()
                rows = dict(snapshot.kv("a").scan())
            columns = a.to_pydict()
            changes = zip(
                columns["_commit_version"], columns["_change_type"], columns["key"], columns["value"], strict=True
            )
            assert follow({}, changes, preimages=False) == rows
            assert set(columns["_commit_version"]) == set(b["_commit_version"].to_pylist()), "half a batch"
            reads.append(a.num_rows)

        def maintain() -> None:
            store_all(store)
            for name in ("a", "b", "c"):
                store.compact(name)

        workers = [threading.Thread(target=until_end, args=(act,)) for act in (write, write, read, maintain)]
        for worker in workers:
            worker.start()
        table, lsn, judged = store.kv("c"), 0, 0
        while not ended.is_set() and (judged < 10 or len(reads) < 10):
            try:
                table.put(b"counted", b"%d" % judged, if_lsn=lsn)
            except PenstockError as error:
                failures.append(error)
                break
            row = table.get_row(b"counted")
            assert row is not None
            lsn, judged = row.lsn, judged + 1
            pace()
        ended.set()
        for worker in workers:
            worker.join()
        assert failures == []
        refused = [row for row in table.changes().to_arrow().to_pylist() if row["key"] == b"counted"]
        assert [row["value"] for row in refused if row["_change_type"] != "update_preimage"] == [
            b"%d" % number for number in range(judged)
        ]
