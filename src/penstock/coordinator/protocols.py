"""What a user of the coordinator brings: a delta and a flusher.

Thread: a pending delta is changed under the coordinator's lock only, and never again once it is in a batch or sealed.
`make_durable` and `apply` are called with no lock held, by whichever thread has the turn: each by one thread at a
time, in epoch order, but one batch may be applied while the next is made durable. They must not call `flush`.
"""

from __future__ import annotations

from enum import Enum
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from penstock.coordinator.epochs import Epoch


class Delta(Protocol):
    """Writes that have not been flushed."""

    def is_empty(self) -> bool: ...

    def merge(self, other: Self, /) -> None:
        """Take over the writes of `other`, which came later. Does not change `other`; changes nothing if it raises."""

    def size_estimate(self) -> int:
        """Bytes of memory, roughly."""


class Durability(Enum):
    """How safe an acknowledged write is."""

    MEMORY = "memory"  # what an epoch alone says
    DISK = "disk"
    QUORUM = "quorum"


class Acknowledgement(NamedTuple):
    """Everything up to `epoch` is this safe."""

    epoch: Epoch
    durability: Durability


D = TypeVar("D", bound=Delta)
D_co = TypeVar("D_co", bound=Delta, covariant=True)
D_contra = TypeVar("D_contra", bound=Delta, contravariant=True)
F = TypeVar("F")
V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


class Batch(NamedTuple, Generic[D_co]):
    """What one flush writes. Its epochs stay the same when it is written again, so `last` can serve as its token."""

    deltas: tuple[D_co, ...]  # oldest first
    first: Epoch
    last: Epoch
    size: int  # bytes, as its writers said


class Flusher(Protocol[D_contra, F, V_co]):
    """Makes batches durable, then applies them."""

    @property
    def durability(self) -> Durability:
        """What a write is once `make_durable` has returned."""

    def make_durable(self, batch: Batch[D_contra], *, again: bool) -> F:
        """Write and sync. Once it raised, nothing is called until `recover`; then the same batch comes `again`."""

    def apply(self, flushed: F) -> V_co:
        """Apply what `make_durable` returned; the view with it. If it raises, it has applied nothing of it."""

    def recover(self) -> None:
        """Make `make_durable` possible again after it, or `apply`, failed."""
