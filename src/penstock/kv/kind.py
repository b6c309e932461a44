"""The kind `kv`: an ordered map of bytes to values.

Thread: pure functions; the table it makes is for any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from penstock.arguments import in_short
from penstock.errors import ConditionFailed, Invalid, KindMismatch
from penstock.kinds import (
    BuildContext,
    ExpectedRow,
    FileReadable,
    Filters,
    Kind,
    Loadable,
    MachineContext,
    Piece,
    Port,
    PreparedRows,
    Queryable,
    QueryContext,
    Reading,
    Replaceable,
    RowConditional,
)
from penstock.kinds.changes import ChangeOptions, Changing, change_options, open_feed
from penstock.kv import queries, section
from penstock.kv.changes import change_schema, read_changes
from penstock.kv.conditions import CONDITIONS, ROW, check_argument, decode_argument
from penstock.kv.loading import Loader, bundle, inside, load_schema
from penstock.kv.machine import KvMachine
from penstock.kv.pieces import check_piece, read_piece
from penstock.kv.ranges import filtered_key_range, parse_key
from penstock.kv.structs import widens
from penstock.kv.table import KvReader, KvTable, kv_schema, with_types
from penstock.kv.text_keys import TextKvReader, TextKvTable
from penstock.kv.validation import check_options, receive, weight
from penstock.kv.values import (
    AnyValueType,
    KeyType,
    Options,
    arrow_type,
    changes_in,
    decode_options,
    encode_options,
    options_of,
)
from penstock.lsm.rows import DELETE
from penstock.partition.ledger_records import TableInfo
from penstock.partition.machine import PartitionDescriptor
from penstock.partition.reference import StagedFile

T = TypeVar("T", bound="KvReader[Any] | TextKvReader[Any]")


def _encoded(value: Any) -> Any:
    """Encode the key of a filter, or the keys of `in`."""
    return value.encode() if isinstance(value, str) else [key.encode() for key in value]


class KvKind(Kind, Loadable, Replaceable, FileReadable, RowConditional, Queryable, Changing):
    """The kind `kv`."""

    name = "kv"
    options_default = encode_options(Options())
    staged_suffix = ".sst"
    row_condition = ROW
    conditions = CONDITIONS

    def options(
        self, value: AnyValueType | None, key: KeyType | None = None, changes: bool | ChangeOptions = False
    ) -> bytes:
        """Return the options of a table with values and keys of these types; `Invalid` if there is no such type."""
        return encode_options(msgspec.structs.replace(options_of(value, key), changes=change_options(changes)))

    def of_types(self, table: T, value: AnyValueType | None, key: KeyType | None) -> T:
        """Return the table if its values and keys are of these types (None: any), or raise `KindMismatch`."""
        requested, options = options_of(value, key), table._options
        narrower = requested.value == options.value == "struct" and widens(arrow_type(requested), arrow_type(options))
        if (
            value is not None
            and not narrower
            and requested != msgspec.structs.replace(options, key=requested.key, changes=None)
        ):
            actual = table.value_type
            if not isinstance(actual, str):  # a struct may have hundreds of fields
                remedy = "leave value= out"
                if requested.value == options.value:
                    remedy += "; a struct can only get more fields, which may be null, at its end"
                actual_name, requested_name = in_short(str(actual)), in_short(str(value))
                raise KindMismatch(f"table {table.name} holds {actual_name}, not {requested_name}: {remedy}")
            other = value if isinstance(value, str) else in_short(value)
            raise KindMismatch(f"table {table.name} holds {actual}, not {other}: say value={actual!r}")
        if key is not None and requested.key != options.key:
            raise KindMismatch(f"the keys of table {table.name} are {options.key}, not {key}: say key={options.key!r}")
        return table

    def widened(self, port: Port, info: TableInfo, value: AnyValueType | None, key: KeyType | None) -> TableInfo:
        """Return a table of structs with the additional fields of `value`, if there are any: they are added durably."""
        options = decode_options(info.options)
        requested = Options() if value is None else options_of(value)
        if key is not None and key != options.key:
            return info  # `of_types` refuses it
        if requested.value != "struct" or options.value != "struct" or requested.fields == options.fields:
            return info
        if not widens(arrow_type(options), arrow_type(requested)):
            return info  # `of_types` says what is wrong
        return port.alter(info, encode_options(msgspec.structs.replace(options, fields=requested.fields)))

    def check_altered(self, info: TableInfo, options: bytes) -> None:
        before, after = decode_options(info.options), decode_options(options)
        if before.value != "struct" or msgspec.structs.replace(before, fields=after.fields) != after:
            super().check_altered(info, options)
        if not widens(arrow_type(before), arrow_type(after)):
            raise Invalid(f"the structs of table {info.name} can only get more fields, which may be null, at the end")

    encode = staticmethod(section.encode)  # not a method that calls it: this is every write

    def decode(self, payload: bytes) -> section.Section:
        return section.decode(payload)

    def weight(self, payload: bytes) -> int:
        return weight(payload)

    def receive(self, payload: bytes, options: bytes) -> section.Section:
        return receive(payload, options)

    def check_options(self, options: bytes) -> None:
        check_options(options)

    def frees_space(self, part: Any) -> bool:
        return isinstance(part, section.Ranges) or all(
            not isinstance(operation, bytes) and operation[0] == DELETE for operation in part.values()
        )

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, context: MachineContext) -> KvMachine:
        tree = context.maintenance.open_tree(descriptor.table_id, descriptor.shard, descriptor.folder)
        changes = changes_in(options)
        feed = None if changes is None else open_feed(context.maintenance, descriptor, tree, changes)
        return KvMachine(tree, context.maintenance, descriptor, options, feed)

    def table(self, port: Port, info: TableInfo, *, durable: bool) -> Any:
        of_text = decode_options(info.options).key == "utf8"
        return (TextKvTable if of_text else KvTable)(port, info, durable=durable)

    def reader(self, port: Reading, info: TableInfo) -> Any:
        return (TextKvReader if decode_options(info.options).key == "utf8" else KvReader)(port, info)

    def schema(self, options: bytes) -> Any:
        return kv_schema(decode_options(options))

    def to_table_schema(self, batch: Any, options: bytes, shard: int) -> Any:
        return with_types(batch, decode_options(options))

    def parse_key(self, text: str) -> bytes:
        return parse_key(text)

    def key_range(self, filters: Filters, info: TableInfo, shard: int, port: Port) -> tuple[bytes, bytes | None]:
        on_keys = [(operation, value) for column, operation, value in filters if column == "key"]
        if decode_options(info.options).key == "utf8":
            on_keys = [(operation, _encoded(value)) for operation, value in on_keys]
        return filtered_key_range(on_keys)

    def load_schema(self, input_schema: Any, options: bytes) -> Any:
        return load_schema(input_schema, decode_options(options))

    def load(self, batches: Iterator[Any], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        return Loader(info, decode_options(info.options), context).run(batches)

    def bundle(self, loads: Sequence[PreparedRows], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        return bundle(loads, info, context, None)

    def check_condition(self, info: TableInfo, condition: str, argument: bytes, *, own: bool) -> None:
        if condition != ROW:
            super().check_condition(info, condition, argument, own=own)
        check_argument(info, argument)

    def expected_row(self, argument: bytes) -> ExpectedRow:
        return decode_argument(argument)

    def condition_failed(self, info: TableInfo, row: ExpectedRow, lsn: int) -> ConditionFailed:
        of_text = decode_options(info.options).key == "utf8"
        return ConditionFailed(row.key.decode() if of_text else row.key, row.lsn, lsn)

    def check_query(self, info: TableInfo, name: str, argument: bytes) -> None:
        queries.check(name, argument)

    def query(
        self, info: TableInfo, name: str, argument: bytes, shards: Sequence[Any], context: QueryContext
    ) -> Iterator[Any]:
        return queries.answer(name, argument, shards, context)

    def check_staged(self, machine: KvMachine, files: Sequence[StagedFile]) -> None:
        machine.check_staged(files)

    def inside(self, batches: Iterator[Any], start: bytes, end: bytes | None) -> Iterator[Any]:
        return inside(batches, start, end)

    def bundle_in_place(
        self,
        loads: Sequence[PreparedRows],
        info: TableInfo,
        context: BuildContext,
        replaced: tuple[bytes, bytes | None],
    ) -> list[PreparedRows]:
        return bundle(loads, info, context, replaced)

    def change_options(self, options: bytes) -> ChangeOptions | None:
        return changes_in(options)

    def change_schema(self, options: bytes) -> Any:
        return change_schema(decode_options(options))

    def read_changes(self, data: bytes, options: bytes) -> tuple[Any, Any]:
        return read_changes(data, decode_options(options))

    def nothing(self) -> section.Rows:
        return section.Rows()

    def read_piece(
        self, piece: Piece, root: str, identity: bytes, columns: Collection[str] | None = None
    ) -> Iterator[Any] | None:
        return read_piece(piece, root, identity)

    def check_piece(self, piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]] | None:
        return check_piece(piece, root, identity)
