"""What makes a record durable: the seam behind which one machine or three decide.

`Alone` is an fsync of the local log. A replicated implementation commits by quorum and has the same face: nothing above
the journal knows which one it talks to.

Thread: one proposer at a time; reading from any thread.
Invariants: (1) a record that `propose` returned an LSN for is durable. (2) LSNs follow each other without a gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from penstock.errors import Invalid
from penstock.host import threads
from penstock.journal.record import Lsn
from penstock.log import Log


class Consensus(Protocol):
    """An ordered, durable sequence of records."""

    @property
    def durability(self) -> Literal["disk", "quorum"]:
        """What a committed record is."""

    @property
    def incarnation(self) -> int:
        """Raised, durably, each time the sequence is opened."""

    @property
    def is_leader(self) -> bool:
        """Whether proposals are taken here."""

    @property
    def first(self) -> Lsn:
        """The oldest record that is still held."""

    @property
    def committed(self) -> Lsn:
        """The last record that is durable."""

    def propose(self, bodies: Sequence[bytes]) -> Lsn:
        """Make records durable, in order; the LSN of the last."""

    def records(self, start: int) -> Iterator[tuple[Lsn, bytes]]:
        """Durable records from `start` on."""

    def barrier(self) -> Lsn:
        """A number at or past every record that anyone was told to be durable."""

    def pieces(self) -> list[int]:
        """The first LSN of each piece that can be given up as a whole, and of the one that grows."""

    def roll(self) -> None:
        """Begin another piece, so that the one that grew until now can be given up."""

    def truncate(self, before: int) -> Lsn:
        """Give up records below `before`, as far as that is possible; the new first."""

    def recover(self) -> None:
        """Go on after a failed proposal; what it held is gone unless it was durable."""

    def close(self) -> None: ...


class Alone:
    """One machine: durable is fsynced here."""

    durability: Literal["disk", "quorum"] = "disk"
    is_leader = True

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threads.lock("journal.log")  # a log has one writer; truncation comes from another thread

    @property
    def incarnation(self) -> int:
        return self._log.incarnation

    @property
    def first(self) -> Lsn:
        return Lsn(self._log.first)

    @property
    def committed(self) -> Lsn:
        return Lsn(self._log.synced)

    def propose(self, bodies: Sequence[bytes]) -> Lsn:
        if not bodies:
            raise Invalid("a proposal holds at least one record")
        with self._lock:
            return self._log.commit(bodies)  # type: ignore[return-value]  # Lsn() is a call, and this is every flush

    def records(self, start: int) -> Iterator[tuple[Lsn, bytes]]:
        with self._log.cursor(start) as cursor:
            for record in cursor:
                yield Lsn(record.index), record.body

    def barrier(self) -> Lsn:
        return self.committed  # alone, whatever was told is here

    def pieces(self) -> list[int]:
        return self._log.segment_starts()

    def roll(self) -> None:
        with self._lock:
            self._log.roll()

    def truncate(self, before: int) -> Lsn:
        with self._lock:
            return Lsn(self._log.truncate_front(before))

    def recover(self) -> None:
        with self._lock:
            self._log.recover()
            if self._log.last > self._log.synced:  # an interrupt came between writing and syncing
                self._log.truncate_back(self._log.synced)

    def close(self) -> None:
        with self._lock:
            self._log.close()
