"""Aggregations that choose among series or values: topk, bottomk, limitk, limit_ratio, quantile, count_values.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

from penstock.errors import Invalid
from penstock.promql.aggregations import SeriesGroups, grouping_labels
from penstock.promql.label_functions import check_label_name
from penstock.promql.limits import QueryBudget
from penstock.promql.matching import SAME_LABELS
from penstock.promql.over_time import quantiles_of
from penstock.promql.tree import AggregateNode
from penstock.promql.values import F64, I64, Mask, VectorValue, merged
from penstock.promql.windows import sorted_windows

CHOOSING = ("topk", "bottomk", "limitk", "limit_ratio")
_WHOLE_MAX = float(1 << 63)


def choose(node: AggregateNode, groups: SeriesGroups, parameter: F64) -> VectorValue:
    """Return the series that topk, bottomk, limitk or limit_ratio choose at each step."""
    vector = groups.vector
    if node.operator == "limit_ratio":
        if np.isnan(parameter).any():
            raise Invalid("the ratio of limit_ratio is NaN: give a number from -1 to 1")
        return _masked(vector, _by_ratio(vector, np.clip(parameter, -1.0, 1.0)))
    if not (np.abs(parameter) < _WHOLE_MAX).all():
        raise Invalid(f"the number of series of {node.operator} is NaN or too large: give a whole number")
    counts = np.trunc(parameter).astype(np.int64)
    ranks = _ranks(node.operator, groups)
    chosen = _masked(vector, vector.present & (ranks < counts))
    if vector.values.shape[1] == 1 and node.operator != "limitk":  # best first
        rows = vector.present[:, 0] & (ranks[:, 0] < counts[0])
        return chosen.take(np.lexsort((ranks[rows, 0], groups.of_series[rows])))
    return chosen


def _masked(vector: VectorValue, present: Mask) -> VectorValue:
    return VectorValue(vector.labels, vector.values, present, vector.unnamed).compact()


def _ranks(operator: str, groups: SeriesGroups) -> I64:
    """Return each value's rank among those of its group and step, from 0."""
    vector = groups.vector
    if operator == "limitk":
        key = np.zeros(vector.values.shape)
    else:
        key = -vector.values if operator == "topk" else vector.values
    key = np.where(np.isnan(key), np.inf, key)  # NaNs are chosen last
    ranks = np.empty(vector.values.shape, np.int64)
    for block in groups.blocks():
        keys = key[:, block]
        nans = np.isnan(vector.values[:, block])
        absent = ~vector.present[:, block]
        of_series = np.broadcast_to(groups.of_series[:, None], keys.shape)
        order = np.lexsort((keys, nans, absent, of_series), axis=0)  # stable: of equals the first series
        positions = np.empty(keys.shape, np.int64)
        np.put_along_axis(positions, order, np.broadcast_to(np.arange(len(keys))[:, None], keys.shape), axis=0)
        ranks[:, block] = positions - groups.starts[groups.of_series][:, None]
    return ranks


def _by_ratio(vector: VectorValue, ratio: F64) -> Mask:
    """Choose series by a hash of their labels, as Prometheus does."""
    hashes = np.array([label_hash(labels) for labels in vector.labels.label_sets()], np.float64) / float(1 << 64)
    fractions = hashes[:, None]
    chosen: Mask = np.where(ratio >= 0, fractions < ratio, fractions >= 1.0 + ratio)
    present: Mask = vector.present & chosen & (ratio != 0)
    return present


def label_hash(labels: Mapping[str, str]) -> int:
    """Return Prometheus' hash of a label set: of names and values, each after its length."""
    data = bytearray()
    for pair in sorted(labels.items()):
        for text in map(str.encode, pair):
            size = len(text)
            data += bytes([size]) if size < 255 else b"\xff" + size.to_bytes(3, "little")
            data += text
    return xxhash.xxh64_intdigest(bytes(data))


def quantile(groups: SeriesGroups, quantiles: F64) -> VectorValue:
    """Return a quantile of the values of each group and step."""
    counts = groups.counts.T  # so that the values of one group and step stand together
    present = groups.vector.present[groups.order].T
    values = groups.vector.values[groups.order].T[present]
    flat = counts.reshape(-1)
    high = np.cumsum(flat)
    low = high - flat
    nonempty = np.flatnonzero(flat)
    cell_quantiles = np.repeat(quantiles, counts.shape[1])[nonempty]
    results = np.zeros(len(flat))
    for batch, ordered, lengths in sorted_windows(values, low[nonempty], high[nonempty], groups.budget):
        results[nonempty[batch]] = quantiles_of(ordered, lengths, cell_quantiles[batch])
    return groups.result(results.reshape(counts.shape).T)


def count_values(node: AggregateNode, vector: VectorValue, label: str, budget: QueryBudget) -> VectorValue:
    """Return, for each group and each distinct value, how many series have it at each step."""
    check_label_name(label, "count_values")
    rows, steps = np.nonzero(vector.present)
    distinct, codes = np.unique(vector.values[rows, steps], return_inverse=True)
    names = [_value_text(value) for value in distinct.tolist()]
    labels = vector.labels.take(rows).replacing(label, names, codes.reshape(-1))
    names_by = node.labels if node.without else (*node.labels, label)
    labels = grouping_labels(labels, names_by, without=node.without)
    numbers, first = labels.groups()
    budget.check_cells(len(first), vector.values.shape[1])
    counts = np.zeros((len(first), vector.values.shape[1]))
    np.add.at(counts, (numbers, steps), 1.0)
    value_counts = VectorValue(labels.take(first), counts, counts > 0, np.zeros(len(first), np.bool_))
    return merged(value_counts, SAME_LABELS)


def _value_text(value: float) -> str:
    """Return a number as a label's value: shortest digits, without exponent."""
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return np.format_float_positional(value, trim="-")
