"""Text to tree, by the library promql-parser.

The library reads nearly all of Prometheus 3. What it gets wrong is handled here, before or after it:

- its parser recurses, so the depth and the number of tokens are checked first; and so does its reader of texts and
  comments, which ends the process where the stack ends;
- a time before 1970 after `@` makes it panic, and `or` between matchers is not PromQL: both are refused;
- a duration as a number of seconds makes it panic if it is too large, and a panic prints: it is refused before;
- it does not know `anchored`, `smoothed`, arithmetic of durations or `1_000`: its error says so.

Thread: pure functions. The library is imported with the first query.
"""

from __future__ import annotations

import importlib
import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NoReturn, get_args

from penstock.arguments import in_short
from penstock.errors import Invalid
from penstock.promql.operators import SET_OPERATORS
from penstock.promql.tree import (
    METRIC_NAME,
    AggregateNode,
    AtTime,
    BinaryNode,
    CallNode,
    LabelMatcher,
    MatchCardinality,
    MatchingRule,
    NegateNode,
    NumberNode,
    QueryNode,
    RangeNode,
    SelectorNode,
    SubqueryNode,
    TextNode,
    ValueKind,
    kind_of,
)

QUERY_BYTES_MAX = 65_536
TOKENS_MAX = 8_192
DEPTH_MAX = 100
ESCAPES_MAX = 4_000  # in texts, and comments: each takes some 400 bytes of the stack
DURATION_US_MAX = 1 << 58  # some 9,000 years; times and a few durations fit into 64 bits together
REMEMBERED_BYTES_MAX = 1_024  # of a query that is not parsed again
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A text that does not end, which the library refuses, is one token: tried from each of its quotes, it would take long.
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\]++)*+"?|'(?:\\.|[^'\\]++)*+'?|`[^`]*+`?)
    |(?P<early>@\s*-)
    |(?P<word>[A-Za-z0-9_:.]+)
    |(?P<open>[(\[{])
    |(?P<close>[)\]}])
    |(?P<operator>[-+*/%^]|[=!<>]=|[<>])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\.|\#", re.DOTALL)
_QUOTED = re.compile(r"""\#[^\n]*|"(?:\\.|[^"\\]++)*+"?|'(?:\\.|[^'\\]++)*+'?|`[^`]*+`?""", re.DOTALL)
# Durations as numbers of seconds: the library panics if one is not finite or too large.
_SECONDS = [
    re.compile(before + r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|inf|nan)(?![a-z0-9_.(])", re.IGNORECASE)
    for before in (r"\[", r"\[[^\[\]]*:", r"\boffset\s*[-+]?")
]
_WORD_OPERATORS = ("and", "or", "unless", "atan2")
_NATIVE = ("histogram_avg", "histogram_count", "histogram_sum", "histogram_stddev", "histogram_stdvar")


def parse_query(text: Any) -> QueryNode:
    """Return the tree of a query; `Invalid` says what is wrong with it."""
    if not isinstance(text, str):
        raise Invalid(f"a query is a text such as rate(requests_total[5m]), not {in_short(text)}")
    plain = str.__str__(text)
    try:
        size = len(plain.encode())
    except UnicodeEncodeError:
        raise Invalid(f"the query {in_short(plain)} holds half of a surrogate pair") from None
    if size > QUERY_BYTES_MAX:
        raise Invalid(f"a query has at most {QUERY_BYTES_MAX} bytes, not {size}")
    return _remembered(plain) if size <= REMEMBERED_BYTES_MAX else _parsed(plain)


@lru_cache(256)
def _remembered(text: str) -> QueryNode:
    return _parsed(text)


def _parsed(text: str) -> QueryNode:
    _check_size(text)
    try:
        return _TreeBuilder(text).node(_library().parse(text))
    except Invalid:
        raise
    except (ValueError, OverflowError) as error:
        raise Invalid(f"the query {in_short(text)} is not PromQL that Penstock knows: {error}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the library's, which is not an `Exception`
            raise
        raise Invalid(f"the query {in_short(text)} has a number that is too large: {error}") from None


@lru_cache(1)
def _library() -> Any:
    try:
        return importlib.import_module("promql_parser")
    except ImportError as missing:
        raise Invalid("PromQL needs the package promql-parser: pip install 'penstock[promql]'") from missing


def _check_size(text: str) -> None:
    """Refuse what would make the library recurse too deeply, or panic."""
    if len(_ESCAPE.findall(text)) > ESCAPES_MAX:
        raise Invalid(f"a query has at most {ESCAPES_MAX} escapes and comments: give it in several")
    plain = _QUOTED.sub('""', text)
    for number in (match for pattern in _SECONDS for match in pattern.finditer(plain)):
        if not float(number.group(1)) * 1_000_000 <= DURATION_US_MAX:
            _refuse_duration()
    tokens = nested = 0
    operators = [0]  # for each bracket that is open: of the expression in it, which nests as deep as it has operators
    for token in _TOKEN.finditer(text):
        kind = token.lastgroup
        if kind == "space":
            continue
        tokens += 1
        if kind == "early":
            raise Invalid(f"the query {in_short(text)} names a time before 1970 after @: give one after it")
        if kind == "open":
            operators.append(0)
            nested += 1
        elif kind == "close" and len(operators) > 1:
            nested -= 1 + operators.pop()
        elif token.group() == ",":
            nested -= operators[-1]
            operators[-1] = 0
        elif kind == "operator" or token.group().lower() in _WORD_OPERATORS:
            operators[-1] += 1
            nested += 1
        if tokens > TOKENS_MAX or nested > DEPTH_MAX:
            raise Invalid(f"a query has at most {TOKENS_MAX} words and is nested at most {DEPTH_MAX} deep")


class _TreeBuilder:
    """Converts the nodes of the library."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._library = _library()
        self._depth = 0

    def node(self, library_node: Any) -> QueryNode:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise Invalid(f"a query is nested at most {DEPTH_MAX} deep: {in_short(self._text)} is nested deeper")
        try:
            converted: QueryNode = getattr(self, f"_of_{type(library_node).__name__}")(library_node)
            return converted
        finally:
            self._depth -= 1

    def _of_NumberLiteral(self, literal: Any) -> QueryNode:
        return NumberNode(literal.val)

    def _of_StringLiteral(self, literal: Any) -> QueryNode:
        return TextNode(literal.val)

    def _of_ParenExpr(self, parentheses: Any) -> QueryNode:
        return self.node(parentheses.expr)

    def _of_UnaryExpr(self, negation: Any) -> QueryNode:
        return NegateNode(self.node(negation.expr))

    def _of_VectorSelector(self, selector: Any) -> SelectorNode:
        if selector.matchers.or_matchers:
            raise Invalid(f"the query {in_short(self._text)} has `or` between matchers: use =~, or the operator or")
        operators = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
        matchers = [LabelMatcher(METRIC_NAME, "=", selector.name)] if selector.name is not None else []
        for matcher in selector.matchers.matchers:
            operator = operators[str(matcher.op).rpartition(".")[2]]
            matchers.append(LabelMatcher(matcher.name, operator, matcher.value))
        return SelectorNode(tuple(matchers), _microseconds(selector.offset), self._at(selector.at))

    def _of_MatrixSelector(self, range_selector: Any) -> QueryNode:
        return RangeNode(self._of_VectorSelector(range_selector.vector_selector), _microseconds(range_selector.range))

    def _of_SubqueryExpr(self, subquery: Any) -> QueryNode:
        step = 0 if subquery.step is None else _microseconds(subquery.step)
        at, offset = self._at(subquery.at), _microseconds(subquery.offset)
        return SubqueryNode(self.node(subquery.expr), _microseconds(subquery.range), step, offset, at)

    def _of_Call(self, call: Any) -> QueryNode:
        name = call.func.name
        if name in _NATIVE:
            raise Invalid(f"{name} reads native histograms, which Penstock does not store: use classic buckets")
        arguments = tuple(map(self.node, call.args))
        kind = str(call.func.return_type).rpartition(".")[2].lower()
        assert kind in get_args(ValueKind), kind
        return CallNode(name, arguments, kind)  # type: ignore[arg-type]

    def _of_AggregateExpr(self, aggregation: Any) -> QueryNode:
        parameter = None if aggregation.param is None else self.node(aggregation.param)
        modifier = aggregation.modifier
        labels = () if modifier is None else tuple(modifier.labels)
        without = modifier is not None and modifier.type == self._library.AggModifierType.Without
        return AggregateNode(str(aggregation.op), self.node(aggregation.expr), parameter, labels, without)

    def _of_BinaryExpr(self, operation: Any) -> QueryNode:
        operator = str(operation.op)
        left, right, modifier = self.node(operation.lhs), self.node(operation.rhs), operation.modifier
        if modifier is None:
            return BinaryNode(operator, left, right, MatchingRule())
        fill = modifier.fill_values
        filled = fill is not None and (fill.lhs is not None or fill.rhs is not None)
        if filled and (operator in SET_OPERATORS or not kind_of(left) == kind_of(right) == "vector"):
            raise Invalid(f"the query {in_short(self._text)} has fill where no two vectors meet by arithmetic or order")
        cardinalities: dict[str, MatchCardinality] = {
            "OneToOne": "one-to-one",
            "ManyToOne": "many-to-one",
            "OneToMany": "one-to-many",
            "ManyToMany": "many-to-many",
        }
        rule = MatchingRule(
            cardinalities[str(modifier.card).rpartition(".")[2]],
            modifier.matching is not None and modifier.matching.type == self._library.LabelModifierType.Include,
            () if modifier.matching is None else tuple(modifier.matching.labels),
            tuple(modifier.group_labels or ()),
            fill.lhs if filled else None,
            fill.rhs if filled else None,
        )
        return BinaryNode(operator, left, right, rule, bool(modifier.return_bool))

    def _at(self, modifier: Any) -> AtTime:
        if modifier is None:
            return None
        kinds = self._library.AtModifierType
        if modifier.type == kinds.Start:
            return "start"
        return "end" if modifier.type == kinds.End else (modifier.at - _EPOCH) // timedelta(microseconds=1)


def _microseconds(duration: timedelta | None) -> int:
    length_us = 0 if duration is None else duration // timedelta(microseconds=1)
    if abs(length_us) > DURATION_US_MAX:
        _refuse_duration()
    return length_us


def _refuse_duration() -> NoReturn:
    raise Invalid(f"a duration in a query has at most {DURATION_US_MAX // 1_000_000} seconds: give a shorter one")
