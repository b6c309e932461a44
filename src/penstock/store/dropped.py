"""Removes the files of dropped shards.

A snapshot outlives the drop of its tables, so files are removed only when no reader needs them. A folder is renamed
before it is emptied: a replay of the journal up to the drop must find it whole, or not at all.

Thread: `add` from the dispatcher's; everything else from one at a time (opening, the scheduler's task, closing).
Invariant: only files named as kinds name them are removed. Foreign files stay, with the folders above them, and are
reported.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from itertools import chain

from penstock.errors import GateShut, PenstockError, WaitExpired
from penstock.host import threads
from penstock.host.file_operations import rename_durably
from penstock.host.files import FileSystem
from penstock.host.paths import parent
from penstock.journal.partitions import SHARDS_MAX, TABLES_MAX, partition_id
from penstock.kinds.changes import CHANGES
from penstock.lsm.maintenance import Maintenance
from penstock.manifest.records import DbDescriptorRecord
from penstock.partition.ledger_records import LEDGER_TABLE
from penstock.partition.machine import SPILL, PartitionDescriptor, PartitionStateMachine
from penstock.partition.snapshots import INSTALL, REPLACED, SNAPSHOT
from penstock.partition.storage_options import FOLDER

logger = logging.getLogger(__name__)

TRASH_SUFFIX = "-gone"  # behind the name of a folder that is being removed; with a number, if that name is taken
_TABLE = re.compile("[1-9][0-9]{0,14}")
_BESIDE = (SPILL, SNAPSHOT, INSTALL, REPLACED)
_SHARD = re.compile(f"(0|[1-9][0-9]{{0,4}})({'|'.join(_BESIDE)})?({TRASH_SUFFIX}[0-9]*)?")
# Files of kinds and logs are named by numbers; a queue has its manifests, and folders of years, months and days; the
# change feed of a shard is a folder.
_FILE = re.compile(
    r"([0-9]{20}\.[a-z]+|[0-9]{20}-[0-9]{10}\.log|[0-9]{10}\.data|manifest\.(1|2|current)|snapshot\.header)(\.tmp)?",
)
_FOLDER = re.compile(f"[0-9]{{2}}|[0-9]{{4}}|[0-9]{{20}}|{CHANGES}")


class DroppedShards:
    """The dropped shards whose files are still to be removed."""

    def __init__(
        self, fs: FileSystem, root: str, maintenance: Maintenance, may_remove: Callable[[], bool] = lambda: True
    ) -> None:
        """`may_remove`: whether no other process can still read a snapshot from before the opening."""
        self._fs = fs
        self._may_remove = may_remove
        self._root = root
        self._maintenance = maintenance
        self._shards: deque[tuple[PartitionDescriptor, PartitionStateMachine | None]] = deque()
        self._left: set[int] = set()  # tables of which something could not be removed: the next opening tries again
        self._removing = threads.lock("store.dropped")

    def add(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine | None) -> None:
        """Queue a dropped shard for removal."""
        self._shards.append((descriptor, machine))

    def folders(self) -> list[str]:
        """Return the folders that are still to be removed, relative to the store."""
        return [descriptor.folder for descriptor, _ in list(self._shards)]

    def machines(self) -> list[tuple[PartitionDescriptor, PartitionStateMachine]]:
        """Return the shards whose files are still there, and that were open when their table was dropped."""
        return [(descriptor, machine) for descriptor, machine in list(self._shards) if machine is not None]

    def has(self, table_id: int) -> bool:
        """Whether something of a dropped table is still to be removed, now or by the next opening."""
        return table_id in self._left or any(descriptor.table_id == table_id for descriptor, _ in list(self._shards))

    def find(self, exists: Callable[[int], bool], rows: Mapping[int, DbDescriptorRecord]) -> None:
        """Queue what an earlier process left: folders of tables that do not exist.

        `rows`: of dropped tables; they say where else folders may be.
        """
        for name in self._fs.listdir(f"{self._root}/{FOLDER}"):
            if _TABLE.fullmatch(name) and LEDGER_TABLE != int(name) < TABLES_MAX and not exists(int(name)):
                self._find(int(name), FOLDER, FOLDER)
        for db_id, row in rows.items():
            if (row.options.chunk_dir, row.options.wal_dir) != (FOLDER, FOLDER):
                self._find(db_id, row.options.chunk_dir, row.options.wal_dir)

    def _find(self, table_id: int, chunk_dir: str, wal_dir: str) -> None:
        names = [self._names(f"{self._root}/{folder}/{table_id}") for folder in (chunk_dir, wal_dir)]
        if names == [None, None]:
            return
        shards = filter(None, map(_SHARD.fullmatch, chain.from_iterable(filter(None, names))))
        for shard in sorted({int(match[1]) for match in shards if int(match[1]) < SHARDS_MAX} or {0}):
            number = partition_id(table_id, shard)
            self.add(PartitionDescriptor(number, table_id, shard, "", "", chunk_dir, wal_dir), None)

    def await_end(self, timeout_s: float) -> None:
        """Wait for a removal that is under way; `WaitExpired` if its files do not answer."""
        if not self._removing.acquire(timeout=timeout_s):
            raise WaitExpired(f"{self._root}: a dropped table is being removed, and this takes too long: retry later")
        self._removing.release()

    def remove(self) -> None:
        """Remove the files of shards that are not in use. A failed removal is left to the next opening."""
        with self._removing:
            self._remove()

    def _remove(self) -> None:
        for _ in range(len(self._shards)):
            descriptor, machine = self._shards[0]
            is_read = not self._may_remove() or (machine is not None and machine.is_read())
            if is_read or self._maintenance.is_at_work(descriptor.table_id, descriptor.shard):
                self._shards.rotate(-1)
                continue
            self._shards.popleft()  # first: after a failed fsync nothing is retried
            try:
                self._remove_shard(descriptor, machine)
            except GateShut:  # a job on another shard of the table has not ended yet
                self._shards.append((descriptor, None))
            except (OSError, PenstockError) as error:
                self._left.add(descriptor.table_id)
                logger.warning("%s/%s is removed later (%s)", self._root, descriptor.folder, error)

    def _remove_shard(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine | None) -> None:
        if machine is not None:
            machine.close()
        self._maintenance.drop_tree(descriptor.table_id, descriptor.shard, descriptor.folder)
        for suffix in ("", *_BESIDE):
            self._remove_folder(f"{self._root}/{descriptor.folder}{suffix}")
        self._remove_folder(f"{self._root}/{descriptor.log_folder}")
        for folder in {descriptor.chunk_dir, descriptor.wal_dir}:
            table = f"{self._root}/{folder}/{descriptor.table_id}"
            if self._names(table) == []:
                self._fs.rmdir(table)
                if folder != FOLDER:  # found by the table's row alone, which goes next
                    self._fs.fsync_dir(parent(table))

    def _remove_folder(self, folder: str) -> None:
        """Remove a folder, if it exists, and what earlier attempts left of it."""
        trash, number = folder + TRASH_SUFFIX, 1
        if self._fs.exists(trash):
            self._fs.fsync_dir(parent(trash))  # an earlier attempt may have stopped before this
        while left := self._empty(trash):
            logger.warning(
                "%s stays, of a dropped table: %d files in it are not ours, as %s", trash, len(left), left[0]
            )
            number += 1
            trash = f"{folder}{TRASH_SUFFIX}{number}"
        if self._names(folder) is not None:
            rename_durably(self._fs, folder, trash)
            self._empty(trash)

    def _names(self, folder: str) -> list[str] | None:
        try:
            return self._fs.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _empty(self, folder: str) -> list[str]:
        """Remove our files and the folder; return the files that are not ours. Not durable: repeat it after a crash."""
        left: list[str] = []
        names = self._names(folder)
        if names is None:
            return [folder] if self._fs.exists(folder) else []
        for name in names:
            path = f"{folder}/{name}"
            if _FOLDER.fullmatch(name):
                left += self._empty(path)
            elif not _FILE.fullmatch(name) or not self._unlink(path):
                left.append(path)
        if not left:
            self._fs.rmdir(folder)
        return left

    def _unlink(self, path: str) -> bool:
        try:
            self._fs.unlink(path)
        except (IsADirectoryError, PermissionError):  # some systems raise the second for a folder
            return False
        return True

    def close(self) -> None:
        """Close the state machines of the remaining shards."""
        for _, machine in self._shards:
            if machine is not None:
                machine.close()
