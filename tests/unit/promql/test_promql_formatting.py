"""A tree as text again: every expression of the suite, and random trees, come back as they were."""

from __future__ import annotations

import pytest
from promql_cases import instant_expressions, range_expressions

from penstock.errors import Invalid
from penstock.promql import parse_query
from penstock.promql.formatting import format_duration, format_query


def test_every_expression_comes_back() -> None:
    count = 0
    for text in [*range_expressions(), *instant_expressions()]:
        try:
            tree = parse_query(text)
        except Invalid:
            continue
        again = format_query(tree)
        assert repr(parse_query(again)) == repr(tree), (text, again)  # repr: NaN is not equal to itself
        assert format_query(parse_query(again)) == again
        count += 1
    assert count > 1_000


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("sum(rate(x[5m]))by(job)", "sum by (job) (rate(x[5m]))"),
        ("sum without() (x)", "sum without () (x)"),
        ("topk(3,x)", "topk(3, x)"),
        ("((a+b))*c", "(a + b) * c"),
        ("a-(b-c)", "a - (b - c)"),
        ("(a-b)-c", "a - b - c"),
        ("(2^3)^2", "(2 ^ 3) ^ 2"),
        ("2^3^2", "2 ^ 3 ^ 2"),
        ("-a^2", "-a ^ 2"),
        ("a + fill(1) b", "a + fill (1) b"),
        (
            "a == bool on(x) group_left(y) fill_right(-Inf) fill_left(NaN) b",
            "a == bool on (x) group_left (y) fill_left (NaN) fill_right (-Inf) b",
        ),
        ("a-fill_left(0)b", "a - fill_left (0) b"),
        ("(-a)^2", "(-a) ^ 2"),
        ("-(a+b)", "-(a + b)"),
        ("a and (b or c)", "a and (b or c)"),
        ("a*on(x)group_left(y)b", "a * on (x) group_left (y) b"),
        ("a > bool 1", "a > bool 1"),
        ("{__name__='a b',x!~'y'}", '{__name__="a b", x!~"y"}'),
        ("a{x='\\n\"'} @ end() offset -90s", 'a{x="\\n\\""} @ end() offset -1m30s'),
        ("a[1d5m:30s] @ 12.5", "a[1d5m:30s] @ 12.5"),
        ("(a+b)[5m:]", "(a + b)[5m:]"),
        ("1e30", "1e+30"),
    ],
)
def test_the_form(text: str, form: str) -> None:
    assert format_query(parse_query(text)) == form


@pytest.mark.parametrize(("length", "form"), [(0, "0s"), (1_500_000, "1s500ms"), (604_800 * 10**6 * 2, "2w")])
def test_durations(length: int, form: str) -> None:
    assert format_duration(length) == form
