"""Object stores: one contract for each, the URLs, the probe of conditional puts, retries, and the cache of files."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.archive.file_cache import FileCache
from penstock.archive.folder_objects import FolderObjects
from penstock.archive.object_urls import check_url, open_objects, probe
from penstock.archive.objects import (
    NetworkFailure,
    ObjectStore,
    StoredObject,
    check_key,
    file_key,
    parse_file_key,
)
from penstock.archive.retrying import RetryingObjects, RetrySettings
from penstock.archive.transfer import fetch, put_file, upload, verify_object
from penstock.errors import ArchiveUnavailable, CorruptionError, Invalid, WaitExpired
from penstock.host.clock import SystemClock
from penstock.host.os_files import OsFileSystem
from penstock.testing import Fault, SimulatedDisk

STORE = "ab" * 16
QUICK = RetrySettings(attempts_max=3, pause_s=0.0, pause_s_max=0.0)


def make(kind: str, folder: Path) -> ObjectStore:
    if kind == "simulated":
        return FolderObjects(SimulatedDisk(), "/archive")
    if kind == "memory":
        pytest.importorskip("obstore")
        return open_objects(f"memory://{folder.name}", OsFileSystem())
    return open_objects(f"file://{folder}/archive", OsFileSystem())


@pytest.fixture(params=["simulated", "folder", "memory"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return make(request.param, tmp_path)


def retrying(objects: Any, settings: RetrySettings = QUICK) -> RetryingObjects:
    return RetryingObjects(objects, clock=SystemClock(), random=random.Random(1), settings=settings)


# -- the contract


def test_an_object_is_created_once_and_read_by_ranges(objects: ObjectStore) -> None:
    assert objects.put_new("a/b", b"first")
    assert not objects.put_new("a/b", b"other")
    assert objects.read("a/b", 0, 3) + objects.read("a/b", 3, 99) == b"first"
    assert objects.size("a/b") == 5
    assert objects.put_new("a/empty", b"")
    assert objects.size("a/empty") == 0


def test_listing_names_what_is_below_a_prefix_alone(objects: ObjectStore) -> None:
    for key in ("x/1", "x/deep/2", "xy/3"):
        objects.put_new(key, key.encode())
    assert sorted(objects.listed("x")) == [StoredObject("x/1", 3), StoredObject("x/deep/2", 8)]
    assert list(objects.listed("none")) == []
    assert sorted(objects.folders()) == ["x", "xy"]


def test_what_does_not_exist_is_said_so_and_deleting_it_is_no_error(objects: ObjectStore) -> None:
    with pytest.raises(FileNotFoundError):
        objects.read("a/none", 0, 4)
    assert objects.size("a/none") is None
    objects.delete("a/none")
    objects.put_new("a/b", b"1")
    objects.delete("a/b")
    assert objects.size("a/b") is None


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a%2e", "a b", "ä", "a/.b", "x" * 901])
def test_keys_that_could_lead_elsewhere_are_refused(objects: ObjectStore, key: str) -> None:
    with pytest.raises(Invalid):
        objects.put_new(key, b"")


def test_a_key_says_what_it_names() -> None:
    key = file_key(STORE, "tables/2/0/00000000000000000007.sst", 0xABC, 12)
    assert key == f"{STORE}/files/tables/2/0/00000000000000000007.sst-00000abc-12"
    assert parse_file_key(key) == parse_file_key(key + ".idx")
    assert parse_file_key(key)[1:] == ("tables/2/0/00000000000000000007.sst", 0xABC, 12)
    for wrong in ("", f"{STORE}/runs/1/LISTING", key + "x", key.replace("ab", "zz")):
        with pytest.raises(Invalid):
            parse_file_key(wrong)
    assert check_key(key) == key


# -- URLs


@pytest.mark.parametrize(
    "url",
    [
        None, 1, True, b"s3://b", "", "bucket", "/folder", "http://x", "ftp://a/b", "s3://", "s3:///x", "file://",
        "file:///", "file://host/x", "s3://key:secret@bucket/p", "s3://b/../c", "s3://b/%2e%2e/c", "s3://b?x=1",
        "s3://b#f", "s3://b\n", "s3://" + "b" * 1_000,
    ],
)  # fmt: skip
def test_what_is_not_the_url_of_an_archive_is_refused(url: Any) -> None:
    with pytest.raises(Invalid):
        check_url(url)


def test_an_error_about_a_url_never_shows_its_credentials() -> None:
    with pytest.raises(Invalid) as refused:
        check_url("s3://AKIA:secret@bucket/p")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/a/b/", "gs://b/p", "az://container/p", "file:///a", "memory://x"]
)
def test_urls(url: str) -> None:
    assert check_url(url) == url.rstrip("/")


# -- the probe


def test_the_probe_leaves_nothing(objects: ObjectStore) -> None:
    probe(objects, STORE, random.Random(1))
    assert list(objects.listed(STORE)) == []


class Overwrites(FolderObjects):
    """An object store that ignores If-None-Match, as some do."""

    def put_new(self, key: str, data: Any) -> bool:
        self.delete(key)
        return super().put_new(key, data)


class OverwritesSilently(Overwrites):
    """One that says so, too."""

    def put_new(self, key: str, data: Any) -> bool:
        super().put_new(key, data)
        return bool(data == b"1")


@pytest.mark.parametrize("kind", [Overwrites, OverwritesSilently])
def test_an_object_store_that_ignores_conditions_is_found_out(kind: type[FolderObjects]) -> None:
    with pytest.raises(Invalid, match="overwrites objects"):
        probe(kind(SimulatedDisk(), "/archive"), STORE, random.Random(1))


# -- retries


class Fails:
    """An object store whose operations fail a number of times, perhaps after they were done."""

    url = "s3://bucket"

    def __init__(self, times: int, error: Callable[[str], Exception] = NetworkFailure, *, done: bool = False) -> None:
        self.objects = FolderObjects(SimulatedDisk(), "/archive")
        self.times, self.error, self.done, self.calls = times, error, done, 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls <= self.times:
                if self.done:
                    getattr(self.objects, name)(*arguments)
                raise self.error("cut")
            return getattr(self.objects, name)(*arguments)

        return call


def test_failures_of_the_network_are_retried_a_bounded_number_of_times() -> None:
    flaky = Fails(2)
    assert retrying(flaky).put_new("a", b"1")
    assert flaky.calls == 3
    down = Fails(99)
    with pytest.raises(ArchiveUnavailable, match="tried 3 times"):
        retrying(down).read("a", 0, 1)
    assert down.calls == 3


def test_refusals_and_missing_objects_are_not_retried() -> None:
    for error in (ArchiveUnavailable, FileNotFoundError, Invalid):
        refused = Fails(99, error)
        with pytest.raises(error):
            retrying(refused).read("a", 0, 1)
        assert refused.calls == 1


def test_a_put_whose_answer_was_lost_is_found_by_the_next_attempt() -> None:
    lost = Fails(1, done=True)
    assert not retrying(lost).put_new("a", b"1")
    assert lost.objects.read("a", 0, 9) == b"1"


def test_a_deadline_and_a_stop_end_the_attempts() -> None:
    down = Fails(99)
    with pytest.raises(ArchiveUnavailable):
        retrying(down, RetrySettings(attempts_max=99, timeout_s=0.0)).size("a")
    assert down.calls == 1
    stop = threading.Event()
    stop.set()
    stopped = RetryingObjects(down, clock=SystemClock(), random=random.Random(1), stop=stop)
    with pytest.raises(ArchiveUnavailable):
        stopped.size("a")
    assert down.calls == 2


# -- files


def test_a_file_goes_up_and_comes_down_as_it_is(objects: ObjectStore, tmp_path: Path) -> None:
    files = OsFileSystem()
    content = random.Random(1).randbytes(100_000)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "1.sst").write_bytes(content)
    key = upload(files, objects, str(tmp_path), "tables/1.sst", STORE)
    assert upload(files, objects, str(tmp_path), "tables/1.sst", STORE) == key
    verify_object(objects, key)
    fetch(files, objects, key, f"{tmp_path}/copy/1.sst")
    assert (tmp_path / "copy" / "1.sst").read_bytes() == content
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["1.sst"]


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "empty", "missing"])
def test_a_damaged_object_is_named_and_leaves_no_file(tmp_path: Path, damage: str) -> None:
    files, objects = OsFileSystem(), make("folder", tmp_path)
    content = b"a" * 70_000
    wrong = {"flipped": b"b" + content[1:], "shorter": content[:-1], "longer": content + b"x", "empty": b""}
    (tmp_path / "1.sst").write_bytes(content)
    key = upload(files, objects, str(tmp_path), "1.sst", STORE)
    objects.delete(key)
    if damage in wrong:
        objects.put_new(key, wrong[damage])
    for target in (None, f"{tmp_path}/copy.sst"):
        with pytest.raises(CorruptionError) as error:
            verify_object(objects, key) if target is None else fetch(files, objects, key, target)
        assert error.value.path == f"{objects.url}/{key}"
    assert not (tmp_path / "copy.sst").exists()
    assert not (tmp_path / "copy.sst.tmp").exists()


def test_an_empty_file_is_an_object_too(objects: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert put_file(OsFileSystem(), objects, f"{tmp_path}/empty", "a/empty")
    key = upload(OsFileSystem(), objects, str(tmp_path), "empty", STORE)
    fetch(OsFileSystem(), objects, key, f"{tmp_path}/copy")
    assert (tmp_path / "copy").read_bytes() == b""


def test_a_folder_syncs_an_object_before_it_has_its_name() -> None:
    disk = SimulatedDisk()
    disk.on_image = lambda: 0
    assert FolderObjects(disk, "/archive").put_new("a/b", b"word")
    for image in disk.images:
        for mode in ("strict", "torn", "kept"):
            left = FolderObjects(image.restore(mode, 1), "/archive")
            assert left.size("a/b") is None or left.read("a/b", 0, 9) == b"word"
    assert FolderObjects(disk.image().restore("strict", 1), "/archive").read("a/b", 0, 9) == b"word"


def test_a_failed_write_to_a_folder_leaves_no_object() -> None:
    for at in range(1, 40):
        disk = SimulatedDisk(faults=(Fault(at, "eio"),))
        objects = FolderObjects(disk, "/archive")
        try:
            objects.put_new("a/b", b"word")
        except OSError:
            size = objects.size("a/b")
            assert size is None or objects.read("a/b", 0, 9) == b"word"


# -- the cache


def key_of(number: int, size: int = 10) -> str:
    return file_key(STORE, f"tables/1/{number}.sst", number, size)


def test_the_cache_keeps_what_was_used_last_within_its_limit() -> None:
    disk, fetched, removed = SimulatedDisk(), list[str](), list[str]()
    cache = FileCache(disk, "/cache", 30, removed.append)

    def get(number: int) -> str:
        def write(path: str) -> None:
            fetched.append(path)
            disk.mkdir("/cache")
            disk.create(path).pwrite(b"x" * 10, 0)

        return cache.path_of(key_of(number), write)

    for number in (1, 2, 3, 1, 4):
        assert disk.exists(get(number))
    assert len(fetched) == 4
    assert removed == [key_of(2)]
    assert cache.bytes() == 30
    again = FileCache(disk, "/cache", 20)  # the next process, with a smaller limit
    assert again.bytes() == 20
    assert len(disk.listdir("/cache")) == 2
    again.discard(key_of(4))
    again.discard(key_of(4))
    assert again.bytes() == 10


def test_a_failed_fetch_is_no_entry_and_one_larger_than_the_limit_is_kept_alone() -> None:
    disk = SimulatedDisk()
    cache = FileCache(disk, "/cache", 5)

    def fails(path: str) -> None:
        raise CorruptionError(path, 0, "damaged")

    with pytest.raises(CorruptionError):
        cache.path_of(key_of(1), fails)
    assert cache.bytes() == 0
    disk.mkdir("/cache")
    cache.path_of(key_of(1), lambda path: disk.create(path).close())
    cache.path_of(key_of(2), lambda path: disk.create(path).close())
    assert cache.bytes() == 10


def test_threads_that_want_one_file_fetch_it_once() -> None:
    disk, calls, gate = SimulatedDisk(), list[int](), threading.Event()
    disk.mkdir("/cache")
    cache = FileCache(disk, "/cache", 100)

    def write(path: str) -> None:
        calls.append(1)
        gate.wait(10)
        disk.create(path).close()

    readers = [threading.Thread(target=lambda: cache.path_of(key_of(1), write)) for _ in range(4)]
    for reader in readers:
        reader.start()
    gate.set()
    for reader in readers:
        reader.join(10)
    assert calls == [1]


def test_a_file_that_is_being_removed_is_fetched_again_only_after_that() -> None:
    disk, removing, goes_on = SimulatedDisk(), threading.Event(), threading.Event()
    disk.mkdir("/cache")

    def write(path: str) -> None:
        disk.create(path).close()

    def removed(key: str) -> None:
        removing.set()
        goes_on.wait(10)

    cache = FileCache(disk, "/cache", 10, removed)
    cache.path_of(key_of(1), write)
    makes_room = threading.Thread(target=lambda: cache.path_of(key_of(2), write))
    makes_room.start()
    assert removing.wait(10)
    with pytest.raises(WaitExpired):
        cache.path_of(key_of(1), write, timeout_s=0.0)
    goes_on.set()
    makes_room.join(10)
    assert disk.exists(cache.path_of(key_of(1), write))


def test_files_fetched_at_once_leave_no_more_than_the_limit_and_an_emptied_cache_is_filled_again() -> None:
    disk = SimulatedDisk()
    disk.mkdir("/cache")
    cache = FileCache(disk, "/cache", 10)
    both = threading.Barrier(2)

    def write(path: str) -> None:
        both.wait(10)
        disk.create(path).close()

    readers = [threading.Thread(target=lambda n=n: cache.path_of(key_of(n), write)) for n in (1, 2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(10)
    assert cache.bytes() == 10
    [name] = disk.listdir("/cache")
    disk.unlink(f"/cache/{name}")
    for number in (1, 2):
        assert disk.exists(cache.path_of(key_of(number), lambda path: disk.create(path).close()))


def test_what_a_killed_put_left_in_a_folder_goes_with_the_next_one() -> None:
    disk = SimulatedDisk()
    FolderObjects(disk, "/archive").put_new(f"{STORE}/files/a", b"1")
    disk.create(f"/archive/{STORE}/files/gone.tmp").close()
    again = FolderObjects(disk, "/archive")
    again.put_new(f"{STORE}/files/b", b"2")
    assert sorted(disk.listdir(f"/archive/{STORE}/files")) == ["a", "b"]


def test_a_folder_keeps_no_empty_folders() -> None:
    disk = SimulatedDisk()
    objects = FolderObjects(disk, "/archive")
    keys = [f"{STORE}/runs/1/journal/a", f"{STORE}/runs/1/tables/b", f"{STORE}/runs/2/journal/a"]
    for key in keys:
        objects.put_new(key, b"1")
    for key in keys[:2]:
        objects.delete(key)
    assert disk.listdir(f"/archive/{STORE}/runs") == ["2"]
    objects.delete(keys[2])
    assert disk.listdir("/archive") == ["LOCK"]


def test_a_folder_that_another_process_puts_into_stays_until_the_next_sweep() -> None:
    disk = SimulatedDisk()
    objects = FolderObjects(disk, "/archive")
    objects.put_new(f"{STORE}/runs/1/a", b"1")
    other = disk.lock("/archive/LOCK")
    objects.delete(f"{STORE}/runs/1/a")
    assert disk.listdir(f"/archive/{STORE}/runs") == ["1"]
    other.release()
    FolderObjects(disk, "/archive").put_new(f"{STORE}/runs/2/a", b"2")
    assert disk.listdir(f"/archive/{STORE}/runs") == ["2"]
