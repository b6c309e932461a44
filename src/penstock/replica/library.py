"""PySyncObj with guards: it elects a leader and finds out what a quorum has; the guards stop what it must not do.

Defects of the library (0.3.17) and the guard against each:
  a repeated or late append drops entries that follow         entries that match are skipped; only a conflict cuts
  a follower commits entries that its leader did not check    the commit index is capped at the last entry that matches
  a follower acknowledges before a sync                       votes and acknowledgements wait for a sync (`_outbox`)
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

Here is what every role of a member needs of the library: its log, terms and votes, and messages. `following` has what a
follower takes, `electing` who may become the leader, `raft` the loop and the leader's side.

Thread: the loop's.
Invariant: nothing is sent that claims more than is durable here: it waits in `_outbox` for a sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import msgspec
import pysyncobj.syncobj
from pysyncobj import SyncObj, SyncObjConf
from pysyncobj.journal import Journal
from pysyncobj.node import Node
from pysyncobj.transport import Transport

from penstock.errors import PenstockError
from penstock.host.randomness import Random
from penstock.replica.messages import Appended, Message, RequestVote, Vote
from penstock.replica.raft_log import RaftLog
from penstock.replica.seams import Link, RaftTimes

LIBRARY_VERSION = "0.3.17"  # the guards rely on the internals of this version

_library_journal: Callable[[Any], Any] = pysyncobj.syncobj.createJournal


def _journal_of(file: Any) -> Any:
    """Return a journal that is passed in place of a file name; the library has no other way to take one."""
    return file if isinstance(file, Journal) else _library_journal(file)


pysyncobj.syncobj.createJournal = _journal_of


class MemberNode(Node):  # type: ignore[misc]  # PySyncObj has no types
    """A member, to the library, which keeps members in sets: their order must not differ between processes."""

    def __hash__(self) -> int:
        return crc32(self.id.encode())


class GuardedSyncObj(SyncObj):  # type: ignore[misc]  # PySyncObj has no types
    """The library's part of a member. Methods named `_SyncObj__…` replace private ones of the library."""

    _SyncObj__raftLeader: Any  # the library's: a node or None
    _SyncObj__raftElectionDeadline: float
    _SyncObj__raftCurrentTerm: int
    _SyncObj__newAppendEntriesTime: float

    def __init__(
        self, member: str, others: Sequence[str], log: RaftLog, link: Link, *, times: RaftTimes, random: Random
    ) -> None:
        self.log = log
        self._link, self._times, self._random = link, times, random
        self._outbox: list[tuple[str, Message]] = []  # to be sent after a sync
        self._voters: set[str] = set()  # who voted for this member in its term
        self._heard_s = -1e9  # when a leader was heard last
        self._may_cut = False
        self.is_full = False  # set from any thread: its disk has no room for more writes
        self._nodes = {name: MemberNode(name) for name in others}
        super().__init__(
            MemberNode(member),
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

    @property
    def poller(self) -> Any:
        """Waits for sockets, at the end of a tick."""
        return self._poller

    @property
    def leader(self) -> str | None:
        """The member that leads, as far as this one knows."""
        node = self._SyncObj__raftLeader
        return None if node is None else str(node.id)

    @property
    def term(self) -> int:
        return int(self._SyncObj__raftCurrentTerm)

    # -- messages

    def _handle(self, node: Node, kind: str, message: Message, **fields: Any) -> None:
        """Let the library handle a message."""
        super()._SyncObj__onMessageReceived(node, {"type": kind, "term": message.term, **fields})

    def _tell(self, member: str, message: Message) -> None:
        if self.is_full and isinstance(message, Appended):
            message = msgspec.structs.replace(message, full=True)
        self._outbox.append((member, message))

    def _send_waiting(self) -> None:
        if self._outbox:
            if self.log.synced < self.log.last:
                self.log.sync()
            waiting, self._outbox = self._outbox, []
            for member, message in waiting:
                self._link.send(member, message)

    # -- the log

    def _SyncObj__deleteEntriesFrom(self, fromIDx: int) -> None:
        """Cut conflicting entries; the library calls this whenever some follow."""
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
    """Turns what the library sends into messages."""

    def __init__(self, raft: GuardedSyncObj) -> None:
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
