"""What the ledger stores, and what writers request: tables, conditions of groups, operations on tables, verdicts.

Thread: immutable values and pure functions.
Invariant: what was encoded once decodes in every later version: fields are added at the end, with a default.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import IntEnum

import msgspec

from penstock.archive.storage import WrappedKey
from penstock.errors import CorruptionError, NotFound
from penstock.journal.partitions import partition_id
from penstock.journal.record import decode
from penstock.partition.storage_options import StorageOptions, decode_storage

LEDGER_TABLE = 1
LEDGER = partition_id(LEDGER_TABLE, 0)
FIRST_TABLE = 2
CONDITION_BYTES_MAX = 4 << 20  # of one group, as a client sends it

_U64 = struct.Struct(">Q")


class Verdict(IntEnum):
    """The outcome of a group."""

    ACCEPTED = 0
    DUPLICATE = 1
    TOKEN_TOO_OLD = 2
    REFUSED = 3  # by a condition of a table's kind


class TableStatus(IntEnum):
    """Whether a table takes writes. A dropped one is in `Ledger.tombstones`."""

    ACTIVE = 0
    DRAINING = 1


class TableInfo(msgspec.Struct, frozen=True, array_like=True):
    """A table as the ledger knows it."""

    table_id: int
    name: str
    kind: str
    shards: int
    options: bytes
    created_lsn: int
    storage: bytes = b""  # see `storage_options`
    created_us: int = 0  # the time of the record; 0: unknown, by an earlier version
    status: TableStatus = TableStatus.ACTIVE
    key: WrappedKey | None = None  # the table's key, if it is encrypted

    @property
    def storage_options(self) -> StorageOptions:
        options = decode_storage(self.storage)
        if self.key is None or options.encryption is None or options.encryption.key_version == self.key.version:
            return options
        encryption = msgspec.structs.replace(options.encryption, key_version=self.key.version)  # after a rotation
        return msgspec.structs.replace(options, encryption=encryption)

    @property
    def table(self) -> int:
        """The earlier name of `table_id`, which scripts use."""
        return self.table_id


class Tombstone(msgspec.Struct, frozen=True, array_like=True):
    """A dropped table. The manifest's row of the table follows it, and its files are collected."""

    info: TableInfo
    dropped_us: int  # the time of the record


class Condition(msgspec.Struct, frozen=True, array_like=True):
    """The condition of a group. `others` are conditions that kinds registered: (name, argument)."""

    token: tuple[str, int] | None = None
    others: tuple[tuple[str, bytes], ...] = ()


class Create(msgspec.Struct, frozen=True, array_like=True, tag="create"):
    """Create a table unless one of that name exists."""

    name: str
    kind: str
    shards: int
    options: bytes
    storage: bytes = b""
    key: WrappedKey | None = None


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """Drop a table."""

    name: str


class Alter(msgspec.Struct, frozen=True, array_like=True, tag="alter"):
    """Replace the options of a table, if they are still `before`: the kind checked the new ones against those."""

    table_id: int
    before: bytes
    options: bytes


class Configure(msgspec.Struct, frozen=True, array_like=True, tag="configure"):
    """Replace the storage options of a table, if they are still `before`."""

    table_id: int
    before: bytes
    storage: bytes


class Rewrap(msgspec.Struct, frozen=True, array_like=True, tag="rewrap"):
    """Replace the wrapped key of a table, if the master key of this version wraps it still. The key stays the same."""

    table_id: int
    before: int
    key: WrappedKey


class SetStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """Let a table drain, or take writes again."""

    table_id: int
    status: TableStatus


class ForgetVerdicts(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Delete the verdicts of records below an LSN: they are no longer needed."""

    before: int


LedgerOp = Create | Drop | Alter | Configure | Rewrap | SetStatus | ForgetVerdicts

_encode = msgspec.msgpack.Encoder().encode
_operations = msgspec.msgpack.Decoder(list[LedgerOp])
_condition = msgspec.msgpack.Decoder(Condition)

# A kind's condition: (argument, read the ledger, write a row of the ledger) -> the verdict.
KindCondition = Callable[[bytes, Callable[[bytes], bytes | None], Callable[[bytes, bytes | None], None]], Verdict]


def encode_ops(*operations: LedgerOp) -> bytes:
    """Encode operations as a section for the ledger."""
    return _encode(list(operations))


def decode_ops(payload: bytes) -> list[LedgerOp]:
    """Decode a section for the ledger. Raises msgspec's errors: the ledger sets such a section aside."""
    return _operations.decode(payload)


def rewrapped_keys(body: bytes) -> Iterator[tuple[int, WrappedKey]]:
    """Iterate over the keys of tables that a record of the journal wraps anew, by table."""
    for section in (section for group in decode(body).groups for section in group.sections):
        if section.header.partition == LEDGER:
            with suppress(msgspec.DecodeError):  # the ledger sets it aside
                for operation in decode_ops(section.payload):
                    if isinstance(operation, Rewrap):
                        yield operation.table_id, operation.key


def encode_condition(condition: Condition) -> bytes:
    """Encode a group's condition."""
    return _encode(condition)


def decode_condition(data: bytes) -> Condition:
    """Decode a condition; empty bytes are the empty condition."""
    try:
        return _condition.decode(data) if data else Condition()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptionError("condition", 0, f"it does not decode ({error})") from None


def condition_table(argument: bytes) -> int:
    """Return the table that a condition belongs to: every argument begins with its id."""
    return int.from_bytes(argument[:8], "big")


def kind_rows(table: int) -> bytes:
    """Return the key prefix of the ledger rows of a table's kind."""
    return b"k" + _U64.pack(table)


def dropped_table(table: int, name: str | None) -> NotFound:
    """Return the error of a call on a dropped table; `name` is None if it is unknown or must not be disclosed."""
    return NotFound(f"table {name or f'number {table}'} was dropped: get it from the store again, or use another")
