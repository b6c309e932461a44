"""Entries that could not be applied: kept with their error, passed over by everybody, for good.

What was acknowledged can be applied; an entry that cannot be is a mistake of Penstock's own. It must not stop its
table, so after some attempts it is put here, durably, before anything after it is applied. From then on every replay
passes over it, also one by a Penstock that could apply it: later entries were applied without it, and messages were
numbered.

One log for the whole store; an entry is a record as the journal has them, with the error in the place of a condition.

Thread: the dispatcher's turn guards `add`; the rest from any.
Invariants: (1) `add` returns when the entry is durable. (2) entries of tables that exist take at most ENTRIES_MAX
places and BYTES_MAX bytes: past that nothing is set aside, and a table that fails is paused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import xxhash

from penstock.errors import Backpressure, Invalid, PenstockError
from penstock.host.files import FileSystem
from penstock.host.randomness import Random
from penstock.journal.partitions import PartitionId
from penstock.journal.record import REFERENCE, Group, JournalRecord, Section, decode, encode
from penstock.log import Log, LogSettings

FOLDER = "aside"
ENTRIES_MAX = 1_000
BYTES_MAX = 256 << 20
REASON_CHARACTERS_MAX = 1_000
SETTINGS = LogSettings(segment_bytes=16 << 20, allocate_bytes=64 << 10)


class SetAside(msgspec.Struct, frozen=True, array_like=True):
    """An entry that was set aside."""

    name: str  # of the table
    partition: int
    lsn: int
    time_us: int
    size_bytes: int
    reason: str


class Trouble(msgspec.Struct, frozen=True, array_like=True):
    """Something that was acknowledged and cannot be read."""

    table: str
    shard: int
    reason: str
    lsn: int  # of the record; 0 if it is not one


class _AsideDetail(msgspec.Struct, frozen=True, array_like=True):
    name: str
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_details = msgspec.msgpack.Decoder(_AsideDetail)


def is_our_mistake(error: BaseException, sections: Sequence[Section]) -> bool:
    """Whether applying sections failed for a reason that lies in them, and not in the disk, in memory or in files."""
    if isinstance(error, Invalid):
        return True
    if any(section.header.form == REFERENCE for section in sections):
        return False  # to adopt files is work on many others
    return not isinstance(error, (OSError, MemoryError, PenstockError))


class AsideLog:
    """What was set aside in a store."""

    def __init__(self, fs: FileSystem, root: str, *, random: Random, identity: bytes) -> None:
        self._fs = fs
        self._folder = f"{root}/{FOLDER}"
        self._random = random
        self._identity = identity
        self._log: Log | None = None
        self._entries: tuple[tuple[int, SetAside], ...] = ()  # each with its place in the log; replaced whole
        self.digests: dict[tuple[int, int], set[bytes]] = {}  # by partition and LSN
        self.is_alive: Callable[[PartitionId], bool] = lambda partition: True  # whether its table exists
        if fs.exists(self._folder):
            for record in self._open():
                self._note(record.index, decode(record.body, where=self._folder, lsn=record.index))

    def _open(self) -> Log:
        if self._log is None:
            self._log = Log.open(
                self._fs, self._folder, random=self._random, settings=SETTINGS, identity=self._identity
            )
        return self._log

    def _note(self, index: int, record: JournalRecord) -> None:
        (group,) = record.groups
        detail, partition = _details.decode(group.condition), group.sections[0].header.partition
        size = sum(len(section.payload) for section in group.sections)
        told = SetAside(detail.name, partition, record.last_epoch, record.time_us, size, detail.reason)
        self.digests.setdefault((partition, record.last_epoch), set()).add(_digest(group.sections))
        self._entries = (*self._entries, (index, told))

    def holds(self, partition: PartitionId, lsn: int, sections: Sequence[Section]) -> bool:
        """Whether these sections of a record were set aside."""
        digests = self.digests.get((partition, lsn))
        return digests is not None and _digest(sections) in digests

    def add(self, name: str, lsn: int, time_us: int, sections: Sequence[Section], error: BaseException) -> None:
        """Set sections of one partition aside, durably; `Backpressure` if too much is here already."""
        size = sum(len(section.payload) for section in sections)
        kept = [told for _, told in self._entries if self.is_alive(PartitionId(told.partition))]
        if len(kept) >= ENTRIES_MAX or sum(told.size_bytes for told in kept) + size > BYTES_MAX:
            raise Backpressure(f"{len(kept)} entries were set aside in {self._folder}: no more are, so the table waits")
        log = self._open()
        log.recover()  # after a failure: what was not synced is forgotten
        if log.last > log.synced:
            log.truncate_back(log.synced)
        self._drop_dead(log)
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS_MAX]
        reason = reason.encode(errors="replace").decode()
        group = Group(tuple(sections), _encode(_AsideDetail(name, reason)))
        record = JournalRecord(time_us, lsn, (group,))  # the LSN stands where a journal record has its epoch
        index = log.append([encode(record)])
        log.sync()
        self._note(index, record)

    def take_back(self) -> None:
        """Forget the newest entry, durably: its table cannot go on without it either. Requires: `add` was the last."""
        log = self._open()
        log.truncate_back(log.last - 1)
        _, told = self._entries[-1]
        self._entries = self._entries[:-1]
        self.digests.pop((told.partition, told.lsn))

    def _drop_dead(self, log: Log) -> None:
        """Give up the oldest entries as far as their tables were dropped."""
        alive = [index for index, told in self._entries if self.is_alive(PartitionId(told.partition))]
        first = log.truncate_front(min(alive, default=log.last + 1))
        self._entries = tuple(entry for entry in self._entries if entry[0] >= first)

    def entries(self) -> list[SetAside]:
        """All of them whose table exists, oldest first."""
        return [told for _, told in self._entries if self.is_alive(PartitionId(told.partition))]

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def _digest(sections: Sequence[Section]) -> bytes:
    digest = xxhash.xxh3_128()
    for section in sections:
        digest.update(len(section.payload).to_bytes(8, "little"))
        digest.update(section.payload)
    return digest.digest()
