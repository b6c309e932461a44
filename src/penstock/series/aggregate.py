"""Aggregates of samples: one value for each group of series and each step of time.

The samples of a selector in [start, end) are divided into groups by the values of the labels in `by`, and into steps
[n * step, (n + 1) * step). A function reduces the samples of a group in a step:

    sum, avg, min, max, count, quantile   of all samples of all series of the group
    last                                  the sample with the latest time; of several, the one of the last series
    increase                              the sum over series of how much each rose, where a fall is a reset to 0
    rate                                  the increase divided by the step in seconds

A rise between two samples counts for the step of the later one; the first sample of a series in the range has none, and
a step without rises has no result.
Staleness markers are left out. Other NaNs are values: a sum with one is NaN; min and max ignore them beside numbers.

The work: each slice of samples, ordered by series and time, is cut into runs of one series and step, and each run is
reduced; runs of one group and step are reduced again, slice after slice. So memory holds one slice and the result,
which has a limit; only `quantile` holds all values, up to another limit. Blocks of samples whose directory says all
that is needed, because they lie in one step, are not decoded. A sum adds the numbers of a step in any order.

Thread: the reader's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arguments import in_short
from penstock.errors import Invalid
from penstock.kinds import QueryContext
from penstock.series.arrow import LABELS, TIME
from penstock.series.blocks import RunSummaries
from penstock.series.labels import U32, check_name, decode_labels
from penstock.series.options import TIME_MAX, TIME_MIN
from penstock.series.queries import SelectedSeries, Slice, check_range, positions_of
from penstock.series.section import STALE_BITS
from penstock.series.selectors import parse_selector
from penstock.series.shard import SampleColumns, SeriesShard

FUNCTIONS = ("sum", "avg", "min", "max", "count", "last", "rate", "increase", "quantile")
BY_MAX = 64
STEP_US_MAX = 1 << 61
QUANTILE_SAMPLES_MAX = 20_000_000
RESULTS_MAX = 10_000_000  # groups x steps that have samples
FOLD_RUNS = 1 << 20  # partial results that are held before they are folded, at least
RESULT_ROWS = 65_536
AGGREGATES = pa.schema(
    [
        pa.field("labels", LABELS, nullable=False),
        pa.field("time", TIME),  # the start of the step, or the year 1 if that is later; null without steps
        pa.field("value", pa.float64(), nullable=False),
    ]
)
F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]


class AggregateQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The argument of the query `aggregate`."""

    selector: str
    start: int = TIME_MIN
    end: int = TIME_MAX
    by: tuple[str, ...] = ()
    step_us: int = 0  # 0: one step for the whole range
    function: str = "sum"
    quantile: float = 0.5


_decoder = msgspec.msgpack.Decoder(AggregateQuery)


def decode_aggregate(argument: bytes) -> AggregateQuery:
    """Decode and check the argument of an aggregate; `Invalid` if it is malformed."""
    try:
        query = _decoder.decode(argument)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"the argument of aggregate does not decode: {error}") from None
    parse_selector(query.selector)
    check_range(query.start, query.end)
    if query.function not in FUNCTIONS:
        raise Invalid(f"there is no function {in_short(query.function)}: use one of {', '.join(FUNCTIONS)}")
    if len(query.by) > BY_MAX or len(set(query.by)) != len(query.by):
        raise Invalid(f"by names each label once, and at most {BY_MAX}")
    for name in query.by:
        check_name(name)
    if not 0 <= query.step_us <= STEP_US_MAX:
        raise Invalid(f"a step is from 1 microsecond to {STEP_US_MAX}, not {query.step_us}")
    if query.function == "rate" and not query.step_us:
        raise Invalid("a rate is an increase per second of a step: give step")
    if not 0 <= query.quantile <= 1:
        raise Invalid(f"quantile is a number from 0 to 1, not {query.quantile}")
    return query


def aggregate(query: AggregateQuery, shards: Sequence[SeriesShard], context: QueryContext) -> Iterator[Any]:
    """Yield record batches of `AGGREGATES`, ordered by group and time. Requires: `query` was checked."""
    groups: dict[tuple[str, ...], int] = {}
    if query.function == "quantile":
        values = _Values(query.quantile)
        for shard in shards:
            for of_row, bucket, ids in _grouped(query, shard, groups, context):
                for columns in shard.read(bucket, ids, query.start, query.end):
                    context.check()
                    values.add(of_row, *_with_steps(query, _slice_of(ids, columns)))
        results = values.result()
    else:
        totals = Totals(_NEEDS[query.function])
        for shard in shards:
            add = _add_rises if query.function in ("rate", "increase") else _add_samples
            add(totals, query, shard, groups, context)
        results = totals.result(query)
    yield from _result(query, groups, results, context)


def _with_steps(query: AggregateQuery, some: Slice) -> tuple[Slice, I64, F64]:
    steps = some.times // query.step_us if query.step_us else np.zeros(len(some.times), np.int64)
    return some, steps, some.bits.view(np.float64)


def _whole_runs(query: AggregateQuery, ids: U32, runs: RunSummaries) -> _WholeRuns:
    steps = runs.last_time // query.step_us if query.step_us else np.zeros(len(runs.id), np.int64)
    return _WholeRuns(positions_of(ids, runs.id), steps, runs)


def _slice_of(ids: U32, columns: SampleColumns) -> Slice:
    sample_ids, times, bits = columns
    return without_stale(Slice(positions_of(ids, sample_ids), times, bits))


def _add_samples(
    totals: Totals,
    query: AggregateQuery,
    shard: SeriesShard,
    groups: dict[tuple[str, ...], int],
    context: QueryContext,
) -> None:
    """Add the samples of a shard."""
    for of_row, bucket, ids in _grouped(query, shard, groups, context):
        for columns, runs in shard.read_summarized(bucket, ids, query.start, query.end, query.step_us):
            context.check()
            whole = _whole_runs(query, ids, runs) if len(runs.id) else None
            totals.add(of_row, *_with_steps(query, _slice_of(ids, columns)), whole)


def _grouped(
    query: AggregateQuery, shard: SeriesShard, groups: dict[tuple[str, ...], int], context: QueryContext
) -> Iterator[tuple[I64, int, U32]]:
    """Yield for each bucket the group of each of its series, its number and their ids, without reading label sets."""
    if query.start >= query.end:
        return
    for bucket, ids in shard.match(parse_selector(query.selector), query.start, query.end, context.check):
        context.check()
        columns = [shard.label_codes(bucket, name, ids, context.check) for name in query.by]
        codes = np.stack([column for _, column in columns], axis=1) if columns else np.zeros((len(ids), 0), np.int64)
        distinct, of_distinct = codes[:1], codes.sum(axis=1)
        if columns:
            distinct, of_distinct = np.unique(codes, axis=0, return_inverse=True)
        names = [
            tuple(values[code] for (values, _), code in zip(columns, row, strict=True)) for row in distinct.tolist()
        ]
        of_row = np.array([groups.setdefault(name, len(groups)) for name in names], np.int64)[of_distinct.reshape(-1)]
        yield of_row, bucket, ids


def _add_rises(
    totals: Totals,
    query: AggregateQuery,
    shard: SeriesShard,
    groups: dict[tuple[str, ...], int],
    context: QueryContext,
) -> None:
    """Add how much the samples of a shard rose, across buckets."""
    selected = SelectedSeries(shard, parse_selector(query.selector), query.start, query.end, context)
    of_row = np.fromiter((_group(labels, query.by, groups) for labels in selected.labels), np.int64)
    before: tuple[int, float] | None = None  # series and value of the last sample of a slice
    for some in selected.slices(context):
        samples = without_stale(some)
        if len(samples.times):
            values = samples.bits.view(np.float64)
            risen, rises = _rises(samples, values, before)
            totals.add(of_row, risen, _with_steps(query, risen)[1], rises)
            before = int(samples.rows[-1]), float(values[-1])


def _group(labels: bytes, by: tuple[str, ...], groups: dict[tuple[str, ...], int]) -> int:
    if not by:
        return groups.setdefault((), 0)
    pairs = dict(decode_labels(labels))
    return groups.setdefault(tuple(pairs.get(name, "") for name in by), len(groups))


def without_stale(some: Slice) -> Slice:
    """Return the samples that are not staleness markers."""
    stale = some.bits == STALE_BITS
    if not stale.any():
        return some
    return Slice(some.rows[~stale], some.times[~stale], some.bits[~stale])


def _rises(some: Slice, values: F64, before: tuple[int, float] | None) -> tuple[Slice, F64]:
    """Return the samples that follow another one of their series, and how much each rose since that."""
    earlier = np.empty(len(values))
    earlier[1:] = values[:-1]
    follows = np.empty(len(values), np.bool_)
    follows[1:] = some.rows[1:] == some.rows[:-1]
    follows[0] = before is not None and before[0] == some.rows[0]
    if before is not None:
        earlier[0] = before[1]
    rows, times, bits = some.rows[follows], some.times[follows], some.bits[follows]
    values, earlier = values[follows], earlier[follows]
    with np.errstate(all="ignore"):  # of infinities; beside a NaN nothing falls
        return Slice(rows, times, bits), np.where(values < earlier, values, values - earlier)


_NEEDS = {  # what is kept of the samples of a group and step
    "sum": ("sum",),
    "avg": ("sum", "count"),
    "min": ("min",),
    "max": ("max",),
    "count": ("count",),
    "last": ("time", "last"),
    "increase": ("sum",),
    "rate": ("sum",),
}


class Totals:
    """Partial results by group and step: sum, count, min, max, time of the last sample, last."""

    def __init__(self, needs: Sequence[str]) -> None:
        self._needs = needs
        self._parts: list[tuple[Any, ...]] = []  # group, step, and a column for each need
        self._runs = 0  # since the last fold
        self._results = 0  # of the last fold

    def add(self, of_row: I64, some: Slice, steps: I64, values: F64, whole: _WholeRuns | None = None) -> None:
        """Reduce the samples of one series and step, and add what was reduced when it was stored."""
        parts: list[tuple[Any, ...]] = []  # series, step, and a column for each need
        if len(values):
            starts = _run_starts(some.rows, steps)
            sources = {"count": np.diff(starts, append=len(values)), "time": some.times}
            reduced = [
                sources["count"] if need == "count" else _reduced(need, sources.get(need, values), starts)
                for need in self._needs
            ]
            parts.append((some.rows[starts], steps[starts], *reduced))
        if whole is not None:
            parts.append((whole.rows, whole.steps, *map(whole.column, self._needs)))
        if not parts:
            return
        rows, steps, *columns = parts[0] if whole is None else _by_series(parts)
        self._parts.append((of_row[rows], steps, *columns))
        self._runs += len(rows)
        if self._runs > max(FOLD_RUNS, self._results):  # as many again: all folds together take linear time
            self._fold()

    def _fold(self) -> None:
        """Reduce the partial results of one group and step to one."""
        if not self._parts:
            return
        groups, steps, *columns = map(np.concatenate, zip(*self._parts, strict=True))
        times = columns[self._needs.index("time")] if "time" in self._needs else np.zeros(0, np.int64)
        # Stable: of equal times the later series is last.
        order = np.lexsort((times, steps, groups)) if len(times) else np.lexsort((steps, groups))
        groups, steps = groups[order], steps[order]
        starts = _run_starts(groups, steps)
        reduced = [_reduced(need, column[order], starts) for need, column in zip(self._needs, columns, strict=True)]
        self._parts = [(groups[starts], steps[starts], *reduced)]
        self._runs, self._results = 0, len(starts)
        if self._results > RESULTS_MAX:
            raise Invalid(f"an aggregate has at most {RESULTS_MAX:,} results: give a longer step, or a shorter range")

    def columns(self) -> tuple[I64, I64, list[npt.NDArray[Any]]]:
        """Return group and step of each result, in order, and a column for each need."""
        self._fold()
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.int64), [np.empty(0) for _ in self._needs]
        groups, steps, *columns = self._parts[0]
        return groups, steps, columns

    def result(self, query: AggregateQuery) -> tuple[I64, I64, F64]:
        """Return group, step and value of each result, in order."""
        groups, steps, columns = self.columns()
        value = columns[-1]
        if query.function == "avg":
            value = columns[0] / columns[1]
        elif query.function == "rate":
            value = value / (query.step_us / 1e6)
        return groups, steps, value.astype(np.float64, copy=False)


class _WholeRuns(NamedTuple):
    """Runs of one series and step that were reduced when they were stored."""

    rows: npt.NDArray[np.intp]
    steps: I64
    runs: RunSummaries

    def column(self, need: str) -> npt.NDArray[Any]:
        if need == "last":
            return np.ascontiguousarray(self.runs.last).view(np.float64)
        names = {"min": "minimum", "max": "maximum", "time": "last_time"}
        column: npt.NDArray[Any] = getattr(self.runs, names.get(need, need))
        return column.astype(np.int64) if need == "count" else column


def _by_series(parts: list[tuple[Any, ...]]) -> list[npt.NDArray[Any]]:
    """Return parts as one, ordered by series: of equal times the later series is last."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return [column[order] for column in columns]


def _run_starts(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Return where a pair of columns changes, with 0. Requires: the columns are not empty."""
    return np.concatenate(([0], np.flatnonzero((one[1:] != one[:-1]) | (other[1:] != other[:-1])) + 1))


def _reduced(need: str, column: npt.NDArray[Any], starts: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
    """Reduce each run of a column."""
    reduced: npt.NDArray[Any]
    if need in ("time", "last"):
        reduced = column[np.append(starts[1:], len(column)) - 1]
        return reduced
    with np.errstate(all="ignore"):  # of infinities
        reduced = {"min": np.fmin, "max": np.fmax}.get(need, np.add).reduceat(column, starts)
    return reduced


class _Values:
    """All values by group and step, for quantiles."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self._parts: list[tuple[I64, I64, F64]] = []
        self._samples = 0

    def add(self, of_row: I64, some: Slice, steps: I64, values: F64) -> None:
        if not len(values):
            return
        self._samples += len(values)
        if self._samples > QUANTILE_SAMPLES_MAX:
            raise Invalid(f"a quantile holds at most {QUANTILE_SAMPLES_MAX} samples: select fewer series or less time")
        self._parts.append((of_row[some.rows], steps, values))

    def result(self) -> tuple[I64, I64, F64]:
        """Return group, step and quantile of each result, in order, interpolated between the two nearest values."""
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
        groups, steps, values = map(np.concatenate, zip(*self._parts, strict=True))
        order = np.lexsort((values, steps, groups))
        groups, steps, values = groups[order], steps[order], values[order]
        starts = _run_starts(groups, steps)
        counts = np.diff(starts, append=len(values))
        rank = self._quantile * (counts - 1)
        low = np.floor(rank).astype(np.intp)
        part = rank - low
        high = np.minimum(low + 1, counts - 1)
        with np.errstate(all="ignore"):
            quantiles = np.where(
                part == 0, values[starts + low], values[starts + low] * (1 - part) + values[starts + high] * part
            )
        return groups[starts], steps[starts], quantiles


def _result(
    query: AggregateQuery, groups: dict[tuple[str, ...], int], results: tuple[I64, I64, F64], context: QueryContext
) -> Iterator[Any]:
    """Yield the results ordered by the labels of the groups, then by time."""
    numbers, steps, values = results
    ordered = sorted(groups)
    rank = np.empty(len(ordered) + 1, np.int64)
    for position, group in enumerate(ordered):
        rank[groups[group]] = position
    order = np.lexsort((steps, rank[numbers]))
    numbers, steps, values = rank[numbers][order], steps[order], values[order]
    maps = pa.array([[(n, v) for n, v in zip(query.by, group, strict=True) if v] for group in ordered], LABELS)
    times = np.maximum(steps * query.step_us, TIME_MIN) if query.step_us else None
    for start in range(0, len(values), RESULT_ROWS):
        context.check()
        some = slice(start, start + RESULT_ROWS)
        time = pa.nulls(len(values[some]), TIME) if times is None else pa.array(times[some]).cast(TIME)
        columns = [maps.take(pa.array(numbers[some])), time, pa.array(np.ascontiguousarray(values[some]))]
        yield pa.record_batch(columns, schema=AGGREGATES)
