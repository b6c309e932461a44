"""A part of a scan: some rows of one memtable or sstable, in scan order.

Thread: values; nothing here changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.lsm.rows import Row


def rows_of_list(rows: list[Row], start: int, end: int) -> list[Row]:
    """Return rows [start, end) of a list, as `ScanPart.rows_between`."""
    return rows[start:end]


class ScanPart(NamedTuple):
    """Some point rows of one source, at least one."""

    keys: list[bytes]
    values: list[bytes]
    plain: bool  # every row is a put that never expires
    rows_between: Callable[[int, int], list[Row]]  # full rows of the part that this one was cut from ...
    start: int = 0  # ... in which it begins here
    is_last: bool = False  # no row of its source follows; False: unknown

    def rows(self) -> list[Row]:
        """Return the full rows."""
        return self.rows_between(self.start, self.start + len(self.keys))

    def cut(self, start: int, end: int) -> ScanPart:
        """Return the part of rows [start, end)."""
        if start == 0 and end == len(self.keys):
            return self
        is_last = self.is_last and end == len(self.keys)
        return ScanPart(
            self.keys[start:end], self.values[start:end], self.plain, self.rows_between, self.start + start, is_last
        )
