"""A closed store is freed: nothing of the process (registries, hooks, threads, sockets) keeps it or its files."""

from __future__ import annotations

import gc
import os
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import StoreLocked
from penstock.host import threads
from penstock.server import service
from penstock.store.settings import StoreSettings
from penstock.store.store import Store, open_store

PATIENCE_S = 20.0  # for threads that end by themselves after a close


def is_freed(reference: weakref.ref[Any]) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while reference() is not None and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.01)
    return reference() is None


def use_tables(store: Store) -> None:
    table, queue = store.kv("t", shards=2), store.queue("q")
    for number in range(20):
        with store.batch(token=("p", number)) as batch:
            batch.kv("t").put(b"%d" % number, b"x" * 100)
            batch.queue("q").put(b"m")
    table.delete_range(b"1", b"2")
    consumer = queue.consumer("c")
    consumer.ack(consumer.get(5, timeout_s=5.0))
    store.compact("t")
    store.checkpoint()


def use_snapshots(store: Store) -> None:
    store.kv("t").put(b"a", b"1", durable=True)
    with store.snapshot() as snapshot:
        assert snapshot.kv("t").get(b"a") == b"1"
    store.left_open = store.snapshot()  # type: ignore[attr-defined] # and one that nobody closed
    store.scan_left_open = store.kv("t").scan()  # type: ignore[attr-defined]
    next(store.scan_left_open)  # type: ignore[attr-defined]


def use_connection(store: Store) -> None:
    with penstock.connect(store.path) as client:
        client.kv("t").put(b"a", b"1", durable=True)
        assert client.kv("t").get(b"a") == b"1"
        with client.snapshot() as snapshot:
            assert list(snapshot.kv("t").scan(start=b"a")) == [(b"a", b"1")]
        remote = weakref.ref(client)
    del client, snapshot
    assert is_freed(remote)


def use_fork(store: Store) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


USES: list[Callable[[Store], None]] = [use_tables, use_snapshots, use_connection, use_fork]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_closed_store_is_freed(tmp_path: Path, use: Callable[[Store], None]) -> None:
    with penstock.open(tmp_path) as store:
        use(store)
        reference = weakref.ref(store)
    del store
    assert is_freed(reference)


def test_descriptors_do_not_grow(tmp_path: Path) -> None:
    counts = []
    for _ in range(4):
        with penstock.open(tmp_path) as store:
            use_tables(store)
            use_connection(store)
            reference = weakref.ref(store)
        del store
        assert is_freed(reference)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] <= counts[0]


def test_a_store_without_threads_and_one_that_could_not_open_are_freed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path), settings=StoreSettings(background=False))
    before = {id(each) for each in gc.get_objects() if isinstance(each, Store)}
    with pytest.raises(StoreLocked):
        open_store(str(tmp_path))
    gc.collect()
    assert {id(each) for each in gc.get_objects() if isinstance(each, Store)} == before
    store.close()
    reference = weakref.ref(store)
    del store
    assert is_freed(reference)


def seed_strong_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ref", lambda of: lambda: of)


def seed_hook_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[Any] = []
    monkeypatch.setattr(threads, "after_fork", lambda owner, act: owners.append(owner))


def seed_atexit_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    owners: list[Any] = []
    monkeypatch.setattr(threads, "at_exit", lambda owner, close: partial(owners.append, owner))


BUGS = [seed_strong_registry, seed_hook_that_holds, seed_atexit_that_holds]


@pytest.mark.parametrize("seed", BUGS, ids=lambda seed: seed.__name__)
def test_what_keeps_a_store_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """The negative controls: the registry of services as it was, and hooks that hold their owner."""
    seed(monkeypatch)
    monkeypatch.setitem(globals(), "PATIENCE_S", 0.1)
    with penstock.open(tmp_path) as store:
        reference = weakref.ref(store)
    del store
    assert not is_freed(reference)


@pytest.mark.parametrize("where", ["owner", "client"])
def test_an_ended_batch_keeps_no_rows_until_the_garbage_collector_runs(tmp_path: Path, where: str) -> None:
    value = b"x" * 1000
    with penstock.open(tmp_path) as owner, penstock.connect(tmp_path) as client:
        store = owner if where == "owner" else client
        store.kv("t").put(b"a", b"1", durable=True)
        gc.collect()
        gc.disable()
        try:
            references = sys.getrefcount(value)
            for number in range(3):
                with store.batch(token=("p", 1)) as batch:  # only the first one writes
                    batch.kv("t").put(b"k", bytes(1000) if number == 0 else value)
                with suppress(ZeroDivisionError), store.batch() as batch:
                    batch.kv("t").put(b"k", value)
                    raise ZeroDivisionError
            store.kv("t").put(b"a", b"2", durable=True)  # the last write is kept for a recovery
            assert sys.getrefcount(value) == references
        finally:
            gc.enable()
