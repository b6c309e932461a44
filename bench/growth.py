"""A kv table and LevelDB while they grow: put, get, scan, disk, memory, recovery, close, compaction, open at each step.

Each database lives in a process of its own, so that memory is told apart, and they take turns: one is closed while the
other works. Each step opens the database, puts rows in batches of 1,000 until there are twice as many as before (so
that the steps span three orders of magnitude), and reads. Then its process is killed, and the next one opens it again,
closes it, and compacts a copy of it. Ours makes every step durable; LevelDB does not sync, which is to its advantage.
LevelDB has its default settings and a bloom filter.

`data` is the bytes of keys and values. Disk is what the files of a folder occupy: the peak is looked for 50 times a
second, `quiet` is measured after the last step, when nobody has used the database for GROWTH_QUIET_S seconds. `open`
and `recovery` (the opening after the kill) are the time until the first get has its answer.

The full size takes about half an hour: GROWTH_ROWS=10000000. The default is a tenth of it, where the journal weighs
more: there the limits for disk are only reported.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import plyvel

import penstock
from bench.harness import Figure, folder, sized, tell

ROWS_FULL = 10_000_000
ROWS = int(os.environ.get("GROWTH_ROWS", sized("1_000_000", "100_000")))
QUIET_S = float(os.environ.get("GROWTH_QUIET_S", sized("120", "5")))
STEPS = 10
SIZES = [0, *(round(size) for size in np.geomspace(ROWS // 1_000, ROWS, STEPS))]  # three orders of magnitude
MANY = 1_000  # rows of a batch
GETS = min(50_000, ROWS // STEPS)
SCAN_ROWS = min(200_000, ROWS // STEPS)
SHORT_SCANS, SHORT_ROWS = 500, 100
KEY_BYTES, VALUE_BYTES = 20, 100
ROW_BYTES = KEY_BYTES + VALUE_BYTES
SAMPLE_S = 0.02
REPLY_S_MAX = 3_600.0
OPENS = 5  # of which the median counts
PEAK_MAX, QUIET_MAX, OPEN_RATIO_MAX = 2.5, 1.35, 2.0

Pair = tuple[bytes, bytes]
Figures = dict[str, float]


# -- rows


_values = random.Random(9).randbytes(1 << 20)


def key_of(number: int) -> bytes:
    """Keys in no order, which anyone can make again: an odd multiplier permutes the numbers of 64 bits."""
    return b"key:%016x" % (number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)


def rows_of(first: int, last: int) -> Iterator[list[Pair]]:
    for at in range(first, last, MANY):
        offsets = np.random.default_rng(at).integers(0, len(_values) - VALUE_BYTES, MANY).tolist()
        some = zip(range(at, min(at + MANY, last)), offsets, strict=False)
        yield [(key_of(number), _values[offset : offset + VALUE_BYTES]) for number, offset in some]


# -- databases


class Database(Protocol):
    """What both can do."""

    def put_many(self, rows: Sequence[Pair]) -> None: ...

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, start: bytes) -> Iterator[Pair]: ...

    def finish(self) -> None:
        """Make all that was put durable, if it can."""

    def compact(self) -> None:
        """Merge everything into as few files as possible."""

    def close(self) -> None: ...


class Ours:
    """A kv table with default settings."""

    def __init__(self, path: str) -> None:
        self._store = penstock.open(path)
        self._table = self._store.kv("rows")
        self.get = self._table.get

    def put_many(self, rows: Sequence[Pair]) -> None:
        self._table.put_many(rows)

    def scan(self, start: bytes) -> Iterator[Pair]:
        return iter(self._table.scan(start))

    def finish(self) -> None:
        self._store.flush(timeout_s=600.0)

    def compact(self) -> None:
        self._store.compact("rows", timeout_s=600.0)

    def close(self) -> None:
        self._store.close()


class Level:
    """LevelDB."""

    def __init__(self, path: str) -> None:
        self._database = plyvel.DB(path, create_if_missing=True, bloom_filter_bits=10)
        self.get = self._database.get

    def put_many(self, rows: Sequence[Pair]) -> None:
        with self._database.write_batch() as batch:
            for key, value in rows:
                batch.put(key, value)

    def scan(self, start: bytes) -> Iterator[Pair]:
        return iter(self._database.iterator(start=start))

    def finish(self) -> None: ...

    def compact(self) -> None:
        self._database.compact_range()

    def close(self) -> None:
        self._database.close()


DATABASES: dict[str, Callable[[str], Database]] = {"ours": Ours, "leveldb": Level}


# -- the work of a step, in the process of its database


def took_s(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def memory_mb() -> Figures:
    """Of this process: all that is resident, mapped files too, and what is not backed by files."""
    columns = {"VmRSS": "rss_mb", "RssAnon": "anonymous_mb"}
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {columns[name[:-1]]: int(rest[0]) / 1_024 for name, *rest in lines if name[:-1] in columns}


def open_times(name: str, path: str) -> Figures:
    """Open, first get, close: the medians."""
    opened, closed = [], []
    for _ in range(OPENS):
        begin = time.perf_counter()
        database = DATABASES[name](path)
        database.get(key_of(0))
        opened.append(time.perf_counter() - begin)
        closed.append(took_s(database.close))
    return {"open_ms": sorted(opened)[OPENS // 2] * 1e3, "close_idle_ms": sorted(closed)[OPENS // 2] * 1e3}


def compact_copy(name: str, path: str) -> Figures:
    """Compact a copy of a closed database: the database itself stays as its own jobs leave it."""
    copy = f"{path}-copy"
    shutil.copytree(path, copy)
    try:
        database = DATABASES[name](copy)
        took = took_s(database.compact)
        database.close()
    finally:
        shutil.rmtree(copy)
    return {"compact_ms": took * 1e3}


def put_step(database: Database, first: int, last: int) -> float:
    """Put rows; the seconds that took, without the making of the rows."""
    total = 0.0
    for rows in rows_of(first, last):
        begin = time.perf_counter()
        database.put_many(rows)
        total += time.perf_counter() - begin
    return total + took_s(database.finish)


def read_step(database: Database, count: int) -> Figures:
    chance = random.Random(count)
    keys = [key_of(chance.randrange(count)) for _ in range(GETS)]

    def gets() -> None:
        for key in keys:
            assert database.get(key) is not None

    def short_scans() -> None:
        for key in keys[:SHORT_SCANS]:
            for _ in islice(database.scan(key), SHORT_ROWS):
                pass

    def long_scan() -> None:
        for _ in islice(database.scan(b""), SCAN_ROWS):
            pass

    return {
        "get_per_s": GETS / took_s(gets),
        "scan_100_per_s": SHORT_SCANS / took_s(short_scans),
        "scan_rows_per_s": min(SCAN_ROWS, count) / took_s(long_scan),
    }


def work(name: str, path: str, connection: Connection) -> None:
    """Do what the other end asks for, until it hangs up."""
    database: Database | None = None
    with suppress(EOFError):
        while True:
            command, *arguments = connection.recv()
            figures: Figures = {}
            if command == "open times":
                figures = open_times(name, path)
            elif command == "compact":
                figures = compact_copy(name, path)
            elif command == "recover":
                DATABASES[name](f"{path}-first").close()  # imports what an opening needs, which is not its cost
                shutil.rmtree(f"{path}-first")
                begin = time.perf_counter()
                database = DATABASES[name](path)
                database.get(key_of(0))
                figures["recovery_ms"] = (time.perf_counter() - begin) * 1e3
            elif command == "put":
                database = DATABASES[name](path)
                figures["put_per_s"] = (arguments[1] - arguments[0]) / put_step(database, *arguments)
            elif command == "read" and database is not None:
                figures = read_step(database, *arguments) | memory_mb()
            elif command == "close" and database is not None:
                figures["close_ms"] = took_s(database.close) * 1e3
                database = None
            connection.send(figures)


# -- watching


def disk_bytes(path: str) -> int:
    """What the files below a folder occupy; those that go while we look count as gone."""
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(f"{parent}/{name}").st_blocks * 512
    return total


@contextmanager
def peak_of(path: str, figures: Figures) -> Iterator[None]:
    """Watch a folder; its peak is put into `figures`."""
    done, most = threading.Event(), [disk_bytes(path)]

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            most.append(disk_bytes(path))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join(10)
        figures["disk_peak_mb"] = max(most) / 1e6


class Worker:
    """A database in a process of its own."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.path = name, path
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._asks, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(self.name, self.path, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def kill(self) -> None:
        """End the process as a crash would; the next command finds a new one."""
        self._process.kill()
        self._process.join(60)
        self._asks.close()
        self._start()

    def ask(self, *command: Any) -> Figures:
        self._asks.send(command)
        if not self._asks.poll(REPLY_S_MAX):
            raise TimeoutError(f"no reply to {command} within {REPLY_S_MAX} s")
        figures: Figures = self._asks.recv()
        return figures

    def close(self) -> None:
        self._asks.close()
        self._process.join(60)


def step(worker: Worker, first: int, last: int, *, quiet_s: float = 0.0) -> Figures:
    figures: Figures = {"rows": last, "data_mb": last * ROW_BYTES / 1e6}
    with peak_of(worker.path, figures):
        figures |= worker.ask("put", first, last)
        figures["disk_mb"] = disk_bytes(worker.path) / 1e6
        figures |= worker.ask("read", last)
        if quiet_s:
            time.sleep(quiet_s)
            figures["disk_quiet_mb"] = disk_bytes(worker.path) / 1e6
        worker.kill()
        figures |= worker.ask("recover")
        figures |= worker.ask("close")
    figures["disk_closed_mb"] = disk_bytes(worker.path) / 1e6
    return figures | worker.ask("compact") | worker.ask("open times")


# -- the report


COLUMNS = (
    "put_per_s", "get_per_s", "scan_100_per_s", "scan_rows_per_s", "disk_peak_mb", "disk_mb", "disk_closed_mb",
    "rss_mb", "anonymous_mb", "open_ms", "recovery_ms", "close_ms", "compact_ms",
)  # fmt: skip


def show(steps: dict[str, list[Figures]]) -> None:
    print(f"\ngrowth  ({ROWS:,} rows of {ROW_BYTES} bytes in {STEPS} steps)")
    print("  " + f"{'rows':>12} {'':<8}" + "".join(f"{name.removesuffix('_per_s'):>16}" for name in COLUMNS))
    for at in range(STEPS):
        for name, figures in steps.items():
            numbers = "".join(f"{figures[at].get(column, 0.0):>16,.1f}" for column in COLUMNS)
            print(f"  {int(figures[at]['rows']):>12,} {name:<8}{numbers}")


def judge(steps: dict[str, list[Figures]], empty: dict[str, Figures]) -> list[Figure]:
    """The ratios and their limits, which bind at the full size alone."""
    ours, peer = steps["ours"], steps["leveldb"]
    data_mb = ours[-1]["data_mb"]
    ratios = {
        **{f"{name} of leveldb": ours[-1][name] / peer[-1][name] for name in COLUMNS if name.endswith("_per_s")},
        "put, last step of the first": ours[-1]["put_per_s"] / ours[0]["put_per_s"],
        "disk, peak of the data": max(figures["disk_peak_mb"] for figures in ours) / data_mb,
        "disk, peak of the data: leveldb": max(figures["disk_peak_mb"] for figures in peer) / data_mb,
        "disk, quiet, of the data": ours[-1]["disk_quiet_mb"] / data_mb,
        "disk, quiet, of the data: leveldb": peer[-1]["disk_quiet_mb"] / data_mb,
        "open, full of almost empty": ours[-1]["open_ms"] / empty["ours"]["open_ms"],
        "open, full of almost empty: leveldb": peer[-1]["open_ms"] / empty["leveldb"]["open_ms"],
    }
    limits = {
        "disk, peak of the data": PEAK_MAX,
        "disk, quiet, of the data": QUIET_MAX,
        "open, full of almost empty": OPEN_RATIO_MAX,
    }
    full = ROWS >= ROWS_FULL
    return [
        Figure(name=name, value=ratio, unit="x", most=limits.get(name), gate=full and name in limits)
        for name, ratio in ratios.items()
    ]


def main() -> bool:
    steps: dict[str, list[Figures]] = {name: [] for name in DATABASES}
    with folder() as path:
        workers = {name: Worker(name, f"{path}/{name}") for name in DATABASES}
        empty: dict[str, Figures] = {}
        for name, worker in workers.items():
            worker.ask("put", 0, 1)
            worker.ask("close")
            empty[name] = worker.ask("open times")
        for first, last in pairwise(SIZES):
            for name, worker in workers.items():
                steps[name].append(step(worker, first, last, quiet_s=QUIET_S if last == ROWS else 0.0))
        for worker in workers.values():
            worker.close()
    show(steps)
    return tell("growth", judge(steps, empty), rows=ROWS, quiet_s=QUIET_S, empty=empty, steps=steps)


if __name__ == "__main__":
    sys.exit(not main())
