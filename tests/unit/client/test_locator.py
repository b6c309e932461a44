"""A store is reached whatever its path looks like, and no socket is ever outside a private folder."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock.client.connect import connect
from penstock.errors import DiskFailed, Invalid, StoreLocked, WaitExpired
from penstock.protocol import locator

NAMES = {
    "plain": "store",
    "space": "my store",
    "umlaut": "größe-ü",
    "percent": "100%",
    "escape": "a%20b%2Fc",
    "bar": "a|b",
    "question": "what?x=1",
    "fragment": "a#b",
    "colon": "a:b@c",
    "brackets": "[x]{y}<z>",
    "quotes": 'it\'s "so"`',
    "backslash": "a\\b",
    "newline": "a\nb",
    "controls": "a\t\x01\x7fb",
    "delimiters": "!$&()*+,;=^",
    "dots": "..a..",
    "scheme": "unix:abstract",
    "emoji": "🐍",
    "long": "x" * 200,
    "long and odd": "ü ?" * 60,
    "deep": "/".join(["y" * 60] * 4),
}


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short name, in which a plain store has its sockets in its own folder."""
    with tempfile.TemporaryDirectory(prefix="p", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def sockets(folder: Path) -> set[Path]:
    return {each for each in folder.rglob("*") if stat.S_ISSOCK(each.lstat().st_mode)}


def check_store(path: str | Path, beside: Path, *, elsewhere: bool | None = None, timeout_s: float = 30.0) -> None:
    """Own a store, use it through a client, and look where the sockets are."""
    with penstock.open(path) as store, connect(path, timeout_s=timeout_s) as client:
        client.kv("users").put(b"a", b"1", durable=True)
        assert store.kv("users")[b"a"] == b"1"
        run = Path(os.path.realpath(path)) / "run"
        pointer = run / "elsewhere"
        folder = Path(pointer.read_text()) if pointer.exists() else run
        if elsewhere is not None:
            assert (folder != run) == elsewhere
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {each.parent for each in sockets(folder)} == {folder}
        assert len(sockets(folder)) == 2  # the control socket and Arrow Flight
        assert all(run in each.parents for each in sockets(beside))
    assert sockets(beside) == set()
    assert folder == run or not folder.exists()


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_any_path(short: Path, name: str) -> None:
    check_store(short / name, short, elsewhere=name not in ("store", "..a.."))


@pytest.mark.parametrize("name", ["store/", "./store", "a b/../store", "store//", "store/."])
def test_a_path_that_is_not_written_plainly(short: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short)
    (short / "a b").mkdir()
    check_store(name, short, elsewhere=False)
    with penstock.open(short / "store") as store, connect(name) as client:
        assert client.path == store.path


def test_a_link_to_a_store_may_go_away_or_be_long(short: Path) -> None:
    """Owner and client come by different names, one of them odd and longer than a socket's name may be."""
    link = short / ("odd ?" * 40)
    (short / "store").mkdir()
    link.symlink_to(short / "store")
    check_store(link, short, elsewhere=False)
    with penstock.open(link) as store:
        with connect(short / "store") as client:
            client.kv("users").put(b"b", b"2", durable=True)
        with connect(link) as client:
            assert client.kv("users")[b"b"] == b"2"
        with connect(link) as client:
            link.unlink()
            (short / "other").mkdir()
            link.symlink_to(short / "other")  # neither the owner nor its client goes there
            client.kv("users").put(b"b", b"2", durable=True)
        with connect(short / "store") as client:
            assert client.kv("users")[b"b"] == b"2"
        assert list((short / "other").iterdir()) == []
        assert store.kv("users")[b"b"] == b"2"


def test_a_detached_owner_of_an_odd_path(short: Path) -> None:
    path = short / "odd ü%?#| store\n"
    with connect(path, create=True) as client:
        client.kv("users").put(b"a", b"1", durable=True)
        assert client.path == str(path)
    with penstock.open(path) as store:  # it yields
        assert store.kv("users")[b"a"] == b"1"


def test_a_folder_for_temporary_files_that_is_odd_too(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = short / "tmp ?"
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    check_store(short / "a b", short, elsewhere=True)


def test_a_folder_for_sockets_that_this_user_cannot_have(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another user, who shares the store; and none for temporary files, which an odd path needs."""

    def refuse(error: OSError) -> Callable[..., None]:
        def act(*_: object) -> None:
            raise error

        return act

    with monkeypatch.context() as patch:
        patch.setattr(os, "chmod", refuse(PermissionError(errno.EPERM, "Operation not permitted", "run")))
        with pytest.raises(Invalid, match="run cannot be used"):
            penstock.open(short / "store")
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "gettempdir", refuse(FileNotFoundError(errno.ENOENT, "No usable temporary directory")))
        with pytest.raises(DiskFailed, match="No usable temporary directory"):
            penstock.open(short / "a b")
    penstock.open(short / "a b").close()


def test_what_an_odd_path_would_do_to_a_uri(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if sockets were taken for good in an odd folder, this suite would see it."""
    monkeypatch.setattr(locator, "_takes_sockets", lambda _: True)
    for name in ("a#b", "a b"):
        with pytest.raises((AssertionError, penstock.errors.PenstockError, OSError)):
            check_store(short / name, short, timeout_s=2.0)


def test_a_pointer_to_a_folder_that_somebody_else_made(short: Path) -> None:
    """A folder of the old name that others may enter is not believed: they could answer in the owner's place."""
    path = short / "a b"
    penstock.open(path).close()
    foreign = short / "foreign"
    foreign.mkdir(mode=0o755)
    (path / "run" / "elsewhere").write_text(str(foreign))
    listener = locator.listen(str(foreign))
    assert locator.ask_owner(str(path), "serve", 0.2) is None
    foreign.chmod(0o700)
    with pytest.raises(WaitExpired):  # the control: in a private folder it is asked, and says nothing
        locator.ask_owner(str(path), "serve", 0.2)
    foreign.chmod(0o755)
    with penstock.open(path), connect(path) as client:
        assert client.tables() == []
    listener.close()
    assert (foreign / "control").exists()


@pytest.mark.parametrize("path", ["", "a\0b", os.fsdecode(b"\xff\xfe")])
def test_what_is_not_a_path(path: str, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short)
    for opens in (penstock.open, connect):
        with pytest.raises(Invalid, match="not a path"):
            opens(path)
    assert list(short.iterdir()) == []


def test_somebody_elses_store(short: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may enter any folder")
    path = short / "store"
    with penstock.open(path):
        (path / "run").chmod(0)
        with pytest.raises(StoreLocked, match="another user"):
            connect(path)


def test_a_socket_of_an_earlier_version_is_removed(short: Path) -> None:
    path = short / "s"
    penstock.open(path).close()
    (path / "run" / "bell").touch()
    with penstock.open(path):
        assert not (path / "run" / "bell").exists()


SENDING = """
import signal, socket
from penstock.protocol import locator
from penstock.scheduler.wire import Channel, Stop

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
for send in (lambda it: locator.send_line(it, locator.Answer()), lambda it: Channel(it).send(Stop(), 1.0)):
    ours, theirs = socket.socketpair()
    theirs.close()
    try:
        send(ours)
    except BrokenPipeError:
        print("told")
"""


def test_a_client_that_goes_away_does_not_end_a_program_that_takes_sigpipe() -> None:
    """Filters restore that signal, so that a closed pipe ends them."""
    ended = subprocess.run([sys.executable, "-c", SENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.split()) == (0, ["told", "told"])
