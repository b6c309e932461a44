"""A store and its archive: archive, evict, read, rehydrate, reattach, collect; and damaged or foreign objects."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.archive.container import open_chunk
from penstock.archive.folder_objects import FolderObjects
from penstock.archive.object_urls import open_objects
from penstock.archive.objects import NetworkFailure, ObjectStore
from penstock.errors import (
    ArchiveUnavailable,
    Closed,
    ConditionFailed,
    CorruptionError,
    Invalid,
    NotFound,
    PenstockError,
    ReadOnly,
)
from penstock.host.os_files import OsFileSystem
from penstock.lsm.file_pieces import FilePiece
from penstock.lsm.readers import ReaderLeases
from penstock.lsm.snapshot import Snapshot
from penstock.store import check
from penstock.store.object_collection import HEIRS
from penstock.testing import FakeClock
from penstock.testing.locks import LockOrderChecker

ROWS = 300


def value(key: int) -> bytes:
    return random.Random(key).randbytes(200)


class ArchivedStore:
    """A store, its archive, and what must be read from it."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "store")
        self.url = f"file://{folder}/archive"
        self.objects: ObjectStore = open_objects(self.url, OsFileSystem())
        self.rows: dict[bytes, bytes] = {}

    def open(self, path: str | None = None, *, clock: Any = None, archive: str | None = "", **settings: Any) -> Any:
        chosen = penstock.StoreSettings(
            background=False, serve=False, archive=penstock.ArchiveSettings(**{"grace_s": 0.0, **settings})
        )
        url = self.url if archive == "" else archive
        return penstock.open(path or self.path, settings=chosen, archive=url, clock=clock)

    def fill(self, store: Any, start: int = 0, count: int = ROWS) -> None:
        """Write rows and bring them into files."""
        some = {b"%06d" % key: value(key) for key in range(start, start + count)}
        store.kv("users").put_many(list(some.items()))
        self.rows |= some
        store.queue("events").put(b"event %d" % start, durable=True)
        store.compact("users")

    def files(self, suffix: str = ".sst") -> list[str]:
        return sorted(path.name for path in Path(self.path, "tables").rglob(f"*{suffix}"))

    def objects_there(self) -> list[str]:
        return sorted(each.key for name in self.objects.folders() for each in self.objects.listed(name))

    def files_keys(self) -> list[str]:
        return [key for key in self.objects_there() if "/files/" in key]


@pytest.fixture
def archived_store(tmp_path: Path) -> ArchivedStore:
    return ArchivedStore(tmp_path)


def states(store: Any) -> list[str]:
    return [chunk.residency for chunk in store.chunks("users")]


def read(store: Any) -> dict[bytes, bytes]:
    return dict(store.kv("users").scan())


# -- the way there and back


def test_archived_evicted_read_reopened_and_rehydrated(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        assert states(store) == ["local"]
        report = store.archive()
        assert report.number == 1
        assert states(store) == ["archived"]
        assert store.evict("users").files == 1
        assert states(store) == ["evicted"]
        assert archived_store.files() == []
        assert archived_store.files(".idx") != []
        assert read(store) == archived_store.rows
        assert store.check().ok
        assert store.check().orphans == []
    with archived_store.open(archive=None) as store:  # it remembers its archive
        assert store.archive_url == archived_store.url
        assert read(store) == archived_store.rows
        assert store.rehydrate("users") > 0
        assert states(store) == ["archived"]
        assert archived_store.files() != []
        assert store.verify_archive().damage == []
        assert read(store) == archived_store.rows


def test_nothing_is_uploaded_twice(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        first = store.archive()
        again = store.archive()
        assert again.bytes_uploaded < first.bytes_uploaded
        keys = archived_store.files_keys()
        archived_store.fill(store, ROWS)
        store.archive()
        assert set(keys) <= set(archived_store.files_keys())


def test_a_compaction_and_a_kept_snapshot_fetch_what_they_need(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        store.evict()
        archived_store.fill(store, ROWS)  # compacts: merges the evicted file
        assert states(store) == ["local"]
        assert read(store) == archived_store.rows
        store.archive()
        store.evict()
        store.keep_snapshot("users")
        for file in Path(archived_store.path, "tables").rglob("*.sst"):
            if "snapshot" not in str(file):
                file.unlink()
        store.repair("users")
        assert read(store) == archived_store.rows
        assert states(store) == ["local"]
        store.archive()
        store.evict()
        assert read(store) == archived_store.rows


def test_what_a_snapshot_or_a_backup_needs_is_not_evicted(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        with store.snapshot() as snapshot:
            assert (store.evict().files, store.evict().kept) == (0, 1)
            assert dict(snapshot.kv("users").scan()) == archived_store.rows
        with store.readers.holding(OsFileSystem()):
            assert store.evict().files == 0
        assert store.evict().files == 1


def test_the_ledger_and_files_with_range_deletes_stay(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.kv("users").delete_range(b"000000", b"000010", durable=True)
        for key in range(10):
            del archived_store.rows[b"%06d" % key]
        snapshot = store.snapshot()  # keeps the compaction from dropping the range delete
        store._maintenance.flush(next(t for t, c in store._maintenance.trees() if c.db_id == 2))
        snapshot.close()
        store.archive()
        store.evict()
        assert sorted(states(store)) == ["archived", "evicted"]
        assert read(store) == archived_store.rows


def test_policies_evict_by_age_and_by_size(archived_store: ArchivedStore) -> None:
    clock = FakeClock()
    with archived_store.open(clock=clock, interval_s=None) as store:
        archived_store.fill(store)
        store.alter("users", archive=penstock.ArchivePolicy(evict_after_ms=100_000))
        store.archive()
        store._archive.check_due()
        assert states(store) == ["archived"]
        clock.advance(101)
        store._archive.check_due()
        assert states(store) == ["evicted"]
        store.alter("users", archive=None)
    with archived_store.open(
        clock=clock, policy=penstock.ArchivePolicy(local_bytes_max=1 << 30), interval_s=None
    ) as store:
        store.rehydrate()
        store._archive.check_due()
        assert states(store) == ["archived"]
    with archived_store.open(clock=clock, policy=penstock.ArchivePolicy(local_bytes_max=0), interval_s=None) as store:
        store._archive.check_due()
        assert states(store) == ["evicted"]
        assert read(store) == archived_store.rows


def test_a_run_is_due_after_its_interval_and_is_a_durable_job(archived_store: ArchivedStore) -> None:
    clock = FakeClock()
    with archived_store.open(clock=clock, interval_s=60.0) as store:
        archived_store.fill(store)
        store._archive.check_due()
        assert store._jobs.acquire("w", (4,)) is None
        clock.advance(61)
        store._archive.check_due()
        store._archive.check_due()
        lease = store._jobs.acquire("w", (4,))
        assert lease is not None
        assert store._jobs.acquire("w", (4,)) is None
    with archived_store.open(clock=clock) as store:  # the worker vanished: a repair runs, and the gate opens
        assert store.archive().number > 0
        assert states(store) == ["archived"]


def test_the_cache_is_bounded_and_files_are_read_again(archived_store: ArchivedStore) -> None:
    with archived_store.open(cache_bytes_max=1) as store:
        for start in range(0, 3 * ROWS, ROWS):
            store.kv(f"t{start}").put_many(
                [(b"%06d" % key, value(key)) for key in range(start, start + ROWS)], durable=True
            )
            store.compact(f"t{start}")
        store.archive()
        assert store.evict().files == 3
        for _ in range(2):
            for start in range(0, 3 * ROWS, ROWS):
                assert len(dict(store.kv(f"t{start}").scan())) == ROWS
                assert len(list(Path(archived_store.path, "cache").iterdir())) == 1
            store._archive.release_removed()


# -- backups


def test_a_backup_of_evicted_files_is_whole_and_its_copy_deletes_nothing(
    archived_store: ArchivedStore, tmp_path: Path
) -> None:
    target, copy = str(tmp_path / "backups"), str(tmp_path / "copy")
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        store.evict()
        store.backup(target)
        assert store.backup(target).files_copied < 8
        inherited = archived_store.files_keys()
    assert penstock.check_backup(target) == []
    penstock.restore(target, copy)
    shutil.rmtree(archived_store.path)
    with archived_store.open(copy) as store:
        assert read(store) == archived_store.rows
        assert states(store) == ["evicted"]
        store.rehydrate()
        assert states(store) == ["archived"]
        assert store.evict().files == 0  # the objects are another store's, which may delete them
        store.archive()  # uploads them as its own
        assert store.evict().files == 1
        assert len(archived_store.objects.folders()) == 2
        store.drop("users")
        store._dropped.remove()
        for _ in range(3):
            store.archive()
            store.collect_archive()
        assert set(inherited) <= set(archived_store.files_keys())


def test_a_salvage_fetches_evicted_files_and_writes_nothing_to_the_archive(
    archived_store: ArchivedStore, tmp_path: Path
) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        store.evict()
    before = archived_store.objects_there()
    report = penstock.salvage(archived_store.path, str(tmp_path / "rescued"))
    assert (report.rows["users"], report.damage, report.lost) == (ROWS, [], [])
    assert archived_store.objects_there() == before
    key = next(key for key in before if ".sst-" in key and not key.endswith(".idx") and "/tables/2/" in key)
    archived_store.objects.delete(key)
    report = penstock.salvage(archived_store.path, str(tmp_path / "less"))
    assert report.rows["users"] == 0
    assert any(key in lost for lost in (*report.lost, *(damage.path for damage in report.damage)))


# -- reattaching


def test_a_lost_disk_is_reattached_with_everything_up_to_the_run(archived_store: ArchivedStore, tmp_path: Path) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.kv("users").put(b"late", b"in no file yet", durable=True)
        archived_store.rows[b"late"] = b"in no file yet"
        uuid, lsn = store.uuid, store.archive().lsn
        store.kv("users").put(b"after", b"the run", durable=True)
    shutil.rmtree(archived_store.path)
    report = penstock.reattach(archived_store.url, archived_store.path)
    assert (report.store, report.lsn) == (uuid.hex(), lsn)
    assert report.evicted == 1
    before = archived_store.objects_there()
    with archived_store.open(archive=None) as store:
        assert store.uuid != uuid
        assert archived_store.files() == []
        assert read(store) == archived_store.rows
        assert [message.payload for message in store.queue("events").read()] == [b"event 0"]
        archived_store.fill(store, ROWS)
        store.archive()
        store.collect_archive()
        assert set(before) <= set(archived_store.objects_there())
        assert read(store) == archived_store.rows
    penstock.reattach(archived_store.url, str(tmp_path / "twice"), store=store.uuid.hex())
    with archived_store.open(str(tmp_path / "twice"), archive=None) as twice:
        assert read(twice) == archived_store.rows


def test_a_store_whose_archive_was_reattached_deletes_nothing(archived_store: ArchivedStore, tmp_path: Path) -> None:
    with archived_store.open(runs_kept=1) as store:
        archived_store.fill(store)
        store.archive()
        penstock.reattach(archived_store.url, str(tmp_path / "heir"))
        assert [key for key in archived_store.objects_there() if f"/{HEIRS}/" in key] != []
        before = archived_store.files_keys()
        archived_store.fill(store, ROWS)
        store.archive()
        assert store.collect_archive() == 0
        assert set(before) <= set(archived_store.files_keys())
    with archived_store.open(str(tmp_path / "heir"), archive=None) as heir:
        assert len(read(heir)) == ROWS


def test_reattaching_refuses_what_it_cannot_do(archived_store: ArchivedStore, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no archive"):
        penstock.reattach(archived_store.url, str(tmp_path / "new"))
    for name in ("one", "two"):
        with archived_store.open(str(tmp_path / name)) as store:
            archived_store.fill(store)
            if name == "two":
                store.archive()
    several = rf"{store.uuid.hex()} \(run 1 of \d{{4}}-\d\d-\d\d .* UTC\).*: name one, by store="
    with pytest.raises(Invalid, match=several) as caught:
        penstock.reattach(archived_store.url, str(tmp_path / "new"))
    assert "(no run can be read)" in str(caught.value)
    with pytest.raises(NotFound, match=f"no archive of {'0' * 32}: it has those of .*{store.uuid.hex()}"):
        penstock.reattach(archived_store.url, str(tmp_path / "new"), store="0" * 32)
    with pytest.raises(NotFound, match="no whole run"):
        penstock.reattach(
            archived_store.url,
            str(tmp_path / "new"),
            store=next(n for n in archived_store.objects.folders() if n != store.uuid.hex()),
        )
    with pytest.raises(NotFound, match="no run 7"):
        penstock.reattach(archived_store.url, str(tmp_path / "new"), store=store.uuid.hex(), number=7)
    with pytest.raises(Invalid, match="not empty"):
        penstock.reattach(archived_store.url, str(tmp_path / "one"), store=store.uuid.hex())
    for wrong in (True, 0, -1, 1.5, "1", float("nan")):
        with pytest.raises(Invalid):
            penstock.reattach(archived_store.url, str(tmp_path / "new"), number=wrong)  # type: ignore[arg-type]
    with pytest.raises(Invalid):
        penstock.reattach(archived_store.url, str(tmp_path / "new"), store=1)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("which", ["LISTING", "manifest", ".idx", ".sst", "journal"])
def test_reattaching_names_a_damaged_or_missing_object(
    archived_store: ArchivedStore, tmp_path: Path, which: str
) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
    key = next(
        key
        for key in archived_store.objects_there()
        if (key.endswith(".idx") if which == ".idx" else which in key and not key.endswith(".idx"))
    )
    size = archived_store.objects.size(key)
    assert size is not None
    content = archived_store.objects.read(key, 0, size)
    archived_store.objects.delete(key)
    for wrong in (None, content[:-1], bytes([content[0] ^ 1]) + content[1:]):
        if wrong is not None:
            archived_store.objects.delete(key)
            archived_store.objects.put_new(key, wrong)
        if which == ".sst" and wrong is not None and len(wrong) == size:
            continue  # it is only read when it is needed: see the reads of damaged objects
        with pytest.raises((CorruptionError, NotFound)) as error:
            penstock.reattach(archived_store.url, str(tmp_path / "new"))
        assert not isinstance(error.value, CorruptionError) or key in error.value.path
        assert not (tmp_path / "new").exists()


# -- damage


@pytest.mark.parametrize("damage", ["missing", "flipped", "shorter", "foreign"])
def test_reading_names_an_object_that_is_damaged_missing_or_foreign(archived_store: ArchivedStore, damage: str) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        store.evict()
        key = store.chunks("users")[0].object
        size = archived_store.objects.size(key)
        assert size is not None
        content = archived_store.objects.read(key, 0, size)
        archived_store.objects.delete(key)
        wrong = {
            "flipped": content[:-1] + bytes([content[-1] ^ 1]),
            "shorter": content[: size // 2],
            "foreign": b"x" * size,
        }
        if damage != "missing":
            archived_store.objects.put_new(key, wrong[damage])
        with pytest.raises(CorruptionError) as error:
            read(store)
        assert error.value.path == f"{archived_store.url}/{key}"
        assert [where for where, _ in store.verify_archive().damage] == [f"{archived_store.url}/{key}"]
        assert states(store) == ["evicted"]
        archived_store.objects.delete(key)
        archived_store.objects.put_new(key, content)  # its bytes come back: so do the rows
        assert read(store) == archived_store.rows


def test_a_damaged_object_whose_file_is_here_is_uploaded_again(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        key = store.chunks("users")[0].object
        archived_store.objects.delete(key)
        archived_store.objects.put_new(key, b"damaged")
        assert len(store.verify_archive("users").damage) == 1
        assert states(store) == ["local"]
        assert store.evict().files == 0
        store.archive()
        assert states(store) == ["archived"]
        assert store.verify_archive().damage == []


class LiesOnce:
    """An object store that stores the wrong bytes once: the upload is not believed before it was read back."""

    def __init__(self, objects: Any, wrong: bytes) -> None:
        self.objects, self.wrong, self.lied = objects, wrong, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objects, name)

    def put_new(self, key: str, data: Any) -> bool:
        if ".sst-" in key and not self.lied:
            self.lied = True
            return bool(self.objects.put_new(key, self.wrong))
        return bool(self.objects.put_new(key, data))


def test_an_upload_is_not_believed_before_it_was_read_back(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store._archive.tables.objects = LiesOnce(store._archive.tables.objects, b"something else")
        with pytest.raises(CorruptionError, match="uploaded again"):
            store.archive()
        assert states(store) == ["local"]
        assert store.evict().files == 0
        store.archive()
        assert states(store) == ["archived"]


def test_negative_control_eviction_without_verification_is_refused_by_the_manifest(
    archived_store: ArchivedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mover that skips the verification cannot evict: the transition is not its to make."""
    with archived_store.open() as store:
        archived_store.fill(store)
        moves = store._archive.moves
        monkeypatch.setattr(moves, "_verify", lambda key, row, name: None)
        store.archive()
        assert states(store) == ["unverified"]
        ((key, row),) = moves.rows([store._info("users").table_id])
        from penstock.manifest.records import Evicted

        with pytest.raises(Invalid, match="not verified"):
            moves._set(key, row, Evicted(row.residency.object))
        assert store.evict().files == 0
        assert archived_store.files() != []


# -- collection


def test_replaced_files_are_deleted_after_the_grace_period_and_old_runs(archived_store: ArchivedStore) -> None:
    clock = FakeClock()
    with archived_store.open(clock=clock, grace_s=100.0, runs_kept=1) as store:
        archived_store.fill(store)
        store.archive()
        old = set(archived_store.files_keys())
        archived_store.fill(store, ROWS)  # a compaction replaces the file
        store.archive()
        store.collect_archive()
        assert old <= set(archived_store.files_keys())
        clock.advance(101)
        assert store.collect_archive() == 0  # the version that was replaced may still be read
        store._collector.collect()
        assert store.collect_archive() > 0
        assert not old & {key for key in archived_store.files_keys() if "/2/0/" in key}
        assert read(store) == archived_store.rows
        assert len({key.split("/")[2] for key in archived_store.objects_there() if "/runs/" in key}) == 1
        store.drop("users")
        store._dropped.remove()
        store.archive()
        store.collect_archive()
        clock.advance(101)
        store.collect_archive()
        assert [key for key in archived_store.files_keys() if "/tables/2/" in key] == []


def test_an_object_that_a_snapshot_reads_is_not_deleted(archived_store: ArchivedStore) -> None:
    with archived_store.open(runs_kept=1, cache_bytes_max=0) as store:
        archived_store.fill(store)
        store.archive()
        store.evict()
        before = dict(archived_store.rows)
        with store.snapshot() as snapshot:
            archived_store.fill(store, ROWS)
            store.archive()
            store.collect_archive()
            store._collector.collect()
            store.collect_archive()
            shutil.rmtree(Path(archived_store.path, "cache"), ignore_errors=True)
            assert dict(snapshot.kv("users").scan()) == before


def test_what_nothing_ever_named_is_deleted_and_foreign_objects_stay(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        mine = f"{store.uuid.hex()}/files/tables/2/0/00000000000000000099.sst-00000000-1"
        other = f"{'cd' * 16}/files/tables/2/0/00000000000000000099.sst-00000000-1"
        for key in (mine, other):
            archived_store.objects.put_new(key, b"x")
        store.collect_archive()
        assert archived_store.objects.size(mine) is None
        assert archived_store.objects.size(other) == 1
        assert store.verify_archive().damage == []


def test_negative_control_a_collector_that_forgets_the_rows_is_caught(
    archived_store: ArchivedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        store.evict()
        monkeypatch.setattr(store._archive.collector, "_needed", lambda objects: set())
        store.collect_archive()
        with pytest.raises(CorruptionError):
            read(store)


def test_objects_are_deleted_also_by_a_store_that_is_never_open_for_the_grace_period(
    archived_store: ArchivedStore,
) -> None:
    clock = FakeClock()
    with archived_store.open(clock=clock, grace_s=100.0, runs_kept=1) as store:
        archived_store.fill(store)
        store.archive()
        old = {key for key in archived_store.files_keys() if "/tables/2/" in key}
        archived_store.fill(store, ROWS)  # a compaction replaces the file
        store.archive()
        store.collect_archive()
    clock.advance(60)
    with archived_store.open(clock=clock, grace_s=100.0, runs_kept=1) as store:
        store.collect_archive()
        assert old <= set(archived_store.files_keys())
        assert store.check().orphans == []
    clock.advance(60)
    with archived_store.open(clock=clock, grace_s=100.0, runs_kept=1) as store:
        store.collect_archive()
        assert not old & set(archived_store.files_keys())
        assert store.verify_archive().damage == []
        Path(archived_store.path, "UNNEEDED").write_bytes(b"{")  # damaged: the grace period begins anew
    with archived_store.open(clock=clock, grace_s=100.0, runs_kept=1) as store:
        assert store.collect_archive() == 0


def test_a_file_of_a_queue_is_not_taken_for_the_sstable_of_its_number(archived_store: ArchivedStore) -> None:
    with archived_store.open(runs_kept=1) as store:
        archived_store.fill(store)
        store.archive()
        with store.snapshot():
            number = int(store.chunks("users")[0].chunk)
            mine = f"{store.uuid.hex()}/files/tables/3/0/2026/01/01/{number:010d}.data-00000000-1"
            pinned = f"{store.uuid.hex()}/files/tables/2/0/{number:020d}.sst-00000000-1"
            for key in (mine, pinned):
                archived_store.objects.put_new(key, b"x")
            store.collect_archive()
            assert archived_store.objects.size(mine) is None
            assert archived_store.objects.size(pinned) == 1


def test_an_object_is_not_deleted_while_a_reader_from_before_the_opening_may_read_it(
    archived_store: ArchivedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(
        ReaderLeases, "keep", lambda self, left_s, after_s=0.0: None
    )  # as after a kill: its readers have their leases
    with archived_store.open(clock=clock) as store:
        archived_store.fill(store)
        store.archive()
        store.readers.expect(500.0)
    with archived_store.open(clock=clock, runs_kept=1) as store:
        mine = f"{store.uuid.hex()}/files/tables/2/0/00000000000000000099.sst-00000000-1"
        archived_store.objects.put_new(mine, b"x")
        assert store.readers.may_be_there()
        store.archive()
        runs = [f"{store.uuid.hex()}/runs/{number:08d}/LISTING" for number in (1, 2)]
        assert all(archived_store.objects.size(run) for run in runs)
        store.collect_archive()
        assert archived_store.objects.size(mine) == 1
        assert archived_store.objects.size(runs[0]) is None, (
            "a run that nothing needs waited for readers, who know none"
        )
        assert archived_store.objects.size(runs[1])
        clock.advance(501)
        store.collect_archive()
        assert archived_store.objects.size(mine) is None


def test_a_probe_that_a_dead_process_left_is_deleted_by_the_next_opening(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        uuid = store.uuid.hex()
    archived_store.objects.put_new(f"{uuid}/probes/{'ab' * 8}", b"1")
    with archived_store.open():
        assert [key for key in archived_store.objects_there() if "/probes/" in key] == []


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_run_lists_no_object_that_is_lost_and_files_of_queues_are_verified(
    archived_store: ArchivedStore, tmp_path: Path, damage: str
) -> None:
    def break_one() -> str:
        key = next(key for key in archived_store.files_keys() if ".data-" in key)
        size = archived_store.objects.size(key)
        assert size is not None
        archived_store.objects.delete(key)
        if damage == "changed":
            archived_store.objects.put_new(key, b"x" * size)
        return key

    clock = FakeClock()
    with archived_store.open(clock=clock) as store:
        archived_store.fill(store)
        clock.advance(3_601)
        archived_store.fill(store, ROWS)  # the first file of the queue gets no more messages
        store.archive()
        key = break_one()
        [(url, _)] = store.verify_archive().damage
        assert url.endswith(key)
        assert store.verify_archive().damage == []  # it was uploaded again
        if damage == "missing":
            break_one()
        store.archive()
    penstock.reattach(archived_store.url, tmp_path / "again")
    with archived_store.open(str(tmp_path / "again")) as copy:
        assert read(copy) == archived_store.rows
        assert [message.payload for message in copy.queue("events").read()] == [b"event 0", b"event %d" % ROWS]


# -- the network


class Down:
    """An object store that nobody reaches."""

    url = "s3://bucket"

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> Any:
            raise NetworkFailure("no route")

        return call


def test_a_store_opens_and_works_while_its_archive_is_out_of_reach(
    archived_store: ArchivedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        store.evict()
    monkeypatch.setattr("penstock.store.archiving.open_objects", lambda *_, **__: Down())
    with archived_store.open(attempts_max=2, timeout_s=0.01) as store:
        store.kv("users").put(b"new", b"row", durable=True)
        assert store.kv("users")[b"new"] == b"row"
        for use in (store.archive, store.evict, store.verify_archive, store.collect_archive, lambda: read(store)):
            with pytest.raises(ArchiveUnavailable):
                use()
        assert "no route" in store._archive.last_error
    monkeypatch.undo()
    with archived_store.open() as store:
        archived_store.rows[b"new"] = b"row"
        assert read(store) == archived_store.rows
        store.archive()


@pytest.mark.parametrize("where", ["data", "data/archive", ""], ids=["the store", "inside", "around"])
def test_an_archive_in_the_stores_own_folder_is_refused(tmp_path: Path, where: str) -> None:
    """It would be lost with the disk, and `check` would name its objects as files that only cost space."""
    with pytest.raises(Invalid, match="is not beside the store .*: give a folder elsewhere, best on another disk"):
        penstock.open(tmp_path / "data", archive=f"file://{tmp_path / where}")
    with penstock.open(tmp_path / "data", archive=f"file://{tmp_path}/data-archive") as store:
        assert store.archive().files_uploaded > 0
        assert store.check().orphans == []


def test_an_archive_elsewhere_must_have_the_objects(archived_store: ArchivedStore, tmp_path: Path) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        store.evict()
    with pytest.raises(Invalid, match="has no archive of this store"):
        archived_store.open(archive=f"file://{tmp_path}/other")
    shutil.copytree(tmp_path / "archive", tmp_path / "other")
    shutil.rmtree(tmp_path / "archive")
    with archived_store.open(archive=f"file://{tmp_path}/other") as store:
        assert read(store) == archived_store.rows
    with archived_store.open(archive=None) as store:
        assert store.archive_url == f"file://{tmp_path}/other"


def test_a_copied_folder_cannot_share_the_archive(archived_store: ArchivedStore, tmp_path: Path) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
    shutil.copytree(archived_store.path, tmp_path / "twin")
    with archived_store.open() as store, archived_store.open(str(tmp_path / "twin")) as twin:
        store.archive()
        twin.archive()  # the next number: runs do not replace each other
        runs = {key.split("/")[2] for key in archived_store.objects_there() if "/runs/" in key}
        assert len(runs) == 2


# -- calls


def test_a_store_without_an_archive_says_so(archived_store: ArchivedStore) -> None:
    with archived_store.open(archive=None) as store:
        archived_store.fill(store)
        for call in (store.archive, store.evict, store.rehydrate, store.verify_archive, store.collect_archive):
            with pytest.raises(Invalid, match="has no archive"):
                call()
        assert states(store) == ["local"]
        assert store.archive_url is None


def test_wrong_arguments_change_nothing(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        for wrong in (True, -1, 1.5, "1", None, float("nan"), 1 << 60):
            with pytest.raises(Invalid):
                store.evict("users", local_bytes=wrong)
        for call in (store.evict, store.rehydrate, store.verify_archive):
            with pytest.raises(NotFound):
                call("nobody")
            for name in (b"users", 1, True):
                with pytest.raises((Invalid, NotFound)):
                    call(name)
        assert states(store) == ["archived"]
        assert store.evict("users", local_bytes=1 << 40).files == 0
    for call in (store.archive, store.evict, store.rehydrate):
        with pytest.raises(Closed):
            call()
    for url in (1, True, b"x", "nonsense", ""):
        with pytest.raises(Invalid):
            penstock.open(archived_store.path, archive=url)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"interval_s": 0}, {"interval_s": float("nan")}, {"interval_s": True}, {"policy": None}, {"policy": "x"},
        {"cache_bytes_max": -1}, {"cache_bytes_max": True}, {"runs_kept": 0}, {"runs_kept": 1.5},
        {"grace_s": -1}, {"grace_s": float("inf")}, {"request_timeout_s": 0}, {"timeout_s": "1"}, {"attempts_max": 0},
    ],
)  # fmt: skip
def test_wrong_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        penstock.ArchiveSettings(**settings)


def test_read_only_stores_read_what_was_evicted_and_change_nothing(archived_store: ArchivedStore) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        store.evict()
    before = sorted(str(path) for path in Path(archived_store.path).rglob("*"))
    with penstock.open(archived_store.path, read_only=True) as store:
        assert read(store) == archived_store.rows
        for call in (store.archive, store.evict, store.rehydrate):
            with pytest.raises(ReadOnly):
                call()
    assert sorted(str(path) for path in Path(archived_store.path).rglob("*")) == before


# -- other processes


def test_a_client_archives_and_reads_evicted_rows(archived_store: ArchivedStore) -> None:
    with penstock.open(archived_store.path, archive=archived_store.url) as store:
        archived_store.fill(store)
        with penstock.connect(archived_store.path) as client:
            assert client.archive().number == 1
            assert client.evict("users").files == 1
            assert [chunk.residency for chunk in client.chunks("users")] == ["evicted"]
            assert dict(client.kv("users").scan()) == archived_store.rows
            assert client.verify_archive().objects >= 1
            assert client.rehydrate() > 0
            assert client.collect_archive() >= 0
            for wrong in (True, -1, "x"):
                with pytest.raises(Invalid):
                    client.evict(local_bytes=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("sees_folder", [True, False])
def test_a_task_fetches_an_evicted_file_by_the_key_in_its_plan(
    archived_store: ArchivedStore, tmp_path: Path, sees_folder: bool
) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        store.evict()
        tree = next(tree for tree, catalog in store._maintenance.trees() if catalog.db_id == 2)
        snapshot: Snapshot = tree.snapshot()
        piece = FilePiece.of(snapshot.version, snapshot.now_us, b"", None)
        snapshot.close()
        assert piece.archive == archived_store.url
        root = archived_store.path if sees_folder else str(tmp_path / "elsewhere")
        version = piece.open(root, store.identity)
        assert version is not None
        assert sum(file.meta.rows for file in version.files()) == ROWS
        for file in version.files():
            assert file.table().get(b"000007")[1] == value(7)  # type: ignore[index]
        assert list(piece.damage(b"", None, root, store.identity)) == []


# -- encryption


def test_an_encrypted_table_is_archived_as_it_is_and_no_plain_byte_reaches_the_bucket(
    archived_store: ArchivedStore, tmp_path: Path
) -> None:
    marker = b"Zx9PlainMarker"
    settings = penstock.StoreSettings(
        background=False, serve=False, keys={1: b"1" * 32}, archive=penstock.ArchiveSettings(grace_s=0.0)
    )
    storage = penstock.StorageOptions(
        encryption=penstock.EncryptionConfig("master"),
        compression=penstock.CompressionConfig(penstock.Codec.ZSTD),
    )
    rows = {marker + b"%d" % key: marker * 20 for key in range(200)}
    with penstock.open(archived_store.path, settings=settings, archive=archived_store.url) as store:
        store.kv("secrets", storage=storage).put_many(list(rows.items()), durable=True)
        store.compact("secrets")
        store.kv("secrets").put(marker, marker, durable=True)  # in the journal alone
        rows[marker] = marker
        store.archive()
        assert store.evict("secrets").files == 1
        assert dict(store.kv("secrets").scan()) == rows
    paths = [str(path) for path in Path(tmp_path).rglob("*") if path.is_file() and marker in path.read_bytes()]
    assert paths == []
    penstock.reattach(archived_store.url, str(tmp_path / "again"))
    with penstock.open(str(tmp_path / "again"), settings=settings) as again:
        assert dict(again.kv("secrets").scan()) == rows
    with pytest.raises(PenstockError, match="key"), archived_store.open(str(tmp_path / "again"), archive=None) as again:
        dict(again.kv("secrets").scan())


def test_a_damaged_listing_does_not_keep_the_next_run_from_being_made(
    archived_store: ArchivedStore, tmp_path: Path
) -> None:
    with archived_store.open(runs_kept=1) as store:
        archived_store.fill(store)
        number = store.archive().number
        key = f"{store.uuid.hex()}/runs/{number:08d}/LISTING"
        archived_store.objects.delete(key)
        archived_store.objects.put_new(key, b"damaged")
        assert store.archive().number == number + 1
        store.collect_archive()
    penstock.reattach(archived_store.url, tmp_path / "again")
    with archived_store.open(str(tmp_path / "again")) as copy:
        assert read(copy) == archived_store.rows


def test_a_copy_that_other_reads_remove_before_it_is_open_is_fetched_again(
    archived_store: ArchivedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        assert store.evict("users").files == 1
        cached, left = store._archive.tables.cached, [3]

        def lost(meta: Any) -> Any:
            path = cached(meta)
            if left[0]:
                left[0] -= 1
                Path(path).unlink()
            return path

        monkeypatch.setattr(store._archive.tables, "cached", lost)
        assert read(store) == archived_store.rows
        assert left == [0]


def test_a_check_does_not_miss_the_index_of_a_file_that_was_dropped_meanwhile(
    archived_store: ArchivedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def dropping(fs: Any, path: str, **options: Any) -> Any:
        opened.append(path)
        store.drop("users")
        store._dropped.remove()
        return open_chunk(fs, path, **options)

    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()
        assert store.evict("users").files == 1
        monkeypatch.setattr(check, "open_chunk", dropping)
        report = store.check()
        assert len(opened) == 1
        assert not Path(opened[0]).exists()
        assert report.ok, report.damage


@pytest.mark.parametrize("method", ["get_row", "put", "delete"])
def test_no_other_table_waits_while_a_row_with_its_lsn_is_fetched(
    archived_store: ArchivedStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    read, locks, checker = FolderObjects.read, list[list[str]](), LockOrderChecker()

    def noted(self: FolderObjects, key: str, start: int, end: int) -> bytes:
        locks.append(checker.lock_names())
        return read(self, key, start, end)

    with archived_store.open() as store:
        archived_store.fill(store)
        lsn, key = store.kv("users").get_row(b"000007").lsn, b"000007"
        store.archive()
        assert store.evict("users").files == 1
    with checker.installed(), archived_store.open() as store:
        users = store.kv("users")
        monkeypatch.setattr(FolderObjects, "read", noted)
        if method == "get_row":
            assert users.get_row(key) == (archived_store.rows[key], lsn)
        elif method == "put":
            users.put(key, b"new", if_lsn=lsn)
        else:
            with pytest.raises(ConditionFailed):
                users.delete(key, if_lsn=lsn + 1)
        assert locks
        assert not [names for names in locks if "partition.turn" in names]


def test_attempts_to_reattach_that_ended_early_leave_one_note(
    archived_store: ArchivedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note of a copy that never came to be would keep the old store from deleting anything, for ever."""
    with archived_store.open() as store:
        archived_store.fill(store)
        store.archive()

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    def removed_and_interrupted(fs: OsFileSystem, path: str) -> None:
        fs.unlink(path)
        raise KeyboardInterrupt

    steps = (("write_archive_url", interrupted), ("write_archive_url", interrupted))
    for name, act in (*steps, ("remove_file", removed_and_interrupted)):  # the last: only the rename is missing
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"penstock.store.reattach.{name}", act)
            penstock.reattach(archived_store.url, tmp_path / "again")
    penstock.reattach(archived_store.url, tmp_path / "again")
    with archived_store.open(str(tmp_path / "again")) as copy:
        [note] = archived_store.objects.listed(f"{store.uuid.hex()}/{HEIRS}")
        assert note.key.endswith(copy.uuid.hex())
        assert read(copy) == archived_store.rows
        assert copy.check().orphans == []
