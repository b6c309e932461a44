"""The main job: telemetry of a fleet through a queue and Spark into tables, with every event accounted for.

This process owns the store in DATA and feeds the queue `events`: readings of a simulated fleet (seeded, so the totals
are known, with some records that are broken) and of this machine. A second process runs the pipeline on Spark: it keeps
the latest reading and a running total of each device, writes each reading as a sample to the series table `metrics`
and a fingerprint of each device's window to the vector table `fingerprints`, and sets broken records aside with the
reason, all in one commit for each micro-batch. Spark also computes the rollups of the metrics. At the end the numbers
are laid side by side, with the devices whose fingerprints are odd; the last row is the difference, and it is 0.

    RATE      events a second (2000)         SECONDS   how long (60)
    DATA      a folder, kept and reused      CHAOS=1   kill the query and delete its checkpoint, again and again
"""

# ruff: noqa: E402 - an interrupt is handled before the imports, which take a second

from __future__ import annotations

import os
import signal

INTERRUPTED = 0 if "MAKELEVEL" in os.environ else 130  # make, which is interrupted too, would add a line to another


def stop_at_once(*_: object) -> None:
    """End in one line: for an interrupt before there is anything to clean up."""
    os.write(1, b"\nstopped\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, stop_at_once)

import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import penstock
from examples import fingerprints, live, metrics, questions, report
from examples.accounting import CONSUMER, JOIN, READING, account, join, reasons
from examples.fingerprints import OddDevice
from examples.metrics import MetricsSummary
from examples.run import MicroBatch, Run, Sample, percentile

DEVICES = 200
SITES = fingerprints.SITES
ODD = {42: (22.5, 0.0), 117: (15.0, 5.0), 181: (18.0, 7.0)}  # devices that read otherwise: the least value, the range
USUAL = (20.0, 5.0)
BROKEN = 0.01  # of the fleet's records
THIS_MACHINE = "this-machine"
PROBE_S = 0.1  # between two readings of this machine
END_WAIT_S = 180.0
FINISH_S_MAX = 600.0

# -- producing


class Stamps:
    """Microseconds since 1970, each later than the one before: a series has one sample at a time."""

    def __init__(self) -> None:
        self._last_us = 0

    def next(self) -> int:
        self._last_us = max(self._last_us + 1, time.time_ns() // 1000)
        return self._last_us


def reading(chance: random.Random, number: int, stamps: Stamps) -> tuple[bytes, bytes, bool]:
    """Make a record of the fleet: key, payload, and whether it is sound."""
    device_number = chance.randrange(DEVICES)
    device, site = f"device-{device_number:03d}", SITES[device_number % len(SITES)]
    key = device.encode()
    if chance.random() < BROKEN:
        broken = [b"{not json", b'{"device":null,"value":1.0}', b'{"device":"device-007"}', b"\xff\xfe\x00", b""]
        return key, chance.choice(broken), False
    least, wide = ODD.get(device_number, USUAL)
    value = round(least + wide * chance.random(), 2)
    record = {"device": device, "site": site, "n": number, "value": value, "put_us": stamps.next()}
    return key, json.dumps(record).encode(), True


def this_machine(number: int, stamps: Stamps) -> bytes:
    """Make a record of this machine's load."""
    load = os.getloadavg()[0]
    return json.dumps({"device": THIS_MACHINE, "n": number, "value": load, "put_us": stamps.next()}).encode()


def produce(store: penstock.Store, run: Run, seed: int) -> None:
    """Feed the queue. Each batch and the count of what it holds are one commit, so the count is exact whatever ends."""
    chance, stamps = random.Random(seed), Stamps()
    number, probes, tick = 0, 0, 0.05
    due = time.monotonic()
    while (now := run.now_s) < run.seconds:
        count = max(0, int(run.rate * min(now + tick, run.seconds)) - number)
        records = [reading(chance, number + offset, stamps) for offset in range(count)]
        number += count
        good = sum(ok for _, _, ok in records)
        keys, payloads = [key for key, _, _ in records], [payload for _, payload, _ in records]
        if now >= probes * PROBE_S:
            keys.append(THIS_MACHINE.encode())
            payloads.append(this_machine(probes, stamps))
            run.probes.append((probes, time.monotonic()))
            good += 1
            probes += 1
        if payloads:
            with store.batch(durable=False) as batch:
                batch.queue("events").put_many(payloads, keys=keys)
                expected = batch.kv("expected", value="int64")
                expected.merge(b"sound", good, operator="add_i64")
                expected.merge(b"broken", len(payloads) - good, operator="add_i64")
        run.produced = number + probes
        due += tick
        time.sleep(max(0.0, due - time.monotonic()))
    store.flush()


def watch(store: penstock.Store, run: Run, stop: threading.Event) -> None:
    """Note the backlog, and how long each reading of this machine takes until `latest` has it or a later one."""
    latest, consumer = store.kv("latest"), store.queue("events").consumer(CONSUMER)
    since_us = time.time_ns() // 1000
    while not stop.wait(0.02):
        value = latest.get(THIS_MACHINE.encode())
        record = json.loads(value) if value is not None else {"put_us": 0}
        while run.probes and record["put_us"] >= since_us and run.probes[0][0] <= record["n"]:
            run.note_visible(run.probes.popleft()[1])
        if not run.samples or run.now_s - run.samples[-1].at_s >= 0.25:
            run.samples.append(Sample(run.now_s, run.produced, consumer.lag))
    run.samples.append(Sample(run.now_s, run.produced, consumer.lag))


# -- the query, in a process of its own


def route(frame):  # type: ignore[no-untyped-def]
    """One micro-batch: the latest reading, a count and a fingerprint of each device, samples, and what is broken."""
    from pyspark.sql import functions as F

    parsed = frame.withColumn("r", F.from_json(F.col("payload").cast("string"), READING))
    is_good = F.col("r.device").isNotNull() & F.col("r.value").isNotNull()
    good = parsed.where(is_good).select("shard", "sequence", "payload", "r.*")
    by_device = good.groupBy("device").agg(
        F.max_by("payload", F.struct("shard", "sequence")).alias("payload"),
        F.count("*").alias("count"),
        *fingerprints.columns(),
    )
    key = F.col("device").cast("binary").alias("key")
    return {
        "latest": by_device.select(key, F.col("payload").alias("value")),
        "totals": by_device.select(key, F.col("count").alias("value"), F.lit("add_i64").alias("op")),
        fingerprints.TABLE: by_device.select(F.col("device").alias("id"), "vector", "site", "n"),
        metrics.TABLE: good.select(
            F.when(F.col("device") == THIS_MACHINE, "load").otherwise("temperature").alias("metric"),
            F.create_map(F.lit("device"), "device", F.lit("site"), "site").alias("labels"),
            F.timestamp_micros("put_us").alias("time"), "value",
        ),
        "dead": parsed.where(F.coalesce(~is_good, F.lit(True))).select(
            "shard", "sequence", "timestamp", "key", "payload",
            F.when(F.col("r.device").isNull(), "no device").otherwise("no value").alias("reason"),
        ),
    }  # fmt: skip


def query(folder: str, checkpoint: str) -> None:
    """The second process: run the pipeline and the store's jobs, and say what was done.

    SIGTERM ends the pipeline; then come the join, and the rollups of the last samples.
    """
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
    threading.Thread(target=tell_batches, args=(running,), daemon=True).start()
    with metrics.maintained(spark, folder, lambda done: tell({"jobs": done})):
        penstock.spark.wait(running)
        rows = join(spark, folder)
        metrics.wait_for_rollups(folder)
    tell({"joined": rows})
    spark.stop()


def tell(figures: dict[str, object]) -> None:
    """Write a line for the first process, in one call: several threads do."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def tell_batches(running) -> None:  # type: ignore[no-untyped-def]
    """Print a line for each micro-batch that read something."""
    last = -1
    while running.isActive:
        for batch in running.recentProgress:
            if batch["batchId"] > last:
                last = batch["batchId"]
                if batch["numInputRows"]:
                    figures = {"rows": batch["numInputRows"], "ms": batch["durationMs"].get("triggerExecution", 0)}
                    tell(figures)
        time.sleep(0.2)


class Query:
    """The query's process, started, killed and started again."""

    def __init__(self, run: Run, checkpoint: str) -> None:
        self._command = [sys.executable, "-m", "examples.pipeline", "query", str(run.folder), checkpoint]
        self._checkpoint = checkpoint
        self._run = run
        self._joined: list[dict[str, object]] | None = None
        self.log = open(f"{run.folder}-query.log", "a")  # noqa: SIM115 - it lives as long as the queries
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self.log, text=True, start_new_session=True
        )

    def wait_until_running(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise SystemExit(f"the query did not start: see {self.log.name}")
        self._listener = threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True)
        self._listener.start()

    def _listen(self, lines) -> None:  # type: ignore[no-untyped-def]
        first = True
        for line in lines:
            run, figures = self._run, json.loads(line)
            if "jobs" in figures:
                run.spark_jobs += figures["jobs"]
            elif "joined" in figures:
                self._joined = figures["joined"]
            else:
                run.batches.append(MicroBatch(run.now_s, **figures))
                if first:
                    first, run.up_since_s = False, run.now_s

    def kill(self) -> None:
        """SIGKILL for the driver and its JVM, and no checkpoint left."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._run.up_since_s = None
        shutil.rmtree(self._checkpoint, ignore_errors=True)

    def finish(self) -> list[dict[str, object]]:
        """End the pipeline; return the rows of the join when it and the rollups are done."""
        self.process.terminate()
        try:
            self.process.wait(FINISH_S_MAX)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the join did not end within {FINISH_S_MAX:.0f} s: is the machine busy?") from None
        self._listener.join()
        if self._joined is None:
            raise SystemExit(f"the join failed: see {self.log.name}")
        return self._joined

    def close(self) -> None:
        """Leave no process behind. Killing is safe at any time, as CHAOS=1 shows, and quicker than a stop."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


def chaos(running: Query, run: Run) -> None:
    """Kill the query a few times while events come in; once in a short run."""
    chance = random.Random(3)
    while not run.kills or run.now_s < run.seconds - 5:
        time.sleep(min(chance.uniform(4, 9), run.seconds / 3))
        running.kill()
        run.kills.append(run.now_s)
        running.start()
        running.wait_until_running()


def wait_for_lag(store: penstock.Store, running: Query) -> None:
    """Until every message is read."""
    consumer, deadline_s = store.queue("events").consumer(CONSUMER), time.monotonic() + END_WAIT_S
    while consumer.lag:
        if running.process.poll() is not None:
            raise SystemExit(f"the query ended by itself: see {running.log.name}")
        if time.monotonic() > deadline_s:
            raise SystemExit(f"{consumer.lag} messages were not read within {END_WAIT_S} s: see {running.log.name}")
        time.sleep(0.2)


# -- the whole


def variable(name: str, default: int) -> int:
    """Return a variable of the environment; one that is not a number above 0 ends the program in a line."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or int(text) < 1:
        raise SystemExit(f"{name} is {text!r}: give a whole number above 0")
    return int(text)


def main() -> int:
    rate, seconds = variable("RATE", 2_000), variable("SECONDS", 60)
    data = Path(os.environ.get("DATA") or tempfile.mkdtemp(prefix="penstock-run-")).absolute()
    data.mkdir(parents=True, exist_ok=True)
    run = Run(rate, seconds, data / "store", os.environ.get("CHAOS", "") not in ("", "0"))
    print(f"Penstock: {rate:,} events a second for {seconds:.0f} s through Spark, in {run.folder}", flush=True)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return work(run, data)
    except KeyboardInterrupt:
        print(f"\nstopped: what was produced is in {run.folder}, and DATA={data} make run goes on from there")
        return INTERRUPTED
    except penstock.errors.PenstockError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1


def work(run: Run, data: Path) -> int:
    with penstock.open(run.folder) as store:
        if "events" in store.tables() and not {metrics.TABLE, fingerprints.TABLE} <= set(store.tables()):
            raise SystemExit(f"{run.folder} is of an older version of this job: give another folder as DATA")
        metrics.create(store)
        fingerprints.create(store)
        for name in ("events", "dead"):
            store.queue(name, shards=2 if name == "events" else 1)
        store.kv("latest")
        store.kv("totals", value="int64")
        store.kv("expected", value="int64")
        before, reasons_before = account(store), reasons(store)
        if before["produced"]:
            unread = before["produced"] - before["read by Spark"]
            print(f"  {before['produced']:,} events are there from earlier runs, {unread:,} of them still to be read")
        running = Query(run, str(data / "checkpoint"))
        try:
            with live.display(run):
                running.wait_until_running()
                stream_events(store, run, running)
                store.checkpoint()
                run.stage = "Spark joins high readings with those before them, and computes rollups"
                joined = running.finish()
                run.stage = "everything is counted"
                measured, odd = metrics.summarize(store, run.spark_jobs), fingerprints.odd_devices(store)
                after, reasons_after = account(store), reasons(store)
                tables, answers = questions.tables_made(store), questions.ask(store)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not stop the cleaning up
            raise
        finally:
            running.close()
    by_reason = {name: (reasons_before.get(name, 0), count) for name, count in reasons_after.items()}
    return finish(
        run,
        before,
        after,
        by_reason=by_reason,
        joined=joined,
        measured=measured,
        odd=odd,
        tables=tables,
        answers=answers,
    )


def stream_events(store: penstock.Store, run: Run, running: Query) -> None:
    """Produce, watch and, if asked to, kill; until every event is read."""
    stop, failures = threading.Event(), list[BaseException]()

    def guarded(act: Callable[..., None], *arguments: object) -> threading.Thread:
        def target() -> None:
            try:
                act(*arguments)
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=target, daemon=True)

    seed = sum(
        store.kv("expected", value="int64").get(key) or 0 for key in (b"sound", b"broken")
    )  # another for each run
    run.began_s, run.stage = time.monotonic(), "events come in"
    producer, watcher = guarded(produce, store, run, seed), guarded(watch, store, run, stop)
    producer.start()
    watcher.start()
    if run.wild:
        chaos(running, run)
    producer.join()
    run.stage = "waiting until all is read"
    wait_for_lag(store, running)
    time.sleep(0.1)
    stop.set()
    watcher.join()
    if failures:
        raise failures[0]


def finish(
    run: Run,
    before: dict[str, int],
    after: dict[str, int],
    *,
    by_reason: dict[str, tuple[int, int]],
    joined: list[dict[str, object]],
    measured: MetricsSummary,
    odd: list[OddDevice],
    tables: list[questions.TableMade],
    answers: list[questions.Question],
) -> int:
    """Print what came of it, and write the report."""
    size = sum(path.stat().st_size for path in (run.folder / "tables").rglob("*") if path.is_file())
    waits = run.steady_ms()
    print(f"\n  {'':<48}" + (f" {'before':>12} {'this run':>12} {'in all':>12}" if before["produced"] else ""))
    for name, *counts in report.sums(before, after):
        print(f"  {name:<48}" + "".join(f" {count:>12,}" if count != "" else " " * 13 for count in counts))
    print(f"\n  {report.proved(run, before, after)}")
    middle, high = percentile(waits, 0.5), percentile(waits, 0.99)
    summary = f"median {middle:,.0f} ms, 99 % {high:,.0f} ms" if waits else "every reading waited for Spark to start"
    print(f"  put to visible in `latest`: {summary}")
    print(f"  bytes on disk for each event: {size / max(1, after['produced']):,.0f}")
    for line in [*report.measured_lines(measured), fingerprints.odd_line(odd)]:
        print(f"  {line}")
    page = report.write(
        run,
        before=before,
        after=after,
        reasons=by_reason,
        sql=JOIN,
        joined=joined,
        measured=measured,
        odd=odd,
        size_bytes=size,
        built=tables,
        questions=answers,
    )
    print(f"\nA report with charts: {page}\nThree things to try on the same folder:")
    print(f"  {report.console_command(run)}")
    print(f"  .venv/bin/penstock scan {run.folder} totals --limit 5")
    print(f"  DATA={run.folder.parent} CHAOS=1 make run")
    return 1 if after["difference"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["query"]:
        query(sys.argv[2], sys.argv[3])
    else:
        code = main()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python gives up its own handlers while it ends
        sys.exit(code)
