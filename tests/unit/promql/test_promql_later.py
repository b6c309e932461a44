"""What Prometheus has since 3.5, from which the golden files come: values worked out by hand."""

from __future__ import annotations

import pytest
from memory_source import MemorySource
from promql_dataset import START_MS, Series

from penstock.errors import Invalid
from penstock.promql import QueryBudget, QueryLimits, evaluate, parse_query, step_grid
from penstock.testing.clock import FakeClock

TIMES = [START_MS + 60_000 * n for n in range(5)]
BUCKETS = {"1": 4.0, "2": 6.0, "+Inf": 8.0}
SERIES = [
    Series({"__name__": "a", "x": "1"}, TIMES, [5.0, 4.0, 3.0, 2.0, 1.0]),
    *(Series({"__name__": "h_bucket", "le": le}, TIMES, [count] * 5) for le, count in BUCKETS.items()),
    *(Series({"__name__": "n_bucket", "le": le}, TIMES, [count] * 5) for le, count in {"-1": 2.0, "+Inf": 4.0}.items()),
]


def values(text: str) -> list[float]:
    grid = step_grid((START_MS + 120_000) * 1000, (START_MS + 240_000) * 1000, 60_000_000)
    budget = QueryBudget(QueryLimits(), FakeClock())
    numbers: list[float] = evaluate(
        parse_query(text), MemorySource(SERIES), grid, budget, instant=False
    ).samples.values.tolist()
    return numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("first_over_time(a[2m])", [4.0, 3.0, 2.0]),
        ("ts_of_first_over_time(a[2m]) - 1700000000", [60.0, 120.0, 180.0]),
        ("start() - 1700000000", [120.0] * 3),
        ("end() - 1700000000", [240.0] * 3),
        ("range()", [120.0] * 3),
        ("step()", [60.0] * 3),
        ("max_of(1, time() - 1700000000 - 180)", [1.0, 1.0, 60.0]),
        ("min_of(0, NaN)", [float("nan")] * 3),
        ("min_of(-Inf, NaN)", [float("-inf")] * 3),
        ("histogram_fraction(0, 0.5, h_bucket)", [0.25] * 3),
        ("histogram_fraction(0.5, 1.5, h_bucket)", [0.375] * 3),
        ("histogram_fraction(-5, -2, n_bucket)", [0.0] * 3),
        ("histogram_fraction(-5, 3, n_bucket)", [0.0] * 3),
        ("histogram_quantiles(h_bucket, 'q', 0.25, 1)", [0.5] * 3 + [2.0] * 3),
    ],
)
def test_later_functions(text: str, expected: list[float]) -> None:
    assert values(text) == pytest.approx(expected, nan_ok=True)


def test_a_name_is_kept_by_first_over_time_and_labels_by_quantiles() -> None:
    grid = step_grid((START_MS + 120_000) * 1000, (START_MS + 120_000) * 1000, 1)
    budget = QueryBudget(QueryLimits(), FakeClock())
    labels = [
        evaluate(parse_query(text), MemorySource(SERIES), grid, budget, instant=True).samples.labels.label_sets()
        for text in ("first_over_time(a[2m])", "histogram_quantiles(h_bucket, 'q', 0.25, 1)")
    ]
    assert labels == [[{"__name__": "a", "x": "1"}], [{"q": "0.25"}, {"q": "1.0"}]]


@pytest.mark.parametrize("text", ["start_timestamp(a)", "histogram_quantiles(h_bucket, 'q', time() / 1e10, 1)"])
def test_what_is_missing_says_so(text: str) -> None:
    with pytest.raises(Invalid, match=text.partition("(")[0]):
        values(text)
