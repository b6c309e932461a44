"""A store of all kinds with everything real: written to, maintained and backed up until the process is killed.

Prints `written <rounds>` after each acknowledged round and `backed-up <number>` after each backup. With the argument
`halt`, the second backup stops for ever after its first files, and prints `halted <number>`.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import penstock

SECOND = 1_000_000
BEGIN = 1_700_000_000 * SECOND
printing = threading.Lock()


def make_tables(store: Any) -> None:
    store.kv("users", shards=2)
    store.queue("events", shards=2)
    store.series("metrics")
    store.vector("docs", dimensions=4)


def write_round(store: Any, number: int) -> None:
    """One batch over every kind: all of it is at one LSN."""
    with store.batch() as batch:
        batch.kv("users").put(b"round", b"%d" % number)
        batch.kv("users").put(b"key %06d" % number, b"value" * 20)
        batch.queue("events").put(b"%d" % number, key=b"%d" % (number % 5))
        batch.series("metrics").write("rounds", float(number), labels={"host": "a"}, time=BEGIN + number * SECOND)
        batch.vector("docs").upsert([f"doc {number}"], np.full((1, 4), number + 1, np.float32))


def rounds_of(store: Any) -> int:
    """How many rounds a store holds; every table must hold the same."""
    with store.snapshot() as snapshot:
        if snapshot.kv("users").get(b"round") is None:
            return 0
        last = int(snapshot.kv("users").get(b"round"))
        numbers = sorted(int(value) for value in snapshot.queue("events").to_arrow()["payload"].to_pylist())
        assert numbers == list(range(last + 1))
        assert len(snapshot.kv("users")) == last + 2
        assert snapshot.series("metrics").select("rounds")["value"].to_pylist() == [float(n) for n in numbers]
        assert sorted(snapshot.vector("docs").to_arrow()["id"].to_pylist()) == sorted(f"doc {n}" for n in numbers)
        return last + 1


def halt(number: int, _: penstock.CopyProgress) -> None:
    say("halted", number)
    threading.Event().wait()


def say(*words: object) -> None:
    with printing:
        print(*words, flush=True)


def main(root: Path, first: int, *, halts: bool) -> None:
    store = penstock.open(root / "store")
    make_tables(store)

    def maintain() -> None:
        while True:
            store.checkpoint()
            store.compact("users")
            threading.Event().wait(0.02)

    def back_up() -> None:
        while True:
            number = store.backup(root / "backups", keep=2).number
            say("backed-up", number)
            if halts:
                store.backup(root / "backups", progress=partial(halt, number + 1))

    for target in (maintain, back_up):
        threading.Thread(target=target, daemon=True).start()
    number = first
    while True:
        write_round(store, number)
        number += 1
        say("written", number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), halts="halt" in sys.argv)
