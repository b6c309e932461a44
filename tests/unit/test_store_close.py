"""Closing lets go of everything, whatever fails; and what races with it gets an answer or `Closed`."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from store_model import open_simulated

import penstock
from penstock.errors import Closed, NotFound, OutcomeUnknown, PenstockError, Poisoned, StoreLocked
from penstock.host.lazy_imports import load_pandas
from penstock.host.os_files import OsFile, OsFileSystem
from penstock.manifest.environment import LmdbEngine
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store
from penstock.testing import SimulatedDisk

OPERATIONS: list[tuple[type, str]] = [
    *((OsFile, name) for name in ("pwrite", "truncate", "allocate", "fsync", "fdatasync")),
    *((OsFileSystem, name) for name in ("create", "open", "rename", "unlink", "listdir", "mkdir", "fsync_dir")),
]


class FailingDisk:
    """Counts what is asked of the file system, and fails one call of it, or all syncs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.failed: list[str] = []
        self.fails: Callable[[int, str], bool] = lambda number, name: False
        for owner, name in OPERATIONS:
            patch.setattr(owner, name, self._counted(getattr(owner, name), name))

    def _counted(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.count += 1
            if self.fails(self.count, name):
                self.failed.append(name)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(*args, **named)

        return call

    def heal(self) -> None:
        self.count, self.failed, self.fails = 0, [], lambda number, name: False


def is_number(at: int, number: int, name: str) -> bool:
    return number == at


def threads_left() -> list[str]:
    """Threads that this test's stores left; others may have their own."""
    return [thread.name for thread in set(threading.enumerate()) - _before if thread.name.startswith("penstock")]


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def note_threads() -> None:
    load_pandas()  # before the count: the process, not a store, keeps the thread that imported it
    _before.clear()
    _before.update(threading.enumerate())


def open_files(folder: Path) -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return [link for link in links if link.startswith(str(folder))]


def fill(store: Store, number: int) -> None:
    store.kv("t").put(b"k%d" % number, b"v")
    store.queue("q").put(b"m%d" % number)


def check(folder: Path, *, at_least: int) -> None:
    """Requires: the store was let go. It opens again here, and has all that was durable."""
    assert not threads_left()
    with open_store(str(folder)) as store:
        table = store.kv("t")
        assert all(table.get(b"k%d" % number) == b"v" for number in range(at_least))
        assert len(store.queue("q").read(limit=10_000)) >= at_least


def test_every_step_of_closing_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    disk, number, at = FailingDisk(monkeypatch), 0, 0
    failed: set[str] = set()
    while True:
        at += 1
        store = open_store(str(tmp_path), settings=StoreSettings(background=False))  # only `close` flushes
        fill(store, number)
        store.flush()
        number += 1
        fill(store, 9_999)  # not durable yet
        disk.heal()
        disk.fails = partial(is_number, at)
        try:
            store.close()
        except PenstockError:
            failed.update(disk.failed)
        reached = bool(disk.failed)
        disk.heal()
        store.close()  # a second call does nothing
        assert disk.count == 0
        check(tmp_path, at_least=number)
        if not reached:
            break
    assert at > 10
    assert {"fdatasync", "fsync"} <= failed


def test_a_failed_sync_at_close_is_told_once_and_the_store_opens_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FailingDisk(monkeypatch)
    store = penstock.open(tmp_path)  # with its door
    fill(store, 0)
    store.flush()
    fill(store, 1)
    disk.fails = lambda count, name: name in ("fsync", "fdatasync")
    with pytest.raises(OutcomeUnknown):
        store.close()
    disk.heal()
    store.close()
    assert not open_files(tmp_path)
    check(tmp_path, at_least=1)
    with penstock.open(tmp_path):
        pass


def test_the_control_a_lock_that_is_released_after_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug of before: the manifest let go of its file only if its last sync worked."""

    def close(self: LmdbEngine) -> None:
        env, self._env = self._env, None
        self._close_file()
        env.close()
        self._fs.open(self._path + ".owner", write=True).fsync()
        self._owner.release()

    monkeypatch.setattr(LmdbEngine, "close", close)
    disk = FailingDisk(monkeypatch)
    store = open_store(str(tmp_path))
    fill(store, 0)
    store.flush()
    disk.fails = lambda count, name: name == "fsync"
    with pytest.raises(PenstockError):
        store.close()
    disk.heal()
    with pytest.raises(StoreLocked):
        check(tmp_path, at_least=1)


def test_an_error_of_a_part_is_typed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    fill(store, 0)

    def fail() -> None:
        raise OSError(errno.EIO, "the last step")

    store.at_close(fail)
    with pytest.raises(Poisoned, match="the last step"):
        store.close()
    check(tmp_path, at_least=1)


# -- calls that race with closing


def calls(store: Store) -> dict[str, Callable[[], Any]]:
    table, queue = store.kv("t"), store.queue("q")
    consumer = queue.consumer("c")
    return {
        "get": lambda: table.get(b"k0"),
        "get of a row in a file": lambda: table.get(b"stored"),
        "multi_get": lambda: table.multi_get([b"k0", b"stored"])[0],
        "put": lambda: table.put(b"other", b"v"),
        "durable put": lambda: table.put(b"other", b"v", durable=True),
        "message": lambda: queue.put(b"m"),
        "read": queue.read,
        "consumer": lambda: consumer.get(timeout_s=0.0),
        "batch": lambda: store.batch().commit(),
        "flush": store.flush,
        "table": lambda: store.kv("t"),
        "new table": lambda: store.kv("another"),
        "tables": store.tables,
        "snapshot": lambda: store.snapshot().close(),
    }


def prepared(store: Store) -> Store:
    store.kv("t").put(b"stored", b"v", durable=True)
    store.compact("t")
    fill(store, 0)
    store.flush()
    return store


def test_after_closing_every_call_raises_closed() -> None:
    store = prepared(open_simulated(SimulatedDisk()))
    calls_by_name = calls(store)
    store.close()
    for name, call in calls_by_name.items():
        with pytest.raises(Closed):
            call()
            pytest.fail(f"{name} answered after closing")


def test_after_a_failed_close_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk(monkeypatch)
    store = prepared(open_store(str(tmp_path)))
    calls_by_name = calls(store)
    disk.fails = lambda count, name: name == "fdatasync"
    store.kv("t").put(b"k0", b"pending")
    with pytest.raises(OutcomeUnknown):
        store.close()
    disk.heal()
    for name, call in calls_by_name.items():
        with pytest.raises(Closed):
            call()
            pytest.fail(f"{name} answered after closing")


def race(tmp_path: Path) -> list[Any]:
    """What calls that run while the store closes got, if it is neither right nor `Closed`."""
    wrong: list[Any] = []
    for round_ in range(6):
        store = prepared(open_store(str(tmp_path / str(round_))))
        calls_by_name, begun = calls(store), threading.Event()

        def call_until_closed(name: str, call: Callable[[], Any], begun: threading.Event = begun) -> None:
            try:
                while True:
                    value = call()
                    begun.set()
                    if name.startswith(("get", "multi_get")) and value != b"v":
                        wrong.append((name, value))
            except Closed:
                pass
            except Exception as error:
                wrong.append((name, error))

        names = ("get", "get of a row in a file", "multi_get", "put", "read", "consumer")
        running = [threading.Thread(target=call_until_closed, args=(name, calls_by_name[name])) for name in names]
        for thread in running:
            thread.start()
        assert begun.wait(30)
        store.close()
        for thread in running:
            thread.join(30)
            assert not thread.is_alive()
    return wrong


def test_what_races_with_closing_is_right_or_closed(tmp_path: Path) -> None:
    assert race(tmp_path) == []


def test_the_control_a_partition_that_opens_again(tmp_path: Path) -> None:
    """The bug of before: a lookup after the dispatcher closed opened its partition anew, without the journal's rows."""
    store = prepared(open_store(str(tmp_path), settings=StoreSettings(background=False)))
    fill(store, 1)
    store.flush()
    dispatcher, port = store._dispatcher, store._port
    dispatcher.close()
    with pytest.raises(Closed):
        port.lookup(store.kv("t")._partition(b"k1"), b"k1")
    dispatcher._closed = False
    assert port.lookup(store.kv("t")._partition(b"k1"), b"k1") is None
    store.close()


def test_an_opening_that_fails_late_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    settings = penstock.StoreSettings(task_intervals_s={"absent": 1.0})
    with pytest.raises(NotFound, match="no task named absent"):
        penstock.open(tmp_path / "store", settings=settings)
    assert set(threading.enumerate()) <= before
    penstock.open(tmp_path / "store").close()
