"""The values of the manifest's tables.

`codec` describes their bytes. A record checks itself when it is created; bytes that do not decode to one are corrupt.

Thread: any; all records are frozen.
Invariants: watermarks are ordered (`stored <= applied <= durable <= highest`); paths are relative to the store.
"""

from __future__ import annotations

import math
import operator
from enum import IntEnum
from itertools import zip_longest
from typing import TypeAlias

import msgspec

from penstock.arguments import in_short, whole
from penstock.errors import Invalid
from penstock.manifest.keys import U64_MAX, PendingJobKey

FILE_NAME_BYTES_MAX = 120
BUCKETS_MAX = 64
LIMIT_MAX = (1 << 62) - 1  # of ages and sizes in options
REPAIR_OF = 0x8000  # a repair is in the pending index under this bit and the kind it repairs


class ManifestRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all stored structs."""


# -- db


class Codec(IntEnum):
    """How the bytes of a file are compressed.

    >>> penstock.Codec.ZSTD.name
    'ZSTD'
    """

    NONE = 0
    LZ4 = 1
    ZSTD = 2


_LEVELS = {Codec.NONE: 0, Codec.LZ4: 0, Codec.ZSTD: 22}  # the highest of each; 0 is the codec's default


class CompressionConfig(ManifestRecord, frozen=True):
    """How new files of a table are compressed; level 0 is the codec's own default.

    >>> store.alter("users", compression=penstock.CompressionConfig(penstock.Codec.ZSTD, 3)).compression.level
    3
    """

    codec: Codec = Codec.NONE
    level: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise Invalid(f"{in_short(self.codec)} is not a codec: use Codec.NONE, Codec.LZ4 or Codec.ZSTD")
        whole(self.level, f"the level of {self.codec.name.lower()}", 0, _LEVELS[self.codec])


class EncryptionConfig(ManifestRecord, frozen=True):
    """Which master key wraps the data keys of a table's files.

    >>> penstock.StorageOptions(encryption=penstock.EncryptionConfig("main")).encryption.key_version
    1
    """

    key_id: str
    key_version: int = 1


class RetentionPolicy(ManifestRecord, frozen=True):
    """What may be dropped; None keeps everything.

    >>> store.alter("events", retention=penstock.RetentionPolicy(age_ms_max=86_400_000)).retention.age_ms_max
    86400000
    """

    age_ms_max: int | None = None
    bytes_max: int | None = None

    def __post_init__(self) -> None:
        for limit in (self.age_ms_max, self.bytes_max):
            if limit is not None:
                whole(limit, "a limit of a retention", 1, LIMIT_MAX)


class ArchivePolicy(ManifestRecord, frozen=True):
    """Which files of a table are copied to the object store, and which of these may leave the local disk.

    >>> store.alter("users", archive=penstock.ArchivePolicy(archive_after_ms=3_600_000)).archive.evict_after_ms is None
    True
    """

    archive_after_ms: int = 0  # the age from which a file is copied
    evict_after_ms: int | None = None  # the age from which a verified copy is enough; None: files stay
    local_bytes_max: int | None = None  # evict the oldest above this; None: no limit

    def __post_init__(self) -> None:
        optional = [limit for limit in (self.evict_after_ms, self.local_bytes_max) if limit is not None]
        for number in (self.archive_after_ms, *optional):
            whole(number, "a limit of an archive policy", 0, LIMIT_MAX)


class ManifestDbOptions(ManifestRecord, frozen=True):
    """How and where a table stores its files."""

    wal_dir: str
    chunk_dir: str
    compression: CompressionConfig = CompressionConfig()
    encryption: EncryptionConfig | None = None
    retention: RetentionPolicy = RetentionPolicy()
    detail: bytes = b""  # options of the table's kind; the manifest does not read them
    archive: ArchivePolicy | None = None

    def __post_init__(self) -> None:
        check_relative(self.wal_dir)
        check_relative(self.chunk_dir)


class Active(ManifestRecord, frozen=True, tag=1):
    """In service."""


class Draining(ManifestRecord, frozen=True, tag=2):
    """No new writes; those in progress are being finished."""


class Tombstoned(ManifestRecord, frozen=True, tag=3):
    """Dropped; its files are being collected."""

    tombstoned_at_epoch_ms: int


DbLifecycle: TypeAlias = Active | Draining | Tombstoned


class DbDescriptorRecord(ManifestRecord, frozen=True):
    """A table."""

    created_at_epoch_ms: int
    name: str
    config_hash: bytes
    wal_shards: int
    options: ManifestDbOptions
    status: DbLifecycle = Active()
    kind: str = ""
    generation: int = 0  # of the component ORCHESTRATOR, at the last change of this row

    def __post_init__(self) -> None:
        if not self.name or len(self.name.encode()) > FILE_NAME_BYTES_MAX:
            raise Invalid(f"a table needs a name of at most {FILE_NAME_BYTES_MAX} bytes")
        if len(self.config_hash) != 32:
            raise Invalid(f"config_hash of table {self.name} has {len(self.config_hash)} bytes: it must have 32")
        if not 1 <= self.wal_shards <= 0xFFFF:
            raise Invalid(f"table {self.name} has {self.wal_shards} shards: between 1 and 65535 are possible")


# -- wal_state


class FlushGateState(ManifestRecord, frozen=True):
    """A gate: the job that holds it, and how its last jobs ended. Changed by job operations only."""

    active_job_id: int | None = None
    last_success_at_epoch_ms: int | None = None
    errored_since_epoch_ms: int | None = None


class WalStateRecord(ManifestRecord, frozen=True):
    """The progress of one partition, and (in shard 0) the gates of its table."""

    stored_lsn: int = 0
    last_applied_lsn: int = 0
    durable_lsn: int = 0
    highest_lsn: int = 0
    last_sealed_segment: int = 0
    last_checkpoint_generation: int = 0
    restart_epoch: int = 0
    flush_gate_state: FlushGateState = FlushGateState()
    other_gates: tuple[tuple[int, FlushGateState], ...] = ()  # by kind, ascending
    detail: bytes = b""  # private to the partition; the manifest does not read it

    def __post_init__(self) -> None:
        if not 0 <= self.stored_lsn <= self.last_applied_lsn <= self.durable_lsn <= self.highest_lsn <= U64_MAX:
            raise Invalid(
                "watermarks must be ordered stored <= applied <= durable <= highest, not "
                f"{self.stored_lsn}, {self.last_applied_lsn}, {self.durable_lsn}, {self.highest_lsn}"
            )

    def raised(self, other: WalStateRecord) -> WalStateRecord:
        """Return `other`, with no number below this record's: two writers of a row cannot undo each other."""
        here, there = _progress(self), _progress(other)
        if all(map(operator.ge, there, here)) and (other.detail or not self.detail):
            return other
        highest = dict(zip(_PROGRESS, map(max, here, there), strict=True))
        return msgspec.structs.replace(other, **highest, detail=other.detail or self.detail)

    def gate(self, kind: int) -> FlushGateState:
        """Return the gate of a job kind."""
        if kind == JobKind.FLUSH:
            return self.flush_gate_state
        return dict(self.other_gates).get(kind, FlushGateState())

    def gates(self) -> list[tuple[int, FlushGateState]]:
        """Iterate over all gates ever used, with their kinds."""
        return [(int(JobKind.FLUSH), self.flush_gate_state), *self.other_gates]

    def with_gate(self, kind: int, gate: FlushGateState) -> WalStateRecord:
        """Return this record with one gate changed."""
        if kind == JobKind.FLUSH:
            return msgspec.structs.replace(self, flush_gate_state=gate)
        others = {**dict(self.other_gates), kind: gate}
        return msgspec.structs.replace(self, other_gates=tuple(sorted(others.items(), key=lambda item: item[0])))


_PROGRESS = WalStateRecord.__struct_fields__[:7]  # the numbers that never decrease
_progress = operator.attrgetter(*_PROGRESS)


# -- chunk_catalog


class Local(ManifestRecord, frozen=True, tag=1):
    """The file is only in the store's folder."""


class RemoteArchived(ManifestRecord, frozen=True, tag=2):
    """The file is in the folder and in the object store; `verified` once its bytes were read back."""

    object: str
    verified: bool = False


class Evicted(ManifestRecord, frozen=True, tag=3):
    """The file is in the object store only."""

    object: str

    def __post_init__(self) -> None:
        if not self.object:
            raise Invalid("an evicted chunk needs the key of its object: without it the bytes could not be restored")


ChunkResidency: TypeAlias = Local | RemoteArchived | Evicted


class ChunkEntryRecord(ManifestRecord, frozen=True):
    """An immutable file. A staged one belongs to no version yet, and is purged when it expires."""

    file_name: str  # relative to the store
    generation: int
    size_bytes: int
    compression: Codec = Codec.NONE
    encrypted: bool = False
    residency: ChunkResidency = Local()
    wal_range: tuple[int, int] = (0, 0)  # LSNs, half-open
    uploaded_at_epoch_ms: int | None = None
    purge_after_epoch_ms: int | None = None
    staged: bool = False
    detail: bytes = b""  # private to the file's owner (level, key range); the manifest does not read it

    def __post_init__(self) -> None:
        check_relative(self.file_name)
        if len(self.file_name.encode()) > FILE_NAME_BYTES_MAX:
            raise Invalid(f"file name {self.file_name!r} is longer than {FILE_NAME_BYTES_MAX} bytes")
        if self.wal_range[0] > self.wal_range[1]:
            raise Invalid(f"chunk {self.file_name} has the range {self.wal_range}: its start must not exceed its end")
        if self.staged and self.purge_after_epoch_ms is None:
            raise Invalid(f"chunk {self.file_name} is staged and needs purge_after_epoch_ms")


# -- job_queue


class JobKind(IntEnum):
    """Penstock's own job kinds; 64 to 32767 are the user's."""

    FLUSH = 1
    CHECKPOINT = 2
    COMPACTION = 3
    ARCHIVE = 4
    VERIFY = 5
    REHYDRATE = 6
    PURGE = 7
    ROLLUP = 8
    TRAIN = 9
    REPAIR = 10


USER_KINDS = range(64, REPAIR_OF)
_OWN_KINDS = frozenset(int(kind) for kind in JobKind)


class Pending(ManifestRecord, frozen=True, tag=1):
    """Waiting for a worker, with a row in the pending index."""


class InFlight(ManifestRecord, frozen=True, tag=2):
    """Leased to a worker; only the holder of the token may end it."""

    worker_id: str
    leased_at_ms: int
    token: int


class Completed(ManifestRecord, frozen=True, tag=3):
    """Done."""

    finished_at_ms: int


class FailedPermanent(ManifestRecord, frozen=True, tag=4):
    """Failed for good; `last_error` says why."""

    finished_at_ms: int


JobDurableState: TypeAlias = Pending | InFlight | Completed | FailedPermanent


class JobErrorSnapshot(ManifestRecord, frozen=True):
    """How an attempt ended."""

    at_epoch_ms: int
    kind: str
    message: str


class JobRecord(ManifestRecord, frozen=True):
    """A durable job. `attempts` counts its leases, and is the token of the last one."""

    job_id: int
    created_at_epoch_ms: int
    db_id: int | None
    kind: int
    state: JobDurableState = Pending()
    payload: bytes = b""
    last_error: JobErrorSnapshot | None = None
    attempts: int = 0
    attempts_max: int = 5
    repairs_job_id: int | None = None  # only of a repair
    repairs_kind: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in USER_KINDS and self.kind not in _OWN_KINDS:
            raise Invalid(f"job kind {self.kind} is unknown: use a JobKind, or 64 to 32767 for your own")
        is_repair = self.kind == JobKind.REPAIR
        if is_repair != (self.repairs_kind is not None) or is_repair != (self.repairs_job_id is not None):
            raise Invalid(f"job {self.job_id}: a repair, and only a repair, names the job and kind it repairs")
        if self.attempts_max < 1:
            raise Invalid(f"job {self.job_id}: attempts_max must be at least 1")

    @property
    def table(self) -> int:
        """The table of the job; 0 for the store."""
        return self.db_id or 0

    @property
    def gate_kind(self) -> int:
        """The kind whose gate this job needs: a repair needs the gate of the kind it repairs."""
        return self.kind if self.repairs_kind is None else self.repairs_kind

    @property
    def pending_key(self) -> PendingJobKey:
        """The key of its pending row."""
        kind = self.kind if self.repairs_kind is None else REPAIR_OF | self.repairs_kind
        return PendingJobKey(self.table, kind)


class PendingJobRecord(ManifestRecord, frozen=True):
    """The pending job of a table and kind."""

    job_id: int


# -- metrics


class MetricDelta(ManifestRecord, frozen=True):
    """New observations of a metric."""

    sum: float
    count: int
    min: float
    max: float
    bucket_counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_moments(self)


class MetricRecord(ManifestRecord, frozen=True):
    """All observations of a metric so far."""

    sum: float
    count: int
    min: float
    max: float
    bucket_counts: tuple[int, ...]
    updated_at_epoch_ms: int

    def __post_init__(self) -> None:
        _check_moments(self)

    def merged(self, delta: MetricDelta, at_epoch_ms: int) -> MetricRecord:
        """Return the sum of these observations and others."""
        if delta.count == 0:
            return self
        return MetricRecord(
            self.sum + delta.sum,
            self.count + delta.count,
            min(self.min, delta.min),
            max(self.max, delta.max),
            self._merged_buckets(delta.bucket_counts),
            max(at_epoch_ms, self.updated_at_epoch_ms),
        )

    def _merged_buckets(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        if not counts:
            return self.bucket_counts
        return tuple(map(sum, zip_longest(self.bucket_counts, counts, fillvalue=0)))


# -- generation_watermarks


class GenerationWaiterSnapshot(ManifestRecord, frozen=True):
    """A waiter for a generation at the time the row was written."""

    waiter_id: int
    target_generation: int
    deadline_epoch_ms: int


class GenerationRecord(ManifestRecord, frozen=True):
    """A counter that never decreases."""

    current_generation: int
    last_committed_at_epoch_ms: int
    blocked_waiters: tuple[GenerationWaiterSnapshot, ...] = ()


class DbNameRecord(ManifestRecord, frozen=True):
    """The table, not a tombstoned one, that has a name."""

    db_id: int


class ChunkFileRecord(ManifestRecord, frozen=True):
    """The row of `chunk_catalog` that owns a file."""

    db_id: int
    chunk_id: int


def check_relative(path: str) -> None:
    """Raise `Invalid` for a path outside the store's folder."""
    if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise Invalid(f"path {path!r} must be relative to the store and stay inside it")


def _check_moments(moments: MetricDelta | MetricRecord) -> None:
    buckets = moments.bucket_counts
    if moments.count < 0 or (buckets and (len(buckets) > BUCKETS_MAX or min(buckets) < 0)):
        raise Invalid(f"a metric needs counts from 0 and at most {BUCKETS_MAX} buckets")
    # Comparisons with NaN are false, so this refuses it too.
    if moments.count and not (moments.min <= moments.max and abs(moments.sum) < math.inf):
        raise Invalid(f"a metric's sum must be finite and min <= max, not {moments.sum}, {moments.min}, {moments.max}")
