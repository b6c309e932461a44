"""The state machine of a partition: what a kind of table gives to the dispatcher.

Thread: `apply` is called by one thread at a time, in LSN order; the rest from any.
Invariants: (1) what `apply` does depends on the sections and the state alone: never on a clock. (2) it is installed in
one step, so a retry after an error finds nothing half done. (3) `stored <= applied`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from penstock.errors import CorruptionError, Invalid
from penstock.journal.partitions import PartitionId
from penstock.journal.record import Section

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PartitionDescriptor:
    """A partition as everybody knows it."""

    partition: PartitionId
    table: int
    shard: int
    name: str  # of the table
    kind: str

    @property
    def folder(self) -> str:
        """Where the shard keeps its files, relative to the store."""
        return f"tables/{self.table}/{self.shard}"


class Entry(msgspec.Struct, frozen=True):
    """All that one record holds for one partition: its accepted sections in group order."""

    lsn: int
    time_us: int
    sections: tuple[Section, ...]
    decoded: tuple[Any, ...] | None = None  # what the sections were made from, where the writer is at hand

    @property
    def size(self) -> int:
        """Bytes of its sections."""
        return sum(len(section.payload) for section in self.sections)


class PartitionStateMachine(Protocol):
    """The state of a partition."""

    @property
    def applied(self) -> int:
        """All up to this LSN is in the state."""

    @property
    def stored(self) -> int:
        """All up to this LSN is in files of its own."""

    def apply(self, entry: Entry) -> None:
        """Take in an entry. Requires: its LSN is above `applied`.

        It has no rule of its own that a section could break: what the kind's `receive` and its API let pass can be
        applied. An entry without sections counts as applied, and changes nothing.
        """

    @property
    def broken(self) -> bool:
        """Whether its files failed, so that only `renew` helps."""

    def renew(self) -> None:
        """Begin anew from what is stored; all after that is applied again."""

    def snapshot(self) -> Any:
        """The state of now, to be read for as long as one likes."""

    def is_read(self) -> bool:
        """Whether somebody holds a snapshot of it."""

    def memory_bytes(self) -> int:
        """What is held in memory only."""

    @property
    def stores_cheaply(self) -> bool:
        """Whether `store_now` only syncs what is in files already: then nothing is ever spilled for it."""

    def store_now(self) -> None:
        """Bring everything into files, in this thread, and commit how far that goes."""

    def close(self) -> None: ...


class MachineFactory(Protocol):
    """Opens state machines; the store gives the dispatcher one that knows the kinds."""

    def open(self, descriptor: PartitionDescriptor, options: bytes) -> PartitionStateMachine: ...

    def collect(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine | None) -> None:
        """Close the machine of a dropped partition, if it was open, and remove its files, when nobody reads them."""


def readable(decode: Callable[[bytes], T], payload: bytes) -> T:
    """What a section holds; `Invalid` if it does not decode: its record is sound, so whoever wrote it was wrong."""
    try:
        return decode(payload)
    except CorruptionError as error:
        raise Invalid(f"a section does not decode: {error.reason}") from error


def fold(entries: Sequence[Entry]) -> tuple[Section, ...]:
    """The sections of several entries in order."""
    return tuple(section for entry in entries for section in entry.sections)
