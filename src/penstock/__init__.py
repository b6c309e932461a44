"""Penstock: a durable ingest store for Python and Spark.

The packages, from the top down; each imports only from those below it. A put goes from the API of its table (`kv`)
through the port of the store (`store`) to `coordinator`, `journal`, `partition` and `lsm`; docs/architecture.md draws
the way.

    cli             the command `penstock`
    http            Prometheus' HTTP API, remote write, OTLP and line protocol; the console
    aio             the same store in asyncio
    spark           Spark's source, sink and streams; maintenance on Spark
    server, client  the owner's socket for other processes; the same store from another process
    protocol        the messages between the two, and how a client finds the owner
    store           opens a folder and recovers it; tables, batches, snapshots; the way to the journal
    feeds           change feeds as streams, and their upkeep
    registry        which kinds of table there are
    kv, queue, series, vector  the kinds
    promql          PromQL: parse, and evaluate on columns
    kinds           what a kind must offer, and the port that its tables talk through
    coordinator     epochs, the pending delta, group commit, backpressure
    partition       the ledger and its verdicts, the dispatcher, spills, checkpoints
    replica         Raft: the journal on several machines, by quorum
    journal         one log for the whole store, one fsync
    lsm             memtable, sstable, levels
    archive         the containers that hold the bytes of files; encryption keys; object stores
    scheduler       background tasks, engines, the runner of durable jobs
    manifest        LMDB: which files are live, how far each partition is stored, which jobs are due
    log             append-only files of records
    host            files, time, randomness, threads: the operating system
    arguments       checks of what a caller passes
    arrow_input     rows that a caller passes as Arrow data
    errors          every error, by what the caller does next

`testing` stands beside them: simulated disk, fake clock and contract suites for your own tests. `__main__` is
`python -m penstock`, the command. The docstring of each package lists its modules.

Public are the names in `__all__` here and in `penstock.aio`, `penstock.errors`, `penstock.spark` and
`penstock.testing`. Everything else may change without notice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import errors
    from penstock.archive.master_keys import Keys
    from penstock.arguments import ArrowSource
    from penstock.client.connect import connect
    from penstock.client.store import RemoteSnapshot, RemoteStore
    from penstock.coordinator.protocols import Acknowledgement, Durability, Epoch
    from penstock.kinds.change_reading import ChangeFeed
    from penstock.kinds.changes import ChangeOptions
    from penstock.kinds.table import TableSize
    from penstock.kv.queries import KvStatistics
    from penstock.kv.table import KvReader, KvRow, KvTable
    from penstock.kv.text_keys import TextKvReader, TextKvTable
    from penstock.kv.values import DecimalType, Json, StructType, ValueType
    from penstock.log.settings import LogSettings
    from penstock.lsm.collection import CollectionSettings
    from penstock.lsm.manual_compaction import CompactionReport
    from penstock.lsm.operators import union_items, union_of
    from penstock.manifest.jobs import JobSettings
    from penstock.manifest.records import ArchivePolicy, Codec, CompressionConfig, EncryptionConfig, RetentionPolicy
    from penstock.manifest.settings import ManifestSettings
    from penstock.partition.admission import DispatcherSettings
    from penstock.partition.aside import Trouble
    from penstock.partition.checkpoint import CheckpointReport, CheckpointSettings
    from penstock.partition.reference import StagedFile
    from penstock.partition.storage_options import StorageOptions
    from penstock.queue.calls import (
        ConsumerPosition,
        ConsumerSummary,
        LeasedMessage,
        QueueTotals,
        ShardBounds,
        StreamTotals,
    )
    from penstock.queue.chain import QueueSettings
    from penstock.queue.consumer import Consumer, ConsumerSettings
    from penstock.queue.options import Retention
    from penstock.queue.table import Position, QueueTable
    from penstock.queue.view import Message, QueueView
    from penstock.scheduler.scheduler import SchedulerSettings
    from penstock.series.options import Rollup, SeriesOptions
    from penstock.series.reader import AggregateFunction, Cardinality, SeriesReader, SeriesStatistics
    from penstock.series.section import MetricMetadata
    from penstock.series.table import SeriesTable
    from penstock.server.backups import check_backup, restore, restore_manifest, salvage
    from penstock.server.opening import open  # noqa: A004 - penstock.open reads well
    from penstock.server.reattaching import reattach
    from penstock.server.tcp import serve_tcp
    from penstock.store.archive_settings import (
        ArchiveReport,
        ArchiveSettings,
        EvictReport,
        VerifyReport,
    )
    from penstock.store.backup_folder import CopyProgress
    from penstock.store.batch import StoreBatch
    from penstock.store.loading import LoadReport, PreparedLoad
    from penstock.store.open_telemetry import open_telemetry
    from penstock.store.reattach import ReattachReport
    from penstock.store.reports import (
        BackupReport,
        CheckReport,
        ChunkSummary,
        FileDamage,
        JobSummary,
        PartitionStatistics,
        RotationReport,
        StoreStatistics,
    )
    from penstock.store.restore import RestoreReport
    from penstock.store.salvage import SalvageReport
    from penstock.store.settings import StoreSettings
    from penstock.store.store import Store
    from penstock.store.table_description import JobGate, ShardProgress, TableDescription
    from penstock.store.tables import StoreSnapshot
    from penstock.store.tracing import WriteStage
    from penstock.store.views import StoreSubscription, StoreView
    from penstock.vector.options import Metric
    from penstock.vector.reader import VectorReader, VectorRecord, VectorStatistics
    from penstock.vector.searching import Hit
    from penstock.vector.table import VectorTable

__version__ = "0.1.0"

_MODULES = ("aio", "errors", "spark", "testing")  # public modules, imported on first use

# Each public name and the module it lives in. A test holds that this table, the imports above and `__all__` agree.
_HOMES = {
    "Acknowledgement": "coordinator.protocols",
    "AggregateFunction": "series.reader",
    "ArchivePolicy": "manifest.records",
    "ArchiveReport": "store.archive_settings",
    "ArchiveSettings": "store.archive_settings",
    "ArrowSource": "arguments",
    "BackupReport": "store.reports",
    "Cardinality": "series.reader",
    "ChangeFeed": "kinds.change_reading",
    "ChangeOptions": "kinds.changes",
    "CheckReport": "store.reports",
    "CheckpointReport": "partition.checkpoint",
    "CheckpointSettings": "partition.checkpoint",
    "ChunkSummary": "store.reports",
    "Codec": "manifest.records",
    "CollectionSettings": "lsm.collection",
    "CompactionReport": "lsm.manual_compaction",
    "CompressionConfig": "manifest.records",
    "Consumer": "queue.consumer",
    "ConsumerPosition": "queue.calls",
    "ConsumerSettings": "queue.consumer",
    "ConsumerSummary": "queue.calls",
    "CopyProgress": "store.backup_folder",
    "DecimalType": "kv.values",
    "DispatcherSettings": "partition.admission",
    "Durability": "coordinator.protocols",
    "EncryptionConfig": "manifest.records",
    "Epoch": "coordinator.protocols",
    "EvictReport": "store.archive_settings",
    "FileDamage": "store.reports",
    "Hit": "vector.searching",
    "JobGate": "store.table_description",
    "JobSettings": "manifest.jobs",
    "JobSummary": "store.reports",
    "Json": "kv.values",
    "Keys": "archive.master_keys",
    "KvReader": "kv.table",
    "KvRow": "kv.table",
    "KvStatistics": "kv.queries",
    "KvTable": "kv.table",
    "LeasedMessage": "queue.calls",
    "LoadReport": "store.loading",
    "LogSettings": "log.settings",
    "ManifestSettings": "manifest.settings",
    "Message": "queue.view",
    "Metric": "vector.options",
    "MetricMetadata": "series.section",
    "PartitionStatistics": "store.reports",
    "Position": "queue.table",
    "PreparedLoad": "store.loading",
    "QueueSettings": "queue.chain",
    "QueueTable": "queue.table",
    "QueueTotals": "queue.calls",
    "QueueView": "queue.view",
    "ReattachReport": "store.reattach",
    "RemoteSnapshot": "client.store",
    "RemoteStore": "client.store",
    "RestoreReport": "store.restore",
    "Retention": "queue.options",
    "RetentionPolicy": "manifest.records",
    "Rollup": "series.options",
    "RotationReport": "store.reports",
    "SalvageReport": "store.salvage",
    "SchedulerSettings": "scheduler.scheduler",
    "SeriesOptions": "series.options",
    "SeriesReader": "series.reader",
    "SeriesStatistics": "series.reader",
    "SeriesTable": "series.table",
    "ShardBounds": "queue.calls",
    "ShardProgress": "store.table_description",
    "StagedFile": "partition.reference",
    "StorageOptions": "partition.storage_options",
    "Store": "store.store",
    "StoreBatch": "store.batch",
    "StoreSettings": "store.settings",
    "StoreSnapshot": "store.tables",
    "StoreStatistics": "store.reports",
    "StreamTotals": "queue.calls",
    "StoreSubscription": "store.views",
    "StoreView": "store.views",
    "StructType": "kv.values",
    "TableDescription": "store.table_description",
    "TableSize": "kinds.table",
    "TextKvReader": "kv.text_keys",
    "TextKvTable": "kv.text_keys",
    "Trouble": "partition.aside",
    "ValueType": "kv.values",
    "VectorReader": "vector.reader",
    "VectorRecord": "vector.reader",
    "VectorStatistics": "vector.reader",
    "VectorTable": "vector.table",
    "VerifyReport": "store.archive_settings",
    "WriteStage": "store.tracing",
    "check_backup": "server.backups",
    "connect": "client.connect",
    "open": "server.opening",
    "open_telemetry": "store.open_telemetry",
    "reattach": "server.reattaching",
    "restore": "server.backups",
    "restore_manifest": "server.backups",
    "salvage": "server.backups",
    "serve_tcp": "server.tcp",
    "union_items": "lsm.operators",
    "union_of": "lsm.operators",
}

__all__ = [
    "Acknowledgement",
    "AggregateFunction",
    "ArchivePolicy",
    "ArchiveReport",
    "ArchiveSettings",
    "ArrowSource",
    "BackupReport",
    "Cardinality",
    "ChangeFeed",
    "ChangeOptions",
    "CheckReport",
    "CheckpointReport",
    "CheckpointSettings",
    "ChunkSummary",
    "Codec",
    "CollectionSettings",
    "CompactionReport",
    "CompressionConfig",
    "Consumer",
    "ConsumerPosition",
    "ConsumerSettings",
    "ConsumerSummary",
    "CopyProgress",
    "DecimalType",
    "DispatcherSettings",
    "Durability",
    "EncryptionConfig",
    "Epoch",
    "EvictReport",
    "FileDamage",
    "Hit",
    "JobGate",
    "JobSettings",
    "JobSummary",
    "Json",
    "Keys",
    "KvReader",
    "KvRow",
    "KvStatistics",
    "KvTable",
    "LeasedMessage",
    "LoadReport",
    "LogSettings",
    "ManifestSettings",
    "Message",
    "Metric",
    "MetricMetadata",
    "PartitionStatistics",
    "Position",
    "PreparedLoad",
    "QueueSettings",
    "QueueTable",
    "QueueTotals",
    "QueueView",
    "ReattachReport",
    "RemoteSnapshot",
    "RemoteStore",
    "RestoreReport",
    "Retention",
    "RetentionPolicy",
    "Rollup",
    "RotationReport",
    "SalvageReport",
    "SchedulerSettings",
    "SeriesOptions",
    "SeriesReader",
    "SeriesStatistics",
    "SeriesTable",
    "ShardBounds",
    "ShardProgress",
    "StagedFile",
    "StorageOptions",
    "Store",
    "StoreBatch",
    "StoreSettings",
    "StoreSnapshot",
    "StoreStatistics",
    "StoreSubscription",
    "StoreView",
    "StreamTotals",
    "StructType",
    "TableDescription",
    "TableSize",
    "TextKvReader",
    "TextKvTable",
    "Trouble",
    "ValueType",
    "VectorReader",
    "VectorRecord",
    "VectorStatistics",
    "VectorTable",
    "VerifyReport",
    "WriteStage",
    "__version__",
    "check_backup",
    "connect",
    "errors",
    "open",
    "open_telemetry",
    "reattach",
    "restore",
    "restore_manifest",
    "salvage",
    "serve_tcp",
    "union_items",
    "union_of",
]


if not TYPE_CHECKING:  # a type checker would take every misspelt name for one that is found here

    def __getattr__(name: str) -> Any:
        """Import a public name on first use: a Spark task that only reads sstables needs much less than the store."""
        if name in _MODULES:  # `from penstock import errors` would ask here again
            return importlib.import_module(f"penstock.{name}")
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"penstock has no {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f"penstock.{home}"), name)
        return value


def __dir__() -> list[str]:
    """Return the public names: packages that were imported meanwhile are not among them."""
    return sorted({*__all__, *_MODULES})
