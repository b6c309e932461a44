"""A store whose writers are faster than its disk stays within its memory: they wait, nothing grows.

The writer runs in a process of its own, so that what it takes is measured alone: how far its anonymous memory grows
beyond that of the opened store. The limit counts rows and writes on their way; the buffers of a flush while it works,
and what allocators keep, come on top and have an allowance here.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MEMORY_BYTES_MAX = 256 << 20
ALLOWANCE_BYTES = 160 << 20  # without bounds, a million puts take 500 MiB and ten million 3 GiB

WRITER = """
import random, resource, sys
import penstock
from penstock.errors import Backpressure

path, count, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

with penstock.open(path, settings=penstock.StoreSettings(memory_bytes_max=memory)) as store:
    table = store.kv("rows")
    chance, value, highest, refused = random.Random(1), bytes(100), 0, 0
    before = resident()
    for first in range(0, count, 1_000):
        rows = {chance.randbytes(16): value + b"%d" % first for _ in range(1_000)}
        while True:
            try:
                table.put_many(rows)
                break
            except Backpressure:
                refused += 1
        if first % 10_000 == 0:
            highest = max(highest, resident())
    store.flush()
    found = sum(1 for _ in table.scan()) if count <= 1_000_000 else count
print(highest - before, found, refused)
"""


def grown(tmp_path: object, count: int) -> int:
    """The most that `count` puts of 16 + 100 bytes made a process grow."""
    done = subprocess.run(
        [sys.executable, "-c", WRITER, f"{tmp_path}/store", str(count), str(MEMORY_BYTES_MAX)],
        capture_output=True,
        text=True,
        timeout=3_000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    growth, found, _ = map(int, done.stdout.split())
    assert found == count
    return growth


def test_memory_of_a_million_puts_is_bounded(tmp_path: object) -> None:
    assert grown(tmp_path, 1_000_000) <= MEMORY_BYTES_MAX + ALLOWANCE_BYTES


@pytest.mark.campaign
def test_memory_of_ten_million_puts_is_bounded(tmp_path: object) -> None:
    assert grown(tmp_path, 10_000_000) <= MEMORY_BYTES_MAX + ALLOWANCE_BYTES
