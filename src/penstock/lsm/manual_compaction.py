"""Manual compaction of a table: runs it, waits for it and reports the result.

Thread: any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.host.clock import Clock
from penstock.lsm.maintenance import Maintenance
from penstock.lsm.tree import Tree

COMPACT_WAIT_S = 60.0  # for flushes and compactions that already run on the table


@dataclass(frozen=True, kw_only=True)
class CompactionReport:
    """The result of a manual compaction.

    >>> report = store.compact("users")
    >>> report.files_after
    1
    """

    shards: int  # shards checked
    merged: int  # shards whose files were merged; the others would gain nothing
    files_before: int
    files_after: int
    bytes_before: int  # in files
    bytes_after: int


def compact_trees(
    maintenance: Maintenance, trees: Sequence[Tree], *, clock: Clock, timeout_s: float, stop: Callable[[], bool]
) -> CompactionReport:
    """Merge each tree into as few files as possible.

    `timeout_s` bounds the wait for other jobs on them: `GateShut` if they take longer. Merges done by then remain, also
    when `stop` ends the call.
    """
    deadline_s, merged = clock.monotonic_s() + timeout_s, 0
    before = [tree.statistics() for tree in trees]
    for tree in trees:
        maintenance.flush(tree, max(0.0, deadline_s - clock.monotonic_s()))
        rest_s = max(0.0, deadline_s - clock.monotonic_s())
        if stop():
            break
        merged += maintenance.compact(tree, everything=True, timeout_s=rest_s)
    after = [tree.statistics() for tree in trees]
    return CompactionReport(
        shards=len(trees),
        merged=merged,
        files_before=sum(sum(statistics.level_files) for statistics in before),
        files_after=sum(sum(statistics.level_files) for statistics in after),
        bytes_before=sum(sum(statistics.level_bytes) for statistics in before),
        bytes_after=sum(sum(statistics.level_bytes) for statistics in after),
    )
