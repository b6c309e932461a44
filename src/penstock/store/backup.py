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

from penstock.errors import Closed, CorruptionError, Invalid, NotFound, StoreLocked
from penstock.host.clock import Clock
from penstock.host.file_operations import make_dirs, walk
from penstock.host.files import FileSystem
from penstock.host.paths import absolute, parent, path_text
from penstock.journal.consensus import Consensus
from penstock.kinds import FileKeeping, OwnFile, partitions_of
from penstock.log.chain import is_segment
from penstock.lsm.collection import Collector
from penstock.lsm.maintenance import COMPANION, KEPT
from penstock.lsm.sstable import Sstable
from penstock.manifest.engine import ReadView
from penstock.manifest.manifest import Manifest
from penstock.manifest.tables import CHUNKS, WAL_STATE
from penstock.partition.aside import FOLDER as ASIDE
from penstock.partition.aside import AsideLog
from penstock.partition.checkpoint import Checkpoint
from penstock.partition.ledger import TableInfo
from penstock.partition.reference import files_of
from penstock.partition.snapshots import INSTALL, SNAPSHOT, PartitionSnapshots
from penstock.registry import kind_named
from penstock.store.backup_folder import (
    SHARED,
    VERSION,
    BackedFile,
    BackupFolder,
    BackupListing,
    Copier,
    CopyProgress,
    Progress,
    ends_of_file,
)
from penstock.store.dropped import SPILL, DroppedShards
from penstock.store.port import LocalPort

WAIT_S = 60.0  # for a checkpoint or a removal of files that is under way
ATTEMPTS = 5  # to copy a spill whose shard is opened meanwhile


@dataclass(frozen=True, kw_only=True)
class BackupReport:
    """A backup that was made.

    >>> store.backup("backups").number, store.backup("backups").number
    (1, 2)
    """

    number: int
    lsn: int  # it holds everything up to here, in every table
    files: int
    bytes: int
    files_copied: int  # the others are shared with earlier backups
    bytes_copied: int


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
    port: LocalPort


class Backup:
    """One backup that is being made."""

    def __init__(
        self, source: BackupSource, target: str, *, progress: Progress | None, stop: Callable[[], bool]
    ) -> None:
        self._source = source
        self._folder = BackupFolder(source.fs, target)
        self._copier = Copier(source.fs, stop)
        self._progress = progress
        self._made: set[str] = set()  # folders
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
            folder.prepare(source.uuid.hex())
            earlier = folder.listings()
            number = folder.begin(earlier)
            self._finish_installations()
            with source.snapshots.held_off(), source.collector.readers.holding(source.fs):
                source.collector.await_end(WAIT_S)
                source.dropped.await_end(WAIT_S)
                lsn = self._copy_all(folder.own(number), earlier)
            listing = BackupListing(
                VERSION, number, source.uuid.hex(), source.identity.hex(), lsn, source.clock.time_us(), self._files
            )
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
            rows = source.manifest.copy_to(f"{own}/manifest")
            self._list_own(own, "manifest")
            kept = list(self._kept_files())
            with source.aside.unchanged:
                self._copy_log(own, ASIDE)
            for folder in self._spills():
                self._copy_log(own, folder)
            self._make(f"{own}/journal")
            lsn = source.consensus.copy_to(f"{own}/journal", source.checkpoint.needed_from())
            for name in source.fs.listdir(f"{own}/journal"):
                self._list_own(own, f"journal/{name}")
        for file in kept:
            if not file.is_whole:
                self._copy_own(own, file)
        chunks = [row for _, row in CHUNKS.scan(rows)]
        for row in chunks:
            if row.staged:  # not adopted: it may be unfinished, or discarded meanwhile
                for name in files_of(row.file_name):
                    with suppress(FileNotFoundError):
                        self._copy_own(own, OwnFile(name, -1, None, is_whole=False))
        shared = [(file.path, file.size) for file in kept if file.is_whole]
        for folder in snapshot_folders(rows):
            shared += [(f"{folder}/{name}", -1) for name in walk(source.fs, f"{source.root}/{folder}")]
        for row in chunks:
            if not row.staged:
                shared += [(name, -1) for name in files_of(row.file_name)]
        self._share(own, shared, earlier)
        return int(lsn)

    def _finish_installations(self) -> None:
        """Open shards whose files are to be replaced by a snapshot: opening them does it."""
        source = self._source
        for info in source.port.tables():
            for shard, partition in enumerate(partitions_of(info)):
                if source.fs.exists(f"{source.root}/tables/{info.table_id}/{shard}{INSTALL}"):
                    source.port.machine(partition)

    # -- files of this backup alone

    def _kept_files(self) -> Iterator[OwnFile]:
        """Yield the files that kinds keep beside the manifest. A table that is dropped meanwhile has none."""
        port = self._source.port
        for info in port.tables():
            kind = kind_named(info.kind, info.name)
            if isinstance(kind, FileKeeping):
                yield from self._kept_by(kind, info)

    def _kept_by(self, kind: FileKeeping, info: TableInfo) -> list[OwnFile]:
        files: list[OwnFile] = []
        try:
            for partition in partitions_of(info):
                files += kind.own_files(self._source.port.machine(partition))
        except (NotFound, Closed):
            if self._source.port.table_by_id(info.table_id) is not None:
                raise
            return []
        return files

    def _spills(self) -> Iterable[str]:
        fs, root = self._source.fs, self._source.root
        for table in fs.listdir(f"{root}/tables"):
            with suppress(NotADirectoryError, FileNotFoundError):
                for name in fs.listdir(f"{root}/tables/{table}"):
                    if name.endswith(SPILL):
                        yield f"tables/{table}/{name}"

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
            listed = self._copier.copy(f"{self._source.root}/{file.path}", target, size)
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

    def _share(self, own: str, wanted: list[tuple[str, int]], earlier: list[BackupListing]) -> None:
        """List files that never change, and copy those that no earlier backup has."""
        known = {file.path: file for listing in earlier for file in listing.files if file.shared}
        to_copy: list[tuple[str, int]] = []
        for path, size in wanted:
            listed = known.get(path)
            size = self._size(path) if size < 0 else size
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
            if path in known:  # another file of this name: the earlier backup keeps its own
                self._copy_own(own, OwnFile(path, size, None, is_whole=False))
                continue
            target = f"{self._folder.root}/{SHARED}/{path}"
            self._make(parent(target))
            listed_as = self._copier.copy(f"{self._source.root}/{path}", target, size)
            self._add(BackedFile(path, *listed_as, shared=True))
            if path.endswith(".idx"):
                self._verify(f"{self._folder.root}/{SHARED}/{path.removesuffix('.idx')}.sst")

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
        fs = self._source.fs
        copy = f"{self._folder.root}/{SHARED}/{listed.path}"
        return (
            listed.size == size
            and fs.exists(copy)
            and listed.ends == ends_of_file(fs, f"{self._source.root}/{listed.path}", size)
        )

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
        if folder not in self._made:
            make_dirs(self._source.fs, folder)
            self._made.add(folder)

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
        f"tables/{key.db_id}/{key.shard - KEPT}{SNAPSHOT}/{row.stored_lsn:020d}"
        for key, row in WAL_STATE.scan(rows)
        if KEPT <= key.shard < COMPANION
    ]


def _names(fs: FileSystem, folder: str) -> list[str]:
    try:
        return sorted(fs.listdir(folder))
    except FileNotFoundError:
        return []


def check_target(target: object, root: str) -> str:
    """Return the absolute path of a folder for backups; `Invalid` if it is inside the store's, or around it."""
    folder, store = absolute(path_text(target)), absolute(root)
    for inner, outer in ((folder, store), (store, folder)):
        if f"{inner}/".startswith(f"{outer.rstrip('/')}/"):
            raise Invalid(f"{folder} is not beside the store {store}: give a folder elsewhere, best on another disk")
    return folder
