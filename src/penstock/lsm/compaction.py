"""Which files to merge next: a pure function of a version's levels.

Level 0 is judged by its number of runs, the levels below by their size against a target that grows tenfold. A
compaction of level 0 takes all its runs (they overlap) and the files they overlap in level 1; one of a lower level
takes the file that overlaps least below, so that the least is rewritten.

Thread: pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import Invalid
from penstock.lsm.version import Run, TableFile


@dataclass(frozen=True, kw_only=True)
class LevelLimits:
    """When a level is too full."""

    level0_runs: int = 4  # more runs than this are merged into level 1
    level1_bytes: int = 256 << 20
    fanout: int = 10  # ratio of a level's bytes to those of the level above

    def __post_init__(self) -> None:
        if self.level0_runs < 1 or self.level1_bytes < 1 or self.fanout < 2:
            raise Invalid("level0_runs and level1_bytes must be positive and fanout at least 2")

    def target_bytes(self, level: int) -> int:
        return int(self.level1_bytes * self.fanout ** (level - 1))


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """Files to merge, newest run first, and the level that takes the result."""

    inputs: tuple[TableFile, ...]
    target: int
    bottom: bool  # nothing below the target overlaps the inputs


def pick_compaction(levels: tuple[tuple[Run, ...], ...], limits: LevelLimits) -> Compaction | None:
    """Return the most urgent compaction, or None."""
    scores = [(len(levels[0]) / limits.level0_runs, 0)] if len(levels[0]) > limits.level0_runs else []
    for number, level in enumerate(levels[1:], 1):
        excess = sum(run.size_bytes for run in level) / limits.target_bytes(number)
        if excess > 1:
            scores.append((excess, number))
    if not scores:
        return None
    _, source = max(scores)
    return _compact_level0(levels) if source == 0 else _compact_file(levels, source)


def compact_everything(levels: tuple[tuple[Run, ...], ...]) -> Compaction | None:
    """Return a merge of all files into one run of the lowest level, without deletes; None if it gains nothing."""
    files = tuple(file for level in levels for run in level for file in run.files)
    runs = sum(len(level) for level in levels)
    if not files or (runs == 1 and not any(f.meta.deletes or f.meta.has_ranges or f.meta.expires for f in files)):
        return None
    return Compaction(inputs=files, target=max(1, len(levels) - 1), bottom=True)


def _compact_level0(levels: tuple[tuple[Run, ...], ...]) -> Compaction:
    upper = tuple(file for run in levels[0] for file in run.files)
    return _into(levels, upper, 1)


def _compact_file(levels: tuple[tuple[Run, ...], ...], source: int) -> Compaction:
    files = levels[source][0].files
    below = levels[source + 1] if source + 1 < len(levels) else ()

    def cost(file: TableFile) -> float:
        overlap = sum(f.meta.size_bytes for run in below for f in run.overlapping(file.meta.start, file.meta.end))
        return overlap / max(1, file.meta.size_bytes)

    return _into(levels, (min(files, key=cost),), source + 1)


def _into(levels: tuple[tuple[Run, ...], ...], upper: tuple[TableFile, ...], target: int) -> Compaction:
    start = min(file.meta.start for file in upper)
    end = max(file.meta.end for file in upper)
    level = levels[target] if target < len(levels) else ()
    lower = tuple(file for run in level for file in run.overlapping(start, end))
    # Deletes can be dropped only if they hide no deeper row: check the key range of all inputs, lower ones included.
    start = min([start, *(file.meta.start for file in lower)])
    end = max([end, *(file.meta.end for file in lower)])
    deeper = any(run.overlapping(start, end) for level in levels[target + 1 :] for run in level)
    return Compaction(inputs=upper + lower, target=target, bottom=not deeper)
