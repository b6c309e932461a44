"""The asyncio forms of kv tables, and `kv` of a store, a snapshot and a batch.

Thread: one event loop for each store.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any, Literal, TypeVar, overload

from penstock.aio.bridge import AsyncForm, awaited, iterated
from penstock.client.store import RemoteStore
from penstock.kinds.changes import ChangeOptions
from penstock.kv.table import KvReader, KvTable
from penstock.kv.text_keys import TextKvReader, TextKvTable
from penstock.kv.values import AnyValueType, DecimalType, Json, KeyType, StructType
from penstock.partition.storage_options import StorageOptions
from penstock.store.batch import StoreBatch
from penstock.store.store import Store
from penstock.store.tables import StoreSnapshot

T = TypeVar("T")
V = TypeVar("V")
K = TypeVar("K", bound=KvReader[Any])
X = TypeVar("X", bound=TextKvReader[Any])


class AsyncKvReader(AsyncForm[K]):
    """A kv table of a snapshot. Methods are those of `KvReader`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("users")
    ...         async with store.snapshot() as snapshot:
    ...             users = snapshot.kv("users")
    ...             return await users.get(b"ada", b"unknown")
    >>> asyncio.run(main())
    b'unknown'
    """

    multi_get = awaited(KvReader.multi_get)
    get_row = awaited(KvReader.get_row)
    count = awaited(KvReader.count)
    statistics = awaited(KvReader.statistics)
    to_arrow = awaited(KvReader.to_arrow)
    scan = iterated(KvReader.scan)
    scan_arrow = iterated(KvReader.scan_arrow)
    changes = iterated(KvReader.changes)

    @overload
    async def get(self: AsyncForm[KvReader[V]], key: bytes) -> V | None: ...

    @overload
    async def get(self: AsyncForm[KvReader[V]], key: bytes, default: T) -> V | T: ...

    async def get(self: AsyncForm[KvReader[Any]], key: bytes, default: Any = None) -> Any:
        """Return the value of a key."""
        return await self._threads.run(partial(self._sync.get, key, default))


class AsyncKvTable(AsyncKvReader[KvTable[V]]):
    """A kv table. Methods are those of `KvTable`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         users = await store.kv("users")
    ...         await users.put(b"ada", b"1815")
    ...         return [key async for key, value in users.scan()]
    >>> asyncio.run(main())
    [b'ada']
    """

    put = awaited(KvTable.put)
    put_many = awaited(KvTable.put_many)
    delete = awaited(KvTable.delete)
    delete_range = awaited(KvTable.delete_range)
    merge = awaited(KvTable.merge)


class AsyncTextKvReader(AsyncForm[X]):
    """A kv table of a snapshot, with keys of text. Methods are those of `TextKvReader`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("cities", key="utf8")
    ...         async with store.snapshot() as snapshot:
    ...             cities = snapshot.kv("cities", key="utf8")
    ...             return await cities.count()
    >>> asyncio.run(main())
    0
    """

    get = awaited(TextKvReader.get)
    get_row = awaited(TextKvReader.get_row)
    multi_get = awaited(TextKvReader.multi_get)
    count = awaited(TextKvReader.count)
    statistics = awaited(TextKvReader.statistics)
    to_arrow = awaited(TextKvReader.to_arrow)
    scan = iterated(TextKvReader.scan)
    scan_arrow = iterated(TextKvReader.scan_arrow)
    changes = iterated(TextKvReader.changes)


class AsyncTextKvTable(AsyncTextKvReader[TextKvTable[V]]):
    """A kv table with keys of text. Methods are those of `TextKvTable`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         cities = await store.kv("cities", key="utf8", value="int64")
    ...         await cities.put("Zürich", 443_000)
    ...         return await cities.get("Zürich")
    >>> asyncio.run(main())
    443000
    """

    put = awaited(TextKvTable.put)
    put_many = awaited(TextKvTable.put_many)
    delete = awaited(TextKvTable.delete)
    delete_range = awaited(TextKvTable.delete_range)
    merge = awaited(TextKvTable.merge)


class AsyncKvOfStore(AsyncForm[Store | RemoteStore]):
    """The kv tables of a store."""

    @overload
    async def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: Literal["bytes"] | None = None,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> AsyncKvTable[bytes]: ...

    @overload
    async def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: Literal["utf8"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> AsyncKvTable[str]: ...

    @overload
    async def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: Literal["json"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> AsyncKvTable[Json]: ...

    @overload
    async def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: Literal["int64"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> AsyncKvTable[int]: ...

    @overload
    async def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: Literal["float64"],
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> AsyncKvTable[float]: ...

    @overload
    async def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: DecimalType,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> AsyncKvTable[Decimal]: ...

    @overload
    async def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: StructType,
        create: bool = True,
        changes: bool | ChangeOptions = False,
        storage: StorageOptions | None = None,
        encrypted: bool | None = None,
    ) -> AsyncKvTable[dict[str, object]]: ...

    @overload
    async def kv(
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
    ) -> AsyncTextKvTable[bytes]: ...

    @overload
    async def kv(
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
    ) -> AsyncTextKvTable[str]: ...

    @overload
    async def kv(
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
    ) -> AsyncTextKvTable[Json]: ...

    @overload
    async def kv(
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
    ) -> AsyncTextKvTable[int]: ...

    @overload
    async def kv(
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
    ) -> AsyncTextKvTable[float]: ...

    @overload
    async def kv(
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
    ) -> AsyncTextKvTable[Decimal]: ...

    @overload
    async def kv(
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
    ) -> AsyncTextKvTable[dict[str, object]]: ...

    async def kv(
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
        """Return a kv table; create it if it does not exist, unless `create=False`."""
        find: Callable[..., Any] = self._sync.kv
        table = await self._threads.run(
            partial(
                find,
                name,
                shards=shards,
                value=value,
                key=key,
                create=create,
                changes=changes,
                storage=storage,
                encrypted=encrypted,
            )
        )
        return (AsyncTextKvTable if isinstance(table, TextKvTable) else AsyncKvTable)(table, self._threads)


class AsyncKvOfSnapshot(AsyncForm[StoreSnapshot]):
    """The kv tables of a snapshot."""

    @overload
    def kv(self, name: str, *, value: Literal["bytes"] | None = None) -> AsyncKvReader[KvReader[bytes]]: ...

    @overload
    def kv(self, name: str, *, value: Literal["utf8"]) -> AsyncKvReader[KvReader[str]]: ...

    @overload
    def kv(self, name: str, *, value: Literal["json"]) -> AsyncKvReader[KvReader[Json]]: ...

    @overload
    def kv(self, name: str, *, value: Literal["int64"]) -> AsyncKvReader[KvReader[int]]: ...

    @overload
    def kv(self, name: str, *, value: Literal["float64"]) -> AsyncKvReader[KvReader[float]]: ...

    @overload
    def kv(self, name: str, *, value: DecimalType) -> AsyncKvReader[KvReader[Decimal]]: ...

    @overload
    def kv(self, name: str, *, value: StructType) -> AsyncKvReader[KvReader[dict[str, object]]]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], value: Literal["bytes"] | None = None
    ) -> AsyncTextKvReader[TextKvReader[bytes]]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], value: Literal["utf8"]
    ) -> AsyncTextKvReader[TextKvReader[str]]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], value: Literal["json"]
    ) -> AsyncTextKvReader[TextKvReader[Json]]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], value: Literal["int64"]
    ) -> AsyncTextKvReader[TextKvReader[int]]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], value: Literal["float64"]
    ) -> AsyncTextKvReader[TextKvReader[float]]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], value: DecimalType
    ) -> AsyncTextKvReader[TextKvReader[Decimal]]: ...

    @overload
    def kv(
        self, name: str, *, key: Literal["utf8"], value: StructType
    ) -> AsyncTextKvReader[TextKvReader[dict[str, object]]]: ...

    def kv(self, name: str, *, value: AnyValueType | None = None, key: KeyType | None = None) -> Any:
        """Return a kv table at that LSN."""
        find: Callable[..., Any] = self._sync.kv
        table = find(name, value=value, key=key)
        return (AsyncTextKvReader if isinstance(table, TextKvReader) else AsyncKvReader)(table, self._threads)


class AsyncKvOfBatch(AsyncForm[StoreBatch]):
    """The kv tables of a batch: ordinary ones, which collect in memory."""

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
        """Return an existing kv table, whose writes join this batch."""
        find: Callable[..., Any] = self._sync.kv
        return find(name, value=value, key=key)
