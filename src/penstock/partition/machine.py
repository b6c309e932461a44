"""The state machine of a partition: what a kind of table implements for the dispatcher.

Thread: `apply` is called by one thread at a time, in LSN order; the rest from any.
Invariants: (1) the result of `apply` depends only on the sections and the state, never on a clock. (2) it is installed
in one step, so a retry after an error finds nothing half done. (3) `stored <= applied`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from penstock.errors import CorruptionError, Invalid
from penstock.journal.partitions import PartitionId
from penstock.journal.record import Section
from penstock.manifest.records import ChunkEntryRecord, WalStateRecord
from penstock.partition.storage_options import FOLDER

T = TypeVar("T")
SPILL = "-log"  # behind the name of a shard's folder: what the journal spilled for it


@dataclass(frozen=True, slots=True)
class PartitionDescriptor:
    """Identity of a partition."""

    partition: PartitionId
    table_id: int
    shard: int
    name: str  # of the table
    kind: str
    chunk_dir: str = FOLDER
    wal_dir: str = FOLDER

    @property
    def folder(self) -> str:
        """Where the shard keeps its files, relative to the store."""
        return f"{self.chunk_dir}/{self.table_id}/{self.shard}"

    @property
    def log_folder(self) -> str:
        """Where the shard's own log is, relative to the store."""
        return f"{self.wal_dir}/{self.table_id}/{self.shard}{SPILL}"


class Entry(msgspec.Struct, frozen=True):
    """All that one record holds for one partition: its accepted sections in group order."""

    lsn: int
    time_us: int
    sections: tuple[Section, ...]
    decoded: tuple[Any, ...] | None = None  # what the sections were encoded from, if written by this process

    @property
    def size(self) -> int:
        """Bytes of its sections."""
        return sum(len(section.payload) for section in self.sections)


class PartitionContent(msgspec.Struct, frozen=True):
    """The files of a partition at one LSN, and the rows of the manifest that list them: see `snapshots`."""

    lsn: int  # they hold every entry up to here, and none after it
    partition_index: int  # the partition's own number of its last entry: a queue's last sequence, a tree's LSN
    progress: tuple[tuple[int, WalStateRecord], ...]  # by what is added to the number of the shard
    chunks: tuple[tuple[int, ChunkEntryRecord], ...] = ()  # by chunk id
    files: tuple[tuple[str, int], ...] = ()  # names, relative to the folder of the shard, and sizes
    copied: tuple[tuple[str, bytes], ...] = ()  # files that change in place: their names and bytes
    damaged: Callable[[], list[tuple[str, str]]] = (
        list  # reads files that are not chunks; (path, reason) for each damage
    )


class PartitionStateMachine(Protocol):
    """The state of a partition."""

    @property
    def applied(self) -> int:
        """All entries up to this LSN are in the state."""

    @property
    def stored(self) -> int:
        """All entries up to this LSN are in the partition's own files."""

    def apply(self, entry: Entry) -> None:
        """Apply an entry. Requires: its LSN is above `applied`.

        It must not add checks that a section could fail: whatever the kind's `receive` and its API accept can be
        applied. An entry without sections counts as applied and changes nothing.
        """

    def in_memory(self, entry: Entry) -> bool:
        """Whether applying an entry now neither reads nor writes a file. If unsure, False."""
        return False

    @property
    def broken(self) -> bool:
        """Whether its files failed, so that only `renew` helps."""

    def renew(self) -> None:
        """Restart from the stored state; all later entries are applied again."""

    def snapshot(self) -> Any:
        """Return a snapshot of the current state, readable without a time limit."""

    def is_read(self) -> bool:
        """Whether a snapshot of it is open."""

    def memory_bytes(self) -> int:
        """Return the bytes that are only in memory."""

    @property
    def stores_cheaply(self) -> bool:
        """Whether `store_now` only syncs existing files: then nothing is ever spilled for it."""

    def store_now(self) -> None:
        """Write everything to files, in this thread, and commit the stored LSN."""

    def exported(self) -> AbstractContextManager[PartitionContent]:
        """Write everything to files; until the end of the block, the files of that moment stay and can be copied."""

    def close(self) -> None: ...


class MachineFactory(Protocol):
    """Opens state machines; the store passes the dispatcher one that knows the kinds."""

    def open(self, descriptor: PartitionDescriptor, options: bytes) -> PartitionStateMachine: ...

    def collect(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine | None) -> None:
        """Close the machine of a dropped partition, if it was open, and delete its files once they have no readers."""


def readable(decode: Callable[[bytes], T], payload: bytes) -> T:
    """Decode a section; `Invalid` if that fails: its record is intact, so the writer was wrong."""
    try:
        return decode(payload)
    except CorruptionError as error:
        raise Invalid(f"a section does not decode: {error.reason}") from error


def fold(entries: Sequence[Entry]) -> tuple[Section, ...]:
    """Return the sections of several entries in order."""
    return tuple(section for entry in entries for section in entry.sections)
