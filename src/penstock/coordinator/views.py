"""What readers see: layers of writes over a view, and how far each batch of them has come.

A reader takes `coordinator.layers`: one reference, no lock. In it every write made before is in exactly one place: the
pending delta, one of the other deltas, or the view. A seal, a flush and an apply each replace the whole object in one
assignment. So there is no moment at which a write is in none or, for a merge, in two, and an interrupt between any two
lines finds the state before a step or the state after it, never half a step.

How to read: a lookup asks `pending`, then `deltas` in order, then `view`; a merge folds through all of them. `pending`
is live while it is the coordinator's: a reader may do to it only what is one step under the interpreter's lock (a dict
lookup), and sees it grow. What walks over a delta, a scan, uses `seal_pending()` and reads `deltas` and `view` only.

Thread: `Layers` any; a `Subscription` one thread at a time.
Invariant: `applied <= durable <= taken <= sealed`, and none of them ever goes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeVar

from penstock.coordinator.epochs import Epoch
from penstock.coordinator.protocols import Batch, D

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


class Layers(NamedTuple, Generic[D, V]):
    """One consistent state of everything written."""

    pending: D  # live, until the next flush or seal replaces it
    deltas: tuple[D, ...]  # newest first; they do not change any more
    view: V
    applied: Epoch  # the last epoch in `view`
    durable: Epoch  # the last epoch that is durable
    taken: Epoch  # the last epoch in a batch
    sealed: Epoch  # the last epoch that is not in `pending`
    batches: tuple[Batch[D], ...] = ()  # taken and not in `view`, oldest first
    results: tuple[Any, ...] = ()  # what `make_durable` returned, for the first of `batches`

    @property
    def sealed_deltas(self) -> tuple[D, ...]:
        """Deltas that are in no batch yet, newest first."""
        if not self.batches:
            return self.deltas
        return self.deltas[: len(self.deltas) - sum(len(batch.deltas) for batch in self.batches)]

    # One constructor call a step: `_replace` is five, and every flush takes four steps.

    def seal(self, pending: D, last: Epoch) -> Layers[D, V]:
        """With the pending delta, which holds all up to `last`, among the others, and a new one in its place."""
        _, deltas, view, applied, durable, taken, _, batches, results = self
        return Layers(pending, (self.pending, *deltas), view, applied, durable, taken, last, batches, results)

    def fold(self, folded: D) -> Self:
        """With one delta in the place of all that are sealed and in no batch."""
        return self._replace(deltas=(folded, *self.deltas[len(self.sealed_deltas) :]))

    def take(self, pending: D, last: Epoch, size: int) -> Layers[D, V]:
        """With everything up to `last` that is in no batch in one of its own; `pending` takes the next writes."""
        before, deltas, view, applied, durable, taken, sealed, batches, results = self
        taking = self.sealed_deltas[::-1]
        if last > sealed:
            taking, deltas = (*taking, before), (before, *deltas)
        else:
            pending = before
        batches = (*batches, Batch(taking, Epoch(taken + 1), last, size))
        return Layers(pending, deltas, view, applied, durable, last, last, batches, results)

    def harden(self, result: Any) -> Layers[D, V]:
        """With the oldest batch that was not durable known to be so."""
        pending, deltas, view, applied, _, taken, sealed, batches, results = self
        last = batches[len(results)].last
        return Layers(pending, deltas, view, applied, last, taken, sealed, batches, (*results, result))

    def retire(self, view: V) -> Layers[D, V]:
        """With the oldest batch in the view, and its deltas gone."""
        pending, deltas, _, _, durable, taken, sealed, batches, results = self
        batch = batches[0]
        deltas = deltas[: len(deltas) - len(batch.deltas)]
        return Layers(pending, deltas, view, batch.last, durable, taken, sealed, batches[1:], results[1:])


class Subscription(Generic[V_co]):
    """Shows the latest view. One that is not read misses views, and costs the coordinator nothing."""

    def __init__(self, read: Callable[[], tuple[V_co, Epoch]], wait: Callable[[Epoch, float], None]) -> None:
        self._read = read
        self._wait = wait
        self._seen = read()[1]

    def latest(self) -> V_co:
        """The view of now."""
        view, self._seen = self._read()
        return view

    def wait_newer(self, timeout_s: float) -> V_co:
        """Wait for a view newer than the last one shown (at first: the one of `subscribe`); `WaitExpired` if none."""
        self._wait(Epoch(self._seen + 1), timeout_s)
        return self.latest()
