"""A driver to be killed and paused: streams from `events`, which hold still at a point that the test chooses.

    stream_driver.py MARKS [POINT one|several|broken FOLDER CHECKPOINT]...

POINT is where a stream holds still: `writing` (a task has written files, another waits), `searched` (broken records
were found, and nothing is written), `staged` (all files are there, and no commit), `committed` (the commit happened,
and Spark does not know it). Then it makes a file of its own in the folder MARKS, and waits until that folder is gone.
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


class Points:
    """Where the streams hold still. A batch of a stream runs in one thread, and begins with its function."""

    def __init__(self, marks: str) -> None:
        self._marks = Path(marks)
        self._stream = threading.local()

    def begin(self, point: str, checkpoint: str) -> None:
        self._stream.point, self._stream.mark = point, Path(checkpoint).name

    def reach(self, point: str) -> None:
        if self._stream.point != point:
            return
        if self._marks.exists():
            (self._marks / self._stream.mark).touch()
        while self._marks.exists():
            time.sleep(0.05)


def route_to(tables: str, mark: str = "") -> Route:
    """One table: a copy of the messages. Several: the count and the last message of each key, and a sample of each.

    The times of samples differ from attempt to attempt: a batch that happens twice would leave twice as many. Broken:
    as several, and it fails on a message that begins with `broken`. A task makes the file `mark`, and waits until the
    folder of that is gone.
    """

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        import pathlib
        import time

        from pyspark import TaskContext

        reached, context = pathlib.Path(mark), TaskContext.get()
        if context is None or context.partitionId() > 0:  # the first goes on, and writes files
            reached.touch()
            while reached.parent.exists():
                time.sleep(0.05)
        yield from batches

    def route(frame: Any) -> dict[str, Any]:
        if tables == "broken":
            text = F.col("payload").cast("string")
            refused = F.raise_error(F.concat(F.lit("refused: "), text)).cast("binary")
            frame = frame.withColumn("payload", F.when(text.startswith("broken"), refused).otherwise(F.col("payload")))
        copied = frame.select("key", "payload")
        copied = copied.mapInArrow(wait, copied.schema) if mark else copied
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
            "points": frame.selectExpr("uuid() id", "array(float(shard), float(sequence)) vector", "shard", "sequence"),
        }

    return route


def hold_at(points: Points) -> None:
    """Change Penstock in this process, so that its streams hold still."""
    from penstock.spark import broken_records
    from penstock.spark.batch_runner import BatchRunner
    from penstock.store.batch import StoreBatch

    find_failures, commit, count = vars(broken_records)["find_failures"], StoreBatch.commit, BatchRunner._count

    def searched(*arguments: Any, **more: Any) -> Any:
        failures = find_failures(*arguments, **more)
        points.reach("searched")
        return failures

    def staged(self: StoreBatch) -> None:
        points.reach("staged")
        commit(self)

    def committed(self: BatchRunner, *, lag: int | None = None, **more: int) -> None:
        count(self, lag=lag, **more)
        points.reach("committed")

    vars(broken_records)["find_failures"] = searched
    StoreBatch.commit = staged  # type: ignore[method-assign]
    BatchRunner._count = committed  # type: ignore[method-assign]


def main(marks: str, *streams: str) -> None:
    import penstock.spark

    points = Points(marks)
    hold_at(points)

    def batch(point: str, tables: str, checkpoint: str) -> Route:
        route = route_to(tables, f"{marks}/{Path(checkpoint).name}" if point == "writing" else "")

        def begin(frame: Any) -> dict[str, Any]:
            points.begin(point, checkpoint)
            return route(frame)

        return begin

    spark = penstock.spark.session(
        "driver",
        master="local[6]",
        spark__sql__shuffle__partitions="2",
        spark__sql__codegen__wholeStage="false",  # as in conftest.py: few rows
        spark__sql__codegen__factoryMode="NO_CODEGEN",
    )
    queries = [
        penstock.spark.stream(
            spark,
            folder,
            source="events",
            consumer="c",
            batch=batch(point, tables, checkpoint),
            checkpoint=checkpoint,
            interval_s=0.0,
            dead_letter="dead" if tables == "broken" else None,
        )
        for point, tables, folder, checkpoint in zip(*(streams[offset::4] for offset in range(4)), strict=True)
    ]
    errors = []
    for query in queries:
        try:
            penstock.spark.wait(query)
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    print(json.dumps({"errors": errors}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
