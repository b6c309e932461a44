"""Sstables beside LevelDB (plyvel) and RocksDB (rocksdict): point reads, scans, compaction, in one run.

    python bench/sstable.py [--rows 1000000] [--merge-rows 500000] [--rounds 3] [--out bench/results/sstable.json]

Every figure is the median of interleaved rounds; a ratio above 1 says that we are faster than the peer. All databases are
warm, reopened after loading, with caches and blooms on. A compaction includes its indexes and its fsyncs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plyvel
import rocksdict

from penstock.archive.container import ChunkIdentity
from penstock.host.files import OsFileSystem
from penstock.lsm.merge import MergeInput, MergePlan, merge, sstable_path
from penstock.lsm.rows import Columns
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import SstableWriter

STORE = bytes(16)
Figures = dict[str, float]


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def write_sstable(path: str, keys: list[bytes], values: list[bytes], lsn: int = 1) -> None:
    writer = SstableWriter(OsFileSystem(), path, ChunkIdentity(store=STORE, chunk_id=lsn))
    for at in range(0, len(keys), 4_096):
        writer.append(Columns.of(keys[at : at + 4_096], values[at : at + 4_096], lsn))
    writer.finish()


# -- databases


def open_plyvel(path: str) -> Any:
    return plyvel.DB(path, create_if_missing=True, lru_cache_size=512 << 20, bloom_filter_bits=10,
                     write_buffer_size=64 << 20, compression=None)  # fmt: skip


def rocks_options() -> Any:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    table = rocksdict.BlockBasedOptions()
    table.set_block_cache(rocksdict.Cache(512 << 20))
    table.set_bloom_filter(10, False)
    options.set_block_based_table_factory(table)
    options.set_compression_type(rocksdict.DBCompressionType.none())
    options.set_write_buffer_size(64 << 20)
    return options


def load_peers(folder: Path, keys: list[bytes], values: list[bytes]) -> tuple[Any, Any]:
    level = open_plyvel(str(folder / "leveldb"))
    with level.write_batch() as batch:
        for key, value in zip(keys, values, strict=True):
            batch.put(key, value)
    level.compact_range()
    level.close()
    rocks = rocksdict.Rdict(str(folder / "rocksdb"), rocks_options())
    for key, value in zip(keys, values, strict=True):
        rocks[key] = value
    rocks.flush()
    rocks.compact_range(None, None)
    rocks.close()
    return open_plyvel(str(folder / "leveldb")), rocksdict.Rdict(str(folder / "rocksdb"), rocks_options())


# -- reads


def get_all(get: Callable[[bytes], Any], keys: list[bytes]) -> Callable[[], None]:
    def work() -> None:
        for key in keys:
            get(key)

    return work


def scan_ours(table: Sstable) -> int:
    rows: list[tuple[bytes, bytes]] = []
    for piece in table.scan():
        rows.extend(zip(piece.keys, piece.values, strict=True))
    return len(rows)


def scan_prefixes(scan: Callable[[bytes], Any], starts: list[bytes]) -> Callable[[], None]:
    def work() -> None:
        for start in starts:
            scan(start)

    return work


def hundred_ours(table: Sstable, start: bytes) -> list[tuple[bytes, bytes]]:
    rows: list[tuple[bytes, bytes]] = []
    for piece in table.scan(start):
        rows.extend(zip(piece.keys, piece.values, strict=True))
        if len(rows) >= 100:
            break
    return rows[:100]


def hundred_level(db: Any, start: bytes) -> list[tuple[bytes, bytes]]:
    with db.iterator(start=start) as rows:
        return [next(rows) for _ in range(100)]


def hundred_rocks(db: Any, start: bytes) -> list[tuple[bytes, bytes]]:
    rows = db.items(from_key=start)
    return [next(rows) for _ in range(100)]


def touch_arrow(table: Sstable) -> int:
    """Read every byte of keys and values, as Arrow batches."""
    total = 0
    for batch in table.scan_arrow():
        for name in ("key", "value"):
            data = batch[name].buffers()[2]
            words = np.frombuffer(data, np.uint64, data.size // 8)
            total += int(words.sum(dtype=np.uint64)) & 1
    return total


def touch_level(db: Any) -> int:
    total = 0
    for key, value in db:
        total += len(key) + len(value)
    return total


def bench_reads(rows: int, rounds: int, chance: random.Random) -> dict[str, Figures]:
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    keys = sorted({chance.randbytes(16) for _ in range(rows)})
    values = [chance.randbytes(100) for _ in keys]
    write_sstable(str(folder / "1.sst"), keys, values)
    level, rocks = load_peers(folder, keys, values)
    table = Sstable.open(str(folder / "1.sst"))
    some = chance.sample(keys[:-200], min(100_000, rows // 2))
    absent = [chance.randbytes(16) for _ in some]
    starts = some[:2_000]
    cases: dict[str, dict[str, Callable[[], Any]]] = {
        "get hit": {
            "penstock": get_all(table.get, some),
            "plyvel": get_all(level.get, some),
            "rocksdict": get_all(rocks.get, some),
        },
        "get miss": {
            "penstock": get_all(table.get, absent),
            "plyvel": get_all(level.get, absent),
            "rocksdict": get_all(rocks.get, absent),
        },
        "100 rows from a key": {
            "penstock": scan_prefixes(lambda start: hundred_ours(table, start), starts),
            "plyvel": scan_prefixes(lambda start: hundred_level(level, start), starts),
            "rocksdict": scan_prefixes(lambda start: hundred_rocks(rocks, start), starts),
        },
        "scan to tuples": {
            "penstock": lambda: scan_ours(table),
            "plyvel": lambda: list(level),
            "rocksdict": lambda: list(rocks.items()),
        },
        "scan touching every byte": {
            "penstock": lambda: touch_arrow(table),
            "plyvel": lambda: touch_level(level),
            "rocksdict": lambda: touch_level(rocks.items()),
        },
    }
    units = {"get hit": len(some), "get miss": len(some), "100 rows from a key": len(starts)}
    results = {name: measure(case, rounds, units.get(name, rows)) for name, case in cases.items()}
    level.close()
    rocks.close()
    table.close()
    shutil.rmtree(folder)
    return results


def measure(case: dict[str, Callable[[], Any]], rounds: int, units: int) -> Figures:
    """Microseconds a unit: the median of rounds in which the candidates take turns."""
    for work in case.values():
        work()
    seen: dict[str, list[float]] = {name: [] for name in case}
    for _ in range(rounds):
        for name, work in case.items():
            seen[name].append(timed(work) / units * 1e6)
    return {name: statistics.median(times) for name, times in seen.items()}


# -- compaction


def merge_keys(shape: str, rows: int, runs: int, chance: np.random.Generator) -> list[bytes]:
    if shape == "random keys":
        raw = chance.bytes(16 * rows)
        return sorted({raw[at : at + 16] for at in range(0, len(raw), 16)})
    # Half of what all runs hold is an older version of a key.
    ids = chance.integers(0, rows * runs * 63 // 100, rows)
    scattered = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).tolist()
    return sorted({b"tenant/0001/region/eu-west/user/profile/%016x" % n for n in scattered})


def bench_merge(shape: str, rows: int, rounds: int, runs: int = 10) -> Figures:
    seen: dict[str, list[float]] = {"penstock": [], "rocksdict": []}
    for number in range(rounds):
        folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
        chance = np.random.default_rng(number)
        options = rocks_options()
        options.set_disable_auto_compactions(True)
        options.set_level_zero_stop_writes_trigger(1_000)
        options.set_level_zero_slowdown_writes_trigger(1_000)
        options.set_write_buffer_size(1 << 30)
        rocks = rocksdict.Rdict(str(folder / "rocksdb"), options)
        inputs: list[MergeInput] = []
        total = 0
        for run in range(1, runs + 1):
            keys = merge_keys(shape, rows, runs, chance)
            raw = chance.bytes(100 * len(keys))
            values = [raw[at : at + 100] for at in range(0, len(raw), 100)]
            path = sstable_path(str(folder), run)
            write_sstable(path, keys, values, run)
            inputs.insert(0, MergeInput(path=path))
            for key, value in zip(keys, values, strict=True):
                rocks[key] = value
            rocks.flush()
            total += len(keys)
        plan = MergePlan(
            inputs=tuple(inputs), folder=str(folder), store=STORE, chunk_ids=tuple(range(100, 120)), now_us=0,
            bottom=True, lsn_floor=1 << 62,
        )  # fmt: skip
        seen["penstock"].append(timed(lambda plan=plan: merge(plan)) / total * 1e6)  # type: ignore[misc]
        seen["rocksdict"].append(timed(lambda rocks=rocks: rocks.compact_range(None, None)) / total * 1e6)  # type: ignore[misc]
        rocks.close()
        shutil.rmtree(folder)
    return {name: statistics.median(times) for name, times in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--merge-rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="bench/results/sstable.json")
    options = parser.parse_args()
    results = bench_reads(options.rows, options.rounds, random.Random(1))
    for shape in ("random keys", "long shared prefix, half duplicates"):
        results[f"compaction, {shape}"] = bench_merge(shape, options.merge_rows, options.rounds)
    goals = {
        "get hit": 1.5, "get miss": 1.2, "100 rows from a key": 1.0, "scan to tuples": 2.0,
        "scan touching every byte": 5.0,
    }  # fmt: skip
    report: dict[str, Any] = {}
    for name, figures in results.items():
        ours = figures["penstock"]
        best = min(value for peer, value in figures.items() if peer != "penstock")
        report[name] = {"us": figures, "ratio": best / ours, "goal": goals.get(name, 1.5)}
        shown = "  ".join(f"{peer} {value:9.3f}" for peer, value in figures.items())
        print(f"{name:48} {shown} us  ratio {best / ours:5.2f} (goal {goals.get(name, 1.5)})")
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
