"""The contract of a manifest's engine: transactions, snapshots, order, one owner."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import Closed, PenstockError, StoreLocked
from penstock.host.clock import SystemClock
from penstock.host.files import FileSystem
from penstock.manifest.engine import EngineOpener, ManifestEngine
from penstock.manifest.settings import ManifestSettings


class ManifestEngineBench:
    """Opens engines of one kind, as often as a test needs."""

    def __init__(self, opener: EngineOpener, fs: FileSystem, path: str) -> None:
        self.path = path
        self._opener = opener
        self._fs = fs
        self._opened: list[ManifestEngine] = []

    def open(self, path: str | None = None) -> ManifestEngine:
        """Open the engine of a file; None: the default file."""
        engine = self._opener(path or self.path, ManifestSettings(), self._fs, SystemClock())
        self._opened.append(engine)
        return engine

    def close(self) -> None:
        """Close all engines that were opened."""
        for engine in self._opened:
            engine.close()


def _fill(engine: ManifestEngine, *keys: bytes, table: str = "db") -> None:
    with engine.write() as view:
        for key in keys:
            view.put(table, key, b"value of " + key)


class ManifestEngineContract(ABC):
    """Tests of an engine."""

    @abstractmethod
    @pytest.fixture
    def engines(self, tmp_path: Path) -> Iterator[ManifestEngineBench]:
        """Opens the engine under test; closes what was opened at the end."""

    def test_a_commit_is_there_after_reopening(self, engines: ManifestEngineBench) -> None:
        engine = engines.open()
        _fill(engine, b"a", b"b")
        engine.close()
        with engines.open().read() as view:
            assert view.get("db", b"a") == b"value of a"
            assert view.get("db", b"c") is None
            assert view.get("wal_state", b"a") is None

    def test_an_exception_undoes_everything(self, engines: ManifestEngineBench) -> None:
        engine = engines.open()
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

    def test_scans_are_sorted_and_half_open(self, engines: ManifestEngineBench) -> None:
        engine = engines.open()
        _fill(engine, b"\x00\x02", b"\xff", b"\x00\x01", b"a", b"b")
        with engine.read() as view:
            assert [key for key, _ in view.scan("db")] == [b"\x00\x01", b"\x00\x02", b"a", b"b", b"\xff"]
            assert [key for key, _ in view.scan("db", b"\x00\x02", b"b")] == [b"\x00\x02", b"a"]
            assert list(view.scan("db", b"c", b"d")) == []
            assert list(view.scan("metrics")) == []

    def test_a_transaction_sees_its_own_changes(self, engines: ManifestEngineBench) -> None:
        engine = engines.open()
        with engine.write() as view:
            view.put("db", b"a", b"1")
            view.put("db", b"a", b"2")
            assert view.get("db", b"a") == b"2"
            assert view.delete("db", b"a")
            assert not view.delete("db", b"a")
            assert list(view.scan("db")) == []

    def test_a_snapshot_does_not_move(self, engines: ManifestEngineBench) -> None:
        engine = engines.open()
        _fill(engine, b"a")
        begun, written = threading.Event(), threading.Event()
        scans: list[list[bytes]] = []

        def read() -> None:
            with engine.read() as view:
                scans.append([key for key, _ in view.scan("db")])
                begun.set()
                assert written.wait(10)
                scans.append([key for key, _ in view.scan("db")])

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(10)
        _fill(engine, b"b")
        written.set()
        reader.join(10)
        assert scans == [[b"a"], [b"a"]]

    def test_a_read_may_hold_another(self, engines: ManifestEngineBench) -> None:
        engine = engines.open()
        _fill(engine, b"a")
        with engine.read() as outer, engine.read() as inner:
            assert outer.get("db", b"a") == inner.get("db", b"a")

    def test_a_copy_opens_as_a_manifest(self, engines: ManifestEngineBench) -> None:
        engine = engines.open()
        _fill(engine, b"a", table="meta")  # not `db`: a copy is checked, and rows of other tables must be records
        engine.copy(engines.path + ".copy")
        _fill(engine, b"b", table="meta")
        with engines.open(engines.path + ".copy").read() as view:
            assert [key for key, _ in view.scan("meta")] == [b"a"]

    def test_one_owner_at_a_time(self, engines: ManifestEngineBench) -> None:
        engine = engines.open()
        with pytest.raises(StoreLocked):
            engines.open()
        engine.close()
        engines.open()

    def test_a_closed_engine_says_so(self, engines: ManifestEngineBench) -> None:
        engine = engines.open()
        engine.close()
        engine.close()
        with pytest.raises(Closed), engine.read():
            pass
        with pytest.raises(Closed), engine.write():
            pass

    def test_a_key_that_cannot_be_stored_is_refused(self, engines: ManifestEngineBench) -> None:
        engine = engines.open()
        for key in (b"", b"x" * 512):
            with pytest.raises(PenstockError), engine.write() as view:
                view.put("db", key, b"")
        engine.maintain()
        assert engine.grow(for_deletes=False) in (True, False)
        _fill(engine, b"still works")
