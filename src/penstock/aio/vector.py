"""The asyncio forms of vector tables.

Thread: one event loop for each store.
"""

from __future__ import annotations

from penstock.aio.bridge import AsyncForm, awaited, iterated
from penstock.vector.reader import VectorReader
from penstock.vector.table import VectorTable


class AsyncVectorReader(AsyncForm[VectorReader]):
    """A vector table of a snapshot. Methods are those of `VectorReader`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.vector("docs", dimensions=2)
    ...         async with store.snapshot() as snapshot:
    ...             docs = snapshot.vector("docs")
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
    changes = iterated(VectorReader.changes)


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
    changes = iterated(VectorTable.changes)
