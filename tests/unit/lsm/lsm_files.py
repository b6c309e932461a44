"""Small sstables on a simulated disk, and a plain model of what they hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.archive.chunk import PLAIN, ChunkIdentity, Sealing
from penstock.host.files import FileSystem
from penstock.lsm.index import Summary
from penstock.lsm.ranges import RangeDelete, RangeDeletes
from penstock.lsm.rows import NEVER, Columns
from penstock.lsm.writer import SstableWriter

STORE = bytes(range(16))

# key: (kind, value, lsn, expires)
ModelRows = dict[bytes, tuple[int, bytes, int, int]]


def puts(pairs: dict[bytes, bytes], lsn: int = 1) -> ModelRows:
    return {key: (0, value, lsn, NEVER) for key, value in pairs.items()}


def columns(rows: ModelRows) -> Columns:
    keys = sorted(rows)
    return Columns.of(
        keys,
        [rows[key][1] for key in keys],
        np.array([rows[key][2] for key in keys], np.uint64),
        np.array([rows[key][0] for key in keys], np.uint8),
        np.array([rows[key][3] for key in keys], np.int64),
    )


def write(
    fs: FileSystem,
    path: str,
    rows: ModelRows,
    *,
    ranges: Iterable[RangeDelete] = (),
    chunk_id: int = 1,
    sealing: Sealing = PLAIN,
    chunk_rows: int = 1_000,
) -> Summary:
    writer = SstableWriter(fs, path, ChunkIdentity(store=STORE, chunk_id=chunk_id), sealing=sealing)
    writer.delete_ranges(RangeDeletes.of(ranges))
    whole = columns(rows)
    for at in range(0, len(whole), chunk_rows):
        writer.append(whole.slice(at, min(at + chunk_rows, len(whole))))
    return writer.finish()
