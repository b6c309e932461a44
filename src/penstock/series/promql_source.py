"""PromQL over a series table: samples come through the query `runs`, and are evaluated where the caller is.

So the owner's interpreter only reads; what an expression costs is paid by the process that asked.

Thread: the reader's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from penstock.kinds import QUERY_S_MAX, Reading, partitions_of
from penstock.partition.ledger import TableInfo
from penstock.promql import (
    LabelMatcher,
    QueryBudget,
    QueryResult,
    SelectedSamples,
    StepGrid,
    evaluate,
    parse_query,
    selectors_of,
)
from penstock.promql.labels import LabelMatrix
from penstock.series.labels import decode_labels
from penstock.series.options import TIME_MAX, TIME_MIN
from penstock.series.queries import SeriesQuery, encode_query
from penstock.series.selectors import Matcher, selector_text


def run_promql(
    reading: Reading, info: TableInfo, promql: str, grid: StepGrid, budget: QueryBudget, *, instant: bool
) -> QueryResult:
    """Evaluate an expression over a table as of one moment."""
    tree = parse_query(promql)
    several = len(list(selectors_of(tree))) > 1  # one selector is read by one query, which is of one moment anyway
    with reading.moment(partitions_of(info)) if several else nullcontext(reading) as moment:
        return evaluate(tree, TableSource(moment, info), grid, budget, instant=instant)


class TableSource:
    """A series table as a source of samples."""

    def __init__(self, reading: Reading, info: TableInfo) -> None:
        self._reading = reading
        self._info = info

    def select(
        self, matchers: Sequence[LabelMatcher], start_us: int, end_us: int, budget: QueryBudget
    ) -> SelectedSamples:
        """Return the samples of all series that match, from `start_us` to `end_us`, both included."""
        selector = selector_text([Matcher(m.name, m.operator, m.value) for m in matchers])
        low = min(max(start_us, TIME_MIN), TIME_MAX)
        argument = encode_query(SeriesQuery(selector, low, min(max(end_us + 1, low), TIME_MAX)))
        labels: list[bytes] = []
        starts: list[int] = []
        times, values, count = [np.zeros(0, np.int64)], [np.zeros(0)], 0
        timeout_s = min(budget.remaining_s(), QUERY_S_MAX)
        for batch in self._reading.query(self._info, "runs", argument, timeout_s=timeout_s):
            budget.check()
            budget.add_samples(batch.num_rows)
            series = batch.column(0)
            places = np.flatnonzero(series.is_valid().to_numpy(zero_copy_only=False))
            for place, label_set in zip(places.tolist(), series.drop_null().to_pylist(), strict=True):
                if not labels or labels[-1] != label_set:  # else a batch that goes on with the same series
                    labels.append(label_set)
                    starts.append(count + place)
            budget.check_series(len(labels))
            times.append(batch.column(1).to_numpy())
            values.append(batch.column(2).to_numpy())
            count += batch.num_rows
        return SelectedSamples(
            LabelMatrix.of([decode_labels(some) for some in labels]),
            np.array([*starts, count], np.int64),
            np.concatenate(times),
            np.concatenate(values),
        )
