"""After an opening no file goes that a reader of before may hold: of trees, of queues, of dropped tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from store_model import SETTINGS, open_simulated
from tree_place import Place
from tree_place import Write as WriteToTree

import penstock
from penstock.lsm.collection import CollectionSettings
from penstock.queue.chain import QueueSettings
from penstock.queue.qmft import data_files
from penstock.store.settings import StoreSettings
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk

SMALL = replace(SETTINGS, kinds=(QueueSettings(file_bytes=512, allocate_bytes=64, index_bytes=64),))
LEASE_S = 7_200.0


def maintained(store: Store) -> None:
    store._collector.collect()
    store._tasks.maintain_services()
    store._tasks.retry()


@pytest.mark.parametrize("lease_s", [LEASE_S, 0.0])
def test_files_wait_for_readers_of_before_the_opening(lease_s: float) -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with open_simulated(disk, clock, SMALL) as store:
        queue, doomed = store.queue("q"), store.kv("doomed")
        for number in range(40):
            queue.put(b"%d" % number * 30, durable=True)
        doomed.put(b"a", b"1", durable=True)
        for tree, _ in store._maintenance.trees():
            store._maintenance.flush(tree)
        if lease_s:
            store.readers.expect(lease_s)
    folder = "/store/tables/2/0"
    with open_simulated(disk, clock, SMALL) as store:
        before = list(data_files(disk, folder))
        assert len(before) > 3
        store.queue("q").trim(41, durable=True)
        store.drop("doomed")
        maintained(store)
    with open_simulated(disk, clock, SMALL) as store:
        store.queue("q").bounds()
        maintained(store)
        if lease_s:
            assert list(data_files(disk, folder))[: len(before)] == before
            assert disk.exists("/store/tables/3")
            clock.advance(lease_s)
            maintained(store)
        assert len(list(data_files(disk, folder))) == 1
        assert not disk.exists("/store/tables/3")


def test_leases_of_clients_are_written_down(tmp_path: Path) -> None:
    root, now = tmp_path / "store", StoreSettings(collection=CollectionSettings(grace_s=0.0))
    with penstock.open(root, settings=now) as store:
        client = penstock.connect(root)
        client.snapshot(lease_s=500.0)
        assert store.readers._longest_s == 500.0
        store.close()  # while the client has it
    with penstock.open(root, settings=now) as store:
        assert store.readers._longest_s == 500.0
        assert not store.readers.may_remove()
    with penstock.open(root, settings=now) as store:  # the 500 s are not over: nobody may forget them
        assert not store.readers.may_remove()
    client.close()


def test_leases_that_ended_are_forgotten(tmp_path: Path) -> None:
    root, now = tmp_path / "store", StoreSettings(collection=CollectionSettings(grace_s=0.0))
    with penstock.open(root, settings=now) as store, penstock.connect(root) as client:
        with client.snapshot(lease_s=500.0):
            pass
        assert store.readers._longest_s == 500.0
    with penstock.open(root, settings=now) as store:
        assert store.readers.may_remove()


@pytest.mark.parametrize(("made_before", "lease_s"), [(False, 0.0), (False, 100.0), (True, 0.0), (True, 100.0)])
def test_a_replaced_file_waits_for_readers_of_before_the_opening_alone(made_before: bool, lease_s: float) -> None:
    """Nobody elsewhere has the name of a file that was made since, but through a pin here."""
    place = Place(grace_s=60.0)
    if lease_s:
        place.collector.readers.expect(lease_s)
    if not made_before:
        place.reopen()
    for number in range(2):
        place.write([WriteToTree("put", b"%d" % number, b"v")])
        place.maintenance.flush(place.tree)
    if made_before:
        place.reopen()
    assert place.maintenance.compact(place.tree, everything=True)
    if made_before and lease_s:
        assert place.collector.collect() == 0
        assert len(place.files()) == 6
        place.clock.advance(lease_s)
    assert place.collector.collect() == 4
    assert len(place.files()) == 2
    assert dict(place.tree.scan()) == {b"0": b"v", b"1": b"v"}


@pytest.mark.parametrize("lease_s", [0.0, 100.0])
def test_what_an_earlier_process_left_goes_at_once_and_what_may_be_on_its_way_later(lease_s: float) -> None:
    place = Place(grace_s=60.0)
    if lease_s:
        place.collector.readers.expect(lease_s)
    old = int(place.manifest.reserve_chunk_id())
    place.disk.create(f"/store/tables/1/{old:020d}.sst")
    place.reopen()
    new = int(place.manifest.reserve_chunk_id())
    assert new > old
    place.disk.create(f"/store/tables/1/{new:020d}.sst.tmp")
    assert place.collector.collect() == (0 if lease_s else 1)
    place.clock.advance(61)
    assert place.collector.collect() == 1
    place.clock.advance(lease_s)
    place.collector.collect()
    assert place.files() == []


def test_a_closing_store_removes_what_nobody_needs_unless_a_lease_is_out(tmp_path: Path) -> None:
    for lease_s in (0.0, 500.0):
        root = tmp_path / f"{lease_s:.0f}"
        with penstock.open(root) as store:
            store.kv("t").put(b"k", b"v", durable=True)
            tree, catalog = next(pair for pair in store._maintenance.trees() if pair[1].db_id != 1)
            left = root / catalog.folder / f"{int(store._manifest.reserve_chunk_id()):020d}.sst.tmp"
            left.write_bytes(b"of a merge that was stopped")
            if lease_s:
                store.readers.expect(lease_s)
            assert tree.get(b"k") == b"v"
        assert left.exists() == bool(lease_s)


def test_a_replaced_file_that_is_read_stays() -> None:
    place = Place(grace_s=60.0)
    for number in range(2):
        place.write([WriteToTree("put", b"%d" % number, b"v")])
        place.maintenance.flush(place.tree)
    with place.tree.snapshot() as snapshot:
        place.maintenance.compact(place.tree, everything=True)
        assert place.collector.collect() == 0
        assert dict(snapshot.scan()) == {b"0": b"v", b"1": b"v"}
    del snapshot
    assert place.collector.collect() == 4
