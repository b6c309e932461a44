from __future__ import annotations

import itertools
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lsm_files import STORE, ModelRows, puts, write

from penstock.archive.chunk import ChunkIdentity
from penstock.errors import Closed, CorruptionError, Invalid
from penstock.lsm import merge as merge_module
from penstock.lsm.index import homes_for
from penstock.lsm.merge import MergeInput, MergePlan, merge, outputs_max, slices, sstable_path
from penstock.lsm.operators import ADD_I64, APPEND, MAX_I64, UNION, fold, union_of
from penstock.lsm.order import Keys, shared_prefix, sort
from penstock.lsm.ranges import RangeDelete, RangeDeletes
from penstock.lsm.rows import DELETE, MERGE, NEVER, PUT, Columns, binary_column
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import SstableWriter
from penstock.testing.disk import SimulatedDisk

NOW = 1_000

# Keys that tie: NULs at the end, long shared parts, lengths around the word size.
parts = st.sampled_from([b"", b"\0", b"\0\0", b"a", b"b", b"\xff", b"tenant-1/", b"tenant-2/", b"12345678", b"1234567"])
keys_strategy = st.lists(parts, min_size=1, max_size=5).map(b"".join)


def values_for(kind: int) -> st.SearchStrategy[bytes]:
    if kind in (ADD_I64, MAX_I64):
        return st.integers(-(2**63), 2**63 - 1).map(lambda n: n.to_bytes(8, "little", signed=True))
    if kind == UNION:
        return st.sets(st.binary(max_size=2), max_size=3).map(union_of)
    if kind == DELETE:
        return st.just(b"")
    return st.binary(max_size=9)


def row_strategy(lsn: int) -> st.SearchStrategy[tuple[int, bytes, int, int]]:
    kinds = st.sampled_from([PUT, PUT, PUT, DELETE, ADD_I64, ADD_I64, MAX_I64, APPEND, UNION])
    expiry = st.sampled_from([NEVER, NEVER, NEVER, NOW, NOW + 1, 5])
    return kinds.flatmap(lambda kind: st.tuples(st.just(kind), values_for(kind), st.just(lsn), expiry))


@st.composite
def runs_strategy(draw: Any) -> list[tuple[ModelRows, list[RangeDelete]]]:
    """Runs, newest first, with their range deletes; LSNs fall from run to run."""
    count = draw(st.integers(1, 5))
    runs = []
    for n in range(count):
        lsn = (count - n) * 10
        rows = draw(st.dictionaries(keys_strategy, row_strategy(lsn), max_size=12))
        ranges = draw(st.lists(st.tuples(keys_strategy, keys_strategy, st.integers(lsn - 3, lsn + 3)), max_size=2))
        runs.append((rows, [piece for piece in ranges if piece[0] < piece[1]]))
    return [run for run in runs if run[0] or run[1]]


def read(runs: list[tuple[ModelRows, list[RangeDelete]]], key: bytes, now: int) -> bytes | None:
    """What a reader finds, by the definition: newest to oldest, operands collected until something ends the chain."""
    row: tuple[int, bytes] | None = None
    chain: list[tuple[int, bytes]] = []
    expires = NEVER
    over = max([n for _, ranges in runs for a, b, n in ranges if a <= key < b], default=0)
    for rows, _ in runs:
        if key not in rows:
            continue
        kind, value, lsn, expiry = rows[key]
        if lsn < over or expiry <= now:
            break
        if expires == NEVER:
            expires = expiry
        chain.append((kind, value))
        if kind < MERGE:
            break
    if not chain:
        return None
    for newer in reversed(chain):
        row = fold(row, newer)
    assert row is not None
    return None if row[0] == DELETE else row[1]


def run_of(table: Sstable) -> tuple[ModelRows, list[RangeDelete]]:
    rows: ModelRows = {}
    for piece in table.scan():
        rows.update(zip(piece.keys, piece.rows(), strict=True))
    return rows, list(table.range_deletes)


def write_runs(fs: SimulatedDisk, runs: list[tuple[ModelRows, list[RangeDelete]]]) -> tuple[MergeInput, ...]:
    for number, (rows, ranges) in enumerate(runs):
        write(fs, f"/{number}.sst", rows, ranges=ranges)
    return tuple(MergeInput(path=f"/{number}.sst") for number in range(len(runs)))


def plan_of(inputs: tuple[MergeInput, ...], **changes: Any) -> MergePlan:
    whole: dict[str, Any] = {
        "inputs": inputs, "folder": "/", "store": STORE, "chunk_ids": tuple(range(100, 200)), "now_us": NOW,
    }  # fmt: skip
    return MergePlan(**(whole | changes))


@given(runs=runs_strategy(), older=runs_strategy(), tiny=st.booleans(), output_bytes=st.sampled_from([1, 40, 1 << 20]))
@settings(max_examples=150, deadline=None)
def test_a_merge_changes_nothing_a_reader_sees(
    runs: list[tuple[ModelRows, list[RangeDelete]]],
    older: list[tuple[ModelRows, list[RangeDelete]]],
    tiny: bool,
    output_bytes: int,
) -> None:
    if not runs:
        return
    # Everything below is older than everything merged.
    lift = 10 * (len(older) + 2)
    runs = [
        (
            {key: (kind, value, lsn + lift, expiry) for key, (kind, value, lsn, expiry) in rows.items()},
            [(a, b, n + lift) for a, b, n in ranges],
        )
        for rows, ranges in runs
    ]
    disk = SimulatedDisk()
    inputs = write_runs(disk, runs)
    everywhere = sorted(
        {key for rows, ranges in runs + older for key in [*rows, *(r[0] for r in ranges)]} | {b"", b"~"}
    )
    slice_rows = merge_module.SLICE_ROWS
    merge_module.SLICE_ROWS = 3 if tiny else slice_rows
    try:
        done = merge(plan_of(inputs, output_bytes=output_bytes), fs=disk)
        middle = [run_of(Sstable.open(sstable_path("/", s.chunk_id), fs=disk)) for s in done]
        bottom = merge(
            plan_of(inputs, bottom=True, lsn_floor=1 << 60, folder="/", chunk_ids=tuple(range(300, 400))), fs=disk
        )
    finally:
        merge_module.SLICE_ROWS = slice_rows
    for first, second in itertools.pairwise(done):
        assert first.end <= second.start
    low = [run_of(Sstable.open(sstable_path("/", s.chunk_id), fs=disk)) for s in bottom]
    for key in everywhere:
        assert read(middle + older, key, NOW) == read(runs + older, key, NOW)
        assert read(low, key, NOW) == read(runs, key, NOW)
    for rows, ranges in low:
        assert not ranges
        assert all(kind == PUT and expires > NOW for kind, _, _, expires in rows.values())


@given(keys=st.lists(keys_strategy | st.binary(max_size=20), min_size=1, max_size=200))
@settings(max_examples=300, deadline=None)
def test_the_order_of_keys_is_that_of_bytes(keys: list[bytes]) -> None:
    order, same = sort(Keys.of([binary_column(keys)]), shared_prefix(min(keys), max(keys)))
    expected = sorted(range(len(keys)), key=lambda i: keys[i])
    assert order.tolist() == expected
    assert same.tolist() == [i > 0 and keys[expected[i]] == keys[expected[i - 1]] for i in range(len(keys))]


def test_deletes_stay_above_the_bottom_and_at_or_above_the_floor() -> None:
    disk = SimulatedDisk()
    rows: ModelRows = {b"a": (DELETE, b"", 5, NEVER), b"b": (DELETE, b"", 9, NEVER), b"c": (PUT, b"x", 5, 10)}
    inputs = write_runs(disk, [(rows, [(b"k", b"m", 5), (b"p", b"q", 9)])])
    (upper,) = merge(plan_of(inputs), fs=disk)
    assert (upper.deletes, upper.expiring, upper.range_deletes) == (2, 1, 2)
    (bottom,) = merge(plan_of(inputs, bottom=True, lsn_floor=9, chunk_ids=(300,)), fs=disk)
    rows, ranges = run_of(Sstable.open(sstable_path("/", 300), fs=disk))
    assert list(rows) == [b"b"]
    assert ranges == [(b"p", b"q", 9)]
    assert bottom.rows == 2


def test_a_merge_of_nothing_but_old_deletes_writes_no_file() -> None:
    disk = SimulatedDisk()
    inputs = write_runs(disk, [({b"a": (DELETE, b"", 5, NEVER)}, [])])
    assert merge(plan_of(inputs, bottom=True, lsn_floor=10), fs=disk) == ()
    assert sorted(disk.listdir("/")) == ["0.idx", "0.sst"]


def test_an_adopted_file_takes_the_lsn_of_its_record() -> None:
    disk = SimulatedDisk()
    write_runs(disk, [(puts({b"a": b"new"}, 0), []), ({}, [(b"a", b"b", 5)])])
    inputs = (MergeInput(path="/0.sst", lsn=7), MergeInput(path="/1.sst"))
    (done,) = merge(plan_of(inputs), fs=disk)
    rows, _ = run_of(Sstable.open(sstable_path("/", done.chunk_id), fs=disk))
    assert rows == {b"a": (PUT, b"new", 7, NEVER)}


def test_a_key_range_alone_is_merged() -> None:
    disk = SimulatedDisk()
    inputs = write_runs(disk, [(puts({bytes([i]): b"v" for i in range(50)}), [(b"\x05", b"\x30", 9)])])
    merge(plan_of(inputs, start=b"\x04", end=b"\x08"), fs=disk)
    rows, ranges = run_of(Sstable.open(sstable_path("/", 100), fs=disk))
    assert list(rows) == [b"\x04"]
    assert ranges == [(b"\x05", b"\x08", 9)]


def test_numbers_are_folded_alike_by_numpy_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def number(n: int) -> bytes:
        return n.to_bytes(8, "little", signed=True)

    disk = SimulatedDisk()
    runs: list[tuple[ModelRows, list[RangeDelete]]] = [
        ({b"%04d" % i: (ADD_I64, number(i * run), 10 - run, NEVER) for i in range(500) if i % (run + 1) == 0}, [])
        for run in range(4)
    ]
    runs.append((puts({b"%04d" % i: number(2**63 - 1 - i) for i in range(0, 500, 3)}), []))
    inputs = write_runs(disk, runs)
    merge(plan_of(inputs), fs=disk)
    fast = run_of(Sstable.open(sstable_path("/", 100), fs=disk))
    monkeypatch.setattr("penstock.lsm.operand_fold._numeric", lambda work: np.zeros(len(work.start), np.bool_))
    merge(plan_of(inputs, chunk_ids=(300,)), fs=disk)
    assert fast == run_of(Sstable.open(sstable_path("/", 300), fs=disk))


def test_large_values_of_one_key_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.lsm.order._JOIN_BYTES_MAX", 100)
    disk = SimulatedDisk()
    runs: list[tuple[ModelRows, list[RangeDelete]]] = [
        (puts({b"k%02d" % i: bytes([run]) * (i * 7) for i in range(run, 40, run + 1)}, 9 - run), []) for run in range(4)
    ]
    inputs = write_runs(disk, list(runs))
    merge(plan_of(inputs), fs=disk)
    rows, _ = run_of(Sstable.open(sstable_path("/", 100), fs=disk))
    assert {key: row[1] for key, row in rows.items()} == {
        key: read(list(runs), key, 0) for run in runs for key in run[0]
    }


def test_slices_are_bounded_by_rows_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_module, "SLICE_ROWS", 1_000)
    monkeypatch.setattr(merge_module, "SLICE_BYTES", 50_000)
    disk = SimulatedDisk()
    tables = []
    for run in range(4):
        rows = puts({b"%06d" % i: bytes(5_000 if i < 40 else 8) for i in range(run, 4_000, 2)})
        write(disk, f"/{run}.sst", rows)
        tables.append(Sstable.open(f"/{run}.sst", fs=disk))
    cuts = list(slices(tables, b"", None))
    assert [a for a, _ in cuts[1:]] == [b for _, b in cuts[:-1]]
    for low, high in cuts:
        pieces = [piece for table in tables for piece in table.scan(low, high)]
        assert sum(len(piece.keys) for piece in pieces) <= 1_500
        assert sum(len(value) for piece in pieces for value in piece.values) <= 100_000


def test_a_merge_that_stops_or_fails_leaves_no_file() -> None:
    disk = SimulatedDisk()
    inputs = write_runs(disk, [(puts({b"%05d" % i: bytes(40) for i in range(10_000)}), [])])
    before = sorted(disk.listdir("/"))
    with pytest.raises(Closed):
        merge(plan_of(inputs), fs=disk, stop=lambda: True)
    disk.flip("/0.sst", 8 * 200_000)
    with pytest.raises(CorruptionError):
        merge(plan_of(inputs), fs=disk)
    assert sorted(disk.listdir("/")) == before


def test_too_few_chunk_ids_are_refused() -> None:
    disk = SimulatedDisk()
    slice_rows, merge_module.SLICE_ROWS = merge_module.SLICE_ROWS, 10
    try:
        rows = puts({b"%05d" % i: bytes(40) for i in range(2_000)})
        inputs = write_runs(disk, [(rows, []), (puts({b"00000": b""}), [])])
        with pytest.raises(Invalid, match="outputs_max"):
            merge(plan_of(inputs, chunk_ids=(100,), output_bytes=500), fs=disk)
    finally:
        merge_module.SLICE_ROWS = slice_rows
    assert sorted(disk.listdir("/")) == ["0.idx", "0.sst", "1.idx", "1.sst"]
    assert outputs_max(10, 10) == 1


def test_a_file_ends_before_its_index_would_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """From half its size on: an index whose slots are a quarter full takes as much as one of twice the rows."""
    monkeypatch.setattr(merge_module, "SLICE_ROWS", 10)
    disk = SimulatedDisk()
    rows = puts({b"%08d" % i: bytes(92) for i in range(5_000)})
    inputs = write_runs(disk, [(rows, []), (puts({b"00000000": bytes(92)}), [])])
    most = outputs_max(5_001, 500_100, 100_000)
    summaries = merge(plan_of(inputs, chunk_ids=tuple(range(100, 100 + most)), output_bytes=100_000), fs=disk)
    assert sum(summary.rows for summary in summaries) == 5_000
    assert all(homes_for(summary.rows) == 1_024 for summary in summaries[:-1])
    assert all(summary.rows > 0.9 * 512 for summary in summaries[:-1])


@given(st.lists(keys_strategy, min_size=1, max_size=20))
def test_the_shared_prefix_of_keys(keys: list[bytes]) -> None:
    expected = shared_prefix(min(keys), max(keys))
    assert Keys.of([binary_column(keys)]).shared_prefix() == expected


def _merge_elsewhere(plan: MergePlan) -> list[int]:
    return [summary.rows for summary in merge(plan)]


def test_a_merge_runs_in_a_spawned_process(tmp_path: Path) -> None:
    from penstock.host.os_files import OsFileSystem

    write(OsFileSystem(), f"{tmp_path}/1.sst", puts({b"a": b"1", b"b": b"2"}))
    write(OsFileSystem(), f"{tmp_path}/2.sst", puts({b"b": b"3", b"c": b"4"}, 2))
    plan = plan_of((MergeInput(path=f"{tmp_path}/2.sst"), MergeInput(path=f"{tmp_path}/1.sst")), folder=str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_merge_elsewhere, (plan,)) == [3]
    rows, _ = run_of(Sstable.open(sstable_path(str(tmp_path), 100)))
    assert [row[1] for row in rows.values()] == [b"1", b"3", b"4"]


def test_a_merged_file_has_the_index_of_one_written_at_once() -> None:
    """The hashes that a merge takes over from its inputs are those of the keys."""
    disk = SimulatedDisk()
    older = puts({b"key/%d" % i: b"old" for i in range(0, 3_000, 2)}, lsn=1)
    newer = puts({b"key/%d" % i: b"new" for i in range(0, 3_000, 3)}, lsn=2)
    write(disk, "/1.sst", older, chunk_id=1)
    write(disk, "/2.sst", newer, chunk_id=2)
    merge(plan_of((MergeInput(path="/2.sst"), MergeInput(path="/1.sst"))), fs=disk)
    write(disk, "/whole.sst", {**older, **newer}, chunk_id=100)
    merged = sstable_path(plan_of((MergeInput(path="/2.sst"),)).folder, 100)
    for one, other in ((merged, "/whole.sst"), (merged[:-4] + ".idx", "/whole.idx")):
        size = disk.open(one).size()
        assert disk.open(one).pread(size, 0) == disk.open(other).pread(disk.open(other).size(), 0)


def test_range_deletes_are_cut_and_joined() -> None:
    ranges = RangeDeletes.of([(b"a", b"m", 5), (b"c", b"e", 9), (b"m", b"p", 5), (b"x", b"x", 7)])
    assert list(ranges) == [(b"a", b"c", 5), (b"c", b"e", 9), (b"e", b"p", 5)]
    assert [ranges.lsn_over(key) for key in (b"", b"a", b"c", b"e", b"o", b"p")] == [0, 5, 9, 5, 5, 0]
    assert list(ranges.clip(b"d", b"f")) == [(b"d", b"e", 9), (b"e", b"f", 5)]
    assert list(ranges.at_or_above(6)) == [(b"c", b"e", 9)]


def _anonymous_growth(folder: str, rows: int) -> int:
    """The most anonymous memory that a merge of two files of `rows` rows takes on top, in bytes."""
    from penstock.host.os_files import OsFileSystem

    inputs = []
    for run in range(2):
        writer = SstableWriter(OsFileSystem(), f"{folder}/{run}.sst", ChunkIdentity(store=STORE, chunk_id=run + 1))
        for at in range(0, rows, 4_096):
            keys = [b"%016d" % (2 * i + run) for i in range(at, min(at + 4_096, rows))]
            writer.append(Columns.of(keys, [bytes(100)] * len(keys), run + 1))
        writer.finish()
        inputs.append(MergeInput(path=f"{folder}/{run}.sst"))

    def anonymous() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1_024 for line in lines if line.startswith("RssAnon"))

    most = before = anonymous()
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    merge(plan_of(tuple(inputs), folder=folder))
    done.set()
    watcher.join(10)
    return most - before


@pytest.mark.campaign
def test_memory_follows_the_slice_and_not_the_files(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_anonymous_growth, (str(tmp_path), 2_500_000)) < 300 << 20
