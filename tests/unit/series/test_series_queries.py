"""Queries and aggregates, on shards in memory, against plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import Invalid, WaitExpired
from penstock.series import queries
from penstock.series.aggregate import AGGREGATES, FUNCTIONS, AggregateQuery, aggregate, decode_aggregate
from penstock.series.arrow import SAMPLES
from penstock.series.blocks import RunSummaries
from penstock.series.index import Check, unchecked
from penstock.series.labels import Labels, check_labels, encode_labels
from penstock.series.options import TIME_MAX, TIME_MIN, SeriesOptions
from penstock.series.queries import SeriesQuery, check_series_query, encode_query, run_series_query, scan_samples
from penstock.series.section import STALE_BITS, MetricMetadata
from penstock.series.selectors import Matcher, parse_selector
from penstock.series.shard import SampleColumns, SeriesShard

OPTIONS = SeriesOptions(bucket_s=300)
BUCKET_US = OPTIONS.bucket_us
STALE = float(np.array([STALE_BITS], np.uint64).view(np.float64)[0])
Sample = tuple[Labels, int, float]


class MemoryShard(SeriesShard):
    """Samples in a dict: by bucket, the series in order of appearance; `read` yields few samples at a time."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.buckets: dict[int, dict[Labels, dict[int, float]]] = {}
        for labels, time, value in samples:
            self.buckets.setdefault(OPTIONS.bucket(time), {}).setdefault(labels, {})[time] = value

    def match(
        self, matchers: Sequence[Matcher], start: int, end: int, check: Check = unchecked
    ) -> list[tuple[int, Any]]:
        matches = []
        for bucket in sorted(self.buckets):
            if OPTIONS.bucket_start(bucket) < end and OPTIONS.bucket_start(bucket + 1) > start:
                ids = [
                    number
                    for number, labels in enumerate(self.buckets[bucket], start=1)
                    if all(matcher.matches(dict(labels).get(matcher.name, "")) for matcher in matchers)
                ]
                if ids:
                    matches.append((bucket, np.array(ids, np.uint32)))
        return matches

    def _labels(self, bucket: int, ids: Any) -> list[Labels]:
        label_sets = list(self.buckets[bucket])
        return [label_sets[number - 1] for number in ids.tolist()]

    def labels_of(self, bucket: int, ids: Any) -> list[bytes]:
        return list(map(encode_labels, self._labels(bucket, ids)))

    def read(self, bucket: int, ids: Any, start: int, end: int, steps: Any = None) -> Iterator[SampleColumns]:
        assert ids.tolist() == sorted(ids.tolist())
        rows = [
            (number, time, value)
            for number, labels in zip(ids.tolist(), self._labels(bucket, ids), strict=True)
            for time, value in sorted(self.buckets[bucket][labels].items())
            if start <= time < end
        ]
        for at in range(0, len(rows), 3):
            some = rows[at : at + 3]
            yield (
                np.array([row[0] for row in some], np.uint32),
                np.array([row[1] for row in some], np.int64),
                np.array([row[2] for row in some], np.float64).view(np.uint64),
            )

    def read_summarized(
        self, bucket: int, ids: Any, start: int, end: int, step_us: int
    ) -> Iterator[tuple[SampleColumns, RunSummaries]]:
        """Summarize the steps of every other series."""
        summed: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for columns in self.read(bucket, ids, start, end):
            whole = np.zeros(len(columns[0]), np.bool_)
            for row, (number, time, bits) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
                value = float(np.array([bits], np.uint64).view(np.float64)[0])
                if number % 2 and not math.isnan(value):
                    whole[row] = True
                    summed.setdefault((number, time // step_us if step_us else 0), []).append((time, value))
            rest = columns[0][~whole], columns[1][~whole], columns[2][~whole]
            yield rest, RunSummaries(*(np.zeros(0) for _ in RunSummaries._fields))
        runs = [
            (number, len(some), some[-1][0], sum(v for _, v in some), min(v for _, v in some), max(v for _, v in some))
            for (number, _), some in summed.items()
        ]
        lasts = np.array([some[-1][1] for some in summed.values()]).view(np.uint64)
        table: Any = [np.array(column) for column in zip(*runs, strict=True)] or [np.zeros(0)] * 6
        types: Any = (np.uint32, np.uint32, np.int64, np.float64, np.float64, np.float64)
        nothing = np.zeros(0, np.uint32), np.zeros(0, np.int64), np.zeros(0, np.uint64)
        summaries: Any = [*(column.astype(kind) for column, kind in zip(table, types, strict=True)), lasts]
        yield nothing, RunSummaries(*summaries)

    def statistics(self) -> dict[str, int]:
        return {"memory_bytes": 5, "files": 2, "file_bytes": 7, "runs": 3}

    def _matching(self, matchers: Sequence[Matcher], start: int, end: int) -> Iterator[Labels]:
        for bucket, ids in self.match(matchers, start, end):
            yield from self._labels(bucket, ids)

    def label_names(self, matchers: Sequence[Matcher], start: int, end: int, check: Check = unchecked) -> Iterable[str]:
        return {name for labels in self._matching(matchers, start, end) for name, _ in labels}

    def label_values(
        self, name: str, matchers: Sequence[Matcher], start: int, end: int, check: Check = unchecked
    ) -> Iterable[str]:
        return {dict(labels)[name] for labels in self._matching(matchers, start, end) if name in dict(labels)}

    def label_codes(self, bucket: int, name: str, ids: Any, check: Check = unchecked) -> tuple[list[str], Any]:
        by_id = [dict(labels).get(name, "") for labels in self._labels(bucket, ids)]
        values = sorted({"", *by_id})
        return values, np.array([values.index(value) for value in by_id], np.int64)

    def metadata(self) -> Iterable[MetricMetadata]:
        return [MetricMetadata("mem", "gauge"), MetricMetadata("cpu", "counter", "s", "help")]

    def metric_counts(self, start: int, end: int, check: Check = unchecked) -> Iterable[tuple[int, str, int]]:
        for bucket, ids in self.match((), start, end):
            metrics = [labels[0][1] for labels in self._labels(bucket, ids)]
            yield from ((bucket, metric, metrics.count(metric)) for metric in set(metrics))

    def scan_arrow(self, start: bytes, end: bytes | None) -> Iterator[Any]:
        return iter(())

    def close(self) -> None: ...


class Context:
    lsn = time_us = 0

    def check(self) -> None: ...


SERIES = [
    check_labels("cpu", {"host": "a", "dc": "x"}),
    check_labels("cpu", {"host": "b", "dc": "x"}),
    check_labels("cpu", {"host": "a"}),
    check_labels("mem", {"host": "a", "dc": "y"}),
]
VALUES = st.sampled_from([0.0, -1.5, 1.0, 2.0, 3.25, math.inf, math.nan, STALE])
LISTS = st.lists(st.tuples(st.sampled_from(SERIES), st.integers(-2 * BUCKET_US, 2 * BUCKET_US), VALUES), max_size=40)
RANGES = st.tuples(st.integers(-2 * BUCKET_US, 2 * BUCKET_US), st.integers(0, 4 * BUCKET_US)).map(
    lambda pair: (pair[0], pair[0] + pair[1])
)
SELECTORS = st.sampled_from(["{}", "cpu", 'cpu{host="a"}', '{dc=~"x|y"}', '{dc=""}', '{host!="a"}', "none"])


def shards_of(samples: list[Sample], count: int) -> list[SeriesShard]:
    return [MemoryShard(s for s in samples if SERIES.index(s[0]) % count == shard) for shard in range(count)]


def expected(samples: list[Sample], selector: str, start: int, end: int) -> dict[Labels, list[tuple[int, float]]]:
    matchers = parse_selector(selector)
    by_series: dict[Labels, dict[int, float]] = {}
    for labels, time, value in samples:
        if start <= time < end and all(m.matches(dict(labels).get(m.name, "")) for m in matchers):
            by_series.setdefault(labels, {})[time] = value
    return {labels: sorted(by_time.items()) for labels, by_time in by_series.items()}


def run(name: str, query: SeriesQuery, shards: Sequence[SeriesShard]) -> list[dict[str, Any]]:
    argument = encode_query(query)
    check_series_query(name, argument)
    return [row for batch in run_series_query(name, argument, shards, Context()) for row in batch.to_pylist()]


def bits(value: float) -> int:
    return int(np.array([value]).view(np.uint64)[0])


@given(LISTS, SELECTORS, RANGES, st.integers(1, 3), st.sampled_from([1, 64]))
@settings(max_examples=100, deadline=None)
def test_select(samples: list[Sample], selector: str, bounds: tuple[int, int], shards: int, slice_series: int) -> None:
    before, queries.SLICE_SERIES = queries.SLICE_SERIES, slice_series
    try:
        query = SeriesQuery(selector, *bounds)
        batches = list(run_series_query("select", encode_query(query), shards_of(samples, shards), Context()))
    finally:
        queries.SLICE_SERIES = before
    table = pa.Table.from_batches(batches, SAMPLES)
    by_series: dict[Labels, list[tuple[int, int]]] = {}
    last: Labels | None = None
    values = table.column("value").to_numpy().view(np.uint64).tolist() if table.num_rows else []
    times = table.column("time").cast(pa.int64()).to_pylist()
    for metric, pairs, time, value in zip(
        table.column("metric").to_pylist(), table.column("labels").to_pylist(), times, values, strict=True
    ):
        labels = check_labels(metric, dict(pairs))
        assert labels == last or labels not in by_series, "the samples of one series follow each other"
        by_series.setdefault(labels, []).append((time, value))
        last = labels
    expected_rows = expected(samples, selector, *bounds)
    assert by_series == {
        labels: [(time, bits(value)) for time, value in rows] for labels, rows in expected_rows.items()
    }


@given(LISTS, RANGES)
@settings(max_examples=30, deadline=None)
def test_a_scan_has_all_samples(samples: list[Sample], bounds: tuple[int, int]) -> None:
    rows = [row for batch in scan_samples(MemoryShard(samples), *bounds) for row in batch.to_pylist()]
    assert len(rows) == sum(map(len, expected(samples, "{}", *bounds).values()))


def reduced(function: str, rows: dict[Labels, list[tuple[int, float]]], step: int, quantile: float) -> Any:
    """The samples of one group and step, by series; returns None if there is no result."""
    values = [value for some in rows.values() for _, value in some]
    if function == "count":
        return float(len(values))
    if function == "sum":
        return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
    if function == "avg":
        return sum(values) / len(values)
    if function in ("min", "max"):
        numbers = [value for value in values if not math.isnan(value)]
        return (min if function == "min" else max)(numbers) if numbers else math.nan
    if function == "last":
        latest = max(time for some in rows.values() for time, _ in some)
        return [value for some in rows.values() for time, value in some if time == latest]
    return float(np.quantile(np.array(values), quantile))


@given(
    LISTS,
    RANGES,
    st.sampled_from(FUNCTIONS),
    st.sampled_from([(), ("dc",), ("host", "__name__")]),
    st.sampled_from([0, 7_000_000, BUCKET_US * 2]),
    st.sampled_from([0.0, 0.5, 0.99]),
)
@settings(max_examples=200, deadline=None)
def test_aggregates(
    samples: list[Sample], bounds: tuple[int, int], function: str, by: tuple[str, ...], step: int, quantile: float
) -> None:
    if function == "rate" and not step:
        step = 60_000_000
    if function == "quantile":
        samples = [sample for sample in samples if math.isfinite(sample[2])]
    query = AggregateQuery("{}", *bounds, by=by, step_us=step, function=function, quantile=quantile)
    query = decode_aggregate(encode_query(query))
    batches = list(aggregate(query, shards_of(samples, 2), Context()))
    table = pa.Table.from_batches(batches, AGGREGATES)
    rows = zip(
        table.column("labels").to_pylist(),
        table.column("time").cast(pa.int64()).to_pylist(),
        table.column("value").to_pylist(),
        strict=True,
    )
    values = {(tuple(sorted(pairs)), time): value for pairs, time, value in rows}
    assert len(values) == table.num_rows
    assert list(values) == sorted(values, key=lambda key: ([dict(key[0]).get(name, "") for name in by], key[1] or 0))

    groups: dict[Any, dict[Labels, list[tuple[int, float]]]] = {}
    rises: dict[Any, float] = {}
    for labels, some in expected(samples, "{}", *bounds).items():
        group = tuple(sorted((name, value) for name, value in labels if name in by))
        some = [(time, value) for time, value in some if bits(value) != STALE_BITS]
        for position, (time, value) in enumerate(some):
            key = group, time // step * step if step else None
            groups.setdefault(key, {}).setdefault(labels, []).append((time, value))
            if position:
                rise = value if value < some[position - 1][1] else value - some[position - 1][1]  # NaN is no reset
                rises[key] = rises.get(key, 0.0) + rise
    if function in ("rate", "increase"):
        results: dict[Any, Any] = {key: v / (step / 1e6) if function == "rate" else v for key, v in rises.items()}
    else:
        results = {key: reduced(function, some, step, quantile) for key, some in groups.items()}
    assert values.keys() == results.keys()
    for key, result in results.items():
        choices = result if isinstance(result, list) else [result]
        assert any(
            values[key] == pytest.approx(choice, rel=1e-9, abs=1e-9, nan_ok=True) or values[key] == choice
            for choice in choices
        ), (key, values[key], choices)


def test_labels_values_series_metadata_and_cardinality() -> None:
    samples = [(labels, time, 1.0) for labels in SERIES for time in (0, BUCKET_US)]
    samples.append((check_labels("cpu", {"host": "new"}), BUCKET_US, 1.0))
    for shards in (shards_of(samples[:-1], 2), [MemoryShard(samples)]):
        assert [row["name"] for row in run("label_names", SeriesQuery(), shards)] == ["__name__", "dc", "host"]
        assert [row["name"] for row in run("label_names", SeriesQuery('cpu{dc=""}', end=1), shards)] == [
            "__name__",
            "host",
        ]
    shards = [MemoryShard(samples)]
    assert [row["name"] for row in run("label_values", SeriesQuery("cpu", name="host"), shards)] == ["a", "b", "new"]
    assert [row["name"] for row in run("label_values", SeriesQuery(end=1, name="host"), shards)] == ["a", "b"]
    rows = run("series", SeriesQuery("cpu"), shards)
    assert [(row["metric"], dict(row["labels"])) for row in rows] == [
        ("cpu", {"host": "a", "dc": "x"}),
        ("cpu", {"host": "b", "dc": "x"}),
        ("cpu", {"host": "a"}),
        ("cpu", {"host": "new"}),
    ]
    assert [row["metric"] for row in run("metadata", SeriesQuery(), shards)] == ["cpu", "mem"]
    assert run("metadata", SeriesQuery(name="cpu"), shards) == [
        {"metric": "cpu", "type": "counter", "unit": "s", "help": "help"}
    ]
    counts = {(row["of"], row["name"]): row["count"] for row in run("cardinality", SeriesQuery(), shards)}
    assert counts == {
        ("metric", "cpu"): 4,
        ("metric", "mem"): 1,
        ("label", "host"): 3,
        ("label", "__name__"): 2,
        ("label", "dc"): 2,
    }


def test_one_shard_may_be_asked_alone() -> None:
    shards = shards_of([(labels, 0, 1.0) for labels in SERIES], 2)
    assert [len(run("select", SeriesQuery(shard=shard), shards)) for shard in (0, 1, 7)] == [2, 2, 0]


def test_a_query_checks_its_deadline() -> None:
    class Hurried:
        lsn = time_us = 0

        def check(self) -> None:
            raise WaitExpired("too late")

    for name in ("select", "series", "label_names", "label_values", "metadata", "cardinality"):
        argument = encode_query(SeriesQuery(name="host"))
        with pytest.raises(WaitExpired):
            list(run_series_query(name, argument, [MemoryShard([(SERIES[0], 0, 1.0)])], Hurried()))


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("nothing", SeriesQuery()),
        ("select", SeriesQuery("cpu{")),
        ("select", SeriesQuery(start=2, end=1)),
        ("select", SeriesQuery(start=TIME_MIN - 1)),
        ("select", SeriesQuery(end=TIME_MAX + 1)),
        ("label_values", SeriesQuery()),
    ],
)
def test_wrong_queries(name: str, query: SeriesQuery) -> None:
    with pytest.raises(Invalid):
        check_series_query(name, encode_query(query))


@pytest.mark.parametrize(
    "query",
    [
        AggregateQuery("cpu{"),
        AggregateQuery("cpu", function="median"),
        AggregateQuery("cpu", by=("a", "a")),
        AggregateQuery("cpu", by=("",)),
        AggregateQuery("cpu", step_us=-1),
        AggregateQuery("cpu", function="rate"),
        AggregateQuery("cpu", quantile=math.nan),
        AggregateQuery("cpu", start=1, end=0),
    ],
)
def test_wrong_aggregates(query: AggregateQuery) -> None:
    with pytest.raises(Invalid):
        decode_aggregate(encode_query(query))
    with pytest.raises(Invalid):
        decode_aggregate(b"\xc1")
