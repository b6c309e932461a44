"""The life of a table: its row in the manifest follows the ledger; it drains, is dropped, and is collected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.errors import (
    Closed,
    CorruptionError,
    Invalid,
    NotFound,
    OutcomeUnknown,
    PenstockError,
    ReadOnly,
    Restore,
    StoreLocked,
    TableDraining,
    WaitExpired,
)
from penstock.manifest.invariants import check_all
from penstock.manifest.keys import ComponentId, MetricKey
from penstock.manifest.records import Active, Draining, JobKind, Tombstoned
from penstock.manifest.tables import DB, GENERATIONS, METRICS
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.manifest import MemoryEngine

ANY: Any = 7
HALF: Any = 1.5
SETTINGS = StoreSettings(background=False, reserve_bytes=0)


def rows(store: Store) -> dict[int, Any]:
    return store._manifest.read(lambda view: dict(DB.scan(view)))


def check_rows(store: Store) -> None:
    """The rows of tables are those of the ledger, and the manifest breaks no rule."""
    alive = {db_id: row for db_id, row in rows(store).items() if not isinstance(row.status, Tombstoned)}
    assert {db_id: row.name for db_id, row in alive.items()} == {t.table_id: t.name for t in store.port.tables()}
    assert store._manifest.read(lambda view: list(check_all(view))) == []


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(disk: SimulatedDisk, clock: FakeClock) -> Iterator[Store]:
    with reopened(disk, clock) as store:
        yield store


def reopened(disk: SimulatedDisk, clock: FakeClock, settings: StoreSettings = SETTINGS) -> Store:
    return open_store("s", settings=settings, fs=disk, clock=clock, engine=MemoryEngine)


def test_a_row_follows_every_change_of_a_table(store: Store) -> None:
    store.kv("users", shards=2)
    (table_id,) = rows(store)
    row = rows(store)[table_id]
    assert (row.name, row.kind, row.wal_shards, row.status) == ("users", "kv", 2, Active())
    assert row.created_at_epoch_ms > 0
    before = store.describe("users")
    assert (before.status, before.shards, before.config_hash) == ("active", 2, row.config_hash.hex())
    store.alter("users", archive=penstock.ArchivePolicy(archive_after_ms=7))
    changed = store.describe("users")
    assert changed.generation > before.generation
    assert changed.config_hash == before.config_hash, "what may change is in the hash"
    assert rows(store)[table_id].options.archive.archive_after_ms == 7
    assert store.drain("users").status == "draining"
    assert rows(store)[table_id].status == Draining()
    assert store.reactivate("users").status == "active"
    store.drop("users")
    assert isinstance(rows(store)[table_id].status, Tombstoned)
    store.queue("users")  # the name is free again
    check_rows(store)
    with pytest.raises(NotFound):
        store.describe("other")


def test_a_draining_table_takes_deletes_and_nothing_else_also_after_a_restart(
    disk: SimulatedDisk, clock: FakeClock
) -> None:
    with reopened(disk, clock) as store:
        users, events = store.kv("users"), store.queue("events")
        users.put(b"a", b"1")
        users.put(b"b", b"2")
        events.put(b"m")
        store.drain("users")
        store.drain("events")
        assert store._maintenance.trees(), "it must be open"
        assert store.describe("users").progress[0].stored_lsn > 0, "what was written is in files"
    with reopened(disk, clock) as store:
        users, events = store.kv("users"), store.queue("events")
        for write in (
            lambda: users.put(b"c", b"3"),
            lambda: users.put(b"c", b"3", if_absent=True),
            lambda: users.put_many([(b"c", b"3")]),
            lambda: events.put(b"n"),
            lambda: events.append(b"n"),
        ):
            with pytest.raises(TableDraining, match="reactivate"):
                write()
        with pytest.raises(TableDraining), store.batch() as batch:
            batch.kv("users").put(b"c", b"3")
        users.delete(b"a", durable=True)
        store._tasks.retry()  # decides anew who must ask
        with pytest.raises(TableDraining):
            users.put(b"c", b"3")
        assert dict(users.scan()) == {b"b": b"2"}
        with store.batch() as batch:  # another table is not refused for the deletes of this one
            batch.kv("users").delete(b"b")
        consumer = events.consumer("c")
        (message,) = consumer.get(timeout_s=0)
        assert message.payload == b"m"
        consumer.ack(message)
        store.reactivate("users")
        users.put(b"c", b"3", durable=True)
        assert users[b"c"] == b"3"


@pytest.mark.parametrize("workers", [0, 2])
def test_deletes_that_waited_do_not_open_a_draining_table(path: Path, workers: int) -> None:
    """Entries of a queue wait for its files; when the last is applied, writers must still ask."""
    settings = StoreSettings(dispatcher=penstock.DispatcherSettings(workers=workers))
    with penstock.open(str(path), settings=settings) as store:
        events = store.queue("events")
        for number in range(3):
            events.put(b"%d" % number, durable=True)
        store.drain("events")
        for before in (2, 3):
            events.trim(before, durable=True)
            assert len(events.read()) == 4 - before  # it is applied
            with pytest.raises(TableDraining):
                events.put(b"late")
            with pytest.raises(TableDraining):
                events.put_many([b"late"])


def test_a_dropped_table_is_collected_after_the_grace_period(disk: SimulatedDisk, clock: FakeClock) -> None:
    settings = StoreSettings(
        background=False,
        reserve_bytes=0,
        collection=penstock.CollectionSettings(grace_s=0, dropped_grace_s=600),
    )
    with reopened(disk, clock, settings) as store:
        users = store.kv("users", storage=penstock.StorageOptions(chunk_dir="volumes/a", wal_dir="volumes/b"))
        users.put(b"a", b"1", durable=True)
        store.compact("users")
        (table_id,) = rows(store)
        assert disk.listdir(f"s/volumes/a/{table_id}/0"), "its files are not in its folder"
        assert disk.exists(f"s/volumes/b/{table_id}/0-log") or True
        store._meter.save()
        assert metrics_of(store, table_id)
        store.drop("users")
        store._tasks.remove_dropped()
        assert not disk.exists(f"s/volumes/a/{table_id}"), "its files stay"
        assert not disk.exists(f"s/volumes/b/{table_id}")
        assert isinstance(rows(store)[table_id].status, Tombstoned)
        assert metrics_of(store, table_id), "its metrics went before the grace period ended"
    clock.advance(601)
    with reopened(disk, clock, settings) as store:
        assert table_id in rows(store)
        store._tasks.remove_dropped()
        assert rows(store) == {}
        assert not metrics_of(store, table_id)
        check_rows(store)
    with reopened(disk, clock, settings) as store:
        assert rows(store) == {}, "the ledger's tombstone brought the row back"


@pytest.mark.parametrize("repair", ["waits", "runs", "gave up"])
@pytest.mark.parametrize("kind", [JobKind.FLUSH, JobKind.COMPACTION])
def test_a_table_dropped_before_a_killed_job_of_it_is_repaired_is_collected(
    disk: SimulatedDisk, clock: FakeClock, kind: JobKind, repair: str
) -> None:
    """A repair of a dropped table has nothing left to repair: its gate keeps no row and no file."""
    settings = StoreSettings(
        background=False, reserve_bytes=0, collection=penstock.CollectionSettings(grace_s=0, dropped_grace_s=0)
    )
    with reopened(disk, clock, settings) as store:
        store.kv("users", shards=2).put(b"a", b"1", durable=True)
        store.compact("users")
        (table_id,) = rows(store)
        store._jobs.enqueue(kind, db_id=table_id, payload=msgspec.msgpack.encode((0, False)))
        assert store._jobs.acquire("killed", (kind,)) is not None  # and never completed
    with reopened(disk, clock, settings) as store:
        gate = store._jobs.gate(table_id, kind)
        assert gate.is_shut(), "there is nothing to repair"
        lease = None if repair == "waits" else store._jobs.acquire("here", (kind,))
        if repair == "gave up":
            assert lease is not None
            store._jobs.fail(lease, OSError("a listed file is missing"), retry=False)
        store.drop("users")
        store._tasks.remove_dropped()
        if repair == "runs":
            assert lease is not None
            assert gate.is_shut(), "a job that runs lost its gate"
            assert table_id in rows(store)
            store._jobs.fail(lease, OSError("its files are gone"))
            store._tasks.remove_dropped()
        assert not gate.is_shut()
        assert rows(store) == {}
        assert store._jobs.acquire("here", (kind,)) is None
        assert not disk.exists(f"s/tables/{table_id}"), "its files stay"
        check_rows(store)


def test_metrics_of_a_table_whose_drop_is_replayed_do_not_stay(disk: SimulatedDisk, clock: FakeClock) -> None:
    settings = StoreSettings(
        background=False, reserve_bytes=0, collection=penstock.CollectionSettings(grace_s=0, dropped_grace_s=0)
    )
    with reopened(disk, clock, settings) as store:
        store.kv("users").put(b"a", b"1", durable=True)
        (table_id,) = rows(store)
        store.drop("users")
        store._tasks.remove_dropped()
        assert rows(store) == {}
        store.kv("others").put(b"a", b"1", durable=True)
        image = disk.image().restore("restart")
    with reopened(image, clock, settings) as store:
        store._maintenance.measure()  # before the files of the dropped table are removed once more
        store._tasks.remove_dropped()
        assert metrics_of(store, table_id), "nothing was measured"
        store._tasks.clean_up()
        assert not metrics_of(store, table_id)
        (other_id,) = rows(store)
        assert metrics_of(store, other_id)


def metrics_of(store: Store, table_id: int) -> list[Any]:
    start, stop = MetricKey(table_id, 0), MetricKey(table_id + 1, 0)
    return store._manifest.read(lambda view: list(METRICS.scan(view, start, stop)))


def test_folders_of_a_dropped_table_elsewhere_are_found_by_the_next_opening(
    disk: SimulatedDisk, clock: FakeClock
) -> None:
    with reopened(disk, clock) as store:
        users = store.kv("users", storage=penstock.StorageOptions(chunk_dir="volumes/a"))
        users.put(b"a", b"1", durable=True)
        store.compact("users")
        (table_id,) = rows(store)
        store.drop("users")
        assert disk.exists(f"s/volumes/a/{table_id}/0")
    with reopened(disk, clock) as store:
        store._tasks.remove_dropped()
        assert not disk.exists(f"s/volumes/a/{table_id}")


def test_what_a_failed_commit_left_behind_is_written_later(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = store._manifest.apply

    def fail(*_: Any, **__: Any) -> Any:
        raise OutcomeUnknown("the disk did not answer")

    monkeypatch.setattr(store._manifest, "apply", fail)
    store.kv("users")
    assert rows(store) == {}
    assert store._registry.is_behind
    monkeypatch.setattr(store._manifest, "apply", apply)
    store._tasks.retry()
    check_rows(store)
    assert store.describe("users").status == "active"


def test_rows_that_an_opening_finds_behind_or_missing_are_made_from_the_ledger(
    disk: SimulatedDisk, clock: FakeClock
) -> None:
    """As of a store of an earlier version, or after a crash before the commit."""
    with reopened(disk, clock) as store:
        store.kv("users")
        store.kv("old")
        store.drain("users")
        expected = rows(store)
    for damage in ("all", "status"):
        with reopened(disk, clock) as store, store._manifest._engine.write() as view:
            for db_id, row in list(DB.scan(view)):
                if damage == "all":
                    DB.delete(view, db_id)
                else:
                    DB.put(view, db_id, changed_row(row, status=Active()))
            GENERATIONS.delete(view, ComponentId.TABLES)  # how far the rows follow
            if damage == "all":
                for name in ("users", "old"):
                    view.delete("meta", b"name/" + name.encode())
        with reopened(disk, clock) as store:
            actual = rows(store)
            assert {i: (r.name, r.status, r.config_hash, r.created_at_epoch_ms) for i, r in actual.items()} == {
                i: (r.name, r.status, r.config_hash, r.created_at_epoch_ms) for i, r in expected.items()
            }
            check_rows(store)


def changed_row(row: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(row, **changes)


def test_a_row_of_another_store_is_not_believed(disk: SimulatedDisk, clock: FakeClock) -> None:
    with reopened(disk, clock) as store:
        store.kv("users")
        ((db_id, row),) = rows(store).items()
        with store._manifest._engine.write() as view:
            DB.put(view, db_id, changed_row(row, config_hash=bytes(32)))
    with reopened(disk, clock) as store, pytest.raises(CorruptionError, match="another"):
        store.kv("users").get(b"a")
    with SimulatedDiskWithTable(7) as other, pytest.raises(CorruptionError, match="another"):
        reopened(other, clock)


class SimulatedDiskWithTable:
    """A store whose manifest names a table that its ledger never made."""

    def __init__(self, db_id: int) -> None:
        self._db_id = db_id

    def __enter__(self) -> SimulatedDisk:
        disk, clock = SimulatedDisk(), FakeClock()
        with reopened(disk, clock) as store:
            store.kv("users")
            ((_, row),) = rows(store).items()
            with store._manifest._engine.write() as view:
                DB.put(view, self._db_id, changed_row(row, name="ghost"))
                GENERATIONS.delete(view, ComponentId.TABLES)
        return disk

    def __exit__(self, *_: object) -> None: ...


def test_a_change_is_waited_for_without_polling(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "s") as store, penstock.connect(tmp_path / "s") as client:
        store.kv("users")
        description = client.describe("users")
        assert description == store.describe("users")
        with pytest.raises(WaitExpired):
            client.wait_for_change("users", description.generation, timeout_s=0.01)
        outcomes: list[Any] = []

        def wait() -> None:
            outcomes.append(client.wait_for_change("users", description.generation, timeout_s=30))
            try:
                client.wait_for_change("users", outcomes[0].generation, timeout_s=30)
            except PenstockError as error:
                outcomes.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        store.kv("another")  # does not count
        store.drain("users")
        for _ in range(3_000):
            if outcomes:
                break
            waiting.join(0.01)
        assert outcomes[0].status == "draining"
        assert client.describe("another").generation < outcomes[0].generation
        store.drop("users")
        waiting.join(30)
        assert isinstance(outcomes[1], NotFound)
        with pytest.raises(NotFound):
            client.wait_for_change("users", 0)


def test_operations_of_a_client_on_a_table_as_a_whole(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "s") as store, penstock.connect(tmp_path / "s") as client:
        users = client.kv("users")
        users.put(b"a", b"1")
        assert client.drain("users").status == "draining"
        with pytest.raises(TableDraining):
            users.put(b"b", b"2", durable=True)
        assert client.reactivate("users").status == "active"
        users.put(b"b", b"2", durable=True)
        assert len(store.kv("users")) == 2
        assert "checkpoint" in client.tasks()
        client.trigger("checkpoint")
        with pytest.raises(NotFound):
            client.trigger("nonsense")
        wrong: list[Callable[[], object]] = [
            lambda: client.describe(ANY),
            lambda: client.describe("Users"),
            lambda: client.drain("users", timeout_s=float("nan")),
            lambda: client.drain("users", timeout_s=True),
            lambda: client.wait_for_change("users", True),
            lambda: client.wait_for_change("users", -1),
            lambda: client.wait_for_change("users", 1, timeout_s=-1),
            lambda: client.trigger(ANY),
            lambda: store.trigger(ANY),
            lambda: store.wait_for_change("users", HALF),
            lambda: store.reactivate(ANY),
        ]
        for call in wrong:
            with pytest.raises(Invalid):
                call()
    closed: list[Callable[[], object]] = [
        lambda: store.describe("users"),
        lambda: store.drain("users"),
        store.tasks,
        lambda: client.describe("users"),
        lambda: client.wait_for_change("users", 0),
    ]
    for call in closed:
        with pytest.raises(Closed):
            call()


def test_a_read_only_store_describes_and_changes_nothing(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "s") as store:
        store.kv("users")
    with penstock.open(tmp_path / "s", read_only=True) as store:
        assert store.describe("users").kind == "kv"
        with pytest.raises(ReadOnly):
            store.drain("users")
        with pytest.raises(ReadOnly):
            store.alter("users", archive=None)
        with pytest.raises(Invalid):
            store.trigger("checkpoint")


def test_intervals_of_tasks_and_settings_of_the_control_plane_are_the_stores(tmp_path: Path) -> None:
    settings = penstock.StoreSettings(task_intervals_s={"checkpoint": 7.0, "flush-jobs": 0.5})
    with penstock.open(tmp_path / "s", settings=settings) as store:
        tasks = store._scheduler.statistics().tasks
        assert store._scheduler._table._entries["checkpoint"].base_s == 7.0
        assert tasks["flush-jobs"].name == "flush-jobs"
    with pytest.raises(NotFound):
        penstock.open(tmp_path / "s", settings=penstock.StoreSettings(task_intervals_s={"nonsense": 1.0}))
    for wrong in ({"checkpoint": 0}, {"checkpoint": True}, {"checkpoint": float("nan")}, {7: 1.0}, 5):
        with pytest.raises(Invalid):
            penstock.StoreSettings(task_intervals_s=wrong)  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        penstock.StoreSettings(jobs=3)  # type: ignore[arg-type]


def test_generations_of_the_parts_move(store: Store) -> None:
    before = [store._manifest.generation(part) for part in (ComponentId.WAL, ComponentId.ORCHESTRATOR)]
    store.kv("users").put(b"a", b"1", durable=True)
    store._checkpoint.clear()
    after = [store._manifest.generation(part) for part in (ComponentId.WAL, ComponentId.ORCHESTRATOR)]
    assert all(now > then for now, then in zip(after, before, strict=True))


def test_a_damaged_manifest_is_replaced_by_its_newest_copy(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    with penstock.open(folder) as store:
        store.kv("users").put(b"a", b"1", durable=True)
        store._manifest.backup()
        store.kv("users").put(b"b", b"2", durable=True)
        store.kv("later").put(b"c", b"3", durable=True)
        with pytest.raises(StoreLocked):
            penstock.restore_manifest(folder)
    manifest = folder / "manifest"
    manifest.write_bytes(b"\xff" * manifest.stat().st_size)
    with pytest.raises(Restore):
        penstock.open(folder)
    assert penstock.restore_manifest(folder).startswith("manifest.backup")
    assert (folder / "manifest.damaged").exists()
    with penstock.open(folder) as store:
        assert dict(store.kv("users").scan()) == {b"a": b"1", b"b": b"2"}
        assert store.describe("later").kind == "kv"  # its row follows the ledger again
        check_rows(store)
    with pytest.raises(NotFound):
        penstock.restore_manifest(tmp_path / "nowhere")
    with pytest.raises(Invalid):
        penstock.restore_manifest(ANY)
