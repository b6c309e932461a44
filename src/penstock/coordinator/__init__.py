"""The write path: writes gather in a pending delta, a flush makes them durable together, then they are applied.

A write gets an epoch at once (durability: memory). `flush(epoch)` waits until it is durable, `wait_applied(epoch)`
until the published view holds it. The coordinator knows neither files nor tables: a `Delta` says how writes gather, a
`Flusher` how a batch is made durable and applied.
"""

from penstock.coordinator.coordinator import WriteCoordinator
from penstock.coordinator.epochs import Epoch, EpochTracker
from penstock.coordinator.layers import Layers, Subscription
from penstock.coordinator.protocols import Acknowledgement, Batch, Delta, Durability, Flusher
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
