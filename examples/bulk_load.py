"""Bulk load: tasks write sorted files, which the store takes in as they are, in one commit.

python -m examples.bulk_load [FOLDER]
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

import penstock
import penstock.spark
from examples import run

ROWS = 500_000


def main(spark: SparkSession, folder: str) -> dict[str, Any]:
    """What is in the tables afterwards."""
    with penstock.open(folder) as store:
        prices, loads = store.kv("prices", shards=2, value="int64"), store.kv("loads", value="utf8")

        # All rows are seen at once, or none if a task fails for good. Keys may come in any order.
        frame = spark.range(ROWS).selectExpr("CAST(format_string('item-%07d', id) AS BINARY) AS key", "id * 3 AS value")
        frame.write.format("penstock").option("table", "prices").mode("overwrite").save(folder)
        print(f"{prices.to_arrow().num_rows:,} prices; item 12345 costs {prices.get(b'item-0012345')}")

        # Replace a range of keys: what is in it and does not come again is gone.
        part = spark.range(1_000).selectExpr("CAST(format_string('item-%07d', id) AS BINARY) AS key", "7L AS value")
        writer = part.write.format("penstock").option("table", "prices").mode("overwrite")
        writer.option("start", "item-0000000").option("end", "item-0100000").save(folder)
        left = prices.to_arrow().num_rows
        print(f"{left:,} prices after the first 100,000 keys were replaced by 1,000")

        # Two tables in one commit, which happens once, however often it is tried: a retry is safe.
        tables = {
            "prices": spark.sql("SELECT CAST('item-new' AS BINARY) AS key, 100L AS value, 'add_i64' AS op"),
            "loads": spark.sql("SELECT CAST('2026-01-01' AS BINARY) AS key, 'done' AS value"),
        }
        tries = [penstock.spark.commit(folder, tables, token=("nightly", 20260101)).duplicate for _ in range(2)]
        print(f"the second try was a duplicate: {tries[1]}; the new item costs {prices.get(b'item-new')}")
        return {"left": left, "tries": tries, "prices": dict(prices.scan()), "loads": dict(loads.scan())}


if __name__ == "__main__":
    run(main)
