"""The kind `kv`: ordered bytes to bytes.

Thread: pure functions; the table it makes is for any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import pyarrow as pa

from penstock.errors import Invalid, KindMismatch, PenstockError
from penstock.kinds import Filters, Host, Piece, Port, PreparedRows, Reading, Site, Workplace
from penstock.kv import section
from penstock.kv.loading import Loader, bundle, load_schema
from penstock.kv.machine import KvMachine
from penstock.kv.pieces import check_piece, read_piece
from penstock.kv.ranges import key_of, narrowed_keys
from penstock.kv.received import check_options, receive, weight
from penstock.kv.table import KvReader, KvTable, kv_schema
from penstock.kv.values import arrow_values, decode_options
from penstock.lsm.rows import DELETE
from penstock.partition.ledger import KindCondition, TableInfo
from penstock.partition.machine import PartitionDescriptor


class KvService:
    """A kv table has nothing to be asked beyond reading and writing."""

    def call(self, name: str, argument: bytes) -> NoReturn:
        raise Invalid(f"a kv table does not know {name!r}")

    def admit(self, name: str, argument: bytes) -> None: ...

    def tend(self) -> None: ...

    def engaged(self) -> bool:
        return False

    def close(self) -> None: ...


class KvKind:
    """The kind `kv`."""

    name = "kv"
    staged_suffix = ".sst"
    conditions: Mapping[str, KindCondition] = {}
    asking = repeatable = frozenset[str]()

    def encode(self, part: Any) -> bytes:
        return section.encode(part)

    def decode(self, payload: bytes) -> section.Section:
        return section.decode(payload)

    def weight(self, payload: bytes) -> int:
        return weight(payload)

    def receive(self, payload: bytes, options: bytes) -> section.Section:
        return receive(payload, options)

    def check_condition(self, info: TableInfo, condition: str, argument: bytes, *, own: bool) -> None:
        raise self.refusal(condition, argument)

    def check_call(self, info: TableInfo, name: str, argument: bytes) -> Sequence[str]:
        return ()  # its service refuses them all

    def waits(self, name: str, argument: bytes) -> bool:
        return False

    def check_options(self, options: bytes) -> None:
        check_options(options)

    def gives_room(self, part: Any) -> bool:
        return isinstance(part, section.Ranges) or all(
            not isinstance(operation, bytes) and operation[0] == DELETE for operation in part.values()
        )

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, site: Site) -> KvMachine:
        tree = site.maintenance.open_tree(descriptor.table, descriptor.shard, descriptor.folder)
        return KvMachine(tree, site.maintenance, descriptor, options)

    def service(self, info: TableInfo, host: Host) -> KvService:
        return KvService()

    def refusal(self, condition: str, argument: bytes) -> PenstockError:
        return Invalid(f"a kv table has no condition {condition!r}")

    def move(self, info: TableInfo, consumer: str, ranges: Sequence[tuple[int, int, int]]) -> tuple[str, bytes]:
        raise KindMismatch(f"table {info.name} is a kv table and has no consumers: only a queue has")

    def table(self, port: Port, info: TableInfo, *, durable: bool) -> KvTable[Any]:
        return KvTable(port, info, durable=durable)

    def reader(self, port: Reading, info: TableInfo) -> KvReader[Any]:
        return KvReader(port, info)

    def schema(self, options: bytes) -> Any:
        return kv_schema(decode_options(options))

    def shown(self, batch: Any, options: bytes, shard: int) -> Any:
        kept = decode_options(options)
        columns = [batch.column("key"), arrow_values(batch.column("value"), kept), batch.column("lsn")]
        return pa.record_batch(columns, schema=kv_schema(kept))

    def key_of(self, text: str) -> bytes:
        return key_of(text)

    def narrowed(self, filters: Filters, info: TableInfo, shard: int, port: Port) -> tuple[bytes, bytes | None]:
        return narrowed_keys([(operation, value) for column, operation, value in filters if column == "key"])

    def load_schema(self, given: Any, options: bytes) -> Any:
        return load_schema(given, decode_options(options))

    def load(self, batches: Iterator[Any], info: TableInfo, place: Workplace) -> list[PreparedRows]:
        return Loader(info, decode_options(info.options), place).run(batches)

    def bundle(
        self,
        loads: Sequence[PreparedRows],
        info: TableInfo,
        place: Workplace,
        replace: tuple[bytes, bytes | None] | None,
    ) -> list[PreparedRows]:
        return bundle(loads, info, place, replace)

    def read_piece(self, piece: Piece, root: str, identity: bytes) -> Iterator[Any] | None:
        return read_piece(piece, root, identity)

    def check_piece(self, piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]] | None:
        return check_piece(piece, root, identity)
