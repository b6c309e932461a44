"""The store in asyncio: the same tables, with `await` in front of what may wait.

    async with penstock.aio.open("data/") as store:
        users = await store.kv("users")
        await users.put(b"ada", b"1815", durable=True)
        async for key, value in users.scan():
            ...

A call runs in one of the store's own threads, so that the event loop never waits for a disk or a network. Calls that
only collect in memory are not awaited: the tables of a batch are ordinary ones, and `async with` commits them.

Cancellation: a call that has begun runs to its end, and the cancellation is raised after it. So no call outlives a
cancelled task, and its writes happened or not, as after any other call. Only waiting for messages ends early: a message
that arrives at that moment is returned to the queue.

Thread: one event loop for each store; the threads are the store's.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, overload

import penstock
from penstock.client.connection import PATIENCE_S
from penstock.client.store import RemoteStore
from penstock.errors import Closed
from penstock.kv.table import KvReader, KvTable
from penstock.kv.values import Json, ValueType
from penstock.queue.calls import LeasedMessage
from penstock.queue.consumer import Consumer
from penstock.queue.options import Retention
from penstock.queue.table import QueueTable, QueueView
from penstock.server.opening import YIELD_S
from penstock.store.batch import StoreBatch
from penstock.store.settings import StoreSettings
from penstock.store.store import Store
from penstock.store.tables import StoreSnapshot, Tables

__all__ = [
    "AsyncBatch",
    "AsyncConsumer",
    "AsyncKvReader",
    "AsyncKvTable",
    "AsyncQueueTable",
    "AsyncQueueView",
    "AsyncSnapshot",
    "AsyncStore",
    "connect",
    "open",
]


def __dir__() -> list[str]:
    return sorted(__all__)


THREADS_MAX = 32
WAITING_MAX = 16  # threads that wait for messages: the others stay free for writes
STEP_S = 0.5  # a wait for messages is made of steps, and a cancelled one ends after its step
ROWS_AT_ONCE = 1_000  # of a scan, per change of threads

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")
V = TypeVar("V")
P = ParamSpec("P")


class _Threads:
    """The threads of one store."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="penstock-aio")
        self.waiting = asyncio.Semaphore(WAITING_MAX)
        self.closed = False

    async def run(self, act: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
        """Call `act` in a thread. If the caller is cancelled: wait for `act`, `undo` its result, then raise."""
        if self.closed:
            raise Closed("the store was closed: open it again")
        begun = self._pool.submit(act)
        outcome = asyncio.wrap_future(begun)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            if not begun.cancel():
                await _wait_until_done(outcome)
                if undo is not None and not outcome.cancelled() and outcome.exception() is None:
                    await _wait_until_done(asyncio.wrap_future(self._pool.submit(undo, outcome.result())))
            raise

    def close(self) -> None:
        self.closed = True
        self._pool.shutdown(wait=False)


async def _wait_until_done(outcome: asyncio.Future[Any]) -> None:
    """Wait for a call that cannot be stopped, however often the waiting task is cancelled meanwhile."""
    while not outcome.done():
        try:
            await asyncio.wait([outcome])
        except asyncio.CancelledError:
            continue
    if not outcome.cancelled():
        outcome.exception()  # retrieved, so that asyncio does not report it


class _Async(Generic[S_co]):
    """The asyncio form of an object."""

    def __init__(self, sync: S_co, threads: _Threads) -> None:
        self._sync = sync
        self._threads = threads

    def __repr__(self) -> str:
        return f"<asyncio form of {self._sync!r}>"


def _awaited(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[_Async[S], P], Coroutine[object, None, T]]:
    """Make the asyncio form of a method: the same arguments, and the result must be awaited."""
    name = method.__name__

    async def call(self: _Async[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._threads.run(partial(getattr(self._sync, name), *args, **kwargs))

    return functools.wraps(method)(call)


def _iterated(
    method: Callable[Concatenate[S, P], Iterator[T]],
) -> Callable[Concatenate[_Async[S], P], AsyncIterator[T]]:
    """Make the asyncio form of a method that returns an iterator: `async for`, many rows per change of threads."""
    name = method.__name__

    async def iterate(self: _Async[S], /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        rows: Iterator[T] = await self._threads.run(partial(getattr(self._sync, name), *args, **kwargs))
        try:
            while some := await self._threads.run(lambda: list(itertools.islice(rows, ROWS_AT_ONCE))):
                for row in some:
                    yield row
        finally:
            close = getattr(rows, "close", None)
            if close is not None:
                await self._threads.run(close)

    return functools.wraps(method)(iterate)


K = TypeVar("K", bound=KvReader[Any])
Q = TypeVar("Q", bound=QueueView)


class AsyncKvReader(_Async[K]):
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

    multi_get = _awaited(KvReader.multi_get)
    to_arrow = _awaited(KvReader.to_arrow)
    scan = _iterated(KvReader.scan)
    scan_arrow = _iterated(KvReader.scan_arrow)

    @overload
    async def get(self: _Async[KvReader[V]], key: bytes) -> V | None: ...

    @overload
    async def get(self: _Async[KvReader[V]], key: bytes, default: T) -> V | T: ...

    async def get(self: _Async[KvReader[Any]], key: bytes, default: Any = None) -> Any:
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

    put = _awaited(KvTable.put)
    put_many = _awaited(KvTable.put_many)
    delete = _awaited(KvTable.delete)
    delete_range = _awaited(KvTable.delete_range)
    merge = _awaited(KvTable.merge)


class AsyncQueueView(_Async[Q]):
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

    read = _awaited(QueueView.read)
    read_arrow = _awaited(QueueView.read_arrow)
    to_arrow = _awaited(QueueView.to_arrow)
    scan_arrow = _iterated(QueueView.scan_arrow)


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

    put = _awaited(QueueTable.put)
    put_many = _awaited(QueueTable.put_many)
    append = _awaited(QueueTable.append)
    trim = _awaited(QueueTable.trim)
    seek = _awaited(QueueTable.seek)
    bounds = _awaited(QueueTable.bounds)
    statistics = _awaited(QueueTable.statistics)

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


class AsyncConsumer(_Async[Consumer]):
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

    nack = _awaited(Consumer.nack)
    seek = _awaited(Consumer.seek)
    forget = _awaited(Consumer.forget)

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


class AsyncBatch(_Async[StoreBatch]):
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

    queue = _awaited(StoreBatch.queue)
    commit = _awaited(StoreBatch.commit)

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

    async def kv(self, name: str, *, value: ValueType | None = None) -> KvTable[Any]:
        """Return an existing kv table, whose writes join this batch."""
        return await self._threads.run(lambda: self._sync.kv(name, value=value))

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


class AsyncSnapshot(_Async[StoreSnapshot]):
    """Read-only view of all tables at one LSN.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("users")
    ...         async with store.snapshot() as snapshot:
    ...             return snapshot.lsn > 0
    >>> asyncio.run(main())
    True
    """

    tables = _awaited(StoreSnapshot.tables)
    close = _awaited(StoreSnapshot.close)

    @property
    def lsn(self) -> int:
        return self._sync.lsn

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

    async def kv(self, name: str, *, value: ValueType | None = None) -> AsyncKvReader[KvReader[Any]]:
        """Return a kv table at that LSN."""
        return AsyncKvReader(await self._threads.run(lambda: self._sync.kv(name, value=value)), self._threads)

    async def queue(self, name: str) -> AsyncQueueView[QueueView]:
        """Return a queue at that LSN."""
        return AsyncQueueView(await self._threads.run(partial(self._sync.queue, name)), self._threads)

    async def __aenter__(self) -> AsyncSnapshot:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncStore(_Async[Store | RemoteStore]):
    """A store, opened or connected.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         users = await store.kv("users")
    ...         await users.put(b"ada", b"1815", durable=True)
    ...         return await store.tables()
    >>> asyncio.run(main())
    ['users']
    """

    tables = _awaited(Tables.tables)
    drop = _awaited(Tables.drop)
    flush = _awaited(Tables.flush)

    @property
    def sync(self) -> Store | RemoteStore:
        """The store itself, for what has no asyncio form."""
        return self._sync

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

    async def kv(
        self, name: str, *, shards: int = 1, value: ValueType | None = None, create: bool = True
    ) -> AsyncKvTable[Any]:
        """Return a kv table; create it if it does not exist, unless `create=False`."""
        table = await self._threads.run(lambda: self._sync.kv(name, shards=shards, value=value, create=create))
        return AsyncKvTable(table, self._threads)

    async def queue(
        self, name: str, *, shards: int = 1, retention: Retention | None = None, create: bool = True
    ) -> AsyncQueueTable:
        """Return a queue; create it if it does not exist, unless `create=False`."""
        table = await self._threads.run(
            lambda: self._sync.queue(name, shards=shards, retention=retention, create=create)
        )
        return AsyncQueueTable(table, self._threads)

    def batch(self, *, token: tuple[str, int] | None = None, durable: bool = True) -> AsyncBatch:
        """Begin an atomic batch of writes to any tables; with a token, it is applied at most once."""
        return AsyncBatch(self._sync.batch(token=token, durable=durable), self._threads)

    def snapshot(self) -> _Opening[StoreSnapshot, AsyncSnapshot]:
        """Take a snapshot of all tables at one LSN: `async with store.snapshot() as snapshot`."""
        return _Opening(self._threads, self._sync.snapshot, StoreSnapshot.close, AsyncSnapshot)

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


class _Closing(Protocol):
    async def close(self) -> None: ...


A = TypeVar("A", bound=_Closing)


class _Opening(Generic[S, A]):
    """A store or snapshot that `await` or `async with` opens."""

    def __init__(
        self,
        threads: _Threads | None,
        opens: Callable[[], S],
        closes: Callable[[S], object],
        form: Callable[[S, _Threads], A],
    ) -> None:
        self._threads = threads
        self._opens = opens
        self._closes = closes
        self._form = form
        self._opened: A | None = None

    async def _open(self) -> A:
        threads = self._threads or _Threads()
        try:
            return self._form(await threads.run(self._opens, undo=self._closes), threads)
        except BaseException:
            if self._threads is None:
                threads.close()
            raise

    def __await__(self) -> Generator[Any, None, A]:
        return self._open().__await__()

    async def __aenter__(self) -> A:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        assert self._opened is not None
        await self._opened.close()


def open(  # noqa: A001 - aio.open reads well
    path: str | Path, *, settings: StoreSettings | None = None, timeout_s: float = YIELD_S
) -> _Opening[Store | RemoteStore, AsyncStore]:
    """Open the store in `path` as its owner, like `penstock.open`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("users")
    ...         return await store.tables()
    >>> asyncio.run(main())
    ['users']
    """
    return _Opening(None, partial(penstock.open, path, settings=settings, timeout_s=timeout_s), _close, AsyncStore)


def connect(
    path: str | Path,
    *,
    create: bool = False,
    durable: bool = False,
    timeout_s: float = PATIENCE_S,
    token: str | None = None,
    authority: str | Path | None = None,
) -> _Opening[Store | RemoteStore, AsyncStore]:
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
    return _Opening(None, opens, _close, AsyncStore)


def _close(store: Store | RemoteStore) -> None:
    store.close()
