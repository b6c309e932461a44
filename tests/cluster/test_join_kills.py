"""kill -9 of a member before each change of a file and each message of its join; the next start always joins.

Two members run in this process and take writes. The third has lost its disk and needs a snapshot.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from dying_member import LAG_SEGMENTS, SETTINGS, TIMES

from penstock.testing.members import CLUSTER, LocalCluster

pytestmark = pytest.mark.timeout(600)
PROCESS = Path(__file__).with_name("dying_member.py")


class JoiningCluster(LocalCluster):
    """Two members here, and one that is killed while it joins."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, settings=SETTINGS, times=TIMES, lag_segments=LAG_SEGMENTS)
        self.write(lambda store: store.kv("rows").put(b"first", b"x", durable=True))
        self.stop("c")
        self.rows = 0
        for _ in range(12):  # more than the journal keeps for a member that is away
            self.grow()
        self.write(lambda store: store.checkpoint())
        self._process = subprocess.Popen(
            [sys.executable, str(PROCESS), str(self.folder), "c"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def grow(self) -> None:
        self.rows += 1
        self.write(lambda store: store.kv("rows").put(b"%d" % self.rows, bytes(20_000), durable=True))

    def join(self, fatal: int) -> str:
        """Run the third member until it has joined, or is killed before that change."""
        config = {"cluster": CLUSTER.hex(), "members": self.addresses}
        config["committed"] = self.members[self.leader()].committed  # type: ignore[assignment]
        (self.folder / "c.json").write_text(json.dumps(config))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(fatal, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def join_at_last(self) -> None:
        answer = self.join(0)
        assert answer.startswith("joined"), answer

    def lose_disk(self) -> None:
        with suppress(FileNotFoundError):
            self.wipe("c")

    def check(self) -> None:
        """Check that all have every row, each once, and the same."""
        self.start("c")
        digests = self.digests()
        assert digests["c"] == digests["a"] == digests["b"]
        stored = {key for key, _ in self.leader_store().kv("rows").scan()}
        assert stored == {b"first", *(b"%d" % number for number in range(1, self.rows + 1))}

    def close(self) -> None:
        super().close()
        self._process.communicate()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[JoiningCluster]:
    members = JoiningCluster(tmp_path)
    yield members
    members.close()


def _length(members: JoiningCluster) -> int:
    """Return of how many changes and messages a join consists, about."""
    members.lose_disk()
    joined, count, snapshots = members.join(0).split()
    assert (joined, snapshots) == ("joined", "1")
    return int(count)


def test_a_member_that_is_killed_while_it_joins_joins_at_its_next_start(members: JoiningCluster) -> None:
    chance, length, killed = random.Random(1), _length(members), 0
    for begin in range(1, length, max(1, length // 5)):
        members.lose_disk()
        for fatal in (begin, chance.randrange(1, length)):
            answer = members.join(fatal)
            assert answer == "killed" or answer.startswith("joined"), answer
            killed += answer == "killed"
            members.grow()
        members.join_at_last()
    assert killed
    members.check()


@pytest.mark.campaign
@pytest.mark.timeout(3_600)
def test_a_member_is_killed_at_each_step_of_its_join(members: JoiningCluster) -> None:
    fatal, killed = 0, True
    while killed:
        fatal += 1
        members.lose_disk()
        answer = members.join(fatal)
        killed = answer == "killed"
        assert killed or answer.startswith("joined"), answer
        members.join_at_last()
    assert fatal > 50
    members.check()
