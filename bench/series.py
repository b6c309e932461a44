"""Series beside DuckDB, SQLite and VictoriaMetrics: 10,000,000 samples over 10,000 series, 10,000 rows a commit.

Half of the series are counters, a quarter walks with one decimal, 15 % nearly constant, 10 % noise of full precision;
the rows of a commit have one time, 15 seconds after the last. Ours, DuckDB and SQLite are durable at each commit
(DuckDB takes an Arrow table, as we do); VictoriaMetrics answers before it syncs, and is measured by lines of its import
until the last is searchable, once. If its command is not on the path, Debian's package is unpacked into a folder; where
that fails, it is left out, and a line says so.

Spark reads the same samples from the store and from Parquet, with the aggregates of three queries. One needs all
columns; one needs two of them, which we read with the option `columns` and without it; one needs only the samples of
one metric (a selector for us, a filter for Parquet).

`PENSTOCK_BENCH_SERIES_COMMITS` makes the run shorter (default 1,000 commits); `PENSTOCK_BENCH_SERIES_PARTS` names what
to run (default `ingest,victoria,spark,open`).
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

import penstock
from bench.harness import Case, Figure, Goal, folder, rate, run, sized, tell

SERIES = 10_000
HOSTS, METRICS = 100, 100
COMMITS = int(os.environ.get("PENSTOCK_BENCH_SERIES_COMMITS", sized("1000", "50")))
PARTS = os.environ.get("PENSTOCK_BENCH_SERIES_PARTS", "ingest,victoria,spark,open").split(",")
SPARK_COMMITS = COMMITS // 5
STEP_US = 15_000_000
START_US = 1_790_000_000_000_000 // 86_400_000_000 * 86_400_000_000
HOUR_US = 3_600_000_000
MANY_SERIES = sized(1_000_000, 50_000)

_rng = np.random.default_rng(7)
_metric = np.array([f"metric_{number:03d}" for number in range(METRICS)])
_number = np.arange(SERIES)
NAMES = pa.array(_metric[_number // HOSTS]).dictionary_encode().cast(pa.string())
HOST = pa.array([f"host-{number % HOSTS:03d}.example.net" for number in _number])
DC = pa.array([f"dc{number % HOSTS % 4}" for number in _number])
_shape = _number // HOSTS % 20  # by metric: 10 counters, 5 walks, 3 nearly constant, 2 noise
COUNTER, WALK, CONSTANT, NOISE = (
    _shape < 10,
    (_shape >= 10) & (_shape < 15),
    (_shape >= 15) & (_shape < 18),
    _shape >= 18,
)


class Values:
    """The values of one commit after the other, made in advance so that nobody pays for them."""

    def __init__(self) -> None:
        state = np.zeros(SERIES)
        state[COUNTER] = _rng.integers(0, 10**6, int(COUNTER.sum()))
        state[WALK | CONSTANT] = 50.0
        self.columns: list[Any] = []
        for _ in range(COMMITS):
            state[COUNTER] += _rng.integers(0, 100, int(COUNTER.sum()))
            state[WALK] = np.round(state[WALK] + _rng.normal(0, 0.3, int(WALK.sum())), 1)
            moved = CONSTANT & (_rng.random(SERIES) < 0.002)
            state[moved] = np.round(_rng.random(int(moved.sum())) * 100)
            state[NOISE] = _rng.normal(0, 1, int(NOISE.sum()))
            self.columns.append(state.copy())


def tables(values: Values) -> Iterator[pa.Table]:
    for commit, column in enumerate(values.columns):
        times = pa.array(np.full(SERIES, START_US + commit * STEP_US)).cast(pa.timestamp("us"))
        yield pa.table({"metric": NAMES, "host": HOST, "dc": DC, "time": times, "value": column})


# -- the stores


def ingest_ours(path: str, values: Values) -> float:
    with penstock.open(path) as store:
        table = store.series("metrics")

        def work() -> None:
            for rows in tables(values):
                table.write_arrow(rows, durable=True)

        return rate(SERIES * COMMITS, work)


def ingest_duckdb(path: str, values: Values) -> float:
    with closing(duckdb.connect(path)) as database:
        database.execute(
            "CREATE TABLE samples (metric VARCHAR, host VARCHAR, dc VARCHAR, time TIMESTAMP, value DOUBLE)"
        )

        def work() -> None:
            for rows in tables(values):
                database.register("rows", rows)
                database.execute("INSERT INTO samples SELECT * FROM rows")
                database.unregister("rows")

        return rate(SERIES * COMMITS, work)


def ingest_sqlite(path: str, values: Values) -> float:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute(
            "CREATE TABLE samples (series INTEGER, time INTEGER, value REAL, PRIMARY KEY (series, time)) WITHOUT ROWID"
        )
        some = values.columns[: max(1, COMMITS // 20)]

        def work() -> None:
            for commit, column in enumerate(some):
                at = START_US + commit * STEP_US
                database.execute("BEGIN")
                database.executemany(
                    "INSERT OR REPLACE INTO samples VALUES (?, ?, ?)",
                    [(series, at, value) for series, value in enumerate(column.tolist())],
                )
                database.execute("COMMIT")

        return rate(SERIES * len(some), work)


# -- VictoriaMetrics


def victoria_command(root: str) -> str | None:
    """The command, from Debian's package if it is not installed; None if it cannot be had."""
    command = shutil.which("victoria-metrics") or shutil.which("victoria-metrics-prod")
    if command is None:
        unpack = "apt-get -q download victoria-metrics && dpkg -x victoria-metrics_*.deb ."
        subprocess.run(unpack, shell=True, cwd=root, capture_output=True, timeout=120, check=False)
        command = shutil.which(f"{root}/usr/bin/victoria-metrics")
    if command is None:
        print("  VictoriaMetrics is left out: its package cannot be had here")
    return command


@contextmanager
def victoria(command: str, path: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [command, f"-storageDataPath={path}", f"-httpListenAddr=127.0.0.1:{port}", "-retentionPeriod=100y"]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1).read()
                break
            except OSError:
                time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def run_victoria(root: str, values: Values, report: dict[str, float]) -> None:
    """Measure its ingest, without the making of lines, and its bytes after merges."""
    command, path = victoria_command(root), f"{root}/victoria-data"
    if command is None:
        return
    heads = [f"{NAMES[n]},host={HOST[n]},dc={DC[n]} value=" for n in range(SERIES)]
    with victoria(command, path) as address:
        took = 0.0
        for commit, column in enumerate(values.columns):
            at = f" {(START_US + commit * STEP_US) * 1_000}"
            lines = [head + repr(value) + at for head, value in zip(heads, column.tolist(), strict=True)]
            body = "\n".join(lines).encode()
            begin = time.perf_counter()
            urllib.request.urlopen(f"{address}/write", body, timeout=60).read()
            took += time.perf_counter() - begin
        begin = time.perf_counter()
        urllib.request.urlopen(f"{address}/internal/force_flush", timeout=60).read()
        took += time.perf_counter() - begin
        report["VictoriaMetrics, not synced, samples a second"] = SERIES * COMMITS / took
        urllib.request.urlopen(f"{address}/internal/force_merge", timeout=600).read()
        time.sleep(20)  # it merges in the background, and does not say when it is done
    report["VictoriaMetrics bytes a sample"] = size_of(path) / (SERIES * COMMITS)


# -- Spark


def run_spark(root: str, values: Values, report: dict[str, float]) -> None:
    """Read a fifth of the samples by Spark, from the store and from Parquet."""
    import penstock.spark

    some = Values.__new__(Values)
    some.columns = values.columns[:SPARK_COMMITS]
    path, copy = f"{root}/spark-store", f"{root}/spark-parquet"
    with penstock.open(path) as store:
        table = store.series("metrics", shards=2)
        for rows in tables(some):
            table.write_arrow(rows)
        store.flush()
        store.compact("metrics")
        spark = penstock.spark.session("bench", master="local[2]", spark__driver__memory="2g")
        try:

            def ours(**options: str) -> Any:
                return spark.read.format("penstock").option("table", "metrics").options(**options).load(path)

            def compare(title: str, mine: Callable[[], Any], theirs: Callable[[], Any]) -> None:
                # They make a new DataFrame each time: Spark reuses the stages of one that was collected before.
                report[f"{title}, ms"] = best_ms(lambda: mine().collect(), 6)
                report[f"{title}, Parquet, ms"] = best_ms(lambda: theirs().collect(), 6)
                report[f"{title}, of Parquet (goal 0.7)"] = report[f"{title}, Parquet, ms"] / report[f"{title}, ms"]

            def parquet() -> Any:
                return spark.read.parquet(copy)

            ours().write.parquet(copy)
            name, everything = str(NAMES[4_321]), "bit_xor(xxhash64(metric, labels['host'], time, value))"
            compare(
                "Spark, all columns", lambda: ours().selectExpr(everything), lambda: parquet().selectExpr(everything)
            )
            compare(
                "Spark, avg by metric",
                lambda: ours().groupBy("metric").avg("value"),
                lambda: parquet().groupBy("metric").avg("value"),
            )
            compare(
                "Spark, avg by metric, two columns",
                lambda: ours(columns="metric,value").groupBy("metric").avg("value"),
                lambda: parquet().groupBy("metric").avg("value"),
            )
            compare(
                "Spark, sum by dc of one metric",
                lambda: ours(selector=name).groupBy("labels.dc").sum("value"),
                lambda: parquet().where(f"metric = '{name}'").groupBy("labels.dc").sum("value"),
            )
        finally:
            spark.stop()


# -- reading


def size_of(path: str) -> int:
    target = Path(path)
    return (
        target.stat().st_size if target.is_file() else sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    )


def best_ms(work: Callable[[], object], count: int = 20) -> float:
    took = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        took.append(time.perf_counter() - begin)
    return min(took) * 1_000


def read_ours(path: str, report: dict[str, float]) -> None:
    with penstock.open(path) as store:
        table = store.series("metrics")
        store.compact("metrics")
        name, host = str(NAMES[4_321]), str(HOST[4_321])
        start = START_US + (COMMITS // 2) * STEP_US
        report["one series, one hour, ms"] = best_ms(
            lambda: table.select(f'{name}{{host="{host}"}}', start, start + HOUR_US), 100
        )
        report["sum by dc in 5-minute steps, ms"] = best_ms(
            lambda: table.aggregate(f"{name}{{}}", function="sum", by=["dc"], step=300.0)
        )
    report["bytes a sample"] = size_of(f"{path}/tables") / (SERIES * COMMITS)


def read_duckdb(path: str, report: dict[str, float]) -> None:
    with closing(duckdb.connect(path)) as database:
        database.execute("CHECKPOINT")
        name, host = str(NAMES[4_321]), str(HOST[4_321])
        start = START_US + (COMMITS // 2) * STEP_US
        report["DuckDB one series, one hour, ms"] = best_ms(
            lambda: database.sql(
                "SELECT time, value FROM samples WHERE metric = ? AND host = ? AND time >= make_timestamp(?) "
                "AND time < make_timestamp(?) ORDER BY time",
                params=[name, host, start, start + HOUR_US],
            ).to_arrow_table()
        )
        report["DuckDB sum by dc in 5-minute steps, ms"] = best_ms(
            lambda: database.sql(
                "SELECT dc, time_bucket(INTERVAL 5 MINUTES, time) AS step, sum(value) FROM samples WHERE metric = ? "
                "GROUP BY ALL",
                params=[name],
            ).to_arrow_table()
        )
    report["DuckDB bytes a sample"] = size_of(path) / (SERIES * COMMITS)


def open_with_many(report: dict[str, float]) -> None:
    """Opening with 1,000,000 series against opening with none, and the memory of series that are written to."""
    with folder() as path:
        for name, count in (("empty", 0), ("many", MANY_SERIES)):
            gc.collect()
            before = resident_bytes()
            with penstock.open(f"{path}/{name}") as store:
                table = store.series("metrics")
                for start in range(0, count, 50_000):
                    some = np.arange(start, start + 50_000)
                    rows = {
                        "metric": pa.array(np.full(len(some), "m")),
                        "instance": pa.array(np.char.add("i", some.astype(str))),
                        "time": pa.array(np.full(len(some), START_US)).cast(pa.timestamp("us")),
                        "value": np.zeros(len(some)),
                    }
                    table.write_arrow(pa.table(rows), durable=True)
                if count:
                    store.compact("metrics")
                    gc.collect()
                    report["memory of a live series, bytes"] = (resident_bytes() - before) / count

            def opening(name: str = name) -> None:
                with penstock.open(f"{path}/{name}") as store:
                    store.series("metrics")

            report[f"open, {name}, ms"] = best_ms(opening, 5)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096


def main() -> bool:
    values, report = Values(), dict[str, float]()
    gates_met = True
    with folder() as root:
        rounds = iter(range(100))
        paths: dict[str, str] = {}

        def case(name: str, ingest: Callable[[str, Values], float]) -> Callable[[], float]:
            def measured() -> float:
                if name in paths:
                    shutil.rmtree(paths[name], ignore_errors=True)
                    Path(paths[name]).unlink(missing_ok=True)
                paths[name] = f"{root}/{name}-{next(rounds)}"
                return ingest(paths[name], values)

            return measured

        if "ingest" in PARTS:
            ours = "ingest, durable at each 10,000 rows"
            cases = [
                Case(name=ours, run=case("ours", ingest_ours)),
                Case(name="DuckDB, Arrow inserts", run=case("duckdb", ingest_duckdb), peer_of=ours),
                Case(name="SQLite, executemany", run=case("sqlite", ingest_sqlite)),
            ]
            gates_met = run("series", cases, [Goal(ours=ours, ratio=1.2, gate=True), Goal(ours=ours, ratio=2.0)])
            read_ours(paths["ours"], report)
            read_duckdb(paths["duckdb"], report)
        if "victoria" in PARTS:
            run_victoria(root, values, report)
        if "spark" in PARTS:
            run_spark(root, values, report)
    if "open" in PARTS:
        open_with_many(report)
    limits = {"bytes a sample": 1.8, "memory of a live series, bytes": 600}
    figures = [
        Figure(name=name, value=value, unit="", most=limits.get(name), gate=name == "bytes a sample")
        for name, value in report.items()
    ]
    return tell("series-reading", figures) and gates_met


if __name__ == "__main__":
    sys.exit(not main())
