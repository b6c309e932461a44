"""Change feeds of queues as users meet them: embedded, connected, in asyncio, trimmed, altered, wrongly used."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from feed_model import take_in_expired
from queue_feed_model import check_feed, floors, queue_changes
from queue_model import contents, machine_of, open_queues

import penstock
import penstock.aio
from penstock.errors import CorruptionError, Invalid, KindMismatch, NotFound
from penstock.lsm.maintenance import COMPANION
from penstock.queue.changes import read_changes
from penstock.queue.options import QueueOptions, decode_queue_options, encode_queue_options
from penstock.queue.positions import MOVE, Move, argument
from penstock.testing import FakeClock, SimulatedDisk


def test_embedded_connected_in_a_snapshot_and_after_reopening(path: Path) -> None:
    options = penstock.ChangeOptions(preimages=True)
    with penstock.open(str(path)) as store:
        orders = store.queue("orders", shards=2, headers=True, changes=options)
        for number in range(20):
            orders.put(b"%d" % number, key=b"%d" % number, headers={"n": b"%d" % number}, durable=True)
        with store.snapshot() as snapshot, penstock.connect(str(path)) as client:
            orders.trim(3, shard=0, durable=True)
            orders.put(b"later", time=5, durable=True)
            assert snapshot.queue("orders").changes().to_arrow().num_rows == 20
            later = orders.changes(after=snapshot.lsn).to_arrow()
            assert later["_change_type"].to_pylist() == ["delete", "delete", "insert"]
            assert all(headers for headers in later["headers"].to_pylist()[:2])
            assert later["timestamp"].cast("int64").to_pylist()[-1] == 5
            assert client.queue("orders").changes(after=snapshot.lsn).to_arrow().equals(later)
            assert client.queue("orders").changes().to_arrow().equals(orders.changes().to_arrow())
            until = later["_commit_version"][0].as_py()
            assert orders.changes(after=snapshot.lsn, until=until).to_arrow().num_rows == 2
            events = client.queue("made", changes=True)
            events.put(b"x", durable=True)
            assert [one[1:] for one in queue_changes(events)] == [("insert", 0, 1, b"x")]
        before = orders.changes().to_arrow()
    with penstock.open(str(path)) as store:
        orders = store.queue("orders", changes=True)
        assert orders.changes().to_arrow().equals(before)
        check_feed(orders, contents(orders), [], preimages=True)


def test_in_asyncio_and_by_load(path: Path) -> None:
    import pyarrow as pa

    async def main() -> list[Any]:
        async with penstock.aio.open(str(path)) as store:
            orders = await store.queue("orders", changes=True)
            await orders.put(b"a", durable=True)
            return [row async for batch in orders.changes() for row in batch.to_pylist()]

    (row,) = asyncio.run(main())
    assert (row["payload"], row["_change_type"], row["sequence"]) == (b"a", "insert", 1)
    with penstock.open(str(path)) as store:
        store.load("orders", pa.table({"payload": [b"x" * 100] * 5_000}))
        orders = store.queue("orders")
        assert orders.changes().to_arrow().num_rows == 5_001
        orders.trim(5_000, durable=True)
        check_feed(orders, contents(orders), [], preimages=False)


def test_the_feed_has_a_retention_of_its_own() -> None:
    """Messages that were trimmed stay in the feed, and changes that were trimmed stay in the queue."""
    disk, clock = SimulatedDisk(), FakeClock()
    with open_queues(disk, clock) as store:
        old = store.queue("old", changes=penstock.ChangeOptions(age_s=100))
        small = store.queue("small", changes=penstock.ChangeOptions(age_s=None, bytes_max=2_000))
        unlimited = store.queue("kept", changes=penstock.ChangeOptions(age_s=None, preimages=True))
        for number in range(20):
            for queue in (old, small, unlimited):
                queue.put(b"%d" % number + b"x" * 300, durable=True)
            clock.advance(10)
        for queue in (old, unlimited):
            queue.trim(20, durable=True)
        take_in_expired(store)
        for name in ("old", "small", "kept"):
            machine_of(store, name).drop_files()
        assert [change[1] for change in queue_changes(unlimited)] == ["insert"] * 20 + ["delete"] * 19
        inserts = [change for change in queue_changes(old) if change[1] == "insert"]
        assert 9 <= len(inserts) <= 11
        assert len(queue_changes(old)) == len(inserts) + 19
        assert 3 <= len(queue_changes(small)) <= 6
        assert len(small.read()) == 20
        assert machine_of(store, "old").queue.first_sequence > 1 == machine_of(store, "kept").queue.first_sequence
        with pytest.raises(NotFound, match="were trimmed"):
            old.changes(after=floors(old)[0] - 1).to_arrow()
        assert len(queue_changes(old, floors(old)[0])) == len(queue_changes(old))
        before = {name: queue_changes(store.queue(name)) for name in ("old", "small", "kept")}
    with open_queues(disk, clock) as store:
        take_in_expired(store)  # what went with no file is trimmed anew
        assert {name: queue_changes(store.queue(name)) for name in before} == before
        clock.advance(1_000)
        take_in_expired(store)
        assert queue_changes(store.queue("old")) == []
        machine_of(store, "old").drop_files()
        store.queue("old").put(b"again", durable=True)
        assert [change[1:4] for change in queue_changes(store.queue("old"))] == [("insert", 0, 21)]


def test_a_snapshot_keeps_the_feed_that_it_saw() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with open_queues(disk, clock) as store:
        queue = store.queue("q", changes=penstock.ChangeOptions(age_s=10))
        for _ in range(8):
            queue.put(b"x" * 600, durable=True)
        with store.snapshot() as snapshot:
            queue.trim(8, durable=True)
            clock.advance(100)
            take_in_expired(store)
            machine_of(store, "q").drop_files()
            assert queue_changes(queue) == []
            assert len(queue_changes(snapshot.queue("q"))) == 8
        machine_of(store, "q").drop_files()
        assert machine_of(store, "q").queue.first_sequence > 1


def test_options_are_chosen_at_creation(path: Path) -> None:
    with penstock.open(str(path)) as store:
        fed, plain = store.queue("fed", changes=penstock.ChangeOptions(preimages=True)), store.queue("plain")
        fed.alter(retention=penstock.Retention(age_s=5), headers=True)
        assert store.queue("fed", changes=True).retention == penstock.Retention(age_s=5)
        fed.put(b"x", headers={"a": b"b"}, durable=True)
        assert fed.changes().to_arrow()["headers"].to_pylist() == [[("a", b"b")]]
        for act, match in (
            (lambda: store.queue("plain", changes=True), "no change feed"),
            (plain.changes, "no change feed"),
            (lambda: store.queue("fed", changes=penstock.ChangeOptions()), "other options"),
        ):
            with pytest.raises(KindMismatch, match=match):
                act()
        info = store._port.table("fed")
        assert info is not None
        with pytest.raises(Invalid, match="chosen at its creation"):
            store._port.alter(info, encode_queue_options(QueueOptions(headers=True)))
        others: list[Any] = [None, 1, "true", [], penstock.Retention()]
        for wrong in others:
            with pytest.raises(Invalid, match="changes"):
                store.queue("t", changes=wrong)
        for after in (-1, "1", 1.5, True):
            with pytest.raises(Invalid, match="after"):
                fed.changes(after=after)  # type: ignore[arg-type]


def test_positions_of_the_feed_and_of_messages_are_apart(path: Path) -> None:
    """A consumer of each kind may have the same name, and that of the feed does not hold messages."""
    with penstock.open(str(path)) as store, penstock.connect(str(path)) as client:
        queue = store.queue("q", shards=2, changes=True, retention=penstock.Retention(acknowledged=True))
        plain = store.queue("plain")
        for number in range(6):
            queue.put(b"%d" % number, key=b"%d" % number, durable=True)
        consumer = queue.consumer("c")
        consumer.ack(consumer.get(10))
        port, infos = client.port, {name: store._port.table(name) for name in ("q", "plain")}
        state = port.plan_batch([], source="q", consumer="c", changes=True).source
        assert state is not None
        assert state.position == {0: 1, 1: 1}

        def move(table: str, shard: int, end: int) -> None:
            info = infos[table]
            assert info is not None
            with client.batch() as batch:
                batch.require(MOVE, argument(info.table_id, Move("c", [(shard, 1, end)])))

        move("q", COMPANION + 1, 5)
        state = port.plan_batch([], source="q", consumer="c", changes=True).source
        assert state is not None
        assert state.position == {0: 1, 1: 5}
        assert [one.name for one in queue.consumers()] == ["c"]
        assert queue.lag("c") == 0
        store._port.maintain()
        store.flush()
        assert queue.read() == []
        for table, shard in (("plain", COMPANION), ("q", COMPANION + 2), ("q", COMPANION - 1)):
            with pytest.raises(Invalid, match="no such shard"):
                move(table, shard, 5)
        assert plain.read() == []


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 32, b"\7" + b"\0" * 31, bytes([1, 0, 0, 0]) + b"\0" * 28, b"\0" * 24 + b"\1" + b"\0" * 7 + b"xx"],
)
def test_damaged_parts_are_an_error(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="do not decode|cut short"):
        read_changes(data, encode_queue_options(QueueOptions()))


def test_options_without_a_feed_are_as_before() -> None:
    assert encode_queue_options(QueueOptions()) == b"\x91\x93\xc0\xc0\xc2"
    assert encode_queue_options(QueueOptions(headers=True)) == b"\x92\x93\xc0\xc0\xc2\xc3"
    fed = QueueOptions(changes=penstock.ChangeOptions(preimages=True))
    assert decode_queue_options(encode_queue_options(fed)) == fed
