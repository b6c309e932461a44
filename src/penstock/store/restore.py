"""Restoring a backup into a new folder, and checking one where it is.

The copy is built beside its target, every checksum compared, and renamed when it is complete (`new_store.py`). It gets
a UUID of its own; its files carry the identity of the original (`identity.py`).

Thread: any.
Invariant: the backup is only read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from penstock.errors import CorruptionError
from penstock.host.file_operations import make_dirs
from penstock.host.files import FileSystem
from penstock.host.paths import parent
from penstock.host.randomness import Random
from penstock.store.backup_folder import (
    BackedFile,
    BackupFolder,
    BackupListing,
    Copier,
    CopyProgress,
    Progress,
    naming_the_disk,
)
from penstock.store.identity import IDENTITY_BYTES, StoreIdentity, write_identity
from penstock.store.new_store import built_beside
from penstock.store.reports import FileDamage

RESTORING = ".restoring"  # behind the name of the target, while the copy is incomplete


@dataclass(frozen=True, kw_only=True)
class RestoreReport:
    """A store that was restored.

    >>> lsn = store.backup("backups").lsn
    >>> penstock.restore("backups", "copy").lsn == lsn
    True
    """

    path: str
    number: int  # of the backup
    lsn: int  # it holds everything up to here, in every table
    files: int
    bytes: int


def restore_backup(
    fs: FileSystem,
    source: str,
    path: str,
    *,
    random: Random,
    number: int | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> RestoreReport:
    """Copy a backup to `path`, which must not exist or be empty."""
    folder = BackupFolder(fs, source)
    listing = folder.listing(number)
    counter = _Counter(listing, progress)
    with built_beside(fs, path, RESTORING) as work, naming_the_disk(path):
        _copy_to(fs, folder, listing, work, random=random, copier=Copier(fs, stop), counter=counter)
    return RestoreReport(
        path=path,
        number=listing.number,
        lsn=listing.lsn,
        files=len(listing.files),
        bytes=sum(file.size for file in listing.files),
    )


def _copy_to(
    fs: FileSystem,
    folder: BackupFolder,
    listing: BackupListing,
    work: str,
    *,
    random: Random,
    copier: Copier,
    counter: _Counter,
) -> None:
    folders = {work}
    for file in listing.files:
        target = f"{work}/{file.path}"
        if (above := parent(target)) not in folders:
            make_dirs(fs, above)
            folders.add(above)
        error = _copied(folder, listing, file, partial(_copy, copier, target, file.size))
        if error is not None:
            raise error
        counter.add(file)
    for above in sorted(folders):
        fs.fsync_dir(above)
    write_identity(fs, work, StoreIdentity(bytes.fromhex(listing.identity), random.randbytes(IDENTITY_BYTES)))


def examine_backup(
    fs: FileSystem,
    source: str,
    *,
    number: int | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> list[FileDamage]:
    """Read every file of a backup and return those that are damaged or missing."""
    folder = BackupFolder(fs, source)
    listing = folder.listing(number)
    copier, counter, damage = Copier(fs, stop), _Counter(listing, progress), list[FileDamage]()
    for file in listing.files:
        error = _copied(folder, listing, file, partial(_checksum, copier, file.size))
        if error is not None:
            damage.append(FileDamage(error.path, error.reason))
        counter.add(file)
    return damage


def _copy(copier: Copier, target: str, size: int, where: str) -> int:
    return copier.copy(where, target, size)[1]


def _checksum(copier: Copier, size: int, where: str) -> int:
    return copier.checksum(where, size)


def _copied(
    folder: BackupFolder, listing: BackupListing, file: BackedFile, read: Callable[[str], int]
) -> CorruptionError | None:
    """Read a file of a backup; return what is wrong with it, or None."""
    where = folder.path_of(listing, file)
    try:
        checksum = read(where)
    except FileNotFoundError:
        return CorruptionError(where, 0, f"backup {listing.number} lists this file, and it is missing")
    except CorruptionError as error:
        return error
    if checksum != file.checksum:
        return CorruptionError(where, 0, f"it does not have the checksum that backup {listing.number} lists")
    return None


class _Counter:
    def __init__(self, listing: BackupListing, progress: Progress | None) -> None:
        self._files, self._bytes = 0, 0
        self._files_total = len(listing.files)
        self.total_bytes = sum(file.size for file in listing.files)
        self._progress = progress

    def add(self, file: BackedFile) -> None:
        self._files, self._bytes = self._files + 1, self._bytes + file.size
        if self._progress is not None:
            self._progress(
                CopyProgress(
                    files=self._files,
                    files_total=self._files_total,
                    bytes=self._bytes,
                    bytes_total=self.total_bytes,
                )
            )
