"""Maintenance on Spark: the owner's large jobs, the check of all files, the export of a table.

`maintain` makes a driver a worker of the store: it asks the owner for work, runs each part as a task, and returns the
tasks' results. Tasks open the files of the store themselves, or fetch and send them if they cannot see its folder; no
row passes through the JVM. The owner commits if nothing changed meanwhile.

Thread: the driver's; while a job runs, another thread sends the owner signs of life.
Invariant: a part runs at most once under its file names: a task that Spark retries fails, and with it the offer, which
the owner then does itself.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.errors import PySparkException

from penstock.client.port import FlightPort
from penstock.client.store import RemoteSnapshot
from penstock.errors import CorruptionError, Invalid, PenstockError, RetryLater
from penstock.host import threads
from penstock.host.file_operations import make_dirs
from penstock.host.os_files import OsFileSystem
from penstock.host.paths import parent
from penstock.host.waiting import repeating, stop_on_signals
from penstock.kinds import FileReadable, Piece
from penstock.protocol.wire import PIECE_BYTES
from penstock.registry import kind_named
from penstock.scheduler.offers import JobPart, Offer
from penstock.scheduler.work import pack, perform, unpack
from penstock.spark.format import register
from penstock.spark.table_ref import TableRef

logger = logging.getLogger(__name__)

POLL_S = 0.1  # between two questions for work, 0.4 ms of CPU time each: a compaction waits for the next one
KEEP_S = 2.0  # between two signs of life while a job runs
SNAPSHOT_LEASE_S = 600.0
PIECES_PER_SLOT = 4
_RESULT = "part long, result binary"
_offer = msgspec.msgpack.Decoder(Offer)
_piece = msgspec.msgpack.Decoder(Piece)

Work = Callable[[int], bytes]  # takes the number of a part; runs in a task


@dataclass(frozen=True)
class Damage:
    """A damaged file.

    >>> [damage.file for damage in penstock.spark.verify(spark, path)]
    []
    """

    table: str
    file: str  # relative to the store, if it is one of its files
    reason: str


# -- jobs of the owner


def maintain(spark: Any, path: str, *, once: bool = False, stop: threading.Event | None = None) -> int:
    """Run the large jobs of a store on Spark until `stop` is set, or one with `once`; return the number done.

    Without `stop`, SIGTERM and SIGINT end it. A job that is running then is abandoned, and the owner does it.

    >>> stop = threading.Event()
    >>> threading.Timer(0.1, stop.set).start()
    >>> penstock.spark.maintain(spark, path, stop=stop)  # there was nothing large to do
    0
    """
    ref, done = TableRef.of({"path": path}, table=False), 0
    slots = max(1, spark.sparkContext.defaultParallelism)
    with nullcontext(stop) if stop is not None else stop_on_signals() as ending:
        while not ending.is_set():
            try:
                offer = ref.store().port.take_offer(slots)
                if offer is not None:
                    done += _work(spark, ref, offer, ending)
            except RetryLater as error:
                logger.warning("the owner of %s will be asked again: %s", path, error)
                offer = None
            if offer is None:
                ending.wait(POLL_S)
            elif once:
                break
    return done


def _work(spark: Any, ref: TableRef, offer: Offer, stop: threading.Event) -> bool:
    """Run an offer and send its results; return whether the owner accepted them."""
    port, tag = ref.store().port, f"penstock-{offer.offer}"
    work = partial(_perform, ref, msgspec.msgpack.encode(offer))
    with _keeping(port, offer.offer, stop, lambda: spark.interruptTag(tag)):
        try:
            results = _run_tasks(spark, len(offer.parts), work, tag)
        except (PySparkException, PenstockError) as error:
            logger.warning("%s was not done: %s", offer.function, error)
            port.fail_offer(offer.offer, str(error)[:500])
            return False
        return port.finish_offer(offer.offer, results)


def _keeping(
    port: FlightPort, offer: str, stop: threading.Event, give_up: Callable[[], object]
) -> AbstractContextManager[None]:
    """Send the owner signs of life for an offer; call `give_up` if the owner withdrew it or `stop` is set."""

    def keep() -> bool:
        try:
            active = not stop.is_set() and port.keep_offer(offer)
        except PenstockError:
            active = False
        if not active:
            give_up()
        return active

    return repeating(keep, every_s=KEEP_S, name="penstock-offer")


def _run_tasks(spark: Any, count: int, work: Work, tag: str | None = None) -> list[bytes]:
    """Run `count` tasks and return their results."""
    frame = spark.range(0, count, 1, count).mapInArrow(partial(_task, work), _RESULT)
    if tag is not None:
        spark.addTag(tag)
    try:
        results = {row["part"]: bytes(row["result"]) for row in frame.collect()}
    finally:
        if tag is not None:
            spark.removeTag(tag)
    return [results[number] for number in range(count)]


def _task(work: Work, batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield pa.record_batch([pa.array([number]), pa.array([work(number)], pa.binary())], ["part", "result"])


def _perform(ref: TableRef, encoded: bytes, number: int) -> bytes:
    """Run one part of an offer, in the store's folder or in a temporary copy. Runs in a task."""
    context = TaskContext.get()
    if context is not None and context.attemptNumber():
        raise Invalid("a part must not run twice: an earlier attempt may still write its files")
    offer = _offer.decode(encoded)
    if not offer.function.startswith("penstock."):
        raise Invalid(f"{offer.function} is not a function of Penstock")
    part, root = offer.parts[number], ref.root
    if root is not None:
        return _performed(offer.function, part, root)
    with tempfile.TemporaryDirectory(prefix="penstock-offer-") as spare:
        port = ref.store().port
        for name in part.reads:
            _fetch(port, offer.offer, name, f"{spare}/{name}")
        for name in part.writes:
            make_dirs(OsFileSystem(), parent(f"{spare}/{name}"))
        result = _performed(offer.function, part, spare)
        for name in part.writes:
            _send(port, offer.offer, name, f"{spare}/{name}")
        return result


def _performed(function: str, part: JobPart, root: str) -> bytes:
    arguments = unpack(part.arguments)
    assert isinstance(arguments, dict)
    return perform(function, pack({**arguments, "root": root, "maker": threads.process_name()}), threading.Event())


def _fetch(port: FlightPort, offer: str, name: str, path: str) -> None:
    fs = OsFileSystem()
    make_dirs(fs, parent(path))
    file, offset = fs.create(path), 0
    try:
        while data := port.read_offered(offer, name, offset):
            file.pwrite(data, offset)
            offset += len(data)
    finally:
        file.close()


def _send(port: FlightPort, offer: str, name: str, path: str) -> None:
    """Send a file to the owner, if the part made it."""
    fs = OsFileSystem()
    if not fs.exists(path):
        return
    file = fs.open(path)
    try:
        for offset in range(0, file.size(), PIECE_BYTES):
            port.write_offered(offer, name, offset, file.pread(PIECE_BYTES, offset))
    finally:
        file.close()


# -- checking


def verify(spark: Any, path: str) -> list[Damage]:
    """Check every page of every file of every table against its checksum; return the damage.

    >>> penstock.spark.verify(spark, path)
    []
    """
    ref = TableRef.of({"path": path}, table=False)
    slots = max(1, spark.sparkContext.defaultParallelism)
    with _snapshot(ref) as snapshot:
        pieces = [
            (name, msgspec.msgpack.encode(piece))
            for name in snapshot.tables()
            for piece in _pieces(snapshot, name, slots * PIECES_PER_SLOT)
        ]
        results = _run_tasks(spark, len(pieces), partial(_check, ref, snapshot.id, pieces)) if pieces else []
    damages = {damage for result in results for damage in msgspec.msgpack.decode(result, type=list[Damage])}
    return sorted(damages, key=lambda damage: (damage.table, damage.file, damage.reason))


def _pieces(snapshot: RemoteSnapshot, name: str, count: int) -> list[Piece]:
    try:
        return snapshot.pieces(name, count)
    except CorruptionError:  # a split reads files, which one piece does not
        return snapshot.pieces(name, 1)


def _check(ref: TableRef, snapshot_id: str, pieces: Sequence[tuple[str, bytes]], number: int) -> bytes:
    """Check the files of one piece, or have the owner read it. Runs in a task."""
    name, encoded = pieces[number]
    piece, store, root = _piece.decode(encoded), ref.store(), ref.root
    snapshot = store.snapshot(snapshot_id)
    info = snapshot.info(name)
    damage, kind = None, kind_named(info.kind, info.name)
    if root is not None and piece.detail and isinstance(kind, FileReadable):
        damage = kind.check_piece(piece, root, store.identity)
    if damage is None:
        damage = []
        try:
            for _ in snapshot.read(piece):
                pass
        except CorruptionError as error:
            damage = [(error.path, f"byte {error.offset}: {error.reason}")]
    return msgspec.msgpack.encode([Damage(name, file.removeprefix(f"{store.path}/"), why) for file, why in damage])


# -- export


def export(spark: Any, path: str, table: str, target: str, *, mode: str = "error") -> int:
    """Write a table as of one LSN to Parquet files in `target`; return the LSN. `mode` is that of Spark writers.

    >>> lsn = penstock.spark.export(spark, path, "users", f"{path}.parquet", mode="overwrite")
    >>> spark.read.parquet(f"{path}.parquet").columns
    ['key', 'value', 'lsn']
    """
    ref = TableRef.of({"path": path, "table": table})
    ref.info()
    register(spark)
    with _snapshot(ref) as snapshot:
        reader = spark.read.format("penstock").option("table", table).option("snapshot", snapshot.id)
        reader.load(ref.path).write.mode(mode).parquet(target)
        return snapshot.lsn


@contextmanager
def _snapshot(ref: TableRef) -> Iterator[RemoteSnapshot]:
    """Hold a snapshot for the duration of the block."""
    store = ref.store()
    with store.snapshot(lease_s=SNAPSHOT_LEASE_S) as snapshot:

        def keep() -> bool:
            with suppress(RetryLater):
                store.snapshot(snapshot.id)  # renews the lease
            return True

        with repeating(keep, every_s=SNAPSHOT_LEASE_S / 3, name="penstock-snapshot"):
            yield snapshot
