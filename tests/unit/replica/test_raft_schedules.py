"""Seeded schedules of three and five members, with crashes, partitions and messages that are lost, doubled and late.

Controls: a log that is not durable, and appends as the bare library handles them, end in a violation.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pysyncobj import SyncObj

from penstock.errors import CorruptionError
from penstock.replica.messages import Append, received_entries
from penstock.replica.raft import Raft
from penstock.replica.raft_log import RaftLog
from penstock.testing.crashes import Violation
from penstock.testing.network import SimulatedCluster

SEEDS = 60


def _run(seeds: range, steps: int, cluster: type[SimulatedCluster] = SimulatedCluster) -> tuple[int, Counter[str]]:
    acknowledged, done = 0, Counter[str]()
    for seed in seeds:
        with cluster(seed=seed, members=5 if seed % 3 == 0 else 3) as members:
            members.run(steps)
            members.heal()
            acknowledged += members.acknowledged()
            done += members.done
    return acknowledged, done


def test_nothing_acknowledged_is_lost_or_doubled() -> None:
    acknowledged, done = _run(range(SEEDS), 1_500)
    assert acknowledged > SEEDS * 10
    for what in ("crash", "all", "block", "double", "lose", "start"):
        assert done[what] > SEEDS


@pytest.mark.campaign
def test_thousands_of_schedules() -> None:
    acknowledged, _ = _run(range(1_000, 6_000), 2_500)
    assert acknowledged > 100_000


def _violates(cluster: type[SimulatedCluster], seeds: int = 400) -> str:
    with pytest.raises((Violation, CorruptionError)) as caught:
        _run(range(seeds), 1_500, cluster)
    return str(caught.value)


class _LazyLog(RaftLog):
    """Tells that entries are durable before they are."""

    def sync(self) -> None:
        self._log.synced = self._log.last


class _ForgetfulLog(RaftLog):
    """Keeps term and vote in memory only."""

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        self._term, self._vote = term, votedForNodeId

    def getCurrentTerm(self) -> int:
        return getattr(self, "_term", 0)

    def getVotedForNodeId(self) -> str | None:
        return getattr(self, "_vote", None)


class _LibraryAppend(Raft):
    """Handles an append as the library does."""

    def _receive_append(self, node: Any, message: Append) -> None:
        self._may_cut = True
        self._handle(
            node,
            "append_entries",
            message,
            prevLogIdx=message.previous_index,
            prevLogTerm=message.previous_term,
            entries=received_entries(message),
            commit_index=message.committed,
        )


@pytest.mark.parametrize("log", [_LazyLog, _ForgetfulLog])
def test_a_log_that_is_not_durable_is_caught(log: type[RaftLog]) -> None:
    class Cluster(SimulatedCluster):
        make_log = log

    assert _violates(Cluster)


def test_appends_of_the_bare_library_are_caught() -> None:
    class Cluster(SimulatedCluster):
        make_raft = _LibraryAppend

    assert _violates(Cluster)


def test_the_library_is_the_one_the_guards_know() -> None:
    """The guards replace private methods of one version: another must be read again first."""
    from pysyncobj.version import VERSION

    from penstock.replica.raft import LIBRARY_VERSION

    assert VERSION == LIBRARY_VERSION
    for name in vars(Raft):
        if name.startswith("_SyncObj__"):
            assert name in vars(SyncObj), f"the library has no {name} any more"
