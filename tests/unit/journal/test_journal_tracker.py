"""Which records are needed: against a plain set of (partition, LSN)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Invalid
from penstock.journal.partitions import PartitionId
from penstock.journal.tracker import SegmentedAckTracker, SegmentedWatermarks

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
            held = [n for p, n in needed if p == partition]
            assert tracker.oldest(PartitionId(partition)) == min(held, default=None)


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


def test_wrong_use() -> None:
    with pytest.raises(Invalid):
        SegmentedAckTracker(quorum=0)
    with pytest.raises(Invalid):
        SegmentedWatermarks(stored=2, applied=1, durable=3, highest=3)
