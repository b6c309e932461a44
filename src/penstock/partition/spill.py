"""A partition's own log: sections copied from the journal so that the journal's segment can be deleted.

A partition that stores its sections in time never has one: the first spill makes the folder.

Thread: the checkpoint's; before that, the thread that opens the partition reads it.
Invariants: (1) entries are in LSN order, each once. (2) `upto` is durable here. (3) an entry names the LSN of the one
before it, and the manifest the last one: a missing end is always noticed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from penstock.errors import Closed, CorruptionError
from penstock.host.files import FileSystem
from penstock.host.randomness import Random
from penstock.journal.partitions import PartitionId
from penstock.journal.record import Group, JournalRecord, decode, encode
from penstock.log import Log, LogSettings
from penstock.partition.machine import Entry

SETTINGS = LogSettings(segment_bytes=16 << 20, allocate_bytes=64 << 10)
BATCH_BYTES = 4 << 20
_PREVIOUS = struct.Struct("<Q")  # the LSN of the previous entry, in place of a group's condition


class SpillLog:
    """The entries that a partition spilled and has not stored."""

    def __init__(
        self,
        fs: FileSystem,
        folder: str,
        *,
        random: Random,
        identity: bytes,
        partition: PartitionId,
        reach: tuple[int, int] = (0, 0),
        floor: int | None = None,
    ) -> None:
        """Open the log. `reach`: the LSN up to which the partition has stored, and that up to which it has spilled.

        `floor`: the LSN of the partition's snapshot; then the log has all entries since, also those that are stored,
        and `reach` is that LSN and the log's end.
        """
        self._partition = partition
        self._fs = fs
        self._folder = folder
        self._random = random
        self._identity = identity
        self._log: Log | None = None
        self._failed = False  # the end of the log may hold entries past `upto`
        self._abandoned = False
        self.floor = floor  # of entries that stay although they are stored; None: none
        self.upto = 0  # the last LSN that is durable here
        stored, spilled = reach
        if fs.exists(folder):
            self._check_entries(stored)
        if stored < spilled > self.upto:
            raise CorruptionError(folder, 0, f"what was spilled here ends at LSN {self.upto}, but reached {spilled}")

    def _check_entries(self, stored: int) -> None:
        """Check that each entry follows the one before, and the first follows the stored LSN."""
        for record in self._open():
            decoded = decode(record.body, where=self._folder, lsn=record.index)
            if any(section.header.partition != self._partition for section in decoded.groups[0].sections):
                raise CorruptionError(self._folder, 0, "what was spilled here is another partition's")
            previous = decoded.groups[0].condition  # empty in entries of the first version
            if decoded.last_epoch > stored and previous and _PREVIOUS.unpack(previous)[0] > max(stored, self.upto):
                before = _PREVIOUS.unpack(previous)[0]
                raise CorruptionError(
                    self._folder, 0, f"what was spilled from LSN {before} on, before {decoded.last_epoch}, is missing"
                )
            self.upto = decoded.last_epoch

    def _open(self) -> Log:
        if self._log is None:
            self._log = Log.open(
                self._fs, self._folder, random=self._random, settings=SETTINGS, identity=self._identity
            )
        return self._log

    def entries(self, after: int) -> Iterator[Entry]:
        """Yield the entries above an LSN, in order."""
        if self._log is None and not self._fs.exists(self._folder):
            return
        for record in self._open():
            decoded = decode(record.body, where=self._folder, lsn=record.index)
            if decoded.last_epoch > after:
                yield Entry(decoded.last_epoch, decoded.time_us, decoded.groups[0].sections)

    def append(self, entries: Sequence[Entry]) -> None:
        """Append entries, durably. Requires: they follow `upto`."""
        if not entries:
            return
        if self._abandoned:
            raise Closed(f"{self._folder} is of a dropped table")
        log, bodies, size = self._open(), list[bytes](), 0
        if self._failed:
            log.recover()
            log.truncate_back(log.synced)
        self._failed = True
        previous = self.upto
        for entry in entries:
            # The LSN is in the field of the epoch.
            group = Group(entry.sections, _PREVIOUS.pack(previous))
            bodies.append(encode(JournalRecord(entry.time_us, entry.lsn, (group,))))
            previous = entry.lsn
            size += len(bodies[-1])
            if size >= BATCH_BYTES:
                log.append(bodies)
                bodies, size = [], 0
        if bodies:
            log.append(bodies)
        log.sync()
        self._failed = False
        self.upto = entries[-1].lsn

    def covers(self, stored: int) -> int:
        """Return the LSN up to which the partition needs no journal, if it has stored up to `stored`."""
        return max(self.upto, stored if self.floor is None else min(self.floor, stored))

    def size_bytes(self) -> int:
        """Return about how many bytes the log takes."""
        return 0 if self._log is None else self._log.statistics().segments * SETTINGS.segment_bytes

    def drop_stored(self, stored: int) -> None:
        """Delete segments whose entries are all stored, or below the snapshot if there is one."""
        if self._log is None or self.upto == 0:
            return
        stored = stored if self.floor is None else min(self.floor, stored)
        keep = self._log.last + 1
        for record in self._log:
            if decode(record.body, where=self._folder, lsn=record.index).last_epoch > stored:
                keep = record.index
                break
        if keep > self._log.last and not self._failed:
            self._log.roll()  # else the last segment would stay forever, with only stored entries
        self._log.truncate_front(keep)

    def abandon(self) -> None:
        """Refuse further entries: the table was dropped, and its files are deleted elsewhere."""
        self._abandoned = True

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
