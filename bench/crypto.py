"""Encrypted and compressed tables beside plain ones: gets and scans when warm, puts until durable, and the space taken.

The peer of each case is the same work on a plain table of the same store, in the same round. Gets and scans read rows
that were compacted into one level, after every row was read once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import penstock
from bench.harness import Case, Goal, folder, rate, run, sized

ROWS = int(os.environ.get("CRYPTO_ROWS", sized("300_000", "20_000")))
GETS = min(50_000, ROWS // 2)
PUTS = sized(100_000, 10_000)
VALUE_BYTES = 100
PLAIN, SEALED = "plain", "encrypted and zstd"
KINDS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "encrypted": {"encrypted": True},
    "zstd": {"storage": penstock.StorageOptions(compression=penstock.CompressionConfig(penstock.Codec.ZSTD, 1))},
    SEALED: {
        "encrypted": True,
        "storage": penstock.StorageOptions(compression=penstock.CompressionConfig(penstock.Codec.ZSTD, 1)),
    },
}


def table_name(kind: str) -> str:
    """A table's name for a kind of storage."""
    return kind.replace(" ", "_")


def value_of(number: int) -> bytes:
    """A value that compresses to about half."""
    return (b"%016x" % (number * 2654435761 % (1 << 64)) + b" is the value of a row; it has words ").ljust(VALUE_BYTES)


def load(store: penstock.Store, kind: str) -> None:
    """Fill a table and compact it into one run."""
    table = store.kv(table_name(kind), **KINDS[kind])
    for start in range(0, ROWS, 50_000):
        table.put_many([(b"%012d" % number, value_of(number)) for number in range(start, min(start + 50_000, ROWS))])
    store.flush()
    store.compact(table_name(kind))
    for _ in table.scan():  # warm
        pass


def gets(store: penstock.Store, kind: str) -> Callable[[], float]:
    """Gets of random keys a second."""
    table = store.kv(table_name(kind))
    chance = random.Random(1)
    keys = [b"%012d" % chance.randrange(ROWS) for _ in range(GETS)]

    def work() -> None:
        get = table.get
        for key in keys:
            get(key)

    return lambda: rate(GETS, work)


def scans(store: penstock.Store, kind: str) -> Callable[[], float]:
    """Scanned rows a second."""
    table = store.kv(table_name(kind))

    def work() -> None:
        assert sum(1 for _ in table.scan()) >= ROWS

    return lambda: rate(ROWS, work)


def puts(store: penstock.Store, kind: str) -> Callable[[], float]:
    """Puts a second until all of them are durable, to a table of its own."""
    table = store.kv(f"{table_name(kind)}_puts", **KINDS[kind])

    def work() -> None:
        put = table.put
        for number in range(PUTS):
            put(b"%012d" % number, b"v" * VALUE_BYTES)
        store.flush()

    return lambda: rate(PUTS, work)


def main() -> bool:
    """Run all cases; whether every gate held."""
    cases: list[Case] = []
    with folder() as path, ExitStack() as ends:
        store = ends.enter_context(penstock.open(path, keys={1: b"k" * 32}))
        for kind in KINDS:
            load(store, kind)
        for operation, make in (("get", gets), ("scan", scans), ("put until durable", puts)):
            for kind in KINDS:
                if kind != PLAIN:
                    cases.append(Case(name=f"{operation}, {kind}", run=make(store, kind)))
                    peer = f"{operation}, {PLAIN} ({kind})"
                    cases.append(Case(name=peer, run=make(store, PLAIN), peer_of=f"{operation}, {kind}"))
        goals = [Goal(ours=f"get, {SEALED}", ratio=0.5), Goal(ours=f"put until durable, {SEALED}", ratio=0.5)]
        gates_met = run("crypto", cases, goals)
        for kind in KINDS:
            info = store.port.table(table_name(kind))
            assert info is not None
            size = sum(file.stat().st_size for file in Path(path, "tables", str(info.table_id)).rglob("*.sst"))
            print(f"{kind}: {size / ROWS:.0f} bytes a row in sstables")
    return gates_met


if __name__ == "__main__":
    main()
