"""Compaction: sorted files in, sorted files out, newest row of each key, by numpy over slices of the key space.

A slice holds about 49,152 rows of all inputs together, so that it fits a batch. Its keys are concatenated, newest file
first, sorted once (`order.sort`), and the first row of each key wins. Memory depends on the slice, not on the files.

Thread: a pure function of its plan and files; run it in a separate process or in a thread.
Invariants: (1) readers of the inputs (newest first) and of the outputs see the same rows, at `now_us` or later. (2)
outputs are disjoint, in key order, synced. (3) a delete is dropped only at the bottom and below `lsn_floor`: above the
bottom it still hides rows of files outside the merge.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from penstock.archive.chunk import ChunkIdentity, Codec, KeyRing, Sealing
from penstock.archive.table_keys import key_number, lent_keys
from penstock.errors import Closed, Invalid, KeyMissing
from penstock.host.file_operations import remove_file
from penstock.host.files import FileSystem
from penstock.host.os_files import OsFileSystem
from penstock.lsm.index import ROWS_MAX, Summary, homes_for
from penstock.lsm.memtable import Memtable
from penstock.lsm.operand_fold import fold_groups
from penstock.lsm.order import Flags, Keys, Values, shared_prefix, sort
from penstock.lsm.ranges import NO_RANGES, RangeDeletes
from penstock.lsm.rows import DELETE, I64, MERGE, PUT, RANGE_DELETE, U8, U64, Columns
from penstock.lsm.sstable import Sstable
from penstock.lsm.writer import BATCH_ROWS, SstableWriter, index_path

SLICE_ROWS = 3 << 14
SLICE_BYTES = 1 << 25
OUTPUT_BYTES = 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeInput:
    """One file; `lsn`, if set, replaces the LSN of its rows (an adopted file)."""

    path: str
    lsn: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MergePlan:
    """What to merge, in plain values, so that it can be sent to another process."""

    inputs: tuple[MergeInput, ...]  # newest first; files of one level, being disjoint, in any order
    folder: str  # of the outputs
    store: bytes
    chunk_ids: tuple[int, ...]  # ids for the outputs, in order; not all need be used
    now_us: int  # rows that expire at or before this are expired
    bottom: bool = False  # nothing below these inputs can hold a row of their keys
    lsn_floor: int = 0  # at the bottom, deletes below this LSN are dropped
    start: bytes = b""
    end: bytes | None = None  # only keys in [start, end)
    output_bytes: int = OUTPUT_BYTES  # an output is closed at this size
    table_id: int = 0
    sealing: tuple[Codec, int, bool] = ("none", 1, False)  # of the outputs: codec, its level, whether encrypted

    def __post_init__(self) -> None:
        if not self.inputs or not self.chunk_ids:
            raise Invalid("a merge needs at least one input and one chunk id for its output")
        if self.output_bytes <= 0 or (self.end is not None and self.end < self.start):
            raise Invalid("a merge needs output_bytes above 0 and start not above end")

    @property
    def key(self) -> int:
        """The number of the key that inputs and outputs are encrypted with; 0: they are not."""
        return key_number(self.table_id, self.sealing[2])

    def under(self, root: str) -> MergePlan:
        """Return the plan with its names, relative to a store, put under `root`."""
        inputs = tuple(replace(source, path=f"{root}/{source.path}") for source in self.inputs)
        return replace(self, inputs=inputs, folder=f"{root}/{self.folder}")


def as_written(sealing: Sealing) -> tuple[Codec, int, bool]:
    """Return a sealing in plain values, without its keys: the process that merges has them, or asks for them."""
    return sealing.codec, sealing.level, sealing.keys is not None


def _sealing_of(plan: MergePlan, keys: KeyRing | None) -> Sealing:
    codec, level, encrypted = plan.sealing
    if not encrypted:
        return Sealing(codec=codec, level=level)
    keys = keys or next(iter(lent_keys(plan.store, plan.table_id)), None)
    if keys is None:
        raise KeyMissing(f"the files of table {plan.table_id} are encrypted, and this process has no key for them")
    return Sealing(codec=codec, level=level, keys=keys)


def sstable_path(folder: str, chunk_id: int) -> str:
    """Return the path of a chunk's sstable."""
    return f"{folder}/{chunk_id:020d}.sst"


def outputs_max(rows: int, content_bytes: int, output_bytes: int = OUTPUT_BYTES) -> int:
    """Return how many chunk ids a merge of `rows` and `content_bytes` can need."""
    return 1 + 2 * content_bytes // output_bytes + rows // (ROWS_MAX - 4 * SLICE_ROWS)


def merge(
    plan: MergePlan,
    *,
    fs: FileSystem | None = None,
    keys: KeyRing | None = None,
    stop: Callable[[], bool] | None = None,
    maker: str = "",
) -> tuple[Summary, ...]:
    """Write the outputs of a plan and return their summaries. A failure leaves no file; `stop` is checked per slice.

    `keys` are those of an encrypted table; by default those that were lent to this process.
    """
    fs = OsFileSystem() if fs is None else fs
    tables: list[Sstable] = []
    sealing = _sealing_of(plan, keys)
    outputs = _Outputs(plan, fs, sealing, maker)
    try:
        for source in plan.inputs:
            # With the table's key: otherwise a merge would take in a forged plain file and encrypt its rows.
            tables.append(Sstable.open(source.path, fs=fs, keys=keys, lsn=source.lsn, key=plan.key))
        ranges = RangeDeletes.of(piece for table in tables for piece in table.range_deletes)
        # One slice is written while the next is merged: numpy and I/O release the interpreter lock.
        with ThreadPoolExecutor(1, "merge-output") as pool:
            writing: Future[None] | None = None
            for start, end in slices(tables, plan.start, plan.end):
                if stop is not None and stop():
                    raise Closed("the merge was asked to stop: run its plan again")
                covering = ranges.clip(start, end) if ranges else NO_RANGES
                columns = _merge_slice(plan, tables, covering, start, end)
                output_ranges = covering.at_or_above(plan.lsn_floor) if plan.bottom else covering
                if writing is not None:
                    writing.result()
                writing = pool.submit(outputs.add, columns, output_ranges)
            if writing is not None:
                writing.result()
        return outputs.finish()
    except BaseException:
        outputs.abort()
        raise
    finally:
        for table in tables:
            table.close()


class _Outputs:
    """The files being written, closed at slice borders, so that no range delete spans two files."""

    def __init__(self, plan: MergePlan, fs: FileSystem, sealing: Sealing, maker: str) -> None:
        self._plan = plan
        self._fs = fs
        self._sealing = sealing
        self._maker = maker
        self._writer: SstableWriter | None = None
        self._done: list[Summary] = []

    def add(self, columns: Columns, ranges: RangeDeletes) -> None:
        rows = len(columns) + len(ranges)
        if not rows:
            return
        writer = self._writer
        if writer is not None and self._is_full(writer, rows):
            self._done.append(writer.finish())
            writer = None
        if writer is None:
            number = len(self._done)
            if number >= len(self._plan.chunk_ids):
                raise Invalid(f"the merge needs more than {number} chunk ids: reserve outputs_max of them")
            chunk_id = self._plan.chunk_ids[number]
            identity = ChunkIdentity(store=self._plan.store, chunk_id=chunk_id)
            path = sstable_path(self._plan.folder, chunk_id)
            writer = self._writer = SstableWriter(self._fs, path, identity, sealing=self._sealing, maker=self._maker)
        writer.delete_ranges(ranges)
        writer.append(columns)

    def _is_full(self, writer: SstableWriter, more_rows: int) -> bool:
        """Whether to begin another file: at the size limit, or past half of it if the index would double."""
        rows, size, enough = writer.rows + more_rows, writer.content_bytes, self._plan.output_bytes
        if rows > ROWS_MAX or size >= enough:
            return True
        return 2 * size >= enough and homes_for(rows) > homes_for(writer.rows)

    def finish(self) -> tuple[Summary, ...]:
        if self._writer is not None:
            self._done.append(self._writer.finish())
            self._writer = None
        return tuple(self._done)

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()
        for chunk_id in self._plan.chunk_ids[: len(self._done) + 1]:
            path = sstable_path(self._plan.folder, chunk_id)
            for name in (path, index_path(path)):
                remove_file(self._fs, name)


class InputTables(Protocol):
    """Tables that are read one at a time."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sstable]: ...


def slices(
    tables: InputTables, start: bytes, end: bytes | None, memtables: Sequence[Memtable] = ()
) -> Iterator[tuple[bytes, bytes | None]]:
    """Split [start, end) into slices of about SLICE_ROWS rows or SLICE_BYTES bytes over all inputs."""
    samples: list[tuple[bytes, int, int]] = []
    every, enough = max(64, SLICE_ROWS // (4 * len(tables) or 1)), SLICE_ROWS
    if len(tables) == 1 and not memtables:  # nothing to merge: one batch at a time, used in place
        every, enough = BATCH_ROWS, 1
    for table in tables:
        samples.extend(_samples(table, start, end, every))
    for memtable in memtables:
        samples.extend(memtable.samples(start, end, SLICE_ROWS // 4, SLICE_BYTES // 8))
    samples.sort()
    low, rows, size = start, 0, 0
    for key, more_rows, more_bytes in samples:
        if key > low and (rows >= enough or size >= SLICE_BYTES):
            yield low, key
            low, rows, size = key, 0, 0
        rows += more_rows
        size += more_bytes
    yield low, end


def _samples(table: Sstable, start: bytes, end: bytes | None, every: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield keys of a table at intervals, each with the rows and bytes up to the next."""
    for number, first, last in table.pieces(*table.rows_between(start, end)):
        ends = table.row_bytes(number)
        while first < last:
            # As many rows as fit a share of a slice's bytes, and at least one.
            fitting = int(np.searchsorted(ends, ends[first] + SLICE_BYTES // 8, "right")) - 1
            to = min(last, first + every, max(first + 1, fitting))
            yield table.key_at(number, first), to - first, int(ends[to] - ends[first])
            first = to


def _gather(tables: list[Sstable], start: bytes, end: bytes | None) -> list[Columns]:
    return [
        table.columns(number, first, last, hashes=True)
        for table in tables
        for number, first, last in table.pieces(*table.rows_between(start, end))
    ]


_NO_ROWS = Columns.of([], [], [])


def _merge_slice(
    plan: MergePlan, tables: list[Sstable], ranges: RangeDeletes, start: bytes, end: bytes | None
) -> Columns:
    parts = _gather(tables, start, end)
    if not parts:
        return _NO_ROWS
    return merge_columns(parts, ranges, now_us=plan.now_us, bottom=plan.bottom, lsn_floor=plan.lsn_floor)


def merge_columns(parts: list[Columns], ranges: RangeDeletes, *, now_us: int, bottom: bool, lsn_floor: int) -> Columns:
    """Merge runs, newest first, into one. Requires: at least one part, and none is empty."""
    if len(parts) == 1 and not ranges:
        part = parts[0]
        if part.plain or (part.kinds.max() == PUT and part.expires.min() > now_us):
            return part
    keys = Keys.of([part.keys for part in parts])
    lsns = np.concatenate([part.lsns for part in parts])
    kinds = np.concatenate([part.kinds for part in parts])
    expires = np.concatenate([part.expires for part in parts])
    values = Values([part.values for part in parts])
    lowest = min(part.keys[0].as_py() for part in parts)
    highest = max(part.keys[len(part) - 1].as_py() for part in parts)
    order, same = sort(keys, shared_prefix(lowest, highest))
    if ranges:
        order, same = _without_deleted(keys, order, same, lsns=lsns, kinds=kinds, ranges=ranges)
    winners = order[~same]
    value_rows = winners
    new_kinds, new_expires = kinds[winners], expires[winners]
    folding = (new_kinds >= MERGE) & (new_expires > now_us)
    if folding.any():
        groups = np.flatnonzero(folding)
        folded = fold_groups(
            order=order, same=same, groups=groups, kinds=kinds, expires=expires, values=values,
            now_us=now_us, bottom=bottom,
        )  # fmt: skip
        new_kinds[groups], new_expires[groups] = folded.kinds, folded.expires
        value_rows = winners.copy()
        value_rows[groups] = values.add(folded.values)
    if bottom:
        is_delete = new_kinds == DELETE
        dropped = is_delete & (lsns[winners] < np.uint64(lsn_floor))
        dropped |= ~is_delete & (new_expires <= now_us)
        if dropped.any():
            live = ~dropped
            winners, value_rows = winners[live], value_rows[live]
            new_kinds, new_expires = new_kinds[live], new_expires[live]
    hashes = [part.hashes for part in parts if part.hashes is not None]
    return Columns(
        keys=keys.take(winners),
        lsns=lsns[winners],
        kinds=new_kinds,
        expires=new_expires,
        values=values.take(value_rows),
        hashes=np.concatenate(hashes)[winners] if len(hashes) == len(parts) else None,
    )


def _without_deleted(
    keys: Keys, order: I64, same: Flags, *, lsns: U64, kinds: U8, ranges: RangeDeletes
) -> tuple[I64, Flags]:
    """Return the order without range deletes and without the rows they delete."""

    def position(key: bytes) -> int:
        return bisect_left(range(len(order)), key, key=lambda i: keys.key(int(order[i])))

    deleted_below = np.zeros(len(order), np.uint64)
    if len(ranges) > len(order):  # then a lookup per row is less work
        deleted_below[:] = [ranges.lsn_over(keys.key(row)) for row in order.tolist()]
    else:
        for start, end, lsn in ranges:
            deleted_below[position(start) : position(end)] = lsn
    live = (lsns[order] >= deleted_below) & (kinds[order] != RANGE_DELETE)
    group = np.cumsum(~same)[live]
    still_same = np.zeros(len(group), np.bool_)
    still_same[1:] = group[1:] == group[:-1]
    return order[live], still_same
