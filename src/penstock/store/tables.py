"""The public operations that an owned store and a connected one share: tables by name, batches, snapshots, loads.

Thread: any.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any

from penstock.arguments import ArrowSource, flag, in_short, seconds, whole
from penstock.coordinator import Acknowledgement
from penstock.errors import Backpressure, Invalid, NotFound
from penstock.kinds import SnapshotReading, partitions_of
from penstock.kinds.changes import ChangeOptions
from penstock.partition.ledger_records import TableInfo
from penstock.partition.reference import StagedFile, check_staging
from penstock.partition.storage_options import StorageOptions, changed, encode_storage
from penstock.partition.tokens import check_token
from penstock.queue.options import Retention
from penstock.queue.table import QueueTable
from penstock.queue.view import QueueView
from penstock.registry import QUEUE, check_name, find_kind, kind_named, known_kinds, series_kind, vector_kind
from penstock.store.batch import StoreBatch
from penstock.store.kv_tables import KvOfSnapshot, KvOfStore
from penstock.store.loading import LEASE_S, LoadReport, PreparedLoad, prepare
from penstock.store.naming import check_feed
from penstock.store.reports import StoreStatistics
from penstock.store.table_description import TableDescription
from penstock.store.views import StoreSubscription

if TYPE_CHECKING:  # kinds that are imported at their first use
    from penstock.manifest.records import ArchivePolicy, CompressionConfig, EncryptionConfig, RetentionPolicy
    from penstock.series.options import SeriesOptions
    from penstock.series.reader import SeriesReader
    from penstock.series.table import SeriesTable
    from penstock.vector.options import Metric
    from penstock.vector.reader import VectorReader
    from penstock.vector.table import VectorTable

DRAIN_S = 60.0
GENERATION_MAX = (1 << 64) - 1
ALTER_ATTEMPTS = 10  # others may change the options at the same time
EPOCH_MAX = (1 << 72) - 1  # 32 bits of the store's incarnation, then 40 of the write


def check_epoch(epoch: Any) -> int | None:
    """Return the epoch to wait for; None means all writes so far, and so does 0, the epoch of an empty write."""
    return None if epoch is None else whole(epoch, "an epoch", 0, EPOCH_MAX) or None


class Tables(KvOfStore):
    """The operations of a store, over a port into it."""

    path: str
    _closed: bool

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}{', closed' if self._closed else ''}>"

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise `Closed` if the store is closed."""

    def _check_writable(self) -> None:
        """Raise `Closed`, or `ReadOnly` if the store was opened to be read only."""
        self._check_usable()

    # -- tables

    def queue(
        self,
        name: str,
        *,
        shards: int = 1,
        retention: Retention | None = None,
        headers: bool = False,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> QueueTable:
        """Return a queue; create it if it does not exist, unless `create=False` (`NotFound`).

        `retention` and `headers` (whether its messages may have some) are for a new queue; `alter` changes them. With
        `changes` (True, or a `ChangeOptions`), a new queue has a change feed.

        >>> orders = store.queue("orders", shards=2, retention=penstock.Retention(age_s=7 * 86_400))
        """
        options = QUEUE.options(retention, headers=headers, changes=changes)
        info = self._table(name, QUEUE, shards, options, create=create, storage=storage, encrypted=encrypted)
        QUEUE.check_made(info, retention, headers=headers)
        check_feed(info, QUEUE, changes)
        return QUEUE.table(self._port, info, durable=self._durable)

    def series(
        self,
        name: str,
        *,
        shards: int = 1,
        options: SeriesOptions | None = None,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> SeriesTable:
        """Return a series table; create it, with `options`, if it does not exist, unless `create=False`.

        With `changes` (True, or a `ChangeOptions`), a new table has a change feed. `encrypted` is for a new
        table, by default as the store's settings say.

        >>> load = store.series("load", options=penstock.SeriesOptions(retention_s=30 * 86_400))
        """
        kind = series_kind()
        encoded = kind.options(options, changes)
        info = self._table(name, kind, shards, encoded, create=create, storage=storage, encrypted=encrypted)
        kind.check_made(info, options)
        check_feed(info, kind, changes)
        return kind.table(self._port, info, durable=self._durable)

    def vector(
        self,
        name: str,
        *,
        dimensions: int | None = None,
        metric: Metric | None = None,
        shards: int = 1,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> VectorTable:
        """Return a vector table; create it if it does not exist, unless `create=False` (`NotFound`).

        `dimensions` (of a new table) and `metric` (cosine by default, dot or euclidean) are fixed for a table; they may
        be omitted for an existing one. With `changes` (True, or a `ChangeOptions`), a new table has a change feed.
        `encrypted` is for a new table, by default as the store's settings say.

        >>> texts = store.vector("texts", dimensions=384, metric="cosine")
        """
        info, kind = self._find(check_name(name)), vector_kind()
        if info is None or dimensions is not None:
            options = kind.options(dimensions, metric, changes) if flag(create, "create") else b""
        else:
            options = info.options
        info = self._table(name, kind, shards, options, create=create, storage=storage, encrypted=encrypted)
        kind.check_made(info, dimensions, metric)
        check_feed(info, kind, changes)
        return kind.table(self._port, info, durable=self._durable)

    def create(
        self,
        name: str,
        kind: str,
        *,
        shards: int = 1,
        options: bytes | None = None,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> Any:
        """Return a table of any kind, also of another package; create it if absent. The kind encodes `options`."""
        table_kind = find_kind(kind) if isinstance(kind, str) else None  # type: ignore[redundant-expr]
        if table_kind is None:
            raise Invalid(
                f"there is no kind {in_short(kind)}: the kinds are {', '.join(kind.name for kind in known_kinds())}"
            )
        options = table_kind.options_default if options is None else options
        info = self._table(name, table_kind, shards, options, create=True, storage=storage, encrypted=encrypted)
        return table_kind.table(self._port, info, durable=self._durable)

    def table(self, name: str) -> Any:
        """Return an existing table of any kind; `NotFound` if there is none."""
        info = self._info(name)
        return kind_named(info.kind, name).table(self._port, info, durable=self._durable)

    def _find(self, name: str) -> TableInfo | None:
        self._check_usable()
        return self._port.table(name)

    def _unknown(self, name: str) -> NotFound:
        return NotFound(f"there is no table {name}: the store has {', '.join(self.tables()) or 'none'}")

    def tables(self) -> list[str]:
        """Return the names of all tables.

        >>> "users" in store.tables()
        True
        """
        self._check_usable()
        return [info.name for info in self._port.tables()]

    def drop(self, name: str) -> None:
        """Delete a table and its contents.

        >>> drafts = store.kv("drafts")
        >>> store.drop("drafts")
        """
        self._check_usable()
        try:
            self._port.drop(check_name(name))
        except NotFound:
            raise self._unknown(name) from None

    def alter(
        self,
        name: str,
        *,
        compression: CompressionConfig | EllipsisType = ...,
        encryption: EncryptionConfig | EllipsisType | None = ...,
        retention: RetentionPolicy | EllipsisType = ...,
        archive: ArchivePolicy | EllipsisType | None = ...,
        wal_dir: str | EllipsisType = ...,
        chunk_dir: str | EllipsisType = ...,
        level_compression: tuple[CompressionConfig, ...] | EllipsisType = ...,
        lag_max: int | EllipsisType | None = ...,
    ) -> StorageOptions:
        """Change storage options of a table, durably and while it is in use; return all of them.

        Omitted ones stay. Those for new files hold from the next file on. `Invalid` for what cannot change: the
        folders, and whether the table is encrypted.

        >>> store.alter("users", archive=None).chunk_dir
        'tables'
        """
        self._check_writable()
        arguments = {
            "compression": compression,
            "encryption": encryption,
            "retention": retention,
            "archive": archive,
            "wal_dir": wal_dir,
            "chunk_dir": chunk_dir,
            "level_compression": level_compression,
            "lag_max": lag_max,
        }
        changes = {option: value for option, value in arguments.items() if value is not ...}
        for _ in range(ALTER_ATTEMPTS):
            info = self._info(name)
            stored = encode_storage(changed(info.name, info.storage_options, changes))
            info = self._port.configure(info, stored)
            if info.storage == stored:
                return info.storage_options
        raise Backpressure(f"the options of table {name} are being changed by others: retry later")

    @abstractmethod
    def describe(self, name: str) -> TableDescription:
        """Return how a table is stored, how far each shard is, and the gates of its jobs."""

    @abstractmethod
    def wait_for_change(self, name: str, after: int, *, timeout_s: float = 60.0) -> TableDescription:
        """Wait until the description of a table has a later generation than `after`; return it."""

    @abstractmethod
    def drain(self, name: str, *, timeout_s: float = DRAIN_S) -> TableDescription:
        """Refuse new rows of a table, also after a restart, and put all that was written into its files."""

    @abstractmethod
    def reactivate(self, name: str) -> TableDescription:
        """Let a table that was drained take writes again."""

    # -- durability and consistency

    @abstractmethod
    def statistics(self) -> StoreStatistics:
        """Return the state of the store now: its epochs, its LSNs and the watermarks of every open partition."""

    @abstractmethod
    def subscribe(self) -> StoreSubscription:
        """Return a subscription to the store's LSN and epochs as they move."""

    def flush(self, epoch: int | None = None, timeout_s: float = 60.0) -> Acknowledgement:
        """Wait until all writes up to `epoch` are durable; None or 0 means all writes so far.

        >>> epoch = users.put(b"ada", b"1815")
        >>> store.flush(epoch).durability.value
        'disk'
        """
        self._check_writable()
        return self._port.flush(check_epoch(epoch), seconds(timeout_s, "timeout_s", math.inf))

    def wait_for(self, lsn: int, *, tables: Iterable[str] | None = None, timeout_s: float = 60.0) -> int:
        """Wait until tables have applied every record up to `lsn`; None means all tables. Return the LSN they reached.

        A snapshot taken next holds these records. `WaitExpired` after `timeout_s`; `PartitionPaused` at once if one of
        the tables is paused or frozen.

        >>> lsn = store.queue("events").append(b"e").lsn
        >>> store.wait_for(lsn, tables=["events"], timeout_s=10.0) >= lsn
        True
        """
        self._check_usable()
        lsn = whole(lsn, "lsn", 0, (1 << 63) - 1)
        if isinstance(tables, (str, bytes)):
            raise Invalid(f"tables is a list of names, not {in_short(tables)}: give [{in_short(tables)}]")
        names = None if tables is None else [check_name(name) for name in tables]
        infos = self._port.tables() if names is None else [self._existing(name) for name in names]
        return self._port.wait_for(lsn, infos, seconds(timeout_s, "timeout_s", math.inf))

    def _existing(self, name: str) -> TableInfo:
        info = self._find(name)
        if info is None:
            raise self._unknown(name)
        return info

    def batch(self, *, token: tuple[str, int] | None = None, durable: bool = True) -> StoreBatch:
        """Begin an atomic batch of writes to any tables; with a token, it is applied at most once.

        >>> with store.batch(token=("loader", 17)) as batch:  # all or nothing, and only once
        ...     epoch = batch.kv("users").put(b"ada", b"1815")
        ...     epoch = batch.queue("events").put(b"changed", key=b"ada")
        >>> batch.duplicate
        False
        """
        self._check_writable()
        token = None if token is None else check_token(token)
        return StoreBatch(self._port, token=token, durable=flag(durable, "durable"), find=self._find_cached)

    def snapshot(self) -> StoreSnapshot:
        """Take a snapshot of all tables at one LSN; it holds everything that is applied.

        >>> with store.snapshot() as snapshot:
        ...     snapshot.kv("users").to_arrow().num_rows
        1
        """
        self._check_usable()
        return StoreSnapshot(self._port.snapshot())

    # -- bulk loads

    def load(self, name: str, rows: ArrowSource, *, token: tuple[str, int] | None = None) -> LoadReport:
        """Write many rows to a table, durably and all or nothing; with a token, at most once.

        `rows` is an Arrow table or stream, of any library, in any order. A few rows go through the journal; many are
        built into sorted files in this process, which the store adopts as they are.

        >>> store.load("users", pyarrow.table({"key": [b"bob", b"eve"], "value": [b"1912", b"1990"]})).rows
        2
        """
        with self.batch(token=token) as batch:
            count = batch.load(name, rows)
        return LoadReport(0 if batch.duplicate else count, batch.duplicate)

    def prepare(self, name: str, rows: ArrowSource, *, lease_s: float = LEASE_S) -> PreparedLoad:
        """Build the files of a load, for `StoreBatch.load` to commit, here or in another process.

        Files that are not committed within `lease_s` seconds are removed.

        >>> prepared = store.prepare("users", pyarrow.table({"key": [b"bob"], "value": [b"1912"]}))
        >>> with store.batch() as batch:
        ...     rows = batch.load("users", prepared)
        """
        return prepare(self._port, self._info(name), rows, lease_s)

    def stage(self, name: str, shard: int = 0, *, count: int = 1, lease_s: float = 3600.0) -> list[StagedFile]:
        """Reserve files, for `lease_s` seconds, that are built elsewhere and added by `batch().adopt`.

        >>> files = store.stage("users", count=2, lease_s=600.0)
        """
        info = self._info(name)
        shard = whole(shard, f"a shard of table {info.name}", 0, info.shards - 1)
        count, lease_s = check_staging(count, lease_s)
        return self._port.stage(partitions_of(info)[shard], count, lease_s)


class StoreSnapshot(KvOfSnapshot):
    """Read-only view of all tables at one LSN.

    >>> with store.snapshot() as snapshot:
    ...     len(snapshot.kv("users")), len(snapshot.queue("events").to_arrow())
    (1, 1)
    """

    def __init__(self, port: SnapshotReading) -> None:
        self._port = port

    def __repr__(self) -> str:
        return f"<{type(self).__name__} at LSN {self.lsn}>"

    @property
    def lsn(self) -> int:
        """The LSN of the last record that it holds."""
        return self._port.lsn

    def tables(self) -> list[str]:
        """Return the names of all tables.

        >>> "users" in snapshot.tables()
        True
        """
        return [info.name for info in self._port.tables()]

    def table(self, name: str) -> Any:
        """Return a table of any kind."""
        info = self._info(name)
        return kind_named(info.kind, name).reader(self._port, info)

    def queue(self, name: str) -> QueueView:
        """Return a queue.

        >>> snapshot.queue("events").read(limit=1)[0].payload
        b'hello'
        """
        return QUEUE.reader(self._port, self._info(name, QUEUE))

    def series(self, name: str) -> SeriesReader:
        """Return a series table.

        >>> snapshot.series("metrics").select("cpu").num_rows
        1
        """
        return series_kind().reader(self._port, self._info(name, series_kind()))

    def vector(self, name: str) -> VectorReader:
        """Return a vector table.

        >>> snapshot.vector("documents").search([1.0, 0.0], k=1)[0].id
        'a'
        """
        return vector_kind().reader(self._port, self._info(name, vector_kind()))

    def _find(self, name: str) -> TableInfo | None:
        return self._port.table(name)

    def _unknown(self, name: str) -> NotFound:
        return NotFound(f"there is no table {name} in this snapshot")

    def close(self) -> None:
        """Release the files of the snapshot.

        >>> snapshot.close()  # `with` does it
        """
        self._port.close()

    def __enter__(self) -> StoreSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
