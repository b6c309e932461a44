"""Which messages a retention deletes: a pure decision from the state of a shard.

Thread: any; the trim itself is a record in the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.queue.options import Retention

if TYPE_CHECKING:
    from penstock.queue.machine import QueueMachine


def trim_before(machine: QueueMachine, retention: Retention, floors: Sequence[int], now_us: int) -> int:
    """Return the sequence of the first message to keep."""
    queue, before = machine.queue, machine.first
    if retention.age_s is not None:
        before = max(before, queue.seek_time(max(0, now_us - int(retention.age_s * 1_000_000))))
    if retention.bytes_max is not None:
        before = max(before, queue.first_within(retention.bytes_max))
    if retention.acknowledged and floors:
        before = max(before, min(floors))
    return min(before, queue.next_sequence)
