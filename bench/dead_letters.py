"""A stream in which 1 % of the records are broken beside the same stream with none: what it costs to set them aside.

`QUICK=1 python -m bench dead_letters` takes 2,000 messages in one batch, otherwise 20,000 in four. Each run is a new
consumer; the session is warm. A record is broken for Spark (a cast fails), for a Python function, or for the table (no
key).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pyspark.sql import functions as F

import penstock
import penstock.spark
from bench.harness import Case, Goal, folder, rate, run, sized
from penstock.store.store import Store

MESSAGES, BATCH_ROWS = sized((20_000, 5_000), (2_000, 2_000))
EVERY = 100  # one of so many is broken
KEYS = 50


def parsed(frame: Any) -> Any:
    text = F.col("payload").cast("string")
    return frame.select("key", "payload", F.from_json(text, "device string, value string").alias("r"))


def results(frame: Any) -> dict[str, Any]:
    totals = frame.groupBy("device").agg(F.sum("value").alias("value"))
    key = F.col("device").cast("binary").alias("key")
    return {
        "copied": frame.select("key", "payload"),
        "totals": totals.select(key, "value", F.lit("add_i64").alias("op")),
    }


def by_cast(frame: Any) -> dict[str, Any]:
    return results(parsed(frame).select("key", "payload", "r.device", F.col("r.value").cast("long").alias("value")))


def by_table(frame: Any) -> dict[str, Any]:
    value = F.col("r.value").try_cast("long")
    device = F.when(value.isNotNull(), F.col("r.device"))
    return results(parsed(frame).select("key", "payload", device.alias("device"), value.alias("value")))


def by_python(frame: Any) -> dict[str, Any]:
    def parse(batches: Iterator[Any]) -> Iterator[Any]:
        import json

        import pyarrow as pa

        for batch in batches:
            rows = [json.loads(payload) for payload in batch.column("payload").to_pylist()]
            device = pa.array([row["device"] for row in rows], pa.string())
            value = pa.array([int(row["value"]) for row in rows], pa.int64())
            columns = [batch.column("key"), batch.column("payload"), device, value]
            yield pa.record_batch(columns, names=["key", "payload", "device", "value"])

    return results(frame.mapInArrow(parse, "key binary, payload binary, device string, value long"))


def feed(store: Store, name: str, every: int) -> int:
    """Put the messages, one of `every` broken; return how many are."""
    broken = range(every // 2, MESSAGES, every) if every else range(0)
    values = ["x" if number in broken else str(number) for number in range(MESSAGES)]
    payloads = [json.dumps({"device": f"d{n % KEYS}", "value": value}).encode() for n, value in enumerate(values)]
    store.queue(name).put_many(payloads, keys=[b"%d" % (n % KEYS) for n in range(MESSAGES)], durable=True)
    return len(broken)


def main() -> bool:
    spark = penstock.spark.session("bench", master="local[2]", spark__sql__shuffle__partitions="2")
    numbers = iter(range(1_000_000))
    with folder() as path, penstock.open(f"{path}/store") as store:
        broken = {"none": feed(store, "none", 0), "some": feed(store, "some", EVERY)}
        store.queue("copied")
        store.kv("totals", value="int64")

        def stream(source: str, route: Callable[[Any], dict[str, Any]]) -> float:
            number = next(numbers)
            dead = f"dead{number}"
            store.queue(dead)
            done = penstock.spark.StreamProgress()

            def work() -> None:
                nonlocal done
                query = penstock.spark.stream(
                    spark, store.path, source=source, consumer=f"c{number}", batch=route, max_rows=BATCH_ROWS,
                    available_now=True, dead_letter=dead,
                )  # fmt: skip
                done = penstock.spark.wait(query)

            figure = rate(MESSAGES, work)
            letters = [json.loads(message.payload) for message in store.queue(dead).read()]
            assert (done.rows_in, done.dead, done.lag) == (MESSAGES, broken[source], 0)
            assert set(Counter(letter["sequence"] for letter in letters).values()) <= {1}
            assert len(letters) == broken[source]
            assert all("x" in letter["reason"] or "key" in letter["reason"] for letter in letters)
            print(f"  {route.__name__}, {source} broken: {MESSAGES / figure:.2f} s, {done.batches} commits")
            return figure

        cases: list[Case] = []
        goals: list[Goal] = []
        for route in (by_cast, by_python, by_table):
            stream("none", route)  # Spark's processes are started, and its code is compiled
            name = f"{route.__name__}, 1 % broken"
            cases += [
                Case(name=name, run=partial(stream, "some", route)),
                Case(name=f"{route.__name__}, none broken", run=partial(stream, "none", route), peer_of=name),
            ]
            goals.append(Goal(ours=name, ratio=1 / 3, gate=True))
        gates_met = run("dead-letters", cases, goals)
    spark.stop()
    return gates_met


if __name__ == "__main__":
    sys.exit(not main())
