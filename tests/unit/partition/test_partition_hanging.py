"""Files that hang in less common places: openings, a checkpoint of a dropped table, a get; and through `connect`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import PartitionPaused, WaitExpired
from penstock.host.waiting import pause
from penstock.queue import service
from penstock.queue.machine import QueueMachine
from penstock.store.store import Store

JOIN_S = 30.0


def settings(stall_s: float, *, serve: bool = False) -> penstock.StoreSettings:
    return penstock.StoreSettings(dispatcher=penstock.DispatcherSettings(stall_s=stall_s), serve=serve)


def until(condition: Callable[[], object]) -> None:
    for _ in range(1_000):
        if condition():
            return
        pause(0.02)
    raise AssertionError("it did not come about")


def beside(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def healed() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def hang(monkeypatch: pytest.MonkeyPatch, method: str, healed: threading.Event) -> list[str]:
    """Let a method of the queues whose names begin with `sick` hang; return who is, or was, in it."""
    entered: list[str] = []
    original = getattr(QueueMachine, method)

    def patched(machine: QueueMachine, *arguments: Any) -> Any:
        if machine._descriptor.name.startswith("sick"):
            entered.append(machine._descriptor.name)
            healed.wait(JOIN_S)
        return original(machine, *arguments)

    monkeypatch.setattr(QueueMachine, method, patched)
    return entered


def test_a_snapshot_waits_for_openings_that_hang_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, healed: threading.Event
) -> None:
    names = [f"sick{number}" for number in range(3)]
    with penstock.open(tmp_path, settings=settings(1.0)) as store:
        for name in names:
            store.queue(name).put(b"x", durable=True)
        assert isinstance(store, Store)
        store._dispatcher.await_all(JOIN_S)
        store._checkpoint.clear()  # the next opening replays nothing, so that it opens none of them
    entered = hang(monkeypatch, "_open", healed)
    with penstock.open(tmp_path, settings=settings(600.0)) as store:
        lsns: list[int] = []

        def take() -> None:
            with store.snapshot() as snapshot:
                lsns.append(snapshot.queue("sick0").to_arrow().num_rows)

        thread = beside(take)
        until(lambda: sorted(entered) == names)  # the second does not wait until the first is given up
        healed.set()
        thread.join(JOIN_S)
        assert lsns == [1]


def test_a_table_is_dropped_while_a_checkpoint_hangs_in_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, healed: threading.Event
) -> None:
    with penstock.open(tmp_path, settings=settings(0.5)) as store:
        assert isinstance(store, Store)
        store.queue("sick").put(b"x", durable=True)
        assert store.queue("sick").to_arrow().num_rows == 1
        entered = hang(monkeypatch, "store_now", healed)
        store._consensus.roll()
        checkpoint = beside(store.checkpoint)
        until(lambda: entered)
        store.drop("sick")
        assert store._dispatcher.hanging() == {"sick"}, "a thread is still in its files"
        assert not store._dropped._shards, "they are not deleted under it"
        store.kv("well").put(b"a", b"1", durable=True)
        healed.set()
        checkpoint.join(JOIN_S)
        until(lambda: not store._dispatcher.hanging() and not store._dispatcher.backlogs.dropped)
    with penstock.open(tmp_path) as store:
        assert store.tables() == ["well"]


def test_a_get_does_not_wait_long_for_a_queue_that_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, healed: threading.Event
) -> None:
    monkeypatch.setattr(service, "GET_WAIT_S", 0.1)
    with penstock.open(tmp_path, settings=settings(600.0)) as store:
        sick = store.queue("sick")
        consumer = sick.consumer("c")
        assert list(consumer.get(1)) == []
        hang(monkeypatch, "apply", healed)
        sick.put(b"x", durable=True)
        with pytest.raises(WaitExpired, match="has not applied record"):
            consumer.get(1)
        healed.set()
        until(lambda: [message.payload for message in consumer.get(1, timeout_s=5)] == [b"x"])


def test_clients_of_other_tables_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, healed: threading.Event
) -> None:
    hang(monkeypatch, "apply", healed)
    with penstock.open(tmp_path, settings=settings(0.2, serve=True)) as store, penstock.connect(tmp_path) as client:
        sick, well, events = client.queue("sick"), client.kv("well"), client.queue("events")
        sick.put(b"x", durable=True)
        until(lambda: any(partition.state == "frozen" for partition in client.statistics().partitions))
        with pytest.raises(PartitionPaused) as frozen:
            sick.to_arrow()
        assert (frozen.value.table, frozen.value.state) == ("sick", "frozen")
        with pytest.raises(PartitionPaused):
            sick.put(b"y", durable=True)
        for number in range(5):
            well.put(b"%d" % number, b"1", durable=True)
            events.put(b"%d" % number, durable=True)
        assert len(list(well.scan())) == events.to_arrow().num_rows == 5
        with client.snapshot() as snapshot:
            assert snapshot.kv("well").get(b"4") == b"1"
            with pytest.raises(PartitionPaused):
                snapshot.queue("sick").to_arrow()
        assert client.wait_for(store.statistics().applied_lsn, tables=["well", "events"], timeout_s=10)
        healed.set()
        until(lambda: all(partition.state == "active" for partition in client.statistics().partitions))
        assert sick.to_arrow().num_rows == 1
