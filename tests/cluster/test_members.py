"""Three members in processes of their own, which are killed and stopped while whoever leads writes.

In the end every member has every acknowledged write, once, and all members have the same.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.certificates import make_member_certificates
from penstock.replica.raft import RaftTimes
from penstock.server.member import Member
from penstock.store.settings import StoreSettings

pytestmark = pytest.mark.timeout(600)
NAMES = ("a", "b", "c")
CLUSTER = bytes(range(16))


class Cluster:
    """Processes of members, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_member_certificates(str(folder / "certificates"), dict.fromkeys(NAMES, "127.0.0.1"))
        self.addresses = {name: ("127.0.0.1", _free_port()) for name in NAMES}
        (folder / "cluster.json").write_text(json.dumps({"cluster": CLUSTER.hex(), "members": self.addresses}))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("member_process.py")), str(self.folder), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", (self.folder / f"{name}.log").read_text()[-3000:]

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.communicate()

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.communicate()
        self.processes.clear()

    def told(self) -> set[str]:
        """Return what was acknowledged; the last line of a member that was killed may be torn."""
        lines: set[str] = set()
        for name in NAMES:
            path = self.folder / f"{name}.told"
            text = path.read_text() if path.exists() else ""
            lines |= set(text[: text.rfind("\n") + 1].split())
        return lines

    def writer(self) -> str:
        """Return the member that wrote last: the leader."""
        return max(NAMES, key=lambda name: (self.folder / f"{name}.told").stat().st_mtime_ns)

    def await_progress(self, more: int, timeout_s: float = 60.0) -> None:
        wanted, deadline = len(self.told()) + more, time.monotonic() + timeout_s
        while len(self.told()) < wanted:
            assert time.monotonic() < deadline, f"no {more} writes were acknowledged within {timeout_s} s"
            time.sleep(0.05)

    def contents(self) -> dict[str, tuple[dict[bytes, bytes], Counter[bytes]]]:
        """Open every member here, wait until they agree, and return their rows and messages."""
        members = {
            name: Member(
                self.folder / name,
                name,
                self.addresses,
                cluster=CLUSTER,
                certificates=self.folder / "certificates",
                settings=StoreSettings(serve=False),
                times=RaftTimes(heartbeat_s=0.05, election_s=0.4),
            )
            for name in NAMES
        }
        try:
            deadline = time.monotonic() + 60
            while not any(member.is_leader for member in members.values()):
                assert time.monotonic() < deadline, "no leader was elected in the end"
                time.sleep(0.05)
            last = max(member.committed for member in members.values())
            found = {}
            for name, member in members.items():
                store = member.store()
                store.wait_for(last, timeout_s=60)
                rows = dict(store.kv("rows").scan())
                found[name] = (rows, Counter(store.queue("events").to_arrow()["payload"].to_pylist()))
            return found
        finally:
            for member in members.values():
                member.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()


def _run(cluster: Cluster, faults: int, seed: int) -> Counter[str]:
    chance, done = random.Random(seed), Counter[str]()
    for name in NAMES:
        cluster.start(name)
    cluster.await_progress(5)
    for _ in range(faults):
        what = chance.choice(("kill", "kill", "stop", "all"))
        name = cluster.writer() if chance.random() < 0.6 else chance.choice(NAMES)
        done[what] += 1
        if what == "kill":
            cluster.kill(name)
            cluster.await_progress(3)
            cluster.start(name)
        elif what == "stop":
            os.kill(cluster.processes[name].pid, signal.SIGSTOP)
            cluster.await_progress(3)
            os.kill(cluster.processes[name].pid, signal.SIGCONT)
        else:
            for each in NAMES:
                cluster.kill(each)
            for each in NAMES:
                cluster.start(each)
        cluster.await_progress(3)
    cluster.end()
    return done


def _check(cluster: Cluster) -> None:
    told, found = cluster.told(), cluster.contents()
    rows, messages = found["a"]
    for name in NAMES:
        assert found[name] == (rows, messages), f"{name} differs from a"
    assert told <= {key.decode() for key in rows}
    assert all(value == b"value of " + key for key, value in rows.items())
    assert set(messages) == set(rows)
    assert set(messages.values()) == {1}


def test_members_that_are_killed_lose_and_double_nothing(cluster: Cluster) -> None:
    done = _run(cluster, 3, 5)
    assert len(done) > 1
    _check(cluster)


@pytest.mark.campaign
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(4))
def test_many_faults(cluster: Cluster, seed: int) -> None:
    done = _run(cluster, 50, seed)
    assert set(done) == {"kill", "stop", "all"}
    _check(cluster)
