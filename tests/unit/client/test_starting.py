"""Owners that do not come up, or come up late: nobody waits longer than they said, and nothing is damaged."""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path

import pytest
from owner_processes import hurry, outcome, output_of, owners, script, state_of, succeeds, until

import penstock
from penstock.archive.master_keys import format_key
from penstock.client.connect import connect
from penstock.errors import PenstockError, StoreLocked, WaitExpired
from penstock.host.os_files import OsFileSystem


@pytest.fixture
def path(path: Path) -> Path:
    """A store."""
    with penstock.open(path) as store:
        store.kv("users").put(b"a", b"1", durable=True)
    return path


def interpret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """Let owners be started by a shell that does something first."""
    shell = tmp_path / "python"
    shell.write_text(f'#!/bin/sh\n{first}\nexec {sys.executable} "$@"\n')
    shell.chmod(shell.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(shell))


def is_free(path: Path) -> bool:
    """Whether nobody keeps others from opening."""
    try:
        OsFileSystem().lock(f"{path}/OPENING").release()
    except StoreLocked:
        return False
    return True


def test_connect_gives_up_and_leaves_the_way_free(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(tmp_path, monkeypatch, "kill -STOP $$")
    error = outcome(lambda: connect(path, timeout_s=1.0))
    assert isinstance(error, WaitExpired)
    assert "process" in str(error)
    assert is_free(path)
    with penstock.open(path, timeout_s=1.0) as store:  # the stopped one has no lock yet
        assert store.kv("users")[b"a"] == b"1"
        for pid in owners(path):
            os.kill(pid, signal.SIGCONT)
        until(lambda: not owners(path))  # it found the store locked, and ended
        assert store.kv("users")[b"a"] == b"1"


def test_an_owner_that_is_stopped_with_the_lock_blocks_nobody_for_longer_than_they_said(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = "s.Service._open_control_socket = lambda *_: os.kill(os.getpid(), 19)"
    code = f"import os, sys, penstock.server.service as s; {stop}"
    program = tmp_path / "stops.py"
    program.write_text(f"{code}\nfrom penstock.server.__main__ import main\nmain(sys.argv[3:])\n")
    interpret(tmp_path, monkeypatch, f'exec {sys.executable} {program} "$@"')
    assert isinstance(outcome(lambda: connect(path, timeout_s=1.0)), PenstockError)
    assert is_free(path)
    monkeypatch.undo()
    until(lambda: "T" in map(state_of, owners(path)))
    assert isinstance(outcome(lambda: connect(path, timeout_s=1.0)), WaitExpired | StoreLocked)
    assert isinstance(outcome(lambda: penstock.open(path, timeout_s=0.5)), StoreLocked)
    stopped = [pid for pid in owners(path) if state_of(pid) == "T"]
    assert len(stopped) == 1
    os.kill(stopped[0], signal.SIGKILL)
    with connect(path) as client:
        assert client.kv("users")[b"a"] == b"1"


def test_an_owner_that_comes_late_serves_those_who_come_later(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when whoever started it is gone: it has nobody to report to."""
    interpret(tmp_path, monkeypatch, "sleep 2")
    assert isinstance(outcome(lambda: connect(path, timeout_s=0.5)), WaitExpired)
    first = owners(path)
    monkeypatch.undo()
    until(lambda: (path / "run" / "control").exists() or list((path / "run").glob("elsewhere")))
    with connect(path) as client:
        assert client.kv("users")[b"a"] == b"1"
    assert len(owners(path)) == 1
    assert not first or owners(path) == first


def test_a_client_that_goes_on_asking_starts_one_owner(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(path) as client:
        users = client.kv("users")
        for pid in owners(path):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not owners(path))
        interpret(tmp_path, monkeypatch, "kill -STOP $$")
        hurry(client, 0.5)
        for _ in range(4):
            assert isinstance(outcome(lambda: users.get(b"a")), WaitExpired)
        waiting = stopped_children()
        assert len(waiting) == 1
        os.kill(waiting[0], signal.SIGCONT)
        until(lambda: succeeds(lambda: users.get(b"a")))
        assert owners(path) == waiting


def stopped_children() -> list[int]:
    """Stopped processes that this one started."""
    process_ids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and state_of(int(entry.name)) == "T":
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                process_ids.append(int(entry.name))
    return process_ids


def test_while_somebody_holds_opening_everybody_gives_up_in_time(path: Path) -> None:
    opening = OsFileSystem().lock(f"{path}/OPENING")
    assert isinstance(outcome(lambda: connect(path, timeout_s=0.3)), StoreLocked)
    assert isinstance(outcome(lambda: penstock.open(path, timeout_s=0.3)), StoreLocked)
    opening.release()
    penstock.open(path).close()


def test_a_stopped_owner_is_told_from_none(path: Path) -> None:
    with connect(path):
        os.kill(owners(path)[0], signal.SIGSTOP)
        error = outcome(lambda: connect(path, timeout_s=0.5))
        assert isinstance(error, WaitExpired)
        assert "stopped" in str(error)
        assert isinstance(outcome(lambda: penstock.open(path, timeout_s=0.5)), StoreLocked)
        assert len(owners(path)) == 1  # no other was started
        os.kill(owners(path)[0], signal.SIGCONT)


def test_a_client_that_is_killed_while_its_owner_starts(path: Path) -> None:
    code = """
        import os, threading
        from penstock.client import starting
        start = starting.StartingOwner.__init__
        def begin(*arguments):
            start(*arguments)
            print("started", flush=True)
            os.kill(os.getpid(), 9)
        starting.StartingOwner.__init__ = begin
        penstock.connect(sys.argv[1])
    """
    assert output_of(script(code, path)) == "started"
    with connect(path) as client:
        assert client.kv("users")[b"a"] == b"1"
    until(lambda: len(owners(path)) == 1)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "3", None])
def test_a_timeout_that_is_none(path: Path, timeout_s: float) -> None:
    with pytest.raises(penstock.errors.Invalid, match="timeout_s"):
        connect(path, timeout_s=timeout_s)


def test_a_key_file_is_found_from_the_folder_of_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "master.keys").write_text(format_key(1, b"k" * 32) + "\n")
    (tmp_path / "master.keys").chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_KEYS", "file:master.keys")
    with connect(tmp_path / "sealed", create=True) as store:
        store.kv("secrets", encrypted=True).put(b"a", b"1", durable=True)
        assert store.kv("secrets")[b"a"] == b"1"
