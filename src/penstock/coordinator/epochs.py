"""Epochs: the numbers of writes, and how far they have come.

An epoch is `incarnation << 40 | n`, n from 1. Epochs live in memory only; the incarnation, raised durably at each open,
keeps those of different openings apart.

Thread: changed under the coordinator's lock; any thread may read a watermark, which is one attribute.
Invariants: (1) `applied <= durable <= last`, and none of them ever goes back. (2) an epoch of another incarnation never
gets an answer, only an error.
"""

from __future__ import annotations

from typing import NewType

from penstock.errors import Invalid, Lost

Epoch = NewType("Epoch", int)

COUNT_BITS = 40
COUNT_MAX = (1 << COUNT_BITS) - 1
COUNT_RESERVE = 1 << 32  # the end is looked for once per flush: no flush holds this many writes
INCARNATION_MAX = (1 << 24) - 1  # so that an epoch fits into 64 bits


class EpochTracker:
    """Gives out epochs and keeps the two watermarks."""

    __slots__ = ("applied", "durable", "last", "none")

    def __init__(self, incarnation: int) -> None:
        if not 1 <= incarnation <= INCARNATION_MAX:
            raise Invalid(f"the incarnation is {incarnation}: give 1 to {INCARNATION_MAX}")
        self.none = Epoch(incarnation << COUNT_BITS)  # below every epoch of this incarnation: "nothing yet"
        self.last = self.none  # given out; guarded by the coordinator's lock
        self.durable = self.none
        self.applied = self.none

    @property
    def incarnation(self) -> int:
        return self.none >> COUNT_BITS

    @property
    def count(self) -> int:
        """How many epochs were given out."""
        return self.last - self.none

    @property
    def exhausted(self) -> bool:
        """Whether the numbers of this incarnation are about to end."""
        return self.count > COUNT_MAX - COUNT_RESERVE

    def check(self, epoch: int) -> Epoch:
        """The epoch, if it was given out here. `Lost` if by an earlier incarnation, `Invalid` if by nobody yet."""
        if epoch < self.none:
            raise Lost(
                f"epoch {epoch} is of incarnation {epoch >> COUNT_BITS}, this is {self.incarnation}: "
                "read the data to see whether the write survived"
            )
        if epoch > self.last:
            raise Invalid(f"epoch {epoch} was not given out yet (the last is {self.last}): pass what a write returned")
        return Epoch(epoch)

    def advance_durable(self, epoch: Epoch) -> None:
        """Everything up to `epoch` is durable."""
        assert self.durable < epoch <= self.last
        self.durable = epoch

    def advance_applied(self, epoch: Epoch) -> None:
        """The view that holds everything up to `epoch` is published."""
        assert self.applied < epoch <= self.durable
        self.applied = epoch
