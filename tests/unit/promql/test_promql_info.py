"""What the golden files do not have: `fill`, which is younger than they are, and info metrics that disagree."""

from __future__ import annotations

from typing import Any

import pytest
from memory_source import MemorySource
from promql_dataset import START_MS, Series

from penstock.errors import Invalid
from penstock.promql import QueryBudget, QueryLimits, evaluate, parse_query, selectors_of, step_grid
from penstock.testing.clock import FakeClock

MINUTE_MS = 60_000


def series(name: str, *values: float | None, **labels: str) -> Series:
    """A sample every ten minutes: those before are out of sight."""
    samples = [(START_MS + 10 * MINUTE_MS * n, value) for n, value in enumerate(values) if value is not None]
    return Series({"__name__": name, **labels}, [at for at, _ in samples], [value for _, value in samples])


def run(text: str, data: list[Series], steps: int) -> dict[Any, list[float | None]]:
    """The values of each series at each step; None where it has none."""
    start_us = START_MS * 1_000
    grid = step_grid(start_us, start_us + (steps - 1) * 600_000_000, 600_000_000)
    budget = QueryBudget(QueryLimits(), FakeClock())
    samples = evaluate(parse_query(text), MemorySource(data), grid, budget, instant=False).samples
    rows = {}
    for row, labels in enumerate(samples.labels.label_sets()):
        indices = range(int(samples.starts[row]), int(samples.starts[row + 1]))
        by_step = {int(samples.times[n] - start_us) // 600_000_000: float(samples.values[n]) for n in indices}
        rows[" ".join(f"{name}={labels[name]}" for name in sorted(labels))] = [by_step.get(n) for n in range(steps)]
    return rows


LEFT = [series("l", 10, x="a"), series("l", 20, x="b"), series("l", 30, x="c")]
RIGHT = [series("r", 100, x="a"), series("r", 200, x="b"), series("r", 400, x="d")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("l + fill(0) r", {"x=a": 110, "x=b": 220, "x=c": 30, "x=d": 400}),
        ("l + fill_left(0) r", {"x=a": 110, "x=b": 220, "x=d": 400}),
        ("l - fill_right(1) r", {"x=a": -90, "x=b": -180, "x=c": 29}),
        ("l - fill_left(5) fill_right(7) r", {"x=a": -90, "x=b": -180, "x=c": 23, "x=d": -395}),
        ("l + fill(-Inf) r", {"x=a": 110, "x=b": 220, "x=c": -float("inf"), "x=d": -float("inf")}),
        ("l == fill(30) r", {"__name__=l x=c": 30}),
        ("l != fill(30) r", {"__name__=l x=a": 10, "__name__=l x=b": 20, "x=d": 30}),
        ("l == bool fill(30) r", {"x=a": 0, "x=b": 0, "x=c": 1, "x=d": 0}),
        ("l + on(x) fill(0) r", {"x=a": 110, "x=b": 220, "x=c": 30, "x=d": 400}),
        ("l + on() fill(0) missing", None),
        ("sum(l) + fill(7) missing", {"": 67}),
        ("l + fill_left(0) missing", {}),
        ("missing + fill_left(1) r", {"x=a": 101, "x=b": 201, "x=d": 401}),
        ("missing + fill(1) also", {}),
    ],
)
def test_fill_stands_for_series_that_are_missing(text: str, expected: dict[str, float] | None) -> None:
    if expected is None:  # several series of a group meet one
        with pytest.raises(Invalid, match="many-to-one"):
            run(text, LEFT + RIGHT, 1)
    else:
        assert run(text, LEFT + RIGHT, 1) == {key: [value] for key, value in expected.items()}


def test_fill_is_judged_step_by_step() -> None:
    data = [series("l", 1, None, 3, x="a"), series("r", None, 20, 30, x="a"), series("r", 100, None, None, x="b")]
    assert run("l + fill(0) r", data, 3) == {"x=a": [1, 20, 33], "x=b": [100, None, None]}
    assert run("l + fill_right(0) r", data, 3) == {"x=a": [1, None, 33]}
    assert run("l + fill_left(0) r", data, 3) == {"x=a": [None, 20, 33], "x=b": [100, None, None]}


def test_fill_with_groups() -> None:
    data = [
        *(series("many", value, code=code, m=m) for value, code, m in ((1, "2", "g"), (2, "2", "p"), (3, "5", "g"))),
        *(series("one", value, code=code, team=code) for value, code in ((10, "2"), (40, "4"))),
    ]
    right = "on(code) group_left"
    assert run(f"many + {right} fill_right(0) one", data, 1) == {
        "code=2 m=g": [11],
        "code=2 m=p": [12],
        "code=5 m=g": [3],
    }
    assert run(f"many + {right}(team) fill(0) one", data, 1) == {
        "code=2 m=g team=2": [11],
        "code=2 m=p team=2": [12],
        "code=5 m=g": [3],
        "code=4 team=4": [40],
    }
    # As in Prometheus, the left value is that of the side of many: here the right one.
    assert run("one * on(code) group_right fill_left(2) many", data, 1) == {
        "code=2 m=g": [10],
        "code=2 m=p": [20],
        "code=4": [80],
    }


@pytest.mark.parametrize("text", ["a and fill(0) b", "1 + fill(0) b", "a + fill(0) 1", "a or on(x) fill_left(0) b"])
def test_fill_is_between_vectors(text: str) -> None:
    with pytest.raises(Invalid, match="fill"):
        parse_query(text)


def test_the_newest_info_counts() -> None:
    data = [
        series("m", 1, 2, 3, instance="a", job="j"),
        series("target_info", 1, 1, None, instance="a", job="j", v="old"),
        Series({"__name__": "target_info", "instance": "a", "job": "j", "v": "new"}, [START_MS + 599_000], [1.0]),
    ]
    base = "__name__=m instance=a job=j"
    assert run("info(m)", data, 3) == {f"{base} v=old": [1, 2, None], base: [None, None, 3]}
    data[2] = Series(data[2].labels, [START_MS + 601_000, START_MS + 1_199_000], [1.0, 1.0])
    assert run("info(m)", data, 3) == {f"{base} v=old": [1, 2, None], f"{base} v=new": [None, None, 3]}
    assert run("info(m, {v='new'})", data, 3) == {f"{base} v=new": [None, None, 3]}


def test_a_label_that_a_series_has_stays() -> None:
    data = [series("m", 1, instance="a", v="mine"), series("target_info", 1, instance="a", v="theirs", w="more")]
    assert run("info(m)", data, 1) == {"__name__=m instance=a v=mine w=more": [1]}
    assert run("info(m, {v=~'.+'})", data, 1) == {"__name__=m instance=a v=mine": [1]}


def test_infos_that_disagree_are_refused() -> None:
    metric = series("m", 1, instance="a", job="j")
    twice = [series("target_info", 1, instance="a", job="j", v=v) for v in ("x", "y")]
    with pytest.raises(Invalid, match="duplicate series for an info metric"):
        run("info(m)", [metric, *twice], 1)
    other = series("build_info", 1, instance="a", job="j", v="z")
    with pytest.raises(Invalid, match="conflicting label"):
        run("info(m, {__name__=~'.+_info'})", [metric, twice[0], other], 1)
    owned = series("m", 1, instance="a", job="j", v="own")
    assert list(run("info(m, {__name__=~'.+_info'})", [owned, twice[0], other], 1)) == [
        "__name__=m instance=a job=j v=own"
    ]


def test_an_info_metric_is_not_its_own_info() -> None:
    data = [series("build_info", 1, instance="a", b="1"), series("target_info", 1, instance="a", v="2")]
    assert list(run("info(build_info, {__name__=~'.+_info'})", data, 1)) == ["__name__=build_info b=1 instance=a"]
    every = "{__name__=~'target_.+', __name__=~'.+_info'}"  # all of its matchers have to match
    assert list(run(f"info(build_info, {every})", data, 1)) == ["__name__=build_info b=1 instance=a v=2"]


def test_info_reads_two_selectors() -> None:
    """So that both are read at one moment."""
    assert len(list(selectors_of(parse_query("info(m)")))) == 2
    assert len(list(selectors_of(parse_query("info(m, {v='1'})")))) == 2


def test_info_takes_matchers() -> None:
    with pytest.raises(Invalid, match="matchers in braces"):
        run("info(m, m + m)", [series("m", 1, instance="a")], 1)


def test_one_of_several_infos_changes() -> None:
    data = [
        *(series("m", 1, 2, 3, instance=instance, job="j") for instance in ("a", "b")),
        series("x_info", 1, 1, None, instance="b", job="j", state="stopped"),
        series("x_info", None, None, 1, instance="b", job="j", state="running"),
        series("x_info", 1, 1, 1, instance="a", job="j", state="running"),
    ]
    assert run("info(m, {__name__='x_info'})", data, 3) == {
        "__name__=m instance=a job=j state=running": [1, 2, 3],
        "__name__=m instance=b job=j state=running": [None, None, 3],
        "__name__=m instance=b job=j state=stopped": [1, 2, None],
    }
    assert run("info(sum(m), {__name__='x_info'})", data, 1) == {"": [2]}
    assert run("info(sum(m), {__name__='x_info', state=~'.+'})", data, 1) == {}
