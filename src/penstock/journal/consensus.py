"""The consensus protocol: how a record becomes durable, on one machine or by quorum.

`Alone` is an fsync of the local log. A replicated implementation commits by quorum behind the same protocol: nothing
above the journal knows which one it uses.

Thread: one proposer at a time; reading from any thread.
Invariants: (1) a record that `propose` returned an LSN for is durable. (2) LSNs follow each other without a gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from penstock.errors import CorruptionError, Invalid
from penstock.host import threads
from penstock.journal.record import Lsn
from penstock.log import Log
from penstock.log.record import KIND_DATA


class Consensus(Protocol):
    """An ordered, durable sequence of records."""

    @property
    def durability(self) -> Literal["disk", "quorum"]:
        """What "committed" means: on this disk, or on a quorum of members."""

    @property
    def incarnation(self) -> int:
        """Raised, durably, each time the sequence is opened."""

    @property
    def is_leader(self) -> bool:
        """Whether this member accepts proposals."""

    @property
    def first(self) -> Lsn:
        """The oldest record that is still in the journal."""

    @property
    def committed(self) -> Lsn:
        """The last durable record."""

    def propose(self, bodies: Sequence[bytes]) -> Lsn:
        """Make records durable, in order; return the LSN of the last."""

    def records(self, start: int) -> Iterator[tuple[Lsn, bytes]]:
        """Iterate over durable records from `start` on."""

    def term(self, lsn: int) -> int | None:
        """Return the incarnation (when replicated, the term) that wrote a record; None if it is not here."""

    def barrier(self) -> Lsn:
        """Return an LSN at or past every record that was ever acknowledged as durable."""

    def segment_starts(self) -> list[int]:
        """Return the first LSN of each segment, the active one included: truncation drops whole segments."""

    def roll(self) -> None:
        """Start another segment, so that the active one can be dropped later."""

    def truncate(self, before: int) -> Lsn:
        """Drop records below `before`, by whole segments; return the new first LSN."""

    def copy_to(self, folder: str, first: int) -> Lsn:
        """Write the durable records from `first` on to another folder, as a closed log; return the last LSN."""

    def recover(self) -> None:
        """Continue after a failed proposal; its records are gone unless they were durable."""

    def close(self) -> None: ...


class Alone:
    """One machine: durable is fsynced here."""

    durability: Literal["disk", "quorum"] = "disk"
    is_leader = True

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threads.lock("journal.log")  # a log has one writer, and truncation runs in another thread

    @property
    def incarnation(self) -> int:
        return self._log.incarnation

    @property
    def first(self) -> Lsn:
        return Lsn(self._log.first)

    @property
    def committed(self) -> Lsn:
        return self._log.synced  # type: ignore[return-value]  # Lsn() is a call, and this is every flush

    def propose(self, bodies: Sequence[bytes]) -> Lsn:
        if not bodies:
            raise Invalid("a proposal needs at least one record")
        with self._lock:
            return self._log.commit(bodies)  # type: ignore[return-value]  # Lsn() is a call, and this is every flush

    def records(self, start: int) -> Iterator[tuple[Lsn, bytes]]:
        with self._log.cursor(start) as cursor:
            for record in cursor:
                if record.kind != KIND_DATA:
                    where = (
                        f"record {record.index} was written by a member of a cluster, and the member's file is missing"
                    )
                    raise CorruptionError("journal", 0, where)
                yield Lsn(record.index), record.body

    def term(self, lsn: int) -> int | None:
        if not self.first <= lsn <= self.committed:
            return None
        with self._log.cursor(lsn) as cursor:
            return next((record.incarnation for record in cursor), None)

    def barrier(self) -> Lsn:
        return self.committed  # without replication, every acknowledged record is here

    def segment_starts(self) -> list[int]:
        return self._log.segment_starts()

    def roll(self) -> None:
        with self._lock:
            self._log.roll()

    def truncate(self, before: int) -> Lsn:
        with self._lock:
            return Lsn(self._log.truncate_front(before))

    def copy_to(self, folder: str, first: int) -> Lsn:
        return Lsn(self._log.copy_to(folder, first))

    def recover(self) -> None:
        with self._lock:
            self._log.recover()
            if self._log.last > self._log.synced:  # an interrupt came between writing and syncing
                self._log.truncate_back(self._log.synced)

    def close(self) -> None:
        with self._lock:
            self._log.close()
