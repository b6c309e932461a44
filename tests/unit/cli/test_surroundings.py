"""The program as a shell starts it: any bytes, any locale, streams that are closed, full, endless or no terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import penstock as run
from test_commands import ON_A_STORE, fill

import penstock
from penstock.cli.app import commands_below
from penstock.cli.program import app
from penstock.store.store import Store

PROGRAM = [sys.executable, "-m", "penstock"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with penstock.open(tmp_path_factory.mktemp("surroundings") / "store") as opened:
        fill(opened)
        opened.kv("raw")
        opened.kv("cities", key="utf8", value="utf8").put("Zürich", "漢字", durable=True)
        opened.queue("lines")
        yield opened


def shell(*arguments: str | bytes, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the program; standard streams are pipes unless given."""
    variables = {**os.environ, **more.pop("variables", {})}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run([*PROGRAM, *arguments], env=variables, timeout=120, check=False, **streams)


def test_arguments_are_bytes(store: Store) -> None:
    key, value = b"\xff\xfek", b"v\xff\x01"
    assert shell("put", store.path, "raw", key, value).returncode == 0
    assert store.kv("raw").get(key) == value
    assert shell("get", store.path, "raw", key).stdout == value
    refused = shell("put", store.path, "cities", key, "x")
    assert (refused.returncode, refused.stderr.count(b"\n")) == (2, 1)
    assert b"UTF-8" in refused.stderr


ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("variables", [ASCII, {"PYTHONIOENCODING": "latin-1"}], ids=["ascii", "latin-1"])
def test_output_is_utf8_in_any_locale(store: Store, variables: dict[str, str]) -> None:
    assert shell("scan", store.path, "cities", variables=variables).stdout == "Zürich\t漢字\n".encode()
    result = shell("get", store.path, "cities", "Zürich", variables=variables)  # the argument, too
    assert (result.returncode, result.stdout) == (0, "漢字".encode())


def test_closed_streams_and_a_full_disk(store: Store) -> None:
    """What is printed into nowhere must not land in a file that got the number of a closed stream."""
    command = " ".join(PROGRAM)
    for line, code in [
        (f"{command} scan {store.path} cities >&-", 0),
        (f"{command} queue put {store.path} lines - <&-", 0),
        (f"{command} get {store.path} cities nowhere 2>&-", 3),
        (f"{command} status {store.path} <&- >&- 2>&-", 0),
    ]:
        ended = subprocess.run(["sh", "-c", line], capture_output=True, timeout=120, check=False)
        assert (ended.returncode, ended.stderr) == (code, b""), (line, ended)
    with open("/dev/full", "wb") as full:
        ended = shell("scan", store.path, "cities", stdout=full)
    assert (ended.returncode, ended.stderr) == (4, b"penstock: No space left on device\n")


@pytest.mark.parametrize("arguments", [["scan", "cities"], ["scan", "cities", "--json"], ["get", "cities", "Zürich"]])
def test_a_reader_that_closes_the_pipe_is_no_error(store: Store, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = shell(arguments[0], store.path, *arguments[1:], stdout=writer)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("arguments", [["put", "raw", "endless", "-"], ["queue", "put", "lines", "-"]])
def test_an_input_that_never_ends_is_refused(store: Store, arguments: list[str]) -> None:
    split = 1 if arguments[0] == "put" else 2
    with open("/dev/zero", "rb") as endless:
        ended = shell(*arguments[:split], store.path, *arguments[split:], stdin=endless)
    assert (ended.returncode, ended.stderr.count(b"\n")) == (2, 1), ended
    assert store.kv("raw").get(b"endless") is None
    assert store.queue("lines").statistics().messages == 0


def test_a_terminal_that_cannot_draw_gets_text(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    series = ["series", "query", store.path, "metrics", "cpu", "--last", "60"]
    pages = [["status", store.path], ["top", store.path, "--count", "2", "--every-s", "0.1"], series]
    pages += [["table", "list", store.path]]
    assert all("\x1b" in run(*page, terminal=True).out for page in pages)  # the control
    monkeypatch.setenv("TERM", "dumb")
    assert not any("\x1b" in run(*page, terminal=True).out for page in pages)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any("\x1b" in run(*page, terminal=True).out for page in pages if page[0] != "top")  # which moves lines


def test_ctrl_c_ends_a_campaign_and_its_child_in_one_line(tmp_path: Path) -> None:
    """A terminal sends the signal to every process of the command."""
    process = subprocess.Popen(
        [*PROGRAM, "check", str(tmp_path), "--campaign", "--seconds", "600"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    while not list(tmp_path.glob("*/store/STORE")) and process.poll() is None:  # the child is at work
        os.sched_yield()
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    expected = b"penstock: interrupted: the store of the trial was removed\n"
    assert (process.returncode, out, err) == (130, b"", expected)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_lines_are_sent_says_how_many_are_durable(store: Store) -> None:
    store.queue("sent")
    command = [*PROGRAM, "queue", "put", str(store.path), "sent", "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        process.stdin.write(b"a\nb\nc\n")
        process.stdin.flush()
        while store.queue("sent").statistics().messages < 3 and process.poll() is None:
            os.sched_yield()
        time.sleep(0.2)  # until its sender knows, too, and waits for the next line
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    expected = b"penstock: interrupted: 3 messages are durable, the next ones may be\n"
    assert (process.returncode, out, err) == (130, b"", expected)


def numbers_of_commands() -> list[tuple[tuple[str, ...], str]]:
    """Return every option of every command that takes a number."""
    return [
        (path, parameter.opts[0])
        for path, command in commands_below(typer.main.get_command(app))
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.type_descriptor.annotation in {int, float}
    ]


def test_numbers_out_of_range_are_one_line(store: Store, tmp_path: Path) -> None:
    options = numbers_of_commands()
    assert len(options) > 40, options
    for path, option in options:
        if path not in ON_A_STORE or option in {"--every-s", "--count", "--timeout-s", "--seconds"}:
            continue  # the rest may be as many as one likes, or are refused by their own tests
        words = [str(tmp_path / "b") if word == "BACKUPS" else word for word in ON_A_STORE[path][0]]
        for number in ("1" + "0" * 30, "-" + "1" + "0" * 30, "many"):
            ended = run(*path, store.path, *words, f"{option}={number}")
            assert ended.code in {2, 3}, (path, option, number, ended)
            assert (ended.err.count("\n"), ended.err.startswith("penstock: ")) == (1, True), (path, option, ended)


def test_a_refused_seek_is_one_line_and_names_move_no_cursor(store: Store) -> None:
    store.queue("sought").consumer("\x1b[2Jevil").seek("latest")
    refused = run("queue", "seek", store.path, "sought", "", "earliest")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    moved = run("queue", "seek", store.path, "sought", "new", "earliest")
    assert (moved.code, "new is new" in moved.err, "\x1b" in moved.err) == (0, True, False)
