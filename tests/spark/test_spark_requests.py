"""How many requests Spark makes to the owner of a store: few, however many shards there are. The guide names them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F

import penstock.spark
from penstock.store.store import Store

ROWS = 50  # of a micro-batch
GUIDE = {"PlanBatch": 2, "ScanRanges": 1, "Write": 1}  # what docs/guide/spark.md says a small batch costs


def requests(store: Store) -> Counter[str]:
    """How many requests of each name the owner has answered, but for those by which a new process connects."""
    families = [family for family in store.metrics.families() if family.name == "requests_total"]
    samples = families[0].samples if families else {}  # there are none before the first client
    counts = Counter(
        {name: round(count) for (name,), count in samples.items() if isinstance(count, float | int) and count}
    )
    del counts["Hello"]
    return counts


def route_to(tables: list[str]) -> Any:
    """A queue named `copied...` gets the messages, any other table the count of each key."""

    def route(frame: Any) -> dict[str, Any]:
        counts = frame.groupBy("key").agg(F.count("*").alias("value"))
        rows = counts.select("key", "value", F.lit("add_i64").alias("op"))
        return {name: frame.select("key", "payload") if name == "copied" else rows for name in tables}

    return route


@pytest.mark.parametrize(
    ("shards", "tables"), [(1, ["totals"]), (4, ["totals", "copied", "again"])], ids=["one table", "three tables"]
)
def test_a_micro_batch(spark: Any, store: Store, folder: str, tmp_path: Path, shards: int, tables: list[str]) -> None:
    """4 requests and 1 for each table at most. What several batches cost more than few is what a batch costs."""
    events = store.queue("events", shards=shards)
    for name in tables:
        store.queue(name, shards=2) if name == "copied" else store.kv(name, value="int64", shards=2)
    total = 0

    def run(batches: int) -> Counter[str]:
        nonlocal total
        keys = [b"%d" % (number % 7) for number in range(batches * ROWS)]
        events.put_many([b"x"] * len(keys), keys=keys, durable=True)
        before, total = requests(store), total + len(keys)
        query = penstock.spark.stream(
            spark,
            folder,
            source="events",
            consumer="c",
            batch=route_to(tables),
            checkpoint=str(tmp_path / "checkpoint"),
            max_rows=ROWS,
            available_now=True,
        )
        done = penstock.spark.wait(query, 200)
        assert (done.rows_in, done.lag) == (len(keys), 0)
        assert done.batches >= batches
        return requests(store) - before + Counter({"batches": done.batches})

    run(2)  # the first stream of a consumer asks twice more
    few, many = run(2), run(7)
    assert sum(value for _, value in store.kv("totals", value="int64").scan()) == total
    more = many - few
    batches = more.pop("batches")
    assert batches >= 4
    limit = batches * (4 + len(tables))
    assert sum(more.values()) <= limit, f"{batches} batches made {dict(more)}"
    assert more == {name: batches * count for name, count in GUIDE.items()}, "say it in docs/guide/spark.md"


@pytest.mark.parametrize("options", [{}, {"splits": "8"}], ids=["by size", "splits"])
def test_a_read_is_planned_in_one_request(spark: Any, store: Store, folder: str, options: dict[str, str]) -> None:
    table = store.kv("t", shards=4)
    table.put_many({b"%05d" % number: b"x" for number in range(5_000)}, durable=True)
    before = requests(store)
    frame = spark.read.format("penstock").option("table", "t").options(**options).load(folder)
    assert requests(store) - before == {"FindTable": 1}  # for its schema
    tasks = frame.rdd.getNumPartitions()  # which plans it
    assert tasks >= 4
    assert requests(store) - before == {"FindTable": 2, "CutRanges": 1}
    assert frame.count() == 5_000
    more = requests(store) - before
    assert more["CutRanges"] == 1, "Spark keeps the plan"
    assert more["TakeSnapshot"] == more["CutPieces"] == tasks


def test_a_write(spark: Any, store: Store, folder: str) -> None:
    """Tasks with few rows ask nothing."""
    store.kv("t", shards=4, value="int64")
    before = requests(store)
    rows = spark.range(0, 1_000, 1, 4).selectExpr("cast(cast(id as string) as binary) key", "id value")
    rows.write.format("penstock").option("table", "t").mode("append").save(folder)
    assert len(list(store.kv("t").scan())) == 1_000
    more = requests(store) - before
    assert more["Write"] == 1
    assert sum(more.values()) <= 4, dict(more)
