"""A snapshot of a kv shard, and its pieces for readers in other processes.

A piece names the sstables of a key range and carries the few rows that are not in a file yet, so that a process with
access to the files reads it without the owner. If there are many such rows it carries none, and is read from the owner.

Thread: any; the snapshot that a piece was made from pins its files.
Invariant: all pieces of a snapshot together return the same rows as the snapshot, with the same expiry time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import msgspec

from penstock.errors import CorruptionError
from penstock.journal.partitions import PartitionId
from penstock.kinds import Piece
from penstock.lsm.memtable import Edit, Memtable
from penstock.lsm.ranges import RangeDelete
from penstock.lsm.rows import Row, bytes_list
from penstock.lsm.snapshot import Snapshot
from penstock.lsm.sstable import Sstable
from penstock.lsm.version import FileMeta, TableFile, Version, arrange
from penstock.lsm.view import View

CARRIED_BYTES_MAX = 2 << 20  # of rows in memory that pieces carry
SAMPLES = 64  # keys sampled in each file and memtable, for pieces of similar size


class _Carried(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a memtable in a key range, and its range deletes."""

    rows: list[tuple[bytes, Row]]
    ranges: list[RangeDelete]

    @classmethod
    def of(cls, memtable: Memtable, start: bytes, end: bytes | None) -> _Carried:
        columns = memtable.columns(start, end)
        parts = columns.kinds.tolist(), bytes_list(columns.values), columns.lsns.tolist(), columns.expires.tolist()
        return cls(list(zip(columns.list_keys(), zip(*parts, strict=True), strict=True)), list(memtable.ranges))

    def memtable(self, lsn: int) -> Memtable:
        memtable = Memtable()
        for at, ranges in groupby(sorted(self.ranges, key=itemgetter(2)), itemgetter(2)):
            memtable.apply(Edit(lsn=at, time_us=0, ranges=[(start, end) for start, end, _ in ranges]))
        memtable.apply(Edit(lsn=lsn + 1, time_us=0, rows=dict(self.rows)))
        return memtable


class _KvPiece(msgspec.Struct, frozen=True, array_like=True):
    """The content of a piece's `detail`."""

    lsn: int
    now_us: int
    files: list[FileMeta]
    memory: list[_Carried] | None  # newest first; None: too many rows to carry


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_KvPiece)


class KvState:
    """A snapshot of a shard."""

    __slots__ = ("_partition", "get", "row", "scan", "scan_arrow", "snapshot")

    def __init__(self, partition: PartitionId, snapshot: Snapshot) -> None:
        self._partition = partition
        self.snapshot = snapshot
        self.get, self.row, self.scan, self.scan_arrow = snapshot.get, snapshot.row, snapshot.scan, snapshot.scan_arrow

    @property
    def lsn(self) -> int:
        return self.snapshot.lsn

    @property
    def version(self) -> Version:
        return self.snapshot.version

    def pieces(self, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """Divide a key range into pieces with similar numbers of rows."""
        version = self.snapshot.version
        borders = [start, *_borders(version, count, start, end), end]
        files = [file.meta for run in version.runs for file in run.overlapping(start, end)]
        size = sum(meta.size_bytes for meta in files) + sum(memtable.bytes for memtable in version.frozen)
        each = size // (len(borders) - 1)
        return [
            Piece(self._partition, low, high, self._detail(version, low, high), each)
            for low, high in pairwise(borders)
            if low is not None and (high is None or low < high)
        ]

    def _detail(self, version: Version, start: bytes, end: bytes | None) -> bytes:
        files = [file.meta for run in version.runs for file in run.overlapping(start, end)]
        memory = None
        if sum(memtable.bytes for memtable in version.frozen) <= CARRIED_BYTES_MAX:
            memory = [_Carried.of(memtable, start, end) for memtable in version.frozen if len(memtable)]
        return _encode(_KvPiece(version.lsn, self.snapshot.now_us, files, memory))

    def close(self) -> None:
        self.snapshot.close()


def _borders(version: Version, count: int, start: bytes, end: bytes | None) -> list[bytes]:
    """Return up to `count - 1` keys that divide a key range into parts of similar size."""
    samples: list[tuple[bytes, int]] = []
    if count < 2:
        return []
    for memtable in version.frozen:
        keys = memtable.sorted_keys()
        step = max(1, len(keys) // SAMPLES)
        samples += [(key, step) for key in keys[::step]]
    for file in version.files():
        table, rows = file.table(), file.meta.rows
        landmarks = [(key, many) for key, many, _ in table.landmarks()]
        if len(landmarks) >= SAMPLES // 4:
            samples += landmarks
            continue
        step = max(1, rows // SAMPLES)
        for number, first, last in table.pieces(0, rows):
            samples += [(table.key_at(number, row), step) for row in range(first, last, step)]
    samples = sorted((key, weight) for key, weight in samples if start <= key and (end is None or key < end))
    total, seen, borders = sum(weight for _, weight in samples), 0, list[bytes]()
    for key, weight in samples:
        if seen * count >= total * (len(borders) + 1) and key > (borders[-1] if borders else start):
            borders.append(key)
        seen += weight
    return borders[: count - 1]


def read_piece(piece: Piece, root: str, identity: bytes) -> Iterator[Any] | None:
    """Return record batches of a piece from its files; None if they cannot be read from here."""
    detail = _decoder.decode(piece.detail)
    if detail.memory is None:
        return None
    opened: list[TableFile] = []
    for meta in detail.files:
        try:
            table = Sstable.open(f"{root}/{meta.file_name}", lsn=meta.lsn)
        except FileNotFoundError:
            return None
        if table.summary.store != identity or table.summary.chunk_id != meta.chunk_id:
            raise CorruptionError(table.path, 0, "it is a file of another store")
        opened.append(TableFile(meta, lambda _, table=table: table))  # type: ignore[misc]
    memory = tuple(carried.memtable(detail.lsn) for carried in detail.memory)
    version = Version(None, memory, arrange(opened), detail.lsn, detail.lsn, detail.now_us)
    return View(version, lambda: detail.now_us).scan_arrow(piece.start, piece.end)


def check_piece(piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]]:
    """Check every page of the files that begin in a piece; return (path, reason) for each damage."""
    damage: list[tuple[str, str]] = []
    for meta in _decoder.decode(piece.detail).files:
        if meta.start < piece.start or (piece.end is not None and meta.start >= piece.end):
            continue  # it reaches in from another piece, which checks it
        path = f"{root}/{meta.file_name}"
        try:
            table = Sstable.open(path, lsn=meta.lsn)
        except FileNotFoundError as error:
            damage.append((error.filename or path, "it is missing"))
        except CorruptionError as error:
            damage.append((error.path, f"byte {error.offset}: {error.reason}"))
        else:
            damage += [(error.path, f"byte {error.offset}: {error.reason}") for error in table.damaged_pages()]
            if table.summary.store != identity or table.summary.chunk_id != meta.chunk_id:
                damage.append((path, "it is a file of another store"))
            table.close()
    return damage
