"""What the checkpoint stores, what it spills, and what it leaves on disk."""

from __future__ import annotations

import pytest
from store_model import open_simulated

from penstock.partition import checkpoint
from penstock.store import journal_trimming
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def fill(store: Store, name: str, rows: int) -> None:
    for number in range(rows):
        store.kv(name).put(b"%d" % number, bytes(200), durable=True)


def folder_of(store: Store, name: str) -> str:
    info = store._ledger.table(name)
    assert info is not None
    return f"/store/tables/{info.table_id}/0"


def bytes_in(disk: SimulatedDisk, folder: str) -> int:
    total = 0
    for name in disk.listdir(folder):
        file = disk.open(f"{folder}/{name}")
        total += file.size()
        file.close()
    return total


def test_many_sections_are_stored_and_few_are_spilled(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SPILL_BYTES_MAX", 5_000)
    with open_simulated(disk, clock) as store:
        fill(store, "small", 1)
        fill(store, "large", 40)
        assert store.checkpoint().spilled == 1
        assert disk.exists(folder_of(store, "small") + "-log")
        assert not disk.exists(folder_of(store, "large") + "-log")
        assert any(name.endswith(".sst") for name in disk.listdir(folder_of(store, "large")))
        assert len(store._consensus.segment_starts()) == 1
    with open_simulated(disk.image().restore("strict"), clock) as store:
        assert len(dict(store.kv("large").scan())) == 40
        assert len(dict(store.kv("small").scan())) == 1


def test_a_partition_that_cannot_store_is_spilled(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SPILL_BYTES_MAX", 5_000)

    def fail(*_: object) -> None:
        raise OSError("simulated eio")

    with open_simulated(disk, clock) as store:
        fill(store, "large", 40)
        with monkeypatch.context() as patch:
            patch.setattr("penstock.kv.machine.KvMachine.store_now", fail)
            assert store.checkpoint().spilled == 1
        assert len(store._consensus.segment_starts()) == 1
        image = disk.image()
    with open_simulated(image.restore("strict"), clock) as store:
        assert len(dict(store.kv("large").scan())) == 40


def test_after_a_clear_nothing_is_left_to_replay(disk: SimulatedDisk, clock: FakeClock) -> None:
    with open_simulated(disk, clock) as store:
        fill(store, "t", 30)
        store.queue("q").put(b"m", durable=True)
        written = store._consensus.committed
        report = store._checkpoint.clear()
        assert report.spilled == 0
        assert report.needed_from > written
        assert store._consensus.first > written
        image = disk.image()
    with open_simulated(image.restore("strict"), clock) as store:
        assert len(dict(store.kv("t").scan())) == 30
        assert [message.payload for message in store.queue("q").read()] == [b"m"]


def test_a_clear_that_fails_gives_up_nothing(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("simulated eio")

    with open_simulated(disk, clock) as store:
        fill(store, "t", 30)
        before = store._consensus.segment_starts()
        with monkeypatch.context() as patch:
            patch.setattr("penstock.kv.machine.KvMachine.store_now", fail)
            with pytest.raises(OSError, match="simulated"):
                store._checkpoint.clear()
        assert store._consensus.segment_starts() == before


def test_a_quiet_store_gives_up_its_journal(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_trimming, "QUIET_BYTES", 100)
    with open_simulated(disk, clock) as store:
        fill(store, "t", 5)
        store._trimmer.trim()
        for _ in range(5):  # written to all the time: not quiet
            fill(store, "t", 1)
            clock.advance(journal_trimming.QUIET_S - 1)
            store._trimmer.trim()
            assert store._consensus.first < store._consensus.committed
        clock.advance(journal_trimming.QUIET_S)
        written = store._consensus.committed
        store._trimmer.trim()
        assert store._consensus.first > written
        assert len(dict(store.kv("t").scan())) == 5


def test_a_short_journal_is_left_alone(disk: SimulatedDisk, clock: FakeClock) -> None:
    with open_simulated(disk, clock) as store:
        fill(store, "t", 1)
        store._trimmer.trim()
        clock.advance(10 * journal_trimming.QUIET_S)
        store._trimmer.trim()
        assert store.kv("t").get(b"0") == bytes(200)
        assert not any(name.endswith(".sst") for name in disk.listdir(folder_of(store, "t")))


def test_a_spill_of_stored_entries_takes_no_space(disk: SimulatedDisk, clock: FakeClock) -> None:
    with open_simulated(disk, clock) as store:
        for round_ in range(1, 4):
            fill(store, "t", 20 * round_)
            assert store.checkpoint().spilled == 1
            spill = folder_of(store, "t") + "-log"
            assert bytes_in(disk, spill) > 4_000
            store.compact("t")
            store.checkpoint()
            assert bytes_in(disk, spill) < 500
        fill(store, "t", 70)
        assert store.checkpoint().spilled == 1
        image = disk.image()
    with open_simulated(image.restore("strict"), clock) as store:
        assert len(dict(store.kv("t").scan())) == 70
