"""What a client leaves behind when it closes its connection, and what its tables say afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import Closed, GateShut, LeaseLost
from penstock.queue.leases import Leases


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[penstock.Store]:
    with penstock.open(tmp_path / "store") as store:
        store.queue("events", shards=2).put_many([b"a", b"b", b"c"], keys=[b"1", b"2", b"3"], durable=True)
        yield store


def test_its_messages_are_delivered_again_at_once(owner: penstock.Store) -> None:
    mine = owner.queue("events").consumer("c")
    with penstock.connect(owner.path) as first, penstock.connect(owner.path) as second:
        taken = first.queue("events").consumer("c").get(2)
        others = second.queue("events").consumer("c").get()
        assert len(taken) + len(others) == 3
        first.queue("events").consumer("c").ack(taken[0])
        assert mine.get() == []
        first.close()
        again = mine.get()
        assert [message.payload for message in again] == [taken[1].payload], "those of the other client stay with it"
        assert again[0].deliveries == 2
        second.queue("events").consumer("c").ack(others)
        with pytest.raises(LeaseLost):
            mine.ack(taken[1])


def test_a_client_that_exited_does_not_keep_open_waiting(tmp_path: Path) -> None:
    with penstock.connect(tmp_path / "store", create=True) as client:
        client.queue("events").put(b"m", durable=True)
        assert len(client.queue("events").consumer("c", visibility_timeout_s=600).get()) == 1
    with penstock.open(tmp_path / "store", timeout_s=20) as store:  # otherwise its owner is needed for ten minutes
        assert len(store.queue("events").consumer("c").get()) == 1


def test_leases_that_stay_would_be_noticed(owner: penstock.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded bug: nobody is told that the client left."""
    monkeypatch.setattr(Leases, "leave", lambda *_: None)
    with pytest.raises(AssertionError):
        test_its_messages_are_delivered_again_at_once(owner)


def test_what_ended_leases_leave_in_memory(owner: penstock.Store) -> None:
    with penstock.connect(owner.path) as client:
        consumer = client.queue("events").consumer("c")
        for _ in range(5):
            consumer.nack(consumer.get())
        service = owner.port._service(owner.port.table("events"))  # type: ignore[arg-type]
        leases = service._deliveries._leases  # type: ignore[union-attr]
        assert leases._by_holder
        consumer.ack(consumer.get())
        service.maintain()  # type: ignore[union-attr]
    assert not leases._by_holder


def test_uses_after_the_end(owner: penstock.Store) -> None:
    client = penstock.connect(owner.path)
    users, events = client.kv("users"), client.queue("events")
    consumer, batch = events.consumer("c"), client.batch()
    batch.kv("users").put(b"k", b"v")
    client.close()
    for act in (
        lambda: users.put(b"k", b"v"),
        lambda: users.put(b"k", b"v", durable=True),
        lambda: users.get(b"k"),
        lambda: list(users.scan()),
        lambda: events.put(b"m", token=("p", 1)),
        consumer.get,
        lambda: consumer.get(timeout_s=5),
        batch.commit,
        client.flush,
        client.tables,
        lambda: client.compact("users"),
        lambda: client.port.flush(None),
        lambda: client.port.flush(1),
    ):
        with pytest.raises(Closed, match="closed: connect again") as caught:
            act()
        assert "\n" not in str(caught.value)
    client.close()


def test_compaction(owner: penstock.Store) -> None:
    with penstock.connect(owner.path) as client:
        users = client.kv("users")
        for part in range(3):
            users.put_many({b"%d" % number: b"%d" % part for number in range(100)}, durable=True)
            owner.checkpoint()
        report = client.compact("users")
        assert (report.shards, report.files_after) == (1, 1)
        assert users.get(b"7") == b"2"
        assert client.compact("users", timeout_s=0) == owner.compact("users", timeout_s=0)
        assert issubclass(GateShut, penstock.errors.RetryLater)
