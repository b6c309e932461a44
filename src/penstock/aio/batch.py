"""The asyncio form of a batch: its tables are the ordinary ones.

Thread: one event loop for each store.
"""

from __future__ import annotations

from functools import partial
from types import TracebackType

from penstock.aio.bridge import awaited
from penstock.aio.kv import AsyncKvOfBatch
from penstock.store.batch import StoreBatch


class AsyncBatch(AsyncKvOfBatch):
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
