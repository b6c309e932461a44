"""The index of a vector table: made, maintained and repaired by jobs; recall, snapshots and reopening meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.errors import KindMismatch, NotFound
from penstock.kinds import partitions_of
from penstock.lsm import file_pieces
from penstock.manifest.records import JobKind
from penstock.store.store import Store
from penstock.vector import indexing
from penstock.vector.stored import read_generations

RNG = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand vectors are enough for an index."""
    monkeypatch.setattr(indexing, "TRAINED_ROWS_MIN", 1_000)
    monkeypatch.setattr(indexing, "ASSIGN_IDS", 400)
    monkeypatch.setattr(indexing, "ASSIGN_PARTS", 2)


def clusters(count: int, at: float = 0.0, dimensions: int = 16) -> Any:
    centres = RNG.normal(size=(20, dimensions)) * 4 + at
    return (centres[RNG.integers(20, size=count)] + RNG.normal(size=(count, dimensions))).astype(np.float32)


def machine_of(store: Store, name: str = "docs") -> Any:
    info = store.port.table(name)
    assert info is not None
    return store.port.machine(partitions_of(info)[0])


def table(docs: Any, queries: Any, **options: Any) -> Any:
    return docs.search(queries, k=5, **options)


def recall(docs: Any, queries: Any, k: int = 10) -> float:
    approximate, truth = (docs.search(queries, k, exact=exact).to_pylist() for exact in (False, True))
    hits = [
        {row["id"] for row in rows if row["query"] == n} for n in range(len(queries)) for rows in (approximate, truth)
    ]
    return float(np.mean([len(a & b) / k for a, b in zip(hits[::2], hits[1::2], strict=True)]))


def test_an_index_is_made_while_much_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More is in memory than a piece carries, whenever a step is planned."""
    monkeypatch.setattr(file_pieces, "CARRIED_BYTES_MAX", 1_000)
    rows = clusters(2_000)
    with penstock.open(tmp_path / "store") as store:
        docs: Any = store.vector("docs", dimensions=16, metric="euclidean")
        docs.upsert([str(n) for n in range(2_000)], rows, durable=True)
        machine, writes = machine_of(store), list[int]()
        store_now = machine.store_now

        def store_and_write() -> None:
            store_now()
            first = 100 * len(writes)
            writes.append(first)
            docs.delete([str(n) for n in range(first, first + 10)], durable=True)
            docs.upsert([str(n) for n in range(first + 10, first + 100)], rows[first + 10 : first + 100], durable=True)

        machine.store_now = store_and_write
        assert store.reindex("docs") >= 4
        machine.store_now = store_now
        assert writes
        assert docs.count() == 2_000 - 10 * len(writes)
        assert docs.statistics().trained
        assert recall(docs, rows[1_500:1_560]) >= 0.95
        hits = {hit.id for hit in docs.search(rows[0], k=2_000, probes=10_000)}
        assert hits == set(docs.to_arrow().column("id").to_pylist())


def test_deletes_alone_leave_the_lists_in_the_end(tmp_path: Path) -> None:
    rows = clusters(3_000)
    with penstock.open(tmp_path / "store") as store:
        docs: Any = store.vector("docs", dimensions=16, metric="euclidean")
        docs.upsert([str(n) for n in range(3_000)], rows, durable=True)
        store.reindex("docs")
        for end in (1_900, 3_000):  # most, and then all
            docs.delete([str(n) for n in range(end)], durable=True)
            assert store.reindex("docs") >= 2
            assert docs.statistics().deleted == 0
            assert len(docs.search(rows[0], k=2_000, probes=10_000)) == 3_000 - end


def test_an_index_is_made_and_used(tmp_path: Path) -> None:
    rows = clusters(3_000)
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs", dimensions=16, metric="euclidean")
        docs.upsert([str(n) for n in range(900)], rows[:900])
        assert store.reindex("docs") == 0  # too few
        assert not docs.statistics().trained
        docs.upsert([str(n) for n in range(3_000)], rows)
        docs.delete([str(n) for n in range(100)], durable=True)
        with store.snapshot() as before:
            assert store.reindex("docs") >= 4  # train, assign in steps, use
            assert store.reindex("docs") == 0
            docs.delete([str(n) for n in range(100, 200)], durable=True)
            assert recall(docs, rows[200:260]) >= 0.95
            early = before.vector("docs")
            assert early.search(rows[150], k=1)[0].id == "150"
            assert docs.search(rows[150], k=1)[0].id != "150"
        statistics = docs.statistics()
        assert statistics.trained
        assert statistics.lists > 10
        assert statistics.deleted == 100
        assert statistics.recall is not None
        assert statistics.recall >= 0.9
        answers = table(docs, rows[200:260])
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs")
        assert table(docs, rows[200:260]).equals(answers)
        assert docs.count() == 2_800
        assert machine_of(store).live.index.lists == statistics.lists


def test_writes_between_the_steps_are_found(tmp_path: Path) -> None:
    rows = clusters(2_000)
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs", dimensions=16, metric="cosine")
        docs.upsert([str(n) for n in range(1_500)], rows[:1_500], durable=True)
        info, derived = store.port.table("docs"), store._derived
        assert info is not None
        at = 1_500
        while derived._derive(info, derived._run_here):
            docs.upsert([str(at)], rows[at : at + 1])
            docs.upsert([str(at - 1_500)], rows[at : at + 1] + 1)  # older ones move to other internal ids
            docs.delete([str(at - 1_000)], durable=True)
            at += 1
        assert at > 1_503
        generations = read_generations(machine_of(store).tree.view)
        assert (generations.current, generations.building) == (1, 0)
        for number in range(1_500, at):
            assert docs.search(rows[number], k=1)[0].id == str(number)
            assert docs.get(str(number - 1_000)) is None
        assert recall(docs, rows[600:660]) >= 0.95
        assert store.troubles() == []


def test_recall_does_not_decay(tmp_path: Path) -> None:
    """Ten times the trained size in drifting clusters, half of it deleted."""
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs", dimensions=16, metric="euclidean")
        docs.upsert([f"0 {n}" for n in range(1_000)], clusters(1_000), durable=True)
        assert store.reindex("docs")
        rows = clusters(1_000)
        for step in range(1, 11):
            rows = clusters(1_000, at=2.0 * step)
            docs.upsert([f"{step} {n}" for n in range(1_000)], rows)
            docs.delete([f"{step - 1} {n}" for n in range(0, 1_000, 2)], durable=True)
            store.reindex("docs")
        assert docs.count() == 11_000 - 5_000
        assert recall(docs, rows[:50] + 0.1) >= 0.95
        assert docs.statistics().lists > 50
        assert docs.statistics().deleted < 0.3 * 6_000


def test_the_index_is_repaired_from_data(tmp_path: Path) -> None:
    rows = clusters(1_200)
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs", dimensions=16, shards=2)
        docs.upsert([str(n) for n in range(1_200)], rows, durable=True)
        assert store.reindex("docs") == 0  # 600 in each shard
        docs.upsert([f"more {n}" for n in range(1_200)], rows + 0.5, durable=True)
        assert store.reindex("docs")
        assert docs.statistics().trained
        before = table(docs, rows[:20], exact=True)
        assert store.reindex("docs", rebuild=True)
        again = table(docs, rows[:20], exact=True)
        assert again.drop_columns("distance").equals(before.drop_columns("distance"))
        # The last digits of a distance depend on where vectors lie in memory.
        np.testing.assert_allclose(again["distance"], before["distance"], rtol=1e-5, atol=1e-5)
        assert recall(docs, rows[:40]) >= 0.95
        with pytest.raises(NotFound):
            store.reindex("nothing")
        store.kv("users")
        with pytest.raises(KindMismatch):
            store.reindex("users")


def test_a_job_makes_the_index_in_the_background(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store", settings=penstock.StoreSettings(background=False)) as store:
        docs = store.vector("docs", dimensions=16)
        derived = store._derived
        derived._enqueue()
        assert store._jobs.acquire("test", [JobKind.TRAIN], None) is None  # nothing to do: no job
        docs.upsert([str(n) for n in range(1_100)], clusters(1_100), durable=True)
        derived._enqueue()
        lease = store._jobs.acquire("test", [JobKind.TRAIN], None)
        assert lease is not None
        while (info := store.port.table("docs")) is not None and derived._derive(info, derived._run_here):
            pass
        assert docs.statistics().trained
