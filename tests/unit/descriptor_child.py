"""A process with few descriptors that uses a store: `descriptor_child.py <scenario> <folder> <limit> <bounded>`.

Ends with 0 if all went well. With `unbounded`, every open file and mapping keeps a descriptor: then it must not.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.archive.chunk import ChunkIdentity
from penstock.host import mappings
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem, UnboundedFileSystem
from penstock.lsm.merge import MergeInput, MergePlan
from penstock.lsm.rows import Columns
from penstock.lsm.sstable import Sstable
from penstock.lsm.tasks import merge_on
from penstock.lsm.writer import SstableWriter
from penstock.scheduler.engines import Engines
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

SHARDS = 40
SETTINGS = StoreSettings(serve=False)


def opened(root: str, fs: FileSystem) -> Store:
    return open_store(root, fs=fs, settings=SETTINGS)


def count_open(root: str) -> tuple[int, int]:
    """Descriptors and mappings of files of the store."""
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
    return sum(link.startswith(root) for link in links), Path("/proc/self/maps").read_text().count(root)


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def queue(root: str, fs: FileSystem) -> None:
    keys = [b"%d" % number for number in range(2 * SHARDS)]
    with opened(root, fs) as store:
        events = store.queue("events", shards=SHARDS)
        for _ in range(2):
            events.put_many(keys, keys=keys, durable=True)
        consumer, count = events.consumer("c"), 0
        while messages := consumer.get(1_000):
            consumer.ack(messages)
            count += len(messages)
        assert count == 2 * len(keys)
        with store.snapshot() as snapshot:
            assert snapshot.queue("events").to_arrow().num_rows == count
        store.checkpoint()
    with opened(root, fs) as store:
        assert store.queue("events").to_arrow().num_rows == 2 * len(keys)
        assert not store.queue("events").consumer("c").get()
        store.queue("events").put_many(keys, keys=keys, durable=True)
        assert len(store.queue("events").consumer("c").get(1_000)) == len(keys)


def kv(root: str, fs: FileSystem) -> None:
    rows = {b"%d" % number: b"v%d" % number for number in range(2 * SHARDS)}
    with opened(root, fs) as store:
        users = store.kv("users", shards=SHARDS)
        users.put_many(list(rows.items()))
        store.flush()
        for tree, _ in store._maintenance.trees():
            store._maintenance.flush(tree)
        with store.snapshot() as snapshot:
            assert dict(snapshot.kv("users").scan()) == rows
        assert all(users.get(key) == value for key, value in rows.items())
        users.put(b"0", b"new")
        store.compact("users")
        assert dict(users.scan()) == {**rows, b"0": b"new"}
    with opened(root, fs) as store:
        assert store.kv("users").to_arrow().num_rows == len(rows)


def tables(root: str, fs: FileSystem) -> None:
    with opened(root, fs) as store:
        for number in range(SHARDS):
            store.queue(f"q{number}").put(b"message")
        for number in range(5):
            store.kv(f"k{number}").put(b"key", b"value")
        store.flush()
    with opened(root, fs) as store:
        for number in range(SHARDS):
            assert store.queue(f"q{number}").to_arrow().num_rows == 1
        for number in range(5):
            assert store.kv(f"k{number}").get(b"key") == b"value"


def sstables(root: str, fs: FileSystem) -> None:
    """Hundreds of files, mapped at once, and merged by a process of the engine."""
    os.makedirs(f"{root}/out")
    paths = [f"{root}/{number:04d}.sst" for number in range(2 * SHARDS)]
    for number, path in enumerate(paths, 1):
        writer = SstableWriter(fs, path, ChunkIdentity(store=bytes(16), chunk_id=number))
        writer.append(Columns.of([b"%04d" % number], [b"value"], [number]))
        writer.finish()
    open_now = [Sstable.open(path, fs=fs) for path in paths]
    assert all(table.get(b"%04d" % number) for number, table in enumerate(open_now, 1))
    plan = MergePlan(
        inputs=tuple(MergeInput(path=path) for path in paths[::-1]),
        folder=f"{root}/out",
        store=bytes(16),
        chunk_ids=(9_999,),
        now_us=0,
    )
    engines = Engines()
    try:
        (summary,) = merge_on(engines)(plan, lambda: False, None)
        assert summary.rows == len(paths)
    finally:
        engines.shutdown(10.0)


SCENARIOS: dict[str, Callable[[str, FileSystem], None]] = {
    "queue": queue,
    "kv": kv,
    "tables": tables,
    "sstables": sstables,
}


def main() -> None:
    name, root, limit, bounded = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), int(limit)))
    fs: FileSystem = OsFileSystem()
    if bounded == "unbounded":
        fs = UnboundedFileSystem()
        mappings._map = lambda fd, size: mmap.mmap(fd, size, access=mmap.ACCESS_READ)
    SCENARIOS[name](root, fs)
    print(*count_open(root))


if __name__ == "__main__":
    main()
