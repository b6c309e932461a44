"""Spark: reads, writes and maintains stores.

    session, views        a local session; a temporary view of each table
    commit                several tables and a consumer's position in one commit
    stream, progress      a stream from a queue with exactly-once results
    wait                  wait until a stream ends, or stop it on a signal
    maintain              run the large jobs of a store on Spark
    verify, export        check all files; write a table as Parquet

    format                the format `penstock`; the other modules implement it
    table_ref, arrow      the store and table of an option; types
    sessions              session, views
    exactly_once          the stream; committing: its commit; offset_log: Spark's checkpoint
    maintenance           maintain, verify, export
    reading, writing, loading, streaming

Nothing else in Penstock imports pyspark.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.spark.committing import Committed, commit
    from penstock.spark.exactly_once import StreamProgress, dead_letter_payload, progress, stream, wait
    from penstock.spark.format import register
    from penstock.spark.maintenance import Damage, export, maintain, verify
    from penstock.spark.sessions import session, views

_HOMES = {
    "session": "sessions",
    "views": "sessions",
    "register": "format",
    "commit": "committing",
    "Committed": "committing",
    "stream": "exactly_once",
    "progress": "exactly_once",
    "wait": "exactly_once",
    "StreamProgress": "exactly_once",
    "dead_letter_payload": "exactly_once",
    "maintain": "maintenance",
    "verify": "maintenance",
    "export": "maintenance",
    "Damage": "maintenance",
}
__all__ = [
    "Committed",
    "Damage",
    "StreamProgress",
    "commit",
    "dead_letter_payload",
    "export",
    "maintain",
    "progress",
    "register",
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
