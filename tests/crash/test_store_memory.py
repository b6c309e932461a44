"""A store whose writers are faster than its disk stays within its memory: they wait, nothing grows.

The writer runs in a process of its own, which is watched from here: how far its anonymous memory (mapped files are the
page cache's) grows over what it was before the store was opened. That is to stay below `memory_bytes_max` itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

MEMORY_BYTES_MAX = 256 << 20

WRITER = """
import random, sys
import penstock
from penstock.errors import Backpressure
from penstock.lsm.tree_settings import TreeSettings

path, count, size, memory, bounded = sys.argv[1], *map(int, sys.argv[2:])
if not bounded:  # as if nobody had thought of it
    penstock.StoreSettings.tree = TreeSettings(memtable_bytes=1 << 40)
    from penstock.store.governor import MemoryGovernor
    MemoryGovernor.rebalance = lambda self: None
chance, value, found = random.Random(1), bytes(size), count
print("ready", flush=True)
sys.stdin.readline()
with penstock.open(path, settings=penstock.StoreSettings(memory_bytes_max=memory)) as store:
    table = store.kv("rows")
    step = max(1, min(1_000, (1 << 20) // size))
    for first in range(0, count, step):
        rows = {chance.randbytes(16): value + b"%d" % first for _ in range(min(step, count - first))}
        while True:
            try:
                table.put_many(rows)
                break
            except Backpressure:
                pass
    store.flush()
    if size == 100 and count <= 1_000_000:  # a scan takes memory of its own
        found = sum(1 for _ in table.scan())
print(found)
"""


def anonymous(process: int) -> int:
    """The anonymous memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon")), 0)


def grown(tmp_path: Path, count: int, size: int, *, bounded: bool = True) -> int:
    """The most that `count` puts of 16 + `size` bytes made a process grow."""
    arguments = [f"{tmp_path}/store", str(count), str(size), str(MEMORY_BYTES_MAX), str(int(bounded))]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        before = highest = anonymous(writer.pid)
        writer.stdin.write("go\n")
        writer.stdin.flush()
        while os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            highest = max(highest, anonymous(writer.pid))
            time.sleep(0.005)
        assert writer.stdout.read() == f"{count}\n"
    assert writer.returncode == 0
    return highest - before


def test_memory_of_a_million_puts_is_bounded(tmp_path: Path) -> None:
    assert grown(tmp_path, 1_000_000, 100) <= MEMORY_BYTES_MAX


@pytest.mark.parametrize("size", [10_000, 2_000_000])
def test_memory_of_large_values_is_bounded(tmp_path: Path, size: int) -> None:
    assert grown(tmp_path, 400_000_000 // size, size) <= MEMORY_BYTES_MAX


def test_the_measure_sees_a_store_without_bounds(tmp_path: Path) -> None:
    assert grown(tmp_path, 50_000, 10_000, bounded=False) > MEMORY_BYTES_MAX


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_memory_of_ten_million_puts_is_bounded(tmp_path: Path) -> None:
    assert grown(tmp_path, 10_000_000, 100) <= MEMORY_BYTES_MAX
