"""A folder of backups of one store: what stands where, and how a backup becomes whole.

    BACKUPS             which store this is: format version and UUID
    files/<path>        files that never change, by their path in the store; every backup that lists one shares it
    <number>/<path>     files of one backup alone
    <number>/LISTING    every file of that backup, with size and checksum; written last, by a rename

A backup without a LISTING is not whole: it is ignored, and removed by the next backup. docs/format/backup.md gives the
bytes.

Thread: one; a lock on the folder keeps other backups out.
Invariants: (1) a LISTING names only files that are whole and durable. (2) a file that a LISTING names does not change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import google_crc32c
import msgspec

from penstock.arguments import in_short
from penstock.errors import Closed, CorruptionError, DiskFull, Invalid, NotFound, PenstockError, UnsupportedVersion
from penstock.host.file_errors import is_disk_full
from penstock.host.file_operations import make_dirs, publish, remove_file, remove_folder, walk
from penstock.host.files import File, FileSystem
from penstock.host.paths import parent

VERSION = 1
MARKER, LISTING, SHARED = "BACKUPS", "LISTING", "files"
COPY_BYTES = 256 << 10  # above 1 MiB each read would get fresh pages from the system: half the rate
ENDS_BYTES = 64 << 10
_NUMBER = re.compile(r"[0-9]{6}")
_PATH = re.compile(r"[a-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_CHECKSUM = re.compile(rb'\n{"crc32c":"([0-9a-f]{8})"}\n')
NUMBER_MAX = 999_999

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CopyProgress:
    """How far a backup, a restore or a check is; given to `progress=` after every file.

    >>> done = []
    >>> report = store.backup("backups", progress=done.append)
    >>> done[-1].files == done[-1].files_total
    True
    """

    files: int
    files_total: int
    bytes: int
    bytes_total: int


Progress = Callable[[CopyProgress], object]


def check_progress(progress: Any) -> Progress | None:
    """Return a callback, or None; `Invalid` for anything else."""
    if progress is not None and not callable(progress):
        raise Invalid(f"progress is a function of one argument, not {in_short(progress)}")
    return progress  # type: ignore[no-any-return]


class BackedFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of a backup."""

    path: str  # in the store
    size: int
    checksum: int  # CRC32C
    ends: int  # CRC32C of its first and last 64 KiB: whether a file of the store is still this one
    shared: bool  # in `files`, not in the backup's own folder


class BackupListing(msgspec.Struct, frozen=True):
    """A whole backup."""

    version: int
    number: int
    store: str  # the UUID, as hex digits
    identity: str  # what the store's files carry
    lsn: int  # the backup holds everything up to here, in every table
    time_us: int  # when it was made, by the store's clock
    files: list[BackedFile]


class _Marker(msgspec.Struct, frozen=True):
    version: int
    store: str


class Copier:
    """Copies files, and checks what it copies; `stop` ends it between two pieces."""

    def __init__(self, fs: FileSystem, stop: Callable[[], bool] = lambda: False) -> None:
        self.fs = fs
        self._stop = stop

    def copy(self, source: str, target: str, size: int | None = None) -> tuple[int, int, int]:
        """Copy the first `size` bytes of a file, synced under its name; return size and checksums as listed."""
        read = self.fs.open(source)
        try:
            length = read.size() if size is None else size
            ends = ends_of(read, length)
            temporary = f"{target}.tmp"
            if self.fs.exists(temporary):
                self.fs.unlink(temporary)
            write = self.fs.create(temporary)
            try:
                checksum = self._pump(read, write, length)
                write.fsync()
                self.fs.rename(temporary, target)  # its folder is synced before a listing names it
            finally:
                write.close()
        finally:
            read.close()
        return length, checksum, ends

    def write(self, content: bytes, target: str) -> tuple[int, int, int]:
        """Write a small file; return size and checksums as listed."""
        file = self.fs.create(target)
        try:
            file.pwrite(content, 0)
            file.fsync()
        finally:
            file.close()
        return len(content), google_crc32c.value(content), _ends_of(content)

    def checksum(self, path: str, length: int) -> int:
        """Return the CRC32C of a file; `CorruptionError` if it has another length."""
        file = self.fs.open(path)
        try:
            if file.size() != length:
                raise CorruptionError(path, min(length, file.size()), f"it has {file.size()} bytes, not {length}")
            return self._pump(file, None, length)
        finally:
            file.close()

    def _pump(self, read: File, write: File | None, length: int) -> int:
        at = checksum = 0
        while at < length:
            if self._stop():
                raise Closed("the copy was interrupted: begin it again")
            data = read.pread(min(COPY_BYTES, length - at), at)
            if not data:
                raise CorruptionError(read.path, at, f"it ends here, and {length} bytes were expected")
            checksum = google_crc32c.extend(checksum, data)
            if write is not None:
                write.pwrite(data, at)
            at += len(data)
        return checksum


@contextmanager
def naming_the_disk(target: str) -> Iterator[None]:
    """Say which disk is full while a copy is written to `target`: mostly it is another one than the source's."""
    try:
        yield
    except OSError as error:
        if isinstance(error, PenstockError) or not is_disk_full(error):  # some are subclasses of `OSError`
            raise
        raise DiskFull(f"{target} has no room, its disk is full: free some space there, then retry") from error


def ends_of_file(fs: FileSystem, path: str, length: int) -> int:
    """Return the checksum of a file's two ends."""
    file = fs.open(path)
    try:
        return ends_of(file, length)
    finally:
        file.close()


def ends_of(file: File, length: int) -> int:
    """Return the checksum of an open file's two ends."""
    head = file.pread(min(ENDS_BYTES, length), 0)
    tail = file.pread(min(ENDS_BYTES, length), max(0, length - ENDS_BYTES))
    return int(google_crc32c.extend(google_crc32c.value(head), tail))


def _ends_of(content: bytes) -> int:
    return int(google_crc32c.extend(google_crc32c.value(content[:ENDS_BYTES]), content[-ENDS_BYTES:]))


class BackupFolder:
    """The backups of one store in a folder."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self.fs = fs
        self.root = root

    def path_of(self, listing: BackupListing, file: BackedFile) -> str:
        """Return where a file of a backup is."""
        return f"{self.root}/{SHARED}/{file.path}" if file.shared else f"{self.own(listing.number)}/{file.path}"

    def own(self, number: int) -> str:
        """Return the folder of one backup."""
        return f"{self.root}/{number:06d}"

    # -- reading

    def listings(self) -> list[BackupListing]:
        """Return the whole backups, oldest first; `NotFound` if the folder has no backups of a store."""
        return [self._listing(number) for number in self._whole()]

    def _whole(self) -> list[int]:
        if not self.fs.exists(f"{self.root}/{MARKER}"):
            raise NotFound(f"{self.root} is not a folder of backups: give the one that store.backup wrote to")
        self._marker()
        return [number for number in self._numbers() if self.fs.exists(f"{self.own(number)}/{LISTING}")]

    def listing(self, number: int | None) -> BackupListing:
        """Return a whole backup, by default the newest."""
        whole = self._whole()
        matches = [each for each in whole if number in (None, each)]
        if not matches:
            missing = "no whole backup" if number is None else f"no backup {number}"
            raise NotFound(f"{self.root} has {missing}: it has {', '.join(map(str, whole)) or 'none'}")
        return self._listing(matches[-1])  # another that is damaged does not matter

    def _numbers(self) -> list[int]:
        return sorted(int(name) for name in self.fs.listdir(self.root) if _NUMBER.fullmatch(name))

    def _marker(self) -> _Marker:
        return self._read(f"{self.root}/{MARKER}", _Marker)

    def _listing(self, number: int) -> BackupListing:
        path = f"{self.own(number)}/{LISTING}"
        listing = self._read(path, BackupListing)
        files = listing.files
        if listing.number != number or not all(_PATH.fullmatch(file.path) and file.size >= 0 for file in files):
            raise CorruptionError(path, 0, "it is not the list of this backup")
        return listing

    def _read(self, path: str, of: type[T]) -> T:
        file = self.fs.open(path)
        try:
            data = file.pread(file.size(), 0)
        finally:
            file.close()
        body, end = data[:-_SUM_BYTES], _CHECKSUM.fullmatch(data[-_SUM_BYTES:])
        if end is None or int(end[1], 16) != google_crc32c.value(body):
            raise CorruptionError(path, 0, "its checksum does not match")
        try:
            version = msgspec.json.decode(body, type=dict).get("version")
            if version != VERSION:
                raise UnsupportedVersion(
                    f"{path} has version {version}, this Penstock reads {VERSION}: use a newer one"
                )
            return msgspec.json.decode(body, type=of)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptionError(path, 0, f"it does not decode ({error})") from None

    # -- writing

    def prepare(self, store: str) -> None:
        """Create the folder for a store, or check that it is that store's. Requires: the lock of `lock_path`."""
        path = f"{self.root}/{MARKER}"
        if self.fs.exists(path):
            if self._marker().store != store:
                raise Invalid(f"{self.root} has the backups of another store: give another folder")
            return
        others = set(self.fs.listdir(self.root)) - {"LOCK", f"{MARKER}.tmp", "lost+found"}
        if others:
            raise Invalid(f"{self.root} holds other files ({min(others)}): give a new or an empty folder")
        self._write(_Marker(VERSION, store), path)

    @property
    def lock_path(self) -> str:
        return f"{self.root}/LOCK"

    def begin(self, listings: Sequence[BackupListing]) -> int:
        """Remove what is left of backups that are not whole; return the number of a new one, with its own folder."""
        whole = {listing.number for listing in listings}
        for number in self._numbers():
            if number not in whole:
                remove_folder(self.fs, self.own(number))
                self._sweep(listings)
        number = max(whole, default=0) + 1
        if number > NUMBER_MAX:
            raise Invalid(f"{self.root} has had {NUMBER_MAX} backups: give another folder")
        make_dirs(self.fs, f"{self.root}/{SHARED}")
        make_dirs(self.fs, self.own(number))
        return number

    def publish(self, listing: BackupListing) -> None:
        """Make a backup whole. Requires: its files are synced under their names."""
        folders = {parent(self.path_of(listing, file)) for file in listing.files}
        for folder in sorted(folders):
            self.fs.fsync_dir(folder)
        self._write(listing, f"{self.own(listing.number)}/{LISTING}")

    def _write(self, value: msgspec.Struct, path: str) -> None:
        body = msgspec.json.encode(value)
        temporary = f"{path}.tmp"
        if self.fs.exists(temporary):
            self.fs.unlink(temporary)
        file = self.fs.create(temporary)
        try:
            file.pwrite(body + b'\n{"crc32c":"%08x"}\n' % google_crc32c.value(body), 0)
            publish(self.fs, file, path)
        finally:
            file.close()

    def remove(self, listings: Sequence[BackupListing], others: Sequence[BackupListing]) -> None:
        """Remove whole backups, and then the shared files that none of the `others` lists."""
        for listing in listings:
            self.fs.unlink(f"{self.own(listing.number)}/{LISTING}")  # first: without it the rest does not count
            self.fs.fsync_dir(self.own(listing.number))
            remove_folder(self.fs, self.own(listing.number))
        self._sweep(others)

    def _sweep(self, listings: Sequence[BackupListing]) -> None:
        """Remove shared files that no backup lists."""
        listed = {file.path for listing in listings for file in listing.files if file.shared}
        for path in walk(self.fs, f"{self.root}/{SHARED}"):
            if path not in listed:
                remove_file(self.fs, f"{self.root}/{SHARED}/{path}")


_SUM_BYTES = len(b'\n{"crc32c":"00000000"}\n')
