"""Tables by name: the surface that an owned store and a connected one share.

Thread: any.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Literal, overload

from penstock.arguments import ArrowSource, seconds, whole
from penstock.coordinator import Acknowledgement
from penstock.errors import KindMismatch, NotFound
from penstock.kinds import Port, SnapshotReading, partitions_of
from penstock.kv.table import KvReader, KvTable, of_value_type
from penstock.kv.values import Json, Options, ValueType, check_value_type, encode_options
from penstock.partition.ledger import TableInfo, check_token
from penstock.partition.reference import StagedFile, check_staging
from penstock.queue.options import Retention, decode_queue_options, encode_queue_options, queue_options
from penstock.queue.table import QueueTable, QueueView
from penstock.registry import check_name, check_shards, kind_named
from penstock.store.batch import StoreBatch
from penstock.store.loading import LEASE_S, LoadReport, PreparedLoad, prepare

EPOCH_MAX = (1 << 72) - 1  # 32 bits of the store's incarnation before 40 of the write


def check_epoch(epoch: Any) -> int | None:
    """The epoch to wait for; None for all so far, as the 0 of a write of nothing."""
    return None if epoch is None else whole(epoch, "an epoch", 0, EPOCH_MAX) or None


class Tables(ABC):
    """What one does with a store, over a port into it."""

    _port: Port
    _durable: bool

    @abstractmethod
    def _check_usable(self) -> None:
        """Raise `Closed` if it is."""

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

    def kv(self, name: str, *, shards: int = 1, value: ValueType | None = None, create: bool = True) -> KvTable[Any]:
        """A kv table; made if it is absent, unless `create=False` (`NotFound`).

        `value` is the type of its values. A table that exists is opened without it, too: type checkers then take its
        values for bytes. `KindMismatch` if the table holds another type.
        """
        wanted = Options("bytes" if value is None else check_value_type(value))
        info = self._table(name, "kv", shards, encode_options(wanted), create=create)
        return of_value_type(KvTable(self._port, info, durable=self._durable), value)

    def queue(
        self, name: str, *, shards: int = 1, retention: Retention | None = None, create: bool = True
    ) -> QueueTable:
        """A queue; made if it is absent, unless `create=False` (`NotFound`). `retention` counts when it is made."""
        wanted = queue_options(retention)
        info = self._table(name, "queue", shards, encode_queue_options(wanted), create=create)
        if retention is not None and decode_queue_options(info.options) != wanted:
            raise KindMismatch(f"queue {name} was made with another retention")
        return QueueTable(self._port, info, durable=self._durable)

    def table(self, name: str) -> Any:
        """A table of whatever kind it is; `NotFound` if there is none."""
        info = self._existing(name)
        return kind_named(info.kind, name).table(self._port, info, durable=self._durable)

    def _table(self, name: str, kind: str, shards: int, options: bytes, *, create: bool) -> TableInfo:
        self._check_usable()
        name, shards = check_name(name), check_shards(shards)
        info = self._port.table(name)
        if info is None:
            if not create:
                raise self._unknown(name)
            info = self._port.create(name, kind, shards, options)
        if info.kind != kind:
            raise KindMismatch(f"table {name} is of the kind {info.kind}, not {kind}")
        if shards not in (1, info.shards):
            raise KindMismatch(f"table {name} has {info.shards} shards, not {shards}")
        return info

    def _existing(self, name: str) -> TableInfo:
        self._check_usable()
        info = self._port.table(check_name(name))
        if info is None:
            raise self._unknown(name)
        return info

    def _unknown(self, name: str) -> NotFound:
        return NotFound(f"there is no table {name}: it has {', '.join(self.tables()) or 'none'}")

    def tables(self) -> list[str]:
        """The names of all tables."""
        self._check_usable()
        return [info.name for info in self._port.tables()]

    def drop(self, name: str) -> None:
        """Remove a table and all that is in it."""
        self._check_usable()
        self._port.drop(check_name(name))

    # -- durability and consistency

    def flush(self, epoch: int | None = None, timeout_s: float = 60.0) -> Acknowledgement:
        """Wait until all writes up to `epoch` are durable; None, or the 0 of a write of nothing: all so far."""
        self._check_usable()
        return self._port.flush(check_epoch(epoch), seconds(timeout_s, "timeout_s", math.inf))

    def batch(self, *, token: tuple[str, int] | None = None, durable: bool = True) -> StoreBatch:
        """Writes to any tables that happen together or not at all; with a token at most once."""
        self._check_usable()
        return StoreBatch(self._port, token=None if token is None else check_token(token), durable=durable)

    def snapshot(self) -> StoreSnapshot:
        """Everything that is applied, at one LSN."""
        self._check_usable()
        return StoreSnapshot(self._port.snapshot())

    # -- bulk loads

    def load(self, name: str, rows: ArrowSource, *, token: tuple[str, int] | None = None) -> LoadReport:
        """Write many rows to a table, all or nothing, durably; with a token at most once.

        `rows` is an Arrow table or stream, of any library, in any order. Little of it goes through the journal, much is
        built into sorted files here and taken in as it is.
        """
        with self.batch(token=token) as batch:
            count = batch.load(name, rows)
        return LoadReport(0 if batch.duplicate else count, batch.duplicate)

    def prepare(self, name: str, rows: ArrowSource, *, lease_s: float = LEASE_S) -> PreparedLoad:
        """Build the files of a load and commit nothing: `StoreBatch.load` does, here or in another process.

        Without a commit they are removed after `lease_s` seconds.
        """
        return prepare(self._port, self._existing(name), rows, lease_s)

    def stage(self, name: str, shard: int = 0, *, count: int = 1, lease_s: float = 3600.0) -> list[StagedFile]:
        """Places for files to be built elsewhere and taken in by `batch().adopt`; kept for `lease_s`."""
        info = self._existing(name)
        shard = whole(shard, f"a shard of table {info.name}", 0, info.shards - 1)
        count, lease_s = check_staging(count, lease_s)
        return self._port.stage(partitions_of(info)[shard], count, lease_s)


class StoreSnapshot:
    """All tables at one LSN."""

    def __init__(self, port: SnapshotReading) -> None:
        self._port = port

    @property
    def lsn(self) -> int:
        return self._port.lsn

    def tables(self) -> list[str]:
        """The names of all tables."""
        return [info.name for info in self._port.tables()]

    def table(self, name: str) -> Any:
        """A table of whatever kind it is."""
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

    def kv(self, name: str, *, value: ValueType | None = None) -> KvReader[Any]:
        """A kv table; `value` is the type of its values, for type checkers."""
        found: KvReader[Any] = self._of_kind(name, "kv")
        return of_value_type(found, value)

    def queue(self, name: str) -> QueueView:
        found: QueueView = self._of_kind(name, "queue")
        return found

    def _of_kind(self, name: str, kind: str) -> Any:
        info = self._info(name)
        if info.kind != kind:
            raise KindMismatch(f"table {name} is of the kind {info.kind}, not {kind}")
        return self.table(name)

    def _info(self, name: str) -> TableInfo:
        info = self._port.table(check_name(name))
        if info is None:
            raise NotFound(f"there is no table {name} in this snapshot")
        return info

    def close(self) -> None:
        """Let go of the files it needs."""
        self._port.close()

    def __enter__(self) -> StoreSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
