"""Keeps the memtables within their share of memory, and stops writers before they exceed it.

Applied bytes are counted; every few megabytes the sizes of the memtables are added up. When the growing ones hold too
much, the largest is frozen and flushed early. When all of them together hold too much, the coordinator makes new writes
wait until a flush or a compaction ends. When one tree is slow, only its own writers are slowed, then wait. Writes
accepted before are applied: an apply never waits for memory.

Thread: `applied` by the thread that applies; `rebalance` by any. `_lock` keeps two checks consistent.
Invariant: while writes are held, a flush or a compaction is queued or running, and its end checks again.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.host import threads
from penstock.lsm.catalog import Catalog
from penstock.lsm.maintenance import COMPANION, Maintenance
from penstock.lsm.tree import Tree
from penstock.lsm.tree_settings import Stall
from penstock.partition.ledger_records import LEDGER_TABLE
from penstock.store.flusher import Coordinator

GROWING_PART = 8  # growing memtables may hold 1/8 of the memory
CHECK_BYTES = 4 << 20  # applied between two checks


class MemoryGovernor:
    """Limits the memory of one store's memtables."""

    def __init__(
        self,
        maintenance: Maintenance,
        coordinator: Coordinator,
        *,
        memory_bytes_max: int,
        rows_bytes_max: int,
        flush_soon: Callable[[Tree], None],
        press: Callable[[int, int, Tree | None], None],
    ) -> None:
        """`press(table, shard, tree)` slows the writers of a shard whose tree is slow; None: it is no longer slow."""
        self._maintenance = maintenance
        self._coordinator = coordinator
        self._growing_bytes_max = memory_bytes_max // GROWING_PART
        self._rows_bytes_max = rows_bytes_max
        self._flush_soon = flush_soon
        self._press = press
        self._pressed: set[tuple[int, int]] = set()  # guarded by _lock: shards with slow trees
        self._lock = threads.lock("store.governor")
        self._is_holding = False  # guarded by _lock
        self._unseen_bytes = 0  # applied since the last check; by the thread that applies

    def applied(self, size: int) -> bool:
        """Count `size` applied bytes; return whether the limits were checked."""
        self._unseen_bytes += size
        if self._unseen_bytes < CHECK_BYTES:
            return False
        self._unseen_bytes = 0
        self.rebalance()
        return True

    def rebalance(self) -> None:
        """Check the limits: flush early, hold writes back, or release them."""
        tree_catalogs = self._maintenance.trees()
        trees = [tree for tree, _ in tree_catalogs]
        growing = {tree: tree.growing_bytes() for tree in trees}
        if sum(growing.values()) > self._growing_bytes_max:
            largest = max(trees, key=lambda tree: growing[tree])
            largest.freeze()
            self._flush_soon(largest)
        with self._lock:
            self._press_slow(tree_catalogs)
            reason = self._reason(tree_catalogs)
            if reason is not None or self._is_holding:
                self._is_holding = reason is not None
                self._coordinator.hold(reason)
        if reason is not None and trees:
            self._flush_soon(max(trees, key=lambda tree: tree.memory_bytes() - tree.growing_bytes()))

    def _press_slow(self, tree_catalogs: list[tuple[Tree, Catalog]]) -> None:
        """Slow the writers of slow trees, and no others. Requires: _lock."""
        slow: dict[tuple[int, int], Tree] = {}
        for level in (Stall.SLOW, Stall.STOP):  # of the two trees of a shard the one that stops counts
            for tree, catalog in tree_catalogs:
                if tree.stall()[0] is level:
                    slow[catalog.db_id, catalog.shard % COMPANION] = tree
        for table, shard in self._pressed | slow.keys():
            self._press(table, shard, slow.get((table, shard)))
        self._pressed = set(slow)

    def _reason(self, tree_catalogs: list[tuple[Tree, Catalog]]) -> str | None:
        """Return why all writes must wait; None if they need not."""
        rows_bytes = sum(tree.memory_bytes() for tree, _ in tree_catalogs)
        if rows_bytes > self._rows_bytes_max:
            return f"{rows_bytes:,} bytes of rows are in no file yet (limit {self._rows_bytes_max:,})"
        for tree, catalog in tree_catalogs:
            level, why = tree.stall()
            if level is Stall.STOP:
                tree.wake_maintenance()
                if catalog.db_id == LEDGER_TABLE:  # every record writes to it
                    return why
        return None
