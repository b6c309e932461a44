"""Routes durable records: to the ledger first, then each section to its partition.

A record is dispatched by one thread, in LSN order, and normally applied at once in that thread. `backlog` has what
becomes of an entry that cannot be applied.

Thread: `dispatch` and `snapshot` exclude each other (`turn`); `admit` from any thread, without a lock.
Invariants: (1) at most one apply of a partition is in flight. (2) a snapshot lies between two records. (3) a record
that was dispatched is in the tracker until the partition has stored it, whatever happens to the partition. (4) an
interrupt may end a dispatch between any two lines: every step can be repeated, and the next thread to take the turn
finishes the interrupted record (`finish`). (5) `published` is the last record with every section applied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from penstock.errors import (
    Backpressure,
    Closed,
    FixTheCall,
    NotFound,
    PartitionPaused,
    PenstockError,
    ProcessLimit,
)
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.journal.partitions import SHARD_BITS, PartitionId, partition_id, shard_number, table_of
from penstock.journal.record import JournalRecord, Section
from penstock.journal.tracker import SegmentedAckTracker
from penstock.partition.aside import AsideLog, Trouble, is_our_mistake
from penstock.partition.backlog import Backlogs, DispatcherSettings, Partition
from penstock.partition.ledger import LEDGER, Judgement, Ledger, TableInfo, Verdict, dropped_table
from penstock.partition.machine import Entry, MachineFactory, PartitionDescriptor
from penstock.partition.spill import SpillLog

logger = logging.getLogger(__name__)


class _BegunRecord(msgspec.Struct, frozen=True):
    """A record whose dispatch has not finished."""

    record: JournalRecord
    lsn: int
    decoded: Sequence[Sequence[Any]] | None


class Dispatcher:
    """All partitions of a store."""

    def __init__(
        self,
        ledger: Ledger,
        factory: MachineFactory,
        tracker: SegmentedAckTracker,
        *,
        clock: Clock,
        make_spill: Callable[[PartitionDescriptor], SpillLog],
        aside: AsideLog,
        journal: Callable[[int], Iterable[tuple[int, JournalRecord]]],
        settings: DispatcherSettings | None = None,
    ) -> None:
        self.ledger = ledger
        self.tracker = tracker
        self._factory = factory
        self._make_spill = make_spill
        self._aside = aside
        self._journal = journal  # durable records from an LSN on
        self.backlogs = Backlogs(aside, settings or DispatcherSettings(), clock=clock, replay=self._replay)
        self.turn = threads.rlock("partition.turn")  # while held nothing is applied; see `finish`
        self._begun: _BegunRecord | None = None  # guarded by turn: a record that may be half applied
        self.published = ledger.tree.lsn  # the last record that is applied everywhere; read without a lock
        self.torn = False  # a batch with a condition may be applied in one table and not yet in another
        self._partitions: dict[PartitionId, Partition] = {}  # guarded by turn; lookups need no lock
        self.known = self._partitions.get  # an open partition, or None; called for every write
        self._closed = False  # guarded by turn
        self.refusals = {"paused": 0, "partition": 0, "store": 0}  # writes refused, by the limit that they met
        # Guarded by turn: entries of partitions that could not be opened, because file descriptors ran out or because
        # this version cannot read the tables' options. They are few: writes to such a partition are refused.
        self._unopened: dict[PartitionId, list[Entry]] = {}

    # -- partitions

    def finish(self) -> None:
        """Finish a record that an interrupt left half applied, so that the state is between two records.

        Requires: `turn`. This is not a context manager: an interrupt at its exit would leave the lock acquired.
        """
        if self._begun is not None:
            self._dispatch_begun(self._begun)

    def partition(self, partition: PartitionId) -> Partition:
        """Return a partition, opened on first use; `NotFound` if its table was dropped."""
        opened = self._partitions.get(partition)
        if opened is not None:
            return opened
        with self.turn:
            if self._closed:  # a partition opened now would lack entries that only the journal has
                raise Closed("the store was closed: open it again")
            opened = self._partitions.get(partition)
            if opened is None:
                opened = threads.run_uninterrupted(lambda: self._open(partition))
                self.backlogs.drain(opened)
            return opened

    def _open(self, partition: PartitionId) -> Partition:
        info = self._info(partition)
        descriptor = describe(info, shard_number(partition))
        with ExitStack() as undo:  # a retry must find nothing open
            spill = self._make_spill(descriptor)
            undo.callback(spill.close)
            machine = self._factory.open(descriptor, info.options)
            undo.callback(machine.close)
            opened = Partition(descriptor, machine, spill)
            for entry in (*spill.entries(machine.stored), *self._unopened.get(partition, ())):
                if entry.lsn > opened.highest:
                    self.backlogs.enqueue(opened, entry)
            undo.pop_all()
        self._partitions[partition] = opened  # with all its waiting entries, or not at all
        self._unopened.pop(partition, None)
        return opened

    def open_shards(self, table: int) -> bool:
        """Open all shards of a table, with what they spilled; False if one cannot be opened now."""
        info = self.ledger.table_by_id(table)
        try:
            for shard in range(0 if info is None else info.shards):
                self.partition(partition_id(table, shard))
        except Exception as error:
            threads.raise_interrupt(error)
            logger.warning("a shard of table %d cannot be opened: %s", table, error)
            return False
        return info is not None

    def _info(self, partition: PartitionId) -> TableInfo:
        info = self.ledger.table_by_id(table_of(partition))
        if info is None:
            raise dropped_table(table_of(partition), self.ledger.dropped_name(table_of(partition)))
        if shard_number(partition) >= info.shards:
            raise NotFound(f"table {info.name} has no shard {shard_number(partition)}: it has {info.shards}")
        return info

    def partitions(self) -> list[Partition]:
        with self.turn:
            return list(self._partitions.values())

    def opened(self) -> list[Partition]:
        """Return the open partitions without the turn: statistics are read while a partition hangs, too."""
        return list(self._partitions.values())

    def unopened_floor(self) -> int:
        """Return the LSN up to which all is applied to partitions that could not be opened; also without the turn."""
        return min([self.published, *(waiting[0].lsn - 1 for waiting in list(self._unopened.values()))])

    # -- admission

    def admit(self, partition: Partition) -> None:
        """Raise, before anything is written, if the partition is paused or too many entries wait to be applied."""
        if partition.refusal is not None:
            self.refusals["paused" if isinstance(partition.refusal, PartitionPaused) else "partition"] += 1
            raise partition.refusal
        if self.backlogs.behind:
            with self.turn:
                try:
                    self.backlogs.check_room()
                except Backpressure:
                    self.refusals["store"] += 1
                    raise

    # -- dispatching

    def dispatch(self, record: JournalRecord, lsn: int, decoded: Sequence[Sequence[Any]] | None = None) -> Judgement:
        """Judge a durable record and apply its accepted sections. Requires: records come in LSN order.

        `decoded` holds the objects each section was encoded from, by group, if this process wrote the record.
        """
        with self.turn:
            self._begun = begun = _BegunRecord(record, lsn, decoded)
            return self._dispatch_begun(begun)

    def _dispatch_begun(self, begun: _BegunRecord) -> Judgement:
        record, lsn, decoded = begun.record, begun.lsn, begun.decoded
        judgement = self.ledger.judge(record, lsn)
        for info in judgement.dropped:
            self._drop(info)
        if judgement.repeated:
            self._drop_dead()
        entries = self._entries(record, lsn, judgement.verdicts, decoded)
        # Before anything can fail: the journal must keep the record.
        self.tracker.record(lsn, (LEDGER, *entries))
        self.torn = len(entries) > 1 and any(group.condition for group in record.groups)
        for partition, entry in entries.items():
            self._offer(partition, entry)
        self.published = max(self.published, lsn)
        self.torn = False
        self._begun = None
        return judgement

    def _entries(
        self, record: JournalRecord, lsn: int, verdicts: Sequence[Verdict], decoded: Sequence[Sequence[Any]] | None
    ) -> dict[PartitionId, Entry]:
        """Return each partition's accepted sections in group order, without those of dropped tables."""
        tables, groups = self.ledger.tables_by_id, record.groups  # the ledger is not in `tables`
        if len(groups) == 1 and len(groups[0].sections) == 1 and verdicts[0] is Verdict.ACCEPTED:  # nearly always
            sections, partition = groups[0].sections, groups[0].sections[0].header.partition
            if partition >> SHARD_BITS not in tables:
                return {}
            return {partition: Entry(lsn, record.time_us, sections, None if decoded is None else tuple(decoded[0]))}
        by_partition: dict[PartitionId, tuple[list[Section], list[Any]]] = {}
        for number, (group, verdict) in enumerate(zip(groups, verdicts, strict=True)):
            if verdict is not Verdict.ACCEPTED:
                continue
            for index, section in enumerate(group.sections):
                partition = section.header.partition
                if partition >> SHARD_BITS in tables:
                    parts, sources = by_partition.setdefault(partition, ([], []))
                    parts.append(section)
                    if decoded is not None:
                        sources.append(decoded[number][index])
        return {
            partition: Entry(lsn, record.time_us, tuple(parts), tuple(sources) if decoded else None)
            for partition, (parts, sources) in by_partition.items()
        }

    def _replay(self, partition: PartitionId, start: int, last: int) -> Iterator[Entry]:
        """Yield the entries of a partition from the journal, for LSNs from `start` to `last`."""
        for lsn, record in self._journal(start):
            if lsn <= last:
                entry = self._entries(record, lsn, self.ledger.verdicts(record, lsn), None).get(partition)
                if entry is not None:
                    yield entry

    def _offer(self, number: PartitionId, entry: Entry) -> None:
        """Apply an entry to its partition at once, or add it to the backlog if the partition is behind."""
        partition = self._partitions.get(number)
        if partition is None or partition.backlog or partition.failures or partition.refusal or self._aside.digests:
            self._enqueue_and_drain(number, entry)
            return
        # An interrupted attempt has begun this entry before; it may or may not have been applied.
        begun = entry.lsn <= partition.highest
        partition.highest = max(entry.lsn, partition.highest)
        try:
            if not begun or entry.lsn > partition.machine.applied:
                partition.machine.apply(entry)
        except Exception as error:
            threads.raise_interrupt(error)
            self.backlogs.add_failed(partition, entry, error)

    def _enqueue_and_drain(self, number: PartitionId, entry: Entry) -> None:
        try:
            partition = self.partition(number)
        except Exception as error:  # its entries wait in the journal, and other partitions continue
            threads.raise_interrupt(error)
            if not isinstance(error, (ProcessLimit, FixTheCall)) and not is_our_mistake(error, ()):
                raise  # the disk failed or a file is corrupt: the caller that opens the store must know
            logger.error("shard %d of table %d cannot be opened now: %s", shard_number(number), table_of(number), error)
            waiting = self._unopened.setdefault(number, [])
            if not waiting or waiting[-1].lsn < entry.lsn:  # else this record is being dispatched again
                waiting.append(entry)
            return
        if entry.lsn > partition.highest:  # else it was stored, spilled or begun before
            self.backlogs.enqueue(partition, entry)
        if partition.backlog:
            self.backlogs.drain(partition)

    def retry(self) -> int:
        """Retry failing partitions whose pause is over; return how many are still behind."""
        with self.turn:
            self.finish()
            for number in list(self._unopened):
                try:
                    self.partition(number)
                except ProcessLimit:
                    break  # the others would hit the same limit
                except Exception as error:
                    threads.raise_interrupt(error)
                    logger.warning(
                        "shard %d of table %d cannot be opened: %s", shard_number(number), table_of(number), error
                    )
            for partition in self._partitions.values():
                if partition.machine.broken and not partition.failures:  # a sync failed, and there was no write since
                    partition.failures = 1
                    self.backlogs.renew(partition)
            behind = [partition for partition in self._partitions.values() if partition.backlog or partition.failures]
            for partition in behind:
                self.backlogs.drain(partition)
            return len(self._unopened) + sum(1 for partition in behind if partition.backlog)

    def out_of_space(self) -> bool:
        """Whether a partition cannot apply because the disk is full."""
        return any(partition.out_of_space for partition in self.partitions())

    def resume(self, table: int) -> None:
        """Retry the paused partitions of a table now."""
        with self.turn:
            self.finish()
            for number in [number for number in self._unopened if table_of(number) == table]:
                self.partition(number)  # raises the reason if it still cannot be opened
            for partition in self._partitions.values():
                if partition.descriptor.table_id == table:
                    partition.failures, partition.retry_at_s, partition.refusal = min(partition.failures, 1), 0.0, None
                    self.backlogs.drain(partition)

    def troubles(self) -> list[Trouble]:
        """Return the entries set aside and the shards that are behind."""
        with self.turn:
            self.finish()
            troubles = [
                Trouble(one.name, shard_number(one.partition), f"set aside: {one.reason}", one.lsn)
                for one in self._aside.entries()
            ]
            for number, waiting in self._unopened.items():
                troubles.append(
                    Trouble(self._info(number).name, shard_number(number), "it cannot be opened", waiting[0].lsn)
                )
            for partition in self._partitions.values():
                behind, descriptor = partition.behind, partition.descriptor
                if behind is not None:
                    lsn = partition.backlog[0].lsn if partition.backlog else 0
                    troubles.append(Trouble(descriptor.name, descriptor.shard, str(behind), lsn))
            return troubles

    # -- snapshots and drops

    def snapshot(self) -> tuple[int, list[TableInfo], dict[PartitionId, Any]]:
        """Return one LSN, all tables, and each shard's state at that LSN, or an error for a shard that is behind."""
        with self.turn:
            self.finish()
            tables, states = self.ledger.tables(), dict[PartitionId, Any]()
            for info in tables:
                for shard in range(info.shards):
                    number = partition_id(info.table_id, shard)
                    states[number] = self._state_of(number)
            return self.ledger.tree.lsn, tables, states

    def _state_of(self, number: PartitionId) -> Any:
        """Return the state of a shard, or its error if it cannot be read: the others still can."""
        try:
            partition = self.partition(number)
            return partition.behind or partition.machine.snapshot()
        except ProcessLimit as error:
            if number not in self._unopened:
                raise
            name = self._info(number).name
            return PartitionPaused(f"shard {shard_number(number)} of {name} is behind ({error}): it is tried again")
        except Closed:
            raise
        except PenstockError as error:
            return error
        except Exception as error:
            threads.raise_interrupt(error)
            return PartitionPaused(
                f"shard {shard_number(number)} of {self._info(number).name} cannot be opened ({error})"
            )

    def _drop(self, info: TableInfo) -> None:
        for shard in range(info.shards):
            number = partition_id(info.table_id, shard)
            partition = self._partitions.get(number)
            self._factory.collect(describe(info, shard), None if partition is None else partition.machine)
            self._forget(number)

    def _drop_dead(self) -> None:
        """Close partitions whose table was dropped: an interrupt came between the verdict and the drop."""
        for number, partition in list(self._partitions.items()):
            if not self.ledger.is_alive(number):
                self._factory.collect(partition.descriptor, partition.machine)
                self._forget(number)

    def _forget(self, number: PartitionId) -> None:
        partition = self._partitions.get(number)
        if partition is not None:
            partition.spill.abandon()
            self.backlogs.behind.discard(partition)
        self._unopened.pop(number, None)
        self.tracker.forget(number)
        self._partitions.pop(number, None)  # last: `_drop_dead` repeats this after an interrupt

    def close(self) -> None:
        with self.turn, ExitStack() as stack:
            self._closed = True
            for partition in self._partitions.values():
                stack.callback(partition.machine.close)
                stack.callback(partition.spill.close)
            self._partitions.clear()


def describe(info: TableInfo, shard: int) -> PartitionDescriptor:
    """Return the descriptor of a shard."""
    return PartitionDescriptor(partition_id(info.table_id, shard), info.table_id, shard, info.name, info.kind)
