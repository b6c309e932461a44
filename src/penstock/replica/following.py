"""What a follower does with its leader's entries: it appends those that it lacks, and cuts those that conflict.

Entries that refer to files wait until these are here. A follower whose log ends before its leader's begins is told to
take a snapshot.

Thread: the loop's.
Invariants: (1) an entry that matches is never cut. (2) only entries that are known to be the leader's are committed.
(3) an entry is in the log only when the files that it refers to are here, durably.
"""

from __future__ import annotations

from collections.abc import Sequence

from pysyncobj.node import Node

from penstock.host.randomness import Random
from penstock.replica.library import GuardedSyncObj
from penstock.replica.messages import Append, Appended, NeedSnapshot, received_entries
from penstock.replica.raft_log import Command, RaftEntry, RaftLog
from penstock.replica.seams import FileGate, Link, NoFiles, RaftTimes


class FollowingRaft(GuardedSyncObj):
    """The follower's side of a member."""

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
        self._files: FileGate = files or NoFiles()
        self._blocked: RaftEntry | None = None  # an entry whose files are being fetched
        self._follows = (0, 0)  # in this term, its leader's entries are here up to this index
        self.snapshot_from: str | None = None  # the leader whose log begins after what is here
        self.needed_from = 0  # a follower may need entries from here on; as its leader said last
        super().__init__(member, others, log, link, times=times, random=random)

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
