"""Turns a batch of deltas from the coordinator into journal records, then applies them.

Thread: the coordinator's: one at a time in `make_durable`, one at a time in `apply`, which is one batch behind.
Invariants: (1) a section is encoded once. (2) record times never go back. (3) groups keep their order; a group that
refers to files has a record of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock.coordinator import Batch, Durability, WriteCoordinator
from penstock.errors import DiskFull, Poisoned, ProcessLimit
from penstock.host.clock import Clock
from penstock.host.metrics import Histogram
from penstock.journal.consensus import Consensus
from penstock.journal.partitions import SHARD_BITS
from penstock.journal.record import (
    INLINE,
    REFERENCE,
    Group,
    JournalRecord,
    Lsn,
    Section,
    SegmentedRecordHeader,
    encode,
)
from penstock.kinds import Kind
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.ledger_records import LEDGER, Verdict
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.partition.reference import Reference, encode_reference
from penstock.store.keys import StoreKeys
from penstock.store.stream_counts import StreamCounts
from penstock.store.tracing import Tracer

T = TypeVar("T")

CHECK_US = 1_000  # a lone writer syncs every 150 us or so, and a check costs it 6
NOTED_MAX = 256  # batches whose times are counted together
SHORTAGE_ATTEMPTS = 10  # to get a file descriptor; each attempt waits for one


class FlushedRecord(msgspec.Struct, frozen=True):
    """A record with its LSN, and the groups it was made from."""

    lsn: int
    record: JournalRecord
    groups: list[PendingGroup]
    decoded: list[list[Any]]


class Flushed(msgspec.Struct, frozen=True):
    """A durable batch."""

    records: list[FlushedRecord]
    size: int  # bytes, as its writers counted them


Coordinator = WriteCoordinator[PendingDelta, Flushed, int]  # of a store


class _Attempt(msgspec.Struct, frozen=True):
    """The records of a batch being written, which follow the last committed LSN (`after`)."""

    last_epoch: int
    after: int
    records: list[FlushedRecord]


class StoreFlusher:
    """Makes batches of a store durable and applies them."""

    def __init__(
        self,
        consensus: Consensus,
        dispatcher: Dispatcher,
        kinds: Mapping[str, Kind],
        *,
        keys: StoreKeys,
        clock: Clock,
        make_room: Callable[[], bool],
        check_folder: Callable[[], None],
        applied: Callable[[int], None],
        tracer: Tracer | None = None,
    ) -> None:
        self._consensus = consensus
        self._dispatcher = dispatcher
        self._kinds = kinds
        self._keys = keys
        self._clock = clock
        self._time_us = 0  # of the last record of this process
        self._attempt: _Attempt | None = None  # the last batch passed to the journal
        self._misnumbered: str | None = None  # why no recovery helps: a record has not the number that it was given
        self._make_room = make_room  # called when the disk is full; returns whether it freed some space
        self._checked_us = 0  # when the folder was checked last
        self._check_folder = check_folder  # raises if the journal is not in the store's folder any more
        self._applied = applied
        self._monotonic_s = clock.monotonic_s  # bound once, for every flush
        self._tracer = tracer
        self.encode_seconds = Histogram()  # of a batch
        self.journal_seconds = Histogram()  # to write and sync its records
        self.dispatch_seconds = Histogram()  # to judge it and apply it to every partition
        self._note_encode_s = self.encode_seconds.note  # bound once, for every flush
        self._note_journal_s = self.journal_seconds.note
        self._note_dispatch_s = self.dispatch_seconds.note
        self._noted = 0  # batches since the notes were counted
        self.journal_failures = 0
        self.journal_retries = 0
        self.streams = StreamCounts()
        self.refused_groups = {verdict: 0 for verdict in Verdict if verdict is not Verdict.ACCEPTED}

    @property
    def durability(self) -> Durability:
        return Durability.DISK if self._consensus.durability == "disk" else Durability.QUORUM

    def make_durable(self, batch: Batch[PendingDelta], *, again: bool) -> Flushed:
        """Write and sync a batch: one record, or more if groups refer to files."""
        began_s = self._monotonic_s()
        attempt, committed = self._attempt, self._consensus.committed
        if not again or attempt is None or attempt.last_epoch != batch.last:
            attempt = self._prepare(batch, committed)
        records = attempt.records
        if records and committed < records[-1].lsn:  # else an interrupt came right after the sync
            assert committed == attempt.after
            bodies = [encode(records[0].record)] if len(records) == 1 else list(map(_body, records))
            self.journal_retries += again
            self._write(bodies, records[-1].lsn, began_s)
        # After the sync: do not acknowledge a write to a folder that was moved or deleted more than a moment ago.
        if not records or abs(records[-1].record.time_us - self._checked_us) >= CHECK_US:
            self._check_folder()
            self._checked_us = self._time_us
        for record in records:
            for group in record.groups:
                group.lsn = record.lsn  # before it is applied: see `pending`
        return Flushed(records, batch.size)

    def _write(self, bodies: list[bytes], lsn: int, began_s: float) -> None:
        """Write and sync encoded records, the last of which gets `lsn`."""
        encoded_s = self._monotonic_s()
        try:
            written = self._consensus.propose(bodies)
        except (ProcessLimit, DiskFull) as error:
            self.journal_failures += 1
            written = self._propose_again(bodies, error)
        except BaseException:
            self.journal_failures += 1
            raise
        if written != lsn:  # applied under another number, its sections would be taken for those of another record
            self._misnumbered = f"the journal wrote record {written} where {lsn} was next: open the store again"
            raise Poisoned(self._misnumbered)
        synced_s = self._monotonic_s()
        self._note_encode_s(encoded_s - began_s)
        self._note_journal_s(synced_s - encoded_s)
        if self._tracer is not None:
            size = sum(map(len, bodies))
            self._tracer.emit("encode", lsn, began_s, encoded_s, size=size)
            self._tracer.emit("journal", lsn, encoded_s, synced_s, size=size)

    def _prepare(self, batch: Batch[PendingDelta], committed: int) -> _Attempt:
        time_us, applied_us = self._clock.time_us(), self._dispatcher.ledger.tree.time_us
        if time_us < self._time_us or time_us < applied_us:
            time_us = max(self._time_us, applied_us)
        self._time_us = time_us
        deltas = batch.deltas
        if len(deltas) == 1 and len(deltas[0].groups) == 1:  # nearly always
            groups = deltas[0].groups
            encoded, decoded, _ = self._encode(groups[0])
            record = JournalRecord(time_us, batch.last, (encoded,))
            records = [FlushedRecord(committed + 1, record, groups, [decoded])]
        else:
            records = self._prepare_many(batch, committed)
        self._attempt = attempt = _Attempt(batch.last, committed, records)
        return attempt

    def _prepare_many(self, batch: Batch[PendingDelta], committed: int) -> list[FlushedRecord]:
        """Return the records of many groups: one, or more if groups refer to files."""
        contents: list[tuple[list[Group], list[PendingGroup], list[list[Any]]]] = []
        alone = True  # the next group begins a record
        for delta in batch.deltas:
            for group in delta.groups:
                encoded, decoded, refers = self._encode(group)
                if alone or refers:
                    contents.append(([], [], []))
                content = contents[-1]
                content[0].append(encoded)
                content[1].append(group)
                content[2].append(decoded)
                alone = refers
        records: list[FlushedRecord] = []
        lsn = committed
        for encodeds, groups, decodeds in contents:
            lsn += 1
            record = JournalRecord(self._time_us, batch.last, tuple(encodeds))
            records.append(FlushedRecord(lsn, record, groups, decodeds))
        return records

    def _encode(self, group: PendingGroup) -> tuple[Group, list[Any], bool]:
        """Return the encoded group, the objects its sections encode, and whether it refers to files."""
        sections: list[Section] = []
        decoded: list[Any] = []
        refers = False
        for number, waiting in group.sections.items():
            info = self._dispatcher.ledger.tables_by_id.get(number >> SHARD_BITS)
            for part in waiting if type(waiting) is tuple else (waiting,):
                form, payload = INLINE, b""  # table dropped since: an empty section keeps the position
                if number == LEDGER:
                    payload = part
                elif info is not None and isinstance(part, Reference):
                    form, payload, refers = REFERENCE, encode_reference(part), True
                elif info is not None:
                    payload = self._kinds[info.kind].encode(part)
                    if info.key is not None:
                        sections.append(self._keys.seal_section(number, payload))
                        decoded.append(part)
                        continue
                sections.append(Section(SegmentedRecordHeader(number, form), payload))
                decoded.append(part)
        return Group(tuple(sections), group.condition), decoded, refers

    def _propose_again(self, bodies: list[bytes], error: ProcessLimit | DiskFull) -> Lsn:
        """Propose records again: the error came before a byte was written, so this does not retry a failed write."""
        if isinstance(error, ProcessLimit):
            return _retry_shortage(lambda: self._consensus.propose(bodies))
        if self._make_room():
            return self._consensus.propose(bodies)
        raise error

    def apply(self, flushed: Flushed) -> int:
        """Dispatch the records; return the LSN up to which everything is applied, or late: see `Dispatcher`."""
        began_s = self._monotonic_s()
        for flushed_record in flushed.records:
            record, lsn, decoded = flushed_record.record, flushed_record.lsn, flushed_record.decoded
            try:
                judgement = self._dispatcher.dispatch(record, lsn, decoded)
            except ProcessLimit:
                judgement = _retry_shortage(partial(self._dispatcher.dispatch, record, lsn, decoded))
            for group, verdict in zip(flushed_record.groups, judgement.verdicts, strict=True):
                if group.condition and group.verdict is None:
                    group.verdict = verdict  # first: an interrupt may lose a count, and counts nothing twice
                    self.streams.note(group.condition, verdict)
                group.verdict = verdict
                if verdict is not Verdict.ACCEPTED:
                    self.refused_groups[verdict] += 1
            for number, index in judgement.refused_by.items():
                flushed_record.groups[number].refused_by = index
        ended_s = self._monotonic_s()
        self._note_dispatch_s(ended_s - began_s)
        self._noted += 1
        if self._noted >= NOTED_MAX:
            self._noted = 0
            for seconds in (self.encode_seconds, self.journal_seconds, self.dispatch_seconds):
                seconds.count_noted()
        if self._tracer is not None and flushed.records:
            self._tracer.emit("dispatch", flushed.records[-1].lsn, began_s, ended_s, size=flushed.size)
        self._applied(flushed.size)
        return self._dispatcher.published

    def recover(self) -> None:
        if self._misnumbered is not None:  # the batch is durable, and this process would apply it under another number
            raise Poisoned(self._misnumbered)
        self._consensus.recover()


def _body(flushed: FlushedRecord) -> bytes:
    return encode(flushed.record)


def _retry_shortage(act: Callable[[], T]) -> T:
    """Retry `act` while the process lacks file descriptors: a failure would stop the store.

    Requires: `act` changes nothing when it raises `ProcessLimit`, and waits for a descriptor each time.
    """
    for _ in range(SHORTAGE_ATTEMPTS - 1):
        with suppress(ProcessLimit):
            return act()
    return act()
