"""The files of a store's trees: opens listed files, writes memtables, checks files before adoption.

Thread: any; nothing here changes.
Invariant: a file is used only if its store, chunk id and rows match what was expected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from penstock.archive.chunk import ChunkIdentity
from penstock.errors import CorruptionError, Invalid
from penstock.host.file_errors import translate_os_errors
from penstock.host.files import FileSystem
from penstock.lsm.catalog import Catalog
from penstock.lsm.index import ROWS_MAX, Summary
from penstock.lsm.memtable import Memtable
from penstock.lsm.sorted_rows import SortedRows
from penstock.lsm.sstable import Sstable
from penstock.lsm.version import FileMeta, RemoteTable, TableFile
from penstock.lsm.writer import BATCH_BYTES, SstableWriter

FLUSH_CHUNK_ROWS = 1 << 16  # rows passed to a writer per call
ROWS_PER_FILE = FLUSH_CHUNK_ROWS * 50
assert ROWS_PER_FILE < ROWS_MAX  # which leaves room for range deletes

COPY_ATTEMPTS = 100  # at a copy from the archive, which reads of other files may remove before it is open


def files_of(rows: Memtable) -> int:
    """Return the largest number of files that a memtable can become."""
    return 1 + max(0, len(rows.rows) - 1) // ROWS_PER_FILE


class ArchivedFiles(Protocol):
    """Copies of sstables in an archive."""

    def locate(self, meta: FileMeta) -> RemoteTable | None:
        """Return where the archive has a file; None if it has no verified copy."""

    def cached(self, meta: FileMeta) -> str | None:
        """Return the path of a copy to read, fetched if need be; None if the archive has none."""

    def discard(self, meta: FileMeta) -> None:
        """Remove the copy of a file, which is damaged; the archive has another one."""

    def bring_back(self, meta: FileMeta) -> None:
        """Fetch a file into the store's folder again."""


class TreeFiles:
    """The sstables below the folder `root` of the store whose identity is `store`."""

    def __init__(self, fs: FileSystem, root: str, store: bytes) -> None:
        self.fs = fs
        self.root = root
        self.store = store
        self.archive: ArchivedFiles | None = None

    def locate(self, meta: FileMeta) -> RemoteTable | None:
        """Return where the archive has a file, if there is one."""
        return None if self.archive is None else self.archive.locate(meta)

    def is_here(self, meta: FileMeta) -> bool:
        """Whether a file is in the store's folder."""
        return self.fs.exists(f"{self.root}/{meta.file_name}")

    def bring_back(self, metas: Iterable[FileMeta]) -> None:
        """Fetch the files that are in the archive only: work outside this process reads them by their names."""
        for meta in metas:
            if self.archive is not None and not self.is_here(meta):
                self.archive.bring_back(meta)

    def open_table(self, meta: FileMeta) -> Sstable:
        """Open a listed file; `CorruptionError` if it is missing, another file, or not encrypted as its table is."""
        path = f"{self.root}/{meta.file_name}"
        with translate_os_errors():
            try:
                table = Sstable.open(path, fs=self.fs, lsn=meta.lsn, key=meta.key, resident=True)
            except FileNotFoundError as error:
                table = self._open_archived(path, meta, error.filename or path)
        summary = table.summary
        if (summary.store, summary.chunk_id, summary.rows) != (self.store, meta.chunk_id, meta.rows):
            table.close()
            raise CorruptionError(path, 0, f"this is not the file that the manifest lists as chunk {meta.chunk_id}")
        return table

    def _open_archived(self, path: str, meta: FileMeta, missing: str) -> Sstable:
        if self.archive is not None and missing == path:
            fetched_again = False
            for _ in range(COPY_ATTEMPTS):
                copy = self.archive.cached(meta)
                if copy is None:
                    break
                try:
                    return Sstable.open(path, fs=self.fs, lsn=meta.lsn, key=meta.key, data_path=copy, resident=True)
                except FileNotFoundError as error:
                    missing = error.filename or path
                    if missing != copy:  # its index, which is never evicted
                        break
                except CorruptionError as error:
                    if error.path != copy or fetched_again:
                        raise
                    fetched_again = True
                    self.archive.discard(meta)
        raise CorruptionError(missing, 0, "this file is listed in the manifest, and missing")

    def open_all(self, metas: Sequence[FileMeta]) -> list[TableFile]:
        """Open files for a version now: once they are committed, nothing may fail."""
        files = [TableFile(meta, self.open_table, self.locate) for meta in metas]
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
        """Return a writer for the file of a chunk id, in level 0."""
        identity = ChunkIdentity(store=self.store, chunk_id=chunk_id)
        path, sealing = f"{self.root}/{catalog.file_name(chunk_id)}", catalog.storage.sealing(0)
        return SstableWriter(self.fs, path, identity, sealing=sealing)

    def inspect(self, catalog: Catalog, chunk_id: int, check: Callable[[Sstable], object]) -> Summary:
        """Return the summary of a file built outside; `Invalid` if it is of another store, or if `check` raises it."""
        path = f"{self.root}/{catalog.file_name(chunk_id)}"
        try:
            table = Sstable.open(path, fs=self.fs, key=catalog.storage.key)
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
