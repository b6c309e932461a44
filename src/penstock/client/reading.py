"""Reads over a connection: of the live store, and of a snapshot that the owner holds.

Thread: any.
Invariants: (1) a live read sees everything this client wrote before it. (2) all reads of a snapshot see one LSN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from penstock.arguments import seconds
from penstock.client.connection import Connection, Page
from penstock.host.randomness import Random
from penstock.journal.partitions import PartitionId
from penstock.kinds import QUERY_S, QUERY_S_MAX, Piece
from penstock.lsm.rows import bytes_list
from penstock.partition.ledger_records import TableInfo
from penstock.protocol import wire
from penstock.store.querying import check_query


class FlightReading:
    """Reads over a connection, live or in a snapshot."""

    snapshot_id = ""  # live

    def __init__(self, connection: Connection, random: Random) -> None:
        self._connection = connection
        self._random = random

    def _flush_writes(self) -> None:
        """Send pending writes and wait for them; a snapshot has none."""

    def lookup(self, partition: PartitionId, key: bytes) -> bytes | None:
        return self.lookup_many(partition, [key])[0]

    def lookup_many(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        values: list[bytes | None] = []
        while len(values) < len(keys):
            values += self._first_values(partition, keys[len(values) :])
        return values

    def _first_values(self, partition: PartitionId, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of the first keys, as many as fit into one answer; at least one."""
        first_keys = list(keys[: wire.KEYS_MAX])
        return self._connection.ask(wire.Lookup(self.snapshot_id, partition, first_keys), list[bytes | None])

    def lookup_row(self, partition: PartitionId, key: bytes) -> tuple[bytes, int] | None:
        self._flush_writes()
        request = wire.LookupRow(self.snapshot_id, partition, key)
        return self._connection.ask(request, tuple[bytes, int] | None)  # type: ignore[arg-type]

    def scan(self, partition: PartitionId, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Any]:
        pages = self._scan(partition, start, end, arrow=False, reverse=reverse)
        return (
            pair
            for page in pages
            for _, batch in page
            for pair in zip(bytes_list(batch.column("key")), bytes_list(batch.column("value")), strict=True)
        )

    def scan_arrow(self, partition: PartitionId, start: bytes, end: bytes | None) -> Iterator[Any]:
        return (batch for page in self._scan(partition, start, end, arrow=True, reverse=False) for _, batch in page)

    def scan_ranges(self, ranges: Sequence[wire.KeyRange]) -> Iterator[tuple[int, Any]]:
        """Yield record batches of several ranges of one table, all at one LSN, each with the number of its range."""
        self._flush_writes()
        name = self._random.randbytes(16).hex()
        return chain.from_iterable(self._connection.pages(wire.ScanRanges(name, self.snapshot_id, list(ranges))))

    def query(self, info: TableInfo, name: str, argument: bytes, *, timeout_s: float = QUERY_S) -> Iterator[Any]:
        check_query(info, name, argument, timeout_s)
        self._flush_writes()
        scan = self._random.randbytes(16).hex()
        timeout_s = seconds(timeout_s, "timeout_s", QUERY_S_MAX)  # a plain number, for the wire
        request = wire.RunQuery(scan, self.snapshot_id, info.table_id, name, argument, timeout_s)
        # The first page waits for two batches: the one it sends, and the next, to know whether there is one.
        return (batch for page in self._connection.pages(request, wait_s=2 * timeout_s) for _, batch in page)

    def _scan(
        self, partition: PartitionId, start: bytes, end: bytes | None, *, arrow: bool, reverse: bool
    ) -> Iterator[Page]:
        self._flush_writes()
        name = self._random.randbytes(16).hex()
        return self._connection.pages(wire.Scan(name, self.snapshot_id, partition, start, end, arrow, reverse))

    def pieces(self, partition: PartitionId, count: int, start: bytes = b"", end: bytes | None = None) -> list[Piece]:
        request = wire.CutPieces(self.snapshot_id, partition, count, start, end)
        return wire.received_pieces(self._connection.ask_raw(request))

    def cut_ranges(
        self, ranges: Sequence[wire.KeyRange], count: int, bytes_min: int = 0, bytes_max: int = 0
    ) -> list[list[bytes]]:
        """Return the keys at which to split each range for tasks that read it, in one request."""
        self._flush_writes()
        request = wire.CutRanges(self.snapshot_id, list(ranges), count, bytes_min, bytes_max)
        return self._connection.ask(request, list[list[bytes]])


class FlightSnapshot(FlightReading):
    """Read-only view of a store at one LSN. The owner holds it until its lease expires after the last use.

    Any client that knows the id can read it.
    """

    def __init__(self, connection: Connection, random: Random, handle: wire.SnapshotHandle, *, ours: bool) -> None:
        super().__init__(connection, random)
        self._handle = handle
        self._ours = ours
        self._tables = {info.name: info for info in handle.tables}
        self.snapshot_id = handle.snapshot

    @property
    def lsn(self) -> int:
        return self._handle.lsn

    def table(self, name: str) -> TableInfo | None:
        return self._tables.get(name)

    def tables(self) -> list[TableInfo]:
        return self._handle.tables

    def time_us(self) -> int:
        return self._handle.time_us

    @contextmanager
    def moment(self, partitions: Sequence[PartitionId]) -> Iterator[FlightSnapshot]:
        yield self

    def close(self) -> None:
        """Close the snapshot if this client took it; a joined one is for its taker to close."""
        if self._ours:
            self._connection.forget(wire.CloseSnapshot(self.snapshot_id))
            self._ours = False
