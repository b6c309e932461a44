"""The kind `accounts`: its core, loads and queries.

Thread: pure functions; the table it makes is for any thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import msgspec
import pyarrow as pa

from penstock.errors import CorruptionError, Invalid
from penstock.journal.partitions import shard_of
from penstock.kinds import (
    BuildContext,
    Kind,
    Loadable,
    MachineContext,
    Port,
    PreparedRows,
    Queryable,
    QueryContext,
    Reading,
    partitions_of,
)
from penstock.lsm.view import prefix_end
from penstock.partition.ledger_records import TableInfo
from penstock.partition.machine import PartitionDescriptor
from penstock.partition.reference import StagedFile
from penstock.testing.kinds.accounts import section
from penstock.testing.kinds.accounts.machine import AMOUNT, AccountsMachine, AccountsSnapshot, account_of
from penstock.testing.kinds.accounts.table import (
    BALANCES,
    TABLE_SCHEMA,
    AccountsReader,
    AccountsTable,
    BalanceQuery,
    in_table_schema,
)

BATCH_ACCOUNTS = 1_024
LOAD_SCHEMA = pa.schema([TABLE_SCHEMA.field("account"), TABLE_SCHEMA.field("amount")])
_queries = msgspec.msgpack.Decoder(BalanceQuery)


class AccountsKind(Kind, Loadable, Queryable):
    """The kind `accounts`."""

    name = "accounts"
    staged_suffix = ".accounts"

    # -- the core

    def encode(self, part: section.Bookings) -> bytes:
        return section.encode(part)

    def decode(self, payload: bytes) -> section.Bookings:
        return section.decode(payload)

    def weight(self, payload: bytes) -> int:
        return 2 * len(payload) + section.BOOKING_BYTES * section.booking_count(payload)

    def receive(self, payload: bytes, options: bytes) -> section.Bookings:
        return section.receive(payload)

    def check_options(self, options: bytes) -> None:
        if options:
            raise Invalid("accounts have no options")

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, context: MachineContext) -> AccountsMachine:
        tree = context.maintenance.open_tree(descriptor.table_id, descriptor.shard, descriptor.folder)
        return AccountsMachine(tree, context.maintenance, descriptor)

    def table(self, port: Port, info: TableInfo, *, durable: bool) -> AccountsTable:
        return AccountsTable(port, info, durable=durable)

    def reader(self, port: Reading, info: TableInfo) -> AccountsReader:
        return AccountsReader(port, info)

    def schema(self, options: bytes) -> Any:
        return TABLE_SCHEMA

    def to_table_schema(self, batch: Any, options: bytes, shard: int) -> Any:
        return in_table_schema(batch)

    def parse_key(self, text: str) -> bytes:
        return section.check(text, 0)[0]

    # -- loads: always as sections

    def load_schema(self, input_schema: Any, options: bytes) -> Any:
        names = [name for name in input_schema.names if name != "lsn"]
        if sorted(names) != LOAD_SCHEMA.names:
            raise Invalid(f"bookings have the columns account and amount, not {', '.join(names)}")
        if not pa.types.is_string(input_schema.field("account").type) or not pa.types.is_integer(
            input_schema.field("amount").type
        ):
            raise Invalid("an account is a string and an amount an integer: cast the columns first")
        return LOAD_SCHEMA

    def load(self, batches: Iterator[Any], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        shards = [section.Bookings() for _ in range(info.shards)]
        for batch in batches:
            columns = batch.column("account").to_pylist(), batch.column("amount").to_pylist()
            for account, amount in map(section.check, *columns):
                shards[shard_of(account, info.shards)].append((account, amount))
        return [
            PreparedRows(partition, section.encode(bookings), rows=len(bookings))
            for partition, bookings in zip(partitions_of(info), shards, strict=True)
            if bookings
        ]

    def check_staged(self, machine: AccountsMachine, files: Sequence[StagedFile]) -> None:
        raise Invalid("accounts take no files: load their rows")

    # -- queries

    def check_query(self, info: TableInfo, name: str, argument: bytes) -> None:
        if name != "balances":
            raise Invalid(f"accounts have no query {name!r}: use balances")
        try:
            _queries.decode(argument)
        except (msgspec.DecodeError, UnicodeDecodeError, CorruptionError) as error:
            raise Invalid(f"the argument of balances does not decode: {error}") from None

    def query(
        self,
        info: TableInfo,
        name: str,
        argument: bytes,
        shards: Sequence[AccountsSnapshot],
        context: QueryContext,
    ) -> Iterator[Any]:
        prefix = _queries.decode(argument).prefix.encode()
        rows = heapq.merge(*(_balances(shard, prefix, context) for shard in shards))
        while page := list(islice(rows, BATCH_ACCOUNTS)):
            yield pa.record_batch([list(column) for column in zip(*page, strict=True)], schema=BALANCES)


def _balances(shard: AccountsSnapshot, prefix: bytes, context: QueryContext) -> Iterator[tuple[str, int, int]]:
    """Yield account, bookings and balance of a shard's accounts, in order."""
    rows = shard.rows(prefix, prefix_end(prefix))
    for account, bookings in groupby(rows, lambda row: account_of(row[0])):
        context.check()
        amounts = [AMOUNT.unpack(value)[0] for _, value in bookings]
        yield account.decode(), len(amounts), sum(amounts)
