"""The kv store beside LevelDB, RocksDB, LMDB and SQLite: 16-byte random keys, 100-byte values, our default settings.

What is compared is said by the names. Where ours is durable at the end and theirs is not (put, put_many), that is to
their advantage. LevelDB and RocksDB are the LSM peers; the goals that name one peer or the LSM peers alone are judged
against those, and the other peers' figures are printed beside them.
"""

from __future__ import annotations

import random
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import lmdb
import plyvel
import rocksdict

import penstock
from bench.harness import Case, Goal, by_threads, folder, rate, run, sized
from penstock.kv.table import KvTable
from penstock.store.store import Store

ROWS = sized(1_000_000, 100_000)
FEW = sized(250_000, 25_000)  # for peers that are only told beside the others
MANY = 1_000
GETS = sized(100_000, 20_000)
WINDOW = 64
MAP_BYTES = 4 << 30

_chance = random.Random(5)
_bytes = _chance.randbytes(16 * ROWS)
KEYS = [_bytes[at : at + 16] for at in range(0, len(_bytes), 16)]
VALUES = [_chance.randbytes(100) for _ in range(1_000)]
QUERY_KEYS = _chance.sample(KEYS, GETS)

Pairs = Iterator[tuple[bytes, bytes]]


def pairs(count: int = ROWS) -> Pairs:
    return ((key, VALUES[i % 1_000]) for i, key in enumerate(islice(KEYS, count)))


def chunks(count: int = ROWS) -> Iterator[list[tuple[bytes, bytes]]]:
    rows = pairs(count)
    while some := list(islice(rows, MANY)):
        yield some


# -- opening


@contextmanager
def ours() -> Iterator[tuple[Store, KvTable[bytes]]]:
    with folder() as path, penstock.open(f"{path}/store") as store:
        yield store, store.kv("rows")


@contextmanager
def leveldb() -> Iterator[Any]:
    with folder() as path, closing(plyvel.DB(f"{path}/level", create_if_missing=True)) as database:
        yield database


def rocks_options(*, sync: bool) -> tuple[Any, Any]:
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    write = rocksdict.WriteOptions()
    write.sync = sync
    return options, write


@contextmanager
def rocksdb(*, sync: bool = False) -> Iterator[Any]:
    options, write = rocks_options(sync=sync)
    with folder() as path:
        database = rocksdict.Rdict(f"{path}/rocks", options)
        database.set_write_options(write)
        try:
            yield database
        finally:
            database.close()


@contextmanager
def lightning(*, sync: bool = False) -> Iterator[Any]:
    with folder() as path, closing(lmdb.open(path, map_size=MAP_BYTES, sync=sync)) as environment:
        yield environment


@contextmanager
def sqlite(*, sync: bool = False) -> Iterator[sqlite3.Connection]:
    with folder() as path, closing(sqlite3.connect(f"{path}/rows.db", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(f"PRAGMA synchronous={'FULL' if sync else 'OFF'}")
        database.execute("CREATE TABLE rows (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        yield database


INSERT = "INSERT OR REPLACE INTO rows VALUES (?, ?)"


# -- put, one by one


def put_ours() -> float:
    with ours() as (store, table):

        def work() -> None:
            put = table.put
            for key, value in pairs():
                put(key, value)
            store.flush()

        return rate(ROWS, work)


def put_leveldb() -> float:
    with leveldb() as database:
        return rate(ROWS, lambda: put_all(database.put))


def put_rocksdb() -> float:
    with rocksdb() as database:
        return rate(ROWS, lambda: put_all(database.put))


def put_all(put: Callable[[bytes, bytes], object], count: int = ROWS) -> None:
    for key, value in pairs(count):
        put(key, value)


def put_lmdb() -> float:
    """One transaction for all: one for each put would be a hundred times slower."""
    with lightning() as environment:

        def work() -> None:
            with environment.begin(write=True) as txn:
                put_all(txn.put, FEW)

        return rate(FEW, work)


def put_sqlite() -> float:
    with sqlite() as database:

        def work() -> None:
            database.execute("BEGIN")
            for pair in pairs(FEW):
                database.execute(INSERT, pair)
            database.execute("COMMIT")

        return rate(FEW, work)


# -- put_many


def many_ours() -> float:
    with ours() as (store, table):

        def work() -> None:
            for some in chunks():
                table.put_many(some)
            store.flush()

        return rate(ROWS, work)


def many_leveldb() -> float:
    with leveldb() as database:

        def work() -> None:
            for some in chunks():
                with database.write_batch() as batch:
                    for key, value in some:
                        batch.put(key, value)

        return rate(ROWS, work)


def many_rocksdb() -> float:
    with rocksdb() as database:

        def work() -> None:
            for some in chunks():
                batch = rocksdict.WriteBatch(raw_mode=True)
                for key, value in some:
                    batch.put(key, value)
                database.write(batch)

        return rate(ROWS, work)


def many_sqlite() -> float:
    with sqlite() as database:

        def work() -> None:
            for some in chunks(FEW):
                database.execute("BEGIN")
                database.executemany(INSERT, some)
                database.execute("COMMIT")

        return rate(FEW, work)


# -- until all is in sstables


def sustained_ours() -> float:
    with ours() as (store, table):

        def work() -> None:
            put_all(table.put)
            store._coordinator.wait_applied(store.flush().epoch)
            for tree, _ in store._maintenance.trees():
                store._maintenance.flush(tree)

        return rate(ROWS, work)


def sustained_leveldb() -> float:
    """LevelDB has no flush: opening it again writes out what its log holds."""
    with folder() as path:

        def work() -> None:
            with closing(plyvel.DB(f"{path}/level", create_if_missing=True)) as database:
                put_all(database.put)
            plyvel.DB(f"{path}/level").close()

        return rate(ROWS, work)


def sustained_rocksdb() -> float:
    with rocksdb() as database:

        def work() -> None:
            put_all(database.put)
            database.flush(wait=True)

        return rate(ROWS, work)


# -- durable


def each(put: Callable[[bytes, bytes], object]) -> Callable[[list[bytes]], None]:
    def work(keys: list[bytes]) -> None:
        for key in keys:
            put(key, VALUES[0])

    return work


def durable_ours(threads: int, count: int) -> float:
    with ours() as (_, table):
        return by_threads(KEYS, threads, count, each(partial(table.put, durable=True)))


def durable_leveldb(threads: int, count: int) -> float:
    with leveldb() as database:
        return by_threads(KEYS, threads, count, each(partial(database.put, sync=True)))


def durable_rocksdb(threads: int, count: int) -> float:
    with rocksdb(sync=True) as database:
        return by_threads(KEYS, threads, count, each(database.put))


def durable_lmdb(threads: int, count: int) -> float:
    with lightning(sync=True) as environment:

        def put(key: bytes, value: bytes) -> None:
            with environment.begin(write=True) as txn:
                txn.put(key, value)

        return by_threads(KEYS, threads, count, each(put))


def durable_sqlite(count: int) -> float:
    with sqlite(sync=True) as database:
        return rate(count, lambda: each(lambda key, value: database.execute(INSERT, (key, value)))(KEYS[:count]))


def windowed_ours(count: int) -> float:
    with ours() as (store, table):

        def work(keys: list[bytes]) -> None:
            for start in range(0, len(keys), WINDOW):
                for key in keys[start : start + WINDOW]:
                    epoch = table.put(key, VALUES[0])
                store.flush(epoch)

        return by_threads(KEYS, 1, count, work)


# -- get


class Readers:
    """The same rows in every store, closed and opened again once: what a get costs is measured on these."""

    def __init__(self, path: str) -> None:
        with penstock.open(f"{path}/store") as store:
            for some in chunks():
                store.kv("rows").put_many(some)
        self.store = penstock.open(f"{path}/store")
        self.table = self.store.kv("rows", create=False)
        with closing(plyvel.DB(f"{path}/level", create_if_missing=True)) as level:
            put_all(level.put)
        self.level = plyvel.DB(f"{path}/level")
        options, _ = rocks_options(sync=False)
        rocks = rocksdict.Rdict(f"{path}/rocks", options)
        put_all(rocks.put)
        rocks.close()
        self.rocks = rocksdict.Rdict(f"{path}/rocks", options)
        with (
            closing(lmdb.open(f"{path}/lmdb", map_size=MAP_BYTES, sync=False)) as environment,
            environment.begin(write=True) as txn,
        ):
            put_all(txn.put)
        self.lmdb = lmdb.open(f"{path}/lmdb", map_size=MAP_BYTES)
        self.sqlite = sqlite3.connect(f"{path}/rows.db", isolation_level=None)
        self.sqlite.execute("CREATE TABLE rows (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
        self.sqlite.execute("BEGIN")
        self.sqlite.executemany(INSERT, pairs())
        self.sqlite.execute("COMMIT")

    def close(self) -> None:
        for opened in (self.store, self.level, self.rocks, self.lmdb, self.sqlite):
            opened.close()

    def get_lmdb(self, key: bytes) -> bytes | None:
        with self.lmdb.begin() as txn:
            return txn.get(key)

    def get_sqlite(self, key: bytes) -> bytes | None:
        row = self.sqlite.execute("SELECT value FROM rows WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]


def gets(get: Callable[[bytes], bytes | None]) -> float:
    def work() -> None:
        for key in QUERY_KEYS:
            if get(key) is None:
                raise AssertionError(f"{key!r} is missing")

    return rate(GETS, work)


def get_pending() -> float:
    """Gets a second of rows that wait for their flush, which cannot come while they are asked for."""
    with ours() as (_, table):
        best = 0.0
        for _ in range(20):
            some = KEYS[:2_000]
            for key in some:
                table.put(key, VALUES[0])
            get = table.get
            best = max(best, rate(len(some), lambda some=some, get=get: [get(key) for key in some]))  # type: ignore[misc]
        return best


def get_cases(readers: Readers) -> tuple[list[Case], list[Goal]]:
    hit, pending = "get, after reopening", "get, one's own pending write"
    beside_lmdb = "get, after reopening (beside LMDB)"
    cases = [
        Case(name=hit, run=lambda: gets(readers.table.get)),
        Case(name="LevelDB get", run=lambda: gets(readers.level.get), peer_of=hit),
        Case(name="RocksDB get", run=lambda: gets(readers.rocks.get), peer_of=hit),
        Case(name=beside_lmdb, run=lambda: gets(readers.table.get)),
        Case(name="LMDB get, a transaction each", run=lambda: gets(readers.get_lmdb), peer_of=beside_lmdb),
        Case(name="SQLite get", run=lambda: gets(readers.get_sqlite)),
        Case(name=pending, run=get_pending),
        Case(name="1.5 µs", run=lambda: 1e6 / 1.5, peer_of=pending),
    ]
    return cases, [Goal(ours=hit, ratio=1.0), Goal(ours=beside_lmdb, ratio=0.5), Goal(ours=pending, ratio=1.0)]


def put_cases() -> tuple[list[Case], list[Goal]]:
    put, many, stored = "put, durable by the final flush", f"put_many({MANY})", "put, until all is in sstables"
    cases = [
        Case(name=put, run=put_ours),
        Case(name="LevelDB put, unsynced", run=put_leveldb, peer_of=put),
        Case(name="RocksDB put, unsynced", run=put_rocksdb, peer_of=put),
        Case(name="LMDB put, one transaction, unsynced", run=put_lmdb),
        Case(name="SQLite insert, one transaction, unsynced", run=put_sqlite),
        Case(name=many, run=many_ours),
        Case(name="LevelDB write_batch", run=many_leveldb, peer_of=many),
        Case(name="RocksDB WriteBatch", run=many_rocksdb, peer_of=many),
        Case(name="SQLite executemany", run=many_sqlite),
        Case(name=stored, run=sustained_ours),
        Case(name="LevelDB, then its memtable out", run=sustained_leveldb, peer_of=stored),
        Case(name="RocksDB, then flush", run=sustained_rocksdb, peer_of=stored),
    ]
    goals = [
        Goal(ours=put, ratio=1.8, gate=True),
        Goal(ours=put, ratio=2.5),
        Goal(ours=many, ratio=2.5),
        Goal(ours=stored, ratio=1.2),
    ]
    return cases, goals


def durable_cases() -> tuple[list[Case], list[Goal]]:
    one, many, window = "durable put, 1 thread", "durable put, 16 threads", f"durable, awaited once per {WINDOW}"
    others = "durable put, 16 threads (beside the others)"
    cases = [
        Case(name=one, run=lambda: durable_ours(1, 1_500)),
        Case(name="LevelDB synced, 1 thread", run=lambda: durable_leveldb(1, 1_500), peer_of=one),
        Case(name="RocksDB synced, 1 thread", run=lambda: durable_rocksdb(1, 1_500), peer_of=one),
        Case(name="LMDB synced, 1 thread", run=lambda: durable_lmdb(1, 1_500), peer_of=one),
        Case(name="SQLite synced, 1 thread", run=lambda: durable_sqlite(1_500), peer_of=one),
        Case(name=many, run=lambda: durable_ours(16, 8_000)),
        Case(name="LevelDB synced, 16 threads", run=lambda: durable_leveldb(16, 8_000), peer_of=many),
        Case(name=others, run=lambda: durable_ours(16, 8_000)),
        Case(name="RocksDB synced, 16 threads", run=lambda: durable_rocksdb(16, 4_000), peer_of=others),
        Case(name="LMDB synced, 16 threads", run=lambda: durable_lmdb(16, 2_000), peer_of=others),
        Case(name=window, run=lambda: windowed_ours(64_000)),
        Case(name="LevelDB, each synced", run=lambda: durable_leveldb(1, 1_500), peer_of=window),
    ]
    goals = [
        Goal(ours=one, ratio=0.8, gate=True),
        Goal(ours=one, ratio=1.0),
        Goal(ours=many, ratio=0.65, gate=True),
        Goal(ours=many, ratio=0.85),
        Goal(ours=others, ratio=2.0),
        Goal(ours=window, ratio=8.0),
    ]
    return cases, goals


def main() -> bool:
    all_met = run("kv", *put_cases())
    all_met &= run("kv-durable", *durable_cases())
    with folder() as path, closing(Readers(path)) as readers:
        all_met &= run("kv-get", *get_cases(readers))
    return all_met


if __name__ == "__main__":
    sys.exit(not main())
