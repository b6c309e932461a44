"""One member and its store: interrupts, failures, forks, damage. Most of it needs no other member."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.cli.certificates import make_member_certificates
from penstock.errors import CorruptionError, DiskFull, Invalid, Lost, PenstockError, Poisoned
from penstock.host.file_operations import make_dirs
from penstock.host.os_files import OsFileSystem
from penstock.host.randomness import system_random
from penstock.replica.replicated import Replicated
from penstock.replica.seams import RaftTimes
from penstock.replica.state import JOINING, StateFile, founding, new_disk
from penstock.server.member import Member
from penstock.store.identity import StoreIdentity, write_identity
from penstock.store.store import Store
from penstock.testing.members import CLUSTER, LocalCluster, await_true

TIMES = RaftTimes(heartbeat_s=0.05, election_s=0.3)


class Members:
    """Members of one cluster, in this process; the first call of `begin` says which there are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cluster: LocalCluster | None = None

    def begin(self, *names: str, times: RaftTimes = TIMES) -> dict[str, Member]:
        if self._cluster is None:
            self._cluster = LocalCluster(self.folder, names, start=False)
        self._cluster.times = times
        for name in names:
            self._cluster.start(name)
        return self._cluster.members

    @property
    def members(self) -> dict[str, Member]:
        return {} if self._cluster is None else self._cluster.members

    @property
    def addresses(self) -> dict[str, tuple[str, int]]:
        assert self._cluster is not None
        return self._cluster.addresses

    def leader(self) -> str:
        assert self._cluster is not None
        return self._cluster.leader()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    members = Members(tmp_path)
    yield members
    for member in members.members.values():
        member.close()


@pytest.fixture
def alone(members: Members) -> Member:
    member = members.begin("a")["a"]
    members.leader()
    return member


def _payloads(store: Store) -> list[bytes]:
    payloads: list[bytes] = store.queue("events").to_arrow()["payload"].to_pylist()
    return payloads


def _again(members: Members) -> Store:
    members.members.pop("a").close()
    return members.begin("a")["a"].store()


def test_an_interrupted_write_is_written_once(members: Members, alone: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next flush finds out what became of it; the same record must not be proposed again."""
    store = alone.store()
    queue = store.queue("events")
    queue.put(b"first")
    store.flush()
    log = alone._journal._log
    sync = log.sync

    interrupts = [signal.SIGINT]

    def slow() -> object:
        if interrupts:  # while the writer waits for this sync
            os.kill(os.getpid(), interrupts.pop())
        time.sleep(0.3)
        return sync()

    monkeypatch.setattr(log, "sync", slow)
    with pytest.raises(KeyboardInterrupt):
        queue.put(b"once")
        store.flush()
    store.flush()
    monkeypatch.undo()
    queue.put(b"last")
    store.flush()
    assert _payloads(store) == [b"first", b"once", b"last"]
    assert alone.committed == store._ledger.tree.lsn
    assert _payloads(_again(members)) == [b"first", b"once", b"last"]


def test_a_term_has_one_store_that_takes_writes(members: Members, alone: Member) -> None:
    """A store that failed is opened again in another term: what it left in the log may be committed later."""
    store = alone.store()
    queue = store.queue("events")
    queue.put(b"first")
    store.flush()
    term, epoch = alone._journal.current_term, queue.put(b"second")
    store.flush()
    with store._coordinator._lock:
        store._coordinator._executor.failure = PenstockError("a write failed")
    await_true(lambda: "x" if alone.is_leader and alone.store() is not store else "")
    again = alone.store()
    assert alone._journal.current_term > term
    with pytest.raises(Lost):
        again.flush(epoch)
    again.queue("events").put(b"third")
    again.flush()
    assert _payloads(_again(members)) == [b"first", b"second", b"third"]


def test_a_record_under_another_number_is_not_applied(alone: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    store = alone.store()
    users = store.kv("users")
    propose = store._consensus.propose
    monkeypatch.setattr(store._consensus, "propose", lambda bodies: propose(bodies) + 1)
    with pytest.raises((Poisoned, penstock.errors.OutcomeUnknown)):
        users.put(b"a", b"1", durable=True)


def test_a_forked_child_does_not_close_the_journal(members: Members, alone: Member) -> None:
    users = alone.store().kv("users")
    users.put(b"before", b"1", durable=True)
    ready, release = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(ready, 1)
            alone.close()
            alone._journal.close()
            os._exit(0)
        finally:
            os._exit(1)  # whatever happens, the child must not go on with the tests
    for number in range(20):
        users.put(b"%d" % number, b"v" * 100, durable=True)
    os.write(release, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(ready)
    os.close(release)
    users.put(b"after", b"1", durable=True)
    assert len(list(_again(members).kv("users").scan())) == 22


def test_a_journal_that_is_gone_is_noticed_before_a_vote(members: Members, alone: Member) -> None:
    store = alone.store()
    for number in range(50):
        store.kv("users").put(b"%d" % number, b"1", durable=True)
    store.checkpoint()
    store._maintenance.flush(store._ledger.tree)
    members.members.pop("a").close()
    for segment in (members.folder / "a" / "journal").iterdir():
        segment.unlink()
    with pytest.raises(CorruptionError):
        members.begin("a")


def test_a_member_without_its_file_is_no_store_of_its_own(members: Members, alone: Member) -> None:
    alone.store().kv("users").put(b"a", b"1", durable=True)
    members.members.pop("a").close()
    (members.folder / "a" / "raft").unlink()
    with pytest.raises(CorruptionError):
        penstock.open(members.folder / "a")


def test_an_address_in_use_is_told_at_once(members: Members) -> None:
    members.begin("a")
    members.members.pop("a").close()
    with socket.create_server(members.addresses["a"]), pytest.raises(Invalid, match="cannot listen at"):
        members.begin("a")
    members.begin("a")


def test_a_member_recovers_from_a_failure_of_its_loop(alone: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    store = alone.store()
    store.kv("users").put(b"a", b"1", durable=True)
    with monkeypatch.context() as patch:
        patch.setattr(alone._journal._log, "sync", _fail)
        with pytest.raises(PenstockError):
            store.kv("users").put(b"b", b"2", durable=True)
        time.sleep(0.2)
    await_true(lambda: "x" if alone.is_leader and alone.store() is not store else "")
    again = alone.store().kv("users")
    again.put(b"c", b"3", durable=True)
    assert again.get(b"a") == b"1"


def test_a_leader_that_cannot_open_its_store_leaves_the_lead(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    members.begin("a", "b", "c")
    failing = members.members[members.leader()]
    failing.store().kv("users").put(b"a", b"1", durable=True)
    monkeypatch.setattr(failing, "_begin_store", _fail)
    with failing.store()._coordinator._lock:
        failing.store()._coordinator._executor.failure = PenstockError("a write failed")
    other = await_true(lambda: next((n for n, m in members.members.items() if m.is_leader and m is not failing), ""))
    members.members[other].store().kv("users").put(b"b", b"2", durable=True)


def test_a_leader_whose_disk_is_full_leaves_the_lead(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    members.begin("a", "b", "c")
    full = members.members[members.leader()]
    full.store().kv("users").put(b"a", b"1", durable=True)
    monkeypatch.setattr(full.store()._space, "claim_reserve", lambda: None)
    full.store()._space.release_reserve()
    other = await_true(lambda: next((n for n, m in members.members.items() if m.is_leader and m is not full), ""))
    members.members[other].store().kv("users").put(b"b", b"2", durable=True)


def test_the_lead_stays_when_all_disks_are_full(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member leaves the lead only for one that has room."""
    monkeypatch.setattr("penstock.server.member.FULL_S", 0.0)
    members.begin("a", "b", "c")
    leader = members.members[members.leader()]
    leader.store().kv("users").put(b"a", b"1", durable=True)
    followers = [member for member in members.members.values() if member is not leader]
    for member in [*followers, leader]:
        space = member.store()._space
        monkeypatch.setattr(space, "claim_reserve", lambda: None)
        space.release_reserve()
        if member is followers[1]:
            await_true(lambda: leader._journal.others_are_full)
    term, rounds, leave = leader._journal.current_term, list[object](), leader._leave_if_full

    def count(role: tuple[object, ...]) -> None:
        leave(role)
        rounds.append(role)

    monkeypatch.setattr(leader, "_leave_if_full", count)
    await_true(lambda: len(rounds) > 3)
    assert (leader.is_leader, leader._journal.current_term) == (True, term)
    with pytest.raises(DiskFull):
        leader.store().kv("users").put(b"b", b"2", durable=True)
    followers[0].store()._port.read_only = None  # it has room again
    (other,) = await_true(lambda: [member for member in followers if member.is_leader])
    other.store().kv("users").put(b"b", b"2", durable=True)


def test_a_disk_belongs_to_one_member_of_one_cluster(members: Members, alone: Member) -> None:
    """With other members, or as another one, it would vote against what it promised."""
    alone.store().kv("users").put(b"a", b"1", durable=True)
    members.members.pop("a").close()
    more = LocalCluster(members.folder, ("a", "b", "c"), start=False)
    with pytest.raises(Invalid, match="members are not added, removed or exchanged"):
        more.start("a")
    make_member_certificates(str(members.folder / "more"), {"b": "127.0.0.1"})
    with pytest.raises(Invalid, match="is of member a of a, not of b of b"):
        Member(
            members.folder / "a", "b", {"b": ("127.0.0.1", 1)}, cluster=CLUSTER, certificates=members.folder / "more"
        )
    assert members.begin("a")["a"].store().kv("users").get(b"a") == b"1"


def test_names_that_are_not_members_are_left_out(members: Members) -> None:
    members.begin("a", "b", "c")
    leader = members.members[members.leader()]
    leader.move({"0": ("127.0.0.1", 1), "d": ("127.0.0.1", 2), **members.addresses})
    assert set(leader._addresses) == set(leader._link._addresses) == {"a", "b", "c"}
    leader.store().kv("users").put(b"a", b"1", durable=True)


def test_the_last_copy_begins_another_cluster(members: Members) -> None:
    """Two disks are lost: with one copy and two new disks nothing is elected, until the operator says so."""
    members.begin("a", "b", "c")
    members.members[members.leader()].store().kv("users").put(b"a", b"1", durable=True)
    await_true(lambda: all(member.committed == 2 for member in members.members.values()))
    for name in "abc":
        members.members.pop(name).close()
    for name in "bc":
        shutil.rmtree(members.folder / name)
    fs, path = OsFileSystem(), str(members.folder / "a" / "raft")
    state = StateFile(fs, path)
    state.save(founding(state.state, system_random()))
    members.begin("a", "b", "c")
    members.members[members.leader()].store().kv("users").put(b"b", b"2", durable=True)
    for name in "abc":
        await_true(lambda name=name: members.members[name].committed >= 3)  # type: ignore[misc]
        assert members.members[name].store().kv("users").get(b"a") == b"1"


@pytest.mark.parametrize("brought", ["a store", "a copy"])
def test_a_founder_that_brings_nothing_waits_for_nobody(members: Members, brought: str) -> None:
    """An empty store, or the empty last copy of a cluster: nothing can be lost, and whoever is elected leads."""
    path = str(members.folder / "a")
    make_dirs(OsFileSystem(), path)
    write_identity(OsFileSystem(), path, StoreIdentity(CLUSTER, CLUSTER))
    penstock.open(path).close()
    if brought == "a copy":
        state = StateFile(OsFileSystem(), f"{path}/raft")
        state.save(founding(new_disk(system_random(), standing=JOINING), system_random()))
    members.begin("a", "b", "c")
    members.members[members.leader()].store().kv("users").put(b"a", b"1", durable=True)
    for name in "abc":
        await_true(lambda name=name: members.members[name].committed == 2)  # type: ignore[misc]


def test_a_file_in_place_of_the_folder_is_told(members: Members, tmp_path: Path) -> None:
    members.begin("a")
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match="is not a folder"):
        Member(tmp_path / "file", "a", members.addresses, cluster=CLUSTER, certificates=members.folder / "certificates")


def test_an_interrupted_close_can_be_repeated(members: Members, alone: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    alone.store()
    with monkeypatch.context() as patch:
        patch.setattr(Replicated, "close", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            alone.close()
    alone.close()
    members.begin("a")


def test_a_follower_applies_what_its_ledger_had_stored_alone(members: Members) -> None:
    """After a restart it opens no store before it knows that what it stored is committed, and replays all of it."""
    slow = RaftTimes(heartbeat_s=0.3, election_s=1.0)
    members.begin("a", "b", "c", times=slow)
    leader = members.leader()
    users = members.members[leader].store().kv("users")
    for number in range(20):
        users.put(b"%d" % number, b"v", durable=True)
    name = next(name for name in members.members if name != leader)
    follower = members.members[name].store()
    follower.wait_for(members.members[leader].committed, timeout_s=30)
    follower._maintenance.flush(follower._ledger.tree)  # the ledger alone, as a checkpoint does
    shutil.copytree(members.folder / name, members.folder / "copy")  # as a kill would leave it
    members.members.pop(name).close()
    shutil.rmtree(members.folder / name)
    shutil.move(members.folder / "copy", members.folder / name)
    for number in range(20, 23):
        users.put(b"%d" % number, b"v", durable=True)
    members.members.pop(leader).close()  # another one leads when the follower is back
    members.begin(leader, times=slow)
    last = members.members[members.leader()]
    members.begin(name, times=slow)
    back = members.members[name].store()
    back.wait_for(last.committed, timeout_s=30)
    assert len(list(back.kv("users").scan())) == 23


def test_members_that_all_start_again_wait_for_the_tables_that_they_know(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    """The manifest describes a table as soon as it is made; the ledger has it when its record is known as committed."""
    for number in range(3):
        members.begin("a", "b", "c")
        leader = members.members[members.leader()]
        leader.store().kv(f"users{number}").put(b"a", b"1", durable=True)
        for name in "abc":
            members.members[name].store().wait_for(leader.committed, timeout_s=30)
        for name in "abc":
            members.members.pop(name).close()
    assert "which is another one in the ledger" not in caplog.text


def _fail(*_: object) -> None:
    raise OSError(5, "the disk is away")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
