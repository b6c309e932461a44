"""The LSM tree beside LevelDB (plyvel), RocksDB (rocksdict) and LMDB: reads, flush, compaction, and reads beside one.

Everything goes through a tree and its maintenance, on disk, with a manifest, indexes, checksums and fsyncs. Databases
are warm, reopened after loading, with caches and blooms on. LSM_ROWS and LSM_MERGE_ROWS make a shorter run.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import plyvel
import rocksdict

from bench.harness import Case, Goal, folder, rate, run
from penstock.host.clock import SystemClock
from penstock.host.os_files import OsFileSystem
from penstock.lsm.compaction import LevelLimits
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.memtable import Edit
from penstock.lsm.merge import OUTPUT_BYTES
from penstock.lsm.tasks import merge_on
from penstock.lsm.tree import Tree
from penstock.lsm.tree_settings import TreeSettings
from penstock.manifest.jobs import JobQueue
from penstock.manifest.manifest import Manifest
from penstock.scheduler.engines import Engines

ROWS = int(os.environ.get("LSM_ROWS", "1_000_000"))
MERGE_ROWS = int(os.environ.get("LSM_MERGE_ROWS", "500_000"))
RUNS = 10
GETS = min(50_000, ROWS // 2)
THREADS = 4
VALUE_BYTES = 100
MEMORY_MB_MAX = 300
MEMORY_FOLDER = "/dev/shm"
ON_DISK = ""
RAW = "the disk alone, as many bytes"
SHAPES = ("random keys", "long shared prefix, half duplicates")
# The benchmark decides when to flush and to compact.
SETTINGS = TreeSettings(memtable_bytes=1 << 40, limits=LevelLimits(level0_runs=20), level0_slow=30, level0_stop=40)

Work = Callable[[], object]


# -- databases


class Ours:
    """A tree with its manifest and maintenance, in a folder."""

    def __init__(self, path: str, engines: Engines | None = None) -> None:
        self.path = path
        self._manifest = Manifest.open(f"{path}/manifest")
        self.maintenance = Maintenance(
            self._manifest, JobQueue(self._manifest, random=random.Random(6)), fs=OsFileSystem(), root=path,
            store=bytes(16), clock=SystemClock(), merge_files=None if engines is None else merge_on(engines),
        )  # fmt: skip
        self.tree: Tree = self.maintenance.open_tree(1, 0, "tables/1", SETTINGS)

    def apply(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        for at in range(0, len(keys), 20_000):
            lsn = 1 + self.tree.lsn
            pairs = zip(keys[at : at + 20_000], values[at : at + 20_000], strict=True)
            self.tree.apply(Edit(lsn=lsn, time_us=lsn, puts=dict(pairs)))  # as a kv table does

    def flush(self) -> None:
        self.maintenance.flush(self.tree)

    def compact(self) -> None:
        self.maintenance.compact(self.tree, everything=True)

    def close(self) -> None:
        self.maintenance.close_tree(1, 0)
        self._manifest.close()


def open_plyvel(path: str) -> Any:
    return plyvel.DB(path, create_if_missing=True, lru_cache_size=512 << 20, bloom_filter_bits=10,
                     write_buffer_size=64 << 20, compression=None)  # fmt: skip


def open_rocks(path: str) -> Any:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(rocksdict.Cache(512 << 20))
    table.set_bloom_filter(10, False)
    options.set_block_based_table_factory(table)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    # As with our own, the benchmark decides when to flush and to compact.
    options.set_write_buffer_size(1 << 30)
    options.set_disable_auto_compactions(True)
    options.set_level_zero_slowdown_writes_trigger(1_000)
    options.set_level_zero_stop_writes_trigger(1_000)
    return rocksdict.Rdict(path, options)


def put_rocks(db: Any, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
    batch = rocksdict.WriteBatch(raw_mode=True)
    for key, value in zip(keys, values, strict=True):
        batch.put(key, value)
    db.write(batch)


def values_for(keys: Sequence[bytes], chance: np.random.Generator) -> list[bytes]:
    raw = chance.bytes(VALUE_BYTES * len(keys))
    return [raw[at : at + VALUE_BYTES] for at in range(0, len(raw), VALUE_BYTES)]


@contextmanager
def loaded() -> Iterator[tuple[list[bytes], dict[str, Any]]]:
    """The same rows in every database: ours as one level and as four overlapping runs."""
    chance = np.random.default_rng(1)
    raw = chance.bytes(16 * ROWS)
    shuffled = list({raw[at : at + 16] for at in range(0, len(raw), 16)})
    values = values_for(shuffled, chance)
    with folder() as path:
        one, four = Ours(make(path, "one")), Ours(make(path, "four"))
        for at in range(4):
            four.apply(shuffled[at::4], values[at::4])
            four.flush()
        one.apply(shuffled, values)
        one.flush()
        one.compact()
        rocks = open_rocks(f"{path}/rocks")
        put_rocks(rocks, shuffled, values)
        rocks.flush()
        rocks.compact_range(None, None)
        level = open_plyvel(f"{path}/level")
        with level.write_batch() as batch:
            for key, value in zip(shuffled, values, strict=True):
                batch.put(key, value)
        level.compact_range()
        for db in (one, four, rocks, level):
            db.close()
        env = lmdb.open(f"{path}/lmdb", map_size=1 << 31)
        with env.begin(write=True) as transaction:
            transaction.cursor().putmulti(sorted(zip(shuffled, values, strict=True)), append=True)
        env.close()
        env = lmdb.open(f"{path}/lmdb", map_size=1 << 31, readonly=True)
        one, four = Ours(f"{path}/one"), Ours(f"{path}/four")
        databases = {
            "one": one, "four": four, "plyvel": open_plyvel(f"{path}/level"), "rocksdict": open_rocks(f"{path}/rocks"),
        }  # fmt: skip
        with env.begin() as transaction:
            yield sorted(shuffled), {**databases, "lmdb": transaction}
        for db in (*databases.values(), env):
            db.close()


def make(path: str, name: str) -> str:
    os.makedirs(f"{path}/{name}")
    return f"{path}/{name}"


# -- reads


def get_all(get: Callable[[bytes], Any], keys: Sequence[bytes]) -> Work:
    def work() -> None:
        for key in keys:
            get(key)

    return work


def get_by_threads(get: Callable[[bytes], Any], keys: Sequence[bytes]) -> Work:
    def work() -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            for future in [pool.submit(get_all(get, keys[i::THREADS])) for i in range(THREADS)]:
                future.result()

    return work


def scan_all(scan: Callable[[bytes, bytes], list[Any]], ranges: Sequence[tuple[bytes, bytes]]) -> Work:
    def work() -> None:
        for start, end in ranges:
            assert len(scan(start, end)) == 100

    return work


def touch_arrow(tree: Tree) -> int:
    """Read every byte of keys and values, as Arrow batches."""
    total = 0
    for batch in tree.scan_arrow():
        for name in ("key", "value"):
            data = batch[name].buffers()[2]
            total += int(np.frombuffer(data, np.uint64, data.size // 8).sum(dtype=np.uint64)) & 1
    return total


def touch_rows(rows: Any) -> int:
    total = 0
    for key, value in rows:
        total += len(key) + len(value)
    return total


def beside(name: str, count: int, works: Mapping[str, Work]) -> list[Case]:
    """A case of ours (the first) and its peers, all warmed."""
    cases: list[Case] = []
    for library, work in works.items():
        work()
        peer = None if not cases else name
        title = name if peer is None else f"{name}: {library}"
        cases.append(Case(name=title, run=partial(rate, count, work), peer_of=peer))
    return cases


def bench_reads() -> bool:
    chance = random.Random(2)
    with loaded() as (keys, databases):
        one, four = databases["one"].tree, databases["four"].tree
        level, rocks, transaction = databases["plyvel"], databases["rocksdict"], databases["lmdb"]
        present = chance.sample(keys, GETS)
        absent = [chance.randbytes(16) for _ in present]
        gets = {"ours": one.get, "plyvel": level.get, "rocksdict": rocks.get}
        starts = chance.sample(range(len(keys) - 101), 1_000)
        ranges = [(keys[at], keys[at + 100]) for at in starts]
        hundreds: dict[str, Callable[[bytes, bytes], list[Any]]] = {
            "plyvel": lambda start, end: list(level.iterator(start=start, stop=end)),
            "rocksdict": lambda start, end: list(islice(rocks.items(from_key=start), 100)),
        }
        cases = [
            *beside("get hit", GETS, {library: get_all(get, present) for library, get in gets.items()}),
            *beside("get miss", GETS, {library: get_all(get, absent) for library, get in gets.items()}),
            *beside(
                "get hit, against lmdb",
                GETS,
                {"ours": get_all(one.get, present), "lmdb": get_all(transaction.get, present)},
            ),
            *beside(
                f"get hit, {THREADS} threads",
                GETS,
                {library: get_by_threads(get, present) for library, get in gets.items()},
            ),
            *beside(
                "100 rows, one level",
                len(ranges),
                {
                    library: scan_all(scan, ranges)
                    for library, scan in {"ours": lambda a, b: list(one.scan(a, b)), **hundreds}.items()
                },
            ),
            *beside(
                "100 rows, four runs",
                len(ranges),
                {
                    library: scan_all(scan, ranges)
                    for library, scan in {"ours": lambda a, b: list(four.scan(a, b)), **hundreds}.items()
                },
            ),
            *beside(
                "scan to tuples",
                ROWS,
                {
                    "ours": lambda: list(one.scan()),
                    "plyvel": lambda: list(level),
                    "rocksdict": lambda: list(rocks.items()),
                },
            ),
            *beside(
                "scan touching every byte",
                ROWS,
                {
                    "ours": lambda: touch_arrow(one),
                    "plyvel": lambda: touch_rows(level),
                    "rocksdict": lambda: touch_rows(rocks.items()),
                },
            ),
        ]
        goals = [
            Goal(ours="get hit", ratio=1.0, gate=True),
            Goal(ours="get hit", ratio=1.5),
            Goal(ours="get miss", ratio=1.2),
            Goal(ours="get hit, against lmdb", ratio=0.5),
            Goal(ours="100 rows, one level", ratio=1.0),
            Goal(ours="100 rows, four runs", ratio=0.6),
            Goal(ours="scan to tuples", ratio=2.0),
            Goal(ours="scan touching every byte", ratio=5.0),
        ]
        return run("lsm-reads", cases, goals, rounds=5)


# -- flush and compaction


def keys_of_run(shape: str, rows: int, chance: np.random.Generator) -> list[bytes]:
    if shape == SHAPES[0]:
        raw = chance.bytes(16 * rows)
        return list(dict.fromkeys(raw[at : at + 16] for at in range(0, len(raw), 16)))  # in the order of their memory
    # Half of what all runs hold is an older version of a key.
    ids = chance.integers(0, rows * RUNS * 63 // 100, rows)
    scattered = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).tolist()
    return list({b"tenant/0001/region/eu-west/user/profile/%016x" % n for n in scattered})


def build_runs(path: str, shape: str, rows: int, *, rocks: bool) -> int:
    """Ten flushed runs of ours, and if wanted of rocksdict's, to be copied for each round; how many rows."""
    ours = Ours(make(path, "ours"))
    peer = open_rocks(f"{path}/rocks") if rocks else None
    chance = np.random.default_rng(3)
    total = 0
    for _ in range(RUNS):
        keys = keys_of_run(shape, rows, chance)
        values = values_for(keys, chance)
        total += len(keys)
        ours.apply(keys, values)
        ours.flush()
        if peer is not None:
            put_rocks(peer, keys, values)
            peer.flush()
    ours.close()
    if peer is not None:
        peer.close()
    return total


@contextmanager
def copy_of(path: str) -> Iterator[str]:
    target = f"{path}-copy"
    shutil.copytree(path, target)
    os.sync()  # what the copy left to be written is not to be paid by the work
    try:
        yield target
    finally:
        shutil.rmtree(target)


def compact_ours(path: str, rows: int) -> float:
    with copy_of(f"{path}/ours") as copy:
        ours = Ours(copy)
        result = rate(rows, ours.compact)
        ours.close()
        return result


def compact_rocks(path: str, rows: int) -> float:
    with copy_of(f"{path}/rocks") as copy:
        rocks = open_rocks(copy)
        result = rate(rows, lambda: rocks.compact_range(None, None))
        rocks.close()
        return result


def flush_ours(keys: list[bytes], values: list[bytes]) -> float:
    with folder() as path:
        ours = Ours(path)
        ours.apply(keys, values)
        result = rate(len(keys), ours.flush)
        ours.close()
        return result


def flush_rocks(keys: list[bytes], values: list[bytes]) -> float:
    with folder() as path:
        rocks = open_rocks(path)
        put_rocks(rocks, keys, values)
        result = rate(len(keys), rocks.flush)
        rocks.close()
        return result


def compact_watched(path: str) -> float:
    """The anonymous memory that a compaction takes on top, as 1/MB."""

    def anonymous_mb() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1_024 for line in lines if line.startswith("RssAnon"))

    done = threading.Event()
    before = anonymous_mb()
    most = [before]

    def watch() -> None:
        while not done.wait(0.01):
            most.append(anonymous_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    compact_ours(path, 1)
    done.set()
    watcher.join(10)
    return 1 / max(1.0, max(most) - before)


def size_of(path: str) -> int:
    """The bytes of the runs below a folder."""
    return sum(file.stat().st_size for file in Path(path, "ours").rglob("*") if file.suffix in (".sst", ".idx"))


def write_raw(path: str, size: int) -> float:
    """What the disk itself does with so many bytes: files as large as a compaction's, each synced."""
    block = random.Random(7).randbytes(1 << 20)
    target = make(path, "raw")

    def work() -> None:
        for number, start in enumerate(range(0, size, OUTPUT_BYTES)):
            with open(f"{target}/{number}", "wb", buffering=0) as file:
                for _ in range(min(OUTPUT_BYTES, size - start) >> 20):
                    file.write(block)
                os.fsync(file)

    os.sync()
    result = rate(size >> 20, work)
    shutil.rmtree(target)
    return result


@contextmanager
def in_memory(*paths: str) -> Iterator[list[tuple[str, ...]]]:
    """Copies of folders on a file system in memory, where there is one with room for them, their copies and outputs."""
    bytes_needed = 4 * sum(size_of(path) for path in paths)
    if not os.path.isdir(MEMORY_FOLDER) or shutil.disk_usage(MEMORY_FOLDER).free < bytes_needed:
        yield []
        return
    with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as folder:
        copies = [shutil.copytree(f"{path}/ours", f"{folder}/{number}/ours") for number, path in enumerate(paths)]
        yield [(", in memory", *(os.path.dirname(copy) for copy in copies))]


def bench_writes() -> bool:
    chance = np.random.default_rng(4)
    keys = keys_of_run(SHAPES[0], MERGE_ROWS, chance)
    values = values_for(keys, chance)
    cases = [
        Case(name="flush", run=partial(flush_ours, keys, values), unit="rows/s"),
        Case(name="flush: rocksdict", run=partial(flush_rocks, keys, values), peer_of="flush", unit="rows/s"),
    ]
    goals = [Goal(ours="flush", ratio=0.8)]
    with folder() as path:
        for number, shape in enumerate(SHAPES):
            base, name = make(path, str(number)), f"compaction, {shape}"
            rows = build_runs(base, shape, MERGE_ROWS, rocks=True)
            cases.append(Case(name=name, run=partial(compact_ours, base, rows), unit="rows/s"))
            cases.append(
                Case(name=f"{name}: rocksdict", run=partial(compact_rocks, base, rows), peer_of=name, unit="rows/s")
            )
            goals.append(Goal(ours=name, ratio=1.5))
        large, small = f"{path}/0", make(path, "small")
        rows = build_runs(small, SHAPES[0], MERGE_ROWS // 10, rocks=False)
        memory = "one over the memory of a compaction"
        with in_memory(large, small) as copies:
            for where, many, few in ((ON_DISK, large, small), *copies):
                speed = f"compaction of ten times the data{where}"
                cases += [
                    Case(name=speed, run=partial(compact_ours, many, 10 * rows), unit="rows/s"),
                    Case(
                        name=f"the tenth of it{where}", run=partial(compact_ours, few, rows), peer_of=speed,
                        unit="rows/s",
                    ),
                ]  # fmt: skip
                goals.append(Goal(ours=speed, ratio=1 / 1.3))
            cases += [
                Case(name=RAW, run=partial(write_raw, path, 10 * size_of(small)), unit="MB/s"),
                Case(name="the tenth of them", run=partial(write_raw, path, size_of(small)), peer_of=RAW, unit="MB/s"),
                Case(name=memory, run=partial(compact_watched, large), unit="1/MB"),
                Case(name=f"{MEMORY_MB_MAX} MB", run=lambda: 1 / MEMORY_MB_MAX, peer_of=memory, unit="1/MB"),
            ]
            goals.append(Goal(ours=memory, ratio=1.0))
            gates_met = run("lsm-writes", cases, goals)
        return bench_latency(large) and gates_met


# -- reads beside a compaction


def worst_gets(tree: Tree, keys: Sequence[bytes], go_on: Callable[[int], bool]) -> float:
    """One over the p99.9 of gets, for as long as `go_on(gets so far)`."""
    took: list[float] = []
    get, clock = tree.get, time.perf_counter
    while go_on(len(took)):
        for key in keys:
            begin = clock()
            get(key)
            took.append(clock() - begin)
    return 1 / float(np.quantile(took, 0.999))


def bench_latency(path: str) -> bool:
    engines = Engines()
    with copy_of(f"{path}/ours") as copy:
        ours = Ours(copy)
        keys = [key for key, _ in islice(ours.tree.scan(), 0, 200_000, 100)]
        ours.close()
    random.Random(5).shuffle(keys)

    def idle() -> float:
        with copy_of(f"{path}/ours") as copy:
            ours = Ours(copy)
            get_all(ours.tree.get, keys)()
            result = worst_gets(ours.tree, keys, lambda gets: gets < 100_000)
            ours.close()
            return result

    def compacting() -> float:
        with copy_of(f"{path}/ours") as copy, ThreadPoolExecutor(1) as pool:
            ours = Ours(copy, engines)
            get_all(ours.tree.get, keys)()
            work = pool.submit(ours.compact)
            result = worst_gets(ours.tree, keys, lambda gets: not work.done())
            work.result()
            ours.close()
            return result

    name = "one over p99.9 of gets beside a compaction"
    cases = [Case(name=name, run=compacting), Case(name="idle", run=idle, peer_of=name)]
    try:
        return run("lsm-latency", cases, [Goal(ours=name, ratio=0.5)])
    finally:
        engines.shutdown(10.0)


def main() -> bool:
    reads = bench_reads()
    return bench_writes() and reads


if __name__ == "__main__":
    sys.exit(not main())
