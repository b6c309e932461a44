"""The functions of PromQL, by name: each evaluates its arguments and computes.

Thread: one query, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np

from penstock.errors import Invalid
from penstock.promql import histograms, label_functions, over_time, rates, trends
from penstock.promql.calendar import CALENDAR_FUNCTIONS, date_part
from penstock.promql.info import with_info
from penstock.promql.limits import QueryBudget
from penstock.promql.matching import SAME_LABELS
from penstock.promql.mathematics import UNARY_FUNCTIONS, clamped, greater, lesser, rounded
from penstock.promql.rates import Outcome
from penstock.promql.tree import METRIC_NAME, TARGET_INFO, LabelMatcher, QueryNode, RangeNode, SelectorNode, TextNode
from penstock.promql.values import (
    F64,
    Mask,
    ScalarValue,
    StepGrid,
    TextValue,
    VectorValue,
    any_of,
    lone_series,
    merged,
    stacked,
)
from penstock.promql.windows import RangeWindows

QueryValue: TypeAlias = ScalarValue | VectorValue | TextValue
Arguments: TypeAlias = Sequence[QueryNode]


class Evaluation(Protocol):
    """A query under way, as a function sees it."""

    @property
    def budget(self) -> QueryBudget: ...

    @property
    def query_grid(self) -> StepGrid:
        """The steps of the whole query."""

    def vector(self, node: QueryNode, grid: StepGrid) -> VectorValue:
        """Evaluate a vector."""

    def numbers(self, node: QueryNode, grid: StepGrid) -> F64:
        """Evaluate a scalar."""

    def instant(self, node: SelectorNode, grid: StepGrid) -> tuple[VectorValue, F64]:
        """Return the latest sample of each series at each step, and its time in seconds."""

    def windows(self, node: QueryNode, grid: StepGrid, *, once: bool = False) -> RangeWindows:
        """Return the windows of a range at each step; with `once`, only one for a range that `@` fixes."""


Function: TypeAlias = Callable[[Evaluation, Arguments, StepGrid], QueryValue]

WINDOW_FUNCTIONS: tuple[Callable[[RangeWindows], Outcome], ...] = (
    *(rates.rate, rates.increase, rates.delta, rates.irate, rates.idelta, rates.resets, rates.changes),
    *(over_time.sum_over_time, over_time.avg_over_time, over_time.count_over_time, over_time.present_over_time),
    *(over_time.min_over_time, over_time.max_over_time, over_time.first_over_time, over_time.last_over_time),
    *(over_time.ts_of_first_over_time, over_time.ts_of_last_over_time),
    *(over_time.ts_of_max_over_time, over_time.ts_of_min_over_time),
    *(over_time.mad_over_time, over_time.stddev_over_time, over_time.stdvar_over_time, trends.deriv),
)
NAME_KEPT = ("last_over_time", "first_over_time")


def _of_windows(function: Callable[[RangeWindows], Outcome]) -> Function:
    def call(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
        windows = evaluation.windows(arguments[0], grid, once=True)
        return _window_vector(function.__name__, windows, function(windows), grid)

    return call


def _of_windows_and_numbers(range_position: int, function: Callable[..., Outcome]) -> Function:
    def call(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
        windows = evaluation.windows(arguments[range_position], grid)
        numbers = [evaluation.numbers(node, grid) for at, node in enumerate(arguments) if at != range_position]
        return _window_vector(function.__name__, windows, function(windows, *numbers), grid)

    return call


def _window_vector(name: str, windows: RangeWindows, outcome: Outcome, grid: StepGrid) -> VectorValue:
    unnamed = windows.unnamed if name in NAME_KEPT else np.ones(len(windows.labels), np.bool_)
    vector = VectorValue(windows.labels, *outcome, unnamed).compact()
    return vector if windows.steps == grid.steps else vector.broadcast(grid.steps)


def _of_number(function: Callable[[F64], F64]) -> Function:
    def call(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
        vector = evaluation.vector(arguments[0], grid)
        return vector.mapped(function(vector.values))

    return call


def _of_date(part: str) -> Function:
    def call(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
        if not arguments:
            return lone_series(date_part(part, (grid.times() // 1_000_000).astype(np.float64)))
        vector = evaluation.vector(arguments[0], grid)
        return vector.mapped(date_part(part, vector.values))

    return call


def _of_query(function: Callable[[StepGrid], float]) -> Function:
    def call(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
        return ScalarValue(np.full(grid.steps, function(evaluation.query_grid)))

    return call


# -- scalars and vectors


def _time(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    return ScalarValue(grid.times() / 1e6)


def _extreme_of(function: Callable[[F64, F64], F64]) -> Function:
    def call(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
        return ScalarValue(function(*(evaluation.numbers(node, grid) for node in arguments)))

    return call


def _vector(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    return lone_series(evaluation.numbers(arguments[0], grid))


def _scalar(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    vector = evaluation.vector(arguments[0], grid)
    only = vector.present.sum(axis=0) == 1
    return ScalarValue(np.where(only, np.where(vector.present, vector.values, 0.0).sum(axis=0), np.nan))


def _clamp(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    low, high = (evaluation.numbers(node, grid) for node in arguments[1:])
    return _clamped(evaluation.vector(arguments[0], grid), low, high)


def _clamp_min(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    low = evaluation.numbers(arguments[1], grid)
    return _clamped(evaluation.vector(arguments[0], grid), low, np.full(grid.steps, np.inf))


def _clamp_max(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    high = evaluation.numbers(arguments[1], grid)
    return _clamped(evaluation.vector(arguments[0], grid), np.full(grid.steps, -np.inf), high)


def _clamped(vector: VectorValue, low: F64, high: F64) -> VectorValue:
    values, in_order = clamped(vector.values, low, high)
    unnamed = np.ones(len(vector), np.bool_)
    return VectorValue(vector.labels, values, vector.present & in_order, unnamed).compact()


def _round(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    vector = evaluation.vector(arguments[0], grid)
    nearest = evaluation.numbers(arguments[1], grid) if len(arguments) > 1 else np.ones(grid.steps)
    return vector.mapped(rounded(vector.values, nearest))


def _timestamp(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    if isinstance(arguments[0], SelectorNode):
        vector, times_s = evaluation.instant(arguments[0], grid)
        return vector.mapped(times_s)
    vector = evaluation.vector(arguments[0], grid)
    return vector.mapped(np.broadcast_to(grid.times() / 1e6, vector.values.shape))


# -- absence


def _absent(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    there = any_of(evaluation.vector(arguments[0], grid).present, 0)
    return _absence(arguments[0].matchers if isinstance(arguments[0], SelectorNode) else (), there)


def _absent_over_time(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    there = any_of(evaluation.windows(arguments[0], grid).lengths > 0, 0)
    return _absence(arguments[0].selector.matchers if isinstance(arguments[0], RangeNode) else (), there)


def _absence(matchers: Sequence[LabelMatcher], there: Mask) -> VectorValue:
    present = ~there.reshape(1, -1)
    labels = label_functions.absent_labels(matchers)
    return VectorValue(labels, np.ones(present.shape), present, np.zeros(1, np.bool_)).compact()


# -- labels


def _texts(arguments: Arguments) -> list[str]:
    """Return the texts among arguments whose types were checked."""
    return [node.value for node in arguments if isinstance(node, TextNode)]


def _label_replace(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    target, replacement, source, pattern = _texts(arguments[1:])
    vector = evaluation.vector(arguments[0], grid)
    return label_functions.label_replace(vector, target, replacement, source, pattern)


def _label_join(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    target, separator, *sources = _texts(arguments[1:])
    return label_functions.label_join(evaluation.vector(arguments[0], grid), target, separator, sources)


def _info(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    info_selector = arguments[1] if len(arguments) > 1 else TARGET_INFO
    if not isinstance(info_selector, SelectorNode):
        raise Invalid('the second argument of info is matchers in braces, such as {version=~".+"}')
    base = evaluation.vector(arguments[0], grid)
    if not len(base):
        return base
    named = any(matcher.name == METRIC_NAME for matcher in info_selector.matchers)
    selected = info_selector.matchers if named else (*TARGET_INFO.matchers, *info_selector.matchers)
    with evaluation.budget.holding(base.values.size):
        info, times_s = evaluation.instant(SelectorNode(selected), grid)
    return with_info(base, info, times_s, info_selector.matchers, evaluation.budget)


def _sorting(*, descending: bool) -> Function:
    def call(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
        return label_functions.sort_by_value(evaluation.vector(arguments[0], grid), descending=descending)

    return call


def _sorting_by_label(*, descending: bool) -> Function:
    def call(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
        vector = evaluation.vector(arguments[0], grid)
        return label_functions.sort_by_label(vector, _texts(arguments[1:]), descending=descending)

    return call


# -- histograms


def _histogram_quantile(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    quantiles = evaluation.numbers(arguments[0], grid)
    return histograms.histogram_quantile(evaluation.vector(arguments[1], grid), quantiles, evaluation.budget)


def _histogram_fraction(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    lower, upper = (evaluation.numbers(node, grid) for node in arguments[:2])
    return histograms.histogram_fraction(evaluation.vector(arguments[2], grid), lower, upper, evaluation.budget)


def _histogram_quantiles(evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    vector, (label, *_) = evaluation.vector(arguments[0], grid), _texts(arguments[1:2])
    label_functions.check_label_name(label, "histogram_quantiles")
    series = VectorValue.empty(grid.steps)
    for node in arguments[2:]:
        quantiles = evaluation.numbers(node, grid)
        if len(set(quantiles.tolist())) != 1:
            raise Invalid("the quantiles of histogram_quantiles are the same at every step: give numbers")
        quantile = histograms.histogram_quantile(vector, quantiles, evaluation.budget)
        labels = quantile.labels.replacing(label, [str(float(quantiles[0]))], np.zeros(len(quantile), np.int64))
        series = stacked(series, VectorValue(labels, quantile.values, quantile.present, quantile.unnamed))
    return merged(series, SAME_LABELS)


FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        **{function.__name__: _of_windows(function) for function in WINDOW_FUNCTIONS},
        "quantile_over_time": _of_windows_and_numbers(1, over_time.quantile_over_time),
        "predict_linear": _of_windows_and_numbers(0, trends.predict_linear),
        "double_exponential_smoothing": _of_windows_and_numbers(0, trends.double_exponential_smoothing),
        **{name: _of_number(function) for name, function in UNARY_FUNCTIONS.items()},
        **{part: _of_date(part) for part in CALENDAR_FUNCTIONS},
        "start": _of_query(lambda grid: grid.start_us / 1e6),
        "end": _of_query(lambda grid: grid.end_us / 1e6),
        "range": _of_query(lambda grid: (grid.end_us - grid.start_us) / 1e6),
        "step": _of_query(lambda grid: grid.step_us / 1e6 if grid.steps > 1 else 0.0),
        "pi": _of_query(lambda _: np.pi),
        "time": _time,
        "max_of": _extreme_of(greater),
        "min_of": _extreme_of(lesser),
        "vector": _vector,
        "scalar": _scalar,
        "clamp": _clamp,
        "clamp_min": _clamp_min,
        "clamp_max": _clamp_max,
        "round": _round,
        "timestamp": _timestamp,
        "absent": _absent,
        "absent_over_time": _absent_over_time,
        "label_replace": _label_replace,
        "label_join": _label_join,
        "info": _info,
        "sort": _sorting(descending=False),
        "sort_desc": _sorting(descending=True),
        "sort_by_label": _sorting_by_label(descending=False),
        "sort_by_label_desc": _sorting_by_label(descending=True),
        "histogram_quantile": _histogram_quantile,
        "histogram_fraction": _histogram_fraction,
        "histogram_quantiles": _histogram_quantiles,
    }
)


def call_function(name: str, evaluation: Evaluation, arguments: Arguments, grid: StepGrid) -> QueryValue:
    """Evaluate a call; `Invalid` if there is no such function."""
    function = FUNCTIONS.get(name)
    if function is None:
        raise Invalid(f"Penstock does not have the function {name}: write the query without it")
    return function(evaluation, arguments, grid)
