"""The settings of a log, and what it reports: its end, its statistics, a repair.

Thread: values.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.arguments import SIZE_MAX, set_wholes
from penstock.errors import Invalid
from penstock.log.record import Index


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Sizes of a log's files.

    >>> penstock.StoreSettings(journal=penstock.LogSettings(segment_bytes=16 << 20)).journal.segment_bytes
    16777216
    """

    segment_bytes: int = 64 << 20  # a segment is rolled before it would grow past this
    allocate_bytes: int = 1 << 20  # zero-filled room ahead for small appends
    index_bytes: int = 64 << 10  # bytes per entry of the sparse index

    def __post_init__(self) -> None:
        set_wholes(self, ("segment_bytes", "allocate_bytes", "index_bytes"), 1, SIZE_MAX)
        if self.segment_bytes < max(self.index_bytes, self.allocate_bytes):
            raise Invalid("segment_bytes must be at least index_bytes and allocate_bytes")


@dataclass(frozen=True, slots=True)
class Repair:
    """The end of a log that was not closed, as opening repaired it."""

    path: str
    offset: int
    resynced: int  # valid records that were not known to be synced, and are now
    torn: str | None  # why the bytes after them are not a record; None if nothing was written there


@dataclass(frozen=True, slots=True)
class LogEnd:
    """How far a log reaches, by its content: file names alone would not show a missing end."""

    path: str  # of its last segment, or the folder if there is none
    offset: int
    first: int
    last: int
    incarnation: int  # the highest of its segments; 0 if there is none


@dataclass(frozen=True, slots=True)
class LogStatistics:
    """The state of a log at one moment."""

    first: Index
    last: Index
    synced: Index
    incarnation: int
    segments: int
    poisoned: bool
