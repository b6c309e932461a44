"""Batch: read tables with SQL, and write what comes of it to another table.

python -m examples.batch [FOLDER]
"""

from __future__ import annotations

import json

from pyspark.sql import SparkSession

import penstock
import penstock.spark
from examples import run

SITES = {b"d0": "roof", b"d1": "roof", b"d2": "cellar"}

# Payloads are bytes: as text they can be parsed.
MEANS = """
SELECT s.value AS site, count(*) AS readings, avg(e.r.value) AS mean
FROM (SELECT from_json(CAST(payload AS STRING), 'device STRING, value DOUBLE') AS r FROM events) AS e
JOIN sites AS s ON CAST(s.key AS STRING) = e.r.device
GROUP BY s.value ORDER BY site"""


def fill(store: penstock.Store) -> None:
    """A queue of readings in JSON, and a table that says where each device stands."""
    readings = [{"device": f"d{number % 3}", "value": 20 + number % 7} for number in range(1_000)]
    payloads = [json.dumps(reading).encode() for reading in readings]
    store.queue("events", shards=2).put_many(payloads, token=("example", 1))  # with a token: once, whatever happens
    store.kv("sites", value="utf8").put_many(SITES)
    store.kv("means", value="float64")
    store.flush()


def main(spark: SparkSession, folder: str) -> dict[str, float]:
    """The mean reading of each site."""
    with penstock.open(folder) as store:  # or somebody else has it open: Spark finds the owner
        fill(store)
        events = spark.read.format("penstock").option("table", "events").load(folder)
        print(f"{events.count():,} events with the columns {', '.join(events.columns)}")

        penstock.spark.views(spark, folder)  # each table under its name
        means = spark.sql(MEANS)
        means.show()

        rows = means.selectExpr("CAST(site AS BINARY) AS key", "mean AS value")
        rows.write.format("penstock").option("table", "means").mode("append").save(folder)  # all of it, or nothing
        return {site.decode(): mean for site, mean in store.kv("means", value="float64").scan()}


if __name__ == "__main__":
    run(main)
