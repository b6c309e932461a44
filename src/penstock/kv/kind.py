"""The kind `kv`: an ordered map of bytes to values.

Thread: pure functions; the table it makes is for any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.kinds import (
    BuildContext,
    FileReadable,
    Filters,
    Kind,
    Loadable,
    MachineContext,
    Piece,
    Port,
    PreparedRows,
    Reading,
    Replaceable,
)
from penstock.kv import section
from penstock.kv.loading import Loader, bundle, inside, load_schema
from penstock.kv.machine import KvMachine
from penstock.kv.pieces import check_piece, read_piece
from penstock.kv.ranges import filtered_key_range, parse_key
from penstock.kv.table import KvReader, KvTable, kv_schema
from penstock.kv.validation import check_options, receive, weight
from penstock.kv.values import Options, ValueType, arrow_values, check_value_type, decode_options, encode_options
from penstock.lsm.rows import DELETE
from penstock.partition.ledger import TableInfo
from penstock.partition.machine import PartitionDescriptor
from penstock.partition.reference import StagedFile


class KvKind(Kind, Loadable, Replaceable, FileReadable):
    """The kind `kv`."""

    name = "kv"
    options_default = encode_options(Options())
    staged_suffix = ".sst"

    def options(self, value: ValueType | None) -> bytes:
        """Return the options of a table with values of this type; `Invalid` if there is no such type."""
        return self.options_default if value is None else encode_options(Options(check_value_type(value)))

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
        return KvMachine(tree, context.maintenance, descriptor, options)

    def table(self, port: Port, info: TableInfo, *, durable: bool) -> KvTable[Any]:
        return KvTable(port, info, durable=durable)

    def reader(self, port: Reading, info: TableInfo) -> KvReader[Any]:
        return KvReader(port, info)

    def schema(self, options: bytes) -> Any:
        return kv_schema(decode_options(options))

    def to_table_schema(self, batch: Any, options: bytes, shard: int) -> Any:
        table_options = decode_options(options)
        columns = [batch.column("key"), arrow_values(batch.column("value"), table_options), batch.column("lsn")]
        return pa.record_batch(columns, schema=kv_schema(table_options))

    def parse_key(self, text: str) -> bytes:
        return parse_key(text)

    def key_range(self, filters: Filters, info: TableInfo, shard: int, port: Port) -> tuple[bytes, bytes | None]:
        return filtered_key_range([(operation, value) for column, operation, value in filters if column == "key"])

    def load_schema(self, input_schema: Any, options: bytes) -> Any:
        return load_schema(input_schema, decode_options(options))

    def load(self, batches: Iterator[Any], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        return Loader(info, decode_options(info.options), context).run(batches)

    def bundle(self, loads: Sequence[PreparedRows], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        return bundle(loads, info, context, None)

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

    def read_piece(self, piece: Piece, root: str, identity: bytes) -> Iterator[Any] | None:
        return read_piece(piece, root, identity)

    def check_piece(self, piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]] | None:
        return check_piece(piece, root, identity)
