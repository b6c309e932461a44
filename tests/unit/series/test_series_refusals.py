"""What a series table refuses, in one line and without effect, and odd input that it takes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import penstock
from penstock.errors import Invalid
from penstock.series.selectors import parse_selector

EAST, WEST = (timezone(timedelta(hours=hours)) for hours in (14, -14))
VIEW = pa.string_view()


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[Any]:
    with penstock.open(tmp_path / "store") as store:
        table = store.series("metrics", options=penstock.SeriesOptions(future_s=None))
        table.write("cpu", 1.0, {"host": "a"}, time=1)
        table.write_arrow(pa.table({"time": [2], "value": [2.0]}), metric="mem")
        yield table


def refused(metrics: Any, act: Any) -> None:
    before = metrics.to_arrow()
    with pytest.raises(Invalid) as error:
        act()
    assert "\n" not in str(error.value)
    assert metrics.to_arrow().equals(before)
    metrics.write("after", 1.0, time=3, durable=True)


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(np.array([[1, 2], [3, 4]], "datetime64[us]"), id="two dimensions"),
        pytest.param(np.datetime64(1, "us"), id="one datetime"),
        pytest.param(np.array([1, (1 << 64) // 1_000_000 + 5], "datetime64[s]"), id="wraps to a time of 1970"),
        pytest.param(np.array([0, 584_554], "datetime64[Y]"), id="wraps from years"),
        pytest.param([datetime(2020, 1, 1, tzinfo=UTC), None], id="none"),
        pytest.param([datetime(2020, 1, 1, tzinfo=UTC), pd.NaT], id="NaT"),
        pytest.param([datetime(2020, 1, 1, tzinfo=UTC), datetime(2020, 1, 1)], id="without a zone"),
        pytest.param([datetime(1, 1, 1, tzinfo=EAST)] * 2, id="before the year 1"),
    ],
)
def test_wrong_times_of_columns(metrics: Any, times: Any) -> None:
    refused(metrics, lambda: metrics.write_columns("cpu", [1.0, 2.0], times=times))


@pytest.mark.parametrize("time", [datetime(1, 1, 1, tzinfo=EAST), datetime(9999, 12, 31, 23, tzinfo=WEST)])
def test_a_zone_that_moves_a_time_out_of_the_years(metrics: Any, time: datetime) -> None:
    refused(metrics, lambda: metrics.write("cpu", 1.0, time=time))
    refused(metrics, lambda: metrics.select("cpu", time))


def test_times_of_pandas_keep_their_zone(metrics: Any) -> None:
    times = pd.date_range("2020-01-01", periods=2, tz="Asia/Tokyo")
    metrics.write_columns("zones", [1.0, 2.0], times=times)
    metrics.write_columns("zones", [3.0], times=pd.Series(times[:1]))
    expected = [time.to_pydatetime().astimezone(UTC) for time in times]
    assert metrics.select("zones").column("time").to_pylist() == expected
    assert metrics.select("zones").column("value").to_pylist() == [3.0, 2.0]


def test_a_metric_that_looks_like_a_series_of_the_cache(metrics: Any) -> None:
    refused(metrics, lambda: metrics.write(("cpu", ("host", "a")), 1.0, time=5))


@pytest.mark.parametrize("metric", [np.array(["a", "b"]), pa.array(["a"]), ["a"], 5, b"a", "\ud800", ""])
def test_a_wrong_metric_for_rows(metrics: Any, metric: Any) -> None:
    refused(metrics, lambda: metrics.write_arrow(pa.table({"time": [1], "value": [1.0]}), metric=metric))


def test_a_struct_that_names_a_label_twice(metrics: Any) -> None:
    labels = pa.StructArray.from_arrays([pa.array(["1"]), pa.array(["2"])], names=["a", "a"])
    table = pa.table({"metric": ["cpu"], "labels": labels, "time": [1], "value": [1.0]})
    refused(metrics, lambda: metrics.write_arrow(table))


def test_a_stream_that_fails(metrics: Any) -> None:
    batch = pa.record_batch({"metric": ["cpu"], "time": [9], "value": [1.0]})

    def batches() -> Iterator[Any]:
        yield batch
        raise RuntimeError("the first line\nthe second")

    refused(metrics, lambda: metrics.write_arrow(pa.RecordBatchReader.from_batches(batch.schema, batches())))


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param({"host": pa.array(["a", None], VIEW)}, id="column"),
        pytest.param(
            {"host": pa.DictionaryArray.from_arrays(pa.array([0, None]), pa.array(["a"], VIEW))}, id="dictionary"
        ),
        pytest.param({"labels": pa.array([[("host", "a")], None], pa.map_(VIEW, VIEW))}, id="map"),
        pytest.param({"labels": pa.array([{"host": "a"}, None], pa.struct([("host", VIEW)]))}, id="struct"),
    ],
)
def test_views_of_text(metrics: Any, labels: Any) -> None:
    table = pa.table({"metric": pa.array(["view", "view"], VIEW), **labels, "time": [1, 2], "value": [1.0, 2.0]})
    for _ in range(2):  # the second finds the columns of the first
        metrics.write_arrow(table)
        assert metrics.select("view").sort_by("time").column("labels").to_pylist() == [[("host", "a")], []]


@pytest.mark.parametrize("pattern", ["ab)?(?:c", "a)(b", "a)|(b"])
def test_a_pattern_with_a_parenthesis_of_its_own(pattern: str) -> None:
    with pytest.raises(Invalid, match="not a regular expression"):
        parse_selector(f'{{host=~"{pattern}"}}')


@pytest.mark.parametrize("function", ["increase", "rate"])
def test_a_counter_does_not_fall_beside_a_nan(metrics: Any, function: Any) -> None:
    metrics.write_columns("hits", [1e9, np.nan, 1e9 + 1, 1e9 + 3, 2.0], times=np.arange(5) * 1_000_000)
    values = metrics.aggregate("hits", function=function, step=1).column("value").to_pylist()
    np.testing.assert_array_equal(values, [np.nan, np.nan, 2.0, 2.0])


def test_the_series_of_a_batch_count_together(tmp_path: Path) -> None:
    options = penstock.SeriesOptions(series_max=10, metric_series_max=5)
    with penstock.open(tmp_path / "store") as store:
        metrics = store.series("metrics", options=options)
        for number in range(3):
            metrics.write("cpu", 1.0, {"n": str(number)}, time=1, durable=True)

        def batch(metric: str, count: int) -> None:
            with store.batch() as batch:
                for number in range(count):
                    batch.series("metrics").write(metric, 2.0, {"n": str(number)}, time=2)
                    batch.series("metrics").write_columns(metric, [3.0], {"n": str(number)}, times=[3])

        before = metrics.to_arrow()
        with pytest.raises(Invalid, match=r"metric cpu of table metrics has 3 series and this write adds 3: .* 5 "):
            batch("cpu", 6)
        with (
            pytest.raises(
                Invalid, match=r"table metrics holds 3 series and this write adds 8, most of metric m: .* 10 "
            ),
            store.batch() as both,
        ):
            for number in range(4):
                both.series("metrics").write("m", 1.0, {"n": str(number)}, time=1)
                both.series("metrics").write(f"m{number}", 1.0, time=1)
        assert metrics.to_arrow().equals(before)
        batch("cpu", 5)  # those that are known do not count again
        assert metrics.cardinality().metrics == {"cpu": 5}
        assert metrics.select("cpu").num_rows == 13


MASKED = np.ma.MaskedArray([1, 2], [False, True])


@pytest.mark.parametrize(
    ("values", "times", "message"),
    [
        (MASKED, [1, 2], "some values are masked: drop such samples"),
        ([1.0, 2.0], MASKED, "some times are masked: drop such samples"),
        (np.array([1, 10], np.longdouble) ** 400, [1, 2], "a value is larger than float64 can hold"),
        ([1.0], [1.5], "times are an array of microseconds since 1970"),
    ],
)
def test_arrays_that_lose_something(metrics: Any, values: Any, times: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        metrics.write_columns("cpu", values, times=times)
    refused(metrics, lambda: metrics.write_columns("cpu", values, times=times))


def test_arrays_that_lose_nothing(metrics: Any) -> None:
    plain = np.ma.MaskedArray([5.0, 6.0], [False, False])
    metrics.write_columns("plain", plain, times=np.ma.MaskedArray([1, 2]))
    metrics.write_columns("long", np.array([0.5, np.inf, -np.inf], np.longdouble), times=[1, 2, 3])
    metrics.write_columns("half", np.array([0.5, 1.5], np.float16), times=[1, 2])
    values = {name: metrics.select(name).column("value").to_pylist() for name in ("plain", "long", "half")}
    assert values == {"plain": [5.0, 6.0], "long": [0.5, np.inf, -np.inf], "half": [0.5, 1.5]}


def test_times_of_numpy(metrics: Any) -> None:
    time = np.datetime64("2020-01-01T00:00:00")
    metrics.write("numpy", 1.0, time=time)
    assert metrics.select("numpy", time, time + np.timedelta64(1, "us")).column("time").to_pylist() == [
        datetime(2020, 1, 1, tzinfo=UTC)
    ]
    metrics.delete("numpy", end=time)
    assert metrics.select("numpy").num_rows == 1
    for wrong in (np.datetime64("NaT"), np.datetime64(20_000, "Y"), 1_700_000_000.5, "2020-01-01"):
        refused(metrics, lambda wrong=wrong: metrics.write("cpu", 1.0, time=wrong))


def test_a_label_of_by_that_no_series_has(metrics: Any) -> None:
    rows = metrics.aggregate("cpu", function="count", by=["hst"]).to_pylist()
    assert [(row["labels"], row["value"]) for row in rows] == [([], 1.0)]


class Text(str):
    """A subclass, as numpy and many libraries have: the writer's encoder does not know it."""

    __slots__ = ()


@pytest.mark.parametrize("name", ["metric", "type", "unit", "help"])
def test_metadata_become_plain_texts(metrics: Any, name: str) -> None:
    """What cannot be encoded would stop the writes of the whole store."""
    arguments: dict[str, Any]
    for text in (Text("gauge"), np.str_("gauge")):
        arguments = {"metric": "cpu", name: text}
        metrics.set_metadata(arguments.pop("metric"), **arguments, durable=True)
    stored = metrics.metadata()["gauge" if name == "metric" else "cpu"]
    assert getattr(stored, name) == "gauge"
    for wrong in (None, 5, b"gauge", np.array(["gauge"]), "x\ud800"):
        arguments = {"metric": "cpu", name: wrong}
        refused(metrics, lambda arguments=arguments: metrics.set_metadata(**arguments))


@pytest.mark.parametrize("timeout_s", [np.int64(5), np.float64(5.5), True, "5", 0, -1, np.nan, 1e9])
def test_timeouts_are_plain_numbers_for_connected_tables_too(tmp_path: Path, timeout_s: Any) -> None:
    with penstock.open(tmp_path / "store") as store, penstock.connect(tmp_path / "store") as client:
        store.series("metrics").write("cpu", 1.0, time=1, durable=True)
        good = isinstance(timeout_s, (np.int64, np.float64))
        for table in (store.series("metrics"), client.series("metrics")):
            if good:
                assert table.select("cpu", timeout_s=timeout_s).num_rows == 1
            else:
                with pytest.raises(Invalid, match="timeout_s"):
                    table.select("cpu", timeout_s=timeout_s)


# -- what newcomers meet


def test_a_frame_of_pandas_with_an_index(metrics: Any) -> None:
    """A frame that was filtered or sorted has an index that Arrow makes a column of."""
    frame = pd.DataFrame({"metric": "disk", "host": ["a", None, "c"], "time": pd.Timestamp(9, unit="s"), "value": 1})
    metrics.write_arrow(frame[frame["host"].notna()].iloc[::-1])
    metrics.write_arrow(pa.Table.from_pandas(frame.set_index("time")))
    assert metrics.labels("disk") == ["__name__", "host"]
    assert metrics.select("disk").num_rows == 3
    with pytest.raises(Invalid, match="the column 'core' is int64: labels are texts: cast it to string, or drop it"):
        metrics.write_arrow(frame.assign(core=5))


@pytest.mark.parametrize("labels", [{"a": 5}, {"a": "x" * 5_000}, {"a": []}, 7])
def test_a_refusal_is_not_chained_to_another_error(metrics: Any, labels: Any) -> None:
    with pytest.raises(Invalid) as caught:
        metrics.write("cpu", 1.0, labels)
    assert caught.value.__context__ is None


def test_large_integers_are_rounded_alike(metrics: Any) -> None:
    large = (1 << 60) + 1
    metrics.write("large", large, time=1)
    metrics.write_columns("large", [large], times=[2])
    metrics.write_arrow(pa.table({"metric": ["large"], "time": [3], "value": [large]}))
    assert metrics.select("large").column("value").to_pylist() == [float(large)] * 3


def test_a_step_that_begins_before_the_year_1(metrics: Any) -> None:
    metrics.write("old", 1.0, time=-1)
    (row,) = metrics.aggregate("old", function="count", step=1e12).to_pylist()
    assert row["time"] == datetime(1, 1, 1, tzinfo=UTC)


def test_many_labels_of_one_map(metrics: Any) -> None:
    maps = pa.array([[(f"name{n}", "x") for n in range(10_000)]], pa.map_(pa.string(), pa.string()))
    with pytest.raises(Invalid, match="a series has more than 64 labels"):
        metrics.write_arrow(pa.table({"metric": ["m"], "labels": maps, "time": [1], "value": [1.0]}))
