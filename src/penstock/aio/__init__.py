"""The store in asyncio: the same tables, with `await` in front of what may wait.

    async with penstock.aio.open("data/") as store:
        users = await store.kv("users")
        await users.put(b"ada", b"1815", durable=True)
        async for key, value in users.scan():
            ...

The rule: every call that reads or writes is awaited, or iterated by `async for`. Not awaited is what only makes an
object (`queue.consumer(name)`, `batch.kv(name)`, `snapshot.kv(name)` and the like) or puts something into a batch,
whose tables are ordinary ones; `store.batch()` and `store.snapshot()` go with `async with`.

A call runs in one of the store's own threads, so that the event loop never waits for a disk or a network.

Cancellation: a call that has begun runs to its end, and the cancellation is raised after it. So no call outlives a
cancelled task, and its writes happened or not, as after any other call. Closing is never left out. Only waiting for
what others write (messages, newer views, changes of a table) ends early: a message that arrives at that moment is
returned to the queue.

Thread: one event loop for each store; the threads are the store's.

The modules:

    store   `open`, `connect`; stores, snapshots, subscriptions
    batch   batches
    kv      kv tables, and `kv` of a store, a snapshot and a batch
    queue   queues and consumers
    series  series tables
    vector  vector tables
    bridge  runs the calls of the ordinary classes in threads
"""

from penstock.aio.batch import AsyncBatch
from penstock.aio.kv import AsyncKvReader, AsyncKvTable, AsyncTextKvReader, AsyncTextKvTable
from penstock.aio.queue import AsyncConsumer, AsyncQueueTable, AsyncQueueView
from penstock.aio.series import AsyncSeriesReader, AsyncSeriesTable
from penstock.aio.store import (
    AsyncMetrics,
    AsyncSnapshot,
    AsyncStore,
    AsyncSubscription,
    connect,
    open,  # noqa: A004 - aio.open reads well
)
from penstock.aio.vector import AsyncVectorReader, AsyncVectorTable

__all__ = [
    "AsyncBatch",
    "AsyncConsumer",
    "AsyncKvReader",
    "AsyncKvTable",
    "AsyncMetrics",
    "AsyncQueueTable",
    "AsyncQueueView",
    "AsyncSeriesReader",
    "AsyncSeriesTable",
    "AsyncSnapshot",
    "AsyncStore",
    "AsyncSubscription",
    "AsyncTextKvReader",
    "AsyncTextKvTable",
    "AsyncVectorReader",
    "AsyncVectorTable",
    "connect",
    "open",
]


def __dir__() -> list[str]:
    return sorted(__all__)
