"""Routes durable records: to the ledger first, then each section to its partition.

A record is dispatched by one thread, in LSN order, with the turn. Sections that only touch memory are applied at once.
Others, and those of a partition that is behind, wait in its backlog, which a thread applies without any lock: see
`backlog`. A reader of such a partition waits until it has applied every record dispatched before. So no reader sees
half of a batch: it finds each partition at the last record, however late that one is.

Thread: `dispatch` and `snapshot` exclude each other (`turn`). The turn is never held while files are read or written,
except those of the ledger and the mapped rows that a conditional write compares.
Invariants: (1) at most one apply of a partition is in flight. (2) a snapshot lies between two records. (3) a record
that was dispatched is in the tracker until the partition has stored it, whatever happens to the partition. (4) an
interrupt may end a dispatch between any two lines: every step can be repeated, and the next thread to take the turn
finishes the interrupted record (`finish`). (5) `published` is the last record of which every section is applied, or
waits in the backlog of a partition that is `late`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import msgspec

from penstock.errors import (
    DiskFailed,
    PenstockError,
    ProcessLimit,
)
from penstock.host import threads
from penstock.journal.partitions import SHARD_BITS, PartitionId, partition_id, shard_number, table_of
from penstock.journal.record import JournalRecord, Section
from penstock.lsm.tree import Tree
from penstock.partition.aside import Trouble
from penstock.partition.ledger import Judgement
from penstock.partition.ledger_records import LEDGER, TableInfo, Verdict
from penstock.partition.machine import Entry, PartitionDescriptor
from penstock.partition.moments import Moments
from penstock.partition.partition import Partition
from penstock.partition.roster import PartitionOpening, describe

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0  # for workers that are in the middle of an entry
DETACH_ATTEMPTS = 1_000  # each of them follows a moment at which no thread was in the files
JOIN_S = 2.0  # for idle workers


class _BegunRecord(msgspec.Struct, frozen=True):
    """A record whose dispatch has not finished."""

    record: JournalRecord
    lsn: int
    decoded: Sequence[Sequence[Any]] | None


class Dispatcher(Moments):
    """All partitions of a store."""

    _begun: _BegunRecord | None = None  # guarded by turn: a record that may be half applied
    _noted: Any = None  # the tables at the last call of `on_tables`
    on_tables: Callable[[], None] = staticmethod(lambda: None)  # called without the turn, when tables changed

    # -- partitions

    def finish(self) -> None:
        """Finish a record that an interrupt left half applied, so that the state is between two records.

        Requires: `turn`. This is not a context manager: an interrupt at its exit would leave the lock acquired.
        """
        if self._begun is not None:
            self._dispatch_begun(self._begun)

    # -- dispatching

    def dispatch(self, record: JournalRecord, lsn: int, decoded: Sequence[Sequence[Any]] | None = None) -> Judgement:
        """Judge a durable record and apply its accepted sections. Requires: records come in LSN order.

        `decoded` holds the objects each section was encoded from, by group, if this process wrote the record.
        """
        with self.turn:
            self._begun = begun = _BegunRecord(record, lsn, decoded)
            judgement = self._dispatch_begun(begun)
        if self.backlogs.left or self._to_open:
            self._give_out()
        if self.ledger.tables_by_id is not self._noted:
            self._noted = self.ledger.tables_by_id
            self.on_tables()
        return judgement

    def _give_out(self) -> None:
        """Let workers apply what has to wait; this thread does it if there are none. Requires: no lock."""
        numbers, self._to_open = self._to_open, []
        for number in numbers:
            if self.backlogs.workers.count:
                self._open_later(number)
            else:
                self._open_now(number)
        self.backlogs.give_out()

    def _dispatch_begun(self, begun: _BegunRecord) -> Judgement:
        record, lsn, decoded = begun.record, begun.lsn, begun.decoded
        # Set before the ledger shows the token or position of this record: its rows elsewhere may not be applied yet.
        groups = record.groups
        self.torn = bool(groups[0].condition) if len(groups) == 1 else any(group.condition for group in groups)
        try:
            judgement = self.ledger.judge(record, lsn)
        except Exception:
            self.torn = self.torn and self.ledger.tree.lsn >= lsn
            raise
        for info in judgement.dropped:
            self._drop(info)
        if judgement.restated or (judgement.repeated and lsn == self.ledger.tree.lsn):
            for each in self._partitions.values():
                self._mark_draining(each)
        if judgement.repeated:
            self._drop_dead()
        if len(groups) == 1 and len(groups[0].sections) == 1 and judgement.verdicts[0] is Verdict.ACCEPTED:
            section, source = groups[0].sections, None if decoded is None else tuple(decoded[0])  # nearly always
            partition = section[0].header.partition
            is_table = partition >> SHARD_BITS in self.ledger.tables_by_id  # the ledger is not among them
            entries = {partition: Entry(lsn, record.time_us, section, source)} if is_table else {}
        else:
            entries = self._entries(record, lsn, judgement.verdicts, decoded)
        # Before anything can fail: the journal must keep the record.
        self.tracker.record(lsn, (LEDGER, *entries))
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

    def entries_after(self, partition: PartitionId, lsn: int) -> Iterator[Entry]:
        """Yield the entries of a partition that are in the journal, after an LSN."""
        return self._replay(partition, lsn + 1, self.published)

    def _offer(self, number: PartitionId, entry: Entry) -> None:
        """Apply an entry that only touches memory, or add it to the backlog of its partition."""
        partition = self._partitions.get(number)
        if partition is None:
            self._enqueue_unopened(number, entry)
            return
        if partition.late or self._aside.digests or not partition.machine.in_memory(entry):
            if entry.lsn > partition.highest:  # else it was stored, spilled or begun before
                self.backlogs.enqueue(partition, entry)
            elif partition.late:
                self.backlogs.left.append(partition)  # this record is being dispatched again
            return
        # An interrupted attempt has begun this entry before; it may or may not have been applied.
        before, begun = partition.highest, entry.lsn <= partition.highest
        partition.highest = max(entry.lsn, before)
        try:
            if not begun or entry.lsn > partition.machine.applied:
                partition.machine.apply(entry if partition.opener is None else partition.opener(entry))
        except Exception as error:
            threads.raise_interrupt(error)
            partition.first_error = error  # it is tried again, or set aside, without the turn
            partition.highest = min(before, entry.lsn - 1)  # until it is in the backlog, it does not count as offered
            self.backlogs.enqueue(partition, entry)

    def _enqueue_unopened(self, number: PartitionId, entry: Entry) -> None:
        """Keep an entry for a partition that is not open. Its entries wait in the journal, too; others continue."""
        waiting = self._unopened.setdefault(number, [])
        if not waiting or waiting[-1].lsn < entry.lsn:  # else this record is being dispatched again
            waiting.append(entry)
        self._to_open.append(number)

    # -- waiting for partitions that are late

    def retry(self) -> int:
        """Retry failing partitions whose pause is over; return how many are still behind."""
        with self.turn:
            self.finish()
            unopened, partitions = list(self._unopened), list(self._partitions.values())
        for number in unopened:
            if self.backlogs.workers.count:
                self._open_later(number)
            else:
                try:
                    self.partition(number)
                except ProcessLimit:
                    break  # the others would hit the same limit
                except Exception as error:
                    threads.raise_interrupt(error)
                    self._report_unopened(number, error)
        for partition in partitions:
            if partition.machine.broken and not partition.failures and not partition.is_claimed:
                with self.turn:  # a sync failed, and there was no write since
                    partition.failures, partition.late, partition.guarded = 1, True, True
                    partition.error = partition.error or DiskFailed("a sync of its files failed")
            if partition.first_waiting is not None or partition.failures:
                self.backlogs.schedule(partition)
        with self.turn:
            self.admission.guard(partitions)
        self.backlogs.workers.staff()
        return len(self._unopened) + sum(1 for partition in partitions if partition.first_waiting is not None)

    def press(self, table: int, shard: int, tree: Tree | None) -> None:
        """Slow the writers of a shard whose tree is slow; `tree` is None when it is no longer slow."""
        partition = self.find_open(partition_id(table, shard))
        if partition is not None:
            partition.slow_tree = tree
            if tree is not None:
                partition.guarded = True

    def out_of_space(self) -> bool:
        """Whether a partition cannot apply because the disk is full."""
        return any(partition.out_of_space for partition in self.partitions())

    def resume(self, table: int) -> None:
        """Retry the paused partitions of a table now."""
        with self.turn:
            self.finish()
            unopened = [number for number in self._unopened if table_of(number) == table]
        for number in unopened:
            self.partition(number)  # raises the reason if it still cannot be opened
        for partition in [each for each in self.partitions() if each.descriptor.table_id == table]:
            with self.turn:
                partition.failures, partition.retry_at_s, partition.refusal = min(partition.failures, 1), 0.0, None
            stall_s, name = self.admission.settings.stall_s, partition.descriptor.name
            with suppress(PenstockError):  # `troubles` has it
                self.backlogs.workers.run(partial(self.backlogs.drain, partition), stall_s, f"applying to {name}")
                self.catch_up(partition, timeout_s=stall_s)  # if another thread drains it

    def troubles(self) -> list[Trouble]:
        """Return the entries set aside and the shards that are behind."""
        with self.turn:
            self.finish()
            troubles = [
                Trouble(entry.name, shard_number(entry.partition), f"set aside: {entry.reason}", entry.lsn)
                for entry in self._aside.entries()
            ]
            for number, waiting in self._unopened.items():
                troubles.append(
                    Trouble(self._info(number).name, shard_number(number), "it cannot be opened", waiting[0].lsn)
                )
            for partition in self._partitions.values():
                behind, descriptor = self.admission.reading_refused(partition), partition.descriptor
                if behind is not None:
                    lsn = partition.first_waiting or 0
                    troubles.append(Trouble(descriptor.name, descriptor.shard, str(behind), lsn))
            return troubles

    def replace(self, number: PartitionId, install: Callable[[], None]) -> None:
        """Close a partition, let `install` replace its files, and open it with all that was written since.

        Its readers and writers wait, or get an error, meanwhile. If `install` fails, it is opened as it is.
        """
        partition, opening, last = self._detach(number)
        try:
            opening.is_running = True
            if partition is not None:
                with suppress(PenstockError, OSError):  # its files are damaged
                    partition.machine.close()
                with suppress(PenstockError, OSError):
                    partition.spill.close()
            install()
        finally:
            entries = list(self._replay(number, 0, last))
            with self.turn:
                later = [entry for entry in self._unopened.get(number, ()) if entry.lsn > last]
                self._unopened[number] = [*entries, *later]
                if self._opening.get(number) is opening:
                    del self._opening[number]
            opening.end()
        self.partition(number)

    def _detach(self, number: PartitionId) -> tuple[Partition | None, PartitionOpening, int]:
        """Take a partition that no thread uses from the roster, as if it were being opened, and the last LSN."""
        for _ in range(DETACH_ATTEMPTS):  # beside writers, a worker may be in its files again before the turn is taken
            is_unused = self._await_unused(number)
            with self.turn:
                self.finish()
                self._check_open()
                partition = self._partitions.get(number)
                if not self._is_used(number):
                    opening = self._opening[number] = PartitionOpening(self._clock.monotonic_s())
                    opening.is_given = True  # by this thread
                    self._unopened.setdefault(number, [])
                    if partition is not None:
                        self.backlogs.detach(partition, self._paused(number, "is being repaired: retry later"))
                        del self._partitions[number]
                    return partition, opening, self.published
            if not is_unused:
                break
        raise self._paused(number, "is used by a thread that has not come back from its files: retry later")

    def _is_used(self, number: PartitionId) -> bool:
        partition = self._partitions.get(number)
        return number in self._opening or (partition is not None and partition.is_used)

    def _await_unused(self, number: PartitionId) -> bool:
        """Wait, no longer than `stall_s`, until no thread is in a partition's files; return whether there is none."""
        backlogs = self.backlogs
        with backlogs.moved:
            backlogs.movers += 1
            try:
                return backlogs.moved.wait_for(lambda: not self._is_used(number), self.admission.settings.stall_s)
            finally:
                backlogs.movers -= 1

    def dropped_in_use(self) -> list[Partition]:
        """Return the partitions of dropped tables in whose files a thread still works."""
        with self.turn:  # a drop is whole
            self.finish()
            return list(self.backlogs.dropped)

    def describe(self, number: PartitionId) -> PartitionDescriptor:
        """Return the descriptor of a partition that may not be open; `NotFound` if its table was dropped."""
        return describe(self._info(number), shard_number(number))

    # -- snapshots and drops

    def _drop(self, info: TableInfo) -> None:
        for shard in range(info.shards):
            number = partition_id(info.table_id, shard)
            if number in self._partitions:
                self._forget(number)
            else:
                self._factory.collect(describe(info, shard), None)
                self._unopened.pop(number, None)
                self.tracker.forget(number)

    def _drop_dead(self) -> None:
        """Close partitions whose table was dropped: an interrupt came between the verdict and the drop."""
        for number in list(self._partitions):
            if not self.ledger.is_alive(number):
                self._forget(number)

    def _forget(self, number: PartitionId) -> None:
        partition = self._partitions[number]
        partition.spill.abandon()
        self.backlogs.forget(partition)
        self._unopened.pop(number, None)
        self.tracker.forget(number)
        self._partitions.pop(number, None)  # last: `_drop_dead` repeats this after an interrupt

    def _collect(self, partition: Partition) -> None:
        """Let the files of a dropped partition be deleted: no thread applies to it any more."""
        self._factory.collect(partition.descriptor, partition.machine)

    # -- closing

    def await_all(self, timeout_s: float) -> list[Partition]:
        """Wait until every partition that makes progress has applied its entries; return those that have not."""
        deadline_s, late = self._clock.monotonic_s() + timeout_s, list[Partition]()
        for partition in self.partitions():
            try:
                self.catch_up(partition, timeout_s=max(0.0, deadline_s - self._clock.monotonic_s()))
            except PenstockError as error:
                logger.warning("%s: its writes are applied at the next opening", error)
                late.append(partition)
        return late

    def hanging(self) -> set[str]:
        """Return the tables in whose files a thread still works."""
        opening = [self.ledger.table_by_id(table_of(one)) for one, it in list(self._opening.items()) if it.is_running]
        partitions = [*list(self._partitions.values()), *self.backlogs.dropped.copy()]
        used = {partition.descriptor.name for partition in partitions if partition.is_used}
        return used | {info.name for info in opening if info is not None}

    def close(self) -> None:
        """Close every partition, except those whose files hang: a thread may still write to them."""
        self.backlogs.workers.close()
        with self.turn:
            self._closed = True
            partitions = list(self._partitions.values())
        self.backlogs.stop(lambda: not self.hanging(), min(self.admission.settings.stall_s, CLOSE_WAIT_S))
        with ExitStack() as stack:
            for partition in partitions:
                if not partition.is_used:
                    stack.callback(partition.machine.close)
                    stack.callback(partition.spill.close)
                    self._partitions.pop(partition.descriptor.partition, None)
            if not self.hanging():
                self.backlogs.workers.join(JOIN_S)
