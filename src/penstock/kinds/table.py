"""The base of the API classes of tables: what tables of every kind have.

Thread: any.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from penstock.coordinator import Epoch
from penstock.kinds.change_reading import ChangeFeed, no_feed
from penstock.kinds.core import InThisProcess
from penstock.kinds.port import Port, Reading, partitions_of
from penstock.partition.ledger_records import TableInfo

DURABLE_S = 30.0  # how long a durable write waits


class TableSize(NamedTuple):
    """About how large a table is, whatever its kind.

    >>> store.kv("users").statistics().size.rows
    1
    """

    rows: int  # or messages, series, vectors; at most so many, where counting them would read them
    files: int
    file_bytes: int
    memory_bytes: int = 0
    runs: int = 0  # sorted runs that a lookup may have to search


class TableStatistics(Protocol):
    """The statistics of a table: a struct or dataclass of numbers."""

    @property
    def size(self) -> TableSize: ...


@runtime_checkable
class Measured(Protocol):
    """A table that has statistics."""

    def statistics(self) -> TableStatistics: ...


def statistics_of(table: ReadableTable) -> TableStatistics | None:
    """Return the statistics of a table, None if its kind has none."""
    return table.statistics() if isinstance(table, Measured) else None


def numbers_of(statistics: TableStatistics | None) -> dict[str, Any]:
    """Return the fields of statistics, of which there may be none."""
    names: Iterable[str] = getattr(statistics, "__struct_fields__", ()) or getattr(
        statistics, "__dataclass_fields__", ()
    )
    return {name: getattr(statistics, name) for name in names}


class ReadableTable(InThisProcess, ABC):
    """A read-only table, live or in a snapshot."""

    def __init__(self, port: Reading, info: TableInfo) -> None:
        self._reading = port
        self._info = info
        self._partitions = partitions_of(info)

    @property
    def name(self) -> str:
        """Its name."""
        return self._info.name

    @property
    def shards(self) -> int:
        """Into how many shards it is split."""
        return self._info.shards

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The Arrow schema of its rows."""

    @abstractmethod
    def scan_arrow(self) -> Iterator[pa.RecordBatch]:
        """Return record batches of all rows."""

    def changes(self, *, after: int | None = None, until: int | None = None) -> ChangeFeed:
        """Return the changes of a table with a change feed, of commits after the LSN `after`; None: all that are kept.

        `until` is the LSN of the last commit; None: the last there is. They are those of applied writes: wait for a
        write by `flush` to find it here.

        >>> users.changes(after=0).to_arrow().column("key")[0].as_py()
        b'ada'
        """
        schema = self._change_schema()
        if schema is None:
            raise no_feed(self._info)
        return ChangeFeed(self._reading, self._info, schema, after, until)

    def _change_schema(self) -> pa.Schema | None:
        """Return the columns of the table in its change feed; None if it has none."""
        return None

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        reader = pa.RecordBatchReader.from_batches(self.schema, self.scan_arrow())
        return reader.__arrow_c_stream__(requested_schema)


class WritableTable:
    """What the writes of a table share."""

    _port: Port
    _info: TableInfo
    _durable: bool  # whether writes are durable if the caller does not say

    def _end(self, epoch: Epoch, durable: bool | None) -> Epoch:
        """Wait for a write, if it is to be durable, and return its epoch."""
        if self._durable if durable is None else durable:
            self._port.flush(epoch, DURABLE_S, table=self._info.table_id)
        return epoch
