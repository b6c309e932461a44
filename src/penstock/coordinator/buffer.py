"""The pending delta, the deltas on their way, and how much room they leave.

`room` makes a write cheap: it is the number of bytes that may still be written before somebody must look around (start
the timer, flush by size, wait for memory, refuse). Below that a write checks nothing else; SHUT sends every write to
look.

Thread: everything under the coordinator's lock; `layers` may be read by any thread.
Invariants: (1) `layers` holds every write once (see views). (2) a delta in `layers.deltas` never changes. (3) bytes
count from the write until the view that holds them is published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from penstock.coordinator.epochs import Epoch
from penstock.coordinator.protocols import Batch, D, V
from penstock.coordinator.views import Layers

SHUT = -1
SEALED_MAX = 8  # sealed deltas of one flush; more are folded, so that a lookup never goes through many


class DeltaBuffer(Generic[D, V]):
    """Writes between their callers and the view."""

    __slots__ = (
        "_allowed",
        "_bytes_max",
        "_flush_bytes",
        "_make",
        "_pending_bytes",
        "_sealed",
        "in_flight_bytes",
        "layers",
        "pending",
        "room",
        "taken_bytes",
    )

    def __init__(self, make: Callable[[], D], view: V, applied: Epoch, *, flush_bytes: int, bytes_max: int) -> None:
        self._make = make
        self._flush_bytes = flush_bytes
        self._bytes_max = bytes_max
        self.pending = make()
        self.layers: Layers[D, V] = Layers(self.pending, (), view, applied)
        self.room = SHUT
        self._allowed = SHUT  # what `room` was when it was opened: the difference has been written since
        self._pending_bytes = 0
        self._sealed = 0  # this many of `layers.deltas`, the newest, are in no batch yet
        self.in_flight_bytes = 0  # in batches that are not in the view
        self.taken_bytes = 0  # ever put into a batch

    @property
    def pending_bytes(self) -> int:
        """Bytes that are in no batch yet, sealed ones included."""
        return self._pending_bytes + self._allowed - self.room

    @property
    def flush_due(self) -> bool:
        return self.pending_bytes >= self._flush_bytes

    def fits(self, size: int) -> bool:
        return self.pending_bytes + self.in_flight_bytes + size <= self._bytes_max

    def charge(self, size: int) -> None:
        """Count a write that did not go through `room`."""
        self._pending_bytes += size

    def open_room(self) -> None:
        """Let writes in without a look, up to the next limit."""
        self.shut_room()
        room = self._bytes_max - self._pending_bytes - self.in_flight_bytes
        if self._pending_bytes < self._flush_bytes:
            room = min(room, self._flush_bytes - self._pending_bytes)
        self.room = self._allowed = max(room, SHUT)

    def shut_room(self) -> None:
        """Make the next write look."""
        self._pending_bytes = self.pending_bytes
        self.room = self._allowed = SHUT

    def seal(self) -> None:
        """Make the pending delta a layer that does not change any more, and begin another."""
        now = self.layers
        self.pending = self._make()
        self._sealed += 1
        self.layers = Layers(self.pending, (now.pending, *now.deltas), now.view, now.applied)

    def fold(self) -> None:
        """Merge the sealed deltas into one if there are many."""
        if self._sealed <= SEALED_MAX:
            return
        now = self.layers
        folded = self._make()
        for delta in reversed(now.deltas[: self._sealed]):
            folded.merge(delta)
        rest = now.deltas[self._sealed :]
        self._sealed = 1
        self.layers = Layers(now.pending, (folded, *rest), now.view, now.applied)

    def take(self, first: Epoch, last: Epoch) -> Batch[D]:
        """Everything sealed that is in no batch yet, as a batch. Requires: the pending delta has no writes."""
        self.shut_room()
        batch = Batch(self.layers.deltas[: self._sealed][::-1], first, last, self._pending_bytes)
        self.in_flight_bytes += batch.size
        self.taken_bytes += batch.size
        self._pending_bytes = self._sealed = 0
        return batch

    def retire(self, batch: Batch[D], view: V) -> None:
        """Publish the view that holds `batch`, and drop its deltas, in one step. Requires: it is the oldest."""
        now = self.layers
        kept = len(now.deltas) - len(batch.deltas)
        assert now.deltas[kept:] == batch.deltas[::-1]
        self.in_flight_bytes -= batch.size
        self.layers = Layers(now.pending, now.deltas[:kept], view, batch.last)
