"""A tree with everything real: threads beside flush and compaction, and processes that are killed in the middle."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tree_real
from tree_real import RealShard, rows_of

from penstock.lsm.memtable import Edit
from penstock.manifest.records import JobKind
from penstock.testing.locks import LockOrderChecker

SCRIPT = Path(tree_real.__file__)


def stress(root: Path, seconds: float) -> None:
    """One writer, readers, snapshots; flush and compaction in the background on the process engine."""
    shard = RealShard(str(root / "store"))
    tree, stop = shard.tree, threading.Event()
    errors: list[BaseException] = []
    floor: dict[bytes, int] = {}  # key: the least LSN a reader may find; raised after each apply

    def read() -> None:
        chance = random.Random(threading.get_ident())
        try:
            while not stop.is_set():
                keys = chance.sample(list(floor), min(50, len(floor))) if floor else []
                for key, least in [(key, floor[key]) for key in keys]:
                    value = tree.get(key)
                    if value is None or int(value[:10]) < least:
                        raise AssertionError(f"{key!r} must be at least of record {least}, found {value!r}")
                time.sleep(0.002)
        except BaseException as error:
            errors.append(error)
            stop.set()

    def snapshots() -> None:
        try:
            while not stop.is_set():
                with tree.snapshot() as snapshot:
                    first, second = dict(snapshot.scan()), dict(snapshot.scan())
                    newest = max((int(value[:10]) for value in first.values()), default=0)
                    assert first == second
                    assert newest <= snapshot.lsn
                    if newest:
                        assert set(rows_of(newest)) <= set(first)
                time.sleep(0.01)
        except BaseException as error:
            errors.append(error)
            stop.set()

    def compacted() -> bool:
        return sum(tree.statistics().level_files[1:]) > 0

    threads = [threading.Thread(target=target) for target in (read, read, snapshots)]
    for thread in threads:
        thread.start()
    lsn, end = 0, time.monotonic() + seconds
    # On a busy machine it goes on until there was a compaction, up to a minute.
    while not stop.is_set() and (time.monotonic() < end or (not compacted() and time.monotonic() < end + 60)):
        lsn += 1
        tree.admit(30)
        rows = rows_of(lsn)
        tree.apply(Edit(lsn=lsn, time_us=lsn, rows=rows))
        floor.update(dict.fromkeys(rows, lsn))
    stop.set()
    for thread in threads:
        thread.join(60)
    statistics = tree.statistics()
    shard.close()
    if errors:
        raise errors[0]
    assert statistics.stored > 0
    assert sum(statistics.level_files[1:]) > 0, "no compaction happened"


def test_threads_beside_flush_and_compaction(tmp_path: Path) -> None:
    with LockOrderChecker().installed() as checker:
        stress(tmp_path, 4.0)
    assert checker.violations == []


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_threads_for_thirty_seconds(tmp_path: Path) -> None:
    stress(tmp_path, 30.0)


def kill_rounds(root: str, rounds: int, seed: int = 1) -> None:
    chance = random.Random(seed)
    reported = 0
    for _ in range(rounds):
        with subprocess.Popen([sys.executable, str(SCRIPT), root], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline()]
            while int(lines[-1].split()[1]) == reported:  # until it has flushed, however slow the machine is
                lines.append(child.stdout.readline())
            time.sleep(chance.uniform(0.3, 1.5))
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.read().split("\n")[:-1]
        reported = max([reported, *(int(line.split()[1]) for line in lines if line)])
        check(root, reported)


def check(root: str, reported: int) -> None:
    """Nothing that was stored is lost, nothing of a killed job is left, and the tree works."""
    shard = RealShard(root, background=False)
    try:
        stored = shard.tree.stored
        assert stored >= reported
        expected: dict[bytes, int] = {}
        for lsn in range(1, stored + 1):
            expected.update(dict.fromkeys(rows_of(lsn), lsn))
        assert {key: int(value[:10]) for key, value in shard.tree.scan()} == expected
        shard.maintenance.run(JobKind.FLUSH, JobKind.COMPACTION)
        shard.collector.collect()
        shard.collector.collect()
        listed = {file.meta.file_name.rsplit("/", 1)[-1] for file in shard.tree._version.files()}
        files = {name.name for name in Path(root, "tables/1").iterdir()}
        assert files == listed | {name.replace(".sst", ".idx") for name in listed}
        assert not shard.jobs.gate(1, JobKind.COMPACTION).is_shut()
    finally:
        shard.close()


def test_killed_in_the_middle(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "store"), 3)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_killed_fifty_times(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "store"), 50)
