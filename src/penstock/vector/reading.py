"""A snapshot of a vector shard: records and searches at one LSN; and its pieces for readers in other processes.

The key of a row, for readers that share a scan, is its internal id: eight bytes, in the order in which they were given.

Thread: any; a snapshot does not change.
Invariant: all reads see one LSN; writes that are laid over it, which are not applied yet, are seen by all reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.errors import CorruptionError, Invalid
from penstock.journal.partitions import PartitionId
from penstock.kinds import Piece, ShardSnapshot
from penstock.kinds.changes import FeedSnapshot
from penstock.lsm.file_pieces import FilePiece, size_of
from penstock.lsm.memtable import Memtable
from penstock.lsm.rows import Columns
from penstock.lsm.snapshot import Snapshot
from penstock.lsm.version import Version
from penstock.lsm.view import View
from penstock.vector.attributes import attribute_table
from penstock.vector.draft import (
    Generations,
    VectorDraft,
    internal_id,
    read_generations,
    read_sequence,
    record_key,
    split_record,
    vector_key,
)
from penstock.vector.exact import ExactRows, prepared
from penstock.vector.filters import compile_condition, condition_key
from penstock.vector.keys import DICTIONARY, F32, FIRST_ID, RECORD, U64, VECTOR, id_range, scan_bounds, scan_key
from penstock.vector.live import IndexView, LiveIndex, LoadedIndex, RemovedIds, record_slices, vector_slices
from penstock.vector.operators import id_array
from penstock.vector.options import VectorOptions
from penstock.vector.rows import schema_of, vector_type

I64 = np.ndarray[Any, np.dtype[np.int64]]
SAMPLED_EACH = 16  # queries of one search that may be kept to measure recall


class VectorState(ShardSnapshot):
    """A shard at one LSN; with a draft, including writes that are not applied yet."""

    def __init__(
        self,
        partition: PartitionId,
        snapshot: Snapshot,
        options: VectorOptions,
        live: LiveIndex | None,
        feed: FeedSnapshot | None = None,
    ) -> None:
        self._partition = partition
        self.snapshot = snapshot
        self.feed = feed
        self.options = options
        self._live = LiveIndex(options, lambda: snapshot) if live is None else live
        self._index: IndexView | None = None if live is None else live.view(snapshot)
        self._view: View = snapshot
        self._draft: VectorDraft | None = None

    @property
    def lsn(self) -> int:
        return self.snapshot.lsn

    @property
    def view(self) -> View:
        """The rows of the tree."""
        return self._view

    def under(self, draft: VectorDraft, time_us: int) -> VectorState:
        """Return this state with newer writes on top."""
        rows = Memtable()
        rows.apply(draft.edit(time_us))
        state = VectorState(self._partition, self.snapshot, self.options, self._live)
        state._index, state._view, state._draft = self._index, self.snapshot.under(rows), draft
        return state

    def close(self) -> None:
        self._index = None  # its pin
        self.snapshot.close()
        if self.feed is not None:
            self.feed.close()

    # -- records

    def get(self, key: bytes) -> bytes | None:
        """Return the vector of an external id and its encoded attributes, or None."""
        return get_record(self._view.get, key)

    def row(self, key: bytes) -> tuple[bytes, int] | None:
        found, row = self.get(key), self._view.row(DICTIONARY + key)
        return None if found is None or row is None else (found, row[1])

    @property
    def count(self) -> int:
        """The number of vectors."""
        return read_sequence(self._view).count

    def generations(self) -> Generations:
        """Return the generations of centroids."""
        return read_generations(self._view)

    def records(self, numbers: Sequence[int]) -> list[tuple[str, bytes]]:
        """Return the external ids and encoded attributes of internal ids."""
        found: list[tuple[str, bytes]] = []
        get, remembered = self._view.get, self._live.record
        drafted = self._draft is not None  # internal ids that are not applied yet are not final
        for number in numbers:
            record = read_record(get, number) if drafted else remembered(number, get)
            if record is None:
                raise CorruptionError(f"vector table, shard {self._partition}", 0, f"{number} has no record")
            found.append(record)
        return found

    # -- scans

    def scan_arrow(self, start: bytes, end: bytes | None) -> Iterator[Any]:
        low, high = scan_bounds(start, end)
        return scan_records(self._view, self.options, low, None if high > _LAST else high)

    def pieces(self, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """Divide a range of internal ids into pieces of about equal length."""
        low, high = scan_bounds(start, end)
        low, last = max(low, FIRST_ID), min(high, read_sequence(self.snapshot).next)
        step = max(1, -(-(last - low) // max(1, count)))
        borders = [start, *(scan_key(number) for number in range(low + step, last, step)), end]
        version, now_us = self.snapshot.version, self.snapshot.now_us
        share = size_of(version, *id_range(VECTOR)) // (len(borders) - 1)
        pieces: list[Piece] = []
        for first, after in pairwise(borders):
            assert first is not None
            parts = [FilePiece.of(version, now_us, *_stored_range(kind, first, after)) for kind in (VECTOR, RECORD)]
            detail = _encode(VectorPiece(self.options, parts[0], parts[1]))
            pieces.append(Piece(self._partition, first, after, detail, share))
        return pieces

    # -- searching

    def nearest(
        self, queries: F32, k: int, *, probes: int | None = None, exact: bool = False, where: Any = None
    ) -> tuple[F32, I64]:
        """Return the distances and internal ids of the `k` nearest vectors of each query; inf and -1 where none is."""
        self.snapshot.check_open()
        for query in queries[:SAMPLED_EACH]:
            self._live.sample(query.copy())
        view = self._index
        if view is None or not view.index.loaded:
            view = self._index = self._live.view_of(self.snapshot) if self._live.fits(self.count) else None
        if view is None:
            return self._nearest_in_files(queries, k, where)
        gone = view.gone
        if self._draft is not None and self._draft.gone:
            gone = np.union1d(gone, id_array(self._draft.gone))
        allowed = None if where is None else self._allowed(where, view.ceiling)
        distances, ids = view.index.search(
            queries, k, probes=probes, exact=exact, allowed=allowed, below=view.ceiling, deleted=RemovedIds(gone)
        )
        if self._draft is not None:
            return self._with_drafted(queries, k, where, (distances, ids))
        return distances, ids

    def _nearest_in_files(self, queries: F32, k: int, where: Any) -> tuple[F32, I64]:
        """Compare with all vectors, a slice of the files at a time."""
        metric = self.options.metric
        wanted = prepared(queries, metric)
        nearest = np.full((len(queries), k), np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
        for ids, vectors in vector_slices(self._view, self.options.dimensions):
            self.snapshot.check_open()
            if where is not None:
                parts = record_slices(self._view, int(ids[0]), int(ids[-1]) + 1)
                table = attribute_table([some for _, _, attributes in parts for some in attributes])
                passing = compile_condition(where, table.schema).mask(table)
                ids, vectors = ids[passing], vectors[passing]
            if len(ids):
                distances, places = ExactRows(prepared(vectors, metric), metric).search(wanted, k)
                found = np.where(places >= 0, ids[places].astype(np.int64), -1)
                nearest = merge_nearest([nearest, (distances, found)], k)[:2]
        return nearest

    @property
    def in_one_table(self) -> bool:
        """Whether filters see all attributes as columns of one table, in which each has one type."""
        return self._draft is None and self._live.fits(self.count)

    def attribute_fields(self, check: Callable[[], None]) -> Iterator[pa.Field]:
        """Yield the names and types of all attributes, a name once for each part of the shard that has it."""
        check()
        if not self._live.fits(self.count):
            for _, _, encoded in record_slices(self._view):
                check()
                yield from attribute_table(encoded).schema
            return
        ceiling = read_sequence(self.snapshot).next
        yield from self._live.columns(self.snapshot, self.lsn, ceiling, self.count).table.schema
        for part in self._draft.live_added() if self._draft is not None else ():
            yield from attribute_table([attributes for _, attributes in self.records(part.ids.tolist())]).schema

    def index_statistics(self) -> dict[str, Any]:
        """Return what is known of the kernel in memory."""
        index, (recall, queries) = self._live.index, self._live.recall()
        return {
            "loaded": index is not None,
            "lists": 0 if index is None else index.lists,
            "probes": 0 if index is None else index.probes,
            "memory_bytes": self._live.memory_bytes(),
            "recall": recall,
            "recall_queries": queries,
        }

    def _allowed(self, where: Any, ceiling: int) -> U64:
        columns = self._live.columns(self.snapshot, self.lsn, ceiling, self.count)
        condition = compile_condition(where, columns.table.schema)
        return self._live.allowed(condition_key(where), columns, lambda: condition.mask(columns.table))

    def _with_drafted(self, queries: F32, k: int, where: Any, found: tuple[F32, I64]) -> tuple[F32, I64]:
        """Return what was found together with the nearest of the vectors that are not applied yet."""
        assert self._draft is not None
        parts = list(self._draft.live_added())
        if not parts:
            return found
        ids = np.concatenate([part.ids for part in parts])
        rows = np.concatenate([part.vectors for part in parts])
        if where is not None:
            table = attribute_table([attributes for _, attributes in self.records(ids.tolist())])
            passing = compile_condition(where, table.schema).mask(table)
            ids, rows = ids[passing], rows[passing]
        if not len(ids):
            return found
        metric = self.options.metric
        distances, places = ExactRows(prepared(rows, metric), metric).search(prepared(queries, metric), k)
        drafted = np.where(places >= 0, ids[places].astype(np.int64), -1)
        return merge_nearest([found, (distances, drafted)], k)[:2]


_LAST = (1 << 64) - 1


def merge_nearest(parts: Sequence[tuple[F32, I64]], k: int) -> tuple[F32, I64, I64]:
    """Return the `k` nearest of several answers, ascending, and which answer each is from; -1 ids come last."""
    distances = np.concatenate([part[0] for part in parts], axis=1)
    ids = np.concatenate([part[1] for part in parts], axis=1)
    source = np.concatenate([np.full(part[1].shape[1], number) for number, part in enumerate(parts)])
    order = np.argsort(np.where(ids < 0, np.inf, distances), axis=1, kind="stable")[:, :k]
    rows = np.arange(len(distances))[:, None]
    return distances[rows, order], ids[rows, order], source[order]


def get_record(get: Callable[[bytes], bytes | None], external: bytes) -> bytes | None:
    """Return the vector of an external id followed by its encoded attributes; None if there is none."""
    number = internal_id(get(DICTIONARY + external))
    if not number:
        return None
    vector, record = get(vector_key(number)), get(record_key(number))
    if vector is None or record is None:
        return None
    return vector + split_record(record)[1]


def read_record(get: Callable[[bytes], bytes | None], number: int) -> tuple[str, bytes] | None:
    """Return the external id and encoded attributes of an internal id, or None."""
    value = get(record_key(number))
    if value is None:
        return None
    external, attributes = split_record(value)
    return external.decode(), attributes


def scan_records(view: View, options: VectorOptions, start: int, end: int | None) -> Iterator[Any]:
    """Yield record batches of the records with internal ids in [start, end)."""
    schema = schema_of(options)
    for ids, vectors in vector_slices(view, options.dimensions, start, end):
        parts = list(record_slices(view, int(ids[0]), int(ids[-1]) + 1))
        if sum(len(part[0]) for part in parts) != len(ids):
            raise CorruptionError("vector table", 0, f"internal ids from {ids[0]} on have vectors without records")
        texts = pa.array([some.decode() for part in parts for some in part[1]], pa.string())
        attributes = [some.decode() if some else None for part in parts for some in part[2]]
        flat = pa.array(np.ascontiguousarray(vectors).reshape(-1), pa.float32())
        lists = pa.FixedSizeListArray.from_arrays(flat, type=vector_type(options))
        yield pa.record_batch([texts, lists, pa.array(attributes, pa.string())], schema=schema)


# -- pieces


class FileShard:
    """A shard that another process searches from its files. It is loaded when it is made."""

    def __init__(self, rows: View, options: VectorOptions) -> None:
        self._rows = rows
        self._loaded = LoadedIndex(rows, options)
        self._live = LiveIndex(options, _no_snapshot)  # for its caches
        self._count = read_sequence(rows).count

    def nearest(
        self, queries: F32, k: int, *, probes: int | None = None, exact: bool = False, where: Any = None
    ) -> tuple[F32, I64]:
        """Return what `VectorState.nearest` does."""
        allowed: U64 | None = None
        if where is not None:
            columns = self._live.columns(self._rows, 0, self._loaded.ceiling, self._count)
            condition = compile_condition(where, columns.table.schema)
            allowed = self._live.allowed(condition_key(where), columns, lambda: condition.mask(columns.table))
        return self._loaded.index.search(queries, k, probes=probes, exact=exact, allowed=allowed)

    def records(self, numbers: Sequence[int]) -> list[tuple[str, bytes]]:
        """Return the external ids and encoded attributes of internal ids."""
        found = [self._live.record(number, self._rows.get) for number in numbers]
        return [record for record in found if record is not None]


def _no_snapshot() -> Snapshot:
    raise Invalid("the files of a snapshot are searched as they are")


class VectorPiece(msgspec.Struct, frozen=True, array_like=True):
    """The content of a piece's `detail`: vectors and records of a range of internal ids."""

    options: VectorOptions
    vectors: FilePiece
    records: FilePiece


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(VectorPiece).decode


def _stored_range(kind: bytes, start: bytes, end: bytes | None) -> tuple[bytes, bytes | None]:
    """Return the keys of a range of internal ids; the first and the last piece have the other rows of the tree, too."""
    low, high = scan_bounds(start, end)
    first, last = id_range(kind, low, None if high > _LAST else high)
    return b"" if kind == VECTOR and not start else first, None if kind == RECORD and end is None else last


def read_piece(piece: Piece, root: str, identity: bytes) -> Iterator[Any] | None:
    """Return record batches of a piece from its files; None if they cannot be read from here."""
    opened = open_piece(piece.detail, root, identity)
    if opened is None:
        return None
    low, high = scan_bounds(piece.start, piece.end)
    return scan_records(*opened, low, None if high > _LAST else high)


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
