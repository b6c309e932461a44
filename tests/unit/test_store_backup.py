"""Backups: one moment of the whole store while others write, only what changed, and never half of one."""

from __future__ import annotations

import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from backup_kill_child import make_tables, rounds_of, write_round

import penstock
from penstock.errors import Backpressure, CorruptionError, Invalid, NotFound, StoreLocked, UnsupportedVersion
from penstock.host.os_files import OsFileSystem
from penstock.kinds import partitions_of
from penstock.manifest.manifest import Manifest
from penstock.partition.checkpoint import Checkpoint
from penstock.registry import QUEUE
from penstock.store import backup_folder
from penstock.store.backup import Backup
from penstock.store.identity import read_uuid

BEGIN = 1_700_000_000_000_000
ROWS = 500


@pytest.fixture
def store(tmp_path: Path) -> Iterator[penstock.Store]:
    with penstock.open(tmp_path / "store") as opened:
        make_tables(opened)
        yield opened


def restored(tmp_path: Path, number: int | None = None) -> Path:
    path = tmp_path / "copy"
    shutil.rmtree(path, ignore_errors=True)
    penstock.restore(tmp_path / "backups", path, number=number)
    return path


@pytest.mark.parametrize("moment", ["before", "during"])
@pytest.mark.parametrize("method", ["backup", "archive"])
def test_a_dropped_queue_whose_records_are_in_the_journal_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, method: str
) -> None:
    """The copy replays them up to the drop: without the queue's files it could not be opened."""
    journal = penstock.LogSettings(segment_bytes=1 << 16, allocate_bytes=1 << 14)
    settings = penstock.StoreSettings(background=False, serve=False, journal=journal)
    copy_to, url = Manifest.copy_to, f"file://{tmp_path}/archive"
    source: penstock.Store

    def dropping(self: Manifest, target: str) -> Any:
        rows = copy_to(self, target)
        source.drop("events")
        return rows

    with penstock.open(tmp_path / "store", settings=settings, archive=url) as source:
        source.kv("users").put(b"ada", b"1815", durable=True)
        events = source.queue("events", storage=penstock.StorageOptions(wal_dir="volumes/log"))
        for _ in range(20):
            events.put(bytes(10_000), durable=True)
        assert source.checkpoint().segments_dropped
        events.put(b"the last", durable=True)
        if moment == "before":
            source.drop("events")
        else:
            monkeypatch.setattr(Manifest, "copy_to", dropping)
        if method == "backup":
            source.backup(tmp_path / "backups")
        else:
            source.archive()
    monkeypatch.undo()
    if method == "backup":
        penstock.restore(tmp_path / "backups", tmp_path / "copy")
    else:
        penstock.reattach(url, tmp_path / "copy")
    with penstock.open(tmp_path / "copy") as copy:
        assert copy.tables() == ["users"]
        assert copy.kv("users")[b"ada"] == b"1815"
        assert copy.check().ok


def test_a_backup_is_one_moment_while_others_write(store: penstock.Store, tmp_path: Path) -> None:
    stop, written = threading.Event(), [0]

    def write() -> None:
        while not stop.is_set():
            write_round(store, written[0])
            written[0] += 1

    def maintain() -> None:
        while not stop.is_set():
            store.checkpoint()
            for name in ("users", "metrics", "docs"):
                store.compact(name)
            store._collector.collect()

    threads = [threading.Thread(target=write), threading.Thread(target=maintain)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 4):
            while written[0] < number * 20:
                time.sleep(0.01)
            before = written[0]
            report = store.backup(tmp_path / "backups")
            after = written[0]
            with penstock.open(restored(tmp_path), read_only=number == 2) as copy:
                assert before <= rounds_of(copy) <= after + 1
                assert copy.statistics().durable_lsn == report.lsn
                assert copy.check().ok
                if number != 2:
                    write_round(copy, rounds_of(copy))  # and it is used further
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert rounds_of(store) == written[0]
    assert store.check().ok


def test_a_restored_store_is_another_store(store: penstock.Store, tmp_path: Path) -> None:
    store.backup(tmp_path / "backups")
    path = restored(tmp_path)
    fs = OsFileSystem()
    assert read_uuid(fs, str(path)) not in (None, read_uuid(fs, str(tmp_path / "store")))
    with penstock.open(path) as copy:
        assert copy.uuid == read_uuid(fs, str(path)) != store.uuid
        with pytest.raises(Invalid, match="of another store: give another folder"):
            copy.backup(tmp_path / "backups")
        copy.backup(tmp_path / "backups of the copy")  # a copy of a copy
        penstock.restore(tmp_path / "backups of the copy", tmp_path / "third")
    with penstock.open(tmp_path / "third") as third:
        assert third.uuid not in (store.uuid, copy.uuid)


def test_positions_tokens_and_sequences_survive(store: penstock.Store, tmp_path: Path) -> None:
    with store.batch(token=("loader", 1)) as batch:
        batch.queue("events").put(b"once", key=b"k")
    where = store.queue("events").append(b"second", key=b"k")
    consumer = store.queue("events").consumer("router")
    messages = consumer.get(10)
    assert len(messages) == 2
    consumer.ack(messages)
    store.backup(tmp_path / "backups")
    with penstock.open(restored(tmp_path)) as copy:
        with copy.batch(token=("loader", 1)) as again:
            again.queue("events").put(b"twice", key=b"k")
        assert again.duplicate
        assert copy.queue("events").consumer("router").get(10) == []
        assert copy.queue("events").append(b"third", key=b"k").sequence == where.sequence + 1


def test_loads_that_are_stored_and_discarded_during_a_backup(
    store: penstock.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is copied before the rows of a load are stored, the journal after: the backup needs their files."""
    times = pa.array(range(BEGIN, BEGIN + ROWS), pa.timestamp("us"))
    loads = {
        "events": pa.table({"payload": [b"loaded"] * ROWS}),
        "users": pa.table({"key": [b"loaded %08d" % n for n in range(ROWS)], "value": [b"v" * 50] * ROWS}),
        "metrics": pa.table({"metric": ["loaded"] * ROWS, "time": times, "value": [1.0] * ROWS}),
    }
    copied = Manifest.copy_to

    def copy_to(self: Manifest, target: str) -> Any:
        rows = copied(self, target)
        for name, loaded in prepared.items():
            with store.batch() as batch:
                batch.load(name, loaded)
        store.flush()
        for info in store.port.tables():
            for partition in partitions_of(info):
                store._port.machine(partition).store_now()  # with the loaded rows: it waits until they are applied
        return rows

    for kind in ("kv.loading", "queue.staged", "series.loading"):
        monkeypatch.setattr(f"penstock.{kind}.INLINE_BYTES_MAX", 1_000)
    prepared = {name: store.prepare(name, rows) for name, rows in loads.items()}
    staged = {path for path in (tmp_path / "store" / "tables").rglob("*") if path.suffix in (".arrow", ".samples")}
    assert len(staged) == 2
    monkeypatch.setattr(Manifest, "copy_to", copy_to)
    store.backup(tmp_path / "backups")
    assert not any(path.exists() for path in staged)  # they were discarded in the end
    assert store.check().orphans == []
    with penstock.open(restored(tmp_path)) as copy, copy.snapshot() as snapshot:
        assert len(snapshot.queue("events").to_arrow()) == ROWS
        assert len(snapshot.kv("users")) == ROWS
        assert len(snapshot.series("metrics").select("loaded")) == ROWS
        assert copy.check().ok


def test_a_checkpoint_right_after_the_journal_was_copied(
    store: penstock.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_off, deleted = Checkpoint.held_off, list[int]()

    @contextmanager
    def followed(self: Checkpoint, timeout_s: float) -> Iterator[None]:
        with held_off(self, timeout_s):
            yield
        before = int(store._consensus.first)
        self.clear()
        deleted.append(int(store._consensus.first) - before)

    write_round(store, 0)
    store.flush()
    monkeypatch.setattr(Checkpoint, "held_off", followed)
    store.backup(tmp_path / "backups")
    assert deleted[0] > 0
    with penstock.open(restored(tmp_path)) as copy:
        assert rounds_of(copy) == 1
        assert copy.check().ok


def test_partition_snapshots_and_change_feeds_are_backed_up(store: penstock.Store, tmp_path: Path) -> None:
    store.kv("fed", changes=True).put(b"a", b"1")
    for number in range(3):
        write_round(store, number)
    store.keep_snapshot("users")
    store.keep_snapshot("events")
    write_round(store, 3)
    store.checkpoint()
    store.backup(tmp_path / "backups")
    assert store.check().ok
    assert store.check().orphans == []
    path = restored(tmp_path)
    for damaged in [*(path / "tables").rglob("0/*.sst")]:
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    with penstock.open(path) as copy:
        for name in ("users", "events"):
            assert copy.repair(name) == []
        assert rounds_of(copy) == 4
        assert copy.kv("fed").changes(after=0).to_arrow()["key"].to_pylist() == [b"a"]


def test_unchanged_files_are_not_copied_again(store: penstock.Store, tmp_path: Path) -> None:
    for number in range(50):
        write_round(store, number)
    store.compact("users")
    first = store.backup(tmp_path / "backups")
    shared = {path: path.stat().st_ino for path in (tmp_path / "backups" / "files").rglob("*.sst")}
    assert shared
    second = store.backup(tmp_path / "backups")
    assert second.files == first.files
    assert second.files - second.files_copied >= 2 * len(shared)
    assert {path: path.stat().st_ino for path in shared} == shared
    write_round(store, 50)
    store.compact("users")  # replaces the files of the first two backups
    third = store.backup(tmp_path / "backups")
    for number, rounds in ((1, 50), (2, 50), (3, 51)):
        with penstock.open(restored(tmp_path, number)) as copy:
            assert rounds_of(copy) == rounds
    assert third.number == 3
    store.backup(tmp_path / "backups", keep=2)
    folders = {path.name for path in (tmp_path / "backups").iterdir() if path.is_dir()}
    assert folders == {"000003", "000004", "files"}
    left = set((tmp_path / "backups" / "files").rglob("*.sst"))
    assert not left.issuperset(shared)  # what only the removed backups had is gone
    for number in (3, 4):
        assert penstock.check_backup(tmp_path / "backups", number=number) == []
    with pytest.raises(NotFound, match="has no backup 1: it has 3, 4"):
        restored(tmp_path, 1)


def test_a_file_of_the_same_name_and_other_content_does_not_replace_that_of_an_earlier_backup(
    store: penstock.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write_round(store, number)
    store.compact("users")
    store.backup(tmp_path / "backups")
    monkeypatch.setattr(Backup, "_is_same", lambda self, listed, size: False)
    store.backup(tmp_path / "backups")
    for number in (1, 2):
        with penstock.open(restored(tmp_path, number)) as copy:
            assert rounds_of(copy) == 3


def test_a_half_backup_is_never_taken_for_whole(
    store: penstock.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error at each step of a backup, as a full disk gives: the store goes on, and the last whole one counts."""
    write_round(store, 0)
    store.compact("users")
    store.backup(tmp_path / "backups")
    write_round(store, 1)
    store.compact("users")
    copied = backup_folder.Copier.copy
    for failing in range(40):
        left = [failing]

        def copy(self: Any, *args: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(28, "No space left on device", args[1])
            return copied(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(backup_folder.Copier, "copy", copy)
            try:
                store.backup(tmp_path / "backups")
            except penstock.errors.DiskFull:
                pass
            else:
                break
        assert store.readers.holders == 0
        assert penstock.check_backup(tmp_path / "backups") == []
        with penstock.open(restored(tmp_path)) as one:
            assert rounds_of(one) == 1
    else:
        raise AssertionError("no backup succeeded")
    assert failing > 3
    with penstock.open(restored(tmp_path)) as two:
        assert rounds_of(two) == 2
    assert not list((tmp_path / "backups").rglob("*.tmp"))
    assert rounds_of(store) == 2


def test_damage_in_a_backup_is_named(store: penstock.Store, tmp_path: Path) -> None:
    for number in range(5):
        write_round(store, number)
    store.compact("users")
    store.backup(tmp_path / "backups")
    files = [path for path in (tmp_path / "backups").rglob("*") if path.is_file() and path.name != "LOCK"]
    assert {path.suffix for path in files} >= {".sst", ".idx", ".log", ".data", ".2", ".current", ""}
    for path in files:
        content = path.read_bytes()
        for at in {0, len(content) // 2, len(content) - 1}:
            path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
            with pytest.raises((CorruptionError, UnsupportedVersion), match=path.name.replace(".", r"\.")):
                restored(tmp_path)
            assert not (tmp_path / "copy").exists()
            if path.name not in ("LISTING", "BACKUPS"):
                assert str(path) in [damage.path for damage in penstock.check_backup(tmp_path / "backups")]
        path.unlink()
        if path.name not in ("LISTING", "BACKUPS"):
            with pytest.raises(CorruptionError, match="missing"):
                restored(tmp_path)
        path.write_bytes(content)
    with penstock.open(restored(tmp_path)) as copy:
        assert rounds_of(copy) == 5


def test_damage_in_the_store_does_not_enter_a_backup(store: penstock.Store, tmp_path: Path) -> None:
    for number in range(5):
        write_round(store, number)
    store.compact("users")
    path = next((tmp_path / "store" / "tables").rglob("*.sst"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptionError, match=path.name) as caught:
        store.backup(tmp_path / "backups")
    assert caught.value.path == str(path)
    assert str(path) in [damage.path for damage in store.check().damage]
    with pytest.raises(NotFound, match="no whole backup"):
        restored(tmp_path)


def test_wrong_arguments(store: penstock.Store, tmp_path: Path) -> None:
    root = tmp_path / "store"
    for target in (root, root / "tables" / "backups", tmp_path, "/"):
        with pytest.raises(Invalid, match="give a folder elsewhere"):
            store.backup(target)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear")
    with pytest.raises(Invalid, match="holds other files"):
        store.backup(tmp_path / "full")
    for wrong in (None, 7, b"backups", "a\0b", ""):
        with pytest.raises(Invalid):
            store.backup(wrong)  # type: ignore[arg-type]
        with pytest.raises(Invalid):
            penstock.restore(wrong, tmp_path / "copy")  # type: ignore[arg-type]
    for keep in (0, -1, 1.5, "2", True):
        with pytest.raises(Invalid):
            store.backup(tmp_path / "backups", keep=keep)  # type: ignore[arg-type]
    with pytest.raises(Invalid, match="progress"):
        store.backup(tmp_path / "backups", progress=3)  # type: ignore[arg-type]
    assert not (tmp_path / "backups").exists()
    with pytest.raises(NotFound, match="not a folder of backups"):
        penstock.restore(tmp_path / "full", tmp_path / "copy")
    store.backup(tmp_path / "backups")
    with pytest.raises(Invalid, match="is not empty"):
        penstock.restore(tmp_path / "backups", root)
    (tmp_path / "empty").mkdir()
    penstock.restore(tmp_path / "backups", tmp_path / "empty")
    with pytest.raises(penstock.errors.ReadOnly), penstock.open(tmp_path / "empty", read_only=True) as reader:
        reader.backup(tmp_path / "others")


def test_a_newer_format_is_refused(store: penstock.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("penstock.store.backup.VERSION", 2)
        store.backup(tmp_path / "backups")
    with pytest.raises(UnsupportedVersion, match="LISTING has version 2, this Penstock reads 1"):
        restored(tmp_path)


def test_two_at_once(store: penstock.Store, tmp_path: Path) -> None:
    def meanwhile(_: penstock.CopyProgress) -> None:
        if not errors:
            for act in (lambda: store.backup(tmp_path / "backups"), store.check):
                try:
                    act()
                except penstock.errors.PenstockError as error:
                    errors.append(error)
            store.drop("docs")  # and its files stay until the end
            store.checkpoint()

    errors: list[Exception] = []
    write_round(store, 0)
    store.compact("docs")
    store.backup(tmp_path / "backups", progress=meanwhile)
    assert [type(error) for error in errors] == [StoreLocked]
    assert "another backup is being written" in str(errors[0])
    with penstock.open(restored(tmp_path)) as copy:
        assert rounds_of(copy) == 1
    assert "docs" not in store.tables()


def test_a_check_runs_alone(store: penstock.Store) -> None:
    def meanwhile(_: penstock.CopyProgress) -> None:
        with pytest.raises(Backpressure, match="another check"):
            store.check()
        calls.append(1)

    calls: list[int] = []
    write_round(store, 0)
    assert store.check(progress=meanwhile).ok
    assert calls


def test_through_a_client(store: penstock.Store, tmp_path: Path) -> None:
    with penstock.connect(tmp_path / "store") as client:
        assert client.uuid == store.uuid
        write_round(client, 0)
        report = client.backup(tmp_path / "backups", keep=1)
        assert (report.number, client.check().ok, client.troubles()) == (1, True, [])
        with pytest.raises(Invalid, match="give a folder elsewhere"):
            client.backup(tmp_path / "store" / "tables")
        with penstock.open(restored(tmp_path)) as copy:
            assert rounds_of(copy) == 1


def test_a_moved_store_works(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "here") as store:
        make_tables(store)
        write_round(store, 0)
        store.compact("users")
        uuid = store.uuid
    (tmp_path / "there").mkdir()
    (tmp_path / "here").rename(tmp_path / "there" / "store")
    with penstock.open(tmp_path / "there" / "store") as store:
        assert (rounds_of(store), store.uuid) == (1, uuid)
        write_round(store, 1)
        assert store.check().ok


def test_orphans_are_found(store: penstock.Store, tmp_path: Path) -> None:
    write_round(store, 0)
    store.compact("users")
    assert store.check().orphans == []
    shard = next((tmp_path / "store" / "tables").rglob("*.sst")).parent
    (shard / "00000000000000009999.sst").write_bytes(b"")
    (tmp_path / "store" / "letter").write_text("dear")
    report = store.check()
    assert report.ok
    assert sorted(path.rpartition("/")[2] for path in report.orphans) == ["00000000000000009999.sst", "letter"]


def test_every_kind_of_file_is_checked(store: penstock.Store, tmp_path: Path) -> None:
    for number in range(5):
        write_round(store, number)
    for name in ("users", "metrics", "docs"):
        store.compact(name)
    root = tmp_path / "store"
    paths = [*root.rglob("*.sst"), *root.rglob("*.idx"), *root.rglob("*.data"), *root.rglob("journal/*.log")]
    assert len({path.suffix for path in paths}) == 4
    for path in paths:
        content = path.read_bytes()
        at = 200 if path.suffix in (".data", ".log") else len(content) - 9
        with path.open("r+b") as file:  # in place: it is open
            file.seek(at)
            file.write(bytes([content[at] ^ 4]))
        try:
            assert path.name in " ".join(damage.path for damage in store.check().damage)
        finally:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(content[at : at + 1])
    assert store.check().damage == []


def test_an_interrupt_ends_a_backup_and_leaves_the_store_in_use(store: penstock.Store, tmp_path: Path) -> None:
    """Ctrl-C at several points: in the main thread the interrupt is raised, and the next backup succeeds."""
    write_round(store, 0)
    store.compact("users")
    for at in (1, 2):
        steps: list[penstock.CopyProgress] = []

        def interrupt(done: penstock.CopyProgress, steps: list[penstock.CopyProgress] = steps, at: int = at) -> None:
            steps.append(done)
            if len(steps) == at:
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.05)

        folder = tmp_path / f"interrupted {at}"  # a new one: all files are to be copied
        with pytest.raises(KeyboardInterrupt):
            report = store.backup(folder, progress=interrupt)
            raise AssertionError(f"no interrupt in {report}: {steps}")
        assert store.readers.holders == 0
        assert store.backup(folder).files > 0
        write_round(store, at)
        store.flush()  # a compaction stores what was applied: the next backup has files to copy
        store.compact("users")
    with pytest.raises(KeyboardInterrupt):
        store.check(progress=lambda _: signal.raise_signal(signal.SIGINT))
    assert store.check().ok
    store.backup(tmp_path / "backups")
    store.checkpoint()
    with penstock.open(restored(tmp_path)) as copy:
        assert copy.kv("users").get(b"round") == b"2"


def test_a_store_that_is_closed_meanwhile(tmp_path: Path) -> None:
    store = penstock.open(tmp_path / "store")
    make_tables(store)
    write_round(store, 0)
    store.compact("users")
    closing = threading.Thread(target=store.close)

    def close(_: penstock.CopyProgress) -> None:
        if not closing.ident:
            closing.start()
            while not store.closed:
                time.sleep(0.01)

    with pytest.raises(penstock.errors.PenstockError):
        store.backup(tmp_path / "backups", progress=close)
    closing.join()
    with pytest.raises(NotFound, match="no whole backup"):
        penstock.check_backup(tmp_path / "backups")
    with penstock.open(tmp_path / "store") as again:
        assert rounds_of(again) == 1
        again.backup(tmp_path / "backups")
    with pytest.raises(penstock.errors.Closed):
        store.backup(tmp_path / "backups")
    with pytest.raises(penstock.errors.Closed):
        store.check()


def test_restores_that_meet(store: penstock.Store, tmp_path: Path) -> None:
    def meanwhile(_: penstock.CopyProgress) -> None:
        with pytest.raises(StoreLocked, match="is being made by another process"):
            penstock.restore(tmp_path / "backups", tmp_path / "copy")

    store.backup(tmp_path / "backups")
    penstock.restore(tmp_path / "backups", tmp_path / "copy", progress=meanwhile)
    (tmp_path / "other.restoring").mkdir()
    (tmp_path / "other.restoring" / "letter").write_text("dear")
    with pytest.raises(Invalid, match="is in the way"):
        penstock.restore(tmp_path / "backups", tmp_path / "other")
    assert (tmp_path / "other.restoring" / "letter").read_text() == "dear"
    with pytest.raises(KeyError):  # and one that ended early is no hindrance

        def fail(_: penstock.CopyProgress) -> None:
            raise KeyError

        penstock.restore(tmp_path / "backups", tmp_path / "third", progress=fail)
    penstock.restore(tmp_path / "backups", tmp_path / "third")
    with penstock.open(tmp_path / "third") as third:
        assert third.tables() == store.tables()


def test_a_damaged_listing_of_another_backup_does_not_matter(store: penstock.Store, tmp_path: Path) -> None:
    store.backup(tmp_path / "backups")
    store.backup(tmp_path / "backups")
    (tmp_path / "backups" / "000001" / "LISTING").write_bytes(b"{}")
    restored(tmp_path)
    with pytest.raises(CorruptionError, match="000001/LISTING"):
        store.backup(tmp_path / "backups")  # it cannot tell which files the damaged one shares
    shutil.rmtree(tmp_path / "backups" / "000001")
    assert store.backup(tmp_path / "backups").number == 3


@pytest.mark.parametrize("inside", ["", "files/copy", "000001/copy", "copy"])
def test_a_restore_into_the_folder_of_backups_is_refused(store: penstock.Store, tmp_path: Path, inside: str) -> None:
    """The next backup would remove it."""
    store.backup(tmp_path / "backups")
    with pytest.raises(Invalid, match="is not beside the folder of backups"):
        penstock.restore(tmp_path / "backups", tmp_path / "backups" / inside)
    assert not (tmp_path / "backups" / inside / "STORE").exists()


@pytest.mark.parametrize("how", ["cut", "flip", "lose"])
def test_a_damaged_copy_is_not_listed_again(store: penstock.Store, tmp_path: Path, how: str) -> None:
    write_round(store, 0)
    store.compact("users")
    store.backup(tmp_path / "backups")
    for path in (tmp_path / "backups" / "files").rglob("*.sst"):
        content = path.read_bytes()
        if how == "lose":
            path.unlink()
        else:
            path.write_bytes(content[:-1] if how == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    store.backup(tmp_path / "backups")
    assert penstock.check_backup(tmp_path / "backups", number=1) != []
    assert penstock.check_backup(tmp_path / "backups", number=2) == []
    with penstock.open(restored(tmp_path)) as copy:
        assert rounds_of(copy) == 1


UNREADABLE = (r"tables/.*\.sst", r"tables/.*\.data", r"tables/.*manifest\.", r"tables/.*-log/", r"tables/.*-snapshot/")


@pytest.mark.parametrize("pattern", UNREADABLE)
def test_files_that_cannot_be_read_are_named_by_a_check(
    store: penstock.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """A bad sector does not end the check: it is one of the damages."""
    for number in range(3):
        write_round(store, number)
    store.compact("users")
    store.keep_snapshot("users")
    write_round(store, 3)
    store._consensus.roll()
    store.checkpoint()
    assert store.check().ok
    opened = OsFileSystem.open

    def fail(self: OsFileSystem, path: str, **options: Any) -> Any:
        if re.search(pattern, path) and not options.get("write"):
            raise OSError(5, "Input/output error", path)
        return opened(self, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(OsFileSystem, "open", fail)
        for partition in partitions_of(store.port.table("events")):  # type: ignore[arg-type]
            store._port.machine(partition).queue._reader.forget()  # type: ignore[attr-defined]
        damage = store.check().damage
    assert damage
    assert all(re.search(pattern, one.path) and "cannot be read (Input/output error)" in one.reason for one in damage)
    assert store.check().ok


def test_the_journal_is_checked_although_its_beginning_is_dropped_many_times(
    store: penstock.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_round(store, 0)
    store.flush()
    path = max((tmp_path / "store" / "journal").glob("*.log"))
    with path.open("r+b") as file:
        file.seek(300)
        byte = file.read(1)
        file.seek(300)
        file.write(bytes([byte[0] ^ 1]))
    kind, calls = type(store._consensus), list[int]()
    records, begins = kind.records, int(store._consensus.first)

    def dropped(self: Any, start: int) -> Any:
        calls.append(start)
        if len(calls) <= 20:
            raise NotFound("its beginning was dropped")
        return records(self, begins)

    monkeypatch.setattr(kind, "records", dropped)
    monkeypatch.setattr(kind, "committed", property(lambda self: 100))
    monkeypatch.setattr(kind, "first", property(lambda self: begins + len(calls)))
    assert path.name in " ".join(damage.path for damage in store.check().damage)
    monkeypatch.undo()
    with path.open("r+b") as file:
        file.seek(300)
        file.write(byte)


def test_a_failed_repair_ends_the_service_of_its_table(store: penstock.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a shard before were replaced: leases on their messages must not be used any more."""
    write_round(store, 0)
    store.keep_snapshot("events")
    messages = store.queue("events").consumer("router").get(10)
    assert messages
    repair, done = type(store._snapshots).repair, list[int]()

    def fail(self: Any, number: Any) -> Any:
        if done:
            raise CorruptionError("a snapshot", 0, "it is damaged")
        done.append(1)
        return repair(self, number)

    monkeypatch.setattr(type(store._snapshots), "repair", fail)
    before = store._port._services.find(store.port.table("events").table_id)  # type: ignore[union-attr]
    with pytest.raises(CorruptionError):
        store.repair("events")
    assert store._port._services.find(store.port.table("events").table_id) is not before  # type: ignore[union-attr]


def test_a_service_is_made_once_although_another_one_ends(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, services = type(QUEUE), store._port._services
    info = store.port.table("events")
    assert info is not None
    original, active, most, go = kind.service, [0], [0], threading.Event()

    def service(self: Any, *arguments: Any) -> Any:
        active[0] += 1
        most[0] = max(most[0], active[0])
        go.wait(20)
        active[0] -= 1
        return original(self, *arguments)

    services.of(info)  # so that maintenance is not about to make one, without what follows
    monkeypatch.setattr(kind, "service", service)
    services.end(info.table_id, is_dropped=False)
    threads = [threading.Thread(target=services.of, args=(info,)) for _ in range(2)]
    threads[0].start()
    while not active[0]:
        time.sleep(0.001)
    services.end(info.table_id, is_dropped=False)  # as a repair does
    threads[1].start()
    threads[1].join(0.1)
    go.set()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_a_compaction_waits_for_a_late_table_no_longer_than_told(
    store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, waits = store._port.machine, list[float]()

    caller = threading.current_thread()

    def waited(partition: Any, timeout_s: float = 60.0) -> Any:
        if threading.current_thread() is caller:  # the store's own tasks ask, too
            waits.append(timeout_s)
        return machine(partition, timeout_s)

    monkeypatch.setattr(store._port, "machine", waited)
    store.compact("users", timeout_s=5.0)
    assert len(waits) == 2
    assert max(waits) <= 5.0
