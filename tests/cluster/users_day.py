"""The programs of a small project: log lines of three services, counted in Python and in Spark.

    users_day.py produce STORE SERVICE COUNT    put lines, in batches with tokens; a restart begins at the first
    users_day.py count STORE STOP               count lines by service, until the file STOP exists and none is left
    users_day.py route STORE CHECKPOINT once|on stream through Spark: a join with the owners, totals, dead letters
    users_day.py report STORE                   print what is there, as DuckDB and Polars see it

It is what a user would write: it knows the public API of the installed package and nothing of its tests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import penstock
from penstock.errors import LeaseLost, RetryLater

SERVICES = {"checkout": "shop", "search": "web", "login": "accounts"}
BATCH = 20  # lines


def line(service: str, number: int) -> bytes:
    """One in 50 is broken, one in 10 is an error."""
    if number % 50 == 7:
        return b"not JSON, line %d" % number if number % 100 == 7 else b'{"number": %d}' % number
    level = "error" if number % 10 == 0 else "info"
    return json.dumps({"service": service, "number": number, "level": level}).encode()


def tell(text: object) -> None:
    print(text, flush=True)


def produce(path: str, service: str, count: str) -> None:
    with penstock.connect(path) as store:
        lines = store.queue("lines")
        for first in range(0, int(count), BATCH):
            batch = [line(service, number) for number in range(first, first + BATCH)]
            while True:
                try:
                    lines.put_many(batch, keys=[service.encode()] * BATCH, token=(service, first))
                    break
                except RetryLater:  # the owner is being replaced: the token makes it safe to send them again
                    time.sleep(0.1)
            tell(first + BATCH)


def count(path: str, stop: str) -> None:
    with penstock.connect(path) as store:
        consumer = store.queue("lines").consumer("counter", visibility_timeout_s=2)
        while True:
            try:
                messages = consumer.get(50, timeout_s=0.5)
                if not messages:
                    if os.path.exists(stop) and consumer.lag == 0:
                        return
                    continue
                with store.batch() as batch:
                    line_counts, errors = batch.kv("seen", value="int64"), batch.kv("errors", value="int64")
                    for message in messages:
                        assert message.key is not None
                        line_counts.merge(message.key, 1, operator="add_i64")
                        if b'"error"' in message.payload:
                            errors.merge(message.key, 1, operator="add_i64")
                    consumer.ack(messages, batch=batch)
                tell(len(messages))
            except (LeaseLost, RetryLater):  # nothing was written, or it is acknowledged: go on with the next
                continue


def route(path: str, checkpoint: str, how: str) -> None:
    from pyspark.sql import functions as F

    import penstock.spark

    spark = penstock.spark.session("day", master="local[2]", spark__sql__shuffle__partitions="2")
    owners = spark.read.format("penstock").option("table", "owners").load(path).withColumnRenamed("value", "team")

    def batch(messages: Any) -> dict[str, Any]:
        parsed = messages.withColumn(
            "line", F.from_json(F.col("payload").cast("string"), "service string, number long, level string")
        )
        services = parsed.where("line.service IS NOT NULL").select(F.col("line.service").cast("binary").alias("key"))
        by_team = services.join(owners, "key").groupBy("team").count()
        reason = F.when(F.col("line.number").isNull(), "not JSON").otherwise("no service").alias("reason")
        return {
            "totals": by_team.selectExpr("CAST(team AS BINARY) AS key", "count AS value", "'add_i64' AS op"),
            "dead": parsed.where("line.service IS NULL").select(*messages.columns, reason),
        }

    query = penstock.spark.stream(
        spark, path, source="lines", consumer="router", batch=batch, checkpoint=checkpoint, dead_letter="dead",
        max_rows=600, interval_s=0.0, available_now=how == "once",
    )  # fmt: skip
    while how == "on" and query.isActive and not penstock.spark.progress(query).batches:
        time.sleep(0.1)
    tell("a batch is committed" if how == "on" else "")
    penstock.spark.wait(query)
    spark.stop()


def report(path: str) -> None:
    import duckdb
    import polars

    with penstock.open(path) as store, store.snapshot() as snapshot:
        lines = snapshot.queue("lines").to_arrow()  # noqa: F841 - DuckDB finds it by its name
        dead = snapshot.queue("dead").to_arrow()
        counts: Any = duckdb.sql(
            "SELECT CAST(key AS VARCHAR), count(*), count(DISTINCT payload) FROM lines GROUP BY 1 ORDER BY 1"
        )
        letters = polars.DataFrame(dead).select(polars.col("payload").cast(polars.String).str.json_decode(
            polars.Struct({"reason": polars.String, "payload": polars.String})
        )).unnest("payload")  # fmt: skip
        tell(json.dumps({
            "installed": os.path.dirname(penstock.__file__),
            "lines": counts.fetchall(),
            "dead": sorted(letters.rows()),
            "check": [str(trouble) for trouble in store.troubles()],
            **{
                name: {key.decode(): value for key, value in snapshot.kv(name, value="int64").items()}
                for name in ("seen", "errors", "totals")
            },
        }))  # fmt: skip


if __name__ == "__main__":
    programs: dict[str, Any] = {"produce": produce, "count": count, "route": route, "report": report}
    programs[sys.argv[1]](*sys.argv[2:])
