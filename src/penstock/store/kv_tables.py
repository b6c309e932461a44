"""`kv` of a store, a batch and a snapshot: the overloads tell type checkers the Python types of values and keys.

Thread: any.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Literal, overload

from penstock.kinds import Port, SnapshotReading
from penstock.kinds.changes import ChangeOptions
from penstock.kv.table import KvReader, KvTable
from penstock.kv.text_keys import TextKvReader, TextKvTable
from penstock.kv.values import AnyValueType, DecimalType, Json, KeyType, StructType
from penstock.partition.storage_options import StorageOptions
from penstock.registry import KV
from penstock.store.naming import CreatedTables, NamedTables, check_feed


class KvOfStore(CreatedTables):
    """The kv tables of a store."""

    @overload
    def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: Literal["bytes"] | None = None,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> KvTable[bytes]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: Literal["utf8"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> KvTable[str]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: Literal["json"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> KvTable[Json]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: Literal["int64"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> KvTable[int]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: Literal["float64"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> KvTable[float]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: DecimalType,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> KvTable[Decimal]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: StructType,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
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
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> TextKvTable[bytes]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        key: Literal["utf8"],
        shards: int = 1,
        value: Literal["utf8"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> TextKvTable[str]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        key: Literal["utf8"],
        shards: int = 1,
        value: Literal["json"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> TextKvTable[Json]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        key: Literal["utf8"],
        shards: int = 1,
        value: Literal["int64"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> TextKvTable[int]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        key: Literal["utf8"],
        shards: int = 1,
        value: Literal["float64"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> TextKvTable[float]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        key: Literal["utf8"],
        shards: int = 1,
        value: DecimalType,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> TextKvTable[Decimal]: ...

    @overload
    def kv(
        self,
        name: str,
        *,
        key: Literal["utf8"],
        shards: int = 1,
        value: StructType,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> TextKvTable[dict[str, object]]: ...

    def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: AnyValueType | None = None,
        key: KeyType | None = None,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> Any:
        """Return a kv table; create it if it does not exist, unless `create=False` (`NotFound`).

        `value` is the type of its values, and `key` of its keys: bytes or utf8. They may be omitted for an existing
        table: type checkers then take them for bytes. `KindMismatch` if the table holds another type. With `changes`
        (True, or a `ChangeOptions`), a new table has a change feed. `encrypted` is for a new table, by default as
        the store's settings say.

        >>> visits = store.kv("visits", value="int64", shards=2)
        >>> visits[b"ada"] = 1
        """
        options = KV.options(value, key, changes)
        info = self._table(name, KV, shards, options, create=create, storage=storage, encrypted=encrypted)
        check_feed(info, KV, changes)
        info = KV.widened(self._port, info, value, key)
        return KV.of_types(KV.table(self._port, info, durable=self._durable), value, key)


class KvOfBatch(NamedTables):
    """The kv tables of a batch."""

    _writes: Port

    @overload
    def kv(self, name: str, *, value: Literal["bytes"] | None = None) -> KvTable[bytes]: ...

    @overload
    def kv(self, name: str, *, value: Literal["utf8"]) -> KvTable[str]: ...

    @overload
    def kv(self, name: str, *, value: Literal["json"]) -> KvTable[Json]: ...

    @overload
    def kv(self, name: str, *, value: Literal["int64"]) -> KvTable[int]: ...

    @overload
    def kv(self, name: str, *, value: Literal["float64"]) -> KvTable[float]: ...

    @overload
    def kv(self, name: str, *, value: DecimalType) -> KvTable[Decimal]: ...

    @overload
    def kv(self, name: str, *, value: StructType) -> KvTable[dict[str, object]]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: Literal["bytes"] | None = None) -> TextKvTable[bytes]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: Literal["utf8"]) -> TextKvTable[str]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: Literal["json"]) -> TextKvTable[Json]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: Literal["int64"]) -> TextKvTable[int]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: Literal["float64"]) -> TextKvTable[float]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: DecimalType) -> TextKvTable[Decimal]: ...

    @overload
    def kv(self, name: str, *, key: Literal["utf8"], value: StructType) -> TextKvTable[dict[str, object]]: ...

    def kv(self, name: str, *, value: AnyValueType | None = None, key: KeyType | None = None) -> Any:
        """Return an existing kv table, whose writes join this batch; `value` and `key` are its types.

        >>> with store.batch() as batch:
        ...     epoch = batch.kv("users").put(b"ada", b"1815")
        """
        return KV.of_types(KV.table(self._writes, self._info(name, KV), durable=False), value, key)


class KvOfSnapshot(NamedTables):
    """The kv tables of a snapshot."""

    _port: SnapshotReading

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
        """Return a kv table; `value` and `key` are the types of its values and keys, for type checkers.

        >>> with store.snapshot() as snapshot:
        ...     snapshot.kv("users")[b"ada"]
        b'1815'
        """
        return KV.of_types(KV.reader(self._port, self._info(name, KV)), value, key)
