"""Kill a process that writes to a log, again and again, and account for every record it was promised.

A child appends records in batches and prints the last durable index after each sync. It is killed with SIGKILL at a
random moment; the next child opens the same folder and goes on. At the end every acknowledged record must be there,
once, unchanged. `KILLS` and `DATA` (a folder, kept; default a temporary one) can be set.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock.host.chance import system_random
from penstock.host.files import OsFileSystem
from penstock.log import Log, LogSettings

SETTINGS = LogSettings(segment_bytes=1 << 20)
BATCH = 64


def open_log(folder: str) -> Log:
    return Log.open(OsFileSystem(), folder, random=system_random(), settings=SETTINGS)


def body_of(index: int) -> bytes:
    return random.Random(index).randbytes(100 + index % 400)


def write(folder: str) -> None:
    """The child: append for ever, and say what is durable."""
    log = open_log(folder)
    while True:
        log.append([body_of(log.last + 1 + n) for n in range(BATCH)])
        print(log.sync(), flush=True)


def kill_while_writing(folder: str, after_s: float) -> int:
    """Start a child, kill it, and return the last index it said was durable."""
    with subprocess.Popen([sys.executable, "-m", "examples.demo", folder], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = int(child.stdout.readline())
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().split("\n")
    complete = [line for line in lines[:-1] if line]  # the last line may be cut short by the kill
    return int(complete[-1]) if complete else acknowledged


def main() -> int:
    kills = int(os.environ.get("KILLS", "10"))
    data = os.environ.get("DATA")
    folder = str(Path(data or tempfile.mkdtemp(prefix="penstock-demo-")) / "log")
    chance = random.Random(1)
    print(f"Penstock: a log in {folder}, its writer killed {kills} times\n")
    acknowledged = 0
    for number in range(1, kills + 1):
        acknowledged = kill_while_writing(folder, chance.uniform(0.05, 0.4))
        print(f"  kill {number:2}: {acknowledged:>9,} records acknowledged")
    with open_log(folder) as log:
        found = right = size = 0
        for record in log:
            found += 1
            right += record.body == body_of(record.index)
            size += len(record.body)
        segments = log.statistics().segments
    print(f"\n  {'acknowledged before the last kill':<44} {acknowledged:>12,}")
    print(f"  {'found after reopening':<44} {found:>12,}   ({size / 1e6:.1f} MB in {segments} segments)")
    print(f"  {'of these, byte for byte what was written':<44} {right:>12,}")
    print(f"  {'beyond the last acknowledgement (in flight)':<44} {found - acknowledged:>12,}")
    lost = max(0, acknowledged - found) + (found - right)
    print(f"  {'difference':<44} {lost:>12,}")
    print("\nNext: `make test` (the crash suite among them), `make bench`, docs/architecture.md")
    return 1 if lost else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(sys.argv[1])
    sys.exit(main())
