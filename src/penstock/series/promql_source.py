"""PromQL over a series table: samples come through the query `runs`, and are evaluated where the caller is.

So the owner's interpreter only reads, and the calling process pays for the evaluation. Imported with the first query.

Thread: the reader's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from penstock.arguments import microseconds, seconds, whole
from penstock.host import threads
from penstock.host.clock import SystemClock
from penstock.kinds import QUERY_S_MAX, Reading, partitions_of
from penstock.partition.ledger_records import TableInfo
from penstock.promql import (
    SAMPLES_MAX,
    EvaluationSettings,
    LabelMatcher,
    QueryBudget,
    QueryLimits,
    QueryResult,
    SelectedSamples,
    StepGrid,
    evaluate,
    parse_query,
    selectors_of,
    step_grid,
)
from penstock.promql.labels import LabelMatrix
from penstock.series.labels import decode_labels
from penstock.series.options import TIME_MAX, TIME_MIN
from penstock.series.queries import SeriesQuery, encode_query
from penstock.series.selectors import Matcher, selector_text
from penstock.series.times import step_us

MATRIX_BYTES_MAX = 32 << 20
ReadRuns: TypeAlias = Callable[[bytes, float], Iterator[Any]]  # the query `runs`: its argument, and its time limit


def run_promql(
    reading: Reading,
    info: TableInfo,
    promql: str,
    grid: StepGrid,
    budget: QueryBudget,
    *,
    instant: bool,
    settings: EvaluationSettings | None = None,
) -> QueryResult:
    """Evaluate an expression over a table as of one moment."""
    tree = parse_query(promql)
    several = len(list(selectors_of(tree))) > 1  # one selector is read by one query, which is of one moment anyway
    with reading.moment(partitions_of(info)) if several else nullcontext(reading) as moment:
        source = TableSource(partial(_runs, moment, info))
        return evaluate(tree, source, grid, budget, instant=instant, settings=settings)


def _runs(reading: Reading, info: TableInfo, argument: bytes, timeout_s: float) -> Iterator[Any]:
    return reading.query(info, "runs", argument, timeout_s=timeout_s)


def instant_grid(time_us: int) -> StepGrid:
    """Return the grid of a query at one time."""
    return StepGrid(time_us, 1, 1)


def range_grid(start: Any, end: Any, step: Any) -> StepGrid:
    """Return the grid of a range, from the arguments of `query_range`."""
    return step_grid(microseconds(start, "start"), microseconds(end, "end"), step_us(step))


def query_budget(samples_max: Any, timeout_s: Any) -> QueryBudget:
    """Return the budget of a query, from the arguments of `query`."""
    limits = QueryLimits(
        samples_max=SAMPLES_MAX if samples_max is None else whole(samples_max, "samples_max", 1),
        timeout_s=seconds(timeout_s, "timeout_s", QUERY_S_MAX, above_zero=True),
    )
    return QueryBudget(limits, SystemClock())


class TableSource:
    """A series table as a source of samples."""

    def __init__(self, runs: ReadRuns) -> None:
        self._runs = runs

    def select(
        self,
        matchers: Sequence[LabelMatcher],
        start_us: int,
        end_us: int,
        budget: QueryBudget,
        steps: StepGrid | None = None,
    ) -> SelectedSamples:
        """Return the samples of all series that match, from `start_us` to `end_us`, both included.

        With `steps`, samples that are not the last before a step are left out where that is easy.
        """
        selector = selector_text([Matcher(m.name, m.operator, m.value) for m in matchers])
        low = min(max(start_us, TIME_MIN), TIME_MAX)
        thinning: dict[str, Any] = {} if steps is None else {"steps_from": steps.start_us, "step": steps.step_us}
        argument = encode_query(SeriesQuery(selector, low, min(max(end_us + 1, low), TIME_MAX), **thinning))
        labels: list[bytes] = []
        starts: list[int] = []
        times, values, count = [np.zeros(0, np.int64)], [np.zeros(0)], 0
        for batch in self._runs(argument, min(budget.remaining_s(), QUERY_S_MAX)):
            budget.check()
            budget.add_samples(batch.num_rows)
            series = batch.column(0)
            positions = np.flatnonzero(series.is_valid().to_numpy(zero_copy_only=False))
            for position, label_set in zip(positions.tolist(), series.drop_null().to_pylist(), strict=True):
                if not labels or labels[-1] != label_set:  # else a batch that goes on with the same series
                    labels.append(label_set)
                    starts.append(count + position)
            budget.check_series(len(labels))
            times.append(batch.column(1).to_numpy())
            values.append(batch.column(2).to_numpy())
            count += batch.num_rows
        return SelectedSamples(
            MATRICES.matrix(tuple(labels)), np.array([*starts, count], np.int64), _joined(times), _joined(values)
        )


def _joined(parts: list[Any]) -> Any:
    return parts[1] if len(parts) == 2 else np.concatenate(parts)  # the first is empty, and says the type


class MatrixCache:
    """The label matrices of the last selections: dashboards select the same series again and again.

    Thread: any; `_lock` guards the entries. Invariant: the labels of all entries have at most `bytes_max` bytes.
    """

    def __init__(self, bytes_max: int = MATRIX_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._start()
        threads.after_fork(self, MatrixCache._start)  # another thread may have held the lock

    def _start(self) -> None:
        self._matrices: OrderedDict[tuple[bytes, ...], LabelMatrix] = OrderedDict()  # guarded by _lock; last used last
        self._bytes = 0  # guarded by _lock
        self._lock = threads.lock("series.matrices")

    def matrix(self, labels: tuple[bytes, ...]) -> LabelMatrix:
        """Return the matrix of label sets, which are canonical bytes."""
        with self._lock:
            entry = self._matrices.get(labels)
            if entry is not None:
                self._matrices.move_to_end(labels)
                return entry
        matrix = LabelMatrix.of([decode_labels(label_set) for label_set in labels])
        with self._lock:
            if labels not in self._matrices:
                self._matrices[labels] = matrix
                self._bytes += _size(labels)
            if self._bytes > self._bytes_max:
                self._bytes = sum(map(_size, self._matrices))  # an interrupt may have miscounted
                while self._bytes > self._bytes_max * 7 // 8:
                    self._bytes -= _size(self._matrices.popitem(last=False)[0])
        return matrix


def _size(labels: tuple[bytes, ...]) -> int:
    return 1_000 + sum(map(len, labels)) + 100 * len(labels)


MATRICES = MatrixCache()
