"""`penstock check --campaign FOLDER`: whether a disk keeps what was synced to it, tried with a store that is killed.

A child process owns a store in a new folder inside FOLDER and writes numbered batches over a queue, kv, series and
vector table, durably, printing each number once its batch is acknowledged. It is killed at a random moment; then the
store is opened, every acknowledged number must be there in every table, none twice, and every file must be sound.
This repeats, in the same store, until the time is over. Before it, single calls: a file, its folder and a rename are
synced, and a lock keeps another process out.

A kill loses what is in the process, not what is in the operating system's memory: it finds file systems whose rename,
lock or mapping is not as it must be, and defects of ours. Only pulling the plug shows a disk that lies about a sync.

Children have sessions of their own: a terminal's Ctrl-C is for this process, which kills them.

Thread: one.
Invariant: works in a new folder inside FOLDER, and removes it unless a promise was broken.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import penstock
from penstock.errors import Invalid, Restore
from penstock.host.clock import SystemClock
from penstock.host.file_operations import remove_folder
from penstock.host.os_files import OsFileSystem
from penstock.host.randomness import system_random
from penstock.host.waiting import pause

START_S = 60.0  # for the child to open the store, and to write to it
KILL_S_MAX = 1.5
LOCKED_CODE = 9


class DiskTrialFailed(Restore):
    """The disk, or Penstock, lost what it had acknowledged."""


def run(folder: Path, seconds: float) -> dict[str, float]:
    """Try the disk of a folder; return counts and times. `DiskTrialFailed` says what was broken."""
    if not folder.is_dir():
        raise Invalid(f"{folder} is not a folder: give one on the disk to try")
    files = OsFileSystem()
    path = folder / f"penstock-campaign-{system_random().randbytes(4).hex()}"
    files.mkdir(str(path))
    clock = SystemClock()
    end_s = clock.monotonic_s() + seconds
    try:
        counts: dict[str, float] = _try_calls(str(path))
        rounds = acknowledged = 0
        while not rounds or clock.monotonic_s() < end_s:
            acknowledged = max(acknowledged, _kill_once(path))
            _verify(path, acknowledged)
            rounds += 1
    except Restore as error:
        raise DiskTrialFailed(f"{error}; the store is left in {path}: keep it, and do not use this disk") from error
    except BaseException:
        remove_folder(files, str(path))
        raise
    remove_folder(files, str(path))
    return {**counts, "kills": rounds, "batches": acknowledged}


def _try_calls(path: str) -> dict[str, float]:
    """Try the calls that a store relies on, one by one; return the milliseconds of a sync."""
    files, clock = OsFileSystem(), SystemClock()
    file = files.create(f"{path}/new")
    begin_s = clock.monotonic_s()
    for number in range(20):
        file.pwrite(b"%4d" % number, number * 4)
        file.fdatasync()
    sync_ms = (clock.monotonic_s() - begin_s) * 1e3 / 20
    file.close()
    files.rename(f"{path}/new", f"{path}/renamed")
    files.fsync_dir(path)
    file = files.open(f"{path}/renamed")
    content = file.pread(8, 0)
    file.close()
    if files.exists(f"{path}/new") or content != b"   0   1":
        raise DiskTrialFailed(f"a file was renamed in {path}, and its old name or other bytes are there")
    files.unlink(f"{path}/renamed")
    if _second_owner(path) != LOCKED_CODE:
        raise DiskTrialFailed(f"a lock in {path} does not keep a second process out")
    return {"sync_ms": round(sync_ms, 3)}


def _second_owner(path: str) -> int:
    """Return the exit code of a second process that opens a store which this one has open."""
    code = (
        "import sys, penstock\n"
        "try: penstock.open(sys.argv[1], timeout_s=0.2)\n"
        f"except penstock.errors.StoreLocked: sys.exit({LOCKED_CODE})"
    )
    command = [sys.executable, "-c", code, f"{path}/locked"]
    with penstock.open(f"{path}/locked"):
        return subprocess.run(command, timeout=START_S, check=False, start_new_session=True).returncode


def _kill_once(path: Path) -> int:
    """Let a child write, then kill it; return the last number that it printed as durable."""
    command = [sys.executable, "-m", "penstock.cli.disk_campaign", str(path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        assert child.stdout is not None
        try:
            ready = select.select([child.stdout], [], [], START_S)[0]
            first = child.stdout.readline() if ready else ""  # it is at work
            pause(system_random().random() * KILL_S_MAX)
        finally:
            child.send_signal(signal.SIGKILL)
        numbers = [first, *child.stdout.read().split("\n")[:-1]]
    if not first:
        raise DiskTrialFailed(f"the store in {path} could not be opened and written to within {START_S:g} s")
    return max(int(number) for number in numbers if number.strip())


def _verify(path: Path, acknowledged: int) -> None:
    """Check that every acknowledged batch is in every table; another may be there too, but whole, and once."""
    with penstock.open(path / "store") as store:
        counts = {
            "counter": store.kv("counter", value="int64").get(b"batches") or 0,
            "events": sum(bounds.next - 1 for bounds in store.queue("events").bounds()),
            "metrics": store.series("metrics").select("batch").num_rows,
            "docs": store.vector("docs", dimensions=4).count(),
        }
        report = store.check()
    if len(set(counts.values())) > 1 or counts["counter"] < acknowledged:
        raise DiskTrialFailed(f"{acknowledged} batches were acknowledged, and {counts} are there")
    if report.damage:
        raise DiskTrialFailed(f"{report.damage[0]}")


def _write(path: str) -> None:
    """Write numbered batches until killed; print each number once it is durable."""
    with penstock.open(path) as store:
        number = store.kv("counter", value="int64").get(b"batches") or 0
        store.queue("events")
        store.series("metrics")
        store.vector("docs", dimensions=4)
        while True:
            number += 1
            with store.batch(token=("campaign", number)) as batch:
                batch.kv("counter", value="int64").merge(b"batches", 1, operator="add_i64")
                batch.queue("events").put(b"%d" % number)
                batch.series("metrics").write("batch", number, time=number)
                batch.vector("docs").upsert([str(number)], np.full((1, 4), number, np.float32))
            print(number, flush=True)


if __name__ == "__main__":
    _write(sys.argv[1])
