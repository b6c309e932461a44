"""The API of a series table, over a port.

Thread: any number; a table caches the series it writes to, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arguments import ArrowSource, flag, in_short, microseconds, whole
from penstock.arguments import text as checked_text
from penstock.coordinator import Epoch
from penstock.errors import Backpressure, Invalid, NotFound
from penstock.journal.partitions import PartitionId
from penstock.kinds import DURABLE_S, QUERY_S, Port, ReadableTable, Reading, WritableTable
from penstock.partition.ledger import TableInfo
from penstock.partition.pending import PendingGroup
from penstock.series.admission import check_window
from penstock.series.aggregate import AGGREGATES, AggregateQuery, decode_aggregate
from penstock.series.arrow import SAMPLES, BlockMaker, time_column, value_column
from penstock.series.labels import LabelTable, check_labels, check_name, fingerprint_of, shard_number_of
from penstock.series.options import (
    TIME_MAX,
    TIME_MIN,
    SeriesOptions,
    check_series_options,
    decode_series_options,
    encode_series_options,
)
from penstock.series.queries import SCHEMAS, SeriesQuery, check_range, encode_query
from penstock.series.section import (
    I64,
    SAMPLE_BYTES,
    MetricMetadata,
    Part,
    SampleBlock,
    SeriesDelete,
    SeriesKey,
    SeriesSection,
    append_sample,
    check_delete,
    check_metadata,
    check_times,
)
from penstock.series.selectors import parse_selector
from penstock.series.times import moment_us, moments_us, step_us

if TYPE_CHECKING:  # imported with the first query: most programs never run one
    from penstock.promql import QueryBudget, QueryResult, StepGrid

AggregateFunction: TypeAlias = Literal["sum", "avg", "min", "max", "count", "last", "rate", "increase", "quantile"]
KEYS_MAX = 100_000  # series that a table remembers
SECTION_BYTES = 512  # memory of a section besides its columns
ALTERS_MAX = 100  # attempts, while others alter the same table


@dataclass(frozen=True, slots=True)
class Cardinality:
    """How many series and label values a table has, the largest first.

    >>> metrics = store.series("metrics")
    >>> epoch = metrics.write("cpu", 0.42, {"host": "a"})
    >>> metrics.cardinality().metrics
    {'cpu': 1}
    """

    series: int  # of all metrics
    metrics: dict[str, int]  # series of each metric, in the bucket where it has most
    labels: dict[str, int]  # distinct values of each label


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesStatistics:
    """Where the samples of a series table are, at one moment.

    >>> store.series("metrics").statistics().shards
    1
    """

    shards: int
    buckets: int  # of time, that have series
    series: int  # of all metrics, in the bucket that has most
    memory_bytes: int  # of samples and index rows that are in no file yet
    files: int
    file_bytes: int
    runs_max: int  # sorted runs that a read may have to search, in the worst shard


class SeriesReader(ReadableTable):
    """A read-only series table, live or in a snapshot. Times are ranges [start, end); None means without a bound.

    >>> epoch = store.series("metrics").write("cpu", 0.42, {"host": "a"}, durable=True)
    >>> with store.snapshot() as snapshot:
    ...     snapshot.series("metrics").select('cpu{host="a"}').num_rows
    1
    """

    def __init__(self, port: Reading, info: TableInfo) -> None:
        super().__init__(port, info)
        self._options = decode_series_options(info.options)

    @property
    def options(self) -> SeriesOptions:
        """The options it was created with."""
        return self._options

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of samples: metric, labels (a map), time, value."""
        return SAMPLES

    def __repr__(self) -> str:
        shards = "" if self.shards == 1 else f" of {self.shards} shards"
        return f"<{type(self).__name__} {self.name!r}{shards}>"

    # -- samples

    def select(
        self,
        selector: str,
        start: int | datetime | np.datetime64 | None = None,
        end: int | datetime | np.datetime64 | None = None,
        *,
        timeout_s: float = QUERY_S,
    ) -> pa.Table:
        """Return the samples of a selector as an Arrow table.

        The samples of one series follow each other in the order of time. `scan_arrow` reads them as a stream.
        """
        batches = self._query("select", _query(selector, start, end), timeout_s)
        return pa.Table.from_batches(list(batches), SAMPLES)

    def scan_arrow(
        self,
        selector: str = "{}",
        start: int | datetime | np.datetime64 | None = None,
        end: int | datetime | np.datetime64 | None = None,
        *,
        timeout_s: float = QUERY_S,
    ) -> Iterator[pa.RecordBatch]:
        """Return the samples of a selector as record batches, in bounded memory."""
        return self._query("select", _query(selector, start, end), timeout_s)

    def to_arrow(self) -> pa.Table:
        """Return all samples as an Arrow table."""
        return self.select("{}")

    def aggregate(
        self,
        selector: str,
        start: int | datetime | np.datetime64 | None = None,
        end: int | datetime | np.datetime64 | None = None,
        *,
        function: AggregateFunction,
        by: Iterable[str] = (),
        step: float | timedelta | None = None,
        quantile: float | None = None,
        timeout_s: float = QUERY_S,
    ) -> pa.Table:
        """Return one value for each group of series and each step, as an Arrow table (labels, time, value).

        `by` names the labels that make a group; series without one of them are a group, too, as in Prometheus.
        `step` is in seconds and `time` the start of a step, a multiple of it.
        `function` is sum, avg, min, max, count, last, rate, increase or quantile (with `quantile`, from 0 to 1).
        """
        query = AggregateQuery(
            *_bounds(selector, start, end),
            by=_names(by),
            step_us=0 if step is None else step_us(step),
            function=checked_text(function, "function", 64),
            quantile=_quantile(function, quantile),
        )
        argument = encode_query(query)
        decode_aggregate(argument)
        batches = self._reading.query(self._info, "aggregate", argument, timeout_s=timeout_s)
        return pa.Table.from_batches(list(batches), AGGREGATES)

    # -- PromQL

    def query(
        self,
        promql: str,
        time: int | datetime | None = None,
        *,
        samples_max: int | None = None,
        timeout_s: float = QUERY_S,
    ) -> pa.Table:
        """Evaluate a PromQL expression at one time, by default now; return an Arrow table like that of `select`.

        It is evaluated in this process. A metric that the expression drops is "". `samples_max` bounds what is read, by
        default 20 million.
        """
        from penstock.series.promql_source import instant_grid, query_budget

        grid = instant_grid(self._reading.time_us() if time is None else microseconds(time))
        return self.evaluate(promql, grid, query_budget(samples_max, timeout_s), instant=True).to_arrow(SAMPLES)

    def query_range(
        self,
        promql: str,
        start: int | datetime,
        end: int | datetime,
        step: float | timedelta,
        *,
        samples_max: int | None = None,
        timeout_s: float = QUERY_S,
    ) -> pa.Table:
        """Evaluate a PromQL expression at `start` and every `step` seconds after it, up to and including `end`."""
        from penstock.series.promql_source import query_budget, range_grid

        grid = range_grid(start, end, step)
        return self.evaluate(promql, grid, query_budget(samples_max, timeout_s), instant=False).to_arrow(SAMPLES)

    def evaluate(self, promql: str, grid: StepGrid, budget: QueryBudget, *, instant: bool) -> QueryResult:
        """Evaluate a PromQL expression; for other packages of Penstock."""
        from penstock.series.promql_source import run_promql

        return run_promql(self._reading, self._info, promql, grid, budget, instant=instant)

    # -- labels

    def series(
        self,
        selector: str = "{}",
        start: int | datetime | np.datetime64 | None = None,
        end: int | datetime | np.datetime64 | None = None,
        *,
        timeout_s: float = QUERY_S,
    ) -> pa.Table:
        """Return the label sets of a selector as an Arrow table (metric, labels).

        The range is that of whole buckets: a series may have its samples elsewhere in one of them.
        """
        batches = self._query("series", _query(selector, start, end), timeout_s)
        return pa.Table.from_batches(list(batches), SCHEMAS["series"])

    def labels(
        self,
        selector: str = "{}",
        start: int | datetime | np.datetime64 | None = None,
        end: int | datetime | np.datetime64 | None = None,
        *,
        timeout_s: float = QUERY_S,
    ) -> list[str]:
        """Return the names of all labels of the series of a selector, sorted; `__name__` is the metric."""
        return self._texts("label_names", _query(selector, start, end), timeout_s)

    def label_values(
        self,
        name: str,
        selector: str = "{}",
        start: int | datetime | np.datetime64 | None = None,
        end: int | datetime | np.datetime64 | None = None,
        *,
        timeout_s: float = QUERY_S,
    ) -> list[str]:
        """Return the values of a label of the series of a selector, sorted."""
        return self._texts("label_values", _query(selector, start, end, check_name(name)), timeout_s)

    def metadata(self, metric: str | None = None) -> dict[str, MetricMetadata]:
        """Return type, unit and help of metrics, of one or of all that have some, by metric."""
        name = "" if metric is None else checked_text(metric, "a metric", 4_096)
        batches = self._query("metadata", SeriesQuery(name=name), QUERY_S)
        return {row["metric"]: MetricMetadata(**row) for batch in batches for row in batch.to_pylist()}

    def cardinality(
        self,
        start: int | datetime | np.datetime64 | None = None,
        end: int | datetime | np.datetime64 | None = None,
        *,
        top: int | None = None,
        timeout_s: float = QUERY_S,
    ) -> Cardinality:
        """Return how many series and label values there are; with `top`, only that many of the largest."""
        limit = None if top is None else whole(top, "top", 1)
        batches = self._query("cardinality", _query("{}", start, end), timeout_s)
        rows = [row for batch in batches for row in batch.to_pylist()]
        found = {of: {row["name"]: row["count"] for row in rows if row["of"] == of} for of in ("metric", "label")}
        metrics, labels = (dict(list(found[of].items())[:limit]) for of in ("metric", "label"))
        return Cardinality(sum(found["metric"].values()), metrics, labels)

    def statistics(self) -> SeriesStatistics:
        """Return how many buckets and series there are, and the bytes in memory and in files."""
        (row,) = [row for batch in self._query("statistics", SeriesQuery(), QUERY_S) for row in batch.to_pylist()]
        return SeriesStatistics(**row)

    def _query(self, name: str, query: SeriesQuery, timeout_s: float) -> Iterator[Any]:
        return self._reading.query(self._info, name, encode_query(query), timeout_s=timeout_s)

    def _texts(self, name: str, query: SeriesQuery, timeout_s: float) -> list[str]:
        return [text for batch in self._query(name, query, timeout_s) for text in batch.column(0).to_pylist()]


def _bounds(selector: Any, start: Any, end: Any) -> tuple[str, int, int]:
    parse_selector(selector)
    low = TIME_MIN if start is None else moment_us(start, "start")
    high = TIME_MAX if end is None else moment_us(end, "end")
    check_range(low, high)
    return str.__str__(selector), low, high


def _query(selector: Any, start: Any, end: Any, name: str = "") -> SeriesQuery:
    return SeriesQuery(*_bounds(selector, start, end), name)


def _names(by: Any) -> tuple[str, ...]:
    if isinstance(by, str) or not isinstance(by, Iterable):
        raise Invalid(f"by is a list of labels, not {in_short(by)}")
    return tuple(map(check_name, by))


def _quantile(function: Any, quantile: Any) -> float:
    if (function == "quantile") != (quantile is not None):
        raise Invalid('quantile goes with function="quantile": give both, or none')
    if quantile is None:
        return 0.5
    if isinstance(quantile, bool) or not isinstance(quantile, (int, float)) or not 0 <= quantile <= 1:
        raise Invalid(f"quantile is a number from 0 to 1, not {in_short(quantile)}")
    return float(quantile)


class SeriesTable(SeriesReader, WritableTable):
    """A series table of an open store.

    >>> metrics = store.series("metrics")
    >>> epoch = metrics.write("cpu", 0.42, {"host": "a"})
    >>> metrics.select("cpu").column("value").to_pylist()
    [0.42]
    """

    def __init__(self, port: Port, info: TableInfo, *, durable: bool = False) -> None:
        super().__init__(port, info)
        self._port = port
        self._durable = durable
        self._write = port.write  # bound once
        self._bucket_us = self._options.bucket_us
        self._keys: dict[Any, SeriesKey] = {}  # by metric and labels as they are given; cleared when it is full
        self._maker = BlockMaker()

    # -- writing

    def write(
        self,
        metric: str,
        value: float,
        labels: Mapping[str, str] | None = None,
        *,
        time: int | datetime | np.datetime64 | None = None,
        durable: bool | None = None,
    ) -> Epoch:
        """Write one sample; `time` is whole microseconds since 1970 or a datetime with a zone, by default now.

        A sample replaces an earlier one of the same series and time.
        """
        try:
            key = self._keys[(metric,) if labels is None else (metric, *labels.items())]
        except (KeyError, TypeError, AttributeError):
            key = self._key(metric, labels)
        number = value if type(value) is float else _number(value)
        if durable is not None and durable is not True and durable is not False:
            flag(durable, "durable")
        if time is None:
            time_us = self._port.now_us()
        else:
            time_us = moment_us(time)
            self._check_window(time_us, time_us)
        bucket = time_us // self._bucket_us
        if key.bucket == bucket and not key.term.over:
            epoch = self._write(key.partition, append_sample, SAMPLE_BYTES, key, (time_us, number))
        else:  # it may be a new or an emptied series, which the owner must admit
            section = SeriesSection()
            section.log.append((key, time_us, number))
            epoch = self._submit({key.partition: section}, SAMPLE_BYTES)
            key.bucket = bucket
        if durable or (durable is None and self._durable):
            self._port.flush(epoch, DURABLE_S, table=self._info.table_id)
        return epoch

    def _key(self, metric: Any, labels: Any) -> SeriesKey:
        checked = check_labels(metric, labels)
        key = SeriesKey(checked, self._partitions[shard_number_of(fingerprint_of(checked), len(self._partitions))])
        if len(self._keys) >= KEYS_MAX:
            self._keys = {}
        if labels is None or type(labels) is dict:
            self._keys[(metric,) if labels is None else (metric, *labels.items())] = key
        return key

    def write_columns(
        self,
        metric: str,
        values: npt.ArrayLike,
        labels: Mapping[str, str] | None = None,
        *,
        times: npt.ArrayLike | Sequence[datetime],
        durable: bool | None = None,
    ) -> Epoch:
        """Write many samples of one series: values and times of the same length."""
        if durable is not None:
            flag(durable, "durable")
        series = LabelTable.of([check_labels(metric, labels)])
        bits, moments = _values(values), _times(times)
        if len(bits) != len(moments):
            raise Invalid(f"there are {len(bits)} values and {len(moments)} times: give as many of both")
        if not len(bits):
            return Epoch(0)
        check_times(moments)
        return self._end(self._write_block(SampleBlock(series, np.zeros(len(bits), np.uint32), moments, bits)), durable)

    def write_arrow(self, rows: ArrowSource, *, metric: str | None = None, durable: bool | None = None) -> Epoch:
        """Write an Arrow table or record batch, all or none of its rows.

        Columns: `metric` (or the argument), `time`, `value`, `labels` (a map or a struct), and any others as labels.
        """
        if durable is not None:
            flag(durable, "durable")
        block = self._maker.block(rows, metric)
        return Epoch(0) if block is None else self._end(self._write_block(block), durable)

    def write_block(self, block: SampleBlock) -> Epoch:
        """Write samples of label sets that were checked; for other packages of Penstock."""
        check_times(block.times)
        return self._end(self._write_block(block), None)

    def _write_block(self, block: SampleBlock) -> Epoch:
        self._check_window(int(block.times.min()), int(block.times.max()))
        parts = [(0, block)] if self.shards == 1 else list(split_block(block, self.shards))
        size = 20 * len(block) + sum(2 * len(part.series.encode()) + SECTION_BYTES for _, part in parts)
        return self._submit({self._partitions[shard]: SeriesSection(part) for shard, part in parts}, size)

    def delete(
        self,
        selector: str,
        start: int | datetime | np.datetime64 | None = None,
        end: int | datetime | np.datetime64 | None = None,
        *,
        durable: bool | None = None,
    ) -> Epoch:
        """Delete the samples of a selector in [start, end), in every shard at once."""
        if durable is not None:
            flag(durable, "durable")
        part = check_delete(SeriesDelete(*_bounds(selector, start, end)))
        sections = {partition: SeriesSection(part) for partition in self._partitions}
        return self._end(self._submit(sections, SECTION_BYTES * len(sections) + len(part.selector)), durable)

    def set_metadata(
        self,
        metric: str,
        *,
        type: str = "",  # noqa: A002 - they read well
        unit: str = "",
        help: str = "",  # noqa: A002
        durable: bool | None = None,
    ) -> Epoch:
        """Set type (counter, gauge, histogram, summary, info, stateset, unknown), unit and help of a metric."""
        if durable is not None:
            flag(durable, "durable")
        part: Part = check_metadata(MetricMetadata(metric, type, unit, help))
        return self._end(self._submit({self._partitions[0]: SeriesSection(part)}, SECTION_BYTES), durable)

    def alter(
        self,
        *,
        window_s: float | EllipsisType | None = ...,
        future_s: float | EllipsisType | None = ...,
        retention_s: float | EllipsisType | None = ...,
        series_max: int | EllipsisType = ...,
        metric_series_max: int | EllipsisType = ...,
    ) -> None:
        """Change options of the table durably, for every process; what is left out stays.

        Other table objects follow when they next write a new series or are asked for again.
        """
        given = {
            "window_s": window_s,
            "future_s": future_s,
            "retention_s": retention_s,
            "series_max": series_max,
            "metric_series_max": metric_series_max,
        }
        changes = {name: value for name, value in given.items() if value is not ...}
        if not changes:
            raise Invalid(f"alter what? Give one of {', '.join(given)}")
        for _ in range(ALTERS_MAX):
            info = self._latest()
            options = encode_series_options(check_series_options(msgspec.structs.replace(self._options, **changes)))
            if info.options == options or self._port.alter(info, options).options == options:
                self._latest()
                return
        raise Backpressure(f"other callers alter table {self.name} at the same time: retry later")

    def _latest(self) -> TableInfo:
        info = self._port.table(self.name)
        if info is None or info.table_id != self._info.table_id:
            raise NotFound(f"series table {self.name} was dropped")
        self._info, self._options = info, decode_series_options(info.options)
        return info

    def _check_window(self, first: int, last: int) -> None:
        """Refuse times outside the table's window early; the owner judges new series again."""
        try:
            check_window(self._info.name, first, last, self._options, self._port.now_us())
        except Invalid:
            before = self._options
            self._latest()
            if self._options == before:
                raise
            check_window(self._info.name, first, last, self._options, self._port.now_us())

    def _submit(self, sections: dict[PartitionId, SeriesSection], size: int) -> Epoch:
        group = PendingGroup()
        group.sections.update(sections)
        return self._port.submit(group, size)


def split_block(block: SampleBlock, shards: int) -> Iterator[tuple[int, SampleBlock]]:
    """Yield, for each shard with samples, its number and its part of a block."""
    rows_new = np.empty(len(block.series), np.uint32)
    shard_of = np.empty(len(block.series), np.int64)
    parts = block.series.by_shard(shards)
    for shard, (_, rows) in enumerate(parts):
        rows_new[rows] = np.arange(len(rows), dtype=np.uint32)
        shard_of[rows] = shard
    of_sample = shard_of[block.index]
    for shard, (series, _) in enumerate(parts):
        places = np.flatnonzero(of_sample == shard)
        if len(places):
            yield shard, SampleBlock(series, rows_new[block.index[places]], block.times[places], block.bits[places])


def _number(value: Any) -> float:
    """Return a value as a plain float, with its bits; `Invalid` if it is not a number."""
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        try:
            return float.__float__(value) if isinstance(value, float) else float(value)
        except OverflowError:
            pass
    raise Invalid(f"a value is a number that a float can hold, not {in_short(value)}")


def _values(values: Any) -> npt.NDArray[np.uint64]:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return value_column(values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values)
    try:
        column = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise Invalid(f"values are an array of numbers, not {in_short(values)} ({error})") from None
    if column.ndim != 1 or (column.dtype.kind not in "fiu" and len(column)):
        raise Invalid(f"values are an array of numbers, not {in_short(values)}")
    _refuse_masked(values, "values")
    with np.errstate(over="ignore"):
        numbers = np.array(column, np.float64)  # a copy: the caller may change its array before the write is encoded
    if column.dtype.itemsize > numbers.itemsize and (np.isinf(numbers) & ~np.isinf(column)).any():
        raise Invalid("a value is larger than float64 can hold: scale the values, or drop it")
    return numbers.view(np.uint64)


def _refuse_masked(column: Any, what: str) -> None:
    """Refuse masked elements: numpy would pass what is under the mask."""
    if np.ma.is_masked(column):
        raise Invalid(f"some {what} are masked: drop such samples")


def _times(times: Any) -> I64:
    if isinstance(times, (pa.Array, pa.ChunkedArray)):
        return time_column(times.combine_chunks() if isinstance(times, pa.ChunkedArray) else times)
    try:
        column = np.asarray(times)
    except (TypeError, ValueError) as error:
        raise Invalid(f"times are an array of microseconds since 1970, not {in_short(times)} ({error})") from None
    _refuse_masked(times, "times")
    if column.dtype.kind == "O" and column.ndim == 1 and len(column) and isinstance(column[0], datetime):
        return np.fromiter(map(microseconds, column), np.int64, len(column))  # with a zone, from pandas too
    if column.ndim != 1 or (column.dtype.kind not in "iuM" and len(column)):
        raise Invalid(f"times are an array of microseconds since 1970, or of datetimes, not {in_short(times)}")
    if column.dtype.kind == "u" and len(column) and int(column.max()) >= TIME_MAX:
        raise Invalid(f"the time {int(column.max())} is outside the years 1 to 9999: times are microseconds since 1970")
    return moments_us(column) if column.dtype.kind == "M" else np.array(column, np.int64)
