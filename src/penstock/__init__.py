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

from penstock import errors
from penstock.store import Store, StoreSettings
from penstock.store import open_store as open  # noqa: A004 - penstock.open reads well

__version__ = "0.1.0"

__all__ = ["Store", "StoreSettings", "__version__", "errors", "open"]
