"""The metrics of `make run`, without Spark: what is counted, and what the difference shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from examples import fingerprints, metrics
from examples.accounting import CONSUMER, account
from examples.pipeline import Stamps

import penstock
from penstock.store.settings import StoreSettings


@pytest.fixture
def store(tmp_path: Path) -> penstock.Store:
    store = penstock.open(tmp_path / "store", settings=StoreSettings(background=False))
    metrics.create(store)
    fingerprints.create(store)
    store.kv("latest")
    store.queue("events", shards=2)
    store.queue("dead")
    store.kv("totals", value="int64")
    store.kv("expected", value="int64")
    return store


def test_each_sound_reading_is_a_sample_and_in_the_rollups(store: penstock.Store) -> None:
    with store:
        put_and_route(store, readings=4, samples=4)
        assert account(store)["difference"] == 8, "the two rollups have none of the four samples"
        summary = metrics.summarize(store, spark_jobs=3)
        assert account(store)["difference"] == 0
        assert (account(store)["samples in the series"], account(store)["samples in the rollup metrics_1m"]) == (4, 4)
        assert summary == metrics.MetricsSummary({"east": 21.0}, {"metrics_1m": 4, "metrics_1h": 1}, 3, 2)
        metrics.create(store)  # as a run on a folder that was used before does


def test_a_lost_sample_is_a_difference(store: penstock.Store) -> None:
    with store:
        put_and_route(store, readings=4, samples=3)
        metrics.summarize(store, spark_jobs=0)
        assert account(store)["difference"] == 1


def test_an_empty_store_has_no_difference(store: penstock.Store) -> None:
    with store:
        assert metrics.summarize(store, spark_jobs=0) == metrics.MetricsSummary(
            {}, {"metrics_1m": 0, "metrics_1h": 0}, 0, 0
        )
        assert account(store)["difference"] == 0


def test_stamps_differ_and_ascend() -> None:
    stamps = Stamps()
    taken = [stamps.next() for _ in range(10_000)]
    assert taken == sorted(set(taken))


def put_and_route(store: penstock.Store, *, readings: int, samples: int) -> None:
    """Do what the producer and the query do, with one sample each minute."""
    store.queue("events").put_many([b"reading"] * readings, keys=[b"device-001"] * readings, durable=True)
    store.queue("events").consumer(CONSUMER).seek("latest")
    store.kv("expected", value="int64").put(b"sound", readings)
    store.kv("totals", value="int64").put(b"device-001", readings)
    times = [1_700_000_000_000_000 + 60_000_000 * number for number in range(samples)]
    store.series(metrics.TABLE).write_columns("temperature", [21.0] * samples, {"site": "east"}, times=times)
    store.flush()  # a snapshot has what is applied
