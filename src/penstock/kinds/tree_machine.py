"""The base of state machines whose shard is one LSM tree: a kind adds `apply` and how its rows are read.

If its table has a change feed, that is a second tree: `apply` calls `Feed.record` before it changes the first.

Thread: see `partition.machine`; reading from any.
Invariants: those of the tree: an edit is applied whole or not at all, and `stored <= applied`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from penstock.kinds.changes import Feed
from penstock.kinds.core import Machine
from penstock.lsm.maintenance import COMPANION, Maintenance
from penstock.lsm.tree import Tree
from penstock.lsm.writer import index_path
from penstock.manifest.operations import PutWalState, UpsertChunk
from penstock.manifest.records import ChunkEntryRecord, WalStateRecord
from penstock.partition.machine import PartitionContent, PartitionDescriptor

ALL_LATER = 1 << 62  # stands for the LSN of rows that are not applied yet


class TreeMachine(Machine):
    """The state machine of a shard that is one tree."""

    stores_cheaply = False
    broken = False  # an apply that fails changes nothing

    def __init__(
        self, tree: Tree, maintenance: Maintenance, descriptor: PartitionDescriptor, feed: Feed | None = None
    ) -> None:
        self.tree = tree
        self.feed = feed
        self._maintenance = maintenance
        self._descriptor = descriptor

    @property
    def applied(self) -> int:
        return self.tree.lsn

    @property
    def stored(self) -> int:
        return self.tree.stored

    def renew(self) -> None:
        """Do nothing: the tree is never broken."""

    def is_read(self) -> bool:
        return self.tree.statistics().snapshots > 0

    def memory_bytes(self) -> int:
        return self.tree.memory_bytes() + (0 if self.feed is None else self.feed.memory_bytes())

    def maintain_feed(self, now_us: int) -> bool:
        return self.feed is not None and self.feed.maintain(now_us, self.tree.time_us)

    def store_now(self) -> None:
        if self.feed is not None:
            self.feed.store_now()
        self._maintenance.flush(self.tree)

    @contextmanager
    def exported(self) -> Iterator[PartitionContent]:
        self.store_now()
        with ExitStack() as stack:
            # In this order: the feed must have all that the tree has, and may have more.
            trees = [(0, self.tree)] if self.feed is None else [(0, self.tree), (COMPANION, self.feed.tree)]
            parts = [(number, self._maintenance.exported(tree)) for number, tree in trees]
            for _, (snapshot, _) in parts:
                stack.callback(snapshot.close)
            chunks, progress, names = (
                list[tuple[int, ChunkEntryRecord]](),
                list[tuple[int, WalStateRecord]](),
                set[str](),
            )
            for number, (_, operations) in parts:
                for operation in operations:
                    if isinstance(operation, UpsertChunk):
                        chunks.append((operation.key.chunk_id, operation.value))
                        names |= {operation.value.file_name, index_path(operation.value.file_name)}
                    elif isinstance(operation, PutWalState):
                        progress.append((number, operation.value))
            lsn, prefix = progress[0][1].stored_lsn, f"{self._descriptor.folder}/"
            files = tuple((name.removeprefix(prefix), self._maintenance.file_size(name)) for name in sorted(names))
            yield PartitionContent(lsn, lsn, tuple(progress), tuple(chunks), files)

    def close(self) -> None:
        self.tree.close()
        if self.feed is not None:
            self.feed.tree.close()
            self._maintenance.close_tree(self._descriptor.table_id, COMPANION + self._descriptor.shard)
        self._maintenance.close_tree(self._descriptor.table_id, self._descriptor.shard)
