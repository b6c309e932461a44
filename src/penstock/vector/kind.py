"""The kind `vector`: float32 vectors with attributes, by external id, and the search for the nearest.

The key of a row, for readers that share a scan, is its internal id: eight bytes.

Thread: pure functions; the table it makes is for any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa

from penstock.arguments import in_short
from penstock.errors import CorruptionError, Invalid, KindMismatch
from penstock.kinds import (
    BuildContext,
    Derived,
    FileReadable,
    Host,
    Kind,
    Loadable,
    MachineContext,
    Piece,
    Port,
    PreparedRows,
    Queryable,
    QueryContext,
    Reading,
    Serviced,
    partitions_of,
)
from penstock.kinds.changes import ChangeOptions, Changing
from penstock.manifest.records import JobKind
from penstock.partition.ledger_records import TableInfo
from penstock.partition.machine import PartitionDescriptor
from penstock.partition.pending import PendingGroup
from penstock.partition.reference import StagedFile
from penstock.vector.changes import change_schema, read_changes
from penstock.vector.indexing import IndexPlan, is_due, plan_index
from penstock.vector.keys import scan_key
from penstock.vector.machine import VectorMachine, open_vector_machine
from penstock.vector.options import VectorOptions, decode_vector_options, encode_vector_options, vector_options
from penstock.vector.pieces import check_piece, read_piece
from penstock.vector.reader import VectorReader
from penstock.vector.reading import VectorState
from penstock.vector.rows import arrow_rows, check_columns, schema_of
from penstock.vector.searching import check_vector_query, run_vector_query
from penstock.vector.section import (
    Deletes,
    IndexChange,
    VectorSection,
    decode_section,
    encode_section,
    receive_section,
    section_weight,
)
from penstock.vector.service import SEARCH, VectorService, check_search_call
from penstock.vector.table import VectorTable, split_rows


class VectorKind(Kind, Derived, FileReadable, Loadable, Queryable, Serviced, Changing):
    """The kind `vector`."""

    name = "vector"
    options_default = encode_vector_options(VectorOptions())
    staged_suffix = ".vectors"
    derived_by = JobKind.TRAIN
    read_only_calls = frozenset({SEARCH})
    repeatable_calls = frozenset({SEARCH})

    def options(self, dimensions: int | None, metric: str | None, changes: bool | ChangeOptions = False) -> bytes:
        """Return the encoded options of a new table; `Invalid` if they are not options."""
        return encode_vector_options(vector_options(dimensions, metric, changes))

    def change_options(self, options: bytes) -> ChangeOptions | None:
        return decode_vector_options(options).changes

    def change_schema(self, options: bytes) -> Any:
        return change_schema(decode_vector_options(options))

    def read_changes(self, data: bytes, options: bytes) -> tuple[Any, Any]:
        return read_changes(data, decode_vector_options(options))

    def nothing(self) -> VectorSection:
        return VectorSection()

    def check_made(self, info: TableInfo, dimensions: int | None, metric: str | None) -> None:
        """Raise `KindMismatch` if an existing table has other options than those requested."""
        options = decode_vector_options(info.options)
        requested = vector_options(
            options.dimensions if dimensions is None else dimensions, options.metric if metric is None else metric
        )
        if (requested.dimensions, requested.metric) != (options.dimensions, options.metric):
            raise KindMismatch(
                f"vector table {info.name} has {options.dimensions} dimensions and the metric {options.metric}: leave "
                "dimensions= and metric= out"
            )

    # -- sections

    def encode(self, section: VectorSection) -> bytes:
        return encode_section(section)

    def decode(self, payload: bytes) -> VectorSection:
        return decode_section(payload)

    def weight(self, payload: bytes) -> int:
        return section_weight(payload)

    def receive(self, payload: bytes, options: bytes) -> VectorSection:
        return receive_section(payload, decode_vector_options(options))

    def frees_space(self, section: VectorSection) -> bool:
        return all(isinstance(part, Deletes) for part in section.log)

    # -- tables

    def check_options(self, options: bytes) -> None:
        try:
            decode_vector_options(options)
        except CorruptionError as error:
            raise Invalid(f"options of a vector table are malformed: {error.reason}") from None

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, context: MachineContext) -> VectorMachine:
        return open_vector_machine(context.maintenance, descriptor, options, context.memory_bytes_max)

    def table(self, port: Port, info: TableInfo, *, durable: bool) -> VectorTable:
        return VectorTable(port, info, durable=durable)

    def reader(self, port: Reading, info: TableInfo) -> VectorReader:
        return VectorReader(port, info)

    def schema(self, options: bytes) -> Any:
        return schema_of(decode_vector_options(options))

    def to_table_schema(self, batch: Any, options: bytes, shard: int) -> Any:
        return batch

    def parse_key(self, text: str) -> bytes:
        if not text.isascii() or not text.isdigit() or len(text) > 19:
            raise Invalid(f"{in_short(text)} is not a position in a vector table: give a number, or no start and end")
        return scan_key(int(text))

    # -- loads: always as sections

    def load_schema(self, input_schema: Any, options: bytes) -> Any:
        check_columns(input_schema)
        dimensions, vectors = decode_vector_options(options).dimensions, input_schema.field("vector").type
        if pa.types.is_fixed_size_list(vectors) and vectors.list_size != dimensions:
            raise Invalid(f"the vectors of this table have {dimensions} dimensions, not {vectors.list_size}")
        types = {"id": pa.string(), "vector": pa.list_(vectors.value_type)}
        return pa.schema([field.with_type(types.get(field.name, field.type)) for field in input_schema])

    def load(self, batches: Iterator[Any], info: TableInfo, context: BuildContext) -> list[PreparedRows]:
        options = decode_vector_options(info.options)
        sections = [VectorSection() for _ in range(info.shards)]
        counts = [0] * info.shards
        for batch in batches:
            rows = arrow_rows(batch, options)
            for shard, part in split_rows(rows, info.shards) if rows is not None else ():
                sections[shard].log.append(part)
                counts[shard] += len(part)
        return [
            PreparedRows(partition, encode_section(section), rows=count)
            for partition, section, count in zip(partitions_of(info), sections, counts, strict=True)
            if section.log
        ]

    def check_staged(self, machine: VectorMachine, files: Sequence[StagedFile]) -> None:
        raise Invalid("a vector table takes no files: load its rows")

    # -- files

    def read_piece(
        self, piece: Piece, root: str, identity: bytes, columns: Collection[str] | None = None
    ) -> Iterator[Any] | None:
        return read_piece(piece, root, identity)

    def check_piece(self, piece: Piece, root: str, identity: bytes) -> list[tuple[str, str]] | None:
        return check_piece(piece, root, identity)

    # -- queries

    def check_query(self, info: TableInfo, name: str, argument: bytes) -> None:
        check_vector_query(name, argument, decode_vector_options(info.options))

    def query(
        self, info: TableInfo, name: str, argument: bytes, shards: Sequence[VectorState], context: QueryContext
    ) -> Iterator[Any]:
        return run_vector_query(name, argument, decode_vector_options(info.options), shards, context)

    # -- the index

    def is_derived(self, info: TableInfo) -> bool:
        return True

    def is_due(self, info: TableInfo, host: Host) -> bool:
        machines = [host.opened(partition) for partition in partitions_of(info)]
        return any(machine is not None and is_due(machine) for machine in machines)

    def reset(self, port: Port, info: TableInfo) -> None:
        """Drop the index of a table: it is repaired by building a new one from the vectors."""
        group = PendingGroup()
        for partition in partitions_of(info):
            group.sections[partition] = VectorSection(IndexChange(generation=0, use=True))
        port.commit_and_wait(group, 1_024 * info.shards)

    def derive(self, info: TableInfo, host: Host) -> IndexPlan | None:
        return plan_index(info, host)

    # -- calls

    def service(self, info: TableInfo, host: Host) -> VectorService:
        return VectorService(info, host)

    def check_call(self, info: TableInfo, name: str, argument: bytes) -> Sequence[str]:
        check_search_call(name, argument, decode_vector_options(info.options))
        if info.shards != 1:
            raise Invalid(f"table {info.name} has {info.shards} shards: search it by a query")
        return ()

    def waits(self, name: str, argument: bytes) -> bool:
        return False
