"""The manifest beside plain LMDB: durable commits with 32 threads and with one, and opening with a million chunk rows.

Ours and the peer's are measured in turn, in short rounds, and the median counts, because the machine's disk changes
its mind between rounds. Run: `python bench/manifest.py [results.json]`.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import lmdb

from penstock.manifest.jobs import JobQueue
from penstock.manifest.keys import ChunkKey, MetricKey, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import ChunkEntryRecord, MetricDelta, MetricRecord, WalStateRecord
from penstock.manifest.recovery import recover
from penstock.manifest.tables import CHUNKS, METRICS, WAL_STATE

ROUNDS = 7
COMMITS_PER_THREAD = 100
COMMITS_PLAIN = 1_000
THREADS = 32
CHUNK_ROWS = 1_000_000


def chunk(db_id: int, chunk_id: int) -> ChunkEntryRecord:
    return ChunkEntryRecord(f"table{db_id}/{chunk_id:012}.arrow", chunk_id, 4096, wal_range=(chunk_id, chunk_id + 1))


def progress(number: int) -> WalStateRecord:
    return WalStateRecord(number, number, number, number)


class Ours:
    """Three operations in one durable commit: a chunk, the progress of its partition, a metric."""

    def __init__(self, folder: str) -> None:
        self.manifest = Manifest.open(f"{folder}/manifest")

    def commit(self, db_id: int, shard: int, chunk_id: int) -> None:
        txn = self.manifest.begin_write()
        txn.upsert_chunk(ChunkKey(db_id, chunk_id), chunk(db_id, chunk_id))
        txn.put_wal_state(WalStateKey(db_id, shard), progress(chunk_id))
        txn.merge_metric(MetricKey(db_id, shard), MetricDelta(1.0, 1, 1.0, 1.0))
        txn.commit()

    def close(self) -> None:
        self.manifest.close()


class Plain:
    """One LMDB transaction that puts the same three values under the same keys, with default durability."""

    def __init__(self, folder: str) -> None:
        self._env = lmdb.open(f"{folder}/plain", subdir=False, map_size=64 << 20, max_dbs=4)
        self._tables = [self._env.open_db(name) for name in (b"chunk_catalog", b"wal_state", b"metrics")]

    def commit(self, db_id: int, shard: int, chunk_id: int) -> None:
        row, state = CHUNKS.codec.encode(chunk(db_id, chunk_id)), WAL_STATE.codec.encode(progress(chunk_id))
        metric = METRICS.codec.encode(MetricRecord(1.0, chunk_id, 1.0, 1.0, (), chunk_id))
        with self._env.begin(write=True) as txn:
            txn.put(ChunkKey(db_id, chunk_id).pack(), row, db=self._tables[0])
            txn.put(WalStateKey(db_id, shard).pack(), state, db=self._tables[1])
            txn.put(MetricKey(db_id, shard).pack(), metric, db=self._tables[2])

    def close(self) -> None:
        self._env.close()


def commits_ours(tables: int) -> float:
    """Seconds per commit with 32 threads that each wait for each of their commits, spread over so many tables."""
    chunk_ids = itertools.count(1)  # one counter for the store, as `reserve_chunk_id` is
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(folder)

        def work(worker: int) -> None:
            for _ in range(COMMITS_PER_THREAD):
                ours.commit(1 + worker % tables, worker + 1, next(chunk_ids))

        pool = [threading.Thread(target=work, args=(worker,)) for worker in range(THREADS)]
        begin = time.perf_counter()
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
        seconds = (time.perf_counter() - begin) / (THREADS * COMMITS_PER_THREAD)
        ours.close()
        return seconds


def commits_plain(tables: int) -> float:
    """Seconds per plain transaction, one after the other, on the same keys."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Plain(folder)
        begin = time.perf_counter()
        for number in range(COMMITS_PLAIN):
            worker = number % THREADS
            plain.commit(1 + worker % tables, worker + 1, number + 1)
        seconds = (time.perf_counter() - begin) / COMMITS_PLAIN
        plain.close()
        return seconds


def latencies() -> tuple[float, float]:
    """Median seconds of our commit and of a plain transaction, one after the other in one thread."""
    times: dict[type, list[float]] = {Ours: [], Plain: []}
    with tempfile.TemporaryDirectory() as folder:
        both: list[Ours | Plain] = [Ours(folder), Plain(folder)]
        for number in range(COMMITS_PLAIN):
            for one in both:
                begin = time.perf_counter()
                one.commit(1, 1, number + 1)
                times[type(one)].append(time.perf_counter() - begin)
        for one in both:
            one.close()
    return statistics.median(times[Ours]), statistics.median(times[Plain])


def fill(path: str, rows: int) -> None:
    with Manifest.open(path) as manifest:
        for start in range(0, rows, 50_000):
            txn = manifest.begin_write()
            for number in range(start + 1, min(rows, start + 50_000) + 1):
                txn.upsert_chunk(ChunkKey(1, number), chunk(1, number))
            txn.commit()


def opening(path: str) -> float:
    """Seconds to open a manifest and recover from it."""
    begin = time.perf_counter()
    manifest = Manifest.open(path)
    recover(manifest, JobQueue(manifest, random=random.Random(1)))
    seconds = time.perf_counter() - begin
    manifest.close()
    return seconds


def compare(ours: Callable[[], float], peer: Callable[[], float], rounds: int = ROUNDS) -> tuple[float, float]:
    """Medians of rounds taken in turn."""
    pairs = [(ours(), peer()) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def run(chunk_rows: int = CHUNK_ROWS) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}

    def note(name: str, ours: float, peer: float, ratio: float) -> None:
        results[name] = {"ours_us": ours * 1e6, "peer_us": peer * 1e6, "ratio": ratio}

    for tables, what in ((1, "gate: 4 times"), (THREADS, "report")):
        ours, peer = compare(functools.partial(commits_ours, tables), functools.partial(commits_plain, tables))
        note(f"{THREADS} threads, {tables} tables, rate against plain transactions ({what})", ours, peer, peer / ours)
    ours, peer = latencies()
    note("1 thread, latency against a plain transaction (goal: 1.5 times)", ours, peer, ours / peer)
    with tempfile.TemporaryDirectory() as folder:
        fill(f"{folder}/full", chunk_rows)
        fill(f"{folder}/empty", 0)
        ours, peer = compare(lambda: opening(f"{folder}/full"), lambda: opening(f"{folder}/empty"), 9)
    note(f"opening with {chunk_rows:,} chunk rows against empty (goal: 2 times)", ours, peer, ours / peer)
    return results


def main() -> None:
    results = run()
    for name, row in results.items():
        sys.stdout.write(f"{name}: {row['ours_us']:.0f} us, {row['peer_us']:.0f} us, ratio {row['ratio']:.2f}\n")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
