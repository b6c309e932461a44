"""`make run`, interrupted: it ends in one line and leaves no process behind, and a second interrupt changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from owner_processes import until
from tests.page_blocks import ROOT


def processes_with(text: str) -> list[int]:
    """The processes, a JVM for example, that have a text in their command lines."""
    process_ids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.fsencode(text) in (entry / "cmdline").read_bytes():
                    process_ids.append(int(entry.name))
            except OSError:
                continue
    return process_ids


@pytest.mark.parametrize("under_make", [False, True])
def test_an_interrupt_ends_it_in_one_line(tmp_path: Path, under_make: bool) -> None:
    env = {**os.environ, "DATA": str(tmp_path / "data"), "SECONDS": "60", "RATE": "10"}
    env.pop("MAKELEVEL", None)
    if under_make:
        env["MAKELEVEL"] = "1"
    process = subprocess.Popen(
        [sys.executable, "-m", "examples.pipeline"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("Penstock: 10 events a second")
    until(lambda: len(processes_with(str(tmp_path))) > 0 or process.poll() is not None)  # the query was started
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (output.strip().count("\n"), errors) == (0, "")
    assert output.strip().startswith(f"stopped: what was produced is in {tmp_path / 'data' / 'store'}")
    assert process.returncode == (0 if under_make else 130)
    until(lambda: processes_with(str(tmp_path)) == [])


def test_an_interrupt_while_spark_starts_leaves_no_jvm(tmp_path: Path) -> None:
    """Spark forgets a JVM that it does not know yet, and such a JVM never ends by itself."""
    program = "import os, penstock.spark; penstock.spark.session(spark__penstock__mark=os.environ['MARK'])"
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "MARK": str(tmp_path)}, cwd=ROOT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    until(lambda: len(processes_with(str(tmp_path))) > 0 or process.poll() is not None)  # not connected to it yet
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    until(lambda: processes_with(str(tmp_path)) == [])
