"""The tasks of a query read one moment, or none: the snapshot they share, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import Backpressure, Closed, Invalid
from penstock.host.os_files import OsFileSystem
from penstock.host.randomness import system_random
from penstock.host.steady_clock import SteadyClock
from penstock.protocol import wire
from penstock.server.gateway import QUERY_KEEPS_S, Gateway
from penstock.server.query_names import KEPT_US, QueryNames
from penstock.server.rights import LOCAL
from penstock.server.service import service_of
from penstock.store.store import Store
from penstock.testing import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "store") as opened:
        opened.kv("t").put(b"k", b"1", durable=True)
        yield opened


@pytest.fixture
def gateway(store: Store, clock: FakeClock) -> Iterator[Gateway]:
    store._clock = SteadyClock(clock)
    opened = Gateway(store, random=system_random(), detached=True)
    yield opened
    opened.close()


def take(gateway: Gateway, query: str = "", lease_s: float = 300.0) -> wire.SnapshotHandle:
    return wire.unpack(gateway.answer(wire.pack(wire.TakeSnapshot(lease_s, query)), LOCAL), wire.SnapshotHandle)


def test_a_name_is_used_once(tmp_path: Path, clock: FakeClock) -> None:
    fs, path = OsFileSystem(), str(tmp_path / "run" / "queries")
    names = QueryNames(fs, path, clock)
    assert names.use("a")
    assert not names.use("a")
    clock.advance(10.0)
    assert names.use("b")
    names.close()
    names = QueryNames(fs, path, clock)  # the next owner
    assert not names.use("a")
    assert names.use("c")
    clock.advance(KEPT_US / 1e6 - 5.0)
    names.close()
    names = QueryNames(fs, path, clock)
    assert names.use("a")  # a day later nobody reads under it any more
    assert not names.use("b")
    names.close()
    Path(path).write_bytes(Path(path).read_bytes() + b"17 torn\n\xff\xfe\nwithout a time\n1")
    names = QueryNames(fs, path, clock)
    assert not names.use("a")
    for bad in ("", "x" * 201, "a\nb", "é"):
        with pytest.raises(Invalid, match="a query's name"):
            names.use(bad)
    names.close()


def test_all_tasks_of_a_query_read_one_moment(store: Store, gateway: Gateway) -> None:
    first = take(gateway, "app-1")
    store.kv("t").put(b"k", b"2", durable=True)
    assert take(gateway, "app-1").snapshot == first.snapshot
    assert take(gateway, "app-1").lsn == first.lsn
    assert take(gateway, "app-2").lsn > first.lsn


def test_a_query_whose_snapshot_is_gone_gets_no_other(store: Store, gateway: Gateway, clock: FakeClock) -> None:
    take(gateway, "app-1", lease_s=60.0)
    clock.advance(61.0)
    gateway.maintain()
    with pytest.raises(Closed, match="run the query again"):
        take(gateway, "app-1")
    take(gateway, "app-2")
    service = service_of(store)
    assert service is not None
    with pytest.raises(Closed, match="run the query again"):  # nor does the owner after this one give it another
        take(service.gateway(), "app-2")


def test_a_query_keeps_the_owner_only_while_it_reads(gateway: Gateway, clock: FakeClock) -> None:
    take(gateway, "app-1")
    assert gateway.idle_s() == 0.0
    assert gateway.begin_yield() == "a snapshot is being read"
    clock.advance(QUERY_KEEPS_S - 1)
    take(gateway, "app-1")
    clock.advance(QUERY_KEEPS_S - 1)
    assert gateway.begin_yield() == "a snapshot is being read"
    clock.advance(2)
    assert gateway.idle_s() == 0.0  # nobody wants the store: it waits for a task that may come
    assert gateway.begin_yield() == ""


def test_a_snapshot_without_a_query_keeps_the_owner(gateway: Gateway, clock: FakeClock) -> None:
    take(gateway)
    clock.advance(299.0)
    assert gateway.begin_yield() == "a snapshot is being read"


def test_old_queries_make_room(gateway: Gateway, clock: FakeClock) -> None:
    gateway._snapshots._each_max = 3
    mine = take(gateway)
    for number in range(10):
        take(gateway, f"app-{number}")
        clock.advance(QUERY_KEEPS_S + 1)
    assert mine.snapshot in gateway._snapshots
    with pytest.raises(Closed):
        take(gateway, "app-0")
    take(gateway, "app-9")
    take(gateway)
    with pytest.raises(Backpressure):
        take(gateway)
