"""The twelve operations of the manifest; what each does inside a transaction is in `edit.py`.

Thread: any; they never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import msgspec

from penstock.manifest.keys import ChunkKey, MetricKey, PendingJobKey, WalStateKey
from penstock.manifest.records import (
    ChunkEntryRecord,
    ChunkFileRecord,
    DbDescriptorRecord,
    JobDurableState,
    JobErrorSnapshot,
    JobRecord,
    MetricDelta,
    WalStateRecord,
)
from penstock.manifest.tables import CHUNK_FILES, CHUNKS


class Operation(msgspec.Struct, frozen=True):
    """Base of the twelve."""

    frees: ClassVar[bool] = False  # whether it may run when the manifest is full

    def prepared(self) -> Any:
        """What `Edit` takes: this, or also what can be packed without looking at a row."""
        return self


class PutDb(Operation, frozen=True):
    """Create or change a table."""

    db_id: int
    value: DbDescriptorRecord


class PutWalState(Operation, frozen=True):
    """Raise the progress of a partition: no number in the row goes back, and its gates stay as they are."""

    key: WalStateKey
    value: WalStateRecord

    def prepared(self) -> tuple[PutWalState, bytes]:
        """With its key."""
        return self, self.key.pack()


class DeleteWalState(Operation, frozen=True):
    """Forget a partition."""

    frees = True
    key: WalStateKey


class UpsertChunk(Operation, frozen=True):
    """Create or change a chunk's row."""

    key: ChunkKey
    value: ChunkEntryRecord

    def prepared(self) -> tuple[UpsertChunk, bytes, bytes, bytes, bytes]:
        """With key and value of the chunk's row, and of its file's."""
        owner = ChunkFileRecord(self.key.db_id, self.key.chunk_id)
        return self, *CHUNKS.packed(self.key, self.value), *CHUNK_FILES.packed(self.value.file_name, owner)


class DeleteChunk(Operation, frozen=True):
    """Remove a chunk's row; one that is not there is no error."""

    frees = True
    key: ChunkKey


class PutJob(Operation, frozen=True):
    """Write a new job. A repair takes the gate of the kind that it repairs at once."""

    value: JobRecord


class UpdateJobState(Operation, frozen=True):
    """Move a job on. `token` names the lease that allows it; taking a lease needs none."""

    frees = True  # it adds little, and work must be able to end
    job_id: int
    new_state: JobDurableState
    token: int | None = None
    error: JobErrorSnapshot | None = None


class RemoveJob(Operation, frozen=True):
    """Forget a job that is not in flight."""

    frees = True
    job_id: int


class UpsertPendingIndex(Operation, frozen=True):
    """Claim the one waiting place of a table and kind."""

    key: PendingJobKey
    job_id: int


class DeletePendingIndex(Operation, frozen=True):
    """Give the waiting place back."""

    frees = True
    key: PendingJobKey


class DeleteMetrics(Operation, frozen=True):
    """Remove all metrics of a table: they are one range of keys."""

    frees = True
    scope: int


class MergeMetric(Operation, frozen=True):
    """Add observations to a metric."""

    key: MetricKey
    delta: MetricDelta

    def prepared(self) -> tuple[MergeMetric, bytes]:
        """With its key."""
        return self, self.key.pack()


class BumpGeneration(Operation, frozen=True):
    """Raise a component's generation."""

    component: int
    increment: int = 1


ManifestOp: TypeAlias = (
    PutDb
    | PutWalState
    | DeleteWalState
    | UpsertChunk
    | DeleteChunk
    | DeleteMetrics
    | PutJob
    | UpdateJobState
    | RemoveJob
    | UpsertPendingIndex
    | DeletePendingIndex
    | MergeMetric
    | BumpGeneration
)


class CommitReceipt(msgspec.Struct, frozen=True):
    """What a batch reached: its highest generation, and each component's."""

    generation: int
    generations: Mapping[int, int]
