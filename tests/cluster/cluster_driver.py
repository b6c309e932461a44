"""A driver on a standalone cluster: reads, writes, streams and compacts in each of some stores.

    cluster_driver.py SPARK_MASTER FOLDER NAME=STORE...

STORE is a path or an address. What it read is in FOLDER, `<name>-<table>.parquet`, and the rest is its last line, JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F

import penstock.spark
from penstock.spark.table_ref import TableRef

LOADED = 100_000  # rows: more than goes through the journal, in each of two tasks
PATIENCE_S = 200.0


def main(master: str, folder: str, *stores: str) -> None:
    spark = penstock.spark.session(
        "cluster",
        master=master,
        spark__driver__host="127.0.0.1",
        spark__driver__bindAddress="127.0.0.1",
        spark__driver__memory="512m",
        spark__executor__memory="512m",
        spark__scheduler__minRegisteredResourcesRatio="1.0",  # no task before both executors are there
        spark__scheduler__maxRegisteredResourcesWaitingTime="120s",
        spark__sql__shuffle__partitions="2",
        spark__sql__codegen__wholeStage="false",  # of plans that run once or twice
        spark__sql__codegen__factoryMode="NO_CODEGEN",
    )
    report: dict[str, Any] = {}
    for name, path in (store.split("=", 1) for store in stores):
        executors = look(spark, path)
        for table in ("users", "events"):
            frame = spark.read.format("penstock").option("table", table).option("splits", 4).load(path)
            pq.write_table(frame.toArrow(), f"{folder}/{name}-{table}.parquet")
        for version in (1, 2):
            load(spark, path, version)
        progress = stream(spark, path)
        report[name] = {
            "executors": executors,
            "batches": progress.batches,
            "rows_in": progress.rows_in,
            "done": penstock.spark.maintain(spark, path, once=True),
        }
    spark.stop()
    print(json.dumps({**report, "driver": os.getpid()}), flush=True)


def look(spark: Any, path: str) -> list[Any]:
    """Whether a task on each executor sees the store's folder."""
    ref = TableRef.of({"path": path}, table=False)

    def task(batches: Iterator[Any]) -> Iterator[Any]:
        import os
        import time

        for _ in batches:
            time.sleep(0.5)  # so that no executor does the work of both
            folder = ref.store().path
            names = os.listdir(folder) if os.path.isdir(folder) else []
            yield pa.RecordBatch.from_pylist(
                [{"executor": os.getcwd(), "files": len(names), "maps": ref.root is not None}]
            )

    rows = spark.range(0, 2, 1, 2).mapInArrow(task, "executor string, files long, maps boolean").collect()
    return [row.asDict() for row in rows]


def load(spark: Any, path: str, version: int) -> None:
    """Every key, then every other one; each task has keys of the whole range, so that their files overlap."""
    number = F.col("id") * version
    rows = (
        spark.range(0, LOADED // version, 1, 1)
        .repartition(2)
        .select(
            F.format_string("%08d", number).cast("binary").alias("key"),
            F.format_string(f"version {version} of %040d", number).cast("binary").alias("value"),
        )
    )
    rows.write.format("penstock").option("table", "loaded").mode("append").save(path)


def stream(spark: Any, path: str) -> Any:
    def route(frame: Any) -> dict[str, Any]:
        counts = frame.groupBy("key").agg(F.count("*").alias("value"))
        return {"totals": counts.withColumn("op", F.lit("add_i64")), "copied": frame.select("key", "payload")}

    query = penstock.spark.stream(spark, path, source="events", consumer="c", batch=route, available_now=True)
    return penstock.spark.wait(query, PATIENCE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
