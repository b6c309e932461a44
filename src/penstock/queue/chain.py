"""The data files of a queue and its manifest: appending, rolling to a new file, repair after a crash, removal.

Thread: the queue's writer.
Invariants: (1) a manifest is written after all that it says of data files is durable, and a file is unlinked after a
manifest without it. (2) the active file is the one the manifest names, never the newest in a listing. (3) after an
unclean end or a failure the active file is never written again: a new file continues at the last trusted position.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.arguments import SIZE_MAX, set_wholes
from penstock.errors import CorruptionError, DiskFull, Invalid
from penstock.host.file_errors import is_disk_full
from penstock.host.file_operations import make_dirs, remove_file
from penstock.host.files import FileSystem
from penstock.host.randomness import Random
from penstock.kinds import OwnFile
from penstock.log.record import Record
from penstock.queue.coding import PREFIX
from penstock.queue.files import (
    KIND_TRIM,
    OPENING_BYTES,
    VERSION,
    VERSION_OF_SHARD,
    DataReader,
    DataWriter,
    FileIndex,
    FilePosition,
    Opening,
    shard_identity,
)
from penstock.queue.qmft import (
    ActiveFileState,
    FileEntry,
    FileTable,
    QmftManifest,
    QmftWriter,
    data_files,
)
from penstock.queue.tail import scan_tail

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class QueueSettings:
    """Sizes of a queue's files.

    >>> settings = penstock.StoreSettings(kinds=(penstock.QueueSettings(file_bytes=16 << 20),))
    """

    file_bytes: int = 64 << 20  # a file is rolled before it would grow past this
    file_age_us: int = 3_600_000_000  # or when its first message is older than this, by record time
    allocate_bytes: int = 256 << 10  # zero-filled space allocated ahead for small appends
    index_bytes: int = 64 << 10  # bytes between two entries of a file's index

    def __post_init__(self) -> None:
        set_wholes(self, ("file_bytes", "allocate_bytes", "index_bytes"), 1, SIZE_MAX)
        set_wholes(self, ["file_age_us"], 1)
        if self.file_bytes < max(self.index_bytes, self.allocate_bytes):
            raise Invalid("file_bytes must be at least index_bytes and allocate_bytes")


@dataclass(frozen=True, slots=True)
class QueueRepair:
    """What opening found at the end of a queue that was not closed."""

    path: str
    offset: int
    record_count: int  # records that were not known to be synced, and now are
    torn: str | None  # why the bytes after them are unreadable; None if nothing was written there


class FileChain:
    """Sealed files, the active one, and the manifest that names them."""

    def __init__(
        self,
        fs: FileSystem,
        folder: str,
        *,
        random: Random,
        settings: QueueSettings,
        identity: bytes,
        of_shard: bool = False,
    ) -> None:
        self._fs = fs
        self._folder = folder
        self._random = random
        self._settings = settings
        self._identity = identity
        self._of_shard = of_shard  # in a store; the folder of a standalone queue may have any name, and be renamed
        self._manifests = QmftWriter(fs, folder)
        self._manifest = QmftManifest.fresh()  # the last one that was written
        self._file_sequence = 0  # the highest ever used, also by failed attempts
        self._day = ""  # the folder of the day, once it is durable
        self._obsolete: list[str] = []  # no longer listed, to be unlinked
        self._not_unlinked: list[str] = []  # the same, but unlinking failed
        self.active: DataWriter | None = None  # None: there is no data file yet
        self._following: DataWriter | None = None  # the file that is about to become active
        self.synced = FilePosition(0, 1, 0, 0)  # the active file is durable up to here

    @property
    def sealed(self) -> FileTable:
        return self._manifest.files

    @property
    def position(self) -> FilePosition:
        """The position of the next record."""
        return self.synced if self.active is None else self.active.position

    def manifest_files(self) -> tuple[tuple[str, bytes], ...]:
        """Return the names and bytes of the manifest's files."""
        return self._manifests.files()

    # -- opening

    def open(self, cut_after_lsn: int | None) -> QueueRepair | None:
        """Open or create the files; return what was repaired after an unclean end."""
        manifest = self._manifests.read_latest()
        if manifest is None:
            make_dirs(self._fs, self._folder)
            self._manifests.write(self._manifest)  # before any data file
            return None
        self._manifests.secure_pointer()
        self._manifest = manifest
        active = manifest.active_file
        self._file_sequence = active.file_sequence
        if not active.path:
            return None
        try:
            reader = DataReader.open(self._fs, self._folder, active.path, self._identity)
        except FileNotFoundError:
            raise CorruptionError(f"{self._folder}/{active.path}", 0, "the active data file is missing") from None
        try:
            position, index = reader.position_at(active.write_position)
            if position.next_sequence != manifest.next_sequence or reader.opening.file_sequence != active.file_sequence:
                raise CorruptionError(reader.file.path, position.offset, "this is not the file the manifest describes")
            if reader.file.size() != position.offset:
                return self._repair(reader, position, cut_after_lsn)
        finally:
            reader.file.close()
        # It ends where the manifest says: it was closed, or nothing was written after that position.
        self._adopt(reader, position, index)
        return None

    def _adopt(self, reader: DataReader, position: FilePosition, index: FileIndex | None) -> None:
        sizes = self._settings
        index = index or FileIndex(sizes.index_bytes)
        index.every_bytes = sizes.index_bytes
        file = self._fs.open(reader.file.path, write=True)
        path = self._manifest.active_file.path
        self.active = DataWriter(file, reader.opening, position, index, allocate_bytes=sizes.allocate_bytes, path=path)
        self.synced = position

    def _repair(self, reader: DataReader, position: FilePosition, cut_after_lsn: int | None) -> QueueRepair:
        """Continue after an unclean end in a new file: it is unknown which bytes of the old one are durable."""
        tail = scan_tail(reader, position, cut_after_lsn)
        if tail.torn is not None:
            logger.warning("%s: torn tail dropped at byte %d (%s)", reader.file.path, tail.end, tail.torn)
        time = max(tail.trusted.last_time_us, reader.opening.time_us)
        trusted, copied = tail.trusted, tail.unsynced
        if trusted.next_sequence == reader.opening.first:  # only trims: the manifest cannot list it, so they move on
            records = (record for _, record in reader.records(OPENING_BYTES, trusted.offset))
            copied = [*(record for record in records if record.kind == KIND_TRIM), *copied]
            trusted = reader.opening.position
        if copied:
            time = PREFIX.unpack_from(copied[0].body)[1]
        self.continue_in_new_file(trusted, copied, time)
        return QueueRepair(reader.file.path, tail.end, len(tail.unsynced), tail.torn)

    def recover(self) -> None:
        """Continue after a failure, from the last good sync."""
        self._manifests.secure_pointer()
        if self.active is not None:
            self.continue_in_new_file(self.synced, (), max(self.synced.last_time_us, self.active.opening.time_us))

    # -- one file after another

    def file_for(self, size: int, time_us: int) -> DataWriter:
        """Return the file for a record of this size and time; roll to a new one if the active file is full or old."""
        file, settings = self.active, self._settings
        if file is None:
            return self.continue_in_new_file(self.synced, (), time_us)
        full = bool(file.messages) and file.position.offset + size > settings.file_bytes
        # A file that has trims and no messages stays active: no manifest could list it.
        old = time_us - file.opening.time_us >= settings.file_age_us and (bool(file.messages) or file.is_empty)
        return self.roll(time_us) if full or old else file

    def sync(self) -> None:
        file = self.active
        if file is not None and self.synced != file.position:
            file.file.fdatasync()
            self.synced = file.position

    def roll(self, time_us: int) -> DataWriter:
        """Finish the active file and begin another."""
        file = self.active
        assert file is not None
        following = self._create(file.position, (), time_us)  # first: if the disk is full, nothing has changed yet
        self.sync()  # before the index record: it claims that all before it is synced
        file.finish()
        self.synced = file.position
        return self._install(following, file.position)

    def continue_in_new_file(self, trusted: FilePosition, tail: Sequence[Record], time_us: int) -> DataWriter:
        """Continue in a new file, which begins with `tail`, after the last trusted position of the active one."""
        return self._install(self._create(trusted, tail, time_us), trusted)

    def _create(self, position: FilePosition, tail: Sequence[Record], time_us: int) -> DataWriter:
        opening = self._next_opening(position, time_us)
        while self._fs.exists(path := f"{self._folder}/{opening.path}") and not remove_file(self._fs, path):
            opening = self._next_opening(position, time_us)  # a leftover of a failed attempt that cannot be removed
        try:
            self._make_day(opening.path.rpartition("/")[0])
        except OSError as error:
            if is_disk_full(error):
                raise DiskFull(f"{self._folder} has no room for a folder: free some space, then retry") from error
            raise
        sizes = self._settings
        return DataWriter.create(
            self._fs, self._folder, opening, tail, allocate_bytes=sizes.allocate_bytes, every=sizes.index_bytes
        )

    def _next_opening(self, position: FilePosition, time_us: int) -> Opening:
        self._file_sequence += 1
        return Opening(
            file_sequence=self._file_sequence,
            first=position.next_sequence,
            last_lsn=position.last_lsn,
            last_time_us=position.last_time_us,
            time_us=time_us,
            salt=int.from_bytes(self._random.randbytes(4), "little"),
            identity=shard_identity(self._identity, self._folder) if self._of_shard else self._identity,
            version=VERSION_OF_SHARD if self._of_shard else VERSION,
        )

    def _make_day(self, day: str) -> None:
        if day == self._day:
            return
        above = self._folder
        for part in day.split("/"):
            self._fs.mkdir(f"{above}/{part}")
            self._fs.fsync_dir(above)  # even if it existed: its creator may have died before this
            above = f"{above}/{part}"
        self._day = day

    def _install(self, file: DataWriter, end: FilePosition) -> DataWriter:
        """Make a new file the active one. The old one ends at `end`, and is durable up to there."""
        old, files = self._manifest.active_file, self._manifest.files
        first = self._manifest.next_sequence - old.message_count
        if old.path and end.next_sequence > first:
            files = files.with_file(FileEntry(old.path, first, end.next_sequence - 1, end.offset))
        self._following = file
        self._name_active(file, files)
        self.take_over()
        if old.path and end.next_sequence == first:
            self._obsolete.append(old.path)  # it holds no messages
        return file

    def take_over(self) -> None:
        """Switch to the file that the manifest names: an interrupt may have come right after it was named."""
        file, old = self._following, self.active
        if file is None:
            return
        if file.path == self._manifest.active_file.path:
            self.active, self.synced = file, file.position
            if old is not None and old is not file:
                old.file.close()
        self._following = None

    def _name_active(self, file: DataWriter, files: FileTable) -> None:
        """Write a manifest with this active file. Requires: the file is synced up to its position."""
        position = file.position
        active = ActiveFileState(file.opening.file_sequence, position.offset, file.messages, file.path)
        self._write(QmftManifest(position.next_sequence, active, files))

    def _write(self, manifest: QmftManifest) -> None:
        self._manifests.write(manifest)
        self._manifest = manifest

    def finish(self) -> None:
        """Finish the active file, so that the next opening need not scan it. Requires: it is synced."""
        file = self.active
        if file is not None:
            file.finish()
            if file.position.offset != self._manifest.active_file.write_position:
                self._name_active(file, self._manifest.files)

    def close(self) -> None:
        if self.active is not None:
            self.active.file.close()

    # -- removing files

    def drop_oldest(self, count: int) -> None:
        """Remove the oldest sealed files from the manifest. `unlink_obsolete` unlinks them."""
        manifest = self._manifest
        paths = [*self._not_unlinked, *(manifest.files[index].path for index in range(count))]
        self._write(QmftManifest(manifest.next_sequence, manifest.active_file, manifest.files.without_oldest(count)))
        self._not_unlinked = []
        self._obsolete += paths

    def unlink_obsolete(self) -> None:
        """Unlink files that are no longer listed. One that cannot be unlinked is retried after the next drop."""
        obsolete, self._obsolete = self._obsolete, []
        self._not_unlinked += [path for path in obsolete if not remove_file(self._fs, f"{self._folder}/{path}")]
        for folder in {path.rpartition("/")[0] for path in obsolete}:
            with suppress(OSError):  # it is not empty
                while folder:
                    self._fs.rmdir(f"{self._folder}/{folder}")
                    self._day = ""
                    folder = folder.rpartition("/")[0]

    def own_files(self) -> list[OwnFile]:
        """Return the synced files, and the manifest that names them."""
        files = [
            *(OwnFile(name, len(data), data, is_whole=False) for name, data in self.manifest_files()),
            *(OwnFile(entry.path, entry.size, None, is_whole=True) for entry in self._manifest.files),
        ]
        if (active := self.active) is not None:
            end = self.synced.offset
            # One without messages is unlinked as soon as another takes its place.
            content = None if active.messages else active.file.pread(end, 0)
            files.append(OwnFile(active.path, end, content, is_whole=False))
        return files

    def collect(self) -> int:
        """Unlink every data file that the manifest does not list; return how many. Lists every folder."""
        listed = {self._manifest.active_file.path, *(entry.path for entry in self._manifest.files)}
        self._obsolete = [path for path in data_files(self._fs, self._folder) if path not in listed]
        count = len(self._obsolete)
        self.unlink_obsolete()
        return count
