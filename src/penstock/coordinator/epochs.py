"""Epochs: the numbers of writes.

An epoch is `incarnation << 40 | n`, n from 1. Epochs live in memory only; the incarnation, raised durably at each open,
keeps those of different openings apart.

Thread: changed under the coordinator's lock; any thread may read.
Invariant: an epoch of another incarnation always raises an error. `Layers` holds the durable and applied epochs.
"""

from __future__ import annotations

from typing import NewType

from penstock.errors import Invalid, Lost

Epoch = NewType("Epoch", int)

COUNT_BITS = 40
COUNT_MAX = (1 << COUNT_BITS) - 1
COUNT_RESERVE = 1 << 32  # exhaustion is checked once per flush: no flush holds this many writes
INCARNATION_MAX = (1 << 24) - 1  # so that an epoch fits into 64 bits


class EpochTracker:
    """Assigns epochs."""

    __slots__ = ("end", "last", "none")

    def __init__(self, incarnation: int) -> None:
        if not 1 <= incarnation <= INCARNATION_MAX:
            raise Invalid(f"the incarnation is {incarnation}: give 1 to {INCARNATION_MAX}")
        self.none = Epoch(incarnation << COUNT_BITS)  # below every epoch of this incarnation: "nothing yet"
        self.last = self.none  # the last assigned; guarded by the coordinator's lock
        self.end = self.none + COUNT_MAX - COUNT_RESERVE  # above it the epochs of this incarnation are nearly used up

    @property
    def incarnation(self) -> int:
        return self.none >> COUNT_BITS

    @property
    def count(self) -> int:
        """The number of epochs assigned."""
        return self.last - self.none

    @property
    def exhausted(self) -> bool:
        """Whether the epochs of this incarnation are nearly used up."""
        return self.last > self.end

    def check(self, epoch: int) -> Epoch:
        """Return the epoch if it was assigned here; `Lost` if by an earlier incarnation, `Invalid` if not yet."""
        if epoch < self.none:
            raise Lost(
                f"epoch {epoch} is of incarnation {epoch >> COUNT_BITS}, this is {self.incarnation}: "
                "read the data to see whether the write survived"
            )
        if epoch > self.last:
            raise Invalid(f"epoch {epoch} was not given out yet (the last is {self.last}): pass what a write returned")
        return Epoch(epoch)
