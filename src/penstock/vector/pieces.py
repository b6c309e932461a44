"""A shard of a snapshot as pieces, which other processes read and search from its files.

Thread: any; files do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import CorruptionError
from penstock.journal.partitions import PartitionId
from penstock.kinds import Piece
from penstock.lsm.file_pieces import FilePiece, size_of
from penstock.lsm.rows import Columns
from penstock.lsm.snapshot import Snapshot
from penstock.lsm.version import Version
from penstock.lsm.view import View
from penstock.vector.columns import RecordCache, RecordColumns
from penstock.vector.exact import I64
from penstock.vector.keys import F32, FIRST_ID, LAST_ID, RECORD, U64, VECTOR, id_range, scan_bounds, scan_key
from penstock.vector.loaded import LoadedIndex
from penstock.vector.options import VectorOptions
from penstock.vector.rows import schema_of, vector_type
from penstock.vector.stored import read_sequence, record_slices, vector_slices


def scan_records(view: View, options: VectorOptions, start: int, end: int | None) -> Iterator[Any]:
    """Yield record batches of the records with internal ids in [start, end)."""
    schema = schema_of(options)
    for ids, vectors in vector_slices(view, options.dimensions, start, end):
        parts = list(record_slices(view, int(ids[0]), int(ids[-1]) + 1))
        if sum(len(part[0]) for part in parts) != len(ids):
            raise CorruptionError("vector table", 0, f"internal ids from {ids[0]} on have vectors without records")
        texts, attributes = (pa.concat_arrays([part[at] for part in parts]) for at in (1, 2))
        flat = pa.array(np.ascontiguousarray(vectors).reshape(-1), pa.float32())
        lists = pa.FixedSizeListArray.from_arrays(flat, type=vector_type(options))
        yield pa.record_batch([texts, lists, attributes], schema=schema)


class FileShard:
    """A shard that another process searches from its files; the constructor loads it."""

    def __init__(self, rows: View, options: VectorOptions) -> None:
        self._rows = rows
        self._loaded = LoadedIndex(rows, options)
        self._cache = RecordCache(lambda: 0)  # columns alone
        self._count = read_sequence(rows).count

    def attribute_fields(self) -> list[pa.Field]:
        """Return the names and types of all attributes."""
        return list(self._columns().table().schema)

    def nearest(
        self, queries: F32, k: int, *, probes: int | None = None, exact: bool = False, where: Any = None
    ) -> tuple[F32, I64]:
        """Return what `VectorState.nearest` does."""
        allowed: U64 | None = None if where is None else self._cache.allowed(where, self._columns())
        return self._loaded.index.search(queries, k, probes=probes, exact=exact, allowed=allowed)

    def records(self, numbers: I64) -> tuple[Any, Any]:
        """Return what `VectorState.records` does."""
        columns = self._columns().take(numbers)
        if columns is None:
            raise CorruptionError("vector table", 0, "an internal id in a list has no record")
        return columns

    def _columns(self) -> RecordColumns:
        return self._cache.up_to(self._rows, 0, self._loaded.ceiling, self._count)


class VectorPiece(msgspec.Struct, frozen=True, array_like=True):
    """The content of a piece's `detail`: vectors and records of a range of internal ids."""

    options: VectorOptions
    vectors: FilePiece
    records: FilePiece


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(VectorPiece).decode


def pieces_of(  # noqa: PLR0917
    partition: PartitionId, snapshot: Snapshot, options: VectorOptions, count: int, start: bytes, end: bytes | None
) -> list[Piece]:
    """Divide a range of a shard's internal ids into pieces of about equal length."""
    low, high = scan_bounds(start, end)
    low, last = max(low, FIRST_ID), min(high, read_sequence(snapshot).next)
    step = max(1, -(-(last - low) // max(1, count)))
    borders = [start, *(scan_key(number) for number in range(low + step, last, step)), end]
    version, now_us = snapshot.version, snapshot.now_us
    share = size_of(version, *id_range(VECTOR)) // (len(borders) - 1)
    pieces: list[Piece] = []
    for first, after in pairwise(borders):
        assert first is not None
        parts = [FilePiece.of(version, now_us, *_stored_range(kind, first, after)) for kind in (VECTOR, RECORD)]
        pieces.append(Piece(partition, first, after, _encode(VectorPiece(options, parts[0], parts[1])), share))
    return pieces


def _stored_range(kind: bytes, start: bytes, end: bytes | None) -> tuple[bytes, bytes | None]:
    """Return the keys of a range of internal ids; the first and the last piece have the other rows of the tree, too."""
    low, high = scan_bounds(start, end)
    first, last = id_range(kind, low, None if high > LAST_ID else high)
    return b"" if kind == VECTOR and not start else first, None if kind == RECORD and end is None else last


def read_piece(piece: Piece, root: str, identity: bytes) -> Iterator[Any] | None:
    """Return record batches of a piece from its files; None if they cannot be read from here."""
    opened = open_piece(piece.detail, root, identity)
    if opened is None:
        return None
    low, high = scan_bounds(piece.start, piece.end)
    return scan_records(*opened, low, None if high > LAST_ID else high)


def open_piece(detail: bytes, root: str, identity: bytes) -> tuple[View, VectorOptions] | None:
    """Return the rows of a piece and the options of its table; None if its files cannot be read from here.

    A piece without bounds has all rows of its shard.
    """
    piece = _decode(detail)
    vectors, records = piece.vectors.open(root, identity), piece.records.open(root, identity)
    if vectors is None or records is None:
        return None
    return _PieceView(vectors, View(records, lambda: piece.records.now_us), piece.vectors.now_us), piece.options


def stored_rows(detail: bytes) -> bytes:
    """Return a piece without the rows that are in memory and in no file yet."""
    piece = _decode(detail)
    vectors, records = (msgspec.structs.replace(part, memory=[]) for part in (piece.vectors, piece.records))
    return _encode(VectorPiece(piece.options, vectors, records))


def piece_files(detail: bytes) -> list[str]:
    """Return the names of the files that a piece is read from."""
    piece = _decode(detail)
    return list(dict.fromkeys(meta.file_name for part in (piece.vectors, piece.records) for meta in part.files))


class _PieceView(View):
    """The two ranges of a piece as one view: rows up to the vectors, and rows from the records on."""

    __slots__ = ("_records",)

    def __init__(self, vectors: Version, records: View, now_us: int) -> None:
        super().__init__(vectors, lambda: now_us)
        self._records = records

    def get(self, key: bytes) -> bytes | None:
        return super().get(key) if key < RECORD else self._records.get(key)

    def scan(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes = b"",
        reverse: bool = False,
        limit: int = -1,
    ) -> Iterator[tuple[bytes, bytes]]:
        if start >= RECORD:
            return self._records.scan(start, end, prefix=prefix, reverse=reverse, limit=limit)
        return super().scan(start, end, prefix=prefix, reverse=reverse, limit=limit)

    def scan_columns(self, start: bytes = b"", end: bytes | None = None, *, prefix: bytes = b"") -> Iterator[Columns]:
        if start >= RECORD:
            return self._records.scan_columns(start, end, prefix=prefix)
        return super().scan_columns(start, end, prefix=prefix)


def check_piece(piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]]:
    """Check every page of the files that begin in a piece; return (path, reason) for each damage."""
    detail = _decode(piece.detail)
    damage: dict[tuple[str, str], None] = {}
    for part, kind in ((detail.vectors, VECTOR), (detail.records, RECORD)):
        damage.update(dict.fromkeys(part.damage(*_stored_range(kind, piece.start, piece.end), root, identity)))
    return list(damage)
