"""Owners that no program tends recover by themselves after a failed sync, or end for the next one to recover."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from owner_processes import faulty_owner, outcome, owners

import penstock
from penstock.client.connect import connect
from penstock.errors import OutcomeUnknown, Poisoned
from penstock.host.os_files import OsFile
from penstock.server.healing import TRIES_MAX, Healer
from penstock.testing.clock import FakeClock


@pytest.fixture
def path(path: Path) -> Path:
    """A store."""
    with penstock.open(path) as store:
        store.kv("counts", value="int64")
    return path


def merge(client: Any) -> Any:
    return outcome(lambda: client.kv("counts", value="int64").merge(b"n", 1, operator="add_i64", durable=True))


def test_a_detached_owner_recovers(path: Path, tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    with faulty_owner(path, fails) as owner, connect(path) as client, connect(path) as other:
        for number in range(3):
            fails.write_text("once")
            assert isinstance(merge(client), int)
            assert isinstance(merge(other), int)
            assert client.kv("counts", value="int64")[b"n"] == 2 * number + 2
            assert not fails.exists()
        assert owner.poll() is None
        assert "recovered, and accepts" in (path / "run" / "owner.log").read_text()


def test_an_owner_that_cannot_recover_ends_and_the_next_one_does(path: Path, tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    with faulty_owner(path, fails) as owner, connect(path) as client:
        assert isinstance(merge(client), int)
        fails.write_text("always")
        assert isinstance(merge(client), int)  # by the next one, which has no such disk
        assert owner.wait(30.0) == 1
        assert client.kv("counts", value="int64")[b"n"] == 2
        assert f"failed {TRIES_MAX} times" in (path / "run" / "owner.log").read_text()
    assert owner.pid not in owners(path)


def test_without_healing_this_would_be_seen(path: Path, tmp_path: Path) -> None:
    """The control: nobody recovers, and nobody writes."""
    fails = tmp_path / "fails"
    program = """
        from penstock.server import healing
        from penstock.server.__main__ import main
        healing.Healer.heal = lambda _: True
        main([sys.argv[1]])
    """
    with faulty_owner(path, fails, program=program), connect(path, timeout_s=2.0) as client:
        fails.write_text("once")
        assert type(merge(client)) is OutcomeUnknown
        assert type(merge(client)) is OutcomeUnknown
        with pytest.raises(OutcomeUnknown):
            client.close()


def test_penstock_serve_recovers(path: Path, tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    program = """
        import pathlib, signal, threading
        from penstock.cli import serving
        from penstock.server import tcp
        tcp.serve_tcp = lambda *_, **__: 1  # its socket in the folder is enough
        serving.serve(pathlib.Path(sys.argv[1]), None, None, None)
    """
    with faulty_owner(path, fails, program=program) as owner, connect(path) as client:
        fails.write_text("once")
        assert isinstance(merge(client), int)
        assert client.kv("counts", value="int64")[b"n"] == 1
        assert owner.poll() is None
        owner.send_signal(signal.SIGTERM)
        assert owner.wait(30.0) == 0


def test_tries_are_few_and_apart(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, fails = FakeClock(), True
    whole = OsFile.fdatasync

    def fdatasync(file: OsFile) -> None:
        if fails and "/journal/" in file.path:
            raise OSError("the disk failed")
        whole(file)

    with penstock.open(path) as store:
        healer = Healer(store, clock)
        monkeypatch.setattr(OsFile, "fdatasync", fdatasync)
        with pytest.raises(OutcomeUnknown):
            store.kv("counts", value="int64").merge(b"n", 1, operator="add_i64", durable=True)
        recover, calls = store.recover, list[float]()

        def counted() -> None:
            calls.append(clock.monotonic_s())
            recover()

        monkeypatch.setattr(store, "recover", counted)
        while healer.heal():
            clock.advance(0.05)
        waits = [later - earlier for earlier, later in pairwise(calls)]
        assert len(calls) == TRIES_MAX
        assert waits == sorted(waits)
        assert waits[-1] > 5
        fails = False
        clock.advance(60.0)
        assert healer.heal()
        assert store.port.failure is None
        assert store.kv("counts", value="int64")[b"n"] == 1
        assert healer.heal()


def test_a_program_that_opened_a_store_recovers_it_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, fails = OsFile.fdatasync, [True]

    def fdatasync(file: OsFile) -> None:
        if fails and "/journal/" in file.path:
            fails.pop()
            raise OSError("the disk failed")
        whole(file)

    with penstock.open(path) as store, connect(path, timeout_s=3.0) as client:
        monkeypatch.setattr(OsFile, "fdatasync", fdatasync)
        assert type(merge(client)) is OutcomeUnknown
        assert store.port.failure is not None
        with pytest.raises(Poisoned):
            store.kv("counts", value="int64").merge(b"n", 1, operator="add_i64")
        store.recover()
        client.flush()
        assert store.kv("counts", value="int64")[b"n"] == 1
