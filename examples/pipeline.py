"""The main job: telemetry of a fleet through a queue and Spark into tables, with every event accounted for.

This process owns the store in DATA and feeds the queue `events`: readings of a simulated fleet (seeded, so the totals
are known, with some records that are broken) and of this machine. A second process runs the pipeline on Spark: it keeps
the latest reading and a running total of each device, and sets broken records aside with the reason. At the end the
numbers are laid side by side; the last row is the difference, and it is 0.

    RATE      events a second (2000)         SECONDS   how long (60)
    DATA      a folder, kept and reused      CHAOS=1   kill the query and delete its checkpoint, again and again
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import penstock
from examples import report

DEVICES = 200
BROKEN = 0.01  # of the fleet's records
CONSUMER = "router"
THIS_MACHINE = "this-machine"
END_WAIT_S = 180.0


@dataclass
class Run:
    """What is seen while it runs."""

    began_s: float
    produced: list[tuple[float, int]] = field(default_factory=list)  # seconds, events so far
    probes: deque[tuple[int, float]] = field(default_factory=deque)  # this machine's readings: number, when it was put
    latencies: list[tuple[float, float]] = field(default_factory=list)  # seconds, put to visible in ms
    kills: int = 0


# -- producing


def reading(chance: random.Random, number: int) -> tuple[bytes, bytes, bool]:
    """(key, payload, whether it is sound) of one record of the fleet."""
    device = f"device-{chance.randrange(DEVICES):03d}"
    key = device.encode()
    if chance.random() < BROKEN:
        broken = [b"{not json", b'{"device":null,"value":1.0}', b"\xff\xfe\x00", b""]
        return key, chance.choice(broken), False
    value = round(20 + 5 * chance.random(), 2)
    record = {"device": device, "n": number, "value": value, "put_us": time.time_ns() // 1000}
    return key, json.dumps(record).encode(), True


def this_machine(number: int) -> bytes:
    """The load of this machine as a record."""
    load = os.getloadavg()[0]
    return json.dumps({"device": THIS_MACHINE, "n": number, "value": load, "put_us": time.time_ns() // 1000}).encode()


def produce(store: penstock.Store, run: Run, rate: int, seconds: float, seed: int) -> None:
    """Feed the queue. Each batch and the count of what it holds are one commit, so the count is exact whatever ends."""
    chance = random.Random(seed)
    number, tick = 0, 0.05
    due, told = time.monotonic(), 0.0
    while (now := time.monotonic() - run.began_s) < seconds:
        wanted = max(0, int(rate * min(now + tick, seconds)) - number)
        records = [reading(chance, number + place) for place in range(wanted)]
        number += wanted
        sound = sum(ok for _, _, ok in records)
        keys, payloads = [key for key, _, _ in records], [payload for _, payload, _ in records]
        if now >= told:
            keys.append(THIS_MACHINE.encode())
            payloads.append(this_machine(int(told)))
            run.probes.append((int(told), time.monotonic()))
            sound += 1
            told += 1.0
        with store.batch(durable=False) as batch:
            if payloads:
                batch.queue("events").put_many(payloads, keys=keys)
                batch.kv("expected", value="int64").merge(b"sound", sound, operator="add_i64")
                batch.kv("expected", value="int64").merge(b"broken", len(payloads) - sound, operator="add_i64")
        run.produced.append((now, number))
        due += tick
        time.sleep(max(0.0, due - time.monotonic()))
    store.flush()


def watch(store: penstock.Store, run: Run, stop: threading.Event) -> None:
    """How long each reading of this machine takes from its put until `latest` has it, or a later one."""
    latest = store.kv("latest")
    since_us = time.time_ns() // 1000
    while not stop.wait(0.02):
        value = latest.get(THIS_MACHINE.encode())
        record = json.loads(value) if value is not None else {"put_us": 0}
        while run.probes and record["put_us"] >= since_us and run.probes[0][0] <= record["n"]:
            _, put_s = run.probes.popleft()
            now_s = time.monotonic()
            run.latencies.append((now_s - run.began_s, (now_s - put_s) * 1e3))


# -- the query, in a process of its own


def route(frame):  # type: ignore[no-untyped-def]
    """One micro-batch: the latest reading and a count of each device, and what is broken."""
    from pyspark.sql import functions as F

    parsed = frame.withColumn(
        "r", F.from_json(F.col("payload").cast("string"), "device string, n long, value double, put_us long")
    )
    sound = F.col("r.device").isNotNull() & F.col("r.value").isNotNull()
    good = parsed.where(sound).select("shard", "sequence", "payload", F.col("r.device").alias("device"))
    by_device = good.groupBy("device").agg(
        F.max_by("payload", F.struct("shard", "sequence")).alias("payload"), F.count("*").alias("count")
    )
    key = F.col("device").cast("binary").alias("key")
    return {
        "latest": by_device.select(key, F.col("payload").alias("value")),
        "totals": by_device.select(key, F.col("count").alias("value"), F.lit("add_i64").alias("op")),
        "dead": parsed.where(F.coalesce(~sound, F.lit(True))).select(
            "shard", "sequence", "timestamp", "key", "payload",
            F.when(F.col("r").isNull() | F.col("r.device").isNull(), "no device").otherwise("no value").alias("reason"),
        ),
    }  # fmt: skip


def query(folder: str, checkpoint: str) -> None:
    """The second process: run the pipeline until it is told to stop."""
    import penstock.spark

    spark = penstock.spark.session("fleet")
    running = penstock.spark.stream(
        spark,
        folder,
        source="events",
        consumer=CONSUMER,
        batch=route,
        checkpoint=checkpoint,
        interval_s=0.0,
        max_rows=200_000,
        dead_letter="dead",
    )
    print("running", flush=True)
    done = penstock.spark.wait(running)
    print(json.dumps(done.__dict__), flush=True)
    if (error := running.exception()) is not None:
        raise SystemExit(str(error).splitlines()[0])
    spark.stop()


class Query:
    """The query's process, started, killed and started again."""

    def __init__(self, folder: str, checkpoint: str) -> None:
        self._command = [sys.executable, "-m", "examples.pipeline", "query", folder, checkpoint]
        self._checkpoint = checkpoint
        self.log = open(f"{folder}-query.log", "a")  # noqa: SIM115 - it lives as long as the queries
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self.log, text=True, start_new_session=True
        )

    def wait_until_running(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise SystemExit(f"the query did not start: see {self.log.name}")

    def kill(self) -> None:
        """SIGKILL for the driver and its JVM, and no checkpoint left."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self._checkpoint, ignore_errors=True)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


def chaos(running: Query, run: Run, until_s: float) -> None:
    """Kill the query a few times while events come in."""
    chance = random.Random(3)
    while time.monotonic() - run.began_s < until_s:
        time.sleep(chance.uniform(4, 9))
        running.kill()
        run.kills += 1
        print(f"  the query was killed and its checkpoint deleted ({run.kills})")
        running.start()
        running.wait_until_running()


# -- accounting


def wait_for_lag(store: penstock.Store, running: Query) -> None:
    """Until every message is read."""
    consumer, deadline_s = store.queue("events").consumer(CONSUMER), time.monotonic() + END_WAIT_S
    while consumer.lag:
        if running.process.poll() is not None:
            raise SystemExit(f"the query ended by itself: see {running.log.name}")
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{consumer.lag} messages were not read within {END_WAIT_S} s: see {running.log.name}")
        time.sleep(0.2)


def account(store: penstock.Store) -> list[tuple[str, int]]:
    """All numbers at one LSN; the last one is the difference."""
    events = store.queue("events")
    position = events.consumer(CONSUMER).position
    with store.snapshot() as snapshot:
        expected = dict(snapshot.kv("expected", value="int64").scan())
        totals = sum(value for _, value in snapshot.kv("totals", value="int64").scan())
        dead = snapshot.queue("dead").to_arrow().num_rows
        produced = snapshot.queue("events").to_arrow().num_rows
    read = sum(place - 1 for place in position.values())
    sound, broken = expected.get(b"sound", 0), expected.get(b"broken", 0)
    difference = abs(produced - sound - broken) + abs(produced - read) + abs(sound - totals) + abs(broken - dead)
    return [
        ("produced", produced),
        ("read by Spark", read),
        ("accepted (sound records produced)", sound),
        ("in the running totals", totals),
        ("dead-lettered", dead),
        ("difference", difference),
    ]


JOIN = """
SELECT a.device, a.value AS high, count(*) AS readings_before, round(avg(b.value), 2) AS mean_before
FROM readings a JOIN readings b
  ON a.device = b.device AND b.put_us <= a.put_us AND b.put_us > a.put_us - 10000000
WHERE a.value >= 24.99
GROUP BY a.device, a.value, a.put_us ORDER BY high DESC, a.device LIMIT 5"""


def point_in_time(folder: str) -> str:
    """A join of each high reading with what was known of its device in the ten seconds before, at one snapshot."""
    command = [sys.executable, "-m", "examples.pipeline", "join", folder]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def join(folder: str) -> None:
    from pyspark.sql import functions as F

    import penstock.spark

    spark = penstock.spark.session("join")
    penstock.spark.views(spark, folder)
    parsed = F.from_json(F.col("payload").cast("string"), "device string, n long, value double, put_us long")
    spark.table("events").select(parsed.alias("r")).select("r.*").createOrReplaceTempView("readings")
    spark.sql(JOIN).show(truncate=False)
    spark.stop()


def main() -> int:
    rate, seconds = int(os.environ.get("RATE", "2000")), float(os.environ.get("SECONDS", "60"))
    kept = os.environ.get("DATA")
    data = Path(kept or tempfile.mkdtemp(prefix="penstock-run-")).absolute()
    data.mkdir(parents=True, exist_ok=True)
    folder, checkpoint = str(data / "store"), str(data / "checkpoint")
    wild = os.environ.get("CHAOS", "") not in ("", "0")
    print(f"Penstock: {rate:,} events a second for {seconds:.0f} s through Spark, in {folder}\n")
    with penstock.open(folder) as store:
        for name in ("events", "dead"):
            store.queue(name, shards=2 if name == "events" else 1)
        store.kv("latest")
        store.kv("totals", value="int64")
        store.kv("expected", value="int64")
        running = Query(folder, checkpoint)
        try:
            running.wait_until_running()
            run, stop = Run(time.monotonic()), threading.Event()
            seed = sum(
                store.kv("expected", value="int64").get(key) or 0 for key in (b"sound", b"broken")
            )  # another for each run
            threads = [
                threading.Thread(target=produce, args=(store, run, rate, seconds, seed)),
                threading.Thread(target=watch, args=(store, run, stop)),
            ]
            for thread in threads:
                thread.start()
            if wild:
                chaos(running, run, seconds - 5)
            threads[0].join()
            wait_for_lag(store, running)
            time.sleep(0.1)
            stop.set()
            threads[1].join()
        finally:
            running.stop()
        rows = account(store)
        store.checkpoint()
        joined = point_in_time(folder)
    return finish(data, rows, run, joined, wild)


def finish(data: Path, rows: list[tuple[str, int]], run: Run, joined: str, wild: bool) -> int:
    """Print what came of it, and write the report."""
    size = sum(path.stat().st_size for path in (data / "store" / "tables").rglob("*") if path.is_file())
    waits = sorted(value for _, value in run.latencies) or [0.0]
    median, worst = waits[len(waits) // 2], waits[-1]
    for name, value in rows:
        print(f"  {name:<40} {value:>12,}")
    if wild:
        print(f"\n  the query was killed and its checkpoint deleted {run.kills} times")
    print(f"\n  put to visible in `latest`, median / longest  {median:,.0f} / {worst:,.0f} ms")
    print(f"  bytes on disk for each event                  {size / max(1, rows[0][1]):,.0f}")
    print(f"\nEach high reading beside the ten seconds before it, at one snapshot:\n{JOIN}\n\n{joined}")
    page = report.write(data / "report.html", rows, run.produced, run.latencies, joined)
    folder = data / "store"
    print(f"A report with charts: {page}\nThree things to try on the same folder:")
    print(f"  .venv/bin/penstock tables {folder}")
    print(f"  .venv/bin/penstock scan {folder} totals --limit 5")
    print(f"  DATA={data} CHAOS=1 make run")
    return 1 if rows[-1][1] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["query"]:
        query(sys.argv[2], sys.argv[3])
    elif sys.argv[1:2] == ["join"]:
        join(sys.argv[2])
    else:
        sys.exit(main())
