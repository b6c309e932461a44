"""PromQL on series tables: embedded, on a snapshot, through a connection, in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from promql_cases import INSTANT_MS, RANGE
from promql_dataset import dataset
from test_promql_conformance import RANGES, alike, expected

import penstock
from penstock import aio
from penstock.errors import Invalid
from penstock.series import promql_source, queries
from penstock.series.labels import encode_labels

EXPRESSIONS = [
    "requests_total",
    "topk(2, sum by (job) (rate(requests_total[5m])))",
    "histogram_quantile(0.99, rate(latency_bucket[5m]))",
    "cpu * on(instance) group_left(version) build_info",
    "ending",
    "info(sum by (job) (requests_total), {__name__='limit'})",
    'paths{host="é"}',
    "max_over_time(sum by (job) (rate(requests_total[2m]))[10m:1m])",
    "count by (__name__) ({__name__=~'.+'})",
    "missing",
    "odd",
]


@pytest.fixture(scope="module", params=["open", "connect"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with penstock.open(tmp_path_factory.mktemp("promql") / "store") as owner:
        series = dataset()
        rows = [
            (entry, moment, value)
            for entry in series
            for moment, value in zip(entry.times_ms, entry.values, strict=True)
        ]
        labels = [{k: v for k, v in entry.labels.items() if k != "__name__"} for entry, _, _ in rows]
        table = pa.table(
            {
                "metric": [entry.labels["__name__"] for entry, _, _ in rows],
                "labels": pa.array([list(pairs.items()) for pairs in labels], pa.map_(pa.string(), pa.string())),
                "time": pa.array(np.array([moment for _, moment, _ in rows]) * 1000),
                "value": pa.array(np.array([value for _, _, value in rows])),
            }
        )
        options = penstock.SeriesOptions(bucket_s=1800)  # so that a series has several
        owner.series("metrics", shards=3, options=options).write_arrow(table, durable=True)
        if request.param == "open":
            yield owner
        else:
            with penstock.connect(owner.path) as client:
                yield client


def by_labels(table: pa.Table) -> dict[Any, dict[int, float]]:
    series: dict[Any, dict[int, float]] = {}
    times = table.column("time").cast(pa.int64()).to_pylist()
    columns = (table.column(name).to_pylist() for name in ("metric", "labels", "value"))
    for moment, metric, labels, value in zip(times, *columns, strict=True):
        key = tuple(sorted({**dict(labels), **({"__name__": metric} if metric else {})}.items()))
        assert series.setdefault(key, {}).setdefault(moment // 1000, value) is value
    return series


def check(table: pa.Table, expression: str) -> None:
    series, reference = by_labels(table), expected(RANGES[expression])
    assert series.keys() == reference.keys()
    for key, values in reference.items():
        assert series[key].keys() == values.keys()
        assert all(alike(series[key][moment], value) for moment, value in values.items())


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_table_answers_as_prometheus(store: Any, expression: str) -> None:
    start, end, step = RANGE[0] * 1000, RANGE[1] * 1000, RANGE[2] / 1000
    metrics = store.series("metrics")
    check(metrics.query_range(expression, start, end, step), expression)
    with store.snapshot() as snapshot:
        check(snapshot.series("metrics").query_range(expression, start, end, timedelta(seconds=step)), expression)


def test_an_instant(store: Any) -> None:
    metrics = store.series("metrics")
    rows = metrics.query("limit", time=INSTANT_MS * 1000)
    assert rows.schema == metrics.schema
    assert sorted(rows.column("value").to_pylist()) == [2.0, 5.0]
    when = datetime.fromtimestamp(INSTANT_MS / 1000, UTC)
    assert metrics.query("sum(limit)", when).to_pylist() == [{"metric": "", "labels": [], "time": when, "value": 7.0}]
    assert metrics.query("1 + 1", when).column("value").to_pylist() == [2.0]
    assert metrics.query("limit").num_rows == 0  # nothing in the last five minutes
    assert metrics.query("limit[1m]", when).num_rows == 8
    assert metrics.query("vector(1)").num_rows == 1


def test_a_process_reads_its_own_writes(store: Any) -> None:
    fresh = store.series("fresh")
    fresh.write("a", 1.0, {"x": "1"})
    fresh.write("b", 3.0, {"x": "1"})
    assert fresh.query("a + b").column("value").to_pylist() == [4.0]
    assert fresh.query("a").column("metric").to_pylist() == ["a"]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda table: table.query("rate(x)"), "matrix"),
        (lambda table: table.query('"x"'), "is a text"),
        (lambda table: table.query("x", time="now"), "microseconds since 1970"),
        (lambda table: table.query_range("x", 0, 10, 0), "step"),
        (lambda table: table.query_range("x", 10, 0, 1), "upwards"),
        (lambda table: table.query_range("x[5m]", 0, 10, 1), "range query"),
        (lambda table: table.query("limit[1m]", INSTANT_MS * 1000, samples_max=3), "at most 3 samples"),
        (lambda table: table.query("limit", samples_max=0), "samples_max"),
        (lambda table: table.query("limit", timeout_s=0), "timeout_s"),
        (lambda table: table.query("requests_total + on(job) limit", INSTANT_MS * 1000), "group_left"),
    ],
)
def test_wrong_calls_are_refused(store: Any, call: Any, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        call(store.series("metrics"))


def test_samples_of_one_series_may_come_in_many_batches(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.store.querying.ROWS_MAX", 7)
    counts = metrics_count(store, "count_over_time(cpu[1h])")
    monkeypatch.undo()
    assert metrics_count(store, "count_over_time(cpu[1h])") == counts == [240.0] * 6


def metrics_count(store: Any, expression: str) -> list[float]:
    end = (RANGE[0] - 437_000 + 15_000 * 239) * 1000
    values: list[float] = store.series("metrics").query(expression, end).column("value").to_pylist()
    return values


def test_all_selectors_of_a_query_see_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write between the two reads of an expression is seen by both or by neither."""
    with penstock.open(tmp_path / "store") as store:
        metrics = store.series("metrics")
        metrics.write("a", 1.0, time=1_000_000, durable=True)
        select = promql_source.TableSource.select

        def select_then_write(self: Any, *arguments: Any) -> Any:
            samples = select(self, *arguments)
            metrics.write("a", 100.0, time=1_000_000, durable=True)
            return samples

        monkeypatch.setattr(promql_source.TableSource, "select", select_then_write)
        assert metrics.query("a - a + on() sum(a offset 1s)", 2_000_000).column("value").to_pylist() == [1.0]


def test_the_query_behind_it_is_of_the_table(store: Any) -> None:
    assert "runs" in queries.QUERIES
    assert queries.SCHEMAS["runs"].names == ["series", "time", "value"]


def test_asyncio(tmp_path: Path) -> None:
    async def main() -> list[list[float]]:
        async with aio.open(tmp_path / "store") as store:
            metrics = await store.series("metrics")
            await metrics.write("a", 2.0, time=1_000_000)
            instant = await metrics.query("a * 3", 2_000_000)
            steps = await metrics.query_range("a", 1_000_000, 3_000_000, 1)
            return [table.column("value").to_pylist() for table in (instant, steps)]

    assert asyncio.run(main()) == [[6.0], [2.0, 2.0, 2.0]]


def test_label_matrices_are_kept_within_a_bound() -> None:
    cache = promql_source.MatrixCache(20_000)
    sets = [tuple(encode_labels([("a", f"{n}"), ("b", "x" * 50)]) for n in range(m, m + 5)) for m in range(40)]
    for labels in [*sets, *sets]:
        matrix = cache.matrix(labels)
        assert [encode_labels(sorted(label_set.items())) for label_set in matrix.label_sets()] == list(labels)
        assert cache.matrix(labels) is matrix
        assert sum(map(promql_source._size, cache._matrices)) == cache._bytes <= 20_000
    assert cache.matrix(()).label_sets() == []
