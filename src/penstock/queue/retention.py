"""Which messages a retention deletes: a pure decision from the state of a shard.

Thread: any; the trim itself is a record in the journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.manifest.records import RetentionPolicy
from penstock.queue.options import Retention

if TYPE_CHECKING:
    from penstock.queue.machine import QueueMachine


def strictest(retention: Retention, policy: RetentionPolicy) -> Retention:
    """Return the retention of a queue together with that of its storage options: what either deletes is deleted."""
    ages = [age_s for age_s in (retention.age_s, _seconds(policy.age_ms_max)) if age_s is not None]
    sizes = [size for size in (retention.bytes_max, policy.bytes_max) if size is not None]
    return msgspec.structs.replace(retention, age_s=min(ages, default=None), bytes_max=min(sizes, default=None))


def _seconds(age_ms: int | None) -> float | None:
    return None if age_ms is None else age_ms / 1_000


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
