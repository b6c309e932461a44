"""Shards of tables that were dropped, until their files are gone.

A snapshot outlives the drop of its tables, so that files go when nobody reads them. A folder is renamed before it is
emptied: a replay of the journal up to the drop must find it whole, or not at all.

Thread: `add` from the dispatcher's; everything else from one at a time (opening, the scheduler's task, closing).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from penstock.host.files import FileSystem, remove_folder, reveal
from penstock.journal.record import partition_id
from penstock.lsm.maintenance import Maintenance
from penstock.partition.ledger import LEDGER_TABLE
from penstock.partition.machine import PartitionDescriptor, PartitionStateMachine

logger = logging.getLogger(__name__)

GONE = "-gone"  # behind the name of a folder that is being removed
SPILL = "-log"  # behind the name of a shard's folder: what the journal spilled for it


class DroppedShards:
    """What is still to be removed."""

    def __init__(self, fs: FileSystem, root: str, maintenance: Maintenance) -> None:
        self._fs = fs
        self._root = root
        self._maintenance = maintenance
        self._shards: deque[tuple[PartitionDescriptor, PartitionStateMachine | None]] = deque()

    def add(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine | None) -> None:
        """Take over a shard that was dropped."""
        self._shards.append((descriptor, machine))

    def find(self, exists: Callable[[int], bool]) -> None:
        """Find what an earlier process did not get to: folders of tables that do not exist."""
        for name in self._fs.listdir(f"{self._root}/tables"):
            if name.isdigit() and int(name) != LEDGER_TABLE and not exists(int(name)):
                folders = self._fs.listdir(f"{self._root}/tables/{name}")
                shards = {int(folder.removesuffix(GONE).removesuffix(SPILL)) for folder in folders}
                for shard in sorted(shards or {0}):
                    number = partition_id(int(name), shard)
                    self.add(PartitionDescriptor(number, int(name), shard, "", ""), None)

    def remove(self) -> None:
        """Remove the files of all that nobody reads."""
        for _ in range(len(self._shards)):
            descriptor, machine = self._shards[0]
            if machine is not None and machine.is_read():
                self._shards.rotate(-1)
                continue
            try:
                self._remove(descriptor, machine)
            except OSError as error:
                logger.warning("files of a dropped table could not be removed (%s): it is tried again later", error)
                self._shards.rotate(-1)
                continue
            self._shards.popleft()

    def _remove(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine | None) -> None:
        if machine is not None:
            machine.close()
        self._maintenance.drop_tree(descriptor.table, descriptor.shard, descriptor.folder)
        for folder in (descriptor.folder, descriptor.folder + SPILL):
            self._remove_folder(f"{self._root}/{folder}")
        table = f"{self._root}/tables/{descriptor.table}"
        if self._fs.exists(table) and not self._fs.listdir(table):
            self._fs.rmdir(table)

    def _remove_folder(self, folder: str) -> None:
        gone = folder + GONE
        if self._fs.exists(folder):
            remove_folder(self._fs, gone)  # of an earlier attempt
            reveal(self._fs, folder, gone)
        remove_folder(self._fs, gone)

    def close(self) -> None:
        """Let go of what is open."""
        for _, machine in self._shards:
            if machine is not None:
                machine.close()
