"""Routes durable records: to the ledger first, then to every partition its own part.

A record is dispatched by one thread, in LSN order, and normally applied at once in that thread. A partition whose apply
fails keeps its entries in a queue of its own: it is tried again with growing pauses, then paused alone. Its writes are
refused by name; everybody else goes on; `resume` lets it catch up. An entry that fails by a mistake of ours, and not of
the disk, is set aside after as many attempts (`aside`), and the partition goes on without it.

Thread: `dispatch` and `snapshot` exclude each other (`turn`); `admit` from any thread, without a lock.
Invariants: (1) at most one apply of a partition is in flight. (2) a snapshot lies between two records. (3) a record
that was dispatched is in the tracker until the partition has stored it, whatever happens to the partition. (4) an
interrupt may end a dispatch between any two lines: every step can be repeated, and whoever takes the turn next goes on
with the record that was begun (`finish`). (5) `published` is the last record of which every section is applied.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.errors import (
    Backpressure,
    Closed,
    FixTheCall,
    Invalid,
    NotFound,
    PartitionPaused,
    PenstockError,
    ProcessLimit,
    Restore,
    RetryLater,
)
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_errors import ran_out_of_space
from penstock.journal.partitions import SHARD_BITS, PartitionId, partition_id, shard_number, table_of
from penstock.journal.record import JournalRecord, Section
from penstock.journal.tracker import SegmentedAckTracker, SegmentedWatermarks
from penstock.partition.aside import AsideLog, Trouble, is_our_mistake
from penstock.partition.ledger import LEDGER, Judgement, Ledger, TableInfo, Verdict
from penstock.partition.machine import Entry, MachineFactory, PartitionDescriptor, PartitionStateMachine
from penstock.partition.spill import SpillLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DispatcherSettings:
    """Limits on what waits to be applied, and how a failing partition is treated."""

    partition_operations_max: int = 10_000  # entries that wait in one partition
    partition_bytes_max: int = 64 << 20
    operations_max: int = 100_000  # in all partitions
    bytes_max: int = 256 << 20
    attempts_max: int = 4
    backoff_s: float = 0.1  # before the second attempt; doubled for each further one

    def __post_init__(self) -> None:
        if min(self.partition_operations_max, self.partition_bytes_max, self.operations_max, self.bytes_max) < 1:
            raise Invalid("limits on waiting operations and bytes must be positive")
        if self.attempts_max < 1 or self.backoff_s < 0:
            raise Invalid("attempts_max must be at least 1 and backoff_s not negative")


class Partition:
    """A partition at work."""

    def __init__(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine, spill: SpillLog) -> None:
        self.descriptor = descriptor
        self.machine = machine
        self.spill = spill
        self.backlog: deque[Entry] = deque()  # durable and not applied; empty in a healthy partition
        self.highest = machine.applied
        self.failures = 0  # in a row
        self.out_of_space = False  # that is why
        self.retry_at_s = 0.0
        self.error: Exception | None = None  # of the last failure
        self.refusal: PenstockError | None = None  # why writes are refused

    @property
    def backlog_bytes(self) -> int:
        return sum(entry.size for entry in self.backlog)

    @property
    def behind(self) -> PenstockError | None:
        """Why it cannot be read: something that was acknowledged is not applied."""
        if not self.failures:
            return None
        if isinstance(self.error, Restore):
            return copy.copy(self.error)  # the caller is to restore a file, and hears which
        name, shard = self.descriptor.name, self.descriptor.shard
        return self.refusal or PartitionPaused(
            f"shard {shard} of {name} is behind after a failure ({self.error}): it is tried again"
        )

    @property
    def watermarks(self) -> SegmentedWatermarks:
        applied = self.machine.applied
        return SegmentedWatermarks(min(self.machine.stored, applied), applied, self.highest, self.highest)


class _BegunRecord(msgspec.Struct, frozen=True):
    """A record whose dispatch has not ended."""

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
        self._clock = clock
        self._make_spill = make_spill
        self._aside = aside
        self._journal = journal  # durable records from an LSN on
        self._settings = settings or DispatcherSettings()
        self.turn = threads.rlock("partition.turn")  # held: nothing is applied; after `finish`: between two records
        self._begun: _BegunRecord | None = None  # guarded by turn: a record that may be half applied
        self.published = ledger.tree.lsn  # the last record that is applied everywhere; read without a lock
        self.torn = False  # a batch with a condition may be applied in one table and not yet in another
        self._partitions: dict[PartitionId, Partition] = {}  # guarded by turn; lookups need no lock
        self.known = self._partitions.get  # a partition that is open already, or None: asked for every write
        self._closed = False  # guarded by turn
        self._behind: set[Partition] = set()  # guarded by turn: those with a backlog
        # Guarded by turn: entries of partitions that could not be opened, for want of descriptors or because this
        # Penstock cannot read what their tables are. They are few: writes to such a partition are refused.
        self._unopened: dict[PartitionId, list[Entry]] = {}

    # -- partitions

    def finish(self) -> None:
        """Go on with a record that an interrupt left half applied: then the caller is between two records.

        Requires: `turn`. Not a context manager of its own: an interrupt at its end would leave the lock taken.
        """
        if self._begun is not None:
            self._go_on(self._begun)

    def partition(self, partition: PartitionId) -> Partition:
        """A partition, opened on first use; `NotFound` if its table was dropped."""
        found = self._partitions.get(partition)
        if found is not None:
            return found
        with self.turn:
            if self._closed:  # what is opened anew would lack what only the journal has
                raise Closed("the store was closed: open it again")
            found = self._partitions.get(partition)
            if found is None:
                found = threads.run_uninterrupted(lambda: self._open(partition))
                self._drain(found)
            return found

    def _open(self, partition: PartitionId) -> Partition:
        info = self._info(partition)
        descriptor = describe(info, shard_number(partition))
        with ExitStack() as undo:  # a second attempt must find nothing open
            spill = self._make_spill(descriptor)
            undo.callback(spill.close)
            machine = self._factory.open(descriptor, info.options)
            undo.callback(machine.close)
            opened = Partition(descriptor, machine, spill)
            for entry in (*spill.entries(machine.stored), *self._unopened.get(partition, ())):
                if entry.lsn > opened.highest:
                    self._enqueue(opened, entry)
            undo.pop_all()
        self._partitions[partition] = opened  # with all that waits for it, or not at all
        self._unopened.pop(partition, None)
        return opened

    def _info(self, partition: PartitionId) -> TableInfo:
        info = self.ledger.table_by_id(table_of(partition))
        if info is None or shard_number(partition) >= info.shards:
            raise NotFound(f"table {table_of(partition)} was dropped, or never had a shard {shard_number(partition)}")
        return info

    def partitions(self) -> list[Partition]:
        with self.turn:
            return list(self._partitions.values())

    # -- admission

    def admit(self, partition: Partition) -> None:
        """Refuse a write before anything is written: its partition is paused, or too much waits."""
        if partition.refusal is not None:
            raise partition.refusal
        if self._behind:
            self._refuse_overload()

    def _refuse_overload(self) -> None:
        with self.turn:
            operations = sum(len(partition.backlog) for partition in self._behind)
            size = sum(partition.backlog_bytes for partition in self._behind)
        if operations >= self._settings.operations_max or size >= self._settings.bytes_max:
            raise Backpressure(
                f"{operations} operations ({size} bytes) wait to be applied (limit "
                f"{self._settings.operations_max}, {self._settings.bytes_max} bytes): retry later"
            )

    def _set_refusal(self, partition: Partition) -> None:
        settings, name = self._settings, partition.descriptor.name
        if partition.failures >= settings.attempts_max:
            return
        if len(partition.backlog) >= settings.partition_operations_max:
            limit = f"{len(partition.backlog)} waiting operations (limit {settings.partition_operations_max})"
        elif partition.backlog_bytes >= settings.partition_bytes_max:
            limit = f"{partition.backlog_bytes} waiting bytes (limit {settings.partition_bytes_max})"
        else:
            partition.refusal = None
            return
        partition.refusal = Backpressure(f"shard {partition.descriptor.shard} of {name} has {limit}: retry later")

    # -- dispatching

    def dispatch(self, record: JournalRecord, lsn: int, decoded: Sequence[Sequence[Any]] | None = None) -> Judgement:
        """Judge a durable record and hand out its accepted sections. Requires: records come in LSN order.

        `decoded` holds what each section was made from, group by group, where the writer is this process.
        """
        with self.turn:
            self._begun = begun = _BegunRecord(record, lsn, decoded)
            return self._go_on(begun)

    def _go_on(self, begun: _BegunRecord) -> Judgement:
        record, lsn, decoded = begun.record, begun.lsn, begun.decoded
        judgement = self.ledger.judge(record, lsn)
        for info in judgement.dropped:
            self._drop(info)
        if judgement.repeated:
            self._drop_dead()
        entries = self._entries(record, lsn, judgement.verdicts, decoded)
        # Before anything can fail: the journal must keep it.
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
        """What each partition gets: all its accepted sections in group order. A dropped table's are void."""
        tables, groups = self.ledger.tables_by_id, record.groups  # which never hold the ledger itself
        if len(groups) == 1 and len(groups[0].sections) == 1 and verdicts[0] is Verdict.ACCEPTED:  # nearly always
            sections, partition = groups[0].sections, groups[0].sections[0].header.partition
            if partition >> SHARD_BITS not in tables:
                return {}
            return {partition: Entry(lsn, record.time_us, sections, None if decoded is None else tuple(decoded[0]))}
        found: dict[PartitionId, tuple[list[Section], list[Any]]] = {}
        for number, (group, verdict) in enumerate(zip(groups, verdicts, strict=True)):
            if verdict is not Verdict.ACCEPTED:
                continue
            for place, section in enumerate(group.sections):
                partition = section.header.partition
                if partition >> SHARD_BITS in tables:
                    parts, sources = found.setdefault(partition, ([], []))
                    parts.append(section)
                    if decoded is not None:
                        sources.append(decoded[number][place])
        return {
            partition: Entry(lsn, record.time_us, tuple(parts), tuple(sources) if decoded else None)
            for partition, (parts, sources) in found.items()
        }

    def _offer(self, number: PartitionId, entry: Entry) -> None:
        """Give a partition its entry: applied at once if nothing is in the way, which is nearly always so."""
        partition = self._partitions.get(number)
        if partition is None or partition.backlog or partition.failures or partition.refusal or self._aside.digests:
            self._enqueue_and_drain(number, entry)
            return
        # Begun before: by an attempt that an interrupt ended. It may have been applied, or not.
        begun = entry.lsn <= partition.highest
        partition.highest = max(entry.lsn, partition.highest)
        try:
            if not begun or entry.lsn > partition.machine.applied:
                partition.machine.apply(entry)
        except Exception as error:
            self._enqueue(partition, entry)
            self._failed(partition, error)
            self._drain(partition, early=partition.failures > 0)  # else it was set aside

    def _enqueue_and_drain(self, number: PartitionId, entry: Entry) -> None:
        try:
            partition = self.partition(number)
        except Exception as error:  # its entries wait, the journal keeps them, and everybody else goes on
            if not isinstance(error, (ProcessLimit, FixTheCall)) and not is_our_mistake(error, ()):
                raise  # the disk failed, or a file is not what was written: whoever opens the store must know
            logger.error("shard %d of table %d cannot be opened now: %s", shard_number(number), table_of(number), error)
            waiting = self._unopened.setdefault(number, [])
            if not waiting or waiting[-1].lsn < entry.lsn:  # else this record is dispatched again
                waiting.append(entry)
            return
        if entry.lsn > partition.highest:  # else it was stored, spilled or begun before
            self._enqueue(partition, entry)
        if partition.backlog:
            self._drain(partition)

    def _enqueue(self, partition: Partition, entry: Entry) -> None:
        if not partition.backlog or partition.backlog[-1].lsn < entry.lsn:  # else an interrupt came between the lines
            partition.backlog.append(entry)
        partition.highest = entry.lsn

    def _drain(self, partition: Partition, *, early: bool | None = None) -> None:
        """Apply what waits, until it fails; `early`: whether it must wait before the next attempt."""
        if early is None:
            early = partition.failures > 0 and self._clock.monotonic_s() < partition.retry_at_s
        while partition.backlog and not early and partition.failures < self._settings.attempts_max:
            try:
                if partition.failures:
                    self._renew(partition)
                entry = partition.backlog[0]
                if entry.lsn > partition.machine.applied:
                    partition.machine.apply(self._applicable(partition, entry))
            except Exception as error:
                self._failed(partition, error)
                if partition.failures:
                    break
                continue  # it was set aside
            partition.backlog.popleft()
            # Until the last entry is in, it is behind: a reader must not find the state between two of them.
            partition.failures, partition.out_of_space = min(partition.failures, len(partition.backlog), 1), False
        if partition.backlog:
            self._behind.add(partition)
        else:
            self._behind.discard(partition)
            partition.failures = 0
        self._set_refusal(partition)

    def _renew(self, partition: Partition) -> None:
        """After a failure of its files, let a partition begin anew from what is stored: the journal has the rest."""
        if not partition.machine.broken:
            return
        partition.machine.renew()
        number, start = partition.descriptor.partition, partition.machine.applied + 1
        entries = {entry.lsn: entry for entry in partition.spill.entries(partition.machine.stored)}
        for lsn, record in self._journal(start):
            if lsn <= partition.highest:
                entry = self._entries(record, lsn, self.ledger.verdicts(record, lsn), None).get(number)
                if entry is not None:
                    entries[lsn] = entry
        entries.update({entry.lsn: entry for entry in partition.backlog})  # these know who waits for them
        partition.backlog = deque(entries[lsn] for lsn in sorted(entries))

    def _applicable(self, partition: Partition, entry: Entry) -> Entry:
        """An entry; of one that was set aside only its LSN, so that it counts as applied."""
        if self._aside.digests and self._aside.holds(partition.descriptor.partition, entry.lsn, entry.sections):
            return Entry(entry.lsn, entry.time_us, ())
        return entry

    def _failed(self, partition: Partition, error: Exception) -> None:
        if partition.failures + 1 >= self._settings.attempts_max and self._set_aside(partition, error):
            partition.failures = 0
            return
        partition.failures += 1
        partition.error = error
        partition.out_of_space = ran_out_of_space(error)
        # Then it is tried until there is some: nothing is wrong with the partition, and nobody has to call `resume`.
        if partition.out_of_space or isinstance(error, RetryLater):
            partition.failures = max(1, min(partition.failures, self._settings.attempts_max - 1))
        name, shard = partition.descriptor.name, partition.descriptor.shard
        partition.retry_at_s = self._clock.monotonic_s() + self._settings.backoff_s * 2 ** (partition.failures - 1)
        logger.error("applying to shard %d of %s failed (attempt %d)", shard, name, partition.failures, exc_info=error)
        if partition.failures >= self._settings.attempts_max:
            partition.refusal = PartitionPaused(
                f"shard {shard} of {name} is paused, because applying to it failed ({error}): "
                f"remove the cause, then call store.resume({name!r})"
            )

    def _set_aside(self, partition: Partition, error: Exception) -> bool:
        """Put away the entry that failed, if the mistake is ours; False: the partition must wait."""
        descriptor = partition.descriptor
        entry = partition.backlog[0]
        if not is_our_mistake(error, entry.sections):
            return False
        if self._aside.holds(descriptor.partition, entry.lsn, entry.sections):
            return False  # not even nothing can be applied
        try:
            self._aside.add(descriptor.name, entry.lsn, entry.time_us, entry.sections, error)
            try:
                partition.machine.apply(Entry(entry.lsn, entry.time_us, ()))
            except BaseException:
                self._aside.take_back()  # the reason lies not in the entry, if even nothing cannot be applied
                raise
        except Exception as failure:
            logger.error("record %d for %s cannot be set aside (%s)", entry.lsn, descriptor.name, failure)
            return False
        logger.critical(
            "record %d could not be applied to shard %d of %s, by a mistake of Penstock, and was set aside: please "
            "report it; store.check() lists it",
            entry.lsn,
            descriptor.shard,
            descriptor.name,
            exc_info=error,
        )
        return True

    def retry(self) -> int:
        """Try failing partitions again whose pause is over; how many are still behind."""
        with self.turn:
            self.finish()
            for number in list(self._unopened):
                try:
                    self.partition(number)
                except ProcessLimit:
                    break  # the others would fare no better
                except Exception as error:
                    logger.warning(
                        "shard %d of table %d cannot be opened: %s", shard_number(number), table_of(number), error
                    )
            for partition in self._partitions.values():
                if partition.machine.broken and not partition.failures:  # a sync failed, and nobody has written since
                    partition.failures = 1
                    self._renew(partition)
            behind = [partition for partition in self._partitions.values() if partition.backlog or partition.failures]
            for partition in behind:
                self._drain(partition)
            return len(self._unopened) + sum(1 for partition in behind if partition.backlog)

    def out_of_space(self) -> bool:
        """Whether a partition cannot apply for want of space on the disk."""
        return any(partition.out_of_space for partition in self.partitions())

    def resume(self, table: int) -> None:
        """Let the paused partitions of a table try again, now."""
        with self.turn:
            self.finish()
            for number in [number for number in self._unopened if table_of(number) == table]:
                self.partition(number)  # raises what is wrong with it
            for partition in self._partitions.values():
                if partition.descriptor.table == table:
                    partition.failures, partition.retry_at_s, partition.refusal = min(partition.failures, 1), 0.0, None
                    self._drain(partition)

    def troubles(self) -> list[Trouble]:
        """What was set aside, and which shards are behind."""
        with self.turn:
            self.finish()
            found = [
                Trouble(one.name, shard_number(one.partition), f"set aside: {one.reason}", one.lsn)
                for one in self._aside.entries()
            ]
            for number, waiting in self._unopened.items():
                found.append(
                    Trouble(self._info(number).name, shard_number(number), "it cannot be opened", waiting[0].lsn)
                )
            for partition in self._partitions.values():
                behind, descriptor = partition.behind, partition.descriptor
                if behind is not None:
                    lsn = partition.backlog[0].lsn if partition.backlog else 0
                    found.append(Trouble(descriptor.name, descriptor.shard, str(behind), lsn))
            return found

    # -- snapshots and drops

    def snapshot(self) -> tuple[int, list[TableInfo], dict[PartitionId, Any]]:
        """All tables and the state of their shards at one LSN; an error in the place of one that is behind."""
        with self.turn:
            self.finish()
            tables, found = self.ledger.tables(), dict[PartitionId, Any]()
            for info in tables:
                for shard in range(info.shards):
                    number = partition_id(info.table, shard)
                    found[number] = self._state_of(number)
            return self.ledger.tree.lsn, tables, found

    def _state_of(self, number: PartitionId) -> Any:
        """The state of a shard, or the error of one that cannot be read: the others can."""
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
            return PartitionPaused(
                f"shard {shard_number(number)} of {self._info(number).name} cannot be opened ({error})"
            )

    def _drop(self, info: TableInfo) -> None:
        for shard in range(info.shards):
            number = partition_id(info.table, shard)
            partition = self._partitions.get(number)
            self._factory.collect(describe(info, shard), None if partition is None else partition.machine)
            self._let_go(number)

    def _drop_dead(self) -> None:
        """Let go of partitions whose table is gone: an interrupt came between the verdict and the drop."""
        for number, partition in list(self._partitions.items()):
            if not self.ledger.is_alive(number):
                self._factory.collect(partition.descriptor, partition.machine)
                self._let_go(number)

    def _let_go(self, number: PartitionId) -> None:
        partition = self._partitions.get(number)
        if partition is not None:
            partition.spill.abandon()
            self._behind.discard(partition)
        self._unopened.pop(number, None)
        self.tracker.forget(number)
        self._partitions.pop(number, None)  # last: an interrupt before it is made good for by `_drop_dead`

    def close(self) -> None:
        with self.turn, ExitStack() as stack:
            self._closed = True
            for partition in self._partitions.values():
                stack.callback(partition.machine.close)
                stack.callback(partition.spill.close)
            self._partitions.clear()


def describe(info: TableInfo, shard: int) -> PartitionDescriptor:
    """The descriptor of a shard."""
    return PartitionDescriptor(partition_id(info.table, shard), info.table, shard, info.name, info.kind)
