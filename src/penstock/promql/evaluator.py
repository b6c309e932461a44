"""Walks the tree of a query. Every node gives a scalar or a vector for all steps at once.

Thread: one query, one thread.
Invariant: the value at a step depends on no other step, so a range query gives what instant queries at its steps give.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import Invalid
from penstock.promql import ranking, results
from penstock.promql.aggregations import AGGREGATIONS, SeriesGroups
from penstock.promql.functions import QueryValue, call_function
from penstock.promql.labels import LabelMatrix
from penstock.promql.limits import STEPS_MAX, QueryBudget
from penstock.promql.matching import scalar_operation, set_operation, vector_operation
from penstock.promql.operators import ARITHMETIC, COMPARISONS, SET_OPERATORS
from penstock.promql.source import STALE_BITS, SampleSource, SelectedSamples
from penstock.promql.tree import (
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
    kind_of,
)
from penstock.promql.values import F64, Mask, ScalarValue, StepGrid, TextValue, VectorValue, any_of, lone_series
from penstock.promql.windows import RangeWindows, counts_up_to, windows_over

LOOKBACK_US = 300_000_000
SUBQUERY_STEP_US = 60_000_000
TIME_US_MAX = 1 << 60  # of times that are computed; the sum of two of them still fits


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """How far back a sample is seen, and the step of subqueries that name none."""

    lookback_us: int = LOOKBACK_US
    subquery_step_us: int = SUBQUERY_STEP_US


def evaluate(
    node: QueryNode,
    source: SampleSource,
    grid: StepGrid,
    budget: QueryBudget,
    *,
    instant: bool,
    settings: EvaluationSettings | None = None,
    whole: StepGrid | None = None,
) -> results.QueryResult:
    """Evaluate a query at every step of a grid; an instant has one step, and may be of any kind.

    `whole` is the grid of the query of which this one is a part: `@ start()` and `@ end()` are its ends.
    """
    if not 1 <= grid.steps <= STEPS_MAX:
        raise Invalid(f"a range has from 1 to {STEPS_MAX} steps, not {grid.steps}: give a longer step")
    if not instant:
        check_range_query(node)
    evaluation = QueryEvaluation(source, whole or grid, budget, settings or EvaluationSettings())
    with np.errstate(all="ignore"):
        if isinstance(node, (RangeNode, SubqueryNode)):
            return results.QueryResult("matrix", evaluation.samples_of(node))
        value = evaluation.value(node, grid)
        if isinstance(value, TextValue):
            return results.QueryResult("string", _no_samples(), value.text)
        if isinstance(value, ScalarValue):
            return results.of_scalar(value, grid, "scalar" if instant else "matrix")
        return results.of_vector(value, grid, "vector" if instant else "matrix")


def check_range_query(node: QueryNode) -> None:
    """Raise `Invalid` if an expression does not give numbers for each step."""
    kind = kind_of(node)
    if kind in ("matrix", "string"):
        raise Invalid(f"a range query needs an expression with one number for each step, not a {kind}")


def _checked(grid: StepGrid) -> StepGrid:
    if max(abs(grid.start_us), abs(grid.end_us)) > TIME_US_MAX:
        raise Invalid("a query reads times too far from 1970: check its ranges, offsets and the times after @")
    return grid


def _no_samples() -> SelectedSamples:
    return SelectedSamples(LabelMatrix.empty(), np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0))


class QueryEvaluation:
    """One query under way: the `Evaluation` of functions."""

    def __init__(self, source: SampleSource, grid: StepGrid, budget: QueryBudget, settings: EvaluationSettings) -> None:
        self.query_grid = grid
        self.budget = budget
        self._source = source
        self._settings = settings
        self._selected: dict[tuple[tuple[LabelMatcher, ...], int, int, StepGrid | None], SelectedSamples] = {}

    # -- nodes

    def value(self, node: QueryNode, grid: StepGrid) -> QueryValue:
        """Evaluate a node that is not a range."""
        self.budget.check()
        match node:
            case NumberNode():
                return ScalarValue(np.full(grid.steps, node.value))
            case TextNode():
                return TextValue(node.value)
            case SelectorNode():
                return self.instant(node, grid)[0]
            case NegateNode():
                value = self.value(node.expression, grid)
                if isinstance(value, VectorValue):
                    return value.mapped(-value.values)
                assert isinstance(value, ScalarValue)
                return ScalarValue(-value.values)
            case BinaryNode():
                return self._binary(node, grid)
            case AggregateNode():
                return self._aggregate(node, grid)
            case CallNode():
                return call_function(node.function, self, node.arguments, grid)
            case _:
                raise Invalid("a range such as x[5m] needs a function around it, such as rate")

    def vector(self, node: QueryNode, grid: StepGrid) -> VectorValue:
        """Evaluate a vector."""
        value = self.value(node, grid)
        assert isinstance(value, VectorValue), node
        return value

    def numbers(self, node: QueryNode, grid: StepGrid) -> F64:
        """Evaluate a scalar."""
        value = self.value(node, grid)
        assert isinstance(value, ScalarValue), node
        return value.values

    def _binary(self, node: BinaryNode, grid: StepGrid) -> QueryValue:
        left = self.value(node.left, grid)
        with self.budget.holding(0 if isinstance(left, TextValue) else left.values.size):
            right = self.value(node.right, grid)
        if isinstance(left, VectorValue) and isinstance(right, VectorValue):
            if node.operator in SET_OPERATORS:
                return set_operation(node, left, right)
            return vector_operation(node, left, right, self.budget)
        if isinstance(left, VectorValue) and isinstance(right, ScalarValue):
            return scalar_operation(node, left, right.values, scalar_left=False)
        assert isinstance(left, ScalarValue)
        if isinstance(right, VectorValue):
            return scalar_operation(node, right, left.values, scalar_left=True)
        assert isinstance(right, ScalarValue)
        if node.operator in ARITHMETIC:
            return ScalarValue(ARITHMETIC[node.operator](left.values, right.values))
        return ScalarValue(COMPARISONS[node.operator](left.values, right.values).astype(np.float64))

    def _aggregate(self, node: AggregateNode, grid: StepGrid) -> VectorValue:
        label, parameter = "", np.zeros(grid.steps)
        if isinstance(node.parameter, TextNode):
            label = node.parameter.value
        elif node.parameter is not None:
            parameter = self.numbers(node.parameter, grid)
        vector = self.vector(node.expression, grid)
        if not len(vector):
            return VectorValue.empty(grid.steps)
        if node.operator == "count_values":
            return ranking.count_values(node, vector, label, self.budget)
        groups = SeriesGroups(node, vector, self.budget)
        if node.operator in ranking.CHOOSING:
            return ranking.choose(node, groups, parameter)
        if node.operator == "quantile":
            return ranking.quantile(groups, parameter)
        return groups.result(AGGREGATIONS[node.operator](groups))

    # -- samples

    def instant(self, node: SelectorNode, grid: StepGrid) -> tuple[VectorValue, F64]:
        """Return the latest sample of each series at each step, and its time in seconds."""
        at = self._placed(node.at, node.offset_us, grid)
        lookback = self._settings.lookback_us
        selected = self._select(node.matchers, at.start_us - lookback + 1, at.end_us, at)
        self.budget.check_cells(len(selected.labels), grid.steps)
        if not len(selected.times):
            return VectorValue.empty(grid.steps), np.zeros((0, grid.steps))
        ends = counts_up_to(selected, at)
        indices = np.maximum(ends - 1, 0)
        times, values = selected.times[indices], selected.values[indices]
        present = (ends > selected.starts[:-1, None]) & (times > at.times() - lookback)
        present &= values.view(np.uint64) != STALE_BITS
        rows = any_of(present, 1)
        unnamed = np.zeros(int(rows.sum()), np.bool_)
        vector = VectorValue(selected.labels.take(rows), values[rows], present[rows], unnamed)
        times_s = times[rows] / 1e6
        if at.steps != grid.steps:
            vector, times_s = vector.broadcast(grid.steps), np.broadcast_to(times_s, (len(vector), grid.steps))
        return vector, times_s

    def windows(self, node: QueryNode, grid: StepGrid, *, once: bool = False) -> RangeWindows:
        """Return the windows of a range at each step; with `once`, only one for a range that `@` fixes."""
        if isinstance(node, RangeNode):
            at = self._placed(node.selector.at, node.selector.offset_us, grid)
            matchers = node.selector.matchers
            selected = self._select(matchers, at.start_us - node.range_us + 1, at.end_us).without_stale()
            unnamed = np.zeros(len(selected.labels), np.bool_)
        elif isinstance(node, SubqueryNode):
            at = self._placed(node.at, node.offset_us, grid)
            selected, unnamed = self._subquery(node, at)
        else:
            raise Invalid("a function of a range needs one in brackets, such as x[5m]")
        evaluated_us = at.times() if once and at.steps != grid.steps else grid.times()
        return windows_over(selected, unnamed, at, evaluated_us, range_us=node.range_us, budget=self.budget)

    def _subquery(self, node: SubqueryNode, at: StepGrid) -> tuple[SelectedSamples, Mask]:
        """Return the values of a subquery as samples: at multiples of its step, over all windows."""
        step = node.step_us or self._settings.subquery_step_us
        start = ((at.start_us - node.range_us) // step + 1) * step
        steps = (at.end_us - start) // step + 1
        if steps <= 0:
            return _no_samples(), np.zeros(0, np.bool_)
        self.budget.check_cells(1, steps)
        inner = _checked(StepGrid(start, step, steps))
        value = self.value(node.expression, inner)
        vector = lone_series(value.values) if isinstance(value, ScalarValue) else value
        assert isinstance(vector, VectorValue)
        return results.samples_of_vector(vector, inner), vector.unnamed

    def samples_of(self, node: RangeNode | SubqueryNode) -> SelectedSamples:
        """Return the samples of a range as they are, for an instant query that is nothing else."""
        windows = self.windows(node, self.query_grid)
        lengths = windows.lengths[:, 0]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        indices = np.repeat(windows.low[:, 0] - starts[:-1], lengths) + np.arange(starts[-1])
        labels = windows.labels.without_reserved(windows.unnamed)
        return SelectedSamples(labels, starts, windows.times[indices], windows.values[indices])

    def _placed(self, at: AtTime, offset_us: int, grid: StepGrid) -> StepGrid:
        """Return the times that a selector reads: one fixed time with `@`."""
        if at == "start":
            grid = StepGrid(self.query_grid.start_us, grid.step_us, 1)
        elif at == "end":
            grid = StepGrid(self.query_grid.end_us, grid.step_us, 1)
        elif at is not None:
            grid = StepGrid(at, grid.step_us, 1)
        return _checked(grid.shifted(-offset_us))

    def _select(
        self, matchers: tuple[LabelMatcher, ...], start_us: int, end_us: int, steps: StepGrid | None = None
    ) -> SelectedSamples:
        key = (matchers, start_us, end_us, steps)
        if key not in self._selected:
            self._selected[key] = self._source.select(matchers, start_us, end_us, self.budget, steps)
        return self._selected[key]
