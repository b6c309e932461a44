"""A client of a cluster: it finds the leader among the members, and writes go on when another one leads."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_guard import write_tokens

import penstock
from penstock.cli.certificates import make_member_certificates
from penstock.errors import Invalid, NotLeader
from penstock.replica.raft import RaftTimes
from penstock.server.member import Member

NAMES = ("a", "b", "c")


class Cluster:
    """Three members in this process, each served over TCP."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_member_certificates(str(folder / "certificates"), dict.fromkeys(NAMES, "127.0.0.1"))
        self.tokens = write_tokens(folder / "tokens.toml", admin='"*" = "admin"')
        ports = [_free_port() for _ in range(6)]
        self.addresses = {name: ("127.0.0.1", port) for name, port in zip(NAMES, ports[:3], strict=True)}
        self.served = {name: ("127.0.0.1", port) for name, port in zip(NAMES, ports[3:], strict=True)}
        self.members: dict[str, Member] = {}
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        self.members[name] = Member(
            self.folder / name,
            name,
            self.addresses,
            cluster=bytes(range(16)),
            certificates=self.folder / "certificates",
            times=RaftTimes(heartbeat_s=0.05, election_s=0.4),
            serve=self.served[name],
            tokens=self.tokens,
        )

    def leader(self) -> str:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for name, member in self.members.items():
                if member.is_leader:
                    return name
            time.sleep(0.02)
        raise AssertionError("no leader was elected")

    def connect(self) -> penstock.RemoteStore:
        hosts = ",".join(f"{host}:{port}" for host, port in self.served.values())
        authority = self.folder / "certificates" / "authority.pem"
        return penstock.connect(f"penstock://{hosts}", token="admin-secret", authority=authority)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    for member in cluster.members.values():
        member.close()


def test_a_client_follows_the_leader(cluster: Cluster) -> None:
    with cluster.connect() as store:
        users = store.kv("users")
        for number in range(20):
            users.put(b"%d" % number, b"before", durable=True)
        cluster.members.pop(gone := cluster.leader()).close()
        for number in range(20, 40):
            users.put(b"%d" % number, b"after", durable=True)
        assert len(list(users.scan())) == 40
        cluster.start(gone)
        last = max(member.committed for member in cluster.members.values())
        back = cluster.members[gone].store()
        back.wait_for(last, timeout_s=30)
        assert len(list(back.kv("users").scan())) == 40


def test_a_member_that_does_not_answer_does_not_hold_up_a_client(cluster: Cluster) -> None:
    hosts = [f"{host}:{port}" for host, port in cluster.served.values()]
    authority = cluster.folder / "certificates" / "authority.pem"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        address = "penstock://" + ",".join([f"127.0.0.1:{silent.getsockname()[1]}", *hosts])
        with penstock.connect(address, token="admin-secret", authority=authority, timeout_s=20) as store:
            store.kv("users").put(b"a", b"1", durable=True)


def test_acknowledgements_say_quorum(cluster: Cluster) -> None:
    store = cluster.members[cluster.leader()].store()
    store.kv("users").put(b"a", b"1")
    assert store.flush().durability is penstock.Durability.QUORUM


def test_a_follower_reads_and_refuses_writes(cluster: Cluster) -> None:
    leader = cluster.members[cluster.leader()].store()
    leader.kv("users").put(b"a", b"1", durable=True)
    follower = next(member for name, member in cluster.members.items() if name != cluster.leader()).store()
    follower.wait_for(leader.view().lsn, timeout_s=30)
    users = follower.kv("users")
    assert users.get(b"a") == b"1"
    with follower.snapshot() as snapshot:
        assert snapshot.kv("users").get(b"a") == b"1"
    for write in (lambda: users.put(b"b", b"2"), lambda: follower.kv("new"), lambda: follower.drop("users")):
        with pytest.raises(NotLeader):
            write()


def test_a_folder_of_a_member_is_opened_as_a_member_only(cluster: Cluster) -> None:
    cluster.members.pop("a").close()
    with pytest.raises(Invalid, match="member of a cluster"):
        penstock.open(cluster.folder / "a")
    with pytest.raises(Invalid, match="another cluster"):
        Member(
            cluster.folder / "a",
            "a",
            cluster.addresses,
            cluster=bytes(16),
            certificates=cluster.folder / "certificates",
        )
    cluster.start("a")


def test_a_follower_that_fails_begins_anew(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that could not be applied, because of a disk error for example, is applied after an opening."""
    leader = cluster.members[cluster.leader()].store()
    users = leader.kv("users")
    users.put(b"a", b"1", durable=True)
    member = next(member for name, member in cluster.members.items() if name != cluster.leader())
    follower = member.store()
    follower.wait_for(leader.view().lsn, timeout_s=30)

    def fail(*_: object) -> None:
        raise OSError(5, "the disk is away")

    monkeypatch.setattr(follower._dispatcher, "dispatch", fail)
    users.put(b"b", b"2", durable=True)
    deadline = time.monotonic() + 30
    while (again := member.store()) is follower:
        assert time.monotonic() < deadline, "the member did not begin anew"
        time.sleep(0.02)
    again.wait_for(leader.view().lsn, timeout_s=30)
    assert again.kv("users").get(b"b") == b"2"
