"""Moves the bytes of chunks: up to the archive, out of the folder, and back. The manifest allows each step, or not.

    archive     upload sstable and index -> row: unverified -> read both back -> row: verified
    evict       row: evicted -> readers let go of the file -> unlink it
    rehydrate   fetch the file, synced under its name -> row: verified

A crash leaves the object without a row (the next attempt finds it), an unverified row (verified by the next run), or
the file of an evicted row (still read; removed by the next eviction).

Thread: one at a time (`StoreArchive` takes turns).
Invariants: (1) a row says "verified" only after the object's bytes were read back and compared. (2) a file is unlinked
only after its row says "evicted" durably. (3) a file is evicted only to an object that this store uploaded: another
store may delete its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress

from penstock.archive.objects import INDEX, ObjectStore, parse_file_key
from penstock.archive.transfer import check_object, file_checksum, put_file, upload, verify_object, where
from penstock.errors import CorruptionError, Invalid, NotFound
from penstock.host.clock import Clock
from penstock.host.files import FileSystem
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.readers import ReaderLeases
from penstock.lsm.writer import index_path
from penstock.manifest.keys import ChunkKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import SetResidency
from penstock.manifest.records import ChunkEntryRecord, ChunkResidency, Evicted, Local, RemoteArchived
from penstock.partition.ledger_records import LEDGER_TABLE
from penstock.store.archived_tables import ArchivedTables

NO_ARCHIVE = (
    "this store has no archive: open it with penstock.open(path, archive='s3://bucket/prefix'), "
    "or `penstock serve --archive`"
)

logger = logging.getLogger(__name__)

ChunkRow = tuple[ChunkKey, ChunkEntryRecord]


class ChunkMoves:
    """The steps of a chunk's residency."""

    def __init__(
        self,
        manifest: Manifest,
        maintenance: Maintenance,
        archived: ArchivedTables,
        readers: ReaderLeases,
        *,
        fs: FileSystem,
        root: str,
        store: str,
        clock: Clock,
        stop: Callable[[], bool],
    ) -> None:
        self._manifest = manifest
        self._maintenance = maintenance
        self._archived = archived
        self._readers = readers
        self._fs = fs
        self._root = root
        self._store = store  # the UUID, as hex digits
        self._clock = clock
        self._stop = stop

    @property
    def _objects(self) -> ObjectStore:
        if self._archived.objects is None:
            raise Invalid(NO_ARCHIVE)
        return self._archived.objects

    def rows(self, table_ids: list[int]) -> Iterator[ChunkRow]:
        """Iterate over the sstables of tables that are listed."""
        for table_id in table_ids:
            for key, row in self._manifest.scan_chunks(table_id):
                if not row.staged and row.file_name.endswith(".sst"):
                    yield key, row

    def is_own(self, key: str) -> bool:
        """Whether this store uploaded an object; a restored or reattached one has inherited others."""
        return parse_file_key(key).store == self._store

    # -- to the archive

    def archive(self, key: ChunkKey, row: ChunkEntryRecord) -> int:
        """Bring a chunk that is in the folder into the archive, verified; return the bytes that were uploaded."""
        residency = row.residency
        if isinstance(residency, RemoteArchived) and not self.is_own(residency.object):
            self._set(key, row, Local())  # inherited: it is uploaded again, as this store's own
            residency = Local()
        uploaded = 0
        if isinstance(residency, Local):
            try:
                name = upload(self._fs, self._objects, self._root, row.file_name, self._store, self._stop)
                put_file(self._fs, self._objects, f"{self._root}/{index_path(row.file_name)}", name + INDEX)
            except FileNotFoundError:
                if self._manifest.get_chunk(key) is None:  # a compaction replaced it meanwhile
                    return 0
                raise
            uploaded = parse_file_key(name).size
            residency = RemoteArchived(name)
            if not self._set(key, row, residency, self._clock.time_us() // 1_000):
                return uploaded
        if isinstance(residency, RemoteArchived) and not residency.verified:
            self._verify(key, row, residency.object)
        return uploaded

    def _verify(self, key: ChunkKey, row: ChunkEntryRecord, name: str) -> None:
        """Read a chunk's object and its index back; the row says "verified", or that the chunk is local again."""
        index = f"{self._root}/{index_path(row.file_name)}"
        try:
            size, checksum = file_checksum(self._fs, index, self._stop)
            verify_object(self._objects, name, self._stop)
            check_object(self._objects, name + INDEX, size, checksum, self._stop)
        except CorruptionError as error:
            self._set(key, row, Local())
            self._discard(name)  # so that the next attempt can create it
            raise CorruptionError(error.path, error.offset, f"{error.reason}; it is uploaded again later") from None
        self._set(key, row, RemoteArchived(name, verified=True))

    def _discard(self, name: str) -> None:
        """Delete a damaged object that nothing names any more."""
        for each in (name, name + INDEX):
            self._objects.delete(each)

    def verify_again(self, key: ChunkKey, row: ChunkEntryRecord) -> list[tuple[str, str]]:
        """Read the object of an archived chunk; return what is wrong with it, with its URL.

        If the file is in the folder, a damaged object is forgotten, and uploaded again by the next run.
        """
        residency = row.residency
        if isinstance(residency, Local):
            return []
        if isinstance(residency, RemoteArchived) and not residency.verified and self.is_own(residency.object):
            return self._verify_first(key, row, residency.object)
        try:
            verify_object(self._objects, residency.object, self._stop)
            if self._objects.size(residency.object + INDEX) is None:
                raise CorruptionError(where(self._objects, residency.object + INDEX), 0, "this object is missing")
        except CorruptionError as error:
            if isinstance(residency, RemoteArchived) and self._set(key, row, Local()) and self.is_own(residency.object):
                self._discard(residency.object)
            return [(error.path, error.reason)]
        if isinstance(residency, RemoteArchived) and not residency.verified:
            self._verify(key, row, residency.object)
        return []

    def _verify_first(self, key: ChunkKey, row: ChunkEntryRecord, name: str) -> list[tuple[str, str]]:
        try:
            self._verify(key, row, name)
        except CorruptionError as error:
            return [(error.path, error.reason)]
        except FileNotFoundError:
            if self._manifest.get_chunk(key) is not None:  # else a compaction replaced it meanwhile
                raise
        return []

    def verify_listed(self, name: str, size: int, checksum: int, path: str) -> list[tuple[str, str]]:
        """Read an object that a run lists; return what is wrong with it, with its URL.

        A damaged object is uploaded again at once, if the folder still has a file with its content.
        """
        try:
            check_object(self._objects, name, size, checksum, self._stop)
        except CorruptionError as error:
            here = f"{self._root}/{path}"
            with suppress(FileNotFoundError):
                is_own = name.startswith(f"{self._store}/")  # an inherited object is another store's
                if is_own and file_checksum(self._fs, here, self._stop) == (size, checksum):
                    self._objects.delete(name)
                    put_file(self._fs, self._objects, here, name)
            return [(error.path, error.reason)]
        return []

    # -- out of the folder

    def evict(self, key: ChunkKey, row: ChunkEntryRecord) -> bool:
        """Remove the file of a verified chunk from the folder; False if it must stay."""
        residency = row.residency
        if isinstance(residency, Evicted):
            return self._remove(key, row)  # what a crash or a failed compaction left
        if not (isinstance(residency, RemoteArchived) and residency.verified) or not self.is_own(residency.object):
            return False
        # The ledger decides about every write, and a file's range deletes are needed to open its tree.
        if key.db_id == LEDGER_TABLE or self._maintenance.detail_of(key, row).has_ranges or self._is_pinned(key):
            return False
        if not self._set(key, row, Evicted(residency.object)):
            return False
        return self._remove(key, row)

    def is_left(self, row: ChunkEntryRecord) -> bool:
        """Whether the file of an evicted chunk is still in the folder."""
        return self._fs.exists(f"{self._root}/{row.file_name}")

    def _remove(self, key: ChunkKey, row: ChunkEntryRecord) -> bool:
        path = f"{self._root}/{row.file_name}"
        if not self._fs.exists(path) or self._is_pinned(key) or self._readers.holders:
            return False
        for tree, _ in self._maintenance.trees():
            tree.release({row.file_name})
        return self._readers.remove(self._fs, path)

    def _is_pinned(self, key: ChunkKey) -> bool:
        if self._readers.holders:
            return True
        trees = [tree for tree, catalog in self._maintenance.trees() if catalog.db_id == key.db_id]
        return any(key.chunk_id in tree.pinned_ids() for tree in trees)

    # -- and back

    def rehydrate(self, key: ChunkKey, row: ChunkEntryRecord) -> int:
        """Fetch the file of an evicted chunk into the folder again; return its bytes."""
        if not isinstance(row.residency, Evicted):
            return 0
        name = row.residency.object
        if not self._fs.exists(f"{self._root}/{row.file_name}"):
            self._archived.fetch_file(name, row.file_name)
        self._set(key, row, RemoteArchived(name, verified=True), self._clock.time_us() // 1_000)
        self._archived.cache.discard(name)
        return parse_file_key(name).size

    def _set(self, key: ChunkKey, row: ChunkEntryRecord, value: ChunkResidency, at_ms: int | None = None) -> bool:
        """Commit a residency; False if the chunk is gone."""
        try:
            self._manifest.apply([SetResidency(key, value, at_ms)])
        except NotFound:
            return False
        match value:
            case RemoteArchived(object=name, verified=True) | Evicted(object=name):
                self._archived.record(row.file_name, name)
            case _:
                self._archived.record(row.file_name, None)
        return True
