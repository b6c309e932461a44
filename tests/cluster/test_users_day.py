"""A user's day: a small project on the built wheel, in an environment of its own, while everything is killed once.

Three producers, two consumers in Python, a Spark stream with a join and dead letters; a producer, a consumer, the
store's owner and the Spark driver with its JVM are killed by SIGKILL, the checkpoint is deleted, and all of it goes on.
In the end DuckDB and Polars count.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from owner_processes import owners, until
from users_day import SERVICES, line

import penstock

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("users_day.py")
LINES = 600  # of each service
pytestmark = pytest.mark.timeout(600)  # most of it is Spark, which starts twice
# As in tests/spark: they start sooner.
JAVA = os.environ.get("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel in it; what the wheel needs comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=ROOT)
    (wheel,) = folder.glob("penstock-*.whl")
    environment = folder / "venv"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    site = next((environment / "lib").glob("python*/site-packages"))
    # A line of a .pth file is a folder at the end of the path, whose own .pth files count for nothing: the editable
    # Penstock of the tests is not seen.
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return environment


def run(*command: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, f"{' '.join(command)}: {ran.stderr}"
    return ran.stdout


class Day:
    """The processes of the project."""

    def __init__(self, environment: Path, folder: Path) -> None:
        self._bin = environment / "bin"
        self._log: IO[str] = open(folder / "log", "w")  # noqa: SIM115 - closed in `end`
        self._running: list[subprocess.Popen[str]] = []
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.env = {name: value for name, value in self.env.items() if not name.startswith("PYSPARK")}
        self.env |= {"JAVA_TOOL_OPTIONS": JAVA}
        self.folder = folder
        self.store = folder / "store"

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        command = [str(self._bin / "python"), str(PROGRAM), *map(str, arguments)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=self.env, cwd=self.folder,
            start_new_session=True,
        )  # fmt: skip
        self._running.append(process)
        return process

    def command(self, *arguments: object) -> str:
        return run(str(self._bin / "penstock"), *map(str, arguments), env=self.env, cwd=self.folder)

    def done(self, process: subprocess.Popen[str]) -> str:
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, (self.folder / "log").read_text()[-4_000:]
        return output

    def end(self) -> None:
        for process in self._running:
            if process.poll() is None:
                kill(process)
            assert process.stdout is not None
            process.stdout.close()
        for owner in owners(self.store):
            os.kill(owner, signal.SIGKILL)
        self._log.close()


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL for a process and all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def await_lines(process: subprocess.Popen[str], lines: int = 1) -> None:
    """Wait until a process has printed some lines."""
    assert process.stdout is not None
    for _ in range(lines):
        assert process.stdout.readline(), "it ended by itself"


@pytest.fixture
def day(installed: Path, tmp_path: Path) -> Iterator[Day]:
    day = Day(installed, tmp_path)
    yield day
    day.end()


def test_every_line_counts_once(day: Day, installed: Path) -> None:
    with penstock.open(day.store) as store:
        store.queue("lines", shards=2)
        store.queue("dead")
        store.kv("owners", value="utf8").put_many({name.encode(): team for name, team in SERVICES.items()})
        for name in ("seen", "errors", "totals"):
            store.kv(name, value="int64")
    stop, checkpoint = day.folder / "stop", day.folder / "checkpoint"

    # The morning: everything starts, and a producer, a consumer and the store's owner are killed.
    driver = day.start("route", day.store, checkpoint, "on")
    producers = {name: day.start("produce", day.store, name, LINES) for name in SERVICES}
    first, second = (day.start("count", day.store, stop) for _ in range(2))
    await_lines(producers["search"], 5)
    kill(producers.pop("search"))
    await_lines(first)
    kill(first)
    for owner in owners(day.store):
        os.kill(owner, signal.SIGKILL)

    # Noon: the driver is killed with its JVM, and the checkpoint is gone.
    await_lines(driver)
    kill(driver)
    shutil.rmtree(checkpoint)
    assert "lines" in day.command("table", "list", day.store)

    # The afternoon: all of it again. Producers repeat what they sent.
    for process in producers.values():
        day.done(process)
    for process in [day.start("produce", day.store, name, LINES) for name in SERVICES]:
        day.done(process)
    stop.touch()
    third = day.start("count", day.store, stop)
    day.done(day.start("route", day.store, checkpoint, "once"))
    for process in (second, third):
        day.done(process)

    # The evening.
    assert day.command("check", day.store) == "all is well\n"
    report = json.loads(day.done(day.start("report", day.store)))
    broken = [
        ("not JSON" if line(name, number).startswith(b"not") else "no service", line(name, number).decode())
        for name in SERVICES
        for number in range(7, LINES, 50)
    ]
    assert report["installed"].startswith(str(installed))
    assert report["lines"] == [[name, LINES, LINES] for name in sorted(SERVICES)]
    assert report["seen"] == dict.fromkeys(SERVICES, LINES)
    assert report["errors"] == dict.fromkeys(SERVICES, LINES // 10)
    assert report["totals"] == dict.fromkeys(SERVICES.values(), LINES - LINES // 50)
    assert report["dead"] == sorted(map(list, broken))
    assert report["check"] == []
    until(lambda: not owners(day.store))
