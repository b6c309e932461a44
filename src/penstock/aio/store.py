"""The asyncio forms of snapshots and stores. Those of tables are in a module for each kind.

Thread: one event loop for each store.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import penstock
from penstock.aio.batch import AsyncBatch
from penstock.aio.bridge import AsyncForm, AsyncOpening, awaited, awaited_as, formed, waited
from penstock.aio.kv import AsyncKvOfSnapshot, AsyncKvOfStore
from penstock.aio.queue import AsyncQueueTable, AsyncQueueView
from penstock.aio.series import AsyncSeriesReader, AsyncSeriesTable
from penstock.aio.vector import AsyncVectorReader, AsyncVectorTable
from penstock.archive.master_keys import Keys
from penstock.client.connection import OWNER_TIMEOUT_S
from penstock.client.store import RemoteMetrics, RemoteStore
from penstock.host.metrics import Metrics
from penstock.lsm.manual_compaction import COMPACT_WAIT_S, CompactionReport
from penstock.partition.aside import Trouble
from penstock.queue.view import QueueView
from penstock.series.reader import SeriesReader
from penstock.server.opening import YIELD_S
from penstock.store.reports import BackupReport, CheckReport
from penstock.store.settings import StoreSettings
from penstock.store.store import Store
from penstock.store.tables import StoreSnapshot, Tables
from penstock.store.views import StoreSubscription


class AsyncSnapshot(AsyncKvOfSnapshot):
    """Read-only view of all tables at one LSN.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("users")
    ...         async with store.snapshot() as snapshot:
    ...             return snapshot.lsn > 0
    >>> asyncio.run(main())
    True
    """

    queue = formed(AsyncQueueView[QueueView], StoreSnapshot.queue)
    series = formed(AsyncSeriesReader[SeriesReader], StoreSnapshot.series)
    vector = formed(AsyncVectorReader, StoreSnapshot.vector)
    tables = awaited(StoreSnapshot.tables)
    close = awaited(StoreSnapshot.close, always=True)

    @property
    def lsn(self) -> int:
        """The LSN of the last record that it holds."""
        return self._sync.lsn

    async def __aenter__(self) -> AsyncSnapshot:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncSubscription(AsyncForm[StoreSubscription]):
    """Reads the newest view of a store, and waits for newer ones.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         views = await store.subscribe()
    ...         await store.kv("users")
    ...         return (await views.wait_newer(timeout_s=10)).lsn > 0
    >>> asyncio.run(main())
    True
    """

    latest = awaited(StoreSubscription.latest)
    unread = awaited(StoreSubscription.unread)
    wait_newer = waited(StoreSubscription.wait_newer, undo=StoreSubscription.unread)


class AsyncMetrics(AsyncForm[Metrics | RemoteMetrics]):
    """The metrics of a store.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         return "penstock_coordinator_writes_total" in await store.metrics.exposition()
    >>> asyncio.run(main())
    True
    """

    async def exposition(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return await self._threads.run(self._sync.exposition)


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
    vector = awaited_as(AsyncVectorTable, Tables.vector)
    batch = formed(AsyncBatch, Tables.batch)
    tables = awaited(Tables.tables)
    drop = awaited(Tables.drop)
    alter = awaited(Tables.alter)
    describe = awaited(Tables.describe)
    wait_for_change = waited(Tables.wait_for_change)
    drain = awaited(Tables.drain)
    reactivate = awaited(Tables.reactivate)
    flush = awaited(Tables.flush)
    wait_for = waited(Tables.wait_for)
    load = awaited(Tables.load)
    prepare = awaited(Tables.prepare)
    statistics = awaited(Tables.statistics)
    subscribe = awaited_as(AsyncSubscription, Tables.subscribe)

    @property
    def metrics(self) -> AsyncMetrics:
        """The metrics: `await store.metrics.exposition()`."""
        return AsyncMetrics(self._sync.metrics, self._threads)

    @property
    def sync(self) -> Store | RemoteStore:
        """The store itself, for what has no asyncio form: `await asyncio.to_thread(store.sync.archive)`."""
        return self._sync

    async def recover(self) -> None:
        """Let the store take writes again after a failed one."""
        await self._threads.run(self._sync.recover)

    async def troubles(self) -> list[Trouble]:
        """Return the acknowledged writes that cannot be read, and why; an empty list if all is well."""
        return await self._threads.run(self._sync.troubles)

    async def compact(self, name: str, *, timeout_s: float = COMPACT_WAIT_S) -> CompactionReport:
        """Merge a table into as few files as possible, like `Store.compact`."""
        return await self._threads.run(lambda: self._sync.compact(name, timeout_s=timeout_s))

    async def backup(self, target: str | Path, *, keep: int | None = None) -> BackupReport:
        """Copy the store as of one LSN into the folder `target`, while others write, like `Store.backup`."""
        return await self._threads.run(lambda: self._sync.backup(target, keep=keep))

    async def check(self) -> CheckReport:
        """Read every file of the store and report what is damaged, like `Store.check`."""
        return await self._threads.run(self._sync.check)

    def snapshot(self) -> AsyncOpening[StoreSnapshot, AsyncSnapshot]:
        """Take a snapshot of all tables at one LSN: `async with store.snapshot() as snapshot`."""
        return AsyncOpening(self._threads, self._sync.snapshot, StoreSnapshot.close, AsyncSnapshot)

    async def close(self) -> None:
        """Close the store; a call that runs in another task ends first, or raises `Closed`."""
        if self._threads.closed:
            return
        try:
            await self._threads.run(self._sync.close, always=True)
        finally:
            self._threads.close()

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def open(  # noqa: A001 - aio.open reads well
    path: str | Path,
    *,
    settings: StoreSettings | None = None,
    timeout_s: float = YIELD_S,
    read_only: bool = False,
    keys: Keys | None = None,
    encrypt: bool | None = None,
    archive: str | None = None,
) -> AsyncOpening[Store | RemoteStore, AsyncStore]:
    """Open the store in `path` as its owner, or to be read only, like `penstock.open`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.kv("users")
    ...         return await store.tables()
    >>> asyncio.run(main())
    ['users']
    """
    opens = partial(
        penstock.open,
        path,
        settings=settings,
        timeout_s=timeout_s,
        read_only=read_only,
        keys=keys,
        encrypt=encrypt,
        archive=archive,
    )
    return AsyncOpening(None, opens, _close, AsyncStore)


def connect(
    path: str | Path,
    *,
    create: bool = False,
    start: bool = True,
    durable: bool = False,
    timeout_s: float = OWNER_TIMEOUT_S,
    token: str | None = None,
    authority: str | Path | None = None,
    reads: Literal["leader", "linearizable", "local"] = "leader",
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
        start=start,
        durable=durable,
        timeout_s=timeout_s,
        token=token,
        authority=authority,
        reads=reads,
    )
    return AsyncOpening(None, opens, _close, AsyncStore)


def _close(store: Store | RemoteStore) -> None:
    store.close()
