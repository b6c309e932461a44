"""The asyncio form of a batch: its tables are the ordinary ones.

Thread: one event loop for each store.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from types import TracebackType
from typing import Any

from penstock.aio.bridge import CallThreads, awaited, immediate
from penstock.aio.kv import AsyncKvOfBatch
from penstock.store.batch import StoreBatch


class AsyncBatch(AsyncKvOfBatch):
    """Writes that are committed together at the end of `async with`. Its tables collect in memory, without `await`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("users")
    ...         async with store.batch(token=("loader", 17)) as batch:
    ...             batch.kv("users").put(b"ada", b"1815")
    ...         return batch.duplicate
    >>> asyncio.run(main())
    False
    """

    def __init__(self, sync: StoreBatch, threads: CallThreads) -> None:
        super().__init__(sync, threads)
        sync.wait_for_entry()

    queue = immediate(StoreBatch.queue)
    series = immediate(StoreBatch.series)
    vector = immediate(StoreBatch.vector)
    load = awaited(StoreBatch.load)  # it sorts rows and writes files
    commit = awaited(StoreBatch.commit)

    @property
    def sync(self) -> StoreBatch:
        """The batch itself."""
        return self._sync

    @property
    def duplicate(self) -> bool:
        """Whether its token was committed before."""
        return self._sync.duplicate

    def __await__(self) -> Generator[Any, None, AsyncBatch]:
        return self._enter().__await__()

    async def _enter(self) -> AsyncBatch:
        await self._threads.run(self._sync.look_ahead)  # so that nothing waits in the event loop until the commit
        return self

    async def __aenter__(self) -> AsyncBatch:
        return await self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._threads.run(partial(self._sync.__exit__, kind, error, trace))
