"""The metrics of a store's own parts, with the names of seed 002: partitions, admission, journal, stages of a write.

Thread: any. Everything is read at each export, and nothing waits for a partition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from penstock.errors import PenstockError
from penstock.host.metrics import Keep, MetricFamily, Metrics, MetricSamples, counter, gauge, histogram
from penstock.host.steady_clock import SteadyClock
from penstock.journal.consensus import Consensus
from penstock.journal.partitions import shard_number, table_of
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.metrics import export_trees
from penstock.manifest.manifest import Manifest
from penstock.manifest.recovery import RecoveredState
from penstock.partition.checkpoint import Checkpoint
from penstock.partition.dispatcher import Dispatcher
from penstock.partition.ledger_records import LEDGER_TABLE, TableInfo
from penstock.queue.calls import StreamTotals
from penstock.scheduler.task import Outcome
from penstock.store.flusher import Coordinator, StoreFlusher
from penstock.store.following import MemberJournal
from penstock.store.kept_metrics import KeptMetrics
from penstock.store.reports import PartitionStatistics
from penstock.store.statistics import PARTITION_STATES, all_partitions, applied_floor
from penstock.store.stream_counts import totals_by_consumer

logger = logging.getLogger(__name__)

LEDGER_NAME = "_ledger"  # in labels; no table can have this name
_PARTITION: dict[str, tuple[str, Callable[[PartitionStatistics], int]]] = {
    "enqueued_ops": (
        "Entries that are durable and not applied, and writes admitted to a shard that is behind",
        lambda one: one.enqueued_ops,
    ),
    "enqueued_bytes": ("Bytes of these entries and writes", lambda one: one.enqueued_bytes),
    "backlog_age_ms": ("Age of the oldest entry that is not applied", lambda one: one.backlog_age_ms),
    "durable_index": ("The LSN of the newest durable entry", lambda one: one.durable),
    "applied_index": ("The LSN of the newest applied entry", lambda one: one.applied),
    "snapshot_index": ("The LSN up to which all entries are in files", lambda one: one.stored),
    "applied_global": ("The LSN up to which all records are applied to the partition", lambda one: one.applied_global),
}


class StoreMeter:
    """Exports the parts of a store, and keeps what they count in the manifest."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        maintenance: Maintenance,
        coordinator: Coordinator,
        dispatcher: Dispatcher,
        flusher: StoreFlusher,
        consensus: Consensus,
        checkpoint: Checkpoint,
        manifest: Manifest,
        recovered: RecoveredState,
        clock: SteadyClock,
        tenure: MemberJournal | None = None,
    ) -> None:
        """`tenure` is the journal of a member of a cluster."""
        self._metrics = metrics
        self._tenure = tenure
        self._coordinator = coordinator
        self._dispatcher = dispatcher
        self._flusher = flusher
        self._consensus = consensus
        self._checkpoint = checkpoint
        self._clock = clock
        export_trees(maintenance, metrics, self._table_name)
        streams = partial(flusher.streams.families, dispatcher.ledger)
        for source in (self._partitions, self._admission, self._journal, self._members, self._time, streams):
            metrics.collect_from(source)
        self._totals = KeptMetrics(manifest, self._table_id, recovered.metrics_of)
        metrics.with_earlier = self._totals.with_earlier

    def stream_totals(self, info: TableInfo) -> Mapping[str, StreamTotals]:
        """Return what the streams of each consumer of a queue did, earlier openings included."""
        families = self._flusher.streams.families(self._dispatcher.ledger, info)
        return totals_by_consumer(self._totals.with_earlier(families), info.name)

    def save(self) -> Outcome:
        """Keep what was counted since the last time, if anything."""
        self._totals.save(self._metrics.families())
        return None

    def save_at_close(self) -> None:
        """Keep what was counted. A failure loses only what is new since the last time."""
        try:
            self.save()
        except (OSError, PenstockError) as error:
            logger.warning("the newest counts of metrics were not kept (%s)", error)

    def _table_name(self, table_id: int) -> str | None:
        info = self._dispatcher.ledger.table_by_id(table_id)
        return LEDGER_NAME if table_id == LEDGER_TABLE else None if info is None else info.name

    def _shard(self, partition: int) -> tuple[str, str] | None:
        """Return the table and the shard of a partition as labels; None if the table was dropped."""
        name = self._table_name(table_of(partition))
        return None if name is None else (name, str(shard_number(partition)))

    def _table_id(self, name: str) -> int | None:
        info = self._dispatcher.ledger.table(name)
        return None if info is None else info.table_id

    def _partitions(self) -> Iterable[MetricFamily]:
        partitions, labels = all_partitions(self._dispatcher, self._clock), ("table", "shard")
        for name, (text, read) in _PARTITION.items():
            samples: MetricSamples = {(one.table, str(one.shard)): read(one) for one in partitions}
            yield gauge(f"partition_{name}", text, samples, labels)
        states: MetricSamples = {
            (one.table, str(one.shard), state): int(one.state == state)
            for one in partitions
            for state in PARTITION_STATES
        }
        yield gauge("partition_state", "1 for the state that the partition is in", states, (*labels, "state"))
        failures: MetricSamples = {
            (one.descriptor.name, str(one.descriptor.shard)): one.failures_total for one in self._dispatcher.opened()
        }
        yield counter("partition_apply_failures", "Applies that failed, each of which is retried", failures, labels)
        floor = applied_floor(self._dispatcher, partitions, self._dispatcher.published)
        yield gauge("global_applied_floor", "The LSN up to which every partition has applied all records", floor)

    def _admission(self) -> Iterable[MetricFamily]:
        writing = self._coordinator.statistics()
        refused = {**self._dispatcher.refusals, "memory": writing.refused_writes}
        rejects: MetricSamples = {(limit,): number for limit, number in refused.items()}
        yield counter("admission_rejects", "Writes refused, by the limit that they met", rejects, ("limit",))
        groups: MetricSamples = {(one.name.lower(),): count for one, count in self._flusher.refused_groups.items()}
        yield counter("groups_refused", "Groups that the ledger did not accept, by its verdict", groups, ("verdict",))
        admission = self._dispatcher.admission
        rejected, retried = admission.rejects.copy(), admission.retries.copy()  # in one step: others count meanwhile
        waited = writing.waited_writes + retried.total()
        yield counter("admission_retries", "Writes that found no room and were tried again", waited)
        labels = ("table", "shard")
        refusals: MetricSamples = {
            (*shard, limit): count
            for (partition, limit), count in rejected.items()
            if (shard := self._shard(partition)) is not None
        }
        text = "Writes to a partition that were refused, by the limit that they met"
        yield counter("partition_admission_rejects", text, refusals, (*labels, "limit"))
        retries: MetricSamples = {
            shard: count for partition, count in retried.items() if (shard := self._shard(partition)) is not None
        }
        yield counter("partition_admission_retries", "Writes that had to wait for a partition", retries, labels)

    def _journal(self) -> Iterable[MetricFamily]:
        took = self._flusher.journal_seconds.read()
        yield histogram("fsync_latency_seconds", "Time to write and sync a batch of journal records", took)
        yield counter("fsync_failures", "Writes or syncs of the journal that failed", self._flusher.journal_failures)
        yield counter("fsync_retries", "Batches that were written to the journal again", self._flusher.journal_retries)
        stages: MetricSamples = {
            ("encode",): self._flusher.encode_seconds.read(),
            ("journal",): took,
            ("dispatch",): self._flusher.dispatch_seconds.read(),
        }
        yield histogram("write_stage_seconds", "Time of each stage of a batch of writes", stages, ("stage",))
        yield gauge("journal_first_index", "The oldest LSN of the journal", int(self._consensus.first))
        yield gauge("journal_committed_index", "The newest durable LSN", int(self._consensus.committed))
        yield gauge("journal_segments", "Files of the journal", len(self._consensus.segment_starts()))
        yield gauge("consensus_is_leader", "1 if this member accepts writes", int(self._consensus.is_leader))
        checkpoint = self._checkpoint
        yield counter("checkpoints", "Checkpoints that ended", checkpoint.runs, keep=Keep.WITH_OTHERS)  # idle, too
        yield counter("checkpoint_spilled_partitions", "Partitions that checkpoints spilled", checkpoint.spilled)
        yield counter("checkpoint_dropped_segments", "Segments that checkpoints dropped", checkpoint.segments_dropped)

    def _members(self) -> Iterable[MetricFamily]:
        """What keeps records in the journal: partitions that have not stored them, members that lack them."""
        tracker, published, first = self._dispatcher.tracker, self._dispatcher.published, int(self._consensus.first)
        if self._tenure is not None:
            tracker.hear(self._tenure.acks())
        needed, required = tracker.needed_from(published), tracker.required_from(published)
        yield gauge("journal_needed_index", "The oldest LSN that a partition here needs", max(first, needed))
        text = "The oldest LSN that a partition here, or a member that is waited for, needs"
        yield gauge("journal_required_index", text, max(first, required))
        text = "The term of the cluster in which the store was opened; of a store alone, its incarnation"
        yield gauge("consensus_term", text, self._consensus.incarnation)
        acknowledged: MetricSamples = {(member,): lsn for member, lsn in tracker.acknowledged().items()}
        text = "The LSN up to which another member has all records on disk, as far as is known here"
        yield gauge("member_acknowledged_index", text, acknowledged, ("member",))
        masters: MetricSamples = {}
        for each in self._dispatcher.opened():
            master = "" if self._tenure is None else self._tenure.master_of(each.descriptor.partition)
            if master:
                masters[each.descriptor.name, str(each.descriptor.shard), master] = 1
        text = "1 for the member that is preferred for reads of the partition"
        yield gauge("partition_master", text, masters, ("table", "shard", "member"))

    def _time(self) -> Iterable[MetricFamily]:
        text = "Seconds by which the machine's wall clock is ahead of the store's time"
        yield gauge("clock_ahead_seconds", text, self._clock.wall_ahead_s())
