"""Which records are needed: against a plain set of (partition, LSN)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Invalid
from penstock.journal.partitions import PartitionId
from penstock.journal.tracker import MemberAcks, SegmentedAckTracker, SegmentedWatermarks

steps = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.sets(st.integers(1, 4))),
        st.tuples(st.just("ack"), st.integers(1, 4), st.integers(0, 30)),
        st.tuples(st.just("forget"), st.integers(1, 4)),
    ),
    max_size=40,
)


@given(steps)
def test_against_a_set(steps: list[tuple[Any, ...]]) -> None:
    tracker, needed, lsn = SegmentedAckTracker(), set[tuple[int, int]](), 0
    for word, *values in steps:
        if word == "record":
            lsn += 1
            for partition in values[0]:
                tracker.record(lsn, [PartitionId(partition)])
                needed.add((partition, lsn))
        elif word == "ack":
            partition, upto = values[0], min(values[1], lsn)
            tracker.acknowledge(PartitionId(partition), upto)
            needed = {(p, n) for p, n in needed if p != partition or n > upto}
        else:
            tracker.forget(PartitionId(values[0]))
            needed = {(p, n) for p, n in needed if p != values[0]}
        assert tracker.needed_from(lsn) == min([lsn + 1, *(n for _, n in needed)])
        assert set(tracker.waiting_below(lsn)) == {p for p, n in needed if n < lsn}
        for partition in range(1, 5):
            lsns = [n for p, n in needed if p == partition]
            assert tracker.oldest(PartitionId(partition)) == min(lsns, default=None)


def test_a_quorum() -> None:
    tracker, partition = SegmentedAckTracker(quorum=2), PartitionId(1)
    for lsn in (1, 2, 3):
        tracker.record(lsn, [partition])
    tracker.acknowledge(partition, 3, member=0)
    assert tracker.needed_from(3) == 1
    tracker.acknowledge(partition, 2, member=1)
    assert tracker.needed_from(3) == 3
    tracker.acknowledge(partition, 1, member=1)  # a late word changes nothing
    assert tracker.needed_from(3) == 3


cluster_steps = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.sets(st.integers(1, 3), min_size=1)),
        st.tuples(st.just("ack"), st.integers(1, 3), st.integers(0, 30)),
        st.tuples(st.just("hear"), st.sampled_from("bcx"), st.integers(0, 30)),
        st.tuples(st.just("keep"), st.integers(0, 30)),
        st.tuples(st.just("reopen")),
    ),
    max_size=40,
)


def _check_members(steps: list[tuple[Any, ...]], make: type[SegmentedAckTracker]) -> None:
    """Compare with a plain set of what is lacked: by (partition, LSN) here, and by (member, LSN) elsewhere."""
    tracker, lsn, first, kept_from = make(others="bc"), 0, 1, 0
    sections: dict[int, set[int]] = {}  # the journal
    needed, lacked = set[tuple[int, int]](), set[tuple[str, int]]()
    for word, *values in steps:
        if word == "record":
            lsn += 1
            sections[lsn] = values[0]
            tracker.record(lsn, map(PartitionId, values[0]))
            needed |= {(partition, lsn) for partition in values[0]}
            lacked |= {(member, lsn) for member in "bc"}
        elif word == "ack":
            partition, upto = values[0], min(values[1], lsn)
            tracker.acknowledge(PartitionId(partition), upto)
            needed = {(p, n) for p, n in needed if p != partition or n > upto}
        elif word == "hear":
            member, upto = values[0], min(values[1], lsn)
            tracker.hear(MemberAcks({member: upto}, kept_from))
            lacked = {(m, n) for m, n in lacked if m != member or n > upto}
        elif word == "keep":
            kept_from = max(kept_from, min(values[0], lsn))
            tracker.hear(MemberAcks({}, kept_from))
        else:  # what is left of the journal says what partitions need; members have not been heard yet
            tracker = make(others="bc")
            tracker.hear(MemberAcks({}, kept_from))
            for at in range(first, lsn + 1):
                tracker.record(at, map(PartitionId, sections[at]))
            needed = {(p, at) for at in range(first, lsn + 1) for p in sections[at]}
            lacked = {(member, at) for at in range(1, lsn + 1) for member in "bc"}
        waited = [n for _, n in lacked if n >= kept_from]
        required = tracker.required_from(lsn)
        assert all(required <= n for _, n in needed)
        assert all(required <= n for n in waited)
        assert required <= tracker.needed_from(lsn)
        if not needed and not lacked:
            assert required == lsn + 1  # nothing is kept for nobody
        for at in range(first, required):
            sections.pop(at, None)
        first = max(first, required)


@given(cluster_steps)
def test_members_against_sets(steps: list[tuple[Any, ...]]) -> None:
    _check_members(steps, SegmentedAckTracker)


class _IgnoresMembers(SegmentedAckTracker):
    def required_from(self, dispatched: int) -> Any:
        return self.needed_from(dispatched)


class _CountsAQuorum(SegmentedAckTracker):
    def required_from(self, dispatched: int) -> Any:
        return min(self.needed_from(dispatched), max(self._upto.values()) + 1)


class _KeepsForEver(SegmentedAckTracker):
    def required_from(self, dispatched: int) -> Any:
        return min(super().required_from(dispatched), 1)


@pytest.mark.parametrize("broken", [_IgnoresMembers, _CountsAQuorum, _KeepsForEver])
def test_a_tracker_that_drops_too_much_or_nothing_is_found(broken: type[SegmentedAckTracker]) -> None:
    steps: list[tuple[Any, ...]] = [
        ("record", {1}),
        ("ack", 1, 1),
        ("hear", "b", 1),  # a quorum of three has it, and c may still need it
        ("hear", "c", 1),
    ]
    _check_members(steps, SegmentedAckTracker)
    with pytest.raises(AssertionError):
        _check_members(steps, broken)


def test_a_member_that_is_far_behind_is_not_waited_for() -> None:
    tracker, partition = SegmentedAckTracker(others="bc"), PartitionId(1)
    for lsn in range(1, 11):
        tracker.record(lsn, [partition])
    tracker.acknowledge(partition, 10)
    tracker.hear(MemberAcks({"b": 10, "c": 2}, 0))
    assert tracker.required_from(10) == 3
    tracker.hear(MemberAcks({"c": 1}, 7))  # a late word, and the bound
    assert (tracker.required_from(10), tracker.acknowledged()) == (7, {"b": 10, "c": 2})
    tracker.hear(MemberAcks({"c": 10}, 7))
    assert tracker.required_from(10) == 11


def test_wrong_use() -> None:
    with pytest.raises(Invalid):
        SegmentedAckTracker(quorum=0)
    with pytest.raises(Invalid):
        SegmentedWatermarks(stored=2, applied=1, durable=3, highest=3)
