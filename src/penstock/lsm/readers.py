"""Readers in other processes, which map files of a snapshot by name, and how long the next open must respect them.

The owner knows a remote reader by its lease, which is lost with the owner. So before a lease is granted or renewed, the
manifest records how long it is and when all leases will have expired: until then the next open deletes no file that an
earlier reader may use. The record is a point in time, not a duration, so that an owner that is killed again and again
does not start to wait anew each time. Within one boot it is by the monotonic clock, which leases use, too: the store's
time may step (without its note, by `trust_clock`, to that of a leader). After another boot it is by the store's time.
When leases have ended, the record is shortened to those that are left.

A commit of the record can fail (a full disk) or hang. Reads continue all the same: the owner itself reads the files.
But clients get no names of files then, because a reader that uses them needs the record; the commit is tried again.

A backup is a reader of every file: while one runs (`holding`), nothing removes a file.

Thread: any; `_lock` guards the record and its commit; `_counts` the numbers of holders and grants.
Invariant: while a reader that learnt names of files can have a lease, the record covers it. (The lease of one that
learnt them before commits began to fail may outlast the record: this matters only if the owner is killed then.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from penstock.errors import RetryLater
from penstock.host import threads
from penstock.host.clock import UNKNOWN_BOOT, Clock
from penstock.host.file_operations import remove_file
from penstock.host.files import FileSystem
from penstock.manifest.keys import WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import WalStateRecord

logger = logging.getLogger(__name__)

READERS_KEY = WalStateKey(1, 2)  # beside the rows of the ledger and of the journal

CLOCK_MARGIN = 1.15  # the store's clock may run faster than a lease does, by a tenth
USE_S = 5.0  # a lease is renewed when its use ends, too, and that is recorded a moment later
SPARE_S = 60.0  # a record lasts longer than the leases by up to this: not each of them is a commit
RETRY_S = 1.0  # from a record that failed to the next attempt: not each read of a full disk is one
WAIT_S = 5.0  # how long a read waits while the commit for another one hangs


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True):
    """The manifest's record of readers in other processes. Before there was `until_us`, it was a bare number."""

    longest_s: float = 0.0  # 0: no reader ever got file names, or none has them any more
    until_us: int | None = None  # by the store's clock: every lease will have expired
    until_s: float = 0.0  # the same, by the monotonic clock of `boot_id`
    boot_id: bytes = UNKNOWN_BOOT


class ReaderLeases:
    """How long readers in other processes may use files."""

    def __init__(self, manifest: Manifest, clock: Clock, grace_s: float) -> None:
        row = manifest.get_wal_state(READERS_KEY)
        self._manifest = manifest
        self._clock = clock
        self._grace_s = grace_s
        self._lock = threads.lock("lsm.readers")
        self._counts = threads.lock("lsm.readers.counts")
        self._record = LeaseRecord() if row is None else _decode(row.detail)  # replaced under _lock
        self._is_sure = True  # written under _lock: the manifest has this record, and no other may be committed
        self._keeping = False  # written under _lock: the record may become shorter
        self._retry_s = 0.0  # before this moment no use tries again what failed or hung
        self._boot_id = clock.boot_id()
        self._committed_s = clock.monotonic_s()
        self._earlier = self._record  # leases from before the open
        self._earlier_until_s = self._last_expiry_s(self._committed_s)
        self._has_time = False  # before the store's clock has begun, it is the wall clock
        self._granting = 0  # guarded by _counts: leases that are recorded and not yet held
        self.holders = 0  # guarded by _counts: backups that copy files
        self._left: list[str] = []  # guarded by _counts: files to remove when nothing holds them

    def _last_expiry_s(self, opened_s: float) -> float:
        """Return when all of the longest lease has passed since the open, or the moment of the record has come."""
        record = self._earlier
        until_s = opened_s + max(self._grace_s, record.longest_s) if record.longest_s else 0.0
        return min(until_s, record.until_s) if record.boot_id == self._boot_id != UNKNOWN_BOOT else until_s

    def begin(self) -> None:
        """Trust the clock from now on. Requires: it is the store's."""
        self._has_time = True

    def may_remove(self) -> bool:
        """Whether no reader from before the open can exist any more, and no backup runs. Later readers hold pins."""
        return not self.holders and self._earlier_ended()

    def _earlier_ended(self) -> bool:
        """Whether every lease from before the open has expired."""
        if self._clock.monotonic_s() >= self._earlier_until_s:
            return True
        until_us, boots = self._earlier.until_us, {self._earlier.boot_id, self._boot_id}
        rebooted = len(boots) == 2 and UNKNOWN_BOOT not in boots
        return rebooted and self._has_time and until_us is not None and self._clock.time_us() >= until_us

    @contextmanager
    def holding(self, fs: FileSystem) -> Iterator[None]:
        """Keep every file of the store during a block, except those whose removal has begun."""
        counted, left = False, list[str]()
        try:
            with self._counts:
                self.holders += 1
                counted = True
            yield
        finally:
            if counted:
                with self._counts:
                    self.holders -= 1
                    if not self.holders:
                        left, self._left = self._left, left
            for path in left:
                remove_file(fs, path)

    def remove(self, fs: FileSystem, path: str) -> bool:
        """Remove a file that nothing names any more, now or when no backup holds it; False if that failed."""
        with self._counts:
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
        counted = False
        try:
            with self._counts:
                self._granting += 1
                counted = True
            self.expect(lease_s)
            yield
        finally:
            if counted:
                with self._counts:
                    self._granting -= 1

    def expect(self, lease_s: float) -> bool:
        """Record that a lease of this length begins now; False if that fails: its reader must not learn file names."""
        if self._is_sure and not self._keeping and self._is_covered(lease_s):
            return True
        if self._clock.monotonic_s() < self._retry_s:
            return False
        if not self._lock.acquire(timeout=WAIT_S):
            self._retry_s = self._clock.monotonic_s() + RETRY_S
            return False
        try:
            self._extend(lease_s)
        except (OSError, RetryLater) as error:
            logger.warning("a reader's lease is not recorded yet, and reads continue (%s)", error)
            return False
        finally:
            self._lock.release()
        return True

    def keep(self, left_s: Callable[[], float], *, after_s: float = 0.0) -> None:
        """Record how long the leases that are held last at most; 0 if none is held. Earlier readers keep theirs.

        A record that is too long stays for `after_s` seconds: clients come and go, and each record is a commit.
        """
        with self._lock:
            if self._is_sure and not self.may_be_there():
                return
            self._keeping = True  # first: a lease that begins unseen by the next lines waits for the lock
            try:
                if not self._granting:
                    self._keep(left_s(), after_s)
            finally:
                self._keeping = False

    def _keep(self, lease_s: float, after_s: float) -> None:
        if lease_s:
            self._extend(lease_s)
        until_s = self._needed_s(lease_s)
        is_long = self._record.until_s > until_s + 2 * SPARE_S if lease_s else self._is_extended() or not self._is_sure
        if is_long and self._clock.monotonic_s() - self._committed_s >= after_s:
            self._commit(self._lasting(lease_s, until_s) if lease_s else self._earlier_left())

    def _extend(self, lease_s: float) -> None:
        record = self._record
        if not self._is_sure or not self._is_covered(lease_s):
            until_s = max(self._until_s(record), self._needed_s(lease_s) + SPARE_S)
            self._commit(self._lasting(max(lease_s, record.longest_s), until_s))

    def _is_covered(self, lease_s: float) -> bool:
        """Whether the record lasts as long as a lease that begins now."""
        record = self._record
        return lease_s <= record.longest_s and self._needed_s(lease_s) <= self._until_s(record)

    def _until_s(self, record: LeaseRecord) -> float:
        return record.until_s if record.boot_id == self._boot_id else 0.0

    def _needed_s(self, lease_s: float) -> float:
        """Return when a lease that begins now, and all from before the open, will have expired."""
        until_s = self._clock.monotonic_s() + lease_s + USE_S
        return until_s if self._earlier_ended() else max(until_s, self._earlier_until_s)

    def _lasting(self, longest_s: float, until_s: float) -> LeaseRecord:
        until_us = self._clock.time_us() + int((until_s - self._clock.monotonic_s()) * CLOCK_MARGIN * 1e6)
        return LeaseRecord(max(longest_s, self._earlier_left().longest_s), until_us, until_s, self._boot_id)

    def _earlier_left(self) -> LeaseRecord:
        return LeaseRecord() if self._earlier_ended() else self._earlier

    def _is_extended(self) -> bool:
        return self._record != self._earlier_left()

    def _commit(self, record: LeaseRecord) -> None:
        self._is_sure = False  # a commit that fails may have happened, or happen later
        txn = self._manifest.begin_write()
        txn.put_wal_state(READERS_KEY, WalStateRecord(detail=msgspec.msgpack.encode(record)))
        try:
            txn.commit()
        except BaseException:
            self._retry_s = self._clock.monotonic_s() + RETRY_S
            raise
        self._record, self._committed_s, self._retry_s = record, self._clock.monotonic_s(), 0.0
        self._is_sure = True  # last: uses read it without the lock


def _decode(detail: bytes) -> LeaseRecord:
    decoded = msgspec.msgpack.decode(detail, type=LeaseRecord | float)
    return decoded if isinstance(decoded, LeaseRecord) else LeaseRecord(decoded)
