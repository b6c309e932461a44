"""Sections by reference: files built elsewhere, staged, committed under a token, adopted, purged."""

from __future__ import annotations

import random

import pytest
from lsm_files import columns, puts

from penstock.archive.chunk import ChunkIdentity
from penstock.errors import Invalid, NotFound
from penstock.lsm.writer import SstableWriter
from penstock.partition.reference import StagedFile, sealed
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine


def open_here(disk: SimulatedDisk, clock: FakeClock) -> Store:
    settings = StoreSettings(background=False, reserve_bytes=4096)
    return open_store("/s", fs=disk, clock=clock, random=random.Random(1), engine=MemoryEngine, settings=settings)


def build(store: Store, disk: SimulatedDisk, file: StagedFile, pairs: dict[bytes, bytes]) -> StagedFile:
    """What an executor does: only files."""
    identity = ChunkIdentity(store=store.identity, chunk_id=file.chunk_id)
    writer = SstableWriter(disk, f"/s/{file.file_name}", identity)
    writer.append(columns(puts(pairs)))
    writer.finish()
    return sealed(disk, "/s", file)


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_a_load_is_atomic_once_and_in_order(disk: SimulatedDisk, clock: FakeClock) -> None:
    store = open_here(disk, clock)
    table, other = store.kv("t"), store.kv("o")
    table.put(b"a", b"before")
    table.put(b"z", b"kept")
    one, two = store.stage("t", count=2)
    files = [build(store, disk, one, {b"a": b"1", b"b": b"2"}), build(store, disk, two, {b"m": b"3"})]
    with store.batch(token=("load", 1)) as batch:
        batch.adopt("t", files)
        batch.kv("o").put(b"position", b"7")
    assert not batch.duplicate
    table.put(b"b", b"after")
    expected = {b"a": b"1", b"b": b"after", b"m": b"3", b"z": b"kept"}
    assert dict(table.scan()) == expected
    assert other[b"position"] == b"7"
    with store.batch(token=("load", 1)) as again:  # the files are not even looked at
        again.adopt("t", [StagedFile(1, "nowhere.sst")])
    assert again.duplicate
    store.flush()
    store.close()
    store = open_here(disk, clock)
    assert dict(store.kv("t").scan()) == expected
    store.compact("t")
    assert dict(store.kv("t").scan()) == expected
    store.close()


def test_a_record_that_was_not_adopted_before_a_crash_is_adopted_after_it(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_here(disk, clock)
    store.kv("t")
    file = build(store, disk, store.stage("t", lease_s=1.0)[0], {b"a": b"1"})
    monkeypatch.setattr(type(store._maintenance), "adopt", _fail)
    with store.batch(token=("load", 1)) as batch:
        batch.adopt("t", [file])  # durable and accepted; its adoption fails, as a crash might make it
    monkeypatch.undo()
    clock.advance(100)
    assert store._staging.purge([store._info("t").table_id]) == 0  # a record names it
    disk = disk.image().restore("strict")
    store = open_here(disk, clock)
    assert dict(store.kv("t").scan()) == {b"a": b"1"}
    with store.batch(token=("load", 1)) as again:
        again.adopt("t", [file])
    assert again.duplicate


def _fail(*_: object) -> None:
    raise OSError("the disk is away")


def test_files_that_are_not_what_was_handed_in_are_refused(disk: SimulatedDisk, clock: FakeClock) -> None:
    store = open_here(disk, clock)
    store.kv("t")
    first, unbuilt = store.stage("t", count=2)
    good = build(store, disk, first, {b"a": b"1"})

    def commit(*files: StagedFile) -> None:
        with store.batch(token=("load", 1)) as batch:
            batch.adopt("t", files)

    with pytest.raises(Invalid, match="was not built"):
        commit(unbuilt)
    with pytest.raises(Invalid, match="size and hash"):
        commit(StagedFile(good.chunk_id, good.file_name, good.size_bytes, bytes(32)))
    with pytest.raises(Invalid, match="not staged"):
        commit(StagedFile(999, good.file_name, good.size_bytes, good.digest))
    with pytest.raises(NotFound):
        store.stage("nothing")
    with pytest.raises(Invalid, match="from 0 to 0"):
        store.stage("t", 1)
    disk.flip(f"/s/{good.file_name}", 999)
    with pytest.raises(Invalid, match="size and hash"):
        commit(good)
    assert dict(store.kv("t").scan()) == {}


def test_files_that_overlap_are_runs_of_one_lsn(disk: SimulatedDisk, clock: FakeClock) -> None:
    """As tasks that do not know of each other build them: the newest id wins, before and after everything."""
    store = open_here(disk, clock)
    table = store.kv("t")
    table.put(b"a", b"old", durable=True)
    loads = [{b"a": b"1", b"c": b"1"}, {b"b": b"2", b"c": b"2"}, {b"d": b"3"}]
    with store.batch(token=("load", 1)) as batch:
        for file, rows in zip(store.stage("t", count=3), loads, strict=True):
            batch.adopt("t", [build(store, disk, file, rows)])
    expected = {b"a": b"1", b"b": b"2", b"c": b"2", b"d": b"3"}
    assert dict(table.scan()) == expected
    store.close()
    store = open_here(disk, clock)
    assert dict(store.kv("t").scan()) == expected
    assert store.kv("t").get(b"c") == b"2"
    store.compact("t")
    assert dict(store.kv("t").scan()) == expected


def test_what_nobody_commits_is_purged_when_its_time_is_over(disk: SimulatedDisk, clock: FakeClock) -> None:
    store = open_here(disk, clock)
    store.kv("t")
    table = store._info("t").table_id
    file = build(store, disk, store.stage("t", lease_s=100)[0], {b"a": b"1"})
    clock.advance(99)
    assert store._staging.purge([table]) == 0
    clock.advance(2)
    assert store._staging.purge([table]) == 1
    store._collector.collect()
    clock.advance(61)
    store._collector.collect()
    assert not disk.exists(f"/s/{file.file_name}")
    with pytest.raises(Invalid, match="not staged"), store.batch() as batch:
        batch.adopt("t", [file])


def test_several_shards(disk: SimulatedDisk, clock: FakeClock) -> None:
    store = open_here(disk, clock)
    table = store.kv("t", shards=2)
    keys: dict[int, list[bytes]] = {0: [], 1: []}
    for number in range(20):
        key = b"%02d" % number
        keys[table._partitions.index(table._partition(key))].append(key)
    with store.batch(token=("load", 1)) as batch:
        for shard, mine in keys.items():
            file = store.stage("t", shard)[0]
            batch.adopt("t", [build(store, disk, file, dict.fromkeys(mine, b"x"))], shard)
    assert [key for key, _ in table.scan()] == [b"%02d" % number for number in range(20)]
    with store.snapshot() as snapshot:
        assert snapshot.kv("t").to_arrow().num_rows == 20
