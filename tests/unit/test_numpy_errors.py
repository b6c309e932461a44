"""Programs that make numpy raise where it rounds, overflows or divides by zero: the store works as always."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import penstock

TINY, LARGE = 1e-40, 1e14  # the first has no full precision as float32, and its square is zero


@pytest.fixture(params=["owner", "client"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    with penstock.open(tmp_path / "store") as owner, np.errstate(all="raise"):
        if request.param == "owner":
            yield owner
        else:
            with penstock.connect(tmp_path / "store") as client:
                yield client
        assert owner.troubles() == []


@pytest.mark.parametrize("metric", get_args(penstock.Metric))
def test_vectors(store: Any, metric: penstock.Metric) -> None:
    rows = [[1.0, TINY, 1e-30], [LARGE, LARGE, TINY], [TINY, 1.0, 1e-20], [3.0, 4.0, 5.0]]
    table = store.vector(f"as_{metric}", dimensions=3, metric=metric)
    for turn in range(2):  # the second one meets rows in memory
        table.upsert([f"{turn}-{number}" for number in range(len(rows))], rows, durable=True)
        for row in rows:
            assert len(table.search(row, k=3)) == len(table.search(row, k=3, exact=True)) == 3


def test_samples(store: Any) -> None:
    table = store.series("metrics")
    for number, value in enumerate([5e-324, 1e-310, 0.0, 1e308, -1e308, np.inf, -np.inf, np.nan]):
        table.write("size", value, {"number": str(number)})
    store.flush()
    for function in get_args(penstock.AggregateFunction):
        quantile = 0.5 if function == "quantile" else None
        step = 1.0 if function in {"rate", "increase"} else None
        for by in ([], ["number"]):
            table.aggregate("size", function=function, by=by, step=step, quantile=quantile)
    table.query("avg(size) / 0")
