"""PromQL: parse, then evaluate on columns, over anything that offers samples of selectors.

tree             the typed tree of a query
parser           text to tree, by the library promql-parser; what it gets wrong is handled there
source           where samples come from (`SampleSource`), and their columns
labels           label sets as a matrix of codes
values           scalars and vectors on a grid of steps
limits           series, samples and time of one query
windows          the samples in `(t - range, t]` for every series and step; `sums`: exact sums of them
rates            rate, increase, delta, irate, idelta, resets, changes
over_time        the family *_over_time; `trends`: deriv, predict_linear, smoothing
mathematics      functions of one value; `calendar`: functions of time
label_functions  label_replace, label_join, sorting, absent; `info`: labels of info metrics
matching         operators between vectors; `operators`: what they do to numbers
aggregations     sum, avg, topk and their kin; `ranking`: those that choose series or values
histograms       classic histograms
functions        all functions by name
evaluator        walks the tree
results          what a query returns, also as Arrow

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
