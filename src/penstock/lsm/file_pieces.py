"""A key range of a snapshot for readers in other processes: the sstables to read, and the few rows in no file yet.

If there are many rows in memory it carries none of them, and must be read from the owner.

Thread: any; the snapshot that it was made from pins its files.
Invariant: read elsewhere, it gives the rows that the snapshot gives, with the same expiry time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import msgspec

from penstock.archive.fetching import fetched_table
from penstock.errors import ArchiveUnavailable, CorruptionError, Invalid
from penstock.lsm.memtable import Edit, Memtable, merged
from penstock.lsm.ranges import RangeDelete
from penstock.lsm.rows import Row, bytes_list
from penstock.lsm.sstable import Sstable
from penstock.lsm.version import FileMeta, TableFile, Version, arrange
from penstock.lsm.view import View

logger = logging.getLogger(__name__)

CARRIED_BYTES_MAX = 2 << 20  # of rows in memory


class CarriedRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a memtable in a key range, and its range deletes."""

    rows: list[tuple[bytes, Row]]
    ranges: list[RangeDelete]

    @classmethod
    def of(cls, memtable: Memtable, start: bytes, end: bytes | None) -> CarriedRows:
        """Return the rows of a memtable in [start, end)."""
        columns = memtable.columns(start, end)
        parts = columns.kinds.tolist(), bytes_list(columns.values), columns.lsns.tolist(), columns.expires.tolist()
        return cls(list(zip(columns.list_keys(), zip(*parts, strict=True), strict=True)), list(memtable.ranges))

    def memtable(self, lsn: int) -> Memtable:
        """Return the rows as a memtable of a state at `lsn`."""
        memtable = Memtable()
        for at, ranges in groupby(sorted(self.ranges, key=itemgetter(2)), itemgetter(2)):
            memtable.apply(Edit(lsn=at, time_us=0, ranges=[(start, end) for start, end, _ in ranges]))
        memtable.apply(Edit(lsn=lsn + 1, time_us=0, rows=dict(self.rows)))
        return memtable


class FilePiece(msgspec.Struct, frozen=True, array_like=True):
    """A key range of a tree at one LSN."""

    lsn: int
    now_us: int
    files: list[FileMeta]
    memory: list[CarriedRows] | None  # none or one; None: too many rows to carry
    archive: str = ""  # where readers that do not see a file find the objects that `files` name

    @classmethod
    def of(cls, version: Version, now_us: int, start: bytes, end: bytes | None) -> FilePiece:
        """Return the range [start, end) of a version."""
        files, archive = list[FileMeta](), ""
        for file in (file for run in version.runs for file in run.overlapping(start, end)):
            remote = file.remote()
            files.append(replace(file.meta, object=None if remote is None else remote.key))
            archive = archive if remote is None else remote.url
        memory = None
        if sum(memtable.bytes for memtable in version.frozen) <= CARRIED_BYTES_MAX:
            stored = View(replace(version, active=None, frozen=()), lambda: now_us)
            rows = merged(version.frozen[::-1], version.time_us).to_flush(stored) if version.frozen else Memtable()
            memory = [CarriedRows.of(rows, start, end)] if len(rows) else []
        return cls(version.lsn, now_us, files, memory, archive)

    def open(self, root: str, identity: bytes) -> Version | None:
        """Return a version to read from the files; None if they cannot be read from here."""
        if self.memory is None:
            return None
        opened: list[TableFile] = []
        for meta in self.files:
            table = self._open_table(meta, root)
            if table is None:
                return None
            if table.summary.store != identity or table.summary.chunk_id != meta.chunk_id:
                raise CorruptionError(table.path, 0, "it is a file of another store")
            opened.append(TableFile(meta, lambda _, table=table: table))  # type: ignore[misc]
        memory = tuple(carried.memtable(self.lsn) for carried in self.memory)
        return Version(None, memory, arrange(opened), self.lsn, self.lsn, self.now_us)

    def _open_table(self, meta: FileMeta, root: str) -> Sstable | None:
        """Open a file, or a copy of it from the archive with the credentials of this process; None without either."""
        path = f"{root}/{meta.file_name}"
        try:
            return Sstable.open(path, lsn=meta.lsn, key=meta.key)
        except FileNotFoundError:
            if meta.object is None or not self.archive:
                return None
        try:
            path, copy = fetched_table(self.archive, meta.object, path)
        except (ArchiveUnavailable, Invalid) as error:  # the owner may have what this process lacks
            logger.warning("%s is read from the owner, not from the archive: %s", meta.file_name, error)
            return None
        return Sstable.open(path, lsn=meta.lsn, key=meta.key, data_path=copy)

    def damage(self, start: bytes, end: bytes | None, root: str, identity: bytes) -> Iterator[tuple[str, str]]:
        """Check every page of the files that begin in [start, end); yield (path, reason) for each damage."""
        for meta in self.files:
            if meta.start < start or (end is not None and meta.start >= end):
                continue  # it reaches in from another piece, which checks it
            path = f"{root}/{meta.file_name}"
            try:
                sstable = self._open_table(meta, root)
                if sstable is None:
                    raise FileNotFoundError(2, "it is missing", path)
                table = sstable
            except FileNotFoundError as error:
                yield error.filename or path, "it is missing"
            except CorruptionError as error:
                yield error.path, f"byte {error.offset}: {error.reason}"
            else:
                yield from ((error.path, f"byte {error.offset}: {error.reason}") for error in table.damaged_pages())
                if table.summary.store != identity or table.summary.chunk_id != meta.chunk_id:
                    yield path, "it is a file of another store"
                table.close()


def size_of(version: Version, start: bytes, end: bytes | None) -> int:
    """Estimate the bytes of a key range: all of the files that it touches, and what is in memory."""
    files: Sequence[FileMeta] = [file.meta for run in version.runs for file in run.overlapping(start, end)]
    return sum(meta.size_bytes for meta in files) + sum(memtable.bytes for memtable in version.frozen)
