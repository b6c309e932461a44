"""Random expressions, made from the grammar, compared with a running Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.prometheus import peer_binary
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_peer import PrometheusPeer, prometheus
from promql_cases import CALENDAR, RANGE, WINDOWED
from promql_dataset import dataset
from test_promql_conformance import GRID, by_labels, differences, expected, run

from penstock.errors import Invalid
from penstock.promql import parse_query

pytestmark = pytest.mark.campaign

SELECTORS = st.sampled_from(
    [
        *("requests_total", "temperature", "cpu", "up", "ending", "sparse", "limit", "latency_count"),
        *("requests_total{job='api'}", "cpu{mode=~'i.*'}", "odd{kind=~'steps|nans|constant|negative'}"),
    ]
)
DURATIONS = st.sampled_from(["47s", "2m", "5m", "13m"])
LABELS = st.lists(st.sampled_from(["job", "instance", "code", "mode", "floor", "kind"]), max_size=2, unique=True)
# A difference that is only rounding must not grow: no quotients, no jumps, no numbers that values are equal to.
NUMBERS = st.sampled_from(["0.37", "2.51", "-3.3", "101.7"])
CONTINUOUS = ["abs", "atan", "cos", "sin", "tanh", "rad", "asinh"]
ABSOLUTE = 1e-7
MODIFIERS = st.sampled_from(["", "", "", " offset 3m", " offset -1m", " @ 1700001700", " @ end()"])


def ranges(vectors: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    plain = st.builds(lambda s, d, m: f"{s}[{d}]{m}", SELECTORS, DURATIONS, MODIFIERS)
    # Prometheus reads another time than it should where `@` stands in a subquery that itself stands under `@`.
    nested = st.builds(
        lambda v, d, s, m: f"({v})[{d}:{s}]{'' if '@' in v else m}", vectors, DURATIONS, DURATIONS, MODIFIERS
    )
    return plain | nested


def vectors() -> st.SearchStrategy[str]:
    base = st.builds(lambda s, m: s + m, SELECTORS, MODIFIERS)

    def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        grouping = st.builds(
            lambda word, names: f"{word} ({', '.join(names)})", st.sampled_from(["by", "without"]), LABELS
        )
        arithmetic = st.sampled_from(["+", "-", "*", "> bool", "<", ">="])
        matching = st.builds(
            lambda word, names: f"{word}({', '.join(names)})", st.sampled_from(["on", "ignoring"]), LABELS
        )
        return st.one_of(
            st.builds(
                lambda f, r: f"{f}({r})", st.sampled_from([f for f in WINDOWED if "absent" not in f]), ranges(inner)
            ),
            st.builds(lambda f, v: f"{f}({v})", st.sampled_from(CONTINUOUS), inner),
            st.builds(lambda f, v: f"{f}(timestamp({v}))", st.sampled_from(CALENDAR), inner),  # of NaN it is garbage
            st.builds(
                lambda f, g, v: f"{f} {g} ({v})",
                st.sampled_from(["sum", "avg", "min", "max", "count", "group", "stddev"]),
                grouping,
                inner,
            ),
            st.builds(
                lambda q, g, v: f"quantile {g} ({q}, {v})", st.sampled_from(["0.5", "0.9", "0"]), grouping, inner
            ),
            st.builds(lambda v, o, n: f"({v}) {o} {n}", inner, arithmetic, NUMBERS),
            st.builds(lambda a, o, b: f"({a}) {o} ({b})", inner, arithmetic, inner),
            st.builds(lambda a, o, m, b: f"({a}) {o} {m} ({b})", inner, arithmetic, matching, inner),
            st.builds(
                lambda a, o, m, b: f"({a}) {o} {m} ({b})",
                inner,
                st.sampled_from(["and", "or", "unless"]),
                matching,
                inner,
            ),
            st.builds(
                lambda a, o, m, side, b: f"({a}) {o} {m} group_{side} ({b})",
                inner,
                arithmetic,
                matching,
                st.sampled_from(["left()", "right()", "left(mode)", "right(code, floor)"]),
                inner,
            ),
            st.builds(
                lambda q, r, o: f"histogram_quantile({q}, rate(latency_bucket[{r}]{o}))",
                st.sampled_from(["0.5", "0.9", "0.99"]),
                DURATIONS,
                st.sampled_from(["", " offset 2m"]),
            ),
            st.builds(
                lambda v, t, s, e: f'label_replace({v}, "{t}", "$1x", "{s}", "{e}")',
                inner,
                st.sampled_from(["job", "made", "__name__"]),
                st.sampled_from(["job", "instance", "code", "absent"]),
                st.sampled_from(["(.*)", "(a|w).*", "", "b:.*"]),
            ),
            st.builds(
                lambda f, v, n: f.format(f"({v})", n),
                st.sampled_from(["clamp_min({}, {})", "clamp_max({}, {})", "{} * scalar(limit{{job='api'}}) + {}"]),
                inner,
                NUMBERS,
            ),
            st.builds(lambda r, n: f"predict_linear({r}, {n})", ranges(inner), st.sampled_from(["60", "-600"])),
            st.builds(lambda q, r: f"quantile_over_time({q}, {r})", st.sampled_from(["0.5", "0.1"]), ranges(inner)),
            st.builds(lambda v: f"-({v})", inner),
            st.builds(lambda v: f"absent({v})", inner),
            st.builds(lambda v: f"timestamp({v})", inner),
        )

    return st.recursive(base, larger, max_leaves=5)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusPeer]:
    if peer_binary("prometheus") is None:
        pytest.skip("there is no prometheus on PATH or in PENSTOCK_PEERS")
    with prometheus(tmp_path_factory.mktemp("prometheus"), dataset()) as started:
        yield started


@settings(
    max_examples=2_000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(vectors())
def test_a_random_expression_is_as_in_prometheus(peer: PrometheusPeer, expression: str) -> None:
    answer = peer.range(expression, *RANGE)
    if answer["status"] == "error":
        if "same labelset" not in answer["error"]:  # names are dropped later here, and steps judged one by one
            with pytest.raises(Invalid):
                run(expression, GRID, instant=False)
        return
    reference = expected({"series": [[entry["metric"], entry["values"]] for entry in answer["data"]["result"]]})
    assert differences(by_labels(run(expression, GRID, instant=False)), reference, absolute=ABSOLUTE) == []


def test_the_generator_makes_queries() -> None:
    @settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(vectors())
    def parses(expression: str) -> None:
        parse_query(expression)

    parses()
