"""Opening a store: with many tables and chunks beside few, and recovery against what is unflushed and what is stored.

The gate: opening 1,000 tables with 100,000 chunks takes at most twice as long as 10 tables with 1,000. Each table has
one real file; its other chunks are rows of the manifest, whose files an opening does not touch. Every figure is the
median of openings in interleaved rounds, in this process, of stores that were closed.

The report: seconds to open a store that was not closed, by the bytes that its journal has to replay (they should grow
with these) and by the bytes that are stored in files (they should not).
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time

import msgspec

import penstock
from bench.harness import Figure, folder, sized, tell
from penstock.lsm.catalog import TableDetail
from penstock.manifest.keys import ChunkKey
from penstock.manifest.operations import ManifestOp, UpsertChunk
from penstock.manifest.records import ChunkEntryRecord
from penstock.store.store import Store, open_store

FEW, MANY = (10, 1_000), sized((1_000, 100_000), (50, 5_000))  # tables, chunks
ROUNDS = sized(15, 3)
ROWS_PER_COMMIT = 1_000
MEMORY = "/dev/shm"  # a file system in memory, if there is one
NOT_STORED = shutil.ignore_patterns("LOCK", "*.owner", "run")
VALUE = os.urandom(1_000)
UNFLUSHED_MB = sized((0, 4, 16), (0, 1))
STORED_MB = sized((16, 64, 256), (1, 4))


def build(path: str, tables: int, chunks: int) -> None:
    """Make a store in memory, where thousands of small commits take no time, and move it to the disk."""
    memory = tempfile.mkdtemp(prefix="penstock-", dir=MEMORY if os.path.isdir(MEMORY) else None)
    try:
        fill(f"{memory}/store", tables, chunks)
        shutil.copytree(f"{memory}/store", path, ignore=NOT_STORED)
        os.sync()  # else the openings that are measured wait for it
    finally:
        shutil.rmtree(memory)


def fill(path: str, tables: int, chunks: int) -> None:
    """Make a store of tables, each with a row in a real file, and chunks that only the manifest knows."""
    with penstock.open(path) as store:
        for number in range(tables):
            store.kv(f"t{number:05d}").put(b"k", b"v")
        store.flush()
        store._checkpoint.clear()
        rows = (_chunk(store, info.table_id) for info in store.port.tables() for _ in range(chunks // tables))
        while some := list(itertools.islice(rows, ROWS_PER_COMMIT)):
            store._manifest.apply(some)


def _chunk(store: Store, table: int) -> ManifestOp:
    number = int(store._manifest.reserve_chunk_id())
    key = b"%020d" % number
    detail = msgspec.msgpack.encode(TableDetail(0, 3, 0, key, key, 1, 0, 1, 1, False, False))
    name = f"tables/{table}/0/{number:020d}.sst"
    return UpsertChunk(ChunkKey(table, number), ChunkEntryRecord(name, 1, 4_096, wal_range=(1, 2), detail=detail))


def opening_s(path: str) -> float:
    begin = time.perf_counter()
    store = penstock.open(path)
    seconds = time.perf_counter() - begin
    store.close()
    return seconds


def recovery_s(path: str, copy: str) -> float:
    """Seconds to open a copy of a store that was not closed."""
    shutil.copytree(path, copy, ignore=NOT_STORED)
    try:
        return opening_s(copy)
    finally:
        shutil.rmtree(copy)


def unclosed(path: str, copy: str, stored_mb: int, unflushed_mb: int) -> float:
    """Median seconds to recover a store with so much in files, and so much in the journal alone."""
    store = open_store(path, settings=penstock.StoreSettings(background=False, memory_bytes_max=2 << 30))
    table = store.kv("rows")
    for first in range(0, stored_mb * 1_000, 8_000):
        table.put_many([(b"s%012d" % n, VALUE) for n in range(first, min(first + 8_000, stored_mb * 1_000))])
        store.flush()  # nothing runs in the background: what waits would reach its limit
    store.flush()
    store._checkpoint.clear()
    for first in range(0, unflushed_mb * 1_000, 8_000):
        table.put_many([(b"u%012d" % n, VALUE) for n in range(first, min(first + 8_000, unflushed_mb * 1_000))])
    store.flush()
    try:
        return statistics.median(recovery_s(path, copy) for _ in range(sized(5, 2)))
    finally:
        store.close()


def main() -> bool:
    figures = []
    with folder() as path:
        stores = {"few": FEW, "many": MANY}
        for name, (tables, chunks) in stores.items():
            build(f"{path}/{name}", tables, chunks)
            opening_s(f"{path}/{name}")
        taken: dict[str, list[float]] = {name: [] for name in stores}
        for _ in range(ROUNDS):
            for name in stores:
                taken[name].append(opening_s(f"{path}/{name}"))
        few, many = (statistics.median(taken[name]) for name in ("few", "many"))
        figures += [
            Figure(name=f"opening {FEW[0]:,} tables with {FEW[1]:,} chunks", value=few * 1_000, unit="ms"),
            Figure(name=f"opening {MANY[0]:,} tables with {MANY[1]:,} chunks", value=many * 1_000, unit="ms"),
            Figure(name="the second, in times of the first", value=many / few, unit="x", most=2.0, gate=True),
        ]
    for unflushed in UNFLUSHED_MB:
        with folder() as path:
            seconds = unclosed(f"{path}/store", f"{path}/copy", STORED_MB[0], unflushed)
        figures.append(Figure(name=f"recovery, {unflushed} MB unflushed", value=seconds * 1_000, unit="ms"))
    for stored in STORED_MB:
        with folder() as path:
            seconds = unclosed(f"{path}/store", f"{path}/copy", stored, UNFLUSHED_MB[1])
        figures.append(Figure(name=f"recovery, {stored} MB stored", value=seconds * 1_000, unit="ms"))
    return tell("store", figures)


if __name__ == "__main__":
    sys.exit(not main())
