"""`penstock.spark.search`: the tasks find what the owner finds, in their own files or through it, at one snapshot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock
import penstock.spark
from penstock.errors import Invalid, KindMismatch
from penstock.spark import searching
from penstock.store.store import Store

CHANCE = np.random.default_rng(5)
VECTORS = CHANCE.normal(size=(400, 8)).astype(np.float32)
QUERIES = CHANCE.normal(size=(21, 8)).astype(np.float32)


def fill(store: Store, *, shards: int = 2) -> Any:
    docs = store.vector("docs", dimensions=8, metric="euclidean", shards=shards)
    attributes = [{"shelf": number % 5} for number in range(400)]
    docs.upsert([f"doc-{number}" for number in range(400)], VECTORS, attributes=attributes)
    docs.delete([f"doc-{number}" for number in range(0, 400, 7)])
    store.flush()
    return docs


def queries(spark: Any) -> Any:
    rows = [(number, row.tolist()) for number, row in enumerate(QUERIES)]
    return spark.createDataFrame(rows, "number int, vector array<float>").repartition(3)


def found(frame: Any) -> dict[tuple[int, int], tuple[str, float, str]]:
    rows = frame.collect()
    hits = {(row.number, row["rank"]): (row.id, round(row.distance, 4), row.attributes) for row in rows}
    assert len(hits) == len(rows)
    return hits


def expected(table: Any, **options: Any) -> dict[tuple[int, int], tuple[str, float, str]]:
    rows = table.search(QUERIES, **options).to_pylist()
    return {(row["query"], row["rank"]): (row["id"], round(row["distance"], 4), row["attributes"]) for row in rows}


def test_tasks_find_what_the_owner_finds(spark: Any, store: Store, folder: str, monkeypatch: Any) -> None:
    docs = fill(store)
    search = penstock.spark.search
    plain = search(queries(spark), folder, "docs", k=5)
    assert [field.name for field in plain.schema] == ["number", "vector", "rank", "id", "distance", "attributes"]
    assert found(plain) == expected(docs, k=5)
    where = {"shelf": [1, 3]}
    assert found(search(queries(spark), folder, "docs", k=3, where=where)) == expected(docs, k=3, where=where)
    with penstock.connect(folder) as client, client.snapshot() as snapshot:
        before = expected(docs, k=2, exact=True)
        docs.upsert([f"new-{number}" for number in range(21)], QUERIES, durable=True)
        old = search(queries(spark), folder, "docs", k=2, exact=True, snapshot=snapshot.id)
        assert found(old) == before
    assert {hit[0][:4] for (_, rank), hit in found(search(queries(spark), folder, "docs", k=1)).items()} == {"new-"}


def test_tasks_that_do_not_see_the_files_ask_the_owner(store: Store, folder: str, monkeypatch: Any) -> None:
    """Without Spark: the function of a task, in this process."""
    docs = fill(store, shards=1)
    ref = searching.TableRef.of({"path": folder, "table": "docs"})
    wanted = searching.NeighbourSearch(ref, ref.info(), "plan", "", "vector", 4, None, 0, exact=True)
    import pyarrow as pa

    batch = pa.record_batch({"vector": pa.array(QUERIES.tolist(), pa.list_(pa.float32()))})
    here = pa.Table.from_batches(list(searching._neighbours(wanted, iter([batch]))))
    assert searching._opened
    searching._opened.clear()
    monkeypatch.setattr(searching, "_shards", lambda *_: None)
    there = pa.Table.from_batches(list(searching._neighbours(wanted, iter([batch]))))
    assert here.equals(there)
    assert here.column("id").to_pylist() == docs.search(QUERIES, k=4, exact=True).column("id").to_pylist()
    assert list(searching._neighbours(wanted, iter([]))) == []


def test_what_is_refused(spark: Any, store: Store, folder: str) -> None:
    fill(store)
    store.kv("rows")
    frame = queries(spark)
    with pytest.raises(KindMismatch, match="which has no vectors"):
        penstock.spark.search(frame, folder, "rows")
    with pytest.raises(Invalid, match="has no column 'embedding'"):
        penstock.spark.search(frame, folder, "docs", vector="embedding")
    with pytest.raises(Invalid, match="has a column 'id'"):
        penstock.spark.search(frame.withColumnRenamed("number", "id"), folder, "docs")
    with pytest.raises(Invalid, match="k is a whole number"):
        penstock.spark.search(frame, folder, "docs", k=0)
