"""Spark: reads, writes and maintains stores.

    session, views        a local session; a temporary view of each table
    commit                several tables and a consumer's position in one commit
    stream, progress      a stream from a queue with exactly-once results
    wait, caught_up       wait until a stream ends, or stop it on a signal; wait until it has read all
    maintain              run the large jobs of a store on Spark
    verify, export        check all files; write a table as Parquet
    search                join the rows of a DataFrame with their nearest vectors
    promql                a PromQL range over a series table, by slices of time

    format                the format `penstock`; the other modules implement it
    table_ref, arrow      the store and table of an option; types
    sessions              session, views
    exactly_once          the stream; batch_runner: its batches; committing: a commit; offset_log: Spark's checkpoint
    broken_records        a batch that fails; isolation: the search in Spark's tasks; dead_letters: what is set aside
    maintenance           maintain, verify, export
    reading, writing, loading, streaming; vectors: search; promql_range: promql

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
