"""The entries that wait to be applied to open partitions, and the threads that apply them.

An entry waits if applying it may touch files, if earlier entries wait, or if applying failed. One worker at a time
applies the backlog (it holds the partition's `claim`), and holds no lock meanwhile. So a partition whose files hang
keeps one worker busy, and no other thread: its readers and writers get an error.

A partition whose apply fails is retried with growing pauses, then paused: its writes are refused with its name in the
error; other partitions continue; `Dispatcher.resume` lets it catch up. An entry that fails because of a Penstock bug,
not of the disk, is set aside after as many attempts (`aside`), and the partition continues without it.

Memory is bounded whatever was admitted: an entry that comes when twice the limits wait is *deferred*, and so are those
of a partition whose files hang. They are only in the journal (or in the partition's log, when a checkpoint moves them),
and are read from there when their turn comes.

Thread: any; the dispatcher's turn guards every field of a partition, but it is never held while an entry is applied.
Invariants: (1) an entry leaves a backlog when it is applied or set aside, and in LSN order. (2) at most one thread
applies to a partition. (3) no entry is applied before its record is `published`: every section that only touches memory
is in place by then. (4) `late` is True while an entry waits, and from before its write is seen elsewhere. (5) every
deferred entry is newer than all of the backlog.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

from penstock.errors import PartitionPaused, PenstockError, RetryLater
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_errors import ran_out_of_space
from penstock.host.threads import Mutex
from penstock.journal.partitions import PartitionId
from penstock.partition.admission import DispatcherSettings
from penstock.partition.aside import AsideLog, is_our_mistake
from penstock.partition.machine import Entry
from penstock.partition.partition import Partition
from penstock.partition.workers import Workers

logger = logging.getLogger(__name__)

SLICE_S = 0.02  # a worker applies to one partition for that long, then to the next
TABLE_THREADS_MAX = 16  # in the files of one table, when threads are stuck
_RELEASE_ATTEMPTS = 8  # repeated interrupts must not leave a claim


class Backlogs:
    """The backlogs of all partitions, and the threads that apply them."""

    def __init__(
        self,
        aside: AsideLog,
        settings: DispatcherSettings,
        *,
        clock: Clock,
        turn: Mutex,
        replay: Callable[[PartitionId, int, int], Iterable[Entry]],
        published: Callable[[], int],
        on_applied: Callable[[], None],
        on_released: Callable[[Partition], None],
    ) -> None:
        self._aside = aside
        self._settings = settings
        self._clock = clock
        self._turn = turn
        self._replay = replay  # the entries of a partition in the journal, from one LSN to another
        self._published = published
        self._on_applied = on_applied
        self._on_released = on_released  # called, with the turn, for a dropped partition that nobody uses any more
        self.behind: set[Partition] = set()  # partitions with a backlog; emptiness is read without the turn
        self.dropped: set[Partition] = set()  # guarded by the turn: dropped, and a thread is still in their files
        self.left: list[Partition] = []  # partitions with new entries that no thread was given yet
        self.workers = Workers(0, clock=clock, stall_s=settings.stall_s)
        self.moved = threads.condition("partition.moved")  # notified when a backlog gets shorter
        self.movers = 0  # number of threads that wait for that; a hint
        self._stopped = False  # the store is closing
        self.operations = 0  # entries that wait in all partitions
        self.bytes = 0
        self.guards_all = settings.signal is not None  # whether every writer must ask
        self.undispatched: Callable[[], int] = lambda: 0  # bytes of writes that no partition has yet

    # -- with the turn

    def enqueue(self, partition: Partition, entry: Entry) -> None:
        """Add an entry that follows all others of the partition. Requires: the turn."""
        if not partition.backlog or partition.backlog[-1].lsn < entry.lsn:  # else an interrupted attempt added it
            if not partition.backlog:
                partition.progress_s = self._clock.monotonic_s()
                partition.backlog_bytes = 0
            partition.late = True  # before the entry counts as dispatched
            settings = self._settings
            if self._defers(partition):
                if partition.deferred_from is None:
                    partition.deferred_from = entry.lsn
                partition.deferred_operations += 1
                partition.deferred_bytes += entry.size
            else:
                partition.backlog.append(entry)
                self._count(partition, 1, entry.size)
            # Early, before undispatched writes could exceed a limit: they are not counted for each partition.
            if 2 * len(partition.backlog) >= settings.partition_operations_max or (
                2 * (partition.backlog_bytes + self.undispatched()) >= settings.partition_bytes_max
            ):
                partition.guarded = True
        partition.highest = entry.lsn
        self.behind.add(partition)
        self.left.append(partition)

    def _defers(self, partition: Partition) -> bool:
        """The guard after the commit: whether another entry must wait outside memory. Requires: the turn."""
        settings = self._settings
        return partition.deferred_from is not None or (
            len(partition.backlog) > 2 * settings.partition_operations_max
            or (len(partition.backlog) > 1 and partition.backlog_bytes > 2 * settings.partition_bytes_max)
        )

    def defer(self, partition: Partition, operations_max: int = 1, bytes_max: int = 0) -> None:
        """Keep only the oldest entries in memory, and at least one. Requires: the turn."""
        backlog = partition.backlog
        while len(backlog) > 1 and (len(backlog) > operations_max or partition.backlog_bytes > bytes_max):
            partition.deferred_from = backlog[-1].lsn  # first: an interrupt leaves an entry twice, never nowhere
            entry = backlog.pop()
            self._count(partition, -1, -entry.size)
            partition.deferred_operations += 1
            partition.deferred_bytes += entry.size

    def _count(self, partition: Partition, operations: int, size: int) -> None:
        """Count waiting entries that came or went. Requires: the turn."""
        if partition.is_dropped:
            return  # `forget` has counted them all
        partition.backlog_bytes += size
        self.operations += operations
        self.bytes += size

    def forget(self, partition: Partition) -> None:
        """Forget a dropped partition. Requires: the turn."""
        if partition in self.behind:
            self._count(partition, -len(partition.backlog), -partition.backlog_bytes)
            self.behind.discard(partition)
        partition.is_dropped = True
        self.dropped.add(partition)
        self.release_dropped(partition)

    def release_dropped(self, partition: Partition) -> None:
        """Let the files of a dropped partition be deleted, once no thread is in them. Requires: the turn."""
        if partition in self.dropped and not partition.is_used:
            self.dropped.discard(partition)
            self._on_released(partition)

    def detach(self, partition: Partition, refusal: PenstockError) -> None:
        """Refuse the waiters of a partition that is closed for a while. Requires: the turn."""
        partition.refusal, partition.failures = refusal, self._settings.attempts_max
        partition.late = partition.guarded = True
        self._count(partition, -len(partition.backlog), -partition.backlog_bytes)
        self.behind.discard(partition)

    def is_crowded(self) -> bool:
        """Whether too many entries wait in all partitions."""
        return self.operations >= self._settings.operations_max or self.bytes >= self._settings.bytes_max

    def _end(self, partition: Partition) -> None:
        """After a claim: record whether entries still wait. Requires: the turn."""
        partition.claim = None
        if partition.is_dropped:
            self.behind.discard(partition)
            self.release_dropped(partition)
            return
        if partition.first_waiting is not None:
            self.behind.add(partition)
            partition.late = True
        elif partition.failures and partition.machine.broken:
            partition.late = True  # nothing waits yet, but its files are to be opened anew, and the backlog refilled
        else:
            self.behind.discard(partition)
            partition.failures = partition.backlog_bytes = 0
            partition.deferred_operations = partition.deferred_bytes = 0
            partition.refusal = None
            self._reach(partition)
            partition.late = False
            partition.unguard(self.guards_all)
        if partition.failures:
            partition.guarded = True
        if not self.behind:
            self.operations = self.bytes = 0

    # -- applying, without any lock

    def give_out(self) -> None:
        """Let workers apply what was left by `enqueue`."""
        left, self.left = self.left, []
        for partition in dict.fromkeys(left):
            self.schedule(partition)

    def schedule(self, partition: Partition) -> None:
        """Let a worker apply the backlog soon, or this thread if there are no workers."""
        if not self.workers.count:
            self.drain(partition)
        elif not partition.is_scheduled and not (self.workers.is_crowded and self.hangs(partition.descriptor.table_id)):
            try:
                partition.is_scheduled = True
                self.workers.submit(lambda: self._work(partition))
            except BaseException:
                partition.is_scheduled = False  # an interrupt: perhaps no worker was given it
                raise

    def hangs(self, table: int) -> bool:
        """Whether too many threads are in the files of a table for it to get another: other tables need them."""
        used = [one for one in self.behind.copy() if one.descriptor.table_id == table and one.is_used]
        return len(used) >= TABLE_THREADS_MAX

    def _work(self, partition: Partition) -> None:
        partition.is_scheduled = False  # before the claim: an entry that comes later schedules it again
        self.drain(partition)

    def drain(self, partition: Partition) -> None:
        """Apply the backlog until it is empty or an entry fails, unless another thread does. Requires: no lock."""
        claim = threading.current_thread()
        try:
            with self._turn:
                if not partition.is_claimed and not partition.is_dropped:
                    partition.claim = claim
            if partition.claim is claim:
                self._drain(partition)
        finally:
            self._release(partition, claim)

    def stop(self, is_idle: Callable[[], bool], timeout_s: float) -> None:
        """Let no thread begin another entry, and wait until the entries that were begun end."""
        self._stopped = True
        with self.moved:
            self.movers += 1
            self.moved.wait_for(is_idle, timeout_s)

    def notify(self) -> None:
        """Wake the threads that wait until a backlog is shorter, or a partition's files are no longer used."""
        if self.movers:
            with self.moved:
                self.moved.notify_all()

    def _release(self, partition: Partition, claim: threading.Thread) -> None:
        """Return a claim, even if interrupted, and let a worker go on if entries are left."""
        released = False
        for _ in range(_RELEASE_ATTEMPTS):
            try:
                with self._turn:
                    if partition.claim is claim:
                        released = True
                        self._end(partition)
                break
            except BaseException:
                logger.warning("returning a partition was interrupted: trying again", exc_info=True)
        if not released:
            return
        self.notify()
        self._on_applied()
        goes_on = not partition.failures and not partition.is_dropped and not self._stopped
        if partition.first_waiting is not None and goes_on and self.workers.count:
            self.schedule(partition)

    def _drain(self, partition: Partition) -> None:
        """Apply the backlog. Requires: the claim."""
        early = partition.failures > 0 and self._clock.monotonic_s() < partition.retry_at_s
        if partition.first_error is not None:
            error, partition.first_error = partition.first_error, None
            self._failed(partition, error)
            early = partition.failures > 0  # otherwise it was set aside
        end_s = self._clock.monotonic_s() + SLICE_S
        while not early and partition.refusal is None and not partition.is_dropped:
            try:
                if partition.failures:
                    self.renew(partition)
                if partition.deferred_from is not None and len(partition.backlog) <= 1:
                    self._recall(partition)
                entry = partition.backlog[0] if partition.backlog else None
                self._reach(partition)
                if entry is None or entry.lsn > self._published() or self._stopped:
                    break
                partition.progress_s = self._clock.monotonic_s()
                if entry.lsn > partition.machine.applied:
                    partition.machine.apply(self._applicable(partition, entry))
            except Exception as error:
                threads.raise_interrupt(error)
                self._failed(partition, error)
                if partition.failures:
                    break
                continue  # it was set aside
            with self._turn:
                if partition.backlog and partition.backlog[0] is entry:
                    partition.backlog.popleft()
                    self._count(partition, -1, -entry.size)
                # The partition is behind until the last entry is applied: readers must not see a state in between.
                left = partition.waiting_operations
                partition.failures, partition.out_of_space = min(partition.failures, left, 1), False
            partition.progress_s = now_s = self._clock.monotonic_s()
            if now_s >= end_s and self.workers.count:
                break

    def _recall(self, partition: Partition) -> None:
        """Read deferred entries, as many as may be in memory, from the journal and the log. Requires: the claim."""
        with self._turn:
            start, last, number = partition.deferred_from, partition.highest, partition.descriptor.partition
        assert start is not None
        # The journal first: a checkpoint may move entries from it to the log meanwhile.
        journal, _ = self._some(self._replay(number, start, last))
        before = journal[0].lsn if journal else last + 1
        entries, is_all = self._some(entry for entry in partition.spill.entries(start - 1) if entry.lsn < before)
        if is_all:
            entries += journal
        with self._turn:
            newest = partition.backlog[-1].lsn if partition.backlog else 0
            for entry in entries:
                if entry.lsn > newest:
                    partition.backlog.append(entry)
                    self._count(partition, 1, entry.size)
                    partition.deferred_operations -= 1
                    partition.deferred_bytes -= entry.size
            partition.deferred_from = entries[-1].lsn + 1 if entries else last + 1
            if partition.deferred_from > partition.highest:
                partition.deferred_from = None
                partition.deferred_operations = partition.deferred_bytes = 0

    def _some(self, entries: Iterable[Entry]) -> tuple[list[Entry], bool]:
        """Return the first entries, up to half of the limits of a partition, and whether these are all."""
        some, size, settings = list[Entry](), 0, self._settings
        for entry in entries:
            if 2 * size >= settings.partition_bytes_max or 2 * len(some) >= settings.partition_operations_max:
                return some, False
            some.append(entry)
            size += entry.size
        return some, True

    def _reach(self, partition: Partition) -> None:
        """Resolve the markers that stand before the first entry that waits. Requires: the claim.

        Each is chosen with the turn: while a state is taken, another entry may come, and a marker behind it.
        """
        while partition.markers:
            with self._turn:
                markers, first = partition.markers, partition.first_waiting
                if not markers or (first is not None and markers[0].lsn >= first):
                    return
                marker = markers[0]
            marker.resolve(partition.machine)
            with self._turn, suppress(ValueError):  # its reader gave up, and it was removed
                partition.markers.remove(marker)

    def renew(self, partition: Partition) -> None:
        """After its files failed, restart a partition from its stored state and refill the backlog from the journal."""
        if not partition.machine.broken:
            return
        partition.machine.renew()
        number, start = partition.descriptor.partition, partition.machine.applied + 1
        # The journal first: a checkpoint may move entries from it to the spill meanwhile.
        entries = {entry.lsn: entry for entry in self._replay(number, start, partition.highest)}
        entries.update({entry.lsn: entry for entry in partition.spill.entries(partition.machine.stored)})
        with self._turn:
            entries.update({entry.lsn: entry for entry in partition.backlog})  # these know their waiters
            before, size = len(partition.backlog), partition.backlog_bytes
            partition.backlog = deque(entries[lsn] for lsn in sorted(entries))
            self._count(partition, len(entries) - before, sum(entry.size for entry in partition.backlog) - size)
            partition.deferred_from, partition.deferred_operations, partition.deferred_bytes = None, 0, 0
            self.defer(partition, self._settings.partition_operations_max, self._settings.partition_bytes_max)
            self.behind.add(partition)

    def _applicable(self, partition: Partition, entry: Entry) -> Entry:
        """Return the entry, opened, or an empty one with its LSN if it was set aside, so that it counts as applied."""
        if self._aside.digests and self._aside.holds(partition.descriptor.partition, entry.lsn, entry.sections):
            return Entry(entry.lsn, entry.time_us, ())
        return entry if partition.opener is None else partition.opener(entry)

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
                f"remove the cause, then call store.resume({name!r})",
                partition.descriptor.partition,
                name,
                shard,
                "paused",
            )

    def _set_aside(self, partition: Partition, error: Exception) -> bool:
        """Set aside the entry that failed, if the cause is a bug of ours; False: the partition must wait."""
        descriptor = partition.descriptor
        if not partition.backlog:  # its files could not be opened anew
            return False
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
                self._aside.undo_add(
                    descriptor.partition, entry.lsn
                )  # even an empty entry fails, so this entry is not the cause
                raise
        except Exception as failure:
            threads.raise_interrupt(failure)
            logger.error("record %d for %s cannot be set aside (%s)", entry.lsn, descriptor.name, failure)
            return False
        logger.critical(
            "record %d could not be applied to shard %d of %s, because of a bug in Penstock, and was set aside: please "
            "report it; store.troubles() lists it",
            entry.lsn,
            descriptor.shard,
            descriptor.name,
            exc_info=error,
        )
        return True
