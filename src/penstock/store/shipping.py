"""A snapshot of an open store for another member: a backup (see `backup`) that copies only what may change.

Sstables and finished files of kinds never change, and are read where they are; nothing is removed meanwhile. The rest
(the manifest, spills, unfinished files, the journal's end) is copied to a folder of this store first. The journal is
copied with the terms of its entries, so that the other member goes on after the last of them.

Thread: one for each snapshot.
Invariant: from `begin` to `close` every listed file keeps its content, and the journal keeps the entries that follow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from penstock.errors import NotFound
from penstock.host.file_operations import make_dirs, remove_folder
from penstock.replica.file_channel import ShippedFile, SnapshotListing
from penstock.replica.state import LogBase
from penstock.store.backup import WAIT_S, Backup, BackupSource
from penstock.store.backup_folder import BackedFile, BackupListing
from penstock.store.following import MemberJournal

if TYPE_CHECKING:
    from penstock.store.store import Store

OUTGOING = "outgoing"  # the folder, in the store's, with the copies


class Shipment(Backup):
    """One snapshot that another member takes."""

    def __init__(
        self, source: BackupSource, journal: MemberJournal, name: str, *, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """`name` tells this snapshot from others that are taken at the same time."""
        self._own = f"{source.root}/{OUTGOING}/{name}"
        super().__init__(source, self._own, progress=None, stop=stop)
        self._journal = journal
        self._entries = (LogBase(), LogBase())
        self._parts = ExitStack()
        self._paths: dict[str, str] = {}

    def begin(self) -> SnapshotListing:
        """Make the snapshot."""
        source = self._source
        remove_folder(source.fs, self._own)
        make_dirs(source.fs, self._own)
        self._parts.callback(remove_folder, source.fs, self._own)
        try:
            self._finish_installations()
            self._parts.enter_context(source.snapshots.held_off())
            self._parts.enter_context(source.collector.readers.holding(source.fs))
            source.collector.await_end(WAIT_S)
            source.dropped.await_end(WAIT_S)
            self._parts.callback(self._journal.hold(source.consensus.committed + 1))
            self._copy_all(self._own, [])
        except BaseException:
            self.close()
            raise
        self._paths = {file.path: f"{source.root if file.shared else self._own}/{file.path}" for file in self._files}
        files = tuple(ShippedFile(file.path, file.size) for file in self._files)
        return SnapshotListing(source.identity, *self._entries, files)

    def _copy_journal(self, folder: str, first: int) -> int:
        self._entries = self._journal.copy_entries_to(folder, first)
        return self._entries[1].lsn

    def _share(self, own: str, files: list[tuple[str, int]], earlier: list[BackupListing]) -> None:
        for path, size in files:
            self._files.append(BackedFile(path, self._size(path) if size < 0 else size, 0, 0, shared=True))

    def path_of(self, path: str) -> str:
        """Return where a file of the snapshot is; `NotFound` if it has none of this path."""
        if path not in self._paths:
            raise NotFound(f"the snapshot has no file {path}")
        return self._paths[path]

    def close(self) -> None:
        """Let the store remove files again."""
        self._parts.close()


def ship(store: Store, name: str, *, stop: Callable[[], bool]) -> Shipment:
    """Return a snapshot of a member's store, to be begun and closed."""
    assert store._tenure is not None
    return Shipment(store._backup_source(), store._tenure, name, stop=lambda: stop() or store.closed)
