"""The asyncio forms of series tables.

Thread: one event loop for each store.
"""

from __future__ import annotations

from typing import TypeVar

from penstock.aio.bridge import AsyncForm, awaited, iterated
from penstock.series.reader import SeriesReader
from penstock.series.table import SeriesTable

R = TypeVar("R", bound=SeriesReader)


class AsyncSeriesReader(AsyncForm[R]):
    """A series table of a snapshot. Methods are those of `SeriesReader`.

    >>> async def main():
    ...     async with penstock.aio.open("data/") as store:
    ...         await store.series("metrics")
    ...         async with store.snapshot() as snapshot:
    ...             metrics = snapshot.series("metrics")
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
    statistics = awaited(SeriesReader.statistics)
    scan_arrow = iterated(SeriesReader.scan_arrow)
    changes = iterated(SeriesReader.changes)


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
