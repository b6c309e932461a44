"""The description of a table as a whole, the same for the owner and its clients.

Thread: immutable values.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from penstock.partition.storage_options import StorageOptions


class ShardProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a shard is, as the manifest knows it: what the next opening starts from.

    >>> report = store.compact("users")
    >>> shard = store.describe("users").progress[0]
    >>> shard.stored_lsn <= shard.applied_lsn <= shard.durable_lsn
    True
    """

    shard: int
    stored_lsn: int  # in files
    applied_lsn: int
    durable_lsn: int  # in files or in the shard's own log
    highest_lsn: int
    last_sealed_segment: int  # of the journal, when the shard was last made independent of it
    last_checkpoint_generation: int  # of the component WAL, at that time
    restart_epoch: int  # the incarnation of the store that last wrote this


class JobGate(msgspec.Struct, frozen=True, kw_only=True):
    """The gate of a kind of job: at most one of a table runs.

    >>> report = store.compact("users")
    >>> [(gate.kind, gate.active_job) for gate in store.describe("users").gates]
    [('flush', None)]
    """

    kind: str
    active_job: int | None  # it runs, or waits to be repaired
    last_success: datetime | None
    errored_since: datetime | None


class TableDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A table as the store keeps it.

    >>> table = store.describe("users")
    >>> table.kind, table.shards, table.status, table.storage.chunk_dir
    ('kv', 1, 'active', 'tables')
    """

    name: str
    table_id: int
    kind: str
    shards: int
    status: str  # active, or draining: then it takes no new rows
    created: datetime | None  # None: by an earlier version of Penstock
    config_hash: str  # of what never changes
    generation: int  # raised by every change of this description; for `wait_for_change`
    storage: StorageOptions
    measured: datetime | None = None  # when its metrics were last kept
    progress: tuple[ShardProgress, ...] = ()  # of shards that were used
    gates: tuple[JobGate, ...] = ()  # of jobs that ran, or are due
