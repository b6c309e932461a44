"""A shard of a kv table: a tree, fed by sections.

Thread: see `partition.machine`.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from penstock.journal.record import REFERENCE
from penstock.kv import section
from penstock.kv.values import Options, arrow_type, decode_options
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.tree import Snapshot, Tree
from penstock.partition.machine import Entry, PartitionDescriptor
from penstock.partition.reference import decode_reference


class KvMachine:
    """The state machine of a shard."""

    def __init__(self, tree: Tree, maintenance: Maintenance, descriptor: PartitionDescriptor) -> None:
        self.tree = tree
        self._maintenance = maintenance
        self._descriptor = descriptor

    @property
    def applied(self) -> int:
        return self.tree.lsn

    @property
    def stored(self) -> int:
        return self.tree.stored

    def apply(self, entry: Entry) -> None:
        if entry.sections[0].header.form == REFERENCE:
            files = [file for part in entry.sections for file in decode_reference(part.payload).files]
            ids = [file.chunk_id for file in files]
            self._maintenance.adopt(self.tree, ids, entry.lsn, entry.time_us)
            return
        sections = entry.decoded or [section.decode(part.payload) for part in entry.sections]
        self.tree.apply(section.to_edit(sections, entry.lsn, entry.time_us))

    def snapshot(self) -> Snapshot:
        return self.tree.snapshot()

    def memory_bytes(self) -> int:
        return self.tree.memory_bytes()

    def store_now(self) -> None:
        self._maintenance.flush(self.tree)

    def close(self) -> None:
        self._maintenance.close_tree(self._descriptor.table, self._descriptor.shard)


class KvKind:
    """The kind `kv`."""

    name = "kv"

    def encode(self, part: Any) -> bytes:
        return section.encode(part)

    def decode(self, payload: bytes) -> section.Section:
        return section.decode(payload)

    def open_machine(self, descriptor: PartitionDescriptor, options: bytes, maintenance: Maintenance) -> KvMachine:
        tree = maintenance.open_tree(descriptor.table, descriptor.shard, folder_of(descriptor))
        return KvMachine(tree, maintenance, descriptor)

    def collect(self, descriptor: PartitionDescriptor, maintenance: Maintenance) -> None:
        maintenance.drop_tree(descriptor.table, descriptor.shard, folder_of(descriptor))

    def schema(self, options: bytes) -> Any:
        return kv_schema(decode_options(options))


def folder_of(descriptor: PartitionDescriptor) -> str:
    """Where a shard keeps its files, relative to the store."""
    return f"tables/{descriptor.table}/{descriptor.shard}"


def kv_schema(options: Options) -> Any:
    """(key, value, lsn), with the type the table declares for its values."""
    return pa.schema(
        [
            pa.field("key", pa.binary(), nullable=False),
            pa.field("value", arrow_type(options), nullable=False),
            pa.field("lsn", pa.uint64(), nullable=False),
        ]
    )
