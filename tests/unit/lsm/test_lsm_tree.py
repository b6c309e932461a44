from __future__ import annotations

import gc
from collections.abc import Iterator
from operator import is_
from typing import Any

import pytest
from lsm_files import puts, write
from tree_under_test import TreeUnderTest, Write

from penstock.errors import Backpressure, Closed, CommitFailed, CorruptionError, GateShut, Invalid, OutcomeUnknown
from penstock.lsm import merge
from penstock.lsm.compaction import LevelLimits, compact_everything, pick_compaction
from penstock.lsm.memtable import TAIL_KEYS_MAX, Edit, Memtable
from penstock.lsm.rows import NEVER, PUT
from penstock.lsm.tree import Tree
from penstock.lsm.tree_settings import Stall, TreeSettings
from penstock.lsm.version import FileMeta, Run, TableFile
from penstock.lsm.view import prefix_end
from penstock.manifest.jobs import Lease
from penstock.manifest.records import JobKind
from penstock.testing import FakeClock


@pytest.fixture
def shard() -> Iterator[TreeUnderTest]:
    shard = TreeUnderTest(grace_s=30)
    yield shard
    shard.close()


def put(shard: TreeUnderTest, *keys: bytes, value: bytes = b"v") -> None:
    shard.write([Write("put", key, value) for key in keys])


def test_a_snapshot_keeps_its_files_until_it_is_closed(shard: TreeUnderTest) -> None:
    put(shard, b"a", b"b")
    shard.maintenance.flush(shard.tree)
    old = shard.files()
    snapshot = shard.tree.snapshot()
    put(shard, b"a", value=b"new")
    shard.maintenance.flush(shard.tree)
    assert shard.maintenance.compact(shard.tree, everything=True)
    shard.clock.advance(1000)
    shard.collector.collect()
    shard.clock.advance(1000)
    shard.collector.collect()
    assert set(old) <= set(shard.files())  # listed no more, and yet needed
    assert dict(snapshot.scan()) == {b"a": b"v", b"b": b"v"}
    assert {file.meta.file_name.split("/")[-1] for file in snapshot.version.files()} <= set(old)
    snapshot.close()
    del snapshot
    gc.collect()
    assert shard.collector.collect() == 2
    assert not set(old) & set(shard.files())
    assert shard.tree.get(b"a") == b"new"


def test_a_closed_snapshot_says_so(shard: TreeUnderTest) -> None:
    snapshot = shard.tree.snapshot()
    snapshot.close()
    with pytest.raises(Closed, match="take another"):
        snapshot.get(b"a")


def test_a_hundred_snapshots_leave_few_memtables(shard: TreeUnderTest) -> None:
    snapshots = []
    for number in range(100):
        put(shard, b"%03d" % number)
        snapshots.append(shard.tree.snapshot())
    assert len(shard.tree._version.frozen) <= 8
    assert [len(list(snapshot.scan())) for snapshot in snapshots] == list(range(1, 101))


@pytest.mark.parametrize("flushed", [0, 1, 2])
def test_a_scan_of_memtables_holds_a_slice_at_a_time(
    shard: TreeUnderTest, monkeypatch: pytest.MonkeyPatch, flushed: int
) -> None:
    monkeypatch.setattr(merge, "SLICE_ROWS", 400)
    for number in range(4):  # each over what was there before, and between
        put(shard, *(b"%05d" % key for key in range(number, 6_000, 3 + number)), value=b"%d" % number)
        shard.tree.freeze()
        if number < flushed:
            shard.maintenance.flush(shard.tree)
    shard.write([Write("delete", b"%05d" % key) for key in range(0, 6_000, 7)])
    for start, end in ((b"", None), (b"01", b"0357"), (b"02000", b"02000"), (b"9", None)):
        batches = list(shard.tree.scan_arrow(start, end))
        rows = [row for batch in batches for row in batch.to_pylist()]
        assert [(row["key"], row["value"]) for row in rows] == list(shard.tree.scan(start, end))
        assert all(batch.num_rows <= 1_000 for batch in batches)
    large = {b"%02d" % number: bytes(1 << 20) for number in range(30)}
    monkeypatch.setattr(merge, "SLICE_BYTES", 4 << 20)
    for key, value in large.items():
        put(shard, b"x" + key, value=value)
    sizes = [batch.nbytes for batch in shard.tree.scan_arrow(b"x")]
    assert sum(sizes) >= 30 << 20
    assert max(sizes) <= 8 << 20


def test_unlisted_files_go_after_their_grace(shard: TreeUnderTest) -> None:
    put(shard, b"a")
    shard.maintenance.flush(shard.tree)
    listed = shard.files()
    shard.disk.create("/store/tables/1/00000000000000000999.sst")
    shard.disk.create("/store/tables/1/00000000000000000999.idx.tmp")
    shard.disk.create("/store/tables/1/notes.txt")
    assert shard.collector.collect() == 0
    shard.clock.advance(29)
    assert shard.collector.collect() == 0
    shard.clock.advance(2)
    assert shard.collector.collect() == 2
    assert shard.files() == sorted([*listed, "notes.txt"])


def test_a_file_being_published_is_not_collected(shard: TreeUnderTest) -> None:
    shard.tree.use.announce([77])
    shard.disk.create("/store/tables/1/00000000000000000077.sst")
    shard.collector.collect()
    shard.clock.advance(100)
    assert shard.collector.collect() == 0
    shard.tree.use.withdraw([77])
    shard.collector.collect()
    shard.clock.advance(100)
    assert shard.collector.collect() == 1


def test_adopted_files_are_the_newest_run(shard: TreeUnderTest) -> None:
    put(shard, b"a", b"m", b"z", value=b"old")
    ids = [int(shard.manifest.reserve_chunk_id()) for _ in range(2)]
    write(shard.disk, f"/store/tables/1/{ids[0]:020d}.sst", puts({b"a": b"adopted"}, lsn=999), chunk_id=ids[0])
    write(shard.disk, f"/store/tables/1/{ids[1]:020d}.sst", puts({b"m": b"adopted"}, lsn=999), chunk_id=ids[1])
    shard.maintenance.adopt(shard.tree, ids, lsn=10, time_us=shard.clock.time_us())
    assert shard.tree.lsn == shard.tree.stored == 10
    put(shard, b"m", value=b"newer")
    expected = {b"a": b"adopted", b"m": b"newer", b"z": b"old"}
    assert dict(shard.tree.scan()) == expected
    row = shard.tree.get_row(b"a")
    assert row is not None
    assert row[2] == 10  # the record's LSN stands for the column's
    shard.maintenance.flush(shard.tree)
    shard.reopen()
    assert dict(shard.tree.scan()) == expected
    shard.maintenance.compact(shard.tree, everything=True)
    shard.reopen()
    assert dict(shard.tree.scan()) == expected
    with pytest.raises(Invalid, match="applied already"):
        shard.maintenance.adopt(shard.tree, ids, lsn=5, time_us=0)


def test_adopted_files_may_overlap(shard: TreeUnderTest) -> None:
    ids = [int(shard.manifest.reserve_chunk_id()) for _ in range(2)]
    for chunk_id in ids:
        rows = puts({b"a": b"%d" % chunk_id, b"b": b"2"})
        write(shard.disk, f"/store/tables/1/{chunk_id:020d}.sst", rows, chunk_id=chunk_id)
    shard.maintenance.adopt(shard.tree, ids, lsn=10, time_us=0)
    assert shard.tree.statistics().level0_runs == 2
    expected = {b"a": b"%d" % ids[1], b"b": b"2"}  # the higher number counts
    assert dict(shard.tree.scan()) == expected
    shard.reopen()
    assert dict(shard.tree.scan()) == expected


def test_adopted_files_must_be_ours(shard: TreeUnderTest) -> None:
    write(shard.disk, "/store/tables/1/00000000000000000500.sst", puts({b"a": b"1"}), chunk_id=501)
    with pytest.raises(Invalid, match="another id"):
        shard.maintenance.adopt(shard.tree, [500], lsn=10, time_us=0)
    assert shard.tree.lsn == 0


def test_a_flush_takes_the_oldest_memtables_that_make_one(shard: TreeUnderTest) -> None:
    """A flush of all that waits would take as much memory again."""
    size = shard.tree.settings.memtable_bytes
    for number, part in enumerate((0.4, 0.4, 0.4, 1.5, 0.1)):
        put(shard, b"%d" % number, value=bytes(int(size * part)))
        shard.tree.freeze()
    taken: list[int] = []
    while shard.tree.has_unflushed():
        shard.maintenance.request_flush(shard.tree)
        assert shard.maintenance.run(JobKind.FLUSH) == 1
        taken.append(shard.tree.stored)
    assert taken == [2, 3, 4, 5]  # the first two together
    assert len(dict(shard.tree.scan())) == 5


def test_what_waits_after_a_flush_is_asked_for(shard: TreeUnderTest) -> None:
    woken: list[str] = []
    tree = Tree([], lambda meta: pytest.fail("no file is opened"), clock=FakeClock(), wake=woken.append)
    for lsn in (1, 2):
        tree.apply(Edit(lsn=lsn, time_us=0, rows={b"k": (PUT, bytes(tree.settings.memtable_bytes), lsn, NEVER)}))
    woken.clear()
    work = tree.begin_flush()
    assert work is not None
    tree.end_flush(work[1], [], 0)
    assert woken == ["flush"]


def test_a_crash_in_flight_shuts_the_gate_until_it_is_repaired(shard: TreeUnderTest) -> None:
    put(shard, b"a")
    shard.tree.freeze()
    shard.maintenance.request_flush(shard.tree)
    lease = shard.jobs.acquire("doomed")
    assert lease is not None
    chunk_id = int(shard.manifest.reserve_chunk_id())
    writer = shard.maintenance._files.writer(shard.maintenance.trees()[0][1], chunk_id)
    writer.append(shard.tree._version.frozen[0].columns())
    writer.finish()  # ... and the process dies before it could commit
    shard.reopen()
    left = {"00000000000000000001.idx", "00000000000000000001.sst"}
    assert set(shard.files()) == left
    assert shard.jobs.gate(1, 1).is_shut()
    shard.maintenance.flush(shard.tree)  # does the repair first
    assert not shard.jobs.gate(1, 1).is_shut()
    assert shard.tree.stored == 1
    assert shard.collector.collect() == 2
    assert not left & set(shard.files())


def test_a_repair_fails_while_a_listed_file_is_missing_and_each_opening_tries_again(shard: TreeUnderTest) -> None:
    put(shard, b"a")
    shard.maintenance.flush(shard.tree)
    put(shard, b"b")
    shard.tree.freeze()
    shard.maintenance.request_flush(shard.tree)
    assert shard.jobs.acquire("doomed") is not None
    missing = next(name for name in shard.files() if name.endswith(".sst"))
    shard.disk.rename(f"/store/tables/1/{missing}", f"/store/tables/1/{missing}.away")
    for opening in range(7):
        shard.reopen()
        if opening % 2:
            shard.maintenance.close_tree(1, 0)  # as in a store, where a table is opened on its first use
        with pytest.raises(CorruptionError, match=missing):
            shard.maintenance.run(JobKind.FLUSH)
        shard.clock.advance(1000)
    assert shard.jobs.gate(1, 1).is_shut()
    shard.disk.rename(f"/store/tables/1/{missing}.away", f"/store/tables/1/{missing}")
    shard.reopen()
    shard.maintenance.flush(shard.tree)
    assert shard.tree.stored == 2


def test_a_flush_that_cannot_be_done_says_so(shard: TreeUnderTest) -> None:
    put(shard, b"a")
    shard.disk._faults = {shard.disk.operations + 12: "eio"}
    with pytest.raises(OSError, match="simulated"):
        shard.maintenance.flush(shard.tree)
    with pytest.raises(GateShut, match="simulated eio"):  # it waits for its next attempt
        shard.maintenance.flush(shard.tree)
    shard.clock.advance(60)
    shard.maintenance.flush(shard.tree)
    assert shard.tree.stored == 1


def test_an_unknown_outcome_is_found_out(shard: TreeUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that happened, or did not, without saying so: nothing is flushed twice."""
    complete = shard.jobs.complete
    for happens in (True, False):
        shard.write([Write("add_i64", b"n", (1).to_bytes(8, "little"))])

        def unsure(lease: Lease, also: Any = (), happens: bool = happens) -> None:
            if happens:
                complete(lease, also)
            raise OutcomeUnknown("who knows")

        monkeypatch.setattr(shard.jobs, "complete", unsure)
        if happens:
            shard.maintenance.flush(shard.tree)
        else:
            with pytest.raises(CommitFailed):
                shard.maintenance.flush(shard.tree)
        monkeypatch.setattr(shard.jobs, "complete", complete)
    shard.clock.advance(100)
    shard.maintenance.flush(shard.tree)
    shard.reopen()
    shard.maintenance.compact(shard.tree, everything=True)
    assert shard.tree.get(b"n") == (2).to_bytes(8, "little")


def test_a_tree_is_not_closed_under_a_flush(shard: TreeUnderTest) -> None:
    with shard.maintenance._at_work(1, 0), pytest.raises(GateShut, match="goes on"):
        shard.maintenance.close_tree(1, 0, timeout_s=0.01)


def test_files_outlive_a_lease_after_an_opening(shard: TreeUnderTest) -> None:
    for number in range(2):
        put(shard, b"%d" % number)
        shard.maintenance.flush(shard.tree)
    shard.collector.readers.expect(1.0)  # less than the grace
    shard.reopen()
    shard.maintenance.compact(shard.tree, everything=True)
    gc.collect()
    assert shard.collector.collect() == 0
    shard.clock.advance(31)
    assert shard.collector.collect() == 4


def compacted(shard: TreeUnderTest) -> None:
    put(shard, b"%d" % shard.tree.lsn)
    shard.maintenance.flush(shard.tree)
    shard.maintenance.compact(shard.tree, everything=True)
    gc.collect()


def test_the_longest_lease_is_waited_for_after_an_opening(shard: TreeUnderTest) -> None:
    put(shard, b"first")
    shard.maintenance.flush(shard.tree)
    shard.collector.readers.expect(3_600.0)  # somebody elsewhere was told names of files
    shard.collector.readers.expect(60.0)
    named = set(shard.files())
    shard.reopen()
    compacted(shard)
    shard.clock.advance(3_599)
    shard.collector.collect()
    assert named <= set(shard.files())
    shard.collector.readers.keep(lambda: 0.0)  # too early: who came before the opening may be there
    named = set(shard.files())
    shard.reopen()  # which does not begin to wait anew
    compacted(shard)
    shard.clock.advance(60)  # what a record lasts longer than its leases
    shard.collector.collect()
    assert named <= set(shard.files())
    shard.clock.advance(6)
    assert shard.collector.collect() > 0
    shard.clock.advance(31)  # what is found by its name alone waits for its grace
    shard.collector.collect()
    assert not named & set(shard.files())
    shard.collector.readers.keep(lambda: 0.0)
    named = set(shard.files())
    shard.reopen()
    compacted(shard)
    shard.clock.advance(31)
    assert shard.collector.collect() > 0
    assert not named & set(shard.files())


def test_expiry_in_a_compaction_is_judged_by_what_is_stored(shard: TreeUnderTest) -> None:
    """A record that is only in memory may be replayed, and must find then what it found the first time."""
    now_us = shard.clock.time_us()
    shard.write([Write("put", b"k", b"base", now_us + 10_000_000)])
    shard.maintenance.flush(shard.tree)
    shard.write([Write("append", b"k", b"+x", now_us + 99_000_000)])
    shard.clock.advance(50)
    shard.write([Write("put", b"other", b"")])
    assert shard.tree.get(b"k") == b"base+x"
    shard.maintenance.compact(shard.tree, everything=True)
    shard.reopen()
    assert shard.tree.get(b"k") == b"base+x"


def test_a_range_delete_and_a_put_inside_it_are_never_seen_apart(shard: TreeUnderTest) -> None:
    put(shard, b"k", value=b"old")
    active = shard.tree._version.active
    assert active is not None
    values: list[bytes | None] = []
    add = active._add_ranges
    active._add_ranges = lambda added: (values.append(shard.tree.get(b"k")), add(added))  # type: ignore[method-assign, assignment, func-returns-value]
    shard.write([Write("delete_range", b"a", b"z"), Write("put", b"k", b"new")])
    assert values == [b"new"]
    assert shard.tree.get(b"k") == b"new"


def test_many_range_deletes(shard: TreeUnderTest) -> None:
    for number in range(500):
        put(shard, b"%03d" % number)
        shard.write([Write("delete_range", b"%03d" % number, b"%03d" % (number + 1))])
    put(shard, b"250")
    assert list(shard.tree.scan()) == [(b"250", b"v")]
    shard.maintenance.flush(shard.tree)
    assert list(shard.tree.scan()) == [(b"250", b"v")]


def test_writers_are_slowed_then_stopped() -> None:
    settings = TreeSettings(memtable_bytes=1_000, memtables_slow=2, memtables_stop=4)
    woken: list[str] = []
    tree = Tree([], lambda meta: None, clock=FakeClock(), settings=settings, wake=woken.append)  # type: ignore[arg-type, return-value]

    def fill(lsn: int) -> None:
        tree.apply(Edit(lsn=lsn, time_us=0, rows={b"%d" % lsn: (PUT, b"x" * 900, lsn, NEVER)}))

    fill(1)
    tree.admit()
    assert tree.stall()[0] is Stall.NONE
    fill(2)
    assert tree.stall()[0] is Stall.SLOW
    tree.admit(timeout_s=0.01)
    fill(3)
    fill(4)
    with pytest.raises(Backpressure, match="memtables wait for a flush"):
        tree.admit(timeout_s=0.01)
    assert {"flush", "compaction"} <= set(woken)
    work = tree.begin_flush()
    assert work is not None
    tree.end_flush(work[1], [], 0)
    tree.admit(timeout_s=0.01)


def test_limits() -> None:
    tree = Tree([], lambda meta: None, clock=FakeClock())  # type: ignore[arg-type, return-value]
    tree.apply(Edit(lsn=1, time_us=0))
    with pytest.raises(Invalid, match="comes after"):
        tree.apply(Edit(lsn=1, time_us=0))
    with pytest.raises(Invalid, match="positive"):
        Edit(lsn=0, time_us=0)
    with pytest.raises(Invalid, match="are bytes"):
        tree.scan("text")  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        TreeSettings(memtables_slow=3, memtables_stop=3)
    with pytest.raises(Invalid):
        TreeSettings(level0_slow=1)
    with pytest.raises(Invalid):
        LevelLimits(fanout=1)


# -- the picker


def file(start: str, end: str, level: int, size: int = 100, *, deletes: int = 0) -> TableFile:
    meta = FileMeta(
        chunk_id=1, file_name=f"{level}/{start}", level=level, run=0, start=start.encode(), end=end.encode(), rows=1,
        size_bytes=size, deletes=deletes, lsn_min=1, lsn_max=1, has_ranges=False, expires=False,
    )  # fmt: skip
    return TableFile(meta, lambda meta: None)  # type: ignore[arg-type, return-value]


def names(files: tuple[TableFile, ...]) -> list[str]:
    return [f.meta.file_name for f in files]


LIMITS = LevelLimits(level0_runs=2, level1_bytes=1_000, fanout=10)


def test_nothing_is_picked_while_levels_are_within_their_limits() -> None:
    assert pick_compaction(((),), LIMITS) is None
    level0 = tuple(Run([file("a", "z", 0)]) for _ in range(2))
    assert pick_compaction((level0, (Run([file("a", "m", 1, 1_000)]),)), LIMITS) is None


def test_level_0_goes_whole_with_what_it_overlaps() -> None:
    level0 = tuple(Run([file("d", "f", 0)]) for _ in range(3))
    level1 = Run([file("a", "b", 1), file("c", "e", 1), file("e", "k", 1), file("k", "z", 1)])
    picked = pick_compaction((level0, (level1,)), LIMITS)
    assert picked is not None
    assert names(picked.inputs) == ["0/d", "0/d", "0/d", "1/c", "1/e"]
    assert (picked.target, picked.bottom) == (1, True)
    deeper = Run([file("j", "k", 2)])  # overlaps an input of level 1, though none of level 0
    picked = pick_compaction((level0, (level1,), (deeper,)), LIMITS)
    assert picked is not None
    assert not picked.bottom


def test_a_full_level_gives_the_file_that_costs_least() -> None:
    level1 = Run([file("a", "c", 1, 600), file("c", "e", 1, 600)])
    level2 = Run([file("a", "b", 2, 5_000), file("d", "e", 2, 100)])
    picked = pick_compaction(((), (level1,), (level2,)), LIMITS)
    assert picked is not None
    assert names(picked.inputs) == ["1/c", "2/d"]
    assert (picked.target, picked.bottom) == (2, True)


def test_compacting_everything() -> None:
    assert compact_everything(((),)) is None
    one = Run([file("a", "b", 1)])
    assert compact_everything(((), (one,))) is None
    with_delete = Run([file("a", "b", 1, deletes=1)])
    assert compact_everything(((), (with_delete,))) is not None
    both = compact_everything(((Run([file("a", "b", 0)]),), (one,)))
    assert both is not None
    assert (len(both.inputs), both.target, both.bottom) == (2, 1, True)


# -- memtables


def test_orders_while_the_memtable_grows() -> None:
    memtable = Memtable()
    for lsn in range(1, 40_000):
        key = b"%d" % (lsn * 7919 % 40_000)
        memtable.apply(Edit(lsn=lsn, time_us=0, rows={key: (PUT, b"", lsn, NEVER)}))
        if lsn % 9_000 == 0:
            base, tail = (list(keys) for keys in memtable.orders())
            assert base == sorted(base)
            assert tail == sorted(tail)
            assert sorted(base + tail) == sorted(memtable.rows)
            assert len(tail) <= TAIL_KEYS_MAX
    assert list(memtable.sorted_keys()) == sorted(memtable.rows)
    assert memtable.sorted_keys() is memtable.sorted_keys()


@pytest.mark.parametrize("count", [1, 10_000, 20_000])
def test_a_scan_does_not_sort_again_what_is_sorted(count: int) -> None:
    memtable = Memtable()
    memtable.apply(Edit(lsn=1, time_us=0, puts={b"%d" % (n * 7919 % count): b"" for n in range(count)}))
    orders = memtable.orders()
    assert all(map(is_, memtable.orders(), orders))
    memtable.apply(Edit(lsn=2, time_us=0, puts={b"%d" % n: b"new" for n in range(count)}))  # no new key
    assert all(map(is_, memtable.orders(), orders))
    memtable.put(b"new", b"", 3, 0)
    base, tail = memtable.orders()
    assert base is orders[0]
    assert sorted([*base, *tail]) == sorted(memtable.rows)


@pytest.mark.parametrize(
    ("prefix", "end"), [(b"", None), (b"a", b"b"), (b"a\xff", b"b"), (b"\xff\xff", None), (b"a\xff\xfe", b"a\xff\xff")]
)
def test_prefix_end(prefix: bytes, end: bytes | None) -> None:
    assert prefix_end(prefix) == end


# -- what kinds with columns of their own use


def test_the_values_below_a_key_are_found_without_folding(shard: TreeUnderTest) -> None:
    shard.write([Write("put", b"a", b"0"), Write("append", b"b", b"x")])
    shard.maintenance.flush(shard.tree)
    shard.write([Write("append", b"a", b"1")])
    shard.tree.freeze()
    shard.write([Write("append", b"a", b"2"), Write("delete", b"b"), Write("put", b"c", b"3")])
    values = {key: shard.tree.view.live_values(key) for key in (b"a", b"b", b"c", b"d")}
    assert values == {b"a": [b"2", b"1", b"0"], b"b": [], b"c": [b"3"], b"d": []}
    assert shard.tree.files().live_values(b"a") == [b"0"]
    shard.write([Write("delete_range", b"a", b"b")])
    assert shard.tree.view.live_values(b"a") == []
    shard.write([Write("append", b"a", b"4")])
    assert shard.tree.view.live_values(b"a") == [b"4"]


def test_the_first_key_of_a_range_is_found_in_files_and_memory(shard: TreeUnderTest) -> None:
    view = shard.tree.view
    assert view.first_key(b"", None) is None
    for keys in ((b"c", b"m"), (b"b", b"x")):
        put(shard, *keys)
        shard.maintenance.flush(shard.tree)
    put(shard, b"d", b"k")
    view = shard.tree.view
    first_keys = [
        view.first_key(start, end) for start, end in ((b"", None), (b"c", None), (b"ca", b"k"), (b"ca", b"d"))
    ]
    assert first_keys == [b"b", b"c", b"d", None]
    assert view.first_key(b"y", None) is None
    shard.maintenance.compact(shard.tree, everything=True)
    assert shard.tree.view.first_key(b"e", b"m") == b"k"


class Doubling(Memtable):
    """A memtable that keeps rows of its own until it is flushed."""

    def to_flush(self, files: Any) -> Memtable:
        extra = {key + b"!": (PUT, b"%d" % len(files.live_values(key)), self.lsn_last, NEVER) for key in self.rows}
        return self.with_rows(extra)


def test_a_kind_makes_rows_of_its_columns_when_they_are_flushed(shard: TreeUnderTest) -> None:
    tree = shard.maintenance.open_tree(2, 0, "tables/2", memtable=Doubling)
    for lsn, ranges in ((1, []), (2, [(b"a", b"b")])):
        tree.apply(Edit(lsn=lsn, time_us=0, rows={b"k": (PUT, b"v", lsn, NEVER)}, ranges=ranges))
        assert isinstance(tree.view.memtables()[0], Doubling)
        tree.freeze()
        shard.maintenance.flush(tree)
    assert dict(tree.scan()) == {b"k": b"v", b"k!": b"1"}  # of the second flush: files had one row of it
    shard.maintenance.close_tree(2, 0)
