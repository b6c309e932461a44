"""Writes of this client that the owner did not take, kept until somebody was told, and after that for who asks.

A batch of the client's coordinator is many writes of many tables, and its epochs are known as a whole only. Of a table
none of whose writes in a batch was taken, the owner's error is said; of one that had both, `OutcomeUnknown`.

Thread: any; `_lock` guards everything. `news` is read without it.
Invariant: no refusal is forgotten before somebody was told: when there are too many, the oldest are told as one.
"""

from __future__ import annotations

from penstock.errors import OutcomeUnknown, PenstockError
from penstock.host import threads

REFUSALS_MAX = 64  # kept one by one


class Refusal:
    """What was refused of a batch, or of some that follow each other."""

    __slots__ = ("errors", "first", "last", "told")

    def __init__(self, first: int, last: int, errors: dict[int, PenstockError]) -> None:
        self.first = first  # epochs, both included
        self.last = last
        self.errors = errors  # by table, at least one
        self.told = False

    def joined(self, later: Refusal) -> Refusal:
        """Both as one, which says less."""
        errors = {**later.errors, **self.errors}
        joined = Refusal(self.first, later.last, {})
        joined.errors = {table: in_doubt(error, joined.first, joined.last) for table, error in errors.items()}
        joined.told = self.told and later.told
        return joined


def in_doubt(error: PenstockError, first: int, last: int) -> OutcomeUnknown:
    """What can be said to the writer of one of several writes, of which some were refused."""
    return OutcomeUnknown(
        f"of epochs {first} to {last} some writes to this table were refused ({error}), the others are durable: look",
        first=first,
        last=last,
    )


class Refusals:
    """All of them."""

    def __init__(self) -> None:
        self._lock = threads.lock("client.refusals")
        self._refusals: list[Refusal] = []  # guarded by _lock; in the order of epochs
        self.news = False  # nobody was told of one of them

    def add(self, refusal: Refusal) -> None:
        """Keep one."""
        with self._lock:
            kept = [*self._refusals, refusal]
            if len(kept) > REFUSALS_MAX:
                kept[:2] = [kept[0].joined(kept[1])]
            self._refusals = kept
            self.news = True

    def raise_news(self) -> None:
        """Raise the oldest that nobody was told of, if there is one."""
        with self._lock:
            error = self._tell([refusal for refusal in self._refusals if not refusal.told], None)
        if error is not None:
            raise error

    def raise_for(self, epoch: int, table: int | None) -> None:
        """Raise what was refused of the batch of an epoch: of its table, or (None) of any, or before and not told."""
        with self._lock:
            about = [refusal for refusal in self._refusals if refusal.first <= epoch <= refusal.last]
            if table is None:
                about += [refusal for refusal in self._refusals if not refusal.told and refusal.last < epoch]
            error = self._tell(about, table)
        if error is not None:
            raise error

    def _tell(self, refusals: list[Refusal], table: int | None) -> PenstockError | None:
        """The error to raise. Requires: _lock."""
        for refusal in refusals:
            error = next(iter(refusal.errors.values())) if table is None else refusal.errors.get(table)
            if error is not None:
                refusal.told = refusal.told or len(refusal.errors) == 1 or table is None
                self.news = any(not other.told for other in self._refusals)
                return error
        return None
