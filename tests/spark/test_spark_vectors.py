"""Spark reads, writes and searches vector tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import penstock.spark
from penstock.store.store import Store
from penstock.vector import indexing

RNG = np.random.default_rng(5)


def load(spark: Any, folder: str, table: str, **options: str) -> Any:
    return spark.read.format("penstock").option("table", table).options(**options).load(folder)


def test_a_round_trip_keeps_everything(spark: Any, store: Store, folder: str) -> None:
    docs, copy = store.vector("docs", dimensions=4, shards=2), store.vector("copy", dimensions=4)
    rows = RNG.normal(size=(300, 4)).astype(np.float32)
    docs.upsert([f"ü {n}" for n in range(300)], rows, [{"n": n, "text": "x"} if n % 2 else None for n in range(300)])
    docs.upsert("ü 7", rows[8], {"on": True})
    docs.delete("ü 9", durable=True)
    frame = load(spark, folder, "docs", splits="4")
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
        ("id", "string"), ("vector", "array<float>"), ("attributes", "string"),
    ]  # fmt: skip
    assert frame.count() == 299
    frame.write.format("penstock").option("table", "copy").mode("append").save(folder)
    assert copy.to_arrow().sort_by("id").equals(docs.to_arrow().sort_by("id"))
    columns = "id string, vector array<double>, n int, b boolean"
    more = spark.createDataFrame([("new", [1.0, 2.0, 3.0, 4.0], 5, True)], columns)
    for duplicate in (False, True):
        done = penstock.spark.commit(folder, {"copy": more}, token=("loader", 1))
        assert done.duplicate is duplicate
    record: Any = copy.get("new")
    assert (record.vector.tolist(), record.attributes) == ([1.0, 2.0, 3.0, 4.0], {"n": 5, "b": True})
    wrong = spark.createDataFrame([("new", [1.0, 2.0])], "id string, vector array<double>")
    with pytest.raises(Exception, match="4 dimensions"):
        penstock.spark.commit(folder, {"copy": wrong})
    assert penstock.spark.verify(spark, folder) == []


@pytest.mark.parametrize("trained", [False, True])
def test_a_search_finds_what_the_embedded_one_finds(
    spark: Any, store: Store, folder: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "TRAINED_ROWS_MIN", 500)
    docs = store.vector("docs", dimensions=8, metric="euclidean", shards=2)
    rows = RNG.normal(size=(2_000, 8)).astype(np.float32)
    docs.upsert([str(n) for n in range(2_000)], rows, [{"n": n} for n in range(2_000)], durable=True)
    docs.delete([str(n) for n in range(100)], durable=True)
    if trained:
        assert store.reindex("docs")
        store.compact("docs")  # from files; otherwise rows in memory come with the plan
    queries = [(n, [float(value) for value in rows[n]]) for n in range(90, 150)]
    frame = spark.createDataFrame(queries, "name int, vector array<float>").repartition(2)
    for options in ({}, {"exact": True}, {"where": {"n": {">=": 1_000}}}, {"where": pc.field("n") < 200}):
        found = penstock.spark.search(frame, folder, "docs", k=3, **options).collect()
        wanted: Any = docs.search(rows[90:150], k=3, **options)
        expected = sorted((90 + row["query"], row["rank"], row["id"], row["attributes"]) for row in wanted.to_pylist())
        assert sorted((r["name"], r["rank"], r["neighbor"], r["neighbor_attributes"]) for r in found) == expected
    mistakes: list[dict[str, Any]] = [{"table": "nothing"}, {"k": 0}, {"column": "name"}]
    for wrong in mistakes:
        arguments: dict[str, Any] = {"path": folder, "table": "docs", **wrong}
        with pytest.raises(penstock.errors.PenstockError):
            penstock.spark.search(frame, **arguments)
