"""The coordinator alone: what a write costs, and group commit by several threads, beside a bare mutex and LevelDB.

The flushers are as thin as they can be, so that the figures are the coordinator's: one keeps batches in memory, one
joins keys and values, writes them to a zero-filled file and calls fdatasync.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Self

import plyvel

from bench.harness import Case, Goal, by_threads, folder, rate, run, sized
from penstock.coordinator import Batch, CoordinatorSettings, Durability, WriteCoordinator

WRITES = sized(1_000_000, 100_000)
KEYS = [i.to_bytes(16, "big") for i in range(WRITES)]
VALUE = b"v" * 100
SIZE = 16 + 100 + 64
WINDOW = 64
ROOM = 16 << 20  # of the file, zero-filled ahead


class Puts:
    """A delta of keys and values."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}

    def is_empty(self) -> bool:
        return not self.rows

    def merge(self, other: Self, /) -> None:
        self.rows.update(other.rows)

    def size_estimate(self) -> int:
        return SIZE * len(self.rows)


def insert(pending: Puts, key: bytes, value: bytes, _: None) -> None:
    pending.rows[key] = value


class MemoryFlusher:
    """Nothing is written; the view is the number of rows."""

    durability = Durability.DISK

    def __init__(self) -> None:
        self.rows = 0

    def make_durable(self, batch: Batch[Puts], *, again: bool) -> int:
        return sum(len(delta.rows) for delta in batch.deltas)

    def apply(self, flushed: int) -> int:
        self.rows += flushed
        return self.rows

    def recover(self) -> None: ...


class FileFlusher(MemoryFlusher):
    """Keys and values joined, written into zero-filled room, and synced."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._fd = os.open(f"{path}/journal", os.O_CREAT | os.O_WRONLY)
        os.pwrite(self._fd, bytes(ROOM), 0)
        os.fsync(self._fd)
        self._at = 0

    def make_durable(self, batch: Batch[Puts], *, again: bool) -> int:
        count = 0
        for delta in batch.deltas:
            data = b"".join(delta.rows) + b"".join(delta.rows.values())
            if self._at + len(data) > ROOM:
                self._at = 0  # a journal would recycle a segment here
            os.pwrite(self._fd, data, self._at)
            self._at += len(data)
            count += len(delta.rows)
        os.fdatasync(self._fd)
        return count

    def close(self) -> None:
        os.close(self._fd)


def make(flusher: MemoryFlusher) -> WriteCoordinator[Puts, int, int]:
    return WriteCoordinator(flusher, Puts, view=0, incarnation=1, settings=CoordinatorSettings()).start()


@contextmanager
def on_disk() -> Iterator[WriteCoordinator[Puts, int, int]]:
    with folder() as path:
        flusher = FileFlusher(path)
        try:
            with make(flusher) as coordinator:
                yield coordinator
        finally:
            flusher.close()


def fill(coordinator: WriteCoordinator[Puts, int, int]) -> None:
    write = coordinator.write_into
    for key in KEYS:
        write(insert, SIZE, key, VALUE, None)
    coordinator.flush()


def writes_in_memory() -> float:
    with make(MemoryFlusher()) as coordinator:
        return rate(WRITES, lambda: fill(coordinator))


def writes_to_file() -> float:
    with on_disk() as coordinator:
        return rate(WRITES, lambda: fill(coordinator))


def bare_dict() -> float:
    """What a write cannot go below: a lock and an insert."""
    lock = threading.Lock()
    rows: dict[bytes, bytes] = {}

    def put(key: bytes) -> None:
        with lock:
            rows[key] = VALUE

    def work() -> None:
        for key in KEYS:
            put(key)

    return rate(WRITES, work)


def durable(threads: int, count: int, window: int = 1) -> float:
    with on_disk() as coordinator:

        def work(keys: list[bytes]) -> None:
            for start in range(0, len(keys), window):
                for key in keys[start : start + window]:
                    epoch = coordinator.write_into(insert, SIZE, key, VALUE, None)
                coordinator.flush(epoch)

        return by_threads(KEYS, threads, count, work)


def durable_mutex(threads: int, count: int) -> float:
    """The naive way: everyone syncs its own write under one lock."""
    with folder() as path:
        flusher = FileFlusher(path)
        lock = threading.Lock()

        def work(keys: list[bytes]) -> None:
            for key in keys:
                delta = Puts()
                delta.rows[key] = VALUE
                with lock:
                    flusher.make_durable(Batch((delta,), 1, 1, SIZE), again=False)  # type: ignore[arg-type]

        result = by_threads(KEYS, threads, count, work)
        flusher.close()
        return result


def durable_leveldb(threads: int, count: int) -> float:
    with folder() as path:
        database = plyvel.DB(f"{path}/level", create_if_missing=True)

        def work(keys: list[bytes]) -> None:
            for key in keys:
                database.put(key, VALUE, sync=True)

        result = by_threads(KEYS, threads, count, work)
        database.close()
        return result


def main() -> bool:
    cases = [
        Case(name="write, in-memory flusher", run=writes_in_memory),
        Case(name="lock + dict insert alone", run=bare_dict, peer_of="write, in-memory flusher"),
        Case(name="write, all synced by the final flush", run=writes_to_file),
    ]
    goals = []
    for threads, count, ratio in ((1, 2_000, 0.9), (16, 8_000, 0.8), (64, 12_800, 0.6)):
        name = f"durable write, {threads} threads"
        cases += [
            Case(name=name, run=partial(durable, threads, count)),
            Case(name=f"LevelDB, {threads} threads", run=partial(durable_leveldb, threads, count), peer_of=name),
            Case(name=f"a mutex, {threads} threads", run=partial(durable_mutex, threads, count // 4), peer_of=name),
        ]
        goals.append(Goal(ours=name, ratio=ratio))
    name = f"durable, awaited once per {WINDOW}"
    cases += [
        Case(name=name, run=lambda: durable(1, 128_000, WINDOW)),
        Case(name="LevelDB, each synced", run=lambda: durable_leveldb(1, 2_000), peer_of=name),
        Case(name=f"durable, awaited once per {WINDOW}, 16 threads", run=lambda: durable(16, 256_000, WINDOW)),
    ]
    goals.append(Goal(ours=name, ratio=8))
    return run("coordinator", cases, goals, rounds=5)


if __name__ == "__main__":
    sys.exit(not main())
