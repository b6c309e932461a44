"""The statistics of a store at one moment: its epochs, its LSNs, and the watermarks of each partition.

Thread: any. Nothing here waits for a partition: a partition whose disk hangs is reported as well.
Invariants: (1) `first_lsn <= needed_from`, and `global_applied_floor <= durable_lsn`. (2) per partition,
`stored <= applied <= durable <= highest`. (3) `global_applied_floor` is at most every `applied_global`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from penstock.host.clock import Clock
from penstock.journal.consensus import Consensus
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.partition import Partition
from penstock.store.flusher import Coordinator
from penstock.store.following import MemberJournal
from penstock.store.reports import PartitionStatistics, StoreStatistics

_State = Literal["active", "throttled", "frozen", "paused"]
PARTITION_STATES: tuple[_State, ...] = ("active", "throttled", "frozen", "paused")


def partition_statistics(
    partition: Partition, state: _State, published: int, now_us: int, master: str = ""
) -> PartitionStatistics:
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
        enqueued_ops=len(waiting) + partition.deferred_operations + len(partition.admitted),
        enqueued_bytes=sum(entry.size for entry in waiting) + partition.deferred_bytes + partition.admitted_bytes,
        backlog_age_ms=max(0, now_us - waiting[0].time_us) // 1_000 if waiting else 0,
        error="" if failed is None else f"{type(failed).__name__}: {failed}",
        master=master,
    )


def all_partitions(
    dispatcher: Dispatcher, clock: Clock, master_of: Callable[[int], str] = lambda _: ""
) -> list[PartitionStatistics]:
    """Return the statistics of every open partition, by table and shard."""
    published, now_us = dispatcher.published, max(clock.time_us(), dispatcher.ledger.tree.time_us)
    state = dispatcher.admission.state
    for partition in dispatcher.opened():
        dispatcher.admission.release(partition)
    partitions = [
        partition_statistics(one, state(one).value, published, now_us, master_of(one.descriptor.partition))
        for one in dispatcher.opened()
    ]
    return sorted(partitions, key=lambda one: (one.table, one.shard))


def store_statistics(
    coordinator: Coordinator,
    dispatcher: Dispatcher,
    consensus: Consensus,
    clock: Clock,
    tenure: MemberJournal | None = None,
) -> StoreStatistics:
    """Return the statistics of a store; `tenure` is its journal if it is a member of a cluster."""
    if tenure is None:
        partitions = tuple(all_partitions(dispatcher, clock))
    else:
        partitions = tuple(all_partitions(dispatcher, clock, tenure.master_of))
        dispatcher.tracker.hear(tenure.acks())
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
        required_from=max(first, dispatcher.tracker.required_from(published)),
        member="" if tenure is None else tenure.member,
        acknowledged=dispatcher.tracker.acknowledged(),
    )


def applied_floor(dispatcher: Dispatcher, partitions: Iterable[PartitionStatistics], published: int) -> int:
    """Return the LSN, at most `published`, up to which every partition, open or not, has applied all records."""
    return min([published, dispatcher.unopened_floor(), *(one.applied_global for one in partitions)])
