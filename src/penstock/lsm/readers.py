"""Readers in other processes, who map files of a snapshot by their names, and what an opening owes to those of before.

A reader elsewhere is known to its owner by a lease, which is gone with the owner. So the length of the longest lease is
written down in the manifest before it is given out: for so long after the next opening no file is removed, because a
reader from before may still come to it. An owner that closes with no reader left forgets it.

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
    """How long readers elsewhere may hold files."""

    def __init__(self, manifest: Manifest, clock: Clock, grace_s: float) -> None:
        row = manifest.get_wal_state(READERS_KEY)
        self._manifest = manifest
        self._clock = clock
        self._lock = threads.lock("lsm.readers")
        self._longest_s: float = msgspec.msgpack.decode(row.detail, type=float) if row is not None else 0.0
        # No row, or 0: nobody was told the names of files, or nobody has them any more.
        self._until_s = clock.monotonic_s() + (max(grace_s, self._longest_s) if self._longest_s else 0.0)

    def may_remove(self) -> bool:
        """Whether no reader of before the opening can be there any more. Those of after it hold pins."""
        return self._clock.monotonic_s() >= self._until_s

    def may_be_there(self) -> bool:
        """Whether a reader elsewhere may have a lease, of now or of before the opening."""
        return self._longest_s > 0

    def expect(self, lease_s: float) -> None:
        """A reader is about to get a lease of this length."""
        with self._lock:
            if lease_s > self._longest_s:
                self._commit(lease_s)

    def forget(self) -> None:
        """Nobody has a lease any more, of those who were here before the opening neither."""
        with self._lock:
            if self._longest_s and self.may_remove():
                self._commit(0.0)

    def _commit(self, longest_s: float) -> None:
        txn = self._manifest.begin_write()
        txn.put_wal_state(READERS_KEY, WalStateRecord(detail=msgspec.msgpack.encode(longest_s)))
        txn.commit()
        self._longest_s = longest_s
