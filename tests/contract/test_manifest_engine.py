"""What every manifest engine promises, run on LMDB and on the one in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.errors import Closed, PenstockError, StoreLocked
from penstock.host.clock import SystemClock
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.manifest.engine import ManifestEngine
from penstock.manifest.environment import LmdbEngine
from penstock.manifest.settings import ManifestSettings
from penstock.testing import SimulatedDisk
from penstock.testing.manifest import MemoryEngine


class Bench:
    """One kind of engine, opened as often as a test likes."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.fs: FileSystem = OsFileSystem() if kind == "lmdb" else SimulatedDisk()
        self.path = str(folder / "manifest") if kind == "lmdb" else "manifest"
        self._opener: Callable[..., ManifestEngine] = LmdbEngine if kind == "lmdb" else MemoryEngine
        self._opened: list[ManifestEngine] = []

    def open(self, path: str | None = None) -> ManifestEngine:
        engine = self._opener(path or self.path, ManifestSettings(), self.fs, SystemClock())
        self._opened.append(engine)
        return engine

    def close(self) -> None:
        for engine in self._opened:
            engine.close()


@pytest.fixture(params=["lmdb", "memory"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(request.param, tmp_path)
    yield made
    made.close()


def _fill(engine: ManifestEngine, *keys: bytes, table: str = "db") -> None:
    with engine.write() as view:
        for key in keys:
            view.put(table, key, b"value of " + key)


def test_a_commit_is_there_after_reopening(bench: Bench) -> None:
    engine = bench.open()
    _fill(engine, b"a", b"b")
    engine.close()
    with bench.open().read() as view:
        assert view.get("db", b"a") == b"value of a"
        assert view.get("db", b"c") is None
        assert view.get("wal_state", b"a") is None


def test_an_exception_undoes_everything(bench: Bench) -> None:
    engine = bench.open()
    _fill(engine, b"kept")

    def change_and_fail() -> None:
        with engine.write() as view:
            view.put("db", b"lost", b"x")
            assert view.delete("db", b"kept")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        change_and_fail()
    with engine.read() as view:
        assert [key for key, _ in view.scan("db")] == [b"kept"]


def test_scans_are_sorted_and_half_open(bench: Bench) -> None:
    engine = bench.open()
    _fill(engine, b"\x00\x02", b"\xff", b"\x00\x01", b"a", b"b")
    with engine.read() as view:
        assert [key for key, _ in view.scan("db")] == [b"\x00\x01", b"\x00\x02", b"a", b"b", b"\xff"]
        assert [key for key, _ in view.scan("db", b"\x00\x02", b"b")] == [b"\x00\x02", b"a"]
        assert list(view.scan("db", b"c", b"d")) == []
        assert list(view.scan("metrics")) == []


def test_a_transaction_sees_its_own_changes(bench: Bench) -> None:
    engine = bench.open()
    with engine.write() as view:
        view.put("db", b"a", b"1")
        view.put("db", b"a", b"2")
        assert view.get("db", b"a") == b"2"
        assert view.delete("db", b"a")
        assert not view.delete("db", b"a")
        assert list(view.scan("db")) == []


def test_a_snapshot_does_not_move(bench: Bench) -> None:
    engine = bench.open()
    _fill(engine, b"a")
    begun, written = threading.Event(), threading.Event()
    seen: list[list[bytes]] = []

    def read() -> None:
        with engine.read() as view:
            seen.append([key for key, _ in view.scan("db")])
            begun.set()
            assert written.wait(10)
            seen.append([key for key, _ in view.scan("db")])

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(10)
    _fill(engine, b"b")
    written.set()
    reader.join(10)
    assert seen == [[b"a"], [b"a"]]


def test_a_read_may_hold_another(bench: Bench) -> None:
    engine = bench.open()
    _fill(engine, b"a")
    with engine.read() as outer, engine.read() as inner:
        assert outer.get("db", b"a") == inner.get("db", b"a")


def test_a_copy_opens_as_a_manifest(bench: Bench) -> None:
    engine = bench.open()
    _fill(engine, b"a", table="meta")  # a copy is examined, and rows of other tables are records
    engine.copy(bench.path + ".copy")
    _fill(engine, b"b", table="meta")
    with bench.open(bench.path + ".copy").read() as view:
        assert [key for key, _ in view.scan("meta")] == [b"a"]


def test_one_owner_at_a_time(bench: Bench) -> None:
    engine = bench.open()
    with pytest.raises(StoreLocked):
        bench.open()
    engine.close()
    bench.open()


def test_a_closed_engine_says_so(bench: Bench) -> None:
    engine = bench.open()
    engine.close()
    engine.close()
    with pytest.raises(Closed), engine.read():
        pass
    with pytest.raises(Closed), engine.write():
        pass


def test_a_key_that_cannot_be_stored_is_refused(bench: Bench) -> None:
    engine = bench.open()
    for key in (b"", b"x" * 512):
        with pytest.raises(PenstockError), engine.write() as view:
            view.put("db", key, b"")
    engine.maintain()
    assert engine.grow(for_deletes=False) in (True, False)
    _fill(engine, b"still works")
