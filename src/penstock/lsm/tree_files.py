"""The files of a store's trees: opened as the manifest lists them, written from memtables, looked at before adoption.

Thread: any; nothing here changes.
Invariant: a file is used only if it is the one that was asked for: its store, its chunk id and its rows are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from penstock.archive.chunk import ChunkIdentity, Sealing
from penstock.errors import CorruptionError, Invalid
from penstock.host.files import FileSystem
from penstock.lsm.catalog import Catalog
from penstock.lsm.index import ROWS_MAX, Summary
from penstock.lsm.memtable import Memtable
from penstock.lsm.sorted_rows import SortedRows
from penstock.lsm.sstable import Sstable
from penstock.lsm.version import FileMeta, TableFile
from penstock.lsm.writer import BATCH_BYTES, SstableWriter

FLUSH_CHUNK_ROWS = 1 << 16  # rows given to a writer in one go
ROWS_PER_FILE = FLUSH_CHUNK_ROWS * 50
assert ROWS_PER_FILE < ROWS_MAX  # which leaves room for range deletes


def files_of(rows: Memtable) -> int:
    """The number of files that a memtable becomes, at most."""
    return 1 + max(0, len(rows.rows) - 1) // ROWS_PER_FILE


class TreeFiles:
    """The sstables below the folder `root` of the store whose identity is `store`."""

    def __init__(self, fs: FileSystem, root: str, store: bytes, sealing: Sealing) -> None:
        self.fs = fs
        self.root = root
        self.store = store
        self.sealing = sealing

    def open_table(self, meta: FileMeta) -> Sstable:
        """A listed file. It must be there, and be the one that was listed."""
        path = f"{self.root}/{meta.file_name}"
        try:
            table = Sstable.open(path, fs=self.fs, keys=self.sealing.keys, lsn=meta.lsn)
        except FileNotFoundError as error:
            raise CorruptionError(
                error.filename or path, 0, "this file is listed in the manifest, and missing"
            ) from None
        summary = table.summary
        if (summary.store, summary.chunk_id, summary.rows) != (self.store, meta.chunk_id, meta.rows):
            table.close()
            raise CorruptionError(path, 0, f"this is not the file that the manifest lists as chunk {meta.chunk_id}")
        return table

    def open_all(self, metas: Sequence[FileMeta]) -> list[TableFile]:
        """Files for a version, opened now: when they are committed, nothing may fail any more."""
        files = [TableFile(meta, self.open_table) for meta in metas]
        for file in files:
            file.table()
        return files

    def write(self, rows: Memtable, catalog: Catalog, ids: Sequence[int]) -> list[Summary]:
        """Write a memtable as sstables of these ids, in small steps."""
        ordered = SortedRows(rows)
        starts = range(0, max(1, len(ordered)), ROWS_PER_FILE)
        borders = [b"", *(ordered.key(start) for start in starts[1:]), None]
        summaries: list[Summary] = []
        # Rows that are deleted are not written, so that there may be more ids than files.
        for chunk_id, start, (low, high) in zip(ids, starts, itertools.pairwise(borders), strict=False):
            writer = self.writer(catalog, chunk_id)
            try:
                writer.delete_ranges(rows.ranges.clip(low or b"", high))
                at, end = start, min(start + ROWS_PER_FILE, len(ordered))
                while at < end:
                    columns = ordered.columns(at, min(at + FLUSH_CHUNK_ROWS, end), BATCH_BYTES)
                    writer.append(columns)
                    at += len(columns)
                summaries.append(writer.finish())
            except BaseException:
                writer.abort()
                raise
        return summaries

    def writer(self, catalog: Catalog, chunk_id: int) -> SstableWriter:
        """What writes the file of a chunk id."""
        identity = ChunkIdentity(store=self.store, chunk_id=chunk_id)
        return SstableWriter(self.fs, f"{self.root}/{catalog.file_name(chunk_id)}", identity, sealing=self.sealing)

    def inspect(self, catalog: Catalog, chunk_id: int, check: Callable[[Sstable], object]) -> Summary:
        """What a file built elsewhere holds; `Invalid` if it is not for this store, or `check` says so."""
        path = f"{self.root}/{catalog.file_name(chunk_id)}"
        try:
            table = Sstable.open(path, fs=self.fs, keys=self.sealing.keys)
        except FileNotFoundError as error:
            raise CorruptionError(error.filename or path, 0, "this file is to be adopted, and is missing") from None
        try:
            if table.summary.store != self.store or table.summary.chunk_id != chunk_id:
                raise Invalid(f"{path} was built for another store or under another id: build it again")
            check(table)
            return table.summary
        finally:
            table.close()

    def exists(self, catalog: Catalog, chunk_id: int) -> bool:
        return self.fs.exists(f"{self.root}/{catalog.file_name(chunk_id)}")
