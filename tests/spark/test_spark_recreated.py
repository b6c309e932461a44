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

from penstock.errors import Invalid, NotFound
from penstock.spark import committing
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
