"""Writes an sstable and its index from sorted columns, chunk by chunk.

Thread: one. Each call works on at most its own chunk and one batch, so a flush that passes small chunks never blocks
the interpreter for long.
Invariants: (1) keys ascend strictly, and a range delete precedes the point row of its start. (2) both files are
synced under their names when `finish` returns; before that neither name exists or is listed.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.archive.chunk import PLAIN, ChunkIdentity, ChunkWriter, Sealing
from penstock.archive.container import create_chunk
from penstock.errors import Invalid
from penstock.host.files import FileSystem
from penstock.lsm.index import (
    ALL_PUTS,
    BATCH,
    BATCH_SHIFT,
    BATCHES_MAX,
    ROWS_MAX,
    SOME_EXPIRE,
    PageSums,
    Summary,
    encode_index,
    hash_keys,
)
from penstock.lsm.ranges import RangeDelete, RangeDeletes
from penstock.lsm.rows import (
    DELETE,
    I64,
    KEY_BYTES_MAX,
    MERGE,
    NEVER,
    PUT,
    RANGE_DELETE,
    SCHEMA,
    U32,
    Columns,
    offsets_of,
)  # fmt: skip

BATCH_ROWS = 1 << BATCH_SHIFT
BATCH_ROWS_LEAST = BATCH_ROWS // 2  # smaller ones wait for more rows, unless their bytes make a batch
BATCH_BYTES = 1 << 25  # limit of a batch; a single row may make a larger one, up to ROW_BYTES_MAX
ROW_BYTES_MAX = 1 << 27

_ROWS_TO_OVERLAP = 1 << 15  # per file: for fewer it does not pay to make the index during the sync
_HASH_ROWS = 1 << 13  # keys hashed per call, which blocks the interpreter


def index_path(path: str) -> str:
    """Return the path of an sstable's index."""
    if not path.endswith(".sst"):
        raise Invalid(f"{path} is not the name of an sstable: it must end in .sst")
    return path[: -len(".sst")] + ".idx"


class _Sink:
    """Arrow's output: computes checksums, forwards the bytes, and tracks the offset. Columns are not copied."""

    closed = False

    def __init__(self, out: ChunkWriter) -> None:
        self._out = out
        self._sums = PageSums()
        self._buffers: deque[int] = deque()
        self.at = 0

    def write(self, data: Any) -> int:
        if isinstance(data, pa.Buffer):
            self._buffers.append(self.at)
        view = memoryview(data)
        self._sums.feed(view)
        self._out.write(view)
        self.at += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: Arrow calls it."""

    def take_buffers(self) -> deque[int]:
        """Return the offsets of column buffers written since the last call."""
        buffers, self._buffers = self._buffers, deque()
        return buffers

    def page_sums(self) -> U32:
        return self._sums.finish()


class SstableWriter:
    """An sstable being written."""

    def __init__(
        self, fs: FileSystem, path: str, identity: ChunkIdentity, *, sealing: Sealing = PLAIN, maker: str = ""
    ) -> None:
        self._fs = fs
        self._path = path
        self._identity = identity
        self._sealing = sealing
        self._index_path = index_path(path)
        metadata = {"penstock.store": identity.store.hex(), "penstock.chunk": str(identity.chunk_id)}
        if maker:
            metadata["penstock.maker"] = maker
        self._schema = SCHEMA.with_metadata(metadata)
        self._out = create_chunk(fs, path, identity, sealing)
        self._index_out: Any = None
        self._sink = _Sink(self._out)
        self._ipc = pa.ipc.new_file(self._sink, self._schema)
        self._ranges: deque[RangeDelete] = deque()
        self._waiting: deque[Columns] = deque()
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._hashes: list[U32] = []
        self._range_rows: list[int] = []
        self._batches: list[tuple[int, ...]] = []
        self._first_keys: list[bytes] = []
        self._last_key: bytes | None = None
        self._start = b""
        self._end = b""
        self._lsns = (1 << 64) - 1, 0
        self._deletes = self._merges = self._expiring = 0
        self.rows = 0
        self.content_bytes = 0

    def delete_ranges(self, ranges: RangeDeletes) -> None:
        """Add range deletes. Requires: they follow earlier ones, and no row past their start was appended yet."""
        self._ranges.extend(ranges)

    def append(self, columns: Columns) -> None:
        """Add rows. Requires: they follow those appended before."""
        if not len(columns):
            return
        self._check(columns)
        last_key = columns.key(len(columns) - 1)
        while self._ranges and self._ranges[0][0] <= last_key:
            cut = bisect_left(range(len(columns)), self._ranges[0][0], key=columns.key)
            self._add_points(columns.slice(0, cut))
            self._add_range(*self._ranges.popleft())
            columns = columns.slice(cut, len(columns))
        self._add_points(columns)
        self._last_key = last_key
        self._drain(BATCH_ROWS_LEAST)

    def _check(self, columns: Columns) -> None:
        ordered = self._last_key is None or self._last_key < columns.key(0)
        if columns.hashes is None:  # rows with hashes come from a merge, which has just sorted them
            keys = columns.list_keys()
            ordered = ordered and all(map(operator.lt, keys, islice(keys, 1, None)))
        if not ordered:
            raise Invalid(f"{self._path}: rows were appended out of key order")
        if int(np.diff(offsets_of(columns.keys)).max()) > KEY_BYTES_MAX:
            raise Invalid(f"a key has at most {KEY_BYTES_MAX} bytes")
        if int(np.diff(offsets_of(columns.values)).max()) > ROW_BYTES_MAX - KEY_BYTES_MAX:
            raise Invalid(f"a value in an sstable has at most {ROW_BYTES_MAX - KEY_BYTES_MAX} bytes")
        if (columns.kinds == RANGE_DELETE).any():
            raise Invalid("range deletes are given to delete_ranges, not as rows")

    def _add_points(self, columns: Columns) -> None:
        if not len(columns):
            return
        if columns.hashes is None:
            keys = columns.list_keys()
            parts = [hash_keys(keys[at : at + _HASH_ROWS]) for at in range(0, len(keys), _HASH_ROWS)]
            columns = replace(columns, hashes=np.concatenate(parts))
        self._deletes += int(np.count_nonzero(columns.kinds == DELETE))
        self._merges += int(np.count_nonzero(columns.kinds >= MERGE))
        self._expiring += int(np.count_nonzero(columns.expires != NEVER))
        self._add(columns, columns.key(0), columns.key(len(columns) - 1) + b"\0")

    def _add_range(self, start: bytes, end: bytes, lsn: int) -> None:
        self._range_rows.append(self.rows)
        kinds = np.array([RANGE_DELETE], np.uint8)
        columns = Columns.of([start], [end], [lsn], kinds)
        self._add(replace(columns, hashes=np.zeros(1, np.uint32)), start, end)

    def _add(self, columns: Columns, first: bytes, end: bytes) -> None:
        if self.rows + len(columns) > ROWS_MAX:
            raise Invalid(f"an sstable holds at most {ROWS_MAX} rows: finish it and start another")
        if not self.rows:
            self._start = first
        self._end = max(self._end, end)
        self._lsns = min(self._lsns[0], int(columns.lsns.min())), max(self._lsns[1], int(columns.lsns.max()))
        size = int(_row_ends(columns)[-1])
        self._waiting.append(columns)
        self._waiting_rows += len(columns)
        self._waiting_bytes += size
        self.rows += len(columns)
        self.content_bytes += size

    def _drain(self, least_rows: int) -> None:
        while self._waiting_rows >= least_rows or self._waiting_bytes >= BATCH_BYTES:
            self._write_batch(_joined(list(self._take_batch())))

    def _take_batch(self) -> Iterator[Columns]:
        rows, room = BATCH_ROWS, BATCH_BYTES
        while self._waiting and rows:
            columns = self._waiting[0]
            ends = _row_ends(columns)
            fitting = min(rows, len(columns), int(np.searchsorted(ends, room, "right")))
            if fitting == 0:
                if room < BATCH_BYTES:
                    return
                fitting = 1  # a row larger than a batch gets its own
            size = int(ends[fitting - 1])
            if fitting == len(columns):
                yield self._waiting.popleft()
            else:
                yield columns.slice(0, fitting)
                self._waiting[0] = columns.slice(fitting, len(columns))
            self._waiting_rows -= fitting
            self._waiting_bytes -= size
            rows, room = rows - fitting, room - size

    def _write_batch(self, columns: Columns) -> None:
        if len(self._batches) == BATCHES_MAX:
            raise Invalid(f"an sstable holds at most {BATCHES_MAX} batches: finish it and start another")
        batch = columns.record_batch(self._schema)
        start = self._sink.at
        self._ipc.write_batch(batch)
        end = self._sink.at
        # Arrow writes buffers in the order of the columns and omits empty ones: they get the end offset.
        key_bytes, value_bytes = (
            int(offsets_of(column)[-1] - offsets_of(column)[0]) for column in (columns.keys, columns.values)
        )
        written = (1, key_bytes, 1, 1, batch["expires_us"].null_count, 1, 1, value_bytes)
        buffers = self._sink.take_buffers()
        assert len(buffers) == sum(map(bool, written))
        key_offsets, keys, lsns, kinds, _, expires, value_offsets, values = (
            buffers.popleft() if size else end for size in written
        )
        flags = (ALL_PUTS if columns.kinds.max() == PUT else 0) | (SOME_EXPIRE if columns.expires.min() != NEVER else 0)
        self._batches.append(
            (len(columns), start, key_offsets, keys, lsns, kinds, expires, value_offsets, values, end, flags)
        )
        self._first_keys.append(columns.key(0))
        assert columns.hashes is not None
        self._hashes.append(columns.hashes)

    def finish(self) -> Summary:
        """Write the remaining rows, sync both files, and give them their names."""
        while self._ranges:
            self._add_range(*self._ranges.popleft())
        if not self.rows:
            raise Invalid(f"{self._path}: an sstable holds at least one row")
        self._drain(1)
        self._ipc.close()
        summary = Summary(
            store=self._identity.store, chunk_id=self._identity.chunk_id, file_bytes=self._sink.at, rows=self.rows,
            start=self._start, end=self._end, lsn_min=self._lsns[0], lsn_max=self._lsns[1], deletes=self._deletes,
            merges=self._merges, expiring=self._expiring, range_deletes=len(self._range_rows),
        )  # fmt: skip
        if self.rows < _ROWS_TO_OVERLAP:
            self._out.finish()
            index = self._encode_index(summary)
        else:
            with ThreadPoolExecutor(1, "sstable-sync") as pool:
                synced = pool.submit(self._out.finish)  # the disk syncs while the index is made
                index = self._encode_index(summary)
                synced.result()
        self._index_out = create_chunk(self._fs, self._index_path, self._identity, self._sealing)
        for part in index:
            self._index_out.write(part)
        self._index_out.finish()
        return summary

    def _encode_index(self, summary: Summary) -> tuple[bytes, memoryview]:
        return encode_index(
            summary,
            hashes=np.concatenate(self._hashes),
            range_rows=self._range_rows,
            batches=np.array(self._batches, BATCH),
            first_keys=self._first_keys,
            page_sums=self._sink.page_sums(),
        )

    def abort(self) -> None:
        """Delete the unfinished files."""
        self._out.abort()
        if self._index_out is not None:
            self._index_out.abort()


def _row_ends(columns: Columns) -> I64:
    """Return, for each row, the bytes of keys and values up to and including it."""
    keys, values = offsets_of(columns.keys), offsets_of(columns.values)
    ends: I64 = (keys[1:] - keys[0]).astype(np.int64) + (values[1:] - values[0])
    return ends


def _joined(parts: list[Columns]) -> Columns:
    if len(parts) == 1:
        return parts[0]
    return Columns(
        keys=pa.concat_arrays([part.keys for part in parts]),
        lsns=np.concatenate([part.lsns for part in parts]),
        kinds=np.concatenate([part.kinds for part in parts]),
        expires=np.concatenate([part.expires for part in parts]),
        values=pa.concat_arrays([part.values for part in parts]),
        hashes=np.concatenate([part.hashes for part in parts if part.hashes is not None]),
    )
