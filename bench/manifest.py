"""The manifest beside plain LMDB: durable commits with 32 threads and with one, and opening with a million chunk rows.

The peer is one plain LMDB transaction per commit, with the same keys and values. Chunk ids come from one counter, as
they do in a store; with one table its rows lie side by side, with 32 tables every commit touches pages of its own.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import lmdb

from bench.harness import Case, Goal, folder, run, sized
from penstock.manifest.jobs import JobQueue
from penstock.manifest.keys import ChunkKey, MetricKey, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import ChunkEntryRecord, MetricDelta, MetricRecord, WalStateRecord
from penstock.manifest.recovery import recover
from penstock.manifest.tables import CHUNKS, METRICS, WAL_STATE

COMMITS_PER_THREAD = 400  # about a second: starting 32 threads is not what is measured
COMMITS_PLAIN = 3_000  # about a second
THREADS = 32
GATE = "32 threads, one table"
CHUNK_ROWS = sized(1_000_000, 50_000)


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
        rows = (
            CHUNKS.packed(ChunkKey(db_id, chunk_id), chunk(db_id, chunk_id)),
            WAL_STATE.packed(WalStateKey(db_id, shard), progress(chunk_id)),
            METRICS.packed(MetricKey(db_id, shard), MetricRecord(1.0, chunk_id, 1.0, 1.0, (), chunk_id)),
        )
        with self._env.begin(write=True) as txn:
            for table, (key, value) in zip(self._tables, rows, strict=True):
                txn.put(key, value, db=table)

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

        seconds = by_threads(work) / COMMITS_PER_THREAD
        ours.close()
        return seconds


def by_threads(work: Callable[[int], None]) -> float:
    """Seconds that 32 threads take, for each of them."""
    pool = [threading.Thread(target=work, args=(worker,)) for worker in range(THREADS)]
    begin = time.perf_counter()
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return (time.perf_counter() - begin) / THREADS


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


def commits_plain_by_threads() -> float:
    """Seconds per plain transaction when 32 threads make them, each waiting for LMDB's one writer."""
    chunk_ids = itertools.count(1)
    with tempfile.TemporaryDirectory() as folder:
        plain = Plain(folder)

        def work(worker: int) -> None:
            for _ in range(COMMITS_PLAIN // THREADS):
                plain.commit(1, worker + 1, next(chunk_ids))

        seconds = by_threads(work) / (COMMITS_PLAIN // THREADS)
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


def main() -> bool:
    with folder() as path:
        fill(f"{path}/full", CHUNK_ROWS)
        fill(f"{path}/empty", 0)
        return run(
            "manifest",
            [
                Case(name=GATE, run=lambda: 1 / commits_ours(1)),
                Case(name="plain transactions, one table", run=lambda: 1 / commits_plain(1), peer_of=GATE),
                Case(name="plain transactions, one table, 32 threads", run=lambda: 1 / commits_plain_by_threads()),
                Case(name="32 threads, 32 tables", run=lambda: 1 / commits_ours(THREADS)),
                Case(
                    name="plain transactions, 32 tables",
                    run=lambda: 1 / commits_plain(THREADS),
                    peer_of="32 threads, 32 tables",
                ),
                Case(name="1 thread", run=lambda: 1 / latencies()[0]),
                Case(name="plain transactions, 1 thread", run=lambda: 1 / latencies()[1], peer_of="1 thread"),
                Case(name="opening, 1,000,000 chunk rows", run=lambda: 1 / opening(f"{path}/full")),
                Case(
                    name="opening, empty",
                    run=lambda: 1 / opening(f"{path}/empty"),
                    peer_of="opening, 1,000,000 chunk rows",
                ),
            ],
            [
                Goal(ours=GATE, ratio=4.0, gate=True),
                Goal(ours="1 thread", ratio=1 / 1.5),
                Goal(ours="opening, 1,000,000 chunk rows", ratio=1 / 2),
            ],
            rounds=5,
        )


if __name__ == "__main__":
    sys.exit(not main())
