"""The public operations that an owned store and a connected one share: tables by name, batches, snapshots, loads.

Thread: any.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from decimal import Decimal
from types import TracebackType
from typing import Any, Literal, overload

from penstock.arguments import ArrowSource, flag, in_short, seconds, whole
from penstock.coordinator import Acknowledgement
from penstock.errors import Invalid, KindMismatch, NotFound
from penstock.kinds import Kind, Port, SnapshotReading, partitions_of
from penstock.kv.table import KvReader, KvTable
from penstock.kv.text_keys import TextKvReader, TextKvTable
from penstock.kv.values import AnyValueType, DecimalType, Json, KeyType, StructType
from penstock.partition.ledger import TableInfo, check_token
from penstock.partition.reference import StagedFile, check_staging
from penstock.queue.options import Retention
from penstock.queue.table import QueueTable, QueueView
from penstock.registry import KINDS, KV, QUEUE, SERIES, check_name, check_shards, find_kind, kind_named
from penstock.series.options import SeriesOptions
from penstock.series.table import SeriesReader, SeriesTable
from penstock.store.batch import StoreBatch
from penstock.store.loading import LEASE_S, LoadReport, PreparedLoad, prepare
from penstock.store.naming import NamedTables, check_kind

EPOCH_MAX = (1 << 72) - 1  # 32 bits of the store's incarnation, then 40 of the write


def check_epoch(epoch: Any) -> int | None:
    """Return the epoch to wait for; None means all writes so far, and so does 0, the epoch of an empty write."""
    return None if epoch is None else whole(epoch, "an epoch", 0, EPOCH_MAX) or None


class Tables(NamedTables):
    """The operations of a store, over a port into it."""

    _port: Port
    _durable: bool

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

    @overload
    def kv(
        self, name: str, *, shards: int = 1, value: Literal["bytes"] | None = None, create: bool = True
    ) -> KvTable[bytes]: ...

    @overload
    def kv(self, name: str, *, shards: int = 1, value: Literal["utf8"], create: bool = True) -> KvTable[str]: ...

    @overload
    def kv(self, name: str, *, shards: int = 1, value: Literal["json"], create: bool = True) -> KvTable[Json]: ...

    @overload
    def kv(self, name: str, *, shards: int = 1, value: Literal["int64"], create: bool = True) -> KvTable[int]: ...

    @overload
    def kv(self, name: str, *, shards: int = 1, value: Literal["float64"], create: bool = True) -> KvTable[float]: ...

    @overload
    def kv(self, name: str, *, shards: int = 1, value: DecimalType, create: bool = True) -> KvTable[Decimal]: ...

    @overload
    def kv(
        self, name: str, *, shards: int = 1, value: StructType, create: bool = True
    ) -> KvTable[dict[str, object]]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        key: Literal["utf8"],
        shards: int = 1,
        value: Literal["bytes"] | None = None,
        create: bool = True,
    ) -> TextKvTable[bytes]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], shards: int = 1, value: Literal["utf8"], create: bool = True
    ) -> TextKvTable[str]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], shards: int = 1, value: Literal["json"], create: bool = True
    ) -> TextKvTable[Json]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], shards: int = 1, value: Literal["int64"], create: bool = True
    ) -> TextKvTable[int]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], shards: int = 1, value: Literal["float64"], create: bool = True
    ) -> TextKvTable[float]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], shards: int = 1, value: DecimalType, create: bool = True
    ) -> TextKvTable[Decimal]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], shards: int = 1, value: StructType, create: bool = True
    ) -> TextKvTable[dict[str, object]]: ...

    def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: AnyValueType | None = None,
        key: KeyType | None = None,
        create: bool = True,
    ) -> Any:
        """Return a kv table; create it if it does not exist, unless `create=False` (`NotFound`).

        `value` is the type of its values, and `key` of its keys: bytes or utf8. They may be omitted for an existing
        table: type checkers then take them for bytes. `KindMismatch` if the table holds another type.
        """
        info = self._table(name, KV, shards, KV.options(value, key), create=create)
        info = KV.widened(self._port, info, value, key)
        return KV.of_types(KV.table(self._port, info, durable=self._durable), value, key)

    def queue(
        self,
        name: str,
        *,
        shards: int = 1,
        retention: Retention | None = None,
        headers: bool = False,
        create: bool = True,
    ) -> QueueTable:
        """Return a queue; create it if it does not exist, unless `create=False` (`NotFound`).

        `retention` and `headers` (whether its messages may have some) are for a new queue; `alter` changes them.
        """
        info = self._table(name, QUEUE, shards, QUEUE.options(retention, headers=headers), create=create)
        QUEUE.check_made(info, retention, headers=headers)
        return QUEUE.table(self._port, info, durable=self._durable)

    def series(
        self, name: str, *, shards: int = 1, options: SeriesOptions | None = None, create: bool = True
    ) -> SeriesTable:
        """Return a series table; create it, with `options`, if it does not exist, unless `create=False`."""
        info = self._table(name, SERIES, shards, SERIES.options(options), create=create)
        SERIES.check_made(info, options)
        return SERIES.table(self._port, info, durable=self._durable)

    def create(self, name: str, kind: str, *, shards: int = 1, options: bytes | None = None) -> Any:
        """Return a table of any kind, also of another package; create it if absent. The kind encodes `options`."""
        table_kind = find_kind(kind) if isinstance(kind, str) else None  # type: ignore[redundant-expr]
        if table_kind is None:
            raise Invalid(f"there is no kind {in_short(kind)}: the kinds are {', '.join(KINDS)}")
        options = table_kind.options_default if options is None else options
        info = self._table(name, table_kind, shards, options, create=True)
        return table_kind.table(self._port, info, durable=self._durable)

    def table(self, name: str) -> Any:
        """Return an existing table of any kind; `NotFound` if there is none."""
        info = self._info(name)
        return kind_named(info.kind, name).table(self._port, info, durable=self._durable)

    def _table(self, name: str, kind: Kind, shards: int, options: bytes, *, create: bool) -> TableInfo:
        name, shards, create = check_name(name), check_shards(shards), flag(create, "create")
        info = self._known(name)
        if info is None:
            if not create:
                raise self._unknown(name)
            info = self._port.create(name, kind.name, shards, options)
        check_kind(info, kind)
        if shards not in (1, info.shards):
            raise KindMismatch(f"table {name} has {info.shards} shards, not {shards}: leave shards= out")
        return info

    def _known(self, name: str) -> TableInfo | None:
        """Return a table as `_find` does; a client may do so from what it was told a moment ago."""
        return self._find(name)

    def _find(self, name: str) -> TableInfo | None:
        self._check_usable()
        return self._port.table(name)

    def _unknown(self, name: str) -> NotFound:
        return NotFound(f"there is no table {name}: the store has {', '.join(self.tables()) or 'none'}")

    def tables(self) -> list[str]:
        """Return the names of all tables."""
        self._check_usable()
        return [info.name for info in self._port.tables()]

    def drop(self, name: str) -> None:
        """Delete a table and its contents."""
        self._check_usable()
        self._port.drop(check_name(name))

    # -- durability and consistency

    def flush(self, epoch: int | None = None, timeout_s: float = 60.0) -> Acknowledgement:
        """Wait until all writes up to `epoch` are durable; None or 0 means all writes so far."""
        self._check_writable()
        return self._port.flush(check_epoch(epoch), seconds(timeout_s, "timeout_s", math.inf))

    def batch(self, *, token: tuple[str, int] | None = None, durable: bool = True) -> StoreBatch:
        """Begin an atomic batch of writes to any tables; with a token, it is applied at most once."""
        self._check_writable()
        token = None if token is None else check_token(token)
        return StoreBatch(self._port, token=token, durable=flag(durable, "durable"))

    def snapshot(self) -> StoreSnapshot:
        """Take a snapshot of all tables at one LSN; it holds everything that is applied."""
        self._check_usable()
        return StoreSnapshot(self._port.snapshot())

    # -- bulk loads

    def load(self, name: str, rows: ArrowSource, *, token: tuple[str, int] | None = None) -> LoadReport:
        """Write many rows to a table, durably and all or nothing; with a token, at most once.

        `rows` is an Arrow table or stream, of any library, in any order. A few rows go through the journal; many are
        built into sorted files in this process, which the store adopts as they are.
        """
        with self.batch(token=token) as batch:
            count = batch.load(name, rows)
        return LoadReport(0 if batch.duplicate else count, batch.duplicate)

    def prepare(self, name: str, rows: ArrowSource, *, lease_s: float = LEASE_S) -> PreparedLoad:
        """Build the files of a load, for `StoreBatch.load` to commit, here or in another process.

        Files that are not committed within `lease_s` seconds are removed.
        """
        return prepare(self._port, self._info(name), rows, lease_s)

    def stage(self, name: str, shard: int = 0, *, count: int = 1, lease_s: float = 3600.0) -> list[StagedFile]:
        """Reserve files, for `lease_s` seconds, that are built elsewhere and added by `batch().adopt`."""
        info = self._info(name)
        shard = whole(shard, f"a shard of table {info.name}", 0, info.shards - 1)
        count, lease_s = check_staging(count, lease_s)
        return self._port.stage(partitions_of(info)[shard], count, lease_s)


class StoreSnapshot(NamedTables):
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
        return self._port.lsn

    def tables(self) -> list[str]:
        """Return the names of all tables."""
        return [info.name for info in self._port.tables()]

    def table(self, name: str) -> Any:
        """Return a table of any kind."""
        info = self._info(name)
        return kind_named(info.kind, name).reader(self._port, info)

    @overload
    def kv(self, name: str, *, value: Literal["bytes"] | None = None) -> KvReader[bytes]: ...

    @overload
    def kv(self, name: str, *, value: Literal["utf8"]) -> KvReader[str]: ...

    @overload
    def kv(self, name: str, *, value: Literal["json"]) -> KvReader[Json]: ...

    @overload
    def kv(self, name: str, *, value: Literal["int64"]) -> KvReader[int]: ...

    @overload
    def kv(self, name: str, *, value: Literal["float64"]) -> KvReader[float]: ...

    @overload
    def kv(self, name: str, *, value: DecimalType) -> KvReader[Decimal]: ...

    @overload
    def kv(self, name: str, *, value: StructType) -> KvReader[dict[str, object]]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: Literal["bytes"] | None = None) -> TextKvReader[bytes]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: Literal["utf8"]) -> TextKvReader[str]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: Literal["json"]) -> TextKvReader[Json]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: Literal["int64"]) -> TextKvReader[int]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: Literal["float64"]) -> TextKvReader[float]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: DecimalType) -> TextKvReader[Decimal]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: StructType) -> TextKvReader[dict[str, object]]: ...

    def kv(self, name: str, *, value: AnyValueType | None = None, key: KeyType | None = None) -> Any:
        """Return a kv table; `value` and `key` are the types of its values and keys, for type checkers."""
        return KV.of_types(KV.reader(self._port, self._info(name, KV)), value, key)

    def queue(self, name: str) -> QueueView:
        """Return a queue."""
        return QUEUE.reader(self._port, self._info(name, QUEUE))

    def series(self, name: str) -> SeriesReader:
        """Return a series table."""
        return SERIES.reader(self._port, self._info(name, SERIES))

    def _find(self, name: str) -> TableInfo | None:
        return self._port.table(name)

    def _unknown(self, name: str) -> NotFound:
        return NotFound(f"there is no table {name} in this snapshot")

    def close(self) -> None:
        """Release the files of the snapshot."""
        self._port.close()

    def __enter__(self) -> StoreSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
