"""Three members with threads and TCP on loopback: elections, writes, failures, and peers that are not members."""

from __future__ import annotations

import errno
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.certificates import make_member_certificates
from penstock.errors import NotLeader, PenstockError, RetryLater
from penstock.host import threads
from penstock.host.clock import SystemClock
from penstock.host.os_files import OsFileSystem
from penstock.log import Log, LogSettings
from penstock.replica import replicated, tcp_link
from penstock.replica.file_channel import Greeting, pack_greeting
from penstock.replica.identity import member_contexts
from penstock.replica.raft import Raft
from penstock.replica.replicated import Replicated
from penstock.replica.resolving import Resolver
from penstock.replica.seams import RaftTimes
from penstock.replica.state import StateFile
from penstock.replica.tcp_link import TcpLink
from penstock.testing.members import free_ports

NAMES = ("a", "b", "c")
TIMES = RaftTimes(heartbeat_s=0.05, election_s=0.4)


class Cluster:
    """Members in one process, each with a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_member_certificates(str(folder / "certificates"), dict.fromkeys(NAMES, "127.0.0.1"))
        self.addresses = {name: ("127.0.0.1", port) for name, port in zip(NAMES, free_ports(len(NAMES)), strict=True)}
        self.members: dict[str, Replicated] = {}
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> Replicated:
        fs, folder = OsFileSystem(), self.folder / name
        folder.mkdir(exist_ok=True)
        server, client = member_contexts(self.folder / "certificates", name)
        link = TcpLink(
            name, self.addresses, cluster=b"one", server_context=server, client_context=client, clock=SystemClock()
        )
        self.members[name] = member = Replicated(
            Log.open(fs, str(folder / "journal"), random=random.Random(), settings=LogSettings()),
            StateFile(fs, str(folder / "raft")),
            member=name,
            others=[other for other in NAMES if other != name],
            link=link,
            clock=SystemClock(),
            random=random.Random(),
            times=TIMES,
        )
        return member

    def stop(self, name: str) -> None:
        self.members.pop(name).close()

    def leader(self) -> Replicated:
        """Wait for a leader."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for member in self.members.values():
                if member.is_leader:
                    return member
            time.sleep(0.01)
        raise AssertionError("no leader was elected")

    def write(self, body: bytes) -> int:
        """Write a record to whoever leads, until it is acknowledged."""
        deadline = time.monotonic() + 20
        while True:
            try:
                return self.leader().propose([body])
            except RetryLater:
                if time.monotonic() > deadline:
                    raise

    def records(self, name: str, upto: int) -> list[bytes]:
        self.members[name].await_committed(upto, 20)
        return [body for _, body in self.members[name].records(1)][:upto]

    def close(self) -> None:
        for name in list(self.members):
            self.stop(name)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_every_member_gets_what_was_acknowledged(cluster: Cluster) -> None:
    bodies = [b"%d" % number for number in range(100)]
    leader = cluster.leader()
    lsns = [leader.propose([body]) for body in bodies]
    assert lsns == list(range(1, 101))
    assert leader.propose([b"x" * (3 << 20), b"y"]) == 102
    for name in NAMES:
        assert cluster.records(name, 102) == [*bodies, b"x" * (3 << 20), b"y"]


def test_a_follower_refuses_writes_and_names_the_leader(cluster: Cluster) -> None:
    leader = cluster.leader()
    name = next(name for name in NAMES if cluster.members[name] is not leader)
    cluster.members[name].await_leader(10)
    with pytest.raises(NotLeader) as caught:
        cluster.members[name].propose([b"x"])
    assert cluster.members[caught.value.leader or ""] is leader


def test_writes_go_on_when_a_member_stops_and_comes_back(cluster: Cluster) -> None:
    leader = cluster.leader()
    follower = next(name for name in NAMES if cluster.members[name] is not leader)
    first = leader.propose([b"first"])
    cluster.stop(follower)
    for number in range(20):
        leader.propose([b"%d" % number])
    last = leader.propose([b"last"])
    assert last == first + 21
    cluster.start(follower)
    assert cluster.records(follower, last)[-1] == b"last"


def test_another_leader_is_elected(cluster: Cluster) -> None:
    written = [b"first"]
    cluster.write(b"first")
    for number in range(3):
        leader = cluster.leader()
        name = next(name for name in NAMES if cluster.members[name] is leader)
        cluster.stop(name)
        written.append(b"after %d" % number)
        last = cluster.write(written[-1])
        cluster.start(name)
    for name in NAMES:
        bodies = cluster.records(name, last)
        assert [body for body in bodies if body in written] == written


def test_without_a_quorum_nothing_is_acknowledged(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.replica.replicated.COMMIT_S", 1.5)
    leader = cluster.leader()
    for name in NAMES:
        if cluster.members.get(name) is not leader:
            cluster.stop(name)
    before = leader.committed
    with pytest.raises(RetryLater):
        leader.propose([b"lost or not"])
    assert leader.committed == before


def _connect(cluster: Cluster, name: str, certificate: str, folder: Path) -> ssl.SSLSocket:
    return member_contexts(folder, certificate)[1].wrap_socket(socket.create_connection(cluster.addresses[name], 5))


def _await_text(caplog: pytest.LogCaptureFixture, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in caplog.text:  # it is logged by another thread, after the connection is closed
        assert time.monotonic() < deadline, f"{text!r} was not logged"
        time.sleep(0.01)


def _frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _is_closed(sock: socket.socket) -> bool:
    sock.settimeout(10)
    with suppress(ConnectionError, ssl.SSLError):
        while sock.recv(4096):
            pass
    return True


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\xff\xff\xff" + bytes(100), "a frame of 4294967295 bytes"),
        (struct.pack(">I", 6) + b"\x80\x04\x95abc", "its greeting does not decode"),
        (struct.pack(">I", 4) + b"junk", "its greeting does not decode"),
        (_frame(pack_greeting(Greeting(b"other", "c"))), "is of another cluster"),
        (_frame(pack_greeting(Greeting(b"one", "b"))), "but its certificate names"),
    ],
    ids=["huge", "pickle", "junk", "another cluster", "another member"],
)
def test_a_peer_that_is_not_who_it_should_be_is_refused(
    cluster: Cluster, data: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.write(b"before")
    caplog.set_level("DEBUG", "penstock.replica.tcp_link")
    with _connect(cluster, "a", "c", cluster.folder / "certificates") as sock:
        sock.sendall(data)
        assert _is_closed(sock)
    _await_text(caplog, why)  # not because it was silent, or because the member itself came back
    cluster.write(b"after")


def test_a_member_that_sends_nonsense_is_disconnected(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.write(b"before")
    caplog.set_level("DEBUG", "penstock.replica.tcp_link")
    with _connect(cluster, "a", "c", cluster.folder / "certificates") as sock:
        frames = (pack_greeting(Greeting(b"one", "c")), b"\x80\x04\x95nonsense")
        sock.sendall(b"".join(map(_frame, frames)))  # at once: the member itself connects again soon
        assert _is_closed(sock)
    _await_text(caplog, "a message that does not decode")
    cluster.write(b"after")


def test_a_certificate_of_another_authority_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.write(b"before")
    make_member_certificates(str(tmp_path / "others"), dict.fromkeys(NAMES, "127.0.0.1"))
    (tmp_path / "others" / "authority.pem").write_bytes((cluster.folder / "certificates/authority.pem").read_bytes())
    with suppress(ssl.SSLError, ConnectionError), _connect(cluster, "a", "c", tmp_path / "others") as sock:
        sock.settimeout(10)
        assert sock.recv(4096) == b""  # a member that accepts the certificate greets at once
    with socket.create_connection(cluster.addresses["a"], 5) as plain:
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert _is_closed(plain)
    cluster.write(b"after")


def test_a_failed_disk_stops_a_member_until_it_recovers(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.write(b"before")
    leader = cluster.leader()
    with monkeypatch.context() as patch:
        patch.setattr(leader._log, "sync", _fail)
        with pytest.raises((OSError, PenstockError)):
            leader.propose([b"failed"])
    with pytest.raises(PenstockError):
        leader.propose([b"refused"])
    leader.recover()
    last = cluster.write(b"after")
    for name in NAMES:
        assert cluster.records(name, last)[-1] == b"after"


def _fail() -> None:
    raise OSError(5, "the disk is away")


def test_a_process_with_too_many_threads_looks_up_no_name_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    resolver = Resolver()
    with monkeypatch.context() as patch:
        patch.setattr(threading, "_start_new_thread", refuse)
        assert resolver.find("localhost") is None
    assert resolver.find("localhost", wait=True) is not None


def test_a_connection_that_is_reset_while_it_is_made_leaves_no_socket_open(tmp_path: Path) -> None:
    make_member_certificates(str(tmp_path), {"a": "127.0.0.1"})
    for context in member_contexts(tmp_path, "a"):
        plain = socket.socket()  # to nobody, as after a reset
        descriptor = plain.fileno()
        with pytest.raises(ConnectionResetError):
            context.wrap_socket(plain, server_side=context.protocol == ssl.PROTOCOL_TLS_SERVER)
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(descriptor)


def test_a_caller_without_a_descriptor_does_not_keep_the_loop_busy(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection waits in the listener, and would end every wait of the loop at once."""
    link = cluster.leader()._link
    assert isinstance(link, TcpLink)
    listener, refused, subscribed = link._listener, threading.Event(), threading.Event()

    class Short:
        """A listener of a process without descriptors."""

        def accept(self) -> None:
            if refused.is_set():
                subscribed.set()
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    with monkeypatch.context() as patch, socket.socket() as stranger:
        patch.setattr(tcp_link, "RETRY_S", 3_600.0)
        patch.setattr(link, "_listener", Short())
        stranger.connect(link.address_of(link.member))
        assert refused.wait(20)
        for number in range(20):  # the loop goes round, and does not ask again
            cluster.write(b"%d" % number)
        assert not subscribed.is_set()
        patch.setattr(tcp_link, "RETRY_S", 0.0)
        assert subscribed.wait(20)
    cluster.write(b"last")


def test_a_start_may_take_longer_than_a_write(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine, or a process that is stopped meanwhile, is no reason to give up."""
    cluster.write(b"first")
    cluster.stop("c")
    attach, waited = TcpLink.attach, threading.Event()

    def slowly(link: TcpLink, raft: Raft) -> None:
        waited.wait(0.5)
        attach(link, raft)

    with monkeypatch.context() as patch:
        patch.setattr(replicated, "COMMIT_S", 0.05)
        patch.setattr(TcpLink, "attach", slowly)
        cluster.start("c")
    assert cluster.records("c", 1) == [b"first"]


def test_a_failure_right_after_the_start_is_one_of_a_member_that_runs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the thread that starts it has looked by then must not matter: a full disk ends no process."""
    cluster.write(b"first")
    cluster.stop("c")

    tick, spawn = Raft.tick, threads.spawn

    def fail(raft: Raft, wait_s: float) -> None:
        if "c" not in raft._nodes:
            raise OSError(errno.ENOSPC, "No space left on device")
        tick(raft, wait_s)

    def spawn_and_look_late(run: Callable[[], None], *, name: str) -> threading.Thread:
        thread = spawn(run, name=name)
        thread.join(20)
        return thread

    with monkeypatch.context() as patch:
        patch.setattr(threads, "spawn", spawn_and_look_late)
        patch.setattr(Raft, "tick", fail)
        member = cluster.start("c")
    assert member.is_failed
    member.recover()
    assert cluster.records("c", 1) == [b"first"]
