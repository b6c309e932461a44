"""The typed tree of a query. Times and durations are microseconds.

Thread: immutable values; any.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

ValueKind: TypeAlias = Literal["scalar", "vector", "matrix", "string"]
AtTime: TypeAlias = int | Literal["start", "end"] | None
MatchCardinality: TypeAlias = Literal["one-to-one", "many-to-one", "one-to-many", "many-to-many"]

METRIC_NAME = "__name__"
RESERVED_LABELS = (METRIC_NAME, "__type__", "__unit__")  # dropped where a function changes what a series means


@dataclass(frozen=True, slots=True)
class LabelMatcher:
    """A condition on one label: `operator` is =, !=, =~ or !~."""

    name: str
    operator: str
    value: str


@dataclass(frozen=True, slots=True)
class NumberNode:
    """A number."""

    value: float


@dataclass(frozen=True, slots=True)
class TextNode:
    """A quoted text."""

    value: str


@dataclass(frozen=True, slots=True)
class SelectorNode:
    """The latest sample of each series that matches."""

    matchers: tuple[LabelMatcher, ...]
    offset_us: int = 0
    at: AtTime = None


@dataclass(frozen=True, slots=True)
class RangeNode:
    """The samples of a selector in a range of time."""

    selector: SelectorNode
    range_us: int


@dataclass(frozen=True, slots=True)
class SubqueryNode:
    """The values of an expression in a range of time, at multiples of a step; 0: the default step."""

    expression: QueryNode
    range_us: int
    step_us: int = 0
    offset_us: int = 0
    at: AtTime = None


@dataclass(frozen=True, slots=True)
class CallNode:
    """A call of a function."""

    function: str
    arguments: tuple[QueryNode, ...]
    kind: ValueKind


@dataclass(frozen=True, slots=True)
class AggregateNode:
    """An aggregation of the series of a vector."""

    operator: str
    expression: QueryNode
    parameter: QueryNode | None = None
    labels: tuple[str, ...] = ()
    without: bool = False


@dataclass(frozen=True, slots=True)
class MatchingRule:
    """How the series of two vectors are matched."""

    cardinality: MatchCardinality = "one-to-one"
    on: bool = False
    labels: tuple[str, ...] = ()
    include: tuple[str, ...] = ()  # labels of the "one" side for the result
    fill_left: float | None = None  # stands for a missing series: of the "many" side, the left one if both are "one"
    fill_right: float | None = None


@dataclass(frozen=True, slots=True)
class BinaryNode:
    """An operator between two expressions."""

    operator: str
    left: QueryNode
    right: QueryNode
    matching: MatchingRule
    return_bool: bool = False


@dataclass(frozen=True, slots=True)
class NegateNode:
    """A minus before an expression."""

    expression: QueryNode


QueryNode: TypeAlias = (
    NumberNode | TextNode | SelectorNode | RangeNode | SubqueryNode | CallNode | AggregateNode | BinaryNode | NegateNode
)


TARGET_INFO = SelectorNode((LabelMatcher(METRIC_NAME, "=", "target_info"),))  # which `info` reads if none is named


def kind_of(node: QueryNode) -> ValueKind:
    """Return what an expression evaluates to."""
    match node:
        case NumberNode():
            return "scalar"
        case TextNode():
            return "string"
        case RangeNode() | SubqueryNode():
            return "matrix"
        case CallNode():
            return node.kind
        case BinaryNode():
            return "scalar" if kind_of(node.left) == kind_of(node.right) == "scalar" else "vector"
        case NegateNode():
            return kind_of(node.expression)
        case _:
            return "vector"


def children_of(node: QueryNode) -> tuple[QueryNode, ...]:
    """Return the expressions that a node needs the values of."""
    match node:
        case RangeNode():
            return (node.selector,)
        case SubqueryNode() | NegateNode():
            return (node.expression,)
        case CallNode(function="info", arguments=(base,)):
            return (base, TARGET_INFO)
        case CallNode():
            return node.arguments
        case AggregateNode():
            return (node.expression,) if node.parameter is None else (node.parameter, node.expression)
        case BinaryNode():
            return (node.left, node.right)
        case _:
            return ()


def selectors_of(node: QueryNode) -> Iterator[SelectorNode]:
    """Yield every selector of a query."""
    if isinstance(node, SelectorNode):
        yield node
    for child in children_of(node):
        yield from selectors_of(child)


def reach_us(node: QueryNode, lookback_us: int) -> int:
    """Return how far before or after a step the samples may lie that its value needs; what `@` fixes counts as 0."""
    match node:
        case SelectorNode():
            return abs(node.offset_us) + lookback_us if node.at is None else 0
        case RangeNode():
            return abs(node.selector.offset_us) + node.range_us if node.selector.at is None else 0
        case SubqueryNode():
            inner = reach_us(node.expression, lookback_us)
            return abs(node.offset_us) + node.range_us + inner if node.at is None else 0
        case _:
            return max((reach_us(child, lookback_us) for child in children_of(node)), default=0)
