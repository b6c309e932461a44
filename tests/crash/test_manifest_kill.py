"""kill -9 in a loop while 8 threads commit: what was told is there, and every rule holds."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from penstock.manifest.invariants import check_all
from penstock.manifest.jobs import JobQueue
from penstock.manifest.keys import ChunkKey, WalStateKey
from penstock.manifest.manifest import Manifest
from penstock.manifest.records import Completed, InFlight
from penstock.manifest.recovery import recover

CHILD = Path(__file__).parent / "manifest_kill_child.py"
THREADS, RETAINED = 8, 10


def kill_rounds(path: str, rounds: int, seed: int, *child_arguments: str) -> int:
    """Start the child on one file again and again, kill it, check; how many commits were acknowledged in all."""
    chance, acknowledged = random.Random(seed), 0
    for _ in range(rounds):
        lines = _run_and_kill(path, chance.randrange(1, 300), *child_arguments)
        acknowledged += sum(line[0] == "commit" for line in lines)
        _check(path, lines)
    return acknowledged


def _run_and_kill(path: str, commits: int, *child_arguments: str) -> list[list[str]]:
    child = subprocess.Popen([sys.executable, str(CHILD), path, *child_arguments], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    watchdog = threading.Timer(60.0, child.kill)
    watchdog.start()
    lines: list[str] = []
    for line in child.stdout:
        lines.append(line)
        if len(lines) == commits:
            child.send_signal(signal.SIGKILL)
    watchdog.cancel()
    child.stdout.close()
    assert child.wait(30) == -signal.SIGKILL
    assert len(lines) >= commits
    return [line.split() for line in lines if line.endswith("\n")]


def _check(path: str, lines: list[list[str]]) -> None:
    with Manifest.open(path) as manifest:
        assert manifest.read(lambda view: list(check_all(view))) == []
        for word, *numbers in lines:
            if word == "commit":
                worker, number, generation = map(int, numbers)
                state = manifest.get_wal_state(WalStateKey(worker, 1))
                assert state is not None
                assert state.stored_lsn >= number
                assert manifest.generation() >= generation
            elif word == "completed":
                job = manifest.get_job(int(numbers[0]))
                assert job is not None
                assert isinstance(job.state, Completed)
            elif word == "enqueued":
                assert manifest.get_job(int(numbers[0])) is not None
        for worker in range(1, THREADS + 1):  # a commit is there whole: the chunks agree with the counter
            state = manifest.get_wal_state(WalStateKey(worker, 1))
            last = 0 if state is None else state.stored_lsn
            expected = [ChunkKey(worker, number) for number in range(max(1, last - RETAINED + 1), last + 1)]
            assert [key for key, _ in manifest.scan_chunks(worker)] == expected
        jobs = JobQueue(manifest, random=random.Random(1))
        in_flight = [
            job_id
            for job_id in {int(numbers[0]) for word, *numbers in lines if word == "enqueued"}
            if isinstance(getattr(manifest.get_job(job_id), "state", None), InFlight)
        ]
        state_after = recover(manifest, jobs)
        repaired = {job.repairs_job_id for job in state_after.pending_jobs}
        assert set(in_flight) <= repaired
        for job in state_after.pending_jobs:
            if job.repairs_kind is not None:
                assert jobs.gate(job.db_id, job.repairs_kind).state().active_job_id == job.job_id
        assert manifest.read(lambda view: list(check_all(view))) == []


def test_nothing_told_is_lost_when_killed(tmp_path: Path) -> None:
    assert kill_rounds(str(tmp_path / "manifest"), rounds=3, seed=1) > 0


def test_telling_too_early_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="stored_lsn"):
        kill_rounds(str(tmp_path / "manifest"), 10, 3, "early")


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_nothing_told_is_lost_when_killed_often(tmp_path: Path) -> None:
    assert kill_rounds(str(tmp_path / "manifest"), rounds=50, seed=2) > 1_000
