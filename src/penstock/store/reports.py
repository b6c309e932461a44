"""What a store reports about itself: backups, checks, jobs, chunks, statistics.

The owner makes these and a client receives them, which must not import the owner's parts for them.

Thread: any; these are values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from penstock.errors import Invalid
from penstock.host.paths import absolute, path_text
from penstock.partition.aside import Trouble

JOB_MAX = (1 << 63) - 1  # the highest number of a job


@dataclass(frozen=True, kw_only=True)
class BackupReport:
    """A backup that was made.

    >>> store.backup("backups").number, store.backup("backups").number
    (1, 2)
    """

    number: int
    lsn: int  # it holds everything up to here, in every table
    files: int
    bytes: int
    files_copied: int  # the others are shared with earlier backups
    bytes_copied: int


@dataclass(frozen=True)
class FileDamage:
    """A file that is not as it was written.

    >>> penstock.check_backup("backups") if store.backup("backups") else None
    []
    """

    path: str
    reason: str


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a check of the whole store found.

    >>> report = store.check()
    >>> report.ok, report.damage, report.troubles
    (True, [], [])
    """

    troubles: list[Trouble]  # acknowledged writes that cannot be read
    damage: list[FileDamage]  # files that are not as they were written, and rules that are broken
    orphans: list[str]  # files that nothing names, relative to the store: they only cost space
    files: int  # that were read
    bytes: int

    @property
    def ok(self) -> bool:
        """Whether everything that was acknowledged can be read. Orphans harm nothing."""
        return not self.troubles and not self.damage


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job of a store: background work that survives a crash.

    >>> report = store.compact("users")
    >>> [(job.kind, job.table, job.state) for job in store.jobs() if job.table == "users"]
    [('flush', 'users', 'done')]
    """

    job: int  # its number
    kind: str  # flush, compaction, rollup, train, …; a repair names the kind that it repairs
    table: str  # empty: of the whole store, or of a table that was dropped
    state: str  # pending, running, done or failed
    attempts: int
    attempts_max: int
    created_us: int
    started_us: int | None  # while it runs
    finished_us: int | None
    worker: str  # while it runs
    error: str  # of the last attempt that failed; empty if none did
    failed_us: int | None = None  # when it did


@dataclass(frozen=True, kw_only=True)
class ChunkSummary:
    """A file of sorted rows, or of a queue's messages, which never changes.

    >>> report = store.compact("users")
    >>> [(chunk.level, chunk.rows, chunk.residency) for chunk in store.chunks("users")]
    [(0, 1, 'local')]
    """

    chunk: int  # its number
    table: str
    shard: int
    level: int
    rows: int
    deletes: int
    size_bytes: int
    lsn_min: int  # of its rows; 0 for a queue's file, whose records have the LSNs
    lsn_max: int
    start: bytes  # the lowest key; of a queue, the sequence as eight bytes, big-endian
    end: bytes  # all its keys are below this
    file: str  # relative to the store
    residency: str  # local, unverified, archived (here and in the object store) or evicted (only there)
    encrypted: bool
    object: str = ""  # its key in the archive; empty if it has none


@dataclass(frozen=True, kw_only=True)
class PartitionStatistics:
    """One shard of a table that is open: its watermarks, in LSNs, and the entries that wait to be applied.

    >>> users = next(one for one in store.statistics().partitions if one.table == "users")
    >>> users.state, users.applied == users.durable, users.enqueued_ops
    ('active', True, 0)
    """

    table: str
    shard: int
    kind: str
    state: Literal["active", "throttled", "frozen", "paused"]
    stored: int  # in files of its own
    applied: int  # in its state: readers see it
    durable: int  # in the journal
    highest: int  # handed to it
    applied_global: int  # it has applied all that records up to this LSN hold for it
    enqueued_ops: int  # entries that are durable and not applied, and admitted writes that will become entries
    enqueued_bytes: int
    backlog_age_ms: int  # of the oldest of them
    error: str  # of the last failed apply; empty if there is none
    master: str = ""  # the member of a cluster that is preferred for reads of it; empty if there is none


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """A store at one moment.

    >>> now = store.statistics()
    >>> now.applied_epoch <= now.durable_epoch <= now.last_epoch, now.global_applied_floor <= now.durable_lsn
    (True, True)
    """

    state: str  # of the coordinator: idle, accumulating, flushing or failed
    error: str  # why writes are refused; empty if they are not
    incarnation: int
    last_epoch: int  # of the newest write
    durable_epoch: int
    applied_epoch: int
    first_lsn: int  # the oldest record of the journal
    needed_from: int  # records below it are stored or spilled by every partition
    durable_lsn: int  # the newest durable record
    applied_lsn: int  # new snapshots see all records up to this
    global_applied_floor: int  # every partition has applied all records up to this
    writes: int
    written_bytes: int  # as the limit of pending writes counts them: a batch is 16 KiB more than its bytes
    pending_bytes: int  # not yet in a flush; counted in the same way
    in_flight_bytes: int  # in a flush, or durable and not yet applied
    waiting_writes: int  # writes that wait for room
    refused_writes: int
    flushes: int
    flush_failures: int
    apply_failures: int
    partitions: tuple[PartitionStatistics, ...]  # those that are open, by table and shard
    required_from: int = 0  # as needed_from, and every member of the cluster has them; one far behind is not waited for
    member: str = ""  # the name of this member of a cluster
    acknowledged: dict[str, int] = field(default_factory=dict)  # by other member: it has all up to this LSN on disk


def check_target(target: object, root: str, subject: str = "the store") -> str:
    """Return the absolute path of a folder; `Invalid` if it is inside the folder `root` of `subject`, or around it."""
    folder, other = absolute(path_text(target)), absolute(root)
    for inner, outer in ((folder, other), (other, folder)):
        if f"{inner}/".startswith(f"{outer.rstrip('/')}/"):
            raise Invalid(f"{folder} is not beside {subject} {other}: give a folder elsewhere, best on another disk")
    return folder


class RotationReport(msgspec.Struct, frozen=True):
    """What a rotation of the master keys did.

    >>> secret = penstock.open("secret/", keys={1: bytes(32), 2: b"2" * 32}, encrypt=True)
    >>> users = secret.kv("users")
    >>> secret.rotate_keys().version
    2
    >>> secret.close()
    """

    version: int  # of the master key that wraps every table's key now
    rewrapped: list[str]  # the tables whose key was wrapped by an older one
