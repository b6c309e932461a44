"""The open partitions of a store: opened on first use, without the turn, because their files may hang.

Thread: any; `turn` guards the roster. A worker opens a partition, and all callers wait for that one opening, no longer
than `stall_s`.
Invariants: (1) a partition is opened once, with every entry that waits for it, or not at all. (2) entries of a
partition that cannot be opened stay in memory and in the journal, and others continue.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from penstock.errors import (
    Closed,
    FixTheCall,
    NotFound,
    PartitionPaused,
    ProcessLimit,
    Restore,
)
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.journal.partitions import PartitionId, partition_id, shard_number, table_of
from penstock.journal.record import JournalRecord
from penstock.journal.tracker import SegmentedAckTracker
from penstock.partition.admission import DispatcherSettings, PartitionAdmission
from penstock.partition.aside import AsideLog, is_our_mistake
from penstock.partition.backlog import Backlogs
from penstock.partition.ledger import Ledger
from penstock.partition.ledger_records import TableInfo, TableStatus, dropped_table
from penstock.partition.machine import Entry, MachineFactory, PartitionDescriptor
from penstock.partition.partition import Partition
from penstock.partition.spill import SpillLog
from penstock.partition.workers import Workers

logger = logging.getLogger(__name__)

POLL_S = 0.5
QUEUE_STALLS = 3  # an opening waits for a thread for that many times `stall_s`


class PartitionOpening:
    """A partition that is being opened, for all threads that wait for it."""

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.lock = threads.lock("partition.opening")  # held by the thread that opens it
        self.error: Exception | None = None
        self.is_given = False  # to a worker
        self.is_running = False  # a thread is in its files
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


class Roster(ABC):
    """The open partitions, their backlogs and their admission."""

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
        opener_of: Callable[[int], Callable[[Entry], Entry] | None] = lambda table_id: None,
    ) -> None:
        """`opener_of` returns what opens the sealed sections of a table's entries; None if it is not encrypted."""
        self._opener_of = opener_of
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
        self.admission = PartitionAdmission(
            settings,
            self.backlogs,
            clock=clock,
            published=lambda: self.published,
            lag_max_of=self._lag_max_of,
        )
        self.admit = self.admission.admit
        self.refusals = self.admission.refusals
        self.published = ledger.tree.lsn  # the last record that is applied everywhere; read without a lock
        self.torn = False  # a batch with a condition may be applied in one table and not yet in another
        self._partitions: dict[PartitionId, Partition] = {}  # guarded by turn; lookups need no lock
        self.find_open = self._partitions.get  # an open partition, or None; called for every write
        self._closed = False  # guarded by turn
        # Guarded by turn: entries of partitions that could not be opened, because file descriptors ran out or because
        # this version cannot read the tables' options. They are few: writes to such a partition are refused.
        self._unopened: dict[PartitionId, list[Entry]] = {}
        self._opening: dict[PartitionId, PartitionOpening] = {}  # guarded by turn: partitions that a thread opens
        self.is_repairable: Callable[[PartitionId], bool] = lambda number: False  # whether it has a snapshot
        self._to_open: list[PartitionId] = []  # unopened ones with new entries, which no thread was given yet

    def _lag_max_of(self, table_id: int) -> int | None:
        info = self.ledger.table_by_id(table_id)
        return None if info is None else info.storage_options.lag_max

    def start_workers(self) -> None:
        """After recovery: let worker threads apply what touches files. Without this, callers apply it."""
        settings = self.admission.settings
        self.backlogs.workers = Workers(settings.workers, clock=self._clock, stall_s=settings.stall_s)

    @abstractmethod
    def _replay(self, partition: PartitionId, start: int, last: int) -> Iterator[Entry]:
        """Yield the entries of a partition from the journal, for LSNs from `start` to `last`."""

    @abstractmethod
    def _collect(self, partition: Partition) -> None:
        """Let the files of a dropped partition be deleted: no thread applies to it any more."""

    def partition(self, partition: PartitionId) -> Partition:
        """Return a partition, opened on first use; `NotFound` if its table was dropped."""
        opened = self._partitions.get(partition)
        if opened is not None:
            return opened
        with self.turn:
            self._check_open()
            self._info(partition)
            opening = self._opening.setdefault(partition, PartitionOpening(self._clock.monotonic_s()))
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

    def begin_opening(self, partition: PartitionId) -> None:
        """Let a worker open a partition, if it is not open."""
        with self.turn:
            if partition in self._partitions or self._closed or not self.ledger.is_alive(partition):
                return
            opening = self._opening.setdefault(partition, PartitionOpening(self._clock.monotonic_s()))
        self._give(opening, lambda: self._run_opening(partition, opening))

    def _await_opening(self, partition: PartitionId, opening: PartitionOpening) -> None:
        """Let a worker open a partition, and wait for that as long as for any file."""
        stall_s = self.admission.settings.stall_s
        while not opening.has_ended:
            workers = self.backlogs.workers
            workers.staff()  # if all of them are stuck in the files of others
            waited_s = self._clock.monotonic_s() - opening.begun_s
            # Until a thread has begun, nothing says that these files hang: another is started within `stall_s`.
            limit_s = stall_s if opening.is_running else QUEUE_STALLS * stall_s
            if waited_s >= limit_s:
                reason = f"is frozen: its files have not answered for {waited_s:.1f} s (limit {stall_s:g})"
                raise self._paused(partition, f"{reason}; check the disk, retry later", "frozen")
            self._give(opening, lambda: self._run_opening(partition, opening))
            opening.wait(min(POLL_S, stall_s, limit_s - waited_s))

    def _run_opening(self, partition: PartitionId, opening: PartitionOpening) -> None:
        """Open a partition unless another thread does, or has. All its waiters get an error."""
        with opening.lock:
            if opening.has_ended:
                return
            opening.begun_s, opening.is_running = self._clock.monotonic_s(), True
            try:
                if partition not in self._partitions:
                    self._open(partition)
            except Exception as error:
                opening.error = error
            with self.turn:
                if self._opening.get(partition) is opening:
                    del self._opening[partition]  # the next caller tries again
            opening.end()
            self.backlogs.notify()

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
            opened.opener = self._opener_of(descriptor.table_id)
            opened.guarded = self.backlogs.guards_all
            spilled = list(spill.entries(machine.stored))
            with self.turn:
                self._check_open()
                self._info(partition)  # raises if it was dropped meanwhile
                assert partition not in self._partitions
                for entry in (*spilled, *self._unopened.get(partition, ())):
                    if entry.lsn > opened.highest:
                        self.backlogs.enqueue(opened, entry)
                self._mark_draining(opened)  # it may have changed meanwhile
                self._partitions[partition] = opened  # with all its waiting entries, or not at all
                self._unopened.pop(partition, None)
                undo.pop_all()
        return opened

    def _mark_draining(self, partition: Partition) -> None:
        """Guard a partition while its table drains, so that its writers are checked. Requires: the turn."""
        info = self.ledger.table_by_id(partition.descriptor.table_id)
        partition.is_draining = info is not None and info.status is TableStatus.DRAINING
        if partition.is_draining:
            partition.guarded = True

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

    def opened(self) -> list[Partition]:
        """Return the open partitions without the turn, for statistics."""
        return list(self._partitions.values())

    def unopened_floor(self) -> int:
        """Return the LSN up to which all is applied to partitions that could not be opened; also without the turn."""
        return min([self.published, *(waiting[0].lsn - 1 for waiting in list(self._unopened.values()) if waiting)])

    def _open_now(self, number: PartitionId) -> None:
        try:
            self.partition(number)
        except Exception as error:
            threads.raise_interrupt(error)
            if isinstance(error, Restore) and self.is_repairable(number):
                logger.error("%s: call store.repair(%r)", error, self._info(number).name)
                return
            if not isinstance(error, (ProcessLimit, FixTheCall)) and not is_our_mistake(error, ()):
                raise  # the disk failed or a file is corrupt: the caller that opens the store must know
            self._report_unopened(number, error)

    def _open_later(self, number: PartitionId) -> None:
        """Let a worker open a partition, unless one has it already: if its files hang, only one is lost."""
        with self.turn:
            opening = self._opening.setdefault(number, PartitionOpening(self._clock.monotonic_s()))

        def work() -> None:
            try:
                self._run_opening(number, opening)
                if opening.error is not None:
                    raise opening.error
                self.backlogs.schedule(self.partition(number))
            except Exception as error:
                self._report_unopened(number, error)

        self._give(opening, work)

    def _give(self, opening: PartitionOpening, work: Callable[[], None]) -> None:
        """Give an opening to a worker, once."""
        if not opening.is_given:
            try:
                opening.is_given = True
                self.backlogs.workers.submit(work)
            except BaseException:
                opening.is_given = False  # an interrupt: perhaps no worker was given it
                raise

    def _report_unopened(self, number: PartitionId, error: Exception) -> None:
        logger.error("shard %d of table %d cannot be opened now: %s", shard_number(number), table_of(number), error)

    def _paused(self, number: PartitionId, reason: str, state: str = "paused") -> PartitionPaused:
        name, shard = self._info(number).name, shard_number(number)
        return PartitionPaused(f"shard {shard} of {name} {reason}", number, name, shard, state)


def describe(info: TableInfo, shard: int) -> PartitionDescriptor:
    """Return the descriptor of a shard."""
    number, storage = partition_id(info.table_id, shard), info.storage_options
    return PartitionDescriptor(number, info.table_id, shard, info.name, info.kind, storage.chunk_dir, storage.wal_dir)
