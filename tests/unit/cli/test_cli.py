"""The command, as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli import INTERRUPTED, disk_campaign, main
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


def test_the_program_is_a_process(store: Store) -> None:
    store.kv("users", value="utf8").put(b"ada", "1815", durable=True)
    assert run("get", store.path, "users", "ada").stdout == "1815"
    failed = run("get", store.path, "users", "nobody")
    assert (failed.returncode, failed.stdout, failed.stderr) == (3, "", "penstock: there is no key nobody in users\n")
    with_trace = run("--debug", "get", store.path, "users", "nobody")
    assert "Traceback" in with_trace.stderr


def test_a_reader_that_leaves_early_is_no_error(store: Store) -> None:
    store.kv("many").put_many({b"%06d" % number: b"v" * 100 for number in range(20_000)}, durable=True)
    command = f"{sys.executable} -m penstock scan {store.path} many | head -1"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout.count("\n"), ended.stderr) == (1, "")


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
    for ended in (run("check", store.path), run("resume", store.path, "users")):
        assert ended.returncode == 1
        assert "users" in ended.stdout
        assert "KeyError" in ended.stdout


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
        command = [sys.executable, "-c", program, "status", store.path, str(after_s)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if "Traceback" in ended.stderr and "/penstock/" not in ended.stderr:
            continue  # it came before the first line of ours
        judged += 1
        assert "Traceback" not in ended.stderr, ended.stderr
        assert ended.stderr.count("\n") <= 2
    assert judged


# Each long command, the call under it that is interrupted, and the one line that is then printed.
LONG = [
    (["check", "{store}"], "RemoteStore.check", "nothing was changed"),
    (["check", "{backups}"], "penstock.check_backup", "nothing was changed"),
    (["check", "--campaign", "{new}"], "disk_campaign._try_calls", "the store of the trial was removed"),
    (["backup", "{store}", "{backups}"], "RemoteStore.backup", "holds every earlier backup"),
    (["restore", "{backups}", "{new}/store"], "penstock.restore", "run the same command again"),
    (["salvage", "{store}", "{new}/store"], "penstock.salvage", "is incomplete: remove it, then begin again"),
    (["reattach", "file://{new}", "{new}/store"], "penstock.reattach", "run the same command again"),
    (["bench", "{new}"], "Store.flush", "the temporary store was removed"),
    (["table", "compact", "{store}", "users"], "RemoteStore.compact", "the process that owns the store may still"),
    (["jobs", "run", "{store}", "users"], "RemoteStore.run_jobs", "the process that owns the store may still"),
    (["keep-snapshot", "{store}", "users"], "RemoteStore.keep_snapshot", "the process that owns the store may still"),
    (["repair", "{store}", "users"], "RemoteStore.repair", "the process that owns the store may still finish it"),
    (["chunks", "archive", "{store}"], "RemoteStore.archive", "the process that owns the store may still finish it"),
    (["chunks", "evict", "{store}"], "RemoteStore.evict", "the process that owns the store may still finish it"),
    (["chunks", "rehydrate", "{store}"], "RemoteStore.rehydrate", "the process that owns the store may still finish"),
    (["chunks", "verify", "{store}"], "RemoteStore.check", "nothing was changed"),
    (["chunks", "verify-archive", "{store}"], "RemoteStore.verify_archive", "nothing was changed"),
    (["chunks", "collect", "{store}"], "RemoteStore.collect_archive", "the process that owns the store may still"),
]


@pytest.mark.parametrize(("arguments", "under", "words"), LONG, ids=[" ".join(each[0][:2]) for each in LONG])
def test_ctrl_c_in_a_long_command_says_in_one_line_what_it_left(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    under: str,
    words: str,
) -> None:
    store.kv("users").put(b"ada", b"1815", durable=True)
    backups, new = tmp_path / "backups", tmp_path / "new"
    store.backup(backups)
    new.mkdir()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    home, name = under.rsplit(".", 1)
    owners = {"RemoteStore": penstock.RemoteStore, "Store": Store, "penstock": penstock, "disk_campaign": disk_campaign}
    monkeypatch.setattr(owners[home], name, interrupt)
    argv = [each.format(store=store.path, backups=backups, new=new) for each in arguments]
    monkeypatch.setattr(sys, "argv", ["penstock", *argv])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    assert ended.value.code == INTERRUPTED
    assert output.err.startswith("penstock: interrupted: ")
    assert output.err.count("\n") == 1
    assert words in output.err
    assert list(new.iterdir()) == []  # nothing is left but what the line names
    assert store.check().ok


def test_ctrl_c_after_a_restore_was_complete_says_so(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.backup(tmp_path / "backups")
    restore = penstock.restore

    def interrupted_at_its_end(*arguments: Any, **options: Any) -> None:
        restore(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(penstock, "restore", interrupted_at_its_end)
    monkeypatch.setattr(sys, "argv", ["penstock", "restore", str(tmp_path / "backups"), str(tmp_path / "new")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == INTERRUPTED
    assert capsys.readouterr().err == f"penstock: interrupted: {tmp_path / 'new'} was made, and is complete\n"
    with penstock.open(tmp_path / "new") as restored:
        assert restored.check().ok
