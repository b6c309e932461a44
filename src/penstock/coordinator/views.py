"""What readers see: layers of writes over a view.

A reader takes `coordinator.layers`: one reference, no lock. In it every write made before is in exactly one place: the
pending delta, one of the other deltas, or the view. A flush, a seal and an apply each replace the whole object, so
there is no moment at which a write is in none or, for a merge, in two.

How to read: a lookup asks `pending`, then `deltas` in order, then `view`; a merge folds through all of them. `pending`
is live while it is the coordinator's: a reader may do to it only what is one step under the interpreter's lock (a dict
lookup), and sees it grow. What walks over a delta, a scan, uses `seal_pending()` and reads `deltas` and `view` only.

Thread: `Layers` any; a `Subscription` one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.coordinator.epochs import Epoch
from penstock.coordinator.protocols import D

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Layers(Generic[D, V]):
    """One consistent state of everything written."""

    pending: D  # live, until the next flush or seal replaces it
    deltas: tuple[D, ...]  # newest first; they do not change any more
    view: V
    applied: Epoch  # the last epoch in `view`


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
