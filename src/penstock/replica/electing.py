"""Who may be elected: members that joined, that a quorum would elect (a pre-vote), and that can write.

Thread: the loop's.
Invariants: (1) no term begins before a quorum said that it would elect this member. (2) a member with a new disk
neither votes nor stands before it has joined: see `joining`.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.host.randomness import Random
from penstock.replica.following import FollowingRaft
from penstock.replica.joining import FOUNDER, FRESH, JOINING, MEMBER, NO_VOTE, Joining
from penstock.replica.messages import PreVote, PreVoteGranted, StateInquiry, StateReport
from penstock.replica.raft_log import RaftLog
from penstock.replica.seams import FileGate, Link, RaftTimes

HESITATION = 5  # times `election_s`


class ElectingRaft(FollowingRaft):
    """The part of a member that stands for election, or does not."""

    def __init__(
        self,
        member: str,
        others: Sequence[str],
        log: RaftLog,
        link: Link,
        *,
        times: RaftTimes,
        random: Random,
        files: FileGate | None,
    ) -> None:
        self._joining = Joining(others, log.state.life) if others and log.state.standing != MEMBER else None
        self._inquired_s = -1e9
        self._attempt, self._supporters, self._stands = 0, set[str](), False  # of the pre-vote
        self._hesitates_until_s = -1e9  # until then it does not stand for election
        super().__init__(member, others, log, link, times=times, random=random, files=files)

    def _prepare_election(self, now_s: float) -> None:
        """Put an election off, or ask whether it would be won, if one is due."""
        if self._joining is not None:
            self._advance_joining(self._joining, now_s)
        elif self._lacks_founder(self.log.last) or now_s < self._hesitates_until_s:
            self._SyncObj__raftElectionDeadline = now_s + self._times.election_s * 2
        elif self._nodes and not self._stands and self._SyncObj__raftElectionDeadline < now_s and not self._isLeader():
            self._ask_for_support(now_s)

    def elect_at_once(self) -> None:
        """Stand for election without waiting for a leader. Requires: there are no other members."""
        self._SyncObj__raftElectionDeadline = 0.0

    def hesitate(self) -> None:
        """Let others be elected first: this member cannot write now. If none is, it stands again after a while."""
        if self._nodes:
            self._hesitates_until_s = self._now() + self._times.election_s * HESITATION

    def resign(self) -> None:
        """Stop leading, and let others be elected first."""
        if self._isLeader():
            self.hesitate()
            self._step_down(self.term + 1)
            self._SyncObj__raftElectionDeadline = self._now()

    # -- the pre-vote

    def _ask_for_support(self, now_s: float) -> None:
        """Ask the others whether they would elect this member; a term begins only if a quorum would."""
        self._SyncObj__raftElectionDeadline = now_s + self._SyncObj__generateRaftTimeout()
        self._attempt, self._supporters = self._attempt + 1, set()
        last = self.log.last
        for name in self._nodes:
            self._tell(name, PreVote(self.term, last, self.log.term_at(last), self._attempt))

    def _receive_pre_vote(self, member: str, message: PreVote) -> None:
        last = self.log.last
        complete = (message.last_term, message.last_index) >= (self.log.term_at(last), last)
        complete = complete and not self._lacks_founder(message.last_index)
        if complete and self._joining is None and not self._hears_leader():
            self._tell(member, PreVoteGranted(self.term, message.attempt))

    def _lacks_founder(self, last_index: int) -> bool:
        """Whether a log without entries lacks the store that a founder of the cluster brought."""
        return last_index == 0 and self.log.state.founded

    def _receive_pre_vote_granted(self, member: str, message: PreVoteGranted) -> None:
        if message.attempt == self._attempt and not self._isLeader() and not self._hears_leader():
            self._supporters.add(member)
            if len(self._supporters) + 1 > (len(self._nodes) + 1) / 2:
                self._supporters, self._stands, self._SyncObj__raftElectionDeadline = set(), True, 0.0

    # -- joining

    def _advance_joining(self, joining: Joining, now_s: float) -> None:
        """Find out whether this member may vote now; until then it does not stand."""
        self._SyncObj__raftElectionDeadline = now_s + self._times.election_s * 2
        if now_s - self._inquired_s >= self._times.heartbeat_s:
            self._inquired_s = now_s
            for name in self._nodes:
                self._tell(name, StateInquiry(self.term, self.log.state.life))
        # A founder without entries brought nothing, and would wait for itself.
        is_founder, born = self.log.state.standing == FOUNDER and self.log.last > 0, None
        if is_founder or self.log.last == 0:
            born = joining.founders(is_founder=is_founder)
        for name in self._nodes:
            born = born or joining.counted_by(name)
        needed = joining.needs(self.leader, self.term)
        if born is not None or (needed is not None and self._matched_here() >= needed):
            self.log.join(born or (), founded=joining.has_founder())
            self._joining = None
            self._SyncObj__raftElectionDeadline = now_s + self._SyncObj__generateRaftTimeout()
            return
        term = joining.term_to_adopt()
        if term is not None and not joining.adopted:
            self._SyncObj__setCurrentTerm(max(term, self.term), NO_VOTE)
            joining.adopted = True

    def _receive_joining(self, member: str, message: StateInquiry | StateReport) -> None:
        if isinstance(message, StateReport):
            if self._joining is not None:
                self._joining.take(member, message)
            return
        state = self.log.state
        standing = FRESH if state.standing in (JOINING, FOUNDER) and self.log.last == 0 else state.standing
        leads = bool(self._isLeader())
        self._tell(
            member,
            StateReport(self.term, message.life, state.life, standing, leads, self.log.last, state.born, state.founded),
        )

    @property
    def is_joining(self) -> bool:
        """Whether this member does not vote yet, because its disk is new."""
        return self._joining is not None
