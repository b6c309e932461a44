# mypy: disallow-any-expr, disallow-any-explicit, disallow-any-decorated
"""A user's program under the strictest mypy: every type is precise, and no expression is `Any`.

`tests/test_typing.py` checks it with mypy and runs it. `assert_type` fails in mypy when a type becomes another one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from typing import assert_type

import penstock
import penstock.aio
from penstock import Acknowledgement, Consumer, Epoch, Json, KvReader, KvTable, LeasedMessage, Message, QueueTable
from penstock.errors import Backpressure, NotFound


def ingest(store: penstock.Store | penstock.RemoteStore) -> None:
    users = store.kv("users")
    names = store.kv("names", value="utf8", shards=2)
    totals = store.kv("totals", value="int64")
    means = store.kv("means", value="float64")
    profiles = store.kv("profiles", value="json")
    assert_type(users, KvTable[bytes])
    assert_type(names, KvTable[str])
    assert_type(totals, KvTable[int])
    assert_type(means, KvTable[float])
    assert_type(profiles, KvTable[Json])

    assert_type(users.put(b"ada", b"1815", ttl_s=60.0), Epoch)
    assert_type(names.put_many({b"ada": "Ada", b"bob": "Bob"}), Epoch)
    totals.merge(b"ada", 1, operator="add_i64")
    means[b"ada"] = 0.5
    tags = ["first", "programmer"]
    profiles.put(b"ada", {"born": 1815, "tags": tags})
    assert_type(store.flush(), Acknowledgement)

    assert_type(users.get(b"ada"), bytes | None)
    assert_type(totals.get(b"ada", 0), int)
    assert_type(names[b"ada"], str)
    assert_type(means.multi_get([b"ada"]), list[float | None])
    assert_type(totals.scan(prefix=b"a", limit=10), Iterator[tuple[bytes, int]])
    profile = profiles[b"ada"]
    if isinstance(profile, Mapping):
        assert_type(profile["born"], Json)
    totals.delete(b"bob")
    totals.delete_range(b"x", b"z")

    with store.batch(token=("script", 1)) as batch:
        assert_type(batch.kv("totals", value="int64"), KvTable[int])
        batch.kv("users").put(b"bob", b"1")
        batch.queue("events").put(b"bob")
    assert_type(batch.duplicate, bool)
    with store.snapshot() as snapshot:
        assert_type(snapshot.kv("totals", value="int64"), KvReader[int])
        assert_type(snapshot.kv("names", value="utf8").get(b"ada"), str | None)
        assert_type(snapshot.queue("events").read(), list[Message])
        assert_type(snapshot.lsn, int)
    report = store.load("copy", users, token=("copy", 1))
    assert_type(report.rows, int)
    prepared = store.prepare("copy", users)
    with store.batch() as batch:
        batch.load("copy", [prepared])


def consume(events: QueueTable, totals: KvTable[int], store: penstock.Store) -> int:
    where = events.append(b"hello", key=b"k")
    assert_type(where.sequence, int)
    worker = events.consumer("worker", visibility_timeout_s=10.0)
    assert_type(worker, Consumer)
    messages = worker.get(max=10, timeout_s=5.0)
    assert_type(messages, list[LeasedMessage])
    with store.batch() as batch:
        for message in messages:
            assert_type(message.key, bytes | None)
            batch.kv(totals.name, value="int64").merge(message.payload, 1, operator="add_i64")
        worker.ack(messages, batch=batch)
    assert_type(worker.position, dict[int, int])
    assert_type([bounds.next for bounds in events.bounds()], list[int])
    assert_type(events.statistics().messages, int)
    return sum(count for _, count in totals.scan())


def measure(store: penstock.Store) -> None:
    loads = store.series("loads")
    assert_type(loads, penstock.SeriesTable)
    assert_type(loads.write("cpu", 0.5, {"host": "a"}, durable=True), Epoch)
    assert_type(loads.labels("cpu"), list[str])
    assert_type(loads.metadata(), dict[str, penstock.MetricMetadata])
    assert_type(loads.cardinality().metrics, dict[str, int])
    docs = store.vector("docs", dimensions=2, changes=True)
    assert_type(docs, penstock.VectorTable)
    assert_type(docs.upsert("a", [1.0, 0.0], {"lang": "en"}, durable=True), Epoch)
    assert_type(docs.get("a"), penstock.VectorRecord | None)
    assert_type(docs.get(["a", "b"]), list[penstock.VectorRecord | None])
    assert_type(docs.statistics().recall, float | None)
    assert_type(docs.changes(), penstock.ChangeFeed)
    with store.snapshot() as snapshot:
        assert_type(snapshot.series("loads"), penstock.SeriesReader)
        assert_type(snapshot.vector("docs").count(), int)


def administer(store: penstock.Store) -> None:
    assert_type(store.describe("docs").kind, str)
    assert_type([job.state for job in store.jobs()], list[str])
    assert_type([chunk.file for chunk in store.chunks("totals")], list[str])
    assert_type(store.check().ok, bool)
    assert_type(store.statistics().partitions, tuple[penstock.PartitionStatistics, ...])
    assert_type(store.subscribe().latest().lsn, int)
    assert_type(store.metrics.exposition(), str)


async def awaited(path: str) -> None:
    async with penstock.aio.connect(path) as store:
        totals = await store.kv("totals", value="int64")
        assert_type(totals, penstock.aio.AsyncKvTable[int])
        assert_type(await totals.put(b"z", 1), Epoch)
        assert_type(await totals.get(b"z"), int | None)
        assert_type(await totals.get(b"z", "none"), int | str)
        async for _, count in totals.scan():
            assert_type(count, int)
        async with store.batch() as batch:
            assert_type(batch.kv("names", value="utf8"), KvTable[str])
            assert_type(batch.queue("events"), penstock.QueueTable)
        cities = await store.kv("cities", key="utf8", value="int64")
        assert_type(cities, penstock.aio.AsyncTextKvTable[int])
        assert_type(await cities.get("Zürich"), int | None)
        assert_type(await (await store.queue("events")).put(b"z"), Epoch)
        assert_type(await store.series("loads", shards=1), penstock.aio.AsyncSeriesTable)
        async with store.snapshot() as snapshot:
            assert_type(await snapshot.kv("names", value="utf8").get(b"ada"), str | None)
            assert_type(snapshot.queue("events"), penstock.aio.AsyncQueueView[penstock.QueueView])


def main(path: str) -> None:
    settings = penstock.StoreSettings(memory_bytes_max=512 << 20, checkpoint=penstock.CheckpointSettings())
    with penstock.open(path, settings=settings) as store:
        retention = penstock.Retention(age_s=3600.0, acknowledged=True)
        events = store.queue("events", shards=2, retention=retention)
        store.kv("copy")
        ingest(store)
        consume(events, store.kv("totals", value="int64"), store)
        measure(store)
        administer(store)
        assert_type(store.compact("totals").files_after, int)
        assert_type([trouble.table for trouble in store.troubles()], list[str])
        try:
            store.kv("missing", create=False)
        except NotFound as error:
            print(error)
        except Backpressure:
            raise
        asyncio.run(awaited(path))
        with penstock.connect(path) as connected:
            assert_type(connected, penstock.RemoteStore)
            assert_type(connected.kv("names", value="utf8")[b"ada"], str)
            with connected.snapshot() as snapshot:
                assert_type(snapshot.id, str)


if __name__ == "__main__":
    main(sys.argv[1])
