"""An open partition, and the entries that could not be applied to it.

A partition whose apply fails queues its entries in a backlog: it is retried with growing pauses, then paused. Its
writes are then refused with its name in the error; other partitions continue; `Dispatcher.resume` lets it catch up. An
entry that fails because of a Penstock bug, not of the disk, is set aside after as many attempts (`aside`), and the
partition continues without it.

Thread: the one that has the dispatcher's turn.
Invariant: an entry leaves a backlog when it is applied or set aside, and in LSN order.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.errors import Backpressure, Invalid, PartitionPaused, PenstockError, Restore, RetryLater
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_errors import ran_out_of_space
from penstock.journal.partitions import PartitionId
from penstock.journal.tracker import SegmentedWatermarks
from penstock.partition.aside import AsideLog, is_our_mistake
from penstock.partition.machine import Entry, PartitionDescriptor, PartitionStateMachine
from penstock.partition.spill import SpillLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DispatcherSettings:
    """Limits on entries that wait to be applied, and how often a failing partition is retried.

    >>> penstock.StoreSettings(dispatcher=penstock.DispatcherSettings(operations_max=1_000)).dispatcher.operations_max
    1000
    """

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
    """An open partition and its backlog."""

    def __init__(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine, spill: SpillLog) -> None:
        self.descriptor = descriptor
        self.machine = machine
        self.spill = spill
        self.backlog: deque[Entry] = deque()  # durable and not applied; empty in a healthy partition
        self.highest = machine.applied
        self.failures = 0  # consecutive
        self.failures_total = 0  # applies that failed since the partition was opened
        self.out_of_space = False  # the cause of the last failure
        self.retry_at_s = 0.0
        self.error: Exception | None = None  # of the last failure
        self.refusal: PenstockError | None = None  # why writes are refused

    @property
    def backlog_bytes(self) -> int:
        return sum(entry.size for entry in self.backlog)

    @property
    def behind(self) -> PenstockError | None:
        """Why the partition cannot be read: an acknowledged write is not applied. None if it can."""
        if not self.failures:
            return None
        if isinstance(self.error, Restore):
            return copy.copy(self.error)  # the caller has to restore a file: the error names it
        name, shard = self.descriptor.name, self.descriptor.shard
        return self.refusal or PartitionPaused(
            f"shard {shard} of {name} is behind after a failure ({self.error}): it is tried again"
        )

    @property
    def watermarks(self) -> SegmentedWatermarks:
        applied = self.machine.applied
        return SegmentedWatermarks(min(self.machine.stored, applied), applied, self.highest, self.highest)


class Backlogs:
    """The backlogs of all partitions."""

    def __init__(
        self,
        aside: AsideLog,
        settings: DispatcherSettings,
        *,
        clock: Clock,
        replay: Callable[[PartitionId, int, int], Iterable[Entry]],
    ) -> None:
        self._aside = aside
        self._settings = settings
        self._clock = clock
        self._replay = replay  # the entries of a partition in the journal, from one LSN to another
        self.behind: set[Partition] = set()  # partitions with a backlog; emptiness is read without the turn

    def check_room(self) -> None:
        """Raise `Backpressure` if too many entries wait in all partitions."""
        operations = sum(len(partition.backlog) for partition in self.behind)
        size = sum(partition.backlog_bytes for partition in self.behind)
        if operations >= self._settings.operations_max or size >= self._settings.bytes_max:
            raise Backpressure(
                f"{operations} operations ({size} bytes) wait to be applied (limit "
                f"{self._settings.operations_max}, {self._settings.bytes_max} bytes): retry later"
            )

    def enqueue(self, partition: Partition, entry: Entry) -> None:
        """Add an entry that follows all others of the partition."""
        if not partition.backlog or partition.backlog[-1].lsn < entry.lsn:  # else an interrupted attempt added it
            partition.backlog.append(entry)
        partition.highest = entry.lsn

    def add_failed(self, partition: Partition, entry: Entry, error: Exception) -> None:
        """Add an entry whose first apply failed."""
        self.enqueue(partition, entry)
        self._failed(partition, error)
        self.drain(partition, early=partition.failures > 0)  # without a failure it was set aside

    def drain(self, partition: Partition, *, early: bool | None = None) -> None:
        """Apply the backlog until an entry fails; `early`: it is too early for the next attempt."""
        if early is None:
            early = partition.failures > 0 and self._clock.monotonic_s() < partition.retry_at_s
        while partition.backlog and not early and partition.failures < self._settings.attempts_max:
            try:
                if partition.failures:
                    self.renew(partition)
                entry = partition.backlog[0]
                if entry.lsn > partition.machine.applied:
                    partition.machine.apply(self._applicable(partition, entry))
            except Exception as error:
                threads.raise_interrupt(error)
                self._failed(partition, error)
                if partition.failures:
                    break
                continue  # it was set aside
            partition.backlog.popleft()
            # The partition is behind until the last entry is applied: readers must not see a state in between.
            partition.failures, partition.out_of_space = min(partition.failures, len(partition.backlog), 1), False
        if partition.backlog:
            self.behind.add(partition)
        else:
            self.behind.discard(partition)
            partition.failures = 0
        self._set_refusal(partition)

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

    def renew(self, partition: Partition) -> None:
        """After its files failed, restart a partition from its stored state and refill the backlog from the journal."""
        if not partition.machine.broken:
            return
        partition.machine.renew()
        number, start = partition.descriptor.partition, partition.machine.applied + 1
        entries = {entry.lsn: entry for entry in partition.spill.entries(partition.machine.stored)}
        entries.update({entry.lsn: entry for entry in self._replay(number, start, partition.highest)})
        entries.update({entry.lsn: entry for entry in partition.backlog})  # these know their waiters
        partition.backlog = deque(entries[lsn] for lsn in sorted(entries))

    def _applicable(self, partition: Partition, entry: Entry) -> Entry:
        """Return the entry, or an empty one with its LSN if it was set aside, so that it counts as applied."""
        if self._aside.digests and self._aside.holds(partition.descriptor.partition, entry.lsn, entry.sections):
            return Entry(entry.lsn, entry.time_us, ())
        return entry

    def _failed(self, partition: Partition, error: Exception) -> None:
        partition.failures_total += 1
        if partition.failures + 1 >= self._settings.attempts_max and self._set_aside(partition, error):
            partition.failures = 0
            return
        partition.failures += 1
        partition.error = error
        partition.out_of_space = ran_out_of_space(error)
        # These are retried without end: nothing is wrong with the partition, and nobody has to call `resume`.
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
        """Set aside the entry that failed, if the cause is a bug of ours; False: the partition must wait."""
        descriptor = partition.descriptor
        entry = partition.backlog[0]
        if not is_our_mistake(error, entry.sections):
            return False
        if self._aside.holds(descriptor.partition, entry.lsn, entry.sections):
            return False  # even the empty entry fails
        try:
            self._aside.add(descriptor.name, entry.lsn, entry.time_us, entry.sections, error)
            try:
                partition.machine.apply(Entry(entry.lsn, entry.time_us, ()))
            except BaseException:
                self._aside.undo_add()  # even an empty entry fails, so this entry is not the cause
                raise
        except Exception as failure:
            threads.raise_interrupt(failure)
            logger.error("record %d for %s cannot be set aside (%s)", entry.lsn, descriptor.name, failure)
            return False
        logger.critical(
            "record %d could not be applied to shard %d of %s, because of a bug in Penstock, and was set aside: please "
            "report it; store.check() lists it",
            entry.lsn,
            descriptor.shard,
            descriptor.name,
            exc_info=error,
        )
        return True
