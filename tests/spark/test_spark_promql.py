"""PromQL on Spark: slices of time give together what `query_range` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
import penstock.spark
from penstock.errors import Invalid, KindMismatch, NotFound
from penstock.promql.limits import QueryLimits, QueryTooLarge
from penstock.series.promql_source import range_grid
from penstock.spark import promql_range
from penstock.spark.table_ref import TableRef
from penstock.store.store import Store

HOUR_US = 3_600_000_000
BASE_US = 1_700_000_000_000_000 // HOUR_US * HOUR_US
START_US, END_US, STEP_S = BASE_US + HOUR_US // 2 + 7, BASE_US + 4 * HOUR_US, 97.0
EXPRESSIONS = [
    "cpu",
    "sum by (dc) (rate(requests_total[10m]))",
    "cpu @ start() + cpu @ end() + cpu offset -5m",  # the ends of the whole range, and not of a slice
    "max_over_time(sum(rate(requests_total[5m]))[40m:2m])",
    "absent(missing)",
    "vector(time())",
]


@pytest.fixture
def metrics(store: Store) -> Any:
    """Samples of four hours in files, some of them changed in memory, others gone stale."""
    table = store.series("metrics", shards=2, options=penstock.SeriesOptions(bucket_s=3_600))
    rng = np.random.default_rng(5)
    times = BASE_US + np.arange(0, 4 * HOUR_US, 30_000_000)
    for number in range(6):
        labels = {"host": f"h{number}", "dc": f"dc{number % 2}"}
        table.write_columns("cpu", np.round(rng.normal(50, 9, len(times)), 1), labels, times=times)
        table.write_columns("requests_total", np.cumsum(rng.integers(0, 9, len(times))), labels, times=times)
    table.delete('cpu{host="h1"}', BASE_US + HOUR_US, BASE_US + 2 * HOUR_US)
    store.flush()
    store.compact("metrics")
    table.write("cpu", -1.0, {"host": "h0", "dc": "dc0"}, time=BASE_US + 3 * HOUR_US, durable=True)
    return table


def rows(table: pa.Table) -> set[tuple[Any, ...]]:
    times = table.column("time").cast(pa.int64()).to_pylist()
    labels = [tuple(sorted(dict(pairs).items())) for pairs in table.column("labels").to_pylist()]
    return set(zip(table.column("metric").to_pylist(), labels, times, table.column("value").to_pylist(), strict=True))


def collected(frame: Any) -> set[tuple[Any, ...]]:
    return rows(frame.toArrow())


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_slices_are_the_range(spark: Any, metrics: Any, folder: str, expression: str) -> None:
    expected = rows(metrics.query_range(expression, START_US, END_US, STEP_S))
    assert expected
    frame = penstock.spark.promql(spark, folder, "metrics", expression, START_US, END_US, STEP_S, splits=5)
    assert frame.schema.names == metrics.schema.names
    assert collected(frame) == expected


def test_the_number_of_slices(spark: Any, metrics: Any, folder: str) -> None:
    def slices(query: str, **options: Any) -> int:
        frame = penstock.spark.promql(spark, folder, "metrics", query, START_US, END_US, STEP_S, **options)
        count: int = frame.rdd.getNumPartitions()
        return count

    assert slices("cpu") == 2 * spark.sparkContext.defaultParallelism
    assert slices("rate(requests_total[3h])") == 1  # a slice would read again most of what the others read
    assert slices("cpu", splits=3) == 3
    long = penstock.spark.promql(spark, folder, "metrics", "cpu", BASE_US, BASE_US + 30_000_000_000, 1.0)
    assert long.rdd.getNumPartitions() >= 3  # more steps than one query may have


def test_a_slice_that_is_too_large_is_halved(
    metrics: Any, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(promql_range, "query_name", lambda function: f"{function}-{tmp_path}")
    monkeypatch.setattr(promql_range, "QueryLimits", lambda **more: QueryLimits(samples_max=400, **more))
    ref = TableRef.of({"path": folder, "table": "metrics"})
    grid = range_grid(START_US, END_US, STEP_S)
    range_query = promql_range._RangeQuery(ref, ref.info(), "cpu", grid, 1)
    table = pa.Table.from_batches(promql_range._rows(range_query, grid))
    assert rows(table) == rows(metrics.query_range("cpu", START_US, END_US, STEP_S))
    monkeypatch.setattr(promql_range, "QueryLimits", lambda **more: QueryLimits(samples_max=4, **more))
    with pytest.raises(QueryTooLarge, match="at most 4 samples"):
        list(promql_range._rows(range_query, grid))


def test_a_task_without_the_folder_asks_the_owner(
    metrics: Any, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(promql_range, "query_name", lambda function: f"{function}-{tmp_path}")
    monkeypatch.setattr(promql_range, "_shards", lambda *_: None)
    ref = TableRef.of({"path": folder, "table": "metrics"})
    grid = range_grid(START_US, END_US, STEP_S)
    range_query = promql_range._RangeQuery(ref, ref.info(), "cpu", grid, 1)
    table = pa.Table.from_batches(promql_range._rows(range_query, grid))
    assert rows(table) == rows(metrics.query_range("cpu", START_US, END_US, STEP_S))


def test_wrong_arguments_are_refused_before_any_work(spark: Any, metrics: Any, store: Store, folder: str) -> None:
    store.kv("users")
    good = ("metrics", "cpu", BASE_US, END_US, 60.0)
    for index, wrong, error in (
        (0, "users", KindMismatch),
        (0, "absent", NotFound),
        (1, "cpu[5m]", Invalid),
        (1, "cpu{", Invalid),
        (1, 7, Invalid),
        (2, "now", Invalid),
        (3, BASE_US - 1, Invalid),
        (4, 0, Invalid),
        (4, "1m", Invalid),
    ):
        arguments: list[Any] = [*good]
        arguments[index] = wrong
        with pytest.raises(error):
            penstock.spark.promql(spark, folder, *arguments)
    with pytest.raises(Invalid, match="splits"):
        penstock.spark.promql(spark, folder, *good, splits=0)
