"""The operations of the manifest; what each does inside a transaction is in `edit.py`.

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
    ChunkResidency,
    DbDescriptorRecord,
    JobDurableState,
    JobErrorSnapshot,
    JobRecord,
    MetricDelta,
    WalStateRecord,
)
from penstock.manifest.tables import CHUNK_FILES, CHUNKS


class Operation(msgspec.Struct, frozen=True):
    """Base of the operations."""

    frees_space: ClassVar[bool] = False  # whether it may run when the manifest is full

    def prepare(self) -> Any:
        """Return the argument of `Edit`: the operation, and what can be packed without reading a row."""
        return self


class PutDb(Operation, frozen=True):
    """Create or change a table's descriptor."""

    db_id: int
    value: DbDescriptorRecord


class DeleteDb(Operation, frozen=True):
    """Remove the descriptor of a tombstoned table, whose other rows are all gone."""

    frees_space = True
    db_id: int


class PutWalState(Operation, frozen=True):
    """Raise the progress of a partition: no number in the row decreases, and its gates do not change.

    `replaces`: numbers may decrease, because the partition's files are replaced by those of a snapshot.
    """

    key: WalStateKey
    value: WalStateRecord
    replaces: bool = False

    def prepare(self) -> tuple[PutWalState, bytes]:
        """Return the operation with its packed key."""
        return self, self.key.pack()


class DeleteWalState(Operation, frozen=True):
    """Remove a partition; a repair of its table that does not run ends with shard 0."""

    frees_space = True
    key: WalStateKey


class UpsertChunk(Operation, frozen=True):
    """Create or change a chunk's row.

    `replaces`: its residency may change in any way, because the files of the partition are replaced by a snapshot's.
    """

    key: ChunkKey
    value: ChunkEntryRecord
    replaces: bool = False

    def prepare(self) -> tuple[UpsertChunk, bytes, bytes, bytes, bytes]:
        """Return the operation with the packed key and value of the chunk's row, and of its file's row."""
        owner = ChunkFileRecord(self.key.db_id, self.key.chunk_id)
        return self, *CHUNKS.packed(self.key, self.value), *CHUNK_FILES.packed(self.value.file_name, owner)


class SetResidency(Operation, frozen=True):
    """Change where the bytes of a chunk are, and nothing else of its row; `NotFound` if the row was removed."""

    frees_space = True  # it adds little, and evicting must be possible
    key: ChunkKey
    value: ChunkResidency
    uploaded_at_epoch_ms: int | None = None  # None: unchanged


class DeleteChunk(Operation, frozen=True):
    """Remove a chunk's row, if it exists."""

    frees_space = True
    key: ChunkKey


class PutJob(Operation, frozen=True):
    """Add a job. A repair takes the gate of the kind it repairs at once."""

    value: JobRecord


class UpdateJobState(Operation, frozen=True):
    """Change a job's state. `token` is that of the lease; taking a lease needs none."""

    frees_space = True  # it adds little, and jobs must be able to end
    job_id: int
    new_state: JobDurableState
    token: int | None = None
    error: JobErrorSnapshot | None = None


class RemoveJob(Operation, frozen=True):
    """Remove a job that is not in flight."""

    frees_space = True
    job_id: int


class UpsertPendingIndex(Operation, frozen=True):
    """Add the pending row of a table and kind."""

    key: PendingJobKey
    job_id: int


class DeletePendingIndex(Operation, frozen=True):
    """Remove the pending row of a table and kind."""

    frees_space = True
    key: PendingJobKey


class DeleteMetrics(Operation, frozen=True):
    """Remove all metrics of a table: they are one range of keys."""

    frees_space = True
    scope: int


class MergeMetric(Operation, frozen=True):
    """Add observations to a metric."""

    key: MetricKey
    delta: MetricDelta

    def prepare(self) -> tuple[MergeMetric, bytes]:
        """Return the operation with its packed key."""
        return self, self.key.pack()


class BumpGeneration(Operation, frozen=True):
    """Raise a component's generation."""

    component: int
    increment: int = 1


ManifestOp: TypeAlias = (
    PutDb
    | DeleteDb
    | PutWalState
    | DeleteWalState
    | UpsertChunk
    | SetResidency
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
    """The generations of a commit: the highest, and each component's."""

    generation: int
    generations: Mapping[int, int]
