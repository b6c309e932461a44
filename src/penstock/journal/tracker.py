"""Which partitions and members still need which journal records: truncation is computed only here.

A record is needed here until every partition with a section in it has stored that section (in its own files) or spilled
it (to its own log). An idle partition needs no record and delays no truncation. In a cluster a record is required until
every other member has it on disk, too: those that are behind are sent it from here. A member that is too far behind is
not waited for; it takes a snapshot.

All of it is rebuilt when a store is opened: needs by the records that are replayed, acknowledgements by what members
report; one that has not reported yet counts as having nothing.

Thread: `_lock` guards all.
Invariants: (1) `needed_from` never passes a record that some partition would have to replay. (2) `required_from` passes
neither that nor a record that a member lacks, unless it is below `kept_from`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import Invalid
from penstock.host import threads
from penstock.journal.partitions import PartitionId
from penstock.journal.record import Lsn


@dataclass(frozen=True, slots=True)
class SegmentedWatermarks:
    """The progress of a partition, in LSNs."""

    stored: int = 0  # in files of its own
    applied: int = 0  # in its state
    durable: int = 0  # safe in the journal
    highest: int = 0  # dispatched to it

    def __post_init__(self) -> None:
        if not 0 <= self.stored <= self.applied <= self.durable <= self.highest:
            raise Invalid(
                "watermarks must be ordered stored <= applied <= durable <= highest, not "
                f"{self.stored}, {self.applied}, {self.durable}, {self.highest}"
            )


class MemberAcks(NamedTuple):
    """What the other members of a cluster have."""

    upto: Mapping[str, int]  # by member: it has every record up to this LSN on disk, as far as is known here
    kept_from: int  # records below this LSN are not kept for a member that is behind


@dataclass(slots=True)
class _Needs:
    waiting: deque[int]  # LSNs with a section for it that is not yet stored or spilled
    safe: dict[int, int]  # by member: the LSN up to which its sections are stored or spilled


class SegmentedAckTracker:
    """The needs of all partitions. A record can be dropped when `quorum` members have acknowledged it."""

    def __init__(self, *, quorum: int = 1, others: Iterable[str] = ()) -> None:
        """`others` are the other members of the cluster."""
        if quorum < 1:
            raise Invalid(f"a quorum is at least 1, not {quorum}")
        self._quorum = quorum
        self._lock = threads.lock("journal.tracker")
        self._needs: dict[PartitionId, _Needs] = {}  # guarded by _lock
        self._upto = dict.fromkeys(others, 0)  # guarded by _lock: as `MemberAcks.upto`
        self._kept_from = 0  # guarded by _lock

    def record(self, lsn: int, partitions: Iterable[PartitionId]) -> None:
        """Record which partitions have sections in a record. Requires: LSNs ascend."""
        with self._lock:
            for partition in partitions:
                needs = self._needs.get(partition)
                if needs is None:
                    needs = self._needs[partition] = _Needs(deque(), {})
                needs.waiting.append(lsn)

    def acknowledge(self, partition: PartitionId, upto: int, member: int = 0) -> None:
        """Record that a member has stored or spilled all sections of a partition up to this LSN."""
        with self._lock:
            needs = self._needs.get(partition)
            if needs is None:
                return
            needs.safe[member] = max(upto, needs.safe.get(member, 0))
            agreed = sorted(needs.safe.values(), reverse=True)
            floor = agreed[self._quorum - 1] if len(agreed) >= self._quorum else 0
            while needs.waiting and needs.waiting[0] <= floor:
                needs.waiting.popleft()

    def hear(self, acks: MemberAcks) -> None:
        """Take in what members have acknowledged. A late report, or one of a stranger, changes nothing."""
        with self._lock:
            for member in self._upto.keys() & acks.upto.keys():
                self._upto[member] = max(self._upto[member], acks.upto[member])
            self._kept_from = max(self._kept_from, acks.kept_from)

    def forget(self, partition: PartitionId) -> None:
        """Drop the needs of a partition whose table was dropped."""
        with self._lock:
            self._needs.pop(partition, None)

    def needed_from(self, dispatched: int) -> Lsn:
        """Return the oldest LSN that must stay, if all up to `dispatched` are recorded here."""
        with self._lock:
            oldest = [needs.waiting[0] for needs in self._needs.values() if needs.waiting]
        return Lsn(min([*oldest, dispatched + 1]))

    def required_from(self, dispatched: int) -> Lsn:
        """Return the oldest LSN that must stay for this member or another: the journal is cut below it."""
        needed = self.needed_from(dispatched)
        with self._lock:
            lacked = min((upto + 1 for upto in self._upto.values()), default=needed)
            return Lsn(min(needed, max(lacked, self._kept_from)))

    def acknowledged(self) -> dict[str, int]:
        """Return, for each other member, the LSN up to which it is known to have all records on disk."""
        with self._lock:
            return dict(self._upto)

    def waiting_below(self, lsn: int) -> list[PartitionId]:
        """Return the partitions that still need a record below `lsn`."""
        with self._lock:
            return [p for p, needs in self._needs.items() if needs.waiting and needs.waiting[0] < lsn]

    def oldest(self, partition: PartitionId) -> int | None:
        """Return the oldest LSN that a partition needs; None if it needs none."""
        with self._lock:
            needs = self._needs.get(partition)
            return needs.waiting[0] if needs is not None and needs.waiting else None
