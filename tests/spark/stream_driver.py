"""A driver to be killed and paused: streams from `events`, which hold still at a point that the test chooses.

    stream_driver.py POINT MARKS [one|several|broken FOLDER CHECKPOINT]...

POINT is where each of them holds still: `writing` (a task has written files, another waits), `searched` (broken records
were found, and nothing is written), `staged` (all files are there, and no commit), `committed` (the commit happened,
and Spark does not know it). Then it makes a file in the folder MARKS, and waits until that folder is gone.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F

Route = Callable[[Any], dict[str, Any]]


def hold_still(marks: str) -> None:
    folder = Path(marks)
    if folder.exists():
        (folder / str(threading.get_ident())).touch()
    while folder.exists():
        time.sleep(0.05)


def route_to(tables: str, marks: str = "") -> Route:
    """One table: a copy of the messages. Several: the count and the last message of each key, and a sample of each.

    The times of samples differ from attempt to attempt: a batch that happens twice would leave twice as many. Broken:
    as several, and it fails on a message that begins with `broken`.
    """

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        import pathlib
        import time

        from pyspark import TaskContext

        folder, context = pathlib.Path(marks), TaskContext.get()
        if context is None or context.partitionId() > 0:  # the first goes on, and writes files
            (folder / tables).touch()
            while folder.exists():
                time.sleep(0.05)
        yield from batches

    def route(frame: Any) -> dict[str, Any]:
        if tables == "broken":
            text = F.col("payload").cast("string")
            refused = F.raise_error(F.concat(F.lit("refused: "), text)).cast("binary")
            frame = frame.withColumn("payload", F.when(text.startswith("broken"), refused).otherwise(F.col("payload")))
        copied = frame.select("key", "payload")
        copied = copied.mapInArrow(wait, copied.schema) if marks else copied
        if tables == "one":
            return {"copied": copied}
        by_key = frame.groupBy("key").agg(
            F.count("*").alias("value"), F.max_by("payload", F.struct("shard", "sequence")).alias("last")
        )
        return {
            "copied": copied,
            "totals": by_key.select("key", "value", F.lit("add_i64").alias("op")),
            "latest": by_key.select("key", F.col("last").alias("value")),
            "seen": frame.selectExpr(
                "'seen' metric",
                "map('shard', string(shard)) labels",
                "timestamp_micros(unix_micros(current_timestamp()) + sequence) time",
                "double(sequence) value",
            ),
        }

    return route


def main(point: str, marks: str, *streams: str) -> None:
    import penstock.spark
    from penstock.spark import broken_records
    from penstock.spark.batch_runner import BatchRunner
    from penstock.store.batch import StoreBatch

    if point == "searched":
        find_failures = vars(broken_records)["find_failures"]

        def searched(*given: Any, **more: Any) -> Any:
            failures = find_failures(*given, **more)
            hold_still(marks)
            return failures

        vars(broken_records)["find_failures"] = searched
    if point == "staged":
        commit = StoreBatch.commit

        def held(self: StoreBatch) -> None:
            hold_still(marks)
            commit(self)

        StoreBatch.commit = held  # type: ignore[method-assign]
    if point == "committed":
        count = BatchRunner._count

        def counted(self: BatchRunner, *, lag: int | None = None, **more: int) -> None:
            count(self, lag=lag, **more)
            hold_still(marks)

        BatchRunner._count = counted  # type: ignore[method-assign]
    spark = penstock.spark.session("driver", master="local[6]", spark__sql__shuffle__partitions="2")
    queries = [
        penstock.spark.stream(
            spark,
            folder,
            source="events",
            consumer="c",
            batch=route_to(tables, marks if point == "writing" else ""),
            checkpoint=checkpoint,
            interval_s=0.0,
            dead_letter="dead" if tables == "broken" else None,
        )
        for tables, folder, checkpoint in zip(streams[::3], streams[1::3], streams[2::3], strict=True)
    ]
    told = []
    for query in queries:
        try:
            penstock.spark.wait(query)
            told.append("")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    print(json.dumps({"errors": told}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
