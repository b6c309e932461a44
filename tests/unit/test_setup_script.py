"""`tools/setup.sh`, interrupted while Python makes the environment: one line, and no traceback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.page_blocks import ROOT


@pytest.mark.skipif(shutil.which("java") is None, reason="it would install Java first")
def test_an_interrupt_while_the_environment_is_made(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints.txt", "tools/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    env = {name: value for name, value in os.environ.items() if name != "MAKELEVEL"}
    process = subprocess.Popen(
        ["sh", "tools/setup.sh", "dev"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, start_new_session=True,
        env={**env, "PYTHON": getattr(sys, "_base_executable", sys.executable)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline().startswith("set-up: making .venv with Python")
    while not (tmp_path / ".venv" / "bin" / "python").exists():  # then pip is put into it, which takes seconds
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert output == "set-up: stopped: the next call goes on\n"
    assert process.returncode == 130
