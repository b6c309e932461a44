"""Writes that are not yet in the journal: groups of sections, as their kinds represent them before encoding.

Thread: a delta changes only under the coordinator's lock, and never once it is sealed; a group's `lsn`, `verdict` and
`refused_by` are set once, by the thread that flushes.
Invariants: (1) groups are in epoch order; only the last, if it is open, takes more plain writes. (2) a group's `lsn`
is set before it is applied: a reader that finds a row of that LSN in a tree can skip the group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain, starmap
from typing import Any

import msgspec

from penstock.journal.partitions import PartitionId
from penstock.partition.ledger_records import Verdict
from penstock.partition.reference import Reference


class PendingGroup(msgspec.Struct, eq=False):
    """A future group of a record."""

    condition: bytes = b""
    sections: dict[PartitionId, Any] = {}  # a section, or a tuple of consecutive sections
    judged: bool = False  # it depended on rows, which were as it expects: see `store.conditions`
    lsn: int | None = None
    verdict: Verdict | None = None
    refused_by: int | None = None  # the index of the condition that refused it, if one did
    withdrawals: tuple[Callable[[], None], ...] = ()  # to be called if it is refused: see `Kind.admit`


class PendingDelta(msgspec.Struct, eq=False):
    """A future record, or a few."""

    groups: list[PendingGroup] = []
    open: dict[PartitionId, Any] | None = None  # the sections of a last group that takes plain writes

    def is_empty(self) -> bool:
        return not self.groups

    def size_estimate(self) -> int:
        return sum(len(section) for group in self.groups for section in group.sections.values())

    def merge(self, other: PendingDelta, /) -> None:
        self.open = None
        self.groups = [*self.groups, *other.groups]

    def begin(self) -> dict[PartitionId, Any]:
        """Open a group for plain writes."""
        group = PendingGroup()
        self.groups.append(group)
        self.open = group.sections
        return group.sections

    def add(self, group: PendingGroup) -> None:
        """Append a group that takes no more writes."""
        self.open = None  # first: after an interrupt between the two, a later write would come before this group
        self.groups.append(group)

    def absorb(self, group: PendingGroup) -> bool:
        """Merge a group of plain writes by key into the open group; return False if it is not such a group.

        They share a record, so they are still written together, and readers have few groups to check.
        """
        if group.condition or group.judged:
            return False
        sections = [(number, part) for number, some in group.sections.items() for part in parts(some)]
        if not all(getattr(part, "plain", False) for _, part in sections):
            return False
        open_sections = self.begin() if self.open is None else self.open
        new: dict[PartitionId, Any] = {}
        rows: list[tuple[Any, Any]] = [(open_sections, new)]  # maps, and what is added to them
        logs: list[tuple[Any, Any]] = []
        for number, part in sections:
            section = open_sections.get(number)
            if section is None:
                new.setdefault(number, type(part)()).update(part)
            elif isinstance(section, dict):
                rows.append((section, part))
            else:  # see `PartLog`
                logs.append((section.log, part.log))
        # In one call, behind which alone a signal may arrive: an interrupt leaves the whole group or nothing of it.
        deque(chain(starmap(dict.update, rows), starmap(list.extend, logs)), maxlen=0)
        return True

    def sections(self, partition: PartitionId) -> list[tuple[PendingGroup, Any]]:
        """Return the sections of a partition that read-your-writes readers may see, newest first."""
        return [
            (group, section)
            for group in reversed(self.groups)
            if not group.condition and not group.judged and partition in group.sections
            for section in reversed(parts(group.sections[partition]))
            if not isinstance(section, Reference)  # files become visible when they are adopted
        ]


def parts(sections: Any) -> tuple[Any, ...]:
    """Return the sections of a partition in a group, in order."""
    return sections if type(sections) is tuple else (sections,)


def add_group(delta: PendingDelta, group: PendingGroup, _b: None, _c: None) -> None:
    """Append a group under the coordinator's lock."""
    delta.add(group)


def add_or_absorb(delta: PendingDelta, group: PendingGroup, _b: None, _c: None) -> None:
    """Append or absorb a group in the owner, where all waiting groups become one record."""
    if delta.absorb(group):
        group.verdict = Verdict.ACCEPTED  # no plain write is ever refused
    else:
        delta.add(group)
