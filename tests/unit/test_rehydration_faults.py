"""Reads of evicted files while disk or archive fail: a typed error that names the file, nothing half-written is used.

Each operation of the way (the index, the folder of the cache, the object, the copy) fails once, in each way; the next
read must work. The bucket is a folder of the simulated disk, so that faults reach it, too.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from store_model import SETTINGS

from penstock.archive.file_cache import FileCache
from penstock.errors import ArchiveUnavailable, CorruptionError, DiskFailed, DiskFull, PenstockError, ProcessLimit
from penstock.host.file_operations import walk
from penstock.store.archive_settings import ArchiveSettings
from penstock.store.store import Store, open_store
from penstock.testing import FakeClock, SimulatedDisk
from penstock.testing.disk import FaultKind
from penstock.testing.manifest import MemoryEngine

ARCHIVE = ArchiveSettings(grace_s=0.0, interval_s=None, attempts_max=1)
VALUE = b"v" * 100_000
TYPED = {
    "eio": (DiskFailed, ArchiveUnavailable, CorruptionError),
    "enospc": (DiskFull,),
    "emfile": (ProcessLimit, ArchiveUnavailable),
    "short": (),
}


def opened(disk: SimulatedDisk) -> Store:
    settings = replace(SETTINGS, archive=ARCHIVE, keys={1: b"1" * 32}, encrypt=True)
    return open_store(
        "/store", fs=disk, clock=FakeClock(), random=random.Random(1), engine=MemoryEngine, settings=settings,
        archive="file:///bucket",
    )  # fmt: skip


def evict(store: Store) -> None:
    """Remove the file, and its copy."""
    store.evict("keys")
    cache = store._archive.tables.cache
    for key in list(cache._loaded()):
        cache.discard(key)
    store._archive.release_removed()


@pytest.fixture
def disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    with opened(disk) as store:
        store.kv("keys").put(b"a", VALUE)
        store.flush()
        store.compact("keys")
        store.archive()
        evict(store)
    return disk


def copies(disk: SimulatedDisk) -> list[str]:
    return [f"/store/cache/{name}" for name in disk.listdir("/store/cache")] if disk.exists("/store/cache") else []


def object_of(disk: SimulatedDisk) -> str:
    """The path of the only sstable's object."""
    [path] = [name for name in walk(disk, "/bucket") if "/files/tables/2/" in name and not name.endswith(".idx")]
    return f"/bucket/{path}"


@pytest.mark.parametrize("kind", TYPED)
@pytest.mark.parametrize("way", ["read", "rehydrate"])
def test_a_fault_on_the_way_is_typed_and_the_next_read_works(disk: SimulatedDisk, way: str, kind: FaultKind) -> None:
    store, number, hit, messages = opened(disk), 0, True, list[str]()
    users = store.kv("keys")
    while hit:
        number += 1
        evict(store)
        disk._faults = {disk.operations + number: kind}
        try:
            if way == "read":
                assert users.get(b"a") == VALUE
            else:
                store.rehydrate("keys")
        except PenstockError as error:
            messages.append(str(error))
            if "/store/manifest" not in str(error):  # a commit of the job
                assert isinstance(error, TYPED[kind]), (number, error)
        hit = disk.operations >= min(disk._faults)
        disk._faults = {}
        assert users.get(b"a") == VALUE, number
        assert not [path for path in copies(disk) if path.endswith(".tmp")]
        store.rehydrate("keys")
        assert users.get(b"a") == VALUE, number
    assert number > 10
    assert all("/store" in each or "file:///bucket/" in each or "fsync_dir / " in each for each in messages)
    if kind == "eio":
        target = "/store/cache/" if way == "read" else "/store/tables/"
        for where in (f"create {target}", "file:///bucket/", f"rename {target}", f"fsync_dir {target[:-1]}"):
            assert any(where in each for each in messages), where
    assert bool(messages) == (kind != "short")
    store.close()


@pytest.mark.parametrize("harm", ["cut", "empty", "flip"])
def test_a_damaged_object_is_named_and_read_once_it_is_back(disk: SimulatedDisk, harm: str) -> None:
    path = object_of(disk)
    content = disk.open(path).pread(1 << 20, 0)
    file = disk.open(path, write=True)
    if harm == "flip":
        disk.flip(path, 8 * (len(content) // 2))
    else:
        file.truncate(len(content) // 2 if harm == "cut" else 0)
    with opened(disk) as store:
        for _ in range(2):
            with pytest.raises(CorruptionError, match=f"file://{path}.*this object"):
                store.kv("keys").get(b"a")
            assert copies(disk) == []
        with pytest.raises(PenstockError, match="this object"):
            store.rehydrate("keys")
        file.pwrite(content, 0)
        assert store.kv("keys").get(b"a") == VALUE


def damage_copy(disk: SimulatedDisk, harm: str) -> None:
    [path] = copies(disk)
    file = disk.open(path, write=True)
    if harm == "flip":
        disk.flip(path, 8 * (file.size() // 2))
    else:
        file.truncate(file.size() // 2 if harm == "cut" else 0)


@pytest.mark.parametrize("harm", ["cut", "empty", "flip"])
def test_a_copy_that_was_damaged_between_two_openings_is_fetched_again(disk: SimulatedDisk, harm: str) -> None:
    with opened(disk) as store:
        assert store.kv("keys").get(b"a") == VALUE
    damage_copy(disk, harm)
    for _ in range(2):
        with opened(disk) as store:
            assert store.kv("keys").get(b"a") == VALUE


def test_a_copy_that_was_cut_while_it_was_closed_is_fetched_again(disk: SimulatedDisk) -> None:
    with opened(disk) as store:
        assert store.kv("keys").get(b"a") == VALUE
        for tree, _ in store._maintenance.trees():  # as the limit of open files does
            tree.release({file.meta.file_name for file in tree.view.version.files()})
        damage_copy(disk, "cut")
        assert store.kv("keys").get(b"a") == VALUE


def test_negative_control_a_copy_that_is_believed_fails_every_read(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(disk) as store:
        assert store.kv("keys").get(b"a") == VALUE
    damage_copy(disk, "flip")
    monkeypatch.setattr(FileCache, "_is_sound", lambda *_: True)
    with opened(disk) as store:
        for _ in range(2):
            with pytest.raises(CorruptionError, match="/store/cache/"):
                store.kv("keys").get(b"a")
