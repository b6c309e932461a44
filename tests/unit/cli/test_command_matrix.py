"""Every command on a store that is closed, open, served, damaged and empty; a walk of the tree holds it complete.

`test_commands` runs the commands of ON_A_STORE in all five states; here are those that need more than a store, those
that are refused by a store without an archive or keys, and every command on stores that do not open.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import typer
from commands import Ended
from commands import penstock as run
from test_commands import ON_A_STORE, contents, fill, flip

import penstock
from penstock.cli.app import commands_below
from penstock.cli.certificates import make_certificates
from penstock.cli.program import app
from penstock.errors import PenstockError
from penstock.testing.members import free_ports

STATES = ("closed", "open", "served", "damaged", "empty")
# Arguments after STORE, and the exit code by state; damaged: a store that does not open.
REFUSED = dict.fromkeys(("closed", "open", "served", "empty"), 2) | {"damaged": 6}
ABSENT = dict.fromkeys(("closed", "open", "served", "empty"), 3) | {"damaged": 6}
FOLDER_ONLY = {"closed": 0, "open": 0, "served": 2, "damaged": 6, "empty": 0}
CELLS: dict[tuple[str, ...], tuple[list[str], dict[str, int]]] = {
    # First, while nobody has the store open: other commands start an owner, which ends by itself.
    ("serve",): (["SERVE"], {**FOLDER_ONLY, "open": 5}),
    ("salvage",): (["TARGET"], {"closed": 0, "open": 5, "served": 2, "damaged": 0, "empty": 0}),
    ("chunks", "archive"): ([], REFUSED),  # these stores have no archive; test_archive_commands has one
    ("chunks", "verify-archive"): ([], REFUSED),
    ("chunks", "evict"): ([], REFUSED),
    ("chunks", "rehydrate"): ([], REFUSED),
    ("chunks", "collect"): ([], REFUSED),
    ("keys", "rotate"): ([], REFUSED),  # nor keys
    ("jobs", "show"): (["999999"], ABSENT),
    ("jobs", "retry"): (["999999"], ABSENT),
    ("init",): ([], {"closed": 2, "open": 2, "served": 2, "damaged": 6, "empty": 2}),
    ("http",): (["--console"], FOLDER_ONLY),
    ("console",): ([], {**FOLDER_ONLY, "served": 0}),
}
WAITS = {("serve",), ("http",), ("console",)}
# Commands that are not about a store, or make one from something else: where they meet wrong files.
WITHOUT_A_STORE = {
    ("restore",), ("reattach",), ("bench",), ("config", "show"), ("token", "new"), ("certificates",), ("keys", "new"),
    ("cluster", "init"), ("cluster", "run"), ("cluster", "status"), ("cluster", "certs"), ("cluster", "replace"),
}  # fmt: skip


def test_the_table_is_complete() -> None:
    paths = {path for path, _ in commands_below(typer.main.get_command(app))}
    assert paths == set(ON_A_STORE) | set(CELLS) | WITHOUT_A_STORE
    assert not set(CELLS) & (set(ON_A_STORE) | WITHOUT_A_STORE)
    assert all(set(codes) == set(STATES) for _, codes in CELLS.values())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and tokens."""
    folder = tmp_path_factory.mktemp("files")
    make_certificates(str(folder / "keys"), ["127.0.0.1"], 10)
    digest = hashlib.sha256(b"secret").hexdigest()
    (folder / "tokens").write_text(f'[tokens.me]\nsha256 = "{digest}"\nrights = {{ "*" = "admin" }}\n')
    return folder


def filled(folder: Path, *, empty: bool = False) -> None:
    with penstock.open(folder) as store:
        if not empty:
            fill(store)


@contextmanager
def reached(state: str, folder: Path, files: Path) -> Iterator[tuple[str, list[str]]]:
    """A store in a state: its address, and options for it."""
    filled(folder, empty=state == "empty")
    if state not in {"open", "served"}:
        yield str(folder), []
        return
    with penstock.open(folder) as store:
        if state == "open":
            yield str(folder), []
            return
        keys = {"certificate": files / "keys/server.pem", "key": files / "keys/server.key"}
        port = penstock.serve_tcp(store, "127.0.0.1", 0, tokens=files / "tokens", **keys)
        yield f"penstock://127.0.0.1:{port}", ["--token", "secret", "--authority", str(files / "keys/authority.pem")]


def ended_by_a_signal(port: int, *command: str) -> Ended:
    """Run a command that serves until it is told to end, and tell it once its port answers."""
    over = Event()

    def end() -> None:
        while not over.wait(0.02):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = Thread(target=end)
    thread.start()
    try:
        return run(*command, "--port", str(port))
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("state", [one for one in STATES if one != "damaged"])  # that is the next test
def test_commands_that_need_more_than_a_store(state: str, tmp_path: Path, files: Path) -> None:
    serve = ["--certificate", str(files / "keys/server.pem"), "--key", str(files / "keys/server.key")]
    serve += ["--tokens", str(files / "tokens")]
    with reached(state, tmp_path / "store", files) as (address, options):
        for path, (arguments, codes) in CELLS.items():
            words = [str(tmp_path / "saved") if word == "TARGET" else word for word in arguments]
            words = serve if words == ["SERVE"] else words
            more = [] if path in {("serve",), ("http",), ("salvage",)} else options
            command = (*path, address, *words, *more)
            (port,) = free_ports(1)
            ended = ended_by_a_signal(port, *command) if path in WAITS else run(*command)
            assert ended.code == codes[state], (command, ended)
            if ended.code:
                assert ended.err.startswith("penstock: "), (command, ended)
                assert (ended.err.count("\n"), ended.data) == (1, b""), (command, ended)


def broken(folder: Path, how: str) -> int:
    """Damage a store so that it does not open; return the exit code that says so."""
    journal = next((folder / "journal").iterdir())
    manifest = folder / "manifest"
    if how == "identity":
        flip(folder / "STORE", (folder / "STORE").stat().st_size - 1)
    elif how == "no identity":
        (folder / "STORE").unlink()
    elif how == "manifest":
        manifest.write_bytes(bytes(manifest.stat().st_size))
    elif how == "half a manifest":
        manifest.write_bytes(manifest.read_bytes()[:5_000])
    elif how == "no manifest":
        manifest.unlink()
    elif how == "journal":
        flip(journal, journal.stat().st_size // 2)
    elif how == "no journal":
        journal.unlink()
    elif how == "a file in the place of a folder":
        shutil.rmtree(folder / "journal")
        (folder / "journal").write_text("x")
        return 2
    return 6


@pytest.mark.parametrize("how", [
    "identity", "no identity", "journal", "a file in the place of a folder",
    *(pytest.param(one, marks=pytest.mark.campaign) for one in ("manifest", "half a manifest", "no manifest")),
    pytest.param("no journal", marks=pytest.mark.campaign),
])  # fmt: skip
def test_every_command_on_a_store_that_does_not_open(
    how: str, tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, the right code, nothing printed, and not a byte of the store is changed."""
    folder = tmp_path / "store"
    filled(folder)
    code = broken(folder, how)
    connect = penstock.connect

    def here(path: Any, **options: Any) -> Any:
        """What the owner would say that `connect` starts: sixty processes would take minutes."""
        if not os.path.exists(f"{path}/STORE"):
            return connect(path, **options)
        with penstock.open(path):
            raise AssertionError("it opens")

    monkeypatch.setattr(penstock, "connect", here)
    before = contents(folder)
    serve = ["--certificate", str(files / "keys/server.pem"), "--key", str(files / "keys/server.key")]
    for path, (arguments, _) in (ON_A_STORE | CELLS).items():
        if path == ("salvage",):
            continue
        words = [str(tmp_path / "new") if word == "BACKUPS" else word for word in arguments]
        if path == ("serve",):
            words = [*serve, "--tokens", str(files / "tokens")]
        ended = run(*path, str(folder), *words)
        assert (ended.code, ended.err.count("\n"), ended.data) == (code, 1, b""), (path, ended)
        assert ended.err.startswith("penstock: "), (path, ended)
        assert contents(folder) == before, path
    assert not (tmp_path / "new").exists()
    saved = run("salvage", str(folder), str(tmp_path / "saved"))
    assert saved.code in ({2} if code == 2 else {0, 1}), saved  # 1: some of it is lost, and it says what
    assert bool(saved.data) == (code == 6)
    assert contents(folder) == before


def test_commands_that_get_a_wrong_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder where a file is wanted, a file where a folder is, a store where there must be none."""
    monkeypatch.chdir(tmp_path)
    store, file = tmp_path / "store", tmp_path / "file"
    filled(store)
    file.write_text("x")
    before = contents(store)
    with penstock.open(tmp_path / "backed") as opened:
        fill(opened)
        assert run("backup", opened.path, str(tmp_path / "backups")).code == 0
    flip(tmp_path / "backups" / "BACKUPS", 3)
    member = ["--member", "a=127.0.0.1:7401"]
    wrong: dict[tuple[str, ...], list[list[str]]] = {
        ("restore",): [
            [str(file), str(tmp_path / "r")], [str(store), str(tmp_path / "r")],
            [str(tmp_path / "backups"), str(tmp_path / "r")], [str(tmp_path / "backups"), str(store)],
        ],
        ("reattach",): [[f"file://{store}", str(tmp_path / "r")], ["nonsense", str(tmp_path / "r")]],
        ("bench",): [[str(file)], [str(tmp_path / "absent")]],
        ("token", "new"): [['a"b', "--right", "*=read"], ["a", "--right", "x"]],
        ("certificates",): [[str(file), "--host", "x"], [str(file / "below"), "--host", "x"]],
        ("keys", "new"): [[str(store)], [str(file / "below")], [str(file)]],
        ("cluster", "init"): [[str(store), *member], [str(file), *member], [str(tmp_path / "c"), "--member", "a"]],
        ("cluster", "run"): [[str(store), "a", "--data", str(tmp_path / "d")], [str(file), "a", "--data", "d"]],
        ("cluster", "status"): [[str(store), "--token", "x"], [str(file), "--token", "x"]],
        ("cluster", "certs"): [[str(store)], [str(file)]],
        ("cluster", "replace"): [[str(store), "a"], [str(file), "a"]],
        ("config", "show"): [["--nonsense"]],
    }  # fmt: skip
    assert set(wrong) == WITHOUT_A_STORE
    for path, attempts in wrong.items():
        for arguments in attempts:
            ended = run(*path, *arguments)
            assert ended.code in {2, 3, 6}, (path, ended)
            assert (ended.err.count("\n"), ended.data) == (1, b""), (path, arguments, ended)
            assert ended.err.startswith("penstock: "), (path, ended)
            assert contents(store) == before, (path, arguments)
    assert file.read_text() == "x"
    for name in ("r", "c", "d"):
        assert not (tmp_path / name).exists(), name
    for path in (("status",), ("put",)):  # a file in the place of a store
        ended = run(*path, str(file), *ON_A_STORE[path][0])
        assert (ended.code, "is a file" in ended.err, ended.err.count("\n")) == (2, True, 1), ended


def test_what_a_damaged_store_says_is_what_its_owner_says(tmp_path: Path) -> None:
    """The control of `here` above: a real owner ends with the same error."""
    filled(tmp_path / "store")
    assert broken(tmp_path / "store", "journal") == 6
    with pytest.raises(PenstockError) as opened:
        penstock.open(tmp_path / "store")
    ended = run("keys", "rotate", str(tmp_path / "store"))
    assert (ended.code, ended.err) == (6, f"penstock: {opened.value}\n")
