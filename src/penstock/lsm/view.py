"""Reading a version: points, scans as rows, scans as Arrow batches.

A scan merges its sources window by window: all rows up to the smallest last key of the loaded parts are put into a
dict, oldest source first, then sorted. No step works row by row unless a window holds deletes, operands
or expiries.

Thread: any; a view belongs to the thread that made it.
Invariant: all results of a view come from one version and one time for expiry.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, islice
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import Invalid
from penstock.lsm.memtable import Memtable
from penstock.lsm.merge import merge_columns, slices
from penstock.lsm.operators import fold_all
from penstock.lsm.probe import ABSENT, PRESENT, UNSURE, ProbedKeys
from penstock.lsm.ranges import NO_RANGES, RangeDeletes
from penstock.lsm.rows import DELETE, I64, MERGE, NEVER, PUT, Columns, Row
from penstock.lsm.scan_part import ScanPart
from penstock.lsm.sstable import PART_ROWS_FIRST, PART_ROWS_MAX, Sstable
from penstock.lsm.version import Run, TableFile, Version

if TYPE_CHECKING:
    import numpy.typing as npt

EVERY_LSN = 1 << 63
PROBED_TOGETHER_MIN = 64  # keys: for fewer, lookups one by one are faster
_PART_ROWS_MIN = 16
_key_of = itemgetter(0)
_is_plain = attrgetter("plain")


class View:
    """Reads of one version."""

    __slots__ = ("_now_us", "_version")

    def __init__(self, version: Version, now_us: Callable[[], int]) -> None:
        self._version = version
        self._now_us = now_us

    @property
    def version(self) -> Version:
        """The version that it reads."""
        return self._version

    def check_open(self) -> None:
        """Raise `Closed` if the view was closed: long reads call this from time to time."""

    # -- points

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, or None."""
        version = self._version
        active = version.active
        entry: Any = None
        if active is not None and active.rows:
            entry = active.rows.get(key)
        if entry is None:
            for memtable in version.frozen:
                entry = memtable.rows.get(key)
                if entry is not None:
                    break
            else:
                for run in version.runs:
                    find = run.find
                    entry = run.search(key) if find is None else find(key)
                    if entry is not None:
                        break
                else:
                    return None
        # Every get runs this, so attributes instead of calls: `starts` for whether there are ranges, `plain` first.
        no_ranges = not version.ranges.starts and (active is None or active.plain or not active.has_ranges)
        if no_ranges or not self.deleted_below(key):
            value: bytes = entry if type(entry) is bytes else entry[1]
            if value is entry or (entry[0] == PUT and entry[3] == NEVER):
                return value
        row = self.get_row(key)
        return None if row is None else row[1]

    def get_row(self, key: bytes) -> Row | None:
        """Return the live row of a key, operands folded: (PUT, value, lsn, expires_us), or None."""
        return resolve(self._rows_of(key), self.deleted_below(key), self._now_us())

    def row(self, key: bytes) -> tuple[bytes, int] | None:
        """Return the value of a key and the LSN of its row. Requires: no edit is being applied.

        This LSN is exact; that of `get_row` may be of a later edit of the same memtable.
        """
        memtables, runs = self._version.memtables(), self._version.runs
        rows = chain((memtable.row_with_lsn(key) for memtable in memtables), (run.get(key) for run in runs))
        live = resolve((row for row in rows if row is not None), self.deleted_below(key), self._now_us())
        return None if live is None else (live[1], live[2])

    def fold(self, key: bytes, operand: Row, deleted_below: int) -> Row:
        """Fold a newer operand onto the live row of a key: a put, or a delete if the operand has expired."""
        deleted_below = max(deleted_below, self.deleted_below(key))
        row = resolve(chain([operand], self._rows_of(key)), deleted_below, self._now_us())
        return (DELETE, b"", operand[2], NEVER) if row is None else row

    def live_values(self, key: bytes, read: Callable[[Run, bytes], Any] = Run.get) -> list[Any]:
        """Return the values of a key's live rows, newest first: its operands, then the put below them, if any.

        `read` returns the row of a run, and may return its value in another form.
        """
        deleted_below, now_us = self.deleted_below(key), self._now_us()
        values: list[Any] = []
        for kind, value, lsn, expires in self._rows_of(key, read):
            if kind == DELETE or lsn < deleted_below or expires <= now_us:
                break
            values.append(value)
            if kind < MERGE:
                break
        return values

    def existing(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return for each key whether it has a value."""
        has_value = np.zeros(len(keys), np.bool_)
        if len(keys) < PROBED_TOGETHER_MIN:
            has_value[:] = [self.get(key) is not None for key in keys]
            return has_value
        version = self._version
        no_ranges = not version.ranges.starts and not self._ranges_of_active()
        doubtful: list[I64] = []  # numbers of keys that have a row, which may not be live
        left, numbers = keys, np.arange(len(keys))
        for memtable in version.memtables():
            rows = memtable.rows
            if rows.keys().isdisjoint(left):
                continue
            hits = np.fromiter(map(rows.__contains__, left), np.bool_, len(left))
            if memtable.plain and no_ranges:
                has_value[numbers[hits]] = True
            else:
                doubtful.append(numbers[hits])
            numbers, left = numbers[~hits], list(compress(left, (~hits).tolist()))
            if not left:
                break
        if version.runs and left:
            present, unsure = self._probe(left)
            if no_ranges:
                has_value[numbers[present]] = True
            else:
                doubtful.append(numbers[present])
            doubtful.append(numbers[unsure])
        for number in (int(number) for some in doubtful for number in some):
            has_value[number] = self.get(keys[number]) is not None
        return has_value

    def _probe(self, keys: Sequence[bytes]) -> tuple[I64, I64]:
        """Return the numbers of the keys whose newest row in files is a put, and of those that have another row."""
        low, high = min(keys), max(keys) + b"\0"
        runs = [run for run in self._version.runs if run.overlapping(low, high)]
        outcome = np.zeros(len(keys), np.uint8)
        probed = ProbedKeys(keys) if runs else None
        left = np.arange(len(keys))
        for run in runs:
            assert probed is not None
            for file, some in run.divided(keys, left):
                outcome[some] = file.table().probe(probed, some)
            left = left[outcome[left] == ABSENT]
            if not len(left):
                break
        return np.flatnonzero(outcome == PRESENT), np.flatnonzero(outcome == UNSURE)

    def _ranges_of_active(self) -> bool:
        active = self._version.active
        return active is not None and active.has_ranges

    def first_key(self, start: bytes, end: bytes | None) -> bytes | None:
        """Return the first key of [start, end) that has a row, live or not. No value is read."""
        firsts: list[bytes] = []
        for memtable in self.memtables():
            for keys in memtable.orders():
                at = bisect_left(keys, start)
                firsts += keys[at : at + 1]
        for run in self._version.runs:
            for file in run.overlapping(start, end):
                table = file.table()
                piece = next(iter(table.pieces(*table.rows_between(start, end))), None)
                if piece is not None:
                    firsts.append(table.key_at(piece[0], piece[1]))
                    break
        lowest = min(firsts, default=None)
        return None if lowest is None or (end is not None and lowest >= end) else lowest

    def memtables(self) -> tuple[Memtable, ...]:
        """Return the memtables, newest first."""
        return self._version.memtables()

    def _rows_of(self, key: bytes, read: Callable[[Run, bytes], Any] = Run.get) -> Iterator[Row]:
        for memtable in self._version.memtables():
            row = memtable.row(key)
            if row is not None:
                yield row
        for run in self._version.runs:
            row = read(run, key)
            if row is not None:
                yield row

    def deleted_below(self, key: bytes) -> int:
        """Return the LSN below which rows of `key` are deleted; 0 if none are."""
        active = self._version.active
        here = active.deleted_below(key) if active is not None else 0
        return max(here, self._version.ranges.lsn_over(key))

    # -- scans

    def scan(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes = b"",
        reverse: bool = False,
        limit: int = -1,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) of [start, end) within `prefix`, in order."""
        start, end = narrowed(start, end, prefix)
        pairs = chain.from_iterable(self._windows(start, end, reverse))
        if limit < 0:
            return pairs
        return islice(pairs, limit)

    def _windows(self, start: bytes, end: bytes | None, reverse: bool) -> Iterator[Iterable[tuple[bytes, bytes]]]:
        if end is not None and end <= start:
            return
        version = self._version
        orders = [
            (memtable, keys)
            for memtable in version.memtables()
            if memtable.rows
            for keys in memtable.orders()
            if len(keys)
        ]
        # Each source loads its share of the first rows, so that one window has enough for a short scan.
        total = sum(len(keys) for _, keys in orders) + sum(run.rows for run in version.runs)
        sources = [
            _memtable_parts(memtable, keys, start, end, reverse, size=_share(len(keys), total))
            for memtable, keys in orders
        ]
        sources += [_run_parts(run, start, end, reverse, _share(run.rows, total)) for run in version.runs]
        ranges = self._ranges(start, end)
        now_us = self._now_us()
        for window in merge_parts(sources, reverse):
            self.check_open()
            if not ranges and all(map(_is_plain, window)):
                yield _overlay(window, reverse)
            else:
                yield _resolve_window(window, ranges, now_us, reverse)

    def _ranges(self, start: bytes, end: bytes | None) -> RangeDeletes:
        """Return the range deletes that overlap [start, end)."""
        active, ranges = self._version.active, self._version.ranges
        if ranges:
            ranges = ranges.clip(start, end)
        if active is None or not active.has_ranges:
            return ranges
        return RangeDeletes.union([active.ranges.clip(start, end), ranges])

    def scan_columns(self, start: bytes = b"", end: bytes | None = None, *, prefix: bytes = b"") -> Iterator[Columns]:
        """Yield the live rows of [start, end) as columns: one run is read in place, several are merged by numpy."""
        start, end = narrowed(start, end, prefix)
        if end is not None and end <= start:
            return
        version = self._version
        memtables = [memtable for memtable in version.memtables() if memtable.holds(start, end)]
        runs: list[Sequence[TableFile]] = [files for run in version.runs if (files := run.overlapping(start, end))]
        ranges, now_us = self._ranges(start, end), self._now_us()
        alone = len(runs) == 1 and not memtables
        for parts in _alone(runs[0], start, end) if alone else _together(memtables, runs, start, end):
            self.check_open()
            covering = ranges.clip(*_span(parts)) if ranges else NO_RANGES
            live = merge_columns(parts, covering, now_us=now_us, bottom=True, lsn_floor=EVERY_LSN)
            if len(live):
                yield live

    def scan_arrow(self, start: bytes = b"", end: bytes | None = None, *, prefix: bytes = b"") -> Iterator[Any]:
        """Yield the live rows of [start, end) as record batches of the sstable's schema."""
        return (columns.record_batch() for columns in self.scan_columns(start, end, prefix=prefix))


class NewestView(View):
    """Reads of the newest version, for callers that bind `get` once. Other reads of it are not allowed."""

    __slots__ = ()

    def replace(self, version: Version) -> None:
        self._version = version

    def get_row(self, key: bytes) -> Row | None:
        return View(self._version, self._now_us).get_row(key)  # which reads its version more than once


def resolve(rows: Iterable[Row], deleted_below: int, now_us: int) -> Row | None:
    """Resolve the rows of one key, newest first, to its live row, or None."""
    operands: list[Row] = []
    base: Row | None = None
    for row in rows:
        if row[0] == DELETE or row[2] < deleted_below or row[3] <= now_us:
            break
        if row[0] < MERGE:
            base = row
            break
        operands.append(row)
    if not operands:
        return base
    below = None if base is None else (PUT, base[1])
    _, value = fold_all(below, [row[:2] for row in reversed(operands)], True)
    expires = next((row[3] for row in operands if row[3] != NEVER), NEVER if base is None else base[3])
    return PUT, value, operands[0][2], expires


def narrowed(start: bytes, end: bytes | None, prefix: bytes) -> tuple[bytes, bytes | None]:
    """Return the part of [start, end) whose keys begin with `prefix`."""
    if type(start) is not bytes or type(prefix) is not bytes or (end is not None and type(end) is not bytes):
        raise Invalid("start, end and prefix of a scan are bytes")
    if not prefix:
        return start, end
    after = prefix_end(prefix)
    return max(start, prefix), after if end is None else end if after is None else min(end, after)


def prefix_end(prefix: bytes) -> bytes | None:
    """Return the first key after all that begin with `prefix`; None if there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


# -- sources


def _memtable_parts(
    memtable: Memtable, keys: Sequence[bytes], start: bytes, end: bytes | None, reverse: bool, *, size: int
) -> Iterator[ScanPart]:
    low = bisect_left(keys, start)
    high = len(keys) if end is None else bisect_left(keys, end)
    while low < high:
        first, last = (max(low, high - size), high) if reverse else (low, min(high, low + size))
        low, high = (low, first) if reverse else (last, high)
        yield memtable.part(keys, first, last, reverse=reverse, is_last=low >= high)
        size = min(2 * size, PART_ROWS_MAX)


def _share(rows: int, total: int) -> int:
    """Return how many rows a source of `rows` of `total` loads first."""
    return max(_PART_ROWS_MIN, PART_ROWS_FIRST * rows // total)


def _run_parts(run: Run, start: bytes, end: bytes | None, reverse: bool, size: int) -> Iterator[ScanPart]:
    files = run.overlapping(start, end)
    if len(files) == 1:
        return files[0].table().scan(start, end, reverse=reverse, size=size)
    return _parts_of_files(files[::-1] if reverse else files, start, end, reverse, size)


def _parts_of_files(
    files: Sequence[TableFile], start: bytes, end: bytes | None, reverse: bool, size: int
) -> Iterator[ScanPart]:
    for file in files:
        for part in file.table().scan(start, end, reverse=reverse, size=size):
            yield part if not part.is_last or file is files[-1] else part._replace(is_last=False)


# -- windows


def merge_parts(sources: list[Iterator[ScanPart]], reverse: bool) -> Iterator[list[ScanPart]]:
    """Yield consecutive windows: each holds the parts, newest source first, of all rows between two keys."""
    heads: list[tuple[Iterator[ScanPart], ScanPart]] = []
    for source in sources:
        part = next(source, None)
        if part is not None:
            heads.append((source, part))
    while heads:
        if len(heads) == 1:
            source, part = heads[0]
            yield [part]
            yield from ([part] for part in source)
            return
        lasts = [part.keys[-1] for _, part in heads if not part.is_last]
        if not lasts:  # all remaining rows are loaded
            yield [part for _, part in heads]
            return
        bound = max(lasts) if reverse else min(lasts)
        window: list[ScanPart] = []
        remaining: list[tuple[Iterator[ScanPart], ScanPart]] = []
        for source, part in heads:
            cut = _count_up_to(part.keys, bound, reverse)
            if cut:
                window.append(part.cut(0, cut))
            if cut < len(part.keys):
                rest: ScanPart | None = part.cut(cut, len(part.keys))
            else:
                rest = None if part.is_last else next(source, None)
            if rest is not None:
                remaining.append((source, rest))
        heads = remaining
        yield window


def _count_up_to(keys: list[bytes], bound: bytes, reverse: bool) -> int:
    """Return how many of the keys, which are in scan order, are not after `bound`."""
    if not reverse:
        return bisect_right(keys, bound)
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) >> 1
        if keys[middle] < bound:
            high = middle
        else:
            low = middle + 1
    return low


def _overlay(window: list[ScanPart], reverse: bool) -> Iterable[tuple[bytes, bytes]]:
    if len(window) == 1:
        return zip(window[0].keys, window[0].values, strict=True)
    newest: dict[bytes, bytes] = {}
    for part in reversed(window):
        newest.update(zip(part.keys, part.values, strict=True))
    return sorted(newest.items(), key=_key_of, reverse=reverse)


def _resolve_window(
    window: list[ScanPart], ranges: RangeDeletes, now_us: int, reverse: bool
) -> Iterable[tuple[bytes, bytes]]:
    stacks: dict[bytes, list[Row]] = {}
    for part in window:
        for key, row in zip(part.keys, part.rows(), strict=True):
            stacks.setdefault(key, []).append(row)
    pairs: list[tuple[bytes, bytes]] = []
    for key in sorted(stacks, reverse=reverse):
        live = resolve(stacks[key], ranges.lsn_over(key) if ranges else 0, now_us)
        if live is not None:
            pairs.append((key, live[1]))
    return pairs


def _alone(files: Sequence[TableFile], start: bytes, end: bytes | None) -> Iterator[list[Columns]]:
    """Yield the rows of one run, batch by batch: its files do not overlap."""
    for file in files:
        table = file.table()
        for piece in table.pieces(*table.rows_between(start, end)):
            yield [table.columns(*piece)]


def _together(
    memtables: list[Memtable], runs: list[Sequence[TableFile]], start: bytes, end: bytes | None
) -> Iterator[list[Columns]]:
    """Yield rows of memtables and runs, newest first, by slices of the keys, so that memory stays within a slice."""
    files = [file for run in runs for file in run]
    for low, high in slices(_Tables(files), start, end, memtables):
        parts = [memtable.columns(low, high) for memtable in memtables]
        for file in files:
            if file.meta.end > low and (high is None or file.meta.start < high):
                table = file.table()
                parts += [table.columns(*piece) for piece in table.pieces(*table.rows_between(low, high))]
        parts = [part for part in parts if len(part)]
        if parts:
            yield parts


class _Tables:
    """The tables of files, each opened when it is reached."""

    def __init__(self, files: Sequence[TableFile]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[Sstable]:
        return (file.table() for file in self._files)


def _span(parts: list[Columns]) -> tuple[bytes, bytes]:
    """Return the key range of some rows."""
    return min(part.key(0) for part in parts), max(part.key(len(part) - 1) for part in parts) + b"\0"
