"""Spark reads, writes and searches vector tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import penstock.spark
from penstock.client.store import RemoteStore
from penstock.spark import reading, vectors
from penstock.spark.table_ref import TableRef
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


def test_a_task_that_searches_for_long_renews_the_lease(
    store: Store, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tasks after it, minutes later, find the snapshot of their query closed."""
    store.vector("docs", dimensions=2).upsert("a", [1.0, 0.0], durable=True)
    monkeypatch.setattr(vectors, "query_name", lambda function: "a query")
    now = iter(range(0, 1_000, 10))
    monkeypatch.setattr(reading, "clock", SimpleNamespace(monotonic_s=lambda: float(next(now))))
    ref = TableRef.of({"path": folder, "table": "docs"})
    renewed, snapshot_of = list[str](), RemoteStore.snapshot

    def snapshot(self: RemoteStore, id: str = "") -> Any:  # noqa: A002
        renewed.append(id)
        return snapshot_of(self, id)

    monkeypatch.setattr(RemoteStore, "snapshot", snapshot)
    request = vectors._Search(ref, ref.info(), "vector", 1, 0, False, None)
    batch = pa.record_batch({"vector": pa.array([[1.0, 0.1]], pa.list_(pa.float64()))})
    parts = list(vectors._task(request, iter([batch.slice(0, 0), batch, batch, batch])))
    assert [part.column("neighbor").to_pylist() for part in parts] == [["a"]] * 3
    assert len(renewed) == 3
    assert len(set(renewed)) == 1
    assert list(vectors._task(request, iter([batch.slice(0, 0)]))) == []
    monkeypatch.setattr(vectors, "HITS_MAX", 2)  # a task of many neighbours makes some at a time
    many = pa.concat_batches([batch] * 5)
    parts = list(vectors._task(request, iter([many])))
    assert [part.num_rows for part in parts] == [2, 2, 1]
    assert [part.column("neighbor").to_pylist() for part in parts] == [["a", "a"], ["a", "a"], ["a"]]


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
        neighbors = penstock.spark.search(frame, folder, "docs", k=3, **options).collect()
        hits: Any = docs.search(rows[90:150], k=3, **options)
        expected = sorted((90 + row["query"], row["rank"], row["id"], row["attributes"]) for row in hits.to_pylist())
        assert sorted((r["name"], r["rank"], r["neighbor"], r["neighbor_attributes"]) for r in neighbors) == expected
    mistakes: list[dict[str, Any]] = [
        {"table": "nothing"},
        {"k": 0},
        {"column": "name"},
        {"where": {"n": {"~": 1}}},
        {"where": "n"},
    ]
    for wrong in mistakes:
        arguments: dict[str, Any] = {"path": folder, "table": "docs", **wrong}
        with pytest.raises(penstock.errors.PenstockError):
            penstock.spark.search(frame, **arguments)
