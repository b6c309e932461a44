"""What the author of a kind provides to the contract suite, and the stores that the suite runs in.

Thread: immutable values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

import penstock
from penstock.client.connect import connect
from penstock.client.store import RemoteStore
from penstock.kinds import Kind, Reading, partitions_of
from penstock.log import LogSettings
from penstock.partition.ledger_records import TableInfo
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.store.tables import Tables
from penstock.testing.clock import FakeClock
from penstock.testing.disk import SimulatedDisk
from penstock.testing.manifest import MemoryEngine

NAME = "tried"  # the table's name in most tests
SHARDS = 3
SETTINGS = StoreSettings(
    background=False,
    journal=LogSettings(segment_bytes=4_096, allocate_bytes=1_024, index_bytes=512),
    reserve_bytes=512,
)


@dataclass(frozen=True, kw_only=True)
class QuerySample:
    """A query, and a function that returns its answer as rows after the writes of these numbers."""

    name: str
    argument: bytes
    answer: Callable[[Sequence[int]], list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class KindSample:
    """A kind, and how to use it. Writes have numbers, which determine the content of a table."""

    kind: Kind
    write: Callable[[Any, int], object]  # make the write of a number through the API of a table
    rows: Callable[[Any], list[Any]]  # the content of a table or a reader, in an order that depends on content alone
    expected: Callable[[Sequence[int]], list[Any]]  # the same, after the writes of these numbers
    sections: Sequence[Any]  # sections of every form, as the API makes them
    refused: Sequence[bytes]  # payloads that break rules of the API
    arrow: Callable[[Sequence[int]], pa.Table] | None = None  # of a `Loadable`: rows equivalent to these writes
    many: int = 1_000  # of a `Loadable`: a number of rows that is loaded as files, if it loads files
    queries: Sequence[QuerySample] = ()  # of a `Queryable`

    def make(self, store: Tables, name: str = NAME) -> Any:
        """Return a table of the kind; create it if it is absent."""
        return store.create(name, self.kind.name, shards=SHARDS)

    def write_all(self, table: Any, numbers: Sequence[int]) -> None:
        """Make the writes of these numbers, without waiting until they are durable."""
        for number in numbers:
            self.write(table, number)


def open_simulated(disk: SimulatedDisk, clock: FakeClock | None = None) -> Store:
    """Open the store of a simulated disk, without threads of its own."""
    return open_store(
        "/store",
        fs=disk,
        clock=clock or FakeClock(),
        random=random.Random(1),
        engine=MemoryEngine,
        settings=SETTINGS,
    )


@contextmanager
def opened(folder: Path) -> Iterator[tuple[Store, RemoteStore]]:
    """Open a store in a folder, and a connection to it."""
    with penstock.open(folder / "store") as store, connect(store.path) as client:
        yield store, client


def info_of(reading: Reading, name: str = NAME) -> TableInfo:
    """Return the description of a table."""
    info = reading.table(name)
    assert info is not None
    return info


def scanned(kind: Kind, reading: Reading, name: str = NAME) -> pa.Table:
    """Return all rows of a table as Arrow, shard after shard, at one LSN."""
    info = info_of(reading, name)
    with reading.moment(partitions_of(info)) as moment:
        batches = [
            kind.to_table_schema(batch, info.options, shard)
            for shard, partition in enumerate(partitions_of(info))
            for batch in moment.scan_arrow(partition, b"", None)
        ]
    return pa.Table.from_batches(batches, kind.schema(info.options))
