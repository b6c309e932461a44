from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import penstock
from penstock.client.connect import connect
from penstock.kinds import Reading, partitions_of
from penstock.store.applied_reading import AppliedReading
from penstock.store.settings import StoreSettings
from penstock.store.store import Store
from penstock.testing.contracts.port import OpenPort, PortContract
from penstock.testing.contracts.reading import ReadingContract, fill

SLOW = StoreSettings(flush_interval_s=3600.0)  # what is written stays pending


def folder(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("port") / "store"


@contextmanager
def filled(path: Path) -> Iterator[Store]:
    with penstock.open(path) as store:
        fill(store.port)
        store.flush()
        yield store


class TestLiveReading(ReadingContract):
    @pytest.fixture(scope="class")
    @classmethod
    def reading(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
        with filled(folder(tmp_path_factory)) as store:
            yield store.port


class TestPendingReading(ReadingContract):
    """What is read was written by this process and has not gone to the journal."""

    @pytest.fixture(scope="class")
    @classmethod
    def reading(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
        with penstock.open(folder(tmp_path_factory), settings=SLOW) as store:
            fill(store.port)
            yield store.port

    def test_messages(self, reading: Reading) -> None:
        """Messages get their numbers when they are applied: nobody reads them before that."""
        for partition in self._shards(reading, "events"):
            assert list(reading.scan(partition, b"", None, False)) == []


class TestStoredReading(ReadingContract):
    """What is read lies in files, and the store was opened again."""

    @pytest.fixture(scope="class")
    @classmethod
    def reading(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
        path = folder(tmp_path_factory)
        with filled(path) as store:
            for name in ("plain", "spread"):
                store.compact(name)
            store.checkpoint()
        with penstock.open(path) as store:
            yield store.port


class TestAppliedReading(ReadingContract):
    @pytest.fixture(scope="class")
    @classmethod
    def reading(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
        with filled(folder(tmp_path_factory)) as store:
            yield AppliedReading(store.port)


class TestSnapshot(ReadingContract):
    is_snapshot = True

    @pytest.fixture(scope="class")
    @classmethod
    def reading(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
        with filled(folder(tmp_path_factory)) as store:
            snapshot = store.port.snapshot()
            store.port.drop("plain")
            yield snapshot
            snapshot.close()


class TestStoredSnapshot(ReadingContract):
    is_snapshot = True

    @pytest.fixture(scope="class")
    @classmethod
    def reading(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
        with filled(folder(tmp_path_factory)) as store:
            store.compact("plain")
            store.compact("spread")
            snapshot = store.port.snapshot()
            yield snapshot
            snapshot.close()


class TestClient(ReadingContract):
    @pytest.fixture(scope="class")
    @classmethod
    def reading(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
        path = folder(tmp_path_factory)
        with penstock.open(path), connect(path) as client:
            fill(client.port)
            yield client.port


class TestClientSnapshot(ReadingContract):
    is_snapshot = True

    @pytest.fixture(scope="class")
    @classmethod
    def reading(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
        path = folder(tmp_path_factory)
        with filled(path), connect(path) as client:
            snapshot = client.port.snapshot()
            yield snapshot
            snapshot.close()


class TestJoinedSnapshot(ReadingContract):
    """A snapshot that another client took."""

    is_snapshot = True

    @pytest.fixture(scope="class")
    @classmethod
    def reading(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
        path = folder(tmp_path_factory)
        with filled(path), connect(path) as client, connect(path) as other:
            snapshot = client.port.snapshot()
            yield other.port.join_snapshot(snapshot.snapshot_id)
            snapshot.close()


@contextmanager
def owner(path: Path) -> Iterator[OpenPort]:
    with penstock.open(path) as store:
        yield OpenPort(store.port, store.path, store.identity, store.close)


@contextmanager
def client_of(path: Path) -> Iterator[OpenPort]:
    with ExitStack() as stack:
        stack.enter_context(penstock.open(path))
        client = stack.enter_context(connect(path))
        yield OpenPort(client.port, client.path, client.identity, client.close)


class TestLocalPort(PortContract):
    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPort]:
        with owner(folder(tmp_path_factory)) as opened:
            yield opened

    @pytest.fixture
    def ending(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPort]:
        with owner(folder(tmp_path_factory)) as opened:
            yield opened


class TestFlightPort(PortContract):
    @pytest.fixture(scope="class")
    @classmethod
    def opened(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPort]:
        with client_of(folder(tmp_path_factory)) as opened:
            yield opened

    @pytest.fixture
    def ending(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenPort]:
        with client_of(folder(tmp_path_factory)) as opened:
            yield opened


def test_a_moment_of_the_owner_holds_what_is_pending(tmp_path: Path) -> None:
    """And what others see does not: a crash could take it back."""
    with penstock.open(tmp_path / "store", settings=SLOW) as store:
        fill(store.port)
        store.flush()
        table = store.kv("plain")
        table.put(b"k0000", b"pending")
        info = store.port.table("plain")
        assert info is not None
        (plain,) = partitions_of(info)
        with store.port.moment([plain]) as mine, AppliedReading(store.port).moment([plain]) as everybody:
            assert (mine.lookup(plain, b"k0000"), everybody.lookup(plain, b"k0000")) == (b"pending", b"value of 0")
