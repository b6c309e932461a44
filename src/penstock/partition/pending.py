"""Writes on their way to the journal: groups of sections, as their kinds hold them before they are encoded.

Thread: a delta is changed under the coordinator's lock, and by nobody once it is sealed; a group's `lsn` and `verdict`
are set once, by the thread that flushes; so is `refused_by`.
Invariants: (1) groups are in epoch order; only the last, if it is open, takes more plain writes. (2) a group's `lsn`
is set before it is applied: who finds the row of that LSN in a tree need not look at the group.
"""

from __future__ import annotations

from typing import Any

from penstock.journal.partitions import PartitionId
from penstock.partition.ledger import Verdict
from penstock.partition.reference import Reference


class PendingGroup:
    """What will be one group of a record."""

    __slots__ = ("condition", "lsn", "refused_by", "sections", "verdict")

    def __init__(self, condition: bytes = b"") -> None:
        self.condition = condition
        self.sections: dict[PartitionId, Any] = {}  # a section, or a tuple of sections that follow each other
        self.lsn: int | None = None
        self.verdict: Verdict | None = None
        self.refused_by: int | None = None  # the index of the condition that refused it, if one did


class PendingDelta:
    """What will be one record, or a few."""

    __slots__ = ("groups", "open")

    def __init__(self) -> None:
        self.groups: list[PendingGroup] = []
        self.open: dict[PartitionId, Any] | None = None  # the sections of a last group that takes plain writes

    def is_empty(self) -> bool:
        return not self.groups

    def size_estimate(self) -> int:
        return sum(len(section) for group in self.groups for section in group.sections.values())

    def merge(self, other: PendingDelta, /) -> None:
        self.groups = [*self.groups, *other.groups]
        self.open = None

    def begin(self) -> dict[PartitionId, Any]:
        """Open a group for plain writes."""
        group = PendingGroup()
        self.groups.append(group)
        self.open = group.sections
        return group.sections

    def add(self, group: PendingGroup) -> None:
        """Append a group that stands alone."""
        self.groups.append(group)
        self.open = None

    def absorb(self, group: PendingGroup) -> bool:
        """Make a group of plain writes by key a part of the open one; False if it is not of that sort.

        They share a record, so they are still written together. Readers look through few groups then, not through all.
        """
        if group.condition:
            return False
        sections = [(number, part) for number, some in group.sections.items() for part in parts(some)]
        if not all(getattr(part, "plain", False) for _, part in sections):
            return False
        open_sections = self.begin() if self.open is None else self.open
        for number, part in sections:
            rows = open_sections.get(number)
            if rows is None:
                rows = open_sections[number] = type(part)()
            rows.update(part)
        return True

    def sections(self, partition: PartitionId) -> list[tuple[PendingGroup, Any]]:
        """The sections of a partition that readers of their own writes may see, newest first."""
        return [
            (group, section)
            for group in reversed(self.groups)
            if not group.condition and partition in group.sections
            for section in reversed(parts(group.sections[partition]))
            if not isinstance(section, Reference)  # files are seen when they are adopted
        ]


def parts(held: Any) -> tuple[Any, ...]:
    """The sections of a partition in a group, in order."""
    return held if type(held) is tuple else (held,)


def add_group(delta: PendingDelta, group: PendingGroup, _b: None, _c: None) -> None:
    """Append a group under the coordinator's lock."""
    delta.add(group)


def add_or_absorb(delta: PendingDelta, group: PendingGroup, _b: None, _c: None) -> None:
    """The same in the owner, where all that waits becomes one record."""
    if delta.absorb(group):
        group.verdict = Verdict.ACCEPTED  # no plain write is ever refused
    else:
        delta.add(group)
