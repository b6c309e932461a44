"""Partition snapshots: copies of a partition's files at one LSN, and what they are for.

`save` copies a partition's files to a folder beside them and records that in the manifest. From then on the
partition's own log keeps every later entry, even a stored one (`SpillLog.floor`), and the journal keeps a record
until the snapshot or that log covers it. So `repair` can always replace damaged files: snapshot, partition log,
journal. A new snapshot lets the log shrink; a checkpoint takes one when the log is longer, or would refer to files.

`export` and `install` are for any source: chunks of files, then a header that is checked against this store's history.
An installation can be interrupted anywhere. Until its folder is sealed nothing has changed; after that, the next
opening of the partition finishes it (`finish_install`).
Order: files synced, header published, manifest committed, folders renamed, old files removed.

Thread: any, one at a time for a partition (`_busy`).
Invariants: (1) a snapshot that the manifest names is sealed. (2) an installed snapshot is followed by every later entry
of the partition, or the installation is refused. (3) the manifest's rows of a partition change in one transaction.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import msgspec
import xxhash

from penstock.archive.table_keys import key_number
from penstock.errors import CorruptionError, GateShut, Invalid, NotFound
from penstock.host import threads
from penstock.host.file_operations import remove_folder, rename_durably
from penstock.host.files import FileSystem
from penstock.journal.consensus import Consensus
from penstock.journal.partitions import PartitionId, table_of
from penstock.journal.record import REFERENCE
from penstock.lsm.maintenance import SNAPSHOT_ROW
from penstock.lsm.sstable import Sstable
from penstock.manifest.keys import ChunkKey, ComponentId, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import (
    BumpGeneration,
    DeleteChunk,
    DeleteWalState,
    ManifestOp,
    PutWalState,
    UpsertChunk,
)
from penstock.manifest.records import WalStateRecord
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.machine import PartitionContent, PartitionDescriptor
from penstock.partition.partition import Partition
from penstock.partition.snapshot_folder import (
    HEADER,
    PartitionSnapshotHeader,
    SnapshotChunk,
    SnapshotFile,
    SnapshotFolder,
    read_chunks,
)

logger = logging.getLogger(__name__)

SNAPSHOT = "-snapshot"  # behind the name of a shard's folder: its snapshots, each in a folder named by its LSN
INSTALL = "-install"  # what is being installed
LOG_BYTES_MIN = 64 << 20  # a log that is not longer is no reason for another snapshot
REPLACED = "-replaced"  # the folder that an installation replaced


class PartitionExport:
    """A partition's files, read chunk by chunk; the header is complete after the last one."""

    def __init__(
        self, fs: FileSystem, root: str, folder: str, content: PartitionContent, header: PartitionSnapshotHeader
    ) -> None:
        self._fs = fs
        self._root = root
        self._folder = f"{root}/{folder}"
        self._content = content
        self._header = header
        self._files: list[SnapshotFile] = []
        self.lsn = content.lsn

    def chunks(self) -> Iterator[SnapshotChunk]:
        """Yield all bytes, file by file."""
        self._files = []
        for name, size in self._content.files:
            digest = xxhash.xxh3_128()
            for chunk in read_chunks(self._fs, self._folder, name, size):
                digest.update(chunk.data)
                yield chunk
            self._files.append(SnapshotFile(name, size, digest.digest()))
        for name, data in self._content.copied:
            yield SnapshotChunk(name, 0, data)
            self._files.append(SnapshotFile(name, len(data), xxhash.xxh3_128(data).digest()))

    def check(self) -> None:
        """Read all files and compare them with their checksums; `CorruptionError` for the first damage."""
        table_id = table_of(PartitionId(self._header.partition))
        for _, row in self._content.chunks:
            path = f"{self._root}/{row.file_name}"
            try:
                table = Sstable.open(path, fs=self._fs, key=key_number(table_id, row.encrypted))
            except FileNotFoundError:
                raise CorruptionError(path, 0, "the manifest lists this file, and it is missing") from None
            try:
                for error in table.damaged_pages():
                    raise error
            finally:
                table.close()
        for path, reason in self._content.damaged():
            raise CorruptionError(path, 0, reason)

    @property
    def header(self) -> PartitionSnapshotHeader:
        """The header. Requires: all chunks were read."""
        return msgspec.structs.replace(self._header, files=tuple(self._files))


class PartitionSnapshots:
    """The snapshots of a store's partitions."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        consensus: Consensus,
        manifest: Manifest,
        *,
        fs: FileSystem,
        root: str,
        identity: bytes,
    ) -> None:
        self._dispatcher = dispatcher
        self._consensus = consensus
        self._manifest = manifest
        self._fs = fs
        self._root = root
        self._identity = identity
        self._lock = threads.lock("partition.snapshots")
        self._busy: set[int] = set()  # guarded by _lock
        self._held_off = 0  # guarded by _lock: backups that copy snapshots

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Take, remove and install no snapshot during a block; `GateShut` if one is being taken or installed."""
        with self._lock:
            if self._busy:
                raise GateShut("a snapshot of a shard is being taken or installed: try again later")
            self._held_off += 1
        try:
            yield
        finally:
            with self._lock:
                self._held_off -= 1

    @contextmanager
    def _alone(self, number: int) -> Iterator[None]:
        with self._lock:
            if self._held_off:
                raise GateShut("a backup is being made: try again when it has ended")
            if number in self._busy:
                raise GateShut("a snapshot of this shard is being taken or installed: try again later")
            self._busy.add(number)
        try:
            yield
        finally:
            self._busy.discard(number)

    # -- taking

    @contextmanager
    def export(self, partition: Partition) -> Iterator[PartitionExport]:
        """Store a partition's entries, and keep its files until the end of the block so that they can be read."""
        descriptor, machine = partition.descriptor, partition.machine
        with machine.exported() as content:
            with self._dispatcher.turn:
                self._dispatcher.finish()
                idle = machine.applied == content.lsn and not partition.late
                index = max(content.lsn, self._dispatcher.published) if idle else content.lsn
            header = PartitionSnapshotHeader(
                store=self._identity,
                partition=descriptor.partition,
                table=descriptor.name,
                kind=descriptor.kind,
                lsn=content.lsn,
                partition_index=content.partition_index,
                term=self._consensus.term(index) or 0,
                index=index,
                progress=content.progress,
                chunks=content.chunks,
                files=(),
            )
            yield PartitionExport(self._fs, self._root, descriptor.folder, content, header)

    def save(self, partition: Partition) -> PartitionSnapshotHeader:
        """Copy a partition's files, so that it can be repaired; an earlier snapshot is removed.

        `CorruptionError` if one of them is damaged: then an earlier snapshot stays, from which it can be repaired.
        """
        descriptor, spill = partition.descriptor, partition.spill
        with self._alone(descriptor.partition):
            self._installing(descriptor).remove()  # older than what is kept from now on: no opening may finish it
            before = spill.floor
            if before is None:
                spill.floor = 0  # first: from now on the log deletes nothing
                spill.floor = partition.machine.stored
            try:
                with self.export(partition) as export:
                    folder = self._saved(descriptor, export.lsn)
                    saved = folder.header() if before == export.lsn else None
                    if saved is not None and not list(folder.damaged()):
                        return saved  # nothing was written since: the only copy must not be removed first
                    export.check()  # before anything is removed: a damaged file must not replace a good copy
                    folder.remove()  # what an interrupted attempt left
                    for chunk in export.chunks():
                        folder.write(chunk)
                    header = export.header
                    folder.seal(header)
                self._commit(partition, header.lsn)
            except BaseException:
                row = self.row_of(descriptor)  # a commit whose outcome was unknown may have named the snapshot
                spill.floor = before if row is None else row.stored_lsn
                raise
            spill.floor = header.lsn
            self._remove_snapshots(descriptor, but=header.lsn)
            return header

    def _saved(self, descriptor: PartitionDescriptor, lsn: int) -> SnapshotFolder:
        return SnapshotFolder(self._fs, f"{self._root}/{descriptor.folder}{SNAPSHOT}/{lsn:020d}")

    def _installing(self, descriptor: PartitionDescriptor) -> SnapshotFolder:
        return SnapshotFolder(self._fs, f"{self._root}/{descriptor.folder}{INSTALL}")

    def _commit(self, partition: Partition, lsn: int) -> None:
        """Record a snapshot. Its row also says how far the log reaches: see `log_reaches`."""
        descriptor, upto = partition.descriptor, max(lsn, partition.spill.upto)
        self._manifest.apply([PutWalState(_row_key(descriptor), WalStateRecord(lsn, lsn, upto, upto))])
        if self._dispatcher.find_open(descriptor.partition) is not partition:  # dropped meanwhile: the row would stay
            self._manifest.apply([DeleteWalState(_row_key(descriptor))])
            raise NotFound(f"table {descriptor.name} was dropped")

    def discard(self, partition: Partition) -> None:
        """Remove a partition's snapshot: its log need not keep what is stored."""
        with self._alone(partition.descriptor.partition):
            self._installing(partition.descriptor).remove()
            self._manifest.apply([DeleteWalState(_row_key(partition.descriptor))])
            partition.spill.floor = None
            self._remove_snapshots(partition.descriptor)

    def _remove_snapshots(self, descriptor: PartitionDescriptor, but: int = 0) -> None:
        folder = f"{self._root}/{descriptor.folder}{SNAPSHOT}"
        for name in self._fs.listdir(folder) if self._fs.exists(folder) else ():
            if name != f"{but:020d}":
                SnapshotFolder(self._fs, f"{folder}/{name}").remove()

    def row_of(self, descriptor: PartitionDescriptor) -> WalStateRecord | None:
        """Return the row of a partition's snapshot: `stored_lsn` is where it was taken, `durable_lsn` its log's end."""
        return self._manifest.get_wal_state(_row_key(descriptor))

    def damaged(self, descriptor: PartitionDescriptor) -> list[CorruptionError]:
        """Read a partition's snapshot, if it has one; return what is damaged."""
        row = self.row_of(descriptor)
        return [] if row is None else list(self._saved(descriptor, row.stored_lsn).damaged())

    def log_reaches(self, descriptor: PartitionDescriptor, upto: int) -> list[ManifestOp]:
        """Return the operation that records how far the log of a partition with a snapshot reaches."""
        row = self.row_of(descriptor)
        if row is None:
            return []  # the snapshot is being taken
        lsn, upto = row.stored_lsn, max(row.stored_lsn, upto)
        return [PutWalState(_row_key(descriptor), WalStateRecord(lsn, lsn, upto, upto))]

    def log_bytes_max(self, descriptor: PartitionDescriptor, lsn: int) -> int:
        """Return how long the log may be before another snapshot is smaller than it."""
        header = self._saved(descriptor, lsn).header()
        return max(LOG_BYTES_MIN, 0 if header is None else sum(file.size for file in header.files))

    def is_repairable(self, number: PartitionId) -> bool:
        """Whether `repair` can restore a partition."""
        return self.row_of(self._dispatcher.describe(number)) is not None

    # -- installing

    def repair(self, number: PartitionId) -> PartitionSnapshotHeader:
        """Replace a partition's files by its own snapshot, and apply again all that was written since."""
        descriptor = self._dispatcher.describe(number)
        row = self.row_of(descriptor)
        if row is None:
            raise Invalid(
                f"shard {descriptor.shard} of {descriptor.name} has no snapshot: restore the store from a backup; "
                f"store.keep_snapshot({descriptor.name!r}) takes one for the next time"
            )
        folder = self._saved(descriptor, row.stored_lsn)
        return self.install(number, folder)

    def install(self, number: PartitionId, source: SnapshotFolder) -> PartitionSnapshotHeader:
        """Replace a partition's files by a snapshot; nothing changes if it does not fit this store."""
        descriptor = self._dispatcher.describe(number)
        with self._alone(number):
            header = source.header()
            if header is None:
                raise CorruptionError(source.path, 0, "this snapshot is missing or incomplete")
            self.check(header, descriptor)
            self._check_entries(header, descriptor)
            target = self._installing(descriptor)
            target.receive(source)
            self._dispatcher.replace(number, lambda: self.finish_install(descriptor))
            logger.warning(
                "shard %d of %s was restored from its snapshot at LSN %d, and what was written since was applied again",
                descriptor.shard,
                descriptor.name,
                header.lsn,
            )
            return header

    def check(self, header: PartitionSnapshotHeader, descriptor: PartitionDescriptor) -> None:
        """Raise `Invalid` if a snapshot is of another partition or history, or if entries after it are gone."""
        name, shard = descriptor.name, descriptor.shard
        if (header.store, header.partition, header.kind) != (self._identity, descriptor.partition, descriptor.kind):
            raise Invalid(f"this snapshot is of another store, table or shard, not of shard {shard} of {name}")
        if header.index > self._consensus.committed:
            raise Invalid(
                f"this snapshot was taken at record {header.index}, but the journal ends at "
                f"{self._consensus.committed}: it is of another history"
            )
        term = self._consensus.term(header.index)
        if term is not None and term != header.term:
            raise Invalid(
                f"this snapshot was taken at record {header.index} of term {header.term}, here it is of term {term}: "
                "it is of another history"
            )
        row, first = self.row_of(descriptor), self._consensus.first
        in_log = row is not None and row.stored_lsn <= header.lsn
        if not in_log and first > header.index + 1:
            raise Invalid(
                f"this snapshot was taken at record {header.index}, and later records of shard {shard} of {name}, "
                f"below {first}, are deleted: take a newer one"
            )
        folder = f"{descriptor.folder}/"
        for chunk_id, chunk in header.chunks:
            current = self._manifest.get_chunk(ChunkKey(descriptor.table_id, chunk_id))
            if current is not None and not current.file_name.startswith(folder):
                raise Invalid(f"chunk {chunk_id} of this snapshot is {current.file_name} here: export it anew")
            if not chunk.file_name.startswith(folder):
                raise Invalid(f"chunk {chunk_id} of this snapshot is {chunk.file_name}, outside {folder}")

    def _check_entries(self, header: PartitionSnapshotHeader, descriptor: PartitionDescriptor) -> None:
        """Raise `Invalid` if a later entry refers to files: these are merged into others, or go with the folder."""
        number = descriptor.partition
        partition = self._dispatcher.find_open(number)
        spilled = () if partition is None else partition.spill.entries(header.lsn)
        for entry in chain(self._dispatcher.entries_after(number, header.lsn), spilled):
            if any(section.header.form == REFERENCE for section in entry.sections):
                raise Invalid(
                    f"shard {descriptor.shard} of {descriptor.name} was loaded from files after its snapshot (record "
                    f"{entry.lsn}): restore the store from a backup"
                )

    def finish_install(self, descriptor: PartitionDescriptor) -> None:
        """Finish an installation whose folder is sealed, if there is one. Requires: the partition is not open."""
        folder = f"{self._root}/{descriptor.folder}"
        installed = SnapshotFolder(self._fs, folder + INSTALL)
        header = installed.header()
        if header is not None:
            self._manifest.apply(self._operations(header, descriptor))
            if self._fs.exists(folder):
                remove_folder(self._fs, folder + REPLACED)
                rename_durably(self._fs, folder, folder + REPLACED)
            rename_durably(self._fs, folder + INSTALL, folder)
        if self._fs.exists(f"{folder}/{HEADER}"):
            remove_folder(self._fs, folder + REPLACED)
            self._fs.unlink(f"{folder}/{HEADER}")

    def _operations(self, header: PartitionSnapshotHeader, descriptor: PartitionDescriptor) -> list[ManifestOp]:
        """Return the operations that list a snapshot's files instead of the partition's."""
        table, generation = descriptor.table_id, 1 + self._manifest.generation(ComponentId.MANIFEST)
        listed = {chunk_id for chunk_id, _ in header.chunks}
        operations: list[ManifestOp] = [
            DeleteChunk(key)
            for key, row in self._manifest.scan_chunks(table)
            if row.file_name.startswith(f"{descriptor.folder}/") and key.chunk_id not in listed
        ]
        for chunk_id, chunk in header.chunks:
            row = msgspec.structs.replace(chunk, generation=generation)
            operations.append(UpsertChunk(ChunkKey(table, chunk_id), row, replaces=True))
        for number, state in header.progress:
            key = WalStateKey(table, number + descriptor.shard)
            operations.append(PutWalState(key, state, replaces=True))
        operations.append(BumpGeneration(ComponentId.MANIFEST, 1))
        return operations


def _row_key(descriptor: PartitionDescriptor) -> WalStateKey:
    return WalStateKey(descriptor.table_id, SNAPSHOT_ROW + descriptor.shard)
