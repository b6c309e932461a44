"""Spark over a store beside Spark over Parquet, a Spark sort, a trivial Python source and sink, and the embedded API.

One local session with two cores. Rows have a key of 16 random bytes, a value of 100 and an LSN. The store's owner is
this process, except where writes go through the gateway: there it is another one. Parquet is Spark's default (snappy);
the values are random, so that compression costs it time and saves no bytes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pyspark.sql import functions as F
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

import penstock
import penstock.spark
from bench.harness import Case, Goal, folder, rate, run, sized
from penstock.lsm.compaction import LevelLimits
from penstock.lsm.tree_settings import TreeSettings
from penstock.store.settings import StoreSettings
from penstock.store.store import Store

ROWS = int(os.environ.get("BENCH_SPARK_ROWS", sized("5000000", "200000")))
LOADED = ROWS // 5  # rows of a bulk write
RUNS = 8
MERGED = ROWS // 5  # rows of all runs together
BATCHES, BATCH_ROWS = 20, 100
SENT = 10_000

ALL_COLUMNS = ["bit_xor(xxhash64(key, value, lsn))", "count(*)"]
LENGTHS = ["sum(length(key) + length(value))", "sum(lsn)"]
KEY = "unhex(md5(string({})))"
VALUE = "unhex(concat(sha2(string({0}), 512), substr(sha2(concat(string({0}), 'x'), 512), 1, 72)))"


def rows(spark: Any, first: int, count: int) -> Any:
    numbers = spark.range(first, first + count)
    return numbers.selectExpr(f"{KEY.format('id')} as key", f"{VALUE.format('id')} as value")


def from_store(spark: Any, path: str, table: str = "rows") -> Any:
    return spark.read.format("penstock").option("table", table).load(path)


def to_store(frame: Any, path: str, table: str) -> None:
    frame.write.format("penstock").option("table", table).mode("append").save(path)


# -- reading


def bench_reads(spark: Any, path: str, store: Store) -> bool:
    store.kv("rows")
    to_store(rows(spark, 0, ROWS), store.path, "rows")
    store.compact("rows")
    parquet = f"{path}/rows.parquet"
    penstock.spark.export(spark, store.path, "rows", parquet)

    def read(frame: Any, columns: list[str]) -> float:
        return rate(ROWS, frame.selectExpr(*columns).collect)

    def ours(columns: list[str]) -> float:
        return read(from_store(spark, store.path), columns)

    def peer(columns: list[str]) -> float:
        return read(spark.read.parquet(parquet), columns)

    cases: list[Case] = []
    goals: list[Goal] = []
    for title, columns in (("a hash over all columns", ALL_COLUMNS), ("lengths and a sum", LENGTHS)):
        results = [
            frame.selectExpr(*columns).collect()
            for frame in (from_store(spark, store.path), spark.read.parquet(parquet))
        ]
        assert results[0] == results[1], "both have the same rows"
        name = f"kv, {title}"
        cases += [
            Case(name=name, run=partial(ours, columns)),
            Case(name=f"Parquet, {title}", run=partial(peer, columns), peer_of=name),
        ]
        goals += [Goal(ours=name, ratio=0.6, gate=True), Goal(ours=name, ratio=0.75)]
    return run("spark-read", cases, goals, rounds=5)


# -- writing


def bench_writes(spark: Any, path: str, store: Store) -> bool:
    source = f"{path}/source.parquet"
    rows(spark, 0, LOADED).write.parquet(source)
    numbers = iter(range(1_000))

    def by_spark() -> float:
        table = f"load{next(numbers)}"
        store.kv(table)
        figure = rate(LOADED, lambda: to_store(spark.read.parquet(source), store.path, table))
        store.drop(table)
        return figure

    def by_parquet() -> float:
        target = f"{path}/{next(numbers)}.parquet"
        figure = rate(LOADED, lambda: spark.read.parquet(source).write.parquet(target))
        shutil.rmtree(target)
        return figure

    def embedded() -> float:
        table = f"put{next(numbers)}"
        kv = store.kv(table)
        pairs = [(bytes(row.key), bytes(row.value)) for row in spark.read.parquet(source).limit(LOADED // 4).collect()]

        def work() -> None:
            for start in range(0, len(pairs), 1_000):
                kv.put_many(pairs[start : start + 1_000])
            store.flush()
            for tree, _ in store._maintenance.trees():
                store._maintenance.flush(tree)

        figure = rate(len(pairs), work)
        store.drop(table)
        return figure

    bulk, load = "bulk write of kv", "bulk load of kv, all in sstables"
    return run(
        "spark-write",
        [
            Case(name=bulk, run=by_spark),
            Case(name="write.parquet", run=by_parquet, peer_of=bulk),
            Case(name=load, run=by_spark),
            Case(name="put_many(1000), until all is in sstables", run=embedded, peer_of=load),
        ],
        [Goal(ours=bulk, ratio=0.7), Goal(ours=load, ratio=1.0)],
    )


# -- compaction


class Patient(StoreSettings):
    """A store that compacts when it is told to."""

    @property
    def tree(self) -> TreeSettings:
        return replace(super().tree, limits=LevelLimits(level0_runs=20), level0_slow=30, level0_stop=40)


def bench_compaction(spark: Any, path: str) -> bool:
    """Eight runs in the order of random keys, a tenth of each again in the next, into one."""
    each, numbers = MERGED // RUNS, iter(range(1_000))
    runs = [rows(spark, number * each * 9 // 10, each).coalesce(1) for number in range(RUNS)]
    as_parquet = f"{path}/runs.parquet"
    for number, frame in enumerate(runs):
        frame.selectExpr("*", f"{number}L as lsn").sort("key").write.mode("append").parquet(as_parquet)
    with penstock.open(f"{path}/merged", settings=Patient(offer_bytes_min=1)) as store:

        def by_tasks() -> float:
            table = f"runs{next(numbers)}"
            store.kv(table)
            for frame in runs:
                to_store(frame, store.path, table)
            with driver(spark, store):
                figure = rate(MERGED, lambda: store.compact(table))
            store.drop(table)
            return figure

        def by_sort() -> float:
            target = f"{path}/{next(numbers)}.parquet"
            newest = spark.read.parquet(as_parquet).groupBy("key").agg(F.max_by("value", "lsn"), F.max("lsn"))
            figure = rate(MERGED, lambda: newest.sort("key").write.parquet(target))
            shutil.rmtree(target)
            return figure

        name = "compaction of 8 sorted runs by tasks of Spark"
        cases = [Case(name=name, run=by_tasks), Case(name="the same by a Spark sort", run=by_sort, peer_of=name)]
        return run("spark-compaction", cases, [Goal(ours=name, ratio=5.0)])


@contextmanager
def driver(spark: Any, store: Store) -> Iterator[None]:
    """A driver that does the store's large jobs."""
    stop = threading.Event()
    thread = threading.Thread(target=penstock.spark.maintain, args=(spark, store.path), kwargs={"stop": stop})
    thread.start()
    try:
        while not store.offers.slots():
            time.sleep(0.01)
        yield
    finally:
        stop.set()
        thread.join()


# -- micro-batches


def trivial_format() -> type[DataSource]:
    """Numbers from nowhere to nowhere; made here, so that Spark sends the classes themselves to its processes."""

    class Part(InputPartition):
        def __init__(self, start: int, end: int) -> None:
            super().__init__(None)
            self.start, self.end = start, end

    class Reader(DataSourceStreamReader, SupportsTriggerAvailableNow):
        def prepareForTriggerAvailableNow(self) -> None:
            self._last = BATCHES * BATCH_ROWS

        def getDefaultReadLimit(self) -> ReadLimit:
            return ReadMaxRows(BATCH_ROWS)

        def initialOffset(self) -> dict[str, int]:
            return {"at": 0}

        def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
            return {"at": min(start["at"] + BATCH_ROWS, BATCHES * BATCH_ROWS)}

        def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
            return [Part(start["at"], end["at"])]

        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            assert isinstance(partition, Part)
            return ((number,) for number in range(partition.start, partition.end))

    class Writer(DataSourceStreamWriter):
        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            for _ in iterator:
                pass
            return WriterCommitMessage()

    class Trivial(DataSource):
        @classmethod
        def name(cls) -> str:
            return "trivial"

        def schema(self) -> str:
            return "number long"

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            return Reader()

        def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
            return Writer()

    return Trivial


def batches_a_second(query: Any) -> float:
    """By the median of its micro-batches, without the first, which starts Spark's processes."""
    took_ms = [float(progress["durationMs"]["triggerExecution"]) for progress in query.recentProgress[1:]]
    return 1_000 / statistics.median(took_ms)


def bench_streams(spark: Any, path: str, store: Store) -> bool:
    events = store.queue("events")
    events.put_many([b"%d" % number for number in range(BATCHES * BATCH_ROWS)], durable=True)
    store.queue("copied")
    spark.dataSource.register(trivial_format())
    numbers = iter(range(1_000))

    def copy(reader: Any, kind: str, *table: str) -> float:
        writer = reader.writeStream.format(kind).trigger(availableNow=True)
        writer = writer.option("checkpointLocation", f"{path}/checkpoint{next(numbers)}")
        if table:
            writer = writer.option("table", table[0]).option("path", store.path)
        query = writer.start()
        query.awaitTermination()
        return batches_a_second(query)

    def ours() -> float:
        reader = spark.readStream.format("penstock").option("table", "events").option("maxRows", str(BATCH_ROWS))
        return copy(reader.load(store.path).select("payload"), "penstock", "copied")

    def trivial() -> float:
        return copy(spark.readStream.format("trivial").load(), "trivial")

    def exactly_once() -> float:
        query = penstock.spark.stream(
            spark, store.path, source="events", consumer=f"c{next(numbers)}", max_rows=BATCH_ROWS, available_now=True,
            batch=lambda frame: {"copied": frame.select("payload")},
        )  # fmt: skip
        penstock.spark.wait(query)
        return batches_a_second(query)

    name = "micro-batches, source and sink"
    return run(
        "spark-stream",
        [
            Case(name=name, run=ours),
            Case(name="a trivial Python source and sink", run=trivial, peer_of=name),
            Case(name="penstock.spark.stream", run=exactly_once),
        ],
        [Goal(ours=name, ratio=1 / 1.2)],
    )


# -- the gateway

OWNER = """
import sys, penstock
with penstock.open(sys.argv[1]) as store:
    store.kv("sent")
    print("open", flush=True)
    sys.stdin.read()
"""


def bench_gateway(path: str) -> bool:
    """10,000 puts whose acknowledgements are awaited once."""
    pairs = [(os.urandom(16), os.urandom(100)) for _ in range(SENT)]

    def send(store: Any) -> float:
        table = store.kv("sent")

        def work() -> None:
            for key, value in pairs:
                table.put(key, value)
            store.flush()

        return rate(SENT, work)

    command = [sys.executable, "-c", OWNER, f"{path}/served"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with penstock.connect(f"{path}/served") as remote, penstock.open(f"{path}/own") as local:
            local.kv("sent")
            name = "10,000 puts over the gateway"
            cases = [
                Case(name=name, run=lambda: send(remote)),
                Case(name="the same, embedded", run=lambda: send(local), peer_of=name),
            ]
            return run("gateway", cases, [Goal(ours=name, ratio=0.5)], rounds=9)


def main() -> bool:
    spark = penstock.spark.session(
        "bench", master="local[2]", spark__sql__shuffle__partitions="2", spark__driver__memory="3g"
    )
    with folder() as path:
        with penstock.open(f"{path}/store") as store:
            gates = [
                bench_reads(spark, path, store),
                bench_writes(spark, path, store),
                bench_streams(spark, path, store),
            ]
        gates += [bench_compaction(spark, path), bench_gateway(path)]
    spark.stop()
    return all(gates)


if __name__ == "__main__":
    sys.exit(not main())
