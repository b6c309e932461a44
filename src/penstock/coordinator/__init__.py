"""The write path: writes gather in a pending delta, a flush makes them durable together, then they are applied.

A write gets an epoch at once (durability: memory). `flush(epoch)` waits until it is durable, `wait_applied(epoch)`
until the published view holds it. The coordinator knows neither files nor tables: a `Delta` says how writes gather, a
`Flusher` how a batch is made durable and applied.

    executor      the path of a write: the write turn and the apply turn. Read this first
    coordinator   the API: writing, flushing, waiting, closing
    layers        what readers see; the buffer of writes
    waiting       threads that wait for an epoch, writes that wait for room
    background    the thread that flushes writes without a waiter
    protocols     delta, flusher, epochs
    settings      limits and times; states, triggers of a flush, statistics
    metrics       the statistics as metrics
"""

from penstock.coordinator.coordinator import WriteCoordinator
from penstock.coordinator.layers import Layers, Subscription
from penstock.coordinator.protocols import Acknowledgement, Batch, Delta, Durability, Epoch, EpochTracker, Flusher
from penstock.coordinator.settings import CoordinatorSettings, CoordinatorStatistics, State, Trigger

__all__ = [
    "Acknowledgement",
    "Batch",
    "CoordinatorSettings",
    "CoordinatorStatistics",
    "Delta",
    "Durability",
    "Epoch",
    "EpochTracker",
    "Flusher",
    "Layers",
    "State",
    "Subscription",
    "Trigger",
    "WriteCoordinator",
]
