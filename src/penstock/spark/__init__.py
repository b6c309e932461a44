"""Spark: reads, writes and maintains stores.

    session(), views()      a local session; a temporary view of each table
    commit()                several tables and a consumer's position in one commit
    stream(), progress()    a stream from a queue with exactly-once results
    wait(), caught_up()     wait until a stream ends, or stop it on a signal; wait until it has read all
    maintain()              run the large jobs of a store on Spark
    verify(), export()      check all files; write a table as Parquet
    search()                join the rows of a DataFrame with their nearest vectors
    promql()                a PromQL range over a series table, by slices of time

The modules. The format `penstock`:

    sessions        local sessions with suitable settings; temporary views
    format          `format("penstock")`: what Spark calls for reads, writes and streams
    table_ref       the store and table that options name, and this process' connection to the owner
    arrow           Arrow data in the types of Spark's schema
    reading         batch reads of a table
    change_reading  batch reads of a change feed
    streaming       the streaming source: messages of a queue, or a change feed
    writing         batch and streaming writes
    loading         rows that tasks prepare and one commit writes

A stream with exactly-once results:

    exactly_once    starts a stream and reports its progress
    batch_runner    runs each micro-batch as one commit
    committing      several tables and a consumer's position in one commit
    offset_log      reads Spark's checkpoint
    broken_records  a batch that fails because of some records: sets them aside, and writes the others
    isolation       finds these records in one Spark job
    soft_functions  Python functions that report failures during that job, instead of ending the process
    dead_letters    the records that were set aside, each with its reason

Other work on Spark:

    maintenance     the owner's large jobs, the check of all files, the export to Parquet
    vectors         nearest neighbours of the vectors in a DataFrame
    promql_range    a PromQL range as a DataFrame
    worker_daemon   starts Spark's Python workers sooner

Nothing else in Penstock imports pyspark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.batch_runner import StreamProgress
    from penstock.spark.committing import Committed, commit
    from penstock.spark.dead_letters import dead_letter_payload
    from penstock.spark.exactly_once import caught_up, progress, stream, wait
    from penstock.spark.format import register
    from penstock.spark.maintenance import Damage, export, maintain, verify
    from penstock.spark.promql_range import promql
    from penstock.spark.sessions import session, views
    from penstock.spark.vectors import search

_HOMES = {
    "session": "sessions",
    "views": "sessions",
    "register": "format",
    "commit": "committing",
    "Committed": "committing",
    "stream": "exactly_once",
    "progress": "exactly_once",
    "wait": "exactly_once",
    "caught_up": "exactly_once",
    "StreamProgress": "batch_runner",
    "dead_letter_payload": "dead_letters",
    "maintain": "maintenance",
    "verify": "maintenance",
    "export": "maintenance",
    "Damage": "maintenance",
    "search": "vectors",
    "promql": "promql_range",
}
__all__ = [
    "Committed",
    "Damage",
    "StreamProgress",
    "caught_up",
    "commit",
    "dead_letter_payload",
    "export",
    "maintain",
    "progress",
    "promql",
    "register",
    "search",
    "session",
    "stream",
    "verify",
    "views",
    "wait",
]


if not TYPE_CHECKING:  # with it a type checker would accept every misspelt name

    def __getattr__(name: str) -> Any:
        """Import a module on first use, with a clear error if Spark is missing."""
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"penstock.spark has no {name!r}")
        try:
            importlib.import_module("pyspark.sql")
            return getattr(importlib.import_module(f"penstock.spark.{home}"), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in ("pyspark", "pandas", "py4j"):
                raise ModuleNotFoundError(
                    "penstock.spark needs Spark: pip install 'penstock[spark]'", name=error.name
                ) from None
            raise


def __dir__() -> list[str]:
    return sorted(__all__)
