"""Penstock: a durable ingest store for Python and Spark.

The way of a write, and the packages it goes through (each may import only those below it):

    store, kv      the API; tables of a kind
    coordinator    pending delta, epochs, group commit, backpressure
    partition      ledger (verdicts), dispatcher, spills, checkpoints
    journal        one log for the whole store, one fsync
    lsm            memtable, sstable, levels
    archive        the container that holds the bytes of a file
    scheduler      background tasks, engines, the runner of durable jobs
    manifest       what is durable about files, progress, work (LMDB)
    log            append-only files of records
    host           files, time, chance: the operating system
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import errors
    from penstock.store import Store, StoreSettings
    from penstock.store import open_store as open  # noqa: A004 - penstock.open reads well

__version__ = "0.1.0"

__all__ = ["Store", "StoreSettings", "__version__", "errors", "open"]


def __getattr__(name: str) -> Any:
    """Load the store when it is first asked for: a reader of sstables elsewhere needs, and has, much less."""
    if name == "errors":
        from penstock import errors

        return errors
    if name in ("Store", "StoreSettings", "open"):
        from penstock import store

        return getattr(store, "open_store" if name == "open" else name)
    raise AttributeError(f"penstock has no {name!r}")
