"""The queue beside SQLite, persist-queue and litequeue, and Redis where it is installed: 100-byte messages.

All are durable: SQLite and what stands on it in WAL mode with synchronous=FULL, Redis with appendfsync always. "Get"
takes messages and acknowledges them, durably; ours does so under leases, the peers delete or mark what they took.
(persist-queue commits each put, whatever `auto_commit` says, and litequeue's `pop` is a transaction of its own.)
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import litequeue
import persistqueue

import penstock
from bench.harness import Case, Figure, Goal, folder, rate, run, sized, tell
from penstock.host.clock import SystemClock
from penstock.host.os_files import OsFileSystem
from penstock.queue import ActiveFileState, FileEntry, FileTable, Messages, PersistentQueue, QmftManifest, QmftWriter
from penstock.queue.files import DataWriter, Opening

MANY = 1_000
BATCHES = sized(100, 20)
ONE_BY_ONE = sized(500, 100)
MESSAGES = [random.Random(7).randbytes(100) for _ in range(MANY)]
ROWS = [(payload,) for payload in MESSAGES]
LARGE, SMALL = 1_000_000, 1_000
FILES = sized(20_000, 2_000)
OPENS = sized(15, 3)
INSERT = "INSERT INTO queue (payload) VALUES (?)"


# -- opening


@contextmanager
def ours() -> Iterator[Any]:
    with folder() as path, penstock.open(f"{path}/store") as store:
        yield store.queue("messages")


@contextmanager
def sqlite() -> Iterator[sqlite3.Connection]:
    with folder() as path, closing(sqlite3.connect(f"{path}/queue.db", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE queue (id INTEGER PRIMARY KEY, payload BLOB)")
        yield database


class Plain:
    """A serializer for persist-queue that leaves bytes alone."""

    @staticmethod
    def dumps(value: bytes) -> bytes:
        return value

    @staticmethod
    def loads(value: bytes) -> bytes:
        return value


@contextmanager
def persist_queue() -> Iterator[Any]:
    with folder() as path:
        queue: Any = persistqueue.FIFOSQLiteQueue(path, auto_commit=False, serializer=Plain)
        queue._putter.execute("PRAGMA synchronous=FULL")
        try:
            yield queue
        finally:
            queue.close()


@contextmanager
def lite_queue() -> Iterator[Any]:
    with folder() as path:
        queue = litequeue.LiteQueue(f"{path}/queue.db")
        queue.conn.execute("PRAGMA journal_mode=WAL")
        queue.conn.execute("PRAGMA synchronous=FULL")
        try:
            yield queue
        finally:
            queue.close()


class Redis:
    """A client that speaks the little of the protocol that is needed."""

    def __init__(self, port: int) -> None:
        for _ in range(200):
            try:
                self._socket = socket.create_connection(("127.0.0.1", port))
                break
            except OSError:
                time.sleep(0.05)
        self._file = self._socket.makefile("rwb")

    def ask(self, *words: bytes | str) -> Any:
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        self._file.write(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
        self._file.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self._file.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            return None if rest == b"-1" else self._file.read(int(rest) + 2)[:-2]
        if kind == b"*":
            return [self._answer() for _ in range(int(rest))]
        if kind == b"-":
            raise RuntimeError(rest.decode())
        return rest

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@contextmanager
def redis() -> Iterator[Redis]:
    with folder() as path, closing(socket.create_server(("127.0.0.1", 0))) as free:
        port: int = free.getsockname()[1]
        free.close()
        command = ["redis-server", "--port", str(port), "--dir", path, "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", "always"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            with closing(Redis(port)) as client:
                yield client
        finally:
            server.terminate()
            server.wait()


HAS_REDIS = shutil.which("redis-server") is not None


# -- batches of 1,000


def put_ours() -> float:
    with ours() as queue:
        queue.put(b"first", durable=True)

        def work() -> None:
            for _ in range(BATCHES):
                queue.put_many(MESSAGES, durable=True)

        return rate(BATCHES * MANY, work)


def put_sqlite() -> float:
    with sqlite() as database:

        def work() -> None:
            for _ in range(BATCHES):
                sqlite_batch(database)

        return rate(BATCHES * MANY, work)


def sqlite_batch(database: sqlite3.Connection) -> None:
    database.execute("BEGIN")
    database.executemany(INSERT, ROWS)
    database.execute("COMMIT")


def put_persist_queue(batches: int = BATCHES // 4) -> float:
    with persist_queue() as queue:

        def work() -> None:
            for _ in range(batches):
                persist_batch(queue)

        return rate(batches * MANY, work)


def persist_batch(queue: Any) -> None:
    for payload in MESSAGES:
        queue.put(payload)
    queue.task_done()


def put_lite_queue(batches: int = BATCHES // 4) -> float:
    with lite_queue() as queue:

        def work() -> None:
            for _ in range(batches):
                lite_batch(queue)

        return rate(batches * MANY, work)


def lite_batch(queue: Any) -> None:
    with queue.transaction():
        for payload in MESSAGES:
            queue.put(payload)


def put_redis() -> float:
    with redis() as client:

        def work() -> None:
            for _ in range(BATCHES):
                client.ask("RPUSH", "queue", *MESSAGES)

        return rate(BATCHES * MANY, work)


# -- getting


def get_ours(batches: int = BATCHES // 2) -> float:
    with ours() as queue:
        for _ in range(batches):
            queue.put_many(MESSAGES, durable=True)
        consumer = queue.consumer("bench")

        def work() -> None:
            for _ in range(batches):
                messages = consumer.get(MANY)
                assert len(messages) == MANY
                consumer.ack(messages)

        return rate(batches * MANY, work)


def get_sqlite(batches: int = BATCHES // 2) -> float:
    with sqlite() as database:
        for _ in range(batches):
            sqlite_batch(database)

        def work() -> None:
            for _ in range(batches):
                database.execute("BEGIN IMMEDIATE")
                rows = database.execute("SELECT id, payload FROM queue ORDER BY id LIMIT ?", (MANY,)).fetchall()
                assert len(rows) == MANY
                database.execute("DELETE FROM queue WHERE id BETWEEN ? AND ?", (rows[0][0], rows[-1][0]))
                database.execute("COMMIT")

        return rate(batches * MANY, work)


def get_persist_queue(batches: int = 5) -> float:
    with persist_queue() as queue:
        for _ in range(batches):
            persist_batch(queue)

        def work() -> None:
            for _ in range(batches):
                for _ in range(MANY):
                    queue.get(block=False)
                queue.task_done()

        return rate(batches * MANY, work)


def get_lite_queue(count: int = MANY // 4) -> float:
    """One by one: its `pop` is a transaction of its own."""
    with lite_queue() as queue:
        lite_batch(queue)

        def work() -> None:
            for _ in range(count):
                queue.done(queue.pop().message_id)

        return rate(count, work)


def get_redis(batches: int = BATCHES // 2) -> float:
    with redis() as client:
        for _ in range(batches):
            client.ask("RPUSH", "queue", *MESSAGES)

        def work() -> None:
            for _ in range(batches):
                assert len(client.ask("LPOP", "queue", str(MANY))) == MANY

        return rate(batches * MANY, work)


# -- one by one


def single_ours() -> float:
    with ours() as queue:
        queue.put(b"first", durable=True)

        def work() -> None:
            for payload in MESSAGES[:ONE_BY_ONE]:
                queue.put(payload, durable=True)

        return rate(ONE_BY_ONE, work)


def single_sqlite() -> float:
    with sqlite() as database:

        def work() -> None:
            for row in ROWS[:ONE_BY_ONE]:
                database.execute(INSERT, row)

        return rate(ONE_BY_ONE, work)


def single_persist_queue() -> float:
    with persist_queue() as queue:

        def work() -> None:
            for payload in MESSAGES[:ONE_BY_ONE]:
                queue.put(payload)
                queue.task_done()

        return rate(ONE_BY_ONE, work)


def single_lite_queue() -> float:
    with lite_queue() as queue:

        def work() -> None:
            for payload in MESSAGES[:ONE_BY_ONE]:
                queue.put(payload)

        return rate(ONE_BY_ONE, work)


def single_redis() -> float:
    with redis() as client:

        def work() -> None:
            for payload in MESSAGES[:ONE_BY_ONE]:
                client.ask("RPUSH", "queue", payload)

        return rate(ONE_BY_ONE, work)


# -- opening, and room on the disk


def opening_ms(path: str) -> float:
    """Milliseconds until a store is open and its queue says where it stands."""
    begin = time.perf_counter()
    store = penstock.open(path)
    store.queue("messages").bounds()
    elapsed = time.perf_counter() - begin
    store.close()
    return elapsed * 1_000


def fill(path: str, count: int) -> None:
    with penstock.open(path) as store:
        queue = store.queue("messages")
        for _ in range(count // MANY):
            queue.put_many(MESSAGES)
        store.flush()
        store.checkpoint()


def bytes_below(path: str) -> int:
    """What files take, in blocks of the file system."""
    return sum(
        os.stat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(path) for name in names
    )


class Unsynced(OsFileSystem):
    """Builds a folder quickly: nothing is synced."""

    def create(self, path: str) -> Any:
        file = super().create(path)
        file.fsync = file.fdatasync = lambda: None  # type: ignore[method-assign]
        return file

    def fsync_dir(self, path: str) -> None: ...


def build_files(path: str) -> None:
    """A closed queue of FILES sealed files, each with one message, and an active one."""
    fs, body = Unsynced(), Messages.of([b"message"]).encode(lsn=1, time_us=0)
    os.makedirs(f"{path}/1970/01/01")
    entries: list[FileEntry] = []
    for number in range(1, FILES + 2):
        opening = Opening(
            file_sequence=number,
            first=number,
            last_lsn=number - 1,
            last_time_us=0,
            time_us=0,
            salt=1,
            identity=bytes(16),
        )
        writer = DataWriter.create(fs, path, opening, (), allocate_bytes=4_096, every=4_096)
        if number <= FILES:
            writer.write(body, synced=number - 1)
            writer.finish()
            entries.append(FileEntry(opening.path, number, number, writer.position.offset))
        writer.file.close()
    active = ActiveFileState(FILES + 1, writer.position.offset, 0, opening.path)
    QmftWriter(fs, path).write(QmftManifest(FILES + 1, active, FileTable.of(entries)))


def files_ms(path: str) -> float:
    begin = time.perf_counter()
    queue = PersistentQueue.open(OsFileSystem(), path, random=random.Random(1), clock=SystemClock())
    elapsed = time.perf_counter() - begin
    assert queue.statistics().files == FILES + 1
    queue.close()
    return elapsed * 1_000


def report_sizes() -> bool:
    """What is no rate: opening, and room on the disk."""
    with folder() as path:
        fill(f"{path}/small", SMALL)
        fill(f"{path}/large", LARGE)
        tables = bytes_below(f"{path}/large/tables") + bytes_below(f"{path}/large/manifest")
        small, large = _opens(f"{path}/small", f"{path}/large")
        extra = statistics.median(large) - statistics.median(small)
        build_files(f"{path}/files")
        opened = statistics.median(files_ms(f"{path}/files") for _ in range(OPENS))
    small_ms = statistics.median(small)
    of_payload = tables / (LARGE * 100)
    return tell(
        "queue-open",
        [
            Figure(name=f"open with {SMALL:,} messages", value=small_ms, unit="ms"),
            Figure(name=f"open with {LARGE:,} messages, more than with {SMALL:,}", value=extra, unit="ms", most=2.0),
            Figure(name=f"open with {FILES:,} sealed files", value=opened, unit="ms", most=20.0),
            Figure(name="bytes on disk after a checkpoint, of the payload", value=of_payload, unit="x", most=1.2),
        ],
    )


def _opens(*paths: str) -> Sequence[list[float]]:
    """Interleaved, after one that warms up."""
    for path in paths:
        opening_ms(path)
    rounds = [[opening_ms(path) for path in paths] for _ in range(OPENS)]
    return [list(column) for column in zip(*rounds, strict=True)]


def cases() -> tuple[list[Case], list[Goal]]:
    put, get, one = f"durable put of {MANY:,}", f"get and acknowledge {MANY:,}", "durable put, one by one"
    compared = [
        Case(name=put, run=put_ours),
        Case(name=f"SQLite, {put}", run=put_sqlite, peer_of=put),
        Case(name=f"persist-queue, {put}", run=put_persist_queue, peer_of=put),
        Case(name=f"litequeue, {put}", run=put_lite_queue, peer_of=put),
        Case(name=get, run=get_ours),
        Case(name=f"SQLite, {get}", run=get_sqlite, peer_of=get),
        Case(name=f"persist-queue, {get}", run=get_persist_queue, peer_of=get),
        Case(name=f"litequeue, {get}", run=get_lite_queue, peer_of=get),
        Case(name=one, run=single_ours),
        Case(name=f"SQLite, {one}", run=single_sqlite, peer_of=one),
        Case(name=f"persist-queue, {one}", run=single_persist_queue, peer_of=one),
        Case(name=f"litequeue, {one}", run=single_lite_queue, peer_of=one),
    ]
    if HAS_REDIS:
        compared += [
            Case(name=f"Redis, {put}", run=put_redis, peer_of=put),
            Case(name=f"Redis, {get}", run=get_redis, peer_of=get),
            Case(name=f"Redis, {one}", run=single_redis, peer_of=one),
        ]
    goals = [
        Goal(ours=put, ratio=3.0, gate=True, peer="SQLite"),
        Goal(ours=get, ratio=1.0, gate=True, peer="SQLite"),
        Goal(ours=get, ratio=1.5),
        Goal(ours=one, ratio=1.0),
    ]
    return compared, goals


def main() -> bool:
    all_met = run("queue", *cases(), rounds=5)
    return report_sizes() and all_met


if __name__ == "__main__":
    sys.exit(not main())
