"""The tree of a query, and what is refused with one clear line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.errors import Invalid
from penstock.promql import LabelMatcher, parse_query, selectors_of
from penstock.promql.label_functions import _natural
from penstock.promql.tree import (
    AggregateNode,
    BinaryNode,
    CallNode,
    MatchingRule,
    NegateNode,
    NumberNode,
    RangeNode,
    SelectorNode,
    SubqueryNode,
    TextNode,
    kind_of,
)

S = 1_000_000
UP = SelectorNode((LabelMatcher("__name__", "=", "up"),))


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("up", UP),
        ("(up)", UP),
        ("0x10", NumberNode(16.0)),
        ('"x\\u00e9"', TextNode("xé")),
        ("-up", NegateNode(UP)),
        (
            '{"my.metric", "my.label"=~"x", a!="b", c!~"d"}',
            SelectorNode(
                (
                    LabelMatcher("__name__", "=", "my.metric"),
                    LabelMatcher("my.label", "=~", "x"),
                    LabelMatcher("a", "!=", "b"),
                    LabelMatcher("c", "!~", "d"),
                )
            ),
        ),
        ("up offset 1h30m", SelectorNode(UP.matchers, 5_400 * S)),
        ("up offset -5m", SelectorNode(UP.matchers, -300 * S)),
        ("up @ 1700000000.123", SelectorNode(UP.matchers, 0, 1_700_000_000_123_000)),
        ("up @ start() offset 1m", SelectorNode(UP.matchers, 60 * S, "start")),
        ("up[5m] @ end()", RangeNode(SelectorNode(UP.matchers, 0, "end"), 300 * S)),
        ("up[5m:]", SubqueryNode(UP, 300 * S)),
        ("up[5m:30s] offset 1m", SubqueryNode(UP, 300 * S, 30 * S, 60 * S)),
        ("time()", CallNode("time", (), "scalar")),
        ("rate(up[1m])", CallNode("rate", (RangeNode(UP, 60 * S),), "vector")),
        ("sum by (a, b) (up)", AggregateNode("sum", UP, None, ("a", "b"))),
        ("topk without (a) (3, up)", AggregateNode("topk", UP, NumberNode(3.0), ("a",), True)),
        (
            "up / on(a) group_left(b) up",
            BinaryNode("/", UP, UP, MatchingRule("many-to-one", True, ("a",), ("b",))),
        ),
        ("up > bool ignoring(a) up", BinaryNode(">", UP, UP, MatchingRule("one-to-one", False, ("a",)), True)),
        ("up and up", BinaryNode("and", UP, UP, MatchingRule("many-to-many"))),
    ],
)
def test_a_query_becomes_a_tree(text: str, tree: object) -> None:
    assert parse_query(text) == tree


def test_kinds_and_selectors() -> None:
    assert [kind_of(parse_query(text)) for text in ("1 + 1", "1 + up", "-time()", "up[5m]", '"x"', "sum(up)")] == [
        "scalar",
        "vector",
        "scalar",
        "matrix",
        "string",
        "vector",
    ]
    assert len(list(selectors_of(parse_query("rate(up[5m]) / sum(up) + max_over_time(up[5m:1m])")))) == 3


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no expression"),
        ("sum(up", "unclosed"),
        ("rate(up)", "matrix"),
        ("1 > 2", "BOOL"),
        ("{}", "matcher"),
        ('up{a="b" or c="d"}', "`or` between matchers"),
        ("up @ -1", "before 1970"),
        ("up @   -5 + 1", "before 1970"),
        ("rate(up[5m] smoothed)", "is not PromQL that Penstock knows"),
        ("rate(up[5m] anchored)", "is not PromQL that Penstock knows"),
        ("up[5m + 1m]", "is not PromQL that Penstock knows"),
        ("histogram_count(up)", "native histograms"),
        ("histogram_stddev(up)", "native histograms"),
        ("1_000", "is not PromQL that Penstock knows"),
        ("nope(up)", "nope"),
        ('up{a=~"("}', "regex"),
        ("up\ud800", "surrogate"),
        ("x" * 70_000, "65536 bytes"),
        ("(" * 101 + "1" + ")" * 101, "nested"),
        ("-" * 150 + "1", "nested"),
        ("1" + "+1" * 30_000, "8192 words"),
        ("1" + "+1" * 200, "nested"),
        ("abs(" * 90 + "abs(" * 90, "nested"),
        ("".join("-" * (99 - n) + "(" for n in range(100)) + "1" + ")" * 100, "nested"),
        ("1" + "^1" * 4_000, "nested"),
        ("up" + " or up" * 2_500, "nested"),
        ("up[1e30]", "a duration in a query has at most"),
        ("up offset 1e30", "a duration in a query has at most"),
        ("up[1000000y]", "a duration in a query"),
        ("up offset -1000000y", "a duration in a query"),
        ("up offset 999999999y", "out of range"),
        ("up[5m:99999999y]", "must have magnitude"),
        ("up @ 253402300800", "out of range"),
    ],
)
def test_what_is_not_a_query_is_refused(text: str, reason: str) -> None:
    with pytest.raises(Invalid, match=reason) as refused:
        parse_query(text)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        'up{a="' + r"\n" * 32_000 + '"}',
        '"' + r"\"" * 32_000,
        "'" + r"\'" * 3_900,
        "#\n" * 32_000 + "up",
        "up{" + "#\n" * 32_000 + "}",
    ],
    ids=["escapes", "no end", "fewer, no end", "comments", "comments in braces"],
)
def test_what_the_library_recurses_for_does_not_end_the_process(text: str) -> None:
    with pytest.raises(Invalid):
        parse_query(text)
    assert parse_query('up{a=~"' + r"10\\.0\\.|" * 1_900 + '"}') is not None


@pytest.mark.parametrize("query", [None, 5, b"up"])
def test_a_query_is_text(query: object) -> None:
    with pytest.raises(Invalid, match="a query is a text"):
        parse_query(query)


def test_numbers_in_labels_are_compared_whatever_their_length() -> None:
    texts = ["", "a2", "a10", "a" + "1" * 5_000, "a" + "2" * 5_000, "a" + "1" * 5_001, "b"]
    for number, text in enumerate(texts):
        assert [_natural(text, other) for other in texts] == [
            (number > index) - (number < index) for index in range(len(texts))
        ]


def test_a_wide_query_is_not_a_deep_one() -> None:
    wide = " + ".join(["max_of(" + "1 >= bool " * 30 + "1, " + "2 ^ " * 30 + "2)"] * 50)
    assert isinstance(parse_query(wide), BinaryNode)


def test_text_and_comments_do_not_count_as_signs() -> None:
    assert parse_query('"' + "(" * 500 + '"') == TextNode("(" * 500)
    assert parse_query("up # " + "(" * 500) == UP
    assert parse_query("'@ -1'") == TextNode("@ -1")


def test_the_library_is_imported_with_the_first_query() -> None:
    """It is optional: without it everything else works, and a query says what to install."""
    program = (
        "import sys, penstock, penstock.series.table, penstock.promql as p\n"
        "assert 'promql_parser' not in sys.modules\n"
        "sys.modules['promql_parser'] = None\n"
        "try: p.parse_query('up')\n"
        "except penstock.errors.Invalid as error: assert \"pip install 'penstock[promql]'\" in str(error)\n"
        "else: raise SystemExit('it was found')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "text",
    [
        "a[1e300]",
        "a[ 1e+300 ]",
        "a[5m:1e300]",
        "a[1e300:5m]",
        "a offset 1e30",
        "a offset -inf",
        "a offset NaN",
        "a[1e12]",
    ],
)
def test_a_duration_that_makes_the_library_panic_is_refused_before(
    text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Invalid, match="a duration in a query has at most"):
        parse_query(text)
    assert capfd.readouterr().err == ""  # a panic prints


@pytest.mark.parametrize("text", ['a{x="[1e300"}', "a # [1e300]", "job:inf", "job:1e300", "a[5m:30]", "a offset 1e3"])
def test_what_only_looks_like_one_is_not(text: str) -> None:
    parse_query(text)
