"""Opens the state machine and the log of one shard, and removes its files when its table is dropped.

Thread: the dispatcher's callers, one for a shard at a time.
Invariant: a file that a log still names is known to the staging area before anything can remove it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from penstock.errors import DiskFull
from penstock.host.file_errors import is_disk_full
from penstock.kinds import Machine, MachineContext
from penstock.manifest.keys import WalStateKey
from penstock.manifest.records import WalStateRecord
from penstock.partition.machine import PartitionDescriptor, PartitionStateMachine
from penstock.partition.reference import Staging
from penstock.partition.snapshots import PartitionSnapshots
from penstock.partition.spill import SpillLog
from penstock.registry import kind_named
from penstock.store.dropped import DroppedShards
from penstock.store.settings import StoreSettings
from penstock.store.tracing import Tracer


class ShardOpener:
    """What the dispatcher opens shards with: a `MachineFactory`, and the logs beside the machines."""

    def __init__(
        self,
        context: MachineContext,
        dropped: DroppedShards,
        *,
        settings: StoreSettings,
        tracer: Tracer | None,
        check: Callable[[PartitionDescriptor], None] = lambda descriptor: None,
    ) -> None:
        """`check`: raises if the manifest describes another table than the one that a shard is opened of."""
        self._context = context
        self._dropped = dropped
        self._settings = settings
        self._tracer = tracer
        self._check = check

    def open(self, descriptor: PartitionDescriptor, options: bytes) -> Machine:
        """Return the state machine of a shard."""
        self._check(descriptor)
        try:
            kind = kind_named(descriptor.kind, descriptor.name)
            machine = kind.open_machine(
                descriptor, options, replace(self._context, settings=self._settings.of_kind(kind))
            )
        except OSError as error:
            if is_disk_full(error):
                raise DiskFull(f"{descriptor.folder} has no room for its files: free some space, then retry") from error
            raise
        if self._tracer is not None:
            self._tracer.attach(descriptor, machine)
        return machine

    def collect(self, descriptor: PartitionDescriptor, machine: PartitionStateMachine | None) -> None:
        """Remove the files of a dropped shard, once nothing uses them."""
        self._dropped.add(descriptor, machine)

    def open_spill(self, descriptor: PartitionDescriptor, staging: Staging, snapshots: PartitionSnapshots) -> SpillLog:
        """Return the log of what a shard has not stored."""
        snapshots.finish_install(descriptor)  # before anything is opened
        context = self._context
        state = context.manifest.get_wal_state(WalStateKey(descriptor.table_id, descriptor.shard)) or WalStateRecord()
        snapshot = snapshots.row_of(descriptor)
        reach = state if snapshot is None else snapshot
        spill = SpillLog(
            context.fs,
            f"{context.root}/{descriptor.log_folder}",
            random=context.random,
            identity=context.identity,
            partition=descriptor.partition,
            reach=(reach.stored_lsn, reach.durable_lsn),
            floor=None if snapshot is None else snapshot.stored_lsn,
        )
        with ExitStack() as undo:
            undo.callback(spill.close)
            for entry in spill.entries(state.stored_lsn):
                staging.name_all(entry.sections)
            undo.pop_all()
        return spill
