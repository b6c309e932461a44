"""`penstock.restore`, `restore_manifest`, `check_backup` and `salvage`: what is done without an open store.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.archive.master_keys import Keys
from penstock.arguments import whole
from penstock.errors import Invalid, NotFound
from penstock.host import threads
from penstock.host.clock import SystemClock
from penstock.host.file_errors import translate_os_errors
from penstock.host.os_files import OsFileSystem
from penstock.host.randomness import system_random
from penstock.manifest.manifest import Manifest
from penstock.protocol.folder import store_folder
from penstock.server.opening import open as open_store
from penstock.store.backup_folder import NUMBER_MAX, CopyProgress, check_progress
from penstock.store.reports import FileDamage, check_target
from penstock.store.restore import RestoreReport, examine_backup, restore_backup
from penstock.store.salvage import SalvageReport, salvage_store


def restore(
    source: str | Path,
    path: str | Path,
    *,
    number: int | None = None,
    progress: Callable[[CopyProgress], object] | None = None,
) -> RestoreReport:
    """Copy a backup from the folder `source` to a new store in `path`, which must not exist or be empty.

    By default the newest backup; `number` names another. Every checksum is compared: `CorruptionError` names a file
    that is damaged, and nothing appears at `path`. The store gets a UUID of its own.

    >>> report = store.backup("backups")
    >>> report = penstock.restore("backups", "copy")
    >>> with penstock.open("copy") as copy:
    ...     copy.kv("users")[b"ada"]
    b'1815'
    """
    source = store_folder(source)
    path = check_target(store_folder(path), source, "the folder of backups")
    number = None if number is None else whole(number, "number", 1, NUMBER_MAX)
    progress, cancelled = check_progress(progress), list[bool]()
    with translate_os_errors():
        return threads.run_uninterrupted(
            lambda: restore_backup(
                OsFileSystem(),
                source,
                path,
                random=system_random(),
                number=number,
                progress=progress,
                stop=lambda: bool(cancelled),
            ),
            cancel=lambda: cancelled.append(True),
        )


def restore_manifest(path: str | Path) -> str:
    """Put the newest valid copy in the place of the damaged manifest of a store that is closed; return the copy's name.

    A store keeps copies beside its manifest and renews them in the background. The damaged file stays, as
    `manifest.damaged`. Opening the store then replays the journal from where the copy ends; it refuses a copy that is
    older than the journal's beginning: `penstock.restore` a backup, or `penstock.salvage` what can be read.

    >>> try:
    ...     copy = penstock.restore_manifest("nowhere")
    ... except penstock.errors.NotFound:
    ...     print("there is no store")
    there is no store
    """
    folder, fs = store_folder(path), OsFileSystem()
    if not fs.exists(f"{folder}/STORE"):
        raise NotFound(f"there is no store in {folder}: give the folder of one")
    with translate_os_errors():
        lock = fs.lock(f"{folder}/LOCK")  # `StoreLocked` while somebody owns it
        try:
            return Manifest.restore(f"{folder}/manifest", fs=fs).rsplit("/", 1)[-1]
        finally:
            lock.release()


def check_backup(
    source: str | Path, *, number: int | None = None, progress: Callable[[CopyProgress], object] | None = None
) -> list[FileDamage]:
    """Read a backup in the folder `source`, by default the newest; return its damaged and missing files.

    >>> report = store.backup("backups")
    >>> penstock.check_backup("backups")
    []
    """
    source = store_folder(source)
    number = None if number is None else whole(number, "number", 1, NUMBER_MAX)
    progress, cancelled = check_progress(progress), list[bool]()
    with translate_os_errors():
        return threads.run_uninterrupted(
            lambda: examine_backup(
                OsFileSystem(), source, number=number, progress=progress, stop=lambda: bool(cancelled)
            ),
            cancel=lambda: cancelled.append(True),
        )


def salvage(
    path: str | Path,
    target: str | Path,
    *,
    keys: Keys | None = None,
    progress: Callable[[CopyProgress], object] | None = None,
) -> SalvageReport:
    """Copy what can be read of a damaged store in `path` to a new one in `target`; report what could not.

    Nothing in `path` changes. Rows and messages are copied, not their history: queues number their messages anew, and
    consumers, tokens and expiry times are not kept. If there is a backup, `restore` it instead. `progress` is called
    after each table. Encrypted tables need the `keys` of the store; without them they are reported as lost.

    >>> store.close()
    >>> report = penstock.salvage(store.path, "rescued")
    >>> with penstock.open("rescued") as rescued:
    ...     rescued.kv("users")[b"ada"]
    b'1815'
    """
    path = store_folder(path)
    target = check_target(store_folder(target), path)
    files = OsFileSystem()
    if files.exists(target) and files.listdir(target):
        raise Invalid(f"{target} is not empty: give a new folder, a salvage replaces nothing")
    progress, cancelled = check_progress(progress), list[bool]()

    def run() -> SalvageReport:
        return salvage_store(
            path,
            lambda: open_store(target, keys=keys),
            clock=SystemClock(),
            random=system_random(),
            keys=keys,
            progress=progress,
            stop=lambda: bool(cancelled),
        )

    with translate_os_errors():
        return threads.run_uninterrupted(run, cancel=lambda: cancelled.append(True))
