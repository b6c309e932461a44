"""Every expression of the suite gives what Prometheus gave: golden files, recorded by tools/record_promql.py."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_source import MemorySource
from promql_cases import INSTANT_MS, RANGE, instant_expressions, range_expressions

from penstock.errors import Invalid
from penstock.host.clock import SystemClock
from penstock.promql import QueryBudget, QueryLimits, QueryResult, evaluate, parse_query
from penstock.promql.values import StepGrid

GOLDEN = Path(__file__).parents[2] / "golden" / "promql"
RELATIVE = 1e-9
FAR_FROM_EXACT = {"stddev_over_time(odd{kind='offset'}[20m])": 1e-6}  # in Prometheus
SOURCE = MemorySource()
GRID = StepGrid(RANGE[0] * 1000, RANGE[2] * 1000, (RANGE[1] - RANGE[0]) // RANGE[2] + 1)
INSTANT = StepGrid(INSTANT_MS * 1000, 1, 1)
Expected = dict[tuple[tuple[str, str], ...], dict[int, float]]


def recorded(name: str) -> dict[str, Any]:
    answers: dict[str, Any] = json.loads(gzip.decompress((GOLDEN / f"{name}.json.gz").read_bytes()))
    return answers


RANGES, INSTANTS = recorded("range"), recorded("instant")


def run(expression: str, grid: StepGrid, *, instant: bool) -> QueryResult:
    budget = QueryBudget(QueryLimits(), SystemClock())
    return evaluate(parse_query(expression), SOURCE, grid, budget, instant=instant)


def by_labels(result: QueryResult) -> Expected:
    samples = result.samples
    series: Expected = {}
    for row, labels in enumerate(samples.labels.label_sets()):
        indices = range(int(samples.starts[row]), int(samples.starts[row + 1]))
        key = tuple(sorted(labels.items()))
        assert key not in series, "two series of one label set"
        series[key] = {int(samples.times[n]) // 1000: float(samples.values[n]) for n in indices}
    return {key: values for key, values in series.items() if values}


def expected(answer: dict[str, Any]) -> Expected:
    return {
        tuple(sorted(labels.items())): {round(moment * 1000): float(value) for moment, value in values}
        for labels, values in answer["series"]
    }


def differences(series: Expected, reference: Expected, relative: float = RELATIVE, absolute: float = 0.0) -> list[str]:
    problems = [f"{key} is too much" for key in series.keys() - reference.keys()]
    problems += [f"{key} is missing" for key in reference.keys() - series.keys()]
    for key in series.keys() & reference.keys():
        if series[key].keys() != reference[key].keys():
            problems.append(f"{key} has values at {sorted(series[key])}, not {sorted(reference[key])}")
            continue
        for moment, value in reference[key].items():
            if not alike(series[key][moment], value, relative, absolute):
                problems.append(f"{key} at {moment} is {series[key][moment]!r}, not {value!r}")
    return problems


def alike(value: float, reference: float, relative: float = RELATIVE, absolute: float = 0.0) -> bool:
    if math.isnan(reference) or math.isinf(reference) or math.isnan(value):
        return (math.isnan(value) and math.isnan(reference)) or value == reference
    return abs(value - reference) <= max(absolute, relative * abs(reference))


def test_the_suite_is_large_enough() -> None:
    assert len(range_expressions()) >= 600
    assert set(range_expressions()) == set(RANGES)
    assert set(instant_expressions()) == set(INSTANTS)
    assert sum("error" not in answer and bool(answer["series"]) for answer in RANGES.values()) >= 600


@pytest.mark.parametrize("expression", range_expressions())
def test_a_range_is_as_in_prometheus(expression: str) -> None:
    answer = RANGES[expression]
    if "error" in answer:
        with pytest.raises(Invalid):
            run(expression, GRID, instant=False)
    else:
        series = by_labels(run(expression, GRID, instant=False))
        assert differences(series, expected(answer), FAR_FROM_EXACT.get(expression, RELATIVE)) == []


@pytest.mark.parametrize("expression", instant_expressions())
def test_an_instant_is_as_in_prometheus(expression: str) -> None:
    answer = INSTANTS[expression]
    result = run(expression, INSTANT, instant=True)
    assert result.kind == answer["kind"]
    if result.kind == "string":
        assert result.text == answer["value"]
    elif result.kind == "scalar":
        assert alike(float(result.samples.values[0]), float(answer["value"]))
    else:
        series, reference = by_labels(result), expected(answer)
        assert differences(series, reference) == []
        if expression.startswith(("sort", "topk", "bottomk")) and " by " not in expression:
            assert list(series) == list(reference)


FIXED = ("start()", "end()")
STEPWISE = [e for e in range_expressions()[::9] if "error" not in RANGES[e] and not any(part in e for part in FIXED)]


@pytest.mark.parametrize("expression", STEPWISE)
def test_a_range_is_as_many_instants(expression: str) -> None:
    whole = by_labels(run(expression, GRID, instant=False))
    for moment in GRID.times()[[0, 4, -1]].tolist():
        reference = {
            key: {moment // 1000: values[moment // 1000]} for key, values in whole.items() if moment // 1000 in values
        }
        assert differences(by_labels(run(expression, StepGrid(moment, 1, 1), instant=True)), reference) == []


@pytest.mark.parametrize(
    ("expression", "harm"),
    [
        ("rate(requests_total[5m])", lambda values: values * (1 + 1e-8)),
        ("temperature", lambda values: np.nextafter(values, np.inf) + 1e-6),
    ],
)
def test_a_wrong_value_is_noticed(expression: str, harm: Any) -> None:
    result = run(expression, GRID, instant=False)
    result.samples.values[:] = harm(result.samples.values)
    assert differences(by_labels(result), expected(RANGES[expression])) != []
