"""The master of a partition: the same on every member, spread, and none if masters are disabled."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from penstock.errors import Invalid
from penstock.replica.masters import Masters

PARTITIONS = [table << 16 | shard for table in range(1, 101) for shard in range(3)]


def test_it_follows_from_membership_and_partition() -> None:
    """The values are a format: members of different versions must agree."""
    masters = Masters("hash", ["a", "b", "c"])
    assert [masters.master_of(partition) for partition in PARTITIONS[:6]] == ["c", "c", "a", "b", "a", "c"]
    again = Masters("hash", ["c", "a", "b"])  # each member lists itself first
    assert all(masters.master_of(partition) == again.master_of(partition) for partition in PARTITIONS)
    counts = Counter(map(masters.master_of, PARTITIONS))
    assert min(counts[name] for name in "abc") > len(PARTITIONS) // 5


def test_without_a_member_only_its_partitions_move() -> None:
    three, two = Masters("hash", "abc"), Masters("hash", "ab")
    assert all(
        two.master_of(partition) == three.master_of(partition)
        for partition in PARTITIONS
        if three.master_of(partition) != "c"
    )


def test_fixed_and_disabled() -> None:
    assert {Masters("fixed:b", "abc").master_of(partition) for partition in PARTITIONS} == {"b"}
    assert {Masters("disabled", "abc").master_of(partition) for partition in PARTITIONS} == {""}


@pytest.mark.parametrize("policy", ["", "fixed", "fixed:", "fixed:d", "HASH", "a", None, True, float("nan"), b"hash"])
def test_another_policy_is_refused(policy: Any) -> None:
    with pytest.raises(Invalid, match="hash, disabled, or fixed:NAME"):
        Masters(policy, "abc")
