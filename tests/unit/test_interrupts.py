"""Any line may raise: an interrupt at every point of what a user's thread can be doing leaves a store that goes on.

Each act is interrupted at one point after the other. After each interrupt the store must answer, what was acknowledged
must be there, what was interrupted may be there once and whole, and at the end a reopening must show the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from interrupts import Interrupt, every_point, interrupted_at, where

from penstock.log import LogSettings
from penstock.manifest.records import ArchivePolicy, Tombstoned
from penstock.manifest.tables import DB
from penstock.queue.chain import QueueSettings
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

SETTINGS = StoreSettings(
    background=False,
    memory_bytes_max=256 << 20,
    reserve_bytes=0,
    journal=LogSettings(segment_bytes=64 << 10, allocate_bytes=16 << 10, index_bytes=4 << 10),
    kinds=(QueueSettings(file_bytes=2 << 10, allocate_bytes=512, index_bytes=512),),
)
SHARDS = 3


class Ledger:
    """A store that counts: every act adds one to each of several places, all of them or none."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.acknowledged = self.interrupted = self.token = 0
        self.store = open_store(self.path, settings=SETTINGS)
        self.store.kv("counts", value="int64", shards=SHARDS)
        self.store.kv("rows", shards=SHARDS)
        self.store.queue("events", shards=SHARDS)
        self.store.kv("fed", shards=SHARDS, changes=True)
        self.store.queue("fed_events", changes=True)
        self.store.flush()

    # -- acts

    def merge(self) -> None:
        self.store.kv("counts", value="int64").merge(b"alone", 1, operator="add_i64", durable=True)
        self.acknowledged += 1

    def batch(self) -> None:
        self.token += 1
        with self.store.batch(token=("loader", self.token)) as batch:
            counts = batch.kv("counts", value="int64")
            for key in (b"a", b"b", b"c", b"d"):
                counts.merge(key, 1, operator="add_i64")
            batch.queue("events").put(b"x" * 100, key=b"k")
            batch.kv("rows").put(b"%08d" % self.token, b"row")
        self.acknowledged += 1

    def work(self) -> None:
        """Take a message, count it and acknowledge it, in one batch."""
        consumer = self.store.queue("events").consumer("worker")
        for message in consumer.get(1, timeout_s=0):
            with self.store.batch() as batch:
                batch.kv("counts", value="int64").merge(b"worked", 1, operator="add_i64")
                consumer.ack(message, batch=batch)

    def maintain(self) -> None:
        self.store.kv("rows").put_many({b"%d" % n: b"x" for n in range(100)})
        self.store.kv("rows").delete_range(b"2", b"3")
        self.store.compact("rows")
        self.store.compact("counts")
        self.store.checkpoint()

    def make_and_drop(self) -> None:
        self.store.kv("other").put(b"k", b"v", durable=True)
        self.store.drop("other")

    def change(self) -> None:
        """A table's life as a whole: it is altered, drained, dropped and collected, and its name is used again."""
        store = self.store
        if "other" in store.tables():
            store.drop("other")  # an interrupt left it, perhaps draining
        store.kv("other").put(b"k", b"v", durable=True)
        store.alter("other", archive=ArchivePolicy(archive_after_ms=self.interrupted))
        store.drain("other")
        store.reactivate("other")
        store.drop("other")
        store._tasks.remove_dropped()

    def read(self) -> None:
        list(self.store.kv("rows").scan())
        self.store.kv("counts", value="int64").multi_get([b"a", b"b", b"c"])
        with self.store.snapshot() as snapshot:
            snapshot.kv("rows").to_arrow()
            snapshot.queue("events").to_arrow()

    def put(self) -> None:
        """A message by itself and some together, into a section that others fill, too."""
        events = self.store.queue("fed_events")
        events.put(b"one")
        events.put_many([b"two", b"three"])
        self.store.flush()

    def follow(self) -> None:
        """Change feeds, barriers and subscriptions."""
        fed, events = self.store.kv("fed"), self.store.queue("fed_events")
        subscription, before = self.store.subscribe(), self.store.statistics().durable_lsn
        fed.put(b"k", b"v")
        self.store.flush(events.put(b"e"))
        last = self.store.statistics().durable_lsn
        self.store.wait_for(last, tables=["fed", "fed_events"], timeout_s=20)
        subscription.wait_newer(20)
        for table in (fed, events):
            table.changes(after=before).to_arrow()
            assert len(list(table.changes(after=before, until=last))) <= 1

    # -- checks

    def check(self, *, least: int, most: int) -> None:
        """Nothing is lost, doubled or torn; everybody sees the same."""
        self.store.flush(timeout_s=20)
        self.store._tasks.retry()  # a commit of descriptors that was interrupted is made later
        described = self.store._manifest.read(lambda view: dict(DB.scan(view)))
        alive = {db_id: row.name for db_id, row in described.items() if not isinstance(row.status, Tombstoned)}
        assert alive == {info.table_id: info.name for info in self.store.port.tables()}, where[-1]
        counts = dict(self.store.kv("counts", value="int64").scan())
        with self.store.snapshot() as snapshot:
            snapshot_counts = dict(snapshot.kv("counts", value="int64").scan())
            assert snapshot_counts == counts, where[-1]
        assert least <= counts.get(b"a", 0) + counts.get(b"alone", 0) <= most, (counts, least, most, where[-1])
        if b"b" in counts:
            assert len({counts[key] for key in (b"a", b"b", b"c", b"d")}) == 1, (counts, where[-1])
            rows = sum(1 for key, _ in self.store.kv("rows").scan() if len(key) == 8)
            assert (self.messages(), rows) == (counts[b"b"], counts[b"b"]), where[-1]

    def messages(self) -> int:
        with self.store.snapshot() as snapshot:
            try:
                return int(snapshot.queue("events").to_arrow().num_rows)
            except Exception as error:
                raise AssertionError(where[-1]) from error

    def reopen(self) -> None:
        before = dict(self.store.kv("counts", value="int64").scan()), self.messages()
        self.store.close()
        self.store = open_store(self.path, settings=SETTINGS)
        assert (dict(self.store.kv("counts", value="int64").scan()), self.messages()) == before


def interrupt_everywhere(ledger: Ledger, act: Callable[[], None], *, first: int, step: int, alarm: bool = False) -> int:
    points = 0
    for _ in every_point(act, first=first, step=step, alarm=alarm):
        points += 1
        ledger.interrupted += 1
        ledger.check(least=ledger.acknowledged, most=ledger.acknowledged + ledger.interrupted)
    ledger.reopen()
    ledger.check(least=ledger.acknowledged, most=ledger.acknowledged + ledger.interrupted)
    ledger.store.close()
    return points


WRITES = ["merge", "batch"]
OTHERS = ["work", "maintain", "make_and_drop", "change", "read", "follow", "put"]


@pytest.mark.parametrize("name", WRITES + OTHERS)
@pytest.mark.parametrize("offset", [1, 9])
def test_an_interrupt_at_any_point_leaves_a_store_that_goes_on(tmp_path: Path, name: str, offset: int) -> None:
    ledger = Ledger(tmp_path)
    for _ in range(3):
        ledger.batch()
    steps = {
        "merge": 7,
        "batch": 23,
        "work": 37,
        "maintain": 61,
        "make_and_drop": 41,
        "change": 197,
        "read": 53,
        "follow": 97,
        "put": 11,
    }
    assert interrupt_everywhere(ledger, getattr(ledger, name), first=offset, step=steps[name]) > 10


@pytest.mark.parametrize(("name", "step"), [("merge", 5), ("batch", 17), ("work", 41)])
def test_an_alarm_is_an_interrupt_whatever_its_handler_raises(tmp_path: Path, name: str, step: int) -> None:
    ledger = Ledger(tmp_path)
    for _ in range(3):
        ledger.batch()
    assert interrupt_everywhere(ledger, getattr(ledger, name), first=2, step=step, alarm=True) > 10


@pytest.mark.campaign
@pytest.mark.parametrize("name", WRITES + OTHERS)
def test_an_interrupt_at_every_point(tmp_path: Path, name: str) -> None:
    ledger = Ledger(tmp_path)
    for _ in range(3):
        ledger.batch()
    step = 3 if name == "maintain" else 1
    interrupt_everywhere(ledger, getattr(ledger, name), first=1, step=step)


@pytest.mark.parametrize("step", [7])
def test_an_interrupted_close_or_opening_is_followed_by_another(tmp_path: Path, step: int) -> None:
    ledger = Ledger(tmp_path)
    ledger.batch()
    point = 1
    while True:

        def close_and_open() -> None:
            ledger.store.close()
            ledger.store = open_store(ledger.path, settings=SETTINGS)

        if interrupted_at(point, close_and_open) < point:
            break
        ledger.store.close()
        ledger.store = open_store(ledger.path, settings=SETTINGS)
        ledger.check(least=1, most=1)
        point += step
    ledger.store.close()


def test_the_check_notices_an_apply_that_counts_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded bug: an edit that was begun is begun again from its start."""
    from penstock.lsm.memtable import Memtable

    monkeypatch.setattr(Memtable, "remainder", lambda self, edit: edit)
    ledger = Ledger(tmp_path)
    with pytest.raises(AssertionError):
        interrupt_everywhere(ledger, ledger.merge, first=1, step=1)


def test_the_check_notices_a_turn_that_is_never_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.coordinator.executor import FlushExecutor
    from penstock.errors import WaitExpired

    monkeypatch.setattr(FlushExecutor, "leave", lambda self, waiter: None)
    ledger = Ledger(tmp_path)
    flush = Store.flush
    monkeypatch.setattr(Store, "flush", lambda self, epoch=None, timeout_s=1.0: flush(self, epoch, 1.0))
    with pytest.raises(WaitExpired):
        interrupt_everywhere(ledger, ledger.merge, first=1, step=1)


def test_the_check_notices_a_batch_that_is_written_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.store.flusher import StoreFlusher

    make_durable = StoreFlusher.make_durable

    def anew(self: StoreFlusher, batch: object, *, again: bool) -> object:
        return make_durable(self, batch, again=False)  # type: ignore[arg-type]

    monkeypatch.setattr(StoreFlusher, "make_durable", anew)
    ledger = Ledger(tmp_path)
    with pytest.raises(AssertionError):
        interrupt_everywhere(ledger, ledger.merge, first=1, step=1)


def test_an_interrupt_is_none_of_our_errors() -> None:
    assert not issubclass(Interrupt, Exception)


def test_interrupted_readers_of_feeds_keep_no_files(tmp_path: Path) -> None:
    """What an interrupt left of a reader is gone: retention may remove the files, and no one waits for a marker."""
    ledger = Ledger(tmp_path)
    ledger.follow()
    for _ in every_point(ledger.follow, first=5, step=211):
        gc.collect()
        machines = [partition.machine for partition in ledger.store._dispatcher.partitions()]
        assert [type(machine) for machine in machines if machine.is_read()] == [], where[-1]
        assert not ledger.store.port.listeners, where[-1]
    feeds = [ledger.store.kv("fed").changes().to_arrow(), ledger.store.queue("fed_events").changes().to_arrow()]
    ledger.reopen()
    for feed, table in zip(feeds, (ledger.store.kv("fed"), ledger.store.queue("fed_events")), strict=True):
        assert table.changes().to_arrow().equals(feed)
    ledger.store.close()


def acknowledged_messages(path: Path) -> tuple[int, int]:
    """Put messages after each interrupt of a put; return how many were acknowledged, and how many are there."""
    ledger, acknowledged = Ledger(path), 0
    events = ledger.store.queue("fed_events")
    for _ in every_point(lambda: (events.put(b"interrupted"), events.put(b"interrupted too"))):
        events.put(b"told")
        events.put_many([b"told"] * 2)
        ledger.store.flush()
        acknowledged += 3
    ledger.reopen()
    present = sum(message.payload == b"told" for message in ledger.store.queue("fed_events").read(limit=100_000))
    ledger.store.close()
    return acknowledged, present


def test_an_interrupted_put_takes_no_message_of_others_with_it(tmp_path: Path) -> None:
    acknowledged, present = acknowledged_messages(tmp_path)
    assert acknowledged == present > 50
