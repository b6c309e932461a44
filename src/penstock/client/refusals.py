"""Writes of this client that the owner refused, kept until a call raised the error, and after that for later calls.

A batch of the client's coordinator has many writes to many tables, and its epochs are only known as a whole. If all of
a table's writes in a batch were refused, the owner's error is raised; if only some were, `OutcomeUnknown`.

Thread: any; `_lock` guards everything. `unraised` is read without it.
Invariant: no refusal is forgotten before a call raised it: when there are too many, the oldest are joined.
"""

from __future__ import annotations

from penstock.errors import OutcomeUnknown, PenstockError
from penstock.host import threads

REFUSALS_MAX = 64  # kept separately


class Refusal:
    """The refused writes of a batch, or of several consecutive ones."""

    __slots__ = ("errors", "first", "last", "raised")

    def __init__(self, first: int, last: int, errors: dict[int, PenstockError]) -> None:
        self.first = first  # epochs, both included
        self.last = last
        self.errors = errors  # by table, at least one
        self.raised = False

    def joined(self, later: Refusal) -> Refusal:
        """Return both as one refusal, which is less precise."""
        errors = {**later.errors, **self.errors}
        joined = Refusal(self.first, later.last, {})
        joined.errors = {table: in_doubt(error, joined.first, joined.last) for table, error in errors.items()}
        joined.raised = self.raised and later.raised
        return joined


def in_doubt(error: PenstockError, first: int, last: int) -> OutcomeUnknown:
    """Return the error for a batch of which only some writes were refused."""
    return OutcomeUnknown(
        f"of epochs {first} to {last} some writes to this table were refused ({error}), the others are durable: "
        "read to find out which",
        first=first,
        last=last,
    )


class Refusals:
    """All refusals of a client."""

    def __init__(self) -> None:
        self._lock = threads.lock("client.refusals")
        self._refusals: list[Refusal] = []  # guarded by _lock; in the order of epochs
        self.unraised = False  # some refusal was not raised yet

    def add(self, refusal: Refusal) -> None:
        """Add a refusal."""
        with self._lock:
            refusals = [*self._refusals, refusal]
            if len(refusals) > REFUSALS_MAX:
                refusals[:2] = [refusals[0].joined(refusals[1])]
            self._refusals = refusals
            self.unraised = True

    def raise_unraised(self) -> None:
        """Raise the oldest refusal that was not raised yet, if there is one."""
        with self._lock:
            error = self._next_error([refusal for refusal in self._refusals if not refusal.raised], None)
        if error is not None:
            raise error

    def raise_for(self, epoch: int, table: int | None) -> None:
        """Raise a refusal of the batch of an epoch: of `table`; or (None) of any, or an earlier one not raised yet."""
        with self._lock:
            about = [refusal for refusal in self._refusals if refusal.first <= epoch <= refusal.last]
            if table is None:
                about += [refusal for refusal in self._refusals if not refusal.raised and refusal.last < epoch]
            error = self._next_error(about, table)
        if error is not None:
            raise error

    def _next_error(self, refusals: list[Refusal], table: int | None) -> PenstockError | None:
        """Return the error to raise, and mark its refusal as raised. Requires: _lock."""
        for refusal in refusals:
            error = next(iter(refusal.errors.values())) if table is None else refusal.errors.get(table)
            if error is not None:
                refusal.raised = refusal.raised or len(refusal.errors) == 1 or table is None
                self.unraised = any(not other.raised for other in self._refusals)
                return error
        return None
