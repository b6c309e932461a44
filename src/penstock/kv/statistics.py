"""The statistics of a kv table: a query of its kind, answered from the snapshots of its shards.

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.errors import Invalid
from penstock.kinds import QueryContext
from penstock.lsm.version import Version
from penstock.partition.ledger import TableInfo

QUERY = "statistics"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStatistics:
    """Where the rows of a kv table are, at one moment."""

    shards: int
    rows_max: int  # an upper bound: rows that were written again or deleted count until they are compacted
    memory_bytes: int  # of rows that are in no file yet
    files: int
    file_bytes: int
    runs_max: int  # sorted runs that a lookup may have to search, in the worst shard


def check_query(info: TableInfo, name: str, argument: bytes) -> None:
    """Raise `Invalid` if there is no such query."""
    if name != QUERY or argument:
        raise Invalid(f"a kv table has no query {name!r} with {len(argument)} bytes: its query is {QUERY!r}, with none")


def answer(versions: Sequence[Version], context: QueryContext) -> Iterator[Any]:
    """Yield one record batch with a row for each shard."""
    columns: dict[str, list[int]] = {"rows": [], "memory_bytes": [], "files": [], "file_bytes": [], "runs": []}
    for version in versions:
        context.check()
        files, memtables = list(version.files()), version.memtables()
        columns["rows"].append(sum(map(len, memtables)) + sum(file.meta.rows for file in files))
        columns["memory_bytes"].append(sum(memtable.bytes for memtable in memtables))
        columns["files"].append(len(files))
        columns["file_bytes"].append(sum(file.meta.size_bytes for file in files))
        columns["runs"].append(len(version.runs))
    yield pa.record_batch({name: pa.array(values, pa.int64()) for name, values in columns.items()})


def read(batches: Iterator[Any]) -> KvStatistics:
    """Return the statistics from the answer to the query."""
    table = pa.Table.from_batches(list(batches))
    columns: dict[str, list[int]] = table.to_pydict()
    return KvStatistics(
        shards=table.num_rows,
        rows_max=sum(columns["rows"]),
        memory_bytes=sum(columns["memory_bytes"]),
        files=sum(columns["files"]),
        file_bytes=sum(columns["file_bytes"]),
        runs_max=max(columns["runs"], default=0),
    )
