"""The asyncio forms of snapshots and stores. Those of tables are in a module for each kind.

Thread: one event loop for each store.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import penstock
from penstock.aio.batch import AsyncBatch
from penstock.aio.bridge import AsyncOpening, awaited, awaited_as, formed
from penstock.aio.kv import AsyncKvOfSnapshot, AsyncKvOfStore
from penstock.aio.queue import AsyncQueueTable, AsyncQueueView
from penstock.aio.series import AsyncSeriesReader, AsyncSeriesTable
from penstock.client.connection import OWNER_TIMEOUT_S
from penstock.client.store import RemoteStore
from penstock.queue.table import QueueView
from penstock.series.table import SeriesReader
from penstock.server.opening import YIELD_S
from penstock.store.settings import StoreSettings
from penstock.store.store import Store
from penstock.store.tables import StoreSnapshot, Tables
from penstock.vector.options import Metric
from penstock.vector.table import VectorReader, VectorTable


<<<<<<< HEAD
T = TypeVar("T")
V = TypeVar("V")
K = TypeVar("K", bound=KvReader[Any])
Q = TypeVar("Q", bound=QueueView)
R = TypeVar("R", bound=SeriesReader)


class AsyncKvReader(AsyncForm[K]):
    """A kv table of a snapshot. Methods are those of `KvReader`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("users")
    ...         async with store.snapshot() as snapshot:
    ...             users = await snapshot.kv("users")
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


X = TypeVar("X", bound=TextKvReader[Any])


class AsyncTextKvReader(AsyncForm[X]):
    """A kv table of a snapshot, with keys of text. Methods are those of `TextKvReader`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("cities", key="utf8")
    ...         async with store.snapshot() as snapshot:
    ...             cities = await snapshot.kv("cities", key="utf8")
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


class AsyncQueueView(AsyncForm[Q]):
    """A queue of a snapshot. Methods are those of `QueueView`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.queue("events")
    ...         async with store.snapshot() as snapshot:
    ...             events = await snapshot.queue("events")
    ...             return await events.read()
    >>> asyncio.run(main())
    []
    """

    read = awaited(QueueView.read)
    read_arrow = awaited(QueueView.read_arrow)
    to_arrow = awaited(QueueView.to_arrow)
    scan_arrow = iterated(QueueView.scan_arrow)


class AsyncQueueTable(AsyncQueueView[QueueTable]):
    """A queue. Methods are those of `QueueTable`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         events = await store.queue("events")
    ...         await events.put(b"hello", durable=True)
    ...         return [message.payload for message in await events.read()]
    >>> asyncio.run(main())
    [b'hello']
    """

    put = awaited(QueueTable.put)
    put_many = awaited(QueueTable.put_many)
    append = awaited(QueueTable.append)
    trim = awaited(QueueTable.trim)
    seek = awaited(QueueTable.seek)
    bounds = awaited(QueueTable.bounds)
    statistics = awaited(QueueTable.statistics)
    alter = awaited(QueueTable.alter)
    consumers = awaited(QueueTable.consumers)

    def consumer(
        self,
        name: str,
        *,
        visibility_timeout_s: float = 30.0,
        deliveries_max: int | None = None,
        dead_letter: str | None = None,
    ) -> AsyncConsumer:
        """Return a consumer of this queue."""
        sync = self._sync.consumer(
            name,
            visibility_timeout_s=visibility_timeout_s,
            deliveries_max=deliveries_max,
            dead_letter=dead_letter,
        )
        return AsyncConsumer(sync, self._threads)


class AsyncSeriesReader(AsyncForm[R]):
    """A series table of a snapshot. Methods are those of `SeriesReader`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.series("metrics")
    ...         async with store.snapshot() as snapshot:
    ...             metrics = await snapshot.series("metrics")
    ...             return await metrics.labels()
    >>> asyncio.run(main())
    []
    """

    select = awaited(SeriesReader.select)
    to_arrow = awaited(SeriesReader.to_arrow)
    aggregate = awaited(SeriesReader.aggregate)
    query = awaited(SeriesReader.query)
    query_range = awaited(SeriesReader.query_range)
    series = awaited(SeriesReader.series)
    labels = awaited(SeriesReader.labels)
    label_values = awaited(SeriesReader.label_values)
    metadata = awaited(SeriesReader.metadata)
    cardinality = awaited(SeriesReader.cardinality)
    scan_arrow = iterated(SeriesReader.scan_arrow)


class AsyncSeriesTable(AsyncSeriesReader[SeriesTable]):
    """A series table. Methods are those of `SeriesTable`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         metrics = await store.series("metrics")
    ...         await metrics.write("cpu", 0.42, {"host": "a"}, durable=True)
    ...         return (await metrics.select("cpu")).num_rows
    >>> asyncio.run(main())
    1
    """

    write = awaited(SeriesTable.write)
    write_columns = awaited(SeriesTable.write_columns)
    write_arrow = awaited(SeriesTable.write_arrow)
    delete = awaited(SeriesTable.delete)
    alter = awaited(SeriesTable.alter)
    set_metadata = awaited(SeriesTable.set_metadata)


class AsyncVectorReader(AsyncForm[VectorReader]):
    """A vector table of a snapshot. Methods are those of `VectorReader`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.vector("docs", dimensions=2)
    ...         async with store.snapshot() as snapshot:
    ...             docs = await snapshot.vector("docs")
    ...             return await docs.count()
    >>> asyncio.run(main())
    0
    """

    get = awaited(VectorReader.get)
    search = awaited(VectorReader.search)
    count = awaited(VectorReader.count)
    statistics = awaited(VectorReader.statistics)
    to_arrow = awaited(VectorReader.to_arrow)
    scan_arrow = iterated(VectorReader.scan_arrow)


class AsyncVectorTable(AsyncForm[VectorTable]):
    """A vector table. Methods are those of `VectorTable`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         docs = await store.vector("docs", dimensions=2)
    ...         epoch = await docs.upsert(["a", "b"], [[1.0, 0.0], [0.0, 1.0]])
    ...         return (await docs.search([1.0, 0.1], k=1, after=epoch))[0].id
    >>> asyncio.run(main())
    'a'
    """

    upsert = awaited(VectorTable.upsert)
    delete = awaited(VectorTable.delete)
    get = awaited(VectorTable.get)
    search = awaited(VectorTable.search)
    count = awaited(VectorTable.count)
    statistics = awaited(VectorTable.statistics)
    to_arrow = awaited(VectorTable.to_arrow)
    scan_arrow = iterated(VectorTable.scan_arrow)


class AsyncConsumer(AsyncForm[Consumer]):
    """A consumer: `async for message in consumer`, or `get` and `ack`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         events = await store.queue("events")
    ...         await events.put(b"hello", durable=True)
    ...         consumer = events.consumer("worker")
    ...         async for message in consumer:
    ...             await consumer.ack(message)
    ...             return message.payload
    >>> asyncio.run(main())
    b'hello'
    """

    nack = awaited(Consumer.nack)
    extend = awaited(Consumer.extend)
    seek = awaited(Consumer.seek)
    forget = awaited(Consumer.forget)

    @property
    def name(self) -> str:
        return self._sync.name

    async def get(self, max: int = 100, timeout_s: float = 0.0) -> list[LeasedMessage]:  # noqa: A002 - it reads well
        """Take up to `max` messages that no other consumer of this name has; wait up to `timeout_s` for the first."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + timeout_s
        while True:
            async with self._threads.waiting:
                step_s = min(deadline_s - clock(), STEP_S)
                take = partial(self._sync.get, max, step_s if step_s > 0 else 0.0)
                messages = await self._threads.run(take, undo=self._give_back)
            if messages or clock() >= deadline_s:
                return messages

    def _give_back(self, messages: list[LeasedMessage]) -> None:
        if messages:
            self._sync.nack(messages)

    async def __aiter__(self) -> AsyncIterator[LeasedMessage]:
        while True:
            for message in await self.get(1, 60.0):
                yield message

    async def ack(self, messages: LeasedMessage | Iterable[LeasedMessage], *, batch: AsyncBatch | None = None) -> None:
        """Acknowledge messages, durably; with a batch, together with what that writes."""
        together = None if batch is None else batch.sync
        await self._threads.run(partial(self._sync.ack, messages, batch=together))

    async def position(self) -> dict[int, int]:
        """Return, for each shard, the sequence below which everything is acknowledged."""
        return await self._threads.run(lambda: self._sync.position)

    async def lag(self) -> int:
        """Return how many messages are not acknowledged."""
        return await self._threads.run(lambda: self._sync.lag)


class AsyncBatch(AsyncForm[StoreBatch]):
    """Writes that are committed together at the end of `async with`. Its tables collect in memory, without `await`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("users")
    ...         async with store.batch(token=("loader", 17)) as batch:
    ...             users = await batch.kv("users")
    ...             users.put(b"ada", b"1815")
    ...         return batch.duplicate
    >>> asyncio.run(main())
    False
    """

    queue = awaited(StoreBatch.queue)
    series = awaited(StoreBatch.series)
    vector = awaited(StoreBatch.vector)
    commit = awaited(StoreBatch.commit)

    @overload
    async def kv(self, name: str, *, value: Literal["bytes"] | None = None) -> KvTable[bytes]: ...

    @overload
    async def kv(self, name: str, *, value: Literal["utf8"]) -> KvTable[str]: ...

    @overload
    async def kv(self, name: str, *, value: Literal["json"]) -> KvTable[Json]: ...

    @overload
    async def kv(self, name: str, *, value: Literal["int64"]) -> KvTable[int]: ...

    @overload
    async def kv(self, name: str, *, value: Literal["float64"]) -> KvTable[float]: ...

    @overload
    async def kv(self, name: str, *, value: DecimalType) -> KvTable[Decimal]: ...

    @overload
    async def kv(self, name: str, *, value: StructType) -> KvTable[dict[str, object]]: ...

    @overload
    async def kv(self, name: str, *, key: Literal["utf8"], value: AnyValueType | None = None) -> TextKvTable[Any]: ...

    async def kv(self, name: str, *, value: AnyValueType | None = None, key: KeyType | None = None) -> Any:
        """Return an existing kv table, whose writes join this batch."""
        find: Callable[..., Any] = self._sync.kv
        return await self._threads.run(lambda: find(name, value=value, key=key))

    @property
    def sync(self) -> StoreBatch:
        """The batch itself."""
        return self._sync

    @property
    def duplicate(self) -> bool:
        """Whether its token was committed before."""
        return self._sync.duplicate

    async def __aenter__(self) -> AsyncBatch:
        self._sync.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._threads.run(partial(self._sync.__exit__, kind, error, trace))


class AsyncSnapshot(AsyncForm[StoreSnapshot]):
=======
class AsyncSnapshot(AsyncKvOfSnapshot):
>>>>>>> main
    """Read-only view of all tables at one LSN.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("users")
    ...         async with store.snapshot() as snapshot:
    ...             return snapshot.lsn > 0
    >>> asyncio.run(main())
    True
    """

    queue = awaited_as(AsyncQueueView[QueueView], StoreSnapshot.queue)
    series = awaited_as(AsyncSeriesReader[SeriesReader], StoreSnapshot.series)
    tables = awaited(StoreSnapshot.tables)
    close = awaited(StoreSnapshot.close)

    @property
    def lsn(self) -> int:
        return self._sync.lsn

<<<<<<< HEAD
    @overload
    async def kv(self, name: str, *, value: Literal["bytes"] | None = None) -> AsyncKvReader[KvReader[bytes]]: ...

    @overload
    async def kv(self, name: str, *, value: Literal["utf8"]) -> AsyncKvReader[KvReader[str]]: ...

    @overload
    async def kv(self, name: str, *, value: Literal["json"]) -> AsyncKvReader[KvReader[Json]]: ...

    @overload
    async def kv(self, name: str, *, value: Literal["int64"]) -> AsyncKvReader[KvReader[int]]: ...

    @overload
    async def kv(self, name: str, *, value: Literal["float64"]) -> AsyncKvReader[KvReader[float]]: ...

    @overload
    async def kv(self, name: str, *, value: DecimalType) -> AsyncKvReader[KvReader[Decimal]]: ...

    @overload
    async def kv(self, name: str, *, value: StructType) -> AsyncKvReader[KvReader[dict[str, object]]]: ...

    @overload
    async def kv(
        self, name: str, *, key: Literal["utf8"], value: AnyValueType | None = None
    ) -> AsyncTextKvReader[TextKvReader[Any]]: ...

    async def kv(self, name: str, *, value: AnyValueType | None = None, key: KeyType | None = None) -> Any:
        """Return a kv table at that LSN."""
        find: Callable[..., Any] = self._sync.kv
        table = await self._threads.run(lambda: find(name, value=value, key=key))
        return (AsyncTextKvReader if isinstance(table, TextKvReader) else AsyncKvReader)(table, self._threads)

    async def queue(self, name: str) -> AsyncQueueView[QueueView]:
        """Return a queue at that LSN."""
        return AsyncQueueView(await self._threads.run(partial(self._sync.queue, name)), self._threads)

    async def series(self, name: str) -> AsyncSeriesReader[SeriesReader]:
        """Return a series table at that LSN."""
        return AsyncSeriesReader(await self._threads.run(partial(self._sync.series, name)), self._threads)

    async def vector(self, name: str) -> AsyncVectorReader:
        """Return a vector table at that LSN."""
        return AsyncVectorReader(await self._threads.run(partial(self._sync.vector, name)), self._threads)

=======
>>>>>>> main
    async def __aenter__(self) -> AsyncSnapshot:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncStore(AsyncKvOfStore):
    """A store, opened or connected.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         users = await store.kv("users")
    ...         await users.put(b"ada", b"1815", durable=True)
    ...         return await store.tables()
    >>> asyncio.run(main())
    ['users']
    """

    queue = awaited_as(AsyncQueueTable, Tables.queue)
    series = awaited_as(AsyncSeriesTable, Tables.series)
    batch = formed(AsyncBatch, Tables.batch)
    tables = awaited(Tables.tables)
    drop = awaited(Tables.drop)
    flush = awaited(Tables.flush)

    @property
    def sync(self) -> Store | RemoteStore:
        """The store itself, for what has no asyncio form."""
        return self._sync

<<<<<<< HEAD
    @overload
    async def kv(
        self, name: str, *, shards: int = 1, value: Literal["bytes"] | None = None, create: bool = True
    ) -> AsyncKvTable[bytes]: ...

    @overload
    async def kv(
        self, name: str, *, shards: int = 1, value: Literal["utf8"], create: bool = True
    ) -> AsyncKvTable[str]: ...

    @overload
    async def kv(
        self, name: str, *, shards: int = 1, value: Literal["json"], create: bool = True
    ) -> AsyncKvTable[Json]: ...

    @overload
    async def kv(
        self, name: str, *, shards: int = 1, value: Literal["int64"], create: bool = True
    ) -> AsyncKvTable[int]: ...

    @overload
    async def kv(
        self, name: str, *, shards: int = 1, value: Literal["float64"], create: bool = True
    ) -> AsyncKvTable[float]: ...

    @overload
    async def kv(
        self, name: str, *, shards: int = 1, value: DecimalType, create: bool = True
    ) -> AsyncKvTable[Decimal]: ...

    @overload
    async def kv(
        self, name: str, *, shards: int = 1, value: StructType, create: bool = True
    ) -> AsyncKvTable[dict[str, object]]: ...

    @overload
    async def kv(
        self,
        name: str,
        *,
        key: Literal["utf8"],
        shards: int = 1,
        value: AnyValueType | None = None,
        create: bool = True,
    ) -> AsyncTextKvTable[Any]: ...

    async def kv(
        self,
        name: str,
        *,
        shards: int = 1,
        value: AnyValueType | None = None,
        key: KeyType | None = None,
        create: bool = True,
    ) -> Any:
        """Return a kv table; create it if it does not exist, unless `create=False`."""
        find: Callable[..., Any] = self._sync.kv
        table = await self._threads.run(lambda: find(name, shards=shards, value=value, key=key, create=create))
        return (AsyncTextKvTable if isinstance(table, TextKvTable) else AsyncKvTable)(table, self._threads)

    async def queue(
        self,
        name: str,
        *,
        shards: int = 1,
        retention: Retention | None = None,
        headers: bool = False,
        create: bool = True,
    ) -> AsyncQueueTable:
        """Return a queue; create it if it does not exist, unless `create=False`."""
        options = {"shards": shards, "retention": retention, "headers": headers, "create": create}
        table = await self._threads.run(lambda: self._sync.queue(name, **options))  # type: ignore[arg-type]
        return AsyncQueueTable(table, self._threads)

    async def series(
        self, name: str, *, shards: int = 1, options: SeriesOptions | None = None, create: bool = True
    ) -> AsyncSeriesTable:
        """Return a series table; create it if it does not exist, unless `create=False`."""
        table = await self._threads.run(lambda: self._sync.series(name, shards=shards, options=options, create=create))
        return AsyncSeriesTable(table, self._threads)

    async def vector(
        self,
        name: str,
        *,
        dimensions: int | None = None,
        metric: Metric | None = None,
        shards: int = 1,
        create: bool = True,
    ) -> AsyncVectorTable:
        """Return a vector table; create it if it does not exist, unless `create=False`."""
        table = await self._threads.run(
            lambda: self._sync.vector(name, dimensions=dimensions, metric=metric, shards=shards, create=create)
        )
        return AsyncVectorTable(table, self._threads)

    def batch(self, *, token: tuple[str, int] | None = None, durable: bool = True) -> AsyncBatch:
        """Begin an atomic batch of writes to any tables; with a token, it is applied at most once."""
        return AsyncBatch(self._sync.batch(token=token, durable=durable), self._threads)

=======
>>>>>>> main
    def snapshot(self) -> AsyncOpening[StoreSnapshot, AsyncSnapshot]:
        """Take a snapshot of all tables at one LSN: `async with store.snapshot() as snapshot`."""
        return AsyncOpening(self._threads, self._sync.snapshot, StoreSnapshot.close, AsyncSnapshot)

    async def close(self) -> None:
        """Close the store; a call that runs in another task ends first, or raises `Closed`."""
        if self._threads.closed:
            return
        try:
            await self._threads.run(self._sync.close)
        finally:
            self._threads.close()

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def open(  # noqa: A001 - aio.open reads well
    path: str | Path, *, settings: StoreSettings | None = None, timeout_s: float = YIELD_S, read_only: bool = False
) -> AsyncOpening[Store | RemoteStore, AsyncStore]:
    """Open the store in `path` as its owner, or to be read only, like `penstock.open`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("users")
    ...         return await store.tables()
    >>> asyncio.run(main())
    ['users']
    """
    opens = partial(penstock.open, path, settings=settings, timeout_s=timeout_s, read_only=read_only)
    return AsyncOpening(None, opens, _close, AsyncStore)


def connect(
    path: str | Path,
    *,
    create: bool = False,
    durable: bool = False,
    timeout_s: float = OWNER_TIMEOUT_S,
    token: str | None = None,
    authority: str | Path | None = None,
) -> AsyncOpening[Store | RemoteStore, AsyncStore]:
    """Connect to the store in `path`, like `penstock.connect`.

    >>> async def main():
    ...     async with penstock.aio.connect("data/", create=True) as store:
    ...         await store.kv("users")
    ...         return await store.tables()
    >>> asyncio.run(main())
    ['users']
    """
    opens = partial(
        penstock.connect,
        path,
        create=create,
        durable=durable,
        timeout_s=timeout_s,
        token=token,
        authority=authority,
    )
    return AsyncOpening(None, opens, _close, AsyncStore)


def _close(store: Store | RemoteStore) -> None:
    store.close()
