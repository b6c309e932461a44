"""Archive, verify, evict, read, rehydrate and reattach against a real S3 endpoint, while requests fail on the way."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from s3_proxy import FAULTS, FaultyProxy, s3_behind_proxy

import penstock
from penstock.archive.object_urls import open_objects, probe
from penstock.archive.objects import NetworkFailure
from penstock.archive.retrying import RetrySettings
from penstock.errors import ArchiveUnavailable, Invalid
from penstock.host.os_files import OsFileSystem

pytest.importorskip("obstore")
ROWS = 400
PROBABILITY = 0.25
ROW_MAX = 5


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[FaultyProxy, dict[str, str]]]:
    with s3_behind_proxy() as endpoint:
        yield endpoint


@pytest.fixture
def proxy(endpoint: tuple[FaultyProxy, dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    proxy, environment = endpoint
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    quick = partial(RetrySettings, pause_s=0.01, pause_s_max=0.05)
    monkeypatch.setattr("penstock.store.archiving.RetrySettings", quick)
    monkeypatch.setattr("penstock.archive.retrying.RetrySettings", quick)
    proxy.fault = lambda method, path: None
    proxy.requests.clear()
    proxy.failed.clear()
    return proxy


def open_store(path: Path, url: str | None, **settings: Any) -> penstock.Store:
    archive = penstock.ArchiveSettings(
        **{
            "request_timeout_s": 0.75,
            "timeout_s": 60.0,
            "attempts_max": 12,
            "grace_s": 0.0,
            "interval_s": None,
            **settings,
        }
    )
    return penstock.open(
        path, settings=penstock.StoreSettings(background=False, serve=False, archive=archive), archive=url
    )


def fill(store: penstock.Store, start: int = 0) -> dict[bytes, bytes]:
    rows = {b"%06d" % key: random.Random(key).randbytes(100) for key in range(start, start + ROWS)}
    store.kv("users").put_many(list(rows.items()), durable=True)
    store.queue("events").put(b"event %d" % start, durable=True)
    store.compact("users")
    return rows


@pytest.mark.campaign
@pytest.mark.parametrize("fault", FAULTS)
def test_everything_ends_well_though_a_quarter_of_the_requests_fail(
    proxy: FaultyProxy, tmp_path: Path, fault: str
) -> None:
    ends_well(proxy, tmp_path, [fault])


def test_everything_ends_well_whatever_a_quarter_of_the_requests_meets(proxy: FaultyProxy, tmp_path: Path) -> None:
    ends_well(proxy, tmp_path, [fault for fault in FAULTS if fault != "slow"])


def ends_well(proxy: FaultyProxy, tmp_path: Path, faults: list[str]) -> None:
    chance, url = random.Random(faults[0]), f"s3://bucket/{'-'.join(faults)}"
    row = [0]  # requests that failed one after the other: fewer than `reattach` makes attempts

    def fault(method: str, path: str) -> str | None:
        row[0] = row[0] + 1 if row[0] < ROW_MAX and chance.random() < PROBABILITY else 0
        return chance.choice(faults) if row[0] else None

    with open_store(tmp_path / "store", url) as store:
        rows = fill(store)
        proxy.fault = fault
        store.archive()
        assert store.verify_archive().damage == []
        assert store.evict().files == 1
        assert dict(store.kv("users").scan()) == rows
        assert [chunk.residency for chunk in store.chunks("users")] == ["evicted"]
        store.rehydrate()
        store.evict()
        rows |= fill(store, ROWS)
        store.archive()
        store.evict()
        store.collect_archive()
        assert dict(store.kv("users").scan()) == rows
    shutil.rmtree(tmp_path / "store")
    report = reattached(proxy, url, tmp_path / "again")
    with open_store(tmp_path / "again", None) as again:
        assert report.evicted == 1
        assert dict(again.kv("users").scan()) == rows
        assert [message.payload for message in again.queue("events").read()] == [b"event 0", b"event 400"]
        assert again.verify_archive().damage == []
    assert all(proxy.failed[fault] > 2 for fault in faults), "a fault did not happen"


def reattached(proxy: FaultyProxy, url: str, path: Path) -> penstock.ReattachReport:
    """Reattach: without faults that only a time-out ends, which is a minute there."""
    before = proxy.fault
    if "slow" in url:
        proxy.fault = lambda method, path: None
    try:
        return penstock.reattach(url, path)
    finally:
        proxy.fault = before


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_an_endpoint_that_only_fails_is_given_up_and_nothing_is_lost(
    proxy: FaultyProxy, tmp_path: Path, fault: str
) -> None:
    with open_store(tmp_path / "store", f"s3://bucket/down-{fault}", attempts_max=3, cache_bytes_max=0) as store:
        rows = fill(store)
        store.archive()
        store.evict()
        proxy.fault = lambda method, path: fault
        proxy.requests.clear()
        with pytest.raises(ArchiveUnavailable, match="tried 3 times"):
            dict(store.kv("users").scan())
        assert sum(proxy.requests.values()) == 3
        for call in (store.archive, store.verify_archive, store.rehydrate, store.collect_archive):
            with pytest.raises(ArchiveUnavailable):
                call()
        store.kv("users").put(b"new", b"row", durable=True)
        assert store.kv("users").get(b"new") == b"row"  # in memory: it needs no object
        proxy.fault = lambda method, path: None
        rows[b"new"] = b"row"
        assert dict(store.kv("users").scan()) == rows
        store.archive()
        assert store.verify_archive().damage == []


def test_a_store_opens_while_the_endpoint_is_down_and_attaches_later(proxy: FaultyProxy, tmp_path: Path) -> None:
    proxy.fault = lambda method, path: "503"
    with open_store(tmp_path / "store", "s3://bucket/later", attempts_max=2) as store:
        rows = fill(store)
        with pytest.raises(ArchiveUnavailable):
            store.archive()
        proxy.fault = lambda method, path: None
        assert store.archive().number == 1
        store.evict()
        assert dict(store.kv("users").scan()) == rows


def test_a_missing_bucket_and_wrong_requests_are_said_and_not_retried(proxy: FaultyProxy, tmp_path: Path) -> None:
    objects = open_objects("s3://nobody/x", OsFileSystem(), request_timeout_s=5.0)
    with pytest.raises((ArchiveUnavailable, FileNotFoundError)) as error:
        objects.put_new("a", b"1")
    assert not isinstance(error.value, NetworkFailure)
    with open_store(tmp_path / "store", "s3://nobody/x") as store:
        fill(store)
        with pytest.raises((ArchiveUnavailable, OSError)):
            store.archive()
        assert [chunk.residency for chunk in store.chunks("users")] == ["local"]


def test_conditional_puts_are_honoured_here(proxy: FaultyProxy) -> None:
    objects = open_objects("s3://bucket/probe", OsFileSystem(), request_timeout_s=5.0)
    probe(objects, "ab" * 16, random.Random(1))
    assert list(objects.listed("ab" * 16)) == []
    assert objects.folders() == []
    objects.put_new("one/a", b"1")
    objects.put_new("two/b", b"22")
    assert sorted(objects.folders()) == ["one", "two"]
    assert [each.size for each in objects.listed("two")] == [2]
    with pytest.raises(Invalid):
        objects.put_new("../x", b"")
