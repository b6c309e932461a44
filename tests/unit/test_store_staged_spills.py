"""A load whose apply or storing failed, whose record is spilled, and whose lease is over: its file must survive."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from penstock.errors import Invalid, PenstockError
from penstock.host.clock import SystemClock
from penstock.host.files import File
from penstock.host.os_files import OsFileSystem
from penstock.journal.partitions import partition_id
from penstock.kv import loading as kv_loading
from penstock.log import LogSettings
from penstock.partition.reference import StagedFile, Staging
from penstock.partition.spill import SpillLog
from penstock.queue import staged as queue_loading
from penstock.series import loading as series_loading
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine

JOURNAL = LogSettings(segment_bytes=4096, allocate_bytes=512, index_bytes=512)
SETTINGS = StoreSettings(background=False, reserve_bytes=4096, journal=JOURNAL)
LEASE_S = 60.0
COUNT = 50
T0 = 1_700_000_000_000_000


@dataclass(frozen=True)
class LoadedKind:
    """A table of one kind, the rows of its load, and how they are read."""

    make: Callable[[Store], Any]
    rows: pa.Table
    read: Callable[[Store], list[Any]]
    expected: list[Any]


KINDS = {
    "kv": LoadedKind(
        lambda store: store.kv("t"),
        pa.table({"key": [b"%03d" % n for n in range(COUNT)], "value": [b"x"] * COUNT}),
        lambda store: [key for key, _ in store.kv("t").scan()],
        [b"%03d" % n for n in range(COUNT)],
    ),
    "queue": LoadedKind(
        lambda store: store.queue("t"),
        pa.table({"payload": [b"%03d" % n for n in range(COUNT)]}),
        lambda store: store.queue("t").to_arrow().column("payload").to_pylist(),
        [b"%03d" % n for n in range(COUNT)],
    ),
    "series": LoadedKind(
        lambda store: store.series("t"),
        pa.table({"metric": ["cpu"] * COUNT, "time": range(T0, T0 + COUNT), "value": map(float, range(COUNT))}),
        lambda store: store.series("t").to_arrow().column("value").to_pylist(),
        list(map(float, range(COUNT))),
    ),
}


class FailingDisk(SimulatedDisk):
    """Creating a file in one folder fails while `failing` names it."""

    failing = ""

    def create(self, path: str) -> File:
        if self.failing and path.startswith(self.failing):
            raise OSError(errno.EIO, "injected", path)
        return super().create(path)


@pytest.fixture(autouse=True)
def files_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kv_loading, queue_loading, series_loading):
        monkeypatch.setattr(module, "INLINE_BYTES_MAX", 10)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> LoadedKind:
    return KINDS[request.param]


def open_here(disk: SimulatedDisk, clock: FakeClock) -> Store:
    settings = replace(SETTINGS, trust_clock=True)
    return open_store("/s", fs=disk, clock=clock, random=random.Random(1), engine=MemoryEngine, settings=settings)


def staged(store: Store) -> list[str]:
    table = store._info("t").table_id
    return [row.file_name for _, row in store._manifest.scan_chunks(table) if row.staged]


def spilled_load(kind: LoadedKind, disk: FailingDisk, clock: FakeClock) -> Store:
    """Return a store with a load that is acknowledged, not stored, and in the spill alone."""
    store = open_here(disk, clock)
    kind.make(store)
    if kind is KINDS["kv"]:
        store.kv("t").put(b"000", b"before", durable=True)  # adopting files stores the rows before them
    prepared = store.prepare("t", kind.rows, lease_s=LEASE_S)
    disk.failing = f"/s/tables/{store._info('t').table_id}/0/"
    with store.batch(token=("load", 1)) as batch:
        batch.load("t", prepared)
    spill_everything(store)
    assert len(staged(store)) == 1
    return store


def spill_everything(store: Store) -> None:
    """Fill the journal, so that a checkpoint deletes the segment of the load."""
    load = store._ledger.tree.lsn
    other = store.kv("other")
    for number in range(40):
        other.put(b"k%d" % number, bytes(200), durable=True)
    report = store.checkpoint()
    assert report.spilled
    assert report.segments_dropped
    assert store._consensus.first > load


def crash(disk: SimulatedDisk) -> FailingDisk:
    restored = disk.image().restore("strict")
    restored.__class__ = FailingDisk
    assert isinstance(restored, FailingDisk)
    return restored


def test_a_restart_after_the_lease_loses_nothing(kind: LoadedKind, clock: FakeClock) -> None:
    disk = FailingDisk()
    store = spilled_load(kind, disk, clock)
    clock.advance(LEASE_S + 1)
    store._tasks.clean_up()  # in the process that wrote it
    assert len(staged(store)) == 1
    disk = crash(disk)
    clock.advance(LEASE_S + 1)
    store = open_here(disk, clock)
    store._tasks.clean_up()  # before anything uses the table
    assert kind.read(store) == kind.expected
    assert store.troubles() == []
    store.close()
    store = open_here(crash(disk), clock)
    assert kind.read(store) == kind.expected
    store.close()


def test_a_shard_that_still_fails_keeps_its_file(kind: LoadedKind, clock: FakeClock) -> None:
    """The second process cannot store it either; what it spills again is read by the third."""
    disk = FailingDisk()
    failing = spilled_load(kind, disk, clock)._info("t").table_id
    disk = crash(disk)
    disk.failing = f"/s/tables/{failing}/0/"
    clock.advance(LEASE_S + 1)
    store = open_here(disk, clock)
    store._tasks.clean_up()
    assert len(staged(store)) == 1
    store.kv("other").put(b"more", b"1", durable=True)
    store.checkpoint()
    store._tasks.clean_up()
    disk = crash(disk)
    store = open_here(disk, clock)
    store._tasks.clean_up()
    assert kind.read(store) == kind.expected
    store.close()


def test_a_file_that_a_spill_names_is_not_overwritten(kind: LoadedKind, clock: FakeClock) -> None:
    disk = FailingDisk()
    spilled_load(kind, disk, clock)
    store = open_here(crash(disk), clock)
    ((key, row),) = [(key, row) for key, row in store._manifest.scan_chunks(store._info("t").table_id) if row.staged]
    partition = partition_id(store._info("t").table_id, 0)
    with pytest.raises(Invalid, match="is not staged"):
        store._port.write_staged(partition, key.chunk_id, row.file_name, 0, b"rubbish")
    assert kind.read(store) == kind.expected


def test_a_commit_that_is_refused_does_not_unprotect_the_file_of_another(kind: LoadedKind, clock: FakeClock) -> None:
    disk = FailingDisk()
    store = spilled_load(kind, disk, clock)
    ((key, row),) = [(key, row) for key, row in store._manifest.scan_chunks(store._info("t").table_id) if row.staged]
    with pytest.raises(PenstockError), store.batch() as batch:
        batch.adopt("t", [StagedFile(key.chunk_id, row.file_name, 1, bytes(32))])
    clock.advance(LEASE_S + 1)
    store._tasks.clean_up()
    store = open_here(crash(disk), clock)
    assert kind.read(store) == kind.expected
    store.close()


def test_a_file_is_not_committed_while_it_is_purged(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, kind = FailingDisk(), KINDS["kv"]
    store = open_here(disk, clock)
    kind.make(store)
    prepared = store.prepare("t", kind.rows, lease_s=LEASE_S)
    clock.advance(LEASE_S + 1)
    discard, refused = Staging.discard, list[Exception]()

    def commit_first(self: Staging, *arguments: Any) -> None:
        with pytest.raises(Invalid, match="is not staged") as info, store.batch() as batch:
            batch.load("t", prepared)
        refused.append(info.value)
        discard(self, *arguments)

    monkeypatch.setattr(Staging, "discard", commit_first)
    store._tasks.clean_up()
    assert len(refused) == 1
    assert staged(store) == []
    assert kind.read(store) == []
    store.close()


def test_a_shard_that_cannot_be_opened_keeps_its_files(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, kind = FailingDisk(), KINDS["series"]
    spilled_load(kind, disk, clock)
    clock.advance(LEASE_S + 1)
    store = open_here(crash(disk), clock)
    with monkeypatch.context() as patch:
        patch.setattr(SpillLog, "entries", _fail)
        store._tasks.clean_up()
    assert len(staged(store)) == 1
    assert kind.read(store) == kind.expected
    store.close()


def _fail(*_: object) -> None:
    raise OSError(errno.EIO, "injected")


def test_a_commit_of_spark(kind: LoadedKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a task built are committed through a connection, on a real disk; nothing is stored before the end."""
    pytest.importorskip("pyspark")
    from pyspark.sql.pandas.types import from_arrow_schema

    from penstock.spark.table_ref import TableRef
    from penstock.spark.writing import TableWriter

    path = str(tmp_path / "store")
    create = OsFileSystem.create
    with penstock.open(path, settings=replace(SETTINGS, background=True)) as store:
        kind.make(store)
        if kind is KINDS["kv"]:
            store.kv("t").put(b"000", b"before", durable=True)
        writer = TableWriter({"path": path, "table": "t"}, from_arrow_schema(kind.rows.schema), overwrite=False)
        built = writer.write(iter(kind.rows.to_batches()))
        failing = f"{path}/tables/{store._info('t').table_id}/0/"

        def fail(self: OsFileSystem, name: str) -> File:
            if name.startswith(failing):
                raise OSError(errno.EIO, "injected", name)
            return create(self, name)

        monkeypatch.setattr(OsFileSystem, "create", fail)
        writer.commit([built])
        TableRef(path, "t").store().close()
        spill_everything(store)
        assert len(staged(store)) == 1
    monkeypatch.setattr(OsFileSystem, "create", create)
    clock = FakeClock(time_us=SystemClock().time_us() + 2 * 3_600_000_000)
    with open_store(path, clock=clock, settings=replace(SETTINGS, trust_clock=True)) as store:
        store._tasks.clean_up()
        assert kind.read(store) == kind.expected
        assert store.troubles() == []
