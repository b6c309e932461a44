"""Aggregates of stored samples: directories of blocks are enough where a block lies in one step, and answers stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import penstock
from penstock.series.aggregate import FUNCTIONS
from penstock.series.blocks import Block

DAY_US = 86_400_000_000
T0 = 1_700_000_000_000_000 // DAY_US * DAY_US
PLAIN = ("sum", "avg", "min", "max", "count", "last")


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[Any]:
    with penstock.open(tmp_path / "store", settings=penstock.StoreSettings(background=False)) as store:
        table: Any = store.series("metrics", shards=2)
        chance = np.random.default_rng(7)
        for host in range(70):  # two groups of series in a bucket
            times = T0 + chance.integers(0, 3 * DAY_US // 1_000_000, 300) * 1_000_000
            table.write_columns("cpu", chance.normal(size=300), {"host": f"h{host}", "dc": f"d{host % 3}"}, times=times)
        store.flush()
        store.checkpoint()
        store.compact("metrics")
        table.store = store
        yield table


def answers(metrics: Any, **more: Any) -> dict[str, list[Any]]:
    return {
        function: metrics.aggregate("cpu", function=function, by=["dc"], **more).to_pylist()
        for function in FUNCTIONS
        if function not in ("quantile", "rate", "increase")
    }


def decoded(metrics: Any, monkeypatch: pytest.MonkeyPatch, **more: Any) -> int:
    """How many chunks an aggregate decodes."""
    chunks: list[int] = []
    right = Block._decoded

    def decode(self: Block, chunk: int, kind: int, data: list[bytes]) -> Any:
        chunks.append(chunk)
        return right(self, chunk, kind, data)

    with monkeypatch.context() as patch:
        patch.setattr(Block, "_decoded", decode)
        answers(metrics, **more)
    return len(chunks)


def same(actual: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    for function in PLAIN:
        for one, other in zip(actual[function], expected[function], strict=True):
            assert (one["labels"], one["time"]) == (other["labels"], other["time"])
            if function in ("sum", "avg"):
                assert one["value"] == pytest.approx(other["value"], rel=1e-12, abs=1e-12, nan_ok=True)
            else:
                assert np.float64(one["value"]).tobytes() == np.float64(other["value"]).tobytes()


def as_samples(metrics: Any, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, list[Any]]:
    """The answers when no directory is used."""
    with monkeypatch.context() as patch:
        patch.setattr(Block, "in_one_step", lambda self, which, *_: np.zeros_like(which))
        return answers(metrics, **more)


STEPS = [{}, {"step": 86_400}, {"step": 3_600}, {"step": 7 * 86_400, "start": T0 + 5, "end": T0 + 2 * DAY_US}]


@pytest.mark.parametrize("more", STEPS)
def test_answers_do_not_change(metrics: Any, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    store = metrics.store
    same(answers(metrics, **more), as_samples(metrics, monkeypatch, **more))
    metrics.write_columns("cpu", [1e9, np.nan], {"host": "h3", "dc": "d0"}, times=[T0 + 7, T0 + DAY_US + 7])
    metrics.write("cpu", 5.0, {"host": "h5", "dc": "d2"}, time=T0 + DAY_US)
    metrics.delete('cpu{host="h4"}', T0 + 5, T0 + DAY_US // 2, durable=True)
    same(answers(metrics, **more), as_samples(metrics, monkeypatch, **more))  # in memory
    store.checkpoint()
    same(answers(metrics, **more), as_samples(metrics, monkeypatch, **more))  # in files that overlap
    store.compact("metrics")
    same(answers(metrics, **more), as_samples(metrics, monkeypatch, **more))


def test_what_lies_in_one_step_is_not_decoded(metrics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decoded(metrics, monkeypatch) == 0
    assert decoded(metrics, monkeypatch, step=86_400) == 0
    assert decoded(metrics, monkeypatch, step=3_600) > 0
    assert decoded(metrics, monkeypatch, start=T0 + DAY_US, end=T0 + 2 * DAY_US) == 0
    metrics.write_columns("cpu", [1.0], {"host": "h3", "dc": "d0"}, times=[T0 + 7])
    metrics.store.flush()
    touched = decoded(metrics, monkeypatch)
    assert 0 < touched <= 2 * len(PLAIN)  # values and times of the one block that a write touches


def test_of_equal_times_the_last_series_counts(metrics: Any) -> None:
    """Whether its samples are in a directory or are decoded."""
    store = metrics.store
    ties = store.series("ties")
    table = pa.table({"metric": ["m"] * 6, "n": list("aabbcc"), "time": [T0, T0 + 5] * 3, "value": np.arange(6.0)})
    ties.write_arrow(table, durable=True)
    store.checkpoint()
    for series, value in (("b", 7.0), ("a", 8.0)):
        assert ties.aggregate("m", function="last").column("value").to_pylist() == [5.0]
        ties.write("m", value, {"n": series}, time=T0 + 5, durable=True)
    ties.write("m", 9.0, {"n": "c"}, time=T0 + 5, durable=True)
    assert ties.aggregate("m", function="last").column("value").to_pylist() == [9.0]


def test_sums_past_the_largest_number_warn_nobody(tmp_path: Path) -> None:
    """A program that makes warnings errors would lose the answer."""
    with penstock.open(tmp_path / "store") as store:
        wide: Any = store.series("wide")
        wide.write_columns("m", [1e308, 1e308, -1e308, np.inf, -np.inf], times=T0 + np.arange(5))
        names = (*PLAIN, "rate")
        results = {name: wide.aggregate("m", function=name, step=1).column("value")[0].as_py() for name in names}
        assert np.isnan(results["sum"])
        assert (results["min"], results["max"], results["count"]) == (-np.inf, np.inf, 5)
        wide.delete("m", T0 + 2, T0 + 5)
        assert wide.aggregate("m", function="sum").column("value").to_pylist() == [np.inf]
