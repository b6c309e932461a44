"""Admission: which writes a partition takes, and what its state is.

A write to a partition that keeps up passes at the cost of one attribute (`Partition.guarded`). Otherwise it is checked
here, before anything is written: a partition with many waiting entries slows its writers, then makes them wait, then
refuses them with an error that names it. One whose files hang (`frozen`) or that is `paused` refuses at once.

A write that was checked is *reserved* from then on, until its record is dispatched and it counts as an entry: so limits
hold for what was admitted, not only for what has reached the partition. A large write that does not fit waits, and
smaller ones that do pass it.

Thread: any; `_lock` guards the reservations.
Invariants: (1) a refused write changed nothing. (2) a wait ends at its deadline, or when the partition freezes. (3) a
reservation ends with its write, whatever happens to that: at the latest after RESERVED_S.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from penstock.arguments import set_seconds, set_wholes
from penstock.errors import Backpressure, Invalid, PartitionPaused, PenstockError
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.lsm.tree_settings import Stall

if TYPE_CHECKING:
    from penstock.partition.backlog import Backlogs
    from penstock.partition.partition import Partition

WAIT_S = 5.0  # how long a write waits for its partition
RESERVED_S = 60.0  # no write takes longer until it has an epoch
_SECONDS_MAX = sys.float_info.max  # any time that ends
_COUNTS = (
    "partition_operations_max",
    "partition_bytes_max",
    "partition_lag_max",
    "operations_max",
    "bytes_max",
    "attempts_max",
)
_POLL_S = 0.1
_SLOW_S = 0.001  # the pause of a write to a partition with half of its limit


class Reservation:
    """A write that was admitted to a partition, and is not dispatched."""

    __slots__ = ("epoch", "since_s", "size")

    def __init__(self, size: int, since_s: float) -> None:
        self.epoch: int | None = None  # of the write; 0: it was not written; None: it has none yet
        self.size = size
        self.since_s = since_s


class PartitionState(Enum):
    """What a shard does with reads and writes; `store.statistics()` has it for each."""

    ACTIVE = "active"
    THROTTLED = "throttled"  # too much waits, or an apply failed and is tried again: writes are refused, reads wait
    FROZEN = "frozen"  # its files do not answer: reads and writes are refused until they do
    PAUSED = "paused"  # applying failed: reads and writes are refused until `resume`


@dataclass(frozen=True, kw_only=True)
class DispatcherSettings:
    """Limits on entries that wait to be applied, and how often a failing partition is retried.

    >>> penstock.StoreSettings(dispatcher=penstock.DispatcherSettings(operations_max=1_000)).dispatcher.operations_max
    1000
    """

    partition_operations_max: int = 10_000  # entries that wait in one partition, and writes that were just admitted
    partition_bytes_max: int = 64 << 20  # of these
    partition_age_s_max: float = 3600.0  # of the oldest of these
    partition_lag_max: int = 1_000_000  # records between the newest one and the oldest that waits
    operations_max: int = 100_000  # in all partitions
    bytes_max: int = 256 << 20
    # Called before every write with (table, shard); a text, the reason, refuses the write.
    signal: Callable[[str, int], str | None] | None = None
    stall_s: float = 10.0  # without progress for that long, a partition is frozen
    workers: int = 4  # threads for entries that touch files; 0: writers apply these, and wait for hanging files
    attempts_max: int = 4
    backoff_s: float = 0.1  # before the second attempt; doubled for each further one

    def __post_init__(self) -> None:
        set_wholes(self, _COUNTS, 1)  # NaN would be a limit that nothing reaches
        set_wholes(self, ["workers"], 0, 32)
        set_seconds(self, ("partition_age_s_max", "stall_s"), _SECONDS_MAX, above_zero=True)
        set_seconds(self, ["backoff_s"], _SECONDS_MAX)
        if self.signal is not None and not callable(self.signal):
            raise Invalid("signal is a function of (table, shard) that returns a text or None")


class PartitionAdmission:
    """Judges writes and reads by the state of their partition."""

    def __init__(
        self,
        settings: DispatcherSettings,
        backlogs: Backlogs,
        *,
        clock: Clock,
        published: Callable[[], int],
        lag_max_of: Callable[[int], int | None] = lambda table_id: None,
    ) -> None:
        """`lag_max_of` returns the lag that a table tolerates; None: as the settings say."""
        self.settings = settings
        self._backlogs = backlogs
        self._clock = clock
        self._published = published
        self._lag_max_of = lag_max_of
        self._lock = threads.lock("partition.admitted")
        self.dispatched: Callable[[], int] = lambda: 1 << 62  # the last epoch whose record was dispatched
        self.refusals = {"paused": 0, "partition": 0, "store": 0}  # writes, by what refused them; without a lock
        self.rejects: Counter[tuple[int, str]] = Counter()  # refused writes by partition and limit; without a lock
        self.retries: Counter[int] = Counter()  # writes that had to wait, by partition; without a lock

    def is_frozen(self, partition: Partition) -> bool:
        """Whether entries wait and none was applied for `stall_s`."""
        stalled_s = self._clock.monotonic_s() - partition.progress_s
        return partition.first_waiting is not None and not partition.failures and stalled_s >= self.settings.stall_s

    def state(self, partition: Partition) -> PartitionState:
        if partition.failures >= self.settings.attempts_max:
            return PartitionState.PAUSED
        if self.is_frozen(partition):
            return PartitionState.FROZEN
        if partition.failures or (partition.late and self._reached(partition) is not None):
            return PartitionState.THROTTLED
        return PartitionState.ACTIVE

    def age_s(self, partition: Partition) -> float:
        """Return how long ago the oldest write that waits was admitted or written; 0 if none waits."""
        try:
            return max(0.0, (self._clock.time_us() - partition.backlog[0].time_us) / 1e6)
        except IndexError:
            pass
        try:
            return max(0.0, self._clock.monotonic_s() - partition.admitted[0].since_s)
        except IndexError:
            return 0.0

    def operations(self, partition: Partition) -> int:
        """Return the number of entries that wait, and of admitted writes that will become entries."""
        self.release(partition)
        return partition.waiting_operations + len(partition.admitted)

    def bytes(self, partition: Partition) -> int:
        """Return the bytes of what `operations` counts."""
        self.release(partition)
        return partition.waiting_bytes + partition.admitted_bytes

    def release(self, partition: Partition) -> None:
        """End the reservations of writes that were dispatched, or never written."""
        if partition.admitted:
            with self._lock:
                self._release_locked(partition)

    def _release_locked(self, partition: Partition) -> None:
        """See `release`. Requires: _lock."""
        admitted, last, late_s = partition.admitted, self.dispatched(), self._clock.monotonic_s() - RESERVED_S
        unwritten: list[Reservation] = []  # as many as writers are under way: they hold back none that came later
        try:
            while admitted:
                first = admitted[0]
                if first.epoch is None and first.since_s > late_s:
                    unwritten += [first]  # not a call, behind which a signal could arrive: it would be in both
                    admitted.popleft()
                    continue
                if first.epoch is not None and first.epoch > last:
                    break
                partition.admitted_bytes -= first.size  # then it goes: no signal arrives between the two
                admitted.popleft()
        finally:
            admitted.extendleft(unwritten[::-1])
        if not admitted:
            partition.admitted_bytes = 0

    def _reserve(self, partition: Partition, size: int) -> Reservation | Backpressure:
        """Reserve a write, unless a limit is reached: another writer may have come first."""
        with self._lock:
            self._release_locked(partition)
            refusal = self._full(partition, size)
            if refusal is not None:
                return refusal
            reservation = Reservation(size, self._clock.monotonic_s())
            partition.admitted_bytes += size  # then it is there: no signal arrives between the two
            partition.admitted.append(reservation)
            return reservation

    def _reached(self, partition: Partition, size: int = 0) -> tuple[str, float, float, str] | None:
        """Return the limit that a partition has reached: its name, the limit, the value, and what is counted."""
        settings, operations = self.settings, partition.waiting_operations
        lag = self._published() - partition.machine.applied if operations else 0
        operations += len(partition.admitted)
        waiting_bytes = partition.waiting_bytes + partition.admitted_bytes
        lag_max = self._lag_max_of(partition.descriptor.table_id) or settings.partition_lag_max
        for name, maximum, value, counted in (
            ("partition_operations_max", settings.partition_operations_max, operations, "waiting operations"),
            ("partition_bytes_max", settings.partition_bytes_max, waiting_bytes, "waiting bytes"),
            ("partition_age_s_max", settings.partition_age_s_max, round(self.age_s(partition), 3), "s of waiting"),
            ("partition_lag_max", lag_max, lag, "records to catch up with"),
        ):
            if value >= maximum:
                return name, maximum, value, counted
        if waiting_bytes > 0 and waiting_bytes + size > settings.partition_bytes_max:
            return "partition_bytes_max", settings.partition_bytes_max, waiting_bytes, f"waiting bytes, and {size} more"
        return None

    def _full(self, partition: Partition, size: int) -> Backpressure | None:
        """Return an error if a limit of the partition is reached."""
        reached = self._reached(partition, size) if partition.late or partition.admitted else None
        if reached is None:
            return None
        name, maximum, value, counted = reached
        return self._backpressure(partition, f"has {value} {counted} (limit {maximum})", name, maximum, value)

    def reading_refused(self, partition: Partition) -> PenstockError | None:
        """Return why a partition cannot be read, even after a wait; None if it can be, or will be soon."""
        behind = partition.behind
        if behind is not None:
            return behind
        return self._frozen(partition) if self.is_frozen(partition) else None

    def _frozen(self, partition: Partition) -> PartitionPaused:
        descriptor, stalled_s = partition.descriptor, self._clock.monotonic_s() - partition.progress_s
        return PartitionPaused(
            f"shard {descriptor.shard} of {descriptor.name} is frozen: its files have not answered for "
            f"{stalled_s:.1f} s (limit {self.settings.stall_s:g}); it goes on when they do: check the disk, then retry",
            descriptor.partition,
            descriptor.name,
            descriptor.shard,
            "frozen",
            "stall_s",
            self.settings.stall_s,
            round(stalled_s, 3),
            self.settings.stall_s,
        )

    def writing_refused(self, partition: Partition, size: int = 0) -> PenstockError | None:
        """Return why a partition takes no write of a size now; None if it does."""
        if partition.refusal is not None and partition.failures >= self.settings.attempts_max:
            return partition.refusal
        if self.is_frozen(partition):
            return self._frozen(partition)
        self.release(partition)
        full = self._full(partition, size)
        return full or self._crowded() or self._tree_stops(partition) or self._signalled(partition)

    def _backpressure(
        self, partition: Partition, reason: str, limit: str, maximum: float, value: float
    ) -> Backpressure:
        descriptor = partition.descriptor
        return Backpressure(
            f"shard {descriptor.shard} of {descriptor.name} {reason}: retry later",
            descriptor.partition,
            descriptor.name,
            descriptor.shard,
            "throttled",
            limit,
            maximum,
            value,
            max(0.1, self.settings.backoff_s),
        )

    def _signalled(self, partition: Partition) -> Backpressure | None:
        descriptor, signal = partition.descriptor, self.settings.signal
        reason = None if signal is None else signal(descriptor.name, descriptor.shard)
        return None if reason is None else self._backpressure(partition, f"is held back ({reason})", "signal", 0, 0)

    def _tree_stops(self, partition: Partition) -> Backpressure | None:
        tree = partition.slow_tree
        level, why = (Stall.NONE, "") if tree is None else tree.stall()
        return self._backpressure(partition, f"is slow ({why})", "tree", 0, 0) if level is Stall.STOP else None

    def _crowded(self) -> Backpressure | None:
        """Return an error if too many entries wait in all partitions."""
        settings, backlogs = self.settings, self._backlogs
        if not backlogs.is_crowded():
            return None
        operations, size = backlogs.operations, backlogs.bytes
        limit = ("operations_max", settings.operations_max, operations)
        if operations < settings.operations_max:
            limit = ("bytes_max", settings.bytes_max, size)
        return Backpressure(
            f"{operations} operations ({size} bytes) wait to be applied (limit "
            f"{settings.operations_max}, {settings.bytes_max} bytes): retry later",
            0,
            "",
            0,
            "",
            *limit,
            max(0.1, settings.backoff_s),
        )

    def admit(self, partition: Partition, timeout_s: float = WAIT_S, size: int = 0) -> Reservation:
        """Admit a write of `size` bytes, at once or after a pause; otherwise raise, and nothing was written.

        The caller sets the epoch of the reservation.
        """
        refusal = self.writing_refused(partition, size)
        if refusal is None:
            if partition.slow_tree is not None or (partition.late and partition.guarded and not partition.failures):
                self._wait(_SLOW_S)
            elif not partition.late:
                partition.unguard(self._backlogs.guards_all)
                if not partition.guarded:
                    return Reservation(size, 0.0)  # not counted: nothing waits there
        deadline_s, waited = self._clock.monotonic_s() + timeout_s, False
        while True:
            if refusal is None:
                reserved = self._reserve(partition, size)
                if isinstance(reserved, Reservation):
                    return reserved
                refusal = reserved
            left_s = deadline_s - self._clock.monotonic_s()
            waits = isinstance(refusal, Backpressure) and not partition.failures and refusal.limit != "signal"
            if not waits or left_s <= 0 or not self._backlogs.workers.count:
                self._count_refusal(partition, refusal)
                raise refusal
            if not waited:
                waited = True
                self.retries[partition.descriptor.partition] += 1
            self._wait(min(left_s, _POLL_S))
            refusal = self.writing_refused(partition, size)

    def _count_refusal(self, partition: Partition, refusal: PenstockError) -> None:
        paused = isinstance(refusal, PartitionPaused)
        self.refusals["paused" if paused else "partition" if getattr(refusal, "partition", 0) else "store"] += 1
        limit = getattr(refusal, "limit", "") or ("paused" if paused else "failing")
        self.rejects[partition.descriptor.partition, limit] += 1

    def _wait(self, timeout_s: float) -> None:
        """Sleep until a backlog gets shorter, or time is up."""
        backlogs = self._backlogs
        with backlogs.moved:
            backlogs.movers += 1
            try:
                backlogs.moved.wait(timeout_s)
            finally:
                backlogs.movers -= 1

    def guard(self, partitions: Iterable[Partition]) -> None:
        """Decide again which partitions' writers must call `admit`. Requires: the turn."""
        backlogs = self._backlogs
        backlogs.guards_all = self.settings.signal is not None or backlogs.is_crowded()
        for partition in partitions:
            state = self.state(partition)
            if state in (PartitionState.FROZEN, PartitionState.PAUSED):
                backlogs.defer(partition)  # others need the memory; its entries are in the journal
            if not (partition.late and (partition.guarded or state is not PartitionState.ACTIVE)):
                partition.unguard(backlogs.guards_all)
            else:
                partition.guarded = True
