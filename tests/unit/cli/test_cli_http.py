"""`penstock http`: starts, answers, and ends with a signal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import penstock


def test_it_answers_until_a_signal(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        store.series("metrics").write("up", 1.0, durable=True)
        command = [sys.executable, "-m", "penstock", "http", store.path, "--table", "metrics", "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().strip()
                assert url.startswith("http://127.0.0.1:")
                with urllib.request.urlopen(f"{url}/api/v1/query?query=up", timeout=20) as answer:
                    assert json.load(answer)["data"]["result"][0]["value"][1] == "1"
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == 0
            finally:
                process.kill()


def test_what_is_wrong_is_one_line(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        command = [sys.executable, "-m", "penstock", "http", store.path, "--host", "0.0.0.0"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 1
        assert "give tokens, certificate and key" in " ".join(ran.stderr.split())
        assert "Traceback" not in ran.stderr
