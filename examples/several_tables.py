"""Several tables: orders become stock, parcels and a ledger in one commit with the position of the stream.

The second run has no checkpoint of the first. It reads what is new and nothing twice, because the position is in the
store. Orders that make no sense are set aside with the reason.

    python -m examples.several_tables [FOLDER]
"""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import penstock
import penstock.spark
from examples import run

ITEMS = ["bolt", "nut", "gear"]


def order(number: int) -> bytes:
    """One in ten is broken."""
    if number % 10 == 9:
        return b"{not json" if number % 20 == 9 else json.dumps({"id": number, "item": "nut", "amount": -1}).encode()
    return json.dumps({"id": number, "item": ITEMS[number % 3], "amount": 1 + number % 4}).encode()


def route(frame: DataFrame) -> dict[str, DataFrame]:
    """One micro-batch of orders: what it writes to each table."""
    parsed = frame.withColumn("o", F.from_json(F.col("payload").cast("string"), "id long, item string, amount long"))
    is_valid = F.coalesce(F.col("o.amount") > 0, F.lit(False))
    orders = parsed.where(is_valid).select("o.*")
    sold = orders.groupBy("item").agg(F.sum("amount").alias("amount"))
    item = F.col("item").cast("binary").alias("key")
    number = F.format_string("%08d", "id").cast("binary").alias("key")
    text = F.to_json(F.struct("id", "item", "amount"))
    return {
        "ledger": orders.select(number, text.alias("value")),
        "stock": sold.select(item, (-F.col("amount")).alias("value"), F.lit("add_i64").alias("op")),
        "parcels": orders.select(item, text.cast("binary").alias("payload")),
        "dead": parsed.where(~is_valid).select(*frame.columns, F.lit("no amount above 0").alias("reason")),
    }


def main(spark: SparkSession, folder: str) -> dict[str, Any]:
    """The stock, how much is in each table, and how many orders each run read."""
    with penstock.open(folder) as store:
        orders = store.queue("orders", shards=2)
        stock, ledger = store.kv("stock", value="int64"), store.kv("ledger", value="utf8")
        parcels, dead = store.queue("parcels"), store.queue("dead")
        read = []
        for run_number in range(2):
            numbers = range(run_number * 200, run_number * 200 + 200)
            orders.put_many(map(order, numbers), keys=[b"%d" % (n % 7) for n in numbers], token=("shop", run_number))
            query = penstock.spark.stream(
                spark, folder, source="orders", consumer="shop", batch=route, dead_letter="dead", available_now=True
            )
            done = penstock.spark.wait(query)
            print(f"read {done.rows_in} orders in {done.batches} batches, {done.dead} set aside, {done.lag} wait")
            read.append(done.rows_in)
        letter = json.loads(dead.read()[0].payload)
        print(f"the first dead letter: {letter['reason']} in {letter['payload']}")
        counts = {"ledger": len(list(ledger.scan())), "parcels": parcels.statistics().messages}
        counts["dead"] = dead.statistics().messages
        print(f"stock {dict(stock.scan())}, {counts}")
        return {"read": read, "stock": {item.decode(): left for item, left in stock.scan()}, **counts}


if __name__ == "__main__":
    run(main)
