"""A table that is dropped and made again under the same name while Spark works on it: an error, and never a part of it.

A plan, prepared rows and files are of the table that was there when they were made. Its successor has the name, and
perhaps more shards, another kind or another type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

from penstock.errors import Invalid, NotFound
from penstock.spark import committing
from penstock.spark.streaming import StreamReader
from penstock.store.store import Store

ROWS = 100


def fill(store: Store, shards: int) -> None:
    store.kv("t", shards=shards).put_many([(b"%d" % row, b"v") for row in range(ROWS)], durable=True)


@pytest.mark.parametrize(
    "make_again",
    [
        lambda store: fill(store, 4),
        lambda store: fill(store, 1),
        lambda store: store.queue("t").put(b"m", durable=True),
        lambda store: store.kv("t", value="int64").put(b"k", 1, durable=True),
    ],
    ids=["more shards", "fewer shards", "a queue", "numbers"],
)
def test_a_plan_does_not_read_the_successor(
    spark: Any, store: Store, folder: str, make_again: Callable[[Store], object]
) -> None:
    fill(store, 2)
    frame = spark.read.format("penstock").option("table", "t").load(folder)
    assert frame.count() == ROWS
    store.drop("t")
    make_again(store)
    with pytest.raises(PySparkException, match=r"NotFound: table t was dropped and made again"):
        frame.count()


@pytest.mark.parametrize("size", [10, 30_000], ids=["sections", "files"])
@pytest.mark.parametrize("kind", ["kv", "queue"])
def test_prepared_rows_do_not_vanish(
    spark: Any, store: Store, folder: str, monkeypatch: pytest.MonkeyPatch, kind: str, size: int
) -> None:
    make: Callable[[str], Any] = getattr(store, kind)
    make("t")
    events = store.queue("events")
    events.put_many([b"e"] * 5, durable=True)
    prepare = committing.prepare

    def prepare_and_replace(*arguments: Any) -> Any:
        prepared = prepare(*arguments)
        store.drop("t")
        make("t")
        return prepared

    monkeypatch.setattr(committing, "prepare", prepare_and_replace)
    text = F.format_string("%0100d", F.col("id")).cast("binary")
    columns = [text.alias("key"), text.alias("value")] if kind == "kv" else [text.alias("payload")]
    frame = spark.range(0, size, 1, 1).select(*columns)
    with pytest.raises((NotFound, Invalid)):
        committing.commit(folder, {"t": frame}, consumer="c", source="events", start={0: 1}, end={0: 6})
    assert events.consumer("c").position == {0: 1}, "the position moved without the rows"


@pytest.mark.parametrize(
    ("shards", "messages"), [(1, 2), (1, 50), (2, 50)], ids=["fewer messages", "more messages", "more shards"]
)
def test_offsets_are_not_of_the_successor(store: Store, folder: str, shards: int, messages: int) -> None:
    """A checkpoint that is past the first messages of the new queue would leave them out, whatever `onloss` says."""
    store.queue("q").put_many([b"old"] * 10, durable=True)
    options = {"path": folder, "table": "q"}
    reader = StreamReader(options, StructType([]))
    reached = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert reader.partitions(reader.initialOffset(), reached)
    store.drop("q")
    store.queue("q", shards=shards).put_many([b"new"] * messages, durable=True)
    for again in (reader, StreamReader({**options, "onloss": "skip"}, StructType([]))):
        with pytest.raises((NotFound, Invalid)):
            again.latestOffset(reached, ReadAllAvailable())
    fresh = StreamReader(options, StructType([]))
    assert fresh.latestOffset(fresh.initialOffset(), ReadAllAvailable()) != reached
    older = {"0": 1}  # as checkpoints were before they named the table
    if shards == 1:
        assert fresh.latestOffset(older, ReadAllAvailable())["0"] == messages + 1


def test_a_start_past_the_end_is_told(store: Store, folder: str) -> None:
    store.queue("q").put(b"m", durable=True)
    reader = StreamReader({"path": folder, "table": "q", "start": "5000"}, StructType([]))
    with pytest.raises(NotFound, match="give another start"):
        reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
