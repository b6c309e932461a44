"""Very many names of labels, buckets of time, results and matches: memory and time stay bounded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from series_under_test import SeriesUnderTest, block, labels

import penstock
from penstock.errors import Invalid, WaitExpired
from penstock.journal.partitions import partition_id
from penstock.series import aggregate, arrow, ids, section
from penstock.series.ids import BucketIds
from penstock.series.labels import LabelTable, check_labels
from penstock.series.memtable import SeriesMemtable
from penstock.series.options import TIME_MAX, TIME_MIN, SeriesOptions
from penstock.series.section import SampleBlock, SeriesKey, SeriesSection
from penstock.series.selectors import parse_selector

T0 = 1_700_000_000_000_000
P = partition_id(1, 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    with penstock.open(tmp_path / "store", settings=penstock.StoreSettings(background=False)) as opened:
        yield opened


# -- names of labels


def test_single_samples_with_many_names_become_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As columns of all names, the labels of n series with a name of their own would take n x n."""
    monkeypatch.setattr(section, "CODES_MAX", 500)
    keys = [SeriesKey(check_labels("m", {f"name{n}": "x"}), P) for n in range(300)]
    written = SeriesSection()
    written.log.extend((keys[n % 300], T0 + n, float(n)) for n in range(700))
    samples = []
    for part in written.parts:
        assert isinstance(part, SampleBlock)
        assert part.series.codes.size <= 500
        samples += [
            (part.series.labels(row), time) for row, time in zip(part.index.tolist(), part.times.tolist(), strict=True)
        ]
    assert samples == [(keys[n % 300].labels, T0 + n) for n in range(700)]  # in the order of writing


def test_a_batch_of_many_names(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section, "CODES_MAX", 1_000)
    metrics = store.series("metrics", shards=2)
    with store.batch() as batch:
        for n in range(400):
            batch.series("metrics").write("m", float(n), {f"name{n}": "x"}, time=T0)
    assert len(metrics.labels()) == 401
    assert metrics.select('{name77="x"}').column("value").to_pylist() == [77.0]
    assert metrics.cardinality().series == 400


def test_a_remembered_series_takes_memory_for_its_own_labels_only() -> None:
    bucket = BucketIds(0)
    sets = [check_labels("m", {f"name{n}": "x", f"name{n + 1}": "y"}) for n in range(2_000)]
    tables = [LabelTable.of(sets[at : at + 100]) for at in range(0, 2_000, 100)]
    coded = [row for table in tables for row in bucket.code_rows(table, np.arange(len(table)))]
    assert len(set(coded)) == 2_000
    assert {len(row) for row in coded} == {4 * (1 + 3)}
    assert [row for table in tables for row in bucket.known_rows(table)] == coded
    unknown = LabelTable.of(
        [check_labels("m", {"name3": "x"}), check_labels("m", {"name3": "z", "name4": "y"}), sets[7]]
    )
    assert bucket.known_rows(unknown) == [None, None, coded[7]]


SETS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("xyz"), max_size=6).map(
    lambda some: check_labels("m", some)
)


@settings(max_examples=50)
@given(st.lists(st.lists(SETS, min_size=1, unique=True), min_size=1, max_size=5))
def test_code_rows_are_equal_where_labels_are(tables: list[list[Any]]) -> None:
    bucket, row_of = BucketIds(0), dict[Any, bytes]()
    for some in tables:
        table = LabelTable.of(some)
        for label_set, row in zip(some, bucket.known_rows(table), strict=True):
            assert row is None or row_of.get(label_set, row) == row
        for label_set, row in zip(some, bucket.code_rows(table, np.arange(len(table))), strict=True):
            assert row_of.setdefault(label_set, row) == row
    assert len(set(row_of.values())) == len(row_of)


def test_rows_with_too_many_names_are_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = pa.array([[(f"name{n}", "x")] for n in range(100)], pa.map_(pa.string(), pa.string()))
    rows = pa.table({"metric": ["m"] * 100, "labels": maps, "time": [T0] * 100, "value": np.zeros(100)})
    metrics = store.series("metrics")
    monkeypatch.setattr(arrow, "CODES_MAX", 5_000)
    with pytest.raises(Invalid, match="100 rows have 100 names of labels: write fewer rows at once"):
        metrics.write_arrow(rows)
    metrics.write_arrow(rows.slice(0, 60))
    assert len(metrics.labels()) == 61


# -- buckets


@given(st.lists(st.integers(-(10**10), 10**10), min_size=1))
def test_times_are_divided_by_bucket(times: list[int]) -> None:
    options = SeriesOptions(bucket_s=300)
    column = np.array(times, np.int64)
    by_bucket = [(bucket, column[positions].tolist()) for bucket, positions in options.by_bucket(column)]
    expected: dict[int, list[int]] = {}
    for time in times:
        expected.setdefault(options.bucket(time), []).append(time)
    assert by_bucket == sorted(expected.items())


def test_buckets_that_are_remembered_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "BUCKETS_REMEMBERED_MAX", 5)
    shard = SeriesUnderTest()
    samples = [(labels("m", host=host), bucket * 300_000_000, bucket) for bucket in range(20) for host in "ab"]
    for _ in range(2):
        shard.write(block(samples))
        shard.write(*(block([sample]) for sample in samples))
        assert len(shard.machine._ids._buckets) <= 5
    assert shard.select() == {(some, time): bits for some, time, bits in samples}
    assert len(shard.listed()) == 40
    shard.close()


def test_a_memtable_finds_the_samples_of_a_bucket_among_many() -> None:
    """By one pass over all of them, and not by one for each bucket."""
    shard = SeriesUnderTest()
    samples = [(labels("m"), bucket * 300_000_000, bucket) for bucket in range(500)]
    shard.write(block(samples))
    shard.write(block([(some, time + 1, bits) for some, time, bits in samples[::2]]))
    expected = {(some, time): bits for some, time, bits in samples}
    expected |= {(some, time + 1): bits for some, time, bits in samples[::2]}
    assert shard.select() == expected
    state = shard.machine.snapshot()
    for memtable in state._view.memtables():
        assert isinstance(memtable, SeriesMemtable)
        assert memtable.buckets() == sorted(memtable._grouped or ())
        assert not memtable._parts
    state.close()
    shard.close()


# -- queries


@pytest.mark.parametrize("fold_runs", [0, 7, 1 << 20])
def test_an_aggregate_has_a_bound(store: Any, monkeypatch: pytest.MonkeyPatch, fold_runs: int) -> None:
    monkeypatch.setattr(aggregate, "FOLD_RUNS", fold_runs)
    monkeypatch.setattr(aggregate, "RESULTS_MAX", 50)
    metrics = store.series("metrics")
    for host in "ab":
        metrics.write_columns("m", np.arange(100.0), {"host": host}, times=T0 + 1_000_000 * np.arange(100))
    for function in ("sum", "increase"):
        with pytest.raises(Invalid, match=r"at most 50 results: give a longer step"):
            metrics.aggregate("m", function=function, step=1e-6)
    totals = metrics.aggregate("m", function="sum", step=2)
    assert totals.column("value").to_pylist() == [2.0 * (n + n + 1) for n in range(0, 100, 2)]


@pytest.mark.parametrize("selector", ['{n=~".*7"}', '{n!~".*7"}', '{n=~".+"}', "{}"])
def test_matching_checks_the_deadline(selector: str) -> None:
    """A regular expression may take milliseconds for a value: a query that is out of time must not test them all."""
    shard = SeriesUnderTest()
    shard.write(block([(labels("m", n=str(n)), n * 60_000_000, n) for n in range(200)]))
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > 10:
            raise WaitExpired("too late")

    state = shard.machine.snapshot()
    matchers = parse_selector(selector)
    for query in (
        lambda: state.match(matchers, TIME_MIN, TIME_MAX, check),
        lambda: state.label_names(matchers, TIME_MIN, TIME_MAX, check),
        lambda: state.label_values("n", matchers, TIME_MIN, TIME_MAX, check),
        lambda: list(state.metric_counts(TIME_MIN, TIME_MAX, check)),
    ):
        calls = 0
        with pytest.raises(WaitExpired):
            query()
    state.close()
    shard.close()
