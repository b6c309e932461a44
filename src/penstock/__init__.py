"""Penstock: a durable ingest store for Python and Spark.

The way of a write, and the packages it goes through (each may import only those below it):

    spark, cli     Spark's formats and streams; the command
    server, client the owner's door for other processes; a store that another process owns
    protocol       what the two say to each other, and where an owner is found
    store          opens a folder; tables, batch: what users see; port, flusher: the way down from there
    kv, queue      the kinds of tables
    coordinator    pending delta, epochs, group commit, backpressure
    partition      ledger (verdicts), dispatcher, spills, checkpoints
    journal        one log for the whole store, one fsync
    lsm            memtable, sstable, levels
    archive        the container that holds the bytes of a file
    scheduler      background tasks, engines, the runner of durable jobs
    manifest       what is durable about files, progress, work (LMDB)
    log            append-only files of records
    host           files, time, randomness: the operating system
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import errors
    from penstock.client.connect import connect
    from penstock.server.opening import open  # noqa: A004 - penstock.open reads well
    from penstock.store.settings import StoreSettings
    from penstock.store.store import Store

__version__ = "0.1.0"

__all__ = ["Store", "StoreSettings", "__version__", "connect", "errors", "open"]


def __getattr__(name: str) -> Any:
    """Load the store when it is first asked for: a reader of sstables elsewhere needs, and has, much less."""
    if name == "errors":  # `from penstock import errors` would ask here again
        return importlib.import_module("penstock.errors")
    if name == "open":
        from penstock.server.opening import open as found

        return found
    if name == "connect":
        from penstock.client.connect import connect

        return connect
    if name == "Store":
        from penstock.store.store import Store

        return Store
    if name == "StoreSettings":
        from penstock.store.settings import StoreSettings

        return StoreSettings
    raise AttributeError(f"penstock has no {name!r}")
