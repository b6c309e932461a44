"""The command, as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.cli.formatting import format_value, parse_bytes
from penstock.journal.record import Section, SegmentedRecordHeader
from penstock.store.store import Store


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with penstock.open(tmp_path / "s") as opened:
        yield opened


def test_a_look_at_a_store_that_somebody_has_open(store: Store) -> None:
    store.kv("users", value="utf8").put(b"ada", "1815", durable=True)
    store.queue("events").put(b"hello", durable=True)
    assert "users" in run("tables", store.path).stdout
    assert run("get", store.path, "users", "ada").stdout == "1815\n"
    assert "1815" in run("scan", store.path, "users").stdout
    assert run("put", store.path, "users", "bob", "x").returncode == 0
    assert store.kv("users", value="utf8").get(b"bob") == "x"
    assert run("delete", store.path, "users", "bob").returncode == 0
    assert store.kv("users").get(b"bob") is None
    assert "sequence 2" in run("send", store.path, "events", "0x00ff").stdout
    assert "0x00ff" in run("read", store.path, "events").stdout
    store.queue("events").consumer("c").get()
    assert "2 messages" in run("queue", store.path, "events").stdout
    assert run("drop", store.path, "users", "--yes").returncode == 0
    assert store.tables() == ["events"]
    store.series("metrics").write("cpu", 0.5, {"host": "a"}, time=0, durable=True)
    shown = run("select", store.path, "metrics", 'cpu{host="a"}').stdout
    assert [word for word in ("cpu", "host=a", "1970-01-01", "0.5") if word not in shown] == []


def test_errors_are_one_line(store: Store, tmp_path: Path) -> None:
    store.kv("users")
    for arguments, words in [
        (("get", store.path, "users", "nobody"), "there is no key nobody"),
        (("scan", store.path, "nothing"), "there is no table nothing"),
        (("tables", str(tmp_path / "elsewhere")), "no store"),
        (("get", store.path, "users", "0xzz"), "is not a key"),
    ]:
        found = run(*arguments)
        assert found.returncode == 1
        assert found.stderr.startswith("penstock: ")
        assert words in found.stderr
        assert found.stderr.count("\n") == 1


@pytest.mark.parametrize("value", [b"", b"ada", b"\x00\xff", b"0x12", "ä".encode(), b"a\nb"])
def test_what_is_shown_can_be_given(value: bytes) -> None:
    assert parse_bytes(format_value(value)) == value


def test_what_is_wrong_with_a_store(store: Store) -> None:
    store.kv("users").put(b"ada", b"1815", durable=True)
    well = run("check", store.path)
    assert (well.returncode, well.stdout) == (0, "all is well\n")
    assert run("resume", store.path, "users").returncode == 0
    aside, section = store._aside, Section(SegmentedRecordHeader(store.kv("users")._partitions[0]), b"x")
    aside.add("users", 7, 0, (section,), KeyError("ours"))
    for told in (run("check", store.path), run("resume", store.path, "users")):
        assert told.returncode == 1
        assert "users" in told.stdout
        assert "KeyError" in told.stdout


def test_an_interrupt_at_any_moment_prints_no_traceback(store: Store) -> None:
    """From the first line of Penstock's: what comes before is Python's own start."""
    program = """
import os, signal, sys, threading, time, penstock.cli

def interrupt(after_s=float(sys.argv.pop())):
    time.sleep(after_s)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
penstock.cli.main()
"""
    judged = 0
    for after_s in (0.0, 0.05, 0.2, 0.4):
        command = [sys.executable, "-c", program, "tables", store.path, str(after_s)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if "Traceback" in ended.stderr and "/penstock/" not in ended.stderr:
            continue  # it came before the first line of ours
        judged += 1
        assert "Traceback" not in ended.stderr, ended.stderr
        assert ended.stderr.count("\n") <= 2
    assert judged
