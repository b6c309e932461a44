"""`store.wait_for`: embedded, over `connect`, and in asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import penstock
import penstock.aio
from penstock.errors import Invalid, NotFound, PartitionPaused, WaitExpired
from penstock.partition.machine import Entry
from penstock.queue.machine import QueueMachine

SETTINGS = penstock.StoreSettings(dispatcher=penstock.DispatcherSettings(stall_s=0.5))


def check(store: Any) -> None:
    events, users = store.queue("events"), store.kv("users")
    lsn = events.append(b"e").lsn
    assert store.wait_for(lsn) >= lsn
    assert store.wait_for(lsn, tables=["events"], timeout_s=10.0) >= lsn
    assert store.wait_for(0, tables=[]) >= 0
    users.put(b"k", b"v", durable=True)
    assert store.wait_for(lsn, tables=("users", "events")) >= lsn  # one is idle
    with pytest.raises(WaitExpired, match=f"record {lsn + 1000} was not applied"):
        store.wait_for(lsn + 1000, timeout_s=0.05)
    with pytest.raises(NotFound, match="there is no table nobody"):
        store.wait_for(lsn, tables=["nobody"])
    for wrong in (-1, 1.5, "1", None, True, 1 << 63):
        with pytest.raises(Invalid):
            store.wait_for(wrong)
    for wrong_tables in ("events", b"events", [1]):
        with pytest.raises(Invalid):
            store.wait_for(lsn, tables=wrong_tables)
    with pytest.raises(Invalid):
        store.wait_for(lsn, timeout_s=-1)


def test_embedded_and_connected(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store", settings=SETTINGS) as store:
        check(store)
        with penstock.connect(tmp_path / "store") as client:
            check(client)


def test_in_asyncio(tmp_path: Path) -> None:
    async def main() -> None:
        async with penstock.aio.open(tmp_path / "store") as store:
            events = await store.queue("events")
            lsn = (await events.append(b"e")).lsn
            assert await store.wait_for(lsn, tables=["events"]) >= lsn

    asyncio.run(main())


def test_it_waits_for_a_late_table_and_not_for_a_frozen_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply, healed = QueueMachine.apply, threading.Event()

    def blocked(machine: QueueMachine, entry: Entry) -> None:
        healed.wait(60)
        apply(machine, entry)

    with penstock.open(tmp_path / "store", settings=SETTINGS) as store:
        store.queue("events").put(b"0", durable=True)
        users = store.kv("users")
        monkeypatch.setattr(QueueMachine, "apply", blocked)
        try:
            store.queue("events").put(b"1", durable=True)
            lsn = store.statistics().durable_lsn
            assert store.wait_for(lsn, tables=["users"]) >= lsn
            with pytest.raises(WaitExpired, match="shard 0 of events has not applied record"):
                store.wait_for(lsn, tables=["events"], timeout_s=0.1)
            with pytest.raises(PartitionPaused, match="frozen"):
                store.wait_for(lsn, timeout_s=30.0)
            users.put(b"k", b"v", durable=True)
            with penstock.connect(tmp_path / "store") as client:
                with pytest.raises(PartitionPaused, match="frozen") as caught:
                    client.wait_for(lsn, tables=["events"])
                assert (caught.value.table, caught.value.state, caught.value.limit) == ("events", "frozen", "stall_s")
                assert client.kv("users").get(b"k") == b"v"
                with pytest.raises(PartitionPaused, match="frozen"):
                    client.queue("events").put(b"2", durable=True)
        finally:
            healed.set()
        while store.statistics().global_applied_floor < lsn:  # it is frozen until its worker has gone on
            time.sleep(0.01)
        assert store.wait_for(lsn) >= lsn
        assert store.queue("events").to_arrow().num_rows == 2
