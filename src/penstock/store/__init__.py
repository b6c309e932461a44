"""A store: a folder that one process owns. This package opens it, connects all parts below, and has the public API.

The public API:

    store              `Store`, the open store of the owner; its operations that are not about one table
    tables             what an owned and a connected store share: tables by name, batches, snapshots, loads
    naming             finds tables by name and kind, and creates them
    kv_tables          `store.kv`, with overloads for the types of keys and values
    batch              atomic batches over several tables
    loading            bulk loads: rows become sections or files in any process, one batch commits them
    views              a subscription to the progress of a store
    settings           `StoreSettings`
    reports            what backups, checks, jobs and statistics return
    table_description  what `store.describe` returns

The way of a write:

    port               the way from a table's API to everything below; passes a write to the coordinator
    conditions         compare and set: a write that depends on the LSNs of rows
    flusher            called by the coordinator: encodes a batch for the journal, makes it durable, applies it
    keys               encryption keys of tables; encrypts sections
    tracing            calls a function of the user's at each stage of a write
    open_telemetry     these stages as spans

A read:

    live_reading       the owner's own reads, which see its pending writes
    applied_reading    reads of clients, which see only what is applied
    snapshot_port      reads of a snapshot, at one LSN
    querying           queries of a kind (a selector, a search), in bounded batches

Opening and closing:

    opening            opens a folder, replays the journal, starts the background tasks, closes
    wiring             makes every part and connects them
    identity           the file `STORE`: the UUID of a store and of its files
    shards             opens the state machine of a shard
    following          a follower in a cluster: applies the leader's records

In the background:

    tasks              the periodic tasks
    governor           limits the memory of memtables
    space              handles a full disk
    reserve            space held back so that deletes can be written on a full disk
    journal_trimming   when the journal is truncated
    services           what kinds run for their tables, such as leases and retention
    deriving           tables that jobs compute from others, such as rollups
    table_operations   describe, drain, wait for changes of a table; run a task now
    table_registry     the rows of tables in the manifest, which follow the ledger
    dropped            removes the files of dropped tables

Statistics and metrics:

    statistics         statistics of a store and its partitions
    inspection         jobs and files, as lists for people
    metrics            the store's own parts as metrics
    kept_metrics       counters that outlive the process, in the manifest
    statsd             sends the metrics to a StatsD agent
    stream_counts      what the batches of each stream wrote

Backup and repair:

    backup             a consistent backup while others write
    backup_folder      the folder of backups
    restore            a new store from a backup; checks a backup
    new_store          builds a store beside its folder and renames it when it is complete
    shipping           a snapshot of a store for another member of a cluster
    check              reads every file and checks every rule
    salvage            copies what can be read of a damaged store

The archive, an object store with copies of files:

    archive_settings   its settings and reports
    archive_url        the file `ARCHIVE`: its URL
    archiving          runs, verification, eviction and collection, as jobs and by hand
    archive_run        one run: the store as of one LSN, as objects
    chunk_moves        uploads, evicts and fetches single files
    archived_tables    reads sstables that are only in the archive
    object_collection  deletes objects that nothing names
    reattach           a new store from an archive
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"Store": "store", "open_store": "store", "StoreSettings": "settings"}


def __getattr__(name: str) -> Any:
    """Import the store when it is first used: clients need only a little of this package."""
    if name in _HOMES:
        return getattr(import_module(f"penstock.store.{_HOMES[name]}"), name)
    raise AttributeError(f"penstock.store has no {name!r}")
