"""Stands for the state machine and the spill log of a shard whose files could not be opened when a record came for it.

Its table is out of reach, the others are not: the dispatcher keeps what comes for it in the backlog, the journal keeps
the records, and opening it is tried again as a failed apply is.

Thread: any; it has no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from penstock.errors import Closed, PartitionPaused
from penstock.partition.machine import Entry

UNOPENED = "its files could not be opened"


class Unopened:
    """Nothing is applied, stored or spilled here."""

    applied = stored = upto = 0
    stores_cheaply = False

    def apply(self, entry: Entry) -> NoReturn:
        raise PartitionPaused(UNOPENED)

    def snapshot(self) -> Any:
        raise PartitionPaused(UNOPENED)

    def is_read(self) -> bool:
        return False

    def memory_bytes(self) -> int:
        return 0

    def store_now(self) -> None:
        raise PartitionPaused(UNOPENED)

    def append(self, entries: Sequence[Entry]) -> None:
        raise Closed(UNOPENED)  # the journal keeps the records

    def drop_stored(self, stored: int) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...
