"""The master of a partition: the member that is preferred for reads of it.

A cluster has one policy, which `cluster.toml` records. Every member computes the same answer from the policy, the names
of the members and the number of the partition, so nothing is stored, elected or rebuilt: a member that opens its
journal knows the masters of whatever partitions it finds there. A master has no rights that others lack: writes go to
the leader, and each member maintains its own files.

Thread: pure; an object never changes.
Invariant: with one member less, only the partitions of that member get another master.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from penstock.errors import Invalid

HASH, DISABLED, FIXED = "hash", "disabled", "fixed:"


class Masters:
    """The policy of a cluster.

    >>> from penstock.replica.masters import Masters
    >>> Masters("hash", ["a", "b", "c"]).master_of(1 << 16), Masters("fixed:b", ["a", "b", "c"]).master_of(1 << 16)
    ('c', 'b')
    """

    def __init__(self, policy: str, members: Iterable[str]) -> None:
        self._members = tuple(sorted(set(members)))
        policy = str(policy)
        name = policy[len(FIXED) :] if policy[: len(FIXED)] == FIXED else None
        if policy not in (HASH, DISABLED) and name not in self._members:
            raise Invalid(
                f"masters is {policy!r}: give {HASH}, {DISABLED}, or {FIXED}NAME with one of {', '.join(self._members)}"
            )
        self.policy, self._fixed = policy, name

    def master_of(self, partition: int) -> str:
        """Return the master of a partition; empty if masters are disabled."""
        if self.policy == DISABLED:
            return ""
        return self._fixed or max(self._members, key=lambda name: _weight(name, partition))


def _weight(member: str, partition: int) -> bytes:
    """Return a number for a member and a partition, which is a format: all members must compute the same."""
    return hashlib.blake2b(partition.to_bytes(8, "big") + member.encode(), digest_size=8).digest()
