"""Seeded schedules of three and five members, with crashes, partitions and messages that are lost, doubled and late.

Controls: a log that is not durable, and appends as the bare library handles them, end in a violation.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any, Self

import msgspec
import pytest
from pysyncobj import SyncObj

from penstock.errors import CorruptionError
from penstock.journal.record import Lsn
from penstock.log import Log
from penstock.replica.messages import Append, received_entries
from penstock.replica.proposal import Proposal
from penstock.replica.raft import Raft
from penstock.replica.raft_log import RaftLog
from penstock.replica.state import FOUNDER, MEMBER, StateFile
from penstock.testing.crashes import Violation
from penstock.testing.network import SETTINGS, SimulatedCluster, SimulatedMember

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
    for event in ("crash", "all", "block", "double", "lose", "start", "cut"):
        assert done[event] > SEEDS
    assert done["wiped"] > SEEDS // 2
    assert done["installed"] > SEEDS // 8


@pytest.mark.campaign
def test_thousands_of_schedules() -> None:
    acknowledged, _ = _run(range(1_000, 6_000), 2_500)
    assert acknowledged > 100_000


def test_a_seed_is_one_schedule_in_every_process() -> None:
    """Also where texts have other hashes: the seed of a failure must show it again."""
    code = (
        "from penstock.testing.network import SimulatedCluster\n"
        "with SimulatedCluster(seed=8, members=5) as cluster:\n"
        "    cluster.run(1_500)\n"
        "    print(sorted(cluster.done.items()), cluster.describe())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for hashes in ("1", "2", "3")
    ]
    assert len(set(runs)) == 1, runs


class _Founded(SimulatedCluster):
    """A cluster whose first member brings a store that began alone."""

    def __enter__(self) -> Self:
        super().__enter__()
        founder = self.members["member-1"]
        founder.crash("kept")
        founder.wipe()
        log = Log.open(founder.disk, "/journal", random=self.random, settings=SETTINGS)
        bodies = [b"from before %d" % number for number in range(5)]
        log.commit(bodies)
        log.close()
        state = StateFile(founder.disk, "/raft")
        state.save(msgspec.structs.replace(state.state, standing=FOUNDER))
        founder.start()
        for lsn, body in enumerate(bodies, 1):
            self.proposals.append((proposal := Proposal([body]), body))
            proposal.answer(lsn=Lsn(lsn))
        return self

    def _wipe(self, member: SimulatedMember) -> None:
        pass  # the founder's store may be the only copy


def test_a_store_that_began_alone_is_on_every_member() -> None:
    acknowledged, _ = _run(range(40), 600, _Founded)
    assert acknowledged > 40 * 6


def test_a_founder_that_is_outvoted_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Raft, "_lacks_founder", lambda raft, last: False)
    assert _violates(_Founded)


def _violates(cluster: type[SimulatedCluster], first: int = 0) -> str:
    with pytest.raises((Violation, CorruptionError)) as caught:
        _run(range(first, first + 400), 1_500, cluster)
    return str(caught.value)


class _LazyLog(RaftLog):
    """Tells that entries are durable before they are."""

    def sync(self) -> None:
        self._log.synced = self._log.last


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


def test_a_log_that_is_not_durable_is_caught() -> None:
    class Cluster(SimulatedCluster):
        make_log = _LazyLog

    assert _violates(Cluster)


def test_a_new_disk_that_votes_at_once_is_caught() -> None:
    class Cluster(SimulatedCluster):
        standing = MEMBER

    assert _violates(Cluster, 10)


def test_appends_of_the_bare_library_are_caught() -> None:
    class Cluster(SimulatedCluster):
        make_raft = _LibraryAppend

    assert _violates(Cluster)


def test_the_library_is_the_one_the_guards_know() -> None:
    """The guards replace private methods of one version: another must be read again first."""
    from pysyncobj.version import VERSION

    from penstock.replica.library import LIBRARY_VERSION

    assert VERSION == LIBRARY_VERSION
    for name in {name for part in Raft.__mro__[: Raft.__mro__.index(SyncObj)] for name in vars(part)}:
        if name.startswith("_SyncObj__"):
            assert name in vars(SyncObj), f"the library has no {name} any more"
