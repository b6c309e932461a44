"""Settings, stall levels and statistics of a tree.

Thread: values, shared freely.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from penstock.errors import Invalid
from penstock.lsm.compaction import LevelLimits


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """Sizes of a tree, and when its writers are slowed and stopped."""

    memtable_bytes: int = 64 << 20
    memtables_slow: int = 3  # rows not in files, in units of memtable_bytes
    memtables_stop: int = 5
    level0_slow: int = 12  # runs in level 0
    level0_stop: int = 24
    limits: LevelLimits = field(default_factory=LevelLimits)

    def __post_init__(self) -> None:
        if self.memtable_bytes < 1 or not 1 <= self.memtables_slow < self.memtables_stop:
            raise Invalid("memtable_bytes must be positive and 1 <= memtables_slow < memtables_stop")
        if not self.limits.level0_runs < self.level0_slow < self.level0_stop:
            raise Invalid("level0_runs < level0_slow < level0_stop must hold")


class Stall(enum.Enum):
    """How a tree limits its writers."""

    NONE = 0
    SLOW = 1
    STOP = 2


@dataclass(frozen=True, kw_only=True)
class TreeStatistics:
    """Statistics of a tree at one moment."""

    lsn: int
    stored: int
    memtable_bytes: int
    active_memtable_bytes: int
    frozen_memtables: int
    flush_pending: bool  # frozen memtables wait for a flush, or are being flushed
    level_files: tuple[int, ...]
    level_bytes: tuple[int, ...]
    level0_runs: int
    snapshots: int
    stall: Stall
