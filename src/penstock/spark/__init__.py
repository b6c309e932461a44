"""Spark: the way data leaves, comes back and is maintained.

    session, views        a local session; a temporary view of each table
    commit                several tables and a consumer's position in one commit
    stream, progress      a stream from a queue whose results count once
    wait                  until it ends, or a signal says so
    maintain              a driver that does the large jobs of a store
    verify, export        the check of all files; a table as Parquet

    format                the format `penstock`; the other modules are its parts
    table_ref, arrow      which store and table; types
    sessions              the first two of the above
    exactly_once          the stream; committing: its commit; offset_log: Spark's checkpoint
    maintenance           the last three of the above
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


if not TYPE_CHECKING:  # a type checker would take every misspelt name for one that is found here

    def __getattr__(name: str) -> Any:
        """Load a part when it is asked for, with one clear line if Spark is missing."""
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
    return sorted({*globals(), *__all__})
