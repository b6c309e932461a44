"""`penstock check --campaign`: a disk that keeps what it says passes, and one that does not is told."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import penstock as run

from penstock.cli import disk_campaign
from penstock.cli.disk_campaign import DiskTrialFailed
from penstock.errors import Invalid

Patch = pytest.MonkeyPatch


def test_a_sound_disk_passes_and_nothing_is_left(tmp_path: Path) -> None:
    counts = disk_campaign.run(tmp_path, 0)
    assert counts["kills"] == 1
    assert counts["batches"] > 0
    assert list(tmp_path.iterdir()) == []


def test_what_was_told_and_is_lost_is_noticed(tmp_path: Path, monkeypatch: Patch) -> None:
    kill = disk_campaign._kill_once
    monkeypatch.setattr(disk_campaign, "KILL_S_MAX", 0.1)
    monkeypatch.setattr(disk_campaign, "_kill_once", lambda path: kill(path) + 1_000)
    with pytest.raises(DiskTrialFailed, match="batches were acknowledged"):
        disk_campaign.run(tmp_path, 0)
    assert len(list(tmp_path.iterdir())) == 1  # kept, to be looked at


def test_a_lock_that_does_not_lock_is_noticed(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(disk_campaign, "_second_owner", lambda path: 0)
    with pytest.raises(DiskTrialFailed, match="does not keep a second process out"):
        disk_campaign.run(tmp_path, 0)


def test_a_store_that_does_not_open_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(disk_campaign, "_second_owner", lambda path: disk_campaign.LOCKED_CODE)
    monkeypatch.setattr(disk_campaign, "START_S", 0.0)  # over before the child can write
    with pytest.raises(DiskTrialFailed, match="opened and written to within 0 s"):
        disk_campaign.run(tmp_path, 0)


def test_ctrl_c_reaches_no_child(tmp_path: Path, monkeypatch: Patch) -> None:
    """A terminal sends it to every process of its session: a child would print a traceback of its own."""
    sessions: list[bool] = []
    start = subprocess.Popen.__init__

    def started(self: Any, *arguments: Any, **options: Any) -> None:
        sessions.append(options.get("start_new_session", False))
        start(self, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", started)
    monkeypatch.setattr(disk_campaign, "KILL_S_MAX", 0.1)
    disk_campaign.run(tmp_path, 0)
    assert sessions == [True, True]


def test_a_folder_is_needed(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="give one on the disk to try"):
        disk_campaign.run(tmp_path / "absent", 0)
    assert run("check", "--campaign", "penstock://127.0.0.1:1").code == 2
