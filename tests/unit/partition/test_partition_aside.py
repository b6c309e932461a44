"""What cannot be applied by a mistake of ours is set aside; what fails by the disk pauses; the others go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from store_model import SETTINGS, open_simulated

from penstock.errors import Invalid, NotFound, PartitionPaused, PenstockError
from penstock.kv.machine import KvMachine
from penstock.kv.values import Options, encode_options
from penstock.log import Log
from penstock.partition import aside as aside_module
from penstock.partition.machine import Entry
from penstock.queue.machine import QueueMachine
from penstock.registry import kind_named
from penstock.store import port as local
from penstock.store.store import Store
from penstock.testing import FakeClock, SimulatedDisk

POISON = b"poison"
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class Mistake:
    """Entries that hold POISON cannot be applied."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Callable[[], Exception] = lambda: KeyError("ours")) -> None:
        self.attempts = 0
        self.is_active = True
        for machine in (KvMachine, QueueMachine):
            patch.setattr(machine, "apply", self._failing(machine.apply, error))

    def _failing(self, apply: Callable[..., None], error: Callable[[], Exception]) -> Callable[..., None]:
        def failing(machine: object, entry: Entry) -> None:
            if self.is_active and any(POISON in section.payload for section in entry.sections):
                self.attempts += 1
                raise error()
            apply(machine, entry)

        return failing


def retry_often(store: Store, clock: FakeClock) -> None:
    """Try as often as the background would."""
    for _ in range(10):
        clock.advance(10)
        store._dispatcher.retry()


def write_three(store: Store) -> None:
    for payload in (b"one", POISON, b"three"):
        store.kv("t").put(payload, payload, durable=True)
        store.queue("q").put(payload, durable=True)


def test_a_mistake_of_ours_stops_nobody(disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake = Mistake(monkeypatch)
    store = open_simulated(disk, clock)
    write_three(store)
    with pytest.raises(PartitionPaused, match="tried again"):
        store.kv("t").get(b"one")
    retry_often(store, clock)
    assert mistake.attempts == 2 * SETTINGS.dispatcher.attempts_max  # no entry is given up at once
    expected = {b"one": b"one", b"three": b"three"}

    def look(store: Store) -> None:
        assert dict(store.kv("t").scan()) == expected
        assert [(m.sequence, m.payload) for m in store.queue("q").read()] == [(1, b"one"), (2, b"three")]
        assert store.kv("t").get(POISON) is None
        troubles = store.troubles()
        assert {(trouble.table, trouble.shard) for trouble in troubles} == {("t", 0), ("q", 0)}
        assert all("set aside: KeyError" in trouble.reason and trouble.lsn for trouble in troubles)
        assert [trouble.table for trouble in store.resume("t")] == ["t"]

    look(store)
    store.kv("t").put(b"four", b"4", durable=True)
    expected[b"four"] = b"4"
    look(store)
    store.close()
    mistake.is_active = False  # a better Penstock: what was set aside stays so, or messages would change their numbers
    for _ in range(2):
        with open_simulated(disk, clock) as store:
            look(store)
    with open_simulated(disk, clock) as store:
        store.compact("t")
        store.checkpoint()
        look(store)
    with open_simulated(disk, clock) as store:
        look(store)
        store.drop("t")
        assert [trouble.table for trouble in store.troubles()] == ["q"]
        store.drop("q")
        assert store.troubles() == []
    with open_simulated(disk, clock) as store:
        assert store.troubles() == []


@pytest.mark.parametrize("name", ["t", "q"])
def test_the_journal_is_not_held_back(
    name: str, disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Mistake(monkeypatch)
    with open_simulated(disk, clock) as store:
        store.kv("t")
        store.queue("q")
        store.table(name).put(*((POISON, b"") if name == "t" else (POISON,)), durable=True)
        retry_often(store, clock)
        lsn = store.troubles()[0].lsn
        busy = store.kv("busy")
        for number in range(40):
            busy.put(b"%d" % number, bytes(200), durable=True)
        assert store.checkpoint().needed_from > lsn
    with open_simulated(disk, clock) as store:
        assert [trouble.lsn for trouble in store.troubles()] == [lsn]
        assert dict(store.kv("t").scan()) == {}
        assert store.queue("q").read() == []


@pytest.mark.parametrize("error", [OSError("the disk"), MemoryError(), PenstockError("another part")])
def test_what_is_not_our_mistake_pauses(
    error: Exception, disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = Mistake(monkeypatch, lambda: error)
    with open_simulated(disk, clock) as store:
        write_three(store)
        retry_often(store, clock)
        with pytest.raises(PartitionPaused, match="resume"):
            store.kv("t").get(b"one")
        assert ["set aside" in trouble.reason for trouble in store.troubles()] == [False, False]
        mistake.is_active = False
        assert store.resume("t") == []
        assert dict(store.kv("t").scan()) == {payload: payload for payload in (b"one", POISON, b"three")}


def test_a_table_that_cannot_go_on_without_the_entry_pauses(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, broken = KvMachine.apply, True

    def failing(machine: KvMachine, entry: Entry) -> None:
        if broken:
            raise KeyError("whatever it is")
        apply(machine, entry)

    monkeypatch.setattr(KvMachine, "apply", failing)
    store = open_simulated(disk, clock)
    store.kv("t").put(b"k", b"1", durable=True)
    retry_often(store, clock)
    assert ["set aside" in trouble.reason for trouble in store.troubles()] == [False]
    store.close()
    broken = False
    with open_simulated(disk, clock) as store:
        assert store.kv("t").get(b"k") == b"1"
        assert store.troubles() == []


def test_too_much_is_not_set_aside(disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    Mistake(monkeypatch)
    monkeypatch.setattr(aside_module, "ENTRIES_MAX", 2)
    with open_simulated(disk, clock) as store:
        for number in range(3):
            store.kv(f"t{number}").put(POISON, b"", durable=True)
            retry_often(store, clock)
        troubles = store.troubles()
        assert ["set aside" in trouble.reason for trouble in troubles] == [True, True, False]
        assert troubles[2].table == "t2"
        store.drop("t0")
        store.resume("t2")
        retry_often(store, clock)
        assert ["set aside" in trouble.reason for trouble in store.troubles()] == [True, True]


def test_a_disk_that_cannot_take_it_is_asked_again(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Mistake(monkeypatch)
    with open_simulated(disk, clock) as store:
        store.kv("t").put(POISON, b"", durable=True)
        sync, fails = Log.sync, True

        def failing(log: Log) -> int:
            if fails and "aside" in log._folder:
                raise OSError("no sync")
            return sync(log)

        monkeypatch.setattr(Log, "sync", failing)
        retry_often(store, clock)
        assert ["set aside" in trouble.reason for trouble in store.troubles()] == [False]
        fails = False
        store.resume("t")
        retry_often(store, clock)
        assert ["set aside" in trouble.reason for trouble in store.troubles()] == [True]
    with open_simulated(disk, clock) as store:
        assert len(store.troubles()) == 1


# -- the ledger


def test_a_table_that_cannot_be_made_keeps_no_other_out_of_reach(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an older Penstock wrote for `shards=True`: durable, and not to be decoded."""
    options = encode_options(Options())
    with open_simulated(disk, clock) as store:
        store.kv("before").put(b"k", b"1", durable=True)
        with pytest.raises(Invalid):
            store.port.create("flags", "kv", True, options)
        monkeypatch.setattr(local, "check_create", lambda *_: None)
        for shards in (True, 0, 1 << 17):
            with pytest.raises(NotFound):
                store.port.create("flags", "kv", shards, options)
        monkeypatch.undo()
        assert [trouble.table for trouble in store.troubles()] == ["ledger"] * 3
        store.kv("after").put(b"k", b"2", durable=True)
    for _ in range(2):
        with open_simulated(disk, clock) as store:
            assert store.tables() == ["after", "before"]
            assert (store.kv("before").get(b"k"), store.kv("after").get(b"k")) == (b"1", b"2")
            assert [trouble.table for trouble in store.troubles()] == ["ledger"] * 3
    with open_simulated(disk, clock) as store:
        store.kv("flags").put(b"k", b"3", durable=True)
    with open_simulated(disk, clock) as store:
        assert store.kv("flags").get(b"k") == b"3"


def test_a_condition_that_cannot_be_judged_is_not_fulfilled(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_simulated(disk, clock) as store:
        table = store.queue("q")._info.table_id.to_bytes(8, "big")
        store.kv("t")
        monkeypatch.setattr("penstock.queue.kind.QueueKind.check_condition", lambda *_, **__: None)
        monkeypatch.setattr("penstock.queue.delivery.Deliveries.admit", lambda *_: None)
        for name, argument in (
            ("queue.ack", table + b"\xc1"),
            ("queue.such", table),
            ("queue.move", table + b"\x92\x01"),
        ):
            with pytest.raises((PenstockError, StopIteration)), store.batch() as batch:
                batch.require(name, argument)
                batch.kv("t").put(b"k", b"1")
        monkeypatch.undo()
        assert store.kv("t").get(b"k") is None
        store.kv("t").put(b"k", b"2", durable=True)
    with open_simulated(disk, clock) as store:
        assert store.kv("t").get(b"k") == b"2"
        assert store.troubles() == []


# -- tables that this Penstock cannot read


def test_a_table_of_another_penstock_keeps_no_other_out_of_reach(
    disk: SimulatedDisk, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(SETTINGS)
    with open_simulated(disk, clock, settings) as store:
        store.kv("t").put(b"k", b"1", durable=True)
        store.kv("strange").put(b"k", b"2", durable=True)
        store.queue("odd").put(b"m", durable=True)
        monkeypatch.setattr(local, "check_create", lambda *_: None)
        store.port.create("graph", "graph", 1, b"")
        store.port.create("options", "kv", 1, b"\xc1")
        store.port.create("kept", "queue", 1, b"\x91\x93\xc0\xc0\x01")  # acknowledged=1, as it was once stored
        monkeypatch.undo()

    def forget(name: str, table: str) -> object:
        if table == "strange":
            raise KeyError("a mistake of ours")
        return kind_named(name, table)

    monkeypatch.setattr("penstock.store.shards.kind_named", forget)
    with open_simulated(disk, clock, settings) as store:
        assert store.kv("t").get(b"k") == b"1"
        assert [(trouble.table, trouble.reason) for trouble in store.troubles()] == [("strange", "it cannot be opened")]
        with store.snapshot() as snapshot:
            assert snapshot.kv("t").get(b"k") == b"1"
            with pytest.raises(PenstockError):
                snapshot.table("graph").get(b"k")
        for name in ("options", "graph"):
            with pytest.raises(PenstockError):
                store.table(name)
        store.queue("kept").put(b"m", durable=True)
        assert store.queue("kept").consumer("c").get()[0].payload == b"m"
        store.port.maintain()
        store._dispatcher.retry()
        for number in range(40):
            store.kv("t").put(b"%d" % number, bytes(200), durable=True)
        store.checkpoint()
    monkeypatch.undo()
    with open_simulated(disk, clock, settings) as store:
        assert store.kv("strange").get(b"k") == b"2"
        assert store.kv("t").get(b"39") == bytes(200)
        assert store.troubles() == []
