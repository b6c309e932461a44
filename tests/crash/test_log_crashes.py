"""The log against every crash, every crash during recovery, every fault crossed with crashes, and bit rot."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from log_scenario import FOLDER, SETTINGS, LogScenario, User, observe

from penstock.errors import CorruptionError
from penstock.log import Log
from penstock.testing import CrashReport, Faults, History, SimulatedDisk, Violation, explore
from penstock.testing.crashes import absent

SYNCS = ("fdatasync", "fsync", "fsync_dir")
NAMES = ("create", "rename", "unlink")


def test_every_crash_and_every_crash_in_recovery() -> None:
    report = explore(LogScenario())
    assert report.operations > 100
    assert report.missing("pwrite", "fdatasync", "fsync", "truncate") == []  # records, seals
    assert report.missing("create", "rename", "fsync_dir", "unlink") == []  # segments that come and go
    assert report.crashed["rename /store/journal/#-#.log.tmp /store/journal/#-#.log"] > 10
    assert report.missing_in_recovery("pwrite", "fsync", "fdatasync", "create", "rename", "fsync_dir", "unlink") == []
    assert report.crashes_in_recovery > 2_000
    assert report.crashes > 170


def test_faults_crossed_with_crashes() -> None:
    report = explore(LogScenario(), depth=1, faults=Faults(every=3, images_every=17))
    assert report.faults > 100
    assert absent(report.faulted, "pwrite", "allocate", "read", *SYNCS, *NAMES) == []


def test_failed_syncs_crossed_with_crashes_and_crashes_in_recovery() -> None:
    assert absent(explore_failed_syncs(LogScenario()).faulted, *SYNCS) == []


def test_failed_name_changes_bring_nothing_back() -> None:
    faults = Faults(kinds=("eio", "enospc"), operations=NAMES, images_every=9)
    assert absent(explore(LogScenario(), depth=1, faults=faults).faulted, *NAMES) == []


class Replaced(LogScenario):
    """Truncation from the front passes a segment that replaced one whose creation failed."""

    def run(self, disk: SimulatedDisk, history: History) -> None:
        log = self.open(disk, 1)
        user = User(log, history, "a")
        for sizes in ((600,), (600, 600), (600, 600), (600, 600), (600, 600)):
            self._step(user, lambda sizes=sizes: user.write(sizes))  # type: ignore[misc]
        self._step(user, lambda: user.front(log.last))
        self._step(user, lambda: user.write((5,)))


def replaced_segments() -> CrashReport:
    faults = Faults(kinds=("eio",), operations=("fsync_dir", "rename"))
    return explore(Replaced(), modes=("restart", "strict"), depth=1, faults=faults)


def test_leftover_of_a_failed_creation_stays_dead() -> None:
    report = replaced_segments()
    assert absent(report.faulted, "fsync_dir", "rename") == []
    assert report.missing("unlink") == []


def test_dead_segment_that_could_not_be_unlinked_stays_dead() -> None:
    disk = SimulatedDisk()
    log = Log.open(disk, FOLDER, random=random.Random(1), settings=SETTINGS)
    log.append([b"old"])
    for _ in range(20):
        log.append([b"old" * 100])
    log.sync()
    unlink, disk.unlink = disk.unlink, _fail  # type: ignore[method-assign]
    log.truncate_back(1)
    for _ in range(30):
        log.append([b"new" * 100])
    log.sync()
    assert log.truncate_front(31) == 1  # the segment that keeps them dead must stay as long as they do
    disk.unlink = unlink  # type: ignore[method-assign]
    log.truncate_front(31)
    first = log.first
    log.close()
    log = Log.open(disk, FOLDER, random=random.Random(2), settings=SETTINGS)
    assert log.first == first
    assert {record.body for record in log} == {b"new" * 100}


def _fail(path: str) -> None:
    raise OSError(5, "no unlink", path)


def explore_failed_syncs(scenario: LogScenario) -> CrashReport:
    faults = Faults(kinds=("eio",), operations=SYNCS, every=3, images_every=17)
    return explore(scenario, modes=("restart", "strict"), faults=faults)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_every_fault_crossed_with_every_crash() -> None:
    explore(LogScenario(), torn_seeds=20)
    explore(LogScenario(), torn_seeds=2, depth=1, faults=Faults())
    explore(LogScenario(), faults=Faults(kinds=("eio", "enospc"), images_every=7))


# -- bit rot


def every_bit() -> Iterator[tuple[SimulatedDisk, Log, dict[int, tuple[int, bytes]], str, bool]]:
    """A disk for each bit of each file of a small log, with that bit inverted; also what the log held before."""
    disk, history = SimulatedDisk(), History()
    log = Log.open(disk, FOLDER, random=random.Random(1), settings=SETTINGS)
    user = User(log, history, "a")
    for sizes in ((5, 600), (13,), (400, 300), (3, 0, 8)):
        user.append(*sizes)
        user.sync()
    user.append(1)
    user.sync()  # vouched for by nobody: the one record that rot may take
    _, records = observe(log)
    image = disk.image()
    names = [str(name) for name in log._chain]
    assert len(names) == 2
    for name in names:
        path = f"{FOLDER}/{name}"
        for bit in range(disk.open(path).size() * 8):
            copy = image.restore("kept")
            copy.flip(path, bit)
            yield copy, log, records, path, name == names[-1]


def check_rot() -> tuple[int, int]:
    """Open and read under each flip: right bytes or `CorruptionError` with path and offset, and no record lost."""
    reported = harmless = 0
    for disk, before, records, path, active in every_bit():
        try:
            log = Log.open(disk, FOLDER, random=random.Random(2), settings=SETTINGS)
            _, remaining = observe(log)
        except CorruptionError as error:
            if error.path != path:
                raise Violation(f"damage in {path} is reported for {error.path}") from error
            reported += 1
            continue
        if not active:
            raise Violation(f"damage in the sealed {path} passes unseen")
        if {**records, **remaining} != records or len(remaining) < before.last - 1:
            raise Violation(f"damage in {path} gives {remaining}")
        harmless += 1
    return reported, harmless


def test_bit_rot_is_told_and_never_a_silent_truncation() -> None:
    reported, harmless = check_rot()
    assert reported > 1000  # harmless: zero-filled room, and the one batch that no later record vouches for
    assert harmless > 100
