"""The API of accounts, over a port.

Thread: any number; a table has no state of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from penstock.coordinator import Epoch
from penstock.journal.partitions import PartitionId, shard_of
from penstock.kinds import QUERY_S, Port, ReadableTable, WritableTable
from penstock.partition.ledger_records import TableInfo
from penstock.partition.pending import PendingDelta, PendingGroup
from penstock.testing.kinds.accounts import section
from penstock.testing.kinds.accounts.machine import AMOUNT, account_of, lsn_of

TABLE_SCHEMA = pa.schema(
    [
        pa.field("account", pa.string(), nullable=False),
        pa.field("amount", pa.int64(), nullable=False),
        pa.field("lsn", pa.int64(), nullable=False),
    ]
)
BALANCES = pa.schema(
    [
        pa.field("account", pa.string(), nullable=False),
        pa.field("bookings", pa.int64(), nullable=False),
        pa.field("balance", pa.int64(), nullable=False),
    ]
)


class BalanceQuery(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The argument of the query `balances`: a prefix of account names."""

    prefix: str = ""


def in_table_schema(batch: Any) -> Any:
    """Convert a record batch of a shard's tree to the table's schema."""
    keys: list[bytes] = batch.column("key").to_pylist()
    amounts = [AMOUNT.unpack(value)[0] for value in batch.column("value").to_pylist()]
    accounts = [account_of(key).decode() for key in keys]
    return pa.record_batch([accounts, amounts, list(map(lsn_of, keys))], schema=TABLE_SCHEMA)


class AccountsReader(ReadableTable):
    """Read-only accounts, live or in a snapshot."""

    @property
    def schema(self) -> Any:
        return TABLE_SCHEMA

    def balances(self, prefix: str = "", *, timeout_s: float = QUERY_S) -> Any:
        """Return the bookings and balance of the accounts that begin with a prefix, in order, as an Arrow table."""
        argument = msgspec.msgpack.encode(BalanceQuery(prefix))
        batches = self._reading.query(self._info, "balances", argument, timeout_s=timeout_s)
        return pa.Table.from_batches(list(batches), BALANCES)

    def balance(self, account: str) -> int:
        """Return the balance of one account."""
        balances = [row["balance"] for row in self.balances(account).to_pylist() if row["account"] == account]
        return balances[0] if balances else 0

    def scan_arrow(self) -> Iterator[Any]:
        """Return record batches of all bookings."""
        with self._reading.moment(self._partitions) as moment:
            for partition in self._partitions:
                yield from map(in_table_schema, moment.scan_arrow(partition, b"", None))

    def to_arrow(self) -> Any:
        """Return an Arrow table of all bookings."""
        return pa.Table.from_batches(list(self.scan_arrow()), TABLE_SCHEMA)


class AccountsTable(AccountsReader, WritableTable):
    """Accounts of an open store."""

    def __init__(self, port: Port, info: TableInfo, *, durable: bool = False) -> None:
        super().__init__(port, info)
        self._port = port
        self._durable = durable

    def _partition(self, account: bytes) -> PartitionId:
        return self._partitions[shard_of(account, len(self._partitions))]

    def book(self, account: str, amount: int, *, durable: bool | None = None) -> Epoch:
        """Book an amount on an account."""
        name, amount = section.check(account, amount)
        size = len(name) + section.BOOKING_BYTES
        return self._end(self._port.write(self._partition(name), section.book, size, name, amount), durable)

    def transfer(self, source: str, target: str, amount: int, *, durable: bool | None = None) -> Epoch:
        """Move an amount from one account to another, atomically."""
        delta = PendingDelta()
        for account, change in ((source, -amount), (target, amount)):
            name, change = section.check(account, change)
            section.book(delta, self._partition(name), name, change)
        group = PendingGroup()
        group.sections = delta.groups[0].sections
        return self._end(self._port.submit(group, 2 * section.BOOKING_BYTES + len(source) + len(target)), durable)
