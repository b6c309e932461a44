"""The layers of writes, and how much room they leave.

`room` makes a write cheap: it is the number of bytes that may still be written before somebody must look around (start
the timer, flush by size, wait for memory, refuse). Below that a write checks nothing else; SHUT sends every write to
look.

Thread: everything under the coordinator's lock; `layers` may be read by any thread.
Invariants: (1) `layers` changes by one assignment a step. (2) bytes count from the write until the view that holds them
is published. An interrupt between two lines may count some twice: the next flush takes them all and begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

from penstock.coordinator.epochs import Epoch
from penstock.coordinator.protocols import Batch, D, V
from penstock.coordinator.views import Layers

SHUT = -1
SEALED_MAX = 8  # sealed deltas of one flush; more are folded, so that a lookup never goes through many


class DeltaBuffer(Generic[D, V]):
    """Writes between their callers and the view."""

    __slots__ = (
        "_allowed",
        "_flush_bytes",
        "_make",
        "_pending_bytes",
        "bytes_max",
        "held",
        "layers",
        "room",
        "taken_bytes",
    )

    def __init__(self, make: Callable[[], D], view: V, none: Epoch, *, flush_bytes: int, bytes_max: int) -> None:
        self._make = make
        self._flush_bytes = flush_bytes
        self.bytes_max = bytes_max
        self.layers: Layers[D, V] = Layers(make(), (), view, none, none, none, none)
        self.room = SHUT
        self._allowed = SHUT  # what `room` was when it was opened: the difference has been written since
        self._pending_bytes = 0
        self.taken_bytes = 0  # ever put into a batch
        self.held: str | None = None  # why no write fits at all, for now

    @property
    def pending_bytes(self) -> int:
        """Bytes that are in no batch yet, sealed ones included."""
        return self._pending_bytes + self._allowed - self.room

    @property
    def in_flight_bytes(self) -> int:
        """Bytes in batches that are not in the view."""
        size = 0
        for batch in self.layers.batches:  # few; a sum over a generator would cost more than all of this
            size += batch.size
        return size

    @property
    def flush_due(self) -> bool:
        return self.pending_bytes >= self._flush_bytes

    def fits(self, size: int) -> bool:
        return self.held is None and self.pending_bytes + self.in_flight_bytes + size <= self.bytes_max

    def charge(self, size: int) -> None:
        """Count a write that did not go through `room`."""
        self._pending_bytes += size

    def open_room(self) -> None:
        """Let writes in without a look, up to the next limit."""
        self.shut_room()
        if self.held is not None:
            return
        room = self.bytes_max - self._pending_bytes - self.in_flight_bytes
        left = self._flush_bytes - self._pending_bytes
        self.room = self._allowed = max(min(room, left) if left > 0 else room, SHUT)

    def shut_room(self) -> None:
        """Make the next write look."""
        self._pending_bytes += self._allowed - self.room
        self.room = self._allowed = SHUT

    def seal(self, last: Epoch) -> None:
        """Make the pending delta, if it has writes, a layer that does not change any more."""
        if last > self.layers.sealed:
            self.layers = self.layers.seal(self._make(), last)

    def fold(self) -> None:
        """Merge the sealed deltas into one if there are many."""
        sealed = self.layers.sealed_deltas
        if len(sealed) > SEALED_MAX:
            folded = self._make()
            for delta in reversed(sealed):
                folded.merge(delta)
            self.layers = self.layers.fold(folded)

    def take(self, last: Epoch) -> Batch[D]:
        """Everything up to `last` that is in no batch yet, as a batch."""
        was_open = self.room >= 0
        self.shut_room()
        self.layers = self.layers.take(self._make(), last, self._pending_bytes)
        self._pending_bytes = 0  # after the batch has them
        if was_open:
            self.open_room()
        batch = self.layers.batches[-1]
        self.taken_bytes += batch.size
        return batch

    def harden(self, result: Any) -> None:
        """The oldest batch that was not durable is so now."""
        self.layers = self.layers.harden(result)

    def retire(self, view: V) -> None:
        """Publish the view that holds the oldest batch, and drop its deltas, in one step."""
        self.layers = self.layers.retire(view)
