"""The checkpoint: deletes journal segments that are no longer needed.

The sections of a partition that stores them in time are never copied. When the journal has grown too long, a partition
that holds it back has to store its sections, if its files hold them already and only need a sync, or if they are many.
Few sections are spilled: copied to the partition's own log, which costs less than a small file.
A partition with a snapshot spills what it stored, too: its log has all entries since (see `snapshots`).
Order: spills synced, watermarks committed, `released` committed, segments deleted, verdicts deleted.

Thread: any, one at a time; `_lock` ensures it. The scheduler's task runs after every flush.
Invariant: a segment is dropped only when all its sections are stored or spilled, durably.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from penstock.arguments import COUNT_MAX, set_wholes
from penstock.errors import (
    Closed,
    CorruptionError,
    FixTheCall,
    GateShut,
    NotFound,
    PartitionPaused,
    PenstockError,
    WaitExpired,
)
from penstock.host import threads
from penstock.host.file_errors import ran_out_of_space
from penstock.journal.consensus import Consensus
from penstock.journal.partitions import PartitionId
from penstock.journal.record import REFERENCE, decode
from penstock.journal.tracker import MemberAcks
from penstock.manifest.keys import ComponentId, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import WalStateRecord
from penstock.partition.aside import is_our_mistake
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.extent import JournalExtent, sealed_segment
from penstock.partition.ledger_records import LEDGER, Verdict
from penstock.partition.machine import Entry
from penstock.partition.partition import Partition
from penstock.partition.snapshots import PartitionSnapshots

logger = logging.getLogger(__name__)

STORE_WAIT_S = 60.0  # for one partition's files
SPILL_BYTES_MAX = 16 << 20  # memory of a partition's sections: more is stored, less is spilled


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How long the journal may be before partitions that are behind are spilled.

    >>> penstock.StoreSettings(checkpoint=penstock.CheckpointSettings(segments_max=8)).checkpoint.segments_max
    8
    """

    segments_max: int = 4

    def __post_init__(self) -> None:
        set_wholes(self, ["segments_max"], 1, COUNT_MAX)


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What a checkpoint did.

    >>> store.checkpoint().segments_dropped
    0
    """

    spilled: int  # partitions
    segments_dropped: int
    needed_from: int


class Checkpoint:
    """Truncates the journal."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        consensus: Consensus,
        manifest: Manifest,
        extent: JournalExtent,
        *,
        forget_verdicts: Callable[[int], None],
        store_ledger: Callable[[], None],
        snapshots: PartitionSnapshots,
        settings: CheckpointSettings | None = None,
        member_acks: Callable[[], MemberAcks] | None = None,
    ) -> None:
        """`member_acks`: what the other members of a cluster have."""
        self._dispatcher = dispatcher
        self._member_acks = member_acks
        self._consensus = consensus
        self._manifest = manifest
        self._extent = extent
        self._forget_verdicts = forget_verdicts
        self._store_ledger = store_ledger
        self._snapshots = snapshots
        self._settings = settings or CheckpointSettings()
        self._lock = threads.lock("partition.checkpoint")
        self.runs = self.spilled = self.segments_dropped = 0  # since the opening; changed under _lock

    def run(self, *, everything: bool = False) -> CheckpointReport:
        """Delete unneeded segments; `everything`: first spill partitions that need any but the newest segment."""
        with self._lock:
            self._acknowledge()
            starts = self._consensus.segment_starts()
            keep = 1 if everything else self._settings.segments_max
            spilled = self._spill_below(starts[-keep]) if len(starts) > keep else 0
            with self._dispatcher.turn:  # the tracker does not know durable records that are not dispatched
                self._dispatcher.finish()
                needed = self._dispatcher.tracker.needed_from(self._dispatcher.ledger.tree.lsn)
                required = self._dispatcher.tracker.required_from(self._dispatcher.ledger.tree.lsn)
            if len(starts) > 1 and starts[1] <= needed:
                self._extent.release(
                    needed, sealed_segment(starts)
                )  # before the deletion: a journal that begins later has lost records
            first = self._consensus.truncate(required)
            dropped = len(starts) - len(self._consensus.segment_starts())
            self.runs, self.spilled = self.runs + 1, self.spilled + spilled
            self.segments_dropped += dropped
            if spilled or dropped:
                logger.info(
                    "Checkpoint completed: spilled=%d segments_dropped=%d needed_from=%d", spilled, dropped, needed
                )
            if dropped:
                self._forget_verdicts(first)
            return CheckpointReport(spilled, dropped, needed)

    def clear(self) -> CheckpointReport:
        """Store everything and delete the whole journal, with its active segment: nothing is left to replay.

        Raises if a partition cannot store; then nothing is deleted.
        """
        for partition in self._dispatcher.partitions():
            if self._can_store(partition):  # another is spilled
                with suppress(NotFound, Closed):  # dropped meanwhile
                    self._bounded(partition, partition.machine.store_now)
        self._store_ledger()
        self._consensus.roll()
        return self.run(everything=True)

    def store(self, number: PartitionId) -> None:
        """Put everything that a partition has applied into its files, if they answer."""
        partition = self._dispatcher.partition(number)
        self._dispatcher.catch_up(partition)
        if self._can_store(partition):
            self._bounded(partition, partition.machine.store_now)

    def is_due(self) -> bool:
        """Whether a run would drop a segment, or make partitions independent of one; False while one runs."""
        starts = self._consensus.segment_starts()
        if len(starts) < 2 or not self._lock.acquire(blocking=False):
            return False
        try:
            self._acknowledge()
            required = self._dispatcher.tracker.required_from(self._dispatcher.ledger.tree.lsn)
        finally:
            self._lock.release()
        return len(starts) > self._settings.segments_max or starts[1] <= required

    @contextmanager
    def held_off(self, timeout_s: float) -> Iterator[None]:
        """Spill and delete nothing during a block; `WaitExpired` if a checkpoint that runs does not end in time."""
        if not self._lock.acquire(timeout=timeout_s):
            raise WaitExpired(f"a checkpoint has not ended within {timeout_s:g} s: retry later")
        try:
            yield
        finally:
            self._lock.release()

    def needed_from(self) -> int:
        """Return the first LSN to read at the next open: all below it is stored."""
        return max(self._consensus.first, self._extent.released + 1)

    def _acknowledge(self) -> None:
        """Report to the tracker what partitions have stored, and what other members have."""
        tracker = self._dispatcher.tracker
        if self._member_acks is not None:
            tracker.hear(self._member_acks())
        tracker.acknowledge(LEDGER, self._dispatcher.ledger.tree.stored)
        for partition in self._dispatcher.partitions():
            if not partition.is_storing:
                partition.spill.drop_stored(partition.machine.stored)
            tracker.acknowledge(partition.descriptor.partition, partition.spill.covers(partition.machine.stored))

    def _spill_below(self, lsn: int) -> int:
        """Make every partition independent of the judged records below `lsn`; return how many were spilled."""
        lsn = min(lsn, self._dispatcher.ledger.tree.lsn + 1)
        behind = self._dispatcher.tracker.waiting_below(lsn)
        spilled = 0
        for number in behind:
            if number == LEDGER:
                self._store_ledger()  # stored, not spilled: it must not be behind its own verdicts
                self._dispatcher.tracker.acknowledge(LEDGER, self._dispatcher.ledger.tree.stored)
                continue
            try:
                partition = self._dispatcher.partition(number)
                if self._is_to_store(partition) and self._store(partition) and partition.spill.floor is None:
                    self._dispatcher.tracker.acknowledge(number, partition.machine.stored)
                    continue
                entries = self._sections_of(number, lsn)
                if self._needs_snapshot(partition, entries):
                    if self._renew_snapshot(partition):
                        self._dispatcher.tracker.acknowledge(number, partition.spill.covers(partition.machine.stored))
                        entries = self._sections_of(number, lsn)
                    elif _refers(entries):
                        continue  # the log must not refer to deleted files: the journal keeps these records
                self._bounded(partition, partial(partition.spill.append, entries))
            except (NotFound, Closed):
                continue  # dropped meanwhile
            except (WaitExpired, PartitionPaused, GateShut) as error:
                logger.error("%s: the journal keeps its records", error)
                continue
            except Exception as error:
                unreadable = isinstance(error, FixTheCall) or is_our_mistake(error, ())
                if not unreadable and not ran_out_of_space(error):
                    raise
                logger.warning("shard %d cannot be spilled (%s): the journal keeps its records", number, error)
                continue
            self._commit(partition)
            with self._dispatcher.turn:
                self._dispatcher.finish()
                is_dropped = self._dispatcher.find_open(number) is not partition
            if is_dropped:  # the row would stay forever
                self._uncommit(partition)
                continue
            self._dispatcher.tracker.acknowledge(number, partition.spill.upto)
            spilled += 1
        return spilled

    def _needs_snapshot(self, partition: Partition, entries: list[Entry]) -> bool:
        """Whether a partition with a snapshot needs a new one: its log is long, or would refer to deleted files."""
        spill = partition.spill
        if spill.floor is None or not self._can_store(partition):
            return False
        long = spill.size_bytes() > self._snapshots.log_bytes_max(partition.descriptor, spill.floor)
        return long or _refers(entries)

    def _renew_snapshot(self, partition: Partition) -> bool:
        """Take a new snapshot; False if a file is damaged: the old one stays, from which it can be repaired."""
        try:
            self._bounded(partition, partial(self._snapshots.save, partition))
        except CorruptionError as error:
            name, shard = partition.descriptor.name, partition.descriptor.shard
            logger.error("shard %d of %s is damaged (%s): its snapshot is not renewed; repair it", shard, name, error)
            return False
        return True

    def _is_to_store(self, partition: Partition) -> bool:
        machine = partition.machine
        return self._can_store(partition) and (machine.stores_cheaply or machine.memory_bytes() > SPILL_BYTES_MAX)

    def _can_store(self, partition: Partition) -> bool:
        """Whether storing a partition's sections is worth trying: its files answer."""
        broken = partition.machine.broken or partition.failures or partition.is_storing
        return not broken and not self._dispatcher.admission.is_frozen(partition)

    def _bounded(self, partition: Partition, act: Callable[[], object]) -> None:
        """Work on a partition's files; raise `WaitExpired` if that takes too long, and let it go on."""
        name, shard = partition.descriptor.name, partition.descriptor.shard
        if partition.is_storing:  # an earlier attempt has not ended
            raise WaitExpired(f"the files of shard {shard} of {name} do not answer: retry later")

        def work() -> None:
            try:
                act()
            finally:
                with self._dispatcher.turn:
                    partition.is_storing = False
                    backlogs.release_dropped(partition)
                backlogs.notify()

        partition.is_storing = True
        backlogs = self._dispatcher.backlogs
        backlogs.workers.run(work, STORE_WAIT_S, f"storing shard {shard} of {name}")

    def _store(self, partition: Partition) -> bool:
        """Store a partition's sections; False if that fails: then they are spilled, so that the journal can shrink."""
        try:
            self._bounded(partition, partition.machine.store_now)
        except (NotFound, Closed):
            raise
        except (OSError, PenstockError) as error:
            name, shard = partition.descriptor.name, partition.descriptor.shard
            logger.error("shard %d of %s could not store its sections (%s): it is spilled", shard, name, error)
            return False
        return True

    def _sections_of(self, number: PartitionId, below: int) -> list[Entry]:
        """Return the accepted sections that a partition still needs from records below an LSN."""
        oldest = self._dispatcher.tracker.oldest(number)
        entries: list[Entry] = []
        for lsn, body in self._consensus.records(below if oldest is None else oldest):
            if lsn >= below:
                break
            record = decode(body, lsn=lsn)
            verdicts = self._dispatcher.ledger.verdicts(record, lsn)
            sections = tuple(
                section
                for group, verdict in zip(record.groups, verdicts, strict=True)
                if verdict is Verdict.ACCEPTED
                for section in group.sections
                if section.header.partition == number
            )
            if sections:
                entries.append(Entry(lsn, record.time_us, sections))
        return entries

    def _commit(self, partition: Partition) -> None:
        """Commit the spilled watermark of a partition to the manifest."""
        key, spill = WalStateKey(partition.descriptor.table_id, partition.descriptor.shard), partition.spill
        txn = self._manifest.begin_write()
        progress = WalStateRecord(
            durable_lsn=spill.upto,
            highest_lsn=spill.upto,
            last_sealed_segment=sealed_segment(self._consensus.segment_starts()),
            last_checkpoint_generation=1 + self._manifest.generation(ComponentId.WAL),
            restart_epoch=self._consensus.incarnation,
        )
        txn.put_wal_state(key, progress)
        txn.bump_generation(ComponentId.WAL, 1)
        if spill.floor is not None:
            txn.extend(self._snapshots.log_reaches(partition.descriptor, spill.upto))
        txn.commit()

    def _uncommit(self, partition: Partition) -> None:
        txn = self._manifest.begin_write()
        txn.delete_wal_state(WalStateKey(partition.descriptor.table_id, partition.descriptor.shard))
        txn.commit()


def _refers(entries: list[Entry]) -> bool:
    return any(section.header.form == REFERENCE for entry in entries for section in entry.sections)
