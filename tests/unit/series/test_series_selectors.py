"""Selectors: what parses, into what, and which values match."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Invalid
from penstock.series.selectors import Matcher, parse_selector, selector_text


def parsed(text: str) -> list[tuple[str, str, str]]:
    return [(matcher.name, matcher.operator, matcher.value) for matcher in parse_selector(text)]


@pytest.mark.parametrize(
    ("text", "matchers"),
    [
        ("cpu", [("__name__", "=", "cpu")]),
        ("job:cpu:rate5m", [("__name__", "=", "job:cpu:rate5m")]),
        ("{}", []),
        (" cpu { } ", [("__name__", "=", "cpu")]),
        ('cpu{host="a",dc=~"eu.*"}', [("__name__", "=", "cpu"), ("host", "=", "a"), ("dc", "=~", "eu.*")]),
        ('{ host != "a" , dc !~ "b" , }', [("host", "!=", "a"), ("dc", "!~", "b")]),
        ('{__name__=~"cpu|mem"}', [("__name__", "=~", "cpu|mem")]),
        ('{"my.metric","my.label"="x"}', [("__name__", "=", "my.metric"), ("my.label", "=", "x")]),
        (r'{a="\n\"\\\x41\101\u00e9\U0001F600"}', [("a", "=", '\n"\\AAé😀')]),
        (r"{a='it\'s', b=`raw\n`}", [("a", "=", "it's"), ("b", "=", r"raw\n")]),
        ('{a=""}', [("a", "=", "")]),
    ],
)
def test_selectors_parse(text: str, matchers: list[tuple[str, str, str]]) -> None:
    assert parsed(text) == matchers
    assert parsed(selector_text(parse_selector(text))) == matchers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "wrong at the end: expected a metric or {"),
        ("cpu{", "wrong at the end: expected a label or }"),
        ("cpu{host}", "expected =, !=, =~ or !~"),
        ("cpu{host=a}", "wrong at character 10: expected a quoted text"),
        ('cpu{host="a"', "expected , or }"),
        ('cpu{host="a}', 'expected a closing "'),
        ("cpu{host=`a}", "expected a closing `"),
        ('cpu{host="a"} x', "expected the end"),
        ("cpu[5m]", "wrong at character 4: expected the end (ranges, functions and operators are PromQL: use query"),
        ('cpu{host=="a"}', "expected a quoted text"),
        (r'cpu{host="\q"}', "expected an escape"),
        (r'cpu{host="\xff"}', "the number of a character"),
        (r'cpu{host="\ud800"}', "the number of a character"),
        ('cpu{__name__="x"}', "names its metric twice"),
        ('{"a","b"}', "names its metric twice"),
        ('{a=~"("}', "is not a regular expression of RE2: missing )"),
        ('{a=~"(?=x)"}', "is not a regular expression of RE2"),
        ('{a=~"' + "x" * 5000 + '"}', "at most 4096 bytes"),
        ("x" * 70_000, "at most 65536 bytes"),
        ("{" + 'a="b",' * 300 + "}", "at most 256 matchers"),
        (b"cpu", "a selector is a text"),
        (None, "a selector is a text"),
        ("\ud800", "half of a surrogate pair"),
    ],
)
def test_wrong_selectors_are_refused_in_one_line(text: object, message: str) -> None:
    with pytest.raises(Invalid, match=re.escape(message)) as caught:
        parse_selector(text)
    assert "\n" not in str(caught.value)


VALUES = ["", "a", "b", "ab", "a\nb", "A", "ac", "é", "abb"]


@pytest.mark.parametrize(
    "pattern", ["a", "a|b", "", "a.*", "ab?", "ab*", "ab{0,2}", "|a", "(?i)a", "a.b", "[ab]+", "é?"]
)
def test_matchers_agree_with_full_matches(pattern: str) -> None:
    expected = [re.fullmatch(pattern, value, re.DOTALL) is not None for value in VALUES]
    matcher = Matcher("x", "=~", pattern)
    assert matcher.test(VALUES).tolist() == expected
    assert Matcher("x", "!~", pattern).test(VALUES).tolist() == [not hit for hit in expected]
    assert [matcher.matches(value) for value in VALUES] == expected
    assert matcher.matches_empty is expected[0]
    hits = [value for value, hit in zip(VALUES, expected, strict=True) if hit]
    assert all(hit.startswith(matcher.prefix) for hit in hits)
    assert matcher.exact is None or set(hits) == matcher.exact & set(VALUES)


def test_equality() -> None:
    assert Matcher("x", "=", "a").test(VALUES).tolist() == [value == "a" for value in VALUES]
    assert Matcher("x", "!=", "a").test(VALUES).tolist() == [value != "a" for value in VALUES]
    assert Matcher("x", "!=", "a").matches_empty
    assert Matcher("x", "=~", "eu-.*").prefix == "eu-"
    assert Matcher("x", "=~", "a|b").exact == frozenset("ab")
    assert Matcher("x", "=~", "a") == Matcher("x", "=~", "a") != Matcher("x", "=", "a")


@given(st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        matchers = parse_selector(text)
    except Invalid:
        return
    assert parse_selector(selector_text(matchers)) == matchers
