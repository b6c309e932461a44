"""Between the coordinator and the journal: a batch of deltas becomes records, then edits.

Thread: the coordinator's: `make_durable` by one thread at a time, `apply` by one at a time, one batch behind.
Invariants: (1) a section is encoded once. (2) record times never go back. (3) groups keep their order; one that refers
to files has its record to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from penstock.coordinator import Batch, Durability
from penstock.errors import DiskFull, ProcessLimit
from penstock.host.clock import Clock
from penstock.journal.consensus import Consensus
from penstock.journal.record import (
    REFERENCE,
    Group,
    JournalRecord,
    PartitionId,
    Section,
    SegmentedRecordHeader,
    encode,
)
from penstock.kinds import Kind
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.ledger import LEDGER
from penstock.partition.pending import PendingDelta, PendingGroup, parts
from penstock.partition.reference import Reference, encode_reference

T = TypeVar("T")

SHORTAGE_ATTEMPTS = 10  # to get a descriptor, each with a wait of its own


class FlushedRecord(NamedTuple):
    """A durable record, and what it was made from."""

    lsn: int
    record: JournalRecord
    groups: list[PendingGroup]
    decoded: list[list[Any]]


Flushed: TypeAlias = list[FlushedRecord]
Made: TypeAlias = tuple[JournalRecord, list[PendingGroup], list[list[Any]]]


class _Attempt(NamedTuple):
    """A batch on its way into the journal: as records, behind the last one that was committed."""

    last_epoch: int
    after: int
    made: list[Made]


class StoreFlusher:
    """Makes batches of a store durable and applies them."""

    def __init__(
        self,
        consensus: Consensus,
        dispatcher: Dispatcher,
        kinds: Mapping[str, Kind],
        *,
        clock: Clock,
        make_room: Callable[[], bool],
        check_folder: Callable[[], None],
        applied: Callable[[], None],
    ) -> None:
        self._consensus = consensus
        self._dispatcher = dispatcher
        self._kinds = kinds
        self._clock = clock
        self._time_us = 0  # of the last record of this process
        self._attempt: _Attempt | None = None  # the batch that was given to the journal last
        self._make_room = make_room  # called when the disk is full; whether it freed some space
        self._check_folder = check_folder  # raises if the journal is not in the store's folder any more
        self._applied = applied

    @property
    def durability(self) -> Durability:
        return Durability.DISK if self._consensus.durability == "disk" else Durability.QUORUM

    def make_durable(self, batch: Batch[PendingDelta], *, again: bool) -> Flushed:
        """One record for the batch, synced; more if groups refer to files."""
        attempt = self._attempt
        if not again or attempt is None or attempt.last_epoch != batch.last:
            attempt = self._prepare(batch)
        last = attempt.after + len(attempt.made)
        if (
            attempt.made and self._consensus.committed < last
        ):  # else an interrupt came right behind the sync: it is not written twice
            assert self._consensus.committed == attempt.after
            last = self._propose([encode(record) for record, _, _ in attempt.made])
        self._check_folder()  # after the sync: what is durable where nobody will look is not acknowledged
        flushed = [FlushedRecord(lsn, *record) for lsn, record in enumerate(attempt.made, last - len(attempt.made) + 1)]
        for record in flushed:
            for group in record.groups:
                group.lsn = record.lsn  # before it is applied: see `pending`
        return flushed

    def _prepare(self, batch: Batch[PendingDelta]) -> _Attempt:
        groups = [group for delta in batch.deltas for group in delta.groups]
        self._time_us = max(self._time_us, self._dispatcher.ledger.tree.time_us, self._clock.time_us())
        made = [self._record(some, batch.last) for some in _apart(groups)]
        self._attempt = attempt = _Attempt(batch.last, self._consensus.committed, made)
        return attempt

    def _record(self, groups: list[PendingGroup], last_epoch: int) -> Made:
        encoded: list[Group] = []
        decoded: list[list[Any]] = []
        for group in groups:
            held = [(number, part) for number, sections in group.sections.items() for part in parts(sections)]
            encoded.append(Group(tuple(self._encode(number, part) for number, part in held), group.condition))
            decoded.append([part for _, part in held])
        return JournalRecord(self._time_us, last_epoch, tuple(encoded)), groups, decoded

    def _encode(self, number: PartitionId, part: Any) -> Section:
        if number == LEDGER:
            return Section(SegmentedRecordHeader(number), part)
        info = self._dispatcher.ledger.table_by_id(number >> 16)
        if info is None:  # dropped since: the section is void, and stays in its place
            return Section(SegmentedRecordHeader(number), b"")
        if isinstance(part, Reference):
            return Section(SegmentedRecordHeader(number, REFERENCE), encode_reference(part))
        return Section(SegmentedRecordHeader(number), self._kinds[info.kind].encode(part))

    def _propose(self, bodies: list[bytes]) -> int:
        try:
            return _in_spite_of_shortage(lambda: self._consensus.propose(bodies))
        except DiskFull:  # found before a byte was written: trying again is no retry of a failed write
            if not self._make_room():
                raise
            return self._consensus.propose(bodies)

    def apply(self, flushed: Flushed) -> int:
        """Dispatch records; the LSN up to which everything is applied."""
        for lsn, record, groups, decoded in flushed:
            dispatch = partial(self._dispatcher.dispatch, record, lsn, decoded)
            judgement = _in_spite_of_shortage(dispatch)
            for group, verdict in zip(groups, judgement.verdicts, strict=True):
                group.verdict = verdict
        self._applied()
        return self._dispatcher.published

    def recover(self) -> None:
        self._consensus.recover()


def _in_spite_of_shortage(act: Callable[[], T]) -> T:
    """Do what changes nothing when it gets no descriptor, and waits for one each time; a failure stops the store."""
    for _ in range(SHORTAGE_ATTEMPTS - 1):
        with suppress(ProcessLimit):
            return act()
    return act()


def _apart(groups: list[PendingGroup]) -> list[list[PendingGroup]]:
    """The groups of each record, in order: one that refers to files stands alone."""
    records: list[list[PendingGroup]] = []
    alone = True
    for group in groups:
        refers = any(isinstance(part, Reference) for held in group.sections.values() for part in parts(held))
        if refers or alone:
            records.append([group])
        else:
            records[-1].append(group)
        alone = refers
    return records
