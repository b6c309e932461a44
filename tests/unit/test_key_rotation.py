"""Rotations of master keys that meet something: other rotations, new tables, interrupts, keys that change meanwhile.

What a rotation says is what users remove keys by: it must hold for every table.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.archive.master_keys import format_key
from penstock.errors import Backpressure, KeyMissing, WrongKey
from penstock.store.settings import StoreSettings

ONE, TWO = b"1" * 32, b"2" * 32
BY_HAND = StoreSettings(background=False, serve=False)


def versions(store: penstock.Store) -> dict[str, int]:
    return {info.name: info.key.version for info in store.port.tables() if info.key is not None}


class Service:
    """A key service whose newest key changes."""

    def __init__(self) -> None:
        self.keys = {1: ONE}

    def __call__(self, version: int | None) -> tuple[int, bytes]:
        version = max(self.keys) if version is None else version
        return version, self.keys[version]


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def store(tmp_path: Path, service: Service) -> Any:
    with penstock.open(tmp_path / "s", keys=service, encrypt=True, settings=BY_HAND) as opened:
        for name in ("a", "b"):
            opened.kv(name).put(b"k", b"v", durable=True)
        yield opened


def test_a_description_names_the_master_key_that_is_needed(store: penstock.Store, service: Service) -> None:
    before = store.describe("a").storage.encryption
    service.keys[2] = TWO
    store.rotate_keys()
    after = store.describe("a").storage.encryption
    assert before is not None
    assert after is not None
    assert (before.key_version, after.key_version) == (1, 2)
    store.alter("a", compression=penstock.CompressionConfig(penstock.Codec.LZ4))  # goes on from what it is now
    assert store.describe("a").storage.encryption == after


def test_one_rotation_at_a_time(store: penstock.Store, service: Service) -> None:
    inside, go_on, done = threading.Event(), threading.Event(), list[penstock.RotationReport]()
    rewrap = store._port.rewrap

    def wait(info: Any, key: Any) -> None:
        inside.set()
        assert go_on.wait(60)
        rewrap(info, key)

    store._port.rewrap = wait  # type: ignore[method-assign]
    service.keys[2] = TWO
    thread = threading.Thread(target=lambda: done.append(store.rotate_keys()))
    thread.start()
    assert inside.wait(60)
    service.keys[3] = b"3" * 32
    with pytest.raises(Backpressure, match="another rotation of the keys"):
        store.rotate_keys()
    go_on.set()
    thread.join(60)
    assert done == [penstock.RotationReport(2, ["a", "b"])]  # what it began with, in every table
    assert versions(store) == {"a": 2, "b": 2}
    assert store.rotate_keys() == penstock.RotationReport(3, ["a", "b"])


def test_a_table_that_is_created_during_a_rotation_has_the_newest_key(store: penstock.Store, service: Service) -> None:
    """Its key was wrapped before the rotation, and the ledger creates it after that."""
    command, rotated = store._port._command, list[penstock.RotationReport]()

    def rotate_first(operations: bytes) -> None:
        if not rotated:
            service.keys[2] = TWO
            rotated.append(penstock.RotationReport(0, []))
            rotated.append(store.rotate_keys())
        command(operations)

    store._port._command = rotate_first  # type: ignore[method-assign]
    store.kv("late").put(b"k", b"v", durable=True)
    assert rotated[1] == penstock.RotationReport(2, ["a", "b"])
    del service.keys[1]
    path = store.path
    store.close()
    with penstock.open(path, keys=service, settings=BY_HAND) as again:
        assert versions(again) == {"a": 2, "b": 2, "late": 2}


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_an_interrupted_rotation_is_finished_by_the_next(
    store: penstock.Store, service: Service, stop: type[BaseException]
) -> None:
    rewrap, calls = store._port.rewrap, list[str]()

    def interrupted(info: Any, key: Any) -> None:
        if calls:
            raise stop()
        calls.append(info.name)
        rewrap(info, key)

    service.keys[2] = TWO
    store._port.rewrap = interrupted  # type: ignore[method-assign]
    with pytest.raises(stop):
        store.rotate_keys()
    assert versions(store) == {"a": 2, "b": 1}
    store._port.rewrap = rewrap  # type: ignore[method-assign]
    path = store.path
    store.close()
    with pytest.raises(KeyMissing):
        penstock.open(path, keys={2: TWO}, settings=BY_HAND)
    with penstock.open(path, keys=service, settings=BY_HAND) as again:
        assert again.rotate_keys() == penstock.RotationReport(2, ["b"])
    with penstock.open(path, keys={2: TWO}, settings=BY_HAND) as again:
        assert (again.kv("a")[b"k"], again.kv("b")[b"k"]) == (b"v", b"v")


def test_a_rotation_to_a_key_that_fails_changes_nothing(store: penstock.Store, service: Service) -> None:
    service.keys[2] = b"short"
    with pytest.raises(penstock.errors.Invalid, match="master key 2 is not 32 bytes"):
        store.rotate_keys()
    assert versions(store) == {"a": 1, "b": 1}
    service.keys = {}
    with pytest.raises(KeyMissing):
        store.rotate_keys()
    assert store.kv("a")[b"k"] == b"v"  # an open store needs its master keys no more


def test_a_key_file_that_was_replaced_is_noticed_by_a_rotation(tmp_path: Path) -> None:
    """The store is open and has what it needs: without the check its user would find out at the next opening."""
    file, path = tmp_path / "keys", tmp_path / "s"
    file.write_text(format_key(1, ONE))
    with penstock.open(path, keys=f"file:{file}", encrypt=True, settings=BY_HAND) as store:
        store.kv("a").put(b"k", b"v", durable=True)
        file.write_text(format_key(1, TWO))  # another key of the same version
        with pytest.raises(WrongKey, match="master key 1 is not the one that table a was encrypted with"):
            store.rotate_keys()
        file.write_text(format_key(1, TWO) + format_key(2, TWO))
        assert store.rotate_keys() == penstock.RotationReport(2, ["a"])  # which mends it
    with penstock.open(path, keys=f"file:{file}", settings=BY_HAND) as store:
        assert store.kv("a")[b"k"] == b"v"


def test_a_rotation_in_the_journal_alone_is_enough(store: penstock.Store, service: Service) -> None:
    """As in a member that follows: its ledger's files are older than what it has applied."""
    store._maintenance.flush(store._ledger.tree)
    service.keys[2] = TWO
    store._rewrite_ledger = lambda: None  # type: ignore[method-assign]
    store.kv("c").put(b"k", b"v", durable=True)
    store.rotate_keys()
    path = store.path
    store.close()
    for keys, error in (({1: ONE}, KeyMissing), ({2: ONE}, KeyMissing), ({1: TWO, 2: ONE}, WrongKey)):
        with pytest.raises(error):
            penstock.open(path, keys=keys, settings=BY_HAND)
    with penstock.open(path, keys={2: TWO}, settings=BY_HAND) as again:
        assert [again.kv(name)[b"k"] for name in "abc"] == [b"v"] * 3
