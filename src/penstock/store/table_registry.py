"""The tables' descriptors in the manifest: they follow the ledger, which decides.

    ledger                        db row                       on disk
    a table                       Active
    a table that drains           Draining                     everything is stored, no new rows
    a tombstone                   Tombstoned(time of record)   files go as soon as nobody reads them
    nothing, or a tombstone       none, after the grace period nothing

`follow` compares the tables of the ledger with the rows, and commits the difference: rows, names and the generation
of the component ORCHESTRATOR in one transaction. It runs after every record that changed a table, and at the end of
every recovery. So a crash between the two is finished by the next opening, with the same rows: all that is in them
comes from the ledger, times included, and members of a cluster agree.

Thread: any; `_lock` lets one thread follow at a time.
Invariants: (1) a row is never ahead of the ledger. (2) a row goes last: whatever is left of a dropped table is found
by its row. (3) `config_hash` covers what can never change of a table; a row whose hash is not that of the ledger's
table is of another store.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

import msgspec

from penstock.errors import CorruptionError, GateShut, NotFound, PenstockError, WaitExpired
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.lsm.maintenance import SNAPSHOT_ROW
from penstock.manifest.engine import ReadView
from penstock.manifest.keys import ComponentId, MetricKey, PendingJobKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.operations import (
    BumpGeneration,
    DeleteDb,
    DeleteMetrics,
    DeleteWalState,
    ManifestOp,
    PutDb,
    RemoveJob,
)
from penstock.manifest.records import (
    REPAIR_OF,
    Active,
    DbDescriptorRecord,
    DbLifecycle,
    Draining,
    FlushGateState,
    JobKind,
    Tombstoned,
)
from penstock.manifest.recovery import RecoveredState
from penstock.manifest.tables import DB, METRICS, PENDING, chunks, partitions
from penstock.partition.ledger import Ledger
from penstock.partition.ledger_records import LEDGER_TABLE, TableInfo, TableStatus
from penstock.partition.storage_options import for_manifest
from penstock.store.table_description import JobGate, ShardProgress, TableDescription

logger = logging.getLogger(__name__)

_STATUS: dict[TableStatus, DbLifecycle] = {TableStatus.ACTIVE: Active(), TableStatus.DRAINING: Draining()}
_NAMES: dict[type, str] = {Active: "active", Draining: "draining", Tombstoned: "tombstoned"}


class DbRegistry:
    """The descriptors of a store's tables."""

    def __init__(self, manifest: Manifest, ledger: Ledger, *, clock: Clock) -> None:
        self._manifest = manifest
        self._ledger = ledger
        self._clock = clock
        self._lock = threads.lock("store.table_registry")
        self._followed: Mapping[int, TableInfo] | None = None  # guarded by _lock: tables whose rows are committed
        self._tombstoned: dict[int, DbDescriptorRecord] = {}  # guarded by _lock: rows of dropped tables

    @property
    def is_behind(self) -> bool:
        """Whether rows are missing, because a commit failed or its outcome is unknown: `follow` repeats it."""
        return self._followed is None

    # -- following the ledger

    def restore(self, recovered: RecoveredState) -> None:
        """Take over the rows of an earlier process, and let them follow. Requires: the journal was replayed.

        `CorruptionError` if a row is not of this store's tables. Rows that follow all of the ledger already are not
        read: opening a store takes as long with a thousand tables as with ten.
        """
        ledger = self._ledger
        with self._lock:
            if recovered.generations.get(ComponentId.TABLES, 0) == ledger.tables_lsn + 1:
                self._followed = ledger.tables_by_id
                pairs = [(db_id, recovered.descriptor(db_id)) for db_id in ledger.tombstones]
                self._tombstoned = {db_id: row for db_id, row in pairs if row is not None}
                return
        for db_id, row in recovered.descriptors().items():
            self._check(db_id, row)
        self.follow()

    def check(self, info: TableInfo) -> None:
        """`CorruptionError` if the manifest describes another table under the id of this one."""
        row = self._manifest.get_db(info.table_id)
        if row is not None:
            self._check(info.table_id, row)

    def _check(self, db_id: int, row: DbDescriptorRecord) -> None:
        info = self._ledger.table_by_id(db_id)
        if (info is not None and row.config_hash != config_hash(info)) or db_id > self._ledger.last_table_id():
            raise CorruptionError(
                self._manifest.path,
                0,
                f"it describes table {db_id} ({row.name}), which is another one in the ledger: the manifest is of "
                "another store, or of a backup; restore the whole store",
            )

    def follow(self) -> None:
        """Commit what the ledger changed, if anything. If that fails, the rows stay behind until the next call."""
        if self._ledger.tables_by_id is self._followed:
            return
        with self._lock:
            before, self._followed = self._followed, None  # if this fails, all rows are compared next time
            try:
                self._followed = self._follow(before)
            except PenstockError as error:
                logger.warning("the descriptors of tables are written later (%s)", error)

    def _follow(self, before: Mapping[int, TableInfo] | None) -> Mapping[int, TableInfo]:
        """Commit the rows that differ, and how far they follow. `before`: the tables that rows are known of."""
        lsn, tables = self._ledger.tables_lsn, self._ledger.tables_by_id
        rows = self._manifest.read(_all_rows) if before is None else self._rows_of(before, tables)
        generation = 1 + self._manifest.generation(ComponentId.ORCHESTRATOR)
        changed = dict(self._differences(rows, tables, before or {}, generation))
        operations: list[ManifestOp] = [PutDb(db_id, row) for db_id, row in sorted(changed.items(), key=_dead_first)]
        if operations:
            operations.append(BumpGeneration(ComponentId.ORCHESTRATOR))
        ahead = lsn + 1 - self._manifest.generation(ComponentId.TABLES)
        if ahead > 0:
            operations.append(BumpGeneration(ComponentId.TABLES, ahead))
        if operations:
            self._manifest.apply(operations)
        for db_id, row in {**rows, **changed}.items():
            if isinstance(row.status, Tombstoned):
                self._tombstoned[db_id] = row
        return tables

    def _rows_of(
        self, before: Mapping[int, TableInfo], tables: Mapping[int, TableInfo]
    ) -> dict[int, DbDescriptorRecord]:
        """Return the rows of the tables that changed."""
        changed = [db_id for db_id, info in before.items() if tables.get(db_id) is not info]
        pairs = [(db_id, self._manifest.get_db(db_id)) for db_id in changed]
        return {db_id: row for db_id, row in pairs if row is not None}

    def _differences(
        self,
        rows: Mapping[int, DbDescriptorRecord],
        tables: Mapping[int, TableInfo],
        before: Mapping[int, TableInfo],
        generation: int,
    ) -> Iterable[tuple[int, DbDescriptorRecord]]:
        for db_id, info in tables.items():
            if before.get(db_id) is info:
                continue
            row, new_row, old_info = rows.get(db_id), _descriptor(info, generation), before.get(db_id)
            # Not all options are in the row: a change of another one raises the generation, too.
            altered = old_info is not None and old_info.storage != info.storage
            if row is None or altered or msgspec.structs.replace(new_row, generation=row.generation) != row:
                yield db_id, new_row
        for db_id, row in rows.items():
            if db_id not in tables and not isinstance(row.status, Tombstoned):
                tombstone = self._ledger.tombstones.get(db_id)
                # The ledger forgets a tombstone after a month; an opening in between would have followed it.
                dropped_us = self._ledger.tree.time_us if tombstone is None else tombstone.dropped_us
                status = Tombstoned(max(0, dropped_us // 1_000))
                yield db_id, msgspec.structs.replace(row, status=status, generation=generation)

    # -- dropped tables

    def tombstoned(self) -> dict[int, DbDescriptorRecord]:
        """Return the rows of dropped tables."""
        with self._lock:
            return dict(self._tombstoned)

    def find_tombstoned(self) -> None:
        """Read all rows for dropped tables: the ledger may have forgotten one."""
        rows = self._manifest.read(_all_rows)
        with self._lock:
            self._tombstoned.update((i, row) for i, row in rows.items() if isinstance(row.status, Tombstoned))

    def sweep_metrics(self) -> None:
        """Delete metrics of tables whose rows are gone: the replay of a drop opens a table again, which is measured."""
        scopes = self._manifest.read(_measured_tables)  # first: the ledger then has every table created before this
        stale = [i for i in scopes if i not in self._ledger.tables_by_id and self._manifest.get_db(i) is None]
        if stale:
            self._manifest.apply([DeleteMetrics(db_id) for db_id in stale])

    def lapsed(self, grace_s: float) -> list[int]:
        """Return the dropped tables whose grace period is over."""
        now_ms = self._clock.time_us() // 1_000
        return [
            db_id
            for db_id, row in self.tombstoned().items()
            if isinstance(row.status, Tombstoned) and row.status.tombstoned_at_epoch_ms + grace_s * 1_000 <= now_ms
        ]

    def bury(self, db_id: int) -> bool:
        """Remove what is left of a dropped table in the manifest: False while chunks are listed or a job runs."""
        operations = self._manifest.read(lambda view: _last_rows(view, db_id))
        if operations is None:
            return False
        last = DeleteMetrics(db_id), DeleteDb(db_id), BumpGeneration(ComponentId.ORCHESTRATOR)
        try:
            self._manifest.apply([*operations, *last])
        except GateShut:
            return False
        with self._lock:
            self._tombstoned.pop(db_id, None)
        return True

    # -- describing

    def describe(self, info: TableInfo) -> TableDescription:
        """Return the description of a table; `NotFound` if it was dropped."""
        row = self._manifest.get_db(info.table_id)
        if row is None or isinstance(row.status, Tombstoned):
            raise NotFound(f"table {info.name} was dropped: get it from the store again, or use another")
        progress, gates = self._manifest.read(lambda view: _progress(view, info.table_id))
        measured_ms = self._manifest.read(lambda view: _measured_ms(view, info.table_id))
        newest = self._ledger.table_by_id(info.table_id) or info  # read after the row, which follows it
        return TableDescription(
            name=row.name,
            table_id=info.table_id,
            kind=row.kind,
            shards=row.wal_shards,
            status=_NAMES[type(row.status)],
            created=_time(row.created_at_epoch_ms),
            config_hash=row.config_hash.hex(),
            generation=row.generation,
            storage=newest.storage_options,
            measured=_time(measured_ms),
            progress=progress,
            gates=gates,
        )

    def wait_for_change(self, find: Callable[[], TableInfo], after: int, timeout_s: float) -> TableDescription:
        """Wait until the description of a table is of a later generation than `after`, without polling.

        `find` returns the table, or raises `NotFound`. `WaitExpired` after `timeout_s` seconds.
        """
        deadline_s = self._clock.monotonic_s() + timeout_s
        while True:
            # First: what changes from here on wakes this thread.
            generation = self._manifest.generation(ComponentId.ORCHESTRATOR)
            description = self.describe(find())
            if description.generation > after:
                return description
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0:
                raise WaitExpired(f"table {description.name} has not changed within {timeout_s:g} s: wait again")
            try:
                self._manifest.wait_for_generation(ComponentId.ORCHESTRATOR, generation + 1, left_s)
            except WaitExpired:
                continue


def config_hash(info: TableInfo) -> bytes:
    """Return the hash of what never changes of a table."""
    storage = info.storage_options
    fixed = (info.name, info.kind, info.shards, info.created_lsn, storage.wal_dir, storage.chunk_dir)
    return hashlib.sha256(msgspec.msgpack.encode(fixed)).digest()


def _descriptor(info: TableInfo, generation: int) -> DbDescriptorRecord:
    return DbDescriptorRecord(
        created_at_epoch_ms=max(0, info.created_us // 1_000),
        name=info.name,
        config_hash=config_hash(info),
        wal_shards=info.shards,
        options=for_manifest(info.storage_options, info.options),
        status=_STATUS[info.status],
        kind=info.kind,
        generation=generation,
    )


def _dead_first(item: tuple[int, DbDescriptorRecord]) -> tuple[bool, int]:
    """Order rows for one transaction: a new table may have the name of one that was dropped."""
    return not isinstance(item[1].status, Tombstoned), item[0]


def _all_rows(view: ReadView) -> dict[int, DbDescriptorRecord]:
    return dict(DB.scan(view))


def _measured_tables(view: ReadView) -> set[int]:
    return {key.scope for key, _ in METRICS.scan(view, MetricKey(LEDGER_TABLE + 1, 0))}


def _last_rows(view: ReadView, db_id: int) -> list[ManifestOp] | None:
    """Return the removal of jobs that wait and of partitions; None if chunks of the table are listed."""
    if any(True for _ in chunks(view, db_id)):
        return None
    waiting = PENDING.scan(view, PendingJobKey(db_id, 0), PendingJobKey(db_id + 1, 0))
    jobs: list[ManifestOp] = [RemoveJob(row.job_id) for key, row in waiting if key.kind < REPAIR_OF]
    return [*jobs, *(DeleteWalState(key) for key, _ in partitions(view, db_id))]


def _progress(view: ReadView, db_id: int) -> tuple[tuple[ShardProgress, ...], tuple[JobGate, ...]]:
    rows = list(partitions(view, db_id))
    progress = tuple(
        ShardProgress(
            shard=key.shard,
            stored_lsn=row.stored_lsn,
            applied_lsn=row.last_applied_lsn,
            durable_lsn=row.durable_lsn,
            highest_lsn=row.highest_lsn,
            last_sealed_segment=row.last_sealed_segment,
            last_checkpoint_generation=row.last_checkpoint_generation,
            restart_epoch=row.restart_epoch,
        )
        for key, row in rows
        if key.shard < SNAPSHOT_ROW  # the others are of trees and snapshots beside a shard
    )
    gates = tuple(
        JobGate(
            kind=JobKind(kind).name.lower() if kind in JobKind.__members__.values() else str(kind),
            active_job=gate.active_job_id,
            last_success=_time(gate.last_success_at_epoch_ms),
            errored_since=_time(gate.errored_since_epoch_ms),
        )
        for key, row in rows
        if key.shard == 0
        for kind, gate in row.gates()
        if gate != FlushGateState()
    )
    return progress, gates


def _measured_ms(view: ReadView, db_id: int) -> int:
    metrics = METRICS.scan(view, MetricKey(db_id, 0), MetricKey(db_id + 1, 0))
    return max((record.updated_at_epoch_ms for _, record in metrics), default=0)


def _time(epoch_ms: int | None) -> datetime | None:
    return datetime.fromtimestamp(epoch_ms / 1_000, UTC) if epoch_ms else None
