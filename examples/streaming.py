"""Streaming: count messages in windows of five minutes with Spark's own streams.

A window is written when the watermark has passed its end; messages that come later than that are dropped.

    python -m examples.streaming [FOLDER]
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import penstock
import penstock.spark
from examples import run

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
FIRST = [0, 1, 2, 6, 7, 21]  # minutes after noon at which something was seen
LATER = [3, 14, 22, 40]  # 3 comes too late: the watermark is at 11 by now


def put(store: penstock.Store, number: int, minutes: list[int]) -> None:
    """Messages with times of their own; `number` makes sure that they are added once."""
    times = pa.array([NOON + timedelta(minutes=minute) for minute in minutes], pa.timestamp("us", "UTC"))
    messages = pa.table({"payload": pa.array([b"seen"] * len(minutes), pa.binary()), "time": times})
    store.queue("seen").put_many(messages, token=("example", number))


def count_windows(spark: SparkSession, folder: str) -> None:
    """Read what is there, from where the checkpoint says, and stop."""
    source = spark.readStream.format("penstock").option("table", "seen").option("maxRows", "1000").load(folder)
    windows = source.withWatermark("timestamp", "10 minutes").groupBy(F.window("timestamp", "5 minutes")).count()
    start = F.date_format("window.start", "yyyy-MM-dd HH:mm")
    rows = windows.select(start.cast("binary").alias("key"), F.col("count").alias("value"))
    query = (
        rows.writeStream.format("penstock")
        .option("table", "windows")
        .option("checkpointLocation", f"{folder}-checkpoint")  # the windows that are open are kept there
        .outputMode("append")
        .trigger(availableNow=True)  # without it the query goes on until it is stopped
        .start(folder)
    )
    query.awaitTermination()


def main(spark: SparkSession, folder: str) -> dict[str, int]:
    """How much was seen in each window that is over."""
    with penstock.open(folder) as store:
        store.queue("seen")
        windows = store.kv("windows", value="int64")
        for number, minutes in enumerate([FIRST, LATER]):
            put(store, number, minutes)
            count_windows(spark, folder)
            counts = {key.decode(): count for key, count in windows.scan()}
            print(f"after {len(minutes)} more messages: {counts}")
        return counts


if __name__ == "__main__":
    run(main)
