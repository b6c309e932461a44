"""Loads rows of Spark's tasks into a store: the tasks prepare them, one commit writes them all.

A task turns its rows into a load (see `store/loading.py`) and returns it; the committer puts the loads of all tasks
and tables into one group. A retried task makes new files; files that no commit names are purged.

Thread: Spark's; tasks prepare in their workers, the commit runs where Spark commits.
Invariant: no row is visible before the commit, and all are after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from penstock.errors import Invalid, NotFound
from penstock.journal.partitions import table_of
from penstock.kinds import as_loadable, as_replaceable
from penstock.spark.arrow import arrow_schema
from penstock.spark.table_ref import PlannedTable, build_context, check_range
from penstock.store.batch import StoreBatch
from penstock.store.loading import PreparedLoad, bundle, prepare_batches

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(PreparedLoad)


def check_schema(table: PlannedTable, schema: Any) -> None:
    """Raise `Invalid`, before any work, if rows of this Spark schema cannot be written to the table."""
    as_loadable(table.kind, table.info).load_schema(arrow_schema(schema), table.info.options)


def make_loads(
    table: PlannedTable, schema: Any, batches: Iterator[Any], replace: tuple[bytes, bytes | None] | None = None
) -> bytes:
    """Prepare a task's rows, all within the `replace` range, and return the load for the committer. Runs in a task."""
    with build_context(table) as context:
        return _encode(prepare_batches(context, table.info, arrow_schema(schema), batches, replace))


def add_loads(
    batch: StoreBatch, table: PlannedTable, encoded: Iterable[bytes], replace: tuple[bytes, bytes | None] | None = None
) -> int:
    """Add the loads of all tasks for a table to a batch; return the number of rows."""
    kind, info = table.kind, table.info
    loads = [_decoder.decode(load) for load in encoded]
    parts = [part for load in loads for part in load.parts]
    if any(table_of(part.partition) != info.table_id for part in parts):
        raise NotFound(f"table {info.name} was dropped while rows for it were prepared: nothing was written")
    with build_context(table) as context:
        parts = bundle(context, info, parts, replace)
    for part in parts:
        if part.file is not None:
            batch.add_files(part.partition, [part.file])
        else:
            batch.add_section(part.partition, kind.decode(part.payload), len(part.payload))
    return sum(load.rows for load in loads)


def replaced_range(table: PlannedTable, options: dict[str, str], overwrite: bool) -> tuple[bytes, bytes | None] | None:
    """Return the range an overwrite replaces: that of the options `start` and `end`, or everything."""
    if not overwrite:
        if "start" in options or "end" in options:
            raise Invalid("start and end say what mode('overwrite') replaces; mode('append') takes neither")
        return None
    kind = table.kind
    as_replaceable(kind, table.info)  # before any work
    start = kind.parse_key(options["start"]) if "start" in options else b""
    key_range = start, kind.parse_key(options["end"]) if "end" in options else None
    check_range(*key_range)
    return key_range
