"""PromQL: parse, then evaluate on columns, over anything that offers samples of selectors.

From text to a result:

    parser           text to tree, by the library promql-parser; what it gets wrong is handled there
    tree             the typed tree of a query
    formatting       a tree as text again
    source           where samples come from (`SampleSource`), and their columns
    limits           series, samples and time of one query
    evaluator        walks the tree
    results          what a query returns, also as Arrow

Values:

    values           scalars and vectors on a grid of steps
    labels           label sets as a matrix of codes
    windows          the samples in `(t - range, t]` for every series and step

Functions and operators:

    functions        all functions by name
    rates            rate, increase, delta, irate, idelta, resets, changes
    over_time        the family *_over_time
    sums             sums and means of windows, as Prometheus computes them
    trends           deriv, predict_linear, smoothing
    histograms       quantiles and fractions of classic histograms
    mathematics      functions of one number
    calendar         functions of time
    label_functions  label_replace, label_join, sorting, absent
    info             labels of info metrics
    matching         operators between vectors
    operators        what they do to two numbers
    aggregations     sum, avg and others that give one value for a group
    ranking          topk, quantile and others that choose series or values

The meaning is that of Prometheus 3 on float samples: ranges are open on the left, a sample is seen for five minutes, a
staleness marker ends a series, and the metric's name is dropped at the end of a query, not on the way.

Thread: pure functions of their arguments.
"""

from __future__ import annotations

from penstock.promql.evaluator import EvaluationSettings, evaluate
from penstock.promql.limits import SAMPLES_MAX, QueryBudget, QueryLimits
from penstock.promql.parser import parse_query
from penstock.promql.results import QueryResult
from penstock.promql.source import SampleSource, SelectedSamples
from penstock.promql.tree import LabelMatcher, selectors_of
from penstock.promql.values import StepGrid, step_grid

__all__ = [
    "SAMPLES_MAX",
    "EvaluationSettings",
    "LabelMatcher",
    "QueryBudget",
    "QueryLimits",
    "QueryResult",
    "SampleSource",
    "SelectedSamples",
    "StepGrid",
    "evaluate",
    "parse_query",
    "selectors_of",
    "step_grid",
]
