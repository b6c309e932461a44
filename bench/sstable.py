"""Sstables beside LevelDB (plyvel) and RocksDB (rocksdict): point reads, scans, compaction.

All databases are warm, reopened after loading, with caches and blooms on. A compaction includes indexes and fsyncs.
SSTABLE_ROWS and SSTABLE_MERGE_ROWS make a shorter run.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import plyvel
import rocksdict

from bench.harness import Case, Goal, folder, rate, run
from penstock.archive.container import ChunkIdentity
from penstock.host.files import OsFileSystem
from penstock.lsm.merge import MergeInput, MergePlan, merge, sstable_path
from penstock.lsm.rows import Columns
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import SstableWriter

ROWS = int(os.environ.get("SSTABLE_ROWS", "1_000_000"))
MERGE_ROWS = int(os.environ.get("SSTABLE_MERGE_ROWS", "500_000"))
RUNS = 10
STORE = bytes(16)
Keys = list[bytes]


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


@contextmanager
def databases() -> Iterator[tuple[Keys, Sstable, Any, Any]]:
    chance = random.Random(1)
    with folder() as path:
        keys = sorted({chance.randbytes(16) for _ in range(ROWS)})
        values = [chance.randbytes(100) for _ in keys]
        write_sstable(f"{path}/1.sst", keys, values)
        level, rocks = load_peers(Path(path), keys, values)
        table = Sstable.open(f"{path}/1.sst")
        yield keys, table, level, rocks
        level.close()
        rocks.close()
        table.close()


def bench_reads() -> bool:
    chance = random.Random(2)
    with databases() as (keys, table, level, rocks):
        some = chance.sample(keys[:-200], min(100_000, ROWS // 2))
        absent = [chance.randbytes(16) for _ in some]
        starts = some[:2_000]
        works: dict[str, tuple[int, dict[str, Callable[[], object]]]] = {
            "get hit": (len(some), {
                "ours": get_all(table.get, some),
                "plyvel": get_all(level.get, some),
                "rocksdict": get_all(rocks.get, some),
            }),
            "get miss": (len(some), {
                "ours": get_all(table.get, absent),
                "plyvel": get_all(level.get, absent),
                "rocksdict": get_all(rocks.get, absent),
            }),
            "100 rows from a key": (len(starts), {
                "ours": scan_prefixes(partial(hundred_ours, table), starts),
                "plyvel": scan_prefixes(partial(hundred_level, level), starts),
                "rocksdict": scan_prefixes(partial(hundred_rocks, rocks), starts),
            }),
            "scan to tuples": (ROWS, {
                "ours": lambda: scan_ours(table),
                "plyvel": lambda: list(level),
                "rocksdict": lambda: list(rocks.items()),
            }),
            "scan touching every byte": (ROWS, {
                "ours": lambda: touch_arrow(table),
                "plyvel": lambda: touch_level(level),
                "rocksdict": lambda: touch_level(rocks.items()),
            }),
        }  # fmt: skip
        cases = []
        for name, (count, peers) in works.items():
            for peer, work in peers.items():
                work()  # warm
                ours = peer == "ours"
                cases.append(
                    Case(
                        name=name if ours else f"{name}: {peer}",
                        run=partial(rate, count, work),
                        peer_of=None if ours else name,
                    )
                )
        return run("sstable-reads", cases, [
            Goal(ours="get hit", ratio=1.0, gate=True),
            Goal(ours="get hit", ratio=1.5),
            Goal(ours="get miss", ratio=1.2),
            Goal(ours="100 rows from a key", ratio=1.0),
            Goal(ours="scan to tuples", ratio=2.0),
            Goal(ours="scan touching every byte", ratio=5.0),
        ])  # fmt: skip


# -- compaction


def merge_keys(shape: str, chance: np.random.Generator) -> Keys:
    if shape == "random keys":
        raw = chance.bytes(16 * MERGE_ROWS)
        return sorted({raw[at : at + 16] for at in range(0, len(raw), 16)})
    # Half of what all runs hold is an older version of a key.
    ids = chance.integers(0, MERGE_ROWS * RUNS * 63 // 100, MERGE_ROWS)
    scattered = (ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).tolist()
    return sorted({b"tenant/0001/region/eu-west/user/profile/%016x" % n for n in scattered})


def merge_runs(shape: str) -> Iterator[tuple[Keys, list[bytes]]]:
    chance = np.random.default_rng(3)
    for _ in range(RUNS):
        keys = merge_keys(shape, chance)
        raw = chance.bytes(100 * len(keys))
        yield keys, [raw[at : at + 100] for at in range(0, len(raw), 100)]


def merge_ours(shape: str) -> float:
    with folder() as path:
        inputs: list[MergeInput] = []
        total = 0
        for number, (keys, values) in enumerate(merge_runs(shape), 1):
            name = sstable_path(path, number)
            write_sstable(name, keys, values, number)
            inputs.insert(0, MergeInput(path=name))
            total += len(keys)
        plan = MergePlan(
            inputs=tuple(inputs), folder=path, store=STORE, chunk_ids=tuple(range(100, 120)), now_us=0,
            bottom=True, lsn_floor=1 << 62,
        )  # fmt: skip
        return rate(total, lambda: merge(plan))


def merge_rocks(shape: str) -> float:
    options = rocks_options()
    options.set_disable_auto_compactions(True)
    options.set_level_zero_stop_writes_trigger(1_000)
    options.set_level_zero_slowdown_writes_trigger(1_000)
    options.set_write_buffer_size(1 << 30)
    with folder() as path:
        rocks = rocksdict.Rdict(path, options)
        total = 0
        for keys, values in merge_runs(shape):
            for key, value in zip(keys, values, strict=True):
                rocks[key] = value
            rocks.flush()
            total += len(keys)
        result = rate(total, lambda: rocks.compact_range(None, None))
        rocks.close()
        return result


def bench_merges() -> bool:
    shapes = ("random keys", "long shared prefix, half duplicates")
    cases = []
    for shape in shapes:
        cases.append(Case(name=f"compaction, {shape}", run=partial(merge_ours, shape), unit="rows/s"))
        cases.append(
            Case(
                name=f"rocksdict, {shape}",
                run=partial(merge_rocks, shape),
                peer_of=f"compaction, {shape}",
                unit="rows/s",
            )
        )
    return run("sstable-compaction", cases, [Goal(ours=f"compaction, {shape}", ratio=1.5) for shape in shapes])


def main() -> bool:
    reads = bench_reads()
    return bench_merges() and reads


if __name__ == "__main__":
    sys.exit(not main())
