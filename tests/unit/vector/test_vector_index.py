"""The search kernel: exact results against float64, filters, snapshots, removal, and changes beside searches."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interrupts import every_point

from penstock.errors import Backpressure, Invalid
from penstock.vector import filtered as filtered_module
from penstock.vector import index as index_module
from penstock.vector import lists as lists_module
from penstock.vector.exact import F32, I64, U64, distances_to, prepared
from penstock.vector.index import VectorIndex
from penstock.vector.options import METRICS, Metric
from penstock.vector.training import k_means, nearest_list

pytest.importorskip("faiss")

KERNELS = ["rows", "lists"]
CHANCE = np.random.default_rng(3)
VECTORS = (CHANCE.normal(size=(20, 8))[CHANCE.integers(20, size=600)] + 0.4 * CHANCE.normal(size=(600, 8))).astype(
    np.float32
)
QUERIES = VECTORS[::37] + np.float32(0.05)
CENTROIDS: dict[str, F32] = {metric: k_means(VECTORS, 24, metric) for metric in METRICS}  # type: ignore[arg-type]


def ids_from(first: int, count: int) -> U64:
    return np.arange(first, first + count).astype(np.uint64)


def filled_index(kernel: str, metric: Metric, rows: int = 600, first: int = 5) -> VectorIndex:
    index = VectorIndex(8, metric)
    centroids = CENTROIDS[metric]
    lists = nearest_list(VECTORS[:rows], centroids, metric)
    index.load(ids_from(first, rows), VECTORS[:rows], lists, centroids if kernel == "lists" else None)
    return index


def truth(ids: U64, vectors: F32, queries: F32, k: int, metric: Metric) -> tuple[list[list[float]], list[set[int]]]:
    """The distances of the nearest, and who they are, by float64."""
    rows = prepared(vectors, metric)
    distances, sets = [], []
    for query in prepared(queries, metric):
        far = distances_to(rows, query, metric)
        order = np.argsort(far, kind="stable")[:k]
        distances.append(far[order].tolist())
        sets.append(set(ids[order].tolist()))
    return distances, sets


def check(answer: tuple[F32, I64], expected: tuple[list[list[float]], list[set[int]]], k: int) -> None:
    for row, (distances, ids) in enumerate(zip(*expected, strict=True)):
        assert answer[0][row, : len(distances)] == pytest.approx(distances, abs=2e-6, rel=1e-5)
        assert set(answer[1][row, : len(ids)].tolist()) == ids
        assert answer[1][row, len(ids) :].tolist() == [-1] * (k - len(ids))
        assert np.isinf(answer[0][row, len(ids) :]).all()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_exact_search_finds_what_float64_finds(kernel: str, metric: Metric) -> None:
    index = filled_index(kernel, metric)
    for k in (1, 10, 700):
        check(
            index.search(QUERIES, k, probes=None, exact=True),
            truth(ids_from(5, 600), VECTORS, QUERIES, k, metric),
            k,
        )
    one = index.search_one(QUERIES[0], 10, index.lists)
    check(
        (np.array([one[0]], np.float32), np.array([one[1]])),
        truth(ids_from(5, 600), VECTORS, QUERIES[:1], 10, metric),
        10,
    )
    assert index.count == 600
    assert index.memory_bytes() > VECTORS.nbytes
    assert index.list_sizes.sum() == 600


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_empty_index_finds_nothing(kernel: str) -> None:
    index = filled_index(kernel, "cosine", rows=0)
    assert index.search_one(QUERIES[0], 3) == ([], [])
    assert index.search(QUERIES[:0], 3)[0].shape == (0, 3)
    assert index.search(QUERIES, 3, allowed=ids_from(1, 9))[1].max() == -1
    index.remove(ids_from(1, 3))
    assert index.count == 0


def test_distances_far_from_the_origin_are_exact() -> None:
    index = VectorIndex(8, "euclidean")
    far = VECTORS + np.float32(1e4)
    index.load(ids_from(1, 600), far, np.zeros(600, np.int32), None)
    distances, ids = index.search(far[:50], 5, exact=True)
    assert distances[:, 0].tolist() == [0.0] * 50
    check((distances, ids), truth(ids_from(1, 600), far, far[:50], 5, "euclidean"), 5)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-20, 1e18])
def test_very_short_and_very_long_vectors_have_a_cosine(metric: Metric, scale: float) -> None:
    if metric != "cosine":
        return
    for kernel in KERNELS:
        index = filled_index(kernel, metric)
        query = QUERIES[0] * np.float32(scale)
        assert index.search_one(query, 5, 24)[1] == index.search_one(QUERIES[0], 5, 24)[1]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_adding_and_removing_is_like_loading(kernel: str, metric: Metric) -> None:
    index = filled_index(kernel, metric, rows=300)
    index.reserve(np.full(index.lists, 40))
    lists = nearest_list(VECTORS, CENTROIDS[metric], metric)
    for start in range(300, 600, 50):
        some = slice(start, start + 50)
        index.add(ids_from(5 + start, 50), VECTORS[some], lists[some])
        index.remove(ids_from(5 + start - 300, 25))
        index.remove(ids_from(5 + start, 1))
    index.remove(ids_from(5, 1))  # again
    index.remove(ids_from(10_000, 3))  # never there
    remaining = np.ones(600, np.bool_)
    for start in range(300, 600, 50):
        remaining[start - 300 : start - 275] = remaining[start] = False
    expected = truth(ids_from(5, 600)[remaining], VECTORS[remaining], QUERIES, 10, metric)
    check(index.search(QUERIES, 10, exact=True), expected, 10)
    one = index.search_one(QUERIES[1], 10, index.lists)
    check(
        (np.array([one[0]], np.float32), np.array([one[1]])),
        truth(ids_from(5, 600)[remaining], VECTORS[remaining], QUERIES[1:2], 10, metric),
        10,
    )
    assert index.count == remaining.sum()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_snapshot_sees_its_ceiling_and_its_deleted_ids_while_its_pin_lives(kernel: str) -> None:
    index = filled_index(kernel, "euclidean", rows=400)
    index.remove(ids_from(5, 10))  # before the snapshot
    pin, below, deleted = index.pin(), 405, ids_from(5, 10)
    then = truth(ids_from(15, 390), VECTORS[10:400], QUERIES, 10, "euclidean")
    lists = nearest_list(VECTORS, CENTROIDS["euclidean"], "euclidean")
    index.add(ids_from(405, 200), VECTORS[400:], lists[400:])
    index.remove(ids_from(100, 200))
    remaining = np.r_[10:95, 295:600]
    now = truth(ids_from(5, 600)[remaining], VECTORS[remaining], QUERIES, 10, "euclidean")
    allowed = ids_from(5, 600)[::3]
    for _ in range(2):
        check(index.search(QUERIES, 10, exact=True, below=below, deleted=deleted), then, 10)
        check(index.search(QUERIES, 10, exact=True), now, 10)
        one = index.search_one(QUERIES[0], 10, index.lists)
        check((np.array([one[0]], np.float32), np.array([one[1]])), (now[0][:1], now[1][:1]), 10)
    hits = index.search(QUERIES, 10, exact=True, allowed=allowed, below=below, deleted=deleted)[1]
    assert set(hits.ravel().tolist()) <= set(allowed.tolist()) - set(range(15)) - set(range(405, 900))
    assert index.count == len(remaining)
    entries = index.list_sizes.sum()
    del pin
    index.add(ids_from(605, 1), VECTORS[:1], lists[:1])
    if kernel == "lists":
        assert index.list_sizes.sum() == entries - 200 + 1
    assert index.count == len(remaining) + 1


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_filter_sees_the_allowed_rows_alone(
    kernel: str, metric: Metric, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not few:
        monkeypatch.setattr(filtered_module, "FEW_ROWS", 0)
    index = filled_index(kernel, metric)
    allowed = np.append(ids_from(5, 600)[::7], np.uint64(9_999))
    expected = truth(allowed[:-1], VECTORS[::7], QUERIES, 10, metric)
    for _ in range(2):
        check(index.search(QUERIES, 10, exact=True, allowed=allowed), expected, 10)
    if few:
        check(index.search(QUERIES, 10, probes=1, allowed=allowed), expected, 10)
    else:
        hits = index.search(QUERIES, 10, probes=4, allowed=allowed)[1]
        near = [len(set(row) & ids) for row, ids in zip(hits.tolist(), expected[1], strict=True)]
        assert np.mean(near) >= 9.5
    index.remove(allowed[:40])
    left = truth(allowed[40:-1], VECTORS[::7][40:], QUERIES, 10, metric)
    check(index.search(QUERIES, 10, exact=True, allowed=allowed), left, 10)


def test_a_filter_that_is_correlated_with_the_lists_finds_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """All allowed rows are in lists that an unfiltered search of these queries does not probe."""
    monkeypatch.setattr(filtered_module, "FEW_ROWS", 0)
    index = filled_index("lists", "euclidean")
    lists = nearest_list(VECTORS, CENTROIDS["euclidean"], "euclidean")
    near = set(nearest_list(QUERIES[:1], CENTROIDS["euclidean"], "euclidean").tolist())
    allowed = ids_from(5, 600)[~np.isin(lists, list(near))][::5]
    hits = index.search(QUERIES[:1], 10, probes=1, allowed=allowed)[1][0]
    assert (hits >= 0).all()
    best = truth(allowed, VECTORS[allowed.astype(int) - 5], QUERIES[:1], 10, "euclidean")[1][0]
    assert len(best & set(hits.tolist())) >= 5


def test_what_was_gathered_for_a_filter_is_used_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    index = filled_index("lists", "cosine")
    monkeypatch.setattr(filtered_module, "FILTERS_MAX", 3)
    gathered, vectors = list[int](), lists_module.PostingLists.vectors

    def counted(self: lists_module.PostingLists, ids: U64) -> F32:
        gathered.append(len(ids))
        return vectors(self, ids)

    monkeypatch.setattr(lists_module.PostingLists, "vectors", counted)
    filters = [ids_from(5 + start, 50) for start in range(5)]
    before = index.memory_bytes()
    for _ in range(3):
        index.search(QUERIES, 5, allowed=filters[0])
    assert len(gathered) == 1
    assert index.memory_bytes() > before
    for some in filters:
        index.search(QUERIES, 5, allowed=some)
    index.search(QUERIES, 5, allowed=filters[0])
    assert len(gathered) == 6
    monkeypatch.setattr(filtered_module, "FILTERS_BYTES_MAX", 0)
    index.remove(ids_from(5, 1))
    index.search(QUERIES, 5, allowed=filters[0])
    assert index.memory_bytes() <= before


@pytest.mark.parametrize("kernel", KERNELS)
def test_searches_beside_changes_see_whole_vectors(kernel: str) -> None:
    """Vectors are (n, n, ..., n): a torn or a mismatched one has a distance that its id does not have."""
    index = VectorIndex(8, "euclidean")
    centroids = np.repeat(np.arange(0, 400, 40), 8).reshape(-1, 8).astype(np.float32)
    nothing = np.zeros((0, 8), np.float32)
    index.load(ids_from(1, 0), nothing, np.zeros(0, np.int32), centroids if kernel == "lists" else None)
    stop, failures, searches = threading.Event(), list[Any](), [0]

    def search() -> None:
        chance = np.random.default_rng(threading.get_ident() % 1_000)
        while not stop.is_set() and not failures:
            try:
                at = float(chance.integers(400))
                if chance.integers(2):
                    distances, ids = map(np.array, index.search_one(np.full(8, at, np.float32), 10, 3))
                else:
                    few = np.full((3, 8), at, np.float32)
                    distances, ids = (array[1] for array in index.search(few, 10, probes=3))
                valid = ids >= 0
                values = ids[valid] % 400
                assert np.allclose(distances[valid], np.abs(values - at) * np.sqrt(8), atol=1e-3)
                assert (np.diff(distances[valid]) >= 0).all()
                searches[0] += 1
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    next_id = 1
    chance = np.random.default_rng(9)
    while (next_id < 6_000 or searches[0] < 50) and not failures:
        ids = ids_from(next_id, int(chance.integers(1, 120)))
        values = (ids % 400).astype(np.float32)
        index.add(ids, np.repeat(values, 8).reshape(-1, 8), (values // 40).astype(np.int32))
        next_id += len(ids)
        if next_id > 2_000:
            index.remove(ids - np.uint64(1_500))
            pin = index.pin() if chance.integers(3) == 0 else None
            index.remove(ids[::9])
            del pin
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert searches[0] >= 50


def test_a_search_that_does_not_end_does_not_hold_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "CHANGE_WAIT_S", 0.05)
    for kernel in KERNELS:
        index = filled_index(kernel, "cosine", rows=500)
        began, end, result = threading.Event(), threading.Event(), list[Any]()
        lists = nearest_list(VECTORS, CENTROIDS["cosine"], "cosine")

        def slow(index: VectorIndex = index, began: Any = began, end: Any = end, result: list[Any] = result) -> None:
            with index._search() as old_kernel:
                began.set()
                end.wait(20)
                result.append(old_kernel.vectors(ids_from(5, 500)))

        thread = threading.Thread(target=slow)
        thread.start()
        began.wait(20)
        index.add(ids_from(505, 100), VECTORS[500:], lists[500:])
        index.remove(ids_from(5, 100))
        check(index.search(QUERIES, 5, exact=True), truth(ids_from(105, 500), VECTORS[100:], QUERIES, 5, "cosine"), 5)
        end.set()
        thread.join(20)
        assert np.array_equal(result[0], prepared(VECTORS[:500], "cosine"))


@pytest.mark.parametrize("metric", METRICS)
def test_a_filtered_search_of_one_vector_finds_what_many_find(metric: Metric) -> None:
    for kernel in KERNELS:
        index = filled_index(kernel, metric)
        for allowed in (ids_from(1, 2), ids_from(5, 1), ids_from(50, 40), ids_from(1, 700)):  # none, one, some, all
            for removed in range(2):
                for query in QUERIES[:5]:
                    distances, ids = index.search(query[None], 7, allowed=allowed)
                    answer = index.search_one(query, 7, None, None, allowed)
                    assert answer[1] == ids[0][ids[0] >= 0].tolist()
                    np.testing.assert_allclose(answer[0], distances[0][ids[0] >= 0], rtol=1e-5, atol=1e-6)
                pin = index.pin()
                index.remove(ids_from(60 + removed, 1))  # hidden as long as the pin is there
        del pin


def test_a_search_that_meets_a_change_waits_for_it() -> None:
    for kernel in KERNELS:
        index, answers = filled_index(kernel, "dot"), list[Any]()
        searches: list[Callable[[], Any]] = [
            lambda: answers.append(index.search_one(QUERIES[0], 3)[1]),  # noqa: B023
            lambda: answers.append(index.search(QUERIES[:1], 3)[1][0].tolist()),  # noqa: B023
        ]
        with index._change():
            threads = [threading.Thread(target=search) for search in searches]
            for thread in threads:
                thread.start()
                thread.join(0.05)
            assert not answers
        for thread in threads:
            thread.join(20)
        assert len(answers) == 2
        assert answers[0] == answers[1]
        assert not index._searching


def test_a_search_that_is_interrupted_anywhere_does_not_hold_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "CHANGE_WAIT_S", 60.0)  # a change that waits for it makes this test too long
    index = filled_index("lists", "cosine")
    expected, points = index.search_one(QUERIES[0], 3), 0
    for _ in every_point(lambda: index.search_one(QUERIES[0], 3)):
        points += 1
        assert not index._searching
        index.update(ids_from(1_000 + points, 1), -VECTORS[:1], np.zeros(1, np.int32), ids_from(999 + points, 1))
        assert index.search_one(QUERIES[0], 3) == expected
    assert points > 10


def test_an_error_in_a_change_empties_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in KERNELS:
        index = filled_index(kernel, "dot")
        monkeypatch.setattr(index._kernel, "_count", "two")  # so that it fails in the middle
        with pytest.raises(TypeError):
            index.add(ids_from(700, 2), VECTORS[:2], np.zeros(2, np.int32))
        monkeypatch.undo()
        assert not index.loaded
        assert index.count == 0
        with pytest.raises(Backpressure, match="search again"):
            index.search_one(QUERIES[0], 3)
        index.add(ids_from(800, 1), VECTORS[:1], np.zeros(1, np.int32))  # a part must not pass for the whole
        assert not index.loaded
        index.load(ids_from(1, 600), VECTORS, np.zeros(600, np.int32), None)
        assert index.loaded
        check(index.search(QUERIES, 5, exact=True), truth(ids_from(1, 600), VECTORS, QUERIES, 5, "dot"), 5)


@pytest.mark.parametrize("metric", METRICS)
def test_a_search_finds_k_if_there_are_k(metric: Metric) -> None:
    index = filled_index("lists", metric)
    index.probes = 1
    everything = ids_from(5, 600)
    for pinned in (False, True):
        pin = index.pin() if pinned else None
        index.remove(ids_from(5, 2))
        left = everything[2:]
        assert set(index.search_one(QUERIES[0], 598)[1]) == set(left.tolist())
        assert (index.search(QUERIES, 400)[1] >= 0).all()
        assert (index.search(QUERIES, 400, allowed=left)[1] >= 0).all()
        assert len(index.search_one(QUERIES[0], 700)[1]) == 598  # there are no more
        assert len(index.search_one(QUERIES[0], 598, 1)[1]) < 598  # as was asked for
        del pin


def test_huge_searches_are_cut_into_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    index = filled_index("lists", "dot")
    whole = index.search(QUERIES, 5, probes=3)
    monkeypatch.setattr(index_module, "SLICE_WORK", 2 * 8 * 600)
    slices, find = list[int](), index._find

    def counted(kernel: Any, request: Any, *args: Any) -> tuple[F32, I64]:
        slices.append(len(request.queries))
        return find(kernel, request, *args)

    monkeypatch.setattr(index, "_find", counted)
    cut = index.search(QUERIES, 5, exact=True)
    assert slices == [2] * (len(QUERIES) // 2) + [1] * (len(QUERIES) % 2)
    assert cut[0].shape == whole[0].shape


def test_without_faiss_every_search_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists_module, "_faiss", None)
    monkeypatch.setitem(sys.modules, "faiss", None)
    index = filled_index("lists", "cosine")
    assert index.lists == 1
    check(index.search(QUERIES, 5, probes=1), truth(ids_from(5, 600), VECTORS, QUERIES, 5, "cosine"), 5)
    with pytest.raises(Invalid, match=r"pip install 'penstock\[vector\]'"):
        lists_module.load_faiss()


def test_faiss_is_imported_by_the_first_index_alone() -> None:
    code = (
        "import sys, numpy as np\n"
        "from penstock.vector.index import VectorIndex\n"
        "index = VectorIndex(2, 'dot')\n"
        "index.add(np.array([1], np.uint64), np.ones((1, 2), np.float32), np.zeros(1, np.int32))\n"
        "assert index.search_one(np.ones(2, np.float32), 1)[1] == [1]\n"
        "assert 'faiss' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_snapshots_that_overlap_do_not_keep_what_none_of_them_sees() -> None:
    index = filled_index("lists", "dot")
    pins = [index.pin()]
    for step in range(10):
        index.remove(ids_from(5 + 10 * step, 10))
        pins.append(index.pin())
        del pins[0]
        assert len(index.removed) <= 10, "only the removal since the older pin is kept"
    assert index.count == 500
    assert index.list_sizes.sum() <= 510
