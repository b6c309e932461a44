"""A partition's own log: sections copied out of the journal so that the journal's segment can go.

A partition that stores its sections in time never has one: the folder is made by the first spill.

Thread: the checkpoint's; opening a partition reads it before that.
Invariants: (1) entries are in LSN order, each once. (2) `upto` is durable here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.errors import Closed
from penstock.host.chance import Random
from penstock.host.files import FileSystem
from penstock.journal.record import Group, JournalRecord, decode, encode
from penstock.log import Log, LogSettings
from penstock.partition.machine import Entry

SETTINGS = LogSettings(segment_bytes=16 << 20, allocate_bytes=64 << 10)
BATCH_BYTES = 4 << 20


class SpillLog:
    """What a partition spilled and has not stored."""

    def __init__(self, fs: FileSystem, folder: str, *, random: Random, identity: bytes) -> None:
        self._fs = fs
        self._folder = folder
        self._random = random
        self._identity = identity
        self._log: Log | None = None
        self._failed = False  # the end of the log may hold entries past `upto`
        self._abandoned = False
        self.upto = 0  # the last LSN that is durable here
        if fs.exists(folder):
            for entry in self.entries(0):
                self.upto = entry.lsn

    def _open(self) -> Log:
        if self._log is None:
            self._log = Log.open(
                self._fs, self._folder, random=self._random, settings=SETTINGS, identity=self._identity
            )
        return self._log

    def entries(self, after: int) -> Iterator[Entry]:
        """What was spilled past an LSN, in order."""
        if self._log is None and not self._fs.exists(self._folder):
            return
        for record in self._open():
            kept = decode(record.body, where=self._folder, lsn=record.index)
            if kept.last_epoch > after:
                yield Entry(kept.last_epoch, kept.time_us, kept.groups[0].sections)

    def append(self, entries: Sequence[Entry]) -> None:
        """Copy entries here, durably. Requires: they follow `upto`."""
        if not entries:
            return
        if self._abandoned:
            raise Closed(f"{self._folder} is of a dropped table")
        log, bodies, size = self._open(), list[bytes](), 0
        if self._failed:
            log.recover()
            log.truncate_back(log.synced)
        self._failed = True
        for entry in entries:
            # The LSN stands where a journal record has its epoch.
            bodies.append(encode(JournalRecord(entry.time_us, entry.lsn, (Group(entry.sections),))))
            size += len(bodies[-1])
            if size >= BATCH_BYTES:
                log.append(bodies)
                bodies, size = [], 0
        if bodies:
            log.append(bodies)
        log.sync()
        self._failed = False
        self.upto = entries[-1].lsn

    def drop_stored(self, stored: int) -> None:
        """Give up segments whose entries are all stored."""
        if self._log is None or self.upto == 0:
            return
        keep = self._log.last + 1
        for record in self._log:
            if decode(record.body, where=self._folder, lsn=record.index).last_epoch > stored:
                keep = record.index
                break
        self._log.truncate_front(keep)

    def abandon(self) -> None:
        """Its table was dropped: take nothing more, and leave the files to who removes them."""
        self._abandoned = True

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
