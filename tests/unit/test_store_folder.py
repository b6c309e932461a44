"""A folder that is moved, deleted or replaced under an open store: its owner says so, and touches nothing there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from owner_processes import owners, until

import penstock
from penstock.client.connect import connect
from penstock.errors import Closed, Invalid, OutcomeUnknown, PenstockError
from penstock.host.os_files import OsFileSystem
from penstock.store.flusher import CHECK_US


def fill(folder: Path, value: bytes) -> None:
    with penstock.open(folder) as store:
        store.kv("users").put(b"ada", value)


def move(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def delete(folder: Path) -> None:
    move(folder)  # at once: the owner is at work in it
    shutil.rmtree(folder.with_name("elsewhere"), ignore_errors=True)


def replace_by_another(folder: Path) -> None:
    delete(folder)
    fill(folder, b"another's")


def replace_by_a_copy(folder: Path) -> None:
    """A copy has the same identity: only the lock tells it from the one that is open."""
    move(folder)
    shutil.copytree(folder.with_name("copy"), folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


REPLACED = [delete, move, replace_by_another, replace_by_a_copy]


@pytest.mark.parametrize("change", REPLACED)
def test_an_owner_writes_only_in_the_folder_that_it_opened(path: Path, change: Callable[[Path], None]) -> None:
    fill(path, b"1815")
    shutil.copytree(path, path.with_name("copy"))
    store = penstock.open(path)
    users = store.kv("users")
    users.put(b"ada", b"1816", durable=True)
    change(path)
    before = contents(path)
    time.sleep(2 * CHECK_US / 1_000_000)  # its owner checks no more often
    message = f"{path} was moved, deleted or replaced while it was open.*: close this store and open the path again$"
    with pytest.raises(OutcomeUnknown, match=f"may be durable or not because {message}"):
        users.put(b"ada", b"1817", durable=True)  # it would be synced to a file that nobody finds
    for refused in (lambda: users.put(b"ada", b"1818"), lambda: users.put(b"ada", b"", if_absent=True), store.recover):
        with pytest.raises(Closed, match=f"^{message}"):
            refused()
    for act in (store.checkpoint, lambda: store.compact("users"), store.close):
        with suppress(PenstockError):
            act()
    assert contents(path) == before
    assert path.exists() == bool(before)


def test_a_folder_that_is_gone_is_one_line(path: Path) -> None:
    """For the program that opened it, whose tasks all fail; and for its clients, who need not wait."""
    program = """
        store = penstock.open(sys.argv[1])
        for number in range(3):
            store.kv("users", shards=4).put_many({b"%d" % n: b"x" for n in range(1_000)}, durable=True)
        client = penstock.connect(sys.argv[1], timeout_s=300)
        users = client.kv("users")
        users.put(b"k", b"v", durable=True)
        os.rename(sys.argv[1], sys.argv[1] + "-moved")
        time.sleep(3)
        for act in (lambda: users.put(b"k", b"v", durable=True), lambda: users.put(b"k", b"v"), store.close):
            try:
                act()
            except penstock.errors.PenstockError as error:
                print(type(error).__name__, error, flush=True)
        os._exit(0)
    """
    code = "import os, sys, time, penstock\n" + textwrap.dedent(program)
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert ended.stderr.startswith(f"{path} was moved, deleted or replaced while it was open")
    lines = ended.stdout.splitlines()
    assert len(lines) == 3, ended.stdout
    assert all("was moved, deleted or replaced" in line and "recover()" not in line for line in lines), ended.stdout


def test_the_sockets_of_the_next_owner_stay(path: Path) -> None:
    fill(path, b"1815")
    shutil.copytree(path, path.with_name("copy"))
    first = penstock.open(path)
    replace_by_a_copy(path)
    with penstock.open(path) as second:
        with pytest.raises(Closed, match="was moved, deleted or replaced"):
            first.close()
        with connect(path, timeout_s=10.0) as client:
            client.kv("users").put(b"ada", b"1816", durable=True)
        assert second.kv("users")[b"ada"] == b"1816"


@pytest.mark.parametrize("change", REPLACED)
def test_a_started_owner_ends(path: Path, change: Callable[[Path], None]) -> None:
    fill(path, b"1815")
    shutil.copytree(path, path.with_name("copy"))
    with connect(path) as client, client.snapshot() as snapshot:  # which keeps an owner from ending because it is idle
        assert snapshot.kv("users")[b"ada"] == b"1815"
        (pid,) = owners(path)
        change(path)
        until(lambda: pid not in owners(path))


def test_a_lock_knows_its_file(tmp_path: Path) -> None:
    name = str(tmp_path / "LOCK")
    lock = OsFileSystem().lock(name)
    lock.check()
    os.unlink(name)
    with pytest.raises(Closed, match=f"{tmp_path} was moved, deleted or replaced"):
        lock.check()
    other = OsFileSystem().lock(name)
    other.check()
    with pytest.raises(Closed):
        lock.check()
    other.release()
    lock.release()


CALLS: list[Callable[[penstock.Store], object]] = [
    lambda _: penstock.open("data"),
    lambda _: penstock.open("data", read_only=True),
    lambda _: penstock.connect("data", create=True),
    lambda _: penstock.restore("backups", "data"),
    lambda _: penstock.check_backup("backups"),
    lambda _: penstock.salvage("data", "rescued"),
    lambda _: penstock.restore_manifest("data"),
    lambda _: penstock.reattach("file:///nowhere", "data"),
    lambda store: store.backup("backups"),
]


def test_a_relative_path_in_a_working_folder_that_was_deleted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    working = path.parent / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    working.rmdir()
    with penstock.open(path) as store:  # an absolute one works
        for call in CALLS:
            with pytest.raises(Invalid, match=r"^'\w+' is relative to a working folder that was deleted"):
                call(store)
