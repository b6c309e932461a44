"""The queries of a series table: their requests, and their answers as record batches.

    select         samples of a selector: metric, labels, time, value
    runs           the same, with the labels of a series only where its samples begin
    series         label sets of a selector: metric, labels
    label_names    names of labels
    label_values   values of one label
    metadata       type, unit and help of metrics
    cardinality    series of each metric, values of each label
    statistics     where the samples of each shard are, and the series of each bucket
    aggregate      see `aggregate`

A series that has samples in several buckets is put together again by its labels, in slices of few series, so that
memory stays bounded however many match. The samples of one series alone are streamed bucket by bucket.

Thread: the reader's.
Invariant: the samples of one series follow each other in the order of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arguments import in_short
from penstock.errors import Invalid
from penstock.kinds import QueryContext
from penstock.series.arrow import RUNS, SAMPLES, SERIES, LabelColumns, run_batch, sample_batches, series_batches
from penstock.series.labels import U32, U64, check_name
from penstock.series.options import TIME_MAX, TIME_MIN
from penstock.series.samples import I64, SampleSteps
from penstock.series.section import MetricMetadata
from penstock.series.selectors import Matcher, parse_selector
from penstock.series.shard import SeriesShard

SLICE_SAMPLES = 1 << 18  # samples of several buckets that are put together at once, about
JOINED_SAMPLES = 65_536  # of one series, from several buckets
SLICE_SERIES = 64  # of the first slice, divided by the number of buckets
ALL_SHARDS = -1
TIME_LIMIT = 1 << 62  # of computed times: their differences fit into 64 bits
NAMES = pa.schema([pa.field("name", pa.string(), nullable=False)])
METADATA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in ("metric", "type", "unit", "help")])
CARDINALITY = pa.schema(
    [
        pa.field("of", pa.string(), nullable=False),  # metric: series of a metric; label: values of a label
        pa.field("name", pa.string(), nullable=False),
        pa.field("count", pa.int64(), nullable=False),
    ]
)


STATISTICS = pa.schema(
    [
        pa.field(name, pa.int64(), nullable=False)
        for name in ("shards", "buckets", "series", "memory_bytes", "files", "file_bytes", "runs_max")
    ]
)


class SeriesQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The argument of every query but `aggregate`."""

    selector: str = "{}"
    start: int = TIME_MIN
    end: int = TIME_MAX
    name: str = ""  # of a label (label_values) or of a metric (metadata)
    shard: int = ALL_SHARDS
    steps_from: int = 0  # with `step` above 0, of `runs`: samples that are not the last before a step may be left out
    step: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(SeriesQuery)


def encode_query(query: msgspec.Struct) -> bytes:
    """Encode the argument of a query."""
    return _encode(query)


def decode_query(argument: bytes) -> SeriesQuery:
    """Decode and check the argument of a query; `Invalid` if it is malformed."""
    try:
        query = _decoder.decode(argument)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"the argument of a query does not decode: {error}") from None
    parse_selector(query.selector)
    check_range(query.start, query.end)
    if query.step < 0 or not -TIME_LIMIT < query.steps_from < TIME_LIMIT:
        raise Invalid(f"the steps of a query are not from {query.steps_from} by {query.step}")
    return query


def check_range(start: int, end: int) -> None:
    """Raise `Invalid` if a range of time runs downwards or is outside the times of a table."""
    if not TIME_MIN <= start <= end <= TIME_MAX:
        raise Invalid(f"a range of time runs upwards within the years 1 to 9999, not from {start} to {end}")


def check_series_query(name: str, argument: bytes) -> None:
    """Raise `Invalid` if there is no such query, or its argument is malformed."""
    if name not in QUERIES:
        raise Invalid(f"a series table has no query {in_short(name)}: use one of {', '.join(QUERIES)}, aggregate")
    query = decode_query(argument)
    if name == "label_values":
        check_name(query.name)


def run_series_query(name: str, argument: bytes, shards: Sequence[SeriesShard], context: QueryContext) -> Iterator[Any]:
    """Return the record batches of a query. Requires: `check_series_query` has passed."""
    query = decode_query(argument)
    if query.shard != ALL_SHARDS:
        shards = shards[query.shard : query.shard + 1]
    return QUERIES[name](query, parse_selector(query.selector), shards, context)


# -- samples


class Slice(msgspec.Struct, frozen=True):
    """Samples of some series, ordered by series and time."""

    rows: npt.NDArray[np.intp]  # for each sample, the number of its series
    times: I64
    bits: U64


class SelectedSeries:
    """The series of one shard that match, and their samples."""

    def __init__(
        self,
        shard: SeriesShard,
        matchers: Sequence[Matcher],
        start: int,
        end: int,
        context: QueryContext,
        *,
        steps: SampleSteps | None = None,
    ) -> None:
        self._shard = shard
        self._steps = steps
        self._start, self._end = start, end
        self._buckets: list[tuple[int, Any, npt.NDArray[np.intp]]] = []  # number, ids, the row of each id
        row_of: dict[bytes, int] = {}
        matched = shard.match(matchers, start, end, context.check) if start < end else []
        for bucket, ids in matched:
            context.check()
            labels = shard.labels_of(bucket, ids)
            if len(matched) == 1:
                self.labels = labels
                rows = np.arange(len(ids))
            else:
                rows = np.fromiter(
                    (row_of.setdefault(label_set, len(row_of)) for label_set in labels), np.intp, len(labels)
                )
            self._buckets.append((bucket, ids, rows))
        if len(matched) != 1:
            self.labels = list(row_of)

    def slices(self, context: QueryContext) -> Iterator[Slice]:
        """Yield all samples; those of one series follow each other."""
        if len(self._buckets) == 1:
            bucket, ids, _ = self._buckets[0]
            yield from self._read(bucket, ids, np.arange(len(ids)), context)
            return
        low, size = 0, max(1, SLICE_SERIES // max(1, len(self._buckets)))
        while low < len(self.labels):
            high = min(low + size, len(self.labels))
            count = 0
            for samples in self._joined(low, high, context):
                count += len(samples.times)
                yield samples
            # The next slice has about SLICE_SAMPLES samples, if its series are like these.
            size = min(8 * size, max(1, SLICE_SAMPLES * (high - low) // max(1, count)))
            low = high

    def _joined(self, low: int, high: int, context: QueryContext) -> Iterator[Slice]:
        """Yield the samples of the series from `low` to `high`, over all buckets."""
        parts: list[Slice] = []
        count = 0
        for bucket, ids, rows in self._buckets:
            positions = np.flatnonzero((rows >= low) & (rows < high))
            if not len(positions):
                continue
            for part in self._read(bucket, ids[positions], rows[positions], context):
                parts.append(part)
                count += len(part.times)
                if high - low == 1 and count >= JOINED_SAMPLES:
                    yield _in_order(parts)  # buckets ascend in time: nothing that comes belongs before
                    parts, count = [], 0
        if parts:
            yield _in_order(parts)

    def _read(self, bucket: int, ids: Any, rows: npt.NDArray[np.intp], context: QueryContext) -> Iterator[Slice]:
        context.check()
        for sample_ids, times, bits in self._shard.read(bucket, ids, self._start, self._end, self._steps):
            context.check()
            if len(times):
                yield Slice(rows[positions_of(ids, sample_ids)], times, bits)


def _in_order(parts: Sequence[Slice]) -> Slice:
    """Return parts of which the times ascend as one, ordered by series."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([part.rows for part in parts])
    order = np.argsort(rows, kind="stable")
    times, bits = (np.concatenate([getattr(part, name) for part in parts])[order] for name in ("times", "bits"))
    return Slice(rows[order], times, bits)


def positions_of(ids: U32, sample_ids: U32) -> npt.NDArray[np.intp]:
    """Return the position of each of `sample_ids` among ascending ids, which hold all of them."""
    if int(ids[-1]) - int(ids[0]) + 1 == len(ids):
        return sample_ids.astype(np.intp) - int(ids[0])
    if not len(sample_ids):
        return np.zeros(0, np.intp)
    starts = np.flatnonzero(np.append(True, sample_ids[1:] != sample_ids[:-1]))  # of one series: side by side
    return np.repeat(np.searchsorted(ids, sample_ids[starts]), np.diff(starts, append=len(sample_ids)))


def _select(
    query: SeriesQuery, matchers: Sequence[Matcher], shards: Sequence[SeriesShard], context: QueryContext
) -> Iterator[Any]:
    for shard in shards:
        selected = SelectedSeries(shard, matchers, query.start, query.end, context)
        labels = LabelColumns(selected.labels)
        for samples in selected.slices(context):
            yield from sample_batches(labels, samples.rows, samples.times, samples.bits)


def _runs(
    query: SeriesQuery, matchers: Sequence[Matcher], shards: Sequence[SeriesShard], context: QueryContext
) -> Iterator[Any]:
    steps = SampleSteps(query.steps_from, query.step) if query.step else None
    for shard in shards:
        selected = SelectedSeries(shard, matchers, query.start, query.end, context, steps=steps)
        for samples in selected.slices(context):
            yield run_batch(selected.labels, samples.rows, samples.times, samples.bits)


def scan_samples(shard: SeriesShard, start: int, end: int, columns: Collection[str] | None = None) -> Iterator[Any]:
    """Yield record batches of all samples in a range, with some columns, ordered by bucket, series and time."""
    schema = SAMPLES if columns is None else pa.schema([field for field in SAMPLES if field.name in columns])
    for bucket, ids in shard.match((), start, end) if start < end else ():
        labels = LabelColumns(shard.labels_of(bucket, ids))
        for sample_ids, times, bits in shard.read(bucket, ids, start, end):
            if len(times):
                yield from sample_batches(labels, positions_of(ids, sample_ids), times, bits, schema)


# -- labels


def _series(
    query: SeriesQuery, matchers: Sequence[Matcher], shards: Sequence[SeriesShard], context: QueryContext
) -> Iterator[Any]:
    for shard in shards:
        context.check()
        selected = SelectedSeries(shard, matchers, query.start, query.end, context)
        for batch in series_batches(LabelColumns(selected.labels)):
            context.check()
            yield batch


def _label_names(
    query: SeriesQuery, matchers: Sequence[Matcher], shards: Sequence[SeriesShard], context: QueryContext
) -> Iterator[Any]:
    names: set[str] = set()
    for shard in shards:
        context.check()
        names.update(shard.label_names(matchers, query.start, query.end, context.check))
    yield pa.record_batch([sorted(names)], schema=NAMES)


def _label_values(
    query: SeriesQuery, matchers: Sequence[Matcher], shards: Sequence[SeriesShard], context: QueryContext
) -> Iterator[Any]:
    values: set[str] = set()
    for shard in shards:
        context.check()
        values.update(shard.label_values(query.name, matchers, query.start, query.end, context.check))
    yield pa.record_batch([sorted(values)], schema=NAMES)


def _metadata(
    query: SeriesQuery, matchers: Sequence[Matcher], shards: Sequence[SeriesShard], context: QueryContext
) -> Iterator[Any]:
    by_metric: dict[str, MetricMetadata] = {}
    for shard in shards:
        context.check()
        for metadata in shard.metadata():
            if query.name in ("", metadata.metric):
                by_metric[metadata.metric] = metadata
    rows = [by_metric[metric] for metric in sorted(by_metric)]
    columns = [[getattr(row, name) for row in rows] for name in METADATA.names]
    yield pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=METADATA)


def _cardinality(
    query: SeriesQuery, matchers: Sequence[Matcher], shards: Sequence[SeriesShard], context: QueryContext
) -> Iterator[Any]:
    by_bucket: Counter[tuple[int, str]] = Counter()
    names: set[str] = set()
    for shard in shards:
        context.check()
        for bucket, metric, count in shard.metric_counts(query.start, query.end, context.check):
            by_bucket[bucket, metric] += count
        names.update(shard.label_names((), query.start, query.end, context.check))
    metrics: dict[str, int] = {}
    for (_, metric), count in by_bucket.items():
        metrics[metric] = max(count, metrics.get(metric, 0))
    labels: dict[str, int] = {}
    for name in names:
        value_sets = (shard.label_values(name, (), query.start, query.end, context.check) for shard in shards)
        labels[name] = len(set().union(*value_sets))
    rows = [("metric", *item) for item in _most(metrics)] + [("label", *item) for item in _most(labels)]
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, CARDINALITY, strict=True)]
    yield pa.record_batch(arrays, schema=CARDINALITY)


def _statistics(
    query: SeriesQuery, matchers: Sequence[Matcher], shards: Sequence[SeriesShard], context: QueryContext
) -> Iterator[Any]:
    by_bucket: Counter[int] = Counter()
    by_shard: list[dict[str, int]] = []
    for shard in shards:
        context.check()
        for bucket, _, count in shard.metric_counts(query.start, query.end, context.check):
            by_bucket[bucket] += count
        by_shard.append(shard.statistics())
    numbers = {name: sum(each[name] for each in by_shard) for name in ("memory_bytes", "files", "file_bytes")}
    numbers |= {"shards": len(shards), "buckets": len(by_bucket), "series": max(by_bucket.values(), default=0)}
    numbers["runs_max"] = max((each["runs"] for each in by_shard), default=0)
    yield pa.record_batch([pa.array([numbers[name]], pa.int64()) for name in STATISTICS.names], schema=STATISTICS)


def _most(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


_Answer = Callable[[SeriesQuery, Sequence[Matcher], Sequence[SeriesShard], QueryContext], Iterator[Any]]
QUERIES: dict[str, _Answer] = {
    "select": _select,
    "runs": _runs,
    "series": _series,
    "label_names": _label_names,
    "label_values": _label_values,
    "metadata": _metadata,
    "cardinality": _cardinality,
    "statistics": _statistics,
}
SCHEMAS = {
    "select": SAMPLES,
    "runs": RUNS,
    "series": SERIES,
    "label_names": NAMES,
    "label_values": NAMES,
    "metadata": METADATA,
    "cardinality": CARDINALITY,
    "statistics": STATISTICS,
}
