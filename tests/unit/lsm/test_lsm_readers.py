"""After an opening no file goes that a reader of before may hold: of trees, of queues, of dropped tables."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from store_model import SETTINGS, open_simulated
from tree_under_test import TreeUnderTest
from tree_under_test import Write as WriteToTree

import penstock
from penstock.errors import Closed, WaitExpired
from penstock.lsm.collection import CollectionSettings
from penstock.lsm.readers import RETRY_S, LeaseRecord, _decode
from penstock.manifest.manifest import ManifestTxn
from penstock.manifest.operations import CommitReceipt
from penstock.queue.chain import QueueSettings
from penstock.queue.qmft import data_files
from penstock.server import gateway, service
from penstock.server.leased_objects import LeasedObjects
from penstock.store.settings import StoreSettings
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.members import await_true

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
        assert store.readers._record.longest_s == 500.0
        store.close()  # while the client has it
    with penstock.open(root, settings=now) as store:
        assert store.readers._record.longest_s == 500.0
        assert not store.readers.may_remove()
    with penstock.open(root, settings=now) as store:  # the 500 s are not over: nobody may forget them
        assert not store.readers.may_remove()
    client.close()


def test_leases_that_ended_are_forgotten(tmp_path: Path) -> None:
    root, now = tmp_path / "store", StoreSettings(collection=CollectionSettings(grace_s=0.0))
    with penstock.open(root, settings=now) as store, penstock.connect(root) as client:
        with client.snapshot(lease_s=500.0):
            pass
        assert store.readers._record.longest_s == 500.0
    with penstock.open(root, settings=now) as store:
        assert store.readers.may_remove()


def test_an_owner_that_is_killed_more_often_than_leases_last_removes_files_all_the_same() -> None:
    disk, clock, lease_s, life_s = SimulatedDisk(), FakeClock(), 300.0, 100.0
    with open_simulated(disk, clock, SMALL) as store:
        for number in range(40):
            store.queue("q").put(b"%d" % number * 30, durable=True)
        store.readers.expect(lease_s)
    folder, waited_s = "/store/tables/2/0", 0.0
    with open_simulated(disk, clock, SMALL) as store:
        store.queue("q").trim(41, durable=True)
    while len(list(data_files(disk, folder))) > 1:
        assert waited_s < 4 * lease_s, "it began to wait anew at each opening"
        with open_simulated(disk, clock, SMALL) as store:
            store.queue("q").bounds()
            clock.advance(life_s)
            waited_s += life_s
            maintained(store)
    assert waited_s >= lease_s, "a reader of before lost its files"


def test_a_wrong_wall_clock_takes_no_files_from_readers() -> None:
    disk, clock, lease_s = SimulatedDisk(), FakeClock(), 300.0
    with open_simulated(disk, clock, SMALL) as store:
        store.queue("q").put(b"1", durable=True)
        store.readers.expect(lease_s)
        store._save_time()
    clock.jump(10**6)
    with open_simulated(disk, clock, SMALL) as store:
        assert not store.readers.may_remove()
        clock.advance(lease_s)
        assert store.readers.may_remove()


def test_a_snapshot_that_was_closed_leaves_nothing_to_wait_for_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "FORGET_S", 0.0)
    with penstock.open(tmp_path / "store") as store, penstock.connect(tmp_path / "store") as client:
        with client.snapshot(lease_s=500.0):
            time.sleep(2 * service.MAINTAIN_S)
            assert store.readers.may_be_there()
        await_true(lambda: not store.readers.may_be_there())


def test_a_lease_that_is_being_granted_is_not_forgotten() -> None:
    with open_simulated(SimulatedDisk(), FakeClock(), SMALL) as store:
        readers = store.readers
        with readers.granting(500.0):
            readers.keep(lambda: 0.0)
            assert readers.may_be_there()
        readers.keep(lambda: 400.0)
        assert readers.may_be_there()
        readers.keep(lambda: 0.0, after_s=10.0)
        assert readers.may_be_there(), "each client that comes and goes is two commits"
        readers.keep(lambda: 0.0)
        assert not readers.may_be_there()


def test_a_lease_that_is_used_stays_recorded(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store, penstock.connect(tmp_path / "store") as client:
        store.kv("t").put(b"k", b"v", durable=True)
        with client.snapshot(lease_s=500.0) as snapshot:
            store.readers.keep(lambda: 1.0)  # as if it were about to expire
            assert _left_s(store) < 400
            assert snapshot.kv("t").get(b"k") == b"v"
            assert _left_s(store) > 500


def test_what_later_readers_have_does_not_delay_the_end_of_earlier_ones() -> None:
    """Only if one has a lease at the moment of the kill."""
    disk, clock = SimulatedDisk(), FakeClock()
    with open_simulated(disk, clock, SMALL) as store:
        store.readers.expect(300.0)
        until_us = store.readers._record.until_us
    for _ in range(5):
        with open_simulated(disk, clock, SMALL) as store:
            with store.readers.granting(86_400.0):
                pass
            store.readers.keep(lambda: 0.0)
            assert store.readers._record.until_us == until_us
            clock.advance(50)
    clock.advance(200)
    with open_simulated(disk, clock, SMALL) as store:
        assert store.readers.may_remove()
        store.readers.keep(lambda: 0.0)
        assert not store.readers.may_be_there()


def test_a_long_lease_that_ended_leaves_the_shorter_ones() -> None:
    with open_simulated(SimulatedDisk(), FakeClock(), SMALL) as store:
        store.readers.expect(86_400.0)
        store.readers.keep(lambda: 300.0)
        assert 300 < _left_s(store) < 500


def _left_s(store: Store) -> float:
    until_us = store.readers._record.until_us
    assert until_us is not None
    return (until_us - store._clock.time_us()) / 1e6


def test_a_record_of_an_older_version_is_a_length() -> None:
    assert _decode(msgspec.msgpack.encode(500.0)) == LeaseRecord(500.0)
    assert _decode(msgspec.msgpack.encode(LeaseRecord(500.0, 7))) == LeaseRecord(500.0, 7)


@pytest.mark.parametrize(("made_before", "lease_s"), [(False, 0.0), (False, 100.0), (True, 0.0), (True, 100.0)])
def test_a_replaced_file_waits_for_readers_of_before_the_opening_alone(made_before: bool, lease_s: float) -> None:
    """Nobody elsewhere has the name of a file that was made since, but through a pin here."""
    shard = TreeUnderTest(grace_s=60.0)
    if lease_s:
        shard.collector.readers.expect(lease_s)
    if not made_before:
        shard.reopen()
    for number in range(2):
        shard.write([WriteToTree("put", b"%d" % number, b"v")])
        shard.maintenance.flush(shard.tree)
    if made_before:
        shard.reopen()
    assert shard.maintenance.compact(shard.tree, everything=True)
    if made_before and lease_s:
        assert shard.collector.collect() == 0
        assert len(shard.files()) == 6
        shard.clock.advance(lease_s)
    assert shard.collector.collect() == 4
    assert len(shard.files()) == 2
    assert dict(shard.tree.scan()) == {b"0": b"v", b"1": b"v"}


@pytest.mark.parametrize("lease_s", [0.0, 100.0])
def test_what_an_earlier_process_left_goes_at_once_and_what_may_be_on_its_way_later(lease_s: float) -> None:
    shard = TreeUnderTest(grace_s=60.0)
    if lease_s:
        shard.collector.readers.expect(lease_s)
    old = int(shard.manifest.reserve_chunk_id())
    shard.disk.create(f"/store/tables/1/{old:020d}.sst")
    shard.reopen()
    new = int(shard.manifest.reserve_chunk_id())
    assert new > old
    shard.disk.create(f"/store/tables/1/{new:020d}.sst.tmp")
    assert shard.collector.collect() == (0 if lease_s else 1)
    shard.clock.advance(61)
    assert shard.collector.collect() == 1
    shard.clock.advance(lease_s)
    shard.collector.collect()
    assert shard.files() == []


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
    shard = TreeUnderTest(grace_s=60.0)
    for number in range(2):
        shard.write([WriteToTree("put", b"%d" % number, b"v")])
        shard.maintenance.flush(shard.tree)
    with shard.tree.snapshot() as snapshot:
        shard.maintenance.compact(shard.tree, everything=True)
        assert shard.collector.collect() == 0
        assert dict(snapshot.scan()) == {b"0": b"v", b"1": b"v"}
    del snapshot
    assert shard.collector.collect() == 4


@pytest.mark.parametrize("how", ["no note", "a damaged note", "a trusted clock"])
def test_time_that_steps_at_an_opening_takes_no_files_from_readers(how: str) -> None:
    disk, clock, lease_s = SimulatedDisk(), FakeClock(), 300.0
    clock.advance(10_000.0)  # the machine has run for a while
    with open_simulated(disk, clock, SMALL) as store:
        store.queue("q").put(b"1", durable=True)
        store.readers.expect(lease_s)
        store._save_time()
    if how == "no note":
        disk.unlink("/store/TIME")
    elif how == "a damaged note":
        disk.open("/store/TIME", write=True).pwrite(b"?", 3)
    clock.jump(10**6)
    with open_simulated(disk, clock, replace(SMALL, trust_clock=how == "a trusted clock")) as store:
        assert store._clock.time_us() > clock.time_us() - 10**6, "it stepped"
        assert not store.readers.may_remove()
        clock.advance(lease_s)
        assert store.readers.may_remove()


@pytest.mark.parametrize("is_set", ["by its first tick", "by a leader"])
def test_time_that_steps_while_a_store_is_open_takes_no_files_from_readers(is_set: str) -> None:
    """A clock that was never set takes the first later wall clock; a follower takes its leader's time."""
    years_s = 55 * 365 * 86_400
    disk, clock, lease_s = SimulatedDisk(), FakeClock(time_us=10**9), 300.0
    with open_simulated(disk, clock, SMALL) as store:
        store.queue("q").put(b"1", durable=True)
        store.readers.expect(lease_s)
    for _ in range(2):  # killed soon after the step, too
        with open_simulated(disk, clock, SMALL) as store:
            clock.advance(2.0)
            if clock.time_us() < years_s * 10**6:
                clock.jump(years_s)
            if is_set == "by a leader":
                store._clock.begin(clock.time_us(), None)
            clock.advance(2.0)
            assert store._clock.time_us() >= years_s * 10**6
            assert not store.readers.may_remove()


def test_a_lease_of_an_older_version_is_not_cut_short_by_one_of_this() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with open_simulated(disk, clock, SMALL) as store:
        store.readers._commit(LeaseRecord(7_200.0))  # when it ends, nobody wrote down
    with open_simulated(disk, clock, SMALL) as store:
        store.readers.expect(1.0)
    clock.advance(3_600.0)
    with open_simulated(disk, clock, SMALL) as store:
        assert not store.readers.may_remove()
        clock.advance(4_000.0)
        assert store.readers.may_remove()


def test_a_lease_is_recorded_again_if_its_removal_may_have_been_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    def commit_late(txn: ManifestTxn, timeout_s: float = 0.0) -> CommitReceipt:
        commit(txn)
        raise WaitExpired("the disk was slow")

    disk, clock, commit = SimulatedDisk(), FakeClock(), ManifestTxn.commit
    with open_simulated(disk, clock, SMALL) as store:
        store.readers.expect(300.0)
        with monkeypatch.context() as slow, pytest.raises(WaitExpired):
            slow.setattr(ManifestTxn, "commit", commit_late)
            store.readers.keep(lambda: 0.0)
        assert not store.readers.expect(200.0), "not at each use"
        clock.advance(RETRY_S)
        assert store.readers.expect(200.0)
    with open_simulated(disk, clock, SMALL) as store:
        assert not store.readers.may_remove()


def test_a_record_that_becomes_shorter_still_has_the_leases_of_before_the_opening() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with open_simulated(disk, clock, SMALL) as store:
        store.readers.expect(7_200.0)
    with open_simulated(disk, clock, SMALL) as store:
        store.readers.expect(36_000.0)  # longer than those, and given back early
        store.readers.keep(lambda: 10.0)
    with open_simulated(disk, clock, SMALL) as store:
        clock.advance(3_600.0)
        assert not store.readers.may_remove()
        clock.advance(4_000.0)
        assert store.readers.may_remove()


def test_after_another_boot_the_time_of_the_record_counts() -> None:
    disk, clock, lease_s = SimulatedDisk(), FakeClock(), 300.0
    with open_simulated(disk, clock, SMALL) as store:
        store.queue("q").put(b"1", durable=True)
        store.readers.expect(lease_s)
    for _ in range(20):  # it is started more often than a lease lasts
        clock.reboot(off_s=50.0)
        with open_simulated(disk, clock, SMALL) as store:
            clock.advance(50.0)
            if store.readers.may_remove():
                return
    pytest.fail("it began to wait anew after each start")


@pytest.mark.parametrize("seed", range(8))
def test_no_reader_of_before_loses_its_files_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners are killed, clocks are set, notes are lost, commits fail, and the machine sleeps or is started anew."""
    chance, disk, clock = random.Random(seed), SimulatedDisk(), FakeClock()
    commit, failing = ManifestTxn.commit, False

    def commit_or_fail(txn: ManifestTxn, timeout_s: float = 0.0) -> CommitReceipt:
        fails = failing and chance.random() < 0.3
        if fails and chance.random() < 0.5:
            raise WaitExpired("it did not happen")
        receipt = commit(txn)
        if fails:
            raise WaitExpired("it happened late")
        return receipt

    monkeypatch.setattr(ManifestTxn, "commit", commit_or_fail)
    earlier_s, ended = 0.0, 0  # when the last lease of earlier owners ends
    for life in range(40):
        trust = chance.random() < 0.1
        with open_simulated(disk, clock, replace(SMALL, trust_clock=trust)) as store:
            leases: LeasedObjects[int] = LeasedObjects(
                lambda _: None, noun="snapshot", clock=clock, count_max=9, each_max=9, renew=store.readers.expect
            )
            known_s: dict[str, float] = {}  # by name, until when its reader may use files
            failing = True
            for step in range(chance.randrange(1, 30)):
                name, lease_s = f"{life}.{step}", chance.choice([0.001, 1.0, 60.0, 300.0, 86_400.0])
                act = chance.choice(["grant", "use", "use", "close", "keep", "keep", "wait", "wait", "jump"])
                if act == "grant" and len(leases) < 9:
                    with store.readers.granting(lease_s):
                        leases.add(name, 0, client="a", lease_s=lease_s)
                    if store.readers.expect(lease_s):  # only then it learns names of files
                        known_s[name] = clock.monotonic_s() + lease_s
                elif act == "use" and known_s:
                    name = chance.choice(list(known_s))
                    with suppress(Closed), leases.use(name):
                        if store.readers.expect(leases.lease_s(name)):
                            known_s[name] = clock.monotonic_s() + leases.lease_s(name)
                elif act == "close" and known_s:
                    name = chance.choice(list(known_s))
                    leases.close(name, "a")
                    del known_s[name]
                elif act == "keep":
                    leases.sweep()
                    with suppress(WaitExpired):
                        store.readers.keep(leases.longest_left_s, after_s=chance.choice([0.0, 10.0]))
                elif act == "wait":
                    clock.advance(chance.choice([0.1, 1.0, 30.0, 400.0]))
                else:
                    clock.jump(chance.choice([-(10**6), -60.0, 60.0, 10**6]))
                assert not (store.readers.may_remove() and clock.monotonic_s() < earlier_s), (life, step, act)
                ended += store.readers.may_remove()
            failing = False
            store._save_time()
        earlier_s = max([earlier_s, *known_s.values()])
        if chance.random() < 0.2 and disk.exists("/store/TIME"):
            disk.unlink("/store/TIME")
        if chance.random() < 0.1:
            clock.reboot(off_s=60.0)
            earlier_s = 0.0  # no reader is left
    assert ended
