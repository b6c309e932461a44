"""A store that follows: one thread dispatches the leader's records as they are committed.

Thread: `Follower` has one of its own; `close` ends it.
Invariant: records are dispatched in LSN order, each once, and only after they are committed.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.errors import Closed, Invalid, Poisoned, WaitExpired
from penstock.host import threads
from penstock.host.steady_clock import TimeNote
from penstock.journal.consensus import Consensus
from penstock.journal.record import Lsn
from penstock.journal.tracker import MemberAcks
from penstock.replica.state import LogBase

logger = logging.getLogger(__name__)

RAFT_FILE = "raft"  # a member's term and vote: a folder with it is opened as a member only
AWAIT_S = 0.5
FOLLOW_S = 10.0  # for the leader to report what is committed
JOIN_S = 30.0


CLUSTER_IDS = 1 << 62  # ids of staged files of a cluster are above it, those that a member draws for itself below
TERM_BITS, COUNT_BITS = 30, 32


def cluster_ids(term: int) -> Callable[[], int]:
    """Return a source of ids for files that all members will have. A term has one store that takes writes."""
    if term >= 1 << TERM_BITS:
        raise Invalid(f"the cluster is in term {term}: files can be loaded up to term {1 << TERM_BITS}")
    numbers = itertools.count(CLUSTER_IDS | term << COUNT_BITS)
    return lambda: next(numbers)


class MemberJournal(Consensus, Protocol):
    """The journal of a member of a cluster, which goes on when the store is closed."""

    @property
    def member(self) -> str:
        """The name of this member."""

    @property
    def others(self) -> Sequence[str]:
        """The names of the other members."""

    def acks(self) -> MemberAcks:
        """Return what the other members have on disk, as far as this one knows."""

    def master_of(self, partition: int) -> str:
        """Return the member that is preferred for reads of a partition; empty if there is none."""

    def time_note(self) -> TimeNote | None:
        """Return the last time that a leader's store sent; None if this process has received none."""

    def await_committed(self, lsn: int, timeout_s: float) -> Lsn:
        """Wait until a record is committed here."""

    def copy_entries_to(self, folder: str, first: int) -> tuple[LogBase, LogBase]:
        """Write the committed entries from a record on to another folder; return the one before it, and the last."""

    def hold(self, first: int) -> Callable[[], None]:
        """Keep the entries from a record on; return what ends that."""


class Follower:
    """Dispatches what the leader writes."""

    def __init__(self, tenure: MemberJournal, dispatch: Callable[[int, bytes], None], dispatched: int) -> None:
        self._tenure, self._dispatch = tenure, dispatch
        self._next = dispatched + 1
        self._stop = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threads.spawn(self._run, name="penstock-follower")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._tenure.await_committed(self._next, AWAIT_S)
                for lsn, body in self._tenure.records(self._next):
                    self._dispatch(lsn, body)
                    self._next = lsn + 1
                    if self._stop.is_set():
                        return
            except WaitExpired:
                continue
            except Exception as error:
                self.failure = error
                if isinstance(error, Closed | Poisoned):
                    return  # mostly, the member stops
                logger.exception("this member cannot apply record %d: it does not follow any more", self._next)
                return

    def close(self) -> None:
        self._stop.set()
        self._thread.join(JOIN_S)
