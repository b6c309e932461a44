"""What a user of the coordinator implements, a delta and a flusher, and the epochs that it gets.

An epoch is the number of a write: `incarnation << 40 | n`, n from 1. Epochs live in memory only; the incarnation,
raised durably at each open, keeps those of different openings apart.

Thread: a pending delta is changed under the coordinator's lock only, and never again once it is in a batch or sealed.
`make_durable` and `apply` are called with no lock held, by the thread that has the turn: each by one thread at a
time, in epoch order, but one batch may be applied while the next is made durable. They must not call `flush`. Epochs
are assigned under the lock; any thread may read them.
Invariant: an epoch of another incarnation always raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, NamedTuple, NewType, Protocol, Self, TypeVar

from penstock.errors import Invalid, Lost

Epoch = NewType("Epoch", int)
T = TypeVar("T")

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
            raise Invalid(f"epoch {epoch} was not assigned yet (the last is {self.last}): pass what a write returned")
        return Epoch(epoch)


class Delta(Protocol):
    """Writes that have not been flushed."""

    def is_empty(self) -> bool: ...

    def merge(self, other: Self, /) -> None:
        """Add the writes of `other`, which are later. Does not change `other`; changes nothing if it raises."""

    def size_estimate(self) -> int:
        """Return the approximate memory in bytes."""


class Durability(Enum):
    """How safe an acknowledged write is.

    >>> store.durability
    <Durability.DISK: 'disk'>
    """

    MEMORY = "memory"  # after a write returned its epoch
    DISK = "disk"
    QUORUM = "quorum"


class Acknowledgement(NamedTuple):
    """All writes up to `epoch` have this durability.

    >>> epoch = store.kv("users").put(b"ada", b"1815")
    >>> store.flush(epoch).durability
    <Durability.DISK: 'disk'>
    """

    epoch: Epoch
    durability: Durability


# Builds a named tuple directly: its constructor is one more call, and every flush builds a handful of them.
new_tuple: Callable[[type[T], tuple[Any, ...]], T] = tuple.__new__  # type: ignore[assignment]

D = TypeVar("D", bound=Delta)
D_co = TypeVar("D_co", bound=Delta, covariant=True)
D_contra = TypeVar("D_contra", bound=Delta, contravariant=True)
F = TypeVar("F")
V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


class Batch(NamedTuple, Generic[D_co]):
    """The writes of one flush. A retry has the same epochs, so `last` can serve as its token."""

    deltas: tuple[D_co, ...]  # oldest first
    first: Epoch
    last: Epoch
    size: int  # bytes, as its writers stated


class Flusher(Protocol[D_contra, F, V_co]):
    """Makes batches durable, then applies them."""

    @property
    def durability(self) -> Durability:
        """The durability of a write once `make_durable` has returned."""

    def make_durable(self, batch: Batch[D_contra], *, again: bool) -> F:
        """Write and sync. After it raised, `recover` is called first; then the same batch is passed with `again`."""

    def apply(self, flushed: F) -> V_co:
        """Apply the result of `make_durable` and return the new view. If it raises, it has applied nothing."""

    def recover(self) -> None:
        """Prepare for the next `make_durable` after it, or `apply`, failed."""
