"""Readers in other processes, which map files of a snapshot by name, and how long the next open must respect them.

The owner knows a remote reader by its lease, which is lost with the owner. So the manifest records the length of the
longest lease before it is granted: for that long after the next open no file is deleted, because an earlier reader may
still use it. An owner that closes with no reader left clears it.

Thread: any; `_lock` guards the length and its commit.
"""

from __future__ import annotations

import msgspec

from penstock.host import threads
from penstock.host.clock import Clock
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

    def may_remove(self) -> bool:
        """Whether no reader from before the open can exist any more. Later readers hold pins."""
        return self._clock.monotonic_s() >= self._until_s

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
