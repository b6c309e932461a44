"""Readers in other processes, which map files of a snapshot by name, and how long the next open must respect them.

The owner knows a remote reader by its lease, which is lost with the owner. So the manifest records the length of the
longest lease before it is granted: for that long after the next open no file is deleted, because an earlier reader may
still use it. An owner that closes with no reader left clears it.

A backup is a reader of every file: while it `holds` them, none is removed, whoever wants to.

Thread: any; `_lock` guards the length and its commit, and what a backup holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_operations import remove_file
from penstock.host.files import FileSystem
from penstock.manifest.keys import WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import WalStateRecord

READERS_KEY = WalStateKey(1, 2)  # beside the rows of the ledger and of the journal


class ReaderLeases:
    """How long readers in other processes may use files."""

    def __init__(self, manifest: Manifest, clock: Clock, grace_s: float) -> None:
        row = manifest.get_wal_state(READERS_KEY)
        self._manifest = manifest
        self._clock = clock
        self._lock = threads.lock("lsm.readers")
        self._longest_s: float = msgspec.msgpack.decode(row.detail, type=float) if row is not None else 0.0
        # No row, or 0: no reader ever got file names, or none has them any more.
        self._until_s = clock.monotonic_s() + (max(grace_s, self._longest_s) if self._longest_s else 0.0)
        self.holders = 0  # guarded by _lock: backups that copy files
        self._left: list[str] = []  # guarded by _lock: files to remove when nothing holds them

    def may_remove(self) -> bool:
        """Whether no reader from before the open can exist any more, and no backup runs. Later readers hold pins."""
        return not self.holders and self._clock.monotonic_s() >= self._until_s

    @contextmanager
    def holding(self, fs: FileSystem) -> Iterator[None]:
        """Keep every file of the store during a block, except those whose removal has begun."""
        with self._lock:
            self.holders += 1
        try:
            yield
        finally:
            with self._lock:
                self.holders -= 1
                left: list[str] = []
                if not self.holders:
                    left, self._left = self._left, left
            for path in left:
                remove_file(fs, path)

    def remove(self, fs: FileSystem, path: str) -> bool:
        """Remove a file that nothing names any more, now or when no backup holds it; False if that failed."""
        with self._lock:
            if self.holders:
                self._left.append(path)
                return True
        return remove_file(fs, path)

    def may_be_there(self) -> bool:
        """Whether a reader in another process may have a lease, from now or from before the open."""
        return self._longest_s > 0

    def expect(self, lease_s: float) -> None:
        """Record that a reader is about to get a lease of this length."""
        with self._lock:
            if lease_s > self._longest_s:
                self._commit(lease_s)

    def forget(self) -> None:
        """Record that no reader has a lease any more, not even one from before the open."""
        with self._lock:
            if self._longest_s and self.may_remove():
                self._commit(0.0)

    def _commit(self, longest_s: float) -> None:
        txn = self._manifest.begin_write()
        txn.put_wal_state(READERS_KEY, WalStateRecord(detail=msgspec.msgpack.encode(longest_s)))
        txn.commit()
        self._longest_s = longest_s
