"""Kill a process that writes to a store, again and again, and account for every batch it was promised.

A child counts events per device: each batch sets the latest reading of some devices and adds to their totals, in two
tables, atomically, under a token (its number). It prints each number once the batch is durable, and is killed with
SIGKILL at a random moment. The next child opens the same folder and begins a few batches back, as a job does that
lost track: batches that were committed are told apart by their tokens. At the end every total must be exactly what the
batches that are there add up to. `KILLS` and `DATA` (a folder, kept; default a temporary one) can be set.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import penstock

DEVICES = 1_000
EVENTS = 20  # in a batch
AGAIN = 5  # batches that a new child sends a second time
PUTS, GETS = 300_000, 50_000


def events_of(number: int) -> list[tuple[bytes, bytes]]:
    """(device, reading) of a batch: always the same for the same number."""
    chance = random.Random(number)
    return [(b"device-%03d" % chance.randrange(DEVICES), b"%d:%.2f" % (number, chance.random())) for _ in range(EVENTS)]


def write(folder: str, first: int) -> None:
    """The child: write batches for ever, and say which are durable, and which were there already."""
    with penstock.open(folder) as store:
        store.kv("latest")
        store.kv("totals", value="int64")
        store.kv("batches")
        number = first
        while True:
            with store.batch(token=("demo", number)) as batch:
                latest, totals = batch.kv("latest"), batch.kv("totals")
                for device, reading in events_of(number):
                    latest.put(device, reading)
                    totals.merge(device, 1, operator="add_i64")
                batch.kv("batches").put(b"%012d" % number, b"")
            print(number, int(batch.duplicate), flush=True)
            number += 1


def kill_while_writing(folder: str, first: int, after_s: float) -> tuple[int, int]:
    """Start a child, kill it: the last batch it said was durable, and how many were found committed before."""
    command = [sys.executable, "-m", "examples.demo", folder, str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().split("\n")[:-1]  # what follows the last line end may be cut short by the kill
    said = [tuple(map(int, line.split())) for line in lines if line.strip()]
    if not said:
        raise SystemExit("the writer ended before it wrote anything: see its error above")
    return said[-1][0], sum(duplicate for _, duplicate in said)


def account(store: penstock.Store, acknowledged: int) -> int:
    """Print what was promised beside what is there; the sum of all differences."""
    with store.snapshot() as snapshot:
        found = [int(key) for key in snapshot.kv("batches")]
        totals: dict[bytes, int] = dict(snapshot.kv("totals").scan())
        latest: dict[bytes, bytes] = dict(snapshot.kv("latest").scan())
        lsn = snapshot.lsn
    expected: Counter[bytes] = Counter()
    newest: dict[bytes, bytes] = {}
    for number in found:
        for device, reading in events_of(number):
            expected[device] += 1
            newest[device] = reading
    lost = len(set(range(1, acknowledged + 1)) - set(found))
    off = sum(abs(expected[device] - totals.get(device, 0)) for device in expected | totals.keys())
    stale = sum(latest.get(device) != reading for device, reading in newest.items())
    rows = [
        ("batches acknowledged", acknowledged),
        ("batches found after reopening", len(found)),
        ("of these beyond the last acknowledgement", len(found) + lost - acknowledged),
        ("acknowledged and lost", lost),
        ("events that these batches hold", sum(expected.values())),
        ("sum of all totals", sum(totals.values())),
        ("difference, device by device", off),
        ("latest readings that are not the latest", stale),
    ]
    print(f"\n  snapshot at LSN {lsn:,}")
    for name, value in rows:
        print(f"  {name:<44} {value:>12,}")
    return lost + off + stale


def measure(store: penstock.Store) -> None:
    """What a put and a get cost here and now."""
    table = store.kv("measured")
    chance = random.Random(7)
    keys = [chance.randbytes(16) for _ in range(PUTS)]
    begin = time.perf_counter()
    for key in keys:
        table.put(key, b"v" * 100)
    store.flush()
    rate = PUTS / (time.perf_counter() - begin)
    asked = chance.sample(keys, GETS)
    begin = time.perf_counter()
    for key in asked:
        table.get(key)
    took_us = (time.perf_counter() - begin) / GETS * 1e6
    store.drop("measured")
    print(f"\n  {'puts a second, all durable at the end':<44} {rate:>12,.0f}")
    print(f"  {'a get, in microseconds':<44} {took_us:>12.1f}")


def main() -> int:
    kills = int(os.environ.get("KILLS", "10"))
    data = os.environ.get("DATA")
    folder = str(Path(data or tempfile.mkdtemp(prefix="penstock-demo-")) / "store")
    chance = random.Random(1)
    with penstock.open(folder) as store:
        acknowledged = sum(1 for _ in store.kv("batches"))  # of earlier runs in the same DATA
    print(f"Penstock: a store in {folder}, its writer killed {kills} times\n")
    for number in range(1, kills + 1):
        first = max(1, acknowledged + 1 - AGAIN)
        acknowledged, duplicates = kill_while_writing(folder, first, chance.uniform(0.3, 1.5))
        print(f"  kill {number:2}: {acknowledged:>9,} batches acknowledged, {duplicates} sent twice and told apart")
    with penstock.open(folder) as store:
        difference = account(store, acknowledged)
        measure(store)
    print("\nNext: docs/guide/kv.md, `make test` (the crash suite among them), `make bench`, docs/architecture.md")
    return 1 if difference else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1], int(sys.argv[2]))
    sys.exit(main())
