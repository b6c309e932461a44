"""A million series, and a query that selects them all: bounded, and others are served meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from owner_processes import owners

import penstock
from penstock.host import threads

SERIES, BATCH = 1_000_000, 50_000
TIME_US = 1_790_000_000_000_000
RESIDENT_BYTES_MAX = 4 << 30  # of the process that answers


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4_096


def send_query(url: str, query: str, timeout: int) -> tuple[int, Any]:
    text = urllib.parse.urlencode({"query": query, "time": TIME_US // 10**6, "timeout": "60s"})
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?{text}", timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


@pytest.mark.campaign
def test_counting_everything(tmp_path: Path) -> None:
    with penstock.open(tmp_path / "store") as store:
        table = store.series("metrics", options=penstock.SeriesOptions(future_s=None))
        for start in range(0, SERIES, BATCH):
            numbers = np.arange(start, start + BATCH)
            rows = {
                "metric": pa.array(np.char.add("m", (numbers % 100).astype(str))),
                "instance": pa.array(np.char.add("i", numbers.astype(str))),
                "time": pa.array(np.full(BATCH, TIME_US)).cast(pa.timestamp("us")),
                "value": np.ones(BATCH),
            }
            table.write_arrow(pa.table(rows), durable=True)
        table.write("one", 1.0, time=TIME_US, durable=True)
    command = [sys.executable, "-m", "penstock", "http", str(tmp_path / "store"), "--table", "metrics", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as door:
        try:
            assert door.stdout is not None
            url = door.stdout.readline().strip()
            answers: list[tuple[int, Any]] = []
            asking = threads.spawn(
                lambda: answers.append(send_query(url, 'count({__name__=~".+"})', 180)), name="asking"
            )
            peak, slowest, others = 0, 0.0, 0
            ended = threading.Event()
            while not ended.wait(0.2):
                began = time.monotonic()
                assert send_query(url, "one", 60)[0] == 200
                slowest, others = max(slowest, time.monotonic() - began), others + 1
                peak = max(peak, resident_bytes(door.pid))
                if not asking.is_alive():
                    ended.set()
            ((status, answer),) = answers
            print(f"{status} {str(answer)[:200]}; peak {peak >> 20} MiB; {others} others, the slowest {slowest:.1f} s")
            assert (status == 200 and answer["data"]["result"][0]["value"][1] == f"{SERIES + 1}") or status in (
                422,
                503,
            )
            assert peak < RESIDENT_BYTES_MAX
            assert others > 0
            assert send_query(url, "one", 60)[1]["data"]["result"][0]["value"][1] == "1"
        finally:
            door.kill()
            for pid in owners(tmp_path / "store"):
                os.kill(pid, signal.SIGKILL)
