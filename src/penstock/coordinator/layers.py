"""The state that readers see, layers of writes over a view, and the buffer that adds writes to it.

A reader takes `coordinator.layers`: one reference, no lock. Every earlier write is in exactly one part of it: the
pending delta, one of the other deltas, or the view. A seal, a flush and an apply each replace the whole object in one
assignment. So a write is never in no part or, for a merge, in two, and an interrupt between any two lines finds the
state before a step or after it, never half a step.

How to read: a lookup checks `pending`, then `deltas` in order, then `view`; a merge folds through all of them.
`pending` is live until it is sealed: a reader may only use operations that are one step under the interpreter's lock (a
dict lookup), and sees it grow. A scan, which iterates over deltas, calls `seal_pending()` and reads only `deltas` and
`view`.

`room` makes a write cheap: it is the number of bytes that can be written before the next full check (start the timer,
flush by size, wait for memory, refuse). While there is room a write checks nothing else; SHUT forces the full check.

Thread: `Layers` any; a `Subscription` one thread at a time; a `DeltaBuffer` under the coordinator's lock, but its
`layers` may be read by any thread.
Invariants: (1) `applied <= durable <= taken <= sealed`, and none of them ever decreases. (2) bytes count from the write
until the view that holds them is published. An interrupt between two lines may count some twice: the next flush takes
them all and resets the count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeVar

from penstock.coordinator.protocols import Batch, D, Epoch, V, new_tuple

V_co = TypeVar("V_co", covariant=True)


class Layers(NamedTuple, Generic[D, V]):
    """One consistent state of all writes."""

    pending: D  # live, until the next flush or seal replaces it
    deltas: tuple[D, ...]  # newest first; immutable
    view: V
    applied: Epoch  # the last epoch in `view`
    durable: Epoch  # the last epoch that is durable
    taken: Epoch  # the last epoch in a batch
    sealed: Epoch  # the last epoch that is not in `pending`
    batches: tuple[Batch[D], ...] = ()  # taken and not in `view`, oldest first
    results: tuple[Any, ...] = ()  # results of `make_durable`, for the first of `batches`

    @property
    def sealed_deltas(self) -> tuple[D, ...]:
        """Deltas that are in no batch yet, newest first."""
        if not self.batches:
            return self.deltas
        return self.deltas[: len(self.deltas) - sum(len(batch.deltas) for batch in self.batches)]

    def seal(self, pending: D, last: Epoch) -> Layers[D, V]:
        """Return layers with the pending delta, which ends at `last`, among `deltas`, and a new one in its place."""
        before, deltas, view, applied, durable, taken, _, batches, results = self
        return new_tuple(Layers, (pending, (before, *deltas), view, applied, durable, taken, last, batches, results))

    def fold(self, folded: D) -> Self:
        """Return layers with one delta in place of all sealed deltas that are in no batch."""
        return self._replace(deltas=(folded, *self.deltas[len(self.sealed_deltas) :]))

    def take(self, pending: D, last: Epoch, size: int) -> Layers[D, V]:
        """Return layers with a new batch of all writes up to `last`; `pending` takes the next writes."""
        before, deltas, view, applied, durable, taken, sealed, batches, results = self
        taking = self.sealed_deltas[::-1] if deltas else ()
        if last > sealed:
            taking, deltas = (*taking, before), (before, *deltas)
        else:
            pending = before
        batches = (*batches, new_tuple(Batch, (taking, taken + 1, last, size)))
        return new_tuple(Layers, (pending, deltas, view, applied, durable, last, last, batches, results))

    def mark_durable(self, result: Any) -> Layers[D, V]:
        """Return layers with the oldest batch that was not durable marked durable."""
        pending, deltas, view, applied, _, taken, sealed, batches, results = self
        last = batches[len(results)].last
        return new_tuple(Layers, (pending, deltas, view, applied, last, taken, sealed, batches, (*results, result)))

    def retire(self, view: V) -> Layers[D, V]:
        """Return layers with the oldest batch in the view, and without its deltas."""
        pending, deltas, _, _, durable, taken, sealed, batches, results = self
        batch = batches[0]
        deltas = deltas[: len(deltas) - len(batch.deltas)]
        return new_tuple(Layers, (pending, deltas, view, batch.last, durable, taken, sealed, batches[1:], results[1:]))


class Subscription(Generic[V_co]):
    """Reads the latest view. A subscription that is not read misses views, and costs the coordinator nothing."""

    def __init__(
        self,
        read: Callable[[], tuple[V_co, Epoch]],
        wait: Callable[[Epoch, float], None],
        after: Epoch | None = None,
    ) -> None:
        self._read = read
        self._wait = wait
        self._epoch = read()[1] if after is None else after

    def latest(self) -> V_co:
        """Return the current view."""
        view, self._epoch = self._read()
        return view

    def wait_newer(self, timeout_s: float) -> V_co:
        """Wait for a view newer than the last one returned (initially that of `subscribe`), or raise `WaitExpired`."""
        self._wait(Epoch(self._epoch + 1), timeout_s)
        return self.latest()


SHUT = -1
FAIR_BYTES = 512 << 10  # that may be pending while others wait for their writes
FAIR_FLUSHES = 8  # that stay small after a writer waited: one that waits once usually waits again
SEALED_MAX = 8  # sealed deltas of one flush; more are folded, so that a lookup never checks many


class DeltaBuffer(Generic[D, V]):
    """Holds writes until the view has them."""

    __slots__ = (
        "_allowed",
        "_flush_bytes",
        "_make",
        "_pending_bytes",
        "bytes_max",
        "fair_flushes",
        "hold_reason",
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
        self._allowed = SHUT  # `room` when it was opened: the difference has been written since
        self._pending_bytes = 0
        self.taken_bytes = 0  # total put into batches
        self.hold_reason: str | None = None  # why writes are blocked for now
        self.fair_flushes = 0  # how many more flushes are kept small, because somebody waits for them

    @property
    def pending_bytes(self) -> int:
        """Bytes that are in no batch yet, sealed ones included."""
        return self._pending_bytes + self._allowed - self.room

    @property
    def in_flight_bytes(self) -> int:
        """Bytes in batches that are not in the view."""
        return sum(batch.size for batch in self.layers.batches)

    @property
    def flush_due(self) -> bool:
        return self.pending_bytes >= self._flush_bytes

    def fits(self, size: int, *, fair: bool = True) -> bool:
        """Whether there is room for a write; without `fair`, also beside others that wait for a small flush."""
        pending = self.pending_bytes
        if fair and self.fair_flushes and 0 < pending > FAIR_BYTES - size:
            return False
        return self.hold_reason is None and pending + self.in_flight_bytes + size <= self.bytes_max

    def charge(self, size: int) -> None:
        """Count a write that did not go through `room`."""
        self._pending_bytes += size

    def open_room(self) -> None:
        """Let writes skip the full check, up to the next limit."""
        self._pending_bytes += self._allowed - self.room
        self.room = self._allowed = SHUT
        if self.hold_reason is not None:
            return
        room = self.bytes_max - self._pending_bytes
        for batch in self.layers.batches:  # few, if any
            room -= batch.size
        left = self._flush_bytes - self._pending_bytes
        if 0 < left < room:
            room = left
        if self.fair_flushes:
            # A writer that never waits would fill each flush, and each waiter would wait for all of it.
            room = min(room, FAIR_BYTES - self._pending_bytes)
        self.room = self._allowed = room if room > SHUT else SHUT

    def shut_room(self) -> None:
        """Make the next write do the full check."""
        self._pending_bytes += self._allowed - self.room
        self.room = self._allowed = SHUT

    def seal(self, last: Epoch) -> None:
        """Make the pending delta, if it has writes, an immutable layer."""
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
        """Put all writes up to `last` that are in no batch into a new batch, and return it."""
        was_open, size = self.room >= 0, self._pending_bytes + self._allowed - self.room
        self.layers = layers = self.layers.take(self._make(), last, size)
        self._pending_bytes, self.room, self._allowed = 0, SHUT, SHUT  # after the batch has them
        self.taken_bytes += size
        if self.fair_flushes:
            self.fair_flushes -= 1
        if was_open:
            self.open_room()
        return layers.batches[-1]
