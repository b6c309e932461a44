"""An archive run: the store as of one LSN, in the archive. `reattach` makes a store of it again.

It is a backup (see `backup` for the order of the copies) whose files are objects. What changes, the manifest and the
journal above all, is copied to a folder first and uploaded from there. Sstables that are in the archive already are
named, not copied.

Thread: any; one run of a store at a time.
Invariants: (1) a listing names only objects that were read back. (2) it is created last, and never replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import google_crc32c
import msgspec

from penstock.archive.objects import FILES, INDEX, LISTING, RUNS, ObjectStore
from penstock.archive.transfer import check_object, file_checksum, put_file, upload, verify_object, where
from penstock.errors import CorruptionError, Invalid, UnsupportedVersion
from penstock.host.file_operations import make_dirs, remove_folder
from penstock.manifest.records import ChunkEntryRecord, Evicted, RemoteArchived
from penstock.store.archive_settings import ArchiveReport
from penstock.store.backup import WAIT_S, Backup, BackupSource
from penstock.store.backup_folder import BackupListing

VERSION = 1
STAGING = "archive-run"  # the folder of a run's own files until they are uploaded, in the store's
LISTING_BYTES_MAX = 1 << 30
_SUM_BYTES = len(b'\n{"crc32c":"00000000"}\n')


class ArchivedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a run."""

    path: str  # in the store
    size: int
    checksum: int  # CRC32C
    ends: int  # CRC32C of its first and last 64 KiB
    object: str


class RunListing(msgspec.Struct, frozen=True):
    """A whole run."""

    version: int
    number: int
    store: str  # the UUID, as hex digits
    identity: str  # what the store's files carry
    lsn: int  # the run holds everything up to here, in every table
    time_us: int  # when it was made, by the store's clock
    files: list[ArchivedFile]
    chunks: list[str]  # the objects of sstables that rows of the run's manifest name

    def objects(self) -> Iterator[str]:
        """Iterate over the keys that this run needs."""
        for file in self.files:
            yield file.object
        for key in self.chunks:
            yield key
            yield key + INDEX


def run_prefix(store: str, number: int) -> str:
    """Return the prefix of a run's own objects."""
    return f"{store}/{RUNS}/{number:08d}"


def run_numbers(objects: ObjectStore, store: str) -> dict[int, bool]:
    """Return the numbers of all runs, ascending, and whether each is whole."""
    runs: dict[int, bool] = {}
    for each in objects.listed(f"{store}/{RUNS}"):
        number, _, path = each.key.removeprefix(f"{store}/{RUNS}/").partition("/")
        if number.isdecimal():
            runs[int(number)] = runs.get(int(number), False) or path == LISTING
    return dict(sorted(runs.items()))


def read_listing(objects: ObjectStore, store: str, number: int) -> RunListing:
    """Return a whole run; `CorruptionError` if its listing is damaged."""
    key = f"{run_prefix(store, number)}/{LISTING}"
    size = objects.size(key)
    if size is None:
        raise CorruptionError(where(objects, key), 0, "this object is missing")
    data = objects.read(key, 0, min(size, LISTING_BYTES_MAX))
    body = data[:-_SUM_BYTES]
    if data[-_SUM_BYTES:] != _checksum_line(body):
        raise CorruptionError(where(objects, key), 0, "its checksum does not match")
    try:
        version = msgspec.json.decode(body, type=dict).get("version")
        if version != VERSION:
            raise UnsupportedVersion(f"{where(objects, key)} has version {version}: use a newer Penstock")
        listing = msgspec.json.decode(body, type=RunListing)
    except msgspec.DecodeError as error:
        raise CorruptionError(where(objects, key), 0, f"it does not decode ({error})") from None
    if (listing.store, listing.number) != (store, number):
        raise CorruptionError(where(objects, key), 0, "it is the list of another run")
    return listing


def _checksum_line(body: bytes) -> bytes:
    return b'\n{"crc32c":"%08x"}\n' % google_crc32c.value(body)


class ArchiveRun(Backup):
    """One run that is being made."""

    def __init__(self, source: BackupSource, objects: ObjectStore, stop: Callable[[], bool]) -> None:
        self._staging = f"{source.root}/{STAGING}"
        super().__init__(source, self._staging, progress=None, stop=stop)
        self._objects = objects
        self._stop = stop
        self._store = source.uuid.hex()
        self._earlier_files: dict[str, ArchivedFile] = {}  # files of the run before whose objects are there, by path
        self._listed: list[ArchivedFile] = []
        self._keys: list[str] = []
        self._uploaded = [0, 0]  # files and bytes

    def upload(self, number: int, before: RunListing | None) -> ArchiveReport:
        """Make the run `number`; `before` is the newest whole one."""
        source = self._source
        there = {(each.key, each.size) for each in self._objects.listed(f"{self._store}/{FILES}")}
        files = () if before is None else before.files
        self._earlier_files = {file.path: file for file in files if (file.object, file.size) in there}
        remove_folder(source.fs, self._staging)
        make_dirs(source.fs, self._staging)
        try:
            self._finish_installations()
            with source.snapshots.held_off(), source.collector.readers.holding(source.fs):
                source.collector.await_end(WAIT_S)
                source.dropped.await_end(WAIT_S)
                lsn = self._copy_all(self._staging, [])
            self._upload_own(number)
        finally:
            remove_folder(source.fs, self._staging)
        listing = RunListing(
            VERSION, number, self._store, source.identity.hex(), lsn, source.clock.time_us(), self._listed, self._keys
        )
        self._publish(listing)
        size = sum(file.size for file in self._listed)
        return ArchiveReport(
            number=number,
            lsn=lsn,
            files=len(self._listed) + len(self._keys),
            bytes=size,
            files_uploaded=self._uploaded[0],
            bytes_uploaded=self._uploaded[1],
        )

    def _share(self, own: str, files: list[tuple[str, int]], earlier: list[BackupListing]) -> None:
        """List files that never change: as objects that the archive has, or uploaded now."""
        rows = {row.file_name: row for row in self._chunks}
        keys = {name: key for name, row in rows.items() if (key := _verified(row)) is not None}
        for path, size in files:
            if path in keys:
                self._keys.append(keys[path])
                continue
            size = self._size(path) if size < 0 else size
            file = self._earlier_files.get(path)
            key = keys.get(path.removesuffix(INDEX) + ".sst")
            if file is not None and (key is None or file.object == key + INDEX) and self._is_unchanged(file, size):
                self._listed.append(file)
            elif key is not None:
                size, checksum = file_checksum(self._source.fs, f"{self._source.root}/{path}", self._stop)
                self._list(path, size, checksum, key + INDEX)
            else:
                self._upload_shared(path)

    def _is_unchanged(self, file: ArchivedFile, size: int) -> bool:
        here = f"{self._source.root}/{file.path}"
        return file.size == size and self._ends(here, size) == file.ends

    def _upload_shared(self, path: str) -> None:
        source = self._source
        key = upload(source.fs, self._objects, source.root, path, self._store, self._stop)
        verify_object(self._objects, key, self._stop)
        size, checksum = file_checksum(source.fs, f"{source.root}/{path}", self._stop)
        self._list(path, size, checksum, key)
        self._count(size)

    def _list(self, path: str, size: int, checksum: int, key: str) -> None:
        ends = self._ends(f"{self._source.root}/{path}", size)
        self._listed.append(ArchivedFile(path, size, checksum, ends or 0, key))

    def _upload_own(self, number: int) -> None:
        """Upload the files of this run alone. Objects of an attempt that ended early were deleted before."""
        for file in self._files:
            key = f"{run_prefix(self._store, number)}/{file.path}"
            put_file(self._source.fs, self._objects, f"{self._staging}/{file.path}", key)
            check_object(self._objects, key, file.size, file.checksum, self._stop)
            self._listed.append(ArchivedFile(file.path, file.size, file.checksum, file.ends, key))
            self._count(file.size)

    def _publish(self, listing: RunListing) -> None:
        body = msgspec.json.encode(listing)
        data, key = body + _checksum_line(body), f"{run_prefix(self._store, listing.number)}/{LISTING}"
        if not self._objects.put_new(key, data) and self._objects.read(key, 0, len(data) + 1) != data:
            raise Invalid(
                f"{where(self._objects, key)} was written by another process: two copies of one store must not share "
                "an archive; make copies with backup and restore"
            )
        if self._objects.read(key, 0, len(data) + 1) != data:
            raise CorruptionError(where(self._objects, key), 0, "it was not stored as it was written")
        self._count(len(data))

    def _count(self, size: int) -> None:
        self._uploaded[0] += 1
        self._uploaded[1] += size


def _verified(row: ChunkEntryRecord) -> str | None:
    match row.residency:
        case Evicted(object=key) | RemoteArchived(object=key, verified=True):
            return None if row.staged else key
    return None
