"""A driver to be killed and paused: a stream from `events`, which holds still at a point that the test chooses.

    stream_driver.py FOLDER CHECKPOINT ONE|SEVERAL POINT MARK

POINT is where it holds still: `writing` (a task has written files, another waits), `staged` (all files are there, and
no commit), `committed` (the commit happened, and Spark does not know it). It makes MARK, and waits until that is gone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

Route = Callable[[Any], dict[str, Any]]


def hold_still(mark: str) -> None:
    path = Path(mark)
    path.touch()
    while path.exists():
        time.sleep(0.05)


def route_to(tables: str, mark: str = "") -> Route:
    """One table: a copy of the messages. Several: the count and the last message of each key as well."""

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        import pathlib
        import time

        path = pathlib.Path(mark)
        path.touch()
        while path.exists():
            time.sleep(0.05)
        yield from batches

    def route(frame: Any) -> dict[str, Any]:
        copied = frame.select("key", "payload")
        if tables == "one":
            return {"copied": copied.union(copied.limit(0).mapInArrow(wait, copied.schema)) if mark else copied}
        by_key = frame.groupBy("key").agg(
            F.count("*").alias("value"), F.max_by("payload", F.struct("shard", "sequence")).alias("last")
        )
        totals = by_key.select("key", "value", F.lit("add_i64").alias("op"))
        return {
            "copied": copied,
            "totals": totals.mapInArrow(wait, totals.schema) if mark else totals,
            "latest": by_key.select("key", F.col("last").alias("value")),
        }

    return route


def main(folder: str, checkpoint: str, tables: str, point: str, mark: str) -> None:
    import penstock.spark
    from penstock.batch import StoreBatch
    from penstock.spark.exactly_once import _Runner

    if point == "staged":
        commit = StoreBatch.commit

        def held(self: StoreBatch) -> None:
            hold_still(mark)
            commit(self)

        StoreBatch.commit = held  # type: ignore[method-assign]
    if point == "committed":
        count = _Runner._count

        def counted(self: _Runner, **more: int) -> None:
            count(self, **more)
            hold_still(mark)

        _Runner._count = counted  # type: ignore[method-assign]
    spark = penstock.spark.session("driver", master="local[2]", spark__sql__shuffle__partitions="2")
    query = penstock.spark.stream(
        spark,
        folder,
        source="events",
        consumer="c",
        batch=route_to(tables, mark if point == "writing" else ""),
        checkpoint=checkpoint,
        interval_s=0.0,
    )
    try:
        penstock.spark.wait(query)
        told = ""
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    print(json.dumps({"error": told}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
