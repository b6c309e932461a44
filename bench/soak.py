"""`make soak MINUTES=60`: mixed load on all kinds for a long time; what a store takes must stay level.

An owner in a process of its own writes batches over a queue, kv, series and vector table, consumes, searches, selects,
and keeps flushing, compacting, trimming and archiving to a folder; clients connect, read, write and leave; now and then
Spark counts a table (SPARK=1). Every few minutes the owner is ended, in turn by SIGTERM and by SIGKILL, and started
again. Each batch has a token and adds one to a counter: at the end the counter is the number of batches, whatever was
killed.

Retention keeps the data at one size, so memory, descriptors, threads, disk and latency must be level: the median of the
last third of the samples at most LEVEL times that of the second third. bench/page.py draws them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import penstock
from bench.harness import Figure, folder, sized, tell
from penstock.errors import Closed, LeaseLost, RetryLater

MINUTES = float(os.environ.get("MINUTES", sized("60", "2")))
RESTART_S = float(os.environ.get("SOAK_RESTART_S", sized("360", "30")))  # longer than the lease of a query of Spark
WITH_SPARK = os.environ.get("SPARK", "") not in ("", "0")
SAMPLE_S = 2.0
ANSWER_S = 180.0  # however busy the machine is
LEVEL = 1.25
POINTS = 300
KEYS, DIMENSIONS, BATCH = 20_000, 32, 200
MEASURES = {
    "anonymous_mb": "memory of the owner, MB",
    "descriptors": "open files",
    "threads": "threads",
    "disk_mb": "disk, MB",
    "archive_mb": "archive, MB",
    "p50_ms": "durable batch of 200 messages and rows, median, ms",
    "p99_ms": "the same, p99, ms",
    "batches_per_s": "batches a second",
}
ARCHIVE_S = 30.0
SETTINGS = penstock.StoreSettings(
    memory_bytes_max=256 << 20, archive=penstock.ArchiveSettings(interval_s=ARCHIVE_S, grace_s=2 * ARCHIVE_S)
)


# -- the owner


def own(path: str, first: int) -> None:
    """Own the store, and work in it until a signal; a sample each SAMPLE_S as a line of JSON."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    faulthandler.register(signal.SIGUSR1)  # what it does, if it writes no batch
    with penstock.open(path, settings=SETTINGS, timeout_s=ANSWER_S) as store:  # clients may have started an owner
        events = store.queue("events", shards=2, retention=penstock.Retention(bytes_max=32 << 20))
        store.kv("latest")
        counter = store.kv("counter", value="int64")
        metrics = store.series("metrics")
        docs = store.vector("docs", dimensions=DIMENSIONS)
        done = max(first, counter.get(b"batches") or 0)
        workers = [
            threading.Thread(target=consume, args=(events, ended), daemon=True),
            threading.Thread(target=read, args=(metrics, docs, ended), daemon=True),
        ]
        for worker in workers:
            worker.start()
        for number, took in enumerate(batches(store, done, ended), done + 1):
            latencies.append(took)
            if number % 500 == 0:
                metrics.delete("{}", end=int((time.time() - 600) * 1e6))
            if time.monotonic() >= next_sample[0]:
                print(json.dumps(sample(path, number)), flush=True)
        for worker in workers:
            worker.join(30)


latencies: list[float] = []
next_sample = [0.0]


def batches(store: Any, done: int, ended: threading.Event) -> Iterator[float]:
    """Batches over all kinds, one after the other; what each took."""
    chance = random.Random(done)
    numbers = np.random.default_rng(done)
    while not ended.is_set():
        begin = time.perf_counter()
        try:
            with store.batch(token=("soak", done + 1)) as batch:
                fill(batch, chance, numbers)
        except RetryLater:  # the disk is slow: as an application does, with the same token
            ended.wait(0.1)
            continue
        done += 1
        yield time.perf_counter() - begin


def fill(batch: Any, chance: random.Random, numbers: np.random.Generator) -> None:
    """Put rows of every kind into a batch."""
    batch.kv("counter", value="int64").merge(b"batches", 1, operator="add_i64")
    latest, events = batch.kv("latest"), batch.queue("events")
    for _ in range(BATCH):
        key = chance.randrange(KEYS).to_bytes(4, "big")
        latest.put(key, chance.randbytes(100))
        events.put(chance.randbytes(100), key=key)
    for host in range(20):
        batch.series("metrics").write("load", chance.random(), {"host": f"h{host}"})
    ids = [f"d{chance.randrange(5_000)}" for _ in range(5)]
    batch.vector("docs").upsert(ids, numbers.normal(size=(5, DIMENSIONS)).astype(np.float32))


def consume(events: Any, ended: threading.Event) -> None:
    worker = events.consumer("worker")
    while not ended.is_set():
        with suppress(RetryLater, LeaseLost, Closed):  # a slow disk; and the end
            if messages := worker.get(500, timeout_s=1.0):
                worker.ack(messages)


def read(metrics: Any, docs: Any, ended: threading.Event) -> None:
    chance = np.random.default_rng(1)
    while not ended.wait(0.2):
        with suppress(RetryLater, Closed):
            metrics.aggregate("load", function="avg", by=["host"], step=60)
            if docs.count():
                docs.search(chance.normal(size=DIMENSIONS).astype(np.float32), k=5)


def sample(path: str, done: int) -> dict[str, float]:
    """What this process takes now, and how its batches went since the last sample."""
    taken = sorted(latencies)
    latencies.clear()
    next_sample[0] = time.monotonic() + SAMPLE_S
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "done": done,
        "anonymous_mb": int(status["RssAnon"].split()[0]) / 1_024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "disk_mb": size_mb(path),
        "archive_mb": size_mb(f"{Path(path).parent}/objects"),
        "p50_ms": median(taken) * 1e3,
        "p99_ms": taken[int(len(taken) * 0.99)] * 1e3,
        "batches_per_s": len(taken) / SAMPLE_S,
    }


def size_mb(folder: str) -> float:
    """What the files below a folder take; some of them may go meanwhile."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.lstat(f"{parent}/{name}").st_blocks * 512
    return size / 1e6


# -- clients


CLIENT = """
import sys, penstock
with penstock.connect(sys.argv[1], timeout_s=60) as store:
    rows = sum(1 for _ in store.kv("latest").scan(limit=1_000))
    store.kv("visitors", value="int64").merge(b"all", 1, operator="add_i64", durable=True)
    store.queue("events").read(limit=10)
"""
COUNT = """
import sys, penstock.spark
spark = penstock.spark.session()
print(spark.read.format("penstock").option("table", "latest").load(sys.argv[1]).count())
"""


def visit(path: str, ended: threading.Event, tally: dict[str, int]) -> None:
    """Clients in processes of their own, one after the other; one in 50 is Spark's."""
    number = 0
    while not ended.wait(1.0):
        number += 1
        code = COUNT if WITH_SPARK and number % 50 == 0 else CLIENT
        try:
            ran = subprocess.run([sys.executable, "-c", code, path], capture_output=True, timeout=180, check=False)
            tally["visits" if ran.returncode == 0 else "visits that failed"] += 1  # an owner may be killed meanwhile
        except subprocess.TimeoutExpired:
            tally["visits that hung"] += 1


# -- the supervisor


def lives(path: str, samples: list[dict[str, float]], tally: dict[str, int]) -> None:
    """Start the owner, take its samples, end it, again and again until the time is over."""
    end_s = time.monotonic() + MINUTES * 60
    begin_s = time.monotonic()
    while time.monotonic() < end_s:
        command = [sys.executable, "-m", "bench.soak", path]
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
        lines: queue.Queue[str | None] = queue.Queue(10_000)
        reader = threading.Thread(target=forward, args=(owner, lines), daemon=True)
        reader.start()
        life_end_s = min(end_s, time.monotonic() + RESTART_S)
        while time.monotonic() < life_end_s:
            try:
                line = lines.get(timeout=ANSWER_S)
            except queue.Empty:
                owner.send_signal(signal.SIGUSR1)
                time.sleep(1.0)
                raise TimeoutError(f"the owner did not write a batch within {ANSWER_S:.0f} s") from None
            if line is None:
                raise RuntimeError(f"the owner ended with code {owner.wait(10)}")
            samples.append({"s": time.monotonic() - begin_s, **json.loads(line)})
        how = signal.SIGKILL if tally["restarts"] % 2 else signal.SIGTERM
        owner.send_signal(how)
        owner.wait(120)
        reader.join(10)
        tally["restarts"] += 1


def forward(owner: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert owner.stdout is not None
    for line in owner.stdout:
        lines.put(line)
    lines.put(None)


def judge(path: str, samples: list[dict[str, float]], tally: dict[str, int]) -> list[Figure]:
    """Whether everything stayed level, and nothing was lost."""
    with penstock.open(path) as store:
        counted = store.kv("counter", value="int64").get(b"batches") or 0
        damage = store.check().damage
    third = len(samples) // 3
    figures = []
    for name, text in MEASURES.items():
        early, late = (median(s[name] for s in part) for part in (samples[third : 2 * third], samples[2 * third :]))
        ratio = early / late if name == "batches_per_s" else late / early
        figures.append(Figure(name=f"{text}: last third of second third", value=ratio, unit="x", most=LEVEL))
    lost = max(sample["done"] for sample in samples) - counted
    return [
        *figures,
        Figure(name="batches told and lost", value=max(0.0, lost), unit="", most=0, gate=True),
        Figure(name="damaged files", value=len(damage), unit="", most=0, gate=True),
        Figure(name="clients that hung", value=tally["visits that hung"], unit="", most=0, gate=True),
        Figure(name="batches of 200 messages and rows", value=counted, unit=""),
        Figure(name="restarts, half of them by SIGKILL", value=tally["restarts"], unit=""),
        Figure(name="clients that came and went", value=tally["visits"], unit=""),
        Figure(name="clients whose owner was killed", value=tally["visits that failed"], unit=""),
    ]


def thinned(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    """At most POINTS samples for the chart, each the median of some."""
    step = -(-len(samples) // POINTS)
    parts = [samples[at : at + step] for at in range(0, len(samples), step)]
    return [{name: round(median(one[name] for one in part), 3) for name in part[0]} for part in parts]


def main() -> bool:
    samples: list[dict[str, float]] = []
    tally = dict.fromkeys(("restarts", "visits", "visits that failed", "visits that hung"), 0)
    with folder() as root:
        path, ended = f"{root}/store", threading.Event()
        with penstock.open(path, settings=SETTINGS, archive=f"file://{root}/objects") as store:
            store.kv("latest")
            store.queue("events", shards=2, retention=penstock.Retention(bytes_max=32 << 20))
        visitors = threading.Thread(target=visit, args=(path, ended, tally), daemon=True)
        visitors.start()
        try:
            lives(path, samples, tally)
        finally:
            ended.set()
            visitors.join(200)
        figures = judge(path, samples, tally)
    return tell("soak", figures, minutes=MINUTES, samples=thinned(samples))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        own(sys.argv[1], 0)
    else:
        sys.exit(not main())
