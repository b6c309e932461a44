"""`info`: adds the labels of info metrics, such as target_info, to series of the same instance and job.

Each step takes the newest sample of an info metric, so a series whose info changes is several series in a range. Info
metrics are read at the time of the step, whatever `offset` or `@` the other series have.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.errors import Invalid
from penstock.promql.label_functions import matches
from penstock.promql.labels import LabelMatrix, joined
from penstock.promql.limits import QueryBudget
from penstock.promql.matching import SAME_LABELS
from penstock.promql.tree import METRIC_NAME, LabelMatcher
from penstock.promql.values import F64, I64, Mask, VectorValue, any_of, merged

IDENTIFYING = ("instance", "job")


def with_info(
    base: VectorValue, info: VectorValue, times_s: F64, matchers: Sequence[LabelMatcher], budget: QueryBudget
) -> VectorValue:
    """Return the series of `base` with labels of `info`, whose samples have the times `times_s`.

    `matchers` chose the info metrics. Their labels, if they name any, are the ones that are added, and a series is left
    out if none of its info metrics have them. Series that are info metrics themselves stay as they are.
    """
    names = [matcher for matcher in matchers if matcher.name == METRIC_NAME]
    label_matchers = [matcher for matcher in matchers if matcher.name != METRIC_NAME]
    metrics, codes = base.labels.column(METRIC_NAME)
    own = np.array([bool(names) and all(matches(each, metric) for each in names) for metric in metrics])[codes]
    rows = _identified(base.labels.take(~own), info.labels)
    info, times_s = info.take(rows), times_s[rows]
    combinations, number = _combinations(base, own, info, times_s, budget)
    source, *chosen = combinations
    budget.check_cells(len(source), base.values.shape[1])
    present = base.present[source] & (number[source] == np.arange(len(source))[:, None])
    if not all(matches(each, "") for each in label_matchers):
        has_info = np.logical_or.reduce([part >= 0 for part in chosen]) if chosen else np.zeros(len(source), np.bool_)
        present &= (own[source] | has_info)[:, None]
    nonempty = any_of(present, 1)
    source, chosen, present = source[nonempty], [part[nonempty] for part in chosen], present[nonempty]
    labels = _with_labels(
        base.labels.take(source), info.labels, chosen, own[source], {each.name for each in label_matchers}
    )
    return merged(VectorValue(labels, base.values[source], present, base.unnamed[source]), SAME_LABELS)


def _identified(base: LabelMatrix, info: LabelMatrix) -> Mask:
    """Return which info series have the instances and jobs of some series, each judged by itself."""
    matching, named = np.ones(len(info), np.bool_), False
    for name in IDENTIFYING:
        values, codes = base.column(name)
        base_values = {values[code] for code in np.unique(codes).tolist() if code}
        if base_values:
            named = True
            texts, numbers = info.column(name)
            matching &= np.array([text in base_values for text in texts])[numbers]
    return matching if named else np.zeros(len(info), np.bool_)


def _combinations(
    base: VectorValue, own: Mask, info: VectorValue, times_s: F64, budget: QueryBudget
) -> tuple[list[I64], I64]:
    """Return which info series meet which series, and the number of the combination of each series and step.

    A combination is a row of `base` and, for each info metric, a row of `info`, or -1.
    """
    both = joined(base.labels, info.labels).keeping(IDENTIFYING)
    numbers, first = both.groups()
    of_base, of_info = numbers[: len(base)], numbers[len(base) :]
    base_steps = any_of(base.present, 0)
    combinations: list[I64] = [np.arange(len(base))]
    number: I64 = np.broadcast_to(combinations[0][:, None], base.values.shape)
    _, metric = info.labels.column(METRIC_NAME)
    for code in np.unique(metric).tolist():
        budget.check_cells(len(base), base.values.shape[1])
        rows = np.flatnonzero(metric == code)
        newest = _newest(info.present[rows], times_s[rows], of_info[rows], len(first), base_steps)
        chosen = np.where(newest >= 0, rows[newest], -1)[of_base]
        chosen[own] = -1
        distinct, inverse = np.unique(number * (len(info) + 1) + chosen + 1, return_inverse=True)
        number = inverse.reshape(base.values.shape)
        before, row = np.divmod(distinct, len(info) + 1)
        combinations = [*(part[before] for part in combinations), row - 1]
    return combinations, number


def _newest(present: Mask, times_s: F64, groups: I64, count: int, base_steps: Mask) -> I64:
    """Return, for each group and step, the row with the newest sample, or -1; `Invalid` if there are two of them."""
    order = np.argsort(groups, kind="stable")
    distinct, starts = np.unique(groups[order], return_index=True)
    times = np.where(present, times_s, -np.inf)[order]
    latest = np.full((count, present.shape[1]), -np.inf)
    latest[distinct] = np.maximum.reduceat(times, starts, axis=0)
    last = present[order] & (times == latest[groups[order]])
    if (np.add.reduceat(last.astype(np.int64), starts, axis=0)[:, base_steps] > 1).any():
        raise Invalid("found duplicate series for an info metric: instance and job name more than one at the same time")
    newest = np.full(latest.shape, -1, np.int64)
    newest[distinct] = np.maximum.reduceat(np.where(last, order[:, None], -1), starts, axis=0)
    return newest


def _with_labels(labels: LabelMatrix, info: LabelMatrix, chosen: list[I64], own: Mask, names: set[str]) -> LabelMatrix:
    """Return labels with those of the chosen info series; a label that a series has already stays."""
    for name in info.names:
        if name == METRIC_NAME or (names and name not in names):
            continue
        mine, codes = labels.column(name)
        texts, numbers = info.column(name)
        added = np.zeros(len(labels), np.int64)
        for part in chosen:
            more = np.where(part >= 0, numbers[part], 0)
            if ((added > 0) & (more > 0) & (added != more) & (codes == 0)).any():
                raise Invalid(f"conflicting label: info metrics have different values of {name} for the same series")
            added = np.maximum(added, more)
        labels = labels.replacing(name, [*mine, *texts], np.where((codes > 0) | own, codes, added + len(mine)))
    return labels
