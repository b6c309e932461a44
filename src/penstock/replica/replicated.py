"""`Consensus` by quorum: a member's loop runs in one thread; writers propose and wait, readers follow `committed`.

Thread: `_run` has the loop's thread, the only one that uses `Raft`; the rest from any thread, one proposer at a time.
Invariants: (1) `propose` returns after a quorum has the records on disk, this member included. (2) after an error in
the loop nothing is sent, acknowledged or voted until `recover`. (3) every wait has a deadline.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, Literal, Protocol

from pysyncobj.poller import POLL_EVENT_TYPE

from penstock.errors import (
    Closed,
    CorruptionError,
    Invalid,
    NotLeader,
    OutcomeUnknown,
    PenstockError,
    Poisoned,
    WaitExpired,
)
from penstock.host import threads
from penstock.host.clock import Clock
from penstock.host.file_errors import ran_out_of_space
from penstock.host.randomness import Random
from penstock.journal.record import Lsn
from penstock.journal.tracker import MemberAcks
from penstock.log import Log
from penstock.log.record import KIND_DATA, Index, Record, check_bodies
from penstock.replica.cluster_time import ClusterTime
from penstock.replica.masters import HASH, Masters
from penstock.replica.proposal import Proposal, not_leader
from penstock.replica.raft import Raft
from penstock.replica.raft_log import LAG_SEGMENTS, RaftLog
from penstock.replica.seams import FileGate, Link, RaftTimes
from penstock.replica.state import LogBase, StateFile
from penstock.replica.tcp_link import MemberError

logger = logging.getLogger(__name__)

COMMIT_S = 10.0  # a write that no quorum has by then has an unknown outcome
TICK_S = 0.05
JOIN_S = 10.0
START_S = 60


class MemberLink(Link, Protocol):
    """A link that lives as long as a member's loop."""

    def attach(self, raft: Raft) -> None:
        """Use this loop from now on: its poller, and `receive` for messages. In the loop's thread."""

    def detach(self) -> None:
        """Stop sending and receiving; the members find out."""


class NoLink:
    """The link of a cluster with one member."""

    def attach(self, raft: Raft) -> None:
        pass

    def detach(self) -> None:
        pass

    def send(self, member: str, message: object) -> None:
        raise PenstockError(f"there is no member {member}")

    def has_room(self, member: str) -> bool:
        return False


class Replicated:
    """One member of a cluster, as the journal of a store."""

    durability: Literal["disk", "quorum"] = "quorum"

    def __init__(
        self,
        log: Log,
        state: StateFile,
        *,
        member: str,
        others: Sequence[str],
        link: MemberLink,
        clock: Clock,
        random: Random,
        times: RaftTimes | None = None,
        stored: int = 0,
        files: FileGate | None = None,
        lag_segments: int = LAG_SEGMENTS,
        masters: str = HASH,
        time: ClusterTime | None = None,
    ) -> None:
        """`stored` is the highest LSN that the store's files hold: the journal must reach that far.

        `files` are those that records refer to. A member that is behind by more than `lag_segments` gets a snapshot.
        """
        if member in others or len(set(others)) != len(others):
            raise Invalid(f"every member of a cluster has a name of its own: {[member, *others]}")
        state.claim(member, others)
        self._masters = Masters(masters, [member, *others])
        self._log, self._state = log, state
        self._member, self._others, self._link = member, others, link
        self._clock, self._random, self._times = clock, random, times or RaftTimes()
        self._changed = threads.condition("replica.changed")  # the role of this member, or its failure
        self._advanced = threads.condition("replica.advanced")  # what is committed
        self._failure: BaseException | None = None  # guarded by _changed
        self._lacked_space = False  # the loop ended because its disk was full
        self._closing = False  # guarded by _changed
        self._closed = False
        self._resigning = False  # set from any thread, for the loop
        self._attached = threading.Event()  # the loop runs, or has ended
        self._is_attached = False  # the loop runs, or ran
        self._process = threads.process_id()
        self._files = files
        self._time = time or ClusterTime(clock)
        self._entries = RaftLog(log, state)
        self._entries.lag_segments = lag_segments
        reached = self._entries.lsn_at(self._entries.last)
        if reached < stored:  # before it votes: a quorum may have counted on what is gone
            raise CorruptionError(
                "journal", 0, f"it ends at record {reached}, but {stored} was durable here: its end is missing"
            )
        if stored > self._entries.base.lsn:  # what is stored was committed, whether or not a leader says so again
            self._entries.committed = self._entries.index_of(stored)
        self._raft: Raft | None = None
        self._thread: threading.Thread | None = None
        self._wakes, self._waker = socket.socketpair()  # a byte in it ends the loop's wait
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # -- the loop

    def _start(self) -> None:
        self._raft = raft = Raft(
            self._member,
            self._others,
            self._entries,
            self._link,
            times=self._times,
            random=self._random,
            files=self._files,
            time=self._time,
        )
        if not self._others:
            raft.elect_at_once()
        if self._lacked_space:
            raft.hesitate()
        self._attached.clear()
        self._is_attached = False
        self._thread = threads.spawn(self._run, name=f"penstock-raft-{self._member}")
        # Many short waits: a process that is stopped meanwhile, or a machine that sleeps, uses up one of them.
        if not any(self._attached.wait(1.0) for _ in range(START_S)):
            raise WaitExpired(f"member {self._member} did not start within {START_S} s: see its addresses")
        if not self._is_attached:  # for its address, for example; a later failure is one of a member that runs
            if isinstance(self._failure, PenstockError):
                raise self._failure
            self._check()
        if not self._others:
            self.await_leader(COMMIT_S)

    def _run(self) -> None:
        raft = self._raft
        assert raft is not None
        state: tuple[Any, ...] = ()
        committed = 0
        try:
            raft.poller.subscribe(self._wakes.fileno(), self._drain, POLL_EVENT_TYPE.READ)
            self._link.attach(raft)
            self._is_attached = True
            self._attached.set()
            while not self._closing and self._failure is None:
                if self._resigning:
                    self._resigning = False
                    raft.resign()
                raft.tick(TICK_S)
                if state != (state := (raft.leader, raft.is_leader, raft.term)):
                    with self._changed:
                        self._changed.notify_all()
                if committed != (committed := self._entries.committed):
                    with self._advanced:
                        self._advanced.notify_all()
        except BaseException as error:
            if isinstance(error, MemberError) and error.__cause__ is not None:
                error = error.__cause__
            is_own_error = isinstance(error, PenstockError)
            logger.error("member %s stopped: %s", self._member, error, exc_info=None if is_own_error else error)
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._attached.set()
            with suppress(Exception):
                self._link.detach()
            raft.poller.unsubscribe(self._wakes.fileno())
            raft.fail_proposals(self._stopped())

    def _stopped(self) -> Exception:
        return OutcomeUnknown(f"member {self._member} stopped before a quorum had this write: retry it with its token")

    def _drain(self, descriptor: int, event: int) -> None:
        with suppress(BlockingIOError):
            self._wakes.recv(4096)

    def _wake(self) -> None:
        with suppress(OSError):  # it is full, or closed
            self._waker.send(b"\0")

    # -- Consensus

    @property
    def incarnation(self) -> int:
        return self._log.incarnation

    @property
    def is_leader(self) -> bool:
        return self._raft is not None and self._failure is None and self._raft.is_leader

    @property
    def leader(self) -> str | None:
        """The member that leads, if one is known."""
        return None if self._raft is None else self._raft.leader

    @property
    def first(self) -> Lsn:
        return Lsn(self._entries.base.lsn + 1)

    @property
    def committed(self) -> Lsn:
        return self._entries.lsn_at(self._entries.committed)

    def propose(self, bodies: Sequence[bytes]) -> Lsn:
        if not bodies:
            raise Invalid("a proposal needs at least one record")
        check_bodies(bodies)
        return self._propose(bodies)

    def _propose(self, bodies: Sequence[bytes], only_in: int | None = None) -> Lsn:
        answered = threading.Event()
        proposal = Proposal(bodies, answered.set, only_in=only_in)
        raft = self._check()
        self.await_leader(COMMIT_S)
        if not raft.is_leader:
            raise not_leader(raft.leader)
        raft.submit(proposal)
        self._wake()
        if self._thread is None or not self._thread.is_alive():
            proposal.answer(error=self._stopped())
        if not answered.wait(COMMIT_S):
            proposal.answer(error=self._stopped())
        if proposal.lsn is not None:
            return proposal.lsn
        with self._changed:
            if self._failure is not None and isinstance(self._failure, OSError | PenstockError):
                raise self._failure
        assert proposal.error is not None
        raise proposal.error

    def records(self, start: int) -> Iterator[tuple[Lsn, bytes]]:
        if self._closed:  # entries in memory could still be read
            raise Closed("this member is closed: open it again")
        return self._entries.records(start)

    def term(self, lsn: int) -> int | None:
        if not self.first <= lsn <= self.committed:
            return None
        return self._entries.term_at(self._entries.index_of(lsn))

    def barrier(self) -> Lsn:
        """Return an LSN at or past every acknowledged record: on the leader, after a quorum confirmed it."""
        if self._others and self._failure is None:
            self._propose(())
        return self.committed

    def copy_to(self, folder: str, first: int) -> Lsn:
        last, lsn = self.committed, max(first, int(self.first))
        records = (
            Record(kind=KIND_DATA, flags=0, incarnation=self.term(at) or 0, index=Index(at), synced=Index(0), body=body)
            for at, body in takewhile(lambda record: record[0] <= last, self.records(lsn) if lsn <= last else ())
        )
        incarnation = max(self._log.incarnation, self.term(last) or 0)
        return Lsn(self._log.copy_to(folder, first, records, incarnation))

    def segment_starts(self) -> list[int]:
        return self._entries.segment_starts()

    def roll(self) -> None:
        self._check()
        self._entries.roll()

    def truncate(self, before: int) -> Lsn:
        """Drop records that neither this member nor another one needs, by whole segments."""
        return self._entries.cut_front(before, self._check().may_cut_before())

    def acks(self) -> MemberAcks:
        """Return what the others have on disk: as they told this leader, or as the leader told this follower."""
        raft = self._raft
        upto = dict.fromkeys(self._others, 0) if raft is None else raft.acknowledged()
        return MemberAcks(
            {name: self._entries.lsn_known(index) for name, index in upto.items()}, self._entries.kept_from()
        )

    def await_leader(self, timeout_s: float) -> str:
        """Wait until a leader is known, and knows what is committed if it is this member; return its name."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        with self._changed:
            while True:
                raft = self._check()
                leader = raft.leader
                if leader is not None and (leader != self._member or raft.is_leader):
                    return leader
                rest_s = deadline_s - self._clock.monotonic_s()
                if rest_s <= 0:
                    raise WaitExpired(f"no leader was elected within {timeout_s:g} s: start a quorum of members")
                self._changed.wait(min(rest_s, TICK_S))

    @property
    def current_term(self) -> int:
        """The term of the election that this member knows of."""
        return 0 if self._raft is None else self._raft.term

    def tenure(self, role: tuple[object, ...]) -> Tenure:
        """Return the journal for a store that is opened in this role."""
        leads = bool(role and role[0])
        return Tenure(self, int(str(role[2])) if leads else max(1, self._check().term), leads=leads)

    def await_change(self, previous: tuple[object, ...], timeout_s: float) -> tuple[object, ...]:
        """Return the role of this member, as soon as it differs from `previous`, or after `timeout_s`."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        with self._changed:
            while (role := self.role()) == previous and not self._closing:
                rest_s = deadline_s - self._clock.monotonic_s()
                if rest_s <= 0:
                    break
                self._changed.wait(min(rest_s, TICK_S))
        return role

    def role(self) -> tuple[object, ...]:
        """Return whether this member leads, who does, and in which term; empty if nobody does."""
        raft = self._raft
        if raft is None or self._failure is not None:
            return ()
        leads = raft.is_leader
        if not leads and raft.leader == self._member and raft.is_waited_for:
            return (False, self._member, 0)  # nothing can be committed before others have a snapshot of this store
        if not leads and raft.leader in {None, self._member}:
            return ()  # nobody leads yet, or it does not know yet what is committed
        return (leads, raft.leader, raft.term if leads else 0)

    @property
    def snapshot_from(self) -> str | None:
        """The leader whose journal begins after what this member has; None if it can follow, or nobody leads."""
        raft = self._raft
        return None if raft is None or self._failure is not None else raft.snapshot_from

    @property
    def is_joining(self) -> bool:
        """Whether this member does not vote yet, because its disk is new."""
        return self._raft is not None and self._raft.is_joining

    def bodies(self) -> Iterator[bytes]:
        """Iterate over all records of the journal, committed or not."""
        return self._entries.bodies()

    def has_entry(self, entry: LogBase) -> bool:
        """Whether an entry is in the log of this member."""
        return self._entries.has(entry.index, entry.term)

    def copy_entries_to(self, folder: str, first: int) -> tuple[LogBase, LogBase]:
        """Write the committed entries from a record on to another folder; return the one before it, and the last."""
        return self._entries.copy_to(folder, first)

    def hold(self, first: int) -> Callable[[], None]:
        """Keep the entries from a record on, for a member that takes a snapshot; return a function that ends this."""
        return self._entries.hold(self._entries.index_of(first))

    def await_committed(self, lsn: int, timeout_s: float) -> Lsn:
        """Wait until a record is committed here; return the last that is."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        with self._advanced:
            while self.committed < lsn:
                self._check()
                rest_s = deadline_s - self._clock.monotonic_s()
                if rest_s <= 0:
                    raise WaitExpired(f"record {lsn} was not committed within {timeout_s:g} s")
                self._advanced.wait(min(rest_s, TICK_S))
        return self.committed

    def recover(self) -> None:
        if self._closing:
            raise Closed("this member is closed: open it again")
        if self._failure is None:
            return
        if self._thread is not None:
            self._thread.join(JOIN_S)
        if self._thread is not None and self._thread.is_alive():
            raise Poisoned(f"member {self._member} does not end: start its process again")
        self._entries.recover()
        self._lacked_space, self._failure = ran_out_of_space(self._failure), None
        try:
            self._start()
        except BaseException as error:
            self._failure = error
            raise

    def _check(self) -> Raft:
        if self._closing:
            raise Closed("this member is closed: open it again")
        if self._failure is not None:
            raise Poisoned(f"member {self._member} failed before ({self._failure}): recover() or reopen it")
        assert self._raft is not None
        return self._raft

    @property
    def is_failed(self) -> bool:
        """Whether the loop ended by an error: nothing is sent or voted before `recover`."""
        return self._failure is not None

    def note_space(self, *, full: bool) -> None:
        """Tell the leader whether the disk of this member has room for more writes."""
        if self._raft is not None:
            self._raft.is_full = full

    @property
    def others_are_full(self) -> bool:
        """Whether no other member has room for more writes. Requires: this member leads."""
        return self._raft is not None and self._raft.others_are_full

    def resign(self, timeout_s: float = COMMIT_S) -> None:
        """Stop leading, and wait until this member is in another term; nothing if it does not lead."""
        term = self.current_term
        if self.is_leader:
            self._resigning = True
            self._wake()
            deadline_s = self._clock.monotonic_s() + timeout_s
            with self._changed:
                while self.current_term == term:
                    self._check()
                    if self._clock.monotonic_s() > deadline_s:
                        raise WaitExpired(f"this member did not resign within {timeout_s:g} s")
                    self._changed.wait(TICK_S)

    def close(self) -> None:
        if not self._closed and threads.process_id() == self._process:
            threads.run_uninterrupted(self._close)

    def _close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake()
        if self._thread is not None:  # none could be started
            self._thread.join(JOIN_S)
        self._log.close()
        self._wakes.close()
        self._waker.close()
        self._closed = True


class Tenure:
    """The journal of a member for as long as one store is open on it: one term, for a leader.

    A write of an earlier term must not reach the log of a later one, in which another leader may have written: the
    store is opened again for each.
    """

    durability: Literal["disk", "quorum"] = "quorum"

    def __init__(self, replicated: Replicated, term: int, *, leads: bool) -> None:
        self._replicated, self._term, self._leads = replicated, term, leads
        self.records, self.term = replicated.records, replicated.term
        self.segment_starts, self.roll, self.truncate = replicated.segment_starts, replicated.roll, replicated.truncate
        self.await_committed, self.copy_to = replicated.await_committed, replicated.copy_to
        self.copy_entries_to, self.hold = replicated.copy_entries_to, replicated.hold
        self.member, self.others, self.acks = replicated._member, tuple(replicated._others), replicated.acks
        self.master_of, self.time_note = replicated._masters.master_of, replicated._time.note

    @property
    def incarnation(self) -> int:
        return self._term

    @property
    def is_leader(self) -> bool:
        return self._leads and self._replicated.is_leader and self._replicated.current_term == self._term

    @property
    def first(self) -> Lsn:
        return self._replicated.first

    @property
    def committed(self) -> Lsn:
        return self._replicated.committed

    def propose(self, bodies: Sequence[bytes]) -> Lsn:
        if not bodies:
            raise Invalid("a proposal needs at least one record")
        check_bodies(bodies)
        try:
            return self._replicated._propose(bodies, self._term)
        except (NotLeader, OutcomeUnknown, WaitExpired) as error:
            raise Closed(f"this member does not lead any more ({error}): connect to the leader") from error

    def barrier(self) -> Lsn:
        """Return an LSN at or past every acknowledged record, after a quorum confirmed that this term goes on."""
        self._confirm()
        return self.committed

    def recover(self) -> None:
        """Find out what became of an interrupted proposal: an entry after it is committed after it."""
        self._confirm()

    def _confirm(self) -> None:
        try:
            self._replicated._propose((), self._term)
        except (NotLeader, OutcomeUnknown, WaitExpired) as error:
            raise Closed(f"this member does not lead any more ({error}): connect to the leader") from error

    def close(self) -> None:
        """Do nothing: the member goes on."""
