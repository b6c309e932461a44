"""Every Python block of the Spark guide, and of the README, runs as it stands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as F
from tests.test_docs import ROOT, blocks

import penstock
import penstock.spark

# What a reader would do by hand: give paths of his own, and end what runs until a signal ends it.
SUBSTITUTES = {
    "batch=route)": "batch=route, available_now=True)",
    'maintain(spark, "/abs/data")': 'maintain(spark, "/abs/data", stop=ended)',
}


def runnable() -> Iterator[object]:
    for page in (ROOT / "README.md", ROOT / "docs" / "guide" / "spark.md"):
        for line, source in blocks(page):
            if "spark" in source and "db.example" not in source:
                yield pytest.param(source, id=f"{page.name}:{line}")


def route(df: Any) -> dict[str, Any]:
    key = F.col("key")
    return {"totals": df.select(key, F.lit(1).cast("long").alias("value"), F.lit("add_i64").alias("op"))}


@pytest.mark.parametrize("source", list(runnable()))
def test_a_block_runs(source: str, spark: Any, tmp_path: Path) -> None:
    for old, new in {**SUBSTITUTES, "/abs/": f"{tmp_path}/"}.items():
        source = source.replace(old, new)
    path = str(tmp_path / "data")
    with penstock.open(path) as store:
        store.kv("users", value="utf8").put(b"ada", "Ada")
        store.kv("totals", value="int64")
        store.kv("windows", value="int64")
        events = store.queue("events", shards=2)
        events.put_many([b'{"device": "a", "value": 1}'] * 10, keys=[b"%d" % number for number in range(10)])
        store.flush()
        penstock.spark.views(spark, path)
        ended = threading.Event()
        ended.set()
        names = {
            "ended": ended,
            "penstock": penstock,
            "spark": spark,
            "F": F,
            "route": route,
            "events": spark.table("events"),
            "readings": spark.createDataFrame([("a", 1.0)], "device string, value double"),
            "frame": spark.createDataFrame([(b"bob", "Bob")], "key binary, value string"),
        }
        exec(compile(source, "block", "exec"), names)
        for query in spark.streams.active:
            query.stop()
        connected = names.get("store")
        if isinstance(connected, penstock.RemoteStore):
            connected.close()


def test_there_are_blocks() -> None:
    assert sum(1 for _ in runnable()) > 7
