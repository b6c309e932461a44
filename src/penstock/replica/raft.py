"""One member of a cluster: its loop, the messages it takes, and the leader's side: proposals, entries for the others.

What the library does and must not do is in `library`, the follower's side in `following`, elections in `electing`.

Thread: one, which calls `tick`; `submit` and `committed` from any.
Invariants: (1) nothing is sent that claims more than is durable here. (2) a proposal is answered once: with its LSN if
its own entry is committed, otherwise with an error. (3) after an error in `tick` this object is never used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.errors import DiskFull, Invalid, NotFound, OutcomeUnknown, ProcessLimit
from penstock.host.randomness import Random
from penstock.replica.cluster_time import ClusterTime
from penstock.replica.electing import ElectingRaft
from penstock.replica.messages import (
    Append,
    Appended,
    Message,
    NeedSnapshot,
    NewerTerm,
    PreVote,
    PreVoteGranted,
    RequestVote,
    StateInquiry,
    StateReport,
    Vote,
    sent_entries,
)
from penstock.replica.proposal import Proposal, not_leader, outcome_unknown
from penstock.replica.raft_log import RaftLog
from penstock.replica.seams import FileGate, Link, RaftTimes

APPEND_BYTES = 1 << 20  # of entries in one message, unless a single one is larger
PROPOSALS_MAX = 1_024
NOTICE_S = 0.01  # followers learn what is committed with the next entries, or by a heartbeat after this time
TERM_LEAP_MAX = 1 << 20  # a member that is ahead by more terms was not elected into them


class Raft(ElectingRaft):
    """A member of the cluster."""

    def __init__(
        self,
        member: str,
        others: Sequence[str],
        log: RaftLog,
        link: Link,
        *,
        times: RaftTimes,
        random: Random,
        files: FileGate | None = None,
        time: ClusterTime | None = None,
    ) -> None:
        self._time = time
        self._full: dict[str, bool] = {}  # by member: what it answered last
        self._proposals: deque[Proposal] = deque()  # not in the log yet
        self._in_log: deque[Proposal] = deque()
        self._answered_committed = log.committed
        self._ticked_s = 1e18  # when the loop went round last; it has not yet
        super().__init__(member, others, log, link, times=times, random=random, files=files)

    def tick(self, wait_s: float) -> None:
        """Do what is due; wait for messages up to `wait_s`. An error is final."""
        now_s = self._now()
        if now_s - self._ticked_s > self._times.heartbeat_s * 3:  # it was stopped: what its leader sent is read first
            self._SyncObj__raftElectionDeadline = max(
                self._SyncObj__raftElectionDeadline, now_s + self._times.election_s if self._nodes else 0.0
            )
        self._ticked_s = now_s
        self._prepare_election(now_s)
        busy = bool(self._proposals or self._in_log)
        stood, self._stands = self._stands, False
        self._onTick(0.0 if busy and not self._nodes else self._wait_s(wait_s))  # alone, there is no answer to wait for
        if stood and self._SyncObj__raftElectionDeadline == 0.0:  # nobody is connected: ask again
            self._SyncObj__raftElectionDeadline = now_s
        self._send_waiting()

    def _wait_s(self, wait_s: float) -> float:
        """Return how long nothing is due, at most `wait_s`."""
        if not self._isLeader():
            return wait_s
        if self.log.last > self.log.committed:  # this tick may commit, and then a notice is due
            wait_s = min(wait_s, NOTICE_S)
        return max(0.0, min(wait_s, self._SyncObj__newAppendEntriesTime - self._now()))

    def receive(self, member: str, message: Message) -> None:
        """Take a message of another member."""
        node = self._nodes.get(member)
        if node is None:
            return
        current: int = self._SyncObj__raftCurrentTerm
        if message.term > current + TERM_LEAP_MAX:
            raise Invalid(f"{member} is in term {message.term}, this member in {current}: that cannot be")
        if isinstance(message, StateInquiry | StateReport):
            self._receive_joining(member, message)
        elif isinstance(message, PreVoteGranted):
            self._receive_pre_vote_granted(member, message)
        elif message.term < current:
            self._tell(member, NewerTerm(current))
        elif isinstance(message, PreVote):
            self._receive_pre_vote(member, message)
        elif isinstance(message, RequestVote):
            if self._joining is None and not self._hears_leader() and not self._lacks_founder(message.last_index):
                self._handle(
                    node, "request_vote", message, last_log_index=message.last_index, last_log_term=message.last_term
                )
        elif isinstance(message, Append):
            if self._time is not None:
                self._time.hear(message.time_us)
            self._receive_append(node, message)
        elif isinstance(message, NeedSnapshot):
            self._receive_take(node, message)
        elif message.term > current:
            self._step_down(message.term)
        elif isinstance(message, Appended):
            self._full[member] = message.full
            self._handle(
                node,
                "next_node_idx",
                message,
                next_node_idx=min(message.next_index, self.log.last + 1),
                reset=message.reset,
                success=message.success and message.next_index <= self.log.last + 1,
            )
        elif isinstance(message, Vote) and member not in self._voters:
            self._voters.add(member)
            self._handle(node, "response_vote", message)

    def connect(self, member: str) -> None:
        """Note that messages reach a member."""
        self._SyncObj__onNodeConnected(self._nodes[member])

    def disconnect(self, member: str) -> None:
        self._SyncObj__onNodeDisconnected(self._nodes[member])

    @property
    def is_leader(self) -> bool:
        """Whether this member leads, and an entry of its own term is committed: it knows what is committed."""
        return bool(self._isLeader()) and self.log.term_at(self.log.committed) == self._SyncObj__raftCurrentTerm

    @property
    def others_are_full(self) -> bool:
        """Whether no other member that is connected has room on its disk, as far as this one knows."""
        connected = self._SyncObj__connectedNodes
        return all(self._full.get(name, False) for name, node in self._nodes.items() if node in connected)

    def may_cut_before(self) -> int:
        """Return the index below which every member has all entries, as far as this one knows."""
        if self._isLeader():
            return min([self.log.committed, *self.matched().values()]) + 1
        return self.needed_from

    def acknowledged(self) -> dict[str, int]:
        """Return the last index that each other member is known to have; a follower knows what its leader sent."""
        return self.matched() if self._isLeader() else dict.fromkeys(self._nodes, max(0, self.needed_from - 1))

    def matched(self) -> dict[str, int]:
        """Return the last index that each other member is known to have. Requires: this member leads."""
        matched = self._SyncObj__raftMatchIndex  # the library fills it just after it begins to lead
        return {name: matched.get(node, 0) for name, node in self._nodes.items()}

    @property
    def is_waited_for(self) -> bool:
        """Whether this member leads, and a follower needs a snapshot of its store."""
        following = self._SyncObj__raftNextIndex
        return bool(self._isLeader()) and any(
            following.get(node, 0) <= self.log.base.index for node in self._nodes.values() if node in following
        )

    # -- proposals

    def submit(self, proposal: Proposal) -> None:
        """Queue records; the proposal is answered by a later `tick`. From any thread."""
        if len(self._proposals) >= PROPOSALS_MAX:
            proposal.answer(error=OutcomeUnknown(f"{PROPOSALS_MAX} proposals wait already: retry later"))
        else:
            self._proposals.append(proposal)

    def fail_proposals(self, error: Exception) -> None:
        """Answer every proposal with an error."""
        for proposals in (self._proposals, self._in_log):
            while proposals:
                proposals.popleft().answer(error=error)

    def _checkCommandsToApply(self) -> None:
        """Append what was proposed, send it, and sync it here while the others sync it, too."""
        if not self._isLeader():
            while self._proposals:
                self._proposals.popleft().answer(error=not_leader(self.leader))
            while self._in_log:
                self._in_log.popleft().answer(error=outcome_unknown())
            return
        before = self.log.last
        while self._proposals:
            self._append(self._proposals.popleft())
        if self.log.last > before:
            self._SyncObj__sendAppendEntries()
            self.log.sync()

    def _append(self, proposal: Proposal) -> None:
        term = self.term
        if proposal.is_answered:  # its writer waits no longer
            return
        if proposal.only_in not in {None, term}:  # others may have written since
            proposal.answer(error=not_leader(None))
            return
        try:
            if proposal.bodies:
                proposal.index = self.log.append(proposal.bodies, term)
            else:
                self.log.add(b"\x01", self.log.last + 1, term)
                proposal.index = self.log.last
        except (DiskFull, ProcessLimit, Invalid) as error:  # before a byte was written
            proposal.answer(error=error)
            return
        except BaseException:
            self._in_log.append(proposal)  # answered when this member has stopped
            raise
        proposal.term = term
        self._in_log.append(proposal)

    def _SyncObj__applyLogEntries(self) -> bool:
        """Answer proposals that are committed; return whether to send entries now."""
        committed = self.log.committed
        if committed == self._answered_committed:
            return False
        self._answered_committed = self._SyncObj__raftLastApplied = committed
        while self._in_log and self._in_log[0].index <= committed:
            proposal = self._in_log.popleft()
            if self.log.term_at(proposal.index) == proposal.term:
                proposal.answer(lsn=self.log.lsn_at(proposal.index))
            else:
                proposal.answer(error=not_leader(self.leader))  # another entry is there: this one is gone
        self._SyncObj__newAppendEntriesTime = min(self._SyncObj__newAppendEntriesTime, self._now() + NOTICE_S)
        return False

    # -- entries for the others

    def _SyncObj__sendAppendEntries(self) -> None:
        """Send each member what it lacks, as far as there is room, and at least a heartbeat."""
        self._SyncObj__newAppendEntriesTime = self._now() + self._times.heartbeat_s
        for name, node in self._nodes.items():
            if node not in self._SyncObj__connectedNodes:
                continue
            base = self.log.base
            if self._SyncObj__raftNextIndex[node] <= base.index:
                self._link.send(name, NeedSnapshot(self.term, base.index, base.term))
                continue
            following, first = self._SyncObj__raftNextIndex[node], True
            while first or (following <= self.log.last and self._link.has_room(name)):
                try:
                    entries = self.log.entries(following, APPEND_BYTES) if following <= self.log.last else []
                    previous_term = self.log.term_at(following - 1)
                except NotFound:
                    break  # the journal's front was cut meanwhile
                needed = min([self.log.committed, *self.matched().values()]) + 1
                time_us = 0 if self._time is None else self._time.now_us()
                fields = following - 1, previous_term, self.log.committed, needed, sent_entries(entries), time_us
                self._link.send(name, Append(self.term, *fields))
                following, first = following + len(entries), False
            self._SyncObj__raftNextIndex[node] = following
