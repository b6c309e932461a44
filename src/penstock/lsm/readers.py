"""Readers in other processes, which map files of a snapshot by name, and how long the next open must respect them.

The owner knows a remote reader by its lease, which is lost with the owner. So the manifest records, before a lease is
granted or renewed, how long it is and the time at which all of them will have expired: until then the next open deletes
no file that an earlier reader may use. The time is the store's, so that an owner that is killed again and again does
not begin to wait anew each time. When leases have ended, the record goes back to those that are left.

A backup is a reader of every file: while it `holds` them, none is removed, whoever wants to.

Thread: any; `_lock` guards the record and its commit, and what a backup holds.
Invariant: while a lease can be alive, the record says so and its time has not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


CLOCK_MARGIN = 1.15  # the store's clock may run faster than a lease does, by a tenth
USE_S = 5.0  # a lease is renewed when its use ends, too, and that is recorded a moment later
SPARE_S = 60.0  # a record lasts longer than the leases by up to this: not each of them is a commit


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True):
    """What the manifest says of readers in other processes. Records of before `until_us` are a bare number."""

    longest_s: float = 0.0  # 0: no reader ever got file names, or none has them any more
    until_us: int | None = None  # by the store's clock: every lease will have expired


class ReaderLeases:
    """How long readers in other processes may use files."""

    def __init__(self, manifest: Manifest, clock: Clock, grace_s: float) -> None:
        row = manifest.get_wal_state(READERS_KEY)
        self._manifest = manifest
        self._clock = clock
        self._grace_s = grace_s
        self._lock = threads.lock("lsm.readers")
        self._record = LeaseRecord() if row is None else _decode(row.detail)  # replaced under _lock
        self._earlier = self._record  # leases from before the open
        self._opened_s = self._committed_s = clock.monotonic_s()
        self._has_time = False  # before the store's clock has begun, it is the wall clock
        self._granting = 0  # guarded by _lock: leases that are recorded and not yet held
        self.holders = 0  # guarded by _lock: backups that copy files
        self._left: list[str] = []  # guarded by _lock: files to remove when nothing holds them

    def begin(self) -> None:
        """Trust the clock from now on. Requires: it is the store's."""
        self._has_time = True

    def may_remove(self) -> bool:
        """Whether no reader from before the open can exist any more, and no backup runs. Later readers hold pins."""
        return not self.holders and self._earlier_ended()

    def _earlier_ended(self) -> bool:
        """Whether every lease from before the open has expired: its time has come, or all of it has passed since."""
        longest_s, until_us = self._earlier.longest_s, self._earlier.until_us
        if not longest_s:
            return True
        if self._has_time and until_us is not None and self._clock.time_us() >= until_us:
            return True
        return self._clock.monotonic_s() >= self._opened_s + max(self._grace_s, longest_s)

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
        return self._record.longest_s > 0

    @contextmanager
    def granting(self, lease_s: float) -> Iterator[None]:
        """Record a lease that is granted in a block, at the end of which `keep` can see that it is held."""
        with self._lock:
            self._granting += 1
        try:
            self.expect(lease_s)
            yield
        finally:
            with self._lock:
                self._granting -= 1

    def expect(self, lease_s: float) -> None:
        """Record that a lease of this length begins now."""
        with self._lock:
            self._extend(lease_s)

    def keep(self, left_s: Callable[[], float], *, after_s: float = 0.0) -> None:
        """Record how long the leases that are held last at most; 0 if none is held. Earlier readers keep theirs.

        A record that is too long stays for `after_s` seconds: clients come and go, and each record is a commit.
        """
        with self._lock:
            if self._granting or not self.may_be_there():
                return
            if lease_s := left_s():
                self._extend(lease_s)
            until_us = self._needed_us(lease_s)
            is_long = (
                (self._record.until_us or 0) > until_us + int(2 * SPARE_S * 1e6) if lease_s else self._is_extended()
            )
            if is_long and self._clock.monotonic_s() - self._committed_s >= after_s:
                self._commit(LeaseRecord(lease_s, until_us) if lease_s else self._earlier_left())

    def _extend(self, lease_s: float) -> None:
        record, needed_us = self._record, self._needed_us(lease_s)
        if lease_s > record.longest_s or needed_us > (record.until_us or 0):
            self._commit(LeaseRecord(max(lease_s, record.longest_s), needed_us + int(SPARE_S * 1e6)))

    def _needed_us(self, lease_s: float) -> int:
        """Return the time at which a lease that begins now, and all from before the open, will have expired."""
        now_us, earlier = self._clock.time_us(), self._earlier_left()
        if earlier.longest_s and earlier.until_us is None:
            lease_s = max(lease_s, self._grace_s, earlier.longest_s)
        return max(earlier.until_us or 0, now_us + int((lease_s * CLOCK_MARGIN + USE_S) * 1e6))

    def _earlier_left(self) -> LeaseRecord:
        return LeaseRecord() if self._earlier_ended() else self._earlier

    def _is_extended(self) -> bool:
        return self._record != self._earlier_left()

    def _commit(self, record: LeaseRecord) -> None:
        txn = self._manifest.begin_write()
        txn.put_wal_state(READERS_KEY, WalStateRecord(detail=msgspec.msgpack.encode(record)))
        txn.commit()
        self._record, self._committed_s = record, self._clock.monotonic_s()


def _decode(detail: bytes) -> LeaseRecord:
    decoded = msgspec.msgpack.decode(detail, type=LeaseRecord | float)
    return decoded if isinstance(decoded, LeaseRecord) else LeaseRecord(decoded)
