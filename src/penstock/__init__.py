"""Penstock: a durable ingest store for Python and Spark.

The way of a write, and the packages it goes through (each may import only those below it):

    journal     one log for the whole store, one fsync        (to come)
    lsm         memtable, sstable, levels                     (to come)
    manifest    what is durable about files, progress, work
    log         append-only files of records
    host        files, time, chance: the operating system
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
