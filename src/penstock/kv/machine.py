"""The state machine of a kv shard: applies sections to an LSM tree.

Thread: see `partition.machine`; reading from any.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.host import threads
from penstock.journal.record import REFERENCE
from penstock.kinds import ALL_LATER, TreeMachine, Waiting
from penstock.kinds.changes import Feed
from penstock.kv import section
from penstock.kv.changes import record_changes, record_load, records_in_memory
from penstock.kv.pieces import KvState
from penstock.kv.validation import check_table
from penstock.kv.values import decode_options
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.memtable import Memtable
from penstock.lsm.rows import Row
from penstock.lsm.tree import Tree
from penstock.lsm.view import View, resolve
from penstock.partition.machine import Entry, PartitionDescriptor, readable
from penstock.partition.reference import StagedFile, decode_reference


class KvMachine(TreeMachine):
    """The state machine of a kv shard."""

    def __init__(
        self,
        tree: Tree,
        maintenance: Maintenance,
        descriptor: PartitionDescriptor,
        options: bytes,
        feed: Feed | None = None,
    ) -> None:
        super().__init__(tree, maintenance, descriptor, feed)
        self._table_options = options  # decoded on use: damaged options do not prevent opening the store
        self.get = tree.get  # type: ignore[method-assign]  # bound once: a get is little more than this call

    def in_memory(self, entry: Entry) -> bool:
        decoded, sections = entry.decoded, entry.sections
        if self.feed is not None:
            return records_in_memory(self.feed, self.tree, entry)
        if decoded and len(decoded) == 1 and type(decoded[0]) is section.Rows and not decoded[0].operands:
            return True  # nearly always
        if sections and sections[0].header.form == REFERENCE:
            return False
        return not decoded or not self.tree.folds_files or not any(map(section.has_operands, decoded))

    def apply(self, entry: Entry) -> None:
        if entry.sections and entry.sections[0].header.form == REFERENCE:
            files = [file for part in entry.sections for file in readable(decode_reference, part.payload).files]
            threads.run_uninterrupted(lambda: self._adopt([file.chunk_id for file in files], entry))
            return
        sections = entry.decoded or [readable(section.decode, part.payload) for part in entry.sections]
        if self.feed is not None and self.feed.lacks(entry.lsn):
            record_changes(self.feed, self.tree, entry, sections)
        only = sections[0] if len(sections) == 1 else None
        if type(only) is section.Rows and len(only) == 1 and only.plain:  # most often
            for key, value in only.items():
                self.tree.put(key, value, entry.lsn, entry.time_us)  # type: ignore[arg-type]  # plain: bytes
            return
        self.tree.apply(section.to_edit(sections, entry.lsn, entry.time_us))

    def _adopt(self, chunk_ids: Sequence[int], entry: Entry) -> None:
        if self.feed is not None and self.feed.lacks(entry.lsn):
            record_load(self.feed, self._maintenance, self.tree, entry, chunk_ids)
        self._maintenance.adopt(self.tree, chunk_ids, entry.lsn, entry.time_us)

    def snapshot(self) -> KvState:
        rows = self.tree.snapshot()
        return KvState(self._descriptor.partition, rows, None if self.feed is None else self.feed.snapshot(rows.lsn))

    def present(self) -> KvState:
        return KvState(self._descriptor.partition, self.tree.present())

    def row(self, key: bytes) -> tuple[bytes, int] | None:
        return self.tree.row(key)

    def touches(self, part: section.Section, key: bytes) -> bool:
        return section.find(part, key) is not None

    def touches_any(self, part: section.Section, keys: Collection[bytes]) -> bool:
        if isinstance(part, section.Ranges):
            return any(start <= key < end for start, end in part for key in keys)
        return not part.keys().isdisjoint(keys)

    def fold(self, key: bytes, waiting: Waiting, time_us: int) -> bytes | None:
        applied = self.tree.lsn  # before the row: it includes groups up to here, and up to its own LSN
        stored = self.tree.get_row(key)
        applied = applied if stored is None else max(applied, stored[2])
        rows: list[Row] = []
        for group, part in waiting:
            operation = section.find(part, key)
            lsn = group.lsn  # after the row: it is set before the group is applied
            if operation is None or (lsn is not None and lsn <= applied):
                continue
            kind, value, expires = operation
            rows.append((kind, value, ALL_LATER, expires))
        if stored is not None:
            rows.append(stored)
        live = resolve(rows, 0, time_us)
        return None if live is None else live[1]

    def overlay(self, state: KvState, sections: Sequence[section.Section], time_us: int) -> View:
        rows = Memtable()
        rows.apply(section.to_edit(sections, ALL_LATER, time_us))
        return state.snapshot.under(rows)

    def check_staged(self, files: Sequence[StagedFile]) -> None:
        options = decode_options(self._table_options)
        ids = [file.chunk_id for file in files]
        self._maintenance.check_adoptable(self.tree, ids, check=lambda table: check_table(table, options))
