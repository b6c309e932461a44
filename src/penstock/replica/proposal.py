"""A proposal: records on their way to a quorum, and the errors that end one.

Thread: the loop's thread answers it, any thread waits for it.
Invariant: it is answered once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.errors import NotLeader, OutcomeUnknown
from penstock.journal.record import Lsn


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


def not_leader(leader: str | None) -> NotLeader:
    """Return the error of a write to a member that does not lead."""
    where = "none is elected yet: retry in a moment" if leader is None else f"write to {leader}"
    return NotLeader(f"this member is not the leader, and nothing was written; {where}", leader=leader)


def outcome_unknown() -> OutcomeUnknown:
    """Return the error of a write whose leader was replaced."""
    return OutcomeUnknown(
        "another leader was elected before a quorum had this write: it may or may not be there; retry it with its token"
    )
