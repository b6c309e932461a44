"""The retention of a table's storage options deletes messages and samples; the files of queues are listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import Invalid
from penstock.manifest.records import RetentionPolicy
from penstock.manifest.tables import CHUNKS
from penstock.partition.storage_options import StorageOptions
from penstock.queue.chain import QueueSettings
from penstock.queue.service import QueueService
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine

SMALL_FILES = QueueSettings(file_bytes=4_096, allocate_bytes=1_024, index_bytes=1_024)
SETTINGS = StoreSettings(background=False, reserve_bytes=0, kinds=(SMALL_FILES,))
HOUR_S = 3_600
HOUR_MS = HOUR_S * 1_000


def opened(disk: SimulatedDisk, clock: FakeClock) -> Store:
    return open_store("/store", fs=disk, clock=clock, engine=MemoryEngine, settings=SETTINGS)


def maintain(store: Store) -> None:
    for _ in range(2):  # the second removes the files of what the first has trimmed
        store.flush()
        store.port.maintain()
    store.flush()


def numbers(store: Store) -> list[int]:
    return [int(message.payload[:8]) for message in store.queue("events").read(limit=10_000)]


def put(store: Store, first: int, count: int) -> None:
    for number in range(first, first + count):
        store.queue("events").put(b"%08d" % number + bytes(500))
        store.flush()


# -- queues


@pytest.mark.parametrize("how", ["made", "altered"])
def test_a_queue_is_trimmed_by_the_age_of_its_storage_options(how: str) -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    policy = RetentionPolicy(age_ms_max=HOUR_MS)
    with opened(disk, clock) as store:
        store.queue("events", storage=StorageOptions(retention=policy) if how == "made" else None)
        put(store, 0, 3)
        clock.advance(2 * HOUR_S)
        put(store, 3, 2)
        if how == "altered":
            maintain(store)
            assert numbers(store) == [0, 1, 2, 3, 4]  # without a policy, everything is kept
            store.alter("events", retention=policy)
        maintain(store)
        assert numbers(store) == [3, 4]
    with opened(disk, clock) as store:  # the trim is in the journal
        assert numbers(store) == [3, 4]


def test_a_queue_is_trimmed_by_the_bytes_of_its_storage_options() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with opened(disk, clock) as store:
        store.queue("events", storage=StorageOptions(retention=RetentionPolicy(bytes_max=10_000)))
        put(store, 0, 60)
        maintain(store)
        remaining = numbers(store)
        assert remaining == list(range(remaining[0], 60))  # the newest, and all of them
        assert remaining[0] > 0
        assert 8 <= len(remaining) <= 30
        assert sum(chunk.size_bytes for chunk in store.chunks("events")) <= 10_000 + 4_096


def test_the_stricter_of_two_retentions_counts() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with opened(disk, clock) as store:
        storage = StorageOptions(retention=RetentionPolicy(age_ms_max=HOUR_MS))
        store.queue("events", retention=penstock.Retention(age_s=9 * HOUR_S), storage=storage)
        put(store, 0, 2)
        clock.advance(2 * HOUR_S)
        maintain(store)
        assert numbers(store) == []


def test_a_retention_that_is_not_asked_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded fault: a service that does not maintain leaves what is too old."""
    disk, clock = SimulatedDisk(), FakeClock()
    monkeypatch.setattr(QueueService, "_maintain", lambda *_: None)
    with opened(disk, clock) as store:
        store.queue("events", storage=StorageOptions(retention=RetentionPolicy(age_ms_max=HOUR_MS)))
        put(store, 0, 2)
        clock.advance(2 * HOUR_S)
        maintain(store)
        assert numbers(store) == [0, 1]


# -- series


def test_a_series_table_is_trimmed_by_the_age_of_its_storage_options() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with opened(disk, clock) as store:
        metrics = store.series("metrics", options=penstock.SeriesOptions(bucket_s=HOUR_S))
        now = clock.time_us()
        for hours in range(6):
            metrics.write("cpu", float(hours), {"host": "a"}, time=now - hours * HOUR_S * 1_000_000)
        maintain(store)
        assert len(metrics.select("cpu")) == 6
        store.alter("metrics", retention=RetentionPolicy(age_ms_max=2 * HOUR_MS))
        maintain(store)
        values = set(metrics.select("cpu").column("value").to_pylist())
        assert {0.0, 1.0, 2.0} <= values <= {0.0, 1.0, 2.0, 3.0}
    with opened(disk, clock) as store:
        assert set(store.series("metrics").select("cpu").column("value").to_pylist()) == values


def test_a_series_table_has_no_limit_of_bytes_and_a_kv_table_no_retention() -> None:
    with opened(SimulatedDisk(), FakeClock()) as store:
        store.series("metrics")
        store.kv("users")
        with pytest.raises(Invalid):
            store.alter("metrics", retention=RetentionPolicy(bytes_max=1))
        with pytest.raises(Invalid):
            store.alter("users", retention=RetentionPolicy(age_ms_max=1))


# -- the files of queues


def test_files_of_a_queue_are_listed_from_its_own_manifest(tmp_path: Path) -> None:
    settings = StoreSettings(kinds=(SMALL_FILES,))
    with penstock.open(tmp_path / "store", settings=settings) as store:
        events = store.queue("events", shards=2)
        for number in range(40):
            events.put(b"%08d" % number + bytes(500), durable=True)
        chunks = store.chunks("events")
        assert {chunk.shard for chunk in chunks} == {0, 1}
        for shard in (0, 1):
            of_shard = [chunk for chunk in chunks if chunk.shard == shard]
            assert [chunk.chunk for chunk in of_shard] == sorted({chunk.chunk for chunk in of_shard})
            assert of_shard[0].start == (1).to_bytes(8, "big")
            assert [chunk.start for chunk in of_shard[1:]] == [chunk.end for chunk in of_shard[:-1]]
        for chunk in chunks:
            assert (tmp_path / "store" / chunk.file).stat().st_size == chunk.size_bytes
            assert chunk.rows == int.from_bytes(chunk.end, "big") - int.from_bytes(chunk.start, "big")
            assert (chunk.table, chunk.residency, chunk.encrypted, chunk.object) == ("events", "local", False, "")
        with penstock.connect(store.path) as client:
            assert client.chunks("events") == chunks
        assert store.check().ok
        assert rows_of(store) == []  # no row of the catalogue could disagree with the queue


def rows_of(store: Any) -> list[str]:
    """The names of a queue's data files that rows of the manifest name."""
    rows = store._manifest.read(lambda view: [row.file_name for _, row in CHUNKS.scan(view)])
    return [name for name in rows if name.endswith(".data")]


def test_files_that_are_trimmed_are_listed_no_more() -> None:
    disk, clock = SimulatedDisk(), FakeClock()
    with opened(disk, clock) as store:
        store.queue("events")
        assert store.chunks("events") == []
        put(store, 0, 20)
        before = store.chunks("events")
        assert len(before) > 2
        store.queue("events").trim(before=19)
        maintain(store)
        after = store.chunks("events")
        assert after == before[len(before) - len(after) :]
        assert len(after) < len(before)
    with opened(disk, clock) as store:
        assert store.chunks("events") == after
