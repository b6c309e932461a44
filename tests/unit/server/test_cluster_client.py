"""A client of a cluster: it finds the leader among the members, and writes go on when another one leads."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import Closed, Invalid, NotLeader, PenstockError, WaitExpired
from penstock.server.member import Member
from penstock.testing.members import LocalCluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path, serve=True) as members:
        yield members


def test_a_client_follows_the_leader(cluster: LocalCluster) -> None:
    with cluster.connect() as store:
        users = store.kv("users")
        for number in range(20):
            users.put(b"%d" % number, b"before", durable=True)
        cluster.stop(old_leader := cluster.leader())
        for number in range(20, 40):
            users.put(b"%d" % number, b"after", durable=True)
        assert len(list(users.scan())) == 40
        cluster.start(old_leader)
        last = max(member.committed for member in cluster.members.values())
        back = cluster.members[old_leader].store()
        back.wait_for(last, timeout_s=30)
        assert len(list(back.kv("users").scan())) == 40


def test_a_member_that_does_not_answer_does_not_hold_up_a_client(cluster: LocalCluster) -> None:
    hosts = [f"{host}:{port}" for host, port in cluster.served.values()]
    authority = cluster.folder / "certificates" / "authority.pem"
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        address = "penstock://" + ",".join([f"127.0.0.1:{silent.getsockname()[1]}", *hosts])
        with penstock.connect(address, token="admin-secret", authority=authority, timeout_s=20) as store:
            store.kv("users").put(b"a", b"1", durable=True)


def test_acknowledgements_say_quorum(cluster: LocalCluster) -> None:
    store = cluster.members[cluster.leader()].store()
    store.kv("users").put(b"a", b"1")
    assert store.flush().durability is penstock.Durability.QUORUM


def test_a_follower_reads_and_refuses_writes(cluster: LocalCluster) -> None:
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


def test_a_folder_of_a_member_is_opened_as_a_member_only(cluster: LocalCluster) -> None:
    cluster.stop("a")
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


def test_a_follower_that_fails_begins_anew(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_linearizable_reads_see_what_was_acknowledged(cluster: LocalCluster) -> None:
    with cluster.connect(durable=True) as writer, cluster.connect(reads="linearizable") as reader:
        table, read = writer.kv("users"), reader.kv("users")
        for number in range(20):
            table.put(b"a", b"%d" % number)
            assert read.get(b"a") == b"%d" % number
        assert list(read.scan()) == [(b"a", b"19")]
        cluster.stop(cluster.leader())
        table.put(b"a", b"after")
        assert read.get(b"a") == b"after"


def test_a_read_is_not_confirmed_by_a_leader_that_is_alone(cluster: LocalCluster) -> None:
    store = cluster.leader_store()
    store.kv("users").put(b"a", b"1", durable=True)
    assert store.confirm_lead() >= 1
    for name in cluster.followers():
        cluster.stop(name)
    with pytest.raises(PenstockError):
        store.confirm_lead()


def test_a_write_that_a_leader_could_not_finish_goes_to_the_next(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(bodies: object) -> int:
        raise Closed("this member does not lead any more: connect to the leader")

    with cluster.connect() as store:
        users = store.kv("users")
        users.put(b"a", b"1", durable=True)
        monkeypatch.setattr(cluster.leader_store()._consensus, "propose", lose)
        users.put(b"b", b"2", durable=True)  # without recover()
        assert dict(users.scan()) == {b"a": b"1", b"b": b"2"}


def test_local_reads_come_from_any_member_and_do_not_write(cluster: LocalCluster) -> None:
    with cluster.connect(durable=True) as writer:
        writer.kv("users").put(b"a", b"1")
    cluster.await_agreement()
    paths = set()
    for name in cluster.names:
        host, port = cluster.served[name]
        authority = cluster.folder / "certificates" / "authority.pem"
        with penstock.connect(
            f"penstock://{host}:{port}", token="admin-secret", authority=authority, reads="local"
        ) as store:
            assert store.kv("users", create=False).get(b"a") == b"1"
            with store.snapshot() as snapshot:
                assert snapshot.kv("users").to_arrow().num_rows == 1
            with pytest.raises(NotLeader):
                store.kv("users").put(b"b", b"2", durable=True)
            paths.add(store.path)
    assert len(paths) == 3


def test_a_client_of_a_follower_alone_is_told_to_name_the_others(cluster: LocalCluster) -> None:
    host, port = next(at for name, at in cluster.served.items() if name != cluster.leader())
    authority = cluster.folder / "certificates" / "authority.pem"
    with pytest.raises(WaitExpired, match="does not lead.: give the addresses of all members, or wait until one leads"):
        penstock.connect(f"penstock://{host}:{port}", token="admin-secret", authority=authority, timeout_s=1)


@pytest.mark.parametrize("reads", ["", "Local", None, True, 1, b"local"])
def test_reads_is_one_of_three(tmp_path: Path, reads: Any) -> None:
    with pytest.raises(Invalid, match="reads is"):
        penstock.connect(tmp_path, reads=reads)
