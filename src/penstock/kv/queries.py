"""The queries of a kv table, answered from the snapshots of its shards: how many keys, and where the rows are.

    count        the number of keys in a range; one or more rows, to be added
    statistics   a row for each shard

Thread: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from penstock.errors import Invalid
from penstock.kinds import STATISTICS, QueryContext, Reading, TableSize
from penstock.partition.ledger_records import TableInfo

COUNT = "count"
_ROWS_EACH = 1 << 20  # counted for one batch of an answer, which has a deadline
_encode = msgspec.msgpack.Encoder().encode
_range = msgspec.msgpack.Decoder(tuple[bytes, bytes | None])


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStatistics:
    """Where the rows of a kv table are, at one moment.

    >>> store.kv("users").statistics().rows_max
    1
    """

    shards: int
    rows_max: int  # an upper bound: rows that were written again or deleted count until they are compacted
    memory_bytes: int  # of rows that are in no file yet
    files: int
    file_bytes: int
    runs_max: int  # sorted runs that a lookup may have to search, in the worst shard

    @property
    def size(self) -> TableSize:
        """Its size, in the terms that all kinds share."""
        return TableSize(self.rows_max, self.files, self.file_bytes, self.memory_bytes, self.runs_max)


# -- asking


def count(reading: Reading, info: TableInfo, start: bytes, end: bytes | None) -> int:
    """Count the keys in [start, end)."""
    batches = reading.query(info, COUNT, _encode((start, end)))
    return sum(int(number) for batch in batches for number in batch.column("count").to_pylist())


def statistics(reading: Reading, info: TableInfo) -> KvStatistics:
    """Return the statistics of a table."""
    table = pa.Table.from_batches(list(reading.query(info, STATISTICS, b"")))
    columns: dict[str, list[int]] = table.to_pydict()
    return KvStatistics(
        shards=table.num_rows,
        rows_max=sum(columns["rows"]),
        memory_bytes=sum(columns["memory_bytes"]),
        files=sum(columns["files"]),
        file_bytes=sum(columns["file_bytes"]),
        runs_max=max(columns["runs"], default=0),
    )


# -- answering


def check(name: str, argument: bytes) -> None:
    """Raise `Invalid` if there is no such query, or its argument is malformed."""
    if name not in (COUNT, STATISTICS):
        raise Invalid(f"a kv table has no query {name!r}: it has {COUNT} and {STATISTICS}")
    if name == STATISTICS and argument:
        raise Invalid(f"the query {STATISTICS} has no argument")
    if name == COUNT:
        try:
            _range.decode(argument)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Invalid(f"the argument of the query {COUNT} is a range of keys ({error})") from None


def answer(name: str, argument: bytes, shards: Sequence[Any], context: QueryContext) -> Iterator[Any]:
    """Yield the record batches of a query. Requires: `check` has passed."""
    return _statistics(shards, context) if name == STATISTICS else _count(shards, *_range.decode(argument), context)


def _count(shards: Sequence[Any], start: bytes, end: bytes | None, context: QueryContext) -> Iterator[Any]:
    counted = 0
    for shard in shards:
        for batch in shard.scan_arrow(start, end):
            context.check()
            counted += batch.num_rows
            if counted >= _ROWS_EACH:
                yield pa.record_batch({"count": [counted]})
                counted = 0
    context.check()
    yield pa.record_batch({"count": [counted]})


def _statistics(shards: Sequence[Any], context: QueryContext) -> Iterator[Any]:
    columns: dict[str, list[int]] = {"rows": [], "memory_bytes": [], "files": [], "file_bytes": [], "runs": []}
    for shard in shards:
        context.check()
        version = shard.version
        files, memtables = list(version.files()), version.memtables()
        columns["rows"].append(sum(map(len, memtables)) + sum(file.meta.rows for file in files))
        columns["memory_bytes"].append(sum(memtable.bytes for memtable in memtables))
        columns["files"].append(len(files))
        columns["file_bytes"].append(sum(file.meta.size_bytes for file in files))
        columns["runs"].append(len(version.runs))
    yield pa.record_batch({name: pa.array(values, pa.int64()) for name, values in columns.items()})
