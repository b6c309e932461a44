"""The journal as Raft's log: LSNs beside indexes, cuts at both ends, and a crash at every operation of them."""

from __future__ import annotations

import random
import sys

import pytest

from penstock.errors import CorruptionError, Invalid, NotFound, UnsupportedVersion
from penstock.log import Log, LogSettings
from penstock.replica import raft_log
from penstock.replica.raft_log import NO_OP, RaftLog
from penstock.replica.state import RaftState, StateFile
from penstock.testing.disk import SimulatedDisk

SETTINGS = LogSettings(segment_bytes=1 << 16, allocate_bytes=4096, index_bytes=512)
EVERY = 1 << 40  # every other member has all


def _open(disk: SimulatedDisk) -> RaftLog:
    log = Log.open(disk, "/journal", random=random.Random(1), settings=SETTINGS)
    return RaftLog(log, StateFile(disk, "/raft"))


def _fill(log: RaftLog, entries: int) -> None:
    """Every fifth entry is one of the members' own, every third begins a segment; terms ascend."""
    for index in range(log.last + 1, log.last + entries + 1):
        if index % 5 == 0:
            log.add(NO_OP, index, index // 4)
        else:
            log.append([b"record at %d" % index], index // 4)
        if index % 3 == 0:
            log.roll()
    log.sync()
    log.setRaftCommitIndex(log.last)


def _check(log: RaftLog) -> None:
    """Whatever was cut: terms by index, records by LSN."""
    for index in range(log.base.index, log.last + 1):
        assert log.term_at(index) == index // 4
        assert log.lsn_at(index) == index - index // 5
        if index % 5 and index > log.base.index:
            assert log.index_of(log.lsn_at(index)) == index
    log.setRaftCommitIndex(log.last)
    expected = [
        (index - index // 5, b"record at %d" % index) for index in range(log.base.index + 1, log.last + 1) if index % 5
    ]
    assert list(log.records(log.base.lsn + 1)) == expected


def test_lsns_do_not_count_the_members_own_entries() -> None:
    log = _open(SimulatedDisk())
    _fill(log, 40)
    _check(log)


@pytest.mark.parametrize("cached", [0, 300, 1 << 20])
@pytest.mark.parametrize("at_once", [1, 200, 1 << 20])
def test_records_in_memory_and_in_files_are_the_same(
    monkeypatch: pytest.MonkeyPatch, cached: int, at_once: int
) -> None:
    monkeypatch.setattr(raft_log, "CACHE_BYTES", cached)
    monkeypatch.setattr(raft_log, "READ_BYTES", at_once)
    log = _open(SimulatedDisk())
    _fill(log, 40)
    log.append([b"not committed"], 10)
    log.sync()
    every = [(index - index // 5, b"record at %d" % index) for index in range(1, 41) if index % 5]
    for start in range(1, 34):
        assert list(log.records(start)) == every[start - 1 :]


@pytest.mark.parametrize("before", [1, 5, 9, 20, 32])
def test_a_cut_front_is_for_good(before: int) -> None:
    disk = SimulatedDisk()
    log = _open(disk)
    _fill(log, 40)
    first = log.cut_front(before, EVERY)
    assert first <= before
    _check(log)
    _check(again := _open(disk.image().restore("strict")))
    assert again.base == log.base
    if before > 5:
        with pytest.raises(NotFound):
            list(again.records(1))


def test_entries_that_a_member_needs_stay() -> None:
    log = _open(SimulatedDisk())
    _fill(log, 40)
    log.cut_front(30, 11)
    assert log.base.index < 11
    assert log.entries(11, 1)[0].index == 11
    with pytest.raises(Invalid):
        log.cut_front(1_000, EVERY)


def test_a_crash_at_any_operation_of_the_cuts() -> None:
    """Several segments are dropped one after the other; then terms change, and more is dropped."""
    disk = SimulatedDisk()
    log = _open(disk)
    _fill(log, 40)
    disk.on_image = lambda: 0
    log.cut_front(12, EVERY)
    log.setCurrentTerm(11, "a")
    _fill(log, 10)
    log.cut_front(33, EVERY)
    firsts = set()
    for image in disk.images:
        for mode in ("strict", "torn", "kept", "restart"):
            restored = _open(image.restore(mode))
            _check(restored)
            firsts.add(restored.base.index)
    assert len(firsts) > 8  # it ended between the segments of a cut, too


def test_a_cut_of_many_segments_takes_several_calls() -> None:
    """The state file names each segment that is dropped at once: it must stay small enough to be read."""
    disk = SimulatedDisk()
    log = _open(disk)
    _fill(log, 600)
    lasts = [log.cut_front(400, EVERY) for _ in range(5)]
    assert lasts == sorted(lasts)
    assert len(set(lasts)) > 2
    _check(_open(disk.image().restore("strict")))


def test_readers_see_one_state_of_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever moment of a cut another thread meets, LSNs are those of before and after."""
    log = _open(SimulatedDisk())
    _fill(log, 60)
    last, lsns = log.last, set[int]()
    sys.settrace(lambda frame, *_: (lambda *_: lsns.add(log.lsn_at(last))) if "cut_front" in str(frame) else None)
    try:
        log.cut_front(30, EVERY)
    finally:
        sys.settrace(None)
    assert lsns == {last - last // 5}


def test_a_committed_entry_is_not_cut_from_the_back() -> None:
    log = _open(SimulatedDisk())
    _fill(log, 10)
    with pytest.raises(CorruptionError, match="committed"):
        log.cut_back(9)
    log.append([b"a", b"b"], 9)
    log.cut_back(11)
    assert log.last == 11
    assert log.entries(11, 1 << 20)[-1].index == 11


def test_a_damaged_state_is_told() -> None:
    disk = SimulatedDisk()
    file = StateFile(disk, "/raft")
    file.save(RaftState(7, "b"))
    assert StateFile(disk, "/raft").state == RaftState(7, "b")
    for bit in range(0, 8 * disk.open("/raft").size(), 7):
        copy = disk.image().restore("strict")
        copy.flip("/raft", bit)
        with pytest.raises((CorruptionError, UnsupportedVersion), match="raft"):
            StateFile(copy, "/raft")
