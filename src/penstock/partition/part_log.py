"""The pending writes of a shard as a log of parts: the base of sections that are not plain rows.

Thread: changed under the coordinator's lock; read by any thread.
Invariant: one append for a write, so an interrupt leaves nothing half done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from penstock.journal.partitions import PartitionId
from penstock.partition.pending import PendingDelta

Part = TypeVar("Part")
Log = TypeVar("Log", bound="PartLog[Any]")


class PartLog(Generic[Part]):
    """Pending writes of one shard, in order."""

    __slots__ = ("_cache", "log")

    plain: ClassVar[bool] = True  # sections of several groups may be joined: see `PendingDelta.absorb`

    def __init__(self, *parts: Part) -> None:
        self.log: list[Any] = list(parts)  # parts, or what becomes parts when the log is read
        self._cache: tuple[int, list[Part]] = (0, [])  # the length of the log, and its parts

    def update(self, other: PartLog[Part]) -> None:
        """Append the writes of another section."""
        self.log += other.log

    @property
    def parts(self) -> list[Part]:
        """The parts in order, made of the log."""
        count, parts = self._cache
        if count != len(self.log):
            count = len(self.log)
            parts = self._make(self.log[:count])
            self._cache = count, parts
        return parts

    def _make(self, log: list[Any]) -> list[Part]:
        """Return the parts of a log."""
        return log


def open_section(delta: PendingDelta, partition: PartitionId, make: Callable[[], Log]) -> Log:
    """Return the section of a shard that takes writes now, made on first use. Requires: the coordinator's lock."""
    sections = delta.begin() if delta.open is None else delta.open
    section: Log | None = sections.get(partition)
    if section is None:
        section = sections[partition] = make()
    return section
