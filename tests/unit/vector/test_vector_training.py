"""Centroids, the list of a vector, plans of lists, and probes from measured recall."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.vector import training
from penstock.vector.exact import F32, prepared
from penstock.vector.index import VectorIndex
from penstock.vector.options import METRICS, Metric
from penstock.vector.training import (
    ListAssigner,
    choose_probes,
    k_means,
    list_count,
    nearest_list,
    plan_lists,
    rebalanced,
    recall_floor,
    recalls,
)

pytest.importorskip("faiss")


def clusters(rows: int, count: int, dimensions: int = 16, *, seed: int = 1, spread: float = 0.3) -> F32:
    chance = np.random.default_rng(seed)
    centers = chance.normal(size=(count, dimensions))
    noise = spread * chance.normal(size=(rows, dimensions))
    return (centers[chance.integers(count, size=rows)] + noise).astype(np.float32)


@pytest.mark.parametrize("metric", METRICS)
def test_the_nearest_list_is_that_of_float64(metric: Metric) -> None:
    vectors, centroids = clusters(500, 20, 12), clusters(37, 9, 12, seed=2)
    if metric != "euclidean":
        centroids = prepared(centroids, "cosine")
    wide, middles = vectors.astype(np.float64), centroids.astype(np.float64)
    scores = wide @ middles.T - (np.square(middles).sum(axis=1) / 2 if metric == "euclidean" else 0)
    assert nearest_list(vectors, centroids, metric).tolist() == scores.argmax(axis=1).tolist()


def test_ties_go_to_the_first_list_and_one_row_has_the_list_it_has_among_many() -> None:
    centroids = np.array([[1, 0], [0, 1], [1, 0], [-1, 0]], np.float32)
    vectors = np.array([[1, 0], [1, 1], [0, 0], [-1, 1], [3e38, 3e38], [1e-45, 0]], np.float32)
    assert nearest_list(vectors, centroids, "cosine").tolist() == [0, 0, 0, 1, 0, 0]
    assert nearest_list(vectors, centroids, "euclidean").tolist() == [0, 0, 0, 1, 0, 0]
    many, lists = clusters(300, 5), clusters(40, 40, seed=3)
    assigner = ListAssigner(lists, "euclidean")
    assert [int(assigner.nearest(many[at : at + 1])[0]) for at in range(300)] == assigner.nearest(many).tolist()


def test_the_nearest_list_does_not_follow_rounding_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is off as far as its bound allows, as another BLAS may be, changes no list."""
    chance = np.random.default_rng(5)
    centroids = prepared(np.repeat(chance.normal(size=(8, 16)), 2, axis=0).astype(np.float32), "cosine")
    centroids[1::2] += np.float32(1e-7) * chance.normal(size=(8, 16)).astype(np.float32)  # pairs that nearly tie
    vectors = clusters(200, 8)
    expected = nearest_list(vectors, centroids, "cosine")

    class Blurred(np.ndarray):
        def __matmul__(self, other: object) -> object:  # type: ignore[override]
            exact = np.asarray(self) @ np.asarray(other)
            bound = np.linalg.norm(np.asarray(self), axis=1)[:, None] * 16 * 2.0**-24
            return (exact + bound * chance.uniform(-1, 1, exact.shape)).astype(np.float32)

    blurred = ListAssigner(centroids, "cosine")
    assert blurred.nearest(vectors.view(Blurred)).tolist() == expected.tolist()
    monkeypatch.setattr(training, "error_bound", lambda _, products: 0 * products)
    assert blurred.nearest(vectors.view(Blurred)).tolist() != expected.tolist()  # the bound is what does it


@pytest.mark.parametrize("metric", METRICS)
def test_k_means_finds_clusters_and_repeats_itself(metric: Metric) -> None:
    vectors = clusters(2_000, 10, spread=0.05)
    centroids = k_means(vectors, 30, metric, seed=4)
    assert np.array_equal(centroids, k_means(vectors, 30, metric, seed=4))
    assert 20 <= len(centroids) <= 30
    if metric != "euclidean":
        assert np.allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-6)
    points = prepared(vectors, "cosine") if metric != "euclidean" else vectors
    near = centroids[nearest_list(vectors, centroids, metric)]
    assert np.linalg.norm(points - near, axis=1).mean() < 0.3


def test_k_means_of_few_or_equal_vectors() -> None:
    same = np.ones((100, 4), np.float32)
    assert len(k_means(same, 8, "euclidean")) == 1
    assert len(k_means(clusters(5, 5), 8, "euclidean")) == 5
    assert k_means(np.zeros((10, 4), np.float32), 3, "dot").shape == (1, 4)
    assert len(k_means(np.concatenate([same, clusters(60, 3, 4)]), 8, "euclidean")) > 3


def test_long_lists_are_split_and_short_ones_dissolved_when_there_are_too_many() -> None:
    sizes = np.full(30, 25)
    assert not plan_lists(sizes)
    sizes[3], sizes[5] = 100, 0
    plan = plan_lists(sizes)
    assert plan.split == {3: 8}
    assert plan.dissolve == ()  # not more lists than the rows should have
    many = np.concatenate([np.full(40, 25), np.zeros(30, np.int64)])
    assert plan_lists(many).dissolve
    assert min(plan_lists(many).dissolve) >= 40
    assert not plan_lists(np.zeros(3, np.int64)).split
    vectors = clusters(1_000, 12)
    centroids = clusters(40, 40, seed=9)
    changed = rebalanced(centroids, plan, lambda at: vectors, "euclidean")
    assert len(changed) == 39 + 8
    assert list_count(0) == 1


def indexed(vectors: F32, lists: int, metric: Metric = "euclidean") -> VectorIndex:
    centroids = k_means(vectors, lists, metric)
    index = VectorIndex(vectors.shape[1], metric)
    ids = np.arange(1, len(vectors) + 1).astype(np.uint64)
    index.load(ids, vectors, nearest_list(vectors, centroids, metric), centroids)
    return index


@pytest.mark.parametrize("metric", METRICS)
def test_probes_are_the_fewest_that_give_the_recall(metric: Metric) -> None:
    vectors = clusters(4_000, 60, spread=1.0)
    index, queries = indexed(vectors, 60, metric), clusters(64, 60, spread=1.0, seed=1)
    probes, recall = choose_probes(index, queries)
    assert recall >= 0.95
    assert 1 < probes < 60
    assert recall_floor(recalls(index, queries, 10, probes - 1)) < 0.95
    assert recalls(index, queries, 10, 60).min() == 1.0


def test_recall_does_not_decay_while_clusters_drift_and_rows_are_deleted() -> None:
    drift(trained=400, metric="cosine")


@pytest.mark.campaign
@pytest.mark.parametrize("metric", METRICS)
def test_recall_does_not_decay_at_size(metric: Metric) -> None:
    drift(trained=20_000, metric=metric)


def drift(trained: int, metric: Metric) -> None:
    """Insert ten times the trained rows in clusters that move, delete half of all, and rebalance as planned."""
    chance = np.random.default_rng(11)
    count, dimensions = max(10, trained // 100), 24
    centers = chance.normal(size=(count, dimensions))
    velocity = 0.3 * chance.normal(size=(count, dimensions))

    def some(step: int, rows: int) -> F32:
        moved = centers + step * velocity
        noise = 0.4 * chance.normal(size=(rows, dimensions))
        return (moved[chance.integers(count, size=rows)] + noise).astype(np.float32)

    vectors = some(0, trained)
    ids = np.arange(1, trained + 1).astype(np.uint64)
    centroids = k_means(vectors, list_count(trained), metric)
    index = VectorIndex(dimensions, metric)
    index.load(ids, vectors, nearest_list(vectors, centroids, metric), centroids)
    live = dict(zip(ids.tolist(), vectors, strict=True))
    for step in range(1, 11):
        fresh = some(step, trained)
        ids = np.arange(step * trained + 1, (step + 1) * trained + 1).astype(np.uint64)
        index.add(ids, fresh, nearest_list(fresh, centroids, metric))
        live.update(zip(ids.tolist(), fresh, strict=True))
        removed = chance.permutation(np.array(list(live), np.uint64))[: trained // 2]
        index.remove(removed)
        for number in removed.tolist():
            del live[number]
        if plan := plan_lists(index.list_sizes):
            keys, rows = np.array(list(live), np.uint64), np.stack(list(live.values()))
            lists = nearest_list(rows, centroids, metric)
            members = {at: rows[lists == at] for at in plan.split}
            centroids = rebalanced(centroids, plan, members.__getitem__, metric)
            index = VectorIndex(dimensions, metric)
            index.load(keys, rows, nearest_list(rows, centroids, metric), centroids)
        sample = np.stack([live[number] for number in chance.permutation(list(live))[:100].tolist()])
        index.probes, _ = choose_probes(index, sample + 0.1 * chance.normal(size=sample.shape).astype(np.float32))
    assert index.count == len(live)
    queries = np.stack([live[number] for number in chance.permutation(list(live))[:200].tolist()])
    assert recalls(index, queries, 10, index.probes).mean() >= 0.95
    assert index.list_sizes.max() <= training.SPLIT_ABOVE * 2 * index.count / index.lists + 50
