"""A version: the immutable state of a tree, swapped whole. A reader that holds one sees one state.

A tree is a list of *runs*, newest first: memtables, then the runs of level 0, then one run for each lower level. The
files of a run are disjoint by key.

A file is mapped when it is first read, and may have to release its mappings until the next read: their number is
limited in a process (`host.mappings`).

Thread: any; nothing here changes except that a file is opened lazily, under its lock. `forget` takes no lock, because
it is called by threads that open another file and hold the lock of that one.
Invariant: a retired file becomes obsolete exactly when the last version that lists it is released.
"""

from __future__ import annotations

import itertools
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.errors import Invalid
from penstock.host import threads
from penstock.host.mappings import MAPPINGS
from penstock.lsm.memtable import Memtable
from penstock.lsm.ranges import NO_RANGES, RangeDeletes, Unions
from penstock.lsm.rows import I64, Row
from penstock.lsm.sstable import Sstable

Find: TypeAlias = Callable[[bytes], bytes | Row | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMeta:
    """The catalogue's description of an sstable."""

    chunk_id: int
    file_name: str  # relative to the store
    level: int
    run: int  # files of level 0 with one number were adopted together and are one run
    start: bytes
    end: bytes
    rows: int
    size_bytes: int
    deletes: int
    lsn_min: int
    lsn_max: int
    has_ranges: bool
    expires: bool  # some of its rows expire
    lsn: int | None = None  # replaces the LSN of all rows, in an adopted file
    key: int = 0  # the number of the key that it is encrypted with; 0: it is plain
    object: str | None = None  # its key in the archive, if that was verified before the tree was opened


def check_disjoint(files: Iterable[FileMeta]) -> None:
    """Raise `Invalid` if two files could hold the same key."""
    for one, other in itertools.pairwise(sorted(files, key=lambda meta: meta.start)):
        if other.start < one.end:
            raise Invalid(f"the files of a run must be disjoint by key: {one.file_name} reaches into {other.file_name}")


def split_into_runs(files: Iterable[tuple[bytes, bytes, int]]) -> dict[int, int]:
    """Assign files (start, end, id) to as few runs as their keys allow; return the run of each id."""
    ends: list[tuple[bytes, int]] = []  # where each run ends, and its number
    runs: dict[int, int] = {}
    for start, end, number in sorted(files):
        index = next((index for index, (last, _) in enumerate(ends) if last <= start), None)
        if index is None:
            index, ends = len(ends), [*ends, (end, number)]
        ends[index] = end, ends[index][1]
        runs[number] = ends[index][1]
    return runs


class RemoteTable(NamedTuple):
    """Where an sstable is in an archive."""

    url: str  # of the archive
    key: str


Locate: TypeAlias = Callable[[FileMeta], RemoteTable | None]


class TableFile:
    """A listed sstable; opened when it is first read."""

    __slots__ = ("__weakref__", "_locate", "_lock", "_open", "_ranges", "_short_ways", "_table", "meta")

    def __init__(
        self, meta: FileMeta, open_table: Callable[[FileMeta], Sstable], locate: Locate = lambda meta: None
    ) -> None:
        self.meta = meta
        self._open = open_table
        self._locate = locate
        self._table: Sstable | None = None  # guarded by _lock while it is None
        self._ranges: RangeDeletes | None = None if meta.has_ranges else NO_RANGES
        self._short_ways: tuple[weakref.ref[Run], ...] = ()  # guarded by _lock: runs that read the table directly
        self._lock = threads.lock("lsm.file")

    def table(self) -> Sstable:
        table = self._table
        if table is None:
            with self._lock:
                table = self._table
                if table is None:
                    table = self._open(self.meta)
                    self._ranges = table.range_deletes  # now: the caller is about to make a version of it
                    self._table = table
                    MAPPINGS.register(self)
        return table

    def remote(self) -> RemoteTable | None:
        """Return where the archive has this file; None if it has no verified copy."""
        return self._locate(self.meta)

    @property
    def range_deletes(self) -> RangeDeletes:
        """The file's range deletes. They stay in memory: every version needs them, and making one must not fail."""
        return self._ranges if self._ranges is not None else self.table().range_deletes

    def shorten(self, run: Run, table: Sstable) -> None:
        """Let a run read the table directly, until this file releases it."""
        with self._lock:
            alive = tuple(reference for reference in self._short_ways if reference() not in (None, run))
            self._short_ways = (*alive, weakref.ref(run))
            run.find = table.find
            if self._table is not table:  # released meanwhile, perhaps before this run was added
                run.find = None

    def forget(self) -> None:
        """Release the table; the next read opens it again."""
        self._table = None  # first: see `shorten`
        for reference in self._short_ways:
            run = reference()
            if run is not None:
                run.find = None

    def retire(self, obsolete: deque[FileMeta]) -> None:
        """Mark the file as no longer listed: it is obsolete when the last version releases it."""
        weakref.finalize(self, obsolete.append, self.meta).atexit = False


class Run:
    """Files that are disjoint by key, as one sorted table."""

    __slots__ = ("__weakref__", "_ends", "_starts", "files", "find", "rows")

    def __init__(self, files: Iterable[TableFile]) -> None:
        self.files = tuple(sorted(files, key=lambda file: file.meta.start))
        self._starts = [file.meta.start for file in self.files]
        self._ends = [file.meta.end for file in self.files]
        self.rows = sum(file.meta.rows for file in self.files)
        self.find: Find | None = None  # that of the only file, once it is open: the shortest path of a get
        check_disjoint([file.meta for file in self.files])

    @property
    def number(self) -> int:
        return max(file.meta.run for file in self.files)

    @property
    def lsn_max(self) -> int:
        return max(file.meta.lsn_max for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.meta.size_bytes for file in self.files)

    def get(self, key: bytes) -> Row | None:
        file = self._file(key)
        return None if file is None else file.table().get(key)

    def search(self, key: bytes) -> bytes | Row | None:
        """As `Sstable.find`."""
        file = self._file(key)
        if file is None:
            return None
        table = file.table()
        if len(self.files) == 1:
            file.shorten(self, table)
        return table.find(key)

    def _file(self, key: bytes) -> TableFile | None:
        index = bisect_right(self._starts, key) - 1
        return None if index < 0 or key >= self._ends[index] else self.files[index]

    def divided(self, keys: Sequence[bytes], numbers: I64) -> Iterator[tuple[TableFile, I64]]:
        """Yield each file that may have some of the keys, and the numbers of those."""
        if len(self.files) == 1:
            yield self.files[0], numbers
            return
        some = map(keys.__getitem__, numbers.tolist())
        index = np.fromiter(map(bisect_right, itertools.repeat(self._starts), some), np.int64, len(numbers)) - 1
        for file in np.unique(index).tolist():
            if file >= 0:
                yield self.files[file], numbers[index == file]

    def overlapping(self, start: bytes, end: bytes | None) -> tuple[TableFile, ...]:
        """Return the files with keys in [start, end)."""
        if len(self.files) == 1:
            return self.files if self._ends[0] > start and (end is None or self._starts[0] < end) else ()
        first = max(0, bisect_right(self._starts, start) - 1)
        last = len(self.files) if end is None else bisect_right(self._starts, end)
        inside = self.files[first:last]
        return tuple(f for f in inside if f.meta.end > start and (end is None or f.meta.start < end))


@dataclass(frozen=True, slots=True)
class Version:
    """The state of a tree at one moment."""

    active: Memtable | None  # takes the writes; None in a snapshot
    frozen: tuple[Memtable, ...]  # newest first
    levels: tuple[tuple[Run, ...], ...]  # levels[0]: any number of runs, newest first; below: at most one each
    lsn: int  # all edits up to here are in it; `active` may hold later ones
    stored: int  # all edits up to here are in files
    time_us: int  # the highest record time in it
    unions: Unions = field(default_factory=Unions)  # the tree's
    runs: tuple[Run, ...] = field(init=False)  # of all levels, newest first
    ranges: RangeDeletes = field(init=False)  # of everything but `active`
    expires: bool = field(init=False)  # some row expires, apart from `active`

    def __post_init__(self) -> None:
        runs = tuple(run for level in self.levels for run in level)
        object.__setattr__(self, "runs", runs)
        sources = [memtable.ranges for memtable in self.frozen if memtable.has_ranges]
        sources += [file.range_deletes for file in self.files() if file.meta.has_ranges]
        object.__setattr__(self, "ranges", self.unions.of(sources) if sources else NO_RANGES)
        expires = any(memtable.expires for memtable in self.frozen) or any(file.meta.expires for file in self.files())
        object.__setattr__(self, "expires", expires)
        if any(len(level) > 1 for level in self.levels[1:]):
            raise Invalid("a level below 0 is one run")

    def files(self) -> Iterator[TableFile]:
        for run in self.runs:
            yield from run.files

    def memtables(self) -> tuple[Memtable, ...]:
        """Return all memtables, newest first."""
        return self.frozen if self.active is None else (self.active, *self.frozen)


def arrange(files: Iterable[TableFile]) -> tuple[tuple[Run, ...], ...]:
    """Arrange listed files into levels and runs."""
    by_run: dict[tuple[int, int], list[TableFile]] = {}
    for file in files:
        meta = file.meta
        by_run.setdefault((meta.level, meta.run if meta.level == 0 else 0), []).append(file)
    depth = 1 + max((level for level, _ in by_run), default=0)
    levels: list[list[Run]] = [[] for _ in range(depth)]
    for (level, _), members in by_run.items():
        levels[level].append(Run(members))
    levels[0].sort(key=lambda run: (run.lsn_max, run.number), reverse=True)
    return tuple(tuple(level) for level in levels)
