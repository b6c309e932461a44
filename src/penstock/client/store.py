"""A store that another process owns: `penstock.connect`.

Thread: any.
Invariants: (1) pending writes are sent at `close` and at the interpreter's exit. (2) a connection made before a fork
does not work in the child.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.archive.table_keys import lend, take_back
from penstock.arguments import SIZE_MAX, seconds, text, whole
from penstock.client.connection import Connection, OwnerLocator
from penstock.client.flusher import SEND_S
from penstock.client.port import SNAPSHOT_LEASE_S, FlightPort
from penstock.client.reading import FlightSnapshot
from penstock.coordinator import Acknowledgement
from penstock.errors import Closed, Invalid, NotLeader
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.randomness import Random
from penstock.kinds import Piece, partitions_of
from penstock.lsm.manual_compaction import COMPACT_WAIT_S, CompactionReport
from penstock.partition.aside import Trouble
from penstock.partition.ledger_records import TableInfo
from penstock.registry import check_name
from penstock.store.archive_settings import (
    ArchiveReport,
    EvictReport,
    VerifyReport,
)
from penstock.store.backup_folder import NUMBER_MAX
from penstock.store.reports import (
    JOB_MAX,
    BackupReport,
    CheckReport,
    ChunkSummary,
    JobSummary,
    RotationReport,
    StoreStatistics,
    check_target,
)
from penstock.store.table_description import TableDescription
from penstock.store.tables import DRAIN_S, GENERATION_MAX, StoreSnapshot, Tables, check_epoch
from penstock.store.views import StoreSubscription, StoreView

TIMEOUT_S_MAX = 24 * 3600.0
WHOLE_S = 3600.0  # for a backup or a check of the whole store


class RemoteSnapshot(StoreSnapshot):
    """Read-only view of all tables at one LSN, held by the owner.

    >>> with penstock.connect(store.path) as client, client.snapshot() as snapshot:
    ...     snapshot.kv("users")[b"ada"]
    b'1815'
    """

    _port: FlightSnapshot

    @property
    def id(self) -> str:
        """The id by which other clients join the snapshot, until its lease expires."""
        return self._port.snapshot_id

    @property
    def port(self) -> FlightSnapshot:
        """For Spark and other readers of raw tables."""
        return self._port

    def info(self, name: str) -> TableInfo:
        """Return a table's info; `NotFound` if there is none."""
        return self._info(name)

    def pieces(self, name: str, count: int) -> list[Piece]:
        """Split a table into about `count` pieces for several readers; at least one for each shard."""
        if count < 1:
            raise Invalid(f"a table is read in 1 part or more, not {count}")
        partitions = partitions_of(self._info(name))
        each = -(-count // len(partitions))
        return [piece for partition in partitions for piece in self._port.pieces(partition, each)]

    def read(self, piece: Piece) -> Any:
        """Return the record batches of a piece, from the owner, as its kind scans them."""
        return self._port.scan_arrow(piece.partition, piece.start, piece.end)

    def __enter__(self) -> RemoteSnapshot:
        return self


class RemoteMetrics:
    """The metrics of a store that another process owns, of the tables that this client may read."""

    def __init__(self, check: Callable[[], None], port: FlightPort) -> None:
        self._check = check
        self._port = port

    def exposition(self) -> str:
        """Return all metrics in Prometheus' text format."""
        self._check()
        return self._port.exposition()


class RemoteStore(Tables):
    """A connection to a store.

    >>> with penstock.connect(store.path) as client:
    ...     client.kv("users")[b"ada"]
    b'1815'
    """

    _port: FlightPort

    def __init__(
        self,
        locator: OwnerLocator,
        *,
        durable: bool,
        clock: Clock,
        random: Random,
        owner_timeout_s: float,
        send_s: float = SEND_S,
        reads: str = "leader",
    ) -> None:
        """`reads`: see `connect`."""
        self._locator = locator
        self._durable = durable
        self._process = threads.process_id()
        self._closed = False
        self._connection = Connection(
            locator,
            clock=clock,
            owner_timeout_s=owner_timeout_s,
            any_member=reads == "local",
            linearizable=reads == "linearizable",
        )
        owner = self._connection.owner  # raises if there is no owner
        self.path = locator.folder or owner.path
        self.identity, self.uuid = owner.identity, owner.uuid
        self._port = FlightPort(self._connection, clock=clock, random=random, send_s=send_s)
        if reads == "local":
            self._port.refuse_writes(NotLeader("this connection reads any member: connect without reads= to write"))
        self.metrics = RemoteMetrics(self._check_usable, self._port)
        lend(self.identity, self._port.table_key)  # for pieces that this process reads from the store's files
        self._forget_exit = threads.at_exit(self, RemoteStore.close)
        threads.after_fork(self, RemoteStore._disable_after_fork)

    @property
    def port(self) -> FlightPort:
        """For Spark and other readers of raw tables."""
        return self._port

    def flush(self, epoch: int | None = None, timeout_s: float | None = None) -> Acknowledgement:
        """Wait until all writes up to `epoch` are durable; None or 0 means all writes so far.

        `timeout_s=None` means that of `connect`. After `WaitExpired` sending continues: wait again.
        """
        self._check_usable()
        wait_s = self._connection.owner_timeout_s if timeout_s is None else seconds(timeout_s, "timeout_s", math.inf)
        self._port.wait_sent(check_epoch(epoch), wait_s)
        return self._port.acknowledgement()

    def rotate_keys(self) -> RotationReport:
        """Wrap the keys of all encrypted tables with the owner's newest master key; see `Store.rotate_keys`."""
        self._check_usable()
        return self._port.rotate_keys()

    def snapshot(self, id: str | None = None, *, lease_s: float = SNAPSHOT_LEASE_S) -> RemoteSnapshot:  # noqa: A002
        """Take a snapshot of everything applied, at one LSN; with an `id`, join one that another client took.

        The owner holds it until its taker closes it, or it was not used for `lease_s` seconds.
        """
        self._check_usable()
        return RemoteSnapshot(self._port.snapshot(lease_s) if id is None else self._port.join_snapshot(id))

    def query_snapshot(self, query: str, *, lease_s: float = SNAPSHOT_LEASE_S) -> RemoteSnapshot:
        """Return the snapshot that all tasks of a query share, by the query's name; the first task takes it.

        `Closed` if it was closed: no task may read another LSN than the others.
        """
        self._check_usable()
        return RemoteSnapshot(self._port.query_snapshot(query, lease_s))

    def compact(self, name: str, *, timeout_s: float = COMPACT_WAIT_S) -> CompactionReport:
        """Merge a table into as few files as possible.

        `GateShut` if other work on the table does not end within `timeout_s` seconds, at most a day.
        """
        self._check_usable()
        return self._port.compact(check_name(name), seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX))

    def resume(self, name: str) -> list[Trouble]:
        """Let a paused table try again; return those of its `troubles` that remain."""
        self._check_usable()
        return self._port.resume(check_name(name))

    def keep_snapshot(self, name: str) -> list[int]:
        """Copy the files of a table, so that `repair` can restore it; return the LSN of each shard's copy."""
        self._check_usable()
        return self._port.keep_snapshot(check_name(name))

    def drop_snapshot(self, name: str) -> None:
        """Remove the copy that `keep_snapshot` made; nothing is kept for `repair` any more."""
        self._check_usable()
        self._port.drop_snapshot(check_name(name))

    def repair(self, name: str) -> list[Trouble]:
        """Replace the damaged files of a table by its snapshot, and apply again all that was written since.

        Nothing is lost. Returns those of its `troubles` that remain; `Invalid` if `keep_snapshot` was not called
        before.
        """
        self._check_usable()
        return self._port.repair(check_name(name))

    def jobs(self) -> list[JobSummary]:
        """Return the background work of the tables that this client may read: what waits, runs, and ended lately."""
        self._check_usable()
        return self._port.jobs()

    def retry_job(self, job: int) -> int:
        """Enqueue a job that failed for good once more; return the number of the new job."""
        self._check_usable()
        return self._port.retry_job(whole(job, "job", 1, JOB_MAX))

    def run_jobs(self, name: str, *, timeout_s: float = COMPACT_WAIT_S) -> int:
        """Flush a table and do the compactions that are due, now; return the number of compactions."""
        self._check_usable()
        return self._port.run_jobs(check_name(name), seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX))

    def chunks(self, name: str) -> list[ChunkSummary]:
        """Return the files of a table that never change: of sorted rows, or a queue's that get no more messages."""
        self._check_usable()
        return self._port.chunks(check_name(name))

    def describe(self, name: str) -> TableDescription:
        """Return how a table is stored, how far each shard is, and the gates of its jobs."""
        self._check_usable()
        return self._port.describe(check_name(name))

    def wait_for_change(self, name: str, after: int, *, timeout_s: float = 60.0) -> TableDescription:
        """Wait until the description of a table has a later generation than `after`; return it.

        Its options, or whether it drains, changed. `NotFound` as soon as it is dropped, `WaitExpired` after `timeout_s`
        seconds.
        """
        self._check_usable()
        after, timeout_s = whole(after, "after", 0, GENERATION_MAX), seconds(timeout_s, "timeout_s", math.inf)
        return self._port.wait_for_change(check_name(name), after, timeout_s)

    def drain(self, name: str, *, timeout_s: float = DRAIN_S) -> TableDescription:
        """Refuse new rows of a table, also after a restart, and put all that was written into its files.

        Reads, deletes and acknowledgements go on; writes raise `TableDraining`. Then it can be dropped, copied, or take
        writes again (`reactivate`).
        """
        self._check_usable()
        return self._port.drain(check_name(name), seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX))

    def reactivate(self, name: str) -> TableDescription:
        """Let a table that was drained take writes again."""
        self._check_usable()
        return self._port.reactivate(check_name(name))

    def trigger(self, task: str) -> None:
        """Run a background task of the owner now; `store.tasks()` names them."""
        self._check_usable()
        self._port.trigger(text(task, "task", 127))

    def tasks(self) -> list[str]:
        """Return the names of the owner's background tasks."""
        self._check_usable()
        return self._port.tasks()

    def troubles(self) -> list[Trouble]:
        """Return the acknowledged writes that cannot be read, and why; an empty list if all is well."""
        self._check_usable()
        return self._port.troubles()

    def check(self, *, timeout_s: float = WHOLE_S) -> CheckReport:
        """Have the owner read every file of the store; return what is damaged, cannot be read, or is named by nothing.

        `WaitExpired` if that takes longer than `timeout_s` seconds, at most a day.
        """
        self._check_usable()
        return self._port.check(seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX))

    def backup(self, target: str | Path, *, keep: int | None = None, timeout_s: float = WHOLE_S) -> BackupReport:
        """Have the owner copy the store as of one LSN into a folder of this machine, as `Store.backup` does.

        `Invalid` over TCP: a backup is written where the store is. `OutcomeUnknown` if the owner does not answer
        within `timeout_s` seconds, at most a day: a whole backup may appear later.
        """
        self._check_usable()
        keep = None if keep is None else whole(keep, "keep", 1, NUMBER_MAX)
        folder = check_target(target, self.path)
        return self._port.backup(folder, keep, seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX))

    def archive(self, *, timeout_s: float = WHOLE_S) -> ArchiveReport:
        """Have the owner upload what the archive lacks, and the store as of one LSN, as `Store.archive` does.

        `OutcomeUnknown` if it does not answer within `timeout_s` seconds, at most a day: the run may end later.
        """
        self._check_usable()
        return self._port.archive(seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX))

    def evict(self, name: str | None = None, *, local_bytes: int = 0, timeout_s: float = WHOLE_S) -> EvictReport:
        """Have the owner remove archived files from its folder, as `Store.evict` does."""
        self._check_usable()
        local_bytes = whole(local_bytes, "local_bytes", 0, SIZE_MAX)
        name = None if name is None else check_name(name)
        return self._port.evict(name, local_bytes, seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX))

    def rehydrate(self, name: str | None = None, *, timeout_s: float = WHOLE_S) -> int:
        """Have the owner fetch evicted files into its folder again; return the bytes."""
        self._check_usable()
        name = None if name is None else check_name(name)
        return self._port.rehydrate(name, seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX))

    def verify_archive(self, name: str | None = None, *, timeout_s: float = WHOLE_S) -> VerifyReport:
        """Have the owner read archived objects, and report those that are damaged or missing."""
        self._check_usable()
        name = None if name is None else check_name(name)
        return self._port.verify_archive(name, seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX))

    def collect_archive(self, *, timeout_s: float = WHOLE_S) -> int:
        """Have the owner delete objects that nothing names any more; return their number."""
        self._check_usable()
        return self._port.collect_archive(seconds(timeout_s, "timeout_s", TIMEOUT_S_MAX))

    def statistics(self) -> StoreStatistics:
        """Return the state of the store now, of the tables that this client may read; epochs are those of the owner."""
        self._check_usable()
        return self._port.statistics()

    def subscribe(self) -> StoreSubscription:
        """Return a subscription to the store's LSN and its owner's epochs as they move."""
        return StoreSubscription(self._view, self._wait_view)

    def _view(self) -> StoreView:
        self._check_usable()
        return self._port.view()

    def _wait_view(self, after: int, timeout_s: float) -> StoreView:
        self._check_usable()
        return self._port.wait_view(after, timeout_s)

    def recover(self) -> None:
        """After writes failed for lack of an owner: send them again; each happens at most once."""
        self._check_usable()
        self._port.recover()

    def _find_cached(self, name: str) -> TableInfo | None:
        self._check_usable()
        return self._port.recent(name) or self._find(name)

    def _check_usable(self) -> None:
        if threads.process_id() != self._process:
            raise Closed("this connection was made before a fork: connect in this process")
        if self._closed:
            raise Closed(f"the connection to {self._locator.name} was closed: connect again")

    def _disable_after_fork(self) -> None:
        self._port.disable_after_fork()

    def close(self) -> None:
        """Send pending writes, wait until they are durable, and disconnect. A second call does nothing.

        `OutcomeUnknown` if the owner accepted nothing for the `timeout_s` of `connect`; refusals are raised.
        """
        if self._closed or threads.process_id() != self._process:
            return
        try:
            self._port.send_all()  # refuses later writes of other threads; earlier ones are sent
        except Exception:
            self._disconnect()
            raise
        self._disconnect()  # not after an interrupt: `close` can be called again, and is at the interpreter's exit

    def _disconnect(self) -> None:
        self._closed = True
        self._forget_exit()
        take_back(self.identity, self._port.table_key)
        try:
            self._port.close()
        finally:
            self._connection.close()

    def __enter__(self) -> RemoteStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
