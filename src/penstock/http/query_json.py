"""The tree of a query in the shape of Prometheus' `parse_query`. Parentheses are not kept: the tree says the order.

Thread: pure functions.
"""

from __future__ import annotations

from typing import Any

from penstock.promql.formatting import format_number
from penstock.promql.tree import (
    METRIC_NAME,
    AggregateNode,
    AtTime,
    BinaryNode,
    CallNode,
    NegateNode,
    NumberNode,
    QueryNode,
    RangeNode,
    SelectorNode,
    SubqueryNode,
    TextNode,
    kind_of,
)


def query_json(node: QueryNode) -> dict[str, Any]:
    """Return a tree as values for JSON."""
    match node:
        case NumberNode():
            return {"type": "numberLiteral", "val": format_number(node.value)}
        case TextNode():
            return {"type": "stringLiteral", "val": node.value}
        case SelectorNode():
            return {"type": "vectorSelector", **_selector(node)}
        case RangeNode():
            return {"type": "matrixSelector", **_selector(node.selector), "range": node.range_us // 1_000}
        case SubqueryNode():
            times = {"range": node.range_us // 1_000, "step": node.step_us // 1_000}
            return {"type": "subquery", "expr": query_json(node.expression), **times, **_moved(node.at, node.offset_us)}
        case CallNode():
            kinds = [kind_of(argument) for argument in node.arguments]
            function = {"name": node.function, "argTypes": kinds, "variadic": 0, "returnType": node.kind}
            return {"type": "call", "func": function, "args": list(map(query_json, node.arguments))}
        case NegateNode():
            return {"type": "unaryExpr", "op": "-", "expr": query_json(node.expression)}
        case AggregateNode():
            return {
                "type": "aggregation",
                "op": node.operator,
                "expr": query_json(node.expression),
                "param": None if node.parameter is None else query_json(node.parameter),
                "grouping": list(node.labels),
                "without": node.without,
            }
        case BinaryNode():
            return {
                "type": "binaryExpr",
                "op": node.operator,
                "lhs": query_json(node.left),
                "rhs": query_json(node.right),
                "matching": _matching(node),
                "bool": node.return_bool,
            }


def _matching(node: BinaryNode) -> dict[str, Any] | None:
    if kind_of(node.left) != "vector" or kind_of(node.right) != "vector":
        return None
    rule = node.matching
    fill = {"lhs": rule.fill_left, "rhs": rule.fill_right}
    filled = {"fillValues": fill} if any(value is not None for value in fill.values()) else {}
    shape = {"card": rule.cardinality, "labels": list(rule.labels), "on": rule.on, "include": list(rule.include)}
    return shape | filled


def _selector(node: SelectorNode) -> dict[str, Any]:
    names = [matcher.value for matcher in node.matchers if (matcher.name, matcher.operator) == (METRIC_NAME, "=")]
    matchers = [{"name": m.name, "type": m.operator, "value": m.value} for m in node.matchers]
    return {"name": names[0] if names else "", "matchers": matchers, **_moved(node.at, node.offset_us)}


def _moved(at: AtTime, offset_us: int) -> dict[str, Any]:
    return {
        "offset": offset_us // 1_000,
        "timestamp": at // 1_000 if isinstance(at, int) else None,
        "startOrEnd": at if isinstance(at, str) else None,
    }
