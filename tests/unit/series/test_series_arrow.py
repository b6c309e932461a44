"""Arrow rows: what becomes which block, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import Invalid
from penstock.series.arrow import BlockMaker, LabelColumns, sample_batches
from penstock.series.labels import check_table, encode_labels
from penstock.series.rules import check_block
from penstock.series.section import STALE_BITS, SampleBlock, split_block

Sample = tuple[dict[str, str], int, float]


def samples(block: SampleBlock | None) -> list[Sample]:
    assert block is not None
    check_block(block)
    values = block.bits.view(np.float64).tolist()
    rows = zip(block.index.tolist(), block.times.tolist(), values, strict=True)
    return [(dict(block.series.labels(row)), time, value) for row, time, value in rows]


def row(metric: str, time: int, value: float, **labels: str) -> Sample:
    return {"__name__": metric, **labels}, time, value


HOSTS = ["a", "b", "", None, "a", "c"]
EXPECTED = [
    row("cpu", 1, 0.0, host="a", dc="x"),
    row("cpu", 2, 1.0, host="b", dc="y"),
    row("mem", 3, 2.0, dc="x"),
    row("cpu", 4, 3.0),
    row("cpu", 5, 4.0, host="a", dc="x"),
    row("mem", 6, 5.0, host="c"),
]


def as_columns() -> pa.Table:
    return pa.table(
        {
            "metric": ["cpu", "cpu", "mem", "cpu", "cpu", "mem"],
            "host": HOSTS,
            "dc": ["x", "y", "x", None, "x", ""],
            "time": [1, 2, 3, 4, 5, 6],
            "value": [0.0, 1, 2, 3, 4, 5],
        }
    )


def as_dictionaries() -> pa.Table:
    table = as_columns()
    for name in ("metric", "host", "dc"):
        column = table.column(name).dictionary_encode()
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def as_map(kind: Any = None) -> pa.Table:
    table = as_columns()
    maps = [
        [(name, value) for name, value in (("host", host), ("dc", dc)) if value is not None]
        for host, dc in zip(HOSTS, table.column("dc").to_pylist(), strict=True)
    ]
    labels = pa.array(maps, kind or pa.map_(pa.string(), pa.string()))
    return table.drop_columns(["host", "dc"]).append_column("labels", labels)


def as_struct() -> pa.Table:
    table = as_columns()
    labels = pa.StructArray.from_arrays([table.column(n).combine_chunks() for n in ("host", "dc")], ["host", "dc"])
    return table.drop_columns(["host", "dc"]).append_column("labels", labels)


@pytest.mark.parametrize(
    "table",
    [
        as_columns(),
        as_dictionaries(),
        as_map(),
        as_map(pa.map_(pa.string(), pa.large_string())),
        as_struct(),
        as_columns().cast(
            pa.schema(
                [pa.field(f.name, pa.large_string() if f.name == "host" else f.type) for f in as_columns().schema]
            )
        ),
        pa.concat_tables([as_dictionaries().slice(0, 2), as_dictionaries().slice(2)]),
        pa.concat_tables([as_map().slice(0, 2), as_map().slice(2)]),
        as_dictionaries().to_batches()[0],
    ],
    ids=["columns", "dictionaries", "map", "large map", "struct", "large", "chunks", "map chunks", "batch"],
)
def test_rows_in_every_form(table: Any) -> None:
    maker = BlockMaker()
    for _ in range(2):  # the second from the label columns that were kept
        assert samples(maker.block(table)) == EXPECTED
    sliced = table.slice(1, 3)
    assert samples(maker.block(sliced)) == EXPECTED[1:4]


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_a_block_is_divided_by_shard(shards: int) -> None:
    block = BlockMaker().block(as_columns())
    assert block is not None
    all_samples: list[Sample] = []
    for _, part in split_block(block, shards):
        check_table(part.series)
        all_samples += samples(part)
    assert sorted(all_samples, key=lambda sample: sample[1]) == EXPECTED


def test_equal_label_columns_share_a_table() -> None:
    maker = BlockMaker()
    one = maker.block(as_dictionaries())
    later = as_dictionaries().set_column(3, "time", pa.array([7, 8, 9, 10, 11, 12]))
    two = maker.block(later)
    assert one is not None
    assert two is not None
    assert one.series is two.series
    assert two.times.tolist() == [7, 8, 9, 10, 11, 12]
    other = as_columns().set_column(1, "host", pa.array(["z"] * 6))
    assert {labels["host"] for labels, _, _ in samples(maker.block(other))} == {"z"}


def test_kept_columns_do_not_share_the_callers_memory() -> None:
    codes = np.array([0, 1], np.int32)
    times, values = np.array([1, 2]), np.array([1.0, 2.0])

    def table() -> pa.Table:
        hosts = pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(["a", "b"]))
        return pa.table({"host": hosts, "time": pa.array(times), "value": pa.array(values)})

    maker = BlockMaker()
    first = maker.block(table(), "cpu")
    codes[:] = [1, 0]
    times[:], values[:] = 9, 9.0
    assert samples(first) == [row("cpu", 1, 1.0, host="a"), row("cpu", 2, 2.0, host="b")]
    assert [labels["host"] for labels, _, _ in samples(maker.block(table(), "cpu"))] == ["b", "a"]


def test_a_dictionary_with_repeated_unused_and_null_values() -> None:
    dictionary = pa.array(["a", "unused", "a", "", None])
    hosts = pa.DictionaryArray.from_arrays(pa.array([0, 2, 3, 4, None], pa.int8()), dictionary)
    block = BlockMaker().block(pa.table({"host": hosts, "time": range(5), "value": [0.0] * 5}), "cpu")
    assert [labels.get("host") for labels, _, _ in samples(block)] == ["a", "a", None, None, None]
    assert block is not None
    assert len(block.series) == 2


@pytest.mark.parametrize(
    "times",
    [
        pa.array([datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), datetime(2026, 1, 1, tzinfo=UTC)]),
        pa.array([-1_000, 1_767_225_600_000_000_999], pa.timestamp("ns")),
        pa.array([-1, 1_767_225_600_000_000], pa.timestamp("us", tz="Europe/Berlin")),
        pa.array([-1, 1_767_225_600_000_000]),
    ],
)
def test_times(times: Any) -> None:
    block = BlockMaker().block(pa.table({"time": times, "value": [1.0, 2.0]}), "cpu")
    assert block is not None
    assert block.times.tolist() == [-1, 1_767_225_600_000_000]


def test_nanoseconds_are_rounded_down() -> None:
    table = pa.table({"time": pa.array([-1, 999], pa.timestamp("ns")), "value": [1.0, 2.0]})
    block = BlockMaker().block(table, "cpu")
    assert block is not None
    assert block.times.tolist() == [-1, 0]


def test_values_keep_their_bits() -> None:
    bits = np.array([STALE_BITS, 0x7FF8_0000_0000_0001, 1 << 63, 0x7FF0 << 48], np.uint64)
    block = BlockMaker().block(pa.table({"time": range(4), "value": bits.view(np.float64)}), "cpu")
    assert block is not None
    assert block.bits.tolist() == bits.tolist()
    labels = LabelColumns([encode_labels((("__name__", "cpu"),))])
    (batch,) = sample_batches(labels, np.zeros(4, np.intp), block.times, block.bits)
    assert batch.column("value").to_numpy().view(np.uint64).tolist() == bits.tolist()
    whole = BlockMaker().block(pa.table({"time": [1], "value": pa.array([3], pa.int32())}), "cpu")
    assert samples(whole)[0][2] == 3.0


def test_no_rows_are_no_block() -> None:
    empty = as_columns().slice(0, 0)
    assert BlockMaker().block(empty) is None
    assert BlockMaker().block(empty.schema.empty_table()) is None


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"metric": ["a"], "value": [1.0]}), "time is missing"),
        (pa.table({"metric": ["a"], "time": [1]}), "value is missing"),
        (pa.table({"time": [1], "value": [1.0]}), "have a column metric"),
        (pa.table({"metric": [""], "time": [1], "value": [1.0]}), "a metric has a name"),
        (pa.table({"metric": ["a", None], "time": [1, 2], "value": [1.0, 2.0]}), "a metric has a name"),
        (pa.table({"metric": ["a"], "time": [None], "value": [1.0]}), "the column time is null"),
        (pa.table({"metric": ["a"], "time": pa.array([None], pa.int64()), "value": [1.0]}), "time is null in row 0"),
        (pa.table({"metric": ["a"], "time": [1.5], "value": [1.0]}), "the column time is double"),
        (pa.table({"metric": ["a"], "time": [1], "value": pa.array([None], pa.float64())}), "value is null in row 0"),
        (pa.table({"metric": ["a"], "time": [1], "value": ["1"]}), "the column value is string"),
        (pa.table({"metric": ["a"], "time": [1 << 62], "value": [1.0]}), "outside the years"),
        (pa.table({"metric": ["a"], "time": pa.array([1 << 60], pa.timestamp("s")), "value": [1.0]}), "does not fit"),
        (pa.table({"metric": ["a"], "time": [1], "value": [1.0], "host": [5]}), "labels are texts"),
        (pa.table({"metric": ["a"], "time": [1], "value": [1.0], "host": ["x" * 4097]}), "4097 bytes"),
        (pa.table({"metric": ["a"], "time": [1], "value": [1.0], "__name__": ["b"]}), "stands in two columns"),
        (as_map().append_column("host", pa.array(["a"] * 6)), "stands in two columns"),
        (
            pa.table({"metric": ["a"], "time": [1], "value": [1.0]}).append_column(
                "labels", pa.array([[("a", "1"), ("a", "2")]], pa.map_(pa.string(), pa.string()))
            ),
            "has the key 'a' twice",
        ),
        (
            pa.table({"metric": ["a"], "time": [1], "value": [1.0]}).append_column(
                "labels", pa.array([[("", "1")]], pa.map_(pa.string(), pa.string()))
            ),
            "a label has a name",
        ),
        (
            pa.table({"metric": ["a"], "time": [1], "value": [1.0], **{f"l{n}": ["x"] for n in range(64)}}),
            "more than 64 labels",
        ),
        ([1, 2], "takes an Arrow table"),
        (None, "takes an Arrow table"),
    ],
)
def test_wrong_rows_are_refused_in_one_line(table: Any, message: str) -> None:
    with pytest.raises(Invalid, match=message) as caught:
        BlockMaker().block(table)
    assert "\n" not in str(caught.value)


def test_a_metric_for_all_rows_excludes_the_column() -> None:
    with pytest.raises(Invalid, match="give no metric beside it"):
        BlockMaker().block(as_columns(), "cpu")


def test_many_labels_do_not_overflow() -> None:
    columns = {f"l{n:02}": [f"{(row * 7 + n) % 50}" for row in range(100)] for n in range(40)}
    table = pa.table({"time": range(100), "value": [0.0] * 100, **columns})
    block = BlockMaker().block(table, "cpu")
    assert block is not None
    assert len(block.series) == 50
    expected = [{"__name__": "cpu", **{name: values[row] for name, values in columns.items()}} for row in range(100)]
    assert [labels for labels, _, _ in samples(block)] == expected


def test_long_labels_make_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row repeats them: a batch of usual length would take gigabytes."""
    monkeypatch.setattr("penstock.series.arrow.BATCH_LABEL_BYTES", 1_000)
    labels = LabelColumns([encode_labels((("__name__", "m"), ("n", value))) for value in ("a", "x" * 300, "b")])
    rows = np.repeat(np.arange(3), (50, 7, 50))
    batches = list(sample_batches(labels, rows, np.arange(107), np.arange(107, dtype=np.uint64)))
    assert max(batch.num_rows for batch in batches) <= 3
    assert pa.Table.from_batches(batches).column("time").cast(pa.int64()).to_pylist() == list(range(107))
    assert [len(batch) for batch in sample_batches(labels, rows[:40], rows[:40], rows[:40].view(np.uint64))] == [40]
