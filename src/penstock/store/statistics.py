"""The statistics of a store at one moment: its epochs, its LSNs, and the watermarks of each partition.

Thread: any. Nothing here waits for a partition: a partition whose disk hangs is reported as well.
Invariants: (1) `first_lsn <= needed_from`, and `global_applied_floor <= durable_lsn`. (2) per partition,
`stored <= applied <= durable <= highest`. (3) `global_applied_floor` is at most every `applied_global`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.host.clock import Clock
from penstock.journal.consensus import Consensus
from penstock.partition.backlog import Partition
from penstock.partition.dispatcher import Dispatcher
from penstock.store.flusher import Coordinator

_State = Literal["active", "throttled", "frozen", "paused"]
PARTITION_STATES: tuple[_State, ...] = ("active", "throttled", "frozen", "paused")


@dataclass(frozen=True, kw_only=True)
class PartitionStatistics:
    """One shard of a table that is open: its watermarks, in LSNs, and the entries that wait to be applied.

    >>> users = next(one for one in store.statistics().partitions if one.table == "users")
    >>> users.state, users.applied == users.durable, users.enqueued_ops
    ('active', True, 0)
    """

    table: str
    shard: int
    kind: str
    state: Literal["active", "throttled", "frozen", "paused"]
    stored: int  # in files of its own
    applied: int  # in its state: readers see it
    durable: int  # in the journal
    highest: int  # handed to it
    applied_global: int  # it has applied all that records up to this LSN hold for it
    enqueued_ops: int  # entries that are durable and not applied
    enqueued_bytes: int
    backlog_age_ms: int  # of the oldest of them
    error: str  # of the last failed apply; empty if there is none


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """A store at one moment.

    >>> now = store.statistics()
    >>> now.applied_epoch <= now.durable_epoch <= now.last_epoch, now.global_applied_floor <= now.durable_lsn
    (True, True)
    """

    state: str  # of the coordinator: idle, accumulating, flushing or failed
    error: str  # why writes are refused; empty if they are not
    incarnation: int
    last_epoch: int  # of the newest write
    durable_epoch: int
    applied_epoch: int
    first_lsn: int  # the oldest record of the journal
    needed_from: int  # records below it are stored or spilled by every partition
    durable_lsn: int  # the newest durable record
    applied_lsn: int  # new snapshots see all records up to this
    global_applied_floor: int  # every partition has applied all records up to this
    writes: int
    written_bytes: int
    pending_bytes: int  # not yet in a flush
    in_flight_bytes: int  # in a flush, or durable and not yet applied
    waiting_writes: int  # writes that wait for room
    refused_writes: int
    flushes: int
    flush_failures: int
    apply_failures: int
    partitions: tuple[PartitionStatistics, ...]  # those that are open, by table and shard


def partition_statistics(partition: Partition, state: _State, published: int, now_us: int) -> PartitionStatistics:
    """Return the statistics of a partition; `published` is the LSN up to which records were dispatched."""
    waiting, descriptor = list(partition.backlog), partition.descriptor
    applied = partition.machine.applied
    stored, highest = min(partition.machine.stored, applied), max(partition.highest, applied)
    failed = partition.error if partition.failures else None
    first = waiting[0].lsn if waiting else partition.deferred_from
    return PartitionStatistics(
        table=descriptor.name,
        shard=descriptor.shard,
        kind=descriptor.kind,
        state=state,
        stored=stored,
        applied=applied,
        durable=highest,
        highest=highest,
        applied_global=max(published, applied) if first is None else first - 1,
        enqueued_ops=len(waiting) + partition.deferred_operations,
        enqueued_bytes=sum(entry.size for entry in waiting) + partition.deferred_bytes,
        backlog_age_ms=max(0, now_us - waiting[0].time_us) // 1_000 if waiting else 0,
        error="" if failed is None else f"{type(failed).__name__}: {failed}",
    )


def all_partitions(dispatcher: Dispatcher, clock: Clock) -> list[PartitionStatistics]:
    """Return the statistics of every open partition, by table and shard."""
    published, now_us = dispatcher.published, max(clock.time_us(), dispatcher.ledger.tree.time_us)
    state = dispatcher.admission.state
    found = [partition_statistics(one, state(one).value, published, now_us) for one in dispatcher.opened()]
    return sorted(found, key=lambda one: (one.table, one.shard))


def store_statistics(
    coordinator: Coordinator, dispatcher: Dispatcher, consensus: Consensus, clock: Clock
) -> StoreStatistics:
    """Return the statistics of a store."""
    partitions = tuple(all_partitions(dispatcher, clock))
    published, writing = dispatcher.published, coordinator.statistics()
    first = int(consensus.first)
    return StoreStatistics(
        state=writing.state.value,
        error=writing.error or "",
        incarnation=consensus.incarnation,
        last_epoch=writing.last,
        durable_epoch=writing.durable,
        applied_epoch=writing.applied,
        first_lsn=first,
        needed_from=max(first, dispatcher.tracker.needed_from(published)),
        durable_lsn=int(consensus.committed),
        applied_lsn=published,
        global_applied_floor=applied_floor(dispatcher, partitions, published),
        writes=writing.writes,
        written_bytes=writing.written_bytes,
        pending_bytes=writing.pending_bytes,
        in_flight_bytes=writing.in_flight_bytes,
        waiting_writes=writing.waiting_writes,
        refused_writes=writing.refused_writes,
        flushes=sum(writing.flushes.values()),
        flush_failures=writing.flush_failures,
        apply_failures=writing.apply_failures,
        partitions=partitions,
    )


def applied_floor(dispatcher: Dispatcher, partitions: Iterable[PartitionStatistics], published: int) -> int:
    """Return the LSN, at most `published`, up to which every partition, open or not, has applied all records."""
    return min([published, dispatcher.unopened_floor(), *(one.applied_global for one in partitions)])
