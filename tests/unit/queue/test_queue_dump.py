"""The dump of a queue's folder: everything is said, damage is listed, nothing is changed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.host.clock import SystemClock
from penstock.host.os_files import OsFileSystem
from penstock.queue import Messages, PersistentQueue, QueueSettings
from penstock.queue.dump import main


def make(folder: Path) -> None:
    settings = QueueSettings(file_bytes=1000, allocate_bytes=512, index_bytes=256)
    queue = PersistentQueue.open(
        OsFileSystem(), str(folder), random=random.Random(1), clock=SystemClock(), settings=settings
    )
    for number in range(4):
        queue.append(Messages.of([b"x" * 300]), lsn=10 * number + 1, time_us=1_769_083_200_000_000 + number)
    queue.sync()  # and no close: the tail stands behind the write position


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_sound_queue(tmp_path: Path) -> None:
    make(tmp_path / "q")
    before = content(tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "penstock.queue.dump", str(tmp_path / "q")], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == [
        "manifest version 1: next sequence 3, 1 sealed",
        "active file 2026/01/22/0000000002.data: number 2, write position 88, 0 messages",
        "2026/01/22/0000000001.data: sealed, messages 1 to 2, 936 bytes",
        "          88  1 to 1, LSN 1, 2026-01-22T12:00:00.000000Z, 300 bytes",
        "         456  2 to 2, LSN 11, 2026-01-22T12:00:00.000001Z, 300 bytes",
        "2026/01/22/0000000002.data: active, no message, 88 bytes",
        "          88  3 to 3, LSN 21, 2026-01-22T12:00:00.000002Z, 300 bytes (since the manifest)",
        "         456  4 to 4, LSN 31, 2026-01-22T12:00:00.000003Z, 300 bytes (since the manifest)",
    ]
    assert content(tmp_path) == before


def test_damage_is_listed_and_passed_over_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path)
    path = tmp_path / "2026/01/22/0000000001.data"
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    before = content(tmp_path)
    assert main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "DAMAGED" in line] == [
        "  DAMAGED         88  a record's checksum does not match",
    ]
    assert not any("LSN 11" in line for line in lines)
    assert any("LSN 21" in line for line in lines)
    assert main([str(tmp_path), "--past-damage"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("LSN 11" in line for line in lines)
    assert sum("DAMAGED" in line for line in lines) == 1
    path.unlink()
    assert main([str(tmp_path)]) == 1
    assert "the file is missing" in capsys.readouterr().out
    assert {name: data for name, data in before.items() if name != str(path)} == content(tmp_path)


def test_no_queue_and_no_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert "no queue" in capsys.readouterr().out
    make(tmp_path / "q")
    (tmp_path / "q" / "manifest.current").unlink()
    assert main([str(tmp_path / "q")]) == 1
    assert "no manifest" in capsys.readouterr().err
