"""A query ends: by its limits of series, samples, values and time, or because it was cancelled."""

from __future__ import annotations

import numpy as np
import pytest
from memory_source import MemorySource
from promql_dataset import START_MS, Series

from penstock.errors import Closed, Invalid, WaitExpired
from penstock.http.result_json import result_json
from penstock.promql import QueryBudget, QueryLimits, evaluate, parse_query, step_grid
from penstock.promql.labels import LabelMatrix, joined
from penstock.promql.ranking import label_hash
from penstock.promql.sums import window_means, window_sums
from penstock.series.arrow import SAMPLES
from penstock.testing.clock import FakeClock

SOURCE = MemorySource()
GRID = step_grid(START_MS * 1000, (START_MS + 600_000) * 1000, 60_000_000)


def run(text: str, budget: QueryBudget) -> None:
    evaluate(parse_query(text), SOURCE, GRID, budget, instant=False)


@pytest.mark.parametrize(
    ("limits", "text", "reason"),
    [
        (QueryLimits(series_max=3), "cpu", "at most 3 series"),
        (QueryLimits(samples_max=50), "rate(cpu[5m])", "at most 50 samples"),
        (
            QueryLimits(samples_max=300),
            "sum(delta(cpu[5m])) + sum(delta(up[5m])) + sum(delta(odd[5m]))",
            "at most 300 samples",
        ),
        (QueryLimits(cells_max=20), "cpu", "at most 20 values"),
        (QueryLimits(cells_max=100), "max_over_time(up[30d:1s])", "at most 100 values"),
        (QueryLimits(cells_max=100), "cpu * on() group_left {__name__=~'up|limit'}", "(duplicate|at most)"),
        (QueryLimits(cells_max=200), "{__name__=~'.+'}", "at most 200 values"),
        (
            QueryLimits(cells_max=150),
            "up + (up + (up + (up + (up + (up + (up + up))))))",
            "at most 150 values .* beside",
        ),
        (QueryLimits(), "max_over_time(" * 40 + "vector(time())" + "[9000y:1000y])" * 40, "too far from 1970"),
    ],
)
def test_a_query_is_refused_at_its_limits(limits: QueryLimits, text: str, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        run(text, QueryBudget(limits, FakeClock()))
    run("cpu{mode='idle',instance='a:80'}", QueryBudget(QueryLimits(), FakeClock()))


def test_a_query_ends_in_time_or_when_it_is_cancelled() -> None:
    clock = FakeClock()
    budget = QueryBudget(QueryLimits(timeout_s=5), clock)
    assert budget.remaining_s() == 5
    clock.advance(5.1)
    with pytest.raises(WaitExpired, match="longer than 5 s"):
        run("sum(cpu)", budget)
    cancelled = QueryBudget(QueryLimits(), clock)
    cancelled.cancel()
    with pytest.raises(Closed, match="cancelled"):
        run("sum(cpu)", cancelled)


def test_every_long_loop_looks_at_the_clock() -> None:
    """A window of all samples is walked sample by sample: the walk itself has to end."""

    class Ticking(FakeClock):
        def monotonic_s(self) -> float:
            self.advance(0.01)
            return super().monotonic_s()

    for text in ("deriv(odd[1h])", "stddev_over_time(odd[1h])", "avg(odd)", "histogram_quantile(0.5, shape_bucket)"):
        with pytest.raises(WaitExpired):
            run(text, QueryBudget(QueryLimits(timeout_s=0.05), Ticking()))


@pytest.mark.parametrize(("start", "end", "step"), [(0, -1, 1), (0, 10, 0), (0, 10, -5), (0, 11_001_000, 1_000)])
def test_a_range_has_a_bounded_number_of_steps(start: int, end: int, step: int) -> None:
    with pytest.raises(Invalid, match="range"):
        evaluate(
            parse_query("1"),
            SOURCE,
            step_grid(start, end, step),
            QueryBudget(QueryLimits(), FakeClock()),
            instant=False,
        )


@pytest.mark.parametrize("text", ["up[5m]", '"x"'])
def test_a_range_query_needs_numbers(text: str) -> None:
    with pytest.raises(Invalid, match="range query"):
        run(text, QueryBudget(QueryLimits(), FakeClock()))


@pytest.mark.parametrize("text", ["up offset 200000w", "up @ 999999999999999", "rate(up[5m] offset -200000w)"])
def test_times_far_away_are_refused_or_empty(text: str) -> None:
    try:
        run(text, QueryBudget(QueryLimits(), FakeClock()))
    except Invalid as refused:
        assert "\n" not in str(refused)


def test_label_sets_as_codes() -> None:
    matrix = LabelMatrix.of([{"a": "1", "b": "2"}, {"a": "1"}, {"c": "", "b": "2", "a": "1"}])
    assert matrix.label_sets() == [{"a": "1", "b": "2"}, {"a": "1"}, {"a": "1", "b": "2"}]
    numbers, first = matrix.groups()
    assert numbers.tolist() == [0, 1, 0]
    assert first.tolist() == [0, 1]
    both = joined(matrix, LabelMatrix.of([{"b": "3", "z": "4"}, {"a": "1"}]))
    assert both.label_sets()[3:] == [{"b": "3", "z": "4"}, {"a": "1"}]
    assert both.groups()[0].tolist() == [0, 1, 0, 2, 1]
    wide = LabelMatrix.of([{f"n{column}": str(row % 7) for column in range(40)} for row in range(50)])
    assert wide.groups()[0].tolist() == [row % 7 for row in range(50)]  # more codes than a number can hold


def test_sums_are_exact() -> None:
    budget = QueryBudget(QueryLimits(), FakeClock())
    values = np.array([1e20, 1.0, -1e20, 1e308, 1e308, -1e308, np.inf, 1.0, np.nan, 0.1, 0.2])
    low, high = np.array([0, 3, 6, 7, 9]), np.array([3, 6, 8, 9, 11])
    with np.errstate(all="ignore"):
        total, rest = window_sums(values, low, high, budget)
        means = window_means(values, low, high, budget)
    assert (total + rest)[0] == 1.0
    assert np.isinf(total[1:3]).all()
    assert np.isnan(total[3])
    assert total[4] == 0.1 + 0.2
    assert means[1] == pytest.approx(1e308 / 3)
    assert means[2] == np.inf


def test_sums_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[list[float]]:
        budget = QueryBudget(QueryLimits(), FakeClock())
        texts = [f"{name}_over_time({{__name__=~'cpu|odd|requests_total'}}[3m])" for name in ("sum", "avg")]
        texts.append("stdvar_over_time({__name__=~'cpu|temperature|requests_total'}[3m])")
        return [
            evaluate(parse_query(text), SOURCE, GRID, budget, instant=False).samples.values.tolist() for text in texts
        ]

    whole = results()
    monkeypatch.setattr("penstock.promql.windows.BLOCK_SAMPLES", 7)
    for values, reference in zip(results(), whole, strict=True):
        assert values == pytest.approx(reference, rel=1e-9, abs=1e-12, nan_ok=True)


def test_a_sample_is_seen_for_less_than_five_minutes() -> None:
    lone = MemorySource([Series({"__name__": "a"}, [START_MS], [1.0])])
    grid = step_grid((START_MS + 299_999) * 1000, (START_MS + 300_000) * 1000, 1_000)
    result = evaluate(parse_query("a"), lone, grid, QueryBudget(QueryLimits(), FakeClock()), instant=False)
    assert (result.samples.times // 1000).tolist() == [START_MS + 299_999]


def test_duplicates_are_judged_only_where_both_sides_have_something() -> None:
    one = Series({"__name__": "a", "x": "1"}, [START_MS + 600_000], [1.0])
    twins = [Series({"__name__": "b", "x": "1", "y": y}, [START_MS], [1.0]) for y in "pq"]
    grid = step_grid(START_MS * 1000, (START_MS + 600_000) * 1000, 600_000_000)
    budget = QueryBudget(QueryLimits(), FakeClock())
    tree = parse_query("a + on(x) b")
    assert not len(evaluate(tree, MemorySource([one, *twins]), grid, budget, instant=False).samples.times)
    early = Series({"__name__": "a", "x": "2"}, [START_MS], [1.0])
    with pytest.raises(Invalid, match="duplicate series"):
        evaluate(tree, MemorySource([early, *twins]), grid, budget, instant=False)


def test_the_hash_of_labels_has_lengths_of_one_and_of_four_bytes() -> None:
    assert label_hash({"a": "x" * 254}) != label_hash({"a": "x" * 255})
    assert label_hash({"b": "1", "a": "2"}) == label_hash({"a": "2", "b": "1"})


def test_series_that_differ_only_by_a_dropped_name_are_one_where_they_do_not_meet() -> None:
    early = Series({"__name__": "a", "x": "1"}, [START_MS, START_MS + 60_000], [1.0, 2.0])
    late = Series({"__name__": "b", "x": "1"}, [START_MS + 480_000], [3.0])
    grid = step_grid(START_MS * 1000, (START_MS + 600_000) * 1000, 60_000_000)
    budget = QueryBudget(QueryLimits(), FakeClock())
    tree = parse_query("last_over_time({x='1'}[1m]) * 2")
    result = evaluate(tree, MemorySource([early, late]), grid, budget, instant=False)
    assert result.samples.labels.label_sets() == [{"x": "1"}]
    assert result.samples.values.tolist() == [2.0, 4.0, 6.0]
    with pytest.raises(Invalid, match="same labelset"):
        evaluate(parse_query("{x='1'} * 2"), MemorySource([early, early]), grid, budget, instant=False)


@pytest.mark.parametrize(
    "text",
    [
        "label_replace(" * 30 + "up" + ',"instance","$1$1$1","instance","(.*)")' * 30,
        'label_replace(up,"instance","' + "$1" * 30_000 + '","instance","(.*)")',
        "label_join(" * 30 + "up" + ',"instance","-","instance","instance","instance")' * 30,
        'label_join(up,"instance","' + "x" * 1_000 + '"' + ',"instance"' * 70 + ")",
        'label_join(up,"instance",""' + ',"instance"' * 3_500 + ")",
    ],
)
def test_labels_that_a_query_makes_are_bounded(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.promql.label_functions.VALUE_CHARACTERS_MAX", 10_000)
    with pytest.raises(Invalid, match="a label of more than 10000 characters"):
        run(text, QueryBudget(QueryLimits(), FakeClock()))


def test_labels_of_a_result_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(Invalid, match="2 series have 3 names"):
        patch.setattr("penstock.promql.labels.CELLS_MAX", 5)
        LabelMatrix.of([{"a": "x", "b": "y"}, {"c": "z"}])
    monkeypatch.setattr("penstock.promql.label_functions.VALUES_CHARACTERS_MAX", 3)
    with pytest.raises(Invalid, match="labels of more than 3 characters"):
        run('label_replace(up,"x","abcd","","")', QueryBudget(QueryLimits(), FakeClock()))
    result = evaluate(parse_query("up"), SOURCE, GRID, QueryBudget(QueryLimits(), FakeClock()), instant=False)
    rows = result.to_arrow(SAMPLES)
    repeated = sum(len(k) + len(v) for pairs in rows.column("labels").to_pylist() for k, v in pairs) + 10 * len(rows)
    assert int((result.samples.labels.characters() * np.diff(result.samples.starts)).sum()) == repeated
    monkeypatch.setattr("penstock.promql.results.LABEL_CHARACTERS_MAX", repeated - 1)
    with pytest.raises(Invalid, match=f"repeat {repeated} characters"):
        result.to_arrow(SAMPLES)
    monkeypatch.setattr("penstock.http.result_json.LABEL_CHARACTERS_MAX", 10)
    with pytest.raises(Invalid, match="at most 10 characters of labels"):
        result_json(result)
