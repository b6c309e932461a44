"""Reading a series table, over a port: samples, labels, aggregates, PromQL.

Thread: any number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.arguments import in_short, microseconds, whole
from penstock.arguments import text as checked_text
from penstock.errors import Invalid
from penstock.kinds import QUERY_S, ReadableTable, Reading, TableSize
from penstock.partition.ledger_records import TableInfo
from penstock.series.aggregate import AGGREGATES, AggregateQuery, decode_aggregate
from penstock.series.arrow import SAMPLES
from penstock.series.changes import CHANGE_COLUMNS
from penstock.series.labels import check_name
from penstock.series.options import TIME_MAX, TIME_MIN, SeriesOptions, decode_series_options
from penstock.series.queries import SCHEMAS, SeriesQuery, check_range, encode_query
from penstock.series.section import MetricMetadata
from penstock.series.selectors import parse_selector
from penstock.series.times import moment_us, step_us

if TYPE_CHECKING:  # imported with the first query: most programs never run one
    from penstock.promql import EvaluationSettings, QueryBudget, QueryResult, StepGrid

AggregateFunction: TypeAlias = Literal["sum", "avg", "min", "max", "count", "last", "rate", "increase", "quantile"]


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

    @property
    def size(self) -> TableSize:
        """Its size, in the terms that all kinds share."""
        return TableSize(self.series, self.files, self.file_bytes, self.memory_bytes, self.runs_max)


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

    def _change_schema(self) -> pa.Schema | None:
        return None if self._options.changes is None else CHANGE_COLUMNS

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

        >>> metrics.select('cpu{host="a"}').column("value").to_pylist()
        [0.5]
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
        """Return the samples of a selector as record batches, in bounded memory.

        >>> [batch.num_rows for batch in metrics.scan_arrow("cpu")]
        [1]
        """
        return self._query("select", _query(selector, start, end), timeout_s)

    def to_arrow(self) -> pa.Table:
        """Return all samples as an Arrow table.

        >>> metrics.to_arrow().column("metric").to_pylist()
        ['cpu']
        """
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

        >>> metrics.aggregate("cpu", function="avg", by=["host"], step=60).column("value").to_pylist()
        [0.5]
        """
        query = AggregateQuery(
            *query_bounds(selector, start, end),
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

        >>> metrics.query("sum(cpu)", datetime(2024, 1, 1, tzinfo=UTC)).column("value").to_pylist()
        [0.5]
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
        """Evaluate a PromQL expression at `start` and every `step` seconds after it, up to and including `end`.

        >>> start = datetime(2024, 1, 1, tzinfo=UTC)
        >>> metrics.query_range("cpu", start, start + timedelta(seconds=60), step=30).column("value").to_pylist()
        [0.5, 0.5, 0.5]
        """
        from penstock.series.promql_source import query_budget, range_grid

        grid = range_grid(start, end, step)
        return self.evaluate(promql, grid, query_budget(samples_max, timeout_s), instant=False).to_arrow(SAMPLES)

    def evaluate(
        self,
        promql: str,
        grid: StepGrid,
        budget: QueryBudget,
        *,
        instant: bool,
        settings: EvaluationSettings | None = None,
    ) -> QueryResult:
        """Evaluate a PromQL expression; for other packages of Penstock."""
        from penstock.series.promql_source import run_promql

        return run_promql(self._reading, self._info, promql, grid, budget, instant=instant, settings=settings)

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

        >>> metrics.series("cpu").column("metric").to_pylist()
        ['cpu']
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
        """Return the names of all labels of the series of a selector, sorted; `__name__` is the metric.

        >>> metrics.labels("cpu")
        ['__name__', 'host']
        """
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
        """Return the values of a label of the series of a selector, sorted.

        >>> metrics.label_values("host", "cpu")
        ['a']
        """
        return self._texts("label_values", _query(selector, start, end, check_name(name)), timeout_s)

    def metadata(self, metric: str | None = None) -> dict[str, MetricMetadata]:
        """Return type, unit and help of metrics, of one or of all that have some, by metric.

        >>> metrics.metadata("cpu")
        {}
        """
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
        """Return how many series and label values there are; with `top`, only that many of the largest.

        >>> metrics.cardinality(top=10).metrics
        {'cpu': 1}
        """
        limit = None if top is None else whole(top, "top", 1)
        batches = self._query("cardinality", _query("{}", start, end), timeout_s)
        rows = [row for batch in batches for row in batch.to_pylist()]
        counts = {of: {row["name"]: row["count"] for row in rows if row["of"] == of} for of in ("metric", "label")}
        metrics, labels = (dict(list(counts[of].items())[:limit]) for of in ("metric", "label"))
        return Cardinality(sum(counts["metric"].values()), metrics, labels)

    def statistics(self) -> SeriesStatistics:
        """Return how many buckets and series there are, and the bytes in memory and in files.

        >>> metrics.statistics().series
        1
        """
        (row,) = [row for batch in self._query("statistics", SeriesQuery(), QUERY_S) for row in batch.to_pylist()]
        return SeriesStatistics(**row)

    def _query(self, name: str, query: SeriesQuery, timeout_s: float) -> Iterator[Any]:
        return self._reading.query(self._info, name, encode_query(query), timeout_s=timeout_s)

    def _texts(self, name: str, query: SeriesQuery, timeout_s: float) -> list[str]:
        return [text for batch in self._query(name, query, timeout_s) for text in batch.column(0).to_pylist()]


def query_bounds(selector: Any, start: Any, end: Any) -> tuple[str, int, int]:
    """Return a selector and a range of time that callers give; `Invalid` if one is wrong."""
    parse_selector(selector)
    low = TIME_MIN if start is None else moment_us(start, "start")
    high = TIME_MAX if end is None else moment_us(end, "end")
    check_range(low, high)
    return str.__str__(selector), low, high


def _query(selector: Any, start: Any, end: Any, name: str = "") -> SeriesQuery:
    return SeriesQuery(*query_bounds(selector, start, end), name)


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
