"""Entries that could not be applied: stored with their error, and skipped forever.

Every acknowledged entry should be applicable; one that is not is a bug in Penstock. It must not stop its table, so
after some attempts it is stored here, durably, before any later entry is applied. From then on every replay skips it,
even in a version that could apply it: later entries were applied without it, and messages were numbered.

One log serves the whole store; an entry is a journal record with the error in place of a condition.

Thread: any. `_lock` serializes changes.
Invariants: (1) `add` returns when the entry is durable. (2) there are at most ENTRIES_MAX entries, of BYTES_MAX bytes,
of existing tables: past that nothing is set aside, and a table that fails is paused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import xxhash

from penstock.errors import Backpressure, Invalid, PenstockError
from penstock.host import threads
from penstock.host.files import FileSystem
from penstock.host.randomness import Random
from penstock.journal.partitions import PartitionId
from penstock.journal.record import CODEC_SEALED, REFERENCE, Group, JournalRecord, Section, decode, encode
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
    """An acknowledged write that cannot be read.

    >>> store.troubles()  # a list of them: none
    []
    """

    table: str
    shard: int
    reason: str
    lsn: int  # of the record; 0 if it is not about one record


class _AsideDetail(msgspec.Struct, frozen=True, array_like=True):
    name: str
    reason: str


_encode = msgspec.msgpack.Encoder().encode
_details = msgspec.msgpack.Decoder(_AsideDetail)


def is_our_mistake(error: BaseException, sections: Sequence[Section]) -> bool:
    """Whether applying sections failed because of their content, not because of the disk, memory or files."""
    if isinstance(error, Invalid):
        return True
    if any(section.header.form == REFERENCE for section in sections):
        return False  # adopting files also depends on many other files
    return not isinstance(error, (OSError, MemoryError, PenstockError))


class AsideLog:
    """The entries set aside in a store."""

    def __init__(self, fs: FileSystem, root: str, *, random: Random, identity: bytes) -> None:
        self._fs = fs
        self._folder = f"{root}/{FOLDER}"
        self._random = random
        self._identity = identity
        self._log: Log | None = None
        self._lock = threads.lock("partition.aside")
        self._entries: tuple[tuple[int, SetAside], ...] = ()  # each with its index in the log; replaced whole
        self.digests: dict[tuple[int, int], set[bytes]] = {}  # by partition and LSN
        self.is_alive: Callable[[PartitionId], bool] = lambda partition: True  # whether its table exists
        if fs.exists(self._folder):
            for record in self._open():
                self._note(record.index, decode(record.body, where=self._folder, lsn=record.index))

    @property
    def unchanged(self) -> threads.Mutex:
        """The lock under which entries are added and removed: while it is held the log's files do not change."""
        return self._lock

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
        entry = SetAside(detail.name, partition, record.last_epoch, record.time_us, size, detail.reason)
        self.digests.setdefault((partition, record.last_epoch), set()).add(_digest(group.sections))
        self._entries = (*self._entries, (index, entry))

    def holds(self, partition: PartitionId, lsn: int, sections: Sequence[Section]) -> bool:
        """Whether these sections of a record were set aside."""
        digests = self.digests.get((partition, lsn))
        return digests is not None and _digest(sections) in digests

    def add(self, name: str, lsn: int, time_us: int, sections: Sequence[Section], error: BaseException) -> None:
        """Set sections of one partition aside, durably; `Backpressure` if the log is full."""
        with self._lock:
            self._add(name, lsn, time_us, sections, error)

    def _add(self, name: str, lsn: int, time_us: int, sections: Sequence[Section], error: BaseException) -> None:
        size = sum(len(section.payload) for section in sections)
        alive = [entry for _, entry in self._entries if self.is_alive(PartitionId(entry.partition))]
        if len(alive) >= ENTRIES_MAX or sum(entry.size_bytes for entry in alive) + size > BYTES_MAX:
            raise Backpressure(f"{len(alive)} entries are set aside in {self._folder}, the limit: the table waits")
        log = self._open()
        log.recover()  # after a failure: discards what was not synced
        if log.last > log.synced:
            log.truncate_back(log.synced)
        self._drop_dead(log)
        text = str(error)
        if any(section.header.codec == CODEC_SEALED for section in sections):
            text = "its text is not kept, because the table is encrypted, and it may quote a row"
        reason = f"{type(error).__name__}: {text}"[:REASON_CHARACTERS_MAX]
        reason = reason.encode(errors="replace").decode()
        group = Group(tuple(sections), _encode(_AsideDetail(name, reason)))
        record = JournalRecord(time_us, lsn, (group,))  # the LSN is in the field of the epoch
        index = log.append([encode(record)])
        log.sync()
        self._note(index, record)

    def undo_add(self, partition: PartitionId, lsn: int) -> None:
        """Remove an entry, durably, if it is the newest: skipping it did not help."""
        with self._lock:
            if not self._entries or (self._entries[-1][1].partition, self._entries[-1][1].lsn) != (partition, lsn):
                return  # another partition's came after it: this one stays, and `holds` finds it
            log = self._open()
            log.truncate_back(log.last - 1)
            self._entries = self._entries[:-1]
            self.digests.pop((partition, lsn))

    def _drop_dead(self, log: Log) -> None:
        """Delete the oldest entries whose tables were dropped."""
        alive = [index for index, entry in self._entries if self.is_alive(PartitionId(entry.partition))]
        first = log.truncate_front(min(alive, default=log.last + 1))
        self._entries = tuple(entry for entry in self._entries if entry[0] >= first)

    def entries(self) -> list[SetAside]:
        """Return the entries whose table exists, oldest first."""
        return [entry for _, entry in self._entries if self.is_alive(PartitionId(entry.partition))]

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def _digest(sections: Sequence[Section]) -> bytes:
    digest = xxhash.xxh3_128()
    for section in sections:
        digest.update(len(section.payload).to_bytes(8, "little"))
        digest.update(section.payload)
    return digest.digest()
