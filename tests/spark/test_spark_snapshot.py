"""A read is of one moment, whatever is written, flushed, compacted and collected meanwhile; and it lets go of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import penstock
import penstock.spark
from penstock.errors import StoreLocked
from penstock.lsm.collection import CollectionSettings
from penstock.store.settings import StoreSettings
from penstock.store.store import Store

ACCOUNTS = 20_000
RESTLESS = StoreSettings(collection=CollectionSettings(grace_s=0.0))  # files go as soon as nobody needs them


def load(spark: Any, folder: str, table: str, **options: str) -> Any:
    return spark.read.format("penstock").option("table", table).options(**options).load(folder)


@contextmanager
def traffic(store: Store) -> Iterator[None]:
    """Groups that move an amount from one account to another and tell so in a queue; flushes, compactions, removals."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        number = 0
        while not stop.is_set():
            with store.batch() as batch:
                accounts = batch.kv("accounts", value="int64")
                for step in range(20):
                    account = (number * 7919 + step * 613) % ACCOUNTS
                    accounts.merge(b"%06d" % account, -1, operator="add_i64")
                    accounts.merge(b"%06d" % ((account * 31 + 1) % ACCOUNTS), 1, operator="add_i64")
                accounts.merge(b"moves", 20, operator="add_i64")
                batch.queue("moves").put_many([b"move"] * 20, keys=[b"%d" % step for step in range(20)])
            number += 1

    def tidy() -> None:
        while not stop.wait(0.05):
            store.compact("accounts")
            store._collector.collect()

    def guarded(act: Any) -> Any:
        def run() -> None:
            try:
                act()
            except BaseException as error:
                failures.append(error)

        return run

    threads = [threading.Thread(target=guarded(act)) for act in (write, tidy)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert failures == []


def test_reads_under_traffic(spark: Any, folder: str) -> None:
    with penstock.open(folder, settings=RESTLESS) as store:
        accounts = store.kv("accounts", value="int64", shards=2)
        accounts.put_many({b"%06d" % number: 100 for number in range(ACCOUNTS)} | {b"moves": 0}, durable=True)
        store.queue("moves", shards=2)
        penstock.spark.views(spark, folder)
        with traffic(store), penstock.connect(folder) as connected, connected.snapshot() as snapshot:
            balances = dict(snapshot.kv("accounts").scan())
            moves = snapshot.queue("moves").to_arrow().num_rows
            counts = []
            for _ in range(3):
                row = spark.sql(
                    "select (select sum(value) from accounts where key <> binary('moves')),"
                    " (select value from accounts where key = binary('moves')), (select count(*) from moves)"
                ).first()
                assert row[0] == 100 * ACCOUNTS  # both sides of every move, or neither
                assert row[1] == row[2]  # the queue at the same moment
                counts.append(row[2])
            assert counts == sorted(set(counts))  # a later query sees more
            old = load(spark, folder, "accounts", snapshot=snapshot.id, splits="4").collect()
            assert {bytes(row.key): row.value for row in old} == balances
            assert load(spark, folder, "moves", snapshot=snapshot.id).count() == moves


def test_the_lease_of_a_snapshot(spark: Any, store: Store, folder: str) -> None:
    store.kv("t").put(b"a", b"1", durable=True)
    with penstock.connect(folder) as connected:
        snapshot = connected.snapshot(lease_s=1.0)
        frame = load(spark, folder, "t", snapshot=snapshot.id)
        assert frame.count() == 1
        time.sleep(3.5)
        with pytest.raises(Exception, match="the snapshot was closed, or was not used for its lease"):
            frame.count()


def test_a_store_that_nobody_owned_can_be_opened_after_a_read(spark: Any, folder: str) -> None:
    with penstock.open(folder) as store:
        store.kv("t", value="int64").put_many({b"%05d" % number: number for number in range(20_000)})
        store.queue("q", shards=2).put_many([b"x"] * 20_000, keys=[b"%d" % number for number in range(20_000)])
    table, queue = load(spark, folder, "t", splits="4"), load(spark, folder, "q", splits="4")
    assert table.count() == queue.count() == 20_000
    assert len(queue.take(1)) == len(table.take(1)) == 1  # one task was cut short, others were never run
    with penstock.open(folder, timeout_s=30.0) as store:
        store.kv("t").delete(b"00000", durable=True)
        assert table.count() == 19_999  # the same frames, and another owner
        with pytest.raises(StoreLocked):
            penstock.open(folder)
    assert table.count() == 19_999
    with penstock.open(folder, timeout_s=30.0):
        pass
