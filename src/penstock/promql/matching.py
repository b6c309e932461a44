"""Operators between vectors: which series are paired, and the values of the pairs. Duplicates are judged step by step.

Thread: pure functions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.errors import Invalid
from penstock.promql.labels import LabelMatrix, joined
from penstock.promql.limits import QueryBudget
from penstock.promql.operators import ARITHMETIC, COMPARISONS
from penstock.promql.tree import METRIC_NAME, RESERVED_LABELS, BinaryNode, MatchingRule
from penstock.promql.values import F64, I64, Mask, VectorValue, merged, stacked

SAME_LABELS = "a vector cannot contain metrics with the same labelset"


class _Side(NamedTuple):
    """One side of an operator, and the match group of each of its series."""

    vector: VectorValue
    numbers: I64


def _signatures(left: LabelMatrix, right: LabelMatrix, rule: MatchingRule) -> tuple[I64, I64, int]:
    """Return the match group of each series of both sides, and how many groups there are."""
    numbers, first = _matching_labels(joined(left, right), rule).groups()
    return numbers[: len(left)], numbers[len(left) :], len(first)


def _matching_labels(labels: LabelMatrix, rule: MatchingRule) -> LabelMatrix:
    return labels.keeping(rule.labels) if rule.on else labels.without((METRIC_NAME, *rule.labels))


def _filled(side: _Side, other: _Side, groups: int, rule: MatchingRule, fill: float | None) -> _Side:
    """Return a side with a series for each match group that the other side has and it lacks, step by step."""
    if fill is None or not len(other.vector):
        return side
    distinct, first = np.unique(other.numbers, return_index=True)
    present, other_present = (
        counts_by_group(each.vector.present, each.numbers, groups)[distinct] > 0 for each in (side, other)
    )
    labels = _matching_labels(other.vector.labels.take(first), rule)
    fillers = VectorValue(
        labels, np.full(present.shape, fill), other_present & ~present, np.zeros(len(distinct), np.bool_)
    )
    return _Side(stacked(side.vector, fillers), np.concatenate((side.numbers, distinct)))


def counts_by_group(present: Mask, numbers: I64, groups: int) -> I64:
    """Return how many series of each group have a value at each step."""
    counts = np.zeros((groups, present.shape[1]), np.int64)
    if len(numbers):
        order = np.argsort(numbers, kind="stable")
        distinct, starts = np.unique(numbers[order], return_index=True)
        counts[distinct] = np.add.reduceat(present[order].astype(np.int64), starts, axis=0)
    return counts


def set_operation(node: BinaryNode, left: VectorValue, right: VectorValue) -> VectorValue:
    """Return `and`, `or` or `unless` of two vectors."""
    of_left, of_right, groups = _signatures(left.labels, right.labels, node.matching)
    if node.operator == "or":
        free = right.present & (counts_by_group(left.present, of_left, groups) == 0)[of_right]
        rest = VectorValue(right.labels, right.values, free, right.unnamed)
        return merged(stacked(left, rest.compact()), SAME_LABELS)
    has_partner = (counts_by_group(right.present, of_right, groups) > 0)[of_left]
    present = left.present & (has_partner if node.operator == "and" else ~has_partner)
    return VectorValue(left.labels, left.values, present, left.unnamed).compact()


def vector_operation(node: BinaryNode, left: VectorValue, right: VectorValue, budget: QueryBudget) -> VectorValue:
    """Return an arithmetic operator or a comparison of two vectors."""
    rule = node.matching
    swapped = rule.cardinality == "one-to-many"
    many, one = (right, left) if swapped else (left, right)
    of_many, of_one, groups = _signatures(many.labels, one.labels, rule)
    # Prometheus does not look for duplicates at steps where one side has nothing.
    meeting = many.present.any(axis=0) & one.present.any(axis=0)
    if rule.fill_left is not None or rule.fill_right is not None:
        meeting = np.ones_like(meeting)
    if (counts_by_group(one.present, of_one, groups)[:, meeting] > 1).any():
        side = "left" if swapped else "right"
        raise Invalid(
            f"found duplicate series for a match group on the {side} hand-side of {node.operator}: matching labels "
            "must be unique on one side; name them with on or ignoring"
        )
    sides = _Side(many, of_many), _Side(one, of_one)
    many, of_many = _filled(*sides, groups, rule, rule.fill_left)
    one, of_one = _filled(*sides[::-1], groups, rule, rule.fill_right)
    rows, partners = _pairs(of_many, of_one, groups)
    budget.check_cells(len(rows), left.values.shape[1])
    present = many.present[rows] & one.present[partners]
    a, b = many.values[rows], one.values[partners]
    values, holds = _computed(node, *((b, a) if swapped else (a, b)))
    present &= holds
    if rule.cardinality == "one-to-one" and (counts_by_group(present, of_many[rows], groups) > 1).any():
        raise Invalid(
            f"multiple matches for labels of {node.operator}: many-to-one matching must be explicit "
            "(group_left or group_right)"
        )
    labels = _result_labels(node, many.labels.take(rows), one.labels.take(partners))
    unnamed = many.unnamed[rows] | node.return_bool
    problem = f"multiple matches for labels of {node.operator}: grouping labels must ensure unique matches"
    return merged(VectorValue(labels, values, present, unnamed).compact(), problem)


def _pairs(of_many: I64, of_one: I64, groups: int) -> tuple[I64, I64]:
    """Return all pairs of series of one match group, as rows of both sides."""
    order = np.argsort(of_one, kind="stable")
    counts = np.bincount(of_one, minlength=groups)
    starts = np.concatenate(([0], np.cumsum(counts)))[:-1]
    each = counts[of_many]
    rows = np.repeat(np.arange(len(of_many)), each)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(each) - each, each)
    return rows, order[np.repeat(starts[of_many], each) + within]


def _computed(node: BinaryNode, left: F64, right: F64) -> tuple[F64, Mask]:
    """Return the values of an operator, and which are kept."""
    everything = np.ones(left.shape, np.bool_)
    if node.operator in ARITHMETIC:
        return ARITHMETIC[node.operator](left, right), everything
    holds = COMPARISONS[node.operator](left, right)
    return (holds.astype(np.float64), everything) if node.return_bool else (left, holds)


def _result_labels(node: BinaryNode, many: LabelMatrix, one: LabelMatrix) -> LabelMatrix:
    """Return the labels of the results of pairs."""
    rule = node.matching
    labels = many.without(RESERVED_LABELS) if node.operator in ARITHMETIC else many
    if rule.cardinality == "one-to-one":
        labels = labels.keeping(rule.labels) if rule.on else labels.without(rule.labels)
    for name in rule.include:
        labels = labels.replacing(name, *one.column(name))
    return labels


def scalar_operation(node: BinaryNode, vector: VectorValue, scalar: F64, *, scalar_left: bool) -> VectorValue:
    """Return an operator between a vector and a number for each step."""
    other = np.broadcast_to(scalar, vector.values.shape)
    values, holds = _computed(node, *((other, vector.values) if scalar_left else (vector.values, other)))
    if node.operator in COMPARISONS and not node.return_bool:
        return VectorValue(vector.labels, vector.values, vector.present & holds, vector.unnamed).compact()
    return vector.mapped(values)
