"""Searches without a kernel: just after an opening, while one is loaded, and where one has no room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.kinds import partitions_of
from penstock.lsm.sstable import Sstable
from penstock.store.store import Store
from penstock.vector import indexing, live
from penstock.vector.stored_lists import StoredLists

pytest.importorskip("faiss")
RNG = np.random.default_rng(11)
COUNT, DIMENSIONS = 3_000, 256
CENTRES = 4 * RNG.normal(size=(60, DIMENSIONS))
ROWS = (CENTRES[RNG.integers(60, size=COUNT)] + RNG.normal(size=(COUNT, DIMENSIONS))).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with an index, closed."""
    monkeypatch.setattr(indexing, "TRAINED_ROWS_MIN", 1_000)
    with penstock.open(tmp_path / "store") as store:
        docs = store.vector("docs", dimensions=DIMENSIONS, metric="euclidean")
        docs.upsert([str(n) for n in range(COUNT)], ROWS, [{"n": n} for n in range(COUNT)], durable=True)
        store.reindex("docs")
        docs.delete([str(n) for n in range(100)], durable=True)
        store.compact("docs")
    return tmp_path / "store"


def live_of(store: Store) -> Any:
    info = store.port.table("docs")
    assert info is not None
    machine: Any = store.port.machine(partitions_of(info)[0])
    return machine.live


def test_the_first_searches_find_what_a_kernel_finds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.LiveIndex, "maintain", lambda self: None)  # on a slow machine it loads the kernel first
    with penstock.open(folder) as store:
        docs: Any = store.vector("docs")
        some = range(90, 90 + live.COLD_QUERIES)
        cold = [docs.search(ROWS[n] + 0.01, k=5, probes=10_000) for n in some]
        assert live_of(store).index is None
        warm = [docs.search(ROWS[n] + 0.01, k=5, probes=10_000) for n in some]
        assert live_of(store).index is not None
        assert [[hit.id for hit in hits] for hits in cold] == [[hit.id for hit in hits] for hits in warm]
        np.testing.assert_allclose([h[0].distance for h in cold], [h[0].distance for h in warm], rtol=1e-3)
        assert [hits[0].id for hits in cold][10:] == [str(n) for n in some][10:]  # the first ten were deleted
        assert cold[20][0].attributes == {"n": 110}


def test_they_see_snapshots_and_writes_and_find_k(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "COLD_QUERIES", 1_000)
    with penstock.open(folder) as store:
        docs: Any = store.vector("docs")
        with store.snapshot() as before:
            docs.upsert("new", ROWS[500])
            docs.delete("500")
            names = docs.search(ROWS[500:501], k=1).column("id").to_pylist()  # not applied yet
            assert names == ["new"]
            docs.delete("501", durable=True)
            assert docs.search(ROWS[500], k=1)[0].id == "new"
            assert docs.search(ROWS[501], k=1)[0].id != "501"
            early: Any = before.vector("docs")
            assert [early.search(ROWS[n], k=1)[0].id for n in (500, 501)] == ["500", "501"]
        assert len(docs.search(ROWS[0], k=1_000)) == 1_000  # more than the nearest lists have
        assert len(docs.search(ROWS[0], k=1_000, probes=1)) < 1_000
        truth = docs.search(ROWS[200:260], k=10, exact=True)
        assert live_of(store).index is not None  # the exact search loaded it
        assert truth.num_rows == 600


def test_a_table_that_has_no_room_is_searched_by_its_lists(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "COLD_QUERIES", 0)
    with penstock.open(folder) as store:
        docs: Any = store.vector("docs")
        live_of(store)._budget.bytes_max = 200_000
        compared = 0
        members = StoredLists._members

        def count(self: Any, *arguments: Any) -> Any:
            nonlocal compared
            result = members(self, *arguments)
            compared += len(result[0])
            return result

        monkeypatch.setattr(StoredLists, "_members", count)
        for number in range(200, 240):
            assert docs.search(ROWS[number], k=1)[0].id == str(number)
        assert live_of(store).index is None
        assert compared < 40 * COUNT / 4
        live_of(store).maintain()
        assert live_of(store).index is None
        assert docs.statistics().memory_bytes < 200_000


def test_maintenance_loads_what_searches_went_without(folder: Path) -> None:
    with penstock.open(folder) as store:
        docs: Any = store.vector("docs")
        live_of(store).maintain()
        assert live_of(store).index is None  # nobody searched
        docs.search(ROWS[200])
        live_of(store).maintain()
        assert live_of(store).index is not None


def test_opening_and_the_first_search_read_a_part_of_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = [0]
    check = Sstable._check_page

    def counted(self: Sstable, page: int, data: memoryview) -> None:
        read[0] += len(data)
        check(self, page, data)

    monkeypatch.setattr(Sstable, "_check_page", counted)
    with penstock.open(folder) as store:
        docs: Any = store.vector("docs")
        assert docs.count() == COUNT - 100
        opening, size = read[0], docs.statistics().file_bytes
        docs.search(ROWS[200])
        first = read[0]
        docs.search(ROWS[200:300])
        assert size > 4 * COUNT * DIMENSIONS
        assert opening < size / 5  # the row of the sequence, in its page
        assert first < 0.7 * size  # pages with a vector of the nearest lists
        assert first < read[0] <= 1.1 * size


def test_lists_that_were_made_anew_are_not_searched_by_older_centroids(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that is dropped and made anew has the number of the one before."""
    monkeypatch.setattr(live.LiveIndex, "maintain", lambda self: None)
    monkeypatch.setattr(live, "COLD_QUERIES", 10_000)
    with penstock.open(folder) as store:
        docs: Any = store.vector("docs")
        moved = ROWS[::-1].copy() * 2 + 50
        with store.snapshot() as before:
            early: Any = before.vector("docs")
            for _ in range(2):
                assert [docs.search(ROWS[n], k=1)[0].id for n in (700, 800)] == ["700", "800"]
                docs.upsert([str(n) for n in range(COUNT)], moved, durable=True)
                store.reindex("docs", rebuild=True)
                assert live_of(store).index is None
                assert [docs.search(moved[n], k=1)[0].id for n in range(0, COUNT, 50)] == [
                    str(n) for n in range(0, COUNT, 50)
                ]
                assert [early.search(ROWS[n], k=1)[0].id for n in (700, 800)] == ["700", "800"]
                assert docs.search(moved[900], k=1)[0].id == "900"
                docs.upsert([str(n) for n in range(COUNT)], ROWS, durable=True)
                store.reindex("docs", rebuild=True)
