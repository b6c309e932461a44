"""What a change feed costs: rows a second of processor time, written to a table with a feed and to one without.

Processor time of all threads, from the first write until all is in files: a feed works beside the writer, so the time
that a writer waits would not show it. The table has rows in files before, because a feed has to find out for each key
whether it had a value.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import penstock
from bench.harness import Case, Goal, folder, run, sized

ROWS = sized(300_000, 30_000)
BATCH = 10_000
VALUE = bytes(100)
RATIO = 0.87  # at most 15 % more time


def keys_of(seed: int) -> list[bytes]:
    raw = random.Random(seed).randbytes(16 * ROWS)
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


def put_all(table: Any, keys: list[bytes]) -> None:
    for key in keys:
        table.put(key, VALUE)


def put_many(table: Any, keys: list[bytes]) -> None:
    for at in range(0, len(keys), BATCH):
        table.put_many(dict.fromkeys(keys[at : at + BATCH], VALUE))


def store_all(store: Any) -> None:
    store.flush()
    for tree, _ in store._maintenance.trees():
        store._maintenance.flush(tree)


def rows_per_s(write: Callable[[Any, list[bytes]], None], seed: int, changes: bool) -> float:
    """Return the rows that a second of processor time writes and stores."""
    keys = keys_of(seed)
    with folder() as path, penstock.open(f"{path}/store") as store:
        table = store.kv("t", changes=changes)
        put_many(table, keys_of(1))
        store_all(store)
        begin_s = time.process_time()
        write(table, keys)
        store_all(store)
        return len(keys) / (time.process_time() - begin_s)


def main() -> bool:
    cases: list[Case] = []
    for name, write, seed in (
        ("put of new keys", put_all, 2),
        ("put_many of new keys", put_many, 2),
        ("put_many of keys that it has", put_many, 1),
    ):
        ours = f"{name}, with a change feed"
        cases += [
            Case(name=ours, run=partial(rows_per_s, write, seed, True), unit="rows/s"),
            Case(name=f"{name}, without", run=partial(rows_per_s, write, seed, False), peer_of=ours, unit="rows/s"),
        ]
    return run("feeds", cases, [Goal(ours=case.name, ratio=RATIO) for case in cases if case.peer_of is None], rounds=5)


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
