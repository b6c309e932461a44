"""A snapshot of a kv shard, and its pieces for readers in other processes.

A piece names the sstables of a key range and carries the few rows that are not in a file yet, so that a process with
access to the files reads it without the owner. If there are many such rows it carries none, and is read from the owner.

Thread: any; the snapshot that a piece was made from pins its files.
Invariant: all pieces of a snapshot together return the same rows as the snapshot, with the same expiry time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from penstock.journal.partitions import PartitionId
from penstock.kinds import Piece
from penstock.kinds.changes import FeedSnapshot
from penstock.lsm.file_pieces import FilePiece, size_of
from penstock.lsm.snapshot import Snapshot
from penstock.lsm.version import Version
from penstock.lsm.view import View

SAMPLES = 64  # keys sampled in each file and memtable, for pieces of similar size


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(FilePiece)


class KvState:
    """A snapshot of a shard."""

    __slots__ = ("_partition", "feed", "get", "row", "scan", "scan_arrow", "snapshot")

    def __init__(self, partition: PartitionId, snapshot: Snapshot, feed: FeedSnapshot | None = None) -> None:
        self._partition = partition
        self.snapshot = snapshot
        self.feed = feed
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
        each = size_of(version, start, end) // (len(borders) - 1)
        return [
            Piece(self._partition, low, high, _encode(FilePiece.of(version, self.snapshot.now_us, low, high)), each)
            for low, high in pairwise(borders)
            if low is not None and (high is None or low < high)
        ]

    def close(self) -> None:
        self.snapshot.close()
        if self.feed is not None:
            self.feed.close()


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
    total, passed, borders = sum(weight for _, weight in samples), 0, list[bytes]()
    for key, weight in samples:
        if passed * count >= total * (len(borders) + 1) and key > (borders[-1] if borders else start):
            borders.append(key)
        passed += weight
    return borders[: count - 1]


def read_piece(piece: Piece, root: str, identity: bytes) -> Iterator[Any] | None:
    """Return record batches of a piece from its files; None if they cannot be read from here."""
    detail = _decoder.decode(piece.detail)
    version = detail.open(root, identity)
    return None if version is None else View(version, lambda: detail.now_us).scan_arrow(piece.start, piece.end)


def check_piece(piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]]:
    """Check every page of the files that begin in a piece; return (path, reason) for each damage."""
    return list(_decoder.decode(piece.detail).damage(piece.start, piece.end, root, identity))
