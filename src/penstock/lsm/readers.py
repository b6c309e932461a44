"""Readers in other processes, which map files of a snapshot by name, and how long the next open must respect them.

The owner knows a remote reader by its lease, which is lost with the owner. So the manifest records, before a lease is
granted, the length of the longest one and when the last one will have expired: until then the next open deletes no file
that an earlier reader may use. That is a moment, so that an owner that is killed again and again does not begin to wait
anew each time. Within one boot it is one of the monotonic clock, which leases are counted by, too: the store's time may
step at an open (a missing note, `trust_clock`, a leader that knows better). After another boot it is the store's time.
When no reader is left, the record is cleared.

A backup is a reader of every file: while it `holds` them, none is removed, whoever wants to.

Thread: any; `_lock` guards the record and its commit, and what a backup holds.
Invariant: while a lease can be alive, the record says so and its time has not come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from penstock.host import threads
from penstock.host.clock import UNKNOWN_BOOT, Clock
from penstock.host.file_operations import remove_file
from penstock.host.files import FileSystem
from penstock.manifest.keys import WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import WalStateRecord

READERS_KEY = WalStateKey(1, 2)  # beside the rows of the ledger and of the journal


CLOCK_MARGIN = 1.25  # the store's clock may run faster than a lease does, by a tenth


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True):
    """What the manifest says of readers in other processes. Records of before `until_us` are a bare number."""

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
        self._record = LeaseRecord() if row is None else _decode(row.detail)  # replaced under _lock
        self._is_sure = True  # guarded by _lock: the manifest has this record, and no commit of another has failed
        self._earlier = self._record  # leases from before the open
        self._boot_id = clock.boot_id()
        self._committed_s = clock.monotonic_s()
        self._earlier_until_s = self._last_expiry_s(self._committed_s)
        self._has_time = False  # before the store's clock has begun, it is the wall clock
        self._granting = 0  # guarded by _lock: leases that are recorded and not yet held
        self.holders = 0  # guarded by _lock: backups that copy files
        self._left: list[str] = []  # guarded by _lock: files to remove when nothing holds them

    def _last_expiry_s(self, opened_s: float) -> float:
        """Return when all of the longest lease has passed since the open, or the time of the record has come."""
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
        """Record a lease that is granted in a block, at the end of which `forget` can see that it is held."""
        with self._lock:
            self._granting += 1
        try:
            self.expect(lease_s)
            yield
        finally:
            with self._lock:
                self._granting -= 1

    def expect(self, lease_s: float) -> None:
        """Record that a lease of this length begins now, or is renewed within the next `grace_s` seconds."""
        with self._lock:
            record, now_s = self._record, self._clock.monotonic_s()
            needed_s = now_s + lease_s + self._grace_s
            known_s = record.until_s if record.boot_id == self._boot_id else 0.0
            if lease_s > record.longest_s or needed_s > known_s or not self._is_sure:
                spare_s = max(lease_s, self._grace_s)  # so that not every lease is a commit
                until_s = max(needed_s + spare_s, known_s, self._earlier_until_s)
                until_us = self._clock.time_us() + int((until_s - now_s) * CLOCK_MARGIN * 1e6)
                longest_s = max(lease_s, record.longest_s)
                self._commit(LeaseRecord(longest_s, max(until_us, record.until_us or 0), until_s, self._boot_id))

    def forget(self, is_held: Callable[[], bool] = lambda: False, *, after_s: float = 0.0) -> None:
        """Record that no reader has a lease any more, not even one from before the open, unless one `is_held`.

        Not within `after_s` seconds of the last record.
        """
        with self._lock:
            if not self.may_be_there() or self._granting or not self._earlier_ended() or is_held():
                return
            if self._clock.monotonic_s() - self._committed_s >= after_s:
                self._commit(LeaseRecord())

    def _commit(self, record: LeaseRecord) -> None:
        self._is_sure = False  # a commit that fails may have happened, or happen later
        txn = self._manifest.begin_write()
        txn.put_wal_state(READERS_KEY, WalStateRecord(detail=msgspec.msgpack.encode(record)))
        txn.commit()
        self._record, self._committed_s, self._is_sure = record, self._clock.monotonic_s(), True


def _decode(detail: bytes) -> LeaseRecord:
    decoded = msgspec.msgpack.decode(detail, type=LeaseRecord | float)
    return decoded if isinstance(decoded, LeaseRecord) else LeaseRecord(decoded)
