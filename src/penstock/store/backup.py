"""Backups of an open store: consistent, while others write, and only of what changed since the last one.

Writers are never stopped. The order of the copies makes the backup one moment of the store:

    hold        from here on no file is removed, by anyone
    manifest    a snapshot of its rows: which sstables there are, how far each partition has stored
    own files   what kinds keep beside the manifest (a queue's files), as far as they are synced
    spills      what the journal no longer has, and entries that were set aside
    journal     its records from the first that a partition needs, up to the last that is durable now: the backup's LSN
    sstables    they never change, so those that an earlier backup has are not copied again
    listing     makes the backup whole

Each part is at least as new as those before it, and none is newer than the journal: the same holds after a crash, so
opening a restored copy replays the journal over the rest, up to the backup's LSN in every table.

Thread: any; one backup of a store at a time. No checkpoint runs from the manifest to the journal.
Invariant: a backup is listed only if every file in it is whole, durable and, for an sstable, undamaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from penstock.archive.objects import FileKey, parse_file_key
from penstock.errors import Closed, CorruptionError, NotFound, StoreLocked
from penstock.host.clock import Clock
from penstock.host.file_errors import unreadable
from penstock.host.file_operations import make_dirs, walk
from penstock.host.files import FileSystem
from penstock.host.paths import parent
from penstock.journal.consensus import Consensus
from penstock.journal.partitions import PartitionId
from penstock.kinds import FileKeeping, OwnFile, partitions_of
from penstock.log.chain import is_segment
from penstock.lsm.collection import Collector
from penstock.lsm.maintenance import COMPANION, SNAPSHOT_ROW, Maintenance
from penstock.lsm.sstable import Sstable
from penstock.manifest.engine import ReadView
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import ChunkEntryRecord, ChunkResidency, Evicted
from penstock.manifest.tables import CHUNKS, DB, WAL_STATE
from penstock.partition.aside import FOLDER as ASIDE
from penstock.partition.aside import AsideLog
from penstock.partition.checkpoint import Checkpoint
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.ledger_records import TableInfo
from penstock.partition.machine import SPILL
from penstock.partition.reference import files_of, references_of
from penstock.partition.roster import describe
from penstock.partition.snapshots import INSTALL, SNAPSHOT, PartitionSnapshots
from penstock.partition.storage_options import FOLDER
from penstock.registry import kind_named
from penstock.store.archived_tables import ArchivedTables
from penstock.store.backup_folder import (
    SHARED,
    VERSION,
    BackedFile,
    BackupFolder,
    BackupListing,
    Copier,
    CopyProgress,
    Progress,
    ends_of,
    ends_of_file,
    naming_the_disk,
)
from penstock.store.dropped import DroppedShards
from penstock.store.port import LocalPort
from penstock.store.reports import BackupReport

WAIT_S = 60.0  # for a checkpoint or a removal of files that is under way
ATTEMPTS = 5  # to copy a spill whose shard is opened meanwhile


@dataclass(frozen=True, kw_only=True)
class BackupSource:
    """The parts of an open store that a backup reads."""

    fs: FileSystem
    root: str
    identity: bytes
    uuid: bytes
    clock: Clock
    manifest: Manifest
    checkpoint: Checkpoint
    consensus: Consensus
    collector: Collector
    dropped: DroppedShards
    aside: AsideLog
    snapshots: PartitionSnapshots
    dispatcher: Dispatcher
    port: LocalPort
    archived: ArchivedTables
    maintenance: Maintenance


class Backup:
    """One backup that is being made."""

    def __init__(
        self, source: BackupSource, target: str, *, progress: Progress | None, stop: Callable[[], bool]
    ) -> None:
        self._source = source
        self._folder = BackupFolder(source.fs, target)
        self._copier = Copier(source.fs, stop)
        self._progress = progress
        self._new_folders: set[str] = set()  # that this backup made
        self._chunks: list[ChunkEntryRecord] = []  # of the manifest that was copied
        self._residencies: dict[str, ChunkResidency] = {}  # of these, by path
        self._files: list[BackedFile] = []
        self._copied = CopyProgress(files=0, files_total=0, bytes=0, bytes_total=0)

    def run(self, keep: int | None) -> BackupReport:
        """Make the backup; then remove all but the newest `keep`."""
        source, folder = self._source, self._folder
        make_dirs(source.fs, folder.root)
        try:
            lock = source.fs.lock(folder.lock_path)
        except StoreLocked:
            raise StoreLocked(f"another backup is being written to {folder.root}: wait for its end") from None
        try:
            with naming_the_disk(folder.root):
                folder.prepare(source.uuid.hex())
                earlier = folder.listings()
                number = folder.begin(earlier)
            self._finish_installations()
            with source.snapshots.held_off(), source.collector.readers.holding(source.fs):
                source.collector.await_end(WAIT_S)
                source.dropped.await_end(WAIT_S)
                with naming_the_disk(folder.root):
                    lsn = self._copy_all(folder.own(number), earlier)
            listing = BackupListing(
                VERSION, number, source.uuid.hex(), source.identity.hex(), lsn, source.clock.time_us(), self._files
            )
            with naming_the_disk(folder.root):
                folder.publish(listing)
            if keep is not None:
                whole = [*earlier, listing]
                folder.remove(whole[:-keep], whole[-keep:])
        finally:
            lock.release()
        copied = self._copied
        size = sum(file.size for file in self._files)
        return BackupReport(
            number=number,
            lsn=lsn,
            files=len(self._files),
            bytes=size,
            files_copied=copied.files,
            bytes_copied=copied.bytes,
        )

    def _copy_all(self, own: str, earlier: list[BackupListing]) -> int:
        source = self._source
        with source.checkpoint.held_off(WAIT_S):
            shards = self._shards_with_files()  # first: a table that is dropped meanwhile is in this manifest
            rows = source.manifest.copy_to(f"{own}/manifest")
            self._list_own(own, "manifest")
            shards |= self._shards_with_files()
            own_files = [file for kind, machine in shards.values() for file in kind.own_files(machine)]
            with source.aside.unchanged:
                self._copy_log(own, ASIDE)
            for folder in self._spills():
                self._copy_log(own, folder)
            self._make(f"{own}/journal")
            first = source.checkpoint.needed_from()
            lsn = self._copy_journal(f"{own}/journal", first)
            for name in source.fs.listdir(f"{own}/journal"):
                self._list_own(own, f"journal/{name}")
            chunks = self._chunks = [row for _, row in CHUNKS.scan(rows)]
            named = self._named_since(first, lsn, chunks)  # here: a checkpoint deletes these records
        for file in own_files:
            if not file.is_whole:
                self._copy_own(own, file)
        self._residencies = {row.file_name: row.residency for row in chunks}
        staged = {row.file_name for row in chunks if row.staged}  # not adopted: one may be unfinished, or discarded
        for file_name in sorted(staged | named):
            for name in files_of(file_name):
                with suppress(FileNotFoundError):
                    self._copy_own(own, OwnFile(name, -1, None, is_whole=False))
        shared = [(file.path, file.size) for file in own_files if file.is_whole]
        for folder in snapshot_folders(rows):
            shared += [(f"{folder}/{name}", -1) for name in walk(source.fs, f"{source.root}/{folder}")]
        for row in chunks:
            if not row.staged:
                shared += [(name, -1) for name in files_of(row.file_name)]
        self._share(own, shared, earlier)
        return int(lsn)

    def _copy_journal(self, folder: str, first: int) -> int:
        """Copy the journal's records from `first` on, up to the last that is durable; return its LSN."""
        return int(self._source.consensus.copy_to(folder, first))

    def _named_since(self, first: int, last: int, chunks: list[ChunkEntryRecord]) -> set[str]:
        """Return the files that records of the journal name, and the older copy of the manifest does not."""
        listed, files = {row.file_name for row in chunks}, set[str]()
        for lsn, body in self._source.consensus.records(first) if first <= last else ():
            if lsn > last:
                break
            files |= {file.file_name for file in references_of(body)} - listed
        return files

    def _finish_installations(self) -> None:
        """Open shards whose files are to be replaced by a snapshot: opening them does it."""
        source = self._source
        for info in source.port.tables():
            for shard, partition in enumerate(partitions_of(info)):
                if source.fs.exists(f"{source.root}/{describe(info, shard).folder}{INSTALL}"):
                    source.port.machine(partition)

    # -- files of this backup alone

    def _shards_with_files(self) -> dict[PartitionId, tuple[FileKeeping, Any]]:
        """Return the machines of kinds that keep files beside the manifest, also those of tables that were dropped.

        The manifest may name the files of these, and the journal, up to the drop, may have records for them.
        """
        source, shards = self._source, dict[PartitionId, tuple[FileKeeping, Any]]()
        for info in source.port.tables():
            kind = kind_named(info.kind, info.name)
            if isinstance(kind, FileKeeping):
                shards |= {partition: (kind, machine) for partition, machine in self._machines_of(info)}
        dropped = [(each.descriptor, each.machine) for each in source.dispatcher.dropped_in_use()]
        for descriptor, machine in (*dropped, *source.dropped.machines()):
            kind = kind_named(descriptor.kind, descriptor.name)
            if isinstance(kind, FileKeeping):
                shards[descriptor.partition] = kind, machine
        return shards

    def _machines_of(self, info: TableInfo) -> Iterator[tuple[PartitionId, Any]]:
        for partition in partitions_of(info):
            try:
                yield partition, self._source.port.machine(partition)
            except (NotFound, Closed):
                if self._source.port.table_by_id(info.table_id) is not None:
                    raise
                return  # it was dropped meanwhile

    def _spills(self) -> Iterable[str]:
        fs, root = self._source.fs, self._source.root
        folders = {FOLDER, *(info.storage_options.wal_dir for info in self._source.port.tables())}
        folders |= {descriptor.wal_dir for descriptor, _ in self._source.dropped.machines()}
        for folder in sorted(folders):
            for table in _names(fs, f"{root}/{folder}"):
                with suppress(NotADirectoryError, FileNotFoundError):
                    for name in fs.listdir(f"{root}/{folder}/{table}"):
                        if name.endswith(SPILL):
                            yield f"{folder}/{table}/{name}"

    def _copy_log(self, own: str, folder: str) -> None:
        """Copy the segments of a log to which nothing is appended. Opening it meanwhile may replace its last one."""
        fs, root = self._source.fs, self._source.root
        for left in reversed(range(ATTEMPTS)):
            names = [name for name in _names(fs, f"{root}/{folder}") if is_segment(name)]
            copied = len(self._files)
            try:
                for name in names:
                    self._copy_own(own, OwnFile(f"{folder}/{name}", -1, None, is_whole=False))
                return
            except FileNotFoundError:
                del self._files[copied:]
                if not left:
                    raise
                for name in _names(fs, f"{own}/{folder}"):
                    fs.unlink(f"{own}/{folder}/{name}")

    def _copy_own(self, own: str, file: OwnFile) -> None:
        target = f"{own}/{file.path}"
        self._make(parent(target))
        if file.content is not None:
            listed = self._copier.write(file.content, target)
        else:
            size = None if file.size < 0 else file.size
            listed = self._copier.copy(self._readable(file.path), target, size)
        self._add(BackedFile(file.path, *listed, shared=False))

    def _list_own(self, own: str, path: str) -> None:
        """List a file that was written into the backup's folder by others."""
        target = f"{own}/{path}"
        file = self._source.fs.open(target)
        size = file.size()
        file.close()
        checksum = self._copier.checksum(target, size)
        self._add(BackedFile(path, size, checksum, ends_of_file(self._source.fs, target, size), shared=False))

    # -- shared files

    def _share(self, own: str, files: list[tuple[str, int]], earlier: list[BackupListing]) -> None:
        """List files that never change, and copy those that no earlier backup has."""
        earlier_files = {file.path: file for listing in earlier for file in listing.files if file.shared}
        to_copy: list[tuple[str, int]] = []
        for path, size in files:
            listed = earlier_files.get(path)
            evicted = self._evicted(path)
            size = evicted.size if evicted is not None else self._size(path) if size < 0 else size
            if listed is not None and self._is_same(listed, size):
                self._files.append(listed)
            else:
                to_copy.append((path, size))
        total = sum(size for _, size in to_copy)
        self._copied = replace(
            self._copied, files_total=self._copied.files + len(to_copy), bytes_total=self._copied.bytes + total
        )
        self._report()
        for path, size in to_copy:
            if path in earlier_files:  # another file of this name: the earlier backup keeps its own
                self._copy_own(own, OwnFile(path, size, None, is_whole=False))
                continue
            target = f"{self._folder.root}/{SHARED}/{path}"
            self._make(parent(target))
            listed_as = self._copier.copy(self._readable(path), target, size)
            self._add(BackedFile(path, *listed_as, shared=True))
            if path.endswith(".idx"):
                self._verify(f"{self._folder.root}/{SHARED}/{path.removesuffix('.idx')}.sst")

    def _evicted(self, path: str) -> FileKey | None:
        """Return what the key of an evicted file says; None if the file is in the store's folder."""
        residency = self._residencies.get(path)
        if not isinstance(residency, Evicted) or self._source.fs.exists(f"{self._source.root}/{path}"):
            return None
        return parse_file_key(residency.object)

    def _readable(self, path: str) -> str:
        """Return where a file of the store can be read: in its folder, or as a copy from the archive."""
        if self._evicted(path) is None:
            return f"{self._source.root}/{path}"
        residency = self._residencies[path]
        assert isinstance(residency, Evicted)
        return self._source.archived.cached_object(residency.object, path)

    def _size(self, path: str) -> int:
        try:
            file = self._source.fs.open(f"{self._source.root}/{path}")
        except FileNotFoundError:
            raise CorruptionError(
                f"{self._source.root}/{path}", 0, "this file is listed in the manifest, and missing"
            ) from None
        try:
            return file.size()
        finally:
            file.close()

    def _is_same(self, listed: BackedFile, size: int) -> bool:
        """Whether the store's file is the one that an earlier backup listed, and the copy looks whole."""
        if listed.size != size:
            return False
        evicted = self._evicted(listed.path)
        here, copy = f"{self._source.root}/{listed.path}", f"{self._folder.root}/{SHARED}/{listed.path}"
        same = self._ends(here, size) == listed.ends if evicted is None else evicted.checksum == listed.checksum
        return same and listed.ends == self._ends(copy, size)

    def _ends(self, path: str, size: int) -> int | None:
        """Return the checksum of a file's ends; None if it is missing, has another size or cannot be read."""
        fs = self._source.fs
        try:
            file = fs.open(path)
            try:
                return ends_of(file, size) if file.size() == size else None
            finally:
                file.close()
        except FileNotFoundError:
            return None
        except OSError as error:
            unreadable(error, path)
            return None

    def _verify(self, path: str) -> None:
        """Raise `CorruptionError` if an sstable that was just copied is damaged, naming the store's file."""
        fs = self._source.fs
        if not fs.exists(path):
            return
        try:
            table = Sstable.open(path, fs=fs)
        except CorruptionError as error:
            raise self._damaged(error) from None
        damage = table.damaged_pages()
        table.close()
        if damage:
            raise self._damaged(damage[0])

    def _damaged(self, error: CorruptionError) -> CorruptionError:
        path = error.path.replace(f"{self._folder.root}/{SHARED}", self._source.root)
        return CorruptionError(path, error.offset, error.reason)

    # -- counting

    def _make(self, folder: str) -> None:
        if folder not in self._new_folders:
            make_dirs(self._source.fs, folder)
            self._new_folders.add(folder)

    def _add(self, file: BackedFile) -> None:
        self._files.append(file)
        copied = self._copied
        files, size = copied.files + 1, copied.bytes + file.size
        self._copied = CopyProgress(
            files=files,
            files_total=max(files, copied.files_total) if copied.files_total else 0,
            bytes=size,
            bytes_total=max(size, copied.bytes_total),
        )
        if copied.files_total:  # else a checkpoint waits
            self._report()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._copied)


def snapshot_folders(rows: ReadView) -> list[str]:
    """Return the folders of the partition snapshots that a manifest names, relative to the store."""
    return [
        f"{_chunk_dir(rows, key.db_id)}/{key.db_id}/{key.shard - SNAPSHOT_ROW}{SNAPSHOT}/{row.stored_lsn:020d}"
        for key, row in WAL_STATE.scan(rows)
        if SNAPSHOT_ROW <= key.shard < COMPANION
    ]


def _chunk_dir(rows: ReadView, db_id: int) -> str:
    descriptor = DB.get(rows, db_id)
    return FOLDER if descriptor is None else descriptor.options.chunk_dir


def _names(fs: FileSystem, folder: str) -> list[str]:
    try:
        return sorted(fs.listdir(folder))
    except FileNotFoundError:
        return []
