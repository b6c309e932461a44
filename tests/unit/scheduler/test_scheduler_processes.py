"""What only the engine `process` must stand: killed workers, lost parents, scripts without a main module."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.scheduler.engines import EngineSettings, PooledEngine, process_engine
from penstock.scheduler.work import WorkCancelled, WorkerLost

WAIT_S = 30.0  # only ever waited in full by a test that fails
HERE = "scheduler_functions:"
FOLDER = str(Path(__file__).parent)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
        # One that has ended but was not waited for by whoever inherited it is gone for our purpose.
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_gone(process: int) -> None:
    for _ in range(int(WAIT_S / 0.01)):
        if not alive(process):
            return
        time.sleep(0.01)
    raise AssertionError(f"process {process} is still there")


def wait_for_process(path: Path) -> int:
    """The process id that a function announced."""
    for _ in range(int(WAIT_S / 0.01)):
        if path.exists():
            return int(path.read_text())
        time.sleep(0.01)
    raise AssertionError(f"{path} never came")


@pytest.fixture
def engine() -> Iterator[PooledEngine]:
    engine = process_engine(EngineSettings(workers_max=1))
    yield engine
    engine.shutdown(0.0)


def process_of(engine: PooledEngine) -> int:
    process_id = engine.submit(HERE + "process_id", {}).result(WAIT_S)
    assert isinstance(process_id, int)
    return process_id


def test_calls_run_in_one_other_process(engine: PooledEngine) -> None:
    worker = process_of(engine)
    assert worker != os.getpid()
    assert process_of(engine) == worker


def test_a_worker_killed_under_a_call_is_an_error_and_is_replaced(engine: PooledEngine, tmp_path: Path) -> None:
    for number in range(3):
        handle = engine.submit(HERE + "hang", {"began": str(tmp_path / str(number))})
        after = engine.submit(HERE + "process_id", {})
        worker = wait_for_process(tmp_path / str(number))
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="scheduler_functions:hang was ended by SIGKILL: it may be tried again"):
            handle.result(WAIT_S)
        assert after.result(WAIT_S) != worker
    assert engine.statistics().workers_lost == 3


def test_a_worker_killed_between_calls_costs_no_call(engine: PooledEngine) -> None:
    worker = process_of(engine)
    os.kill(worker, signal.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # all its threads are gone, and the engine can see it
    assert process_of(engine) != worker
    assert engine.statistics().workers_lost == 0


@pytest.mark.parametrize(("function", "how"), [("vanish", "ended with exit code 3"), ("crash", "ended by SIGSEGV")])
def test_a_worker_that_ends_itself_says_how(engine: PooledEngine, function: str, how: str) -> None:
    with pytest.raises(WorkerLost, match=how):
        engine.submit(HERE + function, {}).result(WAIT_S)
    assert engine.submit(HERE + "echo", {}).result(WAIT_S) == {}


def test_a_worker_that_is_stopped_can_still_be_cancelled(engine: PooledEngine, tmp_path: Path) -> None:
    handle = engine.submit(HERE + "obey", {"began": str(tmp_path / "began")})
    worker = wait_for_process(tmp_path / "began")
    os.kill(worker, signal.SIGSTOP)
    handle.cancel()
    with pytest.raises(WorkCancelled, match="while it ran"):
        handle.result(WAIT_S)
    wait_until_gone(worker)
    assert process_of(engine) != worker


def test_what_a_function_prints_does_not_disturb_its_answer(engine: PooledEngine) -> None:
    assert engine.submit(HERE + "noisy", {}).result(WAIT_S) == "quiet"


def test_no_worker_is_left_after_shutdown_busy_or_idle(tmp_path: Path) -> None:
    engine = process_engine(EngineSettings(workers_max=2))
    handles = [engine.submit(HERE + "hang", {"began": str(tmp_path / str(number))}) for number in range(2)]
    workers = [wait_for_process(tmp_path / str(number)) for number in range(2)]
    assert all(alive(worker) for worker in workers)
    assert engine.shutdown(0.05)
    assert not any(alive(worker) for worker in workers)
    for handle in handles:
        with pytest.raises(WorkCancelled):
            handle.result(0.0)
    idle = process_engine()
    worker = process_of(idle)
    assert idle.shutdown(WAIT_S)
    assert not alive(worker)


def test_an_idle_worker_process_ends_by_itself() -> None:
    engine = process_engine(EngineSettings(workers_max=1, idle_s=0.01))
    wait_until_gone(process_of(engine))
    assert engine.shutdown(WAIT_S)


@pytest.mark.parametrize("executable", ["", "/nowhere/python", "/bin/false"])
def test_where_no_process_can_be_started_calls_run_in_a_thread(
    executable: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = process_engine(EngineSettings(workers_max=1), executable=executable)
    with caplog.at_level(logging.WARNING):
        assert process_of(engine) == os.getpid()
        assert process_of(engine) == os.getpid()
    assert "runs in a thread" in caplog.records[0].getMessage()
    assert "a moment ago" in caplog.records[1].getMessage()
    assert engine.shutdown(WAIT_S)


def test_a_process_that_never_answers_is_given_up(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\necho $$ > $0.id\nexec sleep 1000\n")
    silent.chmod(0o755)
    engine = process_engine(EngineSettings(workers_max=1, start_timeout_s=0.3), executable=str(silent))
    assert process_of(engine) == os.getpid()
    assert engine.shutdown(WAIT_S)
    assert not alive(int((tmp_path / "python.id").read_text()))


def test_the_engine_works_from_a_script_that_has_no_file(tmp_path: Path) -> None:
    """No module to import again, no guard: what defeats `multiprocessing`."""
    script = f"""
import os, sys
sys.path.insert(0, {FOLDER!r})
from penstock.scheduler.engines import process_engine
engine = process_engine()
print(engine.submit("scheduler_functions:echo", {{"a": b"b"}}).result(30))
print(engine.submit("scheduler_functions:process_id", {{}}).result(30) != os.getpid())
"""
    done = subprocess.run(
        [sys.executable, "-"], input=script, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert (done.stdout.splitlines(), done.stderr, done.returncode) == (["{'a': b'b'}", "True"], "", 0)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_the_interpreters_exit_lets_running_work_hear_of_it(tmp_path: Path, kind: str) -> None:
    script = f"""
import sys, time, os
sys.path.insert(0, {FOLDER!r})
from penstock.scheduler.engines import {kind}_engine
handle = {kind}_engine().submit("scheduler_functions:obey", {{"began": "began"}})
while not os.path.exists("began"):
    time.sleep(0.01)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert (tmp_path / "began.heard").exists()


_PARENT = f"""
import sys
sys.path.insert(0, {FOLDER!r})
from penstock.scheduler.engines import process_engine, EngineSettings
engine = process_engine(EngineSettings(shutdown_timeout_s=0.1))
handle = engine.submit("scheduler_functions:hang", {{"began": sys.argv[1]}})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "exits"])
def test_workers_do_not_outlive_their_parent(tmp_path: Path, kill: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "began")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        worker = wait_for_process(tmp_path / "began")
        assert alive(worker)
        if kill:
            parent.kill()
        else:
            assert parent.stdin is not None
            parent.stdin.close()
        parent.wait(WAIT_S)
        wait_until_gone(worker)


def test_a_forked_child_leaves_its_parents_workers_alone() -> None:
    script = f"""
import os, sys
sys.path.insert(0, {FOLDER!r})
from penstock.scheduler.engines import process_engine
engine = process_engine()
worker = engine.submit("scheduler_functions:process_id", {{}}).result(30)
if os.fork() == 0:
    sys.exit()
os.wait()
print(engine.submit("scheduler_functions:process_id", {{}}).result(30) == worker)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("True", "", 0)


def test_ctrl_c_in_the_terminal_does_not_reach_the_worker(engine: PooledEngine) -> None:
    worker = process_of(engine)
    assert os.getpgid(worker) != os.getpgid(0)


def test_workers_killed_at_random_lose_only_their_own_calls() -> None:
    """Many calls while workers are killed at any moment: each is answered, right or with the loss of its worker."""
    engine = process_engine(EngineSettings(workers_max=2))
    chance = random.Random(7)
    answered = lost = 0
    for n in range(150):
        handles = [engine.submit(HERE + "echo", {"n": [n, side]}) for side in range(2)]
        if n % 10 == 0:
            handles.append(engine.submit(HERE + "die_soon", {"n": [n, 2], "seconds": chance.uniform(0, 0.01)}))
        for side, handle in enumerate(handles):
            try:
                result = handle.result(WAIT_S)
            except WorkerLost:
                lost += 1
            else:
                assert isinstance(result, dict)
                assert result["n"] == [n, side]
                answered += 1
    statistics = engine.statistics()
    assert (statistics.succeeded, statistics.workers_lost) == (answered, lost)
    assert answered + lost == 315
    assert engine.shutdown(WAIT_S)
