"""A driver that knows nothing of Penstock but the format: `plain_session.py STORE`. Prints a JSON line for each try."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from pyspark.sql import SparkSession

import penstock.spark


def attempt(name: str, act: Callable[[], Any]) -> None:
    try:
        outcome = {"value": act()}
    except Exception as error:
        outcome = {"error": str(error)}
    print(json.dumps({"name": name, **outcome}), flush=True)


def main(folder: str) -> None:
    builder = SparkSession.builder.master("local[1]").config("spark.log.level", "ERROR")
    for name, value in (("ui.enabled", "false"), ("ui.showConsoleProgress", "false"), ("driver.host", "127.0.0.1")):
        builder = builder.config(f"spark.{name}", value)
    spark = builder.getOrCreate()

    def key_range() -> Any:
        reader = spark.read.format("penstock").option("table", "t").option("pushdown", "true").option("splits", "1")
        return reader.load(folder).where("key >= X'62'")

    attempt("count", lambda: spark.read.format("penstock").option("table", "t").load(folder).count())
    attempt("key_range", lambda: [bytes(row.key).decode() for row in key_range().collect()])
    attempt("again", lambda: key_range().count())
    attempt("views", lambda: penstock.spark.views(spark, folder))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
