"""A snapshot of a vector shard: records and searches at one LSN.

The key of a row, for readers that share a scan, is its internal id: eight bytes, in the order in which ids were given.

Thread: any; a snapshot does not change.
Invariant: all reads see one LSN; writes that are laid over it, which are not applied yet, are seen by all reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyroaring import BitMap64

from penstock.errors import CorruptionError
from penstock.journal.partitions import PartitionId
from penstock.kinds import Piece, ShardSnapshot
from penstock.kinds.changes import FeedSnapshot
from penstock.lsm.memtable import Memtable
from penstock.lsm.snapshot import Snapshot
from penstock.lsm.view import View
from penstock.vector.attributes import attribute_table, attributes_text
from penstock.vector.columns import RecordColumns
from penstock.vector.draft import VectorDraft
from penstock.vector.exact import I64, ExactRows, prepared
from penstock.vector.filters import compile_condition
from penstock.vector.keys import DICTIONARY, F32, LAST_ID, U64, scan_bounds
from penstock.vector.live import LiveIndex
from penstock.vector.loaded import IndexView
from penstock.vector.operators import id_array
from penstock.vector.options import VectorOptions
from penstock.vector.pieces import pieces_of, scan_records
from penstock.vector.stored import (
    Generations,
    get_record,
    read_generations,
    read_record,
    read_sequence,
    record_slices,
    vector_slices,
)

SAMPLED_EACH = 16  # queries of one search that may be kept to measure recall
COLUMNS_SHARE = 64  # if at least one of COLUMNS_SHARE records is requested, all are read, as columns


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
        record, row = self.get(key), self._view.row(DICTIONARY + key)
        return None if record is None or row is None else (record, row[1])

    @property
    def count(self) -> int:
        """The number of vectors."""
        return read_sequence(self._view).count

    def generations(self) -> Generations:
        """Return the generations of centroids."""
        return read_generations(self._view)

    def records(self, numbers: I64) -> tuple[Any, Any]:
        """Return the external ids and the attributes, as JSON text, of internal ids: two Arrow columns."""
        drafted = self._draft is not None  # internal ids that are not applied yet are not final
        columns = None if drafted else self._columns_for(len(numbers))
        rows = None if columns is None else columns.take(numbers)
        return self._few_records(numbers.tolist(), cached=not drafted) if rows is None else rows

    def _columns_for(self, number: int) -> RecordColumns | None:
        """Return columns for a number of records, if they are worth it; records may be missing."""
        columns, count = self._live.cache.columns, self.count
        if number * COLUMNS_SHARE < count:
            return None
        newer = columns is not None and columns.lsn > self.lsn
        return columns if newer or not self._live.columns_fit(self.snapshot) else self._columns()

    def _few_records(self, numbers: Sequence[int], *, cached: bool) -> tuple[Any, Any]:
        names: list[str] = []
        attributes: list[str | None] = []
        get, cache = self._view.get, self._live.cache
        for number in numbers:
            if cached:
                entry = cache.record(number, get)
                record = None if entry is None else (entry[0], attributes_text(entry[1]))
            else:
                read = read_record(get, number)
                record = None if read is None else (read[0], read[1].decode())
            if record is None:
                raise CorruptionError(f"vector table, shard {self._partition}", 0, f"{number} has no record")
            names.append(record[0])
            attributes.append(record[1] or None)
        return pa.array(names, pa.string()), pa.array(attributes, pa.string())

    def _columns(self) -> RecordColumns:
        return self._live.cache.up_to(self.snapshot, self.lsn, read_sequence(self.snapshot).next, self.count)

    # -- scans

    def scan_arrow(self, start: bytes, end: bytes | None) -> Iterator[Any]:
        low, high = scan_bounds(start, end)
        return scan_records(self._view, self.options, low, None if high > LAST_ID else high)

    def pieces(self, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        """Divide a range of internal ids into pieces of about equal length."""
        return pieces_of(self._partition, self.snapshot, self.options, count, start, end)

    # -- searching

    def nearest(
        self, queries: F32, k: int, *, probes: int | None = None, exact: bool = False, where: Any = None
    ) -> tuple[F32, I64]:
        """Return the distances and internal ids of the `k` nearest vectors of each query; inf and -1 where none is."""
        self.snapshot.check_open()
        for query in queries[:SAMPLED_EACH]:
            self._live.sample.add(query)
        view = self._index
        if view is None or not view.index.loaded:
            lists = None if exact or where is not None else self._live.stored_lists(self.snapshot, len(queries))
            if lists is not None:
                hidden = BitMap64() if self._draft is None else self._draft.removed
                return self._with_drafted(queries, k, where, lists.search(self.snapshot, queries, k, probes, hidden))
            view = self._index = self._live.view_of(self.snapshot) if self._live.fits(self.count) else None
        if view is None:
            return self._nearest_in_files(queries, k, where)
        deleted = view.removed
        if self._draft is not None and self._draft.removed:
            deleted = np.union1d(deleted, id_array(self._draft.removed))
        nearest = view.index.search(
            queries,
            k,
            probes=probes,
            exact=exact,
            allowed=None if where is None else self._allowed(where),
            below=view.ceiling,
            deleted=deleted,
        )
        return self._with_drafted(queries, k, where, nearest)

    def _nearest_in_files(self, queries: F32, k: int, where: Any) -> tuple[F32, I64]:
        """Compare with all vectors, a slice of the files at a time."""
        metric = self.options.metric
        prepared_queries = prepared(queries, metric)
        nearest = np.full((len(queries), k), np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
        for ids, vectors in vector_slices(self._view, self.options.dimensions):
            self.snapshot.check_open()
            if where is not None:
                parts = record_slices(self._view, int(ids[0]), int(ids[-1]) + 1)
                table = attribute_table([text for _, _, attributes in parts for text in attributes.to_pylist()])
                passing = compile_condition(where, table.schema).mask(table)
                ids, vectors = ids[passing], vectors[passing]
            if len(ids):
                distances, positions = ExactRows(prepared(vectors, metric), metric).search(prepared_queries, k)
                hit_ids = np.where(positions >= 0, ids[positions].astype(np.int64), -1)
                nearest = merge_nearest([nearest, (distances, hit_ids)], k)[:2]
        return nearest

    @property
    def in_one_table(self) -> bool:
        """Whether filters see all attributes as columns of one table."""
        return self._draft is None and self._live.columns_fit(self.snapshot) and self._live.fits(self.count)

    def attribute_fields(self, check: Callable[[], None]) -> Iterator[pa.Field]:
        """Yield the names and types of all attributes, a name once for each part of the shard that has it."""
        check()
        if self.in_one_table:
            yield from self._columns().table().schema
            return
        for _, _, encoded in record_slices(self._view):
            check()
            yield from attribute_table(encoded.to_pylist()).schema

    def index_statistics(self) -> dict[str, Any]:
        """Return statistics of the kernel in memory."""
        index = self._live.index
        recall, queries = (None, 0) if index is None else self._live.sample.recall(index)
        return {
            "loaded": index is not None,
            "lists": 0 if index is None else index.lists,
            "probes": 0 if index is None else index.probes,
            "memory_bytes": self._live.memory_bytes(),
            "recall": recall,
            "recall_queries": queries,
        }

    def _allowed(self, where: Any) -> U64:
        """Return the internal ids that pass a condition; of those that are not applied yet, none."""
        if self._live.columns_fit(self.snapshot):
            return self._live.cache.allowed(where, self._columns())
        passed: list[U64] = [np.zeros(0, np.uint64)]
        for ids, _, encoded in record_slices(self.snapshot):
            self.snapshot.check_open()
            table = attribute_table(encoded.to_pylist())
            passed.append(ids[compile_condition(where, table.schema).mask(table)])
        return np.concatenate(passed)

    def _with_drafted(self, queries: F32, k: int, where: Any, nearest: tuple[F32, I64]) -> tuple[F32, I64]:
        """Merge the nearest applied vectors with the nearest of those that are not applied yet."""
        parts = [] if self._draft is None else list(self._draft.live_added())
        if not parts:
            return nearest
        ids = np.concatenate([part.ids for part in parts])
        rows = np.concatenate([part.vectors for part in parts])
        if where is not None:
            table = attribute_table(self.records(ids.astype(np.int64))[1].to_pylist())
            passing = compile_condition(where, table.schema).mask(table)
            ids, rows = ids[passing], rows[passing]
        if not len(ids):
            return nearest
        metric = self.options.metric
        distances, positions = ExactRows(prepared(rows, metric), metric).search(prepared(queries, metric), k)
        drafted = np.where(positions >= 0, ids[positions].astype(np.int64), -1)
        return merge_nearest([nearest, (distances, drafted)], k)[:2]


def merge_nearest(parts: Sequence[tuple[F32, I64]], k: int) -> tuple[F32, I64, I64]:
    """Return the `k` nearest of several answers, ascending, and which answer each is from; -1 ids come last."""
    if len(parts) == 1:
        return *parts[0], np.zeros(parts[0][1].shape, np.int64)
    distances = np.concatenate([part[0] for part in parts], axis=1)
    ids = np.concatenate([part[1] for part in parts], axis=1)
    source = np.concatenate([np.full(part[1].shape[1], number) for number, part in enumerate(parts)])
    order = np.argsort(np.where(ids < 0, np.inf, distances), axis=1, kind="stable")[:, :k]
    rows = np.arange(len(distances))[:, None]
    return distances[rows, order], ids[rows, order], source[order]
