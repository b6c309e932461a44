"""The asyncio forms of queues and consumers.

Thread: one event loop for each store.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any, TypeVar

from penstock.aio.batch import AsyncBatch
from penstock.aio.bridge import AsyncForm, awaited, formed, iterated
from penstock.arguments import seconds
from penstock.queue.calls import LeasedMessage
from penstock.queue.consumer import Consumer
from penstock.queue.table import QueueTable
from penstock.queue.view import QueueView

Q = TypeVar("Q", bound=QueueView)


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
        """Its name."""
        return self._sync.name

    async def get(self, max: int = 100, timeout_s: float = 0.0) -> list[LeasedMessage]:  # noqa: A002 - it reads well
        """Take up to `max` messages that no other consumer of this name has; wait up to `timeout_s` for the first."""
        take = partial(self._take, max)
        return await self._threads.wait(take, seconds(timeout_s, "timeout_s", math.inf)) or []

    async def _take(self, count: int, wait_s: float) -> list[LeasedMessage] | None:
        return await self._threads.run(partial(self._sync.get, count, wait_s), undo=self._give_back) or None

    def _give_back(self, messages: list[LeasedMessage]) -> None:
        if messages:
            self._sync.nack(messages)

    async def __aiter__(self) -> AsyncIterator[LeasedMessage]:
        while True:
            for message in await self.get(1, 60.0):
                yield message

    async def ack(self, messages: LeasedMessage | Iterable[LeasedMessage], *, batch: AsyncBatch | None = None) -> None:
        """Acknowledge messages, durably; with a batch, together with what that writes."""
        together: Any = batch.sync if isinstance(batch, AsyncBatch) else batch  # anything else is refused there
        await self._threads.run(partial(self._sync.ack, messages, batch=together))

    async def position(self) -> dict[int, int]:
        """Return, for each shard, the sequence below which everything is acknowledged."""
        return await self._threads.run(lambda: self._sync.position)

    async def lag(self) -> int:
        """Return how many messages are not acknowledged."""
        return await self._threads.run(lambda: self._sync.lag)


class AsyncQueueView(AsyncForm[Q]):
    """A queue of a snapshot. Methods are those of `QueueView`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.queue("events")
    ...         async with store.snapshot() as snapshot:
    ...             events = snapshot.queue("events")
    ...             return await events.read()
    >>> asyncio.run(main())
    []
    """

    read = awaited(QueueView.read)
    read_arrow = awaited(QueueView.read_arrow)
    to_arrow = awaited(QueueView.to_arrow)
    scan_arrow = iterated(QueueView.scan_arrow)
    changes = iterated(QueueView.changes)


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
    consumer = formed(AsyncConsumer, QueueTable.consumer)
