"""PySyncObj with guards: it elects a leader and finds out what a quorum has; what it must not do is stopped here.

Defects of the library (0.3.17) and the guard against each:
  a repeated or late append drops entries that follow         entries that match are skipped; only a conflict cuts
  a follower commits entries that its leader did not check    the commit index is capped at the last entry that matches
  a follower acknowledges before a sync                       what tells a vote or an entry waits for `sync` (`_outbox`)
  a leader counts its own entries before they are synced      `RaftLog.setRaftCommitIndex` syncs first
  acknowledgements carry no term                              they do; one of another term is dropped
  a vote that arrives twice counts twice                      votes are counted by member
  a leader that was replaced learns it late                   a message of an old term is answered by the newer term
  a member that was away forces an election                   a vote is refused while a leader is heard, and a member
                                                              asks whether it would win before it begins a term
  a member with a new disk votes as if it had forgotten       it joins first (`joining`)
    nothing
  a member that is behind the leader's log stays so           it is told to take a snapshot
  an apply that raises is tried for ever                      nothing is applied here: readers follow `committed`
  all entries are sent at once to one that is behind          sending stops when a peer's buffer is full
  messages and large entries are unpickled                    `messages` has no code to run

Thread: one, which calls `tick`; `submit` and `committed` from any.
Invariants: (1) nothing is sent that claims more than is durable here. (2) a proposal is answered once: with its LSN if
its own entry is committed, otherwise with an error. (3) after an error in `tick` this object is never used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pysyncobj.syncobj
from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.journal import Journal
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from penstock.errors import DiskFull, Invalid, NotFound, NotLeader, OutcomeUnknown, PenstockError, ProcessLimit
from penstock.host.randomness import Random
from penstock.journal.record import Lsn
from penstock.replica.joining import FOUNDER, FRESH, JOINING, MEMBER, NO_VOTE, Joining
from penstock.replica.messages import (
    Append,
    Appended,
    Inquire,
    Known,
    Message,
    NeedSnapshot,
    NewerTerm,
    RequestVote,
    Sound,
    Support,
    Vote,
    received_entries,
    sent_entries,
)
from penstock.replica.raft_log import Command, RaftEntry, RaftLog

LIBRARY_VERSION = "0.3.17"  # the guards know this version from the inside
APPEND_BYTES = 1 << 20  # of entries in one message, unless a single one is larger
PROPOSALS_MAX = 1_024
NOTICE_S = 0.01  # followers learn what is committed with the next entries, or by a heartbeat after this time
HESITATION = 5  # times `election_s`
TERM_LEAP_MAX = 1 << 20  # a member that is ahead by more terms was not elected into them

_library_journal: Callable[[Any], Any] = pysyncobj.syncobj.createJournal


def _journal_of(file: Any) -> Any:
    """Return a journal that is passed in place of a file name; the library has no other way to take one."""
    return file if isinstance(file, Journal) else _library_journal(file)


pysyncobj.syncobj.createJournal = _journal_of


class Link(Protocol):
    """The way to the other members. Messages may be lost, doubled, late and out of order."""

    def send(self, member: str, message: Message) -> None: ...

    def has_room(self, member: str) -> bool:
        """Whether more entries can be sent to a member without piling up."""


class FileGate(Protocol):
    """The files that records refer to: a follower has them before it has the record."""

    def admits(self, body: bytes, leader: str) -> bool:
        """Whether every file that a record refers to is here, durably; if not, they are fetched from the leader."""


class NoFiles:
    """The gate of a cluster whose records refer to no files."""

    def admits(self, body: bytes, leader: str) -> bool:
        return True


class Proposal:
    """Records on their way to a quorum."""

    def __init__(
        self, bodies: Sequence[bytes], answered: Callable[[], None] = lambda: None, *, only_in: int | None = None
    ) -> None:
        self.bodies = bodies
        self.only_in = only_in  # the term to which it belongs, if it was prepared for one
        self.index = self.term = 0
        self.lsn: Lsn | None = None
        self.error: Exception | None = None
        self._answered = answered

    @property
    def is_answered(self) -> bool:
        return self.lsn is not None or self.error is not None

    def answer(self, lsn: Lsn | None = None, error: Exception | None = None) -> None:
        if not self.is_answered:
            self.lsn, self.error = lsn, error
            self._answered()


class RaftTimes:
    """How long members wait, in seconds."""

    def __init__(self, *, heartbeat_s: float = 0.1, election_s: float = 0.6) -> None:
        if not 0 < heartbeat_s * 3 < election_s:
            raise Invalid(f"election_s ({election_s}) must be more than three times heartbeat_s ({heartbeat_s})")
        self.heartbeat_s, self.election_s = heartbeat_s, election_s


class Raft(SyncObj):  # type: ignore[misc]  # PySyncObj has no types
    """A member of the cluster. Methods named `_SyncObj__…` replace private ones of the library."""

    _SyncObj__raftLeader: Any  # the library's: a node or None
    _SyncObj__raftElectionDeadline: float
    _SyncObj__raftCurrentTerm: int
    _SyncObj__newAppendEntriesTime: float

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
    ) -> None:
        self.log = log
        self._files: FileGate = files or NoFiles()
        self._blocked: RaftEntry | None = None  # an entry whose files are being fetched
        self._joining = Joining(others, log.state.life) if others and log.state.standing != MEMBER else None
        self._inquired_s = -1e9
        self._follows = (0, 0)  # in this term, its leader's entries are here up to this index
        self.snapshot_from: str | None = None  # the leader whose log begins after what is here
        self._attempt, self._supporters, self._stands = 0, set[str](), False  # of the pre-vote
        self._link, self._times, self._random = link, times, random
        self._proposals: deque[Proposal] = deque()  # not in the log yet
        self._in_log: deque[Proposal] = deque()
        self._outbox: list[tuple[str, Message]] = []  # to be sent after a sync
        self._voters: set[str] = set()  # who voted for this member in its term
        self._heard_s = -1e9  # when a leader was heard last
        self._told_committed = log.committed
        self._may_cut = False
        self._hesitates_until_s = -1e9  # until then it does not stand for election
        self._ticked_s = 1e18  # when the loop went round last; it has not yet
        self.needed_from = 0  # a follower may need entries from here on; as its leader said last
        self._nodes = {name: Node(name) for name in others}
        super().__init__(
            Node(member),
            list(self._nodes.values()),
            conf=SyncObjConf(
                autoTick=False,
                journalFile=log,
                raftMinTimeout=times.election_s,
                raftMaxTimeout=times.election_s * 2,
                appendEntriesPeriod=times.heartbeat_s,
                leaderFallbackTimeout=times.election_s * 0.9,  # before another can be elected
                connectionTimeout=times.election_s * 4,
            ),
            transport=_Messenger(self),
        )
        self._SyncObj__raftLastApplied = log.committed
        self.addOnTickCallback(self._send_waiting)

    # -- for the member's thread

    @property
    def poller(self) -> Any:
        """Waits for sockets, at the end of a tick."""
        return self._poller

    def tick(self, wait_s: float) -> None:
        """Do what is due; wait for messages up to `wait_s`. An error is final."""
        now_s = self._now()
        if now_s - self._ticked_s > self._times.heartbeat_s * 3:  # it was stopped: what its leader sent is read first
            self._SyncObj__raftElectionDeadline = max(
                self._SyncObj__raftElectionDeadline, now_s + self._times.election_s if self._nodes else 0.0
            )
        self._ticked_s = now_s
        if self._joining is not None:
            self._advance_joining(self._joining, now_s)
        elif self._lacks_founder(self.log.last) or now_s < self._hesitates_until_s:
            self._SyncObj__raftElectionDeadline = now_s + self._times.election_s * 2
        elif self._nodes and not self._stands and self._SyncObj__raftElectionDeadline < now_s and not self._isLeader():
            self._sound(now_s)
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
        return max(0.0, min(wait_s, self._SyncObj__newAppendEntriesTime - self._now()))

    def receive(self, member: str, message: Message) -> None:
        """Take a message of another member."""
        node = self._nodes.get(member)
        if node is None:
            return
        current: int = self._SyncObj__raftCurrentTerm
        if message.term > current + TERM_LEAP_MAX:
            raise Invalid(f"{member} is in term {message.term}, this member in {current}: that cannot be")
        if isinstance(message, Inquire | Known):
            self._receive_joining(member, message)
        elif isinstance(message, Support):
            self._receive_support(member, message)
        elif message.term < current:
            self._tell(member, NewerTerm(current))
        elif isinstance(message, Sound):
            self._receive_sound(member, message)
        elif isinstance(message, RequestVote):
            if self._joining is None and not self._hears_leader() and not self._lacks_founder(message.last_index):
                self._handle(
                    node, "request_vote", message, last_log_index=message.last_index, last_log_term=message.last_term
                )
        elif isinstance(message, Append):
            self._receive_append(node, message)
        elif isinstance(message, NeedSnapshot):
            self._receive_take(node, message)
        elif message.term > current:
            self._step_down(message.term)
        elif isinstance(message, Appended):
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

    def elect_at_once(self) -> None:
        """Do not wait for a leader that nobody else can be. Requires: there are no other members."""
        self._SyncObj__raftElectionDeadline = 0.0

    def hesitate(self) -> None:
        """Let others be elected first: this member cannot write now. If none is, it stands again after a while."""
        if self._nodes:
            self._hesitates_until_s = self._now() + self._times.election_s * HESITATION

    def connect(self, member: str) -> None:
        """Note that messages reach a member."""
        self._SyncObj__onNodeConnected(self._nodes[member])

    def disconnect(self, member: str) -> None:
        self._SyncObj__onNodeDisconnected(self._nodes[member])

    @property
    def leader(self) -> str | None:
        """The member that leads, as far as this one knows."""
        node = self._SyncObj__raftLeader
        return None if node is None else str(node.id)

    @property
    def is_leader(self) -> bool:
        """Whether this member leads, and an entry of its own term is committed: it knows what is committed."""
        return bool(self._isLeader()) and self.log.term_at(self.log.committed) == self._SyncObj__raftCurrentTerm

    @property
    def term(self) -> int:
        return int(self._SyncObj__raftCurrentTerm)

    def may_cut_before(self) -> int:
        """Return the index below which every member has all entries, as far as this one knows."""
        if self._isLeader():
            return min([self.log.committed, *self.matched().values()]) + 1
        return self.needed_from

    def acknowledged(self) -> dict[str, int]:
        """Return the last index that each other member is known to have; a follower knows what its leader told."""
        return self.matched() if self._isLeader() else dict.fromkeys(self._nodes, max(0, self.needed_from - 1))

    def matched(self) -> dict[str, int]:
        """Return the last index that each other member is known to have. Requires: this member leads."""
        matched = self._SyncObj__raftMatchIndex  # the library fills it just after it begins to lead
        return {name: matched.get(node, 0) for name, node in self._nodes.items()}

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
                self._in_log.popleft().answer(error=_unknown())
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
        if committed == self._told_committed:
            return False
        self._told_committed = self._SyncObj__raftLastApplied = committed
        while self._in_log and self._in_log[0].index <= committed:
            proposal = self._in_log.popleft()
            if self.log.term_at(proposal.index) == proposal.term:
                proposal.answer(lsn=self.log.lsn_at(proposal.index))
            else:
                proposal.answer(error=not_leader(self.leader))  # another entry is there: this one is gone
        self._SyncObj__newAppendEntriesTime = min(self._SyncObj__newAppendEntriesTime, self._now() + NOTICE_S)
        return False

    # -- messages

    def _handle(self, node: Node, kind: str, message: Message, **fields: Any) -> None:
        """Let the library handle a message."""
        super()._SyncObj__onMessageReceived(node, {"type": kind, "term": message.term, **fields})

    def _receive_append(self, node: Node, message: Append) -> None:
        entries, previous, previous_term = received_entries(message), message.previous_index, message.previous_term
        if previous < self.log.base.index:  # committed and dropped here: the leader begins too early
            skipped = self.log.base.index - previous
            if len(entries) < skipped or entries[skipped - 1].term != self.log.base.term:
                self._refuse_append(node, message)
                return
            previous, previous_term = self.log.base.index, self.log.base.term
            entries = entries[skipped:]
        self._heard_s = self._now()
        self.needed_from = max(self.needed_from, message.needed)
        if self._is_blocked(node, message):
            return
        matches = self.log.has(previous, previous_term)
        while matches and entries and self.log.has(entries[0].index, entries[0].term):
            previous, previous_term = entries[0].index, entries[0].term
            entries = entries[1:]
        if matches:
            entries = self._up_to_missing_files(node, entries)
        end = entries[-1].index if entries else previous
        self._may_cut = bool(entries)
        self._handle(
            node,
            "append_entries",
            message,
            prevLogIdx=previous,
            prevLogTerm=previous_term,
            entries=entries,
            commit_index=max(min(message.committed, end), 0) if matches else self.log.committed,
        )
        if matches:
            self.snapshot_from, self._follows = None, (self.term, end)

    def _up_to_missing_files(self, node: Node, entries: list[RaftEntry]) -> list[RaftEntry]:
        """Return the entries before the first whose files are not here yet; those are fetched meanwhile."""
        for position, entry in enumerate(entries):
            if isinstance(entry.command, Command) and not self._files.admits(entry.command.body, node.id):
                self._blocked = entry
                return entries[:position]
        return entries

    def _is_blocked(self, node: Node, message: Append) -> bool:
        """Whether entries wait for files: then the leader is answered, and nothing is appended."""
        entry = self._blocked
        if entry is None:
            return False
        assert isinstance(entry.command, Command)
        if message.previous_index < entry.index - 1 or self._files.admits(entry.command.body, node.id):
            self._blocked = None
            return False
        self._handle(node, "append_entries", message, commit_index=min(message.committed, self._matched_here()))
        self._tell(node.id, Appended(self.term, entry.index, success=False, reset=False))
        return True

    def _matched_here(self) -> int:
        """Return the index up to which the entries are known to be those of the leader of this term."""
        term, index = self._follows
        return index if term == self.term else self.log.committed

    def _receive_take(self, node: Node, message: NeedSnapshot) -> None:
        """A leader's log begins too late for this member: take its entries, or a snapshot."""
        self._heard_s = self._now()
        self._handle(node, "append_entries", message, commit_index=self.log.committed)
        upto = max(message.base_index, self.log.committed)  # what is committed here is in the leader's log, too
        if upto == self.log.committed or self.log.has(message.base_index, message.base_term):
            self.snapshot_from = None
            self._tell(node.id, Appended(self.term, upto + 1, success=True, reset=True))
        else:
            self.snapshot_from = str(node.id)
            self._tell(node.id, Appended(self.term, self.log.committed + 1, success=False, reset=True))

    def _refuse_append(self, node: Node, message: Append) -> None:
        self._heard_s = self._now()
        if message.term > self.term:
            self._step_down(message.term)
        self._tell(node.id, Appended(self.term, self.log.committed + 1, success=False, reset=True))

    def _SyncObj__deleteEntriesFrom(self, fromIDx: int) -> None:
        """Cut conflicting entries; the library asks for it whenever some follow."""
        if self._may_cut:
            self.log.cut_back(fromIDx - 1)

    def _SyncObj__getEntries(
        self,
        fromIDx: int | None,
        count: int | None = None,
        maxSizeBytes: int | None = None,
    ) -> list[tuple[bytes, int, int]]:
        """Return entries without their records: the library reads their terms, and whether another one follows."""
        if fromIDx is None or fromIDx < self.log.base.index:
            return []
        end = min(self.log.last, fromIDx + min(count or 2, 2) - 1)
        return [(b"", index, self.log.term_at(index)) for index in range(fromIDx, end + 1)]

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
                    found = self.log.entries(following, APPEND_BYTES) if following <= self.log.last else []
                    previous_term = self.log.term_at(following - 1)
                except NotFound:
                    break  # the journal's front was cut meanwhile
                needed = min([self.log.committed, *self.matched().values()]) + 1
                self._link.send(
                    name,
                    Append(self.term, following - 1, previous_term, self.log.committed, needed, sent_entries(found)),
                )
                following, first = following + len(found), False
            self._SyncObj__raftNextIndex[node] = following

    def _tell(self, member: str, message: Message) -> None:
        self._outbox.append((member, message))

    def _send_waiting(self) -> None:
        if self._outbox:
            if self.log.synced < self.log.last:
                self.log.sync()
            waiting, self._outbox = self._outbox, []
            for member, message in waiting:
                self._link.send(member, message)

    # -- before an election, and before the first one

    def _sound(self, now_s: float) -> None:
        """Ask the others whether they would elect this member; a term begins only if a quorum would."""
        self._SyncObj__raftElectionDeadline = now_s + self._SyncObj__generateRaftTimeout()
        self._attempt, self._supporters = self._attempt + 1, set()
        last = self.log.last
        for name in self._nodes:
            self._tell(name, Sound(self.term, last, self.log.term_at(last), self._attempt))

    def _receive_sound(self, member: str, message: Sound) -> None:
        last = self.log.last
        complete = (message.last_term, message.last_index) >= (self.log.term_at(last), last)
        complete = complete and not self._lacks_founder(message.last_index)
        if complete and self._joining is None and not self._hears_leader():
            self._tell(member, Support(self.term, message.attempt))

    def _lacks_founder(self, last_index: int) -> bool:
        """Whether a log without entries lacks the store that a founder of the cluster brought."""
        return last_index == 0 and self.log.state.founded

    def _receive_support(self, member: str, message: Support) -> None:
        if message.attempt == self._attempt and not self._isLeader() and not self._hears_leader():
            self._supporters.add(member)
            if len(self._supporters) + 1 > (len(self._nodes) + 1) / 2:
                self._supporters, self._stands, self._SyncObj__raftElectionDeadline = set(), True, 0.0

    def _advance_joining(self, joining: Joining, now_s: float) -> None:
        """Find out whether this member may vote now; until then it does not stand."""
        self._SyncObj__raftElectionDeadline = now_s + self._times.election_s * 2
        if now_s - self._inquired_s >= self._times.heartbeat_s:
            self._inquired_s = now_s
            for name in self._nodes:
                self._tell(name, Inquire(self.term, self.log.state.life))
        is_founder, born = self.log.state.standing == FOUNDER, None
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

    def _receive_joining(self, member: str, message: Inquire | Known) -> None:
        if isinstance(message, Known):
            if self._joining is not None:
                self._joining.take(member, message)
            return
        state = self.log.state
        standing = FRESH if state.standing == JOINING and self.log.last == 0 else state.standing
        leads = bool(self._isLeader())
        self._tell(
            member,
            Known(self.term, message.life, state.life, standing, leads, self.log.last, state.born, state.founded),
        )

    @property
    def is_waited_for(self) -> bool:
        """Whether this member leads, and a follower needs a snapshot of its store."""
        following = self._SyncObj__raftNextIndex
        return bool(self._isLeader()) and any(
            following.get(node, 0) <= self.log.base.index for node in self._nodes.values() if node in following
        )

    @property
    def is_joining(self) -> bool:
        """Whether this member does not vote yet, because its disk is new."""
        return self._joining is not None

    # -- terms

    def _step_down(self, term: int) -> None:
        self._SyncObj__setCurrentTerm(term, None)
        self._SyncObj__setState(pysyncobj.syncobj._RAFT_STATE.FOLLOWER)
        self._SyncObj__raftLeader = None

    def _SyncObj__setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        self.log.setCurrentTerm(term, votedForNodeId)  # first: after an error nothing has changed
        if term != self._SyncObj__raftCurrentTerm:
            self._voters = set()
        self._SyncObj__raftCurrentTerm, self._SyncObj__votedForNodeId = term, votedForNodeId

    def resign(self) -> None:
        """Stop leading, and let others be elected first."""
        if self._isLeader():
            self.hesitate()
            self._step_down(self.term + 1)
            self._SyncObj__raftElectionDeadline = self._now()

    def _hears_leader(self) -> bool:
        """Whether a leader works, so that an election would only interrupt it."""
        return bool(self._isLeader()) or (
            self._SyncObj__raftLeader is not None and self._now() - self._heard_s < self._times.election_s
        )

    def _SyncObj__generateRaftTimeout(self) -> float:
        return self._times.election_s * (1 + self._random.random())

    def _SyncObj__tryLogCompaction(self) -> None:
        pass  # the store truncates its journal

    def _now(self) -> float:
        return float(pysyncobj.syncobj.monotonicTime())


class _Messenger(Transport):  # type: ignore[misc]
    """What the library sends, as messages."""

    def __init__(self, raft: Raft) -> None:
        super().__init__(raft, None, [])
        self._raft = raft

    def send(self, node: Node, message: dict[str, Any]) -> bool:
        kind, term = message["type"], self._raft.term
        if kind == "request_vote":
            self._raft._tell(node.id, RequestVote(term, message["last_log_index"], message["last_log_term"]))
        elif kind == "response_vote":
            self._raft._tell(node.id, Vote(term))
        elif kind == "next_node_idx":
            self._raft._tell(
                node.id, Appended(term, message["next_node_idx"], success=message["success"], reset=message["reset"])
            )
        else:
            raise PenstockError(f"the library sends {kind}, which no member understands: please report it")
        return True


def not_leader(leader: str | None) -> NotLeader:
    """Return the error of a write to a member that does not lead."""
    where = "none is elected yet: retry in a moment" if leader is None else f"write to {leader}"
    return NotLeader(f"this member is not the leader, and nothing was written; {where}", leader=leader)


def _unknown() -> OutcomeUnknown:
    return OutcomeUnknown(
        "another leader was elected before a quorum had this write: it may or may not be there; retry it with its token"
    )
