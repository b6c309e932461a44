"""Pending writes and interrupts: a group is there as a whole, at its place, or not at all."""

from __future__ import annotations

from typing import Any

from interrupts import interrupted_at, where

from penstock.journal.partitions import partition_id
from penstock.kv.section import Rows
from penstock.partition.part_log import PartLog
from penstock.partition.pending import PendingDelta, PendingGroup, add_or_absorb

FIRST, SECOND, THIRD = (partition_id(table, 0) for table in (2, 3, 4))


def begun() -> PendingDelta:
    """A delta with an open group, which has rows of the first partition, and a log of the third."""
    delta = PendingDelta()
    delta.begin().update({FIRST: Rows.of({b"before": b""}), THIRD: PartLog(1)})
    return delta


def group(condition: bytes = b"") -> PendingGroup:
    sections: dict[Any, Any] = {number: Rows.of({b"k": b"1"}) for number in (FIRST, SECOND)}
    return PendingGroup(condition=condition, sections={**sections, THIRD: PartLog(2)})


def test_a_batch_that_joins_others_is_never_torn() -> None:
    point, outcomes = 1, set[int]()
    while True:
        delta, batch = begun(), group()
        count = interrupted_at(point, lambda d=delta, b=batch: add_or_absorb(d, b, None, None))  # type: ignore[misc]
        (sections,) = [one.sections for one in delta.groups]
        there = [b"k" in sections[FIRST], SECOND in sections, sections[THIRD].log == [1, 2]]
        assert len(set(there)) == 1, (there, where[-1])
        outcomes.add(there[0])
        if count < point:
            break
        point += 1
    assert outcomes == {False, True}


def test_a_write_after_an_interrupted_group_follows_it() -> None:
    point = 1
    while True:
        delta, batch = begun(), group(b"condition")
        count = interrupted_at(point, lambda d=delta, b=batch: add_or_absorb(d, b, None, None))  # type: ignore[misc]
        later = group()
        add_or_absorb(delta, later, None, None)
        if batch in delta.groups:
            (number,) = [
                index for index, one in enumerate(delta.groups) if b"k" in one.sections[FIRST] and one is not batch
            ]
            assert number > delta.groups.index(batch), where[-1]
        if count < point:
            break
        point += 1
    assert point > 1
