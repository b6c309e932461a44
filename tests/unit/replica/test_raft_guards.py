"""Each guard around PySyncObj, one message at a time; the control beside it shows what the library does alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.errors import CorruptionError, Invalid
from penstock.log import Log
from penstock.replica.messages import (
    Append,
    Appended,
    Message,
    NewerTerm,
    PreVote,
    PreVoteGranted,
    RequestVote,
    Vote,
    pack,
    unpack,
)
from penstock.replica.proposal import Proposal
from penstock.replica.raft import NOTICE_S, Raft
from penstock.replica.raft_log import RaftLog
from penstock.replica.replicated import TICK_S
from penstock.replica.state import MEMBER, RaftState, StateFile
from penstock.testing.network import SETTINGS, SimulatedCluster, SimulatedMember

NAMES = ["member-2", "member-3", "member-4", "member-5"]


class _Cluster(SimulatedCluster):
    """Keeps what is sent, with what was durable then."""

    standing = MEMBER

    def __init__(self) -> None:
        super().__init__(seed=1, members=5)
        self.sent: list[tuple[str, Message, RaftState, int]] = []

    def post(self, sender: str, receiver: str, data: bytes) -> None:
        if sender == "member-1" and hasattr(self, "members"):
            disk = self.members[sender].disk.image().restore("strict")
            log = Log.open(disk, "/journal", random=self.random, settings=SETTINGS)
            self.sent.append((receiver, unpack(data), StateFile(disk, "/raft").state, log.last))


@pytest.fixture
def cluster() -> Iterator[_Cluster]:
    with _Cluster() as cluster:
        yield cluster


@pytest.fixture
def member(cluster: _Cluster) -> SimulatedMember:
    return cluster.members["member-1"]


def _receive(member: SimulatedMember, sender: str, message: Message) -> None:
    assert member.raft is not None
    member.raft.receive(sender, unpack(pack(message)))
    member.raft._send_waiting()


def _follow(member: SimulatedMember, *terms: int, committed: int = 0) -> None:
    """Give a member entries of these terms, from a leader of the last one."""
    for index, term in enumerate(terms):
        previous = terms[index - 1] if index else 0
        _receive(member, "member-2", Append(term, index, previous, min(committed, index), 0, ((term, b"%d" % index),)))
    _receive(member, "member-2", Append(terms[-1], len(terms), terms[-1], committed))


def _elect(cluster: _Cluster, member: SimulatedMember, *voters: str) -> Raft:
    assert member.raft is not None
    cluster.now_s += 5
    member.raft.tick(0)  # it asks whether it would be elected
    for name in NAMES[:2]:
        _receive(member, name, PreVoteGranted(member.raft.term, member.raft._attempt))
    member.raft.tick(0)
    for voter in voters:
        _receive(member, voter, Vote(member.raft.term))
    return member.raft


def _log(member: SimulatedMember) -> tuple[int, int]:
    assert member.log is not None
    return member.log.last, member.log.committed


def test_a_repeated_append_drops_nothing(member: SimulatedMember) -> None:
    _follow(member, 1, 1, 1, committed=3)
    _receive(member, "member-2", Append(1, 0, 0, 0, 0, ((1, b"0"),)))
    _receive(member, "member-2", Append(1, 1, 1, 3))
    assert _log(member) == (3, 3)


def test_a_conflict_is_cut(member: SimulatedMember) -> None:
    _follow(member, 1, 1, 1, committed=1)
    _receive(member, "member-3", Append(2, 1, 1, 1, 0, ((2, b"other"),)))
    assert _log(member) == (2, 1)


def test_a_committed_entry_is_never_cut(member: SimulatedMember) -> None:
    _follow(member, 1, 1, committed=2)
    with pytest.raises(CorruptionError, match="committed"):
        _receive(member, "member-3", Append(2, 1, 1, 2, 0, ((2, b"other"),)))
    assert _log(member) == (2, 2)


def test_only_what_the_leader_checked_is_committed(member: SimulatedMember) -> None:
    """Entries that an old leader left must not be committed because the new one has as many."""
    _follow(member, 1, 1, 1, committed=1)
    _receive(member, "member-3", Append(2, 1, 1, 3))
    assert _log(member) == (3, 1)


class _UncappedCommit(Raft):
    def _handle(self, node: Any, kind: str, message: Message, **fields: Any) -> None:
        if isinstance(message, Append):
            fields["commit_index"] = message.committed
        super()._handle(node, kind, message, **fields)


def test_control_the_library_commits_what_was_not_checked() -> None:
    class Cluster(_Cluster):
        make_raft = _UncappedCommit

    with Cluster() as cluster:
        member = cluster.members["member-1"]
        _follow(member, 1, 1, 1, committed=1)
        _receive(member, "member-3", Append(2, 1, 1, 3))
        assert _log(member) == (3, 3)


def test_an_entry_is_durable_before_it_is_acknowledged(cluster: _Cluster, member: SimulatedMember) -> None:
    _follow(member, 1, 1, 1)
    answers = [
        (message.next_index, durable) for _, message, _, durable in cluster.sent if isinstance(message, Appended)
    ]
    assert len(answers) == 4
    assert all(next_index - 1 <= durable for next_index, durable in answers)


def test_a_vote_is_durable_before_it_is_told(cluster: _Cluster, member: SimulatedMember) -> None:
    _receive(member, "member-3", RequestVote(7, 0, 0))
    votes = [(to, message.term, state) for to, message, state, _ in cluster.sent if isinstance(message, Vote)]
    assert [(to, term, state.term, state.vote) for to, term, state in votes] == [("member-3", 7, 7, "member-3")]


def test_a_member_votes_once_in_a_term_even_after_a_crash(cluster: _Cluster, member: SimulatedMember) -> None:
    _receive(member, "member-3", RequestVote(7, 0, 0))
    member.crash("strict")
    member.start()
    _receive(member, "member-4", RequestVote(7, 0, 0))
    assert [to for to, message, *_ in cluster.sent if isinstance(message, Vote)] == ["member-3"]


class _ForgetfulLog(RaftLog):
    """Keeps term and vote in memory only."""

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        self._term, self._vote = term, votedForNodeId

    def getCurrentTerm(self) -> int:
        return getattr(self, "_term", 0)

    def getVotedForNodeId(self) -> str | None:
        return getattr(self, "_vote", None)


def test_control_a_vote_in_memory_is_given_twice() -> None:
    class Cluster(_Cluster):
        make_log = _ForgetfulLog

    with Cluster() as cluster:
        member = cluster.members["member-1"]
        _receive(member, "member-3", RequestVote(7, 0, 0))
        member.crash("strict")
        member.start()
        _receive(member, "member-4", RequestVote(7, 0, 0))
        assert [to for to, message, *_ in cluster.sent if isinstance(message, Vote)] == ["member-3", "member-4"]


def test_no_term_begins_without_support(cluster: _Cluster, member: SimulatedMember) -> None:
    """A member that was cut off does not raise its term, so that it disturbs nobody when it is back."""
    assert member.raft is not None
    term = member.raft.term
    for _ in range(10):
        cluster.now_s += 5
        member.raft.tick(0)
        attempt = member.raft._attempt
        for name in (NAMES[0], NAMES[0]):
            _receive(member, name, PreVoteGranted(member.raft.term, attempt))
        _receive(member, NAMES[1], PreVoteGranted(member.raft.term, attempt - 1))
    assert member.raft.term == term
    _elect(cluster, member)
    assert member.raft.term == term + 1


def test_a_member_that_hears_its_leader_supports_nobody(cluster: _Cluster, member: SimulatedMember) -> None:
    _follow(member, 1, committed=1)
    _receive(member, "member-3", PreVote(1, 9, 1, 4))
    cluster.now_s += 5
    _receive(member, "member-3", PreVote(1, 0, 0, 5))  # its log lacks an entry
    assert not [message for _, message, _, _ in cluster.sent if isinstance(message, PreVoteGranted)]
    _receive(member, "member-3", PreVote(1, 9, 1, 6))
    assert [message.attempt for _, message, _, _ in cluster.sent if isinstance(message, PreVoteGranted)] == [6]


def test_a_vote_counts_once(cluster: _Cluster, member: SimulatedMember) -> None:
    raft = _elect(cluster, member, "member-2", "member-2", "member-2")
    assert not raft._isLeader()
    _receive(member, "member-3", Vote(raft.term))
    assert raft._isLeader()


def test_control_the_library_counts_a_vote_twice() -> None:
    class EveryVote(Raft):
        def receive(self, member: str, message: Message) -> None:
            self._voters.discard(member)
            super().receive(member, message)

    class Cluster(_Cluster):
        make_raft = EveryVote

    with Cluster() as cluster:
        assert _elect(cluster, cluster.members["member-1"], "member-2", "member-2")._isLeader()


def test_acknowledgements_of_another_term_do_not_count(cluster: _Cluster, member: SimulatedMember) -> None:
    raft = _elect(cluster, member, "member-2", "member-3")
    proposal = Proposal([b"x"])
    raft.submit(proposal)
    raft.tick(0)
    for name in NAMES:
        _receive(member, name, Appended(raft.term - 1, 3, success=True, reset=False))
    raft.tick(0)
    assert not proposal.is_answered
    for name in NAMES[:2]:
        _receive(member, name, Appended(raft.term, 3, success=True, reset=False))
    raft.tick(0)
    raft.tick(0)
    assert proposal.lsn == 1


def test_a_leader_that_was_replaced_steps_down(cluster: _Cluster, member: SimulatedMember) -> None:
    raft = _elect(cluster, member, "member-2", "member-3")
    proposal = Proposal([b"x"])
    raft.submit(proposal)
    raft.tick(0)
    _receive(member, "member-4", NewerTerm(raft.term + 3))
    raft.tick(0)
    assert not raft._isLeader()
    assert proposal.error is not None
    assert "may or may not" in str(proposal.error)


def test_a_message_of_an_old_term_is_answered_by_the_newer(cluster: _Cluster, member: SimulatedMember) -> None:
    _follow(member, 4)
    cluster.sent.clear()
    _receive(member, "member-5", Append(2, 0, 0, 0))
    assert [(to, message) for to, message, *_ in cluster.sent] == [("member-5", NewerTerm(4))]


def test_nobody_votes_while_a_leader_is_heard(cluster: _Cluster, member: SimulatedMember) -> None:
    _follow(member, 1)
    _receive(member, "member-3", RequestVote(9, 5, 1))
    assert not any(isinstance(message, Vote) for _, message, *_ in cluster.sent)
    cluster.now_s += 1
    _receive(member, "member-3", RequestVote(9, 5, 1))
    assert any(isinstance(message, Vote) for _, message, *_ in cluster.sent)


def test_followers_learn_what_is_committed_without_another_write(cluster: _Cluster, member: SimulatedMember) -> None:
    """With the next entries; if there are none, soon, by a message that does not wait for the next heartbeat."""
    raft = _elect(cluster, member, "member-2", "member-3")
    for name in NAMES:
        raft.connect(name)
    proposal = Proposal([b"x"])
    raft.submit(proposal)
    raft.tick(0)
    for name in NAMES[:2]:
        _receive(member, name, Appended(raft.term, raft.log.last + 1, success=True, reset=False))
    cluster.sent.clear()
    raft.tick(0)
    assert proposal.lsn is not None
    assert not cluster.sent
    cluster.now_s += NOTICE_S * 1.01
    raft.tick(0)
    committed = {to: message.committed for to, message, *_ in cluster.sent if isinstance(message, Append)}
    assert committed == dict.fromkeys(NAMES, raft.log.last)


def test_a_leader_does_not_sleep_past_a_notice(
    cluster: _Cluster, member: SimulatedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round that finds an entry committed, and those after it, wait no longer than until the notice is due."""
    raft, waits = _elect(cluster, member, "member-2", "member-3"), list[float]()
    for name in NAMES:
        raft.connect(name)
    raft.submit(Proposal([b"x"]))
    raft.tick(0)
    for name in NAMES[:2]:
        _receive(member, name, Appended(raft.term, raft.log.last + 1, success=True, reset=False))
    monkeypatch.setattr(raft.poller, "poll", waits.append)
    for _ in range(2):
        cluster.sent.clear()
        raft.tick(TICK_S)
        assert raft.log.committed == raft.log.last
        assert not cluster.sent  # the notice is not out yet
    assert len(waits) == 2
    assert max(waits) <= NOTICE_S < TICK_S


def test_a_member_that_cannot_write_lets_others_be_elected_first(cluster: _Cluster, member: SimulatedMember) -> None:
    assert member.raft is not None
    member.raft.hesitate()

    def ask_for(elections: int) -> int:
        for _ in range(round(elections * cluster.times.election_s / cluster.times.heartbeat_s)):
            cluster.now_s += cluster.times.heartbeat_s
            member.raft.tick(0)  # type: ignore[union-attr]
        return sum(isinstance(message, PreVote) for _, message, *_ in cluster.sent)

    assert ask_for(4) == 0
    assert ask_for(8) > 0  # nobody else can


def test_a_term_that_cannot_be_stored_changes_nothing(
    cluster: _Cluster, member: SimulatedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a leader whose disk fails once would lead the next term, which another was elected for."""
    raft = _elect(cluster, member, "member-2", "member-3")
    term = raft.term

    def fail(*_: object) -> None:
        raise OSError(5, "one bad write")

    monkeypatch.setattr(member.log, "setCurrentTerm", fail)
    with pytest.raises(OSError, match="one bad write"):
        _receive(member, "member-4", Append(term + 1, 0, 0, 0))
    assert raft.term == term


def test_a_term_that_leaps_is_refused(member: SimulatedMember) -> None:
    with pytest.raises(Invalid, match="term"):
        _receive(member, "member-2", RequestVote((1 << 63) - 1, 9, 9))
    assert member.raft is not None
    assert member.raft.term == 0


def test_a_member_that_was_stopped_hears_its_leader_first(cluster: _Cluster, member: SimulatedMember) -> None:
    assert member.raft is not None
    _follow(member, 1)
    member.raft.tick(0)
    cluster.now_s += 60
    member.raft.tick(0)
    assert member.raft.term == 1


def test_a_write_to_a_follower_names_the_leader(member: SimulatedMember) -> None:
    _follow(member, 1)
    assert member.raft is not None
    proposal = Proposal([b"x"])
    member.raft.submit(proposal)
    member.raft.tick(0)
    assert proposal.error is not None
    assert "write to member-2" in str(proposal.error)


@pytest.mark.parametrize(
    "message",
    [
        Append(-1, 0, 0, 0),
        Append(3, 0, 5, 0),
        Append(3, 0, 1, 0, 0, ((2, b"x"), (1, b"y"))),
        Append(3, 1 << 63, 1, 0),
        Appended(3, -5, success=True, reset=False),
        RequestVote(3, -1, 0),
    ],
)
def test_a_message_that_no_member_sends_is_refused(message: Message) -> None:
    with pytest.raises(Invalid):
        unpack(pack(message))


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x80\x04\x95", bytes(100), b"\x92\xa4Vote", pack(Vote(1)) + b"x"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(Invalid):
        unpack(data)
