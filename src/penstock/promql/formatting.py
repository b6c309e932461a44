"""A query's tree as text again, in one form: `sum by (job) (rate(x{job="a"}[5m] offset 1h))`.

Thread: pure functions.
Invariant: the text of a tree parses to that tree.
"""

from __future__ import annotations

import math
import re

from penstock.promql.operators import SET_OPERATORS
from penstock.promql.tree import (
    METRIC_NAME,
    AggregateNode,
    AtTime,
    BinaryNode,
    CallNode,
    LabelMatcher,
    NegateNode,
    NumberNode,
    QueryNode,
    RangeNode,
    SelectorNode,
    SubqueryNode,
    TextNode,
)

_PRECEDENCE = {
    "or": 1,
    **dict.fromkeys(("and", "unless"), 2),
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), 3),
    **dict.fromkeys(("+", "-"), 4),
    **dict.fromkeys(("*", "/", "%", "atan2"), 5),
    "^": 6,
}
_NEGATION = 5  # -a ^ b is -(a ^ b), and -a * b is (-a) * b
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_UNITS_US = (("w", 604_800), ("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def format_query(node: QueryNode) -> str:
    """Return the text of a tree."""
    match node:
        case NumberNode():
            return format_number(node.value)
        case TextNode():
            return quoted(node.value)
        case SelectorNode():
            return _selector(node, "")
        case RangeNode():
            return _selector(node.selector, f"[{format_duration(node.range_us)}]")
        case SubqueryNode():
            step = format_duration(node.step_us) if node.step_us else ""
            inner = _enclosed(node.expression, isinstance(node.expression, (BinaryNode, NegateNode, SubqueryNode)))
            return f"{inner}[{format_duration(node.range_us)}:{step}]{_moved(node.at, node.offset_us)}"
        case CallNode():
            return f"{node.function}({', '.join(map(format_query, node.arguments))})"
        case NegateNode():
            return f"-{_enclosed(node.expression, _level(node.expression) <= _NEGATION)}"
        case AggregateNode():
            return _aggregation(node)
        case BinaryNode():
            return _operation(node)


def _enclosed(node: QueryNode, enclose: bool) -> str:
    text = format_query(node)
    return f"({text})" if enclose else text


def _selector(node: SelectorNode, brackets: str) -> str:
    matchers = list(node.matchers)
    first = matchers[0] if matchers else None
    name = ""
    if first is not None and (first.name, first.operator) == (METRIC_NAME, "=") and _NAME.fullmatch(first.value):
        name = matchers.pop(0).value
    braces = f"{{{', '.join(map(_matcher, matchers))}}}" if matchers or not name else ""
    return f"{name}{braces}{brackets}{_moved(node.at, node.offset_us)}"


def _matcher(matcher: LabelMatcher) -> str:
    return f"{_label(matcher.name)}{matcher.operator}{quoted(matcher.value)}"


def _label(name: str) -> str:
    return name if _LABEL.fullmatch(name) else quoted(name)


def _labels(names: tuple[str, ...]) -> str:
    return f"({', '.join(map(_label, names))})"


def _moved(at: AtTime, offset_us: int) -> str:
    text = ""
    if isinstance(at, str):
        text = f" @ {at}()"
    elif at is not None:
        text = f" @ {at // 1_000_000}.{at % 1_000_000:06}".rstrip("0").rstrip(".")
    if offset_us:
        text += f" offset {'-' if offset_us < 0 else ''}{format_duration(abs(offset_us))}"
    return text


def _aggregation(node: AggregateNode) -> str:
    grouping = f" {'without' if node.without else 'by'} {_labels(node.labels)} " if node.labels or node.without else ""
    parameter = "" if node.parameter is None else f"{format_query(node.parameter)}, "
    return f"{node.operator}{grouping}({parameter}{format_query(node.expression)})"


def _operation(node: BinaryNode) -> str:
    mine = _PRECEDENCE[node.operator]
    power = node.operator == "^"  # the only operator that groups to the right
    left = _enclosed(node.left, _level(node.left) < mine or (power and _level(node.left) == mine))
    right = _enclosed(node.right, _level(node.right) < mine or (not power and _level(node.right) == mine))
    rule, modifiers = node.matching, " bool" if node.return_bool else ""
    if rule.on or rule.labels:
        modifiers += f" {'on' if rule.on else 'ignoring'} {_labels(rule.labels)}"
    if node.operator not in SET_OPERATORS and rule.cardinality in ("many-to-one", "one-to-many"):
        side = "group_left" if rule.cardinality == "many-to-one" else "group_right"
        modifiers += f" {side} {_labels(rule.include)}"
    modifiers += _fill(rule.fill_left, rule.fill_right)
    return f"{left} {node.operator}{modifiers} {right}"


def _fill(left: float | None, right: float | None) -> str:
    texts = [None if value is None else format_number(value) for value in (left, right)]
    if texts[0] is not None and texts[0] == texts[1]:
        return f" fill ({texts[0]})"
    return "".join(
        f" {word} ({text})" for word, text in zip(("fill_left", "fill_right"), texts, strict=True) if text is not None
    )


def _level(node: QueryNode) -> int:
    if isinstance(node, BinaryNode):
        return _PRECEDENCE[node.operator]
    if isinstance(node, NegateNode) or (isinstance(node, NumberNode) and math.copysign(1, node.value) < 0):
        return _NEGATION
    return 7


def format_number(value: float) -> str:
    """Return a number: as few digits as tell it from others, NaN, +Inf or -Inf."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value).removesuffix(".0")


def format_duration(length_us: int) -> str:
    """Return a duration such as 1h30m."""
    parts = []
    rest, below = divmod(length_us, 1_000_000)
    for unit, size in _UNITS_US:
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count}{unit}")
    if below:
        parts.append(f"{below // 1_000}ms")
    return "".join(parts) or "0s"


def quoted(text: str) -> str:
    """Return a quoted text."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return '"' + "".join(escapes.get(c) or (c if c >= " " else f"\\x{ord(c):02x}") for c in text) + '"'
