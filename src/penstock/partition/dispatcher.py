"""Routes durable records: to the ledger first, then each section to its partition.

A record is dispatched by one thread, in LSN order, with the turn. Sections that only touch memory are applied at once.
Others, and those of a partition that is behind, wait in its backlog, which a thread applies without any lock: see
`backlog`. Whoever reads such a partition waits until it has applied every record dispatched before. So no reader sees
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec

from penstock.errors import (
    Closed,
    DiskFailed,
    FixTheCall,
    NotFound,
    PartitionPaused,
    PenstockError,
    ProcessLimit,
    WaitExpired,
)
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.journal.partitions import SHARD_BITS, PartitionId, partition_id, shard_number, table_of
from penstock.journal.record import JournalRecord, Section
from penstock.journal.tracker import SegmentedAckTracker
from penstock.partition.admission import Admission, DispatcherSettings
from penstock.partition.aside import AsideLog, Trouble, is_our_mistake
from penstock.partition.backlog import Backlogs, Partition
from penstock.partition.ledger import LEDGER, Judgement, Ledger, TableInfo, Verdict, dropped_table
from penstock.partition.machine import Entry, MachineFactory, PartitionDescriptor
from penstock.partition.marker import Marker
from penstock.partition.spill import SpillLog
from penstock.partition.workers import Workers

logger = logging.getLogger(__name__)

T = TypeVar("T")
WAIT_S = 60.0  # how long a reader waits for a partition that is late and makes progress
_POLL_S = 0.5


class _BegunRecord(msgspec.Struct, frozen=True):
    """A record whose dispatch has not finished."""

    record: JournalRecord
    lsn: int
    decoded: Sequence[Sequence[Any]] | None


class _Opening:
    """A partition that is being opened, for all threads that wait for it."""

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.lock = threads.lock("partition.opening")  # held by the thread that opens it
        self.error: Exception | None = None
        self.is_given = False  # to a worker
        self.has_ended = False
        self._changed = threads.condition("partition.opened")

    def end(self) -> None:
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        with self._changed:
            if not self.has_ended:
                self._changed.wait(timeout_s)


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
        on_applied: Callable[[], None] = lambda: None,
    ) -> None:
        settings = settings or DispatcherSettings()
        self.ledger = ledger
        self.tracker = tracker
        self._factory = factory
        self._make_spill = make_spill
        self._aside = aside
        self._journal = journal  # durable records from an LSN on
        self._clock = clock
        self.turn = threads.rlock("partition.turn")  # while held no record is dispatched; see `finish`
        self.backlogs = Backlogs(
            aside,
            settings,
            clock=clock,
            turn=self.turn,
            replay=self._replay,
            published=lambda: self.published,
            on_applied=on_applied,
            on_released=self._collect,
        )
        self.admission = Admission(settings, self.backlogs, clock=clock, published=lambda: self.published)
        self.admit = self.admission.admit
        self._begun: _BegunRecord | None = None  # guarded by turn: a record that may be half applied
        self.published = ledger.tree.lsn  # the last record that is applied everywhere; read without a lock
        self.torn = False  # a batch with a condition may be applied in one table and not yet in another
        self._partitions: dict[PartitionId, Partition] = {}  # guarded by turn; lookups need no lock
        self.known = self._partitions.get  # an open partition, or None; called for every write
        self._closed = False  # guarded by turn
        # Guarded by turn: entries of partitions that could not be opened, because file descriptors ran out or because
        # this version cannot read the tables' options. They are few: writes to such a partition are refused.
        self._unopened: dict[PartitionId, list[Entry]] = {}
        self._opening: dict[PartitionId, _Opening] = {}  # guarded by turn: partitions that a thread opens
        self.to_open: list[PartitionId] = []  # unopened ones with new entries, which no thread was given yet

    def start_workers(self) -> None:
        """After recovery: let threads of their own apply what touches files. Without this, callers apply it."""
        settings = self.admission.settings
        self.backlogs.workers = Workers(settings.workers, clock=self._clock, stall_s=settings.stall_s)

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
            self._check_open()
            self._info(partition)
            opening = self._opening.setdefault(partition, _Opening(self._clock.monotonic_s()))
        # Without the turn: its files may hang.
        if self.backlogs.workers.count:
            self._await_opening(partition, opening)
        else:
            threads.run_uninterrupted(lambda: self._run_opening(partition, opening))
        if opening.error is not None:
            raise opening.error
        opened = self._partitions.get(partition)
        if opened is None:
            self._info(partition)  # raises if it was dropped meanwhile
            raise Closed("the store was closed: open it again")
        if opened.backlog:
            self.backlogs.schedule(opened)
        return opened

    def _await_opening(self, partition: PartitionId, opening: _Opening) -> None:
        """Let a worker open a partition, and wait for that as long as for any file."""
        stall_s = self.admission.settings.stall_s
        while not opening.has_ended:
            waited_s = self._clock.monotonic_s() - opening.begun_s
            if waited_s >= stall_s:
                reason = f"is frozen: its files have not answered for {waited_s:.1f} s (limit {stall_s:g})"
                raise self._paused(partition, f"{reason}; check the disk, retry later", "frozen")
            if not opening.is_given:
                opening.is_given = True
                self.backlogs.workers.submit(lambda: self._run_opening(partition, opening))
            opening.wait(min(_POLL_S, stall_s - waited_s))

    def _run_opening(self, partition: PartitionId, opening: _Opening) -> None:
        """Open a partition unless another thread does, or has. An error goes to everybody who waits for it."""
        with opening.lock:
            if opening.has_ended:
                return
            try:
                if partition not in self._partitions:
                    self._open(partition)
            except Exception as error:
                opening.error = error
            with self.turn:
                if self._opening.get(partition) is opening:
                    del self._opening[partition]  # the next caller tries again
            opening.end()

    def _open(self, partition: PartitionId) -> Partition:
        with self.turn:
            self._check_open()
            info = self._info(partition)
        descriptor = describe(info, shard_number(partition))
        with ExitStack() as undo:  # a retry must find nothing open
            spill = self._make_spill(descriptor)
            undo.callback(spill.close)
            machine = self._factory.open(descriptor, info.options)
            undo.callback(machine.close)
            opened = Partition(descriptor, machine, spill)
            opened.guarded = self.backlogs.guards_all
            spilled = list(spill.entries(machine.stored))
            with self.turn:
                self._check_open()
                self._info(partition)  # it may have been dropped meanwhile
                for entry in (*spilled, *self._unopened.get(partition, ())):
                    if entry.lsn > opened.highest:
                        self.backlogs.enqueue(opened, entry)
                self._partitions[partition] = opened  # with all its waiting entries, or not at all
                self._unopened.pop(partition, None)
                undo.pop_all()
        return opened

    def _check_open(self) -> None:
        if self._closed:  # a partition opened now would lack entries that only the journal has
            raise Closed("the store was closed: open it again")

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

    # -- dispatching

    def dispatch(self, record: JournalRecord, lsn: int, decoded: Sequence[Sequence[Any]] | None = None) -> Judgement:
        """Judge a durable record and apply its accepted sections. Requires: records come in LSN order.

        `decoded` holds the objects each section was encoded from, by group, if this process wrote the record.
        """
        with self.turn:
            self._begun = begun = _BegunRecord(record, lsn, decoded)
            judgement = self._dispatch_begun(begun)
        if (self.backlogs.left or self.to_open) and not self.backlogs.workers.count:
            self.give_out(own=True)
        return judgement

    def give_out(self, *, own: bool) -> None:
        """Let threads apply what `dispatch` left; `own`: this one may, if it is one partition's. Requires: no lock."""
        numbers, self.to_open = self.to_open, []
        for number in numbers:
            if self.backlogs.workers.count:
                self._open_later(number)
            else:
                self._open_now(number)
        self.backlogs.give_out(own=own)

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
        begun = entry.lsn <= partition.highest
        partition.highest = max(entry.lsn, partition.highest)
        try:
            if not begun or entry.lsn > partition.machine.applied:
                partition.machine.apply(entry)
        except Exception as error:
            threads.raise_interrupt(error)
            partition.first_error = error  # it is tried again, or set aside, without the turn
            self.backlogs.enqueue(partition, entry)

    def _enqueue_unopened(self, number: PartitionId, entry: Entry) -> None:
        """Keep an entry for a partition that is not open. Its entries wait in the journal, too; others continue."""
        waiting = self._unopened.setdefault(number, [])
        if not waiting or waiting[-1].lsn < entry.lsn:  # else this record is being dispatched again
            waiting.append(entry)
        self.to_open.append(number)

    def _open_now(self, number: PartitionId) -> None:
        try:
            self.partition(number)
        except Exception as error:
            threads.raise_interrupt(error)
            if not isinstance(error, (ProcessLimit, FixTheCall)) and not is_our_mistake(error, ()):
                raise  # the disk failed or a file is corrupt: the caller that opens the store must know
            self._report_unopened(number, error)

    def _open_later(self, number: PartitionId) -> None:
        def work() -> None:
            try:
                opening = self._opening.get(number) or _Opening(0.0)
                self._run_opening(number, opening)
                if opening.error is not None:
                    raise opening.error
                self.backlogs.schedule(self.partition(number))
            except Exception as error:
                self._report_unopened(number, error)

        self.backlogs.workers.submit(work)

    def _report_unopened(self, number: PartitionId, error: Exception) -> None:
        logger.error("shard %d of table %d cannot be opened now: %s", shard_number(number), table_of(number), error)

    # -- waiting for partitions that are late

    def catch_up(self, partition: Partition, lsn: int | None = None, timeout_s: float = WAIT_S) -> None:
        """Wait until a partition has applied every record dispatched so far, or up to `lsn`; raise if it cannot."""
        with self.turn:
            self.finish()
            if not partition.late:
                return
            marker = Marker(self.published if lsn is None else min(lsn, self.published))
            self._mark(partition, marker)
        self._await(partition, marker, self._clock.monotonic_s() + timeout_s)

    def _mark(self, partition: Partition, marker: Marker) -> None:
        """Add a marker in LSN order. Requires: the turn."""
        markers = partition.markers
        index = len(markers)
        while index and markers[index - 1].lsn > marker.lsn:
            index -= 1
        markers.insert(index, marker)

    def _await(self, partition: Partition, marker: Marker, deadline_s: float) -> None:
        """Wait for a marker; raise at once if the partition is paused, frozen or dropped. Requires: no lock."""
        try:
            while not marker.is_reached:
                self._refuse_waiting(partition)
                left_s = deadline_s - self._clock.monotonic_s()
                if left_s <= 0:
                    raise WaitExpired(
                        f"shard {partition.descriptor.shard} of {partition.descriptor.name} has not applied record "
                        f"{marker.lsn} in time ({len(partition.backlog)} entries wait): retry later"
                    )
                if partition.claim is None:
                    self.backlogs.schedule(partition)
                marker.wait(min(left_s, _POLL_S, self.admission.settings.stall_s))
        except BaseException:
            marker.abandon()
            raise

    def _refuse_waiting(self, partition: Partition) -> None:
        if partition.is_dropped:
            table = partition.descriptor.table_id
            raise dropped_table(table, self.ledger.dropped_name(table))
        if self._closed:
            raise Closed("the store was closed: open it again")
        refusal = self.admission.reading_refused(partition)
        if refusal is not None:
            raise refusal

    def freeze(
        self, partitions: Sequence[Partition], also: Callable[[int], T], timeout_s: float = WAIT_S
    ) -> tuple[int, list[Any], T]:
        """Return one LSN, the states of partitions as of it, and what `also(lsn)` returned at that moment."""
        states, result = list[Any](), None
        deadline_s = self._clock.monotonic_s() + timeout_s
        try:
            with self.turn:
                self.finish()
                lsn, result = self.published, also(self.published)
                for partition in partitions:
                    states.append(self._state_of(partition, lsn))
            for index, partition in enumerate(partitions):
                if isinstance(states[index], Marker):
                    self._await(partition, states[index], deadline_s)
                    states[index] = _state_in(states[index])
        except BaseException:
            _discard(states)
            raise
        return lsn, states, result

    def _state_of(self, partition: Partition, lsn: int) -> Any:
        """Return the state of a partition, or a marker for it if the partition is late. Requires: the turn."""
        if not partition.late:
            return partition.machine.snapshot()
        marker = Marker(lsn, takes_state=True)
        self._mark(partition, marker)
        return marker

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
            if partition.machine.broken and not partition.failures and partition.claim is None:
                with self.turn:  # a sync failed, and there was no write since
                    partition.failures, partition.late, partition.guarded = 1, True, True
                    partition.error = partition.error or DiskFailed("a sync of its files failed")
            if partition.backlog or partition.failures:
                self.backlogs.schedule(partition)
        with self.turn:
            self.admission.guard(partitions)
        self.backlogs.workers.staff()
        return len(self._unopened) + sum(1 for partition in partitions if partition.backlog)

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
                behind, descriptor = self.admission.reading_refused(partition), partition.descriptor
                if behind is not None:
                    lsn = partition.backlog[0].lsn if partition.backlog else 0
                    troubles.append(Trouble(descriptor.name, descriptor.shard, str(behind), lsn))
            return troubles

    # -- snapshots and drops

    def snapshot(self, timeout_s: float = WAIT_S) -> tuple[int, list[TableInfo], dict[PartitionId, Any]]:
        """Return one LSN, all tables, and each shard's state at that LSN, or an error for a shard that is behind."""
        failed: dict[PartitionId, PenstockError] = {}
        states: dict[PartitionId, Any] = {}
        deadline_s = self._clock.monotonic_s() + timeout_s
        try:
            while True:
                with self.turn:
                    self.finish()
                    tables = self.ledger.tables()
                    numbers = [partition_id(info.table_id, shard) for info in tables for shard in range(info.shards)]
                    closed = [number for number in numbers if number not in self._partitions and number not in failed]
                    if not closed:
                        for number in numbers:
                            states[number] = self._state_or_error(number, failed)
                        lsn = self.ledger.tree.lsn
                        break
                for number in closed:  # without the turn: their files may hang
                    self._open_or_note(number, failed)
            for number, state in states.items():
                if isinstance(state, Marker):
                    states[number] = self._awaited_state(self._partitions.get(number), state, deadline_s)
        except BaseException:
            _discard(states.values())
            raise
        return lsn, tables, states

    def _state_or_error(self, number: PartitionId, failed: dict[PartitionId, PenstockError]) -> Any:
        """Return the state of a shard, a marker for it, or its error. Requires: the turn."""
        partition = self._partitions.get(number)
        if partition is None:
            return failed[number]
        try:
            return self.admission.reading_refused(partition) or self._state_of(partition, self.ledger.tree.lsn)
        except PenstockError as error:
            return error

    def _awaited_state(self, partition: Partition | None, marker: Marker, deadline_s: float) -> Any:
        """Return the state that a marker got, or the error of a shard that cannot be read: the others still can."""
        if partition is None:  # dropped meanwhile
            return _state_in(marker) if marker.is_reached else NotFound("this table was dropped: take another snapshot")
        try:
            self._await(partition, marker, deadline_s)
            return _state_in(marker)
        except Closed:
            raise
        except PenstockError as error:
            return error

    def _open_or_note(self, number: PartitionId, failed: dict[PartitionId, PenstockError]) -> None:
        """Open a shard for a snapshot; if that fails, note its error: the others can still be read."""
        try:
            self.partition(number)
        except ProcessLimit as error:
            if number not in self._unopened:
                raise
            reason = f"is behind ({error}): it is tried again"
            failed[number] = self._paused(number, reason)
        except Closed:
            raise
        except PenstockError as error:
            failed[number] = error
        except Exception as error:
            threads.raise_interrupt(error)
            failed[number] = self._paused(number, f"cannot be opened ({error})")

    def _paused(self, number: PartitionId, reason: str, state: str = "paused") -> PartitionPaused:
        name, shard = self._info(number).name, shard_number(number)
        return PartitionPaused(f"shard {shard} of {name} {reason}", number, name, shard, state)

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

    @property
    def hanging(self) -> list[Partition]:
        """Partitions to which a thread still applies."""
        return [partition for partition in list(self._partitions.values()) if partition.claim is not None]

    def close(self) -> None:
        """Close every partition, except those whose files hang: a thread may still write to them."""
        self.backlogs.workers.close()
        with self.turn:
            self._closed = True
            partitions = list(self._partitions.values())
        with ExitStack() as stack:
            for partition in partitions:
                if partition.claim is None:
                    stack.callback(partition.machine.close)
                    stack.callback(partition.spill.close)
                    self._partitions.pop(partition.descriptor.partition, None)


def _state_in(marker: Marker) -> Any:
    """Return the state that a marker got; raise the error if taking it failed."""
    if isinstance(marker.state, PenstockError):
        raise marker.state
    return marker.state


def _discard(states: Iterable[Any]) -> None:
    """Close states and give up markers that nobody will use."""
    for state in states:
        if isinstance(state, Marker):
            state.abandon()
        elif not isinstance(state, PenstockError):
            state.close()


def describe(info: TableInfo, shard: int) -> PartitionDescriptor:
    """Return the descriptor of a shard."""
    return PartitionDescriptor(partition_id(info.table_id, shard), info.table_id, shard, info.name, info.kind)
