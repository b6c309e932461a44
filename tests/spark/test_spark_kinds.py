"""Spark reads and writes a kind that it has never heard of: the toy kind of the contract suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock.spark
from penstock.store.store import Store


def load(spark: Any, folder: str, **options: str) -> Any:
    return spark.read.format("penstock").option("table", "bank").options(**options).load(folder)


def test_read_and_write(spark: Any, store: Store, folder: str) -> None:
    bank = store.create("bank", "accounts", shards=2)
    bank.transfer("ada", "bob", 5, durable=True)
    rows = spark.range(0, 1_000, 1, 4).selectExpr("concat('account ', id % 10) account", "id amount")
    rows.write.format("penstock").option("table", "bank").mode("append").save(folder)
    assert bank.balances("account").to_pylist() == [
        {"account": f"account {number}", "bookings": 100, "balance": sum(range(number, 1_000, 10))}
        for number in range(10)
    ]
    frame = load(spark, folder, splits="4")
    assert frame.columns == ["account", "amount", "lsn"]
    assert frame.count() == 1_002
    sums = frame.groupBy("account").sum("amount").collect()
    assert {row[0]: row[1] for row in sums if not row[0].startswith("account")} == {"ada": -5, "bob": 5}
    assert load(spark, folder, start="ada", end="bob").count() == 1
    frame.limit(3).write.format("penstock").option("table", "bank").mode("append").save(folder)  # what was read fits
    assert load(spark, folder).count() == 1_005
    assert penstock.spark.verify(spark, folder) == []


def test_several_tables_in_one_commit(spark: Any, store: Store, folder: str) -> None:
    bank, events = store.create("bank", "accounts"), store.queue("events")
    events.put_many([b"ada", b"bob", b"ada"], durable=True)

    def route(frame: Any) -> dict[str, Any]:
        return {"bank": frame.selectExpr("string(payload) account", "1L amount")}

    query = penstock.spark.stream(spark, folder, source="events", consumer="c", batch=route, available_now=True)
    assert penstock.spark.wait(query).rows_out == 3
    assert (bank.balance("ada"), bank.balance("bob"), events.lag("c")) == (2, 1, 0)


def test_what_the_kind_cannot_do(spark: Any, store: Store, folder: str, tmp_path: Path) -> None:
    store.create("bank", "accounts")
    rows = spark.sql("select 'ada' account, 1L amount")
    with pytest.raises(Exception, match=r"bank is of the kind accounts, which is only appended to: use mode\('append'"):
        rows.write.format("penstock").option("table", "bank").mode("overwrite").save(folder)
    with pytest.raises(Exception, match="bookings have the columns account and amount, not account"):
        rows.select("account").write.format("penstock").option("table", "bank").mode("append").save(folder)
    stream = spark.readStream.format("penstock").option("table", "bank").load(folder)
    out = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(Exception, match="bank is of the kind accounts, which cannot be streamed: read it instead"):
        out.trigger(availableNow=True).start().awaitTermination()
